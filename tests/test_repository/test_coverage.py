# SPDX-License-Identifier: Apache-2.0
"""docs/coverage.md names modules and tests that are there."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "coverage.md").read_text()
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in TEXT.splitlines()
    if re.match(r"\| [RCHGSK]\d\d \|", line)
]


def test_the_modules_and_tests_are_there():
    """A renamed test or module takes its row along."""
    assert ROWS
    for name, *_, where, held in ROWS:
        for module in re.findall(r"`([^`]+\.py)`", where):
            assert (ROOT / "bundler" / module).is_file(), (name, module)
        for path, test in re.findall(r"`([^`:]+\.py)::(\w+)`", held):
            assert f"\ndef {test}(" in (ROOT / "tests" / path).read_text(), (name, path, test)

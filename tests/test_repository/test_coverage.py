# SPDX-License-Identifier: Apache-2.0
"""docs/coverage.md names modules and tests that are there, and every row of the reference's
checklist once.
"""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "coverage.md").read_text()
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in TEXT.splitlines()
    if re.match(r"\| [RCHGSK]\d\d \|", line)
]
MOST = {"R": 21, "C": 7, "H": 10, "G": 3, "S": 13, "K": 12}


def test_every_row_stands_there_once_and_in_order():
    """A row that is missing, or twice, would be a feature that nobody answers for."""
    expected = [
        f"{letter}{number:02}" for letter, most in MOST.items() for number in range(1, most + 1)
    ]
    assert [row[0] for row in ROWS] == expected


def test_what_is_not_whole_says_what_is_missing():
    """A row is there, or says what is missing and why."""
    for name, _, state, where, held in ROWS:
        assert state in {"yes", "part", "no"}, name
        assert ("Missing: " in held) == (state == "part"), name
        assert bool(where) == (state != "no"), name
        assert "::" in held, name


def test_the_modules_and_tests_are_there():
    """A renamed test or module takes its row along."""
    for name, *_, where, held in ROWS:
        for module in re.findall(r"`([^`]+\.py)`", where):
            assert (ROOT / "bundler" / module).is_file(), (name, module)
        for path, test in re.findall(r"`([^`:]+\.py)::(\w+)`", held):
            assert f"\ndef {test}(" in (ROOT / "tests" / path).read_text(), (name, path, test)

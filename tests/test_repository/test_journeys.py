# SPDX-License-Identifier: Apache-2.0
"""How much of the package a restore and a hit go through: no more than `tools.journey` allows."""

import os
from pathlib import Path

import pytest

pytest.importorskip("triton")

from tools import journey
from tools.shared import processes

TOOLS = Path(journey.__file__).parent


@pytest.mark.parametrize("name", journey.MOST)
def test_a_kernel_goes_through_no_more_than_it_may(name, tmp_path, monkeypatch):
    """Whoever reads one meets so many modules and classes, and no more."""
    pytest.importorskip(
        "bundler.lifecycle._kernel_writer", reason="in pure Python two modules check what C does"
    )
    if os.environ.get("BUNDLER_TEST_INSTALLED"):  # tools alone come from the checkout
        (tmp_path / "tools").symlink_to(TOOLS)
        monkeypatch.setattr(processes, "python_path", lambda: str(tmp_path))
        monkeypatch.setenv("PYTHONSAFEPATH", "1")
    found = journey.journey(name)
    modules, classes = journey.MOST[name]
    assert len(found["modules"]) <= modules
    assert len(found["classes"]) <= classes


def test_lines_of_code_leave_out_docstrings_comments_and_blank_lines(tmp_path):
    """A text that is no docstring counts, each of its lines."""
    path = tmp_path / "module.py"
    path.write_text(
        '"""Doc\nstring."""\n\n# comment\nx = """a\nb"""\n\n\ndef f():\n    """D."""\n    return x  # y\n'
    )
    assert journey.code_lines(path) == 4

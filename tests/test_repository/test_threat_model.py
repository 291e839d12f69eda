# SPDX-License-Identifier: Apache-2.0
"""SECURITY.md is what is tested: each attack and mode has tests, which are there, and each test of
the attack folder has its row.
"""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests"
TEXT = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
_MADE = re.compile(r"^def (test_\w+)\(", re.MULTILINE)


@pytest.fixture(scope="module")
def made():
    """File by name of every test."""
    return {
        name: path
        for path in TESTS.rglob("test_*.py")
        for name in _MADE.findall(path.read_text(encoding="utf-8"))
    }


def rows(heading):
    """Return the rows of the table under a header line."""
    _, _, after = TEXT.partition(heading)
    table = after.partition("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table]


def test_every_test_that_is_named_is_there(made):
    """A renamed test takes its row along."""
    named = set(re.findall(r"`(test_\w+)`", TEXT))
    assert len(named) > 30
    assert named - made.keys() == set()


def test_every_file_that_is_named_is_there():
    """So does a file or a folder."""
    for name in re.findall(r"`((?:tests/)?test_\w+(?:/\w+)*\.py|tests/[\w/]+)`", TEXT):
        assert [*TESTS.rglob(name.rpartition("/")[2])], name


@pytest.mark.parametrize(
    "heading", ["| attack | stopped by | test |", "| mode | stops | does not stop | test |"]
)
def test_each_row_names_a_test(heading):
    """An attack or a mode of which nothing is tested is only a hope."""
    found = rows(heading)
    assert len(found) > 7
    for row in found:
        assert re.search(r"`test_\w+(\.py)?`", row[-1]), row[0]


def test_each_attack_that_is_tried_has_its_row(made):
    """Whoever adds an attack says in the model what stops it."""
    tried = {
        name
        for name, path in made.items()
        if path.parent.name == "attacks" and path.name != "test_key_attacks.py"
    }
    named = set(re.findall(r"`(test_\w+)`", TEXT))
    assert tried - named == set()

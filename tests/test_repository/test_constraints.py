# SPDX-License-Identifier: Apache-2.0
"""The files of exact versions: one for each pair of torch and Triton that was tried, inside the
floors of the package.
"""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from bundler.toolchain.identity import TRIED
from tools.wheels import constraints
from tools.wheels.bill import pinned_versions

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / constraints.FOLDER).iterdir())


def pins(path):
    """The requirements of a file."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return [Requirement(line) for line in lines if not line.startswith("#")]


def floors():
    """What pyproject.toml asks for, by name."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = [*project["dependencies"]]
    for asked in project["optional-dependencies"].values():
        lines += asked
    found = {}
    for one in map(Requirement, lines):
        found.setdefault(one.name, []).append(one.specifier)
    return found


def test_the_files_are_what_the_tool_writes(tmp_path):
    """Write them anew by `python -m tools.wheels constraints`; an older pair goes."""
    (tmp_path / "torch-2.0-triton-3.0.txt").touch()
    written = constraints.write(tmp_path)
    assert [path.name for path in sorted(tmp_path.iterdir())] == [path.name for path in FILES]
    assert {path.name: path.read_text() for path in written} == {
        path.name: path.read_text(encoding="utf-8") for path in FILES
    }


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_each_line_is_one_public_version_inside_the_floors(path):
    """A local build, such as torch's for CPUs, is on no index; every name is one that we ask
    for.
    """
    asked = floors()
    for one in pins(path):
        (pin,) = one.specifier
        assert (pin.operator, "+" in pin.version, "*" in pin.version) == ("==", False, False)
        assert all(pin.version in floor for floor in asked[one.name]), one
    names = {one.name for one in pins(path)}
    assert names >= {"torch", "triton", "msgpack", "msgspec", "zstandard", "filelock"}


def test_each_pair_that_was_tried_has_a_file():
    """The table of docs/stability.md, the list by which `doctor` warns, and the files agree."""
    pairs = [re.fullmatch(r"torch-(.+)-triton-(.+)", path.stem).groups() for path in FILES]
    assert tuple(torch for torch, _ in pairs) == TRIED["torch"]
    assert tuple(triton for _, triton in pairs) == TRIED["triton"]
    page = (ROOT / "docs" / "stability.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| (2\.\d+) \| (3\.\d+) \| `const", page, re.MULTILINE) == pairs
    assert [name for path in FILES if (name := f"constraints/{path.name}") not in page] == []


def test_the_pair_of_the_tests_is_one_of_them():
    """make test installs torch and Triton in the versions of one file."""
    torch = re.search(r"^TORCH := (.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)[1]
    assert (torch, pinned_versions()["triton"]) in constraints.PAIRS

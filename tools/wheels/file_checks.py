# SPDX-License-Identifier: Apache-2.0
"""`problems_of`: what is wrong with a built file by itself, before anybody installs it.

A wheel has the extensions that its name promises, for the machine that it names; auditwheel, abi3audit and twine agree, where they are installed.
`trial.py` calls it; `EXTENSIONS` and `promised` tell the trial what a wheel has to bring.
"""

from __future__ import annotations

import importlib.util
import re
import struct
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

from tools.wheels.bill import ROOT

_LISTED = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"][
    "setuptools"
]["ext-modules"]
#: Base name of each extension, and whether it keeps to the limited API.
EXTENSIONS = {one["name"].rpartition(".")[2]: one.get("py-limited-api", False) for one in _LISTED}
_ELF_MACHINES = {"x86_64": 62, "aarch64": 183}


def promised(file: str) -> set[str]:
    """Return the extensions that a file of this name has, or is built to."""
    if file.endswith("-none-any.whl"):
        return set()
    return {name for name, limited in EXTENSIONS.items() if limited or "-abi3-" not in file}


def problems_of(file: Path) -> Iterator[str]:
    """Yield a sentence for each fault of a file."""
    yield from _from_program("twine", "check", "--strict", str(file))
    if file.suffix != ".whl":
        return
    with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(file) as archive:
        objects = [
            archive.extract(name, folder) for name in archive.namelist() if name.endswith(".so")
        ]
        found = {Path(path).name.partition(".")[0] for path in objects}
        if found != promised(file.name):
            yield f"{file.name} has the extensions {sorted(found)}, expected {sorted(promised(file.name))}"
        for path in objects:
            yield from _object_problems(file, Path(path))
    tag = re.search(r"manylinux_\d+_\d+_\w+(?=\.whl)", file.name)
    if tag is not None:
        yield from _from_program(
            "auditwheel", "show", str(file), expected=f'platform tag: "{tag[0]}".'
        )


def _object_problems(file: Path, path: Path) -> Iterator[str]:
    header = path.read_bytes()[:20]
    machine = next((name for name in _ELF_MACHINES if f"_{name}.whl" in file.name), None)
    if (
        machine is None
        or header[:4] != b"\x7fELF"
        or struct.unpack_from("<H", header, 18)[0] != _ELF_MACHINES[machine]
    ):
        yield f"{path.name} in {file.name} is not for the machine that the wheel names"
    limited = EXTENSIONS[path.name.partition(".")[0]]
    tag = (
        ".abi3."
        if limited
        else f".cpython-{file.name.split('-')[2].removeprefix('cp')}-{machine}-linux-gnu."
    )
    if tag not in path.name:
        yield f"{path.name} in {file.name} is not named {tag}, so that Python would not load it"
    if limited:
        yield from _from_program(
            "abi3audit", "--strict", "--assume-minimum-abi3", "3.11", str(path)
        )


def _from_program(module: str, *words: str, expected: str = "") -> Iterator[str]:
    """Yield what a program says when it fails, or when its words, joined to one line, do not have what is expected."""
    if importlib.util.find_spec(module) is None:
        return
    command = [sys.executable, "-m", module, *words]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode or expected not in " ".join(done.stdout.split()):
        yield f"{module} {' '.join(words)} ended with {done.returncode}:\n{done.stdout}{done.stderr}".rstrip()

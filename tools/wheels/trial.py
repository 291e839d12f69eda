# SPDX-License-Identifier: Apache-2.0
"""`python -m tools.wheels trial FOLDER`: check each built file of a folder, and try it as a user
has it, on each Python that is here.

A wheel has the extensions that its name promises, for the machine that it names; auditwheel,
abi3audit and twine agree, where they are installed. Each file that fits is installed in a new
virtual environment, without extras, then with `cli`; `smoke.py` uses it there, and all must come to
equal results, with the extensions that the file promises and from no other place. At last pip is
asked which file it would take where. It fails only on what it tried, and says what it did not.
"""

from __future__ import annotations

import importlib.util
import json
import platform
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import time
import tomllib
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tools.shared import programs
from tools.shared.processes import ROOT, captured
from tools.wheels.bill import pinned_versions
from tools.wheels.interpreters import (
    FREE_THREADED,
    SUPPORTED,
    Interpreter,
    clean_variables,
    environment,
    find,
    pip,
)

GOLDEN = ROOT / "tests" / "data" / "v2.0" / "triton-3.7.1.tbundle"
_NEEDED = (
    "msgpack",
    "msgspec",
    "zstandard",
    "filelock",
    "click",
    "rich",
    "click-man",
    "setuptools",
)
# Python version, platform and what the name of the file that pip takes there has in it.
PICKS = (
    *(
        (
            version,
            f"manylinux_2_17_{machine}",
            f"-cp{version.replace('.', '')}-manylinux_2_17_{machine}",
        )
        for version in SUPPORTED
        for machine in ("x86_64", "aarch64")
    ),
    ("3.15", "manylinux_2_17_x86_64", "-cp311-abi3-manylinux_2_17_x86_64"),
    ("3.15", "manylinux_2_17_aarch64", "-cp311-abi3-manylinux_2_17_aarch64"),
    *((version, "manylinux_2_17_x86_64", "-py3-none-any") for version in FREE_THREADED),
    ("3.12", "musllinux_1_2_x86_64", "-py3-none-any"),
    ("3.12", "manylinux_2_17_ppc64le", "-py3-none-any"),
)
_LISTED = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"][
    "setuptools"
]["ext-modules"]
#: Base name of each extension, and whether it keeps to the limited API.
EXTENSIONS = {one["name"].rpartition(".")[2]: one.get("py-limited-api", False) for one in _LISTED}
# What a bundle's load ends with, by the kind of a subinterpreter; docs/stability.md says it.
IN_SUBINTERPRETERS = {"legacy": "loaded", "isolated": "UnsupportedInterpreter"}
_ELF_MACHINES = {"x86_64": 62, "aarch64": 183}


def fits(file: str, interpreter: Interpreter) -> bool:
    """Whether a file can be installed for an interpreter on this machine."""
    if file.endswith((".tar.gz", "-none-any.whl")):
        return True
    # The stable ABI is that of Pythons with the lock.
    return file.endswith(f"_{platform.machine()}.whl") and (
        f"-{interpreter.tag}-" in file or ("-abi3-" in file and not interpreter.free_threaded)
    )


def try_file(file: Path, interpreter: Interpreter, house: Path, folder: Path) -> dict[str, Any]:
    """Install and use a file, and return what `smoke.py` printed.

    Raises:
        RuntimeError: it does not do what it has to.
        subprocess.CalledProcessError: it cannot be installed.
    """
    offline = ("--no-index", "--find-links", str(house))
    python = environment(interpreter, folder, file, options=("--no-compile", *offline))
    found: dict[str, Any] = json.loads(
        _run(python, "-I", ROOT / "tools" / "wheels" / "smoke.py", GOLDEN)
    )
    compiles = shutil.which("cc") and not interpreter.free_threaded
    expected = promised(file.name) if file.suffix == ".whl" or compiles else set()
    if set(found["extensions"]) != expected:
        raise RuntimeError(
            f"extensions {found['extensions']} were used, expected {sorted(expected)}"
        )
    if not Path(found["where"]).is_relative_to(folder.resolve()):
        raise RuntimeError(f"bundler was imported from {found['where']}, expected below {folder}")
    version = file.name.removesuffix(".tar.gz").split("-")[1]
    if set(found["versions"]) != {version}:
        raise RuntimeError(f"versions {found['versions']}, expected {version}")
    if found["interpreters"] not in ({}, IN_SUBINTERPRETERS):
        raise RuntimeError(f"subinterpreters: {found['interpreters']}")
    pip("--python", python, "install", "--no-compile", *offline, f"{file}[cli]")
    command = Path(python).with_name("triton-bundler")
    found["inspected"] = _run(command, "inspect", GOLDEN)
    if version not in _run(command, "--version"):
        raise RuntimeError(f"triton-bundler --version does not say {version}")
    return found


def trials(files: list[Path], found: list[Interpreter], folder: Path) -> Iterator[str]:
    """Try each file on each interpreter that it fits, print a line each, and yield what is
    wrong.
    """
    pairs = [(file, one) for one in found for file in files if fits(file.name, one)]
    pins = [f"{name}=={pinned_versions()[name]}" for name in _NEEDED]
    houses = {one: folder / f"house-{one.version}" for one in found}
    for one, house in houses.items():
        bare = environment(one, folder / f"bare-{one.version}")
        pinned = ("-c", str(ROOT / "constraints.txt"), *pins)
        # Not `download`: what has no wheel for this Python is compiled here, once.
        pip("--python", bare, "wheel", "-w", str(house), *pinned)
    results: dict[str, str] = {}
    with ThreadPoolExecutor(2) as threads:
        places = [folder / f"env-{number}" for number in range(len(pairs))]
        jobs = [
            threads.submit(_timed, file, one, houses[one], place)
            for (file, one), place in zip(pairs, places, strict=True)
        ]
        for (file, one), job in zip(pairs, jobs, strict=True):
            try:
                outcome, seconds = job.result()
            except (RuntimeError, subprocess.CalledProcessError) as error:
                yield f"{file.name} on Python {one.release}: {error}"
                continue
            results[f"{file.name} on Python {one.release}"] = json.dumps(
                [outcome["results"], outcome["inspected"]]
            )
            names = ", ".join(sorted(outcome["extensions"])) or "none"
            lock = f", {outcome['lock']}" if one.free_threaded else ""
            print(
                f"{seconds:5.1f} s  Python {one.release:8} {file.name}  extensions used:"
                f" {names}{lock}",
                flush=True,
            )
    first = next(iter(results), "")
    yield from (
        f"{name} came to other results than {first}"
        for name in results
        if results[name] != results[first]
    )


def picks(folder: Path, scratch: Path) -> Iterator[str]:
    """Ask pip which file of a folder it takes for each platform, print it, and yield where it is
    another than docs/release.md says.
    """
    for number, (version, system, expected) in enumerate(PICKS):
        if not list(folder.glob(f"*{expected}.whl")):
            print(
                f"skipped: there is no {expected[1:]}, which pip would take on Python {version},"
                f" {system}"
            )
            continue
        place = scratch / f"pick-{number}"
        offered = ("--no-deps", "--no-index", "--only-binary=:all:", "--find-links", str(folder))
        free = ("--implementation=cp", f"--abi=cp{version.replace('.', '')}")
        asked = (
            f"--python-version={version.removesuffix('t')}",
            *(free if version.endswith("t") else ()),
            f"--platform={system}",
            "triton-bundler",
        )
        pip("download", "-d", str(place), *offered, *asked)
        (taken,) = place.iterdir()
        print(f"pip on Python {version}, {system}: {taken.name}")
        if not taken.stem.endswith(expected):
            yield f"pip takes {taken.name} on Python {version}, {system}, expected {expected}"


def _timed(
    file: Path, interpreter: Interpreter, house: Path, folder: Path
) -> tuple[dict[str, Any], float]:
    start = time.monotonic()
    return try_file(file, interpreter, house, folder), time.monotonic() - start


def _run(*command: object) -> str:
    done = captured(*command, env=clean_variables(), cwd="/")
    if done.returncode:
        words = " ".join(done.args)
        raise RuntimeError(f"{words} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


def main() -> int:
    """Try the files of the folder in the command line; the status is 1 when one has a fault."""
    parser = programs.parser(__doc__, python=([*SUPPORTED, *FREE_THREADED], "versions to try"))
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    files = sorted(
        [*arguments.folder.resolve().glob("*.whl"), *arguments.folder.resolve().glob("*.tar.gz")]
    )
    found = find(arguments.python)
    if not files or not found:
        parser.error(
            "nothing to try: "
            + ("no interpreter with venv and headers found" if files else "no files")
        )
    faults = [sentence for file in files for sentence in problems_of(file)]
    print(f"checked {len(files)} files, which promise {len(EXTENSIONS)} extensions, fewer, or none")
    with tempfile.TemporaryDirectory() as scratch:
        faults += [*trials(files, found, Path(scratch)), *picks(arguments.folder, Path(scratch))]
    for version in sorted(set(arguments.python) - {one.version for one in found}):
        print(
            f"skipped: Python {version}, of which there is no interpreter with venv and headers"
            " here"
        )
    for file in files:
        if not any(fits(file.name, one) for one in found):
            print(
                f"skipped: {file.name} was checked but not installed, since nothing here can run it"
            )
    for fault in faults:
        sys.stderr.write(f"trial: {fault}\n")
    return 1 if faults else 0


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
            yield (
                f"{file.name} has the extensions {sorted(found)}, expected"
                f" {sorted(promised(file.name))}"
            )
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
    """Yield what a program says when it fails, or when its words, joined to one line, do not have
    what is expected.
    """
    if importlib.util.find_spec(module) is None:
        return
    done = captured(sys.executable, "-m", module, *words)
    if done.returncode or expected not in " ".join(done.stdout.split()):
        yield (
            f"{module} {' '.join(words)} ended with {done.returncode}:\n{done.stdout}{done.stderr}".rstrip()
        )

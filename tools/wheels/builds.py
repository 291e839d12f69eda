# SPDX-License-Identifier: Apache-2.0
"""`Kind`, `kinds_for` and `build`: the files of a release, and how one is built so that two builds are equal.

Wheels are compiled by zig, where the package `ziglang` is installed: for an old glibc, and for AArch64 too; elsewhere by the machine's compiler, for this machine
alone.  `release.py` calls them.
"""

from __future__ import annotations

import gzip
import importlib.util
import io
import platform
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.wheels.interpreters import Interpreter, clean_variables

GLIBC = "2.17"
MACHINES = ("x86_64", "aarch64")
# The path of the folder must not get into the extensions, by whatever way a compiler has; -g0 and -s, since nobody debugs them from a
# wheel. One level of optimization, since each Python brings another; without it zig would also check for undefined behavior.
_FLAGS = "-g0 -O2 -fno-sanitize=undefined -ffile-prefix-map={folder}=."
_BACKEND = "import sys; from setuptools import build_meta; getattr(build_meta, sys.argv[1])(sys.argv[2], {options})"


@dataclass(frozen=True)
class Kind:
    """One file: a source distribution, or a wheel with `all`, `abi3` or `none` of the extensions for a machine."""

    interpreter: Interpreter
    extensions: str | None = None
    machine: str | None = None

    def __str__(self) -> str:
        """Name it as messages do."""
        if self.extensions is None:
            return "source distribution"
        tag = {"all": self.interpreter.tag, "abi3": "cp311-abi3", "none": "py3-none-any"}[
            self.extensions
        ]
        return f"wheel {tag}" + (f" {self.machine}" if self.machine else "")


def has_zig() -> bool:
    """Whether wheels are compiled by zig."""
    return importlib.util.find_spec("ziglang") is not None


def compiler(machine: str) -> list[str]:
    """Return the command that compiles for a machine."""
    return (
        [sys.executable, "-m", "ziglang", "cc", "-target", f"{machine}-linux-gnu.{GLIBC}"]
        if has_zig()
        else ["cc"]
    )


def kinds_for(interpreters: Sequence[Interpreter]) -> tuple[list[Kind], list[str]]:
    """Return the files to build, the source distribution first, and a sentence for each that cannot be built here."""
    first = interpreters[0]
    kinds, left_out = [Kind(first), Kind(first, "none")], []
    for machine in MACHINES:
        if not has_zig() and machine != platform.machine():
            left_out.append(f"no wheels for {machine}: the package ziglang is not installed")
            continue
        for interpreter, extensions in [(first, "abi3"), *((one, "all") for one in interpreters)]:
            kind = Kind(interpreter, extensions, machine)
            if _compiles(interpreter, machine):
                kinds.append(kind)
            else:
                left_out.append(
                    f"no {kind}: the headers of {interpreter.program} cannot be compiled for {machine}"
                )
    return kinds, left_out


def build(kind: Kind, python: str, source: Path, out: Path, time: str) -> Path:
    """Build a file from a copy of the sources, with a Python that has setuptools, and return its path.

    Raises:
        subprocess.CalledProcessError: it cannot be built; what the compiler wrote was printed.
    """
    out.mkdir(parents=True)
    call, options = (
        ("build_sdist", {}) if kind.extensions is None else ("build_wheel", _options(kind))
    )
    environment = {
        **clean_variables(), "SOURCE_DATE_EPOCH": time, "LC_ALL": "C", "TZ": "UTC", "PYTHONHASHSEED": "0",
        "BUNDLER_BUILD_EXTENSIONS": kind.extensions or "all", **_compiling(kind, source),
    }  # fmt: skip
    command = [python, "-c", _BACKEND.format(options=options), call, str(out)]
    # Modes of files are part of a wheel, and git keeps one bit of them: the rest is the umask's.
    done = subprocess.run(
        command,
        check=False,
        cwd=source,
        env=environment,
        capture_output=True,
        text=True,
        umask=0o022,
    )
    if done.returncode:
        sys.stderr.write(done.stdout + done.stderr)
        done.check_returncode()
    (made,) = out.iterdir()
    if kind.extensions is None:
        made.write_bytes(settled(made.read_bytes(), int(time)))
    return made


def settled(archive: bytes, time: int) -> bytes:
    """Return a source distribution with one time, one owner and one order, as setuptools does not write it."""
    with tarfile.open(fileobj=io.BytesIO(archive)) as old:
        members = [
            (member, old.extractfile(member))
            for member in sorted(old.getmembers(), key=lambda one: one.name)
        ]
        made = io.BytesIO()
        with tarfile.open(fileobj=made, mode="w", format=tarfile.PAX_FORMAT) as new:
            for member, data in members:
                member.mtime, member.uid, member.gid, member.uname, member.gname = (
                    time,
                    0,
                    0,
                    "",
                    "",
                )
                member.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
                member.pax_headers = {}
                new.addfile(member, data)
    return gzip.compress(made.getvalue(), mtime=time)


def _options(kind: Kind) -> dict[str, list[str]]:
    if kind.machine is None or not has_zig():
        return {}
    return {"--build-option": [f"--plat-name=manylinux_{GLIBC.replace('.', '_')}_{kind.machine}"]}


def _compiling(kind: Kind, source: Path) -> dict[str, str]:
    """Return the variables by which setuptools compiles for the machine of a wheel."""
    if kind.machine is None:
        return {}
    command = " ".join(compiler(kind.machine))
    suffix = f".{kind.interpreter.tag.replace('cp', 'cpython-')}-{kind.machine}-linux-gnu.so"
    return {"CC": command, "LDSHARED": f"{command} -shared -Wl,-s", "CFLAGS": f"{_FLAGS.format(folder=source)} {_split_headers(kind.interpreter, source.parent)}",
            "SETUPTOOLS_EXT_SUFFIX": suffix, "ARCHFLAGS": ""}  # fmt: skip


def _split_headers(interpreter: Interpreter, folder: Path) -> str:
    """Return the option by which zig finds what Debian keeps apart: python3.11/pyconfig.h includes x86_64-linux-gnu/python3.11/pyconfig.h.

    /usr/include itself would bring the headers of another C library.
    """
    include = Path(interpreter.include)
    for part in include.parent.glob(f"*-linux-gnu*/{include.name}"):
        link = folder / "headers" / part.parent.name / part.name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(part)
    return f"-I{folder / 'headers'}"


def _compiles(interpreter: Interpreter, machine: str) -> bool:
    """Whether the headers of a Python fit a machine: Debian's are for one machine each."""
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder, "one.c")
        program.write_text("#include <Python.h>\n", encoding="utf-8")
        options = [f"-I{interpreter.include}", _split_headers(interpreter, Path(folder))]
        command = [*compiler(machine), "-c", *options, str(program), "-o", f"{folder}/one.o"]
        return subprocess.run(command, check=False, capture_output=True).returncode == 0

# SPDX-License-Identifier: Apache-2.0
"""`python -m tools.wheels release FOLDER`: the files of a release, each built twice and compared, a
bill of materials for each wheel, and SHA256SUMS.

What is built is what is committed, from two copies at different paths, with the time of the commit:
whoever builds that commit with the same compiler and setuptools gets the same bytes.
docs/release.md says how to compare.

Wheels are compiled by zig, where the package `ziglang` is installed: for an old glibc, and for
AArch64 too; elsewhere by the compiler of the machine, for this machine alone.
"""

from __future__ import annotations

import gzip
import hashlib
import importlib.util
import io
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tools.shared import programs
from tools.shared.processes import ROOT, captured
from tools.wheels import interpreters
from tools.wheels.bill import bill_of, pinned_versions, text_of
from tools.wheels.interpreters import Interpreter, clean_variables, succeeded

_GLIBC = "2.17"
_MACHINES = ("x86_64", "aarch64")
# The path of the folder must not get into the extensions, by whatever way a compiler has; -g0 and
# -s, since nobody debugs them from a wheel. One level of optimization, since each Python brings
# another; without it zig would also check for undefined behavior.
_FLAGS = "-g0 -O2 -fno-sanitize=undefined -ffile-prefix-map={folder}=."
_BACKEND = (
    "import sys; from setuptools import build_meta; getattr(build_meta, sys.argv[1])(sys.argv[2],"
    " {options})"
)


@dataclass(frozen=True)
class Kind:
    """One file: a source distribution, or a wheel with `all`, `abi3` or `none` of the extensions
    for a machine.
    """

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


def _has_zig() -> bool:
    """Whether wheels are compiled by zig."""
    return importlib.util.find_spec("ziglang") is not None


def compiler(machine: str) -> list[str]:
    """Return the command that compiles for a machine."""
    return (
        [sys.executable, "-m", "ziglang", "cc", "-target", f"{machine}-linux-gnu.{_GLIBC}"]
        if _has_zig()
        else ["cc"]
    )


def kinds_for(interpreters: Sequence[Interpreter]) -> tuple[list[Kind], list[str]]:
    """Return the files to build, the source distribution first, and a sentence for each that cannot
    be built here.
    """
    first = interpreters[0]
    kinds, left_out = [Kind(first), Kind(first, "none")], []
    for machine in _MACHINES:
        if not _has_zig() and machine != platform.machine():
            left_out.append(f"no wheels for {machine}: the package ziglang is not installed")
            continue
        for interpreter, extensions in [(first, "abi3"), *((one, "all") for one in interpreters)]:
            kind = Kind(interpreter, extensions, machine)
            if _compiles(interpreter, machine):
                kinds.append(kind)
            else:
                left_out.append(
                    f"no {kind}: the headers of {interpreter.program} cannot be compiled for"
                    f" {machine}"
                )
    return kinds, left_out


def build(kind: Kind, python: str, source: Path, out: Path, time: str) -> Path:
    """Build a file from a copy of the sources, with a Python that has setuptools, and return its
    path.

    Raises:
        subprocess.CalledProcessError: it cannot be built; what the compiler wrote was printed.
    """
    out.mkdir(parents=True)
    call, options = (
        ("build_sdist", {}) if kind.extensions is None else ("build_wheel", _options(kind))
    )
    environment = {
        **clean_variables(),
        "SOURCE_DATE_EPOCH": time,
        "LC_ALL": "C",
        "TZ": "UTC",
        "PYTHONHASHSEED": "0",
        "BUNDLER_BUILD_EXTENSIONS": kind.extensions or "all",
        **_compiling(kind, source),
    }
    command = [python, "-c", _BACKEND.format(options=options), call, str(out)]
    # Modes of files are part of a wheel, and git keeps one bit of them: the rest is the umask's.
    succeeded(captured(*command, cwd=source, env=environment, umask=0o022))
    (made,) = out.iterdir()
    if kind.extensions is None:
        made.write_bytes(settled(made.read_bytes(), int(time)))
    return made


def settled(archive: bytes, time: int) -> bytes:
    """Return a source distribution with one time, one owner and one order, as setuptools does not
    write it.
    """
    with tarfile.open(fileobj=io.BytesIO(archive)) as old:
        members = [
            (member, old.extractfile(member))
            for member in sorted(old.getmembers(), key=lambda one: one.name)
        ]
        made = io.BytesIO()
        with tarfile.open(fileobj=made, mode="w", format=tarfile.PAX_FORMAT) as new:
            for member, data in members:
                member.mtime, member.uid, member.gid = time, 0, 0
                member.uname = member.gname = ""
                member.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
                member.pax_headers = {}
                new.addfile(member, data)
    return gzip.compress(made.getvalue(), mtime=time)


def _options(kind: Kind) -> dict[str, list[str]]:
    if kind.machine is None or not _has_zig():
        return {}
    return {"--build-option": [f"--plat-name=manylinux_{_GLIBC.replace('.', '_')}_{kind.machine}"]}


def _compiling(kind: Kind, source: Path) -> dict[str, str]:
    """Return the variables by which setuptools compiles for the machine of a wheel."""
    if kind.machine is None:
        return {}
    command = " ".join(compiler(kind.machine))
    suffix = f".{kind.interpreter.tag.replace('cp', 'cpython-')}-{kind.machine}-linux-gnu.so"
    return {
        "CC": command,
        "LDSHARED": f"{command} -shared -Wl,-s",
        "CFLAGS": (
            f"{_FLAGS.format(folder=source)} {_split_headers(kind.interpreter, source.parent)}"
        ),
        "SETUPTOOLS_EXT_SUFFIX": suffix,
        "ARCHFLAGS": "",
    }


def _split_headers(interpreter: Interpreter, folder: Path) -> str:
    """Return the option by which zig finds what Debian keeps apart: python3.11/pyconfig.h includes
    x86_64-linux-gnu/python3.11/pyconfig.h.

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
        return captured(*command).returncode == 0


def sources(commit: str, folder: Path) -> tuple[Path, str]:
    """Export a commit into a new folder, and return where it is and the time of the commit.

    Raises:
        subprocess.CalledProcessError: there is no such commit.
    """
    source, archive = folder / "source", folder / "source.tar"
    source.mkdir(parents=True)
    _run("git", "-C", ROOT, "archive", "--format=tar", f"--output={archive}", commit)
    with tarfile.open(archive) as tar:
        tar.extractall(source, filter="data")
    return source, _run("git", "-C", ROOT, "log", "-1", "--format=%ct", commit).strip()


def release(
    commit: str, folder: Path, found: Sequence[interpreters.Interpreter], times: int = 2
) -> list[Path]:
    """Write the files, bills and digests of a commit into a folder, and return them.

    Args:
        commit: what to build.
        folder: is made; files of an earlier release there are removed.
        found: the interpreters that wheels are built for.
        times: how often each file is built; with one, nothing is compared.

    Raises:
        RuntimeError: two builds differ.
        subprocess.CalledProcessError: there is no such commit, or it cannot be built.
    """
    # By its digest: HEAD may move between two builds.
    commit = _run("git", "-C", ROOT, "rev-parse", "--verify", f"{commit}^{{commit}}").strip()
    kinds, left_out = kinds_for(found)
    for sentence in left_out:
        sys.stderr.write(f"release: {sentence}\n")
    folder.mkdir(parents=True, exist_ok=True)
    for old in [*folder.glob("triton_bundler-*"), *folder.glob("SHA256SUMS*")]:
        old.unlink()
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(2) as threads:
        pin = f"setuptools=={pinned_versions()['setuptools']}"
        pythons = {
            one: interpreters.environment(one, Path(scratch, one.version), pin) for one in found
        }
        places = [Path(scratch, f"{number}-" * 9) for number in range(len(kinds))]
        makers = [
            threads.submit(_built_equal, commit, kind, pythons[kind.interpreter], place, times)
            for kind, place in zip(kinds, places, strict=True)
        ]
        files = [
            Path(shutil.copyfile(maker.result(), folder / maker.result().name)) for maker in makers
        ]
    for wheel in [path for path in files if path.suffix == ".whl"]:
        bill = folder / f"{wheel.name}.cdx.json"
        bill.write_text(text_of(bill_of(wheel, pinned_versions())), encoding="utf-8")
        files.append(bill)
    sums = folder / "SHA256SUMS"
    digests = sorted((path.name, hashlib.sha256(path.read_bytes()).hexdigest()) for path in files)
    sums.write_text("".join(f"{digest}  {name}\n" for name, digest in digests), encoding="utf-8")
    return [*sorted(files), sums]


def _built_equal(commit: str, kind: Kind, python: str, folder: Path, times: int) -> Path:
    """Build a file so often, each time from a copy of its own."""
    made = []
    for turn in range(times):
        place = folder / ("below/" * turn + "build")
        source, time = sources(commit, place)
        made.append(build(kind, python, source, place / "out", time))
    if len({path.read_bytes() for path in made}) > 1:
        raise RuntimeError(
            f"two builds of {commit} differ: {made[0].name}; compare them with diffoscope"
        )
    return made[0]


def _run(*command: object) -> str:
    return subprocess.run(
        [str(word) for word in command], check=True, capture_output=True, text=True
    ).stdout


def main() -> int:
    """Release the commit in the command line."""
    parser = programs.parser(
        __doc__,
        commit=("HEAD", "what to build"),
        once=(False, "build each file once, and compare nothing"),
        python=([*interpreters.SUPPORTED], "versions to build for, of which those that are here"),
    )
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    found = interpreters.find(arguments.python)
    if not found:
        parser.error(f"no interpreter with venv and headers found of {', '.join(arguments.python)}")
    for version in set(arguments.python) - {one.version for one in found}:
        sys.stderr.write(
            f"release: no wheels for Python {version}: no interpreter with venv and headers found\n"
        )
    if not _has_zig():
        sys.stderr.write(
            "release: the package ziglang is not installed: wheels are for this machine's glibc\n"
        )
    for path in release(arguments.commit, arguments.folder, found, 1 if arguments.once else 2):
        sys.stdout.write(f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path}\n")
    return 0

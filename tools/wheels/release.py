# SPDX-License-Identifier: Apache-2.0
"""`python -m tools.wheels release FOLDER`: the files of a release, each built twice and compared, a bill of materials for each wheel, and SHA256SUMS.

What is built is what is committed, from two copies at different paths, with the time of the commit: whoever builds that commit with the same compiler and setuptools
gets the same bytes.  docs/release.md says how to compare.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tools.wheels import interpreters
from tools.wheels.bill import ROOT, bill_of, pinned_versions, text_of
from tools.wheels.builds import Kind, build, has_zig, kinds_for


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
    for old in [*folder.glob("triton_bundler-*"), *folder.glob("SHA256SUMS")]:
        old.unlink()
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(2) as threads:
        pin = f"setuptools=={pinned_versions()['setuptools']}"
        pythons = {
            one: interpreters.environment(one, Path(scratch, one.version), pin) for one in found
        }
        makers = [
            threads.submit(
                _build,
                commit,
                kind,
                pythons[kind.interpreter],
                Path(scratch, f"{number}-" * 9),
                times,
            )
            for number, kind in enumerate(kinds)
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


def _build(commit: str, kind: Kind, python: str, folder: Path, times: int) -> Path:
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
    parser = argparse.ArgumentParser(prog="python -m tools.wheels release", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--commit", default="HEAD")
    parser.add_argument(
        "--once", action="store_true", help="build each file once, and compare nothing"
    )
    parser.add_argument("--python", nargs="+", metavar="VERSION", default=interpreters.SUPPORTED,
                        help="which Python versions to build for; default: 3.11 3.12 3.13, of which those that are here")  # fmt: skip
    arguments = parser.parse_args()
    found = interpreters.find(arguments.python)
    if not found:
        parser.error(f"no interpreter with venv and headers found of {', '.join(arguments.python)}")
    for version in set(arguments.python) - {one.version for one in found}:
        sys.stderr.write(
            f"release: no wheels for Python {version}: no interpreter with venv and headers found\n"
        )
    if not has_zig():
        sys.stderr.write(
            "release: the package ziglang is not installed: wheels are for this machine's glibc\n"
        )
    for path in release(arguments.commit, arguments.folder, found, 1 if arguments.once else 2):
        sys.stdout.write(f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

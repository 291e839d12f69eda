# SPDX-License-Identifier: Apache-2.0
"""`python -m tools.wheels release FOLDER`: a wheel that is built twice and compared, its bill of materials, and SHA256SUMS.

What is built is what is committed, from two copies at different paths, with the time of the commit: whoever builds that commit with the same compiler and setuptools
gets the same bytes.  docs/release.md says how to compare.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from tools.wheels.bill import ROOT, bill_of, pinned_versions, text_of

# The path of the folder must not get into the extensions, by whatever way a compiler has; -g0, since nobody debugs them from a wheel.
_FLAGS = "-g0 -ffile-prefix-map={folder}=."


def build(commit: str, folder: Path) -> Path:
    """Build a commit in a new folder and return the wheel.

    Raises:
        subprocess.CalledProcessError: there is no such commit, or it cannot be built.
    """
    source, out = folder / "source", folder / "out"
    source.mkdir(parents=True)
    archive = folder / "source.tar"
    _run("git", "-C", ROOT, "archive", "--format=tar", f"--output={archive}", commit)
    with tarfile.open(archive) as tar:
        tar.extractall(source, filter="data")
    time = _run("git", "-C", ROOT, "log", "-1", "--format=%ct", commit).strip()
    environment = {
        **os.environ, "SOURCE_DATE_EPOCH": time, "CFLAGS": _FLAGS.format(folder=source), "LC_ALL": "C", "TZ": "UTC",
        "PYTHONHASHSEED": "0",
    }  # fmt: skip
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(source)]
    # Modes of files are part of a wheel, and git keeps one bit of them: the rest is the umask's.
    done = subprocess.run(command, check=False, env=environment, capture_output=True, text=True, umask=0o022)
    if done.returncode:
        sys.stderr.write(done.stdout + done.stderr)
        done.check_returncode()
    (wheel,) = out.glob("*.whl")
    return wheel


def release(commit: str, folder: Path) -> list[Path]:
    """Write wheel, bill and digests of a commit into a folder, and return them.

    Raises:
        RuntimeError: two builds differ.
        subprocess.CalledProcessError: as `build`.
    """
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory(prefix="a-longer-path-") as two:
        wheels = [build(commit, Path(one)), build(commit, Path(two, "below"))]
        if wheels[0].read_bytes() != wheels[1].read_bytes():
            raise RuntimeError(f"two builds of {commit} differ: {wheels[0].name}; compare them with diffoscope")
        folder.mkdir(parents=True, exist_ok=True)
        wheel = Path(shutil.copyfile(wheels[0], folder / wheels[0].name))
    bill = folder / f"{wheel.name}.cdx.json"
    bill.write_text(text_of(bill_of(wheel, pinned_versions())), encoding="utf-8")
    sums = folder / "SHA256SUMS"
    digests = [(hashlib.sha256(path.read_bytes()).hexdigest(), path.name) for path in (wheel, bill)]
    sums.write_text("".join(f"{digest}  {name}\n" for digest, name in digests), encoding="utf-8")
    return [wheel, bill, sums]


def _run(*command: object) -> str:
    return subprocess.run([str(word) for word in command], check=True, capture_output=True, text=True).stdout


def main() -> int:
    """Release the commit in the command line."""
    parser = argparse.ArgumentParser(prog="python -m tools.wheels release", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--commit", default="HEAD")
    arguments = parser.parse_args()
    for path in release(arguments.commit, arguments.folder):
        sys.stdout.write(f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

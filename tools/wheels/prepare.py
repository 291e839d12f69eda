# SPDX-License-Identifier: Apache-2.0
"""`python -m tools.wheels prepare FOLDER`: all of a release but the upload, which it names at the
end and never does.

In this order: the commit is tagged, and nothing is uncommitted; the texts agree with the tag; the
gate (`.ci/run`) passes; each file is built twice and is the same; each is installed and used on
each Python that is here; the digests are true; SHA256SUMS is signed, where a key is given.  The
first step that fails ends it.  With `--dry-run` a missing tag and what it asks of the texts are
only said.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from tools.shared.processes import ROOT, command, said
from tools.wheels.texts import version_of

MINISIGN = "minisign"


def commit_faults(tag: str) -> Iterator[str]:
    """Yield what a release asks of the checkout, and this one has not."""
    found = said("git", "-C", ROOT, "tag", "--points-at", "HEAD", "--list", "v*")
    if found is None:
        yield "there is no history of git, which says what to build"
    elif tag not in found.split():
        yield f"the commit has {found or 'no tag'}, expected {tag}"
    if said("git", "-C", ROOT, "status", "--porcelain"):
        yield "there are changes that are not committed, so they would not be in the release"


def run(step: str, words: list[str], folder: Path = ROOT) -> bool:
    """Run a step to its end, which writes where this program writes; whether it passed."""
    print(f"prepare: {step}: {' '.join(words)}", flush=True)
    start = time.monotonic()
    status = subprocess.run(words, check=False, cwd=folder).returncode
    end = "passed" if status == 0 else f"failed with {status}"
    print(f"prepare: {step}: {end} after {time.monotonic() - start:.0f} s", flush=True)
    return status == 0


def signing(key: Path | None, folder: Path) -> Iterator[list[str]]:
    """Yield the commands that sign the digests and, where the public key lies beside the secret
    one, verify the signature.
    """
    if key is None:
        return
    sums = str(folder / "SHA256SUMS")
    yield [MINISIGN, "-S", "-s", str(key), "-m", sums]
    public = key.with_suffix(".pub")
    if public.exists():
        yield [MINISIGN, "-V", "-p", str(public), "-m", sums]


def upload(folder: Path) -> list[str]:
    """Return the command that uploads the files of a folder."""
    files = sorted([*folder.glob("*.whl"), *folder.glob("*.tar.gz")])
    return [sys.executable, "-m", "twine", "upload", *map(str, files)]


def steps(
    folder: Path, tag: str, *, gate: bool, pythons: list[str]
) -> Iterator[tuple[str, list[str]]]:
    """Yield name and command of each step up to the signature."""
    wheels = command("tools.wheels")
    chosen = ["--python", *pythons] if pythons else []
    yield "texts", [*wheels, "texts", "--tag", tag]
    if gate:
        yield "gate", [str(ROOT / ".ci" / "run")]
    yield "files", [*wheels, "release", str(folder), *chosen]
    yield "trial", [*wheels, "trial", str(folder), *chosen]


def main() -> int:
    """Prepare the release of the commit that is checked out; the status is 1 when a step fails."""
    parser = argparse.ArgumentParser(prog="python -m tools.wheels prepare", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--dry-run", action="store_true", help="go on without the tag")
    parser.add_argument("--no-gate", action="store_true", help="it passed for this commit already")
    parser.add_argument(
        "--key", type=Path, help="secret key of minisign; default: nothing is signed"
    )
    parser.add_argument("--python", nargs="+", metavar="VERSION", default=[])
    chosen = parser.parse_args()
    folder = chosen.folder.resolve()
    if chosen.key is not None and shutil.which(MINISIGN) is None:
        parser.error("--key needs minisign, which is not installed")
    tag = f"v{version_of(ROOT)}"
    faults = list(commit_faults(tag))
    for fault in faults:
        print(f"prepare: {fault}", flush=True)
    if faults and not chosen.dry_run:
        return 1
    for step, words in steps(folder, tag, gate=not chosen.no_gate, pythons=chosen.python):
        if not run(step, words) and not (chosen.dry_run and step == "texts"):
            return 1
    if not run("digests", ["sha256sum", "--check", "--quiet", "SHA256SUMS"], folder):
        return 1
    if chosen.key is None:
        print("prepare: nothing is signed, since no --key was given")
    if not all(run("signature", words) for words in signing(chosen.key, folder)):
        return 1
    print(f"prepare: the upload of {tag}, not done: {' '.join(upload(folder))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

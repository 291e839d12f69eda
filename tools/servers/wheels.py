# SPDX-License-Identifier: Apache-2.0
"""Downloads the wheels of vLLM and SGLang, and unpacks their Python files, which other programs and
tests run without installing them.

    python -m tools.servers wheels DIR

DIR then has `vllm/vllm/…` and `sglang/sglang/…`; SERVER_SOURCES=DIR gives them to the tests.
375 MB from the package index, and pip.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import zipfile
from pathlib import Path

RELEASES = {"vllm": "0.33.0", "sglang": "0.5.23"}
# Names the folder for tests, which have no command line.
VARIABLE = "SERVER_SOURCES"


def main() -> int:
    """Download what is not there, and unpack it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "folder", type=Path, metavar="DIR", help="where to; made if it is not there"
    )
    options = parser.parse_args()
    for name, release in RELEASES.items():
        files = unpack(fetch(name, release, options.folder), options.folder / name)
        print(f"{name} {release}: {files} files in {options.folder / name}")
    return 0


def fetch(name: str, release: str, folder: Path) -> Path:
    """Return the wheel of a release, downloaded unless it is there."""
    folder.mkdir(parents=True, exist_ok=True)
    if not any(folder.glob(f"{name}-{release}-*.whl")):
        line = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--no-deps",
            "--dest",
            str(folder),
            f"{name}=={release}",
        ]
        subprocess.run(line, check=True)
    return next(folder.glob(f"{name}-{release}-*.whl"))


def unpack(wheel: Path, folder: Path) -> int:
    """Unpack the Python files of a wheel, and its entry points; returns their number."""
    with zipfile.ZipFile(wheel) as archive:
        wanted = [
            name
            for name in archive.namelist()
            if name.endswith((".py", "METADATA", "entry_points.txt"))
        ]
        archive.extractall(folder, wanted)
    return len(wanted)

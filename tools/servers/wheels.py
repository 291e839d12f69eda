# SPDX-License-Identifier: Apache-2.0
"""Downloads the wheels of vLLM and SGLang, and unpacks their Python files, which other programs and
tests run without installing them.

    python -m tools.servers wheels DIR

DIR then has `vllm/vllm/…` and `sglang/sglang/…`; SERVER_SOURCES=DIR gives them to the tests.
375 MB from the package index, and pip.
"""

from __future__ import annotations

from pathlib import Path

from tools.shared import programs
from tools.shared.wheel_files import fetched, unpack

RELEASES = {"vllm": "0.33.0", "sglang": "0.5.23"}
# Names the folder for tests, which have no command line.
VARIABLE = "SERVER_SOURCES"
_WANTED = (".py", "METADATA", "entry_points.txt")


def main() -> int:
    """Download what is not there, and unpack it."""
    parser = programs.parser(__doc__)
    parser.add_argument("folder", type=Path, metavar="DIR", help="made if it is not there")
    folder = parser.parse_args().folder
    for name, release in RELEASES.items():
        files = unpack(
            fetched(name, release, folder), folder / name, lambda file: file.endswith(_WANTED)
        )
        print(f"{name} {release}: {files} files in {folder / name}")
    return 0

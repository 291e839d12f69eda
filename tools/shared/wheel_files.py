# SPDX-License-Identifier: Apache-2.0
"""Wheels of others: fetched from the package index unless they are there, and unpacked."""

from __future__ import annotations

import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

from tools.shared.processes import captured

# A release of vLLM is 340 MB.
TIMEOUT_S = 1800


class NoIndex(Exception):
    """A wheel could not be fetched; the message has what pip said."""


def fetched(project: str, version: str, folder: Path, *options: str) -> Path:
    """Return the wheel of a release in a folder.

    Raises:
        NoIndex: the package index does not answer, or has no such wheel.
    """
    folder.mkdir(parents=True, exist_ok=True)
    pattern = f"{project.replace('-', '_')}-{version}-*.whl"
    if not any(folder.glob(pattern)):
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
        wanted = ["--no-deps", "--only-binary=:all:", *options, "--dest", str(folder)]
        line = [*pip, *wanted, f"{project}=={version}"]
        done = captured(*line, timeout=TIMEOUT_S)
        if done.returncode or not any(folder.glob(pattern)):
            raise NoIndex(
                f"{project}=={version} could not be fetched: {done.stderr.strip()[-300:]}"
            )
    return min(folder.glob(pattern))


def unpack(wheel: Path, into: Path, wanted: Callable[[str], bool]) -> int:
    """Unpack the files of a wheel whose names are wanted; returns their number."""
    with zipfile.ZipFile(wheel) as archive:
        names = [*filter(wanted, archive.namelist())]
        archive.extractall(into, names)
    return len(names)

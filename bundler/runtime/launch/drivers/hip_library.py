# SPDX-License-Identifier: Apache-2.0
"""`library_path`: which HIP library this process takes; `hip.py` opens it.

A process has to have one: a stream or an address of one copy is nothing to another.  The search is
Triton's, in short.
"""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

LIBRARY = "libamdhip64.so"
# Installations without the files for developers have the library only under these names.
_VERSIONED = (LIBRARY, f"{LIBRARY}.7", f"{LIBRARY}.6")
# Where Triton is told a path.
VARIABLE = "TRITON_LIBHIP_PATH"


def library_path() -> str:
    """Return the path or name of the library: as told, the one already here, torch's, the loader's,
    or that of ROCm.
    """
    return (
        os.environ.get(VARIABLE)
        or _mapped()
        or _packaged()
        or _openable()
        or _installed()
        or LIBRARY
    )


def _mapped() -> str | None:
    """Return the copy that this process has already, as that of a torch which was imported."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return None
    paths = (line[line.index("/") :] for line in lines if f"/{LIBRARY}" in line)
    return next((path for path in paths if Path(path).exists()), None)


def _packaged() -> str | None:
    """Return the copy that torch opens as soon as it is imported: its own, or that of AMD's package
    `rocm-sdk-core`.
    """
    found = (
        copy
        for package in ("torch", "_rocm_sdk_core")
        for folder in sys.path
        for copy in sorted(Path(folder, package, "lib").glob(f"{LIBRARY}*"))
    )
    return next(map(str, found), None)


def _openable() -> str | None:
    """Return the first name that the loader knows."""
    for name in _VERSIONED:
        try:
            ctypes.CDLL(name)
        except OSError:
            continue
        return name
    return None


def _installed() -> str | None:
    """Return the library of a ROCm that the loader does not know."""
    for root in (os.environ.get("HIP_PATH"), os.environ.get("ROCM_PATH"), "/opt/rocm"):
        if root and (found := sorted(Path(root, "lib").glob(f"{LIBRARY}*"))):
            return str(found[0])
    return None

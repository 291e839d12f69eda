# SPDX-License-Identifier: Apache-2.0
"""`warn`, `show`: warnings that point at the line of the user's program that led to them, however
deep in this package they arise.

Every room warns through it; the compile service and cache managers use `show`, since a warning must
not end a compile.
"""

from __future__ import annotations

import sys
import warnings
from types import FrameType

from bundler.errors import BundlerWarning

# Packages whose frames are skipped on the way to the user's line: this one, the libraries that call
# it, and what calls go through.
_BETWEEN = frozenset(
    {
        "bundler",
        "triton",
        "torch",
        "contextlib",
        "functools",
        "importlib",
        "concurrent",
        "threading",
    }
)


def warn(message: str) -> None:
    """Give a `BundlerWarning` at the nearest line that is neither this package's nor that of a
    library which calls it.

    A thread of this package has no such line; then the warning points at the line that calls this.
    """
    here = sys._getframe(1)  # noqa: SLF001  # the documented way to look at who calls
    frame = _users(here) or here
    # Not `stacklevel`, which counts frames: their number differs for every way into this package.
    warnings.warn_explicit(
        message,
        BundlerWarning,
        frame.f_code.co_filename,
        frame.f_lineno,
        frame.f_globals.get("__name__") or "<unknown>",
        frame.f_globals.setdefault("__warningregistry__", {}),
    )


def show(message: str) -> None:
    """Give the same warning where it must never become an error: a program that asked for that (`-W
    error`) is only shown it.
    """
    frame = _users(sys._getframe(1)) or sys._getframe(1)  # noqa: SLF001  # as in `warn`
    try:
        warn(message)
    except BundlerWarning as warning:
        warnings.showwarning(warning, BundlerWarning, frame.f_code.co_filename, frame.f_lineno)


def _users(frame: FrameType | None) -> FrameType | None:
    """Return the nearest frame of the user's program, None when there is none."""
    while frame is not None:
        name = str(frame.f_globals.get("__name__") or "")
        if name.partition(".")[0] not in _BETWEEN and not frame.f_code.co_filename.startswith(
            "<frozen "
        ):
            return frame
        frame = frame.f_back
    return None

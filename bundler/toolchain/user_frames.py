# SPDX-License-Identifier: Apache-2.0
"""`user_place`: the line of the user's program that led to what is happening, past the frames of
torch, Triton and this package.

A capture reports lines with it.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

# Packages whose code acts for the program that calls it.
_ACTING = ("torch", "triton", "bundler")
_OWN = str(Path(__file__).absolute().parents[1]) + os.sep
_STANDARD = sysconfig.get_path("stdlib") + os.sep
_INSTALLED = ("site-packages", "dist-packages")


@dataclass(frozen=True, order=True)
class Place:
    """A line of a program.

    Attributes:
        file, line: the innermost line that is not torch's, Triton's or ours; a library's, or the
            program's own.
        called_from: `file:line` of the program's own script that led there, where that is another
            line.
    """

    file: str
    line: int
    called_from: str = ""

    def __str__(self) -> str:
        return f"{self.file}:{self.line}" + (
            f" (called from {self.called_from})" if self.called_from else ""
        )


def user_place() -> Place:
    """Return the line that the calling thread is at."""
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    script = os.path.abspath(main) if main else ""
    inner: tuple[str, int] | None = None
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001  # the stack is what is asked for
    while frame is not None:
        file = frame.f_code.co_filename
        if inner is None and not _acts_for_others(frame):
            inner = (file, frame.f_lineno)
        if script and os.path.abspath(file) == script:
            own = (file, frame.f_lineno)
            return _place(inner or own, own)
        frame = frame.f_back
    return _place(inner or ("<unknown>", 0), None)


def _place(inner: tuple[str, int], own: tuple[str, int] | None) -> Place:
    return Place(*inner, "" if own is None or own == inner else f"{own[0]}:{own[1]}")


def _acts_for_others(frame: FrameType) -> bool:
    name, file = str(frame.f_globals.get("__name__", "")), frame.f_code.co_filename
    if name.partition(".")[0] in _ACTING or file.startswith((_OWN, "<")):
        return True
    return file.startswith(_STANDARD) and not any(part in file for part in _INSTALLED)

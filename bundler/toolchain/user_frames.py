# SPDX-License-Identifier: Apache-2.0
"""`user_place`: the line of the user's program that led to what is happening, past the frames of
torch, Triton and this package.

A capture reports lines with it.

`recorded_lines`: while a function is traced, each node of the graph gets that line.
torch.compile's graphs have these lines as `meta["stack_trace"]`; make_fx records those of functions
named `forward` alone.  `trace` calls it.
"""

from __future__ import annotations

import contextlib
import linecache
import os
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

# Packages whose code acts for the program that calls it.
_ACTING = ("torch", "triton", "bundler")
_OWN = str(Path(__file__).absolute().parents[1]) + os.sep
_STANDARD = sysconfig.get_path("stdlib") + os.sep
_INSTALLED = ("site-packages", "dist-packages")


class Place(NamedTuple):
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


@contextlib.contextmanager
def recorded_lines() -> Iterator[None]:
    """Record lines for the nodes of graphs that are traced while the block runs; imports torch."""
    from torch.fx import traceback as fx_traceback
    from torch.overrides import TorchFunctionMode

    class LineRecorder(TorchFunctionMode):  # type: ignore[misc]  # torch is not typed here
        """Tells torch, before each of its functions that the user's program calls, from which line
        it is called.
        """

        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            place = user_place()
            text = linecache.getline(place.file, place.line).strip()
            fx_traceback.set_stack_trace(
                [f'File "{place.file}", line {place.line}, in user\n    {text}']
            )
            return func(*args, **(kwargs or {}))

    with fx_traceback.preserve_node_meta(), LineRecorder():
        yield

# SPDX-License-Identifier: Apache-2.0
"""`find_compile`, `find_jit_call`: what Triton's running calls hold in their local variables, read
from the call stack.

Neither the listener nor the cache manager is told the options and environment that the key was made
from, and the metadata they are told is no substitute: compiler passes overwrite options in it.

The listener and both cache managers call `find_compile` while Triton compiles, and a replay that
begins then `find_jit_call`.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import FrameType
from typing import Any, NamedTuple

_COMPILE = ("compile", "triton.compiler.compiler")
_DO_COMPILE = ("_do_compile", "triton.runtime.jit")
# A few wrappers of other programs may stand between `compile` and the listener; a longer walk would
# cost every compile.
_MAX_FRAMES = 8
_MAX_FRAMES_TO_JIT = 2


class CompileFrame(NamedTuple):
    """Local variables of one `compile` call.

    `stages_key` is what a stage inspection hook added to the key, empty without one; `device` is
    known when the JIT made the call in this thread.
    """

    src: Any
    options: Any
    backend: Any
    env_vars: dict[str, str]
    hash: str
    stages_key: str
    metadata: dict[str, Any] | None
    device: int | None


def find_compile() -> CompileFrame | None:
    """Return the innermost `compile` call of Triton on this thread's stack; None when none of the
    nearest frames is one.
    """
    # the only way to an own caller's frame without a trace
    frame = _nearest_compile(sys._getframe(1))  # noqa: SLF001
    return _read(frame) if frame is not None else None


def find_jit_call() -> Mapping[str, Any] | None:
    """Return the local variables of the innermost call of the JIT on this thread's stack that
    compiles, or looks for a kernel on disk, right now; None when there is none.
    """
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001  # as in `find_compile`
    while frame is not None and not _is(frame, _DO_COMPILE):
        frame = frame.f_back
    if frame is None:
        return None
    names = {"self", "key", "signature", "device", "constexprs", "options", "attrs"}
    return frame.f_locals if names <= frame.f_locals.keys() else None


def find_source() -> str | None:
    """Return the text whose digest is a part of the key of the kernel that Triton's `compile` has
    in hand; None when it is not known.
    """
    frame = _nearest_compile(sys._getframe(1))  # noqa: SLF001  # as in `find_compile`
    source = frame.f_locals.get("src") if frame is not None else None
    return source_text(source) if source is not None else None


def source_text(src: Any) -> str | None:
    """Return the text that the part `source.text` is the digest of; None when there is none."""
    text = getattr(src.fn, "src", None) if hasattr(src, "fn") else getattr(src, "src", None)
    return text if isinstance(text, str) else None


def _nearest_compile(frame: FrameType | None) -> FrameType | None:
    for _ in range(_MAX_FRAMES):
        if frame is None or _is(frame, _COMPILE):
            return frame
        frame = frame.f_back
    return None


def _is(frame: FrameType, place: tuple[str, str]) -> bool:
    return frame.f_code.co_name == place[0] and frame.f_globals.get("__name__") == place[1]


def _read(frame: FrameType) -> CompileFrame | None:
    local = frame.f_locals
    try:
        return CompileFrame(
            src=local["src"],
            options=local["options"],
            backend=local["backend"],
            env_vars=local["env_vars"],
            hash=local["hash"],
            stages_key=local.get("inspect_stages_key", ""),
            metadata=local.get("metadata"),
            device=_device_of_jit(frame.f_back),
        )
    except KeyError:
        # A Triton whose `compile` has other variables; half of the facts would be worse than none.
        return None


def _device_of_jit(frame: FrameType | None) -> int | None:
    for _ in range(_MAX_FRAMES_TO_JIT):
        if frame is None:
            return None
        if _is(frame, _DO_COMPILE):
            device = frame.f_locals.get("device")
            return device if type(device) is int else None
        frame = frame.f_back
    return None

# SPDX-License-Identifier: Apache-2.0
"""Lets Triton compile and launch what no recorded specialization fits, and records it, so that the
next launch needs no Triton.

`load(fallback=...)` makes a `JitFallback` for each JIT function that it is given.  It is the only
module of this room that records; a `StaticKernel` knows the protocol `Fallback` alone.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from bundler.format.bundle import Bundle
from bundler.lifecycle.recorder import recording


class JitFallback:
    """A kernel's JIT function, for calls that were not recorded.

    Thread-safe; one thread at a time compiles and records.

    Args:
        function: the JIT function.
        adopt: gets a bundle of what Triton compiled for a call, or found in its cache; not called
            when Triton had it in memory.
    """

    def __init__(self, function: Any, adopt: Callable[[Bundle], None]) -> None:
        self._function, self._adopt = function, adopt
        self._lock = threading.Lock()

    def launch(self, grid: Any, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        """Launch through Triton, then hand over what it compiled.

        Raises whatever Triton raises, and `RecordingError` when Triton is not installed.
        """
        with self._lock, recording() as watched:
            self._function[grid](*args, **keywords)
            compiled = watched.collect(keep="launch")
        if compiled.kernels:
            self._adopt(compiled)

    def launch_again(self, grid: Any, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        """Launch through Triton what it is known to have in memory."""
        self._function[grid](*args, **keywords)

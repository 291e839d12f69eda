# SPDX-License-Identifier: Apache-2.0
"""Lets Triton compile what no recorded specialization fits, and records it, so that the next launch needs no Triton."""

from __future__ import annotations

import threading
from typing import Any

from bundler.format.bundle import Bundle
from bundler.lifecycle.recorder import recording


class Fallback:
    """A kernel's JIT function, for calls that were not recorded.

    Thread-safe; one thread at a time compiles and records.
    """

    def __init__(self, function: Any) -> None:
        self._function = function
        self._lock = threading.Lock()

    def launch(self, grid: Any, args: tuple[Any, ...], keywords: dict[str, Any]) -> Bundle:
        """Launch through Triton and return what it compiled or found in its cache; empty when it had it in memory.

        Raises whatever Triton raises, and `RecordingError` when Triton is not installed.
        """
        with self._lock, recording() as watched:
            self._function[grid](*args, **keywords)
            return watched.collect(keep="launch")

    def launch_again(self, grid: Any, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        """Launch through Triton what it is known to have in memory."""
        self._function[grid](*args, **keywords)

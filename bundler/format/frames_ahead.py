# SPDX-License-Identifier: Apache-2.0
"""`decoded_together`: frames that are decoded in threads, one each, where there are processors to spare.

`Container` calls it for who goes through a whole bundle: then decoding takes most of the time, and needs no interpreter.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from typing import TypeVar

from bundler.errors import BundlerError

# Each takes some megabytes until it is used.
_MOST = 4
T = TypeVar("T")


def frames_at_once() -> int:
    """Return how many frames are decoded at once; one where the other processors have enough to do with writing files."""
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(_MOST, available // 2))


def decoded_together(decode: Callable[[int], T], first: int, others: Sequence[int]) -> list[T]:
    """Return the first frame decoded, and before it those of the others that could be.

    What is wrong with one of the others shows when it is asked for by itself.
    """
    if not others:
        return [decode(first)]
    import threading  # few have so many processors

    found: list[T] = []

    def decode_ahead(number: int) -> None:
        with contextlib.suppress(BundlerError, MemoryError):
            found.append(decode(number))

    started: list[threading.Thread] = []
    try:
        with contextlib.suppress(RuntimeError):  # no thread can be had: what is left is decoded later
            for number in others:
                started.append(threading.Thread(target=decode_ahead, args=(number,), daemon=True))
                started[-1].start()
        asked = decode(first)
    finally:
        for thread in started:
            if thread.ident is not None:
                thread.join()
    return [*found, asked]

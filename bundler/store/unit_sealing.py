# SPDX-License-Identifier: Apache-2.0
"""`Sealing`: units of a push are compressed in threads, while the caller reads the next ones and
stores those before.

Compressing is two thirds of what a push into an empty store does.  `BundleStore` makes one for each
push.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Self

from bundler.store.store_layout import BATCH_BYTES, Unit

if TYPE_CHECKING:
    from concurrent.futures import Future, ThreadPoolExecutor

# Of fewer units the first is done before a thread has begun.
_LEAST_UNITS = 8
# One thread reads and stores what they compress, which takes it a third of the time of one of them.
_MOST_THREADS = 8
# So many wait to be compressed or taken; enough that no thread waits for the caller, who stores
# hundreds at a time.
_MOST_AHEAD = 256


class Sealing:
    """Threads that compress units; used as a context, at whose end what was not begun is left
    undone.

    Args:
        seal: returns what is to be stored for a unit and its payload; safe under threads.
        units: how many there are going to be.
    """

    def __init__(self, seal: Callable[[Unit, bytes], bytes], units: int) -> None:
        self._seal = seal
        self._pool: ThreadPoolExecutor | None = None
        threads = _processors()
        if units >= _LEAST_UNITS and threads > 1:
            from concurrent.futures import (
                ThreadPoolExecutor,  # who only pulls imports this module too
            )

            self._pool = ThreadPoolExecutor(threads)

    def values(self, payloads: Iterable[tuple[Unit, bytes]]) -> Iterator[tuple[str, bytes]]:
        """Yield what is to be stored by key, in the order of the units."""
        if self._pool is None:
            for unit, payload in payloads:
                yield unit.key, self._seal(unit, payload)
            return
        ahead: deque[tuple[Unit, Future[bytes]]] = deque()
        waiting_bytes = 0
        for unit, payload in payloads:
            while ahead and (len(ahead) == _MOST_AHEAD or waiting_bytes + unit.size > BATCH_BYTES):
                waiting_bytes -= ahead[0][0].size
                yield _taken(ahead)
            ahead.append((unit, self._pool.submit(self._seal, unit, payload)))
            waiting_bytes += unit.size
        while ahead:
            yield _taken(ahead)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._pool is not None:
            # After an error, or Ctrl-C, nobody waits for what no thread has begun.
            self._pool.shutdown(wait=kind is None, cancel_futures=True)


def _processors() -> int:
    available = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    return min(_MOST_THREADS, available)


def _taken(ahead: deque[tuple[Unit, Future[bytes]]]) -> tuple[str, bytes]:
    unit, sealed = ahead.popleft()
    return unit.key, sealed.result()

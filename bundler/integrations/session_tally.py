# SPDX-License-Identifier: Apache-2.0
"""`Tally`: counts what a session does, for every part of it; `Tally.snapshot` makes the `Counters`
that users see.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter, deque
from typing import TYPE_CHECKING

from bundler import observers

if TYPE_CHECKING:
    from bundler.integrations.session_counters import Counters

# The report names these; a process that compiles for days keeps no more.
SLOWEST = 10
# Hits that are summed up at once.
MANY_HITS = 4096
# Kernels of which hits are counted one by one; a process that finds more names no others.
MOST_KERNELS = 100_000
# What `add` tells observers: the name of a metric and its labels.
_TOLD: dict[str, tuple[str, dict[str, str]]] = {
    "misses": ("lookups", {"result": "miss", "tier": "none"}),
    "published": ("published", {}),
    "bytes_fetched": ("bytes", {"direction": "fetched", "tier": "store"}),
    "bytes_sent": ("bytes", {"direction": "sent", "tier": "store"}),
}
# What is counted one by one, under the names of `Counters`.
_NUMBERS = ("misses", "compiles", "published", "strict_warnings", "launchers", "moved")
_BYTES = ("bytes_fetched", "bytes_sent")


class Tally:
    """Counts for one session; safe from any thread.

    Attributes:
        hits: kernels that were found since the last sum: where, the seconds that their compiles
            took, the bytes fetched, the key.  Whoever finds one appends it and calls `fold` when
            there are many: that needs no lock.
    """

    def __init__(self) -> None:
        self.reset_after_fork()

    def reset_after_fork(self) -> None:
        """Count from nought, with a lock that no thread of the parent holds."""
        self._lock = threading.Lock()
        self.hits: deque[tuple[str, float, int, str]] = deque()
        self._hits_of: Counter[str] = Counter()
        self._found: Counter[str] = Counter()
        self._errors: Counter[str] = Counter()
        self._launchers_of_triton: Counter[str] = Counter()
        self._numbers: Counter[str] = Counter()
        self._moved: dict[str, str] = {}
        self._compile_seconds, self._seconds_saved = 0.0, 0.0
        self._slowest: list[tuple[str, float]] = []

    def fold(self) -> None:
        """Sum up the hits, and tell observers of each."""
        # It ends when there is none left; another thread may append one at any time.
        with self._lock, contextlib.suppress(IndexError):
            while True:
                place, saved_s, fetched_bytes, key = self.hits.popleft()
                if observers.listeners:
                    _tell_hit(place, saved_s, fetched_bytes)
                self._found[place] += 1
                if key in self._hits_of or len(self._hits_of) < MOST_KERNELS:
                    self._hits_of[key] += 1
                self._seconds_saved += saved_s
                self._numbers["bytes_fetched"] += fetched_bytes

    def moved(self, key: str, origin: str) -> None:
        """Count a hit that was a kernel which only moved, recorded under the key `origin`."""
        with self._lock:
            self._numbers["moved"] += 1
            if len(self._moved) < MOST_KERNELS:
                self._moved[key] = origin

    def compiled(self, name: str, seconds: float, key: str) -> None:
        """Count a kernel that was compiled."""
        observers.ended("compile", seconds, kernel=name, key=key)
        with self._lock:
            self._numbers["compiles"] += 1
            self._compile_seconds += seconds
            slowest = sorted([*self._slowest, (name, seconds)], key=lambda pair: -pair[1])
            self._slowest = slowest[:SLOWEST]

    def add(self, what: str, number: int = 1, *, told: bool = False) -> None:
        """Count something that is called as an attribute of `Counters`; `told` when observers have
        heard of it already.
        """
        if observers.listeners and what in _TOLD and not told:
            name, labels = _TOLD[what]
            observers.count(name, number, **labels)
        with self._lock:
            self._numbers[what] += number

    def launcher(self, reason: str | None) -> None:
        """Count a launcher that was given, or the reason why Triton builds its own."""
        with self._lock:
            if reason is None:
                self._numbers["launchers"] += 1
            else:
                self._launchers_of_triton[reason] += 1

    def failed(self, cause: str) -> bool:
        """Count a failure; True for the first of its cause."""
        with self._lock:
            self._errors[cause] += 1
            return self._errors[cause] == 1

    def hits_of(self) -> dict[str, int]:
        """Return how often each kernel was found, by key."""
        self.fold()
        with self._lock:
            return dict(self._hits_of)

    def moved_from(self) -> dict[str, str]:
        """Return the key under which each kernel that moved was recorded, by the key that was asked
        for.
        """
        with self._lock:
            return dict(self._moved)

    def snapshot(self) -> Counters:
        """Return the numbers as they are now."""
        from bundler.integrations.session_counters import Counters  # a hit does not need it

        self.fold()
        with self._lock:
            return Counters(
                hits=self._found.total(),
                found=dict(sorted(self._found.items())),
                errors=dict(sorted(self._errors.items())),
                launchers_of_triton=dict(sorted(self._launchers_of_triton.items())),
                slowest=tuple(self._slowest),
                compile_seconds=self._compile_seconds,
                seconds_saved=self._seconds_saved,
                **{name: self._numbers[name] for name in (*_NUMBERS, *_BYTES)},
            )


def _tell_hit(place: str, saved_s: float, fetched_bytes: int) -> None:
    observers.count("lookups", result="hit", tier=place)
    observers.count("seconds_saved", saved_s)
    if fetched_bytes:
        observers.count("bytes", fetched_bytes, direction="fetched", tier=place)

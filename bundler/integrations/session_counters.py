# SPDX-License-Identifier: Apache-2.0
"""What a session did so far, in numbers."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from bundler.format.summary import Summarized

# The report names these; a process that compiles for days keeps no more.
SLOWEST = 10
_NUMBERS = ("misses", "compiles", "published", "bytes_fetched", "bytes_sent", "strict_warnings")


@dataclass(frozen=True, repr=False)
class Counters(Summarized):
    """What a session did so far in this process; a snapshot that does not change.

    Attributes:
        hits: kernels that Triton did not compile.
        found: the same by where they were: `triton` (its own directory), `tag`, `store`, `registered`.
        misses: kernels that were nowhere.
        compiles: kernels that Triton compiled and stored.
        compile_seconds: time that these took.
        seconds_saved: time that the compiles of the hits took when they were recorded, as far as known.
        published: kernels and files that were sent to the store.
        bytes_fetched, bytes_sent: their sizes, uncompressed.
        errors: how often something failed, by cause; the program went on.
        slowest: (name, seconds) of the compiles that took longest.
        strict_warnings: kernels that were compiled although strict mode `warn` was on, each counted once.
    """

    hits: int = 0
    found: Mapping[str, int] = field(default_factory=dict)
    misses: int = 0
    compiles: int = 0
    compile_seconds: float = 0.0
    seconds_saved: float = 0.0
    published: int = 0
    bytes_fetched: int = 0
    bytes_sent: int = 0
    errors: Mapping[str, int] = field(default_factory=dict)
    slowest: tuple[tuple[str, float], ...] = ()
    strict_warnings: int = 0


class Tally:
    """Counts for one session; safe from any thread."""

    def __init__(self) -> None:
        self.reset_after_fork()

    def reset_after_fork(self) -> None:
        """Count from nought, with a lock that no thread of the parent holds."""
        self._lock = threading.Lock()
        self._found: Counter[str] = Counter()
        self._errors: Counter[str] = Counter()
        self._numbers: Counter[str] = Counter()
        self._compile_seconds, self._seconds_saved = 0.0, 0.0
        self._slowest: list[tuple[str, float]] = []

    def hit(self, place: str, saved_s: float = 0.0, fetched_bytes: int = 0) -> None:
        """Count a kernel that was found."""
        with self._lock:
            self._found[place] += 1
            self._seconds_saved += saved_s
            self._numbers["bytes_fetched"] += fetched_bytes

    def compiled(self, name: str, seconds: float) -> None:
        """Count a kernel that was compiled."""
        with self._lock:
            self._numbers["compiles"] += 1
            self._compile_seconds += seconds
            self._slowest = sorted([*self._slowest, (name, seconds)], key=lambda pair: -pair[1])[:SLOWEST]

    def add(self, what: str, number: int = 1) -> None:
        """Count something that is called as an attribute of `Counters`."""
        with self._lock:
            self._numbers[what] += number

    def failed(self, cause: str) -> bool:
        """Count a failure; True for the first of its cause."""
        with self._lock:
            self._errors[cause] += 1
            return self._errors[cause] == 1

    def snapshot(self) -> Counters:
        """Return the numbers as they are now."""
        with self._lock:
            return Counters(
                hits=self._found.total(),
                found=dict(sorted(self._found.items())),
                errors=dict(sorted(self._errors.items())),
                slowest=tuple(self._slowest),
                compile_seconds=self._compile_seconds,
                seconds_saved=self._seconds_saved,
                **{name: self._numbers[name] for name in _NUMBERS},
            )

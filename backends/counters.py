# SPDX-License-Identifier: Apache-2.0
"""Counters of what each tier of a store did: `TierCounters` is the value that users see,
`TierTally` counts.

`Tier` counts for `Tiers`; `Store.tiers` shows the values to users.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from dataclasses import dataclass


@dataclass(frozen=True)
class TierCounters:
    """What one tier did so far in this process.

    Attributes:
        name: the tier.
        hits, misses: objects that were asked for, and were there, or not.  A lookup that failed
            counts as neither.
        filled: objects that were copied here from a farther tier.
        damaged: objects that were there, but not what was once stored.
        errors: operations that failed, those that timed out not counted.
        timeouts: operations without an answer in time.
        rested: operations that were not tried, since the tier failed lately.
    """

    name: str
    hits: int = 0
    misses: int = 0
    filled: int = 0
    damaged: int = 0
    errors: int = 0
    timeouts: int = 0
    rested: int = 0


class TierTally:
    """Counts for one tier; safe under threads, and in a forked child, which goes on from its
    parent's numbers.
    """

    def __init__(self, name: str) -> None:
        self._name, self._counts = name, Counter[str]()
        self._own_lock, self._pid = threading.Lock(), os.getpid()

    def add(self, what: str, number: int = 1) -> None:
        """Count something that is called as an attribute of `TierCounters`."""
        with self._lock:
            self._counts[what] += number

    def first(self, cause: str) -> bool:
        """Tell whether this is the first time that something happened."""
        with self._lock:
            self._counts[f"cause {cause}"] += 1
            return self._counts[f"cause {cause}"] == 1

    def snapshot(self) -> TierCounters:
        """Return the numbers as they are now."""
        with self._lock:
            return TierCounters(
                self._name, **{k: v for k, v in self._counts.items() if " " not in k}
            )

    @property
    def _lock(self) -> threading.Lock:
        # Another thread could hold the lock at the moment of a fork; in the child nobody would
        # release it.
        if self._pid != os.getpid():
            self._own_lock, self._pid = threading.Lock(), os.getpid()
        return self._own_lock

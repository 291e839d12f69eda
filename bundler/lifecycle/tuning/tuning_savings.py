# SPDX-License-Identifier: Apache-2.0
"""`tuning_counters`: what tuners of this process found and spent, and how much time their look-ups
of records saved.

`runtime/tuning` counts here; users ask, and the report of a process has the numbers
(`integrations/process_report.py`).
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace

from bundler.fork_safety import after_fork
from bundler.format.candidate_timings import Tuning

_US_OF_S = 1_000_000


@dataclass(frozen=True)
class TuningCounters:
    """What tuners of this process did so far; a snapshot that does not change.

    Attributes:
        found: tuning keys whose config a record told.
        untimed: how many of these records do not say what their tuning took.
        seconds_saved: what the tunings of the others took where they were made: compiles and
            measurements.
        tuned: tuning keys that were searched here.
        seconds_spent: what that took.
    """

    found: int = 0
    untimed: int = 0
    seconds_saved: float = 0.0
    tuned: int = 0
    seconds_spent: float = 0.0


class _Meter:
    """Counts for the process; safe from any thread, and from nought in a forked child."""

    def __init__(self) -> None:
        self._reset()
        after_fork(self._reset)

    def _reset(self) -> None:
        self._lock, self.now = threading.Lock(), TuningCounters()

    def found(self, tuning: Tuning | None) -> None:
        """Count a record that was used in place of a search, with what that took."""
        spent_s = 0.0 if tuning is None else (tuning.compile_us + tuning.measure_us) / _US_OF_S
        with self._lock:
            now = self.now
            self.now = replace(
                now,
                found=now.found + 1,
                untimed=now.untimed + (spent_s == 0),
                seconds_saved=round(now.seconds_saved + spent_s, 6),
            )

    def tuned(self, tuning: Tuning) -> None:
        """Count a search."""
        spent_s = (tuning.compile_us + tuning.measure_us) / _US_OF_S
        with self._lock:
            self.now = replace(
                self.now,
                tuned=self.now.tuned + 1,
                seconds_spent=round(self.now.seconds_spent + spent_s, 6),
            )


METER = _Meter()


def tuning_counters() -> TuningCounters:
    """Return what tuners of this process did so far."""
    return METER.now

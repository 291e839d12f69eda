# SPDX-License-Identifier: Apache-2.0
"""`BandwidthReport`: how near to the memory's speed kernels come, where `TunerOptions` hold one.

`AutotunedKernel` adds each kernel that it chose a config for.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from bundler.format.bundle_file import os_errors
from bundler.package_loggers import logger
from bundler.runtime.launch.calls.argument_types import is_tensor
from bundler.runtime.tuning.benchmark import Clock, pattern_of

# Inductor's figures for marking a kernel as slow.
SLOW_GB_S, SLOW_FROM_MS = 650.0, 0.012
_RED, _PLAIN = "\x1b[31m", "\x1b[0m"
_MS_OF_S = 1e3
# The latest measurements: a server that tunes for months must not run out of memory by its report.
MAX_KEPT = 100_000
_LOG = logger("bundler.runtime")


@dataclass(frozen=True)
class Bandwidth:
    """One measured kernel: `milliseconds` a launch, `gigabytes` read and written by it."""

    name: str
    milliseconds: float
    gigabytes: float

    @property
    def gb_per_s(self) -> float:
        """Gigabytes a second; 0 for a launch that took no time."""
        return self.gigabytes / (self.milliseconds / _MS_OF_S) if self.milliseconds > 0 else 0.0

    @property
    def slow(self) -> bool:
        """Whether it took long, and came nowhere near the speed of the memory."""
        return self.gb_per_s < SLOW_GB_S and self.milliseconds > SLOW_FROM_MS

    def line(self, *, color: bool = False) -> str:
        """Return it as a line of a table, in red where it is slow and `color` is wanted."""
        text = (
            f"{self.milliseconds:.3f}ms\t{self.gigabytes:.3f}"
            f" GB\t{self.gb_per_s:7.2f}GB/s\t{self.name}"
        )
        return f"{_RED}{text}{_PLAIN}" if color and self.slow else text


def moved_bytes(values: Mapping[str, Any]) -> int:
    """Return the bytes of all tensors among a call's arguments; those called `in_out_ptr…` are read
    and written.
    """
    total = 0
    for name, value in values.items():
        if is_tensor(value) and hasattr(value, "numel"):
            # By Inductor's names, the only sign of a kernel that updates a tensor in place.
            size = int(value.numel()) * int(value.dtype.itemsize)
            total += size * (2 if name.startswith("in_out_ptr") else 1)
    return total


class BandwidthReport:
    """Collects how fast kernels are, and writes a table; any thread may add to it.

    Args:
        path: a file that `write` appends to.
        pattern: a regular expression; only kernels whose name begins with a match are measured.
        lines: append each kernel's line to the file when it was measured, and log it, without
            waiting for `write`.
        clock: makes what measures the kernels, such as `ProfilerClock`; None takes what the tuner
            measured, or its clock.

    Raises:
        ConfigError: the pattern is no regular expression.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        pattern: str | None = None,
        lines: bool = False,
        clock: Callable[[], Clock] | None = None,
    ) -> None:
        self.clock = clock
        self._path, self._lock, self._lines = path, threading.Lock(), lines
        self._rows: list[Bandwidth] = []
        self._pattern = pattern_of(pattern)

    def wants(self, name: str) -> bool:
        """Whether a kernel of this name is measured."""
        return self._pattern is None or self._pattern.match(name) is not None

    @property
    def rows(self) -> tuple[Bandwidth, ...]:
        """Everything that was measured, in order."""
        return tuple(self._rows)

    def add(self, name: str, milliseconds: float, gigabytes: float) -> Bandwidth:
        """Add a measurement; returns it.

        Raises:
            AccessDenied, StoreFull, NotFound: with `lines`, the file cannot be written.
        """
        row = Bandwidth(name, milliseconds, gigabytes)
        with self._lock:
            # Replaced, never changed: `rows` and `table` read it without the lock.
            self._rows = [*self._rows, row][-MAX_KEPT:]
            if self._lines:
                _LOG.info("%s", row.line())
                self._append(row.line())
        return row

    def table(self, title: str = "", *, color: bool = False) -> str:
        """Return the totals, and a line for each kernel, the slowest first, with its part of the
        time.
        """
        rows = sorted(self._rows, key=lambda row: (-row.milliseconds, row.name))
        time_ms, size_gb = sum(row.milliseconds for row in rows), sum(row.gigabytes for row in rows)
        total = Bandwidth(f"SUMMARY ({title})" if title else "SUMMARY", time_ms, size_gb)
        lines = [total.line()]
        for row in rows:
            part = 100 * row.milliseconds / time_ms if time_ms > 0 else 0.0
            lines.append(f"{row.line(color=color)}\t{part:5.1f}%")
        return "\n".join(lines)

    def write(self, title: str = "") -> None:
        """Append the table to the file.

        Raises:
            AccessDenied, StoreFull, NotFound: it cannot be written.
        """
        self._append(self.table(title))

    def _append(self, text: str) -> None:
        if self._path is None:
            return
        with (
            os_errors(os.fspath(self._path), "write"),
            open(self._path, "a", encoding="utf-8") as file,
        ):
            file.write(text + "\n")

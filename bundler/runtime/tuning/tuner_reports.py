# SPDX-License-Identifier: Apache-2.0
"""What a tuner tells of its kernels: `BandwidthReport`, how near to the memory's speed they come;
`LaunchDump`, what they are launched with; `launch_range`, a launch in torch's profiler.

`TunerOptions` hold a report and a dump.  `AutotunedKernel` adds each kernel that it chose a config
for, writes down each launch, and opens a range around one while a profiler is active.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from bundler.errors import ConfigError
from bundler.format.bundle_file import os_errors, replace_file
from bundler.package_loggers import logger
from bundler.runtime.launch.argument_types import is_tensor
from bundler.runtime.tuning.benchmark import Clock, pattern_of
from bundler.runtime.tuning.tuner_plugins import TunedLaunch
from bundler.toolchain import tuner_toolchain as toolchain

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


_ODD = re.compile(r"[^A-Za-z0-9_.-]")
_KEY_CHARACTERS = 16


class LaunchDump:
    """Appends a line to a file for each launch: kernel, arguments, config, grid.

    Numbers and bools are written, everything else is `T`.  With `tensors`, each launch has a folder
    `<kernel>-<key>_run_<i>` with a file `tensor_<number of the argument>.pt` for each tensor, as it
    was before the launch; `torch.load` reads it with `weights_only=True`.  The folders of the last
    `runs` launches of each compiled kernel are kept, in turn.  Writing tensors waits for the
    device.  Any thread may launch.

    Args:
        path: the file.
        tensors: the directory of those folders; None writes no tensor.
        runs: how many launches of a kernel are kept.
        pattern: a regular expression; tensors are written for kernels alone whose name begins with
            a match.

    Raises:
        ConfigError: `runs` is below one, or the pattern no regular expression.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        tensors: str | os.PathLike[str] | None = None,
        runs: int = 1,
        pattern: str | None = None,
    ) -> None:
        if type(runs) is not int or runs < 1:
            raise ConfigError(
                f"runs={runs!r}: expected how many launches are kept, at least 1", got=runs
            )
        self._pattern = pattern_of(pattern)
        self._path, self._lock = os.fspath(path), threading.Lock()
        self._tensors, self._runs = None if tensors is None else Path(tensors), runs
        self._counts: Counter[str] = Counter()

    def write(self, launch: TunedLaunch) -> None:
        """Write down one launch.

        Raises:
            AccessDenied, StoreFull, NotFound: a file cannot be written.
        """
        values = list(launch.arguments.items())
        args, keywords = values[: launch.by_position], dict(values[launch.by_position :])
        self.add(
            launch.kernel,
            [value for _, value in args],
            keywords,
            launch.config.all_kwargs(),
            launch.grid,
        )
        wanted = self._pattern is None or self._pattern.match(launch.kernel)
        if self._tensors is not None and wanted:
            self._write_tensors(self._tensors, launch)

    def add(
        self,
        kernel: str,
        args: Iterable[Any],
        keywords: Mapping[str, Any],
        config: Mapping[str, Any],
        grid: Any,
    ) -> None:
        """Append the line of one launch; raises as `write`."""
        words = [_word(value) for value in args]
        words += [f"{name}={_word(value)}" for name, value in keywords.items()]
        words += [f"{name}={value}" for name, value in config.items()]
        line = f"{kernel} | {' '.join(words)} | {grid}\n"
        with (
            self._lock,
            os_errors(self._path, "write"),
            open(self._path, "a", encoding="utf-8") as file,
        ):
            file.write(line)

    def _write_tensors(self, directory: Path, launch: TunedLaunch) -> None:
        name = _ODD.sub("_", f"{launch.kernel}-{launch.key[:_KEY_CHARACTERS]}".rstrip("-"))
        with self._lock:
            run = self._counts[name] % self._runs
            self._counts[name] += 1
        folder = directory / f"{name}_run_{run}"
        with os_errors(os.fspath(folder), "write"):
            folder.mkdir(parents=True, exist_ok=True)
        for number, value in enumerate(launch.arguments.values()):
            if is_tensor(value):
                replace_file(
                    folder / f"tensor_{number}.pt", functools.partial(toolchain.save_tensor, value)
                )


def _word(value: Any) -> str:
    return str(value) if isinstance(value, int | bool) else "T"


_NOTHING: Mapping[str, float] = MappingProxyType({})


def facts_of(launch: TunedLaunch, known: Mapping[str, float]) -> dict[str, Any]:
    """Return what a range tells of a launch; names as Inductor's, and `grid`.

    Args:
        launch: the launch.
        known: further facts, such as `kernel_num_gb`.
    """
    config = launch.config
    return {
        "kernel_name": launch.kernel,
        "kernel_backend": "triton",
        "kernel_file": launch.file,
        "kernel_hash": launch.key,
        "grid": f"grid{launch.grid}",
        "stream": launch.stream,
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
        "kernel_kwargs": ",".join(f"{name}={value}" for name, value in config.kwargs.items()),
        # torch 2.13 writes a whole float as `4.` into its trace, which no reader of JSON takes.
        **{
            name: int(value) if float(value).is_integer() else value
            for name, value in known.items()
        },
    }


@contextlib.contextmanager
def launch_range(launch: TunedLaunch, known: Mapping[str, float] = _NOTHING) -> Iterator[None]:
    """Mark what happens inside as one launch of a kernel; arguments as for `facts_of`."""
    fast: Any = getattr(getattr(sys.modules["torch"], "_C", None), "_profiler", None)
    make = getattr(fast, "_RecordFunctionFast", None)
    name = launch.kernel or "triton kernel"
    if make is None:
        with sys.modules["torch.autograd.profiler"].record_function(name):
            yield
        return
    tensors = [value for value in launch.arguments.values() if is_tensor(value)]
    with make(name, tensors, facts_of(launch, known)):
        yield

# SPDX-License-Identifier: Apache-2.0
"""`MultiKernelRecords`: the choice of a `MultiKernel` as a tuning record, which travels as a
kernel's config does.

`MultiKernel` asks it before it measures, and gives it what it measured; Inductor's wrappers with
multi-kernels are loaded with one each.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Protocol

from bundler.errors import ConfigError, FormatError
from bundler.format import wire
from bundler.format.candidate_timings import Parts, Timing, Tuning, id_of
from bundler.format.digest import sha256
from bundler.format.entries import Target
from bundler.format.launch_spec import Named, TuningRecord
from bundler.lifecycle.tuning_directory import METER, Miss, tuning_listeners
from bundler.runtime.configs import Config
from bundler.runtime.tuning import tuning_winners
from bundler.runtime.tuning.heuristic_kernel import HeuristicKernel
from bundler.runtime.tuning.kept_records import find_record, keep_record
from bundler.runtime.tuning.tuner_options import TunerOptions
from bundler.runtime.tuning.tuning_winners import LookupTable
from bundler.toolchain import tuner_toolchain as toolchain

# The one parameter of a record's config: which kernel runs.
_KERNEL = "kernel"
_NS_OF_MS, _US_OF_S = 1e6, 1e6
SEARCH = "multi-kernel"


class ChoiceRecords(Protocol):
    """Where the choice of a multi-kernel is looked up and kept."""

    def find(self) -> tuple[str, str] | Miss:
        """Return (the kernel to run, how it is known), or why nothing is known."""

    def keep(
        self, choice: str, times_ms: Mapping[str, float], reasons: Mapping[str, str], spent_s: float
    ) -> None:
        """Keep a choice that was measured: the times of kernels, and why others have none."""


class MultiKernelRecords:
    """Looks up and keeps the choice among kernels under heuristics; see `ChoiceRecords`.

    A record counts when all of these are equal: the kernels' names, sources, candidates and sizes,
    the device, and who compiles.

    Args:
        name: of the multi-kernel.
        kernels: by name, in their order.
        options: of the tuner: bundle, table, whether to look up and to record; deterministic takes
            the first kernel, unmeasured.

    Raises:
        ConfigError: there is no kernel.
    """

    def __init__(
        self, name: str, kernels: Mapping[str, HeuristicKernel], options: TunerOptions | None = None
    ) -> None:
        if not kernels:
            raise ConfigError(f"{name}: expected kernels to choose from")
        self._name, self._kernels, self._options = name, dict(kernels), options or TunerOptions()
        table = self._options.table
        self._table = table if isinstance(table, LookupTable | None) else LookupTable.load(table)

    def find(self) -> tuple[str, str] | Miss:
        """Return the kernel to run and how it is known: `table`, `first` or `record`; or why
        nothing is known.
        """
        parts = self._parts()
        if self._table is not None:
            named = dict(parts)
            config = self._table.find(self._name, named["source"], named["arguments"])
            chosen = None if config is None else config.kwargs.get(_KERNEL)
            if chosen in self._kernels:
                return str(chosen), "table"
        if self._options.deterministic:
            return next(iter(self._kernels)), "first"
        found = find_record(self._name, parts, self._first().tuned.ready().bundle, self._options)
        if isinstance(found, Miss):
            return found
        try:
            config = tuning_winners.config_of(found.record.config)
        except FormatError as error:
            return Miss(f"{found.source}: {error}")
        chosen = config.kwargs.get(_KERNEL)
        if set(config.kwargs) != {_KERNEL} or chosen not in self._kernels:
            return Miss(
                f"{found.source}: its choice {chosen!r} is none of {', '.join(self._kernels)}"
            )
        tuning_listeners.tell(found.record, found.tuning)
        METER.found(found.tuning)
        return str(chosen), "record"

    def keep(
        self, choice: str, times_ms: Mapping[str, float], reasons: Mapping[str, str], spent_s: float
    ) -> None:
        """Tell recordings of a choice, and write it where the next process looks."""
        timings = tuple(
            Timing(_named(name), time_ns=round(times_ms[name] * _NS_OF_MS))
            if name in times_ms and name not in reasons
            else Timing(_named(name), reason=reasons.get(name, "the measurement gave no time"))
            for name in self._kernels
        )
        record = TuningRecord(self._name, self._parts(), _named(choice), SEARCH)
        keep_record(
            record,
            Tuning(id_of(record), timings, 0, round(spent_s * _US_OF_S), int(time.time())),
            self._options,
        )

    def _first(self) -> HeuristicKernel:
        return next(iter(self._kernels.values()))

    def _parts(self) -> Parts:
        driver = self._first().tuned.ready().driver
        device = driver.device()
        properties = driver.properties(device)
        rows = self._kernels.items()
        sources = [[name, toolchain.source_part(kernel.tuned.base)] for name, kernel in rows]
        configs = [[name, tuning_winners.configs_part(kernel.configs)] for name, kernel in rows]
        sizes = [f"{name} {sorted(kernel.candidates.hints.items())}" for name, kernel in rows]
        return tuning_winners.parts_of(
            sha256(wire.pack(sources)).hex(),
            sha256(wire.pack(configs)).hex(),
            ", ".join(sizes),
            tuning_winners.device_part(driver.backend, properties, toolchain.device_name(device)),
            toolchain.toolchain_part(Target(driver.backend, properties.arch, properties.warp_size)),
            SEARCH,
        )


def _named(kernel: str) -> Named:
    return tuning_winners.named_of(Config({_KERNEL: kernel}))

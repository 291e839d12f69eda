# SPDX-License-Identifier: Apache-2.0
"""`ResultLookup`: where the config of a call is looked for before anything is measured, and where a
winner is kept.

`AutotunedKernel` puts a `LookupQuestion` to it and gets a `Choice`, or a `Miss` that says why there
is none.  `find_record` and `keep_record` are where tuning records are looked for, and kept, as a
tuner's options say; `MultiKernelRecords` calls them too.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from bundler.errors import BundlerError, FormatError
from bundler.format.bundle import Bundle
from bundler.format.candidate_timings import (
    Parts,
    Timing,
    Tuning,
    from_file,
    id_of,
    record_id,
    to_file,
)
from bundler.format.entries import Target
from bundler.format.launch_spec import TuningRecord
from bundler.lifecycle.listeners import tuning_listeners
from bundler.lifecycle.tuner_files import results_text, results_timings
from bundler.lifecycle.tuning_directory import (
    METER,
    Hit,
    Miss,
    TuningFolder,
    explain,
    file_name,
    tunings_of,
)
from bundler.package_loggers import logger
from bundler.runtime.configs import Config
from bundler.runtime.launch.drivers.driver import Driver, target_of
from bundler.runtime.launch.specialization_match import Specialization
from bundler.runtime.tuning import tuning_winners
from bundler.runtime.tuning.config_list import ListedConfigs, ignored_on, keywords_on
from bundler.runtime.tuning.tuner import TuningOutcome, may_be_halved
from bundler.runtime.tuning.tuner_options import TunerOptions
from bundler.toolchain import tuner_toolchain as toolchain
from bundler.toolchain.directories import triton_cache_dir
from bundler.user_warnings import warn

_LOG = logger("bundler.runtime")
_US_OF_S = 1e6
# Part of each tuning key: another way to measure or to choose gets another number.
METHOD = "1"
# Options that coordinate descent may add to a config of the list.
REFINED_OPTIONS = frozenset({"waves_per_eu"})


@dataclass(frozen=True)
class Choice:
    """The config for one tuning key.

    Attributes:
        config: the config.
        how: where it is from: `table`, `only` (there was one), `record`, `results` (Triton's own
            file), `plugin`, or `autotune`, `steps` or `coordinate_descent` (measured just now).
        keywords: what it adds to a call.
        ignored: its options that this device's compiler does not have, such as `waves_per_eu` on
            CUDA; nothing was done with them.
        time_ms: a launch's measured time; None where it was not measured here.
        specializations: kernels of a bundle that come with it.
    """

    config: Config
    how: str
    keywords: Mapping[str, Any]
    time_ms: float | None = None
    specializations: tuple[Specialization, ...] = ()
    ignored: tuple[str, ...] = ()

    @staticmethod
    def of(
        config: Config,
        how: str,
        target: Target,
        time_ms: float | None = None,
        found: Sequence[Specialization] = (),
    ) -> Choice:
        """Return a choice with what its config adds to a call on a target."""
        return Choice(
            config,
            how,
            keywords_on(config, target),
            time_ms,
            tuple(found),
            ignored_on(config, target),
        )


@dataclass(frozen=True)
class LookupQuestion:
    """One tuning key on one device: its parts by name, and as Triton's tuner has it."""

    parts: Parts
    key: tuple[Any, ...]
    target: Target
    listed: ListedConfigs


def parts_of(source: str, configs: str, arguments: str, driver: Driver, search: str) -> Parts:
    """Return the named parts of a tuning key, in the order in which messages list them.

    Args:
        source, configs, arguments: of the kernel, as text.
        driver: whose current device is meant.
        search: how winners are found.
    """
    device = driver.device()
    name, properties = toolchain.device_name(device), driver.properties(device)
    return (
        ("source", source),
        ("configs", configs),
        ("arguments", arguments),
        ("device", tuning_winners.device_part(driver.backend, properties, name)),
        ("toolchain", toolchain.toolchain_part(target_of(driver, device))),
        ("search", f"{search}, method {METHOD}"),
    )


class ResultLookup:
    """The records of one kernel.

    Args:
        name, function: the kernel's, and its JIT function.
        bundle: whose records and kernels are used, None for none.
        options: the tuner's.
        results: whether Triton's own result files are read and written.
    """

    def __init__(
        self,
        name: str,
        function: Any,
        bundle: Bundle | None,
        options: TunerOptions,
        *,
        results: bool,
    ) -> None:
        self._name, self._function, self._bundle, self._options = name, function, bundle, options
        self._results = results or toolchain.caches_results()
        self._source = toolchain.source_part(function)
        self._table = tuning_winners.opened_table(options.table)

    def question(
        self, driver: Driver, listed: ListedConfigs, memo: Sequence[Any]
    ) -> LookupQuestion:
        """Return what to ask for: a kernel's source, its configs, the key, the device and who
        compiles.
        """
        # Element types are objects of torch; as text they are the same in every process.
        key = tuple(str(value) if hasattr(value, "itemsize") else value for value in memo)
        parts = parts_of(
            self._source,
            tuning_winners.configs_part(listed.configs),
            ", ".join(map(str, key)),
            driver,
            self._options.search,
        )
        return LookupQuestion(parts, key, target_of(driver, driver.device()), listed)

    def find(self, question: LookupQuestion) -> Choice | Miss:
        """Return the config for a tuning key without measuring anything, or why that cannot be."""
        parts, listed = dict(question.parts), question.listed
        if self._table is not None:
            # A table is the user's word, so it comes before any record.
            config = self._table.find(self._name, parts["source"], parts["arguments"])
            if config is not None:
                return Choice.of(_for_kernel(config, listed), "table", question.target)
        # One config that nothing changes leaves nothing to look up, and no record would say more.
        options = self._options
        changes = options.descent is not None or options.steps or len(listed.configs) > 1
        if not changes and not may_be_halved(listed.configs[0], options):
            return Choice.of(listed.configs[0], "only", question.target)
        found = self._recorded(question)
        if isinstance(found, Miss) and self._results and self._options.reuse == "all":
            results = self._triton_results(question)
            return (
                results
                if isinstance(results, Choice)
                else Miss(f"{found.reason}; {results.reason}")
            )
        return found

    def _recorded(self, question: LookupQuestion) -> Choice | Miss:
        found = find_record(self._name, question.parts, self._bundle, self._options)
        if isinstance(found, Miss):
            return found
        try:
            # A record made of another tuner's result names options among the parameters.
            config = _for_kernel(tuning_winners.config_of(found.record.config), question.listed)
        except FormatError as error:
            return Miss(f"{found.source}: {error}")
        why = _foreign(config, question.listed)
        if why is not None:
            return Miss(f"{found.source}: its config {config} {why}")
        # A recording that runs now gets this record too, so that its bundle serves the next
        # process.
        tuning_listeners.tell(found.record, found.tuning)
        METER.found(found.tuning)
        # The user's own object, where the config is one of the list: it may have attributes that a
        # record does not hold.
        config = next((known for known in question.listed.configs if known == config), config)
        return Choice.of(config, "record", question.target, found=self._kernels_of(found))

    def _kernels_of(self, hit: Hit) -> list[Specialization]:
        """Return kernels of the bundle that may be launched: the record's winner, and others of the
        very same source.
        """
        won = {
            t.key
            for t in (hit.tuning.timings if hit.tuning else ())
            if t.config == hit.record.config
        }
        source = self._function.cache_key
        return [
            Specialization(kernel)
            for kernel in (self._bundle.kernels if self._bundle is not None else ())
            if kernel.name == self._name
            and kernel.has_facts
            and (
                kernel.key in won
                or (
                    kernel.parts is not None
                    and dict(kernel.parts.parts).get("source.hash") == source
                )
            )
        ]

    def _triton_results(self, question: LookupQuestion) -> Choice | Miss:
        names = [str(original) for original in question.listed.originals]
        text = toolchain.read_results(self._function, question.target, question.key, names)
        timings = (
            Miss("no result file of Triton's tuner") if text is None else results_timings(text)
        )
        if isinstance(timings, Miss):
            return timings
        # In Triton's file a config is as its user wrote it, with options among the parameters.
        pairs = zip(question.listed.originals, question.listed.configs, strict=True)
        known = {
            tuning_winners.named_of(_as_in_triton(original)): config for original, config in pairs
        }
        timed = [(ms, known[named]) for named, ms in timings if named in known and ms is not None]
        # Triton's file may be of an earlier list of configs: only times of configs that are still
        # listed count.
        if not timed:
            return Miss("the result file of Triton's tuner has no time for any of these configs")
        return Choice.of(min(timed, key=lambda pair: pair[0])[1], "results", question.target)

    def keep(self, outcome: TuningOutcome, question: LookupQuestion) -> None:
        """Tell recordings of a winner, and write it where the next process looks; a failure to
        write is a warning.
        """
        record = TuningRecord(
            self._name,
            question.parts,
            tuning_winners.named_of(outcome.winner.config),
            outcome.found_by,
        )
        spent = (round(outcome.compile_s * _US_OF_S), round(outcome.measure_s * _US_OF_S))
        measured = Tuning(id_of(record), outcome.timings, *spent, when_s=int(time.time()))
        if keep_record(record, measured, self._options) and self._results:
            try:
                self._write_results(outcome.timings, question)
            except BundlerError as error:
                warn(f"the times for {self._name} are not kept for Triton's tuner: {error}")

    def _write_results(self, timings: Sequence[Timing], question: LookupQuestion) -> None:
        by_config = {timing.config: timing for timing in timings}
        kind = toolchain.triton_config_class()
        rows = [
            (
                toolchain.as_triton_fields(_as_in_triton(original).to_triton(kind)),
                by_config[tuning_winners.named_of(config)],
            )
            for original, config in zip(
                question.listed.originals, question.listed.configs, strict=True
            )
        ]
        names = [str(original) for original in question.listed.originals]
        text = results_text(question.key, rows)
        toolchain.write_results(self._function, question.target, question.key, names, text)


def _for_kernel(config: Config, listed: ListedConfigs) -> Config:
    return config if listed.parameters is None else config.for_parameters(listed.parameters)


def _as_in_triton(original: Any) -> Config:
    """Return a config of a user's list as Triton's own tuner has it: an option of ours that is no
    field there is among the parameters.
    """
    if not isinstance(original, Config):
        return Config.from_triton(original)
    apart = {
        name: value
        for name, value in original.options.items()
        if name not in toolchain.triton_config_fields()
    }
    return replace(
        original,
        kwargs={**original.kwargs, **apart},
        options={name: value for name, value in original.options.items() if name not in apart},
    )


def _foreign(config: Config, listed: ListedConfigs) -> str | None:
    """Return why a recorded config can neither be one of a list nor a refinement of one: records
    may come from anybody.
    """
    if all(config.kwargs.keys() != known.kwargs.keys() for known in listed.configs):
        return "has other parameters than those of this kernel"
    options = {name for known in listed.configs for name in known.options} | REFINED_OPTIONS
    unknown = sorted(config.options.keys() - options)
    return f"has the option {unknown[0]!r}, which none of the list has" if unknown else None


def find_record(
    name: str, parts: Parts, bundle: Bundle | None, options: TunerOptions
) -> Hit | Miss:
    """Return the record for these parts: of the bundle, else of the disk, else of the store of the
    session in force; or why there is none.

    Args:
        name: the kernel's.
        parts: what has to be equal.
        bundle: None for none.
        options: whose records may be used.
    """
    if options.reuse == "none":
        return Miss(f"{name}: records are switched off")
    found = _in_bundle(name, parts, bundle)
    if isinstance(found, Hit):
        return found
    if options.reuse == "bundle":
        return Miss(f"{found.reason}; records on disk are switched off")
    # Asked for at each search: a program may change its cache directory while it runs.
    here = TuningFolder(triton_cache_dir()).find(name, parts)
    if isinstance(here, Hit):
        return here
    stored = _in_stores(name, parts)
    if stored is not None:
        if options.record:
            _write(stored.record, stored.tuning)  # the next process asks no store
        return stored
    return here if bundle is None else Miss(f"{found.reason}; on disk: {here.reason}")


def _in_stores(name: str, parts: Parts) -> Hit | None:
    """Return a record that another machine of the same store published; one round trip for each
    session.
    """
    wanted = _known_by(record_id(name, parts))
    for delegate in toolchain.delegates():
        data = delegate.fetch_records([wanted]).get(wanted)
        if data is None:
            continue
        try:
            record, tuning = from_file(data)
        except FormatError as error:
            _LOG.warning("a tuning record of a store cannot be used: %s", error)
            continue
        if (record.kernel, record.parts) == (name, parts):
            return Hit(record, tuning, "the session's store")
    return None


def _known_by(record: str) -> str:
    """Return what a record is known by in a store, given its `record_id`."""
    return f"tuning {record}"


def _in_bundle(name: str, parts: Parts, bundle: Bundle | None) -> Hit | Miss:
    if bundle is None:
        return Miss(f"{name}: no bundle was given")
    pairs, wanted = tunings_of(bundle), record_id(name, parts)
    for record, measured in pairs:
        if id_of(record) == wanted:
            return Hit(record, measured, f"bundle {bundle.digest[:19]}")
    return explain(name, parts, (record for record, _ in pairs))


def keep_record(record: TuningRecord, measured: Tuning, options: TunerOptions) -> bool:
    """Count a winner, tell recordings of it, and write it where the next process looks; returns
    whether it was written.

    With a session in force its store gets it too.  A failure to write is a warning: the winner is
    known here.
    """
    METER.tuned(measured)
    if options.record or options.reuse != "none":
        tuning_listeners.tell(record, measured)
    if not options.record:  # recordings were told above: the option is about files alone
        return False
    known_by = _known_by(id_of(record))
    for delegate in toolchain.delegates():
        delegate.made_record(
            known_by, file_name(record.kernel, id_of(record)), to_file(record, measured)
        )
    return _write(record, measured)


def _write(record: TuningRecord, measured: Tuning | None) -> bool:
    try:
        TuningFolder(triton_cache_dir()).put(record, measured)
    except BundlerError as error:
        warn(f"the winner for {record.kernel} is not kept for other processes: {error}")
        return False
    return True

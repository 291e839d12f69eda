# SPDX-License-Identifier: Apache-2.0
"""`read_winners`: reads the configs that tuners chose: from bundles, cache directories, lookup
tables, and result files of tuners.

The command `tune` is the caller.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from bundler.cli.bundles.selection import chosen
from bundler.errors import ConfigError, FormatError
from bundler.format import names
from bundler.format.bundle import Bundle
from bundler.format.bundle_file import os_errors, read_regular
from bundler.format.candidate_timings import MAX_FILE_BYTES, Timing, Tuning, from_file, record_id
from bundler.format.launch_spec import Named, TuningRecord
from bundler.lifecycle.tuner_files import inductor_result, results_key, results_timings
from bundler.lifecycle.tuning_directory import SUFFIX, Miss, Pair, TuningFolder, tunings_of
from bundler.runtime.tuning.tuning_winners import record_of, table_entries

INDUCTOR, INDUCTOR_DESCENT = "inductor", "inductor, coordinate descent"
# Of a record made of a file of Inductor's tuner: the file, and the kernel that won.
FILE_PART, KEY_PART = "file", "kernel key"
_NS_OF_MS = 1e6
_US_OF_MS = 1000
_MAX_BYTES = 4 * MAX_FILE_BYTES


@dataclass(frozen=True)
class Winners:
    """What one source says.

    Attributes:
        records: of tuners of this package, of Triton's, and of lookup tables.
        inductor: the files of Inductor's tuner, in the form of records; torch alone reads them.
        unreadable: why files among others were left out.
    """

    records: list[Pair]
    inductor: list[Pair] = field(default_factory=list)
    unreadable: list[str] = field(default_factory=list)

    @property
    def all(self) -> list[Pair]:
        """The records of every tuner."""
        return [*self.records, *self.inductor]


def read_winners(source: str) -> Winners:
    """Return the records in a bundle, a cache directory, a lookup table, a record file, or a result
    file of a tuner.

    Raises:
        NotFound, AccessDenied: it cannot be read.
        FormatError: it is none of these.
    """
    if os.path.isdir(source):
        found = _sorted(TuningFolder(source).records(), _files_below(source))
        return _renamed(found, lambda pair: _name_in(Path(source), pair))
    if source.endswith(names.BEST_CONFIG_SUFFIX):
        path = Path(os.path.abspath(source))
        pair = _inductor(_bytes_of(source), f"{path.parent.name}/{path.name}")
        return Winners([], [_name_in(path.parent.parent, pair)])
    if source.endswith((names.AUTOTUNE_SUFFIX, SUFFIX, ".json")):
        data = _bytes_of(source)
        if source.endswith(SUFFIX):
            return Winners([from_file(data)])
        if source.endswith(names.AUTOTUNE_SUFFIX):
            return Winners([_of_triton(data, source)])
        return Winners([record_of(entry) for entry in table_entries(data, source)])
    with Bundle.load(source) as opened:
        kernels = {kernel.key: kernel.name for kernel in opened}
        files = [(entry.path, opened.read(entry.artifact)) for entry in opened.tuning_files]
        found = _sorted(tunings_of(opened), files)
    return _renamed(found, lambda pair: _named(pair, kernels))


def records_to_import(source: str) -> list[Pair]:
    """Return the records that can be put into a bundle; raises as `read_winners`, and `ConfigError`
    for Inductor's files.
    """
    found = read_winners(source)
    if found.inductor and not found.records:
        raise ConfigError(
            f"{source} is of Inductor's tuner, which says neither for which kernel nor for which"
            " sizes a config is, so no record can be made of it; pack the cache directory that it"
            " lies in: the file travels with the kernels, and torch finds it where they are"
            " restored",
            path=source,
        )
    return found.records


def matching(pairs: Iterable[Pair], wanted: str | None, source: str) -> list[Pair]:
    """Return the records of the kernels that `--kernel` means; raises as `chosen`."""
    return chosen(pairs, wanted, source, name=lambda pair: pair[0].kernel, key=_key_of)


def place(record: TuningRecord) -> tuple[str, str, str]:
    """Return kernel, tuning key and device: what a winner is for."""
    parts = dict(record.parts)
    return record.kernel, parts.get("arguments", parts.get(FILE_PART, "")), parts.get("device", "")


def winning_keys(record: TuningRecord, tuning: Tuning | None) -> list[str]:
    """Return the keys of the kernels that were compiled for the winner."""
    timings = tuning.timings if tuning is not None else ()
    return [timing.key for timing in timings if dict(timing.config) == dict(record.config)]


def _key_of(pair: Pair) -> str:
    return next(iter(winning_keys(*pair)), dict(pair[0].parts).get(KEY_PART, ""))


def _sorted(records: Iterable[Pair], files: Iterable[tuple[str, bytes]]) -> Winners:
    """Return records, and what result files of tuners say."""
    found, inductor = list(records), list[Pair]()
    unreadable: list[str] = []
    for path, data in files:
        try:
            if path.endswith(names.AUTOTUNE_SUFFIX):
                found.append(_of_triton(data, path))
            elif path.endswith(names.BEST_CONFIG_SUFFIX):
                inductor.append(_inductor(data, path))
        except FormatError as error:
            unreadable.append(error.message)
    found.sort(key=lambda pair: place(pair[0]))
    return Winners(found, inductor, unreadable)


def _renamed(found: Winners, rename: Callable[[Pair], Pair]) -> Winners:
    inductor = sorted(map(rename, found.inductor), key=lambda pair: place(pair[0]))
    return Winners(found.records, inductor, found.unreadable)


def _files_below(source: str) -> Iterator[tuple[str, bytes]]:
    """Yield the result files of tuners in a cache directory: each lies in a directory of it."""
    for path in sorted(Path(source).glob("*/*")):
        if path.name.endswith((names.AUTOTUNE_SUFFIX, names.BEST_CONFIG_SUFFIX)) and path.is_file():
            yield f"{path.parent.name}/{path.name}", _bytes_of(str(path))


def _bytes_of(path: str) -> bytes:
    with os_errors(path, "read"):
        return read_regular(path, _MAX_BYTES)


def _inductor(data: bytes, path: str) -> Pair:
    """Return a result file of Inductor's tuner as a record that names what little it knows."""
    result = inductor_result(data)
    if isinstance(result, Miss):
        raise FormatError(f"{path}: {result.reason}", path=path)
    kernel = os.path.basename(path).removesuffix(names.BEST_CONFIG_SUFFIX)
    parts = (
        (FILE_PART, path),
        (KEY_PART, result.key),
        ("configs", result.configs),
        ("from", "torch's inductor"),
    )
    record = TuningRecord(
        kernel, parts, result.config, INDUCTOR_DESCENT if result.descended else INDUCTOR
    )
    return record, Tuning(record_id(kernel, parts), (), measure_us=result.spent_ms * _US_OF_MS)


def _named(pair: Pair, kernels: dict[str, str]) -> Pair:
    """Return a record of Inductor's with its kernel's name, which the file lacks, where the kernel
    is beside it.
    """
    record, tuning = pair
    name = kernels.get(dict(record.parts)[KEY_PART])
    if name is None or tuning is None:
        return pair
    named = TuningRecord(name, record.parts, record.config, record.found_by)
    return named, Tuning(record_id(name, record.parts), (), measure_us=tuning.measure_us)


def _name_in(cache: Path, pair: Pair) -> Pair:
    """Return a record of Inductor's with its kernel's name, as the metadata file in its cache
    directory is called.
    """
    key = dict(pair[0].parts)[KEY_PART]
    if not names.is_kernel_key(key):
        return pair
    for path in sorted(cache.glob(f"triton/*/{key}/*.json")):
        if not path.name.startswith(names.GROUP_PREFIX):
            return _named(pair, {key: path.stem})
    return pair


def _of_triton(data: bytes, path: str) -> Pair:
    """Return a result file of Triton's tuner as a record that names what little it knows."""
    timings = results_timings(data)
    if isinstance(timings, Miss):
        raise FormatError(f"{path}: {timings.reason}", path=path)
    timed = [(ms, config) for config, ms in timings if ms is not None]
    if not timed:
        raise FormatError(f"{path}: no config in it has a time", path=path)
    kernel = os.path.basename(path).removesuffix(names.AUTOTUNE_SUFFIX)
    parts = (("arguments", results_key(data)), ("from", "triton's tuner"))
    tuning = Tuning(
        record_id(kernel, parts),
        tuple(_timing(config, ms) for config, ms in timings),
    )
    return TuningRecord(kernel, parts, min(timed, key=lambda pair: pair[0])[1], "triton"), tuning


def _timing(config: Named, time_ms: float | None) -> Timing:
    return Timing(
        config,
        time_ns=None if time_ms is None else round(time_ms * _NS_OF_MS),
        reason="failed" if time_ms is None else "",
    )

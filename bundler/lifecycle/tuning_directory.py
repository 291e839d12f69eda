# SPDX-License-Identifier: Apache-2.0
"""Tuning records on this machine: kept as files beside Triton's kernels, looked up with a reason.

`TuningFolder` is the folder; a look-up in it returns `Hit` or `Miss`.  Our tuners
(`bundler/runtime/tuning/result_lookup.py`) and the command `tune` read and write there; recordings
and `pack` take records along with `with_tunings`, and a restore calls `place_tunings`.
`tuning_counters` says what tuners of this process found and spent, and how much time their look-ups
of records saved: `runtime/tuning` counts, the report of a process has the numbers
(`integrations/process_report.py`).
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from bundler.errors import FormatError
from bundler.fork_safety import after_fork
from bundler.format.bundle import Bundle, with_parts
from bundler.format.bundle_file import os_errors, read_regular
from bundler.format.candidate_timings import (
    MAX_FILE_BYTES,
    Parts,
    Tuning,
    from_file,
    id_of,
    losers,
    merge_tunings,
    record_id,
    time_of,
    to_file,
)
from bundler.format.launch_spec import TuningRecord
from bundler.format.manifest import Content, Observed
from bundler.lifecycle.cache_directory import STALE_AFTER_S, TEMPORARY_PREFIX
from bundler.lifecycle.kernel_writer import make_directories
from bundler.package_loggers import logger

FOLDER = "bundler-tuning"
SUFFIX = ".tuning"
# A directory may hold the records of many sizes; so many are looked at to say why none fits.
MOST_READ = 256
_NAME_CHARACTERS, _ID_CHARACTERS = 80, 32
_ODD = re.compile(r"[^A-Za-z0-9_]")
_LOG = logger("bundler.lifecycle")

Pair = tuple[TuningRecord, Tuning | None]


@dataclass(frozen=True)
class Hit:
    """A record for just this kernel, these configs, this device and this toolchain; `source` says
    where it was.
    """

    record: TuningRecord
    tuning: Tuning | None
    source: str


@dataclass(frozen=True)
class Miss:
    """There is no such record, and why: which part differs from the closest one, or what is wrong
    with the file.
    """

    reason: str


class TuningFolder:
    """The records in one Triton cache directory.

    Any number of threads and processes may use it at once: a record is one file, which appears
    whole; the last writer wins. What is damaged or of another schema is a miss, never an error.

    Args:
        cache_dir: the cache directory; made when the first record is written.
    """

    def __init__(self, cache_dir: str | os.PathLike[str]) -> None:
        self.path = os.path.join(os.path.abspath(cache_dir), FOLDER)

    def put(self, record: TuningRecord, tuning: Tuning | None) -> str:
        """Write a record, in place of an older one of the same parts; returns its path.

        Raises:
            AccessDenied, StoreFull, NotFound: it could not be written.
        """
        path = os.path.join(self.path, file_name(record.kernel, id_of(record)))
        with os_errors(path, "write"):
            make_directories(self.path)
            temporary = os.path.join(
                self.path, f"{TEMPORARY_PREFIX}{os.getpid()}.{secrets.token_hex(8)}"
            )
            try:
                with open(temporary, "xb", opener=_for_the_owner) as file:
                    file.write(to_file(record, tuning))
                os.replace(temporary, path)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(temporary)
                raise
            self._sweep(os.lstat(path).st_mtime)
        return path

    def _sweep(self, now_s: float) -> None:
        """Remove what writers left that were killed a day ago or more; the time is the file
        system's own.
        """
        for name in os.listdir(self.path):
            if name.startswith(TEMPORARY_PREFIX):
                leftover = os.path.join(self.path, name)
                with contextlib.suppress(FileNotFoundError):
                    if now_s - os.lstat(leftover).st_mtime > STALE_AFTER_S:
                        os.unlink(leftover)

    def find(self, kernel: str, parts: Parts) -> Hit | Miss:
        """Return the record for a kernel whose parts are these, or why there is none."""
        path = os.path.join(self.path, file_name(kernel, record_id(kernel, parts)))
        read = _read(path)
        if isinstance(read, Miss):
            return read
        if read is None:
            return explain(kernel, parts, (record for record, _ in self.records(kernel)))
        record, tuning = read
        if (record.kernel, record.parts) != (kernel, parts):
            return Miss(f"{path} holds a record of another kernel or of other parts")
        return Hit(record, tuning, path)

    def records(self, kernel: str | None = None) -> Iterator[Pair]:
        """Yield every sound record, or those of one kernel; at most 256 of a kernel."""
        prefix = "" if kernel is None else _prefix(kernel)
        try:
            found = sorted(
                n for n in os.listdir(self.path) if n.endswith(SUFFIX) and n.startswith(prefix)
            )
        except OSError:
            return
        for name in found if kernel is None else found[:MOST_READ]:
            read = _read(os.path.join(self.path, name))
            if isinstance(read, tuple) and (kernel is None or read[0].kernel == kernel):
                yield read


def file_name(kernel: str, record: str) -> str:
    """Return the name of a record's file, given its kernel's name and its `record_id`."""
    return f"{_prefix(kernel)}{record.partition(':')[2][:_ID_CHARACTERS]}{SUFFIX}"


def _prefix(kernel: str) -> str:
    return f"{_ODD.sub('_', kernel)[:_NAME_CHARACTERS]}-"


def _read(path: str) -> Pair | Miss | None:
    """Return what a file holds, None when there is none."""
    try:
        return from_file(read_regular(path, MAX_FILE_BYTES, links=False))
    except FileNotFoundError:
        return None
    except (OSError, FormatError) as error:
        _LOG.warning("%s is no usable tuning record: %s", path, error)
        return Miss(f"{path} cannot be used: {error}")


def explain(kernel: str, parts: Parts, others: Iterable[TuningRecord]) -> Miss:
    """Return why no record of a kernel has these parts: how the closest one differs."""
    wanted, best = dict(parts), None
    for record in others:
        if record.kernel == kernel:
            have = dict(record.parts)
            names = [*wanted, *(name for name in have if name not in wanted)]
            apart = [name for name in names if wanted.get(name) != have.get(name)]
            if best is None or len(apart) < len(best[0]):
                best = (apart, have)
    if best is None:
        return Miss(f"{kernel}: no record of this kernel")
    words = (
        f"{name}: recorded {_brief(best[1].get(name))}, here {_brief(wanted.get(name))}"
        for name in sorted(best[0])
    )
    return Miss(f"{kernel}: no record fits; the closest differs in " + "; ".join(words))


def _brief(text: str | None) -> str:
    return "nothing" if text is None else f"{text:.120}"


# ------------------------------------------------------------------------------------------ Bundles


def with_tunings(bundle: Bundle, pairs: Iterable[Pair]) -> Bundle:
    """Return a bundle with further records; of two for the same parts, the faster or else the first
    stays.
    """
    found = list(pairs)
    if not found:
        return bundle
    kept = _fastest([*tunings_of(bundle), *found])
    records = [record for record, _ in kept]
    tunings = merge_tunings((), [tuning for _, tuning in kept if tuning is not None])
    content = Content.of(bundle.content.entries, records)
    return with_parts(bundle, content, replace(bundle.observed, tunings=tunings))


def _for_the_owner(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _faster(record: TuningRecord, tuning: Tuning | None, held: Pair) -> bool:
    here, there = time_of(record, tuning), time_of(*held)
    return here is not None and (there is None or here < there)


def tunings_of(bundle: Bundle) -> list[Pair]:
    """Return a bundle's records, each with how it was found where that is known; of two for the
    same parts, the faster one.
    """
    known = {tuning.record: tuning for tuning in bundle.observed.tunings}
    return _fastest((record, known.get(id_of(record))) for record in bundle.tuning_records)


def _fastest(pairs: Iterable[Pair]) -> list[Pair]:
    """Return of two records for the same parts the faster or else the first."""
    best: dict[str, Pair] = {}
    for pair in pairs:
        held = best.setdefault(id_of(pair[0]), pair)
        if _faster(*pair, held):
            best[id_of(pair[0])] = pair
    return list(best.values())


def winners_in(roots: Iterable[str], bundle: Bundle) -> list[Pair]:
    """Return the records in cache directories whose winning kernel is in a bundle, whoever tuned
    it: this process or a child.
    """
    keys = {kernel.key for kernel in bundle.kernels}
    found = (pair for root in roots for pair in TuningFolder(root).records()) if keys else ()
    return [
        (record, tuning)
        for record, tuning in found
        if tuning is not None
        and any(t.key in keys and t.config == record.config for t in tuning.timings)
    ]


def winners_only(bundle: Bundle) -> Bundle:
    """Return a bundle without the kernels that lost every tuning they were compiled for, and
    without the losers' timings.

    A kernel that no tuning names stays.  The result reads through the given bundle.
    """
    lost = losers(bundle.tuning_records, bundle.observed.tunings)
    entries = [entry for entry in bundle.content.entries if getattr(entry, "key", None) not in lost]
    seen = {key: value for key, value in bundle.observed.kernels.items() if key not in lost}
    chosen = {(id_of(record), frozenset(record.config)) for record in bundle.tuning_records}
    tunings = tuple(
        replace(t, timings=tuple(x for x in t.timings if (t.record, frozenset(x.config)) in chosen))
        for t in bundle.observed.tunings
    )
    observed = Observed(seen, bundle.observed.environments, tunings)
    content = Content.of(entries, bundle.tuning_records)
    return with_parts(bundle, content, observed, left_out=())


def place_tunings(bundle: Bundle, cache_dir: str | os.PathLike[str]) -> int:
    """Write a bundle's records where tuners on this machine look; returns how many were new or
    replaced a slower one.

    Raises:
        AccessDenied, StoreFull: the directory cannot be written.
    """
    folder, written = TuningFolder(cache_dir), 0
    for record, tuning in tunings_of(bundle):
        held = folder.find(record.kernel, record.parts)
        if isinstance(held, Hit) and (
            held.record == record or not _faster(record, tuning, (held.record, held.tuning))
        ):
            continue
        folder.put(record, tuning)
        written += 1
    return written


# ------------------------------------------------------------------------------- What tuners saved

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

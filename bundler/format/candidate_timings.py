# SPDX-License-Identifier: Apache-2.0
"""What a tuner measured: every candidate with its time or the reason it has none; the winner itself
is a `TuningRecord`.

A `Tuning` holds a `Timing` of each candidate; `from_file` and `to_file` turn it into the bytes of a
tuning file.  Our tuners make it, the observed part of a manifest carries it, `tuning_directory.py`
and the command `tune` read and write it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from bundler.errors import FormatError
from bundler.format import wire
from bundler.format.digest import DIGEST_BYTES, digest_text, sha256
from bundler.format.launch_spec import Named, TuningRecord, named_from_wire, named_to_wire
from bundler.format.limits import DEFAULT_LIMITS
from bundler.format.summary import Summarized, count

Parts = tuple[tuple[str, str], ...]

FILE_SCHEMA = 1
MAX_FILE_BYTES = 4 << 20
_MAYBE_INT = (int, type(None))


@dataclass(frozen=True)
class Timing:
    """One candidate of a tuned kernel.

    Attributes:
        config: its values and options.
        key: the kernel that it was compiled to; empty when it did not compile.
        time_ns: median time of one launch; None when it was not measured.
        low_ns, high_ns: the 20th and 80th percentile.
        reason: why it has no time; empty when it has one.
    """

    config: Named
    key: str = ""
    time_ns: int | None = None
    low_ns: int | None = None
    high_ns: int | None = None
    reason: str = ""

    def to_wire(self) -> list[Any]:
        """Return the positional form."""
        return [
            named_to_wire(self.config),
            self.key,
            self.time_ns,
            self.low_ns,
            self.high_ns,
            self.reason,
        ]

    @staticmethod
    def from_wire(data: Any, *, open_ended: bool = False) -> Timing:
        """Decode what `to_wire` wrote; raises `FormatError` for anything else."""
        config, *rest = wire.fields(
            data,
            "timing",
            list,
            str,
            _MAYBE_INT,
            _MAYBE_INT,
            _MAYBE_INT,
            str,
            open_ended=open_ended,
        )
        return Timing(named_from_wire(config), *rest)


@dataclass(frozen=True, repr=False)
class Tuning(Summarized):
    """How the winner of one record was found.

    Attributes:
        record: the record's `record_id`.
        timings: every candidate, in the order in which they were tried.
        compile_us, measure_us: time spent, in microseconds.
        when_s: the time of day when it ended, in seconds since 1970.
    """

    record: str
    timings: tuple[Timing, ...]
    compile_us: int = 0
    measure_us: int = 0
    when_s: int = 0

    def to_wire(self) -> list[Any]:
        """Return the positional form."""
        timings = [timing.to_wire() for timing in self.timings]
        return [self.record, timings, self.compile_us, self.measure_us, self.when_s]

    @staticmethod
    def from_wire(data: Any, *, open_ended: bool = False) -> Tuning:
        """Decode what `to_wire` wrote; raises `FormatError` for anything else."""
        record, timings, *rest = wire.fields(
            data, "tuning", str, list, int, int, int, open_ended=open_ended
        )
        return Tuning(
            record, tuple(Timing.from_wire(item, open_ended=open_ended) for item in timings), *rest
        )


def record_id(kernel: str, parts: Parts) -> str:
    """Return `sha256:<hex>` of what a record is about: equal for all winners of one tuning key,
    wherever they were found.
    """
    return digest_text(sha256(wire.pack([kernel, [list(part) for part in parts]])))


def id_of(record: TuningRecord) -> str:
    """Return a record's `record_id`."""
    return record_id(record.kernel, record.parts)


def time_of(record: TuningRecord, tuning: Tuning | None) -> int | None:
    """Return the winner's measured time in nanoseconds, None where nobody measured it."""
    timings = tuning.timings if tuning is not None else ()
    return next(
        (
            t.time_ns
            for t in timings
            if dict(t.config) == dict(record.config) and t.time_ns is not None
        ),
        None,
    )


def merge_tunings(first: Iterable[Tuning], second: Iterable[Tuning]) -> tuple[Tuning, ...]:
    """Return the tunings of both, one a record: the one with more candidates, then the
    later one.
    """
    best: dict[str, Tuning] = {}
    for tuning in (*first, *second):
        known = best.get(tuning.record)
        best[tuning.record] = tuning if known is None else max(known, tuning, key=_rank)
    return tuple(best[name] for name in sorted(best))


def _rank(tuning: Tuning) -> tuple[int, int, bytes]:
    return len(tuning.timings), tuning.when_s, wire.pack(tuning.to_wire())


def losers(records: Iterable[TuningRecord], tunings: Iterable[Tuning]) -> frozenset[str]:
    """Return the keys of kernels that were compiled for a tuning and won none."""
    winners = {(id_of(record), frozenset(record.config)) for record in records}
    tried: set[str] = set()
    won: set[str] = set()
    for tuning in tunings:
        for timing in tuning.timings:
            tried.add(timing.key)
            if (tuning.record, frozenset(timing.config)) in winners:
                won.add(timing.key)
    return frozenset(tried - won - {""})


def to_file(record: TuningRecord, tuning: Tuning | None) -> bytes:
    """Return a record as the bytes of a file of its own: a digest, and the msgpack that it
    covers.
    """
    body = wire.pack([FILE_SCHEMA, record.to_wire(), None if tuning is None else tuning.to_wire()])
    return sha256(body) + body


def from_file(data: bytes) -> tuple[TuningRecord, Tuning | None]:
    """Decode what `to_file` wrote.

    Raises:
        FormatError: damaged, of another schema, or no such file.
    """
    if not DIGEST_BYTES < len(data) <= MAX_FILE_BYTES:
        raise FormatError(
            f"tuning record: {count(len(data), 'byte')}, expected {DIGEST_BYTES + 1} to"
            f" {MAX_FILE_BYTES}"
        )
    digest, body = data[:DIGEST_BYTES], data[DIGEST_BYTES:]
    if sha256(body) != digest:
        raise FormatError("tuning record: the bytes differ from their digest; tune again")
    schema, record, tuning = wire.fields(
        wire.unpack(body, "tuning record", DEFAULT_LIMITS),
        "tuning record file",
        int,
        list,
        (list, type(None)),
    )
    if schema != FILE_SCHEMA:
        raise FormatError(
            f"tuning record: schema {schema}, expected {FILE_SCHEMA}",
            got=schema,
            expected=FILE_SCHEMA,
        )
    found = TuningRecord.from_wire(record)
    measured = None if tuning is None else Tuning.from_wire(tuning)
    if measured is not None and measured.record != id_of(found):
        raise FormatError("tuning record: its timings are of another record")
    return found, measured

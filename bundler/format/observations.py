# SPDX-License-Identifier: Apache-2.0
"""`Observed`: what was seen while a bundle was recorded, which is no part of what the bundle is.

`Bundle` reads and writes it beside the content; recorders and builds make it, a restore asks it for
devices and layouts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Raw, Struct

from bundler.errors import FormatError
from bundler.format import wire
from bundler.format.entries import FrozenValue
from bundler.format.entry_rows import Count, schema_of
from bundler.format.limits import DEFAULT_LIMITS, Limits
from bundler.format.summary import Summarized

if TYPE_CHECKING:
    from bundler.format.candidate_timings import Tuning
    from bundler.format.entries import Kernel

SCHEMA = 1


class Observation(Struct, frozen=True, gc=False):
    """What was seen of one kernel.

    Attributes:
        devices: the device indices it was compiled for, where known.
        layouts: `triton` when it lay in a plain cache directory, `inductor` when in Inductor's, one
            a device.
        times_us: microseconds by compile stage; empty when only hits were seen.
    """

    devices: tuple[int, ...] = ()
    layouts: tuple[str, ...] = ()
    times_us: tuple[tuple[str, int], ...] = ()


# No struct: `inspect.signature` of one wants the names in its annotations, and a restore does not
# import `Tuning`.
@dataclass(init=False, repr=False, eq=False)
class Observed(Summarized, FrozenValue):
    """Facts about the recording that are no part of what the bundle is.

    Attributes:
        kernels: kernel key -> `Observation`.
        environments: for each recording host, (name, version) pairs: python, triton, torch, driver.
        tunings: how the winners among the tuning records were found, one a record, by record.
    """

    kernels: Mapping[str, Observation] = field(default_factory=dict)
    environments: tuple[tuple[tuple[str, str], ...], ...] = ()
    tunings: tuple[Tuning, ...] = ()

    def __init__(
        self,
        kernels: Mapping[str, Observation] | None = None,
        environments: tuple[tuple[tuple[str, str], ...], ...] = (),
        tunings: tuple[Tuning, ...] = (),
    ) -> None:
        kernels = {} if kernels is None else kernels
        self._set_fields(locals())

    @property
    def devices(self) -> tuple[int, ...]:
        """Every device index that any kernel was seen on, ascending."""
        return tuple(sorted({device for seen in self.kernels.values() for device in seen.devices}))

    @property
    def layouts(self) -> frozenset[str]:
        """Every layout that any kernel was seen in; no observation is made for it."""
        if isinstance(self.kernels, _UnmadeObservations):
            return self.kernels.layouts
        return frozenset().union(*{seen.layouts for seen in self.kernels.values()})

    def encode(self) -> bytes:
        """Return the positional msgpack form."""
        kernels = [
            [key, list(seen.devices), list(seen.layouts), [list(time) for time in seen.times_us]]
            for key, seen in sorted(self.kernels.items())
        ]
        environments = [[list(pair) for pair in pairs] for pairs in sorted(self.environments)]
        # A field of its own at the end, and only where there is something to say: other bundles
        # stay as they always were.
        tunings = [[tuning.to_wire() for tuning in sorted(self.tunings, key=lambda t: t.record)]]
        return wire.pack([SCHEMA, kernels, environments, *(tunings if self.tunings else [])])

    @staticmethod
    def decode(
        data: bytes, limits: Limits = DEFAULT_LIMITS, *, newer_minor: bool = False
    ) -> Observed:
        """Read what `encode` wrote; raises `FormatError` or `LimitExceeded`."""
        limits.check("observed_bytes", len(data), "observations")
        schema = schema_of(data, "observed", limits)
        if schema != SCHEMA:
            raise FormatError(
                f"observed: schema {schema}, expected {SCHEMA}", got=schema, expected=SCHEMA
            )
        # Who found out the schema has gone through all of it.
        row = wire.decode(data, _DECODER, "observed", limits, walked=True)
        if not newer_minor:
            wire.check_canonical(data, row if bytes(row.tunings) else row.known(), "observed")
        _check_lengths(row, limits)
        seen = _UnmadeObservations(data, row.kernels)
        hosts = tuple([tuple(map(msgspec.structs.astuple, pairs)) for pairs in row.environments])
        wire.check_texts(
            {
                *_texts(row.kernels),
                *seen.layouts,
                *(text for pairs in hosts for pair in pairs for text in pair),
            },
            "observed",
            limits,
        )
        return Observed(seen, hosts, _tunings(row.tunings, limits, newer_minor=newer_minor))


def merge_observed(first: Observed, second: Observed) -> Observed:
    """Union of what two recordings saw: all devices, the longer list of times, every host once."""
    seen = dict(first.kernels)
    for key, other in second.kernels.items():
        mine = seen.get(key, Observation())
        seen[key] = Observation(
            tuple(sorted({*mine.devices, *other.devices})),
            tuple(sorted({*mine.layouts, *other.layouts})),
            max(mine.times_us, other.times_us, key=lambda times: (len(times), times)),
        )
    hosts = tuple(sorted({*first.environments, *second.environments}))
    from bundler.format.candidate_timings import merge_tunings

    return Observed(seen, hosts, merge_tunings(first.tunings, second.tunings))


class TimeRow(Struct, array_like=True, frozen=True, gc=False):
    """How long a stage of a compile took, in microseconds."""

    stage: str
    time_us: Count


class VersionRow(Struct, array_like=True, frozen=True, gc=False):
    """What of which version a recording host had."""

    name: str
    version: str


class ObservationRow(Struct, array_like=True, frozen=True, gc=False):
    """What was seen of the kernel with this key."""

    key: str
    devices: tuple[int, ...]
    layouts: tuple[str, ...]
    times: tuple[TimeRow, ...]


class ObservedRow(Struct, array_like=True, frozen=True, gc=False):
    """All observations; the tunings are there only when there are some, and stay encoded."""

    schema: Count
    kernels: tuple[ObservationRow, ...]
    environments: tuple[tuple[VersionRow, ...], ...]
    tunings: Raw = msgspec.field(default_factory=Raw)

    def known(self) -> list[Any]:
        """Return the fields of observations without tunings."""
        return [self.schema, self.kernels, self.environments]


_DECODER = msgspec.msgpack.Decoder(ObservedRow)


class _UnmadeObservations(Mapping[str, Observation]):
    """Observations by key that were checked; they are made when somebody reads one: who launches or
    restores reads none.

    Args:
        data: encoded.
        rows: decoded from these bytes; they are not kept, since they take ten times as much memory.

    Attributes:
        layouts: those that occur.

    Raises:
        FormatError: two rows have one key.
    """

    def __init__(self, data: bytes, rows: Sequence[ObservationRow]) -> None:
        if len({row.key for row in rows}) < len(rows):
            # The first whose key was there before; each is taken away when it is met.
            keys = dict.fromkeys([row.key for row in rows], True)
            twice = next(row.key for row in rows if not keys.pop(row.key, False))
            raise FormatError(f"observed: kernel key {twice!r} occurs twice", name=twice)
        # Two threads may make the observations twice, which costs time.
        self._data = data
        self.layouts = frozenset[str]().union(*{row.layouts for row in rows})
        self._made: dict[str, Observation] | None = None

    def __getitem__(self, key: str) -> Observation:
        return self._all()[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._all())

    def __len__(self) -> int:
        return len(self._all())

    def __repr__(self) -> str:
        return repr(self._all())

    def _all(self) -> dict[str, Observation]:
        made = self._made
        if made is None:
            made = self._made = _observations(_DECODER.decode(self._data).kernels)
        return made


def _observations(rows: Sequence[ObservationRow]) -> dict[str, Observation]:
    """Return the observations by key; equal texts and tuples are one object."""
    texts: dict[str, str] = {}
    keys, all_devices, all_layouts = (
        [row.key for row in rows],
        [row.devices for row in rows],
        [row.layouts for row in rows],
    )
    shared: dict[Any, Any] = {group: group for group in chain(all_devices, all_layouts)}
    times = [
        tuple([(texts.setdefault(time.stage, time.stage), time.time_us) for time in row.times])
        if row.times
        else ()
        for row in rows
    ]
    devices, layouts = map(shared.__getitem__, all_devices), map(shared.__getitem__, all_layouts)
    return dict(zip(keys, map(Observation, devices, layouts, times), strict=True))


def _texts(rows: Sequence[ObservationRow]) -> set[str]:
    """Return the texts that occur in observations, beside layouts."""
    return {time.stage for row in rows for time in row.times}.union([row.key for row in rows])


def _check_lengths(row: ObservedRow, limits: Limits) -> None:
    for name, members in (("observations", row.kernels), ("environments", row.environments)):
        limits.check("array_items", len(members), name)


def _tunings(packed: Raw, limits: Limits, *, newer_minor: bool) -> tuple[Tuning, ...]:
    if not bytes(packed):
        return ()
    # Wrapped, so that anything can stand there.
    (rows,) = wire.unpack(b"\x91" + bytes(packed), "tunings", limits)
    # In a newer minor version the field may have become something else, which is ignored like all
    # that is unknown.
    if type(rows) is not list and newer_minor:
        return ()
    from bundler.format.candidate_timings import Tuning

    tunings = tuple(
        Tuning.from_wire(item, open_ended=newer_minor)
        for item in wire.expect(rows, list, "tunings")
    )
    if len({tuning.record for tuning in tunings}) != len(tunings):
        raise FormatError("observed: two tunings of one record")
    return tunings


def observed_of(observed: Observed, kernels: Iterable[Kernel]) -> Observed:
    """Return the observations of these kernels alone."""
    keys = {kernel.key for kernel in kernels}
    return replace(
        observed, kernels={key: seen for key, seen in observed.kernels.items() if key in keys}
    )

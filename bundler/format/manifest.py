# SPDX-License-Identifier: Apache-2.0
"""`Content` and `Observed`, the two parts of a manifest: everything that decides what a bundle is,
in canonical order, whose digest is the bundle's; and what was seen while it was recorded, which the
digest does not cover.

`content_tables` reads content and `table_encoder` writes it.  Recorders and builds make
observations, a restore asks them for devices and layouts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Raw, Struct

from bundler.errors import FormatError, UnsupportedVersion
from bundler.format import content_tables, names, wire
from bundler.format.cached_properties import cached_property
from bundler.format.content_tables import SCHEMA
from bundler.format.digest import digest_text, sha256
from bundler.format.entries import (
    Entry,
    FrozenValue,
    HelperLibrary,
    Kernel,
    Opaque,
    TuningFile,
    check_kernel,
    entry_files,
    replace,
    set_fields,
)
from bundler.format.lazy_kernel import BlobTable, LazyKernel, TableKernels
from bundler.format.limits import DEFAULT_LIMITS, Limits
from bundler.format.summary import Summarized
from bundler.format.wire import Count, schema_of, version_fix

if TYPE_CHECKING:
    from bundler.format.candidate_timings import Tuning
    from bundler.format.launch_spec import TuningRecord

__all__ = ["SCHEMA", "Content", "Observation", "Observed", "content_digest", "merge_observed"]

_OBSERVED_SCHEMA = 1


class Content(Summarized, FrozenValue):
    """Everything that decides what a bundle is, in canonical order.

    Build it with `Content.of`, which sorts and checks; two contents with the same entries encode to
    the same bytes.
    """

    kernels: tuple[Kernel, ...]
    tuning_files: tuple[TuningFile, ...]
    helpers: tuple[HelperLibrary, ...]
    opaque: tuple[Opaque, ...]
    tuning_records: tuple[TuningRecord, ...]

    def __init__(
        self,
        kernels: tuple[Kernel, ...] = (),
        tuning_files: tuple[TuningFile, ...] = (),
        helpers: tuple[HelperLibrary, ...] = (),
        opaque: tuple[Opaque, ...] = (),
        tuning_records: tuple[TuningRecord, ...] = (),
    ) -> None:
        set_fields(self, locals())

    def __getattr__(self, name: str) -> Any:
        # Asked for what is not there: the kernels of a decoded manifest are made when somebody
        # reads them.  Two threads may make them twice, which costs time; all get those that were
        # noted first.
        fields = vars(self)
        if name != "kernels" or "_rows" not in fields:
            raise AttributeError(name)
        return fields.setdefault("kernels", fields["_rows"].make())

    @staticmethod
    def of(entries: Iterable[Entry], tuning_records: Iterable[TuningRecord] = ()) -> Content:
        """Sort entries, and each kernel's files, into canonical order; raises `FormatError` as
        `check_unique`.
        """
        kinds: dict[type, list[Any]] = {Kernel: [], TuningFile: [], HelperLibrary: [], Opaque: []}
        for entry in entries:
            if isinstance(entry, Kernel):
                kinds[Kernel].append(_in_order(entry))
            else:
                kinds[type(entry)].append(entry)
        records = sorted(tuning_records, key=lambda r: wire.pack(r.to_wire()))
        content = Content(
            tuple(sorted(kinds[Kernel], key=_kernel_order)),
            tuple(sorted(kinds[TuningFile], key=lambda e: e.path)),
            tuple(sorted(kinds[HelperLibrary], key=lambda e: e.path)),
            tuple(sorted(kinds[Opaque], key=lambda e: e.path)),
            tuple(records),
        )
        content.check_unique()
        return content

    def check_unique(self) -> None:
        """Raise `FormatError` when a kernel key or a path occurs twice, or one entry's path lies in
        another's.
        """
        keys = self.kernel_keys
        _refuse_repeats("kernel key", keys)
        placed: list[TuningFile | HelperLibrary | Opaque] = [
            *self.tuning_files,
            *self.helpers,
            *self.opaque,
        ]
        paths = [entry.path for entry in placed]
        # A kernel's own files differ (`check_kernel`): only those beside another entry's path can
        # clash.
        shared = {path.partition("/")[0] for path in paths}
        if not shared.isdisjoint(keys):
            paths += [
                f"{k.key}/{name}" for k in self.kernels if k.key in shared for name, *_ in k.files()
            ]
        _refuse_repeats("path", paths)
        path = names.path_with_members(paths)
        if path is not None:
            raise FormatError(f"path {path!r} is a file and a directory at once", name=path)

    @property
    def kernel_keys(self) -> Sequence[str]:
        """The key of each kernel; no kernel is made for it."""
        rows: TableKernels | None = vars(self).get("_rows")
        return [kernel.key for kernel in self.kernels] if rows is None else rows.keys

    @property
    def entries(self) -> Iterator[Entry]:
        """Every entry: kernels, tuning files, helper libraries, opaque files."""
        return chain(self.kernels, self.tuning_files, self.helpers, self.opaque)

    @cached_property
    def blobs(self) -> BlobTable:
        """Raw digest and size (bytes) of every distinct blob, by digest."""
        sizes: dict[bytes, int] = {}
        for filename, raw, size, _ in chain.from_iterable(map(entry_files, self.entries)):
            if sizes.setdefault(raw, size) != size:
                raise FormatError(f"{filename}: two sizes for one digest {digest_text(raw)}")
        digests = sorted(sizes)
        return BlobTable(b"".join(digests), [sizes[digest] for digest in digests])

    def encode(self) -> bytes:
        """Return the canonical bytes, whose sha256 is the bundle's digest."""
        # Imported here: a restore writes no manifest.
        from bundler.format.table_encoder import encode_tables

        return encode_tables(
            self.kernels,
            self.tuning_files,
            self.helpers,
            self.opaque,
            self.tuning_records,
            self.blobs,
        )

    @staticmethod
    def decode(
        data: bytes, limits: Limits = DEFAULT_LIMITS, *, newer_minor: bool = False
    ) -> Content:
        """Read canonical bytes.

        Raises:
            UnsupportedVersion: they are of another schema.
            FormatError, LimitExceeded, UnsafeName: they are unsound.
        """
        limits.check("manifest_bytes", len(data), "manifest")
        schema = schema_of(data, "content", limits)
        if schema != SCHEMA:
            raise UnsupportedVersion(
                f"content: schema {schema}, expected {SCHEMA}; {version_fix(schema, SCHEMA)}",
                got=schema,
                expected=SCHEMA,
            )
        (rows, *others), blobs = content_tables.decode_tables(data, limits, open_ended=newer_minor)
        content = Content((), *others)
        fields = vars(content)
        del fields["kernels"]
        # Of the blobs what the property would find out again, from every file.
        fields.update(_rows=rows, blobs=blobs)
        content.check_unique()
        return content


def content_digest(content_bytes: bytes) -> str:
    """Return the bundle's digest: the sha256 of the encoded content."""
    return digest_text(sha256(content_bytes))


def _kernel_order(kernel: Kernel) -> tuple[str, str, str]:
    # Similar kernels side by side compress best; the key makes the order total.
    return (str(kernel.target), kernel.name, kernel.key)


def _in_order(kernel: Kernel) -> Kernel:
    # The files of a lazy kernel were checked when it was read.
    checked = kernel if isinstance(kernel, LazyKernel) else check_kernel(kernel)
    if checked.layout.is_canonical:
        return checked
    return checked.with_artifacts(
        sorted(checked.artifacts, key=lambda artifact: names.artifact_order(artifact.filename))
    )


def _refuse_repeats(what: str, values: Iterable[str]) -> None:
    listed = list(values)
    if len(set(listed)) == len(listed):
        return
    seen: set[str] = set()
    for value in listed:
        if value in seen:
            raise FormatError(f"{what} {value!r} occurs twice", name=value)
        seen.add(value)


# ----------------------------------------------------------------------------------- Observations


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
class Observed(Summarized, FrozenValue):
    """Facts about the recording that are no part of what the bundle is.

    Attributes:
        kernels: kernel key -> `Observation`.
        environments: for each recording host, (name, version) pairs: python, triton, torch, driver.
        tunings: how the winners among the tuning records were found, one a record, by record.
    """

    kernels: Mapping[str, Observation]
    environments: tuple[tuple[tuple[str, str], ...], ...]
    tunings: tuple[Tuning, ...]

    def __init__(
        self,
        kernels: Mapping[str, Observation] | None = None,
        environments: tuple[tuple[tuple[str, str], ...], ...] = (),
        tunings: tuple[Tuning, ...] = (),
    ) -> None:
        kernels = {} if kernels is None else kernels
        set_fields(self, locals())

    def __getattr__(self, name: str) -> Any:
        # Asked for what is not there: observations that were read are made when somebody reads
        # one, and who launches or restores reads none.  Two threads may make them twice.
        fields = vars(self)
        if name != "kernels" or "_packed" not in fields:
            raise AttributeError(name)
        made = _observations(_OBSERVED.decode(fields["_packed"]).kernels)
        return fields.setdefault("kernels", made)

    @property
    def devices(self) -> tuple[int, ...]:
        """Every device index that any kernel was seen on, ascending."""
        return tuple(sorted({device for seen in self.kernels.values() for device in seen.devices}))

    @property
    def layouts(self) -> frozenset[str]:
        """Every layout that any kernel was seen in; no observation is made for it."""
        known: frozenset[str] | None = vars(self).get("_layouts")
        if known is not None:
            return known
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
        return wire.pack(
            [_OBSERVED_SCHEMA, kernels, environments, *(tunings if self.tunings else [])]
        )

    @staticmethod
    def decode(
        data: bytes, limits: Limits = DEFAULT_LIMITS, *, newer_minor: bool = False
    ) -> Observed:
        """Read what `encode` wrote; raises `FormatError` or `LimitExceeded`."""
        limits.check("observed_bytes", len(data), "observations")
        schema = schema_of(data, "observed", limits)
        if schema != _OBSERVED_SCHEMA:
            raise FormatError(
                f"observed: schema {schema}, expected {_OBSERVED_SCHEMA}",
                got=schema,
                expected=_OBSERVED_SCHEMA,
            )
        # Who found out the schema has gone through all of it.
        row = wire.decode(data, _OBSERVED, "observed", limits, walked=True)
        if not newer_minor:
            wire.check_canonical(
                data,
                row if bytes(row.tunings) else [row.schema, row.kernels, row.environments],
                "observed",
            )
        limits.check("array_items", len(row.kernels), "observations")
        limits.check("array_items", len(row.environments), "environments")
        _refuse_repeats("observed: kernel key", [seen.key for seen in row.kernels])
        layouts = frozenset[str]().union(*{seen.layouts for seen in row.kernels})
        hosts = tuple([tuple(map(msgspec.structs.astuple, pairs)) for pairs in row.environments])
        wire.check_texts(
            {
                *_texts(row.kernels),
                *layouts,
                *(text for pairs in hosts for pair in pairs for text in pair),
            },
            "observed",
            limits,
        )
        observed = Observed({}, hosts, _tunings(row.tunings, limits, newer_minor=newer_minor))
        fields = vars(observed)
        del fields["kernels"]
        # The rows are not kept, since they take ten times as much memory.
        fields.update(_packed=data, _layouts=layouts)
        return observed


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


_OBSERVED = msgspec.msgpack.Decoder(ObservedRow)


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

# SPDX-License-Identifier: Apache-2.0
"""The list that makes a bundle: `content`, which its digest covers, and `observed`, which it does not."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain, pairwise
from typing import Any, TypeVar

from bundler.errors import FormatError
from bundler.format import names, wire
from bundler.format.candidate_timings import Tuning, merge_tunings
from bundler.format.digest import DIGEST_BYTES, digest_raw, digest_text, sha256
from bundler.format.entries import (
    Artifact,
    Entry,
    HelperLibrary,
    Kernel,
    Opaque,
    Target,
    Toolchain,
    TuningFile,
    check_kernel,
    entry_artifacts,
)
from bundler.format.launch_spec import LaunchSpec, TuningRecord
from bundler.format.limits import DEFAULT_LIMITS, Limits
from bundler.format.sentinel import Span
from bundler.format.summary import Summarized, count

SCHEMA = 1
# Without the tunings, which are there only when there are some.
_OBSERVED_FIELDS = 3
_BLOB_TYPES, _FILE_TYPES = [bytes, int], [str, int, list]
T = TypeVar("T")


@dataclass(frozen=True, repr=False)
class Content(Summarized):
    """Everything that decides what a bundle is, in canonical order.

    Build it with `Content.of`, which sorts and checks; two contents with the same entries encode to the same bytes.
    """

    kernels: tuple[Kernel, ...] = ()
    tuning_files: tuple[TuningFile, ...] = ()
    helpers: tuple[HelperLibrary, ...] = ()
    opaque: tuple[Opaque, ...] = ()
    tuning_records: tuple[TuningRecord, ...] = ()

    @staticmethod
    def of(entries: Iterable[Entry], tuning_records: Iterable[TuningRecord] = ()) -> Content:
        """Sort entries, and each kernel's files, into canonical order; raises `FormatError` as `check_unique`."""
        kinds: dict[type, list[Any]] = {Kernel: [], TuningFile: [], HelperLibrary: [], Opaque: []}
        for entry in entries:
            kinds[type(entry)].append(_in_order(check_kernel(entry)) if isinstance(entry, Kernel) else entry)
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
        """Raise `FormatError` when a kernel key or a path occurs twice, or one entry's path lies in another's."""
        _refuse_repeats("kernel key", (kernel.key for kernel in self.kernels))
        placed: list[TuningFile | HelperLibrary | Opaque] = [*self.tuning_files, *self.helpers, *self.opaque]
        paths = [entry.path for entry in placed]
        # A kernel's own files differ (`check_kernel`): only those beside another entry's path can clash.
        shared = {path.partition("/")[0] for path in paths}
        paths += [f"{k.key}/{artifact.filename}" for k in self.kernels if k.key in shared for artifact in k.artifacts]
        _refuse_repeats("path", paths)
        folders = {path[:end] for path in paths for end, character in enumerate(path) if character == "/"}
        for path in paths:
            if path in folders:
                raise FormatError(f"path {path!r} is a file and a directory at once", name=path)

    @property
    def entries(self) -> Iterator[Entry]:
        """Every entry: kernels, tuning files, helper libraries, opaque files."""
        return chain(self.kernels, self.tuning_files, self.helpers, self.opaque)

    @cached_property
    def blobs(self) -> tuple[tuple[bytes, int], ...]:
        """Raw digest and size (bytes) of every distinct blob, by digest."""
        sizes: dict[bytes, int] = {}
        for artifact in chain.from_iterable(map(entry_artifacts, self.entries)):
            raw = digest_raw(artifact.digest)
            if sizes.setdefault(raw, artifact.size) != artifact.size:
                raise FormatError(f"{artifact.filename}: two sizes for one digest {artifact.digest}")
        return tuple(sorted(sizes.items()))

    def encode(self) -> bytes:
        """Return the canonical bytes, whose sha256 is the bundle's digest."""
        index = {raw: position for position, (raw, _) in enumerate(self.blobs)}

        def file(artifact: Artifact) -> list[Any]:
            flat = [number for span in artifact.spans for number in (span.offset, span.place, span.style)]
            return [artifact.filename, index[digest_raw(artifact.digest)], flat]

        return wire.pack(
            [
                SCHEMA,
                [list(blob) for blob in self.blobs],
                [
                    [k.key, k.name, [k.target.backend, k.target.arch, k.target.warp_size], list(map(file, k.artifacts)),
                     k.spec.to_wire(), k.facts_bytes, k.parts_bytes,
                     [k.toolchain.release, k.toolchain.binary, k.toolchain.ptxas]]
                    for k in self.kernels
                ],
                [[e.path, file(e.artifact)] for e in self.tuning_files],
                [[e.path, file(e.artifact), e.machine] for e in self.helpers],
                [[e.path, file(e.artifact)] for e in self.opaque],
                [record.to_wire() for record in self.tuning_records],
            ]
        )  # fmt: skip

    @staticmethod
    def decode(data: bytes, limits: Limits = DEFAULT_LIMITS, *, newer_minor: bool = False) -> Content:
        """Read canonical bytes; raises `FormatError`, `LimitExceeded` or `UnsafeName` for anything unsound."""
        limits.check("manifest_bytes", len(data), "manifest")
        return _Decoder(limits, newer_minor).content(wire.unpack(data, "content", limits))


class _Decoder:
    def __init__(self, limits: Limits, open_ended: bool) -> None:
        self.limits = limits
        self.open_ended = open_ended
        self.blobs: list[tuple[str, int]] = []
        self.used: set[int] = set()
        self.file_bytes = 0

    def fields(self, data: Any, what: str, *kinds: Any) -> list[Any]:
        return wire.fields(data, what, *kinds, open_ended=self.open_ended)

    def content(self, data: list[Any]) -> Content:
        schema, blobs, kernels, tuning, helpers, opaque, records = self.fields(
            data, "content", int, list, list, list, list, list, list
        )
        if schema != SCHEMA:
            raise FormatError(f"content: schema {schema}, expected {SCHEMA}", got=schema, expected=SCHEMA)
        self.limits.check("kernels", len(kernels), "bundle")
        table = tuple(map(self.blob, blobs))
        self.blobs = [(digest_text(raw), size) for raw, size in table]
        self.limits.check("raw_bytes", sum(size for _, size in self.blobs), "bundle")
        content = Content(
            tuple(map(self.kernel, kernels)),
            tuple(TuningFile(*self.placed(item, "tuning file")) for item in tuning),
            tuple(HelperLibrary(*self.placed(item, "helper library", str)) for item in helpers),
            tuple(Opaque(*self.placed(item, "opaque file")) for item in opaque),
            tuple(TuningRecord.from_wire(item, open_ended=self.open_ended) for item in records),
        )
        # As restored: a blob that a thousand files share is written a thousand times.
        self.limits.check("raw_bytes", self.file_bytes, "bundle, all files")
        content.check_unique()
        if len(self.used) == len(table) and all(one < two for (one, _), (two, _) in pairwise(table)):
            vars(content)["blobs"] = table  # what the property would find out again, from every file
        if content.blobs != table:
            raise FormatError("content: the blob table is not the sorted list of the blobs in use")
        return content

    def blob(self, data: Any) -> tuple[bytes, int]:
        # A manifest is mostly blobs and files: `fields` is asked only where something is odd.
        plain = type(data) is list and [*map(type, data)] == _BLOB_TYPES and data[1] >= 0
        raw, size = data if plain else self.fields(data, "blob", *_BLOB_TYPES)
        if len(raw) != DIGEST_BYTES:
            raise FormatError(f"blob: a digest of {count(len(raw), 'byte')}, expected {DIGEST_BYTES}")
        self.limits.check("file_bytes", size, "file")
        return raw, size

    def file(self, data: Any) -> Artifact:
        plain = type(data) is list and [*map(type, data)] == _FILE_TYPES and data[1] >= 0
        filename, index, flat = data if plain else self.fields(data, "file", *_FILE_TYPES)
        if index >= len(self.blobs) or len(flat) % 3:
            raise FormatError(f"file {filename!r}: blob {index} of {len(self.blobs)}, {len(flat)} span numbers")
        self.used.add(index)
        digest, size = self.blobs[index]
        self.file_bytes += size
        return Artifact(names.check_file_name(filename), digest, size, self.spans(flat) if flat else ())

    def spans(self, flat: list[Any]) -> tuple[Span, ...]:
        numbers = [wire.expect(number, int, "span") for number in flat]
        return tuple(Span(*numbers[i : i + 3]) for i in range(0, len(numbers), 3))

    def placed(self, data: Any, what: str, *more: Any) -> list[Any]:
        path, file, *rest = self.fields(data, what, str, list, *more)
        artifact = self.file(file)
        if names.check_relative_path(path).rpartition("/")[2] != artifact.filename:
            raise FormatError(f"{what}: path {path!r} and file name {artifact.filename!r} differ")
        return [path, artifact, *rest]

    def kernel(self, data: Any) -> Kernel:
        maybe_bytes, maybe_text = (bytes, type(None)), (str, type(None))
        key, name, target, files, spec, facts, parts, toolchain = self.fields(
            data, "kernel", str, str, list, list, list, maybe_bytes, maybe_bytes, list
        )
        self.limits.check("files_per_kernel", len(files), f"kernel {key}")
        kernel = Kernel(
            key,
            name,
            Target(*self.fields(target, "target", str, str, int)),
            tuple(map(self.file, files)),
            Toolchain(*self.fields(toolchain, "toolchain", maybe_text, maybe_text, maybe_text)),
            LaunchSpec.from_wire(spec, None, open_ended=self.open_ended),
            facts,
            parts,
        )
        self.limits.check("kernel_bytes", kernel.size, f"kernel {key}")
        return check_kernel(kernel)


@dataclass(frozen=True)
class Observation:
    """What was seen of one kernel.

    Attributes:
        devices: the device indices it was compiled for, where known.
        layouts: `triton` when it lay in a plain cache directory, `inductor` when in Inductor's, one a device.
        times_us: microseconds by compile stage; empty when only hits were seen.
    """

    devices: tuple[int, ...] = ()
    layouts: tuple[str, ...] = ()
    times_us: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, repr=False)
class Observed(Summarized):
    """Facts about the recording that are no part of what the bundle is.

    Attributes:
        kernels: kernel key -> `Observation`.
        environments: for each recording host, (name, version) pairs: python, triton, torch, driver.
        tunings: how the winners among the tuning records were found, one a record, by record.
    """

    kernels: Mapping[str, Observation] = field(default_factory=dict)
    environments: tuple[tuple[tuple[str, str], ...], ...] = ()
    tunings: tuple[Tuning, ...] = ()

    @property
    def devices(self) -> tuple[int, ...]:
        """Every device index that any kernel was seen on, ascending."""
        return tuple(sorted({device for seen in self.kernels.values() for device in seen.devices}))

    def encode(self) -> bytes:
        """Return the positional msgpack form."""
        kernels = [
            [key, list(seen.devices), list(seen.layouts), [list(time) for time in seen.times_us]]
            for key, seen in sorted(self.kernels.items())
        ]
        environments = [[list(pair) for pair in pairs] for pairs in sorted(self.environments)]
        # A field of its own at the end, and only where there is something to say: other bundles stay as they always were.
        tunings = [[tuning.to_wire() for tuning in sorted(self.tunings, key=lambda t: t.record)]]
        return wire.pack([SCHEMA, kernels, environments, *(tunings if self.tunings else [])])

    @staticmethod
    def decode(data: bytes, limits: Limits = DEFAULT_LIMITS, *, newer_minor: bool = False) -> Observed:
        """Read what `encode` wrote; raises `FormatError` or `LimitExceeded`."""
        limits.check("manifest_bytes", len(data), "observations")
        decoder = _Decoder(limits, newer_minor)
        array = wire.unpack(data, "observed", limits)
        more = array[_OBSERVED_FIELDS:]
        # In a newer minor version the field may have become something else, which is ignored like all that is unknown.
        tuned = (list,) if more and (type(more[0]) is list or not newer_minor) else ()
        schema, kernels, environments, *rest = decoder.fields(array, "observed", int, list, list, *tuned)
        if schema != SCHEMA:
            raise FormatError(f"observed: schema {schema}, expected {SCHEMA}", got=schema, expected=SCHEMA)
        seen: dict[str, Observation] = {}
        for item in kernels:
            key, devices, layouts, times = decoder.fields(item, "observation", str, list, list, list)
            if key in seen:
                raise FormatError(f"observed: kernel key {key!r} occurs twice", name=key)
            pairs = tuple(tuple(decoder.fields(time, "time", str, int)) for time in times)
            seen[key] = Observation(
                tuple(wire.expect(device, int, "device") for device in devices),
                tuple(wire.expect(layout, str, "layout") for layout in layouts),
                pairs,
            )
        hosts = tuple(
            tuple(tuple(decoder.fields(p, "environment", str, str)) for p in wire.expect(pairs, list, "environment"))
            for pairs in environments
        )
        tunings = tuple(Tuning.from_wire(item, open_ended=newer_minor) for item in (rest[0] if rest else ()))
        if len({tuning.record for tuning in tunings}) != len(tunings):
            raise FormatError("observed: two tunings of one record")
        return Observed(seen, hosts, tunings)


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
    return Observed(seen, hosts, merge_tunings(first.tunings, second.tunings))


def content_digest(content_bytes: bytes) -> str:
    """Return the bundle's digest: the sha256 of the encoded content."""
    return digest_text(sha256(content_bytes))


def _kernel_order(kernel: Kernel) -> tuple[str, str, str]:
    # Similar kernels side by side compress best; the key makes the order total.
    return (str(kernel.target), kernel.name, kernel.key)


def _in_order(kernel: Kernel) -> Kernel:
    artifacts = tuple(sorted(kernel.artifacts, key=lambda artifact: names.artifact_order(artifact.filename)))
    return kernel if artifacts == kernel.artifacts else replace(kernel, artifacts=artifacts)


def _refuse_repeats(what: str, values: Iterable[str]) -> None:
    seen: set[str] = set()
    for value in values:
        if value in seen:
            raise FormatError(f"{what} {value!r} occurs twice", name=value)
        seen.add(value)

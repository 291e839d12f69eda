# SPDX-License-Identifier: Apache-2.0
"""`Content`: everything that decides what a bundle is, in canonical order; its digest is the
bundle's.

`content_tables` reads it and `table_encoder` writes it; what was seen of it, which the digest does
not cover, is in `observations`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

from bundler.errors import FormatError, UnsupportedVersion
from bundler.format import content_tables, names, wire
from bundler.format.blob_table import BlobTable
from bundler.format.cached_properties import cached_property
from bundler.format.content_tables import TableKernels
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
)
from bundler.format.entry_rows import Entries, schema_of, version_fix
from bundler.format.lazy_kernel import LazyKernel
from bundler.format.limits import DEFAULT_LIMITS, Limits
from bundler.format.observations import Observation, Observed, merge_observed
from bundler.format.summary import Summarized

if TYPE_CHECKING:
    from bundler.format.launch_spec import TuningRecord

__all__ = ["SCHEMA", "Content", "Observation", "Observed", "content_digest", "merge_observed"]

SCHEMA = content_tables.SCHEMA


class _Kernels:
    """The field `Content.kernels`: those of a decoded manifest are made when somebody reads it."""

    def __get__(self, content: Content | None, owner: type) -> tuple[Kernel, ...]:
        if content is None:
            return ()  # what the field is where it is not given
        fields = vars(content)
        found = fields["kernels"]
        if isinstance(found, TableKernels):
            # Two threads may make them twice, which costs time; all get those that were noted
            # first.
            found = fields.setdefault("_made", found.make())
            fields["kernels"] = found
        kernels: tuple[Kernel, ...] = found
        return kernels

    def __set__(self, content: Content, kernels: tuple[Kernel, ...] | TableKernels) -> None:
        vars(content)["kernels"] = kernels


def _kernels() -> Any:
    # What a type checker sees is the type of the field, which the descriptor stands for.
    return _Kernels()


@dataclass(init=False, repr=False, eq=False)
class Content(Summarized, FrozenValue):
    """Everything that decides what a bundle is, in canonical order.

    Build it with `Content.of`, which sorts and checks; two contents with the same entries encode to
    the same bytes.
    """

    kernels: tuple[Kernel, ...] = _kernels()
    tuning_files: tuple[TuningFile, ...] = ()
    helpers: tuple[HelperLibrary, ...] = ()
    opaque: tuple[Opaque, ...] = ()
    tuning_records: tuple[TuningRecord, ...] = ()

    def __init__(
        self,
        kernels: tuple[Kernel, ...] = (),
        tuning_files: tuple[TuningFile, ...] = (),
        helpers: tuple[HelperLibrary, ...] = (),
        opaque: tuple[Opaque, ...] = (),
        tuning_records: tuple[TuningRecord, ...] = (),
    ) -> None:
        self._set_fields(locals())

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
        folders = {
            path[:end] for path in paths for end, character in enumerate(path) if character == "/"
        }
        for path in paths:
            if path in folders:
                raise FormatError(f"path {path!r} is a file and a directory at once", name=path)

    @property
    def kernel_keys(self) -> Sequence[str]:
        """The key of each kernel; no kernel is made for it."""
        kernels = vars(self)["kernels"]
        return (
            kernels.keys
            if isinstance(kernels, TableKernels)
            else [kernel.key for kernel in kernels]
        )

    @property
    def entries(self) -> Iterator[Entry]:
        """Every entry: kernels, tuning files, helper libraries, opaque files."""
        return chain(self.kernels, self.tuning_files, self.helpers, self.opaque)

    @cached_property
    def blobs(self) -> Sequence[tuple[bytes, int]]:
        """Raw digest and size (bytes) of every distinct blob, by digest."""
        sizes: dict[bytes, int] = {}
        for filename, raw, size, _ in chain.from_iterable(map(entry_files, self.entries)):
            if sizes.setdefault(raw, size) != size:
                raise FormatError(f"{filename}: two sizes for one digest {digest_text(raw)}")
        return tuple(sorted(sizes.items()))

    @property
    def blob_sizes(self) -> Sequence[int]:
        """Size (bytes) of every distinct blob, in the order of `blobs`."""
        table = self.blobs
        return table.sizes if isinstance(table, BlobTable) else [size for _, size in table]

    def digests_of(self, numbers: Sequence[int]) -> list[bytes]:
        """Return the raw digests of the blobs with these numbers."""
        table = self.blobs
        return (
            table.digests_of(numbers)
            if isinstance(table, BlobTable)
            else [table[n][0] for n in numbers]
        )

    def sizes_of(self, numbers: Sequence[int]) -> list[int]:
        """Return the sizes (bytes) of the blobs with these numbers."""
        table = self.blobs
        return (
            table.sizes_of(numbers)
            if isinstance(table, BlobTable)
            else [table[n][1] for n in numbers]
        )

    def blob_number(self, digest: bytes) -> int | None:
        """Return the number of a blob by raw digest, None when there is no such blob."""
        table = self.blobs
        raw = table.digest if isinstance(table, BlobTable) else lambda number: table[number][0]
        number = bisect_left(range(len(table)), digest, key=raw)
        return number if number < len(table) and raw(number) == digest else None

    def encode(self) -> bytes:
        """Return the canonical bytes, whose sha256 is the bundle's digest."""
        entries = Entries(
            self.kernels,
            self.tuning_files,
            self.helpers,
            self.opaque,
            self.tuning_records,
            self.blobs,
        )
        # Imported here: a restore writes no manifest.
        from bundler.format.table_encoder import encode_tables

        return encode_tables(entries)

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
        entries = content_tables.decode_tables(data, limits, open_ended=newer_minor)
        kernels: Any = entries.kernels
        content = Content(
            kernels,
            entries.tuning_files,
            entries.helpers,
            entries.opaque,
            entries.tuning_records,
        )
        content.check_unique()
        # What the property would find out again, from every file.
        vars(content)["blobs"] = entries.blobs
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

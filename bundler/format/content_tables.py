# SPDX-License-Identifier: Apache-2.0
"""Reads content as it lies in a manifest, schema 2: what kernels have in common stands in tables,
once.

`TableReader` checks the tables and the kernels in them, which `lazy_kernel` has then.

`Content` calls `decode_tables`, `table_encoder` writes what it reads, and docs/format.md describes
the records.  A kernel's name, target, toolchain, launch spec, file names, and pieces of launch
facts and key parts are numbers into tables, which hold what a kernel refers to and nothing else, in
the order in which the kernels refer to it.  Every record is an array; a field that a newer minor
version added at its end is skipped, and `wire.check_canonical` refuses it where the version is
known.
"""

# Annotations are real ones in this module: msgspec reads those of a struct that it decodes, and
# each that is a text is compiled for it.
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Raw, Struct

from bundler.errors import BundlerError, FormatError, LimitExceeded, UnsafeName
from bundler.format import names, wire
from bundler.format.digest import DIGEST_BYTES, digest_text
from bundler.format.entries import (
    Artifact,
    FileLayout,
    HelperLibrary,
    Opaque,
    Target,
    Toolchain,
    TuningFile,
    check_sizes,
    file_layout,
)
from bundler.format.lazy_kernel import (
    NUMBERS_PER_FILE_SPAN,
    NUMBERS_PER_SPAN,
    REFERENCES,
    BlobTable,
    KernelNumbers,
    KernelReferences,
    Pieces,
    SharedTraits,
    SpecRow,
    TableKernels,
    file_order,
    numbers_of,
    spans_of,
    value_of,
    with_name,
)
from bundler.format.limits import DEFAULT_LIMITS, METADATA_BYTES, Limits
from bundler.format.summary import count
from bundler.format.wire import Count

# Who restores kernels looks at no tuning records.
if TYPE_CHECKING:
    from bundler.format.launch_spec import TuningRecord

_EMPTY_VALUES = frozenset({b"\x92\xa4list\x90", b"\x92\xa5tuple\x90"})
_NO_RECORDS = b"\x90"


class TargetRow(Struct, array_like=True, frozen=True, gc=False):
    """What a kernel's binary runs on."""

    backend: str
    arch: str
    warp_size: Count


class ToolchainRow(Struct, array_like=True, frozen=True, gc=False):
    """Who compiled a kernel."""

    release: str | None
    binary: str | None
    ptxas: str | None


def check_value(packed: bytes, limits: Limits, arrays: int) -> None:
    """Raise what `value_of` raises; nothing is decoded of the values that nearly every
    kernel has.
    """
    if packed not in _EMPTY_VALUES or limits != DEFAULT_LIMITS:
        value_of(packed, limits, arrays)


def tuning_records(packed: Raw, limits: Limits, *, open_ended: bool) -> "tuple[TuningRecord, ...]":
    """Return the tuning records of a content, which lie in one array."""
    if bytes(packed) == _NO_RECORDS:
        return ()
    limits.check("document_bytes", len(bytes(packed)), "tuning records")
    # They are inside the content's own array.
    rows = wire.unpack(bytes(packed), "tuning records", wire.inside(limits, 1))
    if not open_ended and not wire.is_canonical(bytes(packed), rows):
        raise FormatError("tuning records: expected each number in its shortest form")
    from bundler.format.launch_spec import TuningRecord

    return tuple(TuningRecord.from_wire(row, open_ended=open_ended) for row in rows)


# Real ones have some hundred bytes; what is here is decoded for each kernel, and again when its
# files are asked for.
REFERENCE_BYTES = 1 << 16
# So many are looked at by columns, if their references together are no longer than those of one may
# be.
_CHECKED_TOGETHER = 512
# Few, since of a hostile manifest each kernel's references may take half a megabyte while they are
# looked at.
_DECODED_TOGETHER = 16
_ALL_REFERENCES = msgspec.msgpack.Decoder(list[KernelReferences])


def _spans_are_sound(records: Sequence[KernelReferences], counts: Sequence[int]) -> bool:
    # Kernels of one name have their path at the same place.
    different = {*zip([record.spans for record in records], counts, strict=True)}
    return all(_are_spans(spans, files) for spans, files in different if spans)


def _are_spans(flat: Sequence[int], files: int) -> bool:
    positions = flat[::NUMBERS_PER_FILE_SPAN]
    in_order = all(one <= two for one, two in pairwise(positions))
    return (
        not len(flat) % NUMBERS_PER_FILE_SPAN
        and positions[0] >= 0
        and positions[-1] < files
        and in_order
    )


def _check_spans(flat: Sequence[int], files: int, key: str) -> None:
    if not _are_spans(flat, files):
        positions = flat[::NUMBERS_PER_FILE_SPAN]
        raise FormatError(
            f"{key}: {len(flat)} span numbers for {count(files, 'file')}, of files"
            f" {positions!r:.80}",
            key=key,
        )


SCHEMA = 2
_FILE_LIST_BYTES = 4 << 20
# A content of so few bytes has fewer members in each table than the default limits allow.
_SMALL_BYTES = 1 << 16
# The value in a launch spec lies inside three arrays: content, specs, spec.
_ARRAYS_AROUND_VALUE = 3
_NO_SPANS = b"\x90"


class PlacedNumbers(Struct, array_like=True, frozen=True, gc=False):
    """A tuning file or opaque file: its path, which ends in its name, its blob, and its spans,
    which stay encoded.
    """

    path: str
    blob: Count
    spans: Raw


class HelperNumbers(PlacedNumbers, array_like=True, frozen=True, gc=False):
    """A helper library, and the machine that it was built on."""

    machine: str


# What may be long stays encoded until its length was compared with the limits.
_TABLES = {
    "sizes": tuple[Count, ...],
    "names": tuple[str, ...],
    "targets": tuple[TargetRow, ...],
    "toolchains": tuple[ToolchainRow, ...],
    "specs": tuple[SpecRow, ...],
    "file_lists": tuple[tuple[str, ...], ...],
    "pieces": tuple[bytes, ...],
    "kernels": tuple[KernelNumbers, ...],
    "tuning_files": tuple[PlacedNumbers, ...],
    "helpers": tuple[HelperNumbers, ...],
    "opaque": tuple[PlacedNumbers, ...],
}


@lru_cache(maxsize=len(_TABLES))
def _table_decoder(name: str) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(_TABLES[name])


@lru_cache(maxsize=2)
def _content_decoder(*, packed: bool) -> msgspec.msgpack.Decoder[Any]:
    """Return the decoder of a whole content, whose tables stay `packed`; all are decoded at once
    where it is so short that no table can be over its limit.
    """
    tables = dict.fromkeys(_TABLES, Raw) if packed else _TABLES
    fields = [("schema", Count), ("digests", bytes), *tables.items(), ("tuning_records", Raw)]
    kind = msgspec.defstruct("PackedContent", fields, array_like=True, frozen=True, gc=False)
    return msgspec.msgpack.Decoder(kind)


_NUMBERS = msgspec.msgpack.Decoder(tuple[int, ...])
#: Arguments of `Content`, and its blobs.
Decoded = tuple[tuple[Any, ...], BlobTable]


def decode_tables(data: bytes, limits: Limits, *, open_ended: bool) -> Decoded:
    """Read content.

    Args:
        data: its bytes, whose length was checked.
        limits: bounds.
        open_ended: it is of a newer minor version, whose further fields are ignored.

    Raises:
        FormatError, LimitExceeded, UnsafeName: it is unsound.
    """
    content = None if open_ended else _small(data, limits)
    if content is None:
        # Walked already by who found out the schema; and it makes no more of it than there is.
        content = wire.decode(data, _content_decoder(packed=True), "content", limits, walked=True)
        if not open_ended:
            wire.check_canonical(data, content, "content")
        if len(bytes(content.file_lists)) > _FILE_LIST_BYTES:
            raise LimitExceeded(
                f"content: file lists of more bytes than the limit of {_FILE_LIST_BYTES}",
                limit=_FILE_LIST_BYTES,
            )
    return TableReader(content, limits, open_ended=open_ended).read()


def _small(data: bytes, limits: Limits) -> Any:
    """Return a small content; None for another, or where decoding table by table tells what is
    wrong.
    """
    if len(data) > _SMALL_BYTES or limits != DEFAULT_LIMITS:
        return None
    try:
        content = _content_decoder(packed=False).decode(data)
    except wire.MSGSPEC_ERRORS:
        return None
    return content if wire.is_canonical(data, content) else None


class TableReader:
    """Reads a decoded content, checks it, and counts what kernels refer to.

    Args:
        content: its tables, each of which may still be encoded.
        limits: bounds.
        open_ended: records may have further fields, which are ignored.
    """

    def __init__(self, content: Any, limits: Limits, *, open_ended: bool) -> None:
        self._content, self._limits, self._open_ended = content, limits, open_ended
        # In an array, as the table has them, a number would have to be made of each size that is
        # looked at.
        self._sizes: tuple[int, ...] = self._table("sizes")
        self._blobs = BlobTable(content.digests, self._sizes)
        self._names: tuple[str, ...] = self._table("names", "kernels")
        self._target_rows: tuple[TargetRow, ...] = self._table("targets", "kernels")
        self._toolchain_rows: tuple[ToolchainRow, ...] = self._table("toolchains", "kernels")
        self._specs: tuple[SpecRow, ...] = self._table("specs", "kernels")
        self._file_lists: tuple[tuple[str, ...], ...] = self._table("file_lists", "kernels")
        self._pieces = Pieces(self._table("pieces"), limits)
        self._check_texts()
        self._targets = [Target(t.backend, t.arch, t.warp_size) for t in self._target_rows]
        self._toolchains = [Toolchain(t.release, t.binary, t.ptxas) for t in self._toolchain_rows]
        # What each combination of numbers stands for, in the order in which kernels are the first
        # to have them.
        self._shared: dict[tuple[int, ...], SharedTraits] = {}
        # For each blob whether it is in use; and the bytes of all files, those of a blob once for
        # each file.
        self._used_blobs, self._restored_bytes = bytearray(len(self._sizes)), 0

    def read(self) -> Decoded:
        """Check everything and return it."""
        content = self._content
        self._check_blob_table()
        for packed in {bytes(spec.tensor_descriptors) for spec in self._specs}:
            check_value(packed, self._limits, _ARRAYS_AROUND_VALUE)
        rows: tuple[KernelNumbers, ...] = self._table("kernels", "kernels")
        self._check_kernels(rows)
        tuning_files: tuple[PlacedNumbers, ...] = self._table("tuning_files", "kernels")
        helpers: tuple[HelperNumbers, ...] = self._table("helpers", "kernels")
        opaque: tuple[PlacedNumbers, ...] = self._table("opaque", "kernels")
        wire.check_texts((row.machine for row in helpers), "content", self._limits)
        entries = (
            TableKernels(
                rows,
                self._shared,
                self._names,
                self._specs,
                self._file_lists,
                self._pieces,
                self._blobs,
            ),
            tuple([TuningFile(row.path, self._placed(row, "tuning file")) for row in tuning_files]),
            tuple(
                [
                    HelperLibrary(row.path, self._placed(row, "helper library"), row.machine)
                    for row in helpers
                ]
            ),
            tuple([Opaque(row.path, self._placed(row, "opaque file")) for row in opaque]),
            tuning_records(content.tuning_records, self._limits, open_ended=self._open_ended),
        )
        # As restored: a blob that a thousand files share is written a thousand times.
        self._limits.check("raw_bytes", self._restored_bytes, "bundle, all files")
        if 0 in self._used_blobs:
            raise FormatError("content: the blob table is not the sorted list of the blobs in use")
        self._check_used()
        return entries, self._blobs

    def _table(self, name: str, limit: str = "array_items") -> Any:
        found = getattr(self._content, name)
        if isinstance(found, tuple):
            return found
        packed, what = bytes(found), f"content, {name}"
        self._limits.check(limit, wire.array_length(packed), what)
        table = wire.decode(packed, _table_decoder(name), what, self._limits, walked=True)
        if not self._open_ended:
            wire.check_canonical(packed, table, what)
        return table

    def _traits(self, numbers: tuple[int, ...]) -> SharedTraits:
        """Return what a combination of numbers stands for.

        Raises, for one that is asked for the first time:
            IndexError: a number is beyond its table.
            UnsafeName, FormatError, LimitExceeded: the names of its files are not those of a
                kernel.
        """
        found = self._shared.get(numbers)
        if found is None:
            name, target, toolchain, spec, file_list = numbers
            file_names = self._file_lists[file_list]
            self._limits.check("files_per_kernel", len(file_names), "kernel")
            order = file_order(file_layout(with_name(self._names[name], file_names)))
            _ = self._specs[spec]
            found = self._shared[numbers] = SharedTraits(
                order, self._names[name], self._targets[target], self._toolchains[toolchain]
            )
        return found

    def _check_kernels(self, rows: Sequence[KernelNumbers]) -> None:
        """Check kernels.

        Raises:
            FormatError, LimitExceeded, UnsafeName: one is unsound; of several the first in their
                order.
        """
        if len(rows) == 1:  # as in a record of a store; columns would take twice as long
            self._check_each(rows)
            return
        for start in range(0, len(rows), _CHECKED_TOGETHER):
            self._check_some(rows[start : start + _CHECKED_TOGETHER])

    def _sizes_of(self, blobs: Sequence[int], what: str) -> list[int]:
        """Count blobs as used by an entry, and return their sizes; raises `FormatError`."""
        known = self._sizes
        try:
            sizes = [known[blob] for blob in blobs]
        except IndexError:
            raise FormatError(f"{what}: blob {max(blobs)} of {len(known)}", name=what) from None
        self._count(blobs, sum(sizes))
        return sizes

    def _check_some(self, rows: Sequence[KernelNumbers]) -> None:
        references = [row.references for row in rows]
        packed = wire.encode_within(
            sum([len(memoryview(one)) for one in references]) + wire.ARRAY_HEAD_BYTES, references
        )
        if len(packed) <= REFERENCE_BYTES and self._are_sound(rows, packed):
            return
        if len(packed) > REFERENCE_BYTES and len(rows) > _DECODED_TOGETHER:
            half = len(rows) // 2
            self._check_some(rows[:half])
            self._check_some(rows[half:])
            return
        self._check_each(rows)

    def _are_sound(self, rows: Sequence[KernelNumbers], packed: bytearray) -> bool:
        """Tell whether kernels are sound for certain, and count what they refer to; False counts
        nothing, and may mean anything.
        """
        try:
            records = _ALL_REFERENCES.decode(packed)
            layouts = [self._traits(numbers).order.layout for numbers in map(numbers_of, rows)]
        except (*wire.MSGSPEC_ERRORS, IndexError, BundlerError):
            return False
        blobs = [record.blobs for record in records]
        counts = [*map(len, blobs)]
        every = [*chain.from_iterable(blobs)]
        if (
            counts != [len(layout.order) for layout in layouts]
            or max(every) >= len(self._sizes)
            or not names.are_kernel_keys([row.key for row in rows])
            or not (self._open_ended or wire.is_canonical(packed, records))
            or not _spans_are_sound(records, counts)
        ):
            return False
        size_bytes = sum(map(self._sizes.__getitem__, every))
        if not self._sizes_are_sound(blobs, layouts, size_bytes) or not self._pieces.take(
            [
                runs
                for record in records
                for runs in (record.facts, record.parts)
                if runs is not None
            ]
        ):
            return False
        # Nothing was counted before all of them were known to be sound.
        self._count(every, size_bytes)
        return True

    def _sizes_are_sound(
        self, blobs: Sequence[tuple[int, ...]], layouts: Sequence[FileLayout], size_bytes: int
    ) -> bool:
        """Tell whether metadata, binaries and whole kernels have sizes that are allowed; all
        kernels have `size_bytes`.
        """
        sizes, limit = self._sizes, self._limits.kernel_bytes
        metadata = [
            sizes[numbers[layout.metadata]] for numbers, layout in zip(blobs, layouts, strict=True)
        ]
        binaries = [
            sizes[numbers[layout.binary]] for numbers, layout in zip(blobs, layouts, strict=True)
        ]
        return (
            max(metadata) <= METADATA_BYTES
            and min(binaries) > 0
            and (
                size_bytes <= limit
                or all(sum([sizes[blob] for blob in numbers]) <= limit for numbers in blobs)
            )
        )

    def _count(self, blobs: Iterable[int], size_bytes: int) -> None:
        used = self._used_blobs
        for blob in blobs:
            used[blob] = 1
        self._restored_bytes += size_bytes

    def _check_each(self, rows: Sequence[KernelNumbers]) -> None:
        for start in range(0, len(rows), _DECODED_TOGETHER):
            some = rows[start : start + _DECODED_TOGETHER]
            for row, references in zip(some, self._references(some), strict=True):
                self._check_kernel(row, references)

    def _references(self, rows: Sequence[KernelNumbers]) -> list[KernelReferences]:
        packed = [bytes(row.references) for row in rows]
        if max(map(len, packed), default=0) > REFERENCE_BYTES:
            row, long = next(
                found for found in zip(rows, packed, strict=True) if len(found[1]) > REFERENCE_BYTES
            )
            raise LimitExceeded(
                f"{row.key}: references of {len(long)} bytes, over the limit of {REFERENCE_BYTES}",
                limit=REFERENCE_BYTES,
                got=len(long),
            )
        return wire.decode_each(
            packed, REFERENCES, "references of a kernel", self._limits, open_ended=self._open_ended
        )

    def _check_kernel(self, row: KernelNumbers, references: KernelReferences) -> None:
        key, blobs = names.check_kernel_key(row.key), references.blobs
        layout = self._layout_of(row)
        if len(blobs) != len(layout.order):
            raise FormatError(
                f"{key}: {len(blobs)} blobs for {count(len(layout.order), 'file')}", key=key
            )
        sizes = self._sizes_of(blobs, key)
        check_sizes(key, layout, sizes)
        self._limits.check("kernel_bytes", sum(sizes), f"kernel {key}")
        if references.spans:
            _check_spans(references.spans, len(sizes), key)
        self._pieces.check(references.facts, key)
        self._pieces.check(references.parts, key)

    def _layout_of(self, row: KernelNumbers) -> FileLayout:
        key = row.key
        try:
            return self._traits(numbers_of(row)).order.layout
        except IndexError:
            raise FormatError(
                f"{key}: a number beyond its table, among those of name, target, toolchain, launch"
                f" spec and file list: {numbers_of(row)}",
                key=key,
            ) from None
        except (UnsafeName, LimitExceeded):
            raise
        except FormatError as error:
            raise FormatError(f"{key}: {error.message}", key=key) from None

    def _placed(self, row: PlacedNumbers | HelperNumbers, what: str) -> Artifact:
        (size,) = self._sizes_of([row.blob], row.path)
        packed = bytes(row.spans)
        flat = () if packed == _NO_SPANS else self._spans(packed, what)
        filename = names.check_relative_path(row.path).rpartition("/")[2]
        return Artifact(filename, digest_text(self._blobs.digest(row.blob)), size, spans_of(flat))

    def _spans(self, packed: bytes, what: str) -> tuple[int, ...]:
        if len(packed) > REFERENCE_BYTES:
            raise LimitExceeded(
                f"{what}: spans of {len(packed)} bytes, over the limit of {REFERENCE_BYTES}",
                limit=REFERENCE_BYTES,
                got=len(packed),
            )
        flat = wire.decode(packed, _NUMBERS, f"spans of a {what}", self._limits)
        if not self._open_ended:
            wire.check_canonical(packed, flat, what)
        if len(flat) % NUMBERS_PER_SPAN:
            raise FormatError(f"{what}: {len(flat)} span numbers", name=what)
        return flat

    def _check_texts(self) -> None:
        texts = {text for row in self._target_rows for text in (row.backend, row.arch)}
        for row in self._toolchain_rows:
            texts.update(text or "" for text in (row.release, row.binary, row.ptxas))
        texts.update(self._names, (spec.entry or "" for spec in self._specs))
        wire.check_texts(texts, "content", self._limits)

    def _check_blob_table(self) -> None:
        blobs, sizes, limits = self._blobs, self._sizes, self._limits
        if len(blobs.digests) != DIGEST_BYTES * len(sizes):
            raise FormatError(
                f"content: digests of {count(len(blobs.digests), 'byte')} for"
                f" {count(len(sizes), 'size')}, expected {DIGEST_BYTES} for each"
            )
        if not blobs.is_sorted():
            raise FormatError("content: the blob table is not the sorted list of the blobs in use")
        limits.check("file_bytes", max(sizes, default=0), "file")
        limits.check("raw_bytes", sum(sizes), "bundle")

    def _check_used(self) -> None:
        """Check that each table holds what kernels refer to, once and in the order in which they
        do.
        """
        self._pieces.check_used()
        tables: dict[str, Sequence[Any]] = {
            "name": self._names,
            "target": self._target_rows,
            "toolchain": self._toolchain_rows,
            "spec": [msgspec.msgpack.encode(spec) for spec in self._specs],
            "file_list": self._file_lists,
        }
        # The kernel that is the first to have a number is the first to have it together with its
        # other numbers.
        for position, (name, table) in enumerate(tables.items()):
            used = dict.fromkeys([numbers[position] for numbers in self._shared])
            if [*used] != [*range(len(table))] or len(set(table)) != len(table):
                raise FormatError(
                    f"content: the table of each {name} is not what kernels refer to, once and in"
                    " that order"
                )

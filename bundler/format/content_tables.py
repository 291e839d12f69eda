# SPDX-License-Identifier: Apache-2.0
"""How content lies in a manifest, schema 2: what kernels have in common stands in tables, once.

`Content` calls `decode_tables`, `table_encoder` writes what it reads, and docs/format.md describes
the records.  A kernel's name, target, toolchain, launch spec, file names, and pieces of launch
facts and key parts are numbers into tables, which hold what a kernel refers to and nothing else, in
the order in which the kernels refer to it.
"""

# Annotations are real ones in this module, as in `entry_rows`.
from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec
from msgspec import Raw, Struct

from bundler.errors import FormatError, LimitExceeded
from bundler.format import names, wire
from bundler.format.blob_table import BlobTable
from bundler.format.digest import DIGEST_BYTES, digest_text
from bundler.format.document_pieces import Pieces
from bundler.format.entries import Artifact, HelperLibrary, Opaque, TuningFile
from bundler.format.entry_rows import (
    NUMBERS_PER_SPAN,
    Count,
    Entries,
    SpecRow,
    TargetRow,
    ToolchainRow,
    check_value,
    tuning_records,
)
from bundler.format.kernel_columns import REFERENCE_BYTES, KernelCheck
from bundler.format.lazy_kernel import spans_of
from bundler.format.limits import DEFAULT_LIMITS, Limits
from bundler.format.summary import count
from bundler.format.table_kernels import KernelNumbers, KernelTables, TableKernels

SCHEMA = 2
_FILE_LIST_BYTES = 4 << 20
# A content of so few bytes has fewer members in each table than the default limits allow.
_SMALL_BYTES = 1 << 16
# The value in a launch spec lies inside three arrays: content, specs, spec.
_ARRAYS_AROUND_VALUE = 3
_NO_SPANS = b"\x90"
T = TypeVar("T")


class PlacedNumbers(Struct, array_like=True, frozen=True, gc=False):
    """A tuning file or opaque file: its path, which ends in its name, its blob, and its spans,
    which stay encoded.
    """

    path: str
    blob: Count
    spans: Raw


class HelperNumbers(Struct, array_like=True, frozen=True, gc=False):
    """A helper library, and the machine that it was built on."""

    path: str
    blob: Count
    spans: Raw
    machine: str


class ContentTables(Struct, array_like=True, frozen=True, gc=False):
    """The whole content; what may be long stays encoded until its length was compared with the
    limits.
    """

    schema: Count
    digests: bytes
    sizes: Raw
    names: Raw
    targets: Raw
    toolchains: Raw
    specs: Raw
    file_lists: Raw
    pieces: Raw
    kernels: Raw
    tuning_files: Raw
    helpers: Raw
    opaque: Raw
    tuning_records: Raw


class SmallContent(Struct, array_like=True, frozen=True, gc=False):
    """The same, all decoded at once: a short content cannot have a table over its limit."""

    schema: Count
    digests: bytes
    sizes: tuple[Count, ...]
    names: tuple[str, ...]
    targets: tuple[TargetRow, ...]
    toolchains: tuple[ToolchainRow, ...]
    specs: tuple[SpecRow, ...]
    file_lists: tuple[tuple[str, ...], ...]
    pieces: tuple[bytes, ...]
    kernels: tuple[KernelNumbers, ...]
    tuning_files: tuple[PlacedNumbers, ...]
    helpers: tuple[HelperNumbers, ...]
    opaque: tuple[PlacedNumbers, ...]
    tuning_records: Raw


_CONTENT = msgspec.msgpack.Decoder(ContentTables)
_SMALL_CONTENT = msgspec.msgpack.Decoder(SmallContent)
_NUMBERS = msgspec.msgpack.Decoder(tuple[int, ...])
_SIZES = msgspec.msgpack.Decoder(tuple[Count, ...])
_NAMES = msgspec.msgpack.Decoder(tuple[str, ...])
_TARGETS = msgspec.msgpack.Decoder(tuple[TargetRow, ...])
_TOOLCHAINS = msgspec.msgpack.Decoder(tuple[ToolchainRow, ...])
_SPECS = msgspec.msgpack.Decoder(tuple[SpecRow, ...])
_FILE_LISTS = msgspec.msgpack.Decoder(tuple[tuple[str, ...], ...])
_PIECES = msgspec.msgpack.Decoder(tuple[bytes, ...])
_KERNELS = msgspec.msgpack.Decoder(tuple[KernelNumbers, ...])
_PLACED = msgspec.msgpack.Decoder(tuple[PlacedNumbers, ...])
_HELPERS = msgspec.msgpack.Decoder(tuple[HelperNumbers, ...])


def decode_tables(data: bytes, limits: Limits, *, open_ended: bool) -> Entries:
    """Read content.

    Args:
        data: its bytes, whose length was checked.
        limits: bounds.
        open_ended: it is of a newer minor version, whose further fields are ignored.

    Raises:
        FormatError, LimitExceeded, UnsafeName: it is unsound.
    """
    content = None if open_ended else _small(data, limits)
    if content is not None:
        return _Tables(content, limits, open_ended=False).entries()
    # Walked already by who found out the schema; and it makes no more of it than there is.
    packed = wire.decode(data, _CONTENT, "content", limits, walked=True)
    if not open_ended:
        wire.check_canonical(data, packed, "content")
    if len(bytes(packed.file_lists)) > _FILE_LIST_BYTES:
        raise LimitExceeded(
            f"content: file lists of more than {_FILE_LIST_BYTES} bytes", limit=_FILE_LIST_BYTES
        )
    return _Tables(packed, limits, open_ended=open_ended).entries()


def _small(data: bytes, limits: Limits) -> SmallContent | None:
    """Return a small content; None for another, or where decoding table by table tells what is
    wrong.
    """
    if len(data) > _SMALL_BYTES or limits != DEFAULT_LIMITS:
        return None
    try:
        content = _SMALL_CONTENT.decode(data)
    except wire.MSGSPEC_ERRORS:
        return None
    return content if wire.encodes_to(content, data) else None


class _Tables:
    """A decoded content."""

    def __init__(
        self, content: ContentTables | SmallContent, limits: Limits, *, open_ended: bool
    ) -> None:
        self._content, self._limits, self._open_ended = content, limits, open_ended
        self._sizes = self._table("sizes", _SIZES)
        self._blobs = BlobTable(content.digests, self._sizes)
        self._names = self._table("names", _NAMES, "kernels")
        self._target_rows = self._table("targets", _TARGETS, "kernels")
        self._toolchain_rows = self._table("toolchains", _TOOLCHAINS, "kernels")
        self._specs = self._table("specs", _SPECS, "kernels")
        self._file_lists = self._table("file_lists", _FILE_LISTS, "kernels")
        self._pieces = Pieces(self._table("pieces", _PIECES), limits)
        self._check_texts()
        tables = KernelTables(
            self._names,
            [row.target() for row in self._target_rows],
            [row.toolchain() for row in self._toolchain_rows],
            self._specs,
            self._file_lists,
            self._pieces,
            self._blobs,
        )
        self._tables = tables
        self._check = KernelCheck(tables, self._sizes, limits, open_ended=open_ended)

    def entries(self) -> Entries:
        """Check everything and return the entries."""
        content, check = self._content, self._check
        self._check_blob_table()
        for packed in {bytes(spec.tensor_descriptors) for spec in self._specs}:
            check_value(packed, self._limits, _ARRAYS_AROUND_VALUE)
        rows = self._table("kernels", _KERNELS, "kernels")
        check.check(rows)
        tuning_files = self._table("tuning_files", _PLACED, "kernels")
        helpers = self._table("helpers", _HELPERS, "kernels")
        opaque = self._table("opaque", _PLACED, "kernels")
        wire.check_texts((row.machine for row in helpers), "content", self._limits)
        entries = Entries(
            TableKernels(rows, self._tables, check.shared),
            tuple(TuningFile(row.path, self._placed(row, "tuning file")) for row in tuning_files),
            tuple(
                HelperLibrary(row.path, self._placed(row, "helper library"), row.machine)
                for row in helpers
            ),
            tuple(Opaque(row.path, self._placed(row, "opaque file")) for row in opaque),
            tuning_records(content.tuning_records, self._limits, open_ended=self._open_ended),
            self._blobs,
        )
        # As restored: a blob that a thousand files share is written a thousand times.
        self._limits.check("raw_bytes", check.restored_bytes, "bundle, all files")
        if 0 in check.used_blobs:
            raise FormatError("content: the blob table is not the sorted list of the blobs in use")
        self._check_used()
        return entries

    def _table(
        self, name: str, decoder: msgspec.msgpack.Decoder[tuple[T, ...]], limit: str = "array_items"
    ) -> tuple[T, ...]:
        found: Raw | tuple[T, ...] = getattr(self._content, name)
        if isinstance(found, tuple):
            return found
        packed, what = bytes(found), f"content, {name}"
        self._limits.check(limit, wire.array_length(packed), what)
        table = wire.decode(packed, decoder, what, self._limits, walked=True)
        if not self._open_ended:
            wire.check_canonical(packed, table, what)
        return table

    def _placed(self, row: PlacedNumbers | HelperNumbers, what: str) -> Artifact:
        (size,) = self._check.count([row.blob], row.path)
        packed = bytes(row.spans)
        flat = () if packed == _NO_SPANS else self._spans(packed, what)
        filename = names.check_relative_path(row.path).rpartition("/")[2]
        return Artifact(filename, digest_text(self._blobs.digest(row.blob)), size, spans_of(flat))

    def _spans(self, packed: bytes, what: str) -> tuple[int, ...]:
        if len(packed) > REFERENCE_BYTES:
            raise LimitExceeded(
                f"{what}: spans of {len(packed)} bytes", limit=REFERENCE_BYTES, got=len(packed)
            )
        flat = wire.decode(packed, _NUMBERS, f"spans of a {what}", self._limits)
        if not self._open_ended:
            wire.check_canonical(packed, flat, what)
        if len(flat) % NUMBERS_PER_SPAN:
            raise FormatError(f"{what}: {len(flat)} span numbers", name=what)
        return flat

    def _check_texts(self) -> None:
        texts = {text for row in self._target_rows for text in row.texts()}
        texts.update(text for row in self._toolchain_rows for text in row.texts())
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
            used = dict.fromkeys([numbers[position] for numbers in self._check.shared])
            if [*used] != [*range(len(table))] or len(set(table)) != len(table):
                raise FormatError(
                    f"content: the table of each {name} is not what kernels refer to, once and in"
                    " that order"
                )

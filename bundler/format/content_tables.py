# SPDX-License-Identifier: Apache-2.0
"""Content of schema 2, in bundles of version 2.x: what kernels have in common stands in tables, once.

`Content` calls `decode_tables`, `table_encoder` writes what it reads, and docs/format.md describes the records  A kernel's name, target, toolchain,
launch spec, file names, and pieces of launch facts and key parts are numbers into tables, which hold what a kernel refers to
and nothing else, in the order in which the kernels refer to it.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Sequence
from itertools import islice, pairwise
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from msgspec import Raw, Struct

from bundler.errors import FormatError, LimitExceeded, UnsafeName
from bundler.format import names, wire
from bundler.format.blob_table import BlobTable
from bundler.format.digest import DIGEST_BYTES, digest_text
from bundler.format.document_pieces import Pieces
from bundler.format.entries import (
    Artifact,
    FileLayout,
    HelperLibrary,
    Kernel,
    Opaque,
    StoredFile,
    TuningFile,
    check_sizes,
    file_layout,
)
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
from bundler.format.lazy_kernel import NUMBERS_PER_FILE_SPAN, LazyKernel, spans_by_position, spans_of
from bundler.format.limits import Limits
from bundler.format.summary import count

if TYPE_CHECKING:
    from bundler.format.launch_spec import LaunchSpec

SCHEMA = 2
# Stands for the name of the kernel, at the beginning of a file name, which cannot hold it.
NAME = "*"
# Real ones have some hundred bytes; what is here is decoded for each kernel, and again when its files are asked for.
_REFERENCE_BYTES = 1 << 16
_FILE_LIST_BYTES = 4 << 20
# Few, since of a hostile manifest each kernel's references may take half a megabyte while they are looked at.
_CHECKED_TOGETHER = 16
# The value in a launch spec lies inside three arrays: content, specs, spec.
_ARRAYS_AROUND_VALUE = 3
_NO_SPANS = b"\x90"
T = TypeVar("T")


class KernelReferences(Struct, array_like=True, frozen=True, gc=False):
    """What is a kernel's own: the blob of each file, spans, and runs of pieces; None where the compile was not recorded."""

    blobs: tuple[Count, ...]
    spans: tuple[int, ...]
    facts: tuple[Count, ...] | None
    parts: tuple[Count, ...] | None


class FileReferences(Struct, array_like=True, frozen=True, gc=False):
    """The first two of them, for who wants no more: what follows is not decoded."""

    blobs: tuple[Count, ...]
    spans: tuple[int, ...]


class KernelNumbers(Struct, array_like=True, frozen=True, gc=False):
    """A kernel: its key, numbers into the tables, and its references, which stay encoded."""

    key: str
    name: Count
    target: Count
    toolchain: Count
    spec: Count
    file_list: Count
    references: Raw


class PlacedNumbers(Struct, array_like=True, frozen=True, gc=False):
    """A tuning file or opaque file: its path, which ends in its name, its blob, and its spans, which stay encoded."""

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
    """The whole content; what may be long stays encoded until its length was compared with the limits."""

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


_CONTENT = msgspec.msgpack.Decoder(ContentTables)
_REFERENCES = msgspec.msgpack.Decoder(KernelReferences)
_FILE_REFERENCES = msgspec.msgpack.Decoder(FileReferences)
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
    """Read content of schema 2.

    Args:
        data: its bytes, whose length was checked.
        limits: bounds.
        open_ended: it is of a newer minor version, whose further fields are ignored.

    Raises:
        FormatError, LimitExceeded, UnsafeName: it is unsound.
    """
    content = wire.decode(data, _CONTENT, "content", limits)
    if not open_ended:
        wire.check_canonical(data, content, "content")
    return _Tables(content, limits, open_ended=open_ended).entries()


class _Tables:
    """A decoded content; its kernels ask it for their files."""

    def __init__(self, content: ContentTables, limits: Limits, *, open_ended: bool) -> None:
        self._content, self._limits, self._open_ended = content, limits, open_ended
        self._blobs = BlobTable(content.digests, self._table("sizes", _SIZES))
        self._sizes = self._blobs.sizes
        self._names = self._table("names", _NAMES, "kernels")
        target_rows = self._table("targets", _TARGETS, "kernels")
        toolchain_rows = self._table("toolchains", _TOOLCHAINS, "kernels")
        self._targets = [row.target() for row in target_rows]
        self._toolchains = [row.toolchain() for row in toolchain_rows]
        self._specs = self._table("specs", _SPECS, "kernels")
        if len(bytes(content.file_lists)) > _FILE_LIST_BYTES:
            raise LimitExceeded(f"content: file lists of more than {_FILE_LIST_BYTES} bytes", limit=_FILE_LIST_BYTES)
        self._file_lists = self._table("file_lists", _FILE_LISTS, "kernels")
        self._pieces = Pieces(self._table("pieces", _PIECES), limits)
        self._used_blobs = bytearray(len(self._sizes))
        self._restored_bytes = 0
        self._layouts: dict[tuple[int, int], FileLayout] = {}
        self._launch_specs: dict[tuple[int, int], LaunchSpec] = {}
        texts = {text for row in target_rows for text in row.texts()}
        texts.update(text for row in toolchain_rows for text in row.texts())
        texts.update(self._names, (spec.entry or "" for spec in self._specs))
        wire.check_texts(texts, "content", limits)

    def entries(self) -> Entries:
        """Check everything and return the entries."""
        content = self._content
        self._check_blob_table()
        for spec in self._specs:
            check_value(bytes(spec.tensor_descriptors), self._limits, _ARRAYS_AROUND_VALUE)
        rows = self._table("kernels", _KERNELS, "kernels")
        kernels = self._kernels(rows)
        tuning_files = self._table("tuning_files", _PLACED, "kernels")
        helpers = self._table("helpers", _HELPERS, "kernels")
        opaque = self._table("opaque", _PLACED, "kernels")
        wire.check_texts((row.machine for row in helpers), "content", self._limits)
        entries = Entries(
            kernels,
            tuple(TuningFile(row.path, self._placed(row, "tuning file")) for row in tuning_files),
            tuple(HelperLibrary(row.path, self._placed(row, "helper library"), row.machine) for row in helpers),
            tuple(Opaque(row.path, self._placed(row, "opaque file")) for row in opaque),
            tuning_records(content.tuning_records, self._limits, open_ended=self._open_ended),
            self._blobs,
        )
        # As restored: a blob that a thousand files share is written a thousand times.
        self._limits.check("raw_bytes", self._restored_bytes, "bundle, all files")
        if 0 in self._used_blobs:
            raise FormatError("content: the blob table is not the sorted list of the blobs in use")
        self._check_used(rows)
        # Of use while the kernels were checked; they hold on to the rest.
        self._layouts.clear()
        return entries

    def files(self, row: KernelNumbers, positions: Iterable[int]) -> list[StoredFile]:
        """Return the files of a kernel at these positions."""
        references = _FILE_REFERENCES.decode(row.references)
        filenames, blobs = self._filenames(row.name, row.file_list), references.blobs
        spans = spans_by_position(references.spans) if references.spans else {}
        sizes, digests, width = self._sizes, self._blobs.digests, DIGEST_BYTES
        return [
            (filenames[at], digests[blobs[at] * width : (blobs[at] + 1) * width], sizes[blobs[at]], spans.get(at, ()))
            for at in positions
        ]

    def file(self, row: KernelNumbers, position: int) -> tuple[str, bytes]:
        """Return name and raw digest of one file of a kernel."""
        blob = _FILE_REFERENCES.decode(row.references).blobs[position]
        return self._filenames(row.name, row.file_list)[position], self._blobs.digest(blob)

    def blobs(self, row: KernelNumbers) -> list[tuple[bytes, int]]:
        """Return raw digest and size of each file of a kernel."""
        sizes, digests, width = self._sizes, self._blobs.digests, DIGEST_BYTES
        blobs = _FILE_REFERENCES.decode(row.references).blobs
        return [(digests[blob * width : (blob + 1) * width], sizes[blob]) for blob in blobs]

    def sizes(self, row: KernelNumbers) -> list[int]:
        """Return the size of each file of a kernel."""
        return [self._sizes[blob] for blob in _FILE_REFERENCES.decode(row.references).blobs]

    def spec(self, row: KernelNumbers) -> LaunchSpec:
        """Return a kernel's launch spec; those of one row and name are one object."""
        found = self._launch_specs.get((row.spec, row.name))
        if found is None:
            found = self._launch_specs[row.spec, row.name] = self._specs[row.spec].spec(self._names[row.name])
        return found

    def has_facts(self, row: KernelNumbers) -> bool:
        """Tell whether a kernel has launch facts."""
        return _REFERENCES.decode(row.references).facts is not None

    def facts(self, row: KernelNumbers) -> bytes | None:
        """Return a kernel's launch facts, encoded."""
        return self._pieces.join(_REFERENCES.decode(row.references).facts)

    def parts(self, row: KernelNumbers) -> bytes | None:
        """Return a kernel's key parts, encoded."""
        return self._pieces.join(_REFERENCES.decode(row.references).parts)

    def any_parts_hold(self, text: bytes) -> bool:
        """Tell whether the key parts of any kernel may hold a text that lies within one part."""
        return self._pieces.any_holds(text)

    def _table(
        self, name: str, decoder: msgspec.msgpack.Decoder[tuple[T, ...]], limit: str = "array_items"
    ) -> tuple[T, ...]:
        packed, what = bytes(getattr(self._content, name)), f"content, {name}"
        self._limits.check(limit, wire.array_length(packed), what)
        table = wire.decode(packed, decoder, what, self._limits)
        if not self._open_ended:
            wire.check_canonical(packed, table, what)
        return table

    def _kernels(self, rows: Sequence[KernelNumbers]) -> tuple[Kernel, ...]:
        kernels: list[Kernel] = []
        for start in range(0, len(rows), _CHECKED_TOGETHER):
            some = rows[start : start + _CHECKED_TOGETHER]
            kernels += map(self._kernel, some, self._references(some))
        return tuple(kernels)

    def _kernel(self, row: KernelNumbers, references: KernelReferences) -> Kernel:
        key, blobs = names.check_kernel_key(row.key), references.blobs
        try:
            layout = self._layout_of(row.name, row.file_list)
            name, target, toolchain = self._names[row.name], self._targets[row.target], self._toolchains[row.toolchain]
            _ = self._specs[row.spec]
        except IndexError:
            raise FormatError(f"{key}: a number beyond its table, in {row!r:.200}", key=key) from None
        except (UnsafeName, LimitExceeded):
            raise
        except FormatError as error:
            raise FormatError(f"{key}: {error.message}", key=key) from None
        if len(blobs) != len(layout.order):
            raise FormatError(f"{key}: {len(blobs)} blobs for {count(len(layout.order), 'file')}", key=key)
        sizes = self._count(blobs, key)
        check_sizes(key, layout, sizes)
        size = sum(sizes)
        if size > self._limits.kernel_bytes:
            self._limits.check("kernel_bytes", size, f"kernel {key}")
        if references.spans:
            _check_spans(references.spans, len(sizes), key)
        self._pieces.check(references.facts, key)
        self._pieces.check(references.parts, key)
        return LazyKernel.of_row(self, row, layout, key, name, target, toolchain)

    def _references(self, rows: Sequence[KernelNumbers]) -> list[KernelReferences]:
        packed = [bytes(row.references) for row in rows]
        if max(map(len, packed), default=0) > _REFERENCE_BYTES:
            row, long = next(found for found in zip(rows, packed, strict=True) if len(found[1]) > _REFERENCE_BYTES)
            raise LimitExceeded(f"{row.key}: references of {len(long)} bytes", limit=_REFERENCE_BYTES, got=len(long))
        return wire.decode_each(
            packed, _REFERENCES, "references of a kernel", self._limits, open_ended=self._open_ended
        )

    def _layout_of(self, name: int, file_list: int) -> FileLayout:
        layout = self._layouts.get((name, file_list))
        if layout is None:
            self._limits.check("files_per_kernel", len(self._file_lists[file_list]), "kernel")
            layout = self._layouts[name, file_list] = file_layout(self._filenames(name, file_list))
        return layout

    def _filenames(self, name: int, file_list: int) -> tuple[str, ...]:
        return _with_name(self._names[name], self._file_lists[file_list])

    def _count(self, blobs: Sequence[int], what: str) -> list[int]:
        """Count blobs as used by an entry, and return their sizes."""
        known, used = self._sizes, self._used_blobs
        try:
            sizes = [known[blob] for blob in blobs]
        except IndexError:
            raise FormatError(f"{what}: blob {max(blobs)} of {len(known)}", name=what) from None
        for blob in blobs:
            used[blob] = 1
        self._restored_bytes += sum(sizes)
        return sizes

    def _placed(self, row: PlacedNumbers | HelperNumbers, what: str) -> Artifact:
        (size,) = self._count([row.blob], row.path)
        packed = bytes(row.spans)
        flat = () if packed == _NO_SPANS else self._spans(packed, what)
        filename = names.check_relative_path(row.path).rpartition("/")[2]
        return Artifact(filename, digest_text(self._blobs.digest(row.blob)), size, spans_of(flat))

    def _spans(self, packed: bytes, what: str) -> tuple[int, ...]:
        if len(packed) > _REFERENCE_BYTES:
            raise LimitExceeded(f"{what}: spans of {len(packed)} bytes", limit=_REFERENCE_BYTES, got=len(packed))
        flat = wire.decode(packed, _NUMBERS, f"spans of a {what}", self._limits)
        if not self._open_ended:
            wire.check_canonical(packed, flat, what)
        if len(flat) % NUMBERS_PER_SPAN:
            raise FormatError(f"{what}: {len(flat)} span numbers", name=what)
        return flat

    def _check_blob_table(self) -> None:
        blobs, limits = self._blobs, self._limits
        if len(blobs.digests) != DIGEST_BYTES * len(blobs.sizes):
            raise FormatError(
                f"content: digests of {count(len(blobs.digests), 'byte')} for {count(len(blobs.sizes), 'size')}, "
                f"expected {DIGEST_BYTES} for each"
            )
        digests = blobs.split_digests()
        if any(map(operator.ge, digests, islice(digests, 1, None))):
            raise FormatError("content: the blob table is not the sorted list of the blobs in use")
        limits.check("file_bytes", max(blobs.sizes, default=0), "file")
        limits.check("raw_bytes", sum(blobs.sizes), "bundle")

    def _check_used(self, rows: Sequence[KernelNumbers]) -> None:
        """Check that each table holds what kernels refer to, once and in the order in which they do."""
        self._pieces.check_used()
        tables: dict[str, Sequence[Any]] = {
            "name": self._names, "target": self._targets, "toolchain": self._toolchains,
            "spec": [msgspec.msgpack.encode(spec) for spec in self._specs], "file_list": self._file_lists,
        }  # fmt: skip
        for name, table in tables.items():
            used = dict.fromkeys(map(operator.attrgetter(name), rows))
            if [*used] != [*range(len(table))] or len(set(table)) != len(table):
                raise FormatError(
                    f"content: the table of each {name} is not what kernels refer to, once and in that order"
                )


@functools.lru_cache(maxsize=4096)
def _with_name(name: str, file_list: tuple[str, ...]) -> tuple[str, ...]:
    return tuple([name + item[1:] if item.startswith(NAME) else item for item in file_list])


def _check_spans(flat: Sequence[int], files: int, key: str) -> None:
    if len(flat) == NUMBERS_PER_FILE_SPAN and 0 <= flat[0] < files:  # nearly every kernel has one
        return
    positions = flat[::NUMBERS_PER_FILE_SPAN]
    in_order = all(one <= two for one, two in pairwise(positions))
    if len(flat) % NUMBERS_PER_FILE_SPAN or positions[0] < 0 or positions[-1] >= files or not in_order:
        raise FormatError(
            f"{key}: {len(flat)} span numbers for {count(files, 'file')}, of files {positions!r:.80}", key=key
        )

# SPDX-License-Identifier: Apache-2.0
"""Content of schema 1, in bundles of version 1.x: each kernel is one row that says everything about it.

`Content` calls `decode_rows` and `encode_rows`; docs/format.md describes the records.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
from msgspec import Raw, Struct

from bundler.errors import FormatError
from bundler.format import names, wire
from bundler.format.blob_table import BlobTable
from bundler.format.digest import digest_raw, digest_text
from bundler.format.entries import (
    Artifact,
    HelperLibrary,
    Kernel,
    Opaque,
    TuningFile,
    check_files,
)
from bundler.format.entry_rows import (
    NUMBERS_PER_SPAN,
    Count,
    Digest,
    Entries,
    Once,
    SpecRow,
    TargetRow,
    ToolchainRow,
    check_path,
    check_value,
    tuning_records,
)
from bundler.format.kernel_source import file_order
from bundler.format.lazy_kernel import LazyKernel, spans_of
from bundler.format.limits import Limits
from bundler.format.sentinel import Span

if TYPE_CHECKING:
    from bundler.format.launch_spec import LaunchSpec

SCHEMA = 1
# The value in a launch spec lies inside four arrays: content, kernels, kernel, spec.
_ARRAYS_AROUND_VALUE = 4
_NAMES_REMEMBERED = 4096


class BlobRow(Struct, array_like=True, frozen=True, gc=False):
    """Digest and size of the bytes of one or more files."""

    digest: Digest
    size: Count


class FileRow(Struct, array_like=True, frozen=True, gc=False):
    """Name of a file, where its blob stands in the table, and its path sentinels, three numbers each."""

    name: str
    blob: Count
    spans: tuple[int, ...]


class KernelRow(Struct, array_like=True, frozen=True, gc=False):
    """A kernel; its launch facts and key parts are documents of their own."""

    key: str
    name: str
    target: TargetRow
    files: tuple[FileRow, ...]
    spec: SpecRow
    facts: bytes | None
    parts: bytes | None
    toolchain: ToolchainRow


class PlacedRow(Struct, array_like=True, frozen=True, gc=False):
    """A tuning file or opaque file: its path, which ends in the name of the file."""

    path: str
    file: FileRow


class HelperRow(Struct, array_like=True, frozen=True, gc=False):
    """A helper library, and the machine that it was built on."""

    path: str
    file: FileRow
    machine: str


class ContentRow(Struct, array_like=True, frozen=True, gc=False):
    """The whole content."""

    schema: Count
    blobs: tuple[BlobRow, ...]
    kernels: tuple[KernelRow, ...]
    tuning_files: tuple[PlacedRow, ...]
    helpers: tuple[HelperRow, ...]
    opaque: tuple[PlacedRow, ...]
    tuning_records: Raw


_DECODER = msgspec.msgpack.Decoder(ContentRow)


def decode_rows(data: bytes, limits: Limits, *, open_ended: bool) -> Entries:
    """Read content of schema 1.

    Args:
        data: its bytes, whose length was checked.
        limits: bounds.
        open_ended: it is of a newer minor version, whose further fields are ignored.

    Raises:
        FormatError, LimitExceeded, UnsafeName: it is unsound.
    """
    limits.check("document_bytes", len(data), "content of schema 1")
    row = wire.decode(data, _DECODER, "content", limits)
    if not open_ended:
        wire.check_canonical(data, row, "content")
    return _Rows(row, limits).entries(open_ended=open_ended)


class FilesOfRow(NamedTuple):
    """The files of a kernel, as numbers."""

    blobs: tuple[int, ...]
    spans: tuple[int, ...]


class _Rows:
    """A decoded content; its kernels ask it for their files."""

    def __init__(self, content: ContentRow, limits: Limits) -> None:
        self._content, self._limits = content, limits
        self.blob_table = BlobTable(
            b"".join([blob.digest for blob in content.blobs]), [blob.size for blob in content.blobs]
        )
        self._blob_sizes = self.blob_table.sizes
        self._targets, self._toolchains = Once(TargetRow.target), Once(ToolchainRow.toolchain)
        self._used: set[int] = set()
        self._restored_bytes = 0

    def entries(self, *, open_ended: bool) -> Entries:
        """Check everything and return the entries."""
        content = self._content
        self._check_counts()
        entries = Entries(
            tuple([self._kernel(row) for row in content.kernels]),
            tuple(
                TuningFile(row.path, self._placed(row, "tuning file"))
                for row in content.tuning_files
            ),
            tuple(
                HelperLibrary(row.path, self._placed(row, "helper library"), row.machine)
                for row in content.helpers
            ),
            tuple(Opaque(row.path, self._placed(row, "opaque file")) for row in content.opaque),
            tuning_records(content.tuning_records, self._limits, open_ended=open_ended),
            self.blob_table,
        )
        self._check_texts()
        # As restored: a blob that a thousand files share is written a thousand times.
        self._limits.check("raw_bytes", self._restored_bytes, "bundle, all files")
        if len(self._used) != len(self.blob_table) or not self.blob_table.is_sorted():
            raise FormatError("content: the blob table is not the sorted list of the blobs in use")
        return entries

    def references(self, row: KernelRow) -> FilesOfRow:
        """Return the files of a kernel."""
        return FilesOfRow(tuple([file.blob for file in row.files]), _spans_of_files(row.files))

    def filenames(self, row: KernelRow) -> tuple[str, ...]:
        """Return the names of a kernel's files."""
        return _as_one(tuple([file.name for file in row.files]))

    def spec(self, row: KernelRow) -> LaunchSpec:
        """Return a kernel's launch spec."""
        return row.spec.spec(row.name)

    def has_facts(self, row: KernelRow) -> bool:
        """Tell whether a kernel has launch facts."""
        return row.facts is not None

    def facts(self, row: KernelRow) -> bytes | None:
        """Return a kernel's launch facts, encoded."""
        return row.facts

    def parts(self, row: KernelRow) -> bytes | None:
        """Return a kernel's key parts, encoded."""
        return row.parts

    def any_parts_hold(self, text: bytes) -> bool:
        """Tell whether the key parts of any kernel may hold a text; each kernel has its own document, so who asks looks there."""
        return True

    def _kernel(self, row: KernelRow) -> Kernel:
        limits, files = self._limits, row.files
        if len(files) > limits.files_per_kernel:
            limits.check("files_per_kernel", len(files), f"kernel {row.key}")
        size = sum(sizes := self._count(files))
        layout = check_files(row.key, self.filenames(row), sizes)
        if size > limits.kernel_bytes:
            limits.check("kernel_bytes", size, f"kernel {row.key}")
        if row.spec.entry is None:
            raise FormatError(f"{row.key}: the launch spec names no entry point", key=row.key)
        check_value(bytes(row.spec.tensor_descriptors), limits, _ARRAYS_AROUND_VALUE)
        return LazyKernel.of_row(
            self,
            row,
            file_order(layout),
            row.key,
            row.name,
            self._targets[row.target],
            self._toolchains[row.toolchain],
        )

    def _count(self, files: Sequence[FileRow]) -> list[int]:
        """Check that files refer to the table, count them, and return their sizes."""
        blobs = [file.blob for file in files]
        try:
            sizes = [self._blob_sizes[blob] for blob in blobs]
        except IndexError:
            wrong = next(file for file in files if file.blob >= len(self.blob_table))
            raise FormatError(
                f"file {wrong.name!r}: blob {wrong.blob} of {len(self.blob_table)}", name=wrong.name
            ) from None
        for file in files:
            if file.spans and (
                len(file.spans) % NUMBERS_PER_SPAN or len(file.spans) > self._limits.array_items
            ):
                raise FormatError(
                    f"file {file.name!r}: {len(file.spans)} span numbers", name=file.name
                )
        self._used.update(blobs)
        self._restored_bytes += sum(sizes)
        return sizes

    def _placed(self, row: PlacedRow | HelperRow, what: str) -> Artifact:
        file = row.file
        self._count([file])
        digest, size = self.blob_table[file.blob]
        artifact = Artifact(
            names.check_file_name(file.name), digest_text(digest), size, spans_of(file.spans)
        )
        check_path(row.path, artifact, what)
        return artifact

    def _check_counts(self) -> None:
        limits, content = self._limits, self._content
        limits.check("kernels", len(content.kernels), "bundle")
        for name in ("blobs", "tuning_files", "helpers", "opaque"):
            limits.check("array_items", len(getattr(content, name)), name)
        limits.check("file_bytes", max(self._blob_sizes, default=0), "file")
        limits.check("raw_bytes", sum(self._blob_sizes), "bundle")

    def _check_texts(self) -> None:
        content = self._content
        texts = {text for target in self._targets for text in target.texts()}
        texts.update(text for toolchain in self._toolchains for text in toolchain.texts())
        for kernel in content.kernels:
            texts.add(kernel.name)
            texts.add(kernel.spec.entry or "")
            texts.add(kernel.key)
        texts.update(helper.machine for helper in content.helpers)
        wire.check_texts(texts, "content", self._limits)


@functools.lru_cache(_NAMES_REMEMBERED)
def _as_one(filenames: tuple[str, ...]) -> tuple[str, ...]:
    """Return the first that was equal, so that kernels share it."""
    return filenames


def _spans_of_files(files: Sequence[FileRow]) -> tuple[int, ...]:
    """Return the path sentinels of all files, each after the position of its file."""
    return tuple(
        [
            number
            for position, file in enumerate(files)
            for start in range(0, len(file.spans), NUMBERS_PER_SPAN)
            for number in (position, *file.spans[start : start + NUMBERS_PER_SPAN])
        ]
    )


def encode_rows(entries: Entries) -> bytes:
    """Return the canonical bytes of entries that are in canonical order; raises `FormatError` for what cannot be stored."""
    index = {raw: position for position, (raw, _) in enumerate(entries.blobs)}

    def file(name: str, raw: bytes, spans: Sequence[Span]) -> list[Any]:
        return [
            name,
            index[raw],
            [number for span in spans for number in (span.offset, span.place, span.style)],
        ]

    def placed(artifact: Artifact) -> list[Any]:
        return file(artifact.filename, digest_raw(artifact.digest), artifact.spans)

    return wire.pack(
        [
            SCHEMA,
            [list(blob) for blob in entries.blobs],
            [
                [k.key, k.name, [k.target.backend, k.target.arch, k.target.warp_size],
                 [file(name, raw, spans) for name, raw, _, spans in k.files()],
                 k.spec.to_wire(), k.facts_bytes, k.parts_bytes,
                 [k.toolchain.release, k.toolchain.binary, k.toolchain.ptxas]]
                for k in entries.kernels
            ],
            [[e.path, placed(e.artifact)] for e in entries.tuning_files],
            [[e.path, placed(e.artifact), e.machine] for e in entries.helpers],
            [[e.path, placed(e.artifact)] for e in entries.opaque],
            [record.to_wire() for record in entries.tuning_records],
        ]
    )  # fmt: skip

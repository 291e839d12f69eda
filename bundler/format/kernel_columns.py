# SPDX-License-Identifier: Apache-2.0
"""`KernelCheck`: whether the kernels of a content are sound, many at once.

`content_tables` calls it for the rows that it decoded.  What is asked of every kernel is asked of
columns, such as all keys of five hundred kernels, by functions that need no step of the interpreter
for each.  Where a column does not show that all is well, `_check_each` looks at one kernel after
the other, and tells which one is wrong, and how.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain, pairwise

import msgspec

from bundler.errors import BundlerError, FormatError, LimitExceeded, UnsafeName
from bundler.format import names, wire
from bundler.format.document_pieces import Pieces
from bundler.format.entries import FileLayout, check_sizes
from bundler.format.lazy_kernel import NUMBERS_PER_FILE_SPAN
from bundler.format.limits import Limits
from bundler.format.metadata import METADATA_BYTES
from bundler.format.summary import count
from bundler.format.table_kernels import (
    KernelNumbers,
    KernelReferences,
    KernelTables,
    SharedByNumbers,
    numbers_of,
)

# Real ones have some hundred bytes; what is here is decoded for each kernel, and again when its
# files are asked for.
REFERENCE_BYTES = 1 << 16
# So many are looked at by columns, if their references together are no longer than those of one may
# be.
_CHECKED_TOGETHER = 512
# Few, since of a hostile manifest each kernel's references may take half a megabyte while they are
# looked at.
_DECODED_TOGETHER = 16
_REFERENCES = msgspec.msgpack.Decoder(KernelReferences)
_ALL_REFERENCES = msgspec.msgpack.Decoder(list[KernelReferences])


class KernelCheck:
    """Checks kernels, and counts what they refer to.

    Args:
        tables: what they refer to.
        sizes: of the blobs; in an array, as the table has them, a number would have to be made of
            each that is looked at.
        limits: bounds.
        open_ended: their references may have further fields, which are ignored.

    Attributes:
        shared: what each combination of numbers stands for, in the order in which the kernels have
            them.
        used_blobs: for each blob whether it is in use.
        restored_bytes: the bytes of all files, those of a blob once for each file.
    """

    def __init__(
        self, tables: KernelTables, sizes: Sequence[int], limits: Limits, *, open_ended: bool
    ) -> None:
        self._sizes, self._limits, self._open_ended = sizes, limits, open_ended
        self._pieces: Pieces = tables.pieces
        self.shared = SharedByNumbers(tables, limits)
        self.used_blobs = bytearray(len(self._sizes))
        self.restored_bytes = 0

    def check(self, rows: Sequence[KernelNumbers]) -> None:
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

    def count(self, blobs: Sequence[int], what: str) -> list[int]:
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
            references, sum([len(memoryview(one)) for one in references]) + wire.ARRAY_HEAD_BYTES
        )
        if len(packed) <= REFERENCE_BYTES and self._are_sound(rows, packed):
            return
        if len(packed) > REFERENCE_BYTES and len(rows) > _DECODED_TOGETHER:
            half = len(rows) // 2
            self._check_some(rows[:half])
            self._check_some(rows[half:])
            return
        self._check_each(rows)

    # ----------------------------------------------------------------------------------- By columns

    def _are_sound(self, rows: Sequence[KernelNumbers], packed: bytearray) -> bool:
        """Tell whether kernels are sound for certain, and count what they refer to; False counts
        nothing, and may mean anything.
        """
        try:
            records = _ALL_REFERENCES.decode(packed)
            layouts = [self.shared[numbers].order.layout for numbers in map(numbers_of, rows)]
        except (*wire.MSGSPEC_ERRORS, IndexError, BundlerError):
            return False
        blobs = [record.blobs for record in records]
        counts = [*map(len, blobs)]
        every = [*chain.from_iterable(blobs)]
        if (
            counts != [len(layout.order) for layout in layouts]
            or max(every) >= len(self._sizes)
            or not names.are_kernel_keys([row.key for row in rows])
            or not (self._open_ended or wire.encodes_to(records, packed))
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
        used = self.used_blobs
        for blob in blobs:
            used[blob] = 1
        self.restored_bytes += size_bytes

    # ----------------------------------------------------------------------------------- One by one

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
                f"{row.key}: references of {len(long)} bytes", limit=REFERENCE_BYTES, got=len(long)
            )
        return wire.decode_each(
            packed, _REFERENCES, "references of a kernel", self._limits, open_ended=self._open_ended
        )

    def _check_kernel(self, row: KernelNumbers, references: KernelReferences) -> None:
        key, blobs = names.check_kernel_key(row.key), references.blobs
        layout = self._layout_of(row)
        if len(blobs) != len(layout.order):
            raise FormatError(
                f"{key}: {len(blobs)} blobs for {count(len(layout.order), 'file')}", key=key
            )
        sizes = self.count(blobs, key)
        check_sizes(key, layout, sizes)
        self._limits.check("kernel_bytes", sum(sizes), f"kernel {key}")
        if references.spans:
            _check_spans(references.spans, len(sizes), key)
        self._pieces.check(references.facts, key)
        self._pieces.check(references.parts, key)

    def _layout_of(self, row: KernelNumbers) -> FileLayout:
        key = row.key
        try:
            return self.shared[numbers_of(row)].order.layout
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

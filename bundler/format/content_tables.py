# SPDX-License-Identifier: Apache-2.0
"""How content lies in a manifest, schema 2: what kernels have in common stands in tables, once.

In the order in which data goes: `Pieces` cuts launch facts and key parts into pieces, of which
kernels share most, and puts them together again; `TableKernels` has the kernels as numbers into the
tables, and answers what a `LazyKernel` asks; `KernelCheck` asks of all kernels at once whether they
are sound; `decode_tables` reads the tables.

`Content` calls `decode_tables`, `table_encoder` writes what it reads, and docs/format.md describes
the records.  A kernel's name, target, toolchain, launch spec, file names, and pieces of launch
facts and key parts are numbers into tables, which hold what a kernel refers to and nothing else, in
the order in which the kernels refer to it.
"""

from __future__ import annotations

import functools
import operator
from array import array
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, chain, pairwise
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Raw, Struct

from bundler.errors import FormatError
from bundler.format import wire
from bundler.format.blob_table import BlobTable
from bundler.format.entries import Target, Toolchain, file_layout
from bundler.format.entry_rows import Count, SpecRow
from bundler.format.kernel_source import FileOrder, file_order
from bundler.format.lazy_kernel import LazyKernel
from bundler.format.limits import Limits

if TYPE_CHECKING:
    from bundler.format.launch_spec import LaunchSpec
from collections.abc import Iterable
from typing import TypeVar

from bundler.errors import BundlerError, LimitExceeded, UnsafeName
from bundler.format import names
from bundler.format.digest import DIGEST_BYTES, digest_text
from bundler.format.entries import (
    Artifact,
    FileLayout,
    HelperLibrary,
    Opaque,
    TuningFile,
    check_sizes,
)
from bundler.format.entry_rows import (
    NUMBERS_PER_SPAN,
    Entries,
    TargetRow,
    ToolchainRow,
    check_value,
    tuning_records,
)
from bundler.format.lazy_kernel import NUMBERS_PER_FILE_SPAN, spans_of
from bundler.format.limits import DEFAULT_LIMITS
from bundler.format.metadata import METADATA_BYTES
from bundler.format.summary import count

# Launch facts of one kernel are a kilobyte, key parts two; what is larger than this is one piece.
MAX_CUT_BYTES = 1 << 16
_SMALL_RUN_BYTES = 2048
_RUNS_REMEMBERED = 4096
# Of documents whose runs a writer knows.
_REMEMBERED_BYTES = 4 << 20
_RUNS_JOINED = 1024
_MEMBERS = msgspec.msgpack.Decoder(list[Raw])


def cut(document: bytes) -> list[bytes]:
    """Return the pieces of a document, which joined are the document.

    An array is cut before each of its members but the first, and each of its members that is an
    array is cut likewise, but not deeper.  What is no array, or larger than `MAX_CUT_BYTES`, is one
    piece.
    """
    members = _members(document) if len(document) <= MAX_CUT_BYTES else []
    if not members:
        return [document]
    pieces: list[bytes] = []
    for member in members:
        pieces += _remembered(member) if len(member) <= _SMALL_RUN_BYTES else _cut_once(member)
    pieces[0] = document[: len(document) - sum(map(len, members))] + pieces[0]
    return pieces


def _cut_once(member: bytes) -> list[bytes]:
    pieces = _members(member)
    if not pieces:
        return [member]
    pieces[0] = member[: len(member) - sum(map(len, pieces))] + pieces[0]
    return pieces


# Kernels share most members: arguments, options.
_remembered = functools.lru_cache(maxsize=1024)(_cut_once)


def _members(document: bytes) -> list[bytes]:
    """Return the members of an array; none where it is no array, or not msgpack."""
    # The decoder allocates what an array declares; each member takes a byte at least.
    if not document or wire.array_length(document) > len(document):
        return []
    try:
        return [*map(bytes, _MEMBERS.decode(document))]
    except wire.MSGSPEC_ERRORS:
        return []


class Numbers(dict[Any, int]):
    """Numbers what it is asked for, in the order in which it is asked first."""

    def __missing__(self, item: Any) -> int:
        number = self[item] = len(self)
        return number


class PieceWriter:
    """Collects pieces; each occurs once in `table`."""

    def __init__(self) -> None:
        self._numbers = Numbers()
        # Kernels that differ in nothing but their code have equal documents.
        self._known: dict[bytes, list[int]] = {}
        self._known_bytes = 0

    @property
    def table(self) -> list[bytes]:
        """The pieces, in the order in which they first occurred."""
        return list(self._numbers)

    def runs(self, document: bytes | None) -> list[int] | None:
        """Take the pieces of a document and return its runs, two numbers each."""
        if document is None:
            return None
        found = self._known.get(document)
        if found is None:
            found = self._runs(document)
            self._remember(document, found)
        return found

    def _runs(self, document: bytes) -> list[int]:
        numbers = [*map(self._numbers.__getitem__, cut(document))]
        steps = map(operator.sub, numbers[1:], numbers)
        begins = [0, *[at for at, step in enumerate(steps, 1) if step != 1]]
        return [
            *chain.from_iterable(
                (numbers[at], end - at) for at, end in pairwise([*begins, len(numbers)])
            )
        ]

    def _remember(self, document: bytes, runs: list[int]) -> None:
        self._known_bytes += len(document)
        if self._known_bytes > _REMEMBERED_BYTES:
            # As when nothing was remembered yet: where documents repeat, they come again soon.
            self._known.clear()
            self._known_bytes = len(document)
        self._known[document] = runs


class Pieces:
    """The pieces of a manifest.

    Args:
        table: the pieces.
        limits: bounds for one document and for all together.
    """

    def __init__(self, table: Sequence[bytes], limits: Limits) -> None:
        self._table, self._limits = table, limits
        self._ends = array("Q", accumulate(map(len, table), initial=0))
        self._seen = self._joined_bytes = 0
        # Many kernels have the same launch facts.
        self._sizes: dict[tuple[int, ...], int] = {}
        self._joined_runs: dict[tuple[int, int], bytes] = {}
        self._held: dict[bytes, bool] = {}

    def take(self, documents: Sequence[tuple[int, ...]]) -> bool:
        """Check the runs of the next documents at once.

        Returns:
            False when one may be wrong, and then none of them was taken: `check`, for one after the
            other, tells.
        """
        known = [*map(self._sizes.get, documents)]
        new = [runs for runs, size in zip(documents, known, strict=True) if size is None]
        measured = self._measured(new)
        if measured is None:
            return False
        sizes, seen = measured
        joined_bytes = self._joined_bytes + sum(filter(None, known)) + sum(sizes)
        if (
            max(sizes, default=0) > self._limits.facts_bytes
            or joined_bytes > self._limits.all_facts_bytes
        ):
            return False
        self._seen, self._joined_bytes = seen, joined_bytes
        if len(self._sizes) < _RUNS_REMEMBERED:
            self._sizes.update(zip(new, sizes, strict=True))
        return True

    def _measured(self, documents: Sequence[tuple[int, ...]]) -> tuple[list[int], int] | None:
        """Return the sizes of documents, and how many pieces were named after them; None where one
        may be wrong.
        """
        lengths = [*map(len, documents)]
        if any(length % 2 for length in lengths):
            return None
        try:
            numbers = array("I", [*chain.from_iterable(documents)])
        except OverflowError:
            return None
        # Each run as one number: kernels share most of their runs, and what is asked of a run is
        # asked once.
        runs = array("Q", numbers.tobytes()).tolist()
        sizes = dict.fromkeys(runs, 0)
        numbers = array("I", array("Q", sizes).tobytes())
        seen, last, ends = self._seen, len(self._table), self._ends
        for run, first, number in zip(sizes, numbers[::2], numbers[1::2], strict=True):
            end = first + number
            if end > seen:
                if end > last or first > seen:
                    return None
                seen = end
            if not number:
                return None
            sizes[run] = ends[end] - ends[first]
        before = [*accumulate(map(sizes.__getitem__, runs), initial=0)]
        bounds = [end // 2 for end in accumulate(lengths, initial=0)]
        return [before[end] - before[begin] for begin, end in pairwise(bounds)], seen

    def check(self, runs: tuple[int, ...] | None, key: str) -> None:
        """Check the runs of the next document, which is one of this kernel.

        Raises:
            FormatError: they are no runs of the table, or name a piece before those that precede it
                in the table.
            LimitExceeded: this document, or all together, would be too large.
        """
        if runs is None:
            return
        size = self._sizes.get(runs)
        if size is None:
            size = self._size(runs, key)
            if len(self._sizes) < _RUNS_REMEMBERED:
                self._sizes[runs] = size
        self._joined_bytes += size
        if size > self._limits.facts_bytes:
            self._limits.check("facts_bytes", size, f"{key}: launch facts or key parts")
        if self._joined_bytes > self._limits.all_facts_bytes:
            self._limits.check(
                "all_facts_bytes", self._joined_bytes, "launch facts and key parts of all kernels"
            )

    def _size(self, runs: tuple[int, ...], key: str) -> int:
        if len(runs) % 2:
            raise FormatError(
                f"{key}: {len(runs)} numbers in runs of pieces, expected pairs", key=key
            )
        size, seen, ends = 0, self._seen, self._ends
        for first, number in _pairs(runs):
            end = first + number
            if end > seen or not number:
                if end > len(self._table) or first > seen or not number:
                    raise FormatError(
                        f"{key}: a run of {number} pieces from {first}, of {len(self._table)},"
                        f" {seen} of them named before",
                        key=key,
                    )
                seen = end
            size += ends[end] - ends[first]
        self._seen = seen
        return size

    def check_used(self) -> None:
        """Raise `FormatError` when a piece is in none of the documents that were checked, or occurs
        twice.
        """
        self._sizes.clear()
        if self._seen != len(self._table) or len(set(self._table)) != len(self._table):
            raise FormatError("content: the pieces are not those of the kernels, each once")

    def any_holds(self, text: bytes) -> bool:
        """Tell whether one of the pieces holds a text; `cut` never cuts through a member of a
        member, such as a name.
        """
        # Asked for each kernel of a restore, with the same text.
        if text not in self._held:
            self._held[text] = any(text in piece for piece in self._table)
        return self._held[text]

    def join(self, runs: Sequence[int] | None) -> bytes | None:
        """Return the document that consists of these runs."""
        if runs is None:
            return None
        known, table, numbers = self._joined_runs, self._table, iter(runs)
        return b"".join(
            [
                table[first]
                if number == 1
                else known.get((first, number)) or self._run(first, number)
                for first, number in zip(numbers, numbers, strict=True)
            ]
        )

    def _run(self, first: int, number: int) -> bytes:
        # Kernels that differ in their constants alone share the runs around these.
        found = self._joined_runs.get((first, number))
        if found is None:
            found = b"".join(self._table[first : first + number])
            if len(found) <= _SMALL_RUN_BYTES and len(self._joined_runs) < _RUNS_JOINED:
                self._joined_runs[first, number] = found
        return found


def _pairs(runs: Sequence[int]) -> Iterator[tuple[int, int]]:
    return zip(runs[::2], runs[1::2], strict=True)


# Stands for the name of the kernel, at the beginning of a file name, which cannot hold it.
NAME = "*"
_NAMES_REMEMBERED = 4096


class KernelReferences(Struct, array_like=True, frozen=True, gc=False):
    """What is a kernel's own: the blob of each file, spans, and runs of pieces; None where the
    compile was not recorded.
    """

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


class KernelTables(Struct, frozen=True):
    """What kernels refer to."""

    names: Sequence[str]
    targets: Sequence[Target]
    toolchains: Sequence[Toolchain]
    specs: Sequence[SpecRow]
    file_lists: Sequence[tuple[str, ...]]
    pieces: Pieces
    blobs: BlobTable


class SharedTraits(Struct, frozen=True):
    """What kernels with the same numbers have in common."""

    order: FileOrder
    name: str
    target: Target
    toolchain: Toolchain


# The numbers of a kernel; those of one source file are few.
numbers_of: Callable[[KernelNumbers], tuple[int, ...]] = operator.attrgetter(
    "name", "target", "toolchain", "spec", "file_list"
)
_REFERENCES = msgspec.msgpack.Decoder(KernelReferences)
_FILE_REFERENCES = msgspec.msgpack.Decoder(FileReferences)


class SharedByNumbers(dict[tuple[int, ...], SharedTraits]):
    """What each combination of numbers stands for, in the order in which kernels are the first to
    have them.

    Raises, for one that is asked for the first time:
        IndexError: a number is beyond its table.
        UnsafeName, FormatError, LimitExceeded: the names of its files are not those of a kernel.
    """

    def __init__(self, tables: KernelTables, limits: Limits) -> None:
        super().__init__()
        self._tables, self._limits = tables, limits

    def __missing__(self, numbers: tuple[int, ...]) -> SharedTraits:
        name, target, toolchain, spec, file_list = numbers
        tables = self._tables
        file_names = tables.file_lists[file_list]
        self._limits.check("files_per_kernel", len(file_names), "kernel")
        order = file_order(file_layout(_with_name(tables.names[name], file_names)))
        _ = tables.specs[spec]
        found = self[numbers] = SharedTraits(
            order, tables.names[name], tables.targets[target], tables.toolchains[toolchain]
        )
        return found


class TableKernels:
    """Kernels that were decoded and checked; they are made when somebody asks for them.

    Args:
        rows: one for each kernel.
        tables: what they refer to.
        shared: what each combination of their numbers stands for.

    Attributes:
        keys: the key of each.
    """

    def __init__(
        self, rows: Sequence[KernelNumbers], tables: KernelTables, shared: SharedByNumbers
    ) -> None:
        self.keys = [row.key for row in rows]
        self._rows, self._tables, self._shared = rows, tables, shared
        self._launch_specs: dict[tuple[int, int], LaunchSpec] = {}
        self.blob_table = tables.blobs

    def make(self) -> tuple[LazyKernel, ...]:
        """Return the kernels, new ones each time."""
        of_row, rows = LazyKernel.of_row, self._rows
        shared = map(self._shared.__getitem__, map(numbers_of, rows))
        return tuple(
            [
                of_row(self, row, of.order, row.key, of.name, of.target, of.toolchain)
                for row, of in zip(rows, shared, strict=True)
            ]
        )

    def __iter__(self) -> Iterator[LazyKernel]:
        return iter(self.make())

    def references(self, row: KernelNumbers) -> FileReferences:
        """Return the files of a kernel."""
        return _FILE_REFERENCES.decode(row.references)

    def filenames(self, row: KernelNumbers) -> tuple[str, ...]:
        """Return the names of a kernel's files."""
        return _with_name(self._tables.names[row.name], self._tables.file_lists[row.file_list])

    def spec(self, row: KernelNumbers) -> LaunchSpec:
        """Return a kernel's launch spec; those of one row and name are one object."""
        found = self._launch_specs.get((row.spec, row.name))
        if found is None:
            made = self._tables.specs[row.spec].spec(self._tables.names[row.name])
            found = self._launch_specs[row.spec, row.name] = made
        return found

    def has_facts(self, row: KernelNumbers) -> bool:
        """Tell whether a kernel has launch facts."""
        return _REFERENCES.decode(row.references).facts is not None

    def facts(self, row: KernelNumbers) -> bytes | None:
        """Return a kernel's launch facts, encoded."""
        return self._tables.pieces.join(_REFERENCES.decode(row.references).facts)

    def parts(self, row: KernelNumbers) -> bytes | None:
        """Return a kernel's key parts, encoded."""
        return self._tables.pieces.join(_REFERENCES.decode(row.references).parts)

    def any_parts_hold(self, text: bytes) -> bool:
        """Tell whether the key parts of any kernel may hold a text that lies within one part."""
        return self._tables.pieces.any_holds(text)


@functools.lru_cache(_NAMES_REMEMBERED)
def _with_name(name: str, file_list: tuple[str, ...]) -> tuple[str, ...]:
    return tuple([name + item[1:] if item.startswith(NAME) else item for item in file_list])


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

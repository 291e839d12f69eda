# SPDX-License-Identifier: Apache-2.0
"""Kernels as they lie in a manifest: rows of numbers into its tables, of which each kernel is made
when somebody asks for it.

`TableKernels` has the rows of a manifest that were checked, and the tables: `BlobTable` has digest
and size of each file, `Pieces` what launch facts and key parts are put together from.  `LazyKernel` is a
kernel that knows its row: files, launch spec, launch facts and key parts are made when they are
read.  Everybody else sees a `Kernel`.
"""

# Annotations are real ones in this module: msgspec reads those of a struct that it decodes, and
# each that is a text is compiled for it.
import functools
import operator
import sys
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate, chain, islice, pairwise, repeat
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Raw, Struct

from bundler.errors import FormatError
from bundler.format import wire
from bundler.format.digest import DIGEST_BYTES, digest_raw, digest_text
from bundler.format.entries import (
    Artifact,
    FileLayout,
    Keep,
    Kernel,
    StoredFile,
    StoredFiles,
    Target,
    Toolchain,
    field_values,
    file_layout,
)
from bundler.format.limits import Limits
from bundler.format.sentinel import Span
from bundler.format.wire import Count

# Who restores kernels looks at no launch facts.
if TYPE_CHECKING:
    from bundler.format.constant_values import Value
    from bundler.format.launch_spec import LaunchSpec

NUMBERS_PER_SPAN = 3  # offset, place, style
# A file of a kernel that has path sentinels: its position, and then what a span has.
NUMBERS_PER_FILE_SPAN = NUMBERS_PER_SPAN + 1
# Nearly every kernel has the same one: an empty list of tensor descriptors.
_VALUES_REMEMBERED = 256
_SMALL_VALUE_BYTES = 1024
_SPANS_REMEMBERED = 1024
# Runs of pieces that are kept joined: small ones, and few.
SMALL_RUN_BYTES = 2048
_RUNS_REMEMBERED = 4096
_RUNS_JOINED = 1024

# Every variant of a kernel has files of the same names.
_NAMES_REMEMBERED = 4096


class _PickedFiles:
    """Files of a kernel, by their positions in its manifest.

    Attributes:
        positions: where each stands.
        as_listed: whether these are all files, in the order of the manifest.
        pick: returns what stands at these positions.
    """

    __slots__ = ("as_listed", "pick", "positions")

    def __init__(self, positions: tuple[int, ...], files: int) -> None:
        self.positions, self.as_listed = positions, positions == tuple(range(files))
        # There are two at the least, device binary and metadata, so what this returns is a tuple.
        self.pick: Callable[[tuple[Any, ...]], tuple[Any, ...]] = itemgetter(*positions)


class FileOrder:
    """A layout of files, and how those that are wanted are picked; kernels whose files lie alike
    have one, whatever their names.
    """

    __slots__ = ("all", "launch", "layout")

    def __init__(self, layout: FileLayout) -> None:
        self.layout, files = layout, len(layout.order)
        self.all, self.launch = (
            _PickedFiles(layout.order, files),
            _PickedFiles(layout.launch, files),
        )


file_order = lru_cache(_NAMES_REMEMBERED)(FileOrder)


class SpecRow(Struct, array_like=True, frozen=True, gc=False):
    """What a static launch needs; the tensor descriptors are a tagged value, still encoded."""

    entry: str | None
    num_warps: Count
    num_ctas: Count
    warp_size: Count
    shared_bytes: Count
    tmem_columns: Count | None
    global_scratch_bytes: Count | None
    global_scratch_align: Count | None
    profile_scratch_bytes: Count | None
    profile_scratch_align: Count | None
    cooperative: bool
    pdl: bool
    tensor_descriptors: Raw

    def spec(self, name: str) -> "LaunchSpec":
        """Return what it stands for; `name` is the entry point where the row names none."""
        from bundler.format.launch_spec import LaunchSpec

        entry, *figures, descriptors = msgspec.structs.astuple(self)
        value = value_of(bytes(descriptors))
        return LaunchSpec(name if entry is None else entry, *figures, value)  # type: ignore[call-arg]


def value_of(packed: bytes, limits: Limits | None = None, arrays: int = 0) -> "Value":
    """Return an encoded value; with `limits`, checked where it lies inside so many arrays."""
    if len(packed) <= _SMALL_VALUE_BYTES:
        return _small_value(packed, limits, arrays)
    return _value(packed, limits, arrays)


def _value(packed: bytes, limits: Limits | None, arrays: int) -> "Value":
    # Packed alone it lies inside no array; wrapped, it may also be a scalar, which is refused as
    # such.
    bounds = () if limits is None else (wire.inside(limits, arrays - 1),)
    (data,) = wire.unpack(b"\x91" + packed, "value", *bounds)
    if not wire.is_canonical(packed, data):
        raise FormatError("value: expected each number in its shortest form")
    from bundler.format.constant_values import Value

    return Value.from_wire(data)


_small_value = functools.lru_cache(_VALUES_REMEMBERED)(_value)


# Stands for the name of the kernel, at the beginning of a file name, which cannot hold it.
NAME = "*"


class FileReferences(Struct, array_like=True, frozen=True, gc=False):
    """The files of a kernel: the blob of each, and spans; for who wants no more, what follows is not
    decoded.
    """

    blobs: tuple[Count, ...]
    spans: tuple[int, ...]


class KernelReferences(FileReferences, array_like=True, frozen=True, gc=False):
    """What is a kernel's own: its files, and runs of pieces; None where the compile was not recorded."""

    facts: tuple[Count, ...] | None
    parts: tuple[Count, ...] | None


class KernelNumbers(Struct, array_like=True, frozen=True, gc=False):
    """A kernel: its key, numbers into the tables, and its references, which stay encoded."""

    key: str
    name: Count
    target: Count
    toolchain: Count
    spec: Count
    file_list: Count
    references: Raw


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
REFERENCES = msgspec.msgpack.Decoder(KernelReferences)
_FILE_REFERENCES = msgspec.msgpack.Decoder(FileReferences)


# What is compared of a digest first.
_HEAD_BYTES = 8


class BlobTable(Sequence[tuple[bytes, int]]):
    """Raw digest and size of every blob, by digest; the number of a blob is its place here.

    Attributes:
        digests: the raw digests, one after the other: that of blob `n` begins at 32 `n`.
        sizes: how many bytes each has.
    """

    def __init__(self, digests: bytes, sizes: Iterable[int]) -> None:
        self.digests, self.sizes = digests, array("Q", sizes)

    def digest(self, number: int) -> bytes:
        """Return the raw digest of a blob."""
        return self.digests[number * DIGEST_BYTES : (number + 1) * DIGEST_BYTES]

    def digests_of(self, numbers: Iterable[int]) -> list[bytes]:
        """Return the raw digests of several blobs."""
        digests = self.digests
        return [
            digests[number * DIGEST_BYTES : number * DIGEST_BYTES + DIGEST_BYTES]
            for number in numbers
        ]

    def sizes_of(self, numbers: Iterable[int]) -> list[int]:
        """Return the sizes of several blobs."""
        sizes = self.sizes
        return [sizes[number] for number in numbers]

    def number(self, digest: bytes) -> int | None:
        """Return the number of a blob by raw digest, None when there is no such blob."""
        number = bisect_left(range(len(self)), digest, key=self.digest)
        return number if number < len(self) and self.digest(number) == digest else None

    def is_sorted(self) -> bool:
        """Tell whether each digest is greater than the one before it."""
        packed = array("Q", self.digests)[:: DIGEST_BYTES // _HEAD_BYTES]
        if sys.byteorder == "little":
            packed.byteswap()
        # As numbers, of which each is greater than the one before it, unless two digests begin
        # alike.
        return _is_ascending(packed.tolist()) or _is_ascending(self.digests_of(range(len(self))))

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, number: Any) -> Any:
        if isinstance(number, slice):
            return tuple(self)[number]
        size = self.sizes[number]
        return self.digest(number % len(self.sizes)), size

    def __eq__(self, other: object) -> bool:
        return tuple(self) == (tuple(other) if isinstance(other, BlobTable) else other)

    def __hash__(self) -> int:
        return hash(self.digests)


def _is_ascending(values: Sequence[Any]) -> bool:
    return all(map(operator.lt, values, islice(values, 1, None)))


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
            if len(found) <= SMALL_RUN_BYTES and len(self._joined_runs) < _RUNS_JOINED:
                self._joined_runs[first, number] = found
        return found


def _pairs(runs: Sequence[int]) -> Iterator[tuple[int, int]]:
    return zip(runs[::2], runs[1::2], strict=True)


class TableKernels:
    """Kernels that were decoded and checked; they are made when somebody asks for them.

    Args:
        rows: one for each kernel.
        shared: what each combination of their numbers stands for.
        names, specs, file_lists, pieces, blobs: the tables that they refer to.

    Attributes:
        keys: the key of each.
        blobs: the table that the numbers of their files refer to.
    """

    def __init__(
        self,
        rows: Sequence[KernelNumbers],
        shared: Mapping[tuple[int, ...], SharedTraits],
        names: Sequence[str],
        specs: Sequence[SpecRow],
        file_lists: Sequence[tuple[str, ...]],
        pieces: Pieces,
        blobs: BlobTable,
    ) -> None:
        self.keys = [row.key for row in rows]
        self._rows, self._shared, self._names, self._specs = rows, shared, names, specs
        self._file_lists, self._pieces, self.blobs = file_lists, pieces, blobs
        self._launch_specs: dict[tuple[int, int], LaunchSpec] = {}

    def make(self) -> "tuple[LazyKernel, ...]":
        """Return the kernels, new ones each time."""
        of_row, rows = LazyKernel.of_row, self._rows
        shared = map(self._shared.__getitem__, map(numbers_of, rows))
        return tuple(
            [
                of_row(self, row, of.order, row.key, of.name, of.target, of.toolchain)
                for row, of in zip(rows, shared, strict=True)
            ]
        )

    def __iter__(self) -> "Iterator[LazyKernel]":
        return iter(self.make())

    def references(self, row: KernelNumbers) -> FileReferences:
        """Return the files of a kernel."""
        return _FILE_REFERENCES.decode(row.references)

    def filenames(self, row: KernelNumbers) -> tuple[str, ...]:
        """Return the names of a kernel's files."""
        return with_name(self._names[row.name], self._file_lists[row.file_list])

    def spec(self, row: KernelNumbers) -> "LaunchSpec":
        """Return a kernel's launch spec; those of one row and name are one object."""
        found = self._launch_specs.get((row.spec, row.name))
        if found is None:
            made = self._specs[row.spec].spec(self._names[row.name])
            found = self._launch_specs[row.spec, row.name] = made
        return found

    def has_facts(self, row: KernelNumbers) -> bool:
        """Tell whether a kernel has launch facts."""
        return REFERENCES.decode(row.references).facts is not None

    def facts(self, row: KernelNumbers) -> bytes | None:
        """Return a kernel's launch facts, encoded."""
        return self._pieces.join(REFERENCES.decode(row.references).facts)

    def parts(self, row: KernelNumbers) -> bytes | None:
        """Return a kernel's key parts, encoded."""
        return self._pieces.join(REFERENCES.decode(row.references).parts)

    def any_parts_hold(self, text: bytes) -> bool:
        """Tell whether the key parts of any kernel may hold a text that lies within one part."""
        return self._pieces.any_holds(text)


@functools.lru_cache(_NAMES_REMEMBERED)
def with_name(name: str, file_list: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names of a kernel's files."""
    return tuple([name + item[1:] if item.startswith(NAME) else item for item in file_list])


# The files of a kernel that somebody wants, as numbers: their names, which are the same object for
# kernels with equal ones, mostly; the number of the blob of each; and path sentinels, four numbers
# each: the position of the file among these, then offset, place and style.
_StoredNumbers = tuple[tuple[str, ...], tuple[int, ...], tuple[int, ...]]
_new, _set = object.__new__, object.__setattr__


class _Lazy:
    """A field that is made when it is read.

    Two threads may make it twice, which costs time, never correctness; a lock could be held at the
    moment of a fork.

    Args:
        make: makes it of a kernel.
        kept: whether the kernel keeps it, and gives it again when it is read again.
    """

    def __init__(self, make: Callable[[Any], Any], *, kept: bool) -> None:
        self._make, self._kept = make, kept

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, kernel: Any, owner: type) -> Any:
        if kernel is None:
            return self
        value = self._make(kernel)
        if self._kept:
            # Not by its `__dict__`, for the reason that `of_row` has.
            _set(kernel, self._name, value)
        return value


def _lazy(make: Callable[[Any], Any]) -> Any:
    # What a type checker sees is the type of the field, which the descriptor stands for.
    return _Lazy(make, kept=True)


def _lazy_and_forgotten(make: Callable[[Any], Any]) -> Any:
    # Joined from pieces in a microsecond, launch facts and key parts of many kernels take far more
    # memory than the pieces.
    return _Lazy(make, kept=False)


class LazyKernel(Kernel):
    """A kernel that knows its row in a decoded manifest; equal to any other kernel with the same
    fields.
    """

    _source: TableKernels
    _row: Any
    _order: FileOrder

    @_lazy
    def artifacts(self) -> tuple[Artifact, ...]:
        """All its files, as the manifest lists them."""
        references, filenames = (
            self._source.references(self._row),
            self._source.filenames(self._row),
        )
        spans, table = spans_by_position(references.spans), self._source.blobs
        return tuple(
            [
                Artifact(
                    name,
                    digest_text(table.digest(blob)),
                    table.sizes[blob],
                    spans.get(position, ()),
                )
                for position, (name, blob) in enumerate(
                    zip(filenames, references.blobs, strict=True)
                )
            ]
        )

    @_lazy
    def spec(self) -> "LaunchSpec":
        """What a static launch needs."""
        return self._source.spec(self._row)

    @_lazy_and_forgotten
    def facts_bytes(self) -> bytes | None:
        """Launch facts, encoded."""
        return self._source.facts(self._row)

    @_lazy_and_forgotten
    def parts_bytes(self) -> bytes | None:
        """Key parts, encoded."""
        return self._source.parts(self._row)

    def __new__(cls, *fields: Any, **more: Any) -> Any:
        """Return a plain kernel: what `dataclasses.replace` makes of this one has no row."""
        return Kernel(*fields, **more)

    def __reduce__(self) -> tuple[Any, ...]:
        return Kernel, field_values(self)

    @classmethod
    def of_row(
        cls,
        source: TableKernels,
        row: Any,
        order: FileOrder,
        key: str,
        name: str,
        target: Target,
        toolchain: Toolchain,
    ) -> "LazyKernel":
        """Return the kernel of a row whose files were checked."""
        kernel: LazyKernel = _new(cls)
        # One by one, and not by its `__dict__`: as long as nobody asks for that, a kernel takes
        # less than half of the memory.
        _set(kernel, "key", key)
        _set(kernel, "name", name)
        _set(kernel, "target", target)
        _set(kernel, "toolchain", toolchain)
        _set(kernel, "_source", source)
        _set(kernel, "_row", row)
        _set(kernel, "_order", order)
        return kernel

    @property
    def has_facts(self) -> bool:
        """Whether there are launch facts; nothing is joined for it."""
        return self._source.has_facts(self._row)

    @property
    def layout(self) -> FileLayout:
        """What the names of its files say about them."""
        return self._order.layout

    @property
    def size(self) -> int:
        """Bytes of all files as stored."""
        return sum(self._source.blobs.sizes_of(self._source.references(self._row).blobs))

    def listed_blobs(self, keep: Keep = "all") -> list[tuple[bytes, int]]:
        """Return raw digest and size of each file, in the order of the manifest, or of each that is
        launched, in that of the layout.
        """
        table, blobs = self._source.blobs, self._source.references(self._row).blobs
        if keep == "launch":
            blobs = self._order.launch.pick(blobs)
        return [*zip(table.digests_of(blobs), table.sizes_of(blobs), strict=True)]

    def stored_numbers(self, keep: Keep = "all") -> _StoredNumbers:
        """Return the files that `keep` asks for, in Triton's order, by the numbers of their blobs
        in the table of its source.
        """
        wanted = self._order.launch if keep == "launch" else self._order.all
        references, filenames = (
            self._source.references(self._row),
            self._source.filenames(self._row),
        )
        if wanted.as_listed:
            return filenames, references.blobs, references.spans
        spans, pick = references.spans, wanted.pick
        return (
            _picked(filenames, pick),
            pick(references.blobs),
            spans and _moved_spans(spans, wanted.positions),
        )

    def files(self, keep: Keep = "all") -> Iterator[StoredFile]:
        """Yield name, raw digest, size and path sentinels of its files, in Triton's order."""
        filenames, numbers, flat = self.stored_numbers(keep)
        table = self._source.blobs
        spans = _spans_in_order(flat, len(numbers)) if flat else repeat(())
        # Each has one for each file, and the last may have no end.
        return zip(filenames, table.digests_of(numbers), table.sizes_of(numbers), spans)  # noqa: B905

    def stored_files(self, keep: Keep = "all") -> StoredFiles:
        """Return what `files` yields, by columns."""
        filenames, numbers, spans = self.stored_numbers(keep)
        table = self._source.blobs
        return StoredFiles(
            filenames,
            tuple(table.digests_of(numbers)),
            sum(table.sizes_of(numbers)),
            spans,
            file_layout(filenames),
        )

    def binary_file(self) -> tuple[str, bytes]:
        """Return name and raw digest of the device binary; no other file is looked at."""
        binary, source, row = self._order.layout.binary, self._source, self._row
        digest = source.blobs.digest(source.references(row).blobs[binary])
        return source.filenames(row)[binary], digest

    def with_artifacts(self, artifacts: Iterable[Artifact]) -> Kernel:
        """Return the same kernel with other files; what is not decoded yet stays so."""
        other = object.__new__(_Refiled)
        other.__dict__.update(
            key=self.key,
            name=self.name,
            target=self.target,
            toolchain=self.toolchain,
            artifacts=tuple(artifacts),
            _source=self._source,
            _row=self._row,
        )
        return other


def parts_may_hold(kernel: Kernel, text: bytes) -> bool:
    """Tell whether a kernel's key parts may hold a text, such as the name of a part; False is
    certain, and decodes nothing.
    """
    source: TableKernels | None = getattr(kernel, "_source", None)
    return (source is None or source.any_parts_hold(text)) and text in (kernel.parts_bytes or b"")


def any_parts_may_hold(kernels: Iterable[Kernel], text: bytes) -> bool:
    """Tell whether the key parts of one of many kernels may hold a text; False is certain, and
    looks once at what they have in common.
    """
    sources: set[TableKernels | None] = {getattr(kernel, "_source", None) for kernel in kernels}
    return any(source is None or source.any_parts_hold(text) for source in sources)


def blobs_of_files(kernel: Kernel, keep: Keep = "all") -> Sequence[tuple[bytes, int]]:
    """Return raw digest and size of each file of a kernel, as its layout counts them, or of its
    launch set; for who lists the blobs of thousands.
    """
    if type(kernel) is LazyKernel:  # one with other files has a row too
        return kernel.listed_blobs(keep)
    artifacts = (
        kernel.artifacts
        if keep == "all"
        else [kernel.artifacts[place] for place in kernel.layout.launch]
    )
    return [(digest_raw(artifact.digest), artifact.size) for artifact in artifacts]


class _Refiled(LazyKernel):
    """A lazy kernel with files of its own."""

    layout = Kernel.layout
    binary_file = Kernel.binary_file
    size = Kernel.size
    files = Kernel.files
    stored_files = Kernel.stored_files


@lru_cache(_SPANS_REMEMBERED)
def spans_of(flat: tuple[int, ...]) -> tuple[Span, ...]:
    """Return the path sentinels that a manifest holds as three numbers each."""
    return tuple(Span(*flat[start : start + 3]) for start in range(0, len(flat), 3))


@lru_cache(_SPANS_REMEMBERED)
def spans_by_position(flat: tuple[int, ...]) -> Mapping[int, tuple[Span, ...]]:
    """Return the path sentinels of a kernel's files by position, from four numbers each: the
    position, and what a span has.
    """
    grouped: dict[int, list[int]] = {}
    for start in range(0, len(flat), NUMBERS_PER_FILE_SPAN):
        position, *numbers = flat[start : start + NUMBERS_PER_FILE_SPAN]
        grouped.setdefault(position, []).extend(numbers)
    return {position: spans_of(tuple(numbers)) for position, numbers in grouped.items()}


@lru_cache(_NAMES_REMEMBERED)
def _picked(
    filenames: tuple[str, ...], pick: Callable[[tuple[Any, ...]], tuple[Any, ...]]
) -> tuple[str, ...]:
    return pick(filenames)


@lru_cache(_SPANS_REMEMBERED)
def _spans_in_order(flat: tuple[int, ...], files: int) -> tuple[tuple[Span, ...], ...]:
    """Return the path sentinels of each of so many files."""
    by_position = spans_by_position(flat)
    return tuple([by_position.get(position, ()) for position in range(files)])


@lru_cache(_SPANS_REMEMBERED)
def _moved_spans(flat: tuple[int, ...], positions: tuple[int, ...]) -> tuple[int, ...]:
    """Return the path sentinels of the files at these positions, by their places among these."""
    places = {position: place for place, position in enumerate(positions)}
    each = [
        flat[start : start + NUMBERS_PER_FILE_SPAN]
        for start in range(0, len(flat), NUMBERS_PER_FILE_SPAN)
    ]
    moved = sorted(
        (places[position], number, rest)
        for number, (position, *rest) in enumerate(each)
        if position in places
    )
    return tuple([number for place, _, rest in moved for number in (place, *rest)])

# SPDX-License-Identifier: Apache-2.0
"""Kernels as they lie in a manifest: rows of numbers into its tables, of which each kernel is made
when somebody asks for it.

`TableKernels` has the rows of a manifest that were checked, and the tables.  `LazyKernel` is a
kernel that knows its row: files, launch spec, launch facts and key parts are made when they are
read.  Everybody else sees a `Kernel`.
"""

# Annotations are real ones in this module: msgspec reads those of a struct that it decodes, and
# each that is a text is compiled for it.
import dataclasses
import functools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import repeat
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
    file_layout,
)
from bundler.format.limits import Limits
from bundler.format.sentinel import Span
from bundler.format.wire import Count

# Who restores kernels looks at no launch facts.
if TYPE_CHECKING:
    from bundler.format.constant_values import Value
    from bundler.format.content_tables import BlobTable, Pieces
    from bundler.format.launch_spec import LaunchSpec

NUMBERS_PER_SPAN = 3  # offset, place, style
# A file of a kernel that has path sentinels: its position, and then what a span has.
NUMBERS_PER_FILE_SPAN = NUMBERS_PER_SPAN + 1
# Nearly every kernel has the same one: an empty list of tensor descriptors.
_VALUES_REMEMBERED = 256
_SMALL_VALUE_BYTES = 1024
_SPANS_REMEMBERED = 1024
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

        return LaunchSpec(
            name if self.entry is None else self.entry,
            self.num_warps,
            self.num_ctas,
            self.warp_size,
            self.shared_bytes,
            self.tmem_columns,
            self.global_scratch_bytes,
            self.global_scratch_align,
            self.profile_scratch_bytes,
            self.profile_scratch_align,
            self.cooperative,
            self.pdl,
            value_of(bytes(self.tensor_descriptors)),
        )


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
        pieces: "Pieces",
        blobs: "BlobTable",
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
        return Kernel, tuple(getattr(self, field.name) for field in dataclasses.fields(self))

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
        digests, sizes, width = (
            self._source.blobs.digests,
            self._source.blobs.sizes,
            DIGEST_BYTES,
        )
        spans = _spans_in_order(flat, len(numbers)) if flat else repeat(())
        # Each has one for each file, and the last may have no end.
        return zip(  # noqa: B905
            filenames,
            [digests[number * width : number * width + width] for number in numbers],
            [sizes[number] for number in numbers],
            spans,
        )

    def stored_files(self, keep: Keep = "all") -> StoredFiles:
        """Return what `files` yields, by columns."""
        filenames, numbers, spans = self.stored_numbers(keep)
        table, width = self._source.blobs, DIGEST_BYTES
        digests, sizes = table.digests, table.sizes
        return StoredFiles(
            filenames,
            tuple([digests[number * width : number * width + width] for number in numbers]),
            sum([sizes[number] for number in numbers]),
            spans,
            file_layout(filenames),
        )

    def binary_file(self) -> tuple[str, bytes]:
        """Return name and raw digest of the device binary; no other file is looked at."""
        binary, source, row = self._order.layout.binary, self._source, self._row
        start = source.references(row).blobs[binary] * DIGEST_BYTES
        return source.filenames(row)[binary], source.blobs.digests[start : start + DIGEST_BYTES]

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

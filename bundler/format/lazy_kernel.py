# SPDX-License-Identifier: Apache-2.0
"""`LazyKernel`: a kernel of a loaded bundle, whose files, launch spec, launch facts and key parts
are made when asked for.

`TableKernels` makes them, one for each kernel of a manifest, and is the `KernelSource` that knows
how a kernel lies in its manifest.  Everybody else sees a `Kernel`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import repeat
from typing import TYPE_CHECKING, Any

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
from bundler.format.entry_rows import NUMBERS_PER_SPAN
from bundler.format.kernel_source import FileOrder, KernelSource, StoredNumbers
from bundler.format.sentinel import Span

if TYPE_CHECKING:
    from bundler.format.launch_spec import LaunchSpec

_SPANS_REMEMBERED = 1024
# Every variant of a kernel has files of the same names.
_NAMES_REMEMBERED = 4096
# A file of a kernel that has path sentinels: its position, and then what a span has.
NUMBERS_PER_FILE_SPAN = NUMBERS_PER_SPAN + 1


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

    _source: KernelSource
    _row: Any
    _order: FileOrder

    @_lazy
    def artifacts(self) -> tuple[Artifact, ...]:
        """All its files, as the manifest lists them."""
        references, filenames = (
            self._source.references(self._row),
            self._source.filenames(self._row),
        )
        spans, table = spans_by_position(references.spans), self._source.blob_table
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
    def spec(self) -> LaunchSpec:
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
        source: KernelSource,
        row: Any,
        order: FileOrder,
        key: str,
        name: str,
        target: Target,
        toolchain: Toolchain,
    ) -> LazyKernel:
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
        return sum(self._source.blob_table.sizes_of(self._source.references(self._row).blobs))

    def listed_blobs(self, keep: Keep = "all") -> list[tuple[bytes, int]]:
        """Return raw digest and size of each file, in the order of the manifest, or of each that is
        launched, in that of the layout.
        """
        table, blobs = self._source.blob_table, self._source.references(self._row).blobs
        if keep == "launch":
            blobs = self._order.launch.pick(blobs)
        return [*zip(table.digests_of(blobs), table.sizes_of(blobs), strict=True)]

    def stored_numbers(self, keep: Keep = "all") -> StoredNumbers:
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
            self._source.blob_table.digests,
            self._source.blob_table.sizes,
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
        table, width = self._source.blob_table, DIGEST_BYTES
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
        return source.filenames(row)[binary], source.blob_table.digests[
            start : start + DIGEST_BYTES
        ]

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
    source: KernelSource | None = getattr(kernel, "_source", None)
    return (source is None or source.any_parts_hold(text)) and text in (kernel.parts_bytes or b"")


def any_parts_may_hold(kernels: Iterable[Kernel], text: bytes) -> bool:
    """Tell whether the key parts of one of many kernels may hold a text; False is certain, and
    looks once at what they have in common.
    """
    sources: set[KernelSource | None] = {getattr(kernel, "_source", None) for kernel in kernels}
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

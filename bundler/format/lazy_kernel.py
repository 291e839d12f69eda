# SPDX-License-Identifier: Apache-2.0
"""`LazyKernel`: a kernel of a loaded bundle, whose files, launch spec, launch facts and key parts are made when asked for.

`content_rows` and `content_tables` make them, one for each kernel of a manifest, and are the `KernelSource` that knows how a
kernel lies in its manifest.  Everybody else sees a `Kernel`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Protocol

from bundler.format.digest import digest_raw, digest_text
from bundler.format.entries import Artifact, FileLayout, Keep, Kernel, StoredFile, Target, Toolchain
from bundler.format.entry_rows import NUMBERS_PER_SPAN
from bundler.format.sentinel import Span

if TYPE_CHECKING:
    from bundler.format.launch_spec import LaunchSpec

_SPANS_REMEMBERED = 1024
# A file of a kernel that has path sentinels: its position, and then what a span has.
NUMBERS_PER_FILE_SPAN = NUMBERS_PER_SPAN + 1


class KernelSource(Protocol):
    """A decoded manifest, of which each kernel is a row."""

    def files(self, row: Any, positions: Iterable[int]) -> Iterable[StoredFile]:
        """Return the files of a kernel at these positions."""

    def file(self, row: Any, position: int) -> tuple[str, bytes]:
        """Return name and raw digest of one file of a kernel."""

    def blobs(self, row: Any) -> Sequence[tuple[bytes, int]]:
        """Return raw digest and size of each file of a kernel."""

    def sizes(self, row: Any) -> Sequence[int]:
        """Return the size of each file of a kernel."""

    def spec(self, row: Any) -> LaunchSpec:
        """Return a kernel's launch spec."""

    def has_facts(self, row: Any) -> bool:
        """Tell whether a kernel has launch facts."""

    def facts(self, row: Any) -> bytes | None:
        """Return a kernel's launch facts, encoded."""

    def parts(self, row: Any) -> bytes | None:
        """Return a kernel's key parts, encoded."""

    def any_parts_hold(self, text: bytes) -> bool:
        """Tell whether the key parts of any kernel may hold a text that lies within one part; False is certain."""


class _Lazy:
    """A field that is made when it is read.

    Two threads may make it twice, which costs time, never correctness; a lock could be held at the moment of a fork.

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
            kernel.__dict__[self._name] = value
        return value


def _lazy(make: Callable[[Any], Any]) -> Any:
    # What a type checker sees is the type of the field, which the descriptor stands for.
    return _Lazy(make, kept=True)


def _lazy_and_forgotten(make: Callable[[Any], Any]) -> Any:
    # Joined from pieces in a microsecond, launch facts and key parts of many kernels take far more memory than the pieces.
    return _Lazy(make, kept=False)


class LazyKernel(Kernel):
    """A kernel that knows its row in a decoded manifest; equal to any other kernel with the same fields."""

    _source: KernelSource
    _row: Any
    _layout: FileLayout

    @_lazy
    def artifacts(self) -> tuple[Artifact, ...]:
        """All its files, as the manifest lists them."""
        positions = range(len(self._layout.order))
        return tuple(
            Artifact(name, digest_text(digest), size, spans)
            for name, digest, size, spans in self._source.files(self._row, positions)
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
        cls, source: KernelSource, row: Any, layout: FileLayout,
        key: str, name: str, target: Target, toolchain: Toolchain,
    ) -> LazyKernel:  # fmt: skip
        """Return the kernel of a row whose files were checked."""
        kernel = object.__new__(cls)
        # A frozen dataclass sets its fields one by one, which takes longer than all else here.
        kernel.__dict__.update(
            key=key, name=name, target=target, toolchain=toolchain, _source=source, _row=row, _layout=layout
        )
        return kernel

    @property
    def has_facts(self) -> bool:
        """Whether there are launch facts; nothing is joined for it."""
        return self._source.has_facts(self._row)

    @property
    def layout(self) -> FileLayout:
        """What the names of its files say about them."""
        return self._layout

    @property
    def size(self) -> int:
        """Bytes of all files as stored."""
        return sum(self._source.sizes(self._row))

    def files(self, keep: Keep = "all") -> Iterator[StoredFile]:
        """Yield name, raw digest, size and path sentinels of its files, in Triton's order."""
        return iter(self._source.files(self._row, self._layout.launch if keep == "launch" else self._layout.order))

    def binary_file(self) -> tuple[str, bytes]:
        """Return name and raw digest of the device binary; no other file is looked at."""
        return self._source.file(self._row, self._layout.binary)

    def with_artifacts(self, artifacts: Iterable[Artifact]) -> Kernel:
        """Return the same kernel with other files; what is not decoded yet stays so."""
        other = object.__new__(_Refiled)
        other.__dict__.update(
            key=self.key, name=self.name, target=self.target, toolchain=self.toolchain, artifacts=tuple(artifacts),
            _source=self._source, _row=self._row,
        )  # fmt: skip
        return other


def parts_may_hold(kernel: Kernel, text: bytes) -> bool:
    """Tell whether a kernel's key parts may hold a text, such as the name of a part; False is certain, and decodes nothing."""
    source: KernelSource | None = vars(kernel).get("_source")
    return (source is None or source.any_parts_hold(text)) and text in (kernel.parts_bytes or b"")


def blobs_of_files(kernel: Kernel) -> Sequence[tuple[bytes, int]]:
    """Return raw digest and size of each file of a kernel, as its layout counts them; for who lists the blobs of thousands."""
    if type(kernel) is LazyKernel:  # one with other files has a row too
        of_row = vars(kernel)
        found: Sequence[tuple[bytes, int]] = of_row["_source"].blobs(of_row["_row"])
        return found
    return [(digest_raw(artifact.digest), artifact.size) for artifact in kernel.artifacts]


class _Refiled(LazyKernel):
    """A lazy kernel with files of its own."""

    layout = Kernel.layout
    binary_file = Kernel.binary_file
    size = Kernel.size
    files = Kernel.files


@lru_cache(_SPANS_REMEMBERED)
def spans_of(flat: tuple[int, ...]) -> tuple[Span, ...]:
    """Return the path sentinels that a manifest holds as three numbers each."""
    return tuple(Span(*flat[start : start + 3]) for start in range(0, len(flat), 3))


@lru_cache(_SPANS_REMEMBERED)
def spans_by_position(flat: tuple[int, ...]) -> Mapping[int, tuple[Span, ...]]:
    """Return the path sentinels of a kernel's files by position, from four numbers each: the position, and what a span has."""
    grouped: dict[int, list[int]] = {}
    for start in range(0, len(flat), NUMBERS_PER_FILE_SPAN):
        position, *numbers = flat[start : start + NUMBERS_PER_FILE_SPAN]
        grouped.setdefault(position, []).extend(numbers)
    return {position: spans_of(tuple(numbers)) for position, numbers in grouped.items()}

# SPDX-License-Identifier: Apache-2.0
"""`KernelSource`: what a decoded manifest answers for each `LazyKernel`, and in which order the
files of such a kernel are.

`TableKernels` is that source; `content_tables` and `Content` deal with its kernels before any is
made.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Protocol

from bundler.format.blob_table import BlobTable
from bundler.format.entries import FileLayout

if TYPE_CHECKING:
    from bundler.format.launch_spec import LaunchSpec

_LAYOUTS_REMEMBERED = 4096


class ListedFiles(Protocol):
    """The files of a kernel as its manifest lists them."""

    @property
    def blobs(self) -> tuple[int, ...]:
        """For each file the number of its blob."""

    @property
    def spans(self) -> tuple[int, ...]:
        """Path sentinels, four numbers each: the position of the file, then offset, place and
        style.
        """


class KernelSource(Protocol):
    """A decoded manifest, of which each kernel is a row."""

    @property
    def blob_table(self) -> BlobTable:
        """The blobs that the numbers of its kernels' files refer to."""

    def references(self, row: Any) -> ListedFiles:
        """Return the files of a kernel."""

    def filenames(self, row: Any) -> tuple[str, ...]:
        """Return the names of a kernel's files; kernels with equal ones have the same object,
        mostly.
        """

    def spec(self, row: Any) -> LaunchSpec:
        """Return a kernel's launch spec."""

    def has_facts(self, row: Any) -> bool:
        """Tell whether a kernel has launch facts."""

    def facts(self, row: Any) -> bytes | None:
        """Return a kernel's launch facts, encoded."""

    def parts(self, row: Any) -> bytes | None:
        """Return a kernel's key parts, encoded."""

    def any_parts_hold(self, text: bytes) -> bool:
        """Tell whether the key parts of any kernel may hold a text that lies within one part; False
        is certain.
        """


#: The files of a kernel that somebody wants, as numbers: their names, which are the same object for
#: kernels with equal ones, mostly; the number of the blob of each; and path sentinels, four numbers
#: each: the position of the file among these, then offset, place and style.
StoredNumbers = tuple[tuple[str, ...], tuple[int, ...], tuple[int, ...]]


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


file_order = lru_cache(_LAYOUTS_REMEMBERED)(FileOrder)

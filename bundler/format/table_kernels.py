# SPDX-License-Identifier: Apache-2.0
"""`TableKernels`: the kernels of a content, as numbers into its tables; it answers what a
`LazyKernel` asks.

`content_tables` makes one of what it decoded, `kernel_columns` checks what is in it, and `Content`
has it make the kernels when somebody asks for them.
"""

# Annotations are real ones in this module, as in `entry_rows`.
import functools
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import msgspec
from msgspec import Raw, Struct

from bundler.format.blob_table import BlobTable
from bundler.format.document_pieces import Pieces
from bundler.format.entries import Target, Toolchain, file_layout
from bundler.format.entry_rows import Count, SpecRow
from bundler.format.kernel_source import FileOrder, file_order
from bundler.format.lazy_kernel import LazyKernel
from bundler.format.limits import Limits

if TYPE_CHECKING:
    from bundler.format.launch_spec import LaunchSpec

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

    def spec(self, row: KernelNumbers) -> "LaunchSpec":
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

# SPDX-License-Identifier: Apache-2.0
"""`Placement`: one kernel on its way from a bundle into a cache directory.

::

    planned        which files, by their digests
    read           their bytes, as the bundle stores them: paths are placeholders
    localized      what is changed in them below one cache directory of this machine
    CacheDirectory writes it, verified, and says what became of it (`cache_directory.py`)

A restore sends many placements that way, a kernel that Triton asks for is one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import islice
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from bundler.errors import FormatError
from bundler.format import sentinel
from bundler.format.bundle import BlobSource, Keep
from bundler.format.digest import check_digest
from bundler.format.entries import Kernel, file_layout
from bundler.format.lazy_kernel import spans_by_position
from bundler.format.limits import METADATA_BYTES, check_metadata_size
from bundler.format.sentinel import check_edits, edited
from bundler.lifecycle.kernel_writer import (
    ALREADY_CHECKED,
    Buffer,
    FileEdits,
    NewKernel,
    group_file,
)

Trust = Literal["kernels", "code", "signed"]
# Metadata of kernels of one name have their paths at the same few places.
_CHANGES_REMEMBERED = 1024
NEEDS_TRUST = (
    "it would be executed or unpickled; pass trust='code' if you trust who made the bundle"
)


class Placement(Struct, gc=False):
    """A kernel on its way into a cache directory; `planned`, `read` and `localized` fill it in.

    Attributes:
        key: its kernel key, the name of the directory.
        names: of every file but the group file, in Triton's order.
        digests: the raw digest of each.
        size_bytes: bytes of all files as stored, and once it is localized as they are written.
        spans: path placeholders, four numbers each: the position of the file, then offset, place
            and style.
        binary, metadata: positions of device binary and metadata.
        contents: the bytes of each file.
        stored_metadata: the metadata with its placeholders, to recognise another build by.
        compared: whether these were compared with their digests; else who writes them does.
        checked: whether Triton can read binary and metadata; else who writes them looks.
        edits: what is changed in files when they are written, in the order of their positions.
        rewritten: names of the files that hold a path of this machine.
    """

    key: str
    names: tuple[str, ...]
    digests: tuple[bytes, ...]
    size_bytes: int
    spans: tuple[int, ...] = ()
    binary: int = ALREADY_CHECKED
    metadata: int = ALREADY_CHECKED
    contents: tuple[Buffer, ...] = ()
    stored_metadata: Buffer = b""
    compared: bool = False
    checked: bool = False
    edits: tuple[FileEdits, ...] = ()
    rewritten: tuple[str, ...] = ()

    @property
    def files(self) -> Iterator[tuple[str, Buffer]]:
        """Name and bytes of every file but the group file."""
        return zip(self.names, self.contents, strict=True)

    def new_kernel(self, temporary: str, directory: str) -> NewKernel:
        """Return what a writer takes.

        Args:
            temporary: the name of its temporary directory.
            directory: the path of the cache directory with a slash behind it, as it stands in JSON.
        """
        group, text = group_file(self.names, directory)
        return (
            temporary,
            self.key,
            self.names,
            self.contents,
            () if self.compared else self.digests,
            self.edits,
            ALREADY_CHECKED if self.checked else self.binary,
            ALREADY_CHECKED if self.checked else self.metadata,
            group,
            text,
        )

    def verified(self) -> Placement:
        """Return the same with nothing left to verify, and its files as they are written; raises
        `DigestMismatch` or `FormatError`.
        """
        if not self.compared:
            for name, data, digest in zip(self.names, self.contents, self.digests, strict=True):
                check_digest(data, digest, name)
        if not self.checked:
            # Writers in C look themselves, and a restore into an empty directory does not need it.
            from bundler.lifecycle.kernel_directory import why_unreadable

            (binary, metadata) = (
                (self.names[place], bytes(self.contents[place]))
                for place in (self.binary, self.metadata)
            )
            reason = why_unreadable(self.key, binary, metadata)
            if reason is not None:
                raise FormatError(reason, key=self.key)
        for position, edits in self.edits:
            check_edits(self.contents[position], edits)
        return replace(self.edited(), compared=True, checked=True)

    def edited(self) -> Placement:
        """Return the same with its files as they are written."""
        changed = [*self.contents]
        for position, edits in self.edits:
            changed[position] = edited(changed[position], edits)
        return replace(self, contents=tuple(changed), edits=())


def planned(kernel: Kernel, keep: Keep) -> Placement:
    """Return the placement of a kernel, of whose files those are wanted that `keep` says."""
    files = kernel.stored_files(keep)
    layout = files.layout
    return Placement(
        kernel.key,
        files.names,
        files.digests,
        files.size_bytes,
        files.spans,
        layout.binary,
        layout.metadata,
    )


def read(source: BlobSource, placements: Sequence[Placement]) -> None:
    """Read the files of kernels; who writes them verifies them, and looks whether Triton can read
    them.

    Raises:
        DigestMismatch, FormatError, NotFound: those of one are damaged, or not there.
    """
    # Files and stores leave the comparing to who writes; nothing is hashed twice.
    compared = source.verified and source.verifies_stored
    contents = iter(source.stored_blobs([digest for one in placements for digest in one.digests]))
    for one in placements:
        one.contents, one.compared = (*islice(contents, len(one.digests)),), compared
        one.stored_metadata = one.contents[one.metadata]


def localized(placement: Placement, directory: str, triton_dir: str | None) -> Placement:
    """Return what is written of a kernel, which was read, below a cache directory.

    Args:
        placement: the kernel.
        directory: the cache directory.
        triton_dir: where Triton is installed, None when it is not.

    Raises:
        FormatError: Triton could not read it there.
    """
    names, position = placement.names, placement.metadata
    edits, growth, metadata_growth, rewritten = (
        _changes(names, placement.spans, directory, triton_dir)
        if placement.spans
        else ((), 0, 0, ())
    )
    # With other paths it has another size.
    metadata_bytes = metadata_growth + len(placement.contents[position])
    if metadata_bytes > METADATA_BYTES:
        check_metadata_size(metadata_bytes, names[position])
    size_bytes = placement.size_bytes + growth
    return replace(placement, size_bytes=size_bytes, edits=edits, rewritten=rewritten)


def localize(
    spans: Sequence[sentinel.Span], data: bytes, directory: str, triton_dir: str | None
) -> bytes:
    """Put paths of this machine in place of a file's placeholders."""
    return sentinel.from_sentinels(data, spans, _paths(directory, triton_dir)) if spans else data


def places_no_code(keep: Keep, trust: Trust) -> bool:
    """Tell whether no kernel needs more trust than is given, whatever its files are."""
    # Triton loads a library from the directory of its own key, and any bundle can call that
    # directory a kernel.
    return keep == "launch" or trust == "code"


def why_not_trusted(kernel: Kernel, keep: Keep, trust: Trust) -> str | None:
    """Return why a kernel needs more trust than it is given, None when it does not."""
    return NEEDS_TRUST if not places_no_code(keep, trust) and kernel.layout.has_library else None


def _paths(directory: str, triton_dir: str | None) -> dict[int, str]:
    paths = {sentinel.CACHE_DIR: directory}
    if triton_dir is not None:
        paths[sentinel.TRITON_DIR] = triton_dir
    return paths


@lru_cache(_CHANGES_REMEMBERED)
def _changes(
    names: tuple[str, ...], spans: tuple[int, ...], directory: str, triton_dir: str | None
) -> tuple[tuple[FileEdits, ...], int, int, tuple[str, ...]]:
    """Return what is changed where path placeholders are, how many bytes all files and the metadata
    have more then, and the names of the files; raises `FormatError` for spans of no file.
    """
    paths = _paths(directory, triton_dir)
    places: Mapping[int, Sequence[sentinel.Span]] = spans_by_position(spans)
    edits = tuple([(at, sentinel.edits_of(some, paths)) for at, some in places.items()])
    growth = {at: sum([len(new) - len(old) for _, old, new in some]) for at, some in edits}
    metadata = growth.get(file_layout(names).metadata, 0)
    return edits, sum(growth.values()), metadata, tuple([names[at] for at, _ in edits])

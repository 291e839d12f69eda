# SPDX-License-Identifier: Apache-2.0
"""`ReadyKernel`: a kernel that only has to be written below a cache directory, and `NewKernel`, as a writer takes it.

`StoredKernel` makes a `ReadyKernel` for each directory, `PlacementQueue` passes it on, and `CacheDirectory` adds what is of that directory.
The extension `_kernel_writer` reads both as the tuples that they are, by position.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from bundler.errors import BundlerError, DigestMismatch, FormatError
from bundler.format.digest import check_digest
from bundler.format.names import GROUP_PREFIX
from bundler.format.sentinel import Edit, check_edits, edited
from bundler.lifecycle.elf import why_unusable

Buffer = bytes | memoryview
# The position of a file, and what is changed in it after its digest was compared.
FileEdits = tuple[int, tuple[Edit, ...]]
# In place of the position of a device binary that was found whole before.
ALREADY_CHECKED = -1
# Stands in the text of a group file for the kernel key; no path holds it.
_KEY = b"\0"
# Kernels of one name have files of the same names.
_GROUP_FILES_REMEMBERED = 1024


class ReadyKernel(NamedTuple):
    """A kernel that only has to be written.

    Attributes:
        key: its kernel key, the name of the directory.
        names: of every file but the group file, in Triton's order.
        contents: the bytes of each.
        stored_metadata: the metadata as the bundle stores it, with sentinels, to recognise another build by.
        size_bytes: bytes of all files as they are written.
        digests: the raw digest of each file, for who writes the kernel to compare; none when they were compared.
        edits: what is changed in files when they are written, in the order of their positions.
        binary: position of the device binary, if who writes the kernel has to look whether it is whole.
        rewritten: names of the files that hold a path of this machine.
    """

    key: str
    names: tuple[str, ...]
    contents: tuple[Buffer, ...]
    stored_metadata: Buffer
    size_bytes: int
    digests: tuple[bytes, ...] = ()
    edits: tuple[FileEdits, ...] = ()
    binary: int = ALREADY_CHECKED
    rewritten: tuple[str, ...] = ()

    @property
    def files(self) -> Iterator[tuple[str, Buffer]]:
        """Name and bytes of every file but the group file."""
        return zip(self.names, self.contents, strict=True)

    def verified(self) -> ReadyKernel:
        """Return the same kernel with nothing left to verify; raises `DigestMismatch` or `FormatError`."""
        for name, data, digest in zip(self.names, self.contents, self.digests, strict=False):  # there may be no digests
            check_digest(data, digest, name)
        if self.binary != ALREADY_CHECKED:
            reason = why_unusable(self.contents[self.binary])
            if reason is not None:
                raise FormatError(f"{self.names[self.binary]} is {reason}", key=self.key)
        for position, edits in self.edits:
            check_edits(self.contents[position], edits)
        return self.edited()._replace(digests=(), binary=ALREADY_CHECKED)

    def edited(self) -> ReadyKernel:
        """Return the same kernel with its files as they are written."""
        if not self.edits:
            return self
        changed = [*self.contents]
        for position, edits in self.edits:
            changed[position] = edited(changed[position], edits)
        return self._replace(contents=tuple(changed), edits=())

    def why_refused(self) -> BundlerError:
        """Return what is wrong with a kernel that the writer refused."""
        try:
            self.verified()
        except BundlerError as error:
            return error
        # Nothing was written, so there is something to tell.
        return DigestMismatch(
            f"{self.key}: its bytes changed in memory while it was written; restore it again", what=self.key
        )


class GroupFile(NamedTuple):
    """The group file of kernels that have files of the same names below one directory.

    Attributes:
        name: its name.
        text: what is in it, with a zero byte where the kernel key stands.
    """

    name: str
    text: bytes

    def text_of(self, key: str) -> bytes:
        """Return what is in that of one kernel."""
        return self.text.replace(_KEY, key.encode())


class NewKernel(NamedTuple):
    """A kernel as a writer takes it: under which name it is written at first, its group file, and all else."""

    temporary: str
    group: GroupFile
    ready: ReadyKernel


@lru_cache(_GROUP_FILES_REMEMBERED)
def group_file(names: tuple[str, ...], directory: str) -> GroupFile:
    """Return the group file of these files, as json.dumps writes it.

    Args:
        names: of the files of a kernel.
        directory: the path of the cache directory with a slash behind it, as it stands in JSON.
    """
    metadata = next(name for name in names if name.endswith(".json"))
    key = _KEY.decode()
    # Key and names are of characters that JSON leaves alone.
    members = ", ".join([f'"{name}": "{directory}{key}/{name}"' for name in names])
    return GroupFile(GROUP_PREFIX + metadata, f'{{"child_paths": {{{members}}}}}'.encode())

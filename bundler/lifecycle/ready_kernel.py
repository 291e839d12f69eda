# SPDX-License-Identifier: Apache-2.0
"""`ReadyKernel`: a kernel that only has to be written below a cache directory.

`StoredKernel` makes one for each directory, `PlacementQueue` passes it on, and `CacheDirectory` has `new_kernel` make of it what a writer takes.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from msgspec import Struct
from msgspec.structs import replace

from bundler.errors import FormatError
from bundler.format.digest import check_digest
from bundler.format.names import GROUP_PREFIX
from bundler.format.sentinel import Edit, check_edits, edited

Buffer = bytes | memoryview
# The position of a file, and what is changed in it after its digest was compared.
FileEdits = tuple[int, tuple[Edit, ...]]
# What writers take, in C too: the names of the temporary directory and of the kernel's; name, bytes and digest of each file, or no digests
# when they were compared; what is changed in files; which files are device binary and metadata, if these are to be looked at; and name and
# text of the group file, with a zero byte where the kernel key stands in it.
NewKernel = tuple[
    str, str, tuple[str, ...], tuple[Buffer, ...], tuple[bytes, ...], tuple[FileEdits, ...], int, int, str, bytes
]
# In place of the position of a device binary that was found whole before, or of metadata that Triton can read.
ALREADY_CHECKED = -1
# Stands in the text of a group file for the kernel key; no path holds it.
KEY = b"\0"
# Kernels of one name have files of the same names.
_GROUP_FILES_REMEMBERED = 1024


class ReadyKernel(Struct, frozen=True, gc=False):
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
        metadata: position of the metadata, if it has to look as well whether Triton can read them.
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
    metadata: int = ALREADY_CHECKED
    rewritten: tuple[str, ...] = ()

    @property
    def files(self) -> Iterator[tuple[str, Buffer]]:
        """Name and bytes of every file but the group file."""
        return zip(self.names, self.contents, strict=True)

    def verified(self) -> ReadyKernel:
        """Return the same kernel with nothing left to verify; raises `DigestMismatch` or `FormatError`."""
        for name, data, digest in zip(self.names, self.contents, self.digests, strict=False):  # there may be no digests
            check_digest(data, digest, name)
        reason = self._why_unreadable()
        if reason is not None:
            raise FormatError(reason, key=self.key)
        for position, edits in self.edits:
            check_edits(self.contents[position], edits)
        return replace(self.edited(), digests=(), binary=ALREADY_CHECKED, metadata=ALREADY_CHECKED)

    def edited(self) -> ReadyKernel:
        """Return the same kernel with its files as they are written."""
        if not self.edits:
            return self
        changed = [*self.contents]
        for position, edits in self.edits:
            changed[position] = edited(changed[position], edits)
        return replace(self, contents=tuple(changed), edits=())

    def _why_unreadable(self) -> str | None:
        """Return why Triton could not read it, as far as nobody has looked."""
        if self.binary == ALREADY_CHECKED:
            return None
        # Writers in C look themselves, and a restore into an empty directory needs neither of these modules.
        from bundler.lifecycle.elf import why_unusable
        from bundler.lifecycle.kernel_directory import why_unreadable

        name, data = self.names[self.binary], self.contents[self.binary]
        if self.metadata != ALREADY_CHECKED:
            return why_unreadable(
                self.key, (name, data), (self.names[self.metadata], bytes(self.contents[self.metadata]))
            )
        unusable = why_unusable(data)
        return None if unusable is None else f"{name} is {unusable}"


def new_kernel(kernel: ReadyKernel, temporary: str, directory: str) -> NewKernel:
    """Return what a writer takes.

    Args:
        kernel: what is to be written.
        temporary: the name of its temporary directory.
        directory: the path of the cache directory with a slash behind it, as it stands in JSON.
    """
    group, text = _group_file(kernel.names, directory)
    return (
        temporary, kernel.key, kernel.names, kernel.contents, kernel.digests, kernel.edits, kernel.binary, kernel.metadata,
        group, text,
    )  # fmt: skip


@lru_cache(_GROUP_FILES_REMEMBERED)
def _group_file(names: tuple[str, ...], directory: str) -> tuple[str, bytes]:
    """Return name and text of the group file of these files, as json.dumps writes it."""
    metadata, key = next(name for name in names if name.endswith(".json")), KEY.decode()
    # Key and names are of characters that JSON leaves alone.
    members = ", ".join([f'"{name}": "{directory}{key}/{name}"' for name in names])
    return GROUP_PREFIX + metadata, f'{{"child_paths": {{{members}}}}}'.encode()

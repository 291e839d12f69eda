# SPDX-License-Identifier: Apache-2.0
"""`ReadyKernel`: a kernel on its way into a cache directory, and what still has to be verified of it.

`StoredKernel` makes one for each directory, `PlacementQueue` passes it on, and `CacheDirectory` writes it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from bundler.errors import BundlerError, DigestMismatch, FormatError
from bundler.format.digest import check_digest
from bundler.format.sentinel import Edit, edited
from bundler.lifecycle import elf
from bundler.lifecycle.kernel_writer import Buffer

Files = Mapping[str, Buffer]
_ALL_COMPARED: Mapping[str, bytes] = {}
_NO_EDITS: Mapping[str, tuple[Edit, ...]] = {}


class ReadyKernel(NamedTuple):
    """A kernel that only has to be written.

    Attributes:
        key: its kernel key, the name of the directory.
        files: name -> bytes of every file but the group file, in Triton's order.
        stored_metadata: the metadata as the bundle stores it, with sentinels, to recognise another build by.
        rewritten: names of the files that hold a path of this machine.
        digests: name -> raw digest of the files that were not verified yet; who writes the kernel compares them.
        edits: name -> what is changed in a file that was not verified yet, when it is written.
        growth: how many bytes the files have more then.
        binary: the device binary, if nobody has looked yet whether it is whole; who writes the kernel does.
    """

    key: str
    files: Files
    stored_metadata: bytes
    rewritten: tuple[str, ...] = ()
    digests: Mapping[str, bytes] = _ALL_COMPARED
    binary: str | None = None
    edits: Mapping[str, tuple[Edit, ...]] = _NO_EDITS
    growth: int = 0

    @property
    def size_bytes(self) -> int:
        """Bytes of all files but the group file, as they are written."""
        return sum(map(len, self.files.values())) + self.growth

    def verified(self) -> ReadyKernel:
        """Return the same kernel with nothing left to verify; raises `DigestMismatch` or `FormatError`."""
        for name, digest in self.digests.items():
            check_digest(self.files[name], digest, name)
        if self.binary is not None:
            reason = elf.why_unusable(self.files[self.binary])
            if reason is not None:
                raise FormatError(f"{self.binary} is {reason}", key=self.key)
        return self.edited()._replace(digests=_ALL_COMPARED, binary=None)

    def edited(self) -> ReadyKernel:
        """Return the same kernel with its files as they are written."""
        changed = {name: edited(self.files[name], edits) for name, edits in self.edits.items()}
        return self._replace(files={**self.files, **changed}, edits=_NO_EDITS, growth=0) if changed else self

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

# SPDX-License-Identifier: Apache-2.0
"""Brings one kernel from a bundle into cache directories: reads it, verifies it, fills in this machine's paths, publishes it.

`StoredKernel` holds the verified bytes of a kernel; a restore makes many.  `place_kernel` does everything for one kernel, for
Triton's cache manager (`bundler/integrations/lookup_engine.py`), which waits for the answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from bundler.errors import DigestMismatch, FormatError, NotFound
from bundler.format import names, sentinel
from bundler.format.bundle import BlobSource, Keep
from bundler.format.digest import check_digest
from bundler.format.entries import Kernel, StoredFile
from bundler.format.metadata import METADATA_BYTES, check_metadata_size
from bundler.lifecycle.cache_directory import CacheDirectory, Outcome
from bundler.lifecycle.kernel_directory import Rejected, is_readable_head, why_unreadable
from bundler.lifecycle.kernel_writer import Buffer
from bundler.lifecycle.ready_kernel import Files, ReadyKernel
from bundler.lifecycle.restore_options import Trust

_BINARY_ENDINGS = tuple(f".{kind}" for kind in sorted(names.BINARY_KINDS))
NEEDS_TRUST = "it would be executed or unpickled; pass trust='code' if you trust who made the bundle"


class WantedKernel(NamedTuple):
    """What is read of a kernel; the digests can be fetched beforehand.

    Attributes:
        kernel: which.
        files: those that are wanted, in Triton's order: name, raw digest, size and path sentinels.
        digests: the raw digest of each.
    """

    kernel: Kernel
    files: Sequence[StoredFile]
    digests: Sequence[bytes]

    @classmethod
    def of(cls, kernel: Kernel, keep: Keep) -> WantedKernel:
        """Return what `keep` asks for."""
        files = list(kernel.files(keep))
        return cls(kernel, files, [digest for _, digest, _, _ in files])

    @property
    def size_bytes(self) -> int:
        """Bytes of these files as stored."""
        return sum([size for _, _, size, _ in self.files])


class StoredKernel:
    """A kernel with its bytes, as the bundle stores them: paths are sentinels.

    Attributes:
        kernel: which.
        files: name -> bytes, in Triton's order.
        with_paths: names of those that hold a path.
        metadata: the metadata as the bundle stores it.
        digests: name -> raw digest of the files that were not verified yet.
    """

    # A restore makes one of these for each kernel of a bundle.
    __slots__ = (
        "_binary_name", "_checked", "_metadata_name", "_spans", "_written_checked", "digests", "files", "kernel", "metadata",
        "with_paths",
    )  # fmt: skip

    def __init__(self, wanted: WantedKernel, blobs: Sequence[Buffer], *, verified: bool) -> None:
        self.kernel = wanted.kernel
        self.files: dict[str, Buffer] = {}
        self.digests: dict[str, bytes] = {}
        self._spans: dict[str, Sequence[sentinel.Span]] = {}
        for (name, digest, _, spans), data in zip(wanted.files, blobs, strict=True):
            self.files[name] = data
            if spans:
                self._spans[name] = spans
            if name.endswith(".json"):
                self._metadata_name = name
            elif name.endswith(_BINARY_ENDINGS):
                self._binary_name = name
            if verified:
                continue
            if spans or name.endswith(".json"):  # what is parsed here, or changed
                check_digest(data, digest, name)
            else:
                self.digests[name] = digest
        self.with_paths = tuple(self._spans)
        self.metadata = bytes(self.files[self._metadata_name])
        self._checked = self._written_checked = False

    @classmethod
    def read(cls, source: BlobSource, wanted: WantedKernel, *, checked: bool = False) -> StoredKernel:
        """Read and verify a kernel's files.

        Args:
            source: where the bytes of its bundle are.
            wanted: what to read.
            checked: whether these very bytes were found readable for Triton before; their digests are compared all the same.

        Raises:
            DigestMismatch, FormatError, NotFound: they are damaged, or not there.
        """
        blobs = source.view_blobs(wanted.digests)
        # Some sources, a bundle file for one, compare the digests while they read; nothing is hashed twice.
        if not source.verified:
            for (name, digest, _, _), data in zip(wanted.files, blobs, strict=True):
                check_digest(data, digest, name)
        kernel = cls(wanted, blobs, verified=True)
        kernel._checked = checked
        return kernel

    @classmethod
    def read_unverified(cls, source: BlobSource, wanted: WantedKernel) -> StoredKernel:
        """Read a kernel's files and verify those alone that are parsed here; who writes it checks the others.

        Raises:
            DigestMismatch, FormatError, NotFound: they are damaged, or not there.
        """
        # What comes from a store was compared as its unit was opened; nothing is hashed twice.
        verified = source.verified and source.verifies_stored
        kernel = cls(wanted, source.stored_blobs(wanted.digests), verified=verified)
        kernel._written_checked = True
        return kernel

    def ready_for(self, directory: str, triton_dir: str | None) -> ReadyKernel:
        """Return what is written below a cache directory.

        Args:
            directory: the cache directory.
            triton_dir: where Triton is installed, None when it is not.

        Raises:
            FormatError: Triton could not read it there.
            DigestMismatch: it is damaged.
        """
        files: Files = self.files
        if self.with_paths:
            # A copy, since the next directory needs the sentinels again.
            files = dict(files)
            for name, spans in self._spans.items():
                files[name] = localize(spans, bytes(files[name]), directory, triton_dir)
        self._check(files)
        binary = self._binary_name if self._written_checked else None
        return ReadyKernel(self.kernel.key, files, self.metadata, self.with_paths, self.digests, binary)

    def _check(self, files: Files) -> None:
        """Raise `FormatError` when Triton could not read these files, which differ in paths alone from those for other directories."""
        metadata = bytes(files[self._metadata_name])
        if len(metadata) > METADATA_BYTES:  # with other paths it has another size
            check_metadata_size(len(metadata), self._metadata_name)
        # Once for all directories: paths decide nothing that is checked here.
        if self._checked:
            return
        key, binary = self.kernel.key, self._binary_name
        if not (self._written_checked and is_readable_head(key, binary, metadata)):
            # What is parsed now is verified first.
            ReadyKernel(key, files, self.metadata, digests=self.digests).verified()
            reason = why_unreadable(key, (binary, files[binary]), (self._metadata_name, metadata))
            if reason is not None:
                raise FormatError(reason, key=key)
        self._checked = True


def why_not_trusted(kernel: Kernel, keep: Keep, trust: Trust) -> str | None:
    """Return why a kernel needs more trust than it is given, None when it does not."""
    # Triton loads a library from the directory of its own key, and any bundle can call that directory a kernel.
    if keep == "launch" or trust == "code":
        return None
    return NEEDS_TRUST if kernel.layout.has_library else None


def localize(spans: Sequence[sentinel.Span], data: bytes, directory: str, triton_dir: str | None) -> bytes:
    """Put paths of this machine in place of a file's sentinels."""
    if not spans:
        return data
    paths = {sentinel.CACHE_DIR: directory}
    if triton_dir is not None:
        paths[sentinel.TRITON_DIR] = triton_dir
    return sentinel.from_sentinels(data, spans, paths)


class Placed(NamedTuple):
    """A kernel that is in place.

    Attributes:
        outcome: how it came there.
        size_bytes: what was written.
        files: the paths of its files by name, which Triton is told; None where the directory may hold another build of it.
    """

    outcome: Outcome
    size_bytes: int
    files: Mapping[str, str] | None


def place_kernel(
    source: BlobSource,
    kernel: Kernel,
    directory: CacheDirectory,
    *,
    keep: Keep,
    trust: Trust,
    triton_dir: str | None,
    checked: bool = False,
) -> Placed | Rejected:
    """Place one kernel where Triton asks for it at this moment.

    The caller knows that this machine can use the kernel: Triton computed its key here, and the key covers target, Triton's
    build and ptxas.  So no fact of this machine is looked up, and none can be out of date when the visible GPUs change.  All
    else is as for `bundler.restore`.

    Args:
        source: where the bytes of its bundle are.
        kernel: which.
        directory: the cache directory, whatever the layout that the kernel was recorded under.
        keep, trust: as for `bundler.restore`.
        triton_dir: where Triton is installed, None when it is not.
        checked: as for `StoredKernel.read`.

    Returns:
        `Rejected` when its bytes are damaged, when Triton could not read them, or when it needs more trust.

    Raises:
        AccessDenied, StoreFull, NotFound: the directory cannot be written.
        StoreUnavailable: its bytes cannot be read now.
    """
    # First, so that nothing is fetched for a kernel that is refused.
    untrusted = why_not_trusted(kernel, keep, trust)
    if untrusted is not None:
        return Rejected(untrusted)
    wanted = WantedKernel.of(kernel, keep)
    # From a store all files come in one round trip, not in one each.
    source.prefetch(wanted.digests)
    try:
        stored = StoredKernel.read(source, wanted, checked=checked)
        ready = stored.ready_for(directory.path, triton_dir)
    except (DigestMismatch, FormatError, NotFound) as error:
        # The kernel is compiled instead.  Trouble with the directory is no fault of the kernel, and goes to the caller.
        return Rejected(error.message)
    outcome = directory.publish(ready)
    if outcome == "present":
        # What lies there may be another build with other files, so the caller looks which.
        return Placed(outcome, 0, None)
    size = sum(map(len, ready.files.values()))
    return Placed(outcome, size, {name: f"{directory.path}/{kernel.key}/{name}" for name in ready.files})

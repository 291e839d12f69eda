# SPDX-License-Identifier: Apache-2.0
"""Brings one kernel from a bundle into cache directories: reads it, verifies it, fills in this machine's paths, publishes it.

`StoredKernel` holds the verified bytes of a kernel; a restore makes many.  `place_kernel` does everything for one kernel, for
Triton's cache manager (`bundler/integrations/lookup_engine.py`), which waits for the answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

from msgspec import Struct
from msgspec.structs import replace

from bundler.errors import DigestMismatch, FormatError, NotFound
from bundler.format import sentinel
from bundler.format.bundle import BlobSource, Keep
from bundler.format.digest import check_digest
from bundler.format.entries import Kernel, StoredFile, file_layout
from bundler.format.metadata import METADATA_BYTES, check_metadata_size
from bundler.lifecycle.cache_directory import CacheDirectory, Outcome
from bundler.lifecycle.kernel_directory import Rejected, is_readable_head, why_unreadable
from bundler.lifecycle.kernel_writer import Buffer, ReadyKernel
from bundler.lifecycle.restore_options import Trust

# Metadata of kernels of one name have their paths at the same few places.
_EDITS_REMEMBERED = 1024
NEEDS_TRUST = "it would be executed or unpickled; pass trust='code' if you trust who made the bundle"


class WantedKernel(Struct, frozen=True):
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
        return cls(kernel, files, [file[1] for file in files])

    @property
    def size_bytes(self) -> int:
        """Bytes of these files as stored."""
        return sum([file[2] for file in self.files])


class StoredKernel:
    """A kernel with its bytes, as the bundle stores them: paths are sentinels.

    Attributes:
        kernel: which.
        files: name -> bytes, in Triton's order.
        metadata: the metadata as the bundle stores it.
        digests: name -> raw digest of the files that were not verified yet.
    """

    # A restore makes one of these for each kernel of a bundle.
    __slots__ = (
        "_binary_name", "_checked", "_metadata_name", "_spans", "_written_checked", "digests", "files", "kernel", "metadata",
    )  # fmt: skip

    def __init__(self, wanted: WantedKernel, blobs: Sequence[Buffer], *, verified: bool) -> None:
        self.kernel = wanted.kernel
        names = tuple([file[0] for file in wanted.files])
        layout = file_layout(names)
        self._metadata_name, self._binary_name = names[layout.metadata], names[layout.binary]
        # A source returns one for each digest; that `zip` checks it too would take as long as all else here.
        self.files: dict[str, Buffer] = dict(zip(names, blobs))  # noqa: B905
        self.digests: dict[str, bytes] = {} if verified else dict(zip(names, wanted.digests))  # noqa: B905
        self._spans = [(file[0], file[3]) for file in wanted.files if file[3]]
        self.metadata = bytes(blobs[layout.metadata])
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
        """Read a kernel's files; who writes it verifies them.

        Raises:
            DigestMismatch, FormatError, NotFound: they are damaged, or not there.
        """
        # Files and stores leave the comparing to who writes; nothing is hashed twice.
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
        edits: dict[str, tuple[sentinel.Edit, ...]] = {}
        growth = 0
        for name, spans in self._spans:
            edits[name], grown = self._edits(name, spans, directory, triton_dir)
            # With other paths it has another size.
            if name == self._metadata_name and len(self.metadata) + grown > METADATA_BYTES:
                check_metadata_size(len(self.metadata) + grown, name)
            growth += grown
        ready = ReadyKernel(
            self.kernel.key, self.files, self.metadata, tuple(edits), self.digests,
            self._binary_name if self._written_checked else None, edits, growth,
        )  # fmt: skip
        # Once for all directories: paths decide nothing that is checked here.
        if not self._checked:
            self._check(ready)
        # Who writes a file changes it once it was compared; what is not compared then is changed here.
        return ready if self.digests else ready.edited()

    def _edits(
        self, name: str, spans: Sequence[sentinel.Span], directory: str, triton_dir: str | None
    ) -> tuple[tuple[sentinel.Edit, ...], int]:
        """Return what is changed in a file, and how many bytes it has more then."""
        data = self.files[name]
        try:
            edits, grown = _edits_for(tuple(spans), directory, triton_dir)
            sentinel.check_edits(data, edits)
        except FormatError:
            if name in self.digests:  # then it is other bytes that the spans are of
                check_digest(data, self.digests[name], name)
            raise
        return edits, grown

    def _check(self, ready: ReadyKernel) -> None:
        """Raise `FormatError` when Triton could not read these files."""
        key, binary, name = ready.key, self._binary_name, self._metadata_name
        # The metadata is looked at with its sentinels, before its digest is compared: nobody sees it unless that is right.
        if not (self._written_checked and is_readable_head(key, binary, self.metadata)):
            # What is parsed now is verified first.
            files = replace(ready, binary=None).verified().files
            reason = why_unreadable(key, (binary, files[binary]), (name, bytes(files[name])))
            if reason is not None:
                raise FormatError(reason, key=key)
        self._checked = True


def places_no_code(keep: Keep, trust: Trust) -> bool:
    """Tell whether no kernel needs more trust than is given, whatever its files are."""
    # Triton loads a library from the directory of its own key, and any bundle can call that directory a kernel.
    return keep == "launch" or trust == "code"


def why_not_trusted(kernel: Kernel, keep: Keep, trust: Trust) -> str | None:
    """Return why a kernel needs more trust than it is given, None when it does not."""
    if places_no_code(keep, trust):
        return None
    return NEEDS_TRUST if kernel.layout.has_library else None


def localize(spans: Sequence[sentinel.Span], data: bytes, directory: str, triton_dir: str | None) -> bytes:
    """Put paths of this machine in place of a file's sentinels."""
    return sentinel.from_sentinels(data, spans, _paths(directory, triton_dir)) if spans else data


def _paths(directory: str, triton_dir: str | None) -> dict[int, str]:
    paths = {sentinel.CACHE_DIR: directory}
    if triton_dir is not None:
        paths[sentinel.TRITON_DIR] = triton_dir
    return paths


@lru_cache(_EDITS_REMEMBERED)
def _edits_for(
    spans: tuple[sentinel.Span, ...], directory: str, triton_dir: str | None
) -> tuple[tuple[sentinel.Edit, ...], int]:
    edits = sentinel.edits_of(spans, _paths(directory, triton_dir))
    return edits, sum([len(new) - len(old) for _, old, new in edits])


class Placed(Struct, frozen=True):
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

# SPDX-License-Identifier: Apache-2.0
"""Brings one kernel from a bundle into cache directories: reads it, verifies it, fills in this
machine's paths, publishes it.

`StoredKernel` holds the verified bytes of a kernel; a restore makes many.  `place_kernel` does
everything for one kernel, for Triton's cache manager (`bundler/integrations/lookup_engine.py`),
which waits for the answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import islice
from typing import TYPE_CHECKING

from msgspec import Struct

from bundler.errors import DigestMismatch, FormatError, NotFound
from bundler.format import sentinel
from bundler.format.bundle import BlobSource, Keep
from bundler.format.digest import check_digest
from bundler.format.entries import Kernel, StoredFiles, file_layout
from bundler.format.lazy_kernel import spans_by_position
from bundler.format.metadata import METADATA_BYTES, check_metadata_size
from bundler.lifecycle.cache_directory import CacheDirectory, Outcome
from bundler.lifecycle.kernel_writer import ALREADY_CHECKED, Buffer, FileEdits, ReadyKernel
from bundler.lifecycle.restore_options import Trust

if TYPE_CHECKING:
    from bundler.lifecycle.kernel_directory import Rejected

# Metadata of kernels of one name have their paths at the same few places.
_CHANGES_REMEMBERED = 1024
NEEDS_TRUST = (
    "it would be executed or unpickled; pass trust='code' if you trust who made the bundle"
)


class WantedKernel(Struct, frozen=True, gc=False):
    """What is read of a kernel; the digests can be fetched beforehand.

    Attributes:
        kernel: which.
        files: those that are wanted.
    """

    kernel: Kernel
    files: StoredFiles

    @classmethod
    def of(cls, kernel: Kernel, keep: Keep) -> WantedKernel:
        """Return what `keep` asks for."""
        return cls(kernel, kernel.stored_files(keep))

    @property
    def digests(self) -> tuple[bytes, ...]:
        """The raw digest of each file."""
        return self.files.digests


class StoredKernel:
    """A kernel with its bytes, as the bundle stores them: paths are sentinels.

    Attributes:
        wanted: which, and its files.
        contents: the bytes of each file, in Triton's order.
    """

    # A restore makes one of these for each kernel of a bundle.
    __slots__ = ("_checked", "_digests", "contents", "wanted")

    def __init__(
        self,
        wanted: WantedKernel,
        contents: Sequence[Buffer],
        *,
        verified: bool,
        checked: bool = False,
    ) -> None:
        self.wanted, self.contents, self._checked = wanted, tuple(contents), checked
        self._digests: tuple[bytes, ...] = () if verified else wanted.files.digests

    @classmethod
    def read(
        cls, source: BlobSource, wanted: WantedKernel, *, checked: bool = False
    ) -> StoredKernel:
        """Read and verify a kernel's files.

        Args:
            source: where the bytes of its bundle are.
            wanted: what to read.
            checked: whether these very bytes were found readable for Triton before; their digests
                are compared all the same.

        Raises:
            DigestMismatch, FormatError, NotFound: they are damaged, or not there.
        """
        contents = source.view_blobs(wanted.files.digests)
        # Some sources, a bundle file for one, compare the digests while they read; nothing is
        # hashed twice.
        if not source.verified:
            for name, digest, data in zip(
                wanted.files.names, wanted.files.digests, contents, strict=True
            ):
                check_digest(data, digest, name)
        return cls(wanted, contents, verified=True, checked=checked)

    @classmethod
    def read_unverified(
        cls, source: BlobSource, wanted: Sequence[WantedKernel]
    ) -> list[StoredKernel]:
        """Read the files of kernels; who writes them verifies them, and looks whether Triton can
        read them.

        Raises:
            DigestMismatch, FormatError, NotFound: those of one are damaged, or not there.
        """
        # Files and stores leave the comparing to who writes; nothing is hashed twice.
        verified = source.verified and source.verifies_stored
        contents = iter(
            source.stored_blobs([digest for one in wanted for digest in one.files.digests])
        )
        return [
            cls(one, [*islice(contents, len(one.files.digests))], verified=verified)
            for one in wanted
        ]

    def ready_for(self, directory: str, triton_dir: str | None) -> ReadyKernel:
        """Return what is written below a cache directory.

        Args:
            directory: the cache directory.
            triton_dir: where Triton is installed, None when it is not.

        Raises:
            FormatError: Triton could not read it there.
            DigestMismatch: it is damaged.
        """
        files = self.wanted.files
        layout, metadata = files.layout, self.contents[files.layout.metadata]
        changes = (
            _changes(files.names, files.spans, directory, triton_dir)
            if files.spans
            else _NO_CHANGES
        )
        # With other paths it has another size.
        if changes.metadata_growth + len(metadata) > METADATA_BYTES:
            check_metadata_size(
                changes.metadata_growth + len(metadata), files.names[layout.metadata]
            )
        places = (
            (ALREADY_CHECKED, ALREADY_CHECKED)
            if self._checked
            else (layout.binary, layout.metadata)
        )
        ready = ReadyKernel(
            self.wanted.kernel.key,
            files.names,
            self.contents,
            metadata,
            files.size_bytes + changes.growth,
            self._digests,
            changes.edits,
            *places,
            changes.rewritten,
        )
        if self._digests:
            return ready
        # Who writes it need not look again; nor is it looked at for each directory: paths decide
        # nothing that is checked.
        ready = ready.verified()
        self._checked = True
        return ready


class _Changes(Struct, frozen=True):
    """What is changed in the files of a kernel, and how many bytes all of them and the metadata
    have more then.
    """

    edits: tuple[FileEdits, ...]
    growth: int
    metadata_growth: int
    rewritten: tuple[str, ...]


_NO_CHANGES = _Changes((), 0, 0, ())


def places_no_code(keep: Keep, trust: Trust) -> bool:
    """Tell whether no kernel needs more trust than is given, whatever its files are."""
    # Triton loads a library from the directory of its own key, and any bundle can call that
    # directory a kernel.
    return keep == "launch" or trust == "code"


def why_not_trusted(kernel: Kernel, keep: Keep, trust: Trust) -> str | None:
    """Return why a kernel needs more trust than it is given, None when it does not."""
    if places_no_code(keep, trust):
        return None
    return NEEDS_TRUST if kernel.layout.has_library else None


def localize(
    spans: Sequence[sentinel.Span], data: bytes, directory: str, triton_dir: str | None
) -> bytes:
    """Put paths of this machine in place of a file's sentinels."""
    return sentinel.from_sentinels(data, spans, _paths(directory, triton_dir)) if spans else data


def _paths(directory: str, triton_dir: str | None) -> dict[int, str]:
    paths = {sentinel.CACHE_DIR: directory}
    if triton_dir is not None:
        paths[sentinel.TRITON_DIR] = triton_dir
    return paths


@lru_cache(_CHANGES_REMEMBERED)
def _changes(
    filenames: tuple[str, ...], spans: tuple[int, ...], directory: str, triton_dir: str | None
) -> _Changes:
    """Return what is changed where path sentinels are, four numbers each; raises `FormatError` for
    spans of no file.
    """
    paths = _paths(directory, triton_dir)
    edits = tuple(
        (position, sentinel.edits_of(some, paths))
        for position, some in spans_by_position(spans).items()
    )
    growth = {
        position: sum(len(new) - len(old) for _, old, new in some) for position, some in edits
    }
    metadata = file_layout(filenames).metadata
    rewritten = tuple(filenames[position] for position, _ in edits)
    return _Changes(edits, sum(growth.values()), growth.get(metadata, 0), rewritten)


class Placed(Struct, frozen=True):
    """A kernel that is in place.

    Attributes:
        outcome: how it came there.
        size_bytes: what was written.
        files: the paths of its files by name, which Triton is told; None where the directory may
            hold another build of it.
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

    The caller knows that this machine can use the kernel: Triton computed its key here, and the key
    covers target, Triton's build and ptxas.  So no fact of this machine is looked up, and none can
    be out of date when the visible GPUs change.  All else is as for `bundler.restore`.

    Args:
        source: where the bytes of its bundle are.
        kernel: which.
        directory: the cache directory, whatever the layout that the kernel was recorded under.
        keep, trust: as for `bundler.restore`.
        triton_dir: where Triton is installed, None when it is not.
        checked: as for `StoredKernel.read`.

    Returns:
        `Rejected` when its bytes are damaged, when Triton could not read them, or when it needs
        more trust.

    Raises:
        AccessDenied, StoreFull, NotFound: the directory cannot be written.
        StoreUnavailable: its bytes cannot be read now.
    """
    # First, so that nothing is fetched for a kernel that is refused.
    untrusted = why_not_trusted(kernel, keep, trust)
    if untrusted is not None:
        return _rejected(untrusted)
    wanted = WantedKernel.of(kernel, keep)
    # From a store all files come in one round trip, not in one each.
    source.prefetch(wanted.digests)
    try:
        stored = StoredKernel.read(source, wanted, checked=checked)
        ready = stored.ready_for(directory.path, triton_dir)
    except (DigestMismatch, FormatError, NotFound) as error:
        # The kernel is compiled instead.  Trouble with the directory is no fault of the kernel, and
        # goes to the caller.
        return _rejected(error.message)
    outcome = directory.publish(ready)
    if outcome == "present":
        # What lies there may be another build with other files, so the caller looks which.
        return Placed(outcome, 0, None)
    return Placed(
        outcome,
        ready.size_bytes,
        {name: f"{directory.path}/{kernel.key}/{name}" for name in ready.names},
    )


def _rejected(reason: str) -> Rejected:
    from bundler.lifecycle.kernel_directory import (
        Rejected,  # a kernel that is placed needs nothing of it
    )

    return Rejected(reason)

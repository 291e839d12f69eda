# SPDX-License-Identifier: Apache-2.0
"""Brings one kernel from a bundle into cache directories: reads it, verifies it, fills in this machine's paths, publishes it.

`StoredKernel` holds the verified bytes of a kernel; a restore makes many.  `place_kernel` does everything for one kernel, for
Triton's cache manager (`bundler/integrations/lookup_engine.py`), which waits for the answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from bundler.errors import DigestMismatch, FormatError, NotFound
from bundler.format import names, sentinel
from bundler.format.bundle import Bundle, Keep
from bundler.format.digest import digest_raw
from bundler.format.entries import Artifact, Kernel
from bundler.lifecycle.cache_directory import CacheDirectory, Files, Outcome
from bundler.lifecycle.kernel_directory import Rejected, check_kernel_files
from bundler.lifecycle.restore_options import Trust
from bundler.toolchain import identity

NEEDS_TRUST = "it would be executed or unpickled; pass trust='code' if you trust who made the bundle"


@dataclass(frozen=True)
class StoredKernel:
    """A kernel with its verified bytes, as the bundle stores them: paths are sentinels.

    Attributes:
        files: name -> bytes, in Triton's order.
        with_paths: those of the files that hold a path.
    """

    kernel: Kernel
    files: Mapping[str, bytes | memoryview]
    with_paths: tuple[Artifact, ...]

    @classmethod
    def read(cls, bundle: Bundle, kernel: Kernel, keep: Keep) -> StoredKernel:
        """Read and verify a kernel's files.

        Raises:
            DigestMismatch, FormatError, NotFound: they are damaged, or not there.
        """
        files: dict[str, bytes | memoryview] = {}
        artifacts = sorted(_kept(kernel, keep), key=lambda artifact: names.artifact_order(artifact.filename))
        for artifact in artifacts:
            data = bundle.view_blob(digest_raw(artifact.digest), artifact.filename)
            # What is looked into is small; IR, which is only written, is not copied.
            files[artifact.filename] = bytes(data) if artifact.kind in names.LAUNCH_KINDS else data
        return cls(kernel, files, tuple(artifact for artifact in artifacts if artifact.spans))

    @property
    def metadata(self) -> bytes:
        """The metadata as the bundle stores it."""
        return bytes(self.files[self.kernel.metadata.filename])

    def files_for(self, directory: str, triton_dir: str | None) -> Files:
        """Return the files as they are written below a cache directory.

        Args:
            directory: the cache directory.
            triton_dir: where Triton is installed, None when it is not.

        Raises:
            FormatError: Triton could not read them there.
        """
        localized = {
            artifact.filename: localize(artifact, bytes(self.files[artifact.filename]), directory, triton_dir)
            for artifact in self.with_paths
        }
        files = {**self.files, **localized}
        launch = {artifact.filename: bytes(files[artifact.filename]) for artifact in self.kernel.launch_set}
        checked = check_kernel_files(self.kernel.key, launch)
        if isinstance(checked, Rejected):
            raise FormatError(checked.reason, key=self.kernel.key)
        return files


def kept_digests(kernel: Kernel, keep: Keep) -> list[bytes]:
    """Return the raw digests of the files that `StoredKernel.read` reads, to fetch them beforehand."""
    return [digest_raw(artifact.digest) for artifact in _kept(kernel, keep)]


def _kept(kernel: Kernel, keep: Keep) -> tuple[Artifact, ...]:
    return kernel.launch_set if keep == "launch" else kernel.artifacts


def why_not_trusted(kernel: Kernel, keep: Keep, trust: Trust) -> str | None:
    """Return why a kernel needs more trust than it is given, None when it does not."""
    # Triton loads a library from the directory of its own key, and any bundle can call that directory a kernel.
    holds_code = keep == "all" and any(artifact.kind == "so" for artifact in kernel.artifacts)
    return NEEDS_TRUST if holds_code and trust != "code" else None


def localize(artifact: Artifact, data: bytes, directory: str, triton_dir: str | None) -> bytes:
    """Put paths of this machine in place of an artifact's sentinels."""
    if not artifact.spans:
        return data
    paths = {sentinel.CACHE_DIR: directory}
    if triton_dir is not None:
        paths[sentinel.TRITON_DIR] = triton_dir
    return sentinel.from_sentinels(data, artifact.spans, paths)


@dataclass(frozen=True)
class Placed:
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
    bundle: Bundle, kernel: Kernel, directory: CacheDirectory, *, keep: Keep, trust: Trust
) -> Placed | Rejected:
    """Place one kernel where Triton asks for it at this moment.

    The caller knows that this machine can use the kernel: Triton computed its key here, and the key covers target, Triton's
    build and ptxas.  So no fact of this machine is looked up, and none can be out of date when the visible GPUs change.  All
    else is as for `bundler.restore`.

    Args:
        bundle: where its bytes are.
        kernel: which.
        directory: the cache directory, whatever the layout that the kernel was recorded under.
        keep, trust: as for `bundler.restore`.

    Returns:
        `Rejected` when its bytes are damaged, when Triton could not read them, or when it needs more trust.

    Raises:
        AccessDenied, StoreFull, NotFound: the directory cannot be written.
        StoreUnavailable: its bytes cannot be read now.
    """
    untrusted = why_not_trusted(kernel, keep, trust)
    if untrusted is not None:
        return Rejected(untrusted)
    bundle.blobs.prefetch(kept_digests(kernel, keep))
    try:
        stored = StoredKernel.read(bundle, kernel, keep)
        files = stored.files_for(directory.path, identity.triton_dir() if stored.with_paths else None)
    except (DigestMismatch, FormatError, NotFound) as error:
        return Rejected(error.message)
    outcome = directory.publish(kernel.key, files, stored.metadata)
    if outcome == "present":
        return Placed(outcome, 0, None)
    return Placed(
        outcome, sum(map(len, files.values())), {name: f"{directory.path}/{kernel.key}/{name}" for name in files}
    )

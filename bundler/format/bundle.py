# SPDX-License-Identifier: Apache-2.0
"""`Bundle`: a manifest in memory and content that is read, and verified, on demand."""

from __future__ import annotations

import fnmatch
import io
import os
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from types import TracebackType
from typing import Literal, Protocol, Self

from bundler.errors import ConfigError, NotFound, UnsupportedVersion
from bundler.format.container import Container
from bundler.format.digest import check_digest, digest_raw, digest_text
from bundler.format.entries import Artifact, Entry, HelperLibrary, Kernel, Opaque, Target, TuningFile
from bundler.format.file import BytesSource, FileSource, replacing
from bundler.format.launch import TuningRecord
from bundler.format.limits import DEFAULT_LIMITS, Limits
from bundler.format.manifest import Content, Observed, content_digest
from bundler.format.tuning import id_of
from bundler.format.writer import write_container

Keep = Literal["all", "launch"]


class BlobSource(Protocol):
    """Where a bundle's bytes come from.

    Attributes:
        waits: whether `prefetch` mostly waits for somebody else, so that a thread of its own is worth while.
    """

    waits: bool

    def read_blob(self, digest: bytes) -> bytes:
        """Return the bytes of a blob by raw digest; raises `NotFound`."""

    def prefetch(self, digests: Collection[bytes]) -> None:
        """Be told that these blobs are read next: a source that is far away fetches them in few round trips."""

    def close(self) -> None:
        """Release what the source holds."""


class MemoryBlobs:
    """Blobs in a dictionary, by raw digest."""

    waits = False

    def __init__(self, blobs: Mapping[bytes, bytes]) -> None:
        self._blobs = blobs

    def read_blob(self, digest: bytes) -> bytes:
        """Return the bytes of a blob; raises `NotFound`."""
        try:
            return self._blobs[digest]
        except KeyError:
            raise NotFound(f"no blob {digest_text(digest)}", digest=digest_text(digest)) from None

    def prefetch(self, digests: Collection[bytes]) -> None:
        """Nothing is nearer than memory."""

    def close(self) -> None:
        """Nothing to release."""


class FirstBlobs:
    """Blobs of several sources; the first that has one answers."""

    def __init__(self, sources: Iterable[BlobSource]) -> None:
        self._sources = tuple(sources)
        self.waits = any(source.waits for source in self._sources)

    def read_blob(self, digest: bytes) -> bytes:
        """Return the bytes of a blob; raises `NotFound`."""
        for source in self._sources:
            try:
                return source.read_blob(digest)
            except NotFound:
                continue
        raise NotFound(f"no blob {digest_text(digest)}", digest=digest_text(digest))

    def prefetch(self, digests: Collection[bytes]) -> None:
        """Tell every source; each ignores what it does not have."""
        for source in self._sources:
            source.prefetch(digests)

    def close(self) -> None:
        """The sources belong to the bundles they came from, which close them."""


class Bundle:
    """Kernels and their companions, addressed by the digest of what they are.

    Immutable.  Safe under threads; after a fork parent and child may both go on reading.  A loaded bundle keeps its
    file open until `close`, and the file may be unlinked or replaced meanwhile.  A bundle made from others (`select`,
    `merge`) reads through them: keep them open until it was saved.

    Attributes:
        variants_dropped: how many other builds of a kernel `merge` left out.
        left_out: (name, reason) of every file that `pack` or `collect` saw and did not take.
    """

    def __init__(
        self,
        content: Content,
        observed: Observed,
        blobs: BlobSource,
        *,
        content_bytes: bytes | None = None,
        writable: bool = True,
        variants_dropped: int = 0,
        left_out: tuple[tuple[str, str], ...] = (),
    ) -> None:
        self._content = content
        self._observed = observed
        self._blobs = blobs
        self._encoded = content_bytes
        self._writable = writable
        self.variants_dropped = variants_dropped
        self.left_out = left_out

    @property
    def _content_bytes(self) -> bytes:
        # Encoded when asked for: a bundle may only be a step on the way to another.
        if self._encoded is None:
            self._encoded = self._content.encode()
        return self._encoded

    @property
    def digest(self) -> str:
        """`sha256:<64 hex>` of the content part of the manifest."""
        return content_digest(self._content_bytes)

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        """Kernels by target, name and key."""
        return self._content.kernels

    @property
    def tuning_files(self) -> tuple[TuningFile, ...]:
        """Result files of tuners."""
        return self._content.tuning_files

    @property
    def helpers(self) -> tuple[HelperLibrary, ...]:
        """Shared libraries that Triton built with the C compiler."""
        return self._content.helpers

    @property
    def opaque(self) -> tuple[Opaque, ...]:
        """Files that torch executes or unpickles."""
        return self._content.opaque

    @property
    def tuning_records(self) -> tuple[TuningRecord, ...]:
        """Winners that a tuner of ours found."""
        return self._content.tuning_records

    @property
    def content(self) -> Content:
        """All entries."""
        return self._content

    @property
    def observed(self) -> Observed:
        """Devices, compile times and hosts; no part of the digest."""
        return self._observed

    @property
    def blobs(self) -> BlobSource:
        """Where the bytes come from; for reading many at once."""
        return self._blobs

    def read(self, artifact: Artifact) -> bytes:
        """Return the stored bytes of an artifact, verified against its digest.

        Raises:
            NotFound: the artifact is of another bundle.
            DigestMismatch, FormatError: the stored bytes are damaged.
        """
        return self._read_blob(digest_raw(artifact.digest), artifact.filename)

    def view_blob(self, digest: bytes, what: str) -> bytes | memoryview:
        """Return the verified bytes of a blob by raw digest, without a copy where that can be; raises as `read`.

        A view keeps the decoded frame that it lies in, some megabytes, in memory.  `what` names the blob in errors.
        """
        if isinstance(self._blobs, Container):
            return self._blobs.view_blob(digest)
        return self._read_blob(digest, what)

    def verify(self) -> None:
        """Decode and check everything there is; raises the first `FormatError` or `DigestMismatch`."""
        if isinstance(self._blobs, Container):
            self._blobs.verify()
        else:
            for digest, _ in self._content.blobs:
                self._read_blob(digest)
        for kernel in self.kernels:
            kernel.launch.tensor_descriptors.plain()
            if kernel.parts is not None:
                kernel.parts.diff(kernel.parts)

    @staticmethod
    def load(path: str | os.PathLike[str], limits: Limits | None = None) -> Bundle:
        """Open a bundle file; only header, table of contents and manifest are read.

        Raises:
            NotFound, AccessDenied: the file cannot be opened.
            FormatError, DigestMismatch: it is not a sound bundle.
        """
        return _open(FileSource(path), limits or DEFAULT_LIMITS)

    @staticmethod
    def from_bytes(data: bytes, limits: Limits | None = None) -> Bundle:
        """Open a bundle that is in memory; raises as `load`."""
        return _open(BytesSource(data), limits or DEFAULT_LIMITS)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a bundle file: temporary file beside it, flushed to disk, renamed.

        Raises:
            StoreFull, AccessDenied, NotFound: it could not be written; what was at `path` before stays.
            UnsupportedVersion: this bundle has features that we can read but not write.
        """
        self._check_writable()
        with replacing(path) as out:
            write_container(out, self._content, self._content_bytes, self._observed.encode(), self._read_blob)

    def to_bytes(self) -> bytes:
        """Return what `save` would write."""
        self._check_writable()
        out = io.BytesIO()
        write_container(out, self._content, self._content_bytes, self._observed.encode(), self._read_blob)
        return out.getvalue()

    def select(self, *, target: str | None = None, keep: Keep = "all", names: str | None = None) -> Bundle:
        """Return a smaller bundle that reads through this one.

        Args:
            target: only kernels for this target, such as `cuda:90`.
            keep: `launch` drops everything but device binary, metadata and tuning files.
            names: only kernels and tuning files whose name matches this glob.

        With `target` or `names`, helper libraries and opaque files are left out: they cannot be told apart by kernel.
        """
        if keep not in ("all", "launch"):
            raise ConfigError(f"keep={keep!r}: expected 'all' or 'launch'", got=keep)
        wanted = None if target is None else Target.parse(target)
        kernels = [k for k in self.kernels if wanted in (None, k.target) and _matches(k.name, names)]
        if keep == "launch":
            kernels = [replace(k, artifacts=k.launch_set) for k in kernels]
        entries: list[Entry] = [*kernels]
        entries += [e for e in self.tuning_files if _matches(e.artifact.filename, names)]
        if keep == "all" and target is None and names is None:
            entries += [*self.helpers, *self.opaque]
        records = [r for r in self.tuning_records if _matches(r.kernel, names)]
        chosen = {id_of(record) for record in records}
        tunings = tuple(tuning for tuning in self._observed.tunings if tuning.record in chosen)
        observed = replace(observed_of(self._observed, kernels), tunings=tunings)
        return Bundle(Content.of(entries, records), observed, self._blobs, writable=self._writable)

    def close(self) -> None:
        """Release the file; closing twice is fine."""
        self._blobs.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Bundle {self.digest[:19]} {len(self.kernels)} kernels>"

    @property
    def writable(self) -> bool:
        """Whether `save` may write it: no feature of a newer version would be lost."""
        return self._writable

    def _read_blob(self, digest: bytes, what: str = "blob") -> bytes:
        data = self._blobs.read_blob(digest)
        if not isinstance(self._blobs, Container):  # a container has verified it already
            check_digest(data, digest, what)
        return data

    def _check_writable(self) -> None:
        if not self._writable:
            raise UnsupportedVersion(
                "this bundle was written by a newer version, with features that this one can read but not write; "
                "copy the file, or upgrade triton-bundler"
            )


def observed_of(observed: Observed, kernels: Iterable[Kernel]) -> Observed:
    """Return the observations of these kernels alone."""
    keys = {kernel.key for kernel in kernels}
    return replace(observed, kernels={key: seen for key, seen in observed.kernels.items() if key in keys})


def _open(source: FileSource | BytesSource, limits: Limits) -> Bundle:
    try:
        container = Container(source, limits)
        observed = Observed.decode(container.observed_bytes, limits, newer_minor=container.newer_minor)
    except BaseException:
        source.close()
        raise
    return Bundle(
        container.content, observed, container,
        content_bytes=container.content_bytes, writable=not (container.read_only or container.newer_minor),
    )  # fmt: skip


def _matches(name: str, pattern: str | None) -> bool:
    return pattern is None or fnmatch.fnmatchcase(name, pattern)

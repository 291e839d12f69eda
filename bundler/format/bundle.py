# SPDX-License-Identifier: Apache-2.0
"""`Bundle`: a manifest in memory, and content read and verified on demand; each room that makes or
reads bundles calls it.
"""

from __future__ import annotations

import io
import os
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, BinaryIO, Protocol, Self

from bundler.errors import ConfigError, EmptyBundle, NotFound, UnsupportedVersion
from bundler.format import entries as entry_types
from bundler.format.bundle_file import BytesSource, FileSource, replace_file
from bundler.format.cached_properties import cached_property
from bundler.format.container import ZSTD_LEVEL, Container
from bundler.format.digest import check_digest, digest_raw, digest_text
from bundler.format.entries import (
    Artifact,
    Entry,
    HelperLibrary,
    Kernel,
    Opaque,
    Target,
    TuningFile,
    replace,
)
from bundler.format.limits import DEFAULT_LIMITS, Limits
from bundler.format.manifest import Content, Observed, content_digest, observed_of
from bundler.format.summary import HTML_LEFT, HTML_WIDE, count, facts_html, html_text, short

if TYPE_CHECKING:
    from bundler.format.launch_spec import TuningRecord
    from bundler.format.signature_sections import SignatureSource

Keep = entry_types.Keep


def check_keep(keep: str) -> None:
    """Raise `ConfigError` for a value that `keep` cannot have."""
    if keep not in ("all", "launch"):
        raise ConfigError(f"keep={keep!r}: expected 'all' or 'launch'", got=keep)


class BlobSource(Protocol):
    """Where a bundle's bytes come from.

    A source inherits from this class and defines `read_blob`; everything else has a default that is
    correct, and that a source overrides where it can do better.

    Attributes:
        waits: whether `prefetch` mostly waits for another machine, so that it is worth a thread of
            its own.
        verified: whether the source has compared every blob that it returns with its digest; who
            reads need not do it again.
        verifies_stored: whether, where it is `verified`, that goes for `stored_blobs` too.
    """

    waits: bool = False
    verified: bool = False
    verifies_stored: bool = True

    @abstractmethod
    def read_blob(self, digest: bytes) -> bytes:
        """Return the bytes of a blob by raw digest; raises `NotFound`."""

    def view_blob(self, digest: bytes) -> bytes | memoryview:
        """Return the same bytes without a copy, where the source can; raises as `read_blob`."""
        return self.read_blob(digest)

    def view_blobs(self, digests: Sequence[bytes]) -> Sequence[bytes | memoryview]:
        """Return the bytes of several blobs, as `view_blob` does; raises what it raises for the
        first that is damaged.
        """
        return [self.view_blob(digest) for digest in digests]

    def stored_blobs(self, digests: Sequence[bytes]) -> Sequence[bytes | memoryview]:
        """Return the bytes of several blobs, which the caller verifies, unless `verifies_stored`;
        raises as `view_blobs`.
        """
        return self.view_blobs(digests)

    def verify(self, digests: Collection[bytes]) -> None:
        """Read these blobs and compare each with its digest; raises `DigestMismatch`, and as
        `read_blob`.
        """
        for digest in digests:
            data = self.view_blob(digest)
            if not self.verified:
                check_digest(data, digest, "blob")

    def prefetch(self, digests: Collection[bytes]) -> None:
        """Fetch these blobs, which are read next, in few round trips, where the source is
        far away.
        """
        return  # with an empty body a method of a Protocol is abstract

    def close(self) -> None:
        """Release what the source holds; closing twice is fine."""
        return  # not abstract either


def require_content(bundle: Bundle, consequence: str) -> None:
    """Raise `EmptyBundle` when there is nothing in a bundle; `consequence` says what was not done,
    and the way out.
    """
    if bundle.is_empty:
        raise EmptyBundle(
            "the bundle is empty: it has no kernel, no other file and no tuning record;"
            f" {consequence}",
            digest=bundle.digest,
            left_out=bundle.left_out,
        )


class MemoryBlobs(BlobSource):
    """Blobs in a dictionary, by raw digest.

    Args:
        blobs: the bytes.
        verified: whether each digest is known to be that of its bytes.
    """

    def __init__(
        self, blobs: Mapping[bytes, bytes | memoryview], *, verified: bool = False
    ) -> None:
        self._blobs, self.verified = blobs, verified

    def read_blob(self, digest: bytes) -> bytes:
        """Return the bytes of a blob; raises `NotFound`."""
        return bytes(self.view_blob(digest))

    def view_blob(self, digest: bytes) -> bytes | memoryview:
        """Return the bytes of a blob as they are held; raises `NotFound`."""
        try:
            return self._blobs[digest]
        except KeyError:
            raise NotFound(f"no blob {digest_text(digest)}", digest=digest_text(digest)) from None


class FirstBlobs(BlobSource):
    """Blobs of several sources; the first that has one answers.

    The sources belong to the bundles they came from, which close them.
    """

    verified = True

    def __init__(self, sources: Iterable[BlobSource]) -> None:
        self._sources = tuple(sources)
        self.waits = any(source.waits for source in self._sources)

    def read_blob(self, digest: bytes) -> bytes:
        """Return the verified bytes of a blob; raises as `view_blob`."""
        return bytes(self.view_blob(digest))

    def view_blob(self, digest: bytes) -> bytes | memoryview:
        """Return the verified bytes of a blob; raises `NotFound`, `DigestMismatch`, and what the
        source raises.
        """
        for source in self._sources:
            try:
                data = source.view_blob(digest)
            except NotFound:
                continue
            if not source.verified:
                check_digest(data, digest, "blob")
            return data
        raise NotFound(f"no blob {digest_text(digest)}", digest=digest_text(digest))

    def prefetch(self, digests: Collection[bytes]) -> None:
        """Tell every source; each ignores what it does not have."""
        for source in self._sources:
            source.prefetch(digests)


class Bundle:
    """Kernels and their companions, addressed by the digest of what they are.

    Immutable.  Safe under threads; after a fork parent and child may both go on reading.  A loaded
    bundle keeps its file open until `close`, and the file may be unlinked or replaced meanwhile.  A
    bundle made from others (`select`, `merge`) reads through them: keep them open until it was
    saved.

    `len` and iteration are over its kernels; `in` takes a kernel, or a kernel key.  A bundle is
    true, also without kernels.

    Attributes:
        variants_dropped: how many other builds of a kernel `merge` left out.
        left_out: (name, reason) of every file that `pack` or `collect` saw and did not take.
        signed: where signatures of exactly this content are; a bundle that is made from others has
            none.
    """

    signed: SignatureSource

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
        signed: SignatureSource | None = None,
        file: Container | None = None,
    ) -> None:
        self._content = content
        self._observed = observed
        self._blobs = blobs
        self._encoded = content_bytes
        self._writable = writable
        self.variants_dropped = variants_dropped
        self.left_out = left_out
        self._file = file
        if signed is not None:
            self.signed = signed

    @property
    def _content_bytes(self) -> bytes:
        # Encoded when asked for: a bundle may only be a step on the way to another.
        if self._encoded is None:
            self._encoded = self._content.encode()
        return self._encoded

    @cached_property
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
    def programs(self) -> tuple[str, ...]:
        """The names of the generated programs, which `bundler.runtime.load_program` takes."""
        from bundler.format.opaque_files import program_name  # a restore asks for none

        return tuple(sorted({name for e in self.opaque if (name := program_name(e.path))}))

    @property
    def tuning_records(self) -> tuple[TuningRecord, ...]:
        """Winners that a tuner of ours found."""
        return self._content.tuning_records

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing in it: no kernel, no other file, no tuning record."""
        content = self._content
        return not (
            content.kernels
            or content.tuning_files
            or content.helpers
            or content.opaque
            or content.tuning_records
        )

    @property
    def content(self) -> Content:
        """All entries."""
        return self._content

    @property
    def observed(self) -> Observed:
        """Devices, compile times and hosts; no part of the digest."""
        return self._observed

    def __getattr__(self, name: str) -> Any:
        # Asked for what is not there: few ask for signatures.
        fields = vars(self)
        if name != "signed" or "_file" not in fields:
            raise AttributeError(name)
        from bundler.format.signature_sections import UNSIGNED, SignatureSections

        file = fields["_file"]
        return fields.setdefault("signed", UNSIGNED if file is None else SignatureSections(file))

    @property
    def signatures(self) -> tuple[bytes, ...]:
        """Envelopes (DSSE) that came with it; anybody may have put them there, and `triton-bundler
        verify --signed` judges them.

        Raises:
            FormatError, DigestMismatch, LimitExceeded: they are damaged, or more than a reader
                takes.
        """
        return self.signed.envelopes()

    @property
    def stored_digest(self) -> str:
        """Digest of the file's sections as they are stored, but for signatures: 64 hexadecimal
        digits; empty where no file was loaded.
        """
        return self.signed.stored_digest

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
        """Return the verified bytes of a blob by raw digest, without a copy where that can be;
        raises as `read`.

        A view keeps the decoded frame that it lies in, some megabytes, in memory.  `what` names the
        blob in errors.
        """
        data = self._blobs.view_blob(digest)
        if not self._blobs.verified:
            check_digest(data, digest, what)
        return data

    def verify(self) -> None:
        """Decode and check everything there is; raises the first `FormatError` or
        `DigestMismatch`.
        """
        self._blobs.verify([digest for digest, _ in self._content.blobs])
        # A restore needs none of these.
        from bundler.format.keyparts import KeyParts
        from bundler.format.launch_spec import LaunchFacts

        for kernel in self.kernels:
            # Through its own properties a kernel would keep them, and those of a hundred thousand
            # take gigabytes.
            kernel.spec.tensor_descriptors.plain()
            if (facts := kernel.facts_bytes) is not None:
                LaunchFacts.from_bytes(facts)
            if (parts := kernel.parts_bytes) is not None:
                KeyParts.from_bytes(parts)

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

    def save(self, path: str | os.PathLike[str], *, level: int = ZSTD_LEVEL) -> None:
        """Write a bundle file: temporary file beside it, flushed to disk, renamed.

        `level` of compression is zstd's: 3 takes half of the time of 9, for 15 % more bytes.

        Raises:
            ConfigError: there is no such level.
            StoreFull, AccessDenied, NotFound: it could not be written; what was at `path` before
                stays.
            UnsupportedVersion: this bundle has features that we can read but not write.
        """
        replace_file(path, self._writer(level))

    def to_bytes(self, *, level: int = ZSTD_LEVEL) -> bytes:
        """Return what `save` would write."""
        out = io.BytesIO()
        self._writer(level)(out)
        return out.getvalue()

    def _writer(self, level: int) -> Callable[[BinaryIO], None]:
        """Return what writes the container; raises as `save`."""
        from bundler.format.writer import check_level, write_container  # a restore needs none of it

        self._check_writable()
        check_level(level)
        # made while the blobs are compressed
        manifest = lambda: (self._content_bytes, self._observed.encode())  # noqa: E731
        return lambda out: write_container(out, self._content, manifest, self._read_blob, level)

    def select(
        self, *, target: str | None = None, keep: Keep = "all", names: str | None = None
    ) -> Bundle:
        """Return a smaller bundle that reads through this one.

        Args:
            target: only kernels for this target, such as `cuda:90`.
            keep: `launch` drops everything but device binary, metadata and tuning files.
            names: only kernels and tuning files whose name matches this glob.

        With `target` or `names`, helper libraries and opaque files are left out: they cannot be
        told apart by kernel.
        """
        check_keep(keep)
        wanted = None if target is None else Target.parse(target)
        kernels = [
            k for k in self.kernels if wanted in (None, k.target) and _matches(k.name, names)
        ]
        if keep == "launch":
            kernels = [k.with_artifacts(k.launch_set) for k in kernels]
        entries: list[Entry] = [
            *kernels,
            *(e for e in self.tuning_files if _matches(e.artifact.filename, names)),
        ]
        if keep == "all" and target is None and names is None:
            entries += [*self.helpers, *self.opaque]
        records = [r for r in self.tuning_records if _matches(r.kernel, names)]
        from bundler.format.candidate_timings import id_of  # a restore needs none of it

        chosen = {id_of(record) for record in records}
        tunings = tuple(tuning for tuning in self._observed.tunings if tuning.record in chosen)
        observed = replace(observed_of(self._observed, kernels), tunings=tunings)
        content = Content.of(entries, records)
        return Bundle(content, observed, self._blobs, writable=self._writable)

    def close(self) -> None:
        """Release the file; closing twice is fine."""
        self._blobs.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def __len__(self) -> int:
        return len(self.kernels)

    def __iter__(self) -> Iterator[Kernel]:
        return iter(self.kernels)

    def __contains__(self, item: object) -> bool:
        if isinstance(item, Kernel):
            return self._by_key.get(item.key) == item
        return isinstance(item, str) and item in self._by_key

    def __bool__(self) -> bool:
        # A bundle without kernels may hold other things, and `if bundle:` has always asked whether
        # there is one.
        return True

    def __repr__(self) -> str:
        beside = len(self.tuning_files) + len(self.helpers) + len(self.opaque)
        more = [count(beside, "other file")] if beside else []
        more += [count(len(self.tuning_records), "tuning record")] if self.tuning_records else []
        return f"<Bundle {short(self.digest)} {', '.join([count(len(self), 'kernel'), *more])}>"

    def _repr_html_(self) -> str:
        return _html_of(self)

    @cached_property
    def _by_key(self) -> dict[str, Kernel]:
        return {kernel.key: kernel for kernel in self.kernels}

    @property
    def writable(self) -> bool:
        """Whether `save` may write it: no feature of a newer version would be lost."""
        return self._writable

    def _read_blob(self, digest: bytes, what: str = "blob") -> bytes:
        return bytes(self.view_blob(digest, what))

    def _check_writable(self) -> None:
        if not self._writable:
            raise UnsupportedVersion(
                "this bundle was written by a newer version, with features that this one can read"
                " but not write; copy the file, or upgrade triton-bundler"
            )


def _open(source: FileSource | BytesSource, limits: Limits) -> Bundle:
    try:
        container = Container(source, limits)
        observed = Observed.decode(
            container.observed_bytes, limits, newer_minor=container.newer_minor
        )
    except BaseException:
        source.close()
        raise
    return Bundle(
        container.content,
        observed,
        container,
        content_bytes=container.content_bytes,
        writable=not (container.read_only or container.newer_minor),
        file=container,
    )


def with_parts(
    bundle: Bundle,
    content: Content,
    observed: Observed,
    blobs: BlobSource | None = None,
    left_out: tuple[tuple[str, str], ...] | None = None,
) -> Bundle:
    """Return a bundle with these parts, and for None those of the given one; without `blobs` it
    reads through that.
    """
    return Bundle(
        content,
        observed,
        blobs or bundle.blobs,
        writable=bundle.writable,
        variants_dropped=bundle.variants_dropped,
        left_out=bundle.left_out if left_out is None else left_out,
    )


def _matches(name: str, pattern: str | None) -> bool:
    if pattern is None:
        return True
    import fnmatch  # few select by name

    return fnmatch.fnmatchcase(name, pattern)


# -------------------------------------------------------------------------------------- Notebooks

# A notebook's output is read at one glance.
KERNELS_SHOWN = 12
_KEY_CHARACTERS = 12
_US_OF_MS = 1000
_RIGHT = "text-align:right;white-space:nowrap"
_COLUMNS = ("kernel", "target", "warps", "shared memory", "binary", "compiled in", "key")
_NUMERIC = frozenset({2, 3, 4, 5})


def _html_of(bundle: Bundle) -> str:
    """Return what is in a bundle: its digest, kernels by target, what is beside them, and a table
    of the first kernels.  Names in a bundle were chosen by whoever made it: `html_text` escapes all.
    """
    content, observed = bundle.content, bundle.observed
    targets = Counter(str(kernel.target) for kernel in content.kernels)
    beside = {
        "tuning file": content.tuning_files,
        "helper library": content.helpers,
        "opaque file": content.opaque,
        "tuning record": content.tuning_records,
    }
    facts = [
        ("digest", bundle.digest),
        (
            "kernels",
            ", ".join(f"{number:,} for {target}" for target, number in sorted(targets.items()))
            or "none",
        ),
        ("files", count(sum(size for _, size in content.blobs), "byte")),
    ]
    others = [count(len(found), noun) for noun, found in beside.items() if found]
    facts += [("beside them", ", ".join(others))] if others else []
    table = facts_html("Bundle", facts)
    if not content.kernels:
        return table
    head = "".join(
        f'<th scope="col" style="{_align(n)}">{html_text(title)}</th>'
        for n, title in enumerate(_COLUMNS)
    )
    rows = "".join(_row(_cells(observed, kernel)) for kernel in content.kernels[:KERNELS_SHOWN])
    left = len(content.kernels) - KERNELS_SHOWN
    more = f"<p>and {count(left, 'more kernel')}</p>" if left > 0 else ""
    return f"{table}<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>{more}"


def _cells(observed: Observed, kernel: Kernel) -> Sequence[str]:
    seen = observed.kernels.get(kernel.key)
    spent_us = sum(us for _, us in seen.times_us) if seen is not None else 0
    return (
        kernel.name,
        str(kernel.target),
        f"{kernel.spec.num_warps}",
        f"{kernel.spec.shared_bytes:,}",
        f"{kernel.binary.size:,}",
        f"{spent_us / _US_OF_MS:,.0f} ms" if spent_us else "-",
        f"{kernel.key[:_KEY_CHARACTERS]}…",
    )


def _row(cells: Iterable[str]) -> str:
    told = "".join(
        f'<td style="{_align(n)}">{html_text(cell)}</td>' for n, cell in enumerate(cells)
    )
    return f"<tr>{told}</tr>"


def _align(column: int) -> str:
    return _RIGHT if column in _NUMERIC else HTML_WIDE if column == 0 else HTML_LEFT

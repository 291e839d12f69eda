# SPDX-License-Identifier: Apache-2.0
"""`ImageDirectory`: images in a directory, by the OCI image layout (`oci-layout`, `index.json`,
`blobs/sha256/…`).

skopeo, podman and oras read and write such directories, so images go where no network is.  Blobs
are written to a temporary file and renamed; `index.json` is replaced the same way, under a lock of
the directory, so of two writers at once neither loses the other's image. `open_image_place` makes
it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import stat
from collections.abc import Callable, Iterator
from typing import BinaryIO, TypeVar

import msgspec

from bundler.backends.backend_errors import BackendError, BackendUnavailable, NotThere, WrongBytes
from bundler.backends.file_steps import errors_by_meaning, temporary_name, with_temporary
from bundler.backends.oci.image_port import (
    INDEX_TYPE,
    MANIFEST_BYTES,
    MOST_TAGS,
    Descriptor,
    ImageManifest,
    ImagePlace,
    copy_checked,
    digest_of,
    file_chunks,
)

LAYOUT_FILE, INDEX_FILE = "oci-layout", "index.json"
TAG_NAME = "org.opencontainers.image.ref.name"
# An index of so many manifests is looked through for referrers.
MOST_MANIFESTS = 1000
_LAYOUT = b'{"imageLayoutVersion":"1.0.0"}'
_DIGEST = re.compile(r"sha256:([0-9a-f]{64})")
_SMALL_BYTES = 64 * 1024
T = TypeVar("T")


class _Layout(msgspec.Struct, rename="camel"):
    image_layout_version: str


class _Listing(msgspec.Struct, rename="camel"):
    schema_version: int = 2
    media_type: str = INDEX_TYPE
    manifests: list[Descriptor] = []


class _About(msgspec.Struct, rename="camel"):
    """What a manifest says of itself that a referrer is known by."""

    artifact_type: str = ""
    subject: Descriptor | None = None
    config: Descriptor | None = None


class ImageDirectory(ImagePlace):
    """A directory of images.

    Args:
        path: where.
        name: for messages.
        make: make it where it is not there.

    Raises:
        NotThere: there is no such directory.
        BackendUnavailable: it is no OCI image layout of version 1.
    """

    def __init__(self, path: str, name: str, *, make: bool = False) -> None:
        self._path, self.name = path, name
        if make:
            with errors_by_meaning(path, "make"):
                os.makedirs(os.path.join(path, "blobs", "sha256"), exist_ok=True)
            if not os.path.lexists(os.path.join(path, LAYOUT_FILE)):
                self._replace(LAYOUT_FILE, lambda out: out.write(_LAYOUT))
                self._replace(INDEX_FILE, lambda out: out.write(msgspec.json.encode(_Listing())))
        try:
            layout = self._decoded(self._small(LAYOUT_FILE, _SMALL_BYTES), _Layout, LAYOUT_FILE)
        except NotThere as error:
            raise NotThere(
                f"{name}: is no directory of images: it has no file {LAYOUT_FILE}"
            ) from error
        if not layout.image_layout_version.startswith("1."):
            raise BackendUnavailable(
                f"{name}: has the layout {layout.image_layout_version!r:.40}, expected 1.0.0"
            )

    def manifest(self, reference: str) -> ImageManifest:
        """Return a manifest by tag or digest; an image that has no name is meant where it is the
        only one.
        """
        listed = self._listing().manifests
        if ":" in reference:
            data = self._small(self._blob(reference), MANIFEST_BYTES)
            kind = next((one.media_type for one in listed if one.digest == reference), "")
            found = ImageManifest(
                data, kind or self._decoded(data, _Listing, "manifest").media_type
            )
        else:
            tagged = [one for one in listed if _tag(one) == reference]
            if not tagged and len(listed) == 1 and not _tag(listed[0]):
                tagged = listed
            if not tagged:
                raise NotThere(f"{self.name}: no image is called {reference}")
            reference = tagged[-1].digest
            found = ImageManifest(
                self._small(self._blob(reference), MANIFEST_BYTES), tagged[-1].media_type
            )
        if found.digest != reference:
            raise WrongBytes(
                f"{self.name}: manifest {reference} has the digest {found.digest}; copy it again"
            )
        return found

    def put_manifest(self, data: bytes, media_type: str, tag: str = "") -> bool:
        """Store a manifest, and list it; `referrers` finds it by its subject."""
        digest = digest_of(data)
        self._replace(self._blob(digest), lambda out: out.write(data))
        about = self._decoded(data, _About, "manifest")
        new = Descriptor(
            media_type, digest, len(data), about.artifact_type, {TAG_NAME: tag} if tag else {}
        )
        with self._locked():
            listing = self._listing()
            # What a tag named stays listed without a name, as in a registry; a manifest that has a
            # name needs no other entry.
            others = [
                _untagged(one) if tag and _tag(one) == tag else one for one in listing.manifests
            ]
            others = [one for one in others if one.digest != digest or _tag(one) not in {"", tag}]
            listed = not tag and any(one.digest == digest for one in others)
            listing.manifests = others if listed else [*others, new]
            self._replace(INDEX_FILE, lambda out: out.write(msgspec.json.encode(listing)))
        return True

    def read_blob(self, digest: str, size: int, out: BinaryIO) -> None:
        """Write a blob into a file."""
        with self._opened(self._blob(digest)) as source:
            self._copied(digest, size, source, out)

    def _copied(self, digest: str, size: int, source: BinaryIO, out: BinaryIO | None) -> None:
        copy_checked(f"{self.name}: blob {digest}", digest, size, file_chunks(source), out)

    def put_blob(self, digest: str, size: int, source: BinaryIO) -> bool:
        """Store a blob; one of that name and size that is there is compared, and replaced where it
        is damaged.
        """
        with contextlib.suppress(NotThere, WrongBytes), self._opened(self._blob(digest)) as known:
            self._copied(digest, size, known, None)
            return False
        source.seek(0)
        self._replace(self._blob(digest), lambda out: self._copied(digest, size, source, out))
        return True

    def referrers(self, digest: str, artifact_type: str) -> list[Descriptor] | None:
        """Return the listed manifests of this type whose subject is that one."""
        found: list[Descriptor] = []
        for one in self._listing().manifests[:MOST_MANIFESTS]:
            if one.artifact_type not in {"", artifact_type}:
                continue
            try:
                about = self._decoded(self.manifest(one.digest).data, _About, "manifest")
            except BackendError:
                continue  # one that is damaged, or was removed, refers to nothing
            kind = about.artifact_type or (about.config.media_type if about.config else "")
            subject = "" if about.subject is None else about.subject.digest
            if subject == digest and kind == artifact_type:
                found.append(Descriptor(one.media_type, one.digest, one.size, kind))
        return found

    def tags(self) -> list[str]:
        """Return the tags, sorted."""
        found = sorted(filter(None, map(_tag, self._listing().manifests)))
        if len(found) > MOST_TAGS:
            raise BackendUnavailable(f"{self.name}: has more than {MOST_TAGS:,} tags; name one")
        return found

    def _listing(self) -> _Listing:
        return self._decoded(self._small(INDEX_FILE, MANIFEST_BYTES), _Listing, INDEX_FILE)

    def _blob(self, digest: str) -> str:
        match = _DIGEST.fullmatch(digest)
        if match is None:
            raise BackendUnavailable(f"{self.name}: {digest!r:.90} is no digest by SHA-256")
        return os.path.join("blobs", "sha256", match[1])

    def _small(self, name: str, most_bytes: int) -> bytes:
        with self._opened(name) as file:
            data = file.read(most_bytes + 1)
        if len(data) > most_bytes:
            raise BackendUnavailable(f"{self.name}: {name} has more than {most_bytes:,} bytes")
        return data

    @contextlib.contextmanager
    def _opened(self, name: str) -> Iterator[BinaryIO]:
        """Open a regular file of the directory; a link could lead out of it, and opening a pipe
        would wait.
        """
        path = os.path.join(self._path, name)
        try:
            with errors_by_meaning(path, "read"):
                fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except BackendUnavailable as error:
            cause = error.__cause__
            if isinstance(cause, OSError) and cause.errno in {errno.ENOENT, errno.ENOTDIR}:
                raise NotThere(f"{self.name}: there is no {name}") from cause
            raise
        with open(fd, "rb") as file:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise BackendUnavailable(f"{path} is no regular file; copy the image again")
            with errors_by_meaning(path, "read"):
                yield file

    def _replace(self, name: str, write: Callable[[BinaryIO], object]) -> None:
        """Write a file that readers see whole or not at all."""
        target = os.path.join(self._path, name)
        temporary = os.path.join(self._path, f".{temporary_name()}.tmp")

        def write_and_rename() -> None:
            handle = os.open(
                temporary,
                os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC,
                0o666,
            )
            with open(handle, "wb") as out:
                write(out)
                out.flush()
                os.fsync(out.fileno())
            os.rename(temporary, target)

        with errors_by_meaning(target, "write"):
            os.makedirs(os.path.dirname(target), exist_ok=True)
            with_temporary(temporary, write_and_rename)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        with errors_by_meaning(self._path, "lock"):
            fd = os.open(self._path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            with errors_by_meaning(self._path, "lock"):
                fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)

    def _decoded(self, data: bytes, kind: type[T], what: str) -> T:
        try:
            return msgspec.json.decode(data, type=kind)
        except msgspec.DecodeError as error:
            raise BackendUnavailable(f"{self.name}: {what} cannot be read: {error}") from error


def _tag(one: Descriptor) -> str:
    return one.annotations.get(TAG_NAME, "")


def _untagged(one: Descriptor) -> Descriptor:
    return Descriptor(one.media_type, one.digest, one.size, one.artifact_type)

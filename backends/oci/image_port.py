# SPDX-License-Identifier: Apache-2.0
"""`ImagePlace`: what a registry and a directory of images both do.

A place holds blobs by digest, and manifests by digest and by tag.  Everything that is read is
compared with its digest and size, so what a caller gets is what it asked for, or an error.
`registry.py` and `image_directory.py` are the two kinds; `bundler/images` is the caller.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import BinaryIO

import msgspec

from bundler.backends.backend_errors import WrongBytes

# What registries themselves take at most, by the specification.
MANIFEST_BYTES = 4 << 20
CHUNK_BYTES = 1 << 20
MOST_TAGS = 10_000
INDEX_TYPE = "application/vnd.oci.image.index.v1+json"


class Descriptor(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    """A blob or manifest, as manifests name it; the JSON form is that of the OCI image
    specification.
    """

    media_type: str
    digest: str
    size: int
    artifact_type: str = ""
    annotations: dict[str, str] = {}


class ImageManifest(msgspec.Struct, frozen=True):
    """A manifest as it was stored: the very bytes, since the digest is theirs."""

    data: bytes
    media_type: str

    @property
    def digest(self) -> str:
        """`sha256:` and 64 hexadecimal digits."""
        return digest_of(self.data)


class ImagePlace(ABC):
    """One repository of a registry, or one directory.

    Attributes:
        name: what messages call it, without any secret.
    """

    name: str

    @abstractmethod
    def manifest(self, reference: str) -> ImageManifest:
        """Return a manifest by tag or digest; raises `NotThere`, `WrongBytes`."""

    @abstractmethod
    def put_manifest(self, data: bytes, media_type: str, tag: str = "") -> bool:
        """Store a manifest, whose blobs are there, and let a tag name it; True when `referrers`
        will list it by its subject.
        """

    @abstractmethod
    def read_blob(self, digest: str, size: int, out: BinaryIO) -> None:
        """Write a blob into a file at its position; raises `NotThere`, and `WrongBytes` after some
        of it may have been written.
        """

    @abstractmethod
    def put_blob(self, digest: str, size: int, source: BinaryIO) -> bool:
        """Store a blob, read from the file's beginning; False when it was there."""

    @abstractmethod
    def referrers(self, digest: str, artifact_type: str) -> list[Descriptor] | None:
        """Return the manifests of this type whose subject is that one; None where the place does
        not know.
        """

    @abstractmethod
    def tags(self) -> list[str]:
        """Return the tags, sorted; raises `BackendUnavailable` for more than 10,000."""

    def close(self) -> None:
        """Release what is open; closing twice is fine."""
        return  # not abstract: a directory has nothing open


def digest_of(data: bytes) -> str:
    """Return the digest of bytes: `sha256:` and 64 hexadecimal digits."""
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def copy_checked(
    what: str, digest: str, size: int, chunks: Iterable[bytes], out: BinaryIO | None
) -> None:
    """Write chunks to a file, and compare them with a digest and a size.

    Args:
        what: for messages.
        digest, size: what is expected.
        chunks: the bytes.
        out: the file; None where they are only compared.

    Raises:
        WrongBytes: as soon as there are more than there may be, or at the end.
    """
    got, found = 0, hashlib.sha256()
    for chunk in chunks:
        got += len(chunk)
        if got > size:
            raise WrongBytes(
                f"{what}: has more than {size:,} bytes, which its manifest says; push it again"
            )
        found.update(chunk)
        if out is not None:
            out.write(chunk)
    if got != size:
        raise WrongBytes(
            f"{what}: {got:,} bytes came, expected {size:,}; read it again, or push it again"
        )
    if f"sha256:{found.hexdigest()}" != digest:
        raise WrongBytes(
            f"{what}: digest sha256:{found.hexdigest()}, expected {digest}; push it again"
        )


def file_chunks(source: BinaryIO) -> Iterator[bytes]:
    """Return the bytes of an open file in pieces."""
    return iter(lambda: source.read(CHUNK_BYTES), b"")

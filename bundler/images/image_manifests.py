# SPDX-License-Identifier: Apache-2.0
"""What an image's manifest says: `Manifest` as it is read, `encode_manifest` and `encode_index` as
we write it, and the media types; `open_place` and `found_manifest`: where an image is, and its
manifest there.

The bytes of a manifest are a function of what is in it, so the same bundle pushed twice is one
image.  Every call of a place stands in `with store_errors(name)`.  `image_push.py`, `image_pull.py`
and `image_signatures.py` call all of it, the commands open places.
"""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Iterator
from typing import Any, TypeVar

import msgspec

from bundler.backends import oci
from bundler.backends.backend_errors import BackendError, BadSettings
from bundler.backends.oci.image_port import (
    INDEX_TYPE,
    Descriptor,
    ImageManifest,
    ImagePlace,
    digest_of,
)
from bundler.errors import ConfigError, FormatError, LimitExceeded, NotFound
from bundler.store.store_failures import store_errors

OCI_MANIFEST = "application/vnd.oci.image.manifest.v1+json"
OCI_CONFIG = "application/vnd.oci.image.config.v1+json"
OCI_LAYER = "application/vnd.oci.image.layer.v1.tar+gzip"
DOCKER_MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"
DOCKER_CONFIG = "application/vnd.docker.container.image.v1+json"
DOCKER_LAYER = "application/vnd.docker.image.rootfs.diff.tar.gzip"
INDEX_TYPES = frozenset({INDEX_TYPE, "application/vnd.docker.distribution.manifest.list.v2+json"})
BUNDLE_ARTIFACT = "application/vnd.triton-bundler.bundle.v1"
BUNDLE_LAYER = "application/vnd.triton-bundler.bundle.layer.v1"
SIGNATURE_ARTIFACT = "application/vnd.triton-bundler.signature.v1"
ENVELOPE_LAYER = "application/vnd.dsse.envelope.v1+json"
EMPTY, EMPTY_TYPE = b"{}", "application/vnd.oci.empty.v1+json"
TITLE = "org.opencontainers.image.title"
MOST_LAYERS = 128
T = TypeVar("T")
_ATTESTATION = "vnd.docker.reference.type"


class Manifest(msgspec.Struct, frozen=True, rename="camel"):
    """A manifest of an image or artifact; what else stands in it is left alone."""

    config: Descriptor
    layers: tuple[Descriptor, ...] = ()
    artifact_type: str = ""
    subject: Descriptor | None = None
    annotations: dict[str, str] = {}


class Index(msgspec.Struct, frozen=True, rename="camel"):
    """A list of manifests: of one image for several platforms, or of what refers to one."""

    manifests: tuple[Descriptor, ...] = ()


def encode_manifest(
    config: Descriptor,
    layers: list[Descriptor],
    *,
    media_type: str = OCI_MANIFEST,
    artifact_type: str = "",
    subject: Descriptor | None = None,
    annotations: dict[str, str] | None = None,
) -> bytes:
    """Return the bytes of a manifest, the same for the same content."""
    content: dict[str, Any] = {"schemaVersion": 2, "mediaType": media_type}
    if artifact_type:
        content["artifactType"] = artifact_type
    content |= {"config": config, "layers": layers}
    if subject is not None:
        content["subject"] = subject
    if annotations:
        content["annotations"] = dict(sorted(annotations.items()))
    return msgspec.json.encode(content)


def encode_index(manifests: list[Descriptor]) -> bytes:
    """Return the bytes of an index."""
    return msgspec.json.encode(
        {"schemaVersion": 2, "mediaType": INDEX_TYPE, "manifests": manifests}
    )


def decode_manifest(found: ImageManifest, where: str) -> Manifest:
    """Read a manifest.

    Args:
        found: its bytes.
        where: for messages.

    Raises:
        FormatError: it is none.
        LimitExceeded: it has more than 128 layers.
    """
    manifest = _decoded(found, Manifest, where)
    if len(manifest.layers) > MOST_LAYERS:
        raise LimitExceeded(
            f"{where}: {len(manifest.layers)} layers, expected at most {MOST_LAYERS}",
            got=len(manifest.layers),
        )
    return manifest


def decode_index(found: ImageManifest, where: str) -> Index:
    """Read an index; raises `FormatError`."""
    return _decoded(found, Index, where)


def only_image(index: Index, where: str) -> str:
    """Return the digest of the one image in an index; attestations, which docker's builder adds,
    are none.

    Raises:
        FormatError: there are several, or none.
    """
    images = [one.digest for one in index.manifests if _ATTESTATION not in one.annotations]
    if len(images) != 1:
        shown = ", ".join(images[:4]) or "none"
        raise FormatError(
            f"{where}: is a list of {len(images)} images; name one by its digest: {shown}"
        )
    return images[0]


def descriptor(media_type: str, data: bytes) -> Descriptor:
    """Return how manifests name these bytes."""
    return Descriptor(media_type, digest_of(data), len(data))


def _decoded(found: ImageManifest, kind: type[T], where: str) -> T:
    try:
        return msgspec.json.decode(found.data, type=kind)
    except msgspec.DecodeError as error:
        raise FormatError(f"{where}: cannot read the manifest: {error}; is it an image?") from error


_SHOWN_TAGS = 5


def is_image_url(text: str) -> bool:
    """Whether a text is meant as the URL of an image."""
    return text.partition(":")[0] in oci.SCHEMES and ":" in text


def image_url(text: str) -> oci.ImageUrl:
    """Read the URL of an image; raises `ConfigError`."""
    try:
        return oci.parse_image_url(text)
    except BadSettings as error:
        raise ConfigError(str(error), url=oci.shown_image_url(text)) from error


@contextlib.contextmanager
def open_place(url: oci.ImageUrl, *, make: bool = False) -> Iterator[ImagePlace]:
    """Open where an image is, or is to be; raises `NotFound`, `AccessDenied`, `StoreUnavailable`,
    `ConfigError`.
    """
    with store_errors(url.shown):
        place = oci.open_image_place(url, make=make)
    try:
        yield place
    finally:
        place.close()


def found_manifest(place: ImagePlace, url: oci.ImageUrl) -> ImageManifest:
    """Return the manifest that a URL names; of a list of one image, that image's.

    Raises:
        NotFound: there is none; the message names tags like it.
        DigestMismatch, AccessDenied, StoreUnavailable, FormatError: it cannot be read.
    """
    try:
        with store_errors(place.name):
            found = place.manifest(url.reference)
    except NotFound as error:
        near = _near_tags(place, url.tag)
        raise NotFound(
            f"{url.full}: there is no such image;"
            f" {f'there is {near}' if near else 'check the name, and that you may read it'}",
            url=url.full,
        ) from error
    if found.media_type in INDEX_TYPES:
        with store_errors(place.name):
            found = place.manifest(only_image(decode_index(found, url.full), url.full))
    return found


def _near_tags(place: ImagePlace, tag: str) -> str:
    """Return a few tags that are like one; what goes wrong in looking does not matter beside what
    is told already.
    """
    try:
        tags = place.tags()
    except BackendError:
        return ""
    near = difflib.get_close_matches(tag, tags, _SHOWN_TAGS) or tags[-_SHOWN_TAGS:]
    return ", ".join(near)

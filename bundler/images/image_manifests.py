# SPDX-License-Identifier: Apache-2.0
"""What an image's manifest says: `Manifest` as it is read, `encode_manifest` and `encode_index` as
we write it, and the media types.

The bytes of a manifest are a function of what is in it, so the same bundle pushed twice is one
image.  `image_push.py`, `image_pull.py` and `image_signatures.py` call it.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from bundler.backends.oci.image_port import INDEX_TYPE, Descriptor, ImageManifest, digest_of
from bundler.errors import FormatError, LimitExceeded

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


def descriptor(
    media_type: str, data: bytes, annotations: dict[str, str] | None = None
) -> Descriptor:
    """Return how manifests name these bytes."""
    return Descriptor(media_type, digest_of(data), len(data), "", annotations or {})


def _decoded(found: ImageManifest, kind: type[T], where: str) -> T:
    try:
        return msgspec.json.decode(found.data, type=kind)
    except msgspec.DecodeError as error:
        raise FormatError(f"{where}: cannot read the manifest: {error}; is it an image?") from error

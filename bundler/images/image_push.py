# SPDX-License-Identifier: Apache-2.0
"""`push_image`: bundle -> registry, or directory of images.

What names something comes after it: blobs, the manifest, what is signed of it, and the tag last.
Users and the command `oci push` call it.  `ImageReport` is what a push or pull did, `ImageLayout` how
images lie in a registry.
"""

from __future__ import annotations

import hashlib
import io
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import BinaryIO, Literal, get_args

from msgspec import Struct

from bundler.backends import oci
from bundler.backends.oci.image_port import Descriptor, ImagePlace
from bundler.errors import ConfigError, NotFound
from bundler.format.bundle import Bundle, require_content
from bundler.format.bundle_file import open_regular, os_errors
from bundler.format.summary import Reported
from bundler.images.image_manifests import (
    BUNDLE_ARTIFACT,
    BUNDLE_LAYER,
    DOCKER_CONFIG,
    DOCKER_LAYER,
    DOCKER_MANIFEST,
    EMPTY,
    EMPTY_TYPE,
    OCI_CONFIG,
    OCI_LAYER,
    OCI_MANIFEST,
    TITLE,
    descriptor,
    encode_manifest,
    found_manifest,
    image_url,
    open_place,
)
from bundler.images.image_signatures import attach, envelopes_of, next_epoch
from bundler.images.kernel_cache_images import (
    DEFAULT_ROOT,
    cache_files,
    image_config,
    labels_of,
    layer_files,
    unpack_layer,
    write_layer,
)
from bundler.lifecycle.directory_pack import pack
from bundler.lifecycle.restore_plan import opened
from bundler.store.push_signatures import signing_key
from bundler.store.store_failures import store_errors
from bundler.store.store_signatures import signed_name
from bundler.toolchain import identity
from bundler.trust.signing import bundle_envelope, tag_envelope
from bundler.trust.signing_keys import SigningKey

FILE_NAME = "bundle.tbundle"
ANNOTATIONS = "vnd.triton-bundler"
TEMPORARY_PREFIX = "triton-bundler-"
_SHOWN_TARGETS = 32


# `bundle`: the bundle's file as one blob.  `mcv`: what MCV, GKM and KServe read; `mcv-docker` the
# same with Docker's media types.
ImageLayout = Literal["bundle", "mcv", "mcv-docker"]


class ImageReport(Reported, Struct, frozen=True):
    """What was pushed or pulled.

    Attributes:
        image: the image, with its tag or digest.
        manifest: digest of its manifest, `sha256:` and 64 hexadecimal digits.
        layout: how it lies there.
        digest: of the bundle.
        kernels: in the bundle.
        size_bytes: of the image's layers.
        sent_bytes: of those that were not there; 0 for a pull.
        signatures: what a report says of signatures; empty where nobody asked.
        left_out: (name, reason) of what is in one and not in the other.
    """

    image: str
    manifest: str
    layout: ImageLayout
    digest: str
    kernels: int
    size_bytes: int
    sent_bytes: int = 0
    signatures: str = ""
    left_out: tuple[tuple[str, str], ...] = ()


class _Image(Struct):
    """An image that is about to be sent."""

    layout: ImageLayout
    manifest: bytes
    manifest_type: str
    config: tuple[Descriptor, bytes]
    layer: Descriptor
    content: BinaryIO
    # What who pulls it gets, which is what is signed.
    bundle: Bundle
    left_out: tuple[tuple[str, str], ...]


def push_image(
    bundle: Bundle | str | os.PathLike[str],
    url: str,
    *,
    layout: ImageLayout = "bundle",
    key: SigningKey | str | os.PathLike[str] | None = None,
    cache_root: str = DEFAULT_ROOT,
    triton_dir: str | None = None,
) -> ImageReport:
    """Push a bundle as an image; a tag that is there names the new one then.

    Args:
        bundle: a bundle, or the path of one.
        url: `oci://registry/repository:tag`, or `oci-dir:/directory:tag` for a directory in the OCI
            image layout, which is made.
        layout: `bundle` for the bundle's file as one blob, signatures in it included; `mcv` for an
            image that GKM and KServe mount, `mcv-docker` the same with Docker's media types.
        key: who signs the bundle and the tag; None for the key of the settings, if there is one.
        cache_root: for `mcv`, where the reader mounts it: Triton's group files hold absolute paths.
        triton_dir: for `mcv`, where Triton is installed there; None for where it is here. Metadata
            of kernels names files of it, which a launch does not read.

    Returns:
        What was sent.

    Raises:
        ConfigError: not such a URL or layout, or the key cannot be used.
        NotFound, AccessDenied, FormatError, DigestMismatch: the bundle, or the key, cannot be read.
        EmptyBundle: there is nothing in it.
        StoreUnavailable, StoreFull, AccessDenied: the registry or the directory does not take it.
    """
    where, signer = image_url(url), signing_key(key)
    if where.digest:
        raise ConfigError(
            f"{where.full}: a push makes the digest; give a tag alone", url=where.full
        )
    if layout not in get_args(ImageLayout):
        raise ConfigError(
            f"layout={layout!r}: expected {', '.join(map(repr, get_args(ImageLayout)))}", got=layout
        )
    if not cache_root.rstrip("/").startswith("/"):
        raise ConfigError(
            f"cache_root={cache_root!r}: expected an absolute path, which is not /", got=cache_root
        )
    with ExitStack() as stack:
        source = stack.enter_context(opened(bundle))
        require_content(source, "nothing was pushed")
        if signer is not None:
            source.verify()
        if layout == "bundle":
            image = stack.enter_context(
                _bundle_image(source, None if isinstance(bundle, Bundle) else bundle)
            )
        else:
            title = (where.repository or where.directory).rpartition("/")[2]
            there = (cache_root.rstrip("/"), triton_dir or identity.triton_dir())
            image = stack.enter_context(_cache_image(source, layout, title, *there))
        place = stack.enter_context(open_place(where, make=True))
        return _send(place, where, image, signer)


def _send(
    place: ImagePlace, where: oci.ImageUrl, image: _Image, signer: SigningKey | None
) -> ImageReport:
    with store_errors(place.name):
        config, data = image.config
        place.put_blob(config.digest, config.size, io.BytesIO(data))
        is_new = place.put_blob(image.layer.digest, image.layer.size, image.content)
    manifest = descriptor(image.manifest_type, image.manifest)
    if signer is not None:
        with store_errors(place.name):
            place.put_manifest(image.manifest, image.manifest_type)
        content = image.bundle.digest.removeprefix("sha256:")
        epoch = next_epoch(_signed_before(place, where))
        about_tag = tag_envelope(signer, signed_name(place.name), where.tag, content, epoch)
        attach(place, manifest, [bundle_envelope(image.bundle, signer), about_tag])
    with store_errors(place.name):
        place.put_manifest(image.manifest, image.manifest_type, where.tag)
    return ImageReport(
        where.full,
        manifest.digest,
        image.layout,
        image.bundle.digest,
        len(image.bundle.kernels),
        image.layer.size,
        image.layer.size if is_new else 0,
        f"signed by key {signer.key_id}" if signer is not None else "",
        image.left_out,
    )


def _signed_before(place: ImagePlace, where: oci.ImageUrl) -> list[bytes]:
    """Return what is signed of the image that the tag names now."""
    try:
        return envelopes_of(place, found_manifest(place, where).digest)
    except NotFound:
        return []


@contextmanager
def _bundle_image(bundle: Bundle, path: str | os.PathLike[str] | None) -> Iterator[_Image]:
    """Make an image of a bundle's file, byte for byte: what is pulled is what was pushed, and
    signatures in it stay good.
    """
    with tempfile.TemporaryDirectory(prefix=TEMPORARY_PREFIX) as folder:
        if path is None:
            path = os.path.join(folder, FILE_NAME)
            bundle.save(path)
        with os_errors(path, "read"), open(open_regular(path), "rb") as content:
            name = os.path.basename(os.fspath(path))
            layer = _described(content, BUNDLE_LAYER, {TITLE: name})
            config = descriptor(EMPTY_TYPE, EMPTY)
            data = encode_manifest(
                config, [layer], artifact_type=BUNDLE_ARTIFACT, annotations=_annotations(bundle)
            )
            yield _Image("bundle", data, OCI_MANIFEST, (config, EMPTY), layer, content, bundle, ())


def _annotations(bundle: Bundle) -> dict[str, str]:
    targets = {str(kernel.target) for kernel in bundle.kernels}
    releases = {kernel.toolchain.release or "unknown" for kernel in bundle.kernels}
    found = {
        "digest": bundle.digest,
        "kernels": str(len(bundle.kernels)),
        "targets": ",".join(sorted(targets)[:_SHOWN_TARGETS]),
        "triton": ",".join(sorted(releases)[:_SHOWN_TARGETS]),
    }
    return {f"{ANNOTATIONS}.{name}": text for name, text in found.items() if text}


@contextmanager
def _cache_image(
    bundle: Bundle, layout: ImageLayout, title: str, root: str, triton_dir: str | None
) -> Iterator[_Image]:
    made = cache_files(bundle, root, triton_dir)
    if not made.entries:
        why = "; ".join(dict.fromkeys(reason for _, reason in made.left_out))
        raise ConfigError(
            f"nothing in the bundle can be laid out for {root}: {why or 'it has no kernels'}",
            left_out=tuple(made.left_out),
        )
    docker = layout == "mcv-docker"
    with (
        tempfile.TemporaryDirectory(prefix=TEMPORARY_PREFIX) as folder,
        tempfile.TemporaryFile() as content,
        os_errors(folder, "write"),
    ):
        diff_id, cache_bytes = write_layer(content, layer_files(made))
        labels = labels_of(made, cache_bytes, title)
        layer = _described(content, DOCKER_LAYER if docker else OCI_LAYER)
        settings = image_config(labels, diff_id)
        config = descriptor(DOCKER_CONFIG if docker else OCI_CONFIG, settings)
        kind = DOCKER_MANIFEST if docker else OCI_MANIFEST
        # Docker's manifests have no annotations.
        data = encode_manifest(
            config, [layer], media_type=kind, annotations=None if docker else labels
        )
        content.seek(0)
        unpack_layer(content, folder)
        with pack(folder) as read_back:
            described, left_out = (config, settings), tuple(made.left_out)
            yield _Image(layout, data, kind, described, layer, content, read_back, left_out)


def _described(
    content: BinaryIO, media_type: str, annotations: Mapping[str, str] | None = None
) -> Descriptor:
    """Return how manifests name the bytes of a file."""
    content.seek(0)
    digest = hashlib.file_digest(content, "sha256").hexdigest()  # type: ignore[arg-type]
    found = dict(annotations or {})
    return Descriptor(media_type, f"sha256:{digest}", content.tell(), "", found)

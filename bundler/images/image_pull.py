# SPDX-License-Identifier: Apache-2.0
"""`pull_image`: registry or directory of images -> bundle file; and `open_image`, for commands that
only read.

Whatever comes is compared with its digest, then judged by the policy in force, and only then
visible.  An image of MCV's layout is unpacked and packed as a cache directory is.  Users and the
command `oci pull` call it; `bundle_sources.py` opens images in place of files.
"""

from __future__ import annotations

import io
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from msgspec import Struct
from msgspec.structs import replace

from bundler.backends import oci
from bundler.backends.oci.image_port import Descriptor, ImageManifest, ImagePlace
from bundler.errors import FormatError
from bundler.format.bundle import Bundle, require_content
from bundler.format.bundle_file import os_errors, replace_file
from bundler.format.limits import DEFAULT_LIMITS, Limits
from bundler.format.signature_sections import MAX_ENVELOPES
from bundler.images.image_manifests import (
    BUNDLE_LAYER,
    DOCKER_LAYER,
    Manifest,
    decode_manifest,
    found_manifest,
    image_url,
    open_place,
)
from bundler.images.image_push import FILE_NAME, TEMPORARY_PREFIX, ImageLayout, ImageReport
from bundler.images.image_signatures import envelopes_of
from bundler.images.kernel_cache_images import CONFIG_BYTES, is_kernel_cache, unpack_image
from bundler.lifecycle.directory_pack import pack
from bundler.store.store_failures import store_errors
from bundler.store.store_signatures import is_about_bundle, signed_name
from bundler.trust.admission import admit, policy_in_force
from bundler.trust.signature_policy import SignaturePolicy, subject_of

_FIX = "push it with a trusted key (triton-bundler oci push --key), or name the image by its digest"


class _Fetched(Struct):
    """A bundle that was fetched, in a folder of ours."""

    path: str
    layout: ImageLayout
    size_bytes: int
    left_out: tuple[tuple[str, str], ...] = ()


def pull_image(
    url: str,
    output: str | os.PathLike[str],
    *,
    signatures: SignaturePolicy | None = None,
    limits: Limits | None = None,
) -> ImageReport:
    """Write the bundle of an image to a file; a file that is there is replaced, once everything was
    found good.

    Args:
        url: `oci://registry/repository:tag`, or with `@sha256:…` in place of the tag; or
            `oci-dir:/directory:tag`.  The image may be one of `push_image`, or one of MCV's with a
            Triton cache.
        output: the file.  Signatures that the registry has of the bundle are put into it.
        signatures: which signatures are asked for; None for what the environment says.
        limits: how large it may be; None for the limits of `Bundle.load`.

    Returns:
        What was pulled.

    Raises:
        ConfigError: not such a URL.
        NotFound: no such image.
        FormatError, LimitExceeded, UnsafeName: it holds no bundle and no kernel cache, or a hostile
            one.
        DigestMismatch: what came is not what the manifest names.
        Untrusted: signatures are required, and no trusted key vouches for the bundle, or for what
            the tag names.
        StoreUnavailable, AccessDenied: the registry cannot be asked.
        StoreFull: no space is left; what was at `output` stays.
    """
    with open_image(url, signatures=signatures, limits=limits) as (bundle, path, report):
        require_content(bundle, f"{os.fspath(output)} was not written")
        with open(path, "rb") as source:
            replace_file(output, lambda out: shutil.copyfileobj(source, out))
        return report


@contextmanager
def open_image(
    url: str, *, signatures: SignaturePolicy | None = None, limits: Limits | None = None
) -> Iterator[tuple[Bundle, str, ImageReport]]:
    """Open the bundle of an image, until the block ends, and tell the file that it is in; arguments
    and errors are those of `pull_image`.
    """
    where = image_url(url)
    policy = policy_in_force() if signatures is None else signatures
    limits = limits or DEFAULT_LIMITS
    with tempfile.TemporaryDirectory(prefix=TEMPORARY_PREFIX) as folder:
        with open_place(where) as place, os_errors(folder, "write"):
            stored = found_manifest(place, where)
            got = _fetch(place, where, stored, folder, limits)
            envelopes = envelopes_of(place, stored.digest)
            path = _with_signatures(got.path, envelopes, folder, limits)
        with Bundle.load(path, limits=limits) as bundle:
            doubt = _judge_tag(policy, where, envelopes, bundle)
            if doubt:
                bundle.signed.doubt = doubt
            admission = admit(bundle, "kernels", policy)
            report = ImageReport(
                where.full,
                stored.digest,
                got.layout,
                bundle.digest,
                len(bundle.kernels),
                got.size_bytes,
                signatures=admission.line,
                left_out=got.left_out,
            )
            yield bundle, path, report


def _fetch(
    place: ImagePlace, where: oci.ImageUrl, stored: ImageManifest, folder: str, limits: Limits
) -> _Fetched:
    manifest = decode_manifest(stored, where.full)
    ours = [layer for layer in manifest.layers if layer.media_type == BUNDLE_LAYER]
    if len(ours) == 1:
        path = os.path.join(folder, FILE_NAME)
        _download(place, ours[0], path, limits)
        return _Fetched(path, "bundle", ours[0].size)
    if is_kernel_cache(manifest):
        return _unpacked(place, where, manifest, folder, limits)
    kinds = ", ".join(sorted({layer.media_type for layer in manifest.layers})) or "nothing"
    raise FormatError(
        f"{where.full}: is no image of a bundle or of a kernel cache: it has {kinds[:300]},"
        f" expected one layer of {BUNDLE_LAYER}, or a compressed tar archive",
        url=where.full,
    )


def _unpacked(
    place: ImagePlace, where: oci.ImageUrl, manifest: Manifest, folder: str, limits: Limits
) -> _Fetched:
    """Make a bundle of an image of MCV's layout."""
    cache, held = os.path.join(folder, "cache"), os.path.join(folder, "layer")
    os.mkdir(cache)

    def layers() -> Iterator[io.BufferedReader]:
        for layer in manifest.layers:
            _download(place, layer, held, limits)
            with open(held, "rb") as file:
                yield file

    if manifest.config.size > CONFIG_BYTES:
        raise FormatError(
            f"{where.full}: a config of {manifest.config.size:,} bytes, expected at most"
            f" {CONFIG_BYTES:,}"
        )
    config = io.BytesIO()
    with store_errors(place.name):
        place.read_blob(manifest.config.digest, manifest.config.size, config)
    notes = unpack_image(config.getvalue(), layers(), cache, where.full, limits)
    path = os.path.join(folder, FILE_NAME)
    with pack(cache) as bundle:
        require_content(bundle, f"{where.full} has no kernels")
        bundle.save(path)
        notes += bundle.left_out
    docker = manifest.layers[0].media_type == DOCKER_LAYER
    size = sum(layer.size for layer in manifest.layers)
    return _Fetched(path, "mcv-docker" if docker else "mcv", size, tuple(notes))


def _download(place: ImagePlace, layer: Descriptor, path: str, limits: Limits) -> None:
    limits.check("raw_bytes", layer.size, f"{place.name}: layer {layer.digest}")
    with store_errors(place.name), open(path, "wb") as out:
        place.read_blob(layer.digest, layer.size, out)


def _with_signatures(path: str, envelopes: Sequence[bytes], folder: str, limits: Limits) -> str:
    """Return the path of the bundle with the registry's signatures of it beside its own; of tags
    none is kept, as they are for one place.
    """
    about = [data for data in envelopes if is_about_bundle(data)]
    if not about:
        return path
    signed = os.path.join(folder, "signed.tbundle")
    with Bundle.load(path, limits=limits) as bundle:
        every = list(dict.fromkeys([*bundle.signatures, *about]))
        bundle.signed.write_copy(signed, every[:MAX_ENVELOPES])
    return signed


def _judge_tag(
    policy: SignaturePolicy | None, where: oci.ImageUrl, envelopes: Sequence[bytes], bundle: Bundle
) -> str:
    """Return why no signature of the tag counts, empty when one does or nobody asks; raises
    `Untrusted` where one is required.

    Who names an image by its digest has said which one, and no tag was followed.
    """
    if policy is None or where.digest or policy.kernels == policy.code == "off":
        return ""
    level = "kernels" if policy.kernels == "require" else subject_of(bundle).trust
    about = [data for data in envelopes if not is_about_bundle(data)]
    content = bundle.digest.removeprefix("sha256:")
    judgement = policy.of_tag(about, signed_name(where.shown), where.tag, content)
    if not judgement.good:
        judgement = replace(judgement, fix=_FIX)
    policy.require(judgement, level, f"tag {where.full}")
    return "" if judgement.good else f"tag {where.full}: {judgement.reason}"

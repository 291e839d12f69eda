# SPDX-License-Identifier: Apache-2.0
"""Signatures of images: our envelopes in a small artifact whose subject is the image's manifest.

A registry that has the referrers API of OCI 1.1 lists such artifacts itself.  For one that has not,
the specification has a tag, `sha256-<hex of the image's digest>`, that names a list of them; of two
writers of it at once one may lose its entry, as a registry has no compare-and-set. `attach` is for
`image_push.py`, `envelopes_of` for `image_pull.py`.
"""

from __future__ import annotations

import contextlib
import io
import re
import time
from collections.abc import Iterable

from bundler.backends.backend_errors import NotThere, WrongBytes
from bundler.backends.oci.image_port import INDEX_TYPE, Descriptor, ImagePlace
from bundler.errors import FormatError, LimitExceeded
from bundler.format.signature_sections import MAX_ENVELOPE_BYTES, MAX_ENVELOPES
from bundler.images.image_manifests import (
    EMPTY,
    EMPTY_TYPE,
    ENVELOPE_LAYER,
    INDEX_TYPES,
    OCI_MANIFEST,
    SIGNATURE_ARTIFACT,
    decode_index,
    decode_manifest,
    descriptor,
    encode_index,
    encode_manifest,
)
from bundler.store.store_failures import store_errors
from bundler.trust.envelope import Envelope
from bundler.trust.statements import TagStatement

_FALLBACK = re.compile(r"sha256-[0-9a-f]{64}")


def fallback_tag(digest: str) -> str:
    """Return the tag that lists what refers to a manifest, in a registry that does not list it
    itself.
    """
    return digest.replace(":", "-")


def is_fallback_tag(tag: str) -> bool:
    """Whether a tag is one that lists what refers to a manifest."""
    return _FALLBACK.fullmatch(tag) is not None


def attach(place: ImagePlace, subject: Descriptor, envelopes: list[bytes]) -> str:
    """Store envelopes as an artifact that refers to an image, and return its digest.

    Args:
        place: where the image is.
        subject: the image's manifest.
        envelopes: what is signed of it and of its tag.
    """
    with store_errors(place.name):
        config = descriptor(EMPTY_TYPE, EMPTY)
        layers = [descriptor(ENVELOPE_LAYER, data) for data in envelopes]
        for one, data in zip([config, *layers], [EMPTY, *envelopes], strict=True):
            place.put_blob(one.digest, one.size, io.BytesIO(data))
        made = encode_manifest(config, layers, artifact_type=SIGNATURE_ARTIFACT, subject=subject)
        mine = descriptor(OCI_MANIFEST, made)
        if not place.put_manifest(made, OCI_MANIFEST):
            listed = [one for one in _listed(place, subject.digest) if one.digest != mine.digest]
            entry = Descriptor(OCI_MANIFEST, mine.digest, mine.size, SIGNATURE_ARTIFACT)
            place.put_manifest(
                encode_index([*listed, entry]), INDEX_TYPE, fallback_tag(subject.digest)
            )
    return mine.digest


def envelopes_of(place: ImagePlace, digest: str) -> list[bytes]:
    """Return the envelopes that refer to an image, as anybody may have put them there; at most 64.

    Raises:
        StoreUnavailable, AccessDenied: the place cannot be asked.
    """
    found: list[bytes] = []
    with store_errors(place.name):
        known = place.referrers(digest, SIGNATURE_ARTIFACT)
        # Where the registry lists nothing, a client without its API may have left a list under the
        # tag.
        for one in known or _listed(place, digest):
            if one.artifact_type == SIGNATURE_ARTIFACT and len(found) < MAX_ENVELOPES:
                found += _read(place, one.digest)
    return list(dict.fromkeys(found))[:MAX_ENVELOPES]


def next_epoch(envelopes: Iterable[bytes]) -> int:
    """Return an epoch after all that these envelopes name, and at least the time in
    milliseconds.
    """
    epoch = time.time_ns() // 1_000_000
    for data in envelopes:
        with contextlib.suppress(FormatError):  # one about a bundle, or of somebody else
            envelope = Envelope.decode(data, TagStatement.payload_type)
            epoch = max(epoch, TagStatement.decode(envelope.payload).epoch + 1)
    return epoch


def _listed(place: ImagePlace, digest: str) -> list[Descriptor]:
    try:
        found = place.manifest(fallback_tag(digest))
    except NotThere:
        return []
    if found.media_type not in INDEX_TYPES:
        return []
    return list(decode_index(found, place.name).manifests)


def _read(place: ImagePlace, digest: str) -> list[bytes]:
    """Return the envelopes of one artifact; what is none of ours is left alone."""
    try:
        manifest = decode_manifest(place.manifest(digest), place.name)
    except (NotThere, WrongBytes, FormatError, LimitExceeded):
        return []
    found = []
    for layer in manifest.layers[:MAX_ENVELOPES]:
        if layer.media_type == ENVELOPE_LAYER and 0 < layer.size <= MAX_ENVELOPE_BYTES:
            out = io.BytesIO()
            # Anybody may attach what is damaged; it counts as no signature, and keeps nobody from
            # the others.
            with contextlib.suppress(NotThere, WrongBytes):
                place.read_blob(layer.digest, layer.size, out)
                found.append(out.getvalue())
    return found

# SPDX-License-Identifier: Apache-2.0
"""`read_manifest`: the manifest of a bundle as a store has it, compared with the digests in its
key.

`BundleStore` reads the manifest of what it pulls through it, and a push the one that its tag names.
A push whose content the tag names already learns by `seen_too` what else was observed of that
content, and decodes nothing.
"""

from __future__ import annotations

from functools import partial

from bundler.backends.port import Backend
from bundler.errors import DigestMismatch, FormatError, NotFound
from bundler.format.bundle import Bundle
from bundler.format.bundle_union import entry_name
from bundler.format.limits import Limits
from bundler.format.manifest import Content, Observed, merge_observed
from bundler.store import object_proofs, store_layout
from bundler.store.store_failures import checked, store_errors


def read_manifest(
    backend: Backend, name: str, manifest: str, limits: Limits, *, read_only: bool = False
) -> tuple[bytes, bytes]:
    """Return the content and the observed bytes of a manifest.

    Args:
        backend, name: the store.
        manifest: its key.
        limits: bounds on what is read.
        read_only: leave a damaged one where it is; else it is removed, and the next push sends it
            again.

    Raises:
        NotFound: it is missing.
        DigestMismatch: it is damaged.
        StoreUnavailable, AccessDenied: the store cannot be read.
    """
    with store_errors(name):
        asked = (
            object_proofs.of_manifest(manifest, limits)
            if backend.asks_peers
            else store_layout.bounds_of_keys([manifest], limits)
        )
        value = backend.get_within(asked).get(manifest)
    if value is None:
        digest = store_layout.digest_of_manifest(manifest)
        raise NotFound(
            f"{name}: the manifest of {digest} is missing; push the bundle again", digest=digest
        )
    decode = partial(store_layout.decode_manifest, key=manifest, limits=limits)
    return checked(backend, name, manifest, value, decode, () if read_only else (DigestMismatch,))


def current_manifest(before: bytes | None, tag: str | None, *, damaged_ok: bool) -> str | None:
    """Return the manifest that a tag's value names, None for a tag that is not set; raises
    `FormatError` for damage, unless that is fine.
    """
    if before is None or tag is None:
        return None
    try:
        return store_layout.decode_tag(before, tag)
    except FormatError:
        if damaged_ok:
            return None
        raise


def seen_too(bundle: Bundle, stored: tuple[bytes, bytes], limits: Limits) -> Bundle:
    """Return a bundle with what a manifest of the same content has observed besides.

    Args:
        bundle: the bundle; itself is returned where the manifest says no more.
        stored: what `read_manifest` returned.
        limits: bounds on what is decoded.
    """
    content_bytes, observed_bytes = stored
    if observed_bytes == bundle.observed.encode():
        return bundle
    return Bundle(
        bundle.content,
        merge_observed(bundle.observed, Observed.decode(observed_bytes, limits)),
        bundle.blobs,
        content_bytes=content_bytes,
        writable=bundle.writable,
        variants_dropped=bundle.variants_dropped,
    )


def without(held: Bundle, bundle: Bundle) -> Bundle:
    """Return the content of a tag without the entries that a bundle has too."""
    brought = {entry_name(entry) for entry in bundle.content.entries}
    kept = [entry for entry in held.content.entries if entry_name(entry) not in brought]
    return Bundle(Content.of(kept, held.tuning_records), held.observed, held.blobs)

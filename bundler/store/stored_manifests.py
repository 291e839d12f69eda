# SPDX-License-Identifier: Apache-2.0
"""`References`: the manifest that a text names: a tag, a digest, or the beginning of a digest; for
a wrong tag, the tags like it.  `read_manifest`: the manifest of a bundle as a store has it,
compared with the digests in its key.

`BundleStore` reads the manifest of what it pulls through it, and a push the one that its tag names.
A push whose content the tag names already learns by `seen_too` what else was observed of that
content, and decodes nothing.  `BundleStore.pull` and the messages of commands find manifests by
name.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from functools import partial

from bundler.backends.backend_errors import BackendTimeout
from bundler.backends.breaker import bounded
from bundler.errors import BundlerError, ConfigError, DigestMismatch, FormatError, NotFound
from bundler.format.bundle import Bundle
from bundler.format.bundle_union import entry_name
from bundler.format.limits import Limits
from bundler.format.manifest import Content, Observed, merge_observed
from bundler.store import object_proofs, store_layout
from bundler.store.store_failures import NamedStore, checked, store_errors
from bundler.store.store_signatures import SignedTag, envelopes_in


def read_manifest(store: NamedStore, manifest: str, limits: Limits) -> tuple[bytes, bytes]:
    """Return the content and the observed bytes of a manifest.

    Args:
        store: the store.
        manifest: its key.
        limits: bounds on what is read.

    A damaged one is removed, and the next push sends it again.

    Raises:
        NotFound: it is missing.
        DigestMismatch: it is damaged.
        StoreUnavailable, AccessDenied: the store cannot be read.
    """
    asked = (
        object_proofs.of_manifest(manifest, limits)
        if store.asks_peers
        else store_layout.bounds_of_keys([manifest], limits)
    )
    value = store.get_within(asked).get(manifest)
    if value is None:
        digest = store_layout.digest_of_manifest(manifest)
        raise NotFound(
            f"{store.name}: the manifest of {digest} is missing; push the bundle again",
            digest=digest,
        )
    decode = partial(store_layout.decode_manifest, key=manifest, limits=limits)
    return checked(manifest, value, store, decode, (DigestMismatch,))


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


#: The fewest digits of a shortened digest: of ten thousand bundles two begin with the same eight
#: with a chance of one in eighty.
SHORTEST_DIGEST = 8
_WHOLE_DIGEST = 64
# More digits than this are meant as a whole digest, of which some were lost.
_MOSTLY = 40
_NEAR_TAGS = 3
# How long those who name a wrong tag wait for the tags that are there.
SUGGESTIONS_S = 1.0
_SHOWN_CANDIDATES = 10
_PREFIX = "sha256:"
_HEX = re.compile(r"[0-9a-f]{1,64}")


class References:
    """Finds the manifests of one store by name.

    Args:
        store: the store.
    """

    def __init__(self, store: NamedStore) -> None:
        self._backend, self._name = store, store.name

    def find(self, name: str) -> SignedTag:
        """Return the key of the manifest that a tag or digest names, and what a tag says besides.

        A tag wins over a digest that begins with the same characters.  Raises as
        `BundleStore.pull`.
        """
        if name.startswith(_PREFIX):
            return SignedTag(None, self._by_digest(name), ())
        value = self._backend.read_ref(store_layout.tag_key(name))
        if value is not None:
            manifest, hints = store_layout.decode_tag(value, name), store_layout.hints_of(value)
            return SignedTag(name, manifest, hints, envelopes_in(value))
        if _HEX.fullmatch(name) and len(name) >= SHORTEST_DIGEST:
            try:
                return SignedTag(None, self._by_digest(_PREFIX + name), ())
            except NotFound:
                raise NotFound(
                    f"{self._name}: no tag {name!r}, and no bundle whose digest begins so", tag=name
                ) from None
        near: tuple[str, ...] = ()
        # Without suggestions the error still says that there is no such tag.
        with contextlib.suppress(BundlerError):
            near = self.near_tags(name)
        raise unknown_tag(self._name, name, near)

    def near_tags(self, tag: str) -> tuple[str, ...]:
        """Return the tags that are called so or almost so, the nearest first; none where listing
        takes long.
        """
        with store_errors(self._name):
            try:
                keys = bounded(
                    lambda: list(self._backend.inner.list_refs(store_layout.TAGS)), SUGGESTIONS_S
                )
            except BackendTimeout:
                return ()
        import difflib  # only for a tag that is not there

        names = [key.removeprefix(f"{store_layout.TAGS}/") for key in keys]
        return tuple(difflib.get_close_matches(tag, names, n=_NEAR_TAGS))

    def _by_digest(self, digest: str) -> str:
        begin = digest.removeprefix(_PREFIX)
        whole = not _HEX.fullmatch(begin) or len(begin) == _WHOLE_DIGEST
        if not whole and len(begin) < SHORTEST_DIGEST:
            raise ConfigError(
                f"{digest}: expected {SHORTEST_DIGEST} digits of a digest or more", got=digest
            )
        prefix = store_layout.manifests_of(digest) if whole else store_layout.MANIFESTS
        start = f"{store_layout.MANIFESTS}/{begin}"
        found = sorted(
            (stat for stat in self._backend.list(prefix) if stat.key.startswith(start)),
            key=lambda stat: stat.modified_s,
        )
        candidates = sorted({store_layout.digest_of_manifest(stat.key) for stat in found})
        if not found:
            if len(begin) > _MOSTLY:
                # Raises for one that lost digits on the way; a whole one may be pruned.
                store_layout.manifests_of(digest)
            raise NotFound(f"{self._name}: no bundle {digest}", digest=digest)
        if len(candidates) > 1:
            shown = ", ".join(candidates[:_SHOWN_CANDIDATES]) + (
                ", …" if len(candidates) > _SHOWN_CANDIDATES else ""
            )
            raise ConfigError(
                f"{self._name}: {digest} begins {len(candidates)} digests: {shown}; give more"
                " digits of one",
                got=digest,
                candidates=tuple(candidates),
            )
        return found[-1].key


def unknown_tag(store: str, tag: str, near: Sequence[str]) -> NotFound:
    """Return the error for a tag that is not set in a store, which offers those that are called
    almost so.
    """
    hint = did_you_mean(near) or "`triton-bundler tags` lists them"
    return NotFound(f"{store}: no tag {tag!r}; {hint}", tag=tag, near=tuple(near))


def did_you_mean(names: Sequence[str]) -> str:
    """Return a question that offers names; empty when there are none."""
    return f"did you mean {' or '.join(map(repr, names))}?" if names else ""

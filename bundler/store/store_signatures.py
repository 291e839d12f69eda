# SPDX-License-Identifier: Apache-2.0
"""Signatures as a store keeps them: beside manifests, and inside tags.

::

    v1/e/<64 hex>/<16 hex>   an envelope about a bundle, by the bundle's digest and the envelope's own
    v1/t/<tag>               the tag's value has the envelopes about the tag, and about the bundle that it names, as one more field

A tag and what is signed of it change by one compare-and-set, so that no reader sees one without the
other.  `References` reads tags as `SignedTag`, `BundleStore` asks `admit_tag` when one is followed,
`push_signatures.py` makes envelopes, `maintenance.py` keeps them as long as their manifest. Where
nobody asks for signatures nothing of `bundler/trust` is imported but `admission.py`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from msgspec import Struct

from bundler.backends.port import Backend
from bundler.config import signature_settings
from bundler.errors import DigestMismatch, FormatError
from bundler.format import wire
from bundler.format.cached_properties import cached_property
from bundler.format.digest import sha256
from bundler.format.signature_sections import MAX_ENVELOPE_BYTES, MAX_ENVELOPES, SignatureSource
from bundler.store import store_layout
from bundler.store.store_failures import NamedStore
from bundler.store.store_layout import Hint
from bundler.trust.admission import policy_in_force

if TYPE_CHECKING:
    from bundler.trust.signature_policy import SignaturePolicy

ENVELOPES = store_layout.ENVELOPES
# A tag's value is small, since it is read whole by every reader: each envelope in it has some
# hundred bytes.
MOST_IN_TAG, MOST_BYTES_IN_TAG = 16, 48 << 10


class SignedTag(Struct, frozen=True):
    """What a tag says: the manifest, dictionaries that its units want, and envelopes."""

    tag: str | None
    manifest: str
    hints: Sequence[Hint]
    envelopes: tuple[bytes, ...] = ()


def envelopes_in(value: bytes | None) -> tuple[bytes, ...]:
    """Return the envelopes in a tag's value; none for a tag that has none, or cannot be read."""
    try:
        data = store_layout.unpack_ref(value or b"", "tag")
        *_, rows = wire.fields(data, "tag", int, str, list, list, open_ended=True)
    except FormatError:
        return ()
    return tuple(row for row in rows[:MOST_IN_TAG] if type(row) is bytes)


def envelope_keys(backend: Backend, manifest: str) -> list[str]:
    """Return the keys of the envelopes about the bundle of a manifest."""
    return sorted(stat.key for stat in backend.list(prefix_of(manifest)))[:MAX_ENVELOPES]


def envelopes_by_manifest(keys: Collection[str]) -> dict[str, list[str]]:
    """Return what is signed of the bundle of each manifest among the keys of a store, for those of
    which anything is.
    """
    by_prefix: dict[str, list[str]] = {}
    for key in keys:
        if key.startswith(f"{ENVELOPES}/"):
            by_prefix.setdefault(key.rpartition("/")[0], []).append(key)
    found = {}
    for key in keys if by_prefix else ():
        if key.startswith(f"{store_layout.MANIFESTS}/"):
            with contextlib.suppress(FormatError):  # a key that only begins like one
                if prefix_of(key) in by_prefix:
                    found[key] = by_prefix[prefix_of(key)]
    return found


class StoreSignatures(SignatureSource):
    """The signatures of a bundle of a store; those that lie beside its manifest are read when
    somebody asks.

    Args:
        store: the store.
        manifest: the bundle's, by its key.
        in_tag: what the tag said already.
        doubt: why the tag's own signature does not count, for reports.
    """

    def __init__(
        self,
        store: NamedStore,
        manifest: str,
        in_tag: Sequence[bytes] = (),
        doubt: str = "",
    ) -> None:
        self._backend, self._manifest, self._in_tag, self.doubt = store, manifest, in_tag, doubt

    def envelopes(self) -> tuple[bytes, ...]:
        """Return them; raises `StoreUnavailable`, `AccessDenied`."""
        return self._all

    @cached_property
    def _all(self) -> tuple[bytes, ...]:
        about = [data for data in self._in_tag if is_about_bundle(data)]
        if about:  # what a pull by tag came with saves a listing
            return tuple(about)
        keys = envelope_keys(self._backend, self._manifest)
        found = self._backend.get_within(
            dict.fromkeys(keys, store_layout.most_object_bytes(MAX_ENVELOPE_BYTES))
        )
        return tuple(data for key in keys if (data := _unsealed(key, found.get(key))) is not None)


def check_envelope(key: str, value: bytes) -> bytes:
    """Return the envelope in a stored value; raises `DigestMismatch`, `FormatError` for one that is
    damaged or under another's key.
    """
    data = store_layout.decode_object(value, key, None, most_bytes=MAX_ENVELOPE_BYTES)
    if key.rpartition("/")[2] != sha256(data).hex()[:16]:
        raise DigestMismatch(f"{key}: holds another signature; verify --repair removes it", key=key)
    return data


def admit_tag(policy: SignaturePolicy | None, store: str, found: SignedTag) -> str:
    """Judge what a tag says, before what it names is used.

    What it names may hold kernels alone, so here the demand for kernels counts; `admit` refuses
    code behind a tag that nobody vouches for.

    Args:
        policy: which signatures are asked for; None for what the environment says.
        store: the name of the store.
        found: the tag.

    Returns:
        Why no signature of it counts, for reports; empty when one does, or nobody asks.

    Raises:
        Untrusted: the policy requires one.
        As `policy_in_force`.
    """
    policy = policy_in_force() if policy is None else policy
    if policy is None or found.tag is None or policy.kernels == policy.code == "off":
        return ""
    what = f"tag {found.tag!r} of {store}"
    about = [data for data in found.envelopes if not is_about_bundle(data)]
    judgement = policy.of_tag(about, signed_name(store), found.tag, content_of(found.manifest))
    policy.require(judgement, "kernels", what)
    return "" if judgement.good else f"{what}: {judgement.reason}"


def signed_name(store: str) -> str:
    """Return what statements call a store: the setting's name, else the one that messages use."""
    return signature_settings().store_name or store


def content_of(manifest: str) -> str:
    """Return the digest in the key of a manifest: 64 hexadecimal digits."""
    return store_layout.digest_of_manifest(manifest).removeprefix("sha256:")


def prefix_of(manifest: str) -> str:
    """Return what the keys of the envelopes about a manifest's bundle begin with."""
    return f"{ENVELOPES}/{content_of(manifest)}"


def is_about_bundle(data: bytes) -> bool:
    """Whether an envelope says that it is about a bundle."""
    from bundler.trust.envelope import Envelope
    from bundler.trust.statements import BundleStatement

    try:
        Envelope.decode(data, BundleStatement.payload_type)
    except FormatError:
        return False
    return True


def _unsealed(key: str, value: bytes | None) -> bytes | None:
    try:
        return None if value is None else check_envelope(key, value)
    except (DigestMismatch, FormatError):
        return None

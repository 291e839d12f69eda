# SPDX-License-Identifier: Apache-2.0
"""`PushSignatures`: what a push signs, which signatures go with it, and what it refuses to sign.

`BundleStore.push` makes one for each push; `store_signatures.py` says how a store keeps them.
"""

from __future__ import annotations

import base64
import os
import time
from collections.abc import Sequence

from msgspec.structs import replace

from bundler.config import signature_settings
from bundler.errors import FormatError, Untrusted
from bundler.format.bundle import Bundle
from bundler.format.cached_properties import cached_property
from bundler.format.digest import sha256
from bundler.format.signature_sections import MAX_ENVELOPES
from bundler.store import store_layout
from bundler.store.store_failures import NamedStore
from bundler.store.store_layout import Hint
from bundler.store.store_signatures import (
    MOST_BYTES_IN_TAG,
    MOST_IN_TAG,
    content_of,
    envelopes_in,
    is_about_bundle,
    prefix_of,
    signed_name,
)
from bundler.trust.envelope import Envelope, signers
from bundler.trust.signature_policy import SignaturePolicy, subject_of
from bundler.trust.signing import bundle_envelope, tag_envelope
from bundler.trust.signing_keys import SigningKey
from bundler.trust.statements import BundleStatement, TagStatement
from bundler.trust.trusted_keys import TrustedKey, TrustedKeys

_OWN = "the key that signs"


def signing_key(key: SigningKey | str | os.PathLike[str] | None) -> SigningKey | None:
    """Return the key that a push signs with: the one that was given, or that the settings name;
    raises as `SigningKey.load`.
    """
    chosen = signature_settings().signing_key if key is None else key
    return chosen if chosen is None or isinstance(chosen, SigningKey) else SigningKey.load(chosen)


class PushSignatures:
    """What one push does about signatures.

    Args:
        store: the store.
        key: who signs; None for nobody.
        pushed: the bundle, whose own signatures go with it.
        tag: the tag; None for a push by digest alone.
    """

    def __init__(
        self, store: NamedStore, key: SigningKey | None, pushed: Bundle, tag: str | None
    ) -> None:
        self._backend, self._name = store, store.name
        self._key, self._pushed, self._tag = key, pushed, tag

    @property
    def signed(self) -> bool:
        """Whether anybody vouches for what is pushed."""
        return self._key is not None or bool(self._pushed.signatures)

    def check_merge(self, before: bytes | None, held: Bundle) -> None:
        """Refuse to merge what a key would have to vouch for that nobody vouches for, and to make
        an unsigned tag of a signed one.

        Args:
            before: the tag's value.
            held: the bundle that it names.

        Raises:
            Untrusted: either; the tag stays as it is.
        """
        envelopes = envelopes_in(before)
        if self._key is None:
            if envelopes:
                raise Untrusted(
                    f"{self._name}: tag {self._tag} is signed, and this push would change it"
                    " without a key; give one by key= or TRITON_BUNDLER_SIGNING_KEY, or push with"
                    " mode='replace'",
                    tag=self._tag,
                )
            return
        judge, content = self._judge, held.digest.removeprefix("sha256:")
        judgements = (
            judge.of_tag(envelopes, signed_name(self._name), self._tag or "", content),
            judge.of_bundle(held.signatures, subject_of(held)),
        )
        for one in judgements:
            if not one.good:
                raise Untrusted(
                    f"{self._name}: what tag {self._tag} names now would be signed with what is"
                    f" pushed, and {one.reason}; push with mode='replace', or trust the key of who"
                    " signed it",
                    tag=self._tag,
                    reason=one.reason,
                )

    def tag_value(
        self, final: Bundle, before: bytes | None, manifest: str, hints: Sequence[Hint]
    ) -> bytes:
        """Return the value of the tag, with what is signed of it; and store what is signed of the
        bundle.
        """
        content = final.digest.removeprefix("sha256:")
        about = list(self._pushed.signatures) if final.digest == self._pushed.digest else []
        old = envelopes_in(before) if _names(before, self._tag, content) else ()
        about += [data for data in old if is_about_bundle(data)]
        of_tag = [data for data in old if not is_about_bundle(data)]
        if self._key is not None:
            about, of_tag = self._signed(self._key, final, before, about, of_tag)
        about = list(dict.fromkeys(about))[:MAX_ENVELOPES]
        self._put(manifest, about)
        return store_layout.encode_tag(manifest, hints, _fitting([*of_tag, *about]))

    def _signed(
        self,
        key: SigningKey,
        final: Bundle,
        before: bytes | None,
        about: list[bytes],
        of_tag: list[bytes],
    ) -> tuple[list[bytes], list[bytes]]:
        """Return the envelopes with ours first; ones of ours that say so already stay, so that a
        push that changes nothing changes nothing.
        """
        judge = self._judge
        subject = replace(subject_of(final), stored="")
        mine = [data for data in about if _by(data, key) and judge.of_bundle([data], subject).good]
        about = (
            [*mine, *(data for data in about if data not in mine)]
            if mine
            else [bundle_envelope(final, key), *about]
        )
        if self._tag is None:
            return about, []
        store, content = signed_name(self._name), subject.content
        ours = [
            data
            for data in of_tag
            if _by(data, key) and judge.of_tag([data], store, self._tag, content).good
        ]
        if not ours:
            ours = [tag_envelope(key, store, self._tag, content, self._next_epoch(before, store))]
        return about, ours[:1]

    def _next_epoch(self, before: bytes | None, store: str) -> int:
        """Return one more than the last that a known key signed, and at least the time in
        milliseconds, so that a tag that was removed goes on.
        """
        epochs = [0]
        for data in envelopes_in(before):
            try:
                envelope = Envelope.decode(data, TagStatement.payload_type)
                statement = TagStatement.decode(envelope.payload)
            except FormatError:
                continue
            if (statement.store, statement.tag) == (store, self._tag) and signers(
                envelope, self._judge.keys.public
            ):
                epochs.append(statement.epoch)
        return max(max(epochs) + 1, time.time_ns() // 1_000_000)

    @cached_property
    def _judge(self) -> SignaturePolicy:
        """Who signs believes itself, and the keys that it trusts."""
        known = TrustedKeys.load(signature_settings().keys)
        keys = dict(known.by_name)
        if self._key is not None and self._key.key_id not in known.names:
            own = base64.b64encode(self._key.public).decode()
            keys[_OWN] = TrustedKey(key=own, families=("*",), trust=("kernels", "code"))
        return SignaturePolicy(TrustedKeys(keys))

    def _put(self, manifest: str, about: Sequence[bytes]) -> None:
        values = {
            f"{prefix_of(manifest)}/{sha256(data).hex()[:16]}": store_layout.encode_object(data)
            for data in about
        }
        if values:
            self._backend.put(values)


def _fitting(envelopes: Sequence[bytes]) -> list[bytes]:
    """Return the first of these as far as a tag has room; the others lie beside the manifest."""
    kept: list[bytes] = []
    for data in envelopes[:MOST_IN_TAG]:
        if sum(map(len, kept)) + len(data) <= MOST_BYTES_IN_TAG:
            kept.append(data)
    return kept


def _names(value: bytes | None, tag: str | None, content: str) -> bool:
    try:
        return (
            value is not None
            and tag is not None
            and content_of(store_layout.decode_tag(value, tag)) == content
        )
    except FormatError:
        return False


def _by(data: bytes, key: SigningKey) -> bool:
    for kind in (BundleStatement, TagStatement):
        try:
            return bool(signers(Envelope.decode(data, kind.payload_type), {key.key_id: key.public}))
        except FormatError:
            continue
    return False

# SPDX-License-Identifier: Apache-2.0
"""DSSE: a payload with its type, and signatures over both
(https://github.com/secure-systems-lab/dsse, protocol version 1).

`Envelope.sign` signs, `Envelope.decode` reads, `signers` tells which keys verify.  The type is
under the signature, so a statement about a tag is never taken for one about a bundle; who reads
says which type it expects.
"""

# Annotations are real ones in this module, as in `statements.py`.
from collections.abc import Mapping
from typing import TYPE_CHECKING

import msgspec

from bundler.errors import FormatError, LimitExceeded
from bundler.trust import ed25519
from bundler.trust.ed25519 import key_id

if TYPE_CHECKING:
    from bundler.trust.signing_keys import SigningKey

MAX_ENVELOPE_BYTES = 256 << 10
MAX_SIGNATURES = 32


class _Signature(msgspec.Struct, frozen=True):
    keyid: str
    sig: bytes


class _Envelope(msgspec.Struct, frozen=True):
    payload: bytes
    payloadType: str  # noqa: N815  # the name in the standard
    signatures: list[_Signature]


_decoder = msgspec.json.Decoder(_Envelope)


class Envelope(msgspec.Struct, frozen=True):
    """A payload and what was signed of it.

    Attributes:
        payload_type: a media type.
        payload: the bytes that the signatures are of, together with the type.
        signatures: (key id, 64 bytes) of each.
    """

    payload_type: str
    payload: bytes
    signatures: tuple[tuple[str, bytes], ...] = ()

    def sign(self, key: "SigningKey") -> "Envelope":
        """Return this envelope with a signature by `key`, in place of an earlier one by it."""
        others = tuple(pair for pair in self.signatures if pair[0] != key.key_id)
        return Envelope(
            self.payload_type, self.payload, (*others, (key.key_id, key.sign(signed_bytes(self))))
        )

    def encode(self) -> bytes:
        """Return the JSON form, equal for equal envelopes."""
        signatures = [_Signature(name, data) for name, data in self.signatures]
        return msgspec.json.encode(_Envelope(self.payload, self.payload_type, signatures))

    @staticmethod
    def decode(data: bytes, payload_type: str) -> "Envelope":
        """Read the JSON form; nothing of it is believed before `signers` has looked at it.

        Args:
            data: of at most 256 KiB.
            payload_type: what the caller expects.

        Raises:
            LimitExceeded: it is larger, or has more than 32 signatures.
            FormatError: it is no envelope, or one of something else.
        """
        if len(data) > MAX_ENVELOPE_BYTES:
            raise LimitExceeded(
                f"signature envelope: {len(data):,} bytes, expected at most {MAX_ENVELOPE_BYTES:,}",
                got=len(data),
            )
        try:
            found = _decoder.decode(data)
        except (msgspec.DecodeError, ValueError) as error:
            raise FormatError(
                f"signature envelope: {error}, expected a DSSE envelope as JSON; sign again"
            ) from error
        if len(found.signatures) > MAX_SIGNATURES:
            raise LimitExceeded(
                f"signature envelope: {len(found.signatures)} signatures, expected at most"
                f" {MAX_SIGNATURES}",
                got=len(found.signatures),
            )
        if found.payloadType != payload_type:
            raise FormatError(
                f"signature envelope: payload type {found.payloadType[:100]!r}, expected"
                f" {payload_type!r}; it signs something else",
                got=found.payloadType,
                expected=payload_type,
            )
        signatures = tuple((one.keyid, one.sig) for one in found.signatures)
        return Envelope(payload_type, found.payload, signatures)


def signed_bytes(envelope: Envelope) -> bytes:
    """Return what a signature is of: DSSE's pre-authentication encoding of type and payload."""
    kind = envelope.payload_type.encode()
    return b"DSSEv1 %d %b %d %b" % (len(kind), kind, len(envelope.payload), envelope.payload)


def signers(envelope: Envelope, keys: Mapping[str, bytes]) -> list[str]:
    """Return the ids of the keys whose signature verifies.

    Args:
        envelope: with signatures by whomever.
        keys: key id -> raw public key of those to ask for; the id in the envelope only says which
            key to try.
    """
    message = signed_bytes(envelope)
    return [
        name
        for name, data in envelope.signatures
        if name in keys
        and key_id(keys[name]) == name
        and ed25519.verifies(keys[name], data, message)
    ]

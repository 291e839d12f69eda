# SPDX-License-Identifier: Apache-2.0
"""Envelopes say what was signed and by whom, and nothing else passes for it."""

import base64
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bundler.errors import FormatError, LimitExceeded
from bundler.trust.envelope import MAX_SIGNATURES, Envelope, signed_bytes, signers
from bundler.trust.signing_keys import SigningKey
from bundler.trust.statements import BundleStatement, TagStatement

ALICE, BOB = SigningKey(b"a" * 32), SigningKey(b"b" * 32)
KEYS = {key.key_id: key.public for key in (ALICE, BOB)}
KIND = BundleStatement.payload_type


def test_what_is_signed_is_what_the_standard_says():
    """The example of the DSSE specification comes out."""
    assert (
        signed_bytes(Envelope("http://example.com/HelloWorld", b"hello world"))
        == b"DSSEv1 29 http://example.com/HelloWorld 11 hello world"
    )


def test_signatures_of_several_keys_verify_after_a_journey():
    """Each key that is asked for and signed is found; a second signature by one replaces
    its first.
    """
    sealed = Envelope(KIND, b"payload").sign(ALICE).sign(BOB).sign(ALICE)
    found = Envelope.decode(sealed.encode(), KIND)
    assert found == sealed
    assert sorted(signers(found, KEYS)) == sorted(KEYS)
    assert signers(found, {BOB.key_id: BOB.public}) == [BOB.key_id]
    assert len(found.signatures) == 2


def test_another_payload_type_is_refused():
    """A statement about a tag is not taken for one about a bundle, even if somebody relabels it."""
    sealed = Envelope(TagStatement.payload_type, b"payload").sign(ALICE)
    with pytest.raises(FormatError, match="payload type"):
        Envelope.decode(sealed.encode(), KIND)
    relabelled = json.loads(sealed.encode()) | {"payloadType": KIND}
    assert signers(Envelope.decode(json.dumps(relabelled).encode(), KIND), KEYS) == []


def test_a_signature_under_another_keys_name_does_not_count():
    """Bob's signature that says it is Alice's is nobody's, and neither is one by a key that took
    her id.
    """
    sealed = Envelope(KIND, b"payload").sign(BOB)
    renamed = Envelope(KIND, b"payload", ((ALICE.key_id, sealed.signatures[0][1]),))
    assert signers(renamed, KEYS) == []
    assert signers(renamed, {ALICE.key_id: BOB.public}) == []


@given(st.binary(max_size=60), st.integers(min_value=0), st.integers(min_value=1, max_value=255))
def test_any_changed_byte_of_what_is_signed_breaks_it(payload, where, change):
    """No flip of a payload's byte, or of the signature's, verifies."""
    sealed = Envelope(KIND, payload).sign(ALICE)
    ((name, signature),) = sealed.signatures
    at = where % len(signature)
    flipped = signature[:at] + bytes([signature[at] ^ change]) + signature[at + 1 :]
    assert signers(Envelope(KIND, payload, ((name, flipped),)), KEYS) == []
    assert signers(Envelope(KIND, payload + b"\0", sealed.signatures), KEYS) == []
    assert signers(Envelope(KIND + "x", payload, sealed.signatures), KEYS) == []


@pytest.mark.parametrize(
    "members",
    [
        {"payload": "!", "payloadType": KIND, "signatures": []},
        {"payload": "", "payloadType": "x", "signatures": []},
        {"payload": "", "payloadType": KIND, "signatures": [{"keyid": "a", "sig": 7}]},
        {"payload": "", "payloadType": KIND},
        [],
    ],
)
def test_what_is_no_envelope_is_a_typed_error(members):
    """Each has a message that names the envelope, and so has what is no JSON."""
    for data in (json.dumps(members).encode(), json.dumps(members).encode()[:-1]):
        with pytest.raises(FormatError, match="signature envelope"):
            Envelope.decode(data, KIND)


def test_limits_hold():
    """Neither a large envelope nor one with many signatures costs anything."""
    with pytest.raises(LimitExceeded, match="at most 262,144"):
        Envelope.decode(b" " * (256 << 10) + b" ", KIND)
    many = [{"keyid": "k", "sig": base64.b64encode(b"x" * 64).decode()}] * (MAX_SIGNATURES + 1)
    with pytest.raises(LimitExceeded, match="33 signatures"):
        Envelope.decode(
            json.dumps({"payload": "", "payloadType": KIND, "signatures": many}).encode(), KIND
        )

# SPDX-License-Identifier: Apache-2.0
"""Signatures as minisign writes and checks them, so that its users need not take our command.

The form is minisign's own (https://jedisct1.github.io/minisign/, "Signature format"): Ed25519 over
BLAKE2b-512 of the file, and a second signature over the first and the trusted comment.
`write_signature` and `write_public` make texts, `read_public` and `check` read them.  Keys that a
passphrase protects are minisign's to use: signing here is with a `SigningKey`.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections.abc import Iterable
from typing import NamedTuple

from bundler.errors import FormatError, LimitExceeded
from bundler.trust import ed25519
from bundler.trust.signing_keys import SigningKey

MAX_TEXT_BYTES = 64 << 10
_PREHASHED, _WHOLE, _PUBLIC = b"ED", b"Ed", b"Ed"
_NUMBER_BYTES = 8
_UNTRUSTED, _TRUSTED = "untrusted comment: ", "trusted comment: "


class PublicKey(NamedTuple):
    """A public key of minisign: the number that names it, 8 bytes, and the raw key, 32."""

    number: bytes
    public: bytes


def write_public(key: SigningKey) -> str:
    """Return the text of a `.pub` file; minisign knows a key of ours by the bytes of its id."""
    number = bytes.fromhex(key.key_id)
    body = base64.b64encode(_PUBLIC + number + key.public).decode()
    return f"{_UNTRUSTED}minisign public key {number[::-1].hex().upper()}\n{body}\n"


def read_public(text: str) -> PublicKey:
    """Read a `.pub` file, or its second line alone.

    Raises:
        FormatError: it is none.
    """
    lines = [line for line in text.strip().splitlines() if not line.startswith(_UNTRUSTED)]
    data = _decoded(lines[0], "public key") if len(lines) == 1 else b""
    if len(data) != 2 + _NUMBER_BYTES + ed25519.KEY_BYTES or data[:2] != _PUBLIC:
        raise FormatError(
            "minisign public key: expected a comment and one line of base64, of 42 bytes that begin"
            " with Ed"
        )
    return PublicKey(data[2:10], data[10:])


def write_signature(key: SigningKey, chunks: Iterable[bytes], comment: str) -> str:
    """Return the text of a `.minisig` file.

    Args:
        key: who signs.
        chunks: the file's bytes, in pieces.
        comment: a line that is signed too.

    Raises:
        FormatError: the comment has a line break.
    """
    if len(comment.splitlines()) > 1 or comment.endswith("\n"):
        raise FormatError(f"trusted comment {comment[:80]!r}: expected one line")
    signature = key.sign(_hash(chunks))
    both = key.sign(signature + comment.encode())
    body = base64.b64encode(_PREHASHED + bytes.fromhex(key.key_id) + signature).decode()
    last = base64.b64encode(both).decode()
    return f"{_UNTRUSTED}signature by triton-bundler\n{body}\n{_TRUSTED}{comment}\n{last}\n"


def check(text: str, chunks: Iterable[bytes], keys: Iterable[PublicKey]) -> str | None:
    """Return the trusted comment of a signature by one of the keys; None when it is no such key's,
    or not of these bytes.

    Args:
        text: of a `.minisig` file.
        chunks: the file's bytes, in pieces; read once.
        keys: whose word counts.

    Raises:
        LimitExceeded: the text is longer than 64 KiB.
        FormatError: it is no signature of minisign's, or one without prehashing, which only its
            releases before 0.6 made by default.
    """
    if len(text) > MAX_TEXT_BYTES:
        raise LimitExceeded(
            f"minisign signature: {len(text):,} characters, expected at most {MAX_TEXT_BYTES:,}",
            got=len(text),
        )
    lines = text.splitlines()
    # the lines of the form
    if len(lines) != 4 or not lines[0].startswith(_UNTRUSTED) or not lines[2].startswith(_TRUSTED):  # noqa: PLR2004
        raise FormatError(
            "minisign signature: expected four lines, two of them comments; make it again with"
            " minisign -S"
        )
    head, both = _decoded(lines[1], "signature"), _decoded(lines[3], "signature of the comment")
    if head[:2] == _WHOLE:
        raise FormatError(
            "minisign signature: of the whole file (Ed), expected one of its hash (ED); sign with"
            " minisign 0.6 or newer"
        )
    if len(head) != 2 + _NUMBER_BYTES + ed25519.SIGNATURE_BYTES or head[:2] != _PREHASHED:
        raise FormatError(
            "minisign signature: expected 74 bytes in base64 that begin with ED; make it again with"
            " minisign -S"
        )
    number, signature = head[2:10], head[10:]
    comment = lines[2].removeprefix(_TRUSTED)
    candidates = [key for key in keys if key.number == number]
    if not candidates:
        return None
    digest = _hash(chunks)
    signed = ((signature, digest), (both, signature + comment.encode()))
    for key in candidates:
        if all(ed25519.verifies(key.public, *one) for one in signed):
            return comment
    return None


def _hash(chunks: Iterable[bytes]) -> bytes:
    digest = hashlib.blake2b(digest_size=64)
    for chunk in chunks:
        digest.update(chunk)
    return digest.digest()


def _decoded(line: str, what: str) -> bytes:
    try:
        return base64.b64decode(line, validate=True)
    except (binascii.Error, ValueError) as error:
        raise FormatError(f"minisign {what}: {error}, expected base64") from error

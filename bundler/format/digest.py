# SPDX-License-Identifier: Apache-2.0
"""SHA-256 digests: 32 raw bytes inside a bundle, `sha256:<64 hex>` wherever a person sees one.

`sha256` computes, `digest_text` and `digest_raw` convert, `check_digest` compares and raises.  The
other modules of this room call them, and every room that stores or verifies bytes.
"""

from __future__ import annotations

import hashlib

from bundler.errors import DigestMismatch, FormatError

DIGEST_BYTES = 32
_PREFIX = "sha256:"


def sha256(data: bytes | bytearray | memoryview) -> bytes:
    """Return the raw 32-byte SHA-256 of `data`."""
    return hashlib.sha256(data).digest()


def digest_text(raw: bytes) -> str:
    """Return `sha256:<hex>` for 32 raw bytes."""
    return _PREFIX + raw.hex()


def digest_raw(text: str) -> bytes:
    """Return the raw bytes of `sha256:<hex>`.

    Raises:
        FormatError: `text` is not such a digest.
    """
    # Asked for every file of every kernel: this way round it takes a third of the time of a regular
    # expression.
    try:
        raw = bytes.fromhex(text[len(_PREFIX) :])
    except ValueError:
        raw = b""
    if len(raw) != DIGEST_BYTES or f"{_PREFIX}{raw.hex()}" != text:
        raise FormatError(
            f"not a digest: {text!r}; expected sha256: and 64 lower-case hex digits", got=text
        )
    return raw


def check_digest(data: bytes | memoryview, expected: bytes, what: str) -> None:
    """Raise `DigestMismatch` unless `data` has the digest `expected`."""
    got = sha256(data)
    if got != expected:
        raise DigestMismatch(
            f"{what}: expected {digest_text(expected)}, got {digest_text(got)}; "
            "the bytes were damaged or changed, fetch or build the bundle again",
            what=what,
            expected=digest_text(expected),
            got=digest_text(got),
        )

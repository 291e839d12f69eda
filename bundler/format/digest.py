# SPDX-License-Identifier: Apache-2.0
"""SHA-256 digests: 32 raw bytes inside a bundle, `sha256:<64 hex>` wherever a person sees one.

`sha256` computes, `digest_text` and `digest_raw` convert, `check_digest` compares and raises.  The
other modules of this room call them, and every room that stores or verifies bytes.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

from bundler.errors import DigestMismatch, FormatError

DIGEST_BYTES = 32
_PREFIX = "sha256:"
# OpenSSL's function is six times as fast as Python's own, and 2 ms go by until it is loaded: about
# what so many bytes in all take.
_OWN_BYTES = 1 << 18


def sha256(data: bytes | bytearray | memoryview) -> bytes:
    """Return the raw 32-byte SHA-256 of `data`."""
    global _hashed_bytes  # noqa: PLW0603  # two threads may count less: a matter of speed alone
    _hashed_bytes += len(data)
    if _hashed_bytes > _OWN_BYTES or "hashlib" in sys.modules:
        import hashlib

        return hashlib.sha256(data).digest()
    digest: bytes = _OWN(data).digest()
    return digest


def _own_sha256() -> Any:
    for name in ("_sha2", "_sha256", "hashlib"):  # of Python from 3.12 on, before, and without both
        try:
            return import_module(name).sha256
        except ImportError:
            continue
    raise ImportError("this Python has no SHA-256: build it with OpenSSL or with its own hashes")


_OWN, _hashed_bytes = _own_sha256(), 0


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

# SPDX-License-Identifier: Apache-2.0
"""Ed25519 by the package `cryptography`: the one module that imports it.

`public_of`, `sign` and `verifies` take and return raw bytes: 32 for a private or public key, 64 for a signature (RFC 8032).  Keys of this
room (`signing_keys.py`, `trusted_keys.py`, `minisign.py`) call them.
"""

from __future__ import annotations

import secrets

from bundler.errors import ConfigError
from bundler.project import install

KEY_BYTES, SIGNATURE_BYTES = 32, 64


def new_private() -> bytes:
    """Return a private key from the system's source of randomness."""
    return secrets.token_bytes(KEY_BYTES)


def public_of(private: bytes) -> bytes:
    """Return the public key of a private one.

    Raises:
        ConfigError: `cryptography` is not installed.
    """
    try:
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    except ImportError as error:
        raise _missing() from error
    return Ed25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


def sign(private: bytes, message: bytes) -> bytes:
    """Return the signature of a message.

    Raises:
        ConfigError: `cryptography` is not installed.
    """
    try:
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    except ImportError as error:
        raise _missing() from error
    return Ed25519PrivateKey.from_private_bytes(private).sign(message)


def verifies(public: bytes, signature: bytes, message: bytes) -> bool:
    """Tell whether a signature is of this message by this key; bytes of a wrong length are no signature, nor a key.

    Raises:
        ConfigError: `cryptography` is not installed.
    """
    try:
        from cryptography.exceptions import InvalidSignature
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    except ImportError as error:
        raise _missing() from error
    try:
        Ed25519PublicKey.from_public_bytes(public).verify(signature, message)
    except (InvalidSignature, ValueError):
        return False
    return True


def _missing() -> ConfigError:
    return ConfigError(
        f"signatures need the package cryptography, which is not installed; {install('trust')}", extra="trust"
    )

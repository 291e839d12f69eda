# SPDX-License-Identifier: Apache-2.0
"""Ed25519 by the package `cryptography`, which this module alone imports.

`public_of`, `sign` and `verifies` take and return raw bytes: 32 for a private or public key, 64 for
a signature (RFC 8032).  Keys of this room (`signing_keys.py`, `trusted_keys.py`, `minisign.py`)
call them.
"""

from __future__ import annotations

import hashlib
from typing import Any

from bundler.errors import ConfigError, FormatError

_OPENSSH = b"-----BEGIN OPENSSH PRIVATE KEY-----"
KEY_BYTES, SIGNATURE_BYTES = 32, 64
# Points of small order, without their sign bit (RFC 8032 does not demand that they are refused):
# under such a key a signature that anybody can make is good for every message.
_WEAK = frozenset(
    bytes.fromhex(text)
    for text in (
        "00" * 32,
        "01" + "00" * 31,
        "26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc05",
        "c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac037a",
        "ec" + "ff" * 30 + "7f",
        "ed" + "ff" * 30 + "7f",
        "ee" + "ff" * 30 + "7f",
    )
)


def key_id(public: bytes) -> str:
    """Return the name of a public key: the first 16 hexadecimal digits of its SHA-256."""
    return hashlib.sha256(public).hexdigest()[:16]


def public_of(private: bytes) -> bytes:
    """Return the public key of a private one; raises `ConfigError` where `cryptography` is not
    installed, as all that follow.
    """
    return bytes(
        _primitives().Ed25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()
    )


def sign(private: bytes, message: bytes) -> bytes:
    """Return the signature of a message."""
    return bytes(_primitives().Ed25519PrivateKey.from_private_bytes(private).sign(message))


def verifies(public: bytes, signature: bytes, message: bytes) -> bool:
    """Tell whether a signature is of this message by this key; bytes of a wrong length are no
    signature, nor a key.
    """
    if len(public) != KEY_BYTES or len(signature) != SIGNATURE_BYTES or is_weak(public):
        return False
    primitives = _primitives()
    from cryptography.exceptions import InvalidSignature

    try:
        primitives.Ed25519PublicKey.from_public_bytes(public).verify(signature, message)
    except (InvalidSignature, ValueError):
        return False
    return True


def private_of_file(data: bytes, passphrase: bytes | None) -> bytes:
    """Return the private key in a file of OpenSSH, or in PEM that a passphrase protects.

    Raises:
        FormatError: it is damaged, of another type, or its passphrase is another.
        ConfigError: it has a passphrase and none was given, or what reads it is not installed.
    """
    kind = _primitives().Ed25519PrivateKey
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.serialization import (
        load_pem_private_key,
        load_ssh_private_key,
    )

    load = load_ssh_private_key if _OPENSSH in data else load_pem_private_key
    try:
        key = load(data, passphrase)
    except TypeError as error:
        # As `cryptography` says that a passphrase is missing, or is not needed.
        if passphrase is not None:
            return private_of_file(data, None)
        raise ConfigError("a passphrase protects it, and none was given") from error
    except UnsupportedAlgorithm as error:
        raise ConfigError(
            f"it cannot be read here ({error}); keys of OpenSSH with a passphrase need the package"
            " bcrypt"
        ) from error
    except ValueError as error:
        raise FormatError(f"it is damaged, or its passphrase is another ({error})") from error
    if not isinstance(key, kind):
        raise FormatError(
            f"it is a {type(key).__name__}, expected an Ed25519 key; ssh-keygen -t ed25519"
            " makes one"
        )
    return bytes(key.private_bytes_raw())


def is_weak(public: bytes) -> bool:
    """Whether anybody can sign for this public key."""
    return public[:-1] + bytes([public[-1] & 0x7F]) in _WEAK if public else True


def _primitives() -> Any:
    """Return the module of `cryptography` with the classes of keys."""
    try:
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError as error:
        from bundler.project import install  # a restore needs none of it

        raise ConfigError(
            f"signatures need the package cryptography, which is not installed; {install('trust')}",
            extra="trust",
        ) from error
    return ed25519

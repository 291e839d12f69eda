# SPDX-License-Identifier: Apache-2.0
"""`verifies`: Ed25519 by the OpenSSL that Python's hashlib has loaded, which saves a restore the
import of `cryptography`.

`ed25519.py` asks it first.  Where Python was built with another library, or an OpenSSL that has no
Ed25519, the answer is None, and `cryptography` decides.
"""

from __future__ import annotations

import functools
from typing import Any

# NID of Ed25519 in OpenSSL since 1.1.1.
_ED25519 = 1087


@functools.cache
def _library() -> Any:
    """Return OpenSSL's functions, None where they cannot be had."""
    import ctypes

    try:
        import _hashlib

        # The symbols of libcrypto are found through the module that was linked with it.
        library = ctypes.CDLL(_hashlib.__file__)
        for name, result, arguments in (
            ("EVP_PKEY_new_raw_public_key", ctypes.c_void_p, "ipsz"),
            ("EVP_MD_CTX_new", ctypes.c_void_p, ""),
            ("EVP_DigestVerifyInit", ctypes.c_int, "ppppp"),
            ("EVP_DigestVerify", ctypes.c_int, "pszsz"),
            ("EVP_MD_CTX_free", None, "p"),
            ("EVP_PKEY_free", None, "p"),
            ("ERR_clear_error", None, ""),
        ):
            kinds = {
                "p": ctypes.c_void_p,
                "s": ctypes.c_char_p,
                "z": ctypes.c_size_t,
                "i": ctypes.c_int,
            }
            function = getattr(library, name)
            function.restype, function.argtypes = result, [kinds[letter] for letter in arguments]
    except (ImportError, AttributeError, OSError):
        return None
    return library


def verifies(public: bytes, signature: bytes, message: bytes) -> bool | None:
    """Tell whether a signature of 64 bytes is of this message by this key of 32; None where OpenSSL
    cannot tell.
    """
    library = _library()
    if library is None:
        return None
    key = library.EVP_PKEY_new_raw_public_key(_ED25519, None, public, len(public))
    context = library.EVP_MD_CTX_new() if key else None
    try:
        if not context or library.EVP_DigestVerifyInit(context, None, None, None, key) != 1:
            return None
        # 1 is good; 0 and whatever is negative are not.
        return bool(
            library.EVP_DigestVerify(context, signature, len(signature), message, len(message)) == 1
        )
    finally:
        library.EVP_MD_CTX_free(context)
        library.EVP_PKEY_free(key)
        library.ERR_clear_error()

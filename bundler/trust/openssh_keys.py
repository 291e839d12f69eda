# SPDX-License-Identifier: Apache-2.0
"""Keys as OpenSSH keeps them: `read_public` reads the line in a `.pub` file, `is_public` tells
whether a text is one.

`file_signatures.py` calls them for `key trust`.  Private keys of OpenSSH are read in
`signing_keys.py`.
"""

from __future__ import annotations

import base64
import binascii
import struct

from bundler.errors import FormatError
from bundler.trust import ed25519

_TYPE = b"ssh-ed25519"
_PREFIXES = ("ssh-", "ecdsa-sha2-", "sk-ssh-", "sk-ecdsa-")
_LENGTH = struct.Struct(">I")


def is_public(text: str) -> bool:
    """Whether a text is a public key of OpenSSH, of whatever type."""
    return text.lstrip().startswith(_PREFIXES)


def read_public(text: str) -> bytes:
    """Return the 32 bytes of a key in the form `ssh-ed25519 AAAA… comment`.

    Raises:
        FormatError: it is of another type, or damaged, or there are several lines.
    """
    lines = [line for line in text.splitlines() if line.strip()]
    words = lines[0].split() if lines else [""]
    if len(lines) != 1 or words[0] != _TYPE.decode() or len(words) == 1:
        raise FormatError(
            f"OpenSSH public key: {len(lines)} lines, the first of type {words[0][:40]!r}; expected"
            " one line of type ssh-ed25519: ssh-keygen -t ed25519 makes such a key"
        )
    try:
        data = base64.b64decode(words[1], validate=True)
    except (binascii.Error, ValueError) as error:
        raise FormatError(f"OpenSSH public key: {error}, expected base64") from error
    head = _LENGTH.pack(len(_TYPE)) + _TYPE + _LENGTH.pack(ed25519.KEY_BYTES)
    if len(data) != len(head) + ed25519.KEY_BYTES or not data.startswith(head):
        raise FormatError(
            "OpenSSH public key: its base64 holds no key of type ssh-ed25519; copy the line again"
        )
    return data[len(head) :]

# SPDX-License-Identifier: Apache-2.0
"""`HeldLease`, `new_token`: whose a lease is, told by the token that its holder drew.

::

    <32 hex>@<host>:<process id>@<key>      the key only where the store does not keep it otherwise

The digits make a token unlike any other; the rest is for people, who ask `Backend.leases` who
compiles what.  Stores with leases use it.
"""

from __future__ import annotations

import os
import re
import secrets
import socket
from typing import NamedTuple

_HOST_CHARACTERS, _KEY_CHARACTERS = 64, 128
_NOT_OF_A_HOST = re.compile(r"[^A-Za-z0-9._-]")


class HeldLease(NamedTuple):
    """A lease that somebody holds.

    Attributes:
        key: what it is called; empty where the store does not know that.
        holder: `host:process id`; empty where the holder did not say.
        left_s: seconds until it ends, if it is not renewed; None where the store does not say.
    """

    key: str
    holder: str
    left_s: float | None


def new_token(key: str = "") -> str:
    """Return a token that nobody else has."""
    host = _NOT_OF_A_HOST.sub("_", socket.gethostname())[:_HOST_CHARACTERS]
    known = key if len(key) <= _KEY_CHARACTERS else ""
    return f"{secrets.token_hex(16)}@{host}:{os.getpid()}" + (f"@{known}" if known else "")


def held_lease(token: str, left_s: float | None, key: str = "") -> HeldLease:
    """Return the lease of a token, which may be of an older version, or of anybody's making."""
    _, holder, known = (*token.split("@", 2), "", "")[:3]
    return HeldLease(key or known, holder, left_s)

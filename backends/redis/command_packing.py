# SPDX-License-Identifier: Apache-2.0
"""`packed`: commands as a Redis server reads them, many in one piece.

redis-py packs them one by one, each as generally as its clients need it, and sends them in pieces
of 6 KB: for the three hundred reads of a restore that takes longer than reading the answers.  `run`
in `server_exchange.py` calls it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeAlias

#: What a command is made of.
Word: TypeAlias = str | bytes | int
# A value of this size is sent as it is, and not copied beside what is around it.
_LARGE_BYTES = 64 * 1024


def packed(commands: Iterable[Sequence[Word]]) -> list[bytes]:
    """Return what is sent for some commands, in pieces."""
    pieces: list[bytes] = []
    small: list[bytes] = []
    for words in commands:
        small.append(b"*%d\r\n" % len(words))
        for word in words:
            data = (
                word
                if isinstance(word, bytes)
                else word.encode()
                if isinstance(word, str)
                else b"%d" % word
            )
            if len(data) < _LARGE_BYTES:
                small.append(b"$%d\r\n%b\r\n" % (len(data), data))
            else:
                pieces += [b"%b$%d\r\n" % (b"".join(small), len(data)), data]
                small = [b"\r\n"]
    return [*pieces, b"".join(small)]

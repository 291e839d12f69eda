# SPDX-License-Identifier: Apache-2.0
"""The named parts that a kernel key was computed from: the answer to "why did it miss?".

`bundler/toolchain` makes a `KeyParts` when a compile is recorded, a `Kernel` carries it, and
`bundler/integrations/key_comparison.py` compares two of them.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import msgspec

from bundler.errors import NotFound
from bundler.format import wire
from bundler.format.summary import Summarized

#: Of the source: Triton's hash of it, its first line, what it is without lines, and the first lines
#: of it and of the functions that it calls (`bundler/toolchain/keytext.py`).
HASH_PART, LINE_PART = "source.hash", "source.line"
FUNCTIONS_PART, LINES_PART = "source.functions", "source.lines"
#: What differs between two kernels of which one only moved.
LINE_PARTS = frozenset({HASH_PART, LINE_PART, LINES_PART})
_ANY = msgspec.msgpack.Decoder(tuple[bool, list[tuple[str, str]]])


@dataclass(frozen=True, repr=False)
class KeyParts(Summarized):
    """An ordered list of (name, text), and whether the key was recomputed from them.

    Names begin with the part of Triton's key they belong to: `triton.`, `source.`, `backend.`,
    `option.`, `env.`. `proven` is true when hashing the parts the way Triton does gave the kernel's
    own key.
    """

    parts: tuple[tuple[str, str], ...]
    proven: bool

    def __getitem__(self, name: str) -> str:
        for part, text in self.parts:
            if part == name:
                return text
        raise NotFound(f"no key part named {name!r}", name=name)

    def diff(self, other: KeyParts) -> tuple[tuple[str, str | None, str | None], ...]:
        """Return (name, text here, text there) for each part that differs; None where a side lacks
        it.
        """
        mine, theirs = dict(self.parts), dict(other.parts)
        names = [*mine, *(name for name in theirs if name not in mine)]
        return tuple((n, mine.get(n), theirs.get(n)) for n in names if mine.get(n) != theirs.get(n))

    @property
    def moved_key(self) -> str | None:
        """A digest that all kernels have which differ in line numbers alone.

        None where the lines, or what else the key is made of, are not known.
        """
        return moved_key_of(self.to_bytes())

    def to_bytes(self) -> bytes:
        """Return the positional msgpack form."""
        return wire.pack([self.proven, [list(part) for part in self.parts]])

    @staticmethod
    def from_bytes(data: bytes) -> KeyParts:
        """Decode what `to_bytes` wrote; raises `FormatError` for anything else."""
        proven, parts = wire.fields(wire.unpack(data, "key parts"), "key parts", bool, list)
        pairs: list[Any] = [tuple(wire.fields(part, "key part", str, str)) for part in parts]
        return KeyParts(tuple(pairs), proven)


def decode_lines(text: str) -> tuple[int, ...] | None:
    """Return the lines that `LINES_PART` tells; None where it tells none, as a text that was too
    long.
    """
    words = text.split()
    numbers = all(word.isascii() and word.isdecimal() for word in words)
    return tuple(map(int, words)) if words and numbers else None


def moved_key_of(encoded: bytes) -> str | None:
    """Return `KeyParts.moved_key` of encoded parts, None also for what are none: for who asks for
    those of thousands of kernels.
    """
    try:
        proven, parts = _ANY.decode(encoded)
    except (ValueError, msgspec.MsgspecError, RecursionError):
        return None
    if not proven or decode_lines(dict(parts).get(LINES_PART, "")) is None:
        return None
    text = msgspec.msgpack.encode([part for part in parts if part[0] not in LINE_PARTS])
    return hashlib.sha256(text).hexdigest()

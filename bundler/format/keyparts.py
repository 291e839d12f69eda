# SPDX-License-Identifier: Apache-2.0
"""The named parts that a kernel key was computed from: the answer to "why did it miss?".

`bundler/toolchain` makes a `KeyParts` when a compile is recorded, a `Kernel` carries it, and `bundler/integrations/key_comparison.py` compares
two of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from bundler.errors import NotFound
from bundler.format import wire
from bundler.format.summary import Summarized


@dataclass(frozen=True, repr=False)
class KeyParts(Summarized):
    """An ordered list of (name, text), and whether the key was recomputed from them.

    Names begin with the part of Triton's key they belong to: `triton.`, `source.`, `backend.`, `option.`, `env.`.
    `proven` is true when hashing the parts the way Triton does gave the kernel's own key.
    """

    parts: tuple[tuple[str, str], ...]
    proven: bool

    def __getitem__(self, name: str) -> str:
        for part, text in self.parts:
            if part == name:
                return text
        raise NotFound(f"no key part named {name!r}", name=name)

    def diff(self, other: KeyParts) -> tuple[tuple[str, str | None, str | None], ...]:
        """Return (name, text here, text there) for each part that differs; None where a side lacks it."""
        mine, theirs = dict(self.parts), dict(other.parts)
        names = [*mine, *(name for name in theirs if name not in mine)]
        return tuple((n, mine.get(n), theirs.get(n)) for n in names if mine.get(n) != theirs.get(n))

    def to_bytes(self) -> bytes:
        """Return the positional msgpack form."""
        return wire.pack([self.proven, [list(part) for part in self.parts]])

    @staticmethod
    def from_bytes(data: bytes) -> KeyParts:
        """Decode what `to_bytes` wrote; raises `FormatError` for anything else."""
        proven, parts = wire.fields(wire.unpack(data, "key parts"), "key parts", bool, list)
        pairs: list[Any] = [tuple(wire.fields(part, "key part", str, str)) for part in parts]
        return KeyParts(tuple(pairs), proven)

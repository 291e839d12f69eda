# SPDX-License-Identifier: Apache-2.0
"""Damages bundles: their bytes, their manifest, and their container with the checksums made
right.
"""

from __future__ import annotations

import contextlib
import copy
import random
from typing import Any

import msgpack

from tools.fuzz.container import CONTENT, OBSERVED, Parts, nested, pack

ODD: list[Any] = [
    *(None, True, False, 0, 1, -1, 255, 2**31, 2**32, 2**63, 2**64 - 1, -(2**63), 1.5),
    *("", "..", "a/b", "\0", "x" * 5000, b"", b"\0" * 32, "A" * 52, "k.cubin", "json"),
    *([], [[]], {}, {"a": 1}, ["none", None], ["list", []], [0, 0, 0]),
]
DEEP = msgpack.unpackb(nested(60))


def mutated(chance: random.Random, data: bytes) -> bytes:
    """Return damaged bytes: a third raw, a third with a changed manifest, a third with a changed
    container.
    """
    kind = chance.randrange(6)
    if kind == 0:
        return flip(chance, data)
    if kind == 1:
        return data[: chance.randrange(len(data))] + chance.randbytes(chance.choice([0, 0, 16]))
    parts = Parts.of(data)
    if kind == 2:
        _change_section(chance, parts)
        return parts.join()
    if kind == 3:
        return parts.join(table=flip(chance, data[int.from_bytes(data[24:32], "little") :]))
    section = CONTENT if kind == 4 else chance.choice([CONTENT, OBSERVED])
    document = parts.document(section)
    for _ in range(chance.choice([1, 1, 2])):
        # what nests deeper than Python copies stays as it is
        with contextlib.suppress(RecursionError):
            _change(chance, document)
    packed = pack(document)
    parts.put(flip(chance, packed) if kind == 5 and chance.random() < 0.5 else packed, section)
    parts.minor = chance.choice([0, 0, 0, 1])
    return parts.join()


def flip(chance: random.Random, data: bytes) -> bytes:
    """Return bytes with some of them changed, removed, repeated or put in."""
    changed = bytearray(data)
    for _ in range(chance.choice([1, 1, 2, 8])):
        position = chance.randrange(len(changed) + 1)
        length = chance.choice([1, 1, 4, 32])
        match chance.randrange(4):
            case 0 if position < len(changed):
                changed[position] = chance.randrange(256)
            case 1:
                del changed[position : position + length]
            case 2:
                changed[position:position] = chance.randbytes(length)
            case _:
                changed[position:position] = changed[position : position + length]
    return bytes(changed)


def _spots(node: list[Any]) -> list[tuple[list[Any], int]]:
    """Return (array, position) of every field in nested arrays."""
    found = [(node, position) for position in range(len(node))]
    for item in node:
        if isinstance(item, list):
            found += _spots(item)
    return found


def _change(chance: random.Random, node: list[Any]) -> None:
    """Change one field of nested arrays: replace, remove, repeat, swap or move it."""
    where = _spots(node)
    if not where:
        return
    array, position = chance.choice(where)
    match chance.randrange(8):
        case 0:
            del array[position]
        case 1:
            array.insert(position, copy.deepcopy(array[position]))
        case 2:
            other, place = chance.choice(where)
            # Copies, since an array could otherwise come to lie inside itself.
            array[position], other[place] = copy.deepcopy((other[place], array[position]))
        case 3 if isinstance(array[position], int):
            near = array[position] + chance.choice([-1, 1, 1 << 20])
            array[position] = max(-(2**63), min(2**64 - 1, near))
        case 4 if isinstance(array[position], bytes):
            array[position] = flip(chance, array[position])
        case 5:
            array[position] = copy.deepcopy(DEEP)
        case _:
            array[position] = copy.deepcopy(chance.choice(ODD))


def _change_section(chance: random.Random, parts: Parts) -> None:
    """Change a section, or the order of the sections, and keep the checksums right."""
    part = chance.choice(parts.sections)
    match chance.randrange(9):
        case 0:
            part.data = flip(chance, part.data)
        case 1:
            part.raw = chance.choice([0, part.raw + 1, 1 << 26, 1 << 40, 2**64 - 1])
        case 2:
            part.kind = chance.choice([*range(1, 20), 2**40])
        case 3:
            part.codec = chance.choice([0, 1, 2, 255])
        case 4:
            part.prefix = [chance.randrange(-1, 8) for _ in range(chance.randrange(4))]
        case 5:
            part.blobs = [chance.randrange(-1, 20) for _ in range(chance.randrange(9))]
        case 6:
            chance.shuffle(parts.sections)
        case 7:
            parts.sections.append(part)
        case _:
            part.offset = chance.choice([0, 71, 73, 2**63])

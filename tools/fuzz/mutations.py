# SPDX-License-Identifier: Apache-2.0
"""Damages bundles: `mutated` their bytes, their manifest, and their container with the checksums
made right; `structured` what their fields mean.

For the latter a sound bundle is taken apart to the last number, changed there, and put together.
Digests, sizes, the blob table and the checksums are right afterwards, so that the change reaches
whoever reads that field: launch facts and key parts (msgpack inside the manifest), Triton's
metadata (JSON), and the headers of device binaries.
"""

from __future__ import annotations

import contextlib
import copy
import json
import random
import struct
from collections.abc import Callable, Iterator
from functools import lru_cache, wraps
from typing import Any

import msgpack
import zstandard

from tools.fuzz.container import (
    CONTENT,
    OBSERVED,
    Draft,
    DraftKernel,
    File,
    Parts,
    blob_table,
    nested,
    pack,
    raw_dictionary,
    to_rows,
)

ODD: list[Any] = [
    *(None, True, False, 0, 1, -1, 255, 2**31, 2**32, 2**63, 2**64 - 1, -(2**63), 1.5),
    *("", "..", "a/b", "\0", "x" * 5000, b"", b"\0" * 32, "A" * 52, "k.cubin", "json"),
    *([], [[]], {}, {"a": 1}, ["none", None], ["list", []], [0, 0, 0]),
]
DEEP = msgpack.unpackb(nested(60))
# Around what 8, 31, 32, 63 and 64 bits hold, signed and not.
BORDERS = [
    *(0, 1, 2**64 - 1, 2**64 - 2),
    *(
        sign * 2**bits + more
        for bits in (7, 8, 15, 16, 31, 32, 53, 62, 63)
        for sign in (1, -1)
        for more in (-1, 0, 1)
        if sign * 2**bits + more >= -(2**63)
    ),
]
# What JSON and decimal text can say besides.
BEYOND = [2**64, 2**64 + 1, -(2**63) - 1, 2**128, -(2**128), 10**400, -(10**400)]
FLOATS = [
    *(0.0, -0.0, 1.5, -1.5, 1e300, float("inf"), float("-inf"), float("nan")),
    *(5e-324, 2.0**63, 2.0**64, 2.0**1023),
]
TEXTS = [
    *("", "0", "-1", "90", "k", "x" * 300, "9" * 400, "-" + "9" * 399, "\u0663", "1e999", "\0"),
    *(str(2**64), str(2**63), str(-(2**63) - 1), "*fp32", "i1", "u64", "i64", "constexpr"),
    *("tensordesc<fp16[64, 64]>", "nvTmaDesc", "cuda", "hip"),
]
TAGGED = [
    *(["none", None], ["bool", True], ["int", 2**64 - 1], ["int", str(2**64)], ["int", "9" * 400]),
    *(["float", b"\x7f\xf0" + b"\0" * 6], ["float", b"\x7f\xf8" + b"\0" * 6], ["str", "x"]),
    *(["tuple", []], ["list", [["int", 2**63]]], ["dict", [["a", ["int", -1]]]], ["dtype", "fp16"]),
    *(["constexpr", ["int", str(-(2**70))]], ["jit", ["m:f", "0"]], ["other", "x.Y"]),
]
_Other = Callable[[random.Random, Any], Any]
_Change = Callable[[random.Random, Draft], None]


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
            _change_document(chance, document)
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


def _change_document(chance: random.Random, node: list[Any]) -> None:
    """Change one field of nested arrays: replace, remove, repeat, swap or move it."""
    where = list(_spots(node))
    if not where:
        return
    array, position = chance.choice(where)
    match chance.randrange(8):
        case 0:
            del array[position]
        case 1 if isinstance(array, list):  # an earlier change may have put a dictionary there
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


def structured(chance: random.Random, data: bytes) -> bytes:
    """Return a bundle with one to three fields changed, each to a value that it could be mistaken
    about.
    """
    made = copy.deepcopy(_taken_apart(data))
    for _ in range(chance.choice([1, 1, 1, 2, 3])):
        chance.choice(_CHANGES)(chance, made)
    if chance.random() < 0.3:
        made.edits.append(lambda document: _change(chance, document, _number_or_text))
    return made.join()


@lru_cache(8)
def _taken_apart(data: bytes) -> Draft:
    parts = Parts.of(data)
    document, blobs = to_rows(parts.document(CONTENT)), _blobs(parts)

    def one(described: list[Any]) -> File:
        name, number, spans = described
        return File(name, blobs[number], spans)

    _, _, kernels, tuning, helpers, opaque, records = document
    return Draft(
        [
            DraftKernel(key, name, list(map(one, files)), target, spec, facts, more, toolchain)
            for key, name, target, files, spec, facts, more, toolchain in kernels
        ],
        [(path, one(file)) for path, file in tuning],
        [(path, one(file)) for path, file, _ in helpers],
        [(path, one(file)) for path, file in opaque],
        records,
        parts.document(OBSERVED),
    )


def _blobs(parts: Parts) -> dict[int, bytes]:
    """Return the bytes of each blob by its number."""
    table = blob_table(parts.document(CONTENT))
    raws: list[bytes] = []
    found = {}
    for part in parts.sections:
        prefix = b"".join(raws[number] for number in part.prefix)
        decoder = zstandard.ZstdDecompressor(dict_data=raw_dictionary(prefix))
        raw = decoder.decompress(part.data) if part.codec else part.data
        raws.append(raw)
        offset = 0
        for number in part.blobs:
            size = table[number][1]
            found[number] = raw[offset : offset + size]
            offset += size
    return found


def _number_or_text(chance: random.Random, value: Any) -> Any:
    """Return another value of the same type, at a border of what that can hold."""
    match value:
        case None:
            return chance.choice([*BORDERS, *TEXTS, b"", [], ["none", None]])
        case bool():
            return not value
        case int():
            return chance.choice(BORDERS)
        case float():
            return chance.choice(FLOATS)
        case str():
            return chance.choice(TEXTS)
        case bytes():
            size = len(value)
            return chance.choice([b"", value[:-1], value + b"\0", b"\0" * size, b"\xff" * size])
        case list():
            return chance.choice([[], [*value, *value], value[:-1], value[::-1]])
    return None


def _json_value(chance: random.Random, value: Any) -> Any:
    if isinstance(value, (bool, int, float)) and chance.random() < 0.7:
        return chance.choice([*BORDERS, *BEYOND, *FLOATS])
    others: list[Any] = [None, True, [], {}, [[]], {"a": 2**70}, [2**70] * 3]
    return chance.choice([*BORDERS, *BEYOND, *FLOATS, *TEXTS, *others])


def _spots(node: Any) -> Iterator[tuple[Any, Any]]:
    """Yield (container, position) of everything in nested lists and dictionaries."""
    for position in list(node) if isinstance(node, dict) else range(len(node)):
        yield node, position
        if isinstance(node[position], (list, dict)):
            yield from _spots(node[position])


def _change(chance: random.Random, node: Any, other: _Other) -> None:
    if places := list(_spots(node)):
        container, position = chance.choice(places)
        old = container[position]
        tagged = other is _number_or_text and isinstance(old, list) and len(old) == 2
        if tagged and chance.random() < 0.5:
            container[position] = copy.deepcopy(chance.choice(TAGGED))
        else:
            container[position] = other(chance, old)


def _of_kernel(change: Callable[[random.Random, DraftKernel], None]) -> _Change:
    """Return a change of one of the kernels, where there are any."""

    @wraps(change)
    def changed(chance: random.Random, made: Draft) -> None:
        if made.kernels:
            change(chance, chance.choice(made.kernels))

    return changed


@_of_kernel
def _change_spec(chance: random.Random, kernel: DraftKernel) -> None:
    part = chance.choice([kernel.spec, kernel.target, kernel.toolchain])
    _change(chance, part, _number_or_text)


@_of_kernel
def _change_packed(chance: random.Random, kernel: DraftKernel) -> None:
    name = chance.choice(["facts", "parts"])
    if (packed := getattr(kernel, name)) is not None:
        document = msgpack.unpackb(packed)
        _change(chance, document, _number_or_text)
        setattr(kernel, name, pack(document))


@_of_kernel
def _change_metadata(chance: random.Random, kernel: DraftKernel) -> None:
    file = kernel.file("json")
    document = json.loads(file.data)
    _change(chance, document, _json_value)
    file.data = json.dumps(document).encode()


@_of_kernel
def _change_spans(chance: random.Random, kernel: DraftKernel) -> None:
    file = chance.choice(kernel.files)
    file.spans = file.spans or [0, 0, 0]
    _change(chance, file.spans, _number_or_text)


@_of_kernel
def _change_binary(chance: random.Random, kernel: DraftKernel) -> None:
    """Put a number into the headers of an ELF file, or somewhere in it where a number may be."""
    for file in [file for file in kernel.files if file.data.startswith(b"\x7fELF")][:1]:
        layout = chance.choice(["<B", "<H", "<I", "<Q", "<Q"])
        size, highest = struct.calcsize(layout), 256 ** struct.calcsize(layout)
        room = max(1, len(file.data) - size)
        # Headers lie at both ends.
        ends = [chance.randrange(min(64, room)), room - 1 - chance.randrange(min(2048, room))]
        at = chance.choice([*ends, chance.randrange(room)])
        data = bytearray(file.data)
        data[at : at + size] = struct.pack(layout, chance.choice(BORDERS) % highest)
        file.data = bytes(data)


def _change_observed(chance: random.Random, made: Draft) -> None:
    _change(chance, made.observed, _number_or_text)


def _change_record(chance: random.Random, made: Draft) -> None:
    if not made.records:
        made.records.append(["k", [["source", "s"]], [["BLOCK", ["int", 64]]], "autotune"])
    _change(chance, made.records, _number_or_text)


def _change_tuning_file(chance: random.Random, made: Draft) -> None:
    if made.tuning:
        file = chance.choice(made.tuning)[1]
        try:
            document = json.loads(file.data)
        except ValueError:
            return
        if isinstance(document, (dict, list)):
            _change(chance, document, _json_value)
            file.data = json.dumps(document).encode()


_CHANGES = (
    *(_change_packed, _change_packed, _change_metadata, _change_metadata, _change_spec),
    *(_change_spans, _change_binary, _change_observed, _change_record, _change_tuning_file),
)

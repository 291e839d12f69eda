# SPDX-License-Identifier: Apache-2.0
"""Attacks on memory and time: bombs, prefixes, and manifests that are deep, huge or of the wrong types."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from typing import Any

import zstandard

from tools.fuzz.container import (
    CONTENT,
    IR,
    LAUNCH,
    OBSERVED,
    OPAQUE,
    STORED,
    ZSTD,
    Attack,
    Draft,
    DraftKernel,
    File,
    Part,
    bound,
    compressed,
    key_of,
    nested,
    noise,
    pack,
    sha256,
    value_chain,
)
from tools.fuzz.table_content import blob_table

MIB = 1 << 20


def _frame(data: bytes, raw: int, kind: int = CONTENT) -> Callable[[Draft], Any]:
    """Return a change that gives a section these stored bytes and this raw size."""

    def change(parts: Any) -> None:
        part = parts.find(kind)
        part.codec, part.data, part.raw = ZSTD, data, raw

    return lambda made: made.container.append(change)


def bombs() -> Iterator[Attack]:
    """Yield attacks that would take memory or time."""
    zeros = compressed(bytes(16 * MIB))
    yield Attack("bomb/manifest-declared", _frame(compressed(b"\x90"), 2**40))
    yield Attack("bomb/manifest-ratio", _frame(zeros, 16 * MIB))
    yield Attack("bomb/manifest-lying-frame", _frame(zeros, MIB))
    yield Attack("bomb/launch-ratio", _frame(zeros, 16 * MIB, LAUNCH))
    yield Attack(
        "bomb/no-size",
        _frame(zstandard.ZstdCompressor(write_content_size=False).compress(bytes(99)), 99),
    )
    yield Attack(
        "bomb/no-checksum",
        _frame(zstandard.ZstdCompressor(write_checksum=False).compress(bytes(99)), 99),
    )
    yield Attack("bomb/two-frames", _frame(compressed(bytes(50)) * 2, 50))
    yield Attack(
        "bomb/skippable", _frame(b"\x50\x2a\x4d\x18\x04\0\0\0abcd" + compressed(bytes(50)), 50)
    )
    wide = zstandard.ZstdCompressionParameters.from_level(1, window_log=27, write_checksum=True)
    streamed = zstandard.ZstdCompressor(compression_params=wide).compressobj()
    yield Attack("bomb/window", _frame(streamed.compress(bytes(64)) + streamed.flush(), 64))
    # Exactly as dense as the limit allows: manifests of nothing but tiny arrays, long strings, deep nests.
    for label, unit in (
        ("lists", b"\x90"),
        ("pairs", b"\x92\xc0\xc0"),
        ("texts", b"\xa2ab"),
        ("ones", b"\x91\xc0"),
    ):
        for count in (60_000, 900_000, 4_000_000, 15_000_000):
            yield Attack(f"bomb/{label}-{count}", _dense(unit, count), heavy=count > 60_000)
    yield Attack("bomb/reused-blob", _reused_blob, heavy=True)
    yield Attack("bomb/prefix-chain", _prefix_chain)
    yield Attack("bomb/prefix-repeated", lambda made: _prefixed(made, 1, [0] * 60_000))
    yield Attack("bomb/prefix-large", _large_prefixes, heavy=True)
    yield Attack("bomb/prefix-own", lambda made: _prefixed(made, 1, [2]))
    yield Attack("bomb/prefix-later", lambda made: _prefixed(made, 1, [99]))
    yield Attack("bomb/sections", lambda d: d.container.append(lambda p: p.sections.extend(
        Part.of(99, b"") for _ in range(20_000))), heavy=True)  # fmt: skip


def _dense(unit: bytes, count: int) -> Callable[[Draft], Any]:
    """Return a change that makes a manifest of many tiny members, padded until the ratio of its frame is allowed."""

    def change(made: Draft) -> None:
        size = len(unit)
        rows = [
            min(1_000_000, count // size - start)
            for start in range(0, max(1, count // size), 1_000_000)
        ]
        body = b"".join(b"\xdd" + struct.pack(">I", row) + unit * row for row in rows)
        raw = b"\x97\x01" + bytes([0x90 | len(rows)]) + body + b"\x90" * 4
        pad = noise("pad", min(65535, len(raw) // 250))
        raw += b"\x91\xc5" + struct.pack(">H", len(pad)) + pad
        _frame(compressed(raw, level=1), len(raw))(made)

    return change


def _reused_blob(made: Draft) -> None:
    """One blob of 2 MiB that stands for 20 GiB of files."""
    blob = noise("reused", 10_000) + bytes(2 * MIB)
    files = [File(f"f{n}.ttir", blob) for n in range(62)]
    first = made.kernels[0]
    made.kernels = [
        DraftKernel(key_of(sha256(bytes([n]))), "k", [*first.files[1:], *files]) for n in range(165)
    ]


def _prefixed(made: Draft, count: int, prefix: list[int], raw: bytes = b"graph") -> None:
    """Add opaque files, each in a section of its own with this prefix."""
    files = [File("g", raw + str(n).encode()) for n in range(count)]
    made.opaque += [(f"{n}/g", file) for n, file in enumerate(files)]

    def change(parts: Any) -> None:
        whole = parts.find(IR)
        document = parts.document(CONTENT)
        ours = {sha256(file.data): file.data for file in files}
        table = blob_table(document)
        numbers = {position: ours[raw] for position, (raw, _) in enumerate(table) if raw in ours}
        rest = zstandard.decompress(whole.data) if whole.codec == ZSTD else whole.data
        kept = [blob for blob in whole.blobs if blob not in numbers]
        size = sum(table[blob][1] for blob in kept)
        parts.sections[parts.sections.index(whole)] = Part.of(IR, rest[:size], kept)
        for number, data in numbers.items():
            parts.sections.append(Part(OPAQUE, STORED, data, len(data), [number], list(prefix)))

    made.container.append(change)


def _prefix_chain(made: Draft) -> None:
    def change(parts: Any) -> None:
        for number, part in enumerate(parts.sections):
            part.prefix = [number - 1] if number else []

    made.container.append(change)


def _large_prefixes(made: Draft) -> None:
    """Hundreds of small frames that each need 30 of others decoded again, more than a reader keeps."""
    made.kernels[0].files += [
        File(f"big{n}.ttir", f"{n}".encode() + bytes(MIB - 9)) for n in range(30)
    ]

    def split(parts: Any) -> None:
        whole = parts.find(IR)
        raw, position = zstandard.decompress(whole.data), 0
        table, sections = blob_table(parts.document(CONTENT)), []
        for blob in whole.blobs:
            size = table[blob][1]
            sections.append(Part.of(IR, raw[position : position + size], [blob]))
            position += size
        at = parts.sections.index(whole)
        parts.sections[at : at + 1] = sections

    _prefixed(made, 100, [*range(4, 34)])
    made.container.append(split)


def documents() -> Iterator[Attack]:
    """Yield manifests that are deep, huge, or of wrong types and values."""
    for depth in (10, 17, 60, 600, 100_000):
        yield Attack(f"deep/content-{depth}", _raw_content(nested(depth)))
        yield Attack(
            f"deep/observed-{depth}",
            bound(lambda d, n: d.container.append(lambda p: p.put(nested(n), OBSERVED)), depth),
        )
        yield Attack(
            f"deep/facts-{depth}",
            bound(lambda d, n: setattr(d.kernels[0], "facts", nested(n)), depth),
        )
        yield Attack(
            f"deep/parts-{depth}",
            bound(lambda d, n: setattr(d.kernels[0], "parts", nested(n)), depth),
        )
    for depth in (2, 6, 9, 40):
        yield Attack(
            f"deep/value-{depth}",
            bound(lambda d, n: d.kernels[0].spec.__setitem__(12, value_chain(n)), depth),
        )
        record = ["k", [], [["x", value_chain(depth)]], "autotune"]
        yield Attack(f"deep/record-{depth}", bound(lambda d, r: d.records.append(r), record))
    for label, head in (
        ("array", b"\xdd"),
        ("text", b"\xdb"),
        ("bin", b"\xc6"),
        ("map", b"\xdf"),
        ("ext", b"\xc9"),
    ):
        yield Attack(f"huge/{label}", _raw_content(b"\x97\x01" + head + b"\xff\xff\xff\xff"))
    yield Attack("huge/map", _raw_content(b"\x82\x01\x02\x01\x03"))
    yield Attack("huge/float-schema", lambda d: d.edits.append(lambda doc: doc.__setitem__(0, 1.0)))
    yield Attack("huge/text", lambda d: setattr(d.kernels[0], "name", "n" * 5000))
    yield Attack("huge/escape", lambda d: setattr(d.kernels[0], "name", "\x1b]0;x\x07" * 500))
    yield Attack(
        "huge/files",
        lambda d: d.kernels[0].files.extend(File(f"f{n}.ttir", b"x") for n in range(65)),
    )
    for label, text in (
        ("unicode-digits", "\u0663"),
        ("many", "9" * 400),
        ("minus", "--1"),
        ("empty", ""),
        ("hex", "0x1"),
    ):
        yield Attack(
            f"value/int-{label}",
            bound(lambda d, t: d.kernels[0].spec.__setitem__(12, ["int", t]), text),
        )
    twice = ["dict", [["a", ["none", None]], ["a", ["bool", True]]]]
    yield Attack("value/dict-twice", lambda d: d.kernels[0].spec.__setitem__(12, twice))
    facts = pack(
        ["ast", [["x", "", None, True, False, False]], [], [[[2**63], ["int", 1]]], [], []]
    )
    yield Attack("value/facts-path", lambda d: setattr(d.kernels[0], "facts", facts))
    for position, odd in enumerate([-1, 2**64 - 1, None, "4", 1.5, True]):
        for at in range(12):
            yield Attack(
                f"value/spec-{at}-{position}",
                bound(lambda d, a, o: d.kernels[0].spec.__setitem__(a, o), at, odd),
            )
    yield Attack(
        "value/arch-digits", lambda d: setattr(d.kernels[0], "target", ["cuda", "\u0669" * 1300, 0])
    )
    yield Attack("value/arch-long", lambda d: _arch(d, "9" * 4096))


def _arch(made: Draft, arch: str) -> None:
    made.kernels[0].target = ["cuda", arch, 32]
    made.kernels[0].toolchain = ["3.7.1", None, "12.9"]


def _raw_content(data: bytes) -> Callable[[Draft], Any]:
    return lambda made: made.container.append(lambda parts: parts.put(data, CONTENT))

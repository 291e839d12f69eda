# SPDX-License-Identifier: Apache-2.0
"""Attacks on what restoring looks into: metadata JSON and the headers of device binaries."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator
from typing import Any

from tools.fuzz.container import (
    Attack,
    Draft,
    File,
    metadata,
    noise,
)

MIB = 1 << 20
# What stands in place of a metadata file: the text after `"shared": `, the whole bytes, or fields.
NUMBERS = {
    "infinity": "Infinity", "overflow": "1e999", "minus-infinity": "-Infinity", "nan": "NaN", "huge": "9" * 4300,
    "too-huge": "9" * 5000, "text": '"12"', "null": "null", "list": "[]", "object": "{}", "true": "true", "negative": "-1",
    "fraction": "1.5", "million-exponent": "1e-1000000", "surrogate": '"\\ud800"',
}  # fmt: skip
FIELDS: dict[str, dict[str, Any]] = {
    "no-name": {"name": None}, "name-list": {"name": [[["k"]]]}, "name-long": {"name": "k" * 100_000},
    "name-surrogate": {"name": "\ud800"}, "name-escape": {"name": "\x1b[2J"}, "hash-number": {"hash": 1},
    "hash-short": {"hash": "00"}, "hash-spaces": {"hash": " ".join(metadata("one")["hash"])}, "hash-list": {"hash": []},
    "hash-surrogate": {"hash": "\ud800"}, "target-text": {"target": "cuda:90:32"}, "target-null": {"target": None},
    "target-empty": {"target": {}}, "backend-odd": {"target": {"backend": ["x"], "arch": {}, "warp_size": 1}},
    "backend-surrogate": {"target": {"backend": "hip", "arch": "\ud800", "warp_size": 64}, "name": "\udfff" * 9000},
    "warp-infinite": {"target": {"backend": "cuda", "arch": 90, "warp_size": float("inf")}},
    "warp-text": {"target": {"backend": "cuda", "arch": 90, "warp_size": "many"}},
    "warps-null": {"num_warps": None}, "warps-infinite": {"num_warps": float("inf")}, "more": {"class": 1, "_x": 2, "": 3},
}  # fmt: skip


def _document(seed: str, **fields: Any) -> bytes:
    return json.dumps(metadata(seed, **fields)).encode()


def documents() -> Iterator[Attack]:
    """Yield metadata that is no JSON, no object, or odd in a field."""
    plain = _document("one")
    whole = {
        "utf-16": plain.decode().encode("utf-16"), "utf-32": plain.decode().encode("utf-32"), "mark": b"\xef\xbb\xbf" + plain,
        "latin-1": plain[:-1] + b', "x": "\xe9"}', "raw-surrogate": plain[:-1] + b', "x": "\xed\xa0\x80"}',
        "empty": b"", "null": b"null", "list": b"[]", "number": b"1", "text": b'"k"', "trailing": plain + b"{}",
        "cut": plain[:-5], "zeros": bytes(99), "comment": b"//\n" + plain, "nul": plain[:-1] + b', "x": "\0"}',
        "twice": plain[:-1] + b', "shared": 1, "shared": 99999999999, "hash": "00", "name": []}', "control": plain + b"\x1a",
        "slashes": _document("one", x=" /" * 150_000), "triton": _document("one", x="/triton/backends/ " * 5000),
        "quotes": _document("one", x='"\\' * 50_000), "large": plain[:-1] + b', "x": "' + b"x" * 2 * MIB + noise("large", 8000).hex().encode() + b'"}',
    }  # fmt: skip
    for label, data in whole.items():
        yield Attack(f"json/{label}", _replace_metadata(data), heavy=label == "large")
    for label, number in NUMBERS.items():
        for name in ("shared", "num_warps"):
            text = plain.decode().replace(
                f'"{name}": {metadata("one")[name]}', f'"{name}": {number}'
            )
            yield Attack(f"json/{name}-{label}", _replace_metadata(text.encode()))
    for label, fields in FIELDS.items():
        yield Attack(f"json/{label}", _replace_metadata(_document("one", **fields)))
    for depth in (100, *range(940, 1000, 3), 2000, 100_000):
        text = plain.decode()[:-1] + ', "x": ' + "[" * depth + "]" * depth + "}"
        yield Attack(f"json/deep-{depth}", _replace_metadata(text.encode()))
        objects = plain.decode()[:-1] + ', "x": ' + '{"a":' * depth + "1" + "}" * depth + "}"
        yield Attack(f"json/deep-objects-{depth}", _replace_metadata(objects.encode()))
    for name in metadata("one"):
        rest = {field: value for field, value in metadata("one").items() if field != name}
        yield Attack(f"json/without-{name}", _replace_metadata(json.dumps(rest).encode()))


def _replace_metadata(data: bytes) -> Callable[[Draft], Any]:
    return lambda made: (
        setattr(made.kernels[0].file("json"), "data", data) if made.kernels else None
    )


def elf(
    segments: int, sections: int, strides: tuple[int, int, int, int], tail: bytes = b""
) -> bytes:
    """Return an ELF header that says where its tables are: (bytes and count of segments, of sections)."""
    head = b"\x7fELF\x02\x01\x01".ljust(32, b"\0") + struct.pack("<QQIH", segments, sections, 0, 64)
    return head + struct.pack("<HHHHH", *strides, 0) + tail


def binaries() -> Iterator[Attack]:
    """Yield device binaries whose headers lie."""
    tables = {
        "far": elf(2**64 - 1, 2**64 - 1, (56, 1, 64, 1)), "far-odd": elf(2**64 - 1, 0, (55, 3, 64, 0)),
        "far-odd-sections": elf(0, 2**63, (56, 0, 1, 65535)), "no-stride": elf(64, 64, (0, 65535, 0, 65535), bytes(64)),
        "many": elf(64, 64, (1, 65535, 1, 65535), bytes(70_000)), "huge-rows": elf(64, 64, (56, 1, 64, 1), b"\xff" * 64),
        "far-odd-rows": elf(0, 2**63, (56, 0, 65, 3), bytes(200)), "at-the-limit": elf(0, 2**63 - 1, (56, 0, 65, 3), bytes(200)),
        "far-names": elf(0, 64, (56, 0, 64, 2), struct.pack("<IIQQQQI20x", 2**32 - 1, 3, 0, 0, 2**64 - 1, 2**64 - 1, 9) * 2),
        "far-notes": elf(0, 64, (56, 0, 64, 1), struct.pack("<IIQQQQI20x", 0, 7, 0, 0, 2**64 - 1, 12, 0)),
        "far-symbols": elf(0, 64, (56, 0, 64, 1), struct.pack("<IIQQQQI20x", 0, 2, 0, 2**64 - 1, 2**63, 2**63, 0)),
        "head-only": b"\x7fELF", "no-elf": b"MZ" + bytes(99), "half-head": b"\x7fELF\x02" + bytes(20),
    }  # fmt: skip
    for label, data in tables.items():
        change = _replace_binary(data)
        yield Attack(f"elf/{label}", change, heavy=label in {"many", "no-stride"})
    # Each path is looked for in the binary.
    count = 8_000
    texts = b"".join(b'\t.file %d "/%07d/%07d"\n' % (n, n, n) for n in range(count))
    binary = b"\x7fELF\x01.debug_line" + b"".join(b"/%07d/%07d" % (n, n) for n in range(count))

    def paths(made: Draft) -> None:
        made.kernels[0].file("cubin").data = binary
        made.kernels[0].files.append(File("k.ptx", texts))

    yield Attack("elf/many-paths", paths, heavy=True)


def _replace_binary(data: bytes) -> Callable[[Draft], Any]:
    return lambda made: setattr(made.kernels[0].file("cubin"), "data", data)

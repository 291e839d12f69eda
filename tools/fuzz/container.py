# SPDX-License-Identifier: Apache-2.0
"""Bundles for the fuzzer: `Parts`, a container taken apart, and `Draft`, a bundle made from
scratch.

Neither uses the package's writer, which refuses most of what is wanted here: whatever is wrong, the
checksums are right.
"""

from __future__ import annotations

import base64
import hashlib
import json
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import IntEnum
from functools import lru_cache
from itertools import chain, pairwise
from typing import Any

import msgpack
import zstandard

MAGIC = b"\x89TBNDL\r\n"
HEADER = struct.Struct("<8sHHIIIQQ")
HEADER_BYTES = HEADER.size + 32
LAUNCH, IR, TUNING, HELPERS, OPAQUE, CONTENT, OBSERVED = 1, 2, 3, 4, 5, 16, 17
STORED, ZSTD = 0, 1
DECODED_BYTES = 1 << 24
SCHEMA = 2
MAX_CUT_BYTES = 1 << 16
#: Where a content has its tables.
Table = IntEnum("Table", "SIZES NAMES TARGETS TOOLCHAINS SPECS LISTS PIECES KERNELS", start=2)


@lru_cache(16)
def sha256(data: bytes) -> bytes:
    """Return the raw SHA-256; one file may stand for thousands."""
    return hashlib.sha256(data).digest()


def noise(seed: str, size: int) -> bytes:
    """Return bytes that do not compress, the same each time."""
    return b"".join(sha256(f"{seed}/{i}".encode()) for i in range(size // 32 + 1))[:size]


def pack(document: Any) -> bytes:
    """Encode; unlike the package also what is no Unicode text."""
    packed: bytes = msgpack.packb(document, use_bin_type=True, unicode_errors="surrogatepass")
    return packed


def compressed(raw: bytes, level: int = 3) -> bytes:
    """Return raw bytes as a frame that declares its size and has a checksum."""
    compressor = zstandard.ZstdCompressor(
        level=level,
        write_checksum=True,
        write_content_size=True,
        write_dict_id=False,
    )
    return compressor.compress(raw)


def raw_dictionary(prefix: bytes) -> Any:
    """Return bytes that come before a frame as zstandard takes them; None for none."""
    kind = zstandard.DICT_TYPE_RAWCONTENT
    return zstandard.ZstdCompressionDict(prefix, dict_type=kind) if prefix else None


@dataclass
class Part:
    """A section; None stands for the right value."""

    kind: int
    codec: int
    data: bytes
    raw: int
    blobs: list[int] = field(default_factory=list)
    prefix: list[int] = field(default_factory=list)
    offset: int | None = None
    digest: bytes | None = None

    @staticmethod
    def of(kind: int, raw: bytes, blobs: Iterable[int] = ()) -> Part:
        """Return a section of raw bytes, compressed where that helps."""
        data = compressed(raw)
        codec, stored = (ZSTD, data) if len(data) < len(raw) else (STORED, raw)
        return Part(kind, codec, stored, len(raw), list(blobs))


@dataclass
class Parts:
    """A container taken apart."""

    sections: list[Part]
    major: int = 2
    minor: int = 0
    flags: tuple[int, ...] = (0, 0, 0)

    @staticmethod
    def of(data: bytes) -> Parts:
        """Take a sound container apart."""
        _, major, minor, *flags, offset, _ = HEADER.unpack_from(data)
        sections = [
            Part(kind, codec, data[start : start + stored], raw, blobs, prefix)
            for kind, codec, start, stored, raw, _, blobs, prefix in msgpack.unpackb(data[offset:])
        ]
        return Parts(sections, major, minor, tuple(flags))

    def find(self, kind: int) -> Part:
        """Return the first section of a kind."""
        return next(section for section in self.sections if section.kind == kind)

    def document(self, kind: int) -> list[Any]:
        """Return the decoded content, or the observations."""
        part = self.find(kind)
        raw = zstandard.decompress(part.data) if part.codec else part.data
        document: list[Any] = msgpack.unpackb(raw)
        return document

    def put(self, data: bytes, kind: int) -> None:
        """Replace the content, or the observations."""
        new = Part.of(kind, data)
        part = self.find(kind)
        part.codec, part.data, part.raw = new.codec, new.data, new.raw

    def put_field(self, number: int, packed: bytes) -> None:
        """Replace one field of the content by bytes, which may be no msgpack; raises `ValueError`
        where another was made huge.
        """
        if self.find(CONTENT).raw > DECODED_BYTES:
            raise ValueError("a content that only readers with limits should decode")
        document = self.document(CONTENT)
        head = msgpack.Packer().pack_array_header(len(document))
        raw = head + b"".join(
            packed if at == number else pack(item) for at, item in enumerate(document)
        )
        # Compressed it could look like a bomb, and would not be decoded.
        part = self.find(CONTENT)
        part.codec, part.data, part.raw = STORED, raw, len(raw)

    def join(self, table: bytes | None = None, tail: bytes = b"") -> bytes:
        """Put the container together, whatever is wrong with it."""
        body = b"".join(s.data for s in self.sections)
        entries, position = [], HEADER_BYTES
        for s in self.sections:
            offset = position if s.offset is None else s.offset
            digest = sha256(s.data) if s.digest is None else s.digest
            entries.append([s.kind, s.codec, offset, len(s.data), s.raw, digest, s.blobs, s.prefix])
            position += len(s.data)
        table = pack(entries) if table is None else table
        head = HEADER.pack(
            MAGIC, self.major, self.minor, *self.flags, HEADER_BYTES + len(body), len(table)
        )
        return b"".join([head, sha256(head + table), body, table, tail])


@dataclass
class File:
    """A file of a draft; `spans` are three numbers each."""

    name: str
    data: bytes
    spans: list[Any] = field(default_factory=list)


@dataclass
class DraftKernel:
    """A kernel of a draft, with every field at hand."""

    key: str
    name: str
    files: list[File]
    target: list[Any] = field(default_factory=lambda: ["cuda", "90", 32])
    spec: list[Any] = field(
        default_factory=lambda: ["k", 4, 1, 32, 0, *[None] * 5, False, False, ["list", []]]
    )
    facts: bytes | None = None
    parts: bytes | None = None
    toolchain: list[Any] = field(default_factory=lambda: [None, None, None])

    def file(self, suffix: str) -> File:
        """Return the file with this ending."""
        return next(file for file in self.files if file.name.endswith(suffix))


@dataclass
class Draft:
    """A bundle made from scratch.  `edits` change the content document, `container` the sections,
    at the end.
    """

    kernels: list[DraftKernel] = field(default_factory=list)
    tuning: list[tuple[str, File]] = field(default_factory=list)
    helpers: list[tuple[str, File]] = field(default_factory=list)
    opaque: list[tuple[str, File]] = field(default_factory=list)
    records: list[Any] = field(default_factory=list)
    observed: list[Any] = field(default_factory=lambda: [1, [], []])
    edits: list[Callable[[list[Any]], Any]] = field(default_factory=list)
    # The content is made in rows, edited, and put into tables; what follows edits these.
    table_edits: list[Callable[[list[Any]], Any]] = field(default_factory=list)
    container: list[Callable[[Parts], Any]] = field(default_factory=list)

    def parts(self) -> Parts:
        """Return the container with its edits made."""
        others = [f for k in self.kernels for f in k.files]
        launch = [f for f in others if f.name.endswith(("json", "cubin"))]
        others += [f for _, f in self.tuning + self.helpers + self.opaque]
        placed: dict[bytes, bytes] = {}
        groups: list[tuple[int, list[bytes]]] = []
        for kind, files in ((LAUNCH, launch), (IR, others)):
            named = dict.fromkeys(sha256(f.data) for f in files)
            groups.append((kind, [raw for raw in named if raw not in placed]))
            placed.update((sha256(f.data), f.data) for f in files)
        table = sorted(placed)
        index = {raw: position for position, raw in enumerate(table)}
        document = self._document(table, placed, index)
        for edit in self.edits:
            edit(document)
        sections = [
            Part.of(kind, b"".join(placed[raw] for raw in group), [index[raw] for raw in group])
            for kind, group in groups
            if group
        ]
        document = to_tables(document)
        for edit in self.table_edits:
            edit(document)
        parts = Parts(
            [*sections, Part.of(CONTENT, pack(document)), Part.of(OBSERVED, pack(self.observed))]
        )
        for change in self.container:
            change(parts)
        return parts

    def join(self) -> bytes:
        """Return the bundle's bytes."""
        return self.parts().join()

    def _document(
        self, table: list[bytes], placed: dict[bytes, bytes], index: dict[bytes, int]
    ) -> list[Any]:
        def one(f: File) -> list[Any]:
            return [f.name, index[sha256(f.data)], f.spans]

        kernels = [
            [k.key, k.name, k.target, [*map(one, k.files)], k.spec, k.facts, k.parts, k.toolchain]
            for k in self.kernels
        ]
        return [
            SCHEMA,
            [[raw, len(placed[raw])] for raw in table],
            kernels,
            [[path, one(f)] for path, f in self.tuning],
            [[path, one(f), "x86_64"] for path, f in self.helpers],
            [[path, one(f)] for path, f in self.opaque],
            self.records,
        ]


def key_of(digest: bytes) -> str:
    """Return the kernel key that Triton makes of a hash."""
    return base64.b32encode(digest).decode().rstrip("=")


def metadata(seed: str, **fields: Any) -> dict[str, Any]:
    """Return a metadata document that belongs to the key of this seed."""
    target = {"backend": "cuda", "arch": 90, "warp_size": 32}
    own = {"hash": sha256(seed.encode()).hex(), "name": "k", "num_warps": 4, "shared": 0}
    return {**own, "target": target, **fields}


def kernel(
    seed: str = "one", document: bytes | None = None, binary: bytes | None = None
) -> DraftKernel:
    """Return a kernel that can be restored unless its metadata or binary says otherwise."""
    files = [
        File("k.ttir", f'tt.func @k loc("a.py":1:1) // {seed}\n'.encode() * 3),
        File("k.cubin", b"\x7fELF\x01" + noise(seed, 40) if binary is None else binary),
        File("k.json", json.dumps(metadata(seed)).encode() if document is None else document),
    ]
    return DraftKernel(key_of(sha256(seed.encode())), "k", files)


def draft() -> Draft:
    """Return a sound draft: two kernels, one with path sentinels, and a tuning file."""
    stored = json.dumps(metadata("two", path="[[cache_dir]]/x", lib="[[triton_dir]]/l.bc")).encode()
    second = kernel("two", stored)
    spans = [stored.index(b"[[cache"), 0, 0, stored.index(b"[[triton"), 1, 0]
    second.file("json").spans = spans
    tuning = [
        (f"{key_of(sha256(b'tuned'))}/k.autotune.json", File("k.autotune.json", b'{"key": []}'))
    ]
    return Draft([kernel(), second], tuning)


def nested(depth: int) -> bytes:
    """Return msgpack of so many arrays, each in the one before."""
    return b"\x91" * depth + b"\xc0"


def to_tables(document: list[Any]) -> list[Any]:
    """Return the content of these rows; what is too wrong for that stays as it is."""
    try:
        return _to_tables(document)
    except (TypeError, ValueError, LookupError, AttributeError, msgpack.UnpackException):
        return document


def _to_tables(document: list[Any]) -> list[Any]:
    schema, blobs, kernels, tuning, helpers, opaque, records, *more = document
    names, targets, toolchains, specs, lists, pieces = (_Numbers() for _ in range(6))
    rows = []
    for key, name, target, files, spec, facts, parts, toolchain, *further in kernels:
        starred = [
            "*" + item[len(name) :] if name and item.startswith(name) else item
            for item, *_ in files
        ]
        spans = [_with_position(position, file[2]) for position, file in enumerate(files)]
        references = [
            [file[1] for file in files],
            [*chain.from_iterable(spans)],
            pieces.runs(facts),
            pieces.runs(parts),
        ]
        own = [None, *spec[1:]] if spec and spec[0] == name else spec
        numbers = [names[name], targets[target], toolchains[toolchain], specs[own], lists[starred]]
        rows.append([key, *numbers, references, *further])

    def placed(entries: list[Any]) -> list[Any]:
        return [[path, file[1], file[2], *rest] for path, file, *rest in entries]

    tables = [table.items for table in (names, targets, toolchains, specs, lists, pieces)]
    return [
        schema,
        b"".join(digest for digest, *_ in blobs),
        [size for _, size, *_ in blobs],
        *tables,
        rows,
        placed(tuning),
        placed(helpers),
        placed(opaque),
        records,
        *more,
    ]


def to_rows(document: list[Any]) -> list[Any]:
    """Return the rows of a sound content."""
    schema, digests, sizes, names, targets, toolchains, specs, lists, pieces = document[
        : Table.KERNELS
    ]
    rows, *placed, records = document[Table.KERNELS :]

    def join(runs: list[int] | None) -> bytes | None:
        if runs is None:
            return None
        return b"".join(
            b"".join(pieces[at : at + number])
            for at, number in zip(runs[::2], runs[1::2], strict=True)
        )

    kernels = []
    for key, name, target, toolchain, spec, file_list, (blobs, spans, facts, parts) in rows:
        label, documents = names[name], (join(facts), join(parts))
        files = [
            [item.replace("*", label), blob, []]
            for item, blob in zip(lists[file_list], blobs, strict=True)
        ]
        for start in range(0, len(spans), 4):
            files[spans[start]][2] += spans[start + 1 : start + 4]
        own = [label if specs[spec][0] is None else specs[spec][0], *specs[spec][1:]]
        kernels.append([key, label, targets[target], files, own, *documents, toolchains[toolchain]])
    entries = [
        [[path, [path.rpartition("/")[2], blob, spans], *rest] for path, blob, spans, *rest in part]
        for part in placed
    ]
    blob_table = [[digests[32 * number :][:32], size] for number, size in enumerate(sizes)]
    return [schema, blob_table, kernels, *entries, records]


def blob_table(document: list[Any]) -> list[tuple[bytes, int]]:
    """Return digest and size of each blob of a content."""
    return [
        (document[1][32 * number :][:32], size) for number, size in enumerate(document[Table.SIZES])
    ]


def _with_position(position: int, spans: Any) -> list[Any]:
    return [
        number
        for start in range(0, len(spans), 3)
        for number in (position, *spans[start : start + 3])
    ]


class _Numbers:
    """A table in the making: equal items have one number."""

    def __init__(self) -> None:
        self.items: list[Any] = []
        self._known: dict[bytes, int] = {}

    def __getitem__(self, item: Any) -> int:
        packed = msgpack.packb(item, unicode_errors="surrogatepass")
        if packed not in self._known:
            self._known[packed] = len(self.items)
            self.items.append(item)
        return self._known[packed]

    def runs(self, document: bytes | None) -> list[int] | None:
        """Cut a document, and return the runs of its pieces."""
        if document is None:
            return None
        numbers = [self[piece] for piece in _cut(document)]
        begins = [
            at for at, number in enumerate(numbers) if not at or number != numbers[at - 1] + 1
        ]
        return [
            *chain.from_iterable(
                (numbers[at], end - at) for at, end in pairwise([*begins, len(numbers)])
            )
        ]


def _cut(document: bytes) -> list[bytes]:
    starts = [0]
    for number, (start, end) in enumerate(_members(document)):
        starts += [start] if number else []
        starts += [start + inner for inner, _ in _members(document[start:end])[1:]]
    return [document[start:end] for start, end in pairwise([*starts, len(document)])]


def _members(document: bytes) -> list[tuple[int, int]]:
    """Return where each member of an array begins and ends."""
    unpacker = msgpack.Unpacker()
    unpacker.feed(document)
    try:
        count, places = unpacker.read_array_header(), []
        for _ in range(count if len(document) <= MAX_CUT_BYTES else 0):
            start = unpacker.tell()
            unpacker.skip()
            places.append((start, unpacker.tell()))
    except (ValueError, msgpack.UnpackException, RecursionError):
        return []
    return places if places and places[-1][1] == len(document) else []

# SPDX-License-Identifier: Apache-2.0
"""A reader of `.tbundle` 1.x written from docs/format.md alone; it shares no code with the package."""

import hashlib
import json
import struct

import msgpack
import zstandard

PLACEHOLDERS = (b"[[cache_dir]]", b"[[triton_dir]]")


def sha256(data):
    return hashlib.sha256(data).digest()


def parse_table(data):
    magic, major, _, incompatible, _, _, offset, size = struct.unpack_from("<8sHHIIIQQ", data)
    assert magic == b"\x89TBNDL\r\n", "not a bundle"
    assert (major, incompatible) == (1, 0), "a version or flag that this reader does not know"
    assert 72 <= offset == len(data) - size, "truncated, or bytes after the end"
    table = data[offset:]
    assert sha256(data[:40] + table) == data[40:72], "damaged header or table"
    sections, end = [], 72
    for kind, codec, start, stored, raw, digest, blobs, prefix, *_ in msgpack.unpackb(table):
        assert start == end, "a hole or overlap"
        sections.append((kind, codec, data[start : start + stored], raw, digest, blobs, prefix))
        end = start + stored
    assert end == offset
    return sections


def decode(sections, position):
    _, codec, stored, raw, digest, _, prefix = sections[position]
    assert sha256(stored) == digest, "damaged section"
    if codec == 0:
        return stored
    frame = zstandard.get_frame_parameters(stored)
    assert (codec, frame.content_size, frame.has_checksum, raw <= 64 << 20) == (1, raw, True, True)
    shared = b"".join(decode(sections, earlier) for earlier in prefix)
    dictionary = zstandard.ZstdCompressionDict(shared, dict_type=zstandard.DICT_TYPE_RAWCONTENT) if prefix else None
    return zstandard.ZstdDecompressor(dict_data=dictionary).decompress(stored, allow_extra_data=False)


def restore(data, spans, paths):
    out, done = [], 0
    for offset, place, style in zip(spans[::3], spans[1::3], spans[2::3], strict=True):
        assert data[offset : offset + len(PLACEHOLDERS[place])] == PLACEHOLDERS[place]
        text = json.dumps(paths[place], ensure_ascii=not style & 1)[1:-1]
        out += [data[done:offset], (text.replace("/", r"\/") if style & 2 else text).encode()]
        done = offset + len(PLACEHOLDERS[place])
    return b"".join([*out, data[done:]])


def read(data, paths=("/cache", "/triton")):
    """Return the bundle's digest and {path: (stored bytes, bytes to restore)}; a kernel's file has the path KEY/NAME."""
    sections = parse_table(data)
    raw = [decode(sections, position) for position in range(len(sections))]
    content = next(raw[position] for position, section in enumerate(sections) if section[0] == 16)
    _, table, kernels, tuning, helpers, opaque, *_ = msgpack.unpackb(content)
    blobs = {}
    for (kind, *_, indices, _), data in zip(sections, raw, strict=True):
        start = 0
        for index in indices if kind <= 5 else ():
            digest, size = table[index][:2]
            assert index not in blobs, "stored twice"
            blobs[index] = data[start : start + size]
            assert sha256(blobs[index]) == digest
            start += size
        assert kind > 5 or start == len(data)
    assert len(blobs) == len(table)
    files = [(f"{kernel[0]}/{file[0]}", file) for kernel in kernels for file in kernel[3]]
    files += [(entry[0], entry[1]) for entry in (*tuning, *helpers, *opaque)]
    read = {path: (blobs[file[1]], restore(blobs[file[1]], file[2], paths)) for path, file in files}
    return f"sha256:{sha256(content).hex()}", read

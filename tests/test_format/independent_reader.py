# SPDX-License-Identifier: Apache-2.0
"""A reader of `.tbundle` 2.x written from docs/format.md alone; it shares no code with the
package.
"""

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
    assert (major, incompatible) == (2, 0), "a version or flag that this reader does not know"
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
    dictionary = (
        zstandard.ZstdCompressionDict(shared, dict_type=zstandard.DICT_TYPE_RAWCONTENT)
        if prefix
        else None
    )
    return zstandard.ZstdDecompressor(dict_data=dictionary).decompress(
        stored, allow_extra_data=False
    )


def restore(data, spans, paths):
    out, done = [], 0
    for offset, place, style in zip(spans[::3], spans[1::3], spans[2::3], strict=True):
        assert data[offset : offset + len(PLACEHOLDERS[place])] == PLACEHOLDERS[place]
        text = json.dumps(paths[place], ensure_ascii=not style & 1)[1:-1]
        out += [data[done:offset], (text.replace("/", r"\/") if style & 2 else text).encode()]
        done = offset + len(PLACEHOLDERS[place])
    return b"".join([*out, data[done:]])


def raw_sections(data):
    sections = parse_table(data)
    return sections, [decode(sections, position) for position in range(len(sections))]


def content_of(sections, raw):
    content = next(raw[position] for position, section in enumerate(sections) if section[0] == 16)
    return content, msgpack.unpackb(content)


def tables(document):
    """Return the blob table and (path, blob, spans) of every file of a content."""
    _, digests, sizes, names, _, _, _, file_lists, _, kernels, *placed, _ = document
    files = []
    for key, name, _, _, _, file_list, (blobs, spans, *_), *_ in kernels:
        marked = list(zip(*(spans[n::4] for n in range(4)), strict=True))
        for position, (item, blob) in enumerate(zip(file_lists[file_list], blobs, strict=True)):
            filename = names[name] + item[1:] if item[:1] == "*" else item
            files.append(
                (
                    f"{key}/{filename}",
                    blob,
                    [n for at, *span in marked if at == position for n in span],
                )
            )
    table = [(digests[32 * n : 32 * n + 32], size) for n, size in enumerate(sizes)]
    return table, files + [tuple(entry[:3]) for entries in placed for entry in entries]


def documents(data):
    """Return {kernel key: (launch facts, key parts)}, encoded, None where there are none."""
    _, document = content_of(*raw_sections(data))

    def join(runs):
        spots = zip(runs[::2], runs[1::2], strict=True) if runs is not None else ()
        return (
            None
            if runs is None
            else b"".join(document[8][n] for at, many in spots for n in range(at, at + many))
        )

    return {kernel[0]: tuple(map(join, kernel[6][2:4])) for kernel in document[9]}


def read(data, paths=("/cache", "/triton")):
    """Return the bundle's digest and {path: (stored bytes, bytes to restore)}; a kernel's file has
    the path KEY/NAME.
    """
    sections, raw = raw_sections(data)
    content, document = content_of(sections, raw)
    table, files = tables(document)
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
    read = {path: (blobs[blob], restore(blobs[blob], spans, paths)) for path, blob, spans in files}
    return f"sha256:{sha256(content).hex()}", read

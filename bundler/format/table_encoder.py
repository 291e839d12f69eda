# SPDX-License-Identifier: Apache-2.0
"""Writes content: numbers what kernels have in common, and puts each such thing into its table
once.

`Content.encode` calls `encode_tables`; `content_tables` reads what it wrote, and
have the types of the records.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

from msgspec import Raw

from bundler.format import wire
from bundler.format.content_tables import NAME, SCHEMA, Numbers, PieceWriter
from bundler.format.digest import digest_raw
from bundler.format.entries import HelperLibrary, Kernel, Opaque, StoredFile, TuningFile, entry_kind
from bundler.format.entry_rows import Entries, check_path
from bundler.format.sentinel import Span


def encode_tables(entries: Entries) -> bytes:
    """Return the canonical bytes of entries that are in canonical order; raises `FormatError` for
    what cannot be stored.
    """
    blobs = [*entries.blobs]
    index = {raw: position for position, (raw, _) in enumerate(blobs)}
    kernel_names, targets, toolchains, specs, file_lists = (Numbers() for _ in range(5))
    pieces = PieceWriter()

    def kernel(k: Kernel) -> Raw:
        files = [*k.files()]
        row = [
            k.key,
            kernel_names[k.name],
            targets[k.target.backend, k.target.arch, k.target.warp_size],
            toolchains[k.toolchain.release, k.toolchain.binary, k.toolchain.ptxas],
            specs[_packed_spec(k)],
            file_lists[_without_name(tuple([name for name, *_ in files]), k.name)],
            [
                [index[raw] for _, raw, _, _ in files],
                _file_spans(files),
                pieces.runs(k.facts_bytes),
                pieces.runs(k.parts_bytes),
            ],
        ]
        # Encoded at once: a hundred thousand nested lists keep the garbage collector busy for many
        # seconds.
        return Raw(wire.encode(row))

    def placed(entry: TuningFile | HelperLibrary | Opaque, *more: str) -> list[Any]:
        artifact = entry.artifact
        check_path(entry.path, artifact, entry_kind(entry))
        spans = [number for span in artifact.spans for number in _flat(span)]
        return [entry.path, index[digest_raw(artifact.digest)], spans, *more]

    rows = [kernel(k) for k in entries.kernels]
    return wire.encode(
        [
            SCHEMA,
            b"".join([raw for raw, _ in blobs]),
            [size for _, size in blobs],
            list(kernel_names),
            list(targets),
            list(toolchains),
            list(map(Raw, specs)),
            list(file_lists),
            pieces.table,
            rows,
            list(map(placed, entries.tuning_files)),
            [placed(e, e.machine) for e in entries.helpers],
            list(map(placed, entries.opaque)),
            [record.to_wire() for record in entries.tuning_records],
        ]
    )


def _packed_spec(kernel: Kernel) -> bytes:
    entry, *rest = kernel.spec.to_wire()
    return wire.encode([None if entry == kernel.name else entry, *rest])


@functools.lru_cache(maxsize=4096)
def _without_name(filenames: tuple[str, ...], name: str) -> tuple[str, ...]:
    return tuple(
        [NAME + each[len(name) :] if name and each.startswith(name) else each for each in filenames]
    )


def _file_spans(files: Iterable[StoredFile]) -> list[int]:
    """Return the path sentinels of all files, each after the position of its file."""
    return [
        number
        for position, (_, _, _, spans) in enumerate(files)
        for span in spans
        for number in (position, *_flat(span))
    ]


def _flat(span: Span) -> tuple[int, int, int]:
    return span.offset, span.place, span.style

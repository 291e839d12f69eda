# SPDX-License-Identifier: Apache-2.0
"""Writes content: numbers what kernels have in common, and puts each such thing into its table
once; launch facts and key parts are cut into pieces, of which kernels share most.

`Content.encode` calls `encode_tables`; `content_tables` reads what it wrote, and has the types of
the records.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Raw

if TYPE_CHECKING:
    from bundler.format.launch_spec import TuningRecord

from bundler.errors import FormatError
from bundler.format import names, wire
from bundler.format.content_tables import SCHEMA
from bundler.format.digest import digest_raw
from bundler.format.entries import (
    Artifact,
    HelperLibrary,
    Kernel,
    Opaque,
    StoredFile,
    TuningFile,
    entry_kind,
)
from bundler.format.lazy_kernel import NAME, SMALL_RUN_BYTES
from bundler.format.sentinel import Span

# Launch facts of one kernel are a kilobyte, key parts two; what is larger than this is one piece.
MAX_CUT_BYTES = 1 << 16
# Of documents whose runs a writer knows.
_REMEMBERED_BYTES = 4 << 20
_MEMBERS = msgspec.msgpack.Decoder(list[Raw])


def cut(document: bytes) -> list[bytes]:
    """Return the pieces of a document, which joined are the document.

    An array is cut before each of its members but the first, and each of its members that is an
    array is cut likewise, but not deeper.  What is no array, or larger than `MAX_CUT_BYTES`, is one
    piece.
    """
    members = _members(document) if len(document) <= MAX_CUT_BYTES else []
    if not members:
        return [document]
    pieces: list[bytes] = []
    for member in members:
        pieces += _remembered(member) if len(member) <= SMALL_RUN_BYTES else _cut_once(member)
    pieces[0] = document[: len(document) - sum(map(len, members))] + pieces[0]
    return pieces


def _cut_once(member: bytes) -> list[bytes]:
    pieces = _members(member)
    if not pieces:
        return [member]
    pieces[0] = member[: len(member) - sum(map(len, pieces))] + pieces[0]
    return pieces


# Kernels share most members: arguments, options.
_remembered = functools.lru_cache(maxsize=1024)(_cut_once)


def _members(document: bytes) -> list[bytes]:
    """Return the members of an array; none where it is no array, or not msgpack."""
    # The decoder allocates what an array declares; each member takes a byte at least.
    if not document or wire.array_length(document) > len(document):
        return []
    try:
        return [*map(bytes, _MEMBERS.decode(document))]
    except wire.MSGSPEC_ERRORS:
        return []


class Numbers(dict[Any, int]):
    """Numbers what it is asked for, in the order in which it is asked first."""

    def __missing__(self, item: Any) -> int:
        number = self[item] = len(self)
        return number


class PieceWriter:
    """Collects pieces; each occurs once in `table`."""

    def __init__(self) -> None:
        self._numbers = Numbers()
        # Kernels that differ in nothing but their code have equal documents.
        self._known: dict[bytes, list[int]] = {}
        self._known_bytes = 0

    @property
    def table(self) -> list[bytes]:
        """The pieces, in the order in which they first occurred."""
        return list(self._numbers)

    def runs(self, document: bytes | None) -> list[int] | None:
        """Take the pieces of a document and return its runs, two numbers each."""
        if document is None:
            return None
        found = self._known.get(document)
        if found is None:
            found = self._runs(document)
            self._remember(document, found)
        return found

    def _runs(self, document: bytes) -> list[int]:
        numbers = [*map(self._numbers.__getitem__, cut(document))]
        steps = map(operator.sub, numbers[1:], numbers)
        begins = [0, *[at for at, step in enumerate(steps, 1) if step != 1]]
        return [
            *chain.from_iterable(
                (numbers[at], end - at) for at, end in pairwise([*begins, len(numbers)])
            )
        ]

    def _remember(self, document: bytes, runs: list[int]) -> None:
        self._known_bytes += len(document)
        if self._known_bytes > _REMEMBERED_BYTES:
            # As when nothing was remembered yet: where documents repeat, they come again soon.
            self._known.clear()
            self._known_bytes = len(document)
        self._known[document] = runs


def encode_tables(
    kernels: Iterable[Kernel],
    tuning_files: Iterable[TuningFile],
    helpers: Iterable[HelperLibrary],
    opaque: Iterable[Opaque],
    tuning_records: Iterable[TuningRecord],
    blobs: Iterable[tuple[bytes, int]],
) -> bytes:
    """Return the canonical bytes of entries in canonical order; raises `FormatError` for
    what cannot be stored.
    """
    blobs = [*blobs]
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
        return Raw(wire.pack(row))

    def placed(entry: TuningFile | HelperLibrary | Opaque, *more: str) -> list[Any]:
        artifact = entry.artifact
        _check_path(entry.path, artifact, entry_kind(entry))
        spans = [number for span in artifact.spans for number in _flat(span)]
        return [entry.path, index[digest_raw(artifact.digest)], spans, *more]

    rows = [kernel(k) for k in kernels]
    return wire.pack(
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
            list(map(placed, tuning_files)),
            [placed(e, e.machine) for e in helpers],
            list(map(placed, opaque)),
            [record.to_wire() for record in tuning_records],
        ]
    )


def _packed_spec(kernel: Kernel) -> bytes:
    entry, *rest = kernel.spec.to_wire()
    return wire.pack([None if entry == kernel.name else entry, *rest])


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


def _check_path(path: str, artifact: Artifact, what: str) -> None:
    """Raise `UnsafeName` or `FormatError` unless a path is safe and ends in its file's name."""
    if names.check_relative_path(path).rpartition("/")[2] != artifact.filename:
        raise FormatError(f"{what}: path {path!r} and file name {artifact.filename!r} differ")

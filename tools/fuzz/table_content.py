# SPDX-License-Identifier: Apache-2.0
"""Content for the fuzzer: `to_rows` takes it out of its tables, and `to_tables` puts it there
again.

In *rows* each kernel says everything about itself, which is easily made and changed.  `attacks` are
those on the tables themselves.

Written from docs/format.md, without the package's encoder, which refuses most of what is wanted
here.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Any

import msgpack

if TYPE_CHECKING:
    from tools.fuzz.container import Draft

SCHEMA = 2
MAX_CUT_BYTES = 1 << 16
SIZES, NAMES, TARGETS, TOOLCHAINS, SPECS, LISTS, PIECES, KERNELS, TUNING, HELPERS, OPAQUE = range(
    2, 13
)
# Numbers of a kernel, its references, and what of these counts pieces.
_NUMBERS, _REFERENCES, _FACTS, _PARTS = range(1, 6), 6, 2, 3


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
            [
                "*" + item[len(name) :] if name and item.startswith(name) else item
                for item, *_ in files
            ]
        ]
        spans = [_with_position(position, file[2]) for position, file in enumerate(files)]
        references = [
            [file[1] for file in files],
            [*chain.from_iterable(spans)],
            pieces.runs(facts),
            pieces.runs(parts),
        ]
        own = [None, *spec[1:]] if spec and spec[0] == name else spec
        rows.append(
            [
                key,
                names[name],
                targets[target],
                toolchains[toolchain],
                specs[own],
                lists[starred[0]],
                references,
                *further,
            ]
        )

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
    schema, digests, sizes, names, targets, toolchains, specs, lists, pieces = document[:KERNELS]
    rows, *placed, records = document[KERNELS:]

    def join(runs: list[int] | None) -> bytes | None:
        if runs is None:
            return None
        return b"".join(
            b"".join(pieces[at : at + number])
            for at, number in zip(runs[::2], runs[1::2], strict=True)
        )

    kernels = []
    for key, name, target, toolchain, spec, file_list, (blobs, spans, facts, parts) in rows:
        files = [
            [item.replace("*", names[name]), blob, []]
            for item, blob in zip(lists[file_list], blobs, strict=True)
        ]
        for start in range(0, len(spans), 4):
            files[spans[start]][2] += spans[start + 1 : start + 4]
        own = [names[name] if specs[spec][0] is None else specs[spec][0], *specs[spec][1:]]
        kernels.append(
            [
                key,
                names[name],
                targets[target],
                files,
                own,
                join(facts),
                join(parts),
                toolchains[toolchain],
            ]
        )
    entries = [
        [[path, [path.rpartition("/")[2], blob, spans], *rest] for path, blob, spans, *rest in part]
        for part in placed
    ]
    blob_table = [[digests[32 * number :][:32], size] for number, size in enumerate(sizes)]
    return [schema, blob_table, kernels, *entries, records]


def blob_table(document: list[Any]) -> list[tuple[bytes, int]]:
    """Return digest and size of each blob of a content."""
    return [(document[1][32 * number :][:32], size) for number, size in enumerate(document[SIZES])]


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


Change = Callable[[list[Any]], Any]
# What takes least bytes for its memory, and the fields that may be long.
_UNITS = {"nils": b"\xc0", "texts": b"\xa2ab", "ones": b"\x91\xc0"}
_LONG = (NAMES, LISTS, PIECES, KERNELS, OPAQUE, 13)


def attacks() -> Iterator[tuple[str, Callable[[Draft], Any], bool]]:
    """Yield name, change of a draft and whether it takes seconds, of each attack on the tables of a
    content.
    """
    for name, change in chain(_numbers(), _runs(), _wrong_tables()):
        yield f"table/{name}", _edited(change), False
    for field in range(1, 14):
        yield f"huge/table-{field}", _raw(field, b"\xdd\xff\xff\xff\xff"), False
        for label, unit in _UNITS.items():
            for size in (900_000, *([60_000_000] if field in _LONG else [])):
                yield f"dense/{field}-{label}-{size}", _dense(field, unit, size // len(unit)), True


def _numbers() -> Iterator[tuple[str, Change]]:
    for position in _NUMBERS:
        for label, number in (("next", 9), ("largest", 2**64 - 1), ("negative", -1), ("text", "0")):
            yield f"number-{position}-{label}", _set(position, number)
    for label, blobs in (
        ("none", []),
        ("more", [0] * 9),
        ("beyond", [0, 1, 99]),
        ("many", [0] * 70_000),
        ("negative", [-1, 0, 1]),
    ):
        yield f"blobs-{label}", _refer(0, blobs)
    for label, spans in (
        ("three", [0, 0, 0]),
        ("beyond", [9, 0, 0, 0]),
        ("negative", [-1, 0, 0, 0]),
        ("turned", [2, 0, 0, 0, 1, 0, 0, 0]),
        ("many", [2, 0, 0, 0] * 5000),
        ("largest", [2**64 - 1] * 4),
        ("too-many", [2, 0, 0, 0] * 70_000),
    ):
        yield f"spans-{label}", _refer(1, spans)


def _runs() -> Iterator[tuple[str, Change]]:
    large, small = b"x" * (1 << 20), b"y" * 1000
    for label, table, runs in (
        ("odd", [b"a"], [0]),
        ("none", [b"a"], [0, 0]),
        ("beyond", [b"a"], [0, 2]),
        ("far", [b"a"], [2**63, 1]),
        ("wrap", [b"a"], [2**64 - 1, 2]),
        ("later", [b"a", b"b"], [1, 1]),
        ("unused", [b"a", b"b"], [0, 1]),
        ("twice", [b"a", b"a"], [0, 2]),
        ("negative", [b"a"], [-1, 1]),
        ("text", [b"a"], ["0", 1]),
        ("empty", [b""], [0, 1]),
        ("large", [large, b"a"], [0, 2]),
        ("repeated", [small], [0, 1] * 1100),
        ("most", [large], [0, 1]),
    ):
        yield f"runs-{label}", _put_runs(table, runs)


def _set(position: int, number: Any) -> Change:
    return lambda document: document[KERNELS][0].__setitem__(position, number)


def _refer(position: int, numbers: list[Any]) -> Change:
    return lambda document: document[KERNELS][0][_REFERENCES].__setitem__(position, numbers)


def _in_table(table: int, change: Callable[[list[Any]], Any]) -> Change:
    return lambda document: change(document[table])


def _first_name(lists: list[Any], name: str) -> None:
    lists[0][0] = name


def _put_runs(table: list[Any], runs: list[Any]) -> Change:
    def change(document: list[Any]) -> None:
        document[PIECES] = table
        for kernel in document[KERNELS]:
            kernel[_REFERENCES][_FACTS] = runs
            kernel[_REFERENCES][_PARTS] = None

    return change


def _wrong_tables() -> Iterator[tuple[str, Change]]:
    for table in (NAMES, TARGETS, TOOLCHAINS, SPECS, LISTS):
        yield f"repeated-{table}", _in_table(table, lambda rows: rows.append(rows[0]))
        yield f"turned-{table}", _in_table(table, list.reverse)
        yield f"empty-{table}", _in_table(table, list.clear)
    yield "unused-name", lambda doc: doc[NAMES].append("nobody")
    yield (
        "unused-blob",
        lambda doc: (doc.__setitem__(1, doc[1] + b"\xff" * 32), doc[SIZES].append(1)),
    )
    yield "digest-short", lambda doc: doc.__setitem__(1, doc[1][:-1])
    yield (
        "digests-turned",
        lambda doc: doc.__setitem__(1, doc[1][32:64] + doc[1][:32] + doc[1][64:]),
    )
    yield "sizes-more", lambda doc: doc[SIZES].append(0)
    for label, item in (
        ("star", "*"),
        ("stars", "**"),
        ("inside", "k*.json"),
        ("absolute", "/*"),
        ("up", "../*"),
        ("empty", ""),
        ("dots", "*.."),
    ):
        yield f"list-{label}", _in_table(LISTS, partial(_first_name, name=item))
    yield "list-long", lambda doc: doc[LISTS][0].extend(f"*.{n}" for n in range(70))
    yield "list-large", lambda doc: doc[LISTS].append(["x" * 200] * 30_000)
    yield "name-up", lambda doc: doc[NAMES].__setitem__(0, "../k")
    yield "name-empty", lambda doc: doc[NAMES].__setitem__(0, "")
    yield "name-long", lambda doc: doc[NAMES].__setitem__(0, "k" * 4000)
    yield "name-group", lambda doc: doc[NAMES].__setitem__(0, "__grp__k")
    yield "name-star", lambda doc: doc[NAMES].__setitem__(0, "*")


def _edited(change: Change) -> Callable[[Draft], Any]:
    return lambda made: made.table_edits.append(change)


def _dense(field: int, unit: bytes, count: int) -> Callable[[Draft], Any]:
    def change(made: Draft) -> None:  # the bytes are made here: all attacks are listed at once
        _raw(field, b"\xdd" + struct.pack(">I", count) + unit * count)(made)

    return change


def _raw(field: int, packed: bytes) -> Callable[[Draft], Any]:
    """Return a change that puts these bytes in the place of a field, as they are."""

    def change(made: Draft) -> None:
        made.container.append(lambda parts: parts.put_field(field, packed))

    return change

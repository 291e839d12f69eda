# SPDX-License-Identifier: Apache-2.0
"""Cuts launch facts and key parts into pieces, of which kernels share most, and puts them together
again.

`content_tables` keeps each piece once, numbered in the order in which the pieces first occur.  A
document is then a list of runs: the number of a piece, and how many pieces follow each other from
there.
"""

from __future__ import annotations

import functools
import operator
from array import array
from collections.abc import Iterator, Sequence
from itertools import accumulate, chain, pairwise
from typing import Any

import msgspec
from msgspec import Raw

from bundler.errors import FormatError
from bundler.format import wire
from bundler.format.limits import Limits

# Launch facts of one kernel are a kilobyte, key parts two; what is larger than this is one piece.
MAX_CUT_BYTES = 1 << 16
_SMALL_BYTES = 2048
_RUNS_REMEMBERED = 4096
# Of documents whose runs a writer knows.
_REMEMBERED_BYTES = 4 << 20
_RUNS_JOINED = 1024
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
        pieces += _remembered(member) if len(member) <= _SMALL_BYTES else _cut_once(member)
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


class Pieces:
    """The pieces of a manifest.

    Args:
        table: the pieces.
        limits: bounds for one document and for all together.
    """

    def __init__(self, table: Sequence[bytes], limits: Limits) -> None:
        self._table, self._limits = table, limits
        self._ends = array("Q", accumulate(map(len, table), initial=0))
        self._seen = self._joined_bytes = 0
        # Many kernels have the same launch facts.
        self._sizes: dict[tuple[int, ...], int] = {}
        self._joined_runs: dict[tuple[int, int], bytes] = {}
        self._held: dict[bytes, bool] = {}

    def take(self, documents: Sequence[tuple[int, ...]]) -> bool:
        """Check the runs of the next documents at once.

        Returns:
            False when one may be wrong, and then none of them was taken: `check`, for one after the
            other, tells.
        """
        known = [*map(self._sizes.get, documents)]
        new = [runs for runs, size in zip(documents, known, strict=True) if size is None]
        measured = self._measured(new)
        if measured is None:
            return False
        sizes, seen = measured
        joined_bytes = self._joined_bytes + sum(filter(None, known)) + sum(sizes)
        if (
            max(sizes, default=0) > self._limits.facts_bytes
            or joined_bytes > self._limits.all_facts_bytes
        ):
            return False
        self._seen, self._joined_bytes = seen, joined_bytes
        if len(self._sizes) < _RUNS_REMEMBERED:
            self._sizes.update(zip(new, sizes, strict=True))
        return True

    def _measured(self, documents: Sequence[tuple[int, ...]]) -> tuple[list[int], int] | None:
        """Return the sizes of documents, and how many pieces were named after them; None where one
        may be wrong.
        """
        lengths = [*map(len, documents)]
        if any(length % 2 for length in lengths):
            return None
        try:
            numbers = array("I", [*chain.from_iterable(documents)])
        except OverflowError:
            return None
        # Each run as one number: kernels share most of their runs, and what is asked of a run is
        # asked once.
        runs = array("Q", numbers.tobytes()).tolist()
        sizes = dict.fromkeys(runs, 0)
        numbers = array("I", array("Q", sizes).tobytes())
        seen, last, ends = self._seen, len(self._table), self._ends
        for run, first, number in zip(sizes, numbers[::2], numbers[1::2], strict=True):
            end = first + number
            if end > seen:
                if end > last or first > seen:
                    return None
                seen = end
            if not number:
                return None
            sizes[run] = ends[end] - ends[first]
        before = [*accumulate(map(sizes.__getitem__, runs), initial=0)]
        bounds = [end // 2 for end in accumulate(lengths, initial=0)]
        return [before[end] - before[begin] for begin, end in pairwise(bounds)], seen

    def check(self, runs: tuple[int, ...] | None, key: str) -> None:
        """Check the runs of the next document, which is one of this kernel.

        Raises:
            FormatError: they are no runs of the table, or name a piece before those that precede it
                in the table.
            LimitExceeded: this document, or all together, would be too large.
        """
        if runs is None:
            return
        size = self._sizes.get(runs)
        if size is None:
            size = self._size(runs, key)
            if len(self._sizes) < _RUNS_REMEMBERED:
                self._sizes[runs] = size
        self._joined_bytes += size
        if size > self._limits.facts_bytes:
            self._limits.check("facts_bytes", size, f"{key}: launch facts or key parts")
        if self._joined_bytes > self._limits.all_facts_bytes:
            self._limits.check(
                "all_facts_bytes", self._joined_bytes, "launch facts and key parts of all kernels"
            )

    def _size(self, runs: tuple[int, ...], key: str) -> int:
        if len(runs) % 2:
            raise FormatError(
                f"{key}: {len(runs)} numbers in runs of pieces, expected pairs", key=key
            )
        size, seen, ends = 0, self._seen, self._ends
        for first, number in _pairs(runs):
            end = first + number
            if end > seen or not number:
                if end > len(self._table) or first > seen or not number:
                    raise FormatError(
                        f"{key}: a run of {number} pieces from {first}, of {len(self._table)},"
                        f" {seen} of them named before",
                        key=key,
                    )
                seen = end
            size += ends[end] - ends[first]
        self._seen = seen
        return size

    def check_used(self) -> None:
        """Raise `FormatError` when a piece is in none of the documents that were checked, or occurs
        twice.
        """
        self._sizes.clear()
        if self._seen != len(self._table) or len(set(self._table)) != len(self._table):
            raise FormatError("content: the pieces are not those of the kernels, each once")

    def any_holds(self, text: bytes) -> bool:
        """Tell whether one of the pieces holds a text; `cut` never cuts through a member of a
        member, such as a name.
        """
        # Asked for each kernel of a restore, with the same text.
        if text not in self._held:
            self._held[text] = any(text in piece for piece in self._table)
        return self._held[text]

    def join(self, runs: Sequence[int] | None) -> bytes | None:
        """Return the document that consists of these runs."""
        if runs is None:
            return None
        known, table, numbers = self._joined_runs, self._table, iter(runs)
        return b"".join(
            [
                table[first]
                if number == 1
                else known.get((first, number)) or self._run(first, number)
                for first, number in zip(numbers, numbers, strict=True)
            ]
        )

    def _run(self, first: int, number: int) -> bytes:
        # Kernels that differ in their constants alone share the runs around these.
        found = self._joined_runs.get((first, number))
        if found is None:
            found = b"".join(self._table[first : first + number])
            if len(found) <= _SMALL_BYTES and len(self._joined_runs) < _RUNS_JOINED:
                self._joined_runs[first, number] = found
        return found


def _pairs(runs: Sequence[int]) -> Iterator[tuple[int, int]]:
    return zip(runs[::2], runs[1::2], strict=True)

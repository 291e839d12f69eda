# SPDX-License-Identifier: Apache-2.0
"""`in_less_memory`: the order of a program's launches and calls is changed where they then have
less memory at once.

Where most memory is held, some of it waits for a reader that could run before, as the shortcut of a
residual block, or was made for a reader that comes much later.  Such readers are moved before the
peak, such writers behind it, and nothing else: neighbours find in a GPU's cache what the last one
wrote.  `schedule` calls it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import sympy

from bundler.codegen.loops.combination import waits_of
from bundler.codegen.loops.fusion import LoopGroup, is_extern
from bundler.codegen.loops.loop_nodes import Buffer
from bundler.runtime.program.device_tensors import item_bytes

# Of a group, buffer that it writes -> the one whose memory that takes, where nobody reads it later.
Takes = Callable[[LoopGroup], Mapping[str, str]]

# What torch's allocator rounds sizes up to.
_BLOCK_BYTES = 512
# A program that has no more at once is left as it is, and so is one of which less than this share
# would be saved.
_SMALL_BYTES, _LEAST_SHARE = 1 << 20, 1 / 64
# So many of the largest buffers that wait at the peak are tried, in so many rounds: each try goes
# through the program once.
_MOST_TRIED, _MOST_ROUNDS = 8, 16
# What a size counts as that has no example.
_UNKNOWN_SIZE = 8192


def in_less_memory(
    groups: Sequence[LoopGroup],
    buffers: Mapping[str, Buffer],
    hints: Mapping[sympy.Symbol, int],
    kept: Collection[str],
    freed: Collection[str],
    takes: Takes,
) -> list[LoopGroup]:
    """Return the groups in an order in which they can run, that of the program where no other was
    found that has less memory at once.

    Args:
        groups: in an order in which they can run.
        buffers: of the program.
        hints: symbol of a size -> its value in the example, by which buffers are judged.
        kept: buffers that are there when the program ends.
        freed: inputs that are freed when nobody reads them any more.
        takes: which buffers need no memory of their own.
    """
    memory = _Memory(groups, buffers, hints, kept, freed, takes)
    order = [*range(len(groups))]
    first = best = memory.peak_of(order)
    if first.bytes <= _SMALL_BYTES:
        return list(groups)
    waits = waits_of(groups, buffers)
    for _ in range(_MOST_ROUNDS):
        tried = [(memory.peak_of(one), one) for one in memory.moves(order, best, waits)]
        peak, moved = min(tried, key=lambda pair: pair[0].rank, default=(best, order))
        if peak.rank >= best.rank:
            break
        best, order = peak, moved
    if first.bytes - best.bytes < first.bytes * _LEAST_SHARE:
        return list(groups)
    return [groups[number] for number in order]


class _Peak:
    """Where an order of groups has most memory.

    Attributes:
        bytes: that are held there.
        place: of the first group of the order that has so many.
        waiting: buffers that are held there, and that this group does not touch.
        rank: what is less of a better order: the bytes, then how often there are so many.
    """

    def __init__(self, live: Sequence[int], waiting: Collection[str]) -> None:
        self.bytes = max(live, default=0)
        self.place = live.index(self.bytes) if live else 0
        self.waiting = waiting
        self.rank = (self.bytes, live.count(self.bytes))


class _Memory:
    def __init__(
        self,
        groups: Sequence[LoopGroup],
        buffers: Mapping[str, Buffer],
        hints: Mapping[sympy.Symbol, int],
        kept: Collection[str],
        freed: Collection[str],
        takes: Takes,
    ) -> None:
        self._buffers, self._hints, self._kept, self._freed = buffers, hints, kept, freed
        # Of each group the memory that it touches; views that operators return have none of their
        # own.
        self._touched = [sorted({*self._memory_of(group)}) for group in groups]
        self._users: dict[str, list[int]] = {}
        for number, names in enumerate(self._touched):
            for name in names:
                self._users.setdefault(name, []).append(number)
        # What one kernel alone touches stays in its registers.
        inside = {
            name
            for name, users in self._users.items()
            if len(users) == 1 and name not in {*kept, *freed} and not is_extern(groups[users[0]])
        }
        self._size = {name: self._size_of(name) for name in self._users if name not in inside}
        self._takes = [takes(group) if self._may_take(group) else {} for group in groups]

    def _may_take(self, group: LoopGroup) -> bool:
        """Whether a kernel reads a buffer as large as one that it writes."""
        if is_extern(group) or group.parts:
            return False
        wrote = {self._size.get(name, 0) for name in group.written}
        read = {self._size.get(name, 0) for name in group.touched - group.written}
        return not wrote.isdisjoint(read - {0})

    def _memory_of(self, group: LoopGroup) -> Iterator[str]:
        rest = [*group.touched]
        while rest:
            buffer = self._buffers[rest.pop()]
            rest += buffer.bases
            is_own = buffer.source == "node" and not buffer.layout.device
            if not buffer.bases and (is_own or buffer.name in self._freed):
                yield buffer.name

    def _size_of(self, name: str) -> int:
        layout = self._buffers[name].layout
        storage = layout.storage
        sizes = {symbol: self._hints.get(symbol, _UNKNOWN_SIZE) for symbol in storage.free_symbols}
        count = int(storage.subs(sizes)) * item_bytes(layout.dtype)
        return -(-count // _BLOCK_BYTES) * _BLOCK_BYTES

    def peak_of(self, order: Sequence[int]) -> _Peak:
        """Return where groups in an order have most memory."""
        left = {name: len(self._users[name]) for name in self._size}
        held = {name for name in self._freed if name in left}
        now = sum(self._size[name] for name in held)
        live, most, waiting = [], -1, set[str]()
        for number in order:
            touched = [name for name in self._touched[number] if name in left]
            new = {name for name in touched if name not in held}
            takes = self._takes[number]
            taken = {
                takes[name]
                for name in new
                if left.get(takes.get(name, "")) == 1 and takes[name] in held
            }
            now += sum(self._size[name] for name in new) - sum(self._size[name] for name in taken)
            held |= new
            live.append(now)
            if now > most:
                most, waiting = now, held.difference(touched)
            for name in touched:
                left[name] -= 1
                if not left[name] and name not in self._kept:
                    held.discard(name)
                    now -= 0 if name in taken else self._size[name]
        return _Peak(live, waiting)

    def moves(
        self, order: Sequence[int], peak: _Peak, waits: Sequence[Collection[int]]
    ) -> Iterator[list[int]]:
        """Yield orders in which one of the buffers that wait at the peak does not."""
        place = {number: slot for slot, number in enumerate(order)}
        largest = sorted(peak.waiting, key=lambda name: (-self._size[name], name))[:_MOST_TRIED]
        for name in largest:
            if self._size[name] < peak.bytes * _LEAST_SHARE:
                return
            later = {number for number in self._users[name] if place[number] > peak.place}
            if later and name not in self._kept:
                yield from self._hoisted(order, peak.place, later, waits)
            if name not in self._freed:
                earlier = {*self._users[name]} - later
                yield from self._sunk(order, peak.place, earlier, waits)

    @staticmethod
    def _hoisted(
        order: Sequence[int], place: int, chosen: set[int], waits: Sequence[Collection[int]]
    ) -> Iterator[list[int]]:
        """Yield the order in which some groups, and what they wait for, run before a place."""
        behind, moved, rest = {*order[place:]}, set[int](), [*chosen]
        while rest:
            number = rest.pop()
            if number in behind and number not in moved:
                moved.add(number)
                rest += waits[number]
        if order[place] not in moved:
            front = [number for number in order[place:] if number in moved]
            yield [*order[:place], *front, *(n for n in order[place:] if n not in moved)]

    def _sunk(
        self, order: Sequence[int], place: int, chosen: set[int], waits: Sequence[Collection[int]]
    ) -> Iterator[list[int]]:
        """Yield orders in which some groups, and those that wait for them, run behind a place:
        alone, and with those that nobody else waits for.
        """
        moved, window = set(chosen), order[: place + 1]
        for number in window:
            if not moved.isdisjoint(waits[number]):
                moved.add(number)
        if order[place] in moved:
            return
        alone = set(moved)
        slot = {number: at for at, number in enumerate(order)}
        for number in reversed(window):
            users = [self._users[name] for name in self._touched[number]]
            made = [using for using in users if min(using, key=slot.__getitem__) == number]
            if made and all(moved.issuperset({*using} - {number}) for using in made):
                moved.add(number)
        for behind in (alone, moved) if len(moved) > len(alone) else (alone,):
            ahead = [number for number in window if number not in behind]
            yield [*ahead, *(n for n in window if n in behind), *order[place + 1 :]]

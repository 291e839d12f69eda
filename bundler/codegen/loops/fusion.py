# SPDX-License-Identifier: Apache-2.0
"""`fused`: which loops of a program share a kernel.

Two groups of loops become one where their dimensions agree (equal numel, or numel and reduced
numel; a pointwise loop over a reduction's rows and columns agrees with it, and one that memory runs
along while the reduction goes across it is turned, as is one that lays a product out otherwise),
every buffer that one writes and the other touches is touched at the same address, no other node has
to run between them, and they read a buffer at the same addresses, too, so that it is read once. All
pairs of groups that touch a buffer at one address are tried, up to `_WINDOW` apart among its users;
those of which one writes for the other go first, then that which saves most bytes, and where a
measurement may tell (`Choose`), only what it finds faster is made. `schedule` calls it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush
from typing import NamedTuple

import sympy

from bundler.codegen.loops.loop_nodes import (
    POINTWISE,
    Buffer,
    ExternCall,
    Loop,
    Node,
    numel,
)
from bundler.codegen.loops.loop_terms import ATTENTION, SORT
from bundler.codegen.loops.range_trees import IterationSpace
from bundler.codegen.loops.row_direction import runs_along
from bundler.format.cached_properties import cached_property
from bundler.runtime.program.device_tensors import item_bytes

_Dimensions = tuple[tuple[str, sympy.Expr], ...]
# Buffer -> the addresses at which it is touched, each with the elements that it brings.
_Addresses = Mapping[str, Mapping[sympy.Expr, sympy.Expr]]
# Given groups, and what they are as one kernel, says what is launched: one kernel, or None for each
# by itself.
Choose = Callable[[Sequence["LoopGroup"], "LoopGroup"], "LoopGroup | None"]

# More loops than this spill registers.
_MOST_LOOPS = 64
# Nor does a kernel whose programs keep a result for each column loop over rows of more buffers.
_MOST_BUFFERS_MIXED = 12
# What a size counts as that has no example.
_UNKNOWN_SIZE = 8192
# Each user of a buffer is tried with so many of those behind it, as in torch.
_WINDOW = 64
# What saves so many times less than the best pairs waits until these were fused.
_FAR_LESS = 16
# Up to so many rows, of more than so many elements each, keep few programs of a device busy: an
# element that takes more reads than this, as one of a window does, is computed by more of them.
_FEW_ROWS, _LONG_ROW, _MANY_READS = 64, 1024, 8
# Rows up to these lengths, where memory runs along them and where it runs across, are gone through
# again by what reads their results for each element: a program holds them, or one launch goes over
# them twice, which on an H200 takes 1.8 to 2.3 us, and a launch of elements alone about 1.2.
_SHORT_ALONG, _SHORT_ACROSS = 1024, 128
ONE_ROW: _Dimensions = (("x", sympy.Integer(1)),)
_NOWHERE: Mapping[sympy.Expr, sympy.Expr] = {}


@dataclass(frozen=True, eq=False)
class LoopGroup:
    """Nodes that run as one: loops of one kernel, or a single extern call.

    Attributes:
        nodes: in the order of the program.
        dimensions: (prefix, numel) of the kernel; empty for an extern call, and for several parts.
        parts: groups that one kernel computes side by side, as `combination` chose them; else none.
        in_turn: whether the programs of such a kernel take the parts in turn, instead of those of
            the first part coming first.
    """

    nodes: tuple[Node, ...]
    dimensions: _Dimensions
    parts: tuple[LoopGroup, ...] = ()
    in_turn: bool = False

    @cached_property
    def loops(self) -> tuple[Loop, ...]:
        """The nodes that are loops."""
        return tuple(node for node in self.nodes if isinstance(node, Loop))

    @property
    def product(self) -> Loop | None:
        """The product of matrices, or attention, among the loops; a kernel has one at most."""
        return next((loop for loop in self.loops if loop.is_product), None)

    @property
    def has_rows(self) -> bool:
        """Whether some loop goes over rows."""
        return any(loop.has_rows for loop in self.loops)

    @cached_property
    def touched(self) -> frozenset[str]:
        """The buffers that it reads or writes."""
        return frozenset().union(*(node.reads.union(node.writes) for node in self.nodes))

    @cached_property
    def written(self) -> frozenset[str]:
        """The buffers that it writes."""
        return frozenset(name for node in self.nodes for name in node.writes)


def fused(
    nodes: Sequence[Node],
    buffers: Mapping[str, Buffer],
    hints: Mapping[sympy.Symbol, int],
    choose: Choose | None = None,
) -> list[LoopGroup]:
    """Return the groups of a program's nodes, in an order in which they can run.

    Args:
        nodes: of the program.
        buffers: of the program.
        hints: symbol of a size -> its value in the example.
        choose: asked for each fusion before it is made; None makes all.
    """
    return _Fusion(nodes, buffers, hints, choose).run()


def dimensions_of(loop: Loop) -> _Dimensions:
    """Return the dimensions of a kernel of this loop alone."""
    if loop.kind == ATTENTION:
        batch, rows = (numel(part) for part in (loop.sizes[:-3], loop.sizes[-3:-1]))
        return ("z", batch), ("y", rows), ("x", loop.sizes[-1])
    if loop.is_product:
        return tuple(zip("zyx"[-len(loop.sizes) :], loop.sizes, strict=True))
    outer = ("x", numel(loop.sizes))
    return (outer, ("r0_", numel(loop.reduced_sizes))) if loop.has_rows else (outer,)


class _Fused(NamedTuple):
    """Two groups as one kernel.

    Attributes:
        group: the kernel.
        vertical: whether one of the two writes what the other touches, so a store is saved.
        saved: how many bytes are not moved since both touch them at the same addresses.
    """

    group: LoopGroup
    vertical: bool
    saved: int


class _Fusion:
    def __init__(
        self,
        nodes: Sequence[Node],
        buffers: Mapping[str, Buffer],
        hints: Mapping[sympy.Symbol, int],
        choose: Choose | None,
    ) -> None:
        self._buffers, self._hints, self._choose = buffers, hints, choose
        self._place = {id(node): number for number, node in enumerate(nodes)}
        self._order = _GroupOrder(dependencies(nodes, buffers))
        self._groups = [
            LoopGroup((n,), dimensions_of(n) if isinstance(n, Loop) else ()) for n in nodes
        ]
        self._fusions: dict[tuple[LoopGroup, LoopGroup], _Fused | None] = {}
        self._accesses = _Accesses()
        # (Loop, order) -> the loop, and the same turned; both are kept, since they go by identity.
        self._turned: dict[tuple[int, tuple[int, ...]], tuple[Loop, Loop]] = {}

    def run(self) -> list[LoopGroup]:
        # Each round fuses pairs; what they became may pair up again, until nothing does.
        while self._round():
            pass
        by_first = {self._first(group): group for group in self._groups}
        return [by_first[number] for number in self._order.sorted(by_first)]

    def _round(self) -> bool:
        """Fuse what can be fused, the best pairs first; returns whether anything was."""
        groups: list[LoopGroup | None] = list(self._groups)
        least = None
        for a, b, fusion in self._candidates():
            one, other = self._groups[a], self._groups[b]
            # What saves far less waits for what the better pairs became, which it could keep apart.
            if least is not None and fusion.saved < least:
                break
            # A better pair of this round may have used one of them up, and then the score no longer
            # holds: the next round scores what it became.
            if (
                groups[a] is one
                and groups[b] is other
                and self._is_kept(one, other, fusion.group)
                and self._order.merged(self._first(one), self._first(other))
            ):
                groups[a], groups[b] = fusion.group, None
                least = fusion.saved // _FAR_LESS if least is None else least
        self._groups = [group for group in groups if group is not None]
        return least is not None

    def _is_kept(self, one: LoopGroup, other: LoopGroup, together: LoopGroup) -> bool:
        if self._choose is None:
            return True
        parts = sorted((one, other), key=self._first)
        if not self._order.can_merge(*map(self._first, parts)):
            return False
        if self._choose(parts, together) is not None:
            return True
        self._fusions[one, other] = None
        return False

    def _candidates(self) -> list[tuple[int, int, _Fused]]:
        """Return pairs of groups, by their numbers, and what they would be together, the best
        first: what one writes for the other, which others would keep apart, then what saves most
        bytes.
        """
        users: dict[str, list[int]] = {}
        for number, group in enumerate(self._groups):
            for name in sorted(group.touched if group.loops else ()):
                users.setdefault(name, []).append(number)
        siblings = _neighbours(self._siblings(users).values())
        scored = []
        apart = self._gathering()
        for a, b in self._pairs(users) | siblings:
            one, other = self._groups[a], self._groups[b]
            if (a, b) in apart or (b, a) in apart:
                continue
            if (one, other) not in self._fusions:
                self._fusions[one, other] = self._together(one, other)
            found = self._fusions[one, other]
            # Where nothing is stored or loaded less, a launch less does not pay for the registers
            # that two bodies need at once; siblings are the exception.
            if found is None or (
                found.saved == 0 and not found.vertical and (a, b) not in siblings
            ):
                continue
            # Of equal gains the nearest pair first: what lies between two groups has to move, and
            # the order is the same in every process.
            distance = abs(self._first(one) - self._first(other))
            # Half as much again is no reason to loop over rows for what has none.
            gain, unlike = found.saved.bit_length(), one.has_rows != other.has_rows
            score = (-int(found.vertical), -gain, unlike, -found.saved, distance)
            scored.append((*score, a, b, found))
        scored.sort(key=lambda row: row[:-1])
        return [(a, b, found) for *_, a, b, found in scored]

    def _pairs(self, users: Mapping[str, Sequence[int]]) -> set[tuple[int, int]]:
        """Return pairs of groups that may have something of a buffer in common.

        Trying all of its users would cost the square of the program's length: those that touch it
        at one address of equal dimensions are tried up to `_WINDOW` apart; of the others, and of
        those of equal dimensions, neighbours, which meet the next one in the next round.
        """
        alike: dict[object, list[int]] = {}
        equal: dict[object, list[int]] = {}
        found = _neighbours(users.values())
        for name, numbers in users.items():
            for number in numbers:
                group = self._groups[number]
                alike.setdefault((name, group.dimensions), []).append(number)
                addresses = self._accesses.of(group, group.dimensions) or {}
                for address in addresses.get(name, _NOWHERE):
                    equal.setdefault((name, group.dimensions, address), []).append(number)
        return found | _neighbours(alike.values()) | _neighbours(equal.values(), _WINDOW)

    def _gathering(self) -> set[tuple[int, int]]:
        """Return pairs that stay apart: a reduction of one row, and who needs results of such rows
        of unlike lengths for its elements, as who clips gradients by the norm of all.

        In one kernel the reduction would wait for the others, with which it can share a launch.
        """
        writers = {
            name: number
            for number, group in enumerate(self._groups)
            if group.dimensions[:1] == ONE_ROW and group.dimensions[1:]
            for name in group.written
        }
        found = set()
        for number, group in enumerate(self._groups):
            rows = {writers[name] for name in group.touched.intersection(writers)}
            lengths = {self._groups[row].dimensions[1][1] for row in rows}
            if len(group.dimensions) == 1 and len(lengths) > 1:
                found |= {(row, number) for row in rows if all(n.is_Integer for n in lengths)}
        return found

    def _siblings(
        self, users: Mapping[str, Sequence[int]]
    ) -> dict[tuple[object, object], list[int]]:
        """Return groups of reductions that read what one other group writes, by that group and
        their dimensions: second steps of reductions that were split.

        They have no buffer in common, but one launch less costs nothing where they are as large as
        each other.
        """
        reducing = {
            number
            for number, group in enumerate(self._groups)
            if any(loop.is_reduction for loop in group.loops)
        }
        readers = {
            name: [number for number in numbers if number in reducing]
            for name, numbers in users.items()
        }
        found: dict[tuple[object, object], list[int]] = {}
        seen: set[frozenset[str]] = set()
        for writer, group in enumerate(self._groups):
            names = frozenset(name for name in group.written if readers.get(name))
            # Many groups may write parts of one buffer: their readers are the same.
            if not group.loops or not names or (names in seen and writer not in reducing):
                continue
            if writer not in reducing:
                seen.add(names)
            for number in sorted({number for name in names for number in readers[name]}):
                if number != writer:
                    dimensions = self._groups[number].dimensions
                    found.setdefault((writer, dimensions), []).append(number)
        return found

    def _first(self, group: LoopGroup) -> int:
        return self._place[id(group.nodes[0])]

    def _saved(self, own: _Addresses, others: _Addresses, between: frozenset[str]) -> int:
        """Return how many bytes two groups touch at the same addresses, of a slice what is read of
        it; what one writes for the other counts as stored and as loaded.
        """
        total = 0
        for name, addresses in own.items():
            layout, there = self._buffers[name].layout, others.get(name, _NOWHERE)
            if there and not self._buffers[name].by_value:
                count = sum(self._known(n) for at, n in addresses.items() if at in there)
                most = self._known(numel(layout.sizes))
                total += min(count, most) * item_bytes(layout.dtype) * (1 + (name in between))
        return total

    def _known(self, size: sympy.Expr) -> int:
        known = size if size.is_Integer else size.subs(self._hints)
        return int(known) if known.is_Integer else _UNKNOWN_SIZE

    def _together(self, one: LoopGroup, other: LoopGroup) -> _Fused | None:
        # An extern call has no loops to join.
        if not one.loops or not other.loops or len(one.nodes) + len(other.nodes) > _MOST_LOOPS:
            return None
        if (one.product or other.product) and not _is_epilogue(one, other):
            return None
        if not _can_be_mixed(one, other):
            return None
        # A loop that fits no common dimensions, or touches a written buffer elsewhere, forbids the
        # pair.
        for dimensions in _common_dimensions(one.dimensions, other.dimensions):
            if self._keeps_idle(one, other, dimensions):
                continue
            one, other = self._along(one, other, dimensions), self._along(other, one, dimensions)
            own, others = (self._accesses.of(group, dimensions) for group in (one, other))
            if own is not None and others is not None and _same_addresses(one, other, own, others):
                nodes = sorted((*one.nodes, *other.nodes), key=lambda node: self._place[id(node)])
                group = LoopGroup(tuple(nodes), dimensions)
                between = (one.written & other.touched) | (other.written & one.touched)
                return _Fused(group, bool(between), self._saved(own, others, between))
        return None

    def _along(self, group: LoopGroup, other: LoopGroup, dimensions: _Dimensions) -> LoopGroup:
        """Return a group as it goes through memory beside the other one, which reduces rows or is a
        product: with the dimensions of its loops turned where they have another order.
        """
        if group.dimensions == dimensions or other.dimensions != dimensions:
            return group
        if other.product:
            orders = [_behind(loop, other.written) for loop in group.loops]
            if all(order == sorted(order or ()) for order in orders):
                return group
        else:
            short = _has_short_rows(other, dimensions)
            orders = [_beside(loop, other.written, dimensions, short=short) for loop in group.loops]
        loops = [
            self._turned_loop(loop, order)
            for loop, order in zip(group.loops, orders, strict=True)
            if order is not None
        ]
        return LoopGroup(tuple(loops), group.dimensions) if len(loops) == len(orders) else group

    def _turned_loop(self, loop: Loop, order: Sequence[int]) -> Loop:
        """Return a loop with its dimensions in another order."""
        key = (id(loop), tuple(order))
        if key not in self._turned:
            found = replace(
                loop,
                variables=tuple(loop.variables[place] for place in order),
                sizes=tuple(loop.sizes[place] for place in order),
            )
            self._turned[key] = loop, found
            self._place[id(found)] = self._place[id(loop)]
        return self._turned[key][1]

    def _keeps_idle(self, one: LoopGroup, other: LoopGroup, dimensions: _Dimensions) -> bool:
        """Whether a kernel of both would have the programs of few long rows compute elements that
        take many reads, which more programs could.
        """
        if one.has_rows == other.has_rows:
            return False
        rows, row = (self._known(size) for _, size in dimensions)
        apart = other if one.has_rows else one
        if rows > _FEW_ROWS or row <= _LONG_ROW or apart.dimensions == dimensions[:1]:
            return False
        return any(len({*loop.loads}) > _MANY_READS for loop in apart.loops)


def _can_be_mixed(one: LoopGroup, other: LoopGroup) -> bool:
    """Whether reductions across rows, where two groups have any, can run in a kernel of both."""
    loops = (*one.loops, *other.loops)
    if not any(loop.rows_each for loop in loops):
        return True
    sorts = any(loop.kind == SORT for loop in loops)
    return not sorts and len(one.touched | other.touched) <= _MOST_BUFFERS_MIXED


def _common_dimensions(one: _Dimensions, other: _Dimensions) -> list[_Dimensions]:
    """Return the dimensions that a kernel of both could have."""
    if one == other:
        return [one]
    product = next((found for found in (one, other) if found[0][0] != "x"), None)
    if product is not None:
        whole = [numel([size for _, size in found]) for found in (one, other)]
        return [product] if sympy.expand(whole[0] - whole[1]) == 0 else []
    if len(one) == len(other):
        return []
    # A pointwise loop joins a reduction when it runs over the whole rows and columns, or over one
    # element for each row.
    longer, shorter = (one, other) if len(one) > len(other) else (other, one)
    whole = numel([size for _, size in longer])
    return [longer] if shorter[0][1] in {whole, longer[0][1]} else []


def _has_short_rows(group: LoopGroup, dimensions: _Dimensions) -> bool:
    """Whether a group reduces rows so short that what reads the results for each element had better
    go through them, too.
    """
    rows = [loop for loop in group.loops if loop.has_rows]
    row = dimensions[-1][1]
    if not rows or not row.is_Integer or row > _SHORT_ALONG:
        return False
    if not all(loop.is_reduction and not loop.rows_each for loop in rows):
        return False
    return bool(row <= _SHORT_ACROSS) or all(runs_along(loop) for loop in rows)


def _beside(
    loop: Loop, written: frozenset[str], dimensions: _Dimensions, *, short: bool
) -> Sequence[int] | None:
    """Return the order of a loop's dimensions in which those of a kernel's rows are outermost; None
    where it should keep its own.

    Args:
        loop: that has no rows.
        written: what the kernel writes, an element for each row.
        dimensions: of the kernel.
        short: whether its rows are short.
    """
    whole = numel(loop.sizes) == numel([size for _, size in dimensions])
    # A scatter writes wherever its indices say, any other loop along memory.
    if loop.kind != POINTWISE or not (loop.index_terms or (short and whole and loop.mode is None)):
        return None
    read = {index for buffer, index, _ in loop.loads if buffer in written}
    if not loop.index_terms:
        # What the kernel writes element by element, and not row by row, says nothing.
        read = {index for index in read if not index.free_symbols.issuperset(loop.variables)}
    if read:
        return _as_read(loop, read)
    places = range(len(loop.sizes))
    found = [
        (first, last)
        for first in places
        for last in places[first:]
        if numel(loop.sizes[first : last + 1]) == dimensions[0][1]
    ]
    if len(found) != 1:
        return None
    ((first, last),) = found
    return [*places[first : last + 1], *places[:first], *places[last + 1 :]]


def _behind(loop: Loop, written: frozenset[str]) -> Sequence[int] | None:
    """Return the order of a loop's dimensions in which it reads a product's elements row by row,
    such as one that lays out heads; None where it has none.
    """
    return _as_read(loop, {index for buffer, index, _ in loop.loads if buffer in written})


def _as_read(loop: Loop, read: Collection[sympy.Expr]) -> Sequence[int] | None:
    """Return the order of a loop's dimensions in which it reads one address row by row; None where
    it has no such order.
    """
    if len(read) != 1:
        return None
    (index,) = read
    strides = [index.coeff(variable) for variable in loop.variables]
    if not all(stride.is_Integer and stride >= 0 for stride in strides):
        return None
    # Dimensions that the address does not move with have a stride of 0, and keep their order.
    return sorted(range(len(strides)), key=lambda place: -strides[place])


def _is_epilogue(one: LoopGroup, other: LoopGroup) -> bool:
    """Whether one of two groups has a product, and the other one only what is computed of each of
    its elements and then stored.
    """
    product, after = (one, other) if one.product else (other, one)
    return (
        all(loop.kind == POINTWISE and loop.mode is None for loop in after.loops)
        and any(product.written & loop.reads for loop in after.loops)
        # The matrices are read from memory, before anything is stored.
        and not any(loop.reads & after.written for loop in product.loops if loop.is_product)
    )


def _neighbours(numbers: Iterable[Sequence[int]], farthest: int = 2) -> set[tuple[int, int]]:
    """Return pairs of each list that stand beside each other, or at most so far apart."""
    return {
        (a, b)
        for found in numbers
        for near in range(1, min(farthest, len(found)) + 1)
        for a, b in zip(found, found[near:], strict=False)
    }


class _Accesses:
    """The addresses of loops in the dimensions of kernels, each worked out once however many groups
    a loop is tried in.
    """

    def __init__(self) -> None:
        self._spaces: dict[_Dimensions, IterationSpace] = {}
        self._of_loops: dict[tuple[int, _Dimensions], _Addresses | None] = {}
        self._of_groups: dict[tuple[LoopGroup, _Dimensions], _Addresses | None] = {}

    def of(self, group: LoopGroup, dimensions: _Dimensions) -> _Addresses | None:
        """Return the buffers that a group's loops touch, each with its addresses; None where a loop
        does not fit.
        """
        key = (group, dimensions)
        if key not in self._of_groups:
            self._of_groups[key] = self._union(group, dimensions)
        return self._of_groups[key]

    def _union(self, group: LoopGroup, dimensions: _Dimensions) -> _Addresses | None:
        found: dict[str, dict[sympy.Expr, sympy.Expr]] = {}
        for loop in group.loops:
            key = (id(loop), dimensions)
            if key not in self._of_loops:
                self._of_loops[key] = self._of_loop(loop, dimensions)
            addresses = self._of_loops[key]
            if addresses is None:
                return None
            for name, places in addresses.items():
                found.setdefault(name, {}).update(places)
        return found

    def _of_loop(self, loop: Loop, dimensions: _Dimensions) -> _Addresses | None:
        # Equal parts have one symbol in one space, so addresses of it can be compared.
        space = self._spaces.setdefault(dimensions, IterationSpace(dimensions))
        place = space.place(loop)
        if place is None:
            return None
        found: dict[str, dict[sympy.Expr, sympy.Expr]] = {}
        for buffer, index in ((loop.buffer, loop.index), *(load[:2] for load in loop.loads)):
            address = place(index)
            found.setdefault(buffer, {})[address] = space.elements(address)
        return found


def _same_addresses(one: LoopGroup, other: LoopGroup, own: _Addresses, others: _Addresses) -> bool:
    """Whether each buffer that one of two groups writes has one address in all loops of both."""
    # Then a lane reads only what it wrote itself; a kernel cannot wait for its other programs.
    if not all(
        len({*own.get(name, _NOWHERE), *others.get(name, _NOWHERE)}) == 1
        for name in one.written | other.written
    ):
        return False
    loops = (*one.loops, *other.loops)
    modes = {loop.buffer for loop in loops if loop.mode is not None or loop.first is not None}
    if not modes:
        return True
    # A scatter touches places that only values decide, and behind the first elements of a row come
    # those of the next, so the buffer has no other writer and no reader in the kernel.
    writers = Counter(loop.buffer for loop in loops)
    reads = {load[0] for loop in loops for load in loop.loads}
    return all(writers[name] == 1 for name in modes) and not reads & modes


class _GroupOrder:
    """An order in which groups can run, kept while they are merged; a group goes by the number of
    its first node.

    The order begins as the program's.  A merge looks at the groups between the two alone, so that
    it costs as much as they are far from each other.
    """

    def __init__(self, edges: Sequence[set[int]]) -> None:
        # Group -> the nodes outside of it that it waits for.
        self._waits = dict(enumerate(edges))
        # Node -> its group.
        self._home = list(range(len(edges)))
        # Group -> its nodes.
        self._members = {number: [number] for number in range(len(edges))}
        # Group -> its place in the order, and place -> group; merges leave places empty.
        self._slot = list(range(len(edges)))
        self._at: list[int | None] = list(range(len(edges)))

    def can_merge(self, one: int, other: int) -> bool:
        """Whether `merged` would make one group of two."""
        first, last = sorted((one, other), key=lambda number: self._slot[number])
        return self._between(first, last) is not None

    def merged(self, one: int, other: int) -> bool:
        """Make one group of two, unless a third has to run after one of them and before the
        other; returns whether it did.
        """
        first, last = sorted((one, other), key=lambda number: self._slot[number])
        between = self._between(first, last)
        if between is None:
            return False
        low, high = self._slot[first], self._slot[last]
        window = [found for found in self._at[low : high + 1] if found is not None]
        # What the later one waits for moves in front of the pair, all else of the window behind it.
        kept, gone = min(one, other), max(one, other)
        before = [number for number in window if number in between]
        behind = [n for n in window if n not in between and n not in {one, other}]
        order: list[int | None] = [*before, kept, *behind]
        order += [None] * (high + 1 - low - len(order))
        self._at[low : high + 1] = order
        for slot, number in enumerate(order, low):
            if number is not None:
                self._slot[number] = slot
        self._members[kept] += self._members.pop(gone)
        for node in self._members[kept]:
            self._home[node] = kept
        waits = self._waits[kept] | self._waits.pop(gone)
        self._waits[kept] = waits.difference(self._members[kept])
        return True

    def _between(self, first: int, last: int) -> set[int] | None:
        """Return the groups behind the first that the last waits for; None where one of them waits
        for the first.
        """
        low = self._slot[first]
        found: set[int] = set()
        # Only what stands behind the first can lead back to it, so the search ends there.
        stack = [number for number in self._waited(last) if number != first]
        while stack:
            number = stack.pop()
            if number == first:
                return None
            if number not in found and self._slot[number] > low:
                found.add(number)
                stack.extend(self._waited(number))
        return found

    def _waited(self, number: int) -> set[int]:
        return {self._home[node] for node in self._waits[number]}

    def sorted(self, groups: Iterable[int]) -> list[int]:
        """Return groups, which are all, so that each comes behind those it waits for, else as the
        program has them.
        """
        return in_order({number: self._waited(number) for number in groups})


def in_order(waiting: dict[int, set[int]]) -> list[int]:
    """Return numbers so that each comes behind those it waits for, else the smallest first; empties
    the sets.
    """
    followers: dict[int, list[int]] = {}
    for number, waited in waiting.items():
        for before in waited:
            followers.setdefault(before, []).append(number)
    ready = [number for number, waited in waiting.items() if not waited]
    heapify(ready)
    order = []
    while ready:
        number = heappop(ready)
        order.append(number)
        for follower in followers.get(number, ()):
            waiting[follower].discard(number)
            if not waiting[follower]:
                heappush(ready, follower)
    assert len(order) == len(waiting), "groups that wait for each other were never put together"
    return order


def dependencies(nodes: Sequence[Node], buffers: Mapping[str, Buffer]) -> list[set[int]]:
    """Return for each node those before it that it has to wait for: writers of what it touches,
    readers of what it writes.

    Operators that are called, and what changes inputs, also wait for checks before them, and for
    calls whose order counts, which wait for all calls.  What another one that is waited for waits
    for itself is left out: thousands of nodes may write parts of one buffer.
    """
    # Calls since the last barrier; a barrier is a check, or a call whose order counts.
    calls: list[int] = []
    last: int | None = None
    # Buffer -> its last writer, and its readers since then.
    writers: dict[str, int] = {}
    readers: dict[str, list[int]] = {}
    edges: list[set[int]] = []
    for number, node in enumerate(nodes):
        before: set[int] = set()
        read = {name for item in node.reads for name in _memory_of(item, buffers)}
        before.update(writers[name] for name in (*read, *node.writes) if name in writers)
        for name in read:
            readers.setdefault(name, []).append(number)
        for name in node.writes:
            before.update(readers.pop(name, ()))
            writers[name] = number
        called = isinstance(node, ExternCall)
        writes_input = any(buffers[name].source != "node" for name in node.writes)
        # An input must not change, nor an operator run, before a check that may raise.
        if last is not None and (called or writes_input):
            before.add(last)
        if isinstance(node, ExternCall):
            if node.ordered or node.is_check:
                before.update(calls)
                last, calls = number, []
            else:
                calls.append(number)
        edges.append(before - {number})
    return edges


def _memory_of(name: str, buffers: Mapping[str, Buffer]) -> set[str]:
    """Return a buffer and those whose memory it may share, as the result of a called view."""
    found = {name}
    for base in buffers[name].bases:
        found |= _memory_of(base, buffers)
    return found


def is_extern(group: LoopGroup) -> bool:
    """Whether a group is a call of an ATen operator."""
    return isinstance(group.nodes[0], ExternCall)

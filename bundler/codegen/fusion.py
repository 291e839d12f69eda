# SPDX-License-Identifier: Apache-2.0
"""`fused`: which loops of a program share a kernel.

Two groups of loops become one where their dimensions agree (equal numel, or numel and reduced
numel; a pointwise loop over a reduction's rows and columns agrees with it), every buffer that one
writes and the other touches is touched at the same address, no other node has to run between them,
and they read a buffer at the same addresses, too, so that it is read once.  Of all such pairs that
which saves most memory traffic goes first. `schedule` calls it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import sympy

from bundler.codegen.loop_nodes import Buffer, ExternCall, Loop, Node, numel
from bundler.codegen.loop_terms import loads_of
from bundler.codegen.range_trees import IterationSpace

# A kernel of more loops has more registers than a processor.
_MOST_LOOPS = 64
_UNKNOWN_SIZE = 8192


@dataclass(frozen=True, eq=False)
class LoopGroup:
    """Nodes that run as one: loops of one kernel, or a single extern call.

    Attributes:
        nodes: in the order of the program.
        dimensions: (prefix, numel) of the kernel; empty for an extern call.
    """

    nodes: tuple[Node, ...]
    dimensions: tuple[tuple[str, sympy.Expr], ...]

    @property
    def loops(self) -> tuple[Loop, ...]:
        """The nodes that are loops."""
        return tuple(node for node in self.nodes if isinstance(node, Loop))

    @property
    def touched(self) -> frozenset[str]:
        """The buffers that it reads or writes."""
        return frozenset().union(*(node.reads.union(node.writes) for node in self.nodes))

    @property
    def written(self) -> frozenset[str]:
        """The buffers that it writes."""
        return frozenset(name for node in self.nodes for name in node.writes)


def fused(
    nodes: Sequence[Node], buffers: Mapping[str, Buffer], hints: Mapping[sympy.Symbol, int]
) -> list[LoopGroup]:
    """Return the groups of a program's nodes, in an order in which they can run."""
    return _Fusion(nodes, buffers, hints).run()


def dimensions_of(loop: Loop) -> tuple[tuple[str, sympy.Expr], ...]:
    """Return the dimensions of a kernel of this loop alone."""
    outer = ("x", numel(loop.sizes))
    return (outer, ("r0_", numel(loop.reduced_sizes))) if loop.is_reduction else (outer,)


class _Fused(NamedTuple):
    """Two groups as one: whether one writes what the other touches, and how many elements both read
    at the same addresses.
    """

    group: LoopGroup
    vertical: bool
    shared: int


class _Fusion:
    def __init__(
        self,
        nodes: Sequence[Node],
        buffers: Mapping[str, Buffer],
        hints: Mapping[sympy.Symbol, int],
    ) -> None:
        self._nodes, self._buffers, self._hints = list(nodes), buffers, hints
        self._place = {id(node): number for number, node in enumerate(nodes)}
        self._edges = _dependencies(nodes, buffers)
        self._groups = [
            LoopGroup((n,), dimensions_of(n) if isinstance(n, Loop) else ()) for n in nodes
        ]
        self._fusions: dict[tuple[LoopGroup, LoopGroup], _Fused | None] = {}

    def run(self) -> list[LoopGroup]:
        while self._round():
            pass
        return self._in_order(self._groups)

    def _round(self) -> bool:
        """Fuse what can be fused, the best pairs first; returns whether anything was."""
        changed = False
        for one, other, together in self._candidates():
            if (
                one not in self._groups
                or other not in self._groups
                or self._runs_between(one, other)
            ):
                continue
            self._groups[self._groups.index(one)] = together
            self._groups.remove(other)
            changed = True
        return changed

    def _candidates(self) -> list[tuple[LoopGroup, LoopGroup, LoopGroup]]:
        """Return pairs of groups and what they would be together, the best first: what one writes
        for the other, then what both read.
        """
        users: dict[str, list[int]] = {}
        for number, group in enumerate(self._groups):
            for name in sorted(group.touched if group.loops else ()):
                users.setdefault(name, []).append(number)
        siblings = _neighbours(self._siblings(users).values())
        alike: dict[tuple[str, object], list[int]] = {}
        for name, numbers in users.items():
            for number in numbers:
                alike.setdefault((name, self._groups[number].dimensions), []).append(number)
        scored = []
        # Neighbours among the users of a buffer, and among those of equal dimensions, are enough:
        # what they become meets the next one in the next round.
        for a, b in _neighbours([*users.values(), *alike.values()]) | siblings:
            one, other = self._groups[a], self._groups[b]
            if (one, other) not in self._fusions:
                self._fusions[one, other] = self._together(one, other)
            found = self._fusions[one, other]
            if found is None or (
                found.shared == 0 and not found.vertical and (a, b) not in siblings
            ):
                continue
            distance = abs(self._first(one) - self._first(other))
            scored.append((-int(found.vertical), -found.shared, distance, a, b, found.group))
        return [
            (self._groups[a], self._groups[b], group)
            for *_, a, b, group in sorted(scored, key=lambda row: row[:-1])
        ]

    def _siblings(self, users: Mapping[str, Sequence[int]]) -> dict[str, list[int]]:
        """Return groups of reductions that read what one other group writes, by a name for that
        group: second steps of reductions that were split.

        They have no buffer in common, but one launch less costs nothing where they are as large as
        each other.
        """
        found: dict[str, list[int]] = {}
        for writer, group in enumerate(self._groups):
            readers = sorted(
                {
                    number
                    for name in group.written
                    for number in users.get(name, ())
                    if number != writer
                }
            )
            for number in readers:
                one = self._groups[number]
                if group.loops and any(loop.is_reduction for loop in one.loops):
                    found.setdefault(f"{writer} {one.dimensions}", []).append(number)
        return found

    def _first(self, group: LoopGroup) -> int:
        return self._place[id(group.nodes[0])]

    def _bytes(self, name: str) -> int:
        size = numel(self._buffers[name].layout.sizes).subs(self._hints)
        return int(size) if size.is_Integer else _UNKNOWN_SIZE

    def _together(self, one: LoopGroup, other: LoopGroup) -> _Fused | None:
        if not one.loops or not other.loops or len(one.nodes) + len(other.nodes) > _MOST_LOOPS:
            return None
        nodes = tuple(sorted((*one.nodes, *other.nodes), key=lambda node: self._place[id(node)]))
        for dimensions in _common_dimensions(one.dimensions, other.dimensions):
            group = LoopGroup(nodes, dimensions)
            if _same_addresses(group):
                space = IterationSpace(dimensions)
                common = _accesses(one, space) & _accesses(other, space)
                names = {name for name, _ in common if not self._buffers[name].by_value}
                shared = sum(self._bytes(name) for name in names)
                return _Fused(group, bool(one.written & other.touched), shared)
        return None

    def _runs_between(self, one: LoopGroup, other: LoopGroup) -> bool:
        """Whether some third group has to run after one of the two and before the other."""
        merged = [group for group in self._groups if group is not one and group is not other]
        merged.append(LoopGroup((*one.nodes, *other.nodes), ()))
        return self._sorted(merged) is None

    def _in_order(self, groups: Sequence[LoopGroup]) -> list[LoopGroup]:
        found = self._sorted(groups)
        assert found is not None, "groups that wait for each other were never fused"
        return found

    def _sorted(self, groups: Sequence[LoopGroup]) -> list[LoopGroup] | None:
        """Return the groups so that each comes behind those it waits for, else as the program has
        them; None in a circle.
        """
        home = {
            self._place[id(node)]: number
            for number, group in enumerate(groups)
            for node in group.nodes
        }
        waits = [
            {home[before] for node in group.nodes for before in self._edges[self._place[id(node)]]}
            - {number}
            for number, group in enumerate(groups)
        ]
        rest = sorted(
            range(len(groups)), key=lambda n: min(self._place[id(node)] for node in groups[n].nodes)
        )
        done: set[int] = set()
        order = []
        while rest:
            ready = next((number for number in rest if waits[number] <= done), None)
            if ready is None:
                return None
            rest.remove(ready)
            done.add(ready)
            order.append(groups[ready])
        return order


def _common_dimensions(
    one: tuple[tuple[str, sympy.Expr], ...], other: tuple[tuple[str, sympy.Expr], ...]
) -> list[tuple[tuple[str, sympy.Expr], ...]]:
    """Return the dimensions that a kernel of both could have."""
    if one == other:
        return [one]
    if len(one) == len(other):
        return []
    longer, shorter = (one, other) if len(one) > len(other) else (other, one)
    whole = numel([size for _, size in longer])
    return [longer] if shorter[0][1] in {whole, longer[0][1]} else []


def _neighbours(numbers: Iterable[Sequence[int]]) -> set[tuple[int, int]]:
    """Return pairs of each list that stand beside each other, or with one between them."""
    return {
        (a, b)
        for found in numbers
        for near in (1, 2)
        for a, b in zip(found, found[near:], strict=False)
    }


def _accesses(group: LoopGroup, space: IterationSpace) -> set[tuple[str, sympy.Expr]]:
    """Return the buffers that the loops of a group touch, each with its address in a space that
    they fit.
    """
    found = set()
    for loop in group.loops:
        place = space.place(loop)
        assert place is not None
        found |= {(load[0], place(load[1])) for root in loop.roots for load in loads_of(root)}
        found.add((loop.buffer, place(loop.index)))
    return found


def _same_addresses(group: LoopGroup) -> bool:
    """Whether all loops fit the dimensions, and each buffer that one of them writes has one address
    in all of them.
    """
    space = IterationSpace(group.dimensions)
    touched: dict[str, set[sympy.Expr]] = {}
    written = group.written
    for loop in group.loops:
        place = space.place(loop)
        if place is None:
            return False
        accesses = [(load[0], load[1]) for root in loop.roots for load in loads_of(root)]
        accesses.append((loop.buffer, loop.index))
        for buffer, index in accesses:
            if buffer in written:
                touched.setdefault(buffer, set()).add(place(index))
        if loop.mode is not None and sum(loop.buffer in other.writes for other in group.loops) > 1:
            return False
    modes = {loop.buffer for loop in group.loops if loop.mode is not None}
    if any(loop.buffer in modes and loop.mode is None for loop in group.loops):
        return False
    reads = {load[0] for loop in group.loops for root in loop.roots for load in loads_of(root)}
    return all(len(found) == 1 for found in touched.values()) and not reads & modes


def _dependencies(nodes: Sequence[Node], buffers: Mapping[str, Buffer]) -> list[set[int]]:
    """Return for each node those before it that it has to wait for: writers of what it touches,
    readers of what it writes.

    Operators that are called, and what changes inputs, also wait for checks before them, and for
    calls whose order counts, which wait for all calls.
    """
    calls: list[int] = []
    first: list[int] = []  # checks, and calls whose order counts
    writers: dict[str, list[int]] = {}
    readers: dict[str, list[int]] = {}
    edges: list[set[int]] = []
    for number, node in enumerate(nodes):
        before: set[int] = set()
        read = {name for item in node.reads for name in _memory_of(item, buffers)}
        for name in read:
            before.update(writers.get(name, ()))
        for name in node.writes:
            before.update(writers.get(name, ()), readers.get(name, ()))
        for name in read:
            readers.setdefault(name, []).append(number)
        for name in node.writes:
            writers.setdefault(name, []).append(number)
        called = isinstance(node, ExternCall)
        if called or any(buffers[name].source != "node" for name in node.writes):
            before.update(first)
        if isinstance(node, ExternCall):
            if node.ordered or node.is_check:
                before.update(calls)
                first.append(number)
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

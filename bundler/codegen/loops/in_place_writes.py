# SPDX-License-Identifier: Apache-2.0
"""`with_writes_in_place`: places of an input that a program writes to are written where they lie.

torch's functional graph copies the input, writes to the copy, and copies all of it back at the end,
as a cache that `index_copy_` adds a token to. Both copies go where nothing can tell: every element
of the copy is the input's at the same place, nobody reads or writes the input between the first
write and the end, and the copy is no result. `schedule` calls it before all else.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import sympy

from bundler.codegen.loops.loop_nodes import POINTWISE, Buffer, ExternCall, Loop, Node, numel
from bundler.codegen.loops.loop_terms import Term, TermPool, in_order, loads_of


def with_writes_in_place(
    pool: TermPool,
    nodes: Sequence[Node],
    buffers: Mapping[str, Buffer],
    outputs: Collection[str],
) -> list[Node]:
    """Return the nodes without copies of inputs that can be written where they lie.

    Args:
        pool: that the loops' terms are of.
        nodes: of the program, in order, none of which is dead.
        buffers: of the program.
        outputs: buffers that leave the program.
    """
    writes = _Writes(pool, nodes, buffers, outputs)
    for end, node in enumerate(nodes):
        pair = _copied(node, buffers)
        if pair is not None and writes.can_replace(*pair, end):
            writes.replace(*pair, end)
    return [node for node in writes.nodes if node is not None]


def _copied(node: Node, buffers: Mapping[str, Buffer]) -> tuple[str, str] | None:
    """Return the buffer that a loop copies, whole and place by place, and the one that it fills;
    None where it does anything else.
    """
    if not isinstance(node, Loop) or node.kind != POINTWISE or node.mode or node.index_terms:
        return None
    if node.value.operator != "load" or node.value.arguments:
        return None
    name, index, _ = node.value.details
    one, other = buffers[name], buffers[node.buffer]
    same = one.layout == other.layout and sympy.expand(index - node.index) == 0
    # Without gaps, and with no element twice.
    dense = numel(one.layout.sizes) == one.layout.storage == numel(node.sizes)
    if not same or not dense or one.by_value or other.by_value:
        return None
    return name, node.buffer


class _Writes:
    """The nodes of a program, of which those that went are None."""

    def __init__(
        self,
        pool: TermPool,
        nodes: Sequence[Node],
        buffers: Mapping[str, Buffer],
        outputs: Collection[str],
    ) -> None:
        self._pool, self._buffers = pool, buffers
        self.nodes: list[Node | None] = list(nodes)
        self._outputs = outputs
        # Buffers that an operator returned a view of.
        self._viewed = frozenset().union(*(one.bases for one in buffers.values()))
        self._users: dict[str, list[int]] = {}
        self._last_check = -1
        for number, node in enumerate(nodes):
            for name in node.reads.union(node.writes):
                self._users.setdefault(name, []).append(number)
            if isinstance(node, ExternCall) and node.is_check:
                self._last_check = number

    def can_replace(self, copy: str, original: str, end: int) -> bool:
        """Whether nothing can tell a copy from the input, which it is copied back to at the end."""
        one, other = self._buffers[copy], self._buffers[original]
        if one.source != "node" or one.bases or other.source == "node":
            return False
        if copy in self._outputs or not self._viewed.isdisjoint((copy, original)):
            return False
        first, *users = self._users[copy]
        node = self.nodes[first]
        if node is None or _copied(node, self._buffers) != (original, copy):
            return False
        if any(self._is_unfit(self.nodes[number], copy) for number in users):
            return False
        writing = [number for number in users if self._writes(number, copy)]
        start = min(writing, default=end)
        # What is read later has to be the old value, of which there would be no copy any more, and
        # an input must not change before a check that may raise.
        return (
            max(writing, default=start) <= end
            and self._last_check < start
            and all(
                number < start and not self._writes(number, original)
                for number in self._users[original]
                if number not in {first, end}
            )
        )

    def _is_unfit(self, node: Node | None, copy: str) -> bool:
        return not isinstance(node, Loop) or _decides_places(node, copy)

    def _writes(self, number: int, name: str) -> bool:
        node = self.nodes[number]
        return node is not None and name in node.writes

    def replace(self, copy: str, original: str, end: int) -> None:
        """Have the input used in the place of its copy."""
        gone = {self._users[copy][0], end}
        users = {*self._users.pop(copy), *self._users[original]} - gone
        self._users[original] = sorted(users)
        for number in gone:
            self.nodes[number] = None
        for number in users:
            node = self.nodes[number]
            if isinstance(node, Loop):
                self.nodes[number] = _renamed(self._pool, node, copy, original)


def _decides_places(loop: Loop, name: str) -> bool:
    """Whether a value of a buffer decides where something is read or written."""
    places: list[Term] = [term for _, term in loop.index_terms]
    for root in loop.roots:
        for term in in_order(root):
            places += term.terms if term.operator in {"load", "index_expr"} else ()
    return any(read == name for term in places for read, _, _ in loads_of(term))


def _renamed(pool: TermPool, loop: Loop, old: str, new: str) -> Loop:
    """Return a loop that touches another buffer instead of one."""
    buffer = new if loop.buffer == old else loop.buffer
    return replace(loop, buffer=buffer, value=read_from(pool, loop.value, old, new))


def read_from(pool: TermPool, root: Term, old: str, new: str) -> Term:
    """Return a body that loads from another buffer instead of one."""
    done: dict[Term, Term] = {}
    for term in in_order(root):
        arguments = tuple(done[item] if isinstance(item, Term) else item for item in term.arguments)
        details = term.details
        if term.operator == "load" and details[0] == old:
            details = (new, *details[1:])
        done[term] = pool.make(term.operator, arguments, term.dtype, details)
    return done[root]

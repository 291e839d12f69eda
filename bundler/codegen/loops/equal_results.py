# SPDX-License-Identifier: Apache-2.0
"""`with_equal_results_once`: results of one kernel that are the same in each element are stored
once, and their readers read that one.

A model that hands a mask of booleans to each of its attentions has it turned into numbers as often:
each is an argument of an operator that is called, so each would have memory.  `schedule` calls it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from bundler.codegen.loops.fusion import LoopGroup
from bundler.codegen.loops.in_place_writes import read_from
from bundler.codegen.loops.loop_nodes import Buffer, Loop, Node, Reference
from bundler.codegen.loops.loop_terms import TermPool


def with_equal_results_once(
    pool: TermPool,
    groups: Sequence[LoopGroup],
    buffers: Mapping[str, Buffer],
    outputs: Collection[str],
) -> list[LoopGroup]:
    """Return the groups without loops that compute what another one of their kernel does.

    Args:
        pool: that the loops' terms are of.
        groups: in the order in which they run, none of several parts.
        buffers: of the program.
        outputs: buffers that leave the program, each of which keeps its own memory.
    """
    writers = Counter(name for group in groups for node in group.nodes for name in node.writes)
    # What is written once is never changed; an operator's view of it would keep its name.
    viewed = frozenset().union(*(one.bases for one in buffers.values()))
    own = {
        name
        for name, count in writers.items()
        if count == 1 and name not in viewed and buffers[name].source == "node"
    }
    same: dict[str, str] = {}
    found = []
    for group in groups:
        nodes: list[Node] = []
        known: dict[object, str] = {}
        for node in (_reading(pool, one, same) for one in group.nodes):
            if isinstance(node, Loop) and node.buffer in own and not node.is_product:
                key = (replace(node, buffer="", origins=frozenset()), buffers[node.buffer].layout)
                if known.setdefault(key, node.buffer) != node.buffer and node.buffer not in outputs:
                    same[node.buffer] = known[key]
                    continue
            nodes.append(node)
        unchanged = len(nodes) == len(group.nodes) and all(map(_is, nodes, group.nodes))
        found.append(group if unchanged else replace(group, nodes=tuple(nodes)))
    return found


def _is(one: Node, other: Node) -> bool:
    return one is other


def _reading(pool: TermPool, node: Node, same: Mapping[str, str]) -> Node:
    """Return a node that reads other buffers in the place of some."""
    gone = node.reads.intersection(same)
    if not gone:
        return node
    if not isinstance(node, Loop):
        keywords = tuple((name, _renamed(value, same)) for name, value in node.keywords)
        return replace(node, arguments=_renamed(node.arguments, same), keywords=keywords)
    value, terms = node.value, node.index_terms
    for name in sorted(gone):
        value = read_from(pool, value, name, same[name])
        terms = tuple((s, read_from(pool, term, name, same[name])) for s, term in terms)
    return replace(node, value=value, index_terms=terms)


def _renamed(value: Any, same: Mapping[str, str]) -> Any:
    if isinstance(value, Reference):
        return replace(value, buffer=same.get(value.buffer, value.buffer))
    if isinstance(value, (list, tuple)):
        return type(value)(_renamed(one, same) for one in value)
    return value

# SPDX-License-Identifier: Apache-2.0
"""`SourceNodes`: which nodes of the graph, and which lines of the user's program, a kernel
computes, as the comments that TorchInductor writes above a launch.

They are no part of a kernel's text, which is the same for equal kernels of all programs. `lower`
notes the nodes, `program` asks for the comments.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any

from bundler.codegen.graph_errors import user_line


class SourceNodes:
    """The nodes of one graph, as they are lowered, and the buffers that they fill."""

    def __init__(self) -> None:
        # Node -> its number; the graph's order is topological.
        self._numbers: dict[Any, int] = {}
        self._values: dict[Any, Any] = {}
        # Buffer -> the node that was lowered when it was made.
        self._makers: dict[str, Any] = {}
        self._filled: Mapping[str, Any] | None = None

    def lowered(self, node: Any, value: Any, buffers: Iterable[str]) -> None:
        """Note a node, in the order of the graph.

        Args:
            node: of the graph.
            value: what it became; a lazy tensor may get its buffer later.
            buffers: all that there are now, in the order in which they were made.
        """
        self._numbers[node] = len(self._numbers)
        self._values[node] = value
        for name in islice(buffers, len(self._makers), None):
            self._makers[name] = node

    def comment(self, buffers: Iterable[str]) -> tuple[str, ...]:
        """Return the lines of the comment of a launch that fills buffers, once all is lowered."""
        found: dict[Any, None] = {}
        for name in buffers:
            self._collect(self._node_of(name), found)
        nodes = sorted(found, key=self._numbers.__getitem__)
        written: dict[str, list[str]] = {}
        for node in nodes:
            written.setdefault(_source(node), []).append(node.name)
        operators = dict.fromkeys(filter(None, map(_operator, nodes)))
        lines = dict.fromkeys(filter(None, map(user_line, nodes)))
        first = f"# Topologically Sorted Source Nodes: [{', '.join(written)}], Original ATen: "
        return (
            f"{first}[{', '.join(operators)}]",
            "# Source node to ATen node mapping:",
            *(f"#   {one} => {', '.join(sorted(names))}" for one, names in sorted(written.items())),
            "# Source lines:",
            *(f"#   {line}" for line in lines),
            "# Graph fragment:",
            *(f"#   {line}" for node in nodes for line in str(node.format_node()).splitlines()),
        )

    def _node_of(self, buffer: str) -> Any:
        """Return the node whose value a buffer holds: the first, of views of it."""
        if self._filled is None:
            filled: dict[str, Any] = {}
            for node, value in self._values.items():
                name = getattr(value, "buffer", None)
                if name is not None:
                    filled.setdefault(name, node)
            self._filled = filled
        return self._filled.get(buffer, self._makers.get(buffer))

    def _collect(self, node: Any, found: dict[Any, None]) -> None:
        """Add a node, and those whose values are computed with it, since no buffer holds them."""
        left = [node]
        while left:
            one = left.pop()
            if one is None or one in found or one.op != "call_function":
                continue
            found[one] = None
            left += [
                before
                for before in one.all_input_nodes
                if getattr(self._values.get(before), "buffer", None) is None
            ]


def _source(node: Any) -> str:
    """Return what the user's program called a node's value, where torch says that."""
    before = node.meta.get("from_node")
    return str(before[0].name if before else node.name)


def _operator(node: Any) -> str:
    """Return the operator that was called, before torch took it apart; empty for what picks one of
    several results.
    """
    operator = node.meta.get("original_aten") or node.target
    packet = getattr(operator, "overloadpacket", operator)
    return "" if packet.__module__ == "_operator" else str(packet)

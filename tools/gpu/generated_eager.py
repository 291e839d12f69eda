# SPDX-License-Identifier: Apache-2.0
"""`Graphs`: what torch eager gives for a kernel of a recorded wrapper.

Above each kernel Inductor writes the part of the graph that it computes, one comment line a node.
`Graphs` reads these lines as data, calls the operators that they name with eager tensors, and
compares: `compare` gives it a launch whose arguments were noted. Nothing else in the wrapper says
what its kernels have to compute.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import itertools
import math
import operator
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from tools.gpu import generated_launches
from tools.gpu.generated_launches import Launch

_NODE = re.compile(r"#   %(\w+) : (?:Tensor \"(\w+)\[([\d, ]*)\]\[([\d, ]*)\]\S*\")?.*? = (.*)$")
_CALL = re.compile(r"call_function\[target=([\w.]+)\]\(args = (.*), kwargs = (\{.*\})\)$")
_DTYPES = {
    "bf16": torch.bfloat16,
    "f16": torch.float16,
    "f32": torch.float32,
    "f64": torch.float64,
    "i64": torch.int64,
    "i32": torch.int32,
    "b8": torch.bool,
    "u8": torch.uint8,
    "i8": torch.int8,
}
# A wrong assignment of inputs gives other numbers, so trying some cannot make a wrong kernel look
# right.
_MOST_TRIES = 800
# Where a graph has a type of few bits, Inductor rounds to it less often than eager, so its
# tolerance holds for what follows from it, too.
LOOSE = 2.0


@dataclass
class Node:
    """One line: a placeholder, or a call with the operator's name and its arguments as text."""

    name: str
    dtype: torch.dtype | None
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    operator: str = ""
    args: str = ""
    kwargs: str = "{}"


def _number(name: str) -> int:
    return int(name.rpartition("_")[2] or 0) if "_" in name else 0


@dataclass
class Graph:
    """The part of a graph that one kernel computes."""

    nodes: list[Node] = field(default_factory=list)
    returned: list[str] = field(default_factory=list)

    def items(self) -> list[str]:
        """Return the names of an operator's several results, in order: their numbers ascend, and no
        line of its own says it.
        """
        named = {name for node in self.nodes for name in re.findall(r"%(getitem_?\d*)", node.args)}
        inputs = {node.name for node in self.nodes if not node.operator} - {*self.returned}
        return sorted(
            (named | {name for name in self.returned if name.startswith("getitem")}) - inputs,
            key=_number,
        )


class Graphs:
    """The parts of a graph in a wrapper's text, by kernel."""

    def __init__(self, text: str) -> None:
        self.by_kernel: dict[str, Graph] = {}
        graph = Graph()
        for line in text.splitlines():
            if line.startswith("# Graph fragment"):
                graph = Graph()
            elif line.startswith("#   return "):
                graph.returned = [
                    name.strip("% ") for name in line.removeprefix("#   return ").split(",")
                ]
            elif match := _NODE.match(line):
                graph.nodes.append(_node(match))
            elif (match := re.match(r"(\w+) = async_compile\.triton\(", line)) is not None:
                self.by_kernel[match[1]] = graph

    def compare(self, launch: Launch) -> dict[str, Any]:
        """Return how far what our kernel wrote is from eager: the best of the ways to give its
        inputs to the graph.
        """
        graph = self.by_kernel.get(launch.name)
        if graph is None or launch.args is None:
            return {"eager": "no graph"}
        noted = _random(launch.cloned())
        before = [value for value in noted if isinstance(value, torch.Tensor)]
        args = generated_launches.launched(launch.ours.run, generated_launches.cloned(noted))
        after = [value for value in args if isinstance(value, torch.Tensor)]
        written = [one for one, old in zip(after, before, strict=True) if not _equal(one, old)]
        best: dict[str, Any] = {
            "eager": "no inputs fit",
            "off": math.inf,
            "written": len(written),
            "loose": LOOSE,
        }
        for given in itertools.islice(_assignments(graph, before), _MOST_TRIES):
            try:
                values = evaluated(graph, given)
            except (RuntimeError, ValueError, IndexError) as error:
                best.setdefault("raised", f"{type(error).__name__}: {error}"[:300])
                continue
            found = [_nearest(tensor, graph, given, values, before) for tensor in written]
            off = max((one for one, _ in found), default=0.0)
            if off < best["off"] or best["eager"] == "no inputs fit":
                best |= {
                    "eager": "compared",
                    "off": off,
                    "outputs": [
                        [str(t.dtype), *one] for t, one in zip(written, found, strict=True)
                    ],
                }
            if off <= 1.0:
                break
        return best


def _random(args: list[Any]) -> list[Any]:
    """Fill floats with random numbers: what the wrapper's harness leads to after some kernels may
    be no numbers, or zeros alone.
    """
    torch.manual_seed(1)
    for value in args:
        if isinstance(value, torch.Tensor) and value.dtype.is_floating_point:
            everything = value.as_strided(
                (value.untyped_storage().nbytes() // value.itemsize,), (1,), 0
            )
            everything.copy_(torch.randn(everything.shape, device=value.device))
    return args


def evaluated(graph: Graph, given: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Return the values of the nodes that follow from those of the placeholders."""
    importlib.import_module(
        "torch._inductor.inductor_prims"
    )  # operators of its own that a graph may have
    values: dict[str, Any] = dict(given)
    for node in graph.nodes:
        if not node.operator or node.name in values:
            continue
        with contextlib.suppress(
            KeyError
        ):  # what needs another kernel's result is not computed here
            args = _value(ast.parse(node.args.replace("%", "__"), mode="eval").body, values)
            found = _function(node.operator)(*args, **_value(_keywords(node.kwargs), values))
            values[node.name] = found
            if isinstance(found, tuple):
                values.update(zip(graph.items(), found, strict=False))
    return values


def _node(match: re.Match[str]) -> Node:
    name, kind, shape, stride, what = match.groups()
    node = Node(name, _DTYPES.get(kind or ""), _sizes(shape), _sizes(stride))
    if (call := _CALL.match(what)) is not None:
        node.operator, node.args, node.kwargs = call[1], call[2], call[3]
    return node


def _sizes(text: str | None) -> tuple[int, ...]:
    return tuple(int(part) for part in (text or "").split(",") if part.strip())


def _function(name: str) -> Any:
    if name in {"operator.getitem", "_operator.getitem"}:
        return operator.getitem
    found: Any = torch.ops
    for part in name.removeprefix("torch.ops.").split("."):
        found = getattr(found, part)
    return found


def _keywords(text: str) -> ast.expr:
    """Return the keywords, whose names stand without quotes."""
    quoted = re.sub(r"([{,]\s*)(\w+):", r"\1'\2':", text).replace("%", "__")
    # A device is written as text is: cuda:0.
    return ast.parse(re.sub(r"\bcuda:(\d+)", r"'cuda:\1'", quoted), mode="eval").body


def _value(node: ast.expr, values: Mapping[str, Any]) -> Any:
    """Return the value of an argument: data, a node's value, or a type of torch's."""
    match node:
        case ast.Tuple(elts=parts):
            return tuple(_value(part, values) for part in parts)
        case ast.List(elts=parts):
            return [_value(part, values) for part in parts]
        case ast.Dict(keys=keys, values=parts):
            return {
                ast.literal_eval(key): _value(part, values)
                for key, part in zip(keys, parts, strict=True)
                if key
            }
        case ast.Name(id=name) if name.startswith("__"):
            return values[name[2:]]
        case ast.Name(id="inf"):
            return float("inf")
        case ast.UnaryOp(op=ast.USub(), operand=ast.Name(id="inf")):
            return -float("inf")
        case ast.Attribute(value=ast.Name(id="torch"), attr=name):
            return getattr(torch, name)
    return ast.literal_eval(node)


def _assignments(graph: Graph, tensors: list[torch.Tensor]) -> Any:
    """Give each placeholder an argument of its type and number of elements; the first way keeps the
    order of both.
    """
    used = {
        name
        for node in graph.nodes
        if node.operator
        for name in re.findall(r"%(\w+)", node.args + node.kwargs)
    }
    computed = {node.name for node in graph.nodes if node.operator} | {*graph.items()}
    placeholders = [node for node in graph.nodes if not node.operator]
    # A name may be both a placeholder and a node: another kernel has computed it, or this one does.
    # Or a buffer stands for it.
    choices = [
        [node for node in placeholders if node.name in names] for names in (used - computed, used)
    ]
    absent = sorted(used - {node.name for node in graph.nodes})
    choices += [
        [replace(one, name=name)]
        for one in placeholders
        for name in absent
        if one.name.startswith("buf")
    ]
    for wanted in choices:
        fitting = [
            [t for t in tensors if t.dtype == node.dtype and t.numel() == math.prod(node.shape)]
            for node in wanted
        ]
        for chosen in itertools.product(*fitting):
            # A kernel reads each input through an argument of its own.
            if len({id(tensor) for tensor in chosen}) == len(chosen):
                yield {
                    node.name: _shaped(tensor, node)
                    for node, tensor in zip(wanted, chosen, strict=True)
                }


def _shaped(tensor: torch.Tensor, node: Node) -> torch.Tensor:
    """Return an argument with the sizes and strides of the node; the kernel sees memory alone."""
    return tensor.as_strided(node.shape, node.stride, tensor.storage_offset()).clone()


def _nearest(
    tensor: torch.Tensor,
    graph: Graph,
    given: Mapping[str, Any],
    values: Mapping[str, Any],
    args: list[torch.Tensor],
) -> tuple[float, str]:
    """Return how far a tensor is from the nearest node that it may be, in tolerances, and which
    that is.
    """
    from tools.gpu.generated_workers import TOLERANCES, distance

    types = {node.dtype for node in graph.nodes if node.dtype is not None}
    tolerance = max(TOLERANCES.get(dtype, 0.0) for dtype in types)
    nodes = {node.name: node for node in graph.nodes}
    found = [(math.inf, "")]
    for name in values.keys() - given.keys():
        value, node = values[name], nodes.get(name)
        if not isinstance(value, torch.Tensor):
            continue
        if value.dtype == tensor.dtype and value.numel() == tensor.numel():
            found.append(
                (
                    distance(
                        _shaped(tensor, node) if node else tensor.reshape(value.shape),
                        value,
                        tolerance,
                    ),
                    name,
                )
            )
        # A long sum is done by two kernels: the first leaves parts of it.
        parts = _sums(tensor, value.numel())
        found += [
            (distance(part.to(value.dtype), value.reshape(-1), tolerance), f"{name}, in parts")
            for part in parts
        ]
    if not any(name in values for name in graph.returned):
        # The second adds the parts, and the graph has no line for them.
        parts = [part for old in args for part in _sums(old, tensor.numel())]
        found += [
            (distance(tensor.reshape(-1), part.to(tensor.dtype), tolerance), "sum of parts")
            for part in parts
        ]
    return min(found)


def _sums(tensor: torch.Tensor, size: int) -> list[torch.Tensor]:
    """Return the sums of so many groups of a tensor's numbers, with the groups inside or
    outside.
    """
    count = tensor.numel() // max(size, 1)
    if count <= 1 or tensor.numel() % size or not tensor.dtype.is_floating_point:
        return []
    flat = tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset()).float()
    return [flat.view(count, size).sum(0), flat.view(size, count).sum(1)]


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    return bool(torch.equal(generated_launches.bytes_of(one), generated_launches.bytes_of(other)))

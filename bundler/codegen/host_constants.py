# SPDX-License-Identifier: Apache-2.0
"""`on_device`: tensors that a graph makes on the host of nothing but numbers, and copies to the
device, are made on the device.

Imports torch.  Relative positions and masks are often made so; each operator on the host would be a
call, and the copy would wait for the device.  What is exact, integers and what only moves elements,
is computed by kernels; the rest is computed once, by torch on the host, and is a constant of the
program: a logarithm on a GPU may have another last bit, and a bucket that is rounded from it then
is another one.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import unset_fake_temporarily

aten, prims = torch.ops.aten, torch.ops.prims
_COPIES = {aten._to_copy.default, prims.device_put.default}  # noqa: SLF001
# The same elements on every device, also of floats.
_EXACT = (
    "full full_like arange zeros ones clone copy _to_copy view expand permute unsqueeze squeeze"
    " slice select cat repeat select_scatter slice_scatter where eq ne lt le gt ge"
)
# Elements of a tensor that a program holds: a table of positions, not of data.
_MOST_ELEMENTS = 1 << 17


def on_device(module: fx.GraphModule) -> fx.GraphModule:
    """Return the module, or a copy that computes nothing on the host for the device."""
    copies = [node for node in module.graph.nodes if _host_source(node) is not None]
    if not copies:
        return module
    nodes: dict[fx.Node, fx.Node] = {}
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, nodes))
    made = fx.GraphModule(module, graph)
    made.meta = dict(module.meta)
    for number, node in enumerate(nodes[copy] for copy in copies):
        parts = _parts(node)
        if parts is None:
            continue
        if all(map(_is_exact, parts)):
            _make_there(node, parts)
        elif all(map(_is_small, parts)):
            name = f"_host_constant{number}"
            made.register_buffer(name, _computed(made, node, parts), persistent=False)
            with graph.inserting_before(node):
                held = graph.get_attr(name)
            held.meta = dict(node.meta)
            node.replace_all_uses_with(held)
    # AOTAutograd's graphs show what they change in schemas, so only what is dead goes.
    graph.eliminate_dead_code()
    made.recompile()
    return made


def _host_source(node: fx.Node) -> fx.Node | None:
    """Return the tensor on the host that a node copies to another device."""
    if node.target not in _COPIES:
        return None
    source, value = _source(node), node.meta["val"]
    return source if _device(source) == "cpu" != value.device.type else None


def _device(node: fx.Node) -> str:
    value = node.meta.get("val")
    return value.device.type if isinstance(value, torch.Tensor) else ""


def _parts(node: fx.Node) -> list[fx.Node] | None:
    """Return the operators on the host behind a copy, in their order; None where one of them takes
    an input, is random, or is not torch's own.
    """
    found: dict[fx.Node, None] = {}
    waiting = [*_tensors(node)]
    while waiting:
        part = waiting.pop()
        if part in found:
            continue
        if not _is_computed_of_numbers(part):
            return None
        found[part] = None
        waiting += _tensors(part)
    return [part for part in node.graph.nodes if part in found]


def _tensors(node: fx.Node) -> Iterator[fx.Node]:
    return (
        one for one in node.all_input_nodes if not isinstance(one.meta.get("val"), torch.SymInt)
    )


def _is_computed_of_numbers(node: fx.Node) -> bool:
    target = node.target
    if node.op == "get_attr":  # a number of the user's; of what is copied first, nobody has it
        return all(user.target is aten.lift_fresh_copy.default for user in node.users)
    return (
        isinstance(target, OpOverload)
        and target.namespace in {"aten", "prims"}
        and not target._schema.is_mutable  # noqa: SLF001  # torch shows a schema nowhere else
        and torch.Tag.nondeterministic_seeded not in target.tags
        and _device(node) == "cpu"
    )


def _is_exact(node: fx.Node) -> bool:
    if not isinstance(node.target, OpOverload):
        return False
    name = node.target._schema.name.rpartition("::")[2]  # noqa: SLF001
    tensors = [node, *_tensors(node)]
    if all(not one.meta["val"].dtype.is_floating_point for one in tensors):
        return not node.meta["val"].dtype.is_complex
    return name in _EXACT.split() and name != "arange"


def _is_small(node: fx.Node) -> bool:
    sizes = node.meta["val"].shape
    return all(type(size) is int for size in sizes) and sizes.numel() <= _MOST_ELEMENTS


def _make_there(copy: fx.Node, parts: list[fx.Node]) -> None:
    """Make on the device of a copy what it copies; what else reads the host's stays there."""
    device, graph = copy.meta["val"].device, copy.graph
    there: dict[fx.Node, fx.Node] = {}
    with graph.inserting_before(copy):
        for part in parts:
            made = there[part] = graph.node_copy(part, lambda one: there.get(one, one))
            if _device(part) == "cpu" and "device" in part.kwargs:
                made.kwargs = part.kwargs | {"device": device}
            made.meta = dict(part.meta) | {"val": _moved(part.meta["val"], device)}
    copy.replace_input_with(_source(copy), there[_source(copy)])


def _source(copy: fx.Node) -> fx.Node:
    (source,) = _tensors(copy)
    return source


def _moved(value: Any, device: torch.device) -> torch.Tensor:
    with value.fake_mode:
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)


def _computed(module: fx.GraphModule, copy: fx.Node, parts: list[fx.Node]) -> torch.Tensor:
    """Return what a copy has, on the host."""
    known: dict[fx.Node, Any] = {}
    with unset_fake_temporarily(), torch.no_grad():
        for part in parts:
            if isinstance(part.target, OpOverload):
                args, kwargs = fx.map_arg((part.args, part.kwargs), known.__getitem__)
                known[part] = part.target(*args, **kwargs)
            else:
                known[part] = operator.attrgetter(str(part.target))(module)
        value = copy.meta["val"]
        found = torch.empty_strided(tuple(value.shape), value.stride(), dtype=value.dtype)
        return found.copy_(known[_source(copy)])

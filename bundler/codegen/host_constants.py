# SPDX-License-Identifier: Apache-2.0
"""`on_device`: tensors that a graph makes on the host of nothing but numbers, and that operators of
the device read, are made on the device.

Imports torch.  Relative positions and masks are often made so; each operator on the host would be a
call, and the copy would wait for the device.  What has the same bits on every device, integers and
what only moves elements, is computed by kernels.  The rest, where its sizes are known and
torch.compile asks, is computed once, by torch on the host, and is a constant of the program: a
logarithm on a GPU may have another last bit, and a bucket that is rounded from it then is another
one.  A sum or a quotient of floats is taken for such a one, too, since kernels contract products
and approximate quotients.  Other computed floats are still called: of sizes that change, and of
programs that go into a bundle, which holds no constants.

Nothing moves away from the host: what the host reads too, returns or changes stays as it was, and
the device has its own.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils._pytree import tree_leaves, tree_map_only

aten, prims = torch.ops.aten, torch.ops.prims
# Operators of the device that take a tensor of any size from the host.
_COPIES = {aten.copy.default, aten.copy_.default, prims.device_put.default}
_COPIES |= {aten._to_copy.default}  # noqa: SLF001  # torch names it so
_INDEXING = frozenset({aten.index.Tensor, aten.index_put.default})
# A check of what tracing fixed already, as torch.export leaves it at copies: no reader.
_CHECK = aten._assert_tensor_metadata.default  # noqa: SLF001
# The same bits on every device, also of floats.
_EXACT = (
    "full full_like scalar_tensor zeros ones eye clone alias copy _to_copy view _unsafe_view"
    " expand permute transpose unsqueeze squeeze slice select diagonal flip cat repeat split"
    " split_with_sizes unbind select_scatter slice_scatter where eq ne lt le gt ge"
)
_EXACT_OF_INTEGERS = "arange sum cumsum"
# Elements of a tensor that a program holds: a table of positions, not of data.
_MOST_ELEMENTS = 1 << 17


def on_device(module: fx.GraphModule, *, constants: bool) -> fx.GraphModule:
    """Return the module, or a copy that computes on the host for the device nothing but what has to
    be; `constants` is whether it may get some.
    """
    if not _HostNumbers(module, constants=constants).reads:
        return module
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    made = fx.GraphModule(module, graph)
    made.meta = dict(module.meta)
    _HostNumbers(made, constants=constants).replace()
    made.recompile()
    return made


class _HostNumbers:
    """What a graph makes on the host of numbers alone.

    Attributes:
        made: each node of them, in their order.
        exact: those of the same bits on every device.
        held: those that can be constants.
        reads: (operator of the device, what it reads of those that can be made there).
    """

    def __init__(self, module: fx.GraphModule, *, constants: bool) -> None:
        self._module, self._constants = module, constants
        self.made: dict[fx.Node, None] = {}
        self.exact: set[fx.Node] = set()
        self.held: set[fx.Node] = set()
        there: set[fx.Node] = set()
        for node in module.graph.nodes:
            given, exact = _tensors(node), _is_exact(node)
            if not self._is_made_of_numbers(node) or not self.made.keys() >= set(given):
                continue
            self.made[node] = None
            if exact and self.exact.issuperset(given):
                self.exact.add(node)
            # A number that changes, as a size, is no part of a constant.
            if _is_small(node) and self.held.issuperset(node.all_input_nodes):
                self.held.add(node)
            if self._may_be_held(node) or (exact and there.issuperset(given)):
                there.add(node)
        found = [node for node in self.made if node in there]
        self.reads = [(user, one) for one in found for user in one.users if _is_read_by(user, one)]

    def _is_made_of_numbers(self, node: fx.Node) -> bool:
        if node.op == "get_attr":
            # The number of a `torch.tensor(...)` in the function: only copies of it are changed.
            lifted = all(user.target is aten.lift_fresh_copy.default for user in node.users)
            value = self._attribute(node)
            return lifted and type(value) is torch.Tensor and value.device.type == "cpu"
        if node.target is not operator.getitem and (
            not _is_torchs(node)
            or node.target._schema.is_mutable  # noqa: SLF001  # torch shows a schema nowhere else
            or torch.Tag.nondeterministic_seeded in node.target.tags
        ):
            return False
        return _devices(node) == {"cpu"}

    def _attribute(self, node: fx.Node) -> Any:
        return operator.attrgetter(str(node.target))(self._module)

    def replace(self) -> None:
        """Have operators of the device read what is made there, and forget what nobody reads."""
        wanted = self._behind((node for _, node in self.reads), self._is_rebuilt)
        constants = [node for node in wanted if not self._is_rebuilt(node)]
        numbers = self._computed(constants)
        (device,) = {user.meta["val"].device for user, _ in self.reads[:1]}
        there: dict[fx.Node, fx.Node] = {}
        for node in wanted:
            if node in numbers:
                there[node] = self._constant(node, numbers[node], device)
            else:
                there[node] = _rebuilt(node, there, device)
        for user, node in self.reads:
            user.replace_input_with(node, there[node])
        for node in reversed(self.made):
            if all(user.target is _CHECK for user in node.users):
                for check in [*node.users]:
                    self._module.graph.erase_node(check)
                self._module.graph.erase_node(node)

    def _is_rebuilt(self, node: fx.Node) -> bool:
        """Whether kernels compute a node; a single number is written into them."""
        return not self._may_be_held(node) or (node in self.exact and not _is_single(node))

    def _may_be_held(self, node: fx.Node) -> bool:
        return node in self.held and (self._constants or _is_single(node))

    def _behind(
        self, nodes: Iterable[fx.Node], goes_on: Callable[[fx.Node], bool]
    ) -> list[fx.Node]:
        """Return nodes and what they are made of, in the graph's order."""
        found, waiting = set(), list(nodes)
        while waiting:
            node = waiting.pop()
            if node not in found:
                found.add(node)
                waiting += _tensors(node) if goes_on(node) else []
        return [node for node in self.made if node in found]

    def _computed(self, nodes: list[fx.Node]) -> dict[fx.Node, torch.Tensor]:
        """Return what nodes are, on the host, each in memory of its own."""
        known: dict[fx.Node, Any] = {}
        with unset_fake_temporarily(), torch.no_grad():
            for part in self._behind(nodes, lambda _: True):
                if part.op == "get_attr":
                    known[part] = self._attribute(part)
                else:
                    args, kwargs = fx.map_arg((part.args, part.kwargs), known.__getitem__)
                    known[part] = part.target(*args, **kwargs)
            return {node: known[node].clone() for node in nodes}

    def _constant(self, node: fx.Node, value: torch.Tensor, device: torch.device) -> fx.Node:
        """Return a node that is a constant: on the device, but for a single number, which `lower`
        writes into kernels.

        What reads it makes new memory, so no result of the program is the constant itself.
        """
        name = f"_host_constant_{node.name}"
        self._module.register_buffer(name, value, persistent=False)
        with self._module.graph.inserting_before(node):
            held = self._module.graph.get_attr(name)
        fake = node.meta["val"]
        place = device if value.dim() else fake.device
        held.meta = dict(node.meta) | {"val": _like(fake, value.stride(), place)}
        return held


def _rebuilt(node: fx.Node, there: dict[fx.Node, fx.Node], device: torch.device) -> fx.Node:
    """Return what computes a node on the device, of what is there."""
    with node.graph.inserting_before(node):
        made = node.graph.node_copy(node, lambda one: there.get(one, one))
    # Only memory of the host is pinned.
    keywords = {key: value for key, value in node.kwargs.items() if key != "pin_memory"}
    if isinstance(node.target, OpOverload) and _takes_device(node.target):
        keywords["device"] = device
    made.kwargs = keywords
    made.meta = dict(node.meta) | {
        "val": tree_map_only(
            torch.Tensor, lambda fake: _like(fake, fake.stride(), device), node.meta["val"]
        )
    }
    return made


def _takes_device(target: OpOverload) -> bool:
    return any(argument.name == "device" for argument in target._schema.arguments)  # noqa: SLF001


def _like(fake: Any, strides: Any, device: torch.device) -> torch.Tensor:
    with fake.fake_mode:
        return torch.empty_strided(fake.shape, strides, dtype=fake.dtype, device=device)


def _is_read_by(user: fx.Node, node: fx.Node) -> bool:
    """Whether an operator of the device reads a tensor of the host, wherever that lies."""
    value, places = node.meta.get("val"), _devices(user)
    if not isinstance(value, torch.Tensor) or not _is_torchs(user) or places <= {"cpu"}:
        return False
    if user.target in _INDEXING:
        # How many elements a mask takes is asked on the host.
        return node in user.args[1] and value.dtype is not torch.bool
    is_number = not value.dim() and torch.Tag.pointwise in user.target.tags
    return user.target in _COPIES or is_number


def _is_torchs(node: fx.Node) -> bool:
    return isinstance(node.target, OpOverload) and node.target.namespace in {"aten", "prims"}


def _is_exact(node: fx.Node) -> bool:
    """Whether an operator has the same bits on every device, of the same bits."""
    if node.target is operator.getitem:
        return True
    if not _is_torchs(node):
        return False
    name = node.target._schema.name.rpartition("::")[2]  # noqa: SLF001
    dtypes = {leaf.dtype for one in (node, *_tensors(node)) for leaf in _leaves(one)}
    if any(dtype.is_complex for dtype in dtypes):
        return False
    integers = not any(dtype.is_floating_point for dtype in dtypes)
    pointwise = torch.Tag.pointwise in node.target.tags
    of_integers = integers and (pointwise or name in _EXACT_OF_INTEGERS.split())
    return of_integers or name in _EXACT.split()


def _is_single(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and not value.dim()


def _is_small(node: fx.Node) -> bool:
    sizes = [leaf.shape for leaf in _leaves(node)]
    return all(
        all(type(size) is int for size in one) and one.numel() <= _MOST_ELEMENTS for one in sizes
    )


def _tensors(node: fx.Node) -> list[fx.Node]:
    """Return what an operator takes, without sizes and other numbers."""
    return [one for one in node.all_input_nodes if one.op == "get_attr" or _leaves(one)]


def _devices(node: fx.Node) -> set[str]:
    return {leaf.device.type for leaf in _leaves(node)}


def _leaves(node: fx.Node) -> list[torch.Tensor]:
    return [one for one in tree_leaves(node.meta.get("val")) if isinstance(one, torch.Tensor)]

# SPDX-License-Identifier: Apache-2.0
"""`read_graph`: an FX graph of ATen operators, with fake tensors, becomes loops and extern calls.  Imports torch, as `graph_tracing` does.

`program_builder` calls it.  Sizes that torch keeps symbolic become symbols `ks0`, `ks1`, ... in the order in which inputs show them.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch import fx
from torch._ops import HigherOrderOperator, OpOverload
from torch.utils._pytree import tree_leaves
from torch.utils._sympy import functions

from bundler.codegen.graph_tracing import RETURNED_INPUTS
from bundler.codegen.index_functions import FloorDiv, owned
from bundler.codegen.lazy_tensors import GraphBuilder, LazyTensor
from bundler.codegen.loop_nodes import Reference, TensorLayout, TorchValue
from bundler.codegen.lowerings import HIGHER_ORDER, RefusedOperator, lower
from bundler.codegen.operator_calls import OperatorCall
from bundler.errors import UnsupportedOperator

_SHAPES = frozenset(
    getattr(torch.ops.aten, name) for name in ("sym_size", "sym_stride", "sym_numel", "sym_storage_offset")
)
_ALIGNED_BYTES = 16
_LARGEST_NARROW = 2**31 - 1
_ASSEMBLY = "inline_asm_elementwise"
# Parameters that say where and how memory is taken, which no kernel is told.
_PLACEMENT = frozenset(
    {"device", "layout", "pin_memory", "memory_format", "requires_grad", "non_blocking", "generator"}
)


@dataclass
class ReadGraph:
    """What a graph became.

    Attributes:
        builder: buffers and nodes.
        inputs: name of a buffer, or symbol of a size, for each argument; None for one that is neither.
        outputs: a buffer seen through a layout, a size, or None, for each result.
        constants: tensors that the graph holds, by buffer.
        hints: symbol of a size -> its value in the example.
        fallbacks: operators that are called as they are.
        device: where the tensors lie, as torch names it.
        guarded: has torch guard that a size is at most 2**31 - 1 in every call of what it compiles; returns False where torch takes no guard any more.
    """

    builder: GraphBuilder
    inputs: list[str | sympy.Symbol | None] = field(default_factory=list)
    outputs: list[Reference | sympy.Expr | None] = field(default_factory=list)
    constants: dict[str, torch.Tensor] = field(default_factory=dict)
    hints: dict[sympy.Symbol, int] = field(default_factory=dict)
    fallbacks: list[RefusedOperator] = field(default_factory=list)
    device: str = "cpu"
    guarded: Callable[[sympy.Expr], bool] = lambda _: False


def read_graph(module: fx.GraphModule) -> ReadGraph:
    """Lower every operator of a graph.

    Args:
        module: functional but for `copy_` to inputs; its nodes have fake tensors as `meta["val"]`.

    Raises:
        UnsupportedOperator: a node that is no ATen operator, as a higher-order one; the whole graph has to run as it is then.
    """
    return _Reader(module).read()


class _Reader:
    def __init__(self, module: fx.GraphModule) -> None:
        self._module = module
        self._graph = ReadGraph(GraphBuilder())
        self._values: dict[fx.Node, Any] = {}
        self._symbols: dict[sympy.Symbol, sympy.Symbol] = {}
        self._mutations: list[tuple[str, LazyTensor]] = []
        self._environment: Any = None
        self._graph.guarded = self._guarded

    def read(self) -> ReadGraph:
        for node in self._module.graph.nodes:
            self._values[node] = self._value_of(node)
        return self._graph

    def _value_of(self, node: fx.Node) -> Any:
        match node.op:
            case "placeholder":
                return self._input(node)
            case "get_attr":
                return self._constant(node)
            case "call_function":
                return self._called(node)
            case "output":
                return self._finish(node)
        raise UnsupportedOperator(
            f"{node.op} {node.target}: expected a call of an ATen operator", operator=str(node.target)
        )

    # Inputs ---------------------------------------------------------------------------------------------------------------

    def _input(self, node: fx.Node) -> Any:
        value, number = node.meta.get("val"), len(self._graph.inputs)
        if isinstance(value, torch.Tensor):
            name = f"arg{number}"
            self._graph.inputs.append(name)
            aligned = _is_aligned(value)
            tensor = self._graph.builder.stored(name, self._layout(value), "input", aligned=aligned)
            tensor.storage_offset = self._size(value.storage_offset())
            return tensor
        if isinstance(value, torch.SymInt):
            expr = self._size(value)
            self._graph.inputs.append(expr if isinstance(expr, sympy.Symbol) else None)
            return expr
        self._graph.inputs.append(None)
        return value

    def _constant(self, node: fx.Node) -> Any:
        value = self._module
        for part in str(node.target).split("."):
            value = getattr(value, part)
        if not isinstance(value, torch.Tensor):
            raise UnsupportedOperator(
                f"{node.target}: the graph holds a {type(value).__name__}", operator=str(node.target)
            )
        builder, fake = self._graph.builder, node.meta.get("val", value)
        if value.dim() == 0 and value.device.type == "cpu" and type(value) is torch.Tensor:
            number, dtype = value.item(), dtype_name(value.dtype)
            return builder.lazy((), dtype, lambda _: builder.pool.constant(number, dtype), frozenset())
        name = f"constant{len(self._graph.constants)}"
        self._graph.constants[name] = value
        return builder.stored(name, self._layout(fake), "constant")

    # Operators ------------------------------------------------------------------------------------------------------------

    def _called(self, node: fx.Node) -> Any:
        value = node.meta.get("val")
        number = isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool, int, float, bool))
        if number and (not isinstance(node.target, OpOverload) or node.target.overloadpacket in _SHAPES):
            return self._size(value)
        if node.target is operator.getitem:
            source, key = node.args
            return self._values[source][key]
        if isinstance(node.target, HigherOrderOperator) and str(node.target) == _ASSEMBLY:
            return self._assembly(node)
        if not isinstance(node.target, OpOverload):
            raise UnsupportedOperator(f"{node.target}: no operator of ATen", operator=str(node.target))
        if node.target is torch.ops.aten.copy_.default:
            return self._mutated(node)
        if node.target._schema.is_mutable:  # noqa: SLF001  # torch shows a schema nowhere else
            raise UnsupportedOperator(f"{node.target}: changes its arguments", operator=str(node.target))
        return self._lowered(node)

    def _lowered(self, node: fx.Node) -> Any:
        value = node.meta.get("val")
        single = not isinstance(value, (list, tuple))
        results = tuple(self._result(item) for item in ([value] if single else value))
        found = lower(self._graph.builder, self._operator_call(node, results, single=single), self._graph.fallbacks)
        for tensor, layout, given in zip(found, results, [value] if single else value, strict=True):
            if tensor is not None and layout is not None:
                tensor.storage_offset = self._size(given.storage_offset())
                tensor.sizes = layout.sizes  # the same numbers, as torch writes them
                if tensor.strides is None and _is_dense(layout):
                    tensor.strides = layout.strides
                self._graph.builder.mark_reuse(tensor, len(node.users))
        return found[0] if single else found

    def _assembly(self, node: fx.Node) -> LazyTensor:
        """Return the result of torch's operator for assembly, which takes tensors and texts."""
        keywords = {name: self._argument(item) for name, item in node.kwargs.items()}
        positional = tuple(self._argument(item) for item in node.args)
        results = (self._result(node.meta["val"]),)
        call = OperatorCall(
            f"{HIGHER_ORDER}.{_ASSEMBLY}.default", {}, positional, keywords, results, True, None, frozenset({_ASSEMBLY})
        )
        (found,) = lower(self._graph.builder, call, self._graph.fallbacks)
        assert found is not None
        return found

    def _operator_call(self, node: fx.Node, results: tuple[TensorLayout | None, ...], *, single: bool) -> OperatorCall:
        schema = node.target._schema  # noqa: SLF001
        positional = tuple(self._argument(item) for item in node.args)
        keywords = {name: self._argument(item) for name, item in node.kwargs.items()}
        named = {argument.name: value for argument, value in zip(schema.arguments, positional, strict=False)} | keywords
        arguments = {
            name: value.name if isinstance(value, TorchValue) else value
            for name, value in named.items()
            if name not in _PLACEMENT
        }
        return OperatorCall(
            str(node.target), arguments, positional, keywords, results, single, _operand_dtype(node), _origins(node),
            view=any(result.alias_info is not None for result in schema.returns),
        )  # fmt: skip

    def _argument(self, item: Any) -> Any:
        if isinstance(item, fx.Node):
            return self._values[item]
        if isinstance(item, (list, tuple)):
            return [self._argument(part) for part in item]
        for kind, cls in _TORCH_KINDS.items():
            if isinstance(item, cls):
                return TorchValue(kind, str(item).removeprefix("torch."))
        if isinstance(item, torch.Generator):
            raise UnsupportedOperator("a generator of random numbers: expected torch's own", operator="generator")
        return item

    def _result(self, value: Any) -> TensorLayout | None:
        return self._layout(value) if isinstance(value, torch.Tensor) else None

    # Results --------------------------------------------------------------------------------------------------------------

    def _mutated(self, node: fx.Node) -> Any:
        target, value = (self._values[argument] for argument in node.args[:2])
        if not isinstance(target, LazyTensor) or target.buffer is None:
            raise UnsupportedOperator("aten.copy_: changes what is no input", operator="aten.copy_")
        self._mutations.append((target.buffer, value))
        return value

    def _finish(self, node: fx.Node) -> None:
        builder = self._graph.builder
        values = [self._argument(item) for item in tree_leaves(node.args[0])]
        # Before any input is changed, everything that is read of the old one is computed.
        kept = [(buffer, self._computed(value)) for buffer, value in self._mutations]
        self._graph.outputs = [self._returned(place) or self._output(value) for place, value in enumerate(values)]
        for buffer, value in kept:
            builder.write(buffer, value, builder.buffers[buffer].layout)

    def _returned(self, place: int) -> Reference | None:
        """Return the input that a result is, where the program changes that input: no memory of its own, nor a store."""
        number = self._module.meta.get(RETURNED_INPUTS, {}).get(place)
        name = f"arg{number}"
        changed = {buffer for buffer, _ in self._mutations}
        return Reference(name, self._graph.builder.buffers[name].layout) if name in changed else None

    def _computed(self, value: LazyTensor) -> LazyTensor:
        if len(self._mutations) > 1:
            self._graph.builder.realize(value)
        return value

    def _output(self, value: Any) -> Reference | sympy.Expr | None:
        if isinstance(value, LazyTensor):
            builder = self._graph.builder
            # What torch would return without a copy is returned so: an input, or a view of memory that exists.
            given = value.buffer is not None and builder.buffers[value.buffer].source != "node"
            seen = builder.strided_view(value) if value.is_view or given else None
            if seen is not None and seen.buffer not in {buffer for buffer, _ in self._mutations}:
                return seen
            if given:  # an input that the program changes: what it held before
                value = LazyTensor(value.sizes, value.dtype, value.at, value.origins, strides=value.strides)
            name = builder.realize(value)
            return Reference(name, builder.buffers[name].layout)
        return None if value is None else sympy.sympify(value)

    # torch's values as ours -------------------------------------------------------------------------------------------------

    def _layout(self, tensor: torch.Tensor) -> TensorLayout:
        dtype = dtype_name(tensor.dtype)
        if tensor.layout is not torch.strided or tensor.is_quantized:
            raise UnsupportedOperator(f"a tensor of layout {tensor.layout}: expected a strided one", operator="layout")
        sizes, strides = (tuple(map(self._size, part)) for part in (tensor.shape, tensor.stride()))
        if tensor.device.type != "cpu":
            self._graph.device = str(tensor.device)
        return TensorLayout(dtype, sizes, strides)

    def _size(self, value: Any) -> sympy.Expr:
        if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            node = value.node
            return self._renamed(node.expr, node)
        return sympy.sympify(value)

    def _guarded(self, size: sympy.Expr) -> bool:
        theirs = {ours: symbol for symbol, ours in self._symbols.items()}
        if self._environment is None or self._environment.frozen:
            return False
        return bool(self._environment.evaluate_expr(sympy.Le(_of_torch(size.xreplace(theirs)), _LARGEST_NARROW)))

    def _renamed(self, expr: sympy.Expr, node: Any) -> sympy.Expr:
        self._environment = node.shape_env
        for symbol in sorted(expr.free_symbols - self._symbols.keys(), key=str):
            ours = sympy.Symbol(f"ks{len(self._symbols)}", integer=True, positive=True)
            self._symbols[symbol] = ours
            hint = _hint(node, symbol)
            if hint is not None:
                self._graph.hints[ours] = hint
        return _translated(expr, self._symbols)


_TORCH_KINDS: Mapping[str, type] = {
    "dtype": torch.dtype,
    "device": torch.device,
    "memory_format": torch.memory_format,
    "layout": torch.layout,
}


def dtype_name(dtype: torch.dtype) -> str:
    """Return a dtype's name without `torch.`."""
    return str(dtype).removeprefix("torch.")


def _hint(node: Any, symbol: sympy.Symbol) -> int | None:
    environment = node.shape_env
    known = getattr(environment, "backed_var_to_val", None) or getattr(environment, "var_to_val", {})
    value = known.get(symbol)
    return None if value is None else int(value)


def _translated(expr: sympy.Expr, symbols: Mapping[sympy.Symbol, sympy.Symbol]) -> sympy.Expr:
    """Return an expression of torch's with our symbols and integer functions."""
    return owned(expr.xreplace(dict(symbols)))


def _of_torch(expr: sympy.Expr) -> sympy.Expr:
    """Return an expression with torch's functions in the place of ours of the same name."""
    if not expr.args:
        return expr
    made = (
        getattr(functions, type(expr).__name__, expr.func)
        if type(expr).__module__ == FloorDiv.__module__
        else expr.func
    )
    return made(*map(_of_torch, expr.args))


def _is_aligned(tensor: torch.Tensor) -> bool:
    """Whether a tensor's offset in its storage is a multiple of 16 bytes, as that of a whole tensor is."""
    offset = tensor.storage_offset()
    return isinstance(offset, int) and offset * tensor.element_size() % _ALIGNED_BYTES == 0


def _is_dense(layout: TensorLayout) -> bool:
    """Whether every element of the memory that a tensor spans belongs to it, once; for sizes that are known."""
    if not all(part.is_Integer for part in (*layout.sizes, *layout.strides)):
        return False
    expected = 1
    for stride, size in sorted(zip(layout.strides, layout.sizes, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def _operand_dtype(node: fx.Node) -> str | None:
    """Return what torch promotes the first tensor operands of a node to."""
    values: list[Any] = [_example(argument) for argument in node.args[:2]]
    found = [value for value in values if isinstance(value, (torch.Tensor, int, float, bool))]
    tensors = [value for value in found if isinstance(value, torch.Tensor)]
    if not tensors:
        return None
    return dtype_name(tensors[0].dtype if len(found) == 1 else torch.result_type(*found))


def _example(argument: Any) -> Any:
    return argument.meta.get("val") if isinstance(argument, fx.Node) else argument


def _origins(node: fx.Node) -> frozenset[str]:
    """Return the name of the operator that the user's program called, before torch took it apart."""
    original = node.meta.get("original_aten")
    name = str(original) if original is not None else str(node.target)
    return frozenset({name.split(".")[1].lstrip("_") if "." in name else name})

# SPDX-License-Identifier: Apache-2.0
"""`lower_graph`: an FX graph of ATen operators, with fake tensors, becomes loops and extern calls.
Imports torch, as `trace` does.

`schedule` calls it. Sizes that torch keeps symbolic become symbols `ks0`, `ks1`, ... in the order
in which inputs show them.

Kernels run on the one device of the graph; tensors on the host beside it are for `host_tensors`.
The random numbers of a checkpointed part are drawn twice: `run_and_save_rng_state` keeps the state
of the generator before an operator of the forward graph, `run_with_rng_state` calls the operator of
the backward graph in that state. Both become calls of operators that are defined here, beside the
operator itself.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

import sympy
import torch
from torch import fx
from torch._guards import detect_fake_mode
from torch._ops import HigherOrderOperator, OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils._sympy import functions

from bundler.codegen.biases import added_behind
from bundler.codegen.channels_last import (
    CALLERS_RESULTS,
    DONATED,
    FREED,
    STORED_STRIDES,
    has_images,
    has_one_channel,
    in_channels_last,
    is_convolution,
)
from bundler.codegen.determinism import refuse_unordered
from bundler.codegen.gradient_sums import running_sums
from bundler.codegen.graph_errors import located, user_line
from bundler.codegen.loops.data_types import DATA_TYPES, data_type
from bundler.codegen.loops.index_functions import FloorDiv
from bundler.codegen.loops.lazy_tensors import (
    GraphBuilder,
    LazyTensor,
    Strides,
    are_same_strides,
    variables,
)
from bundler.codegen.loops.loop_nodes import (
    Buffer,
    Loop,
    Reference,
    TensorLayout,
    TorchValue,
    channels_last_strides,
    contiguous_strides,
)
from bundler.codegen.loops.loop_terms import Term, loads_of
from bundler.codegen.loops.read_order import reads_rows
from bundler.codegen.lowerings.host_tensors import HostTensors
from bundler.codegen.lowerings.operator_calls import OperatorCall
from bundler.codegen.lowerings.operator_lowerings import HIGHER_ORDER, RefusedOperator, lower
from bundler.codegen.lowerings.product_lowerings import is_patches
from bundler.codegen.lowerings.size_values import SizeValues, guards_of
from bundler.codegen.lowerings.view_lowerings import permuted, reshaped
from bundler.codegen.pixel_products import as_images, is_of_pixels, pixel_product
from bundler.codegen.source_nodes import SourceNodes
from bundler.codegen.trace import EXPORTED, MODULE_NAMES, RETURNED_INPUTS
from bundler.errors import UnsupportedOperator
from bundler.runtime.program.device_tensors import item_bytes
from bundler.runtime.program.program_plan import HOST

_SHAPES = frozenset(
    getattr(torch.ops.aten, name)
    for name in ("sym_size", "sym_stride", "sym_numel", "sym_storage_offset")
)
# By its schema the result is new memory; in fact it shares that of its argument.
_UNSAFE_VIEWS = frozenset({torch.ops.aten._unsafe_view.default})  # noqa: SLF001
_SAME = frozenset({torch.ops.aten.alias.default, torch.ops.aten.detach.default})
# Checks of what tracing fixed already, so every call of the program fulfils them.
_CHECKED_IN_TRACING = frozenset({torch.ops.aten._assert_tensor_metadata})  # noqa: SLF001
# Triton compiles wider loads for addresses that are multiples of this.
_ALIGNED_BYTES = 16
_LARGEST_NARROW = 2**31 - 1
_NUMBERS = frozenset(
    {torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}
    | {torch.float16, torch.bfloat16, torch.float32, torch.float64}
)
_FLOATS = frozenset({"float16", "bfloat16", "float32", "float64"})
_IMAGE_DIMENSIONS, _SEQUENCE_DIMENSIONS = 4, 3
_CONVERSIONS = frozenset({"aten._to_copy.default", "prims.convert_element_type.default"})
_ASSEMBLY = "inline_asm_elementwise"
_SCAN = "associative_scan"
# torch's operator around one with side effects, which takes and returns a token for their order.
_EFFECT = "with_effects"
# torch's operators around one whose random numbers the backward graph draws again.
_SAVED_STATE, _GIVEN_STATE = "run_and_save_rng_state", "run_with_rng_state"
# Parameters that say where and how memory is allocated: the layout of the result has that already.
_PLACEMENT = frozenset(
    {
        "device",
        "layout",
        "pin_memory",
        "memory_format",
        "requires_grad",
        "non_blocking",
        "generator",
    }
)
CPU = "cpu"
_RNG_STATE, _SET_RNG_STATE = (
    "triton_bundler.rng_state.default",
    "triton_bundler.set_rng_state.default",
)
_LIBRARY = torch.library.Library("triton_bundler", "DEF")


@dataclass(frozen=True)
class NarrowGuard:
    """A size of torch's, and whether it is at most 2**31 - 1, which torch guards from then on.

    Attributes:
        size: in torch's symbols.
        fits: what torch said.
        added: how many guards torch had more afterwards.
    """

    size: sympy.Expr
    fits: bool
    added: int = 0


@dataclass
class LoweredGraph:
    """What a graph became.

    Attributes:
        builder: buffers and nodes.
        inputs: name of a buffer, symbol of a size, or the example's number, for each argument; None
            for one that is none of them.
        outputs: a buffer seen through a layout, a size, or None, for each result.
        constants: tensors that the graph holds, by buffer.
        attributes: where the graph's module has each of these, by buffer.
        names: what the user's module calls each, by buffer.
        hints: symbol of a size -> its value in the example.
        values: name -> expression over sizes that the host computes.
        guards: conditions on sizes that every call of the program is checked by.
        conditions: returns those under which the graph is the function's.
        callers_results: of a forward graph, how many results the caller sees; those behind them are
            for backward, which is told their strides. None where the caller sees all.
        freed: inputs that nobody has when the program read them: what was saved for backward.
        donated: those of them whose memory the program may write over.
        fallbacks: operators that are called as they are.
        device: where the tensors lie, as torch names it.
        changed: buffers of inputs, and of constants, that the program changes.
        guarded: has torch guard that a size is at most 2**31 - 1 in every call of what it compiles;
            returns False where torch takes no guard any more.
        asked: what `guarded` asked torch for.
        sources: which nodes fill which buffers.
    """

    builder: GraphBuilder
    inputs: list[str | sympy.Symbol | float | None] = field(default_factory=list)
    outputs: list[Reference | sympy.Expr | None] = field(default_factory=list)
    constants: dict[str, torch.Tensor] = field(default_factory=dict)
    attributes: dict[str, str] = field(default_factory=dict)
    names: dict[str, tuple[str, ...]] = field(default_factory=dict)
    hints: dict[sympy.Symbol, int] = field(default_factory=dict)
    values: dict[str, str] = field(default_factory=dict)
    guards: list[str] = field(default_factory=list)
    fallbacks: list[RefusedOperator] = field(default_factory=list)
    device: str = "cpu"
    changed: frozenset[str] = frozenset()
    guarded: Callable[[sympy.Expr], bool] = lambda _: False
    conditions: Callable[[], list[str]] = list
    asked: list[NarrowGuard] = field(default_factory=list)
    callers_results: int | None = None
    freed: frozenset[str] = frozenset()
    donated: frozenset[str] = frozenset()
    sources: SourceNodes = field(default_factory=SourceNodes)


def lower_graph(
    module: fx.GraphModule,
    *,
    deterministic: bool = False,
    templates: bool | Collection[fx.Node] = False,
    unmeasured: Collection[fx.Node] = (),
) -> LoweredGraph:
    """Lower every operator of a graph.

    Args:
        module: functional but for `copy_` to inputs; its nodes have fake tensors as `meta["val"]`.
        deterministic: let no kernel write in an order that is open, as after
            `torch.use_deterministic_algorithms(True)`.
        templates: whether products of matrices and attention become kernels, or which nodes do.
        unmeasured: those of them whose candidates are not worth a measurement.

    Raises:
        UnsupportedOperator: a node that is no ATen operator, as a higher-order one; the whole graph
            has to run as it is then; or, where the order has to be the same and torch's switch is
            off, an operator of torch's that has none.
    """
    ordered = torch.are_deterministic_algorithms_enabled()
    graph = _Reader(
        module,
        deterministic=deterministic or ordered,
        templates=templates,
        unmeasured=unmeasured,
    ).read()
    if deterministic and not ordered:
        refuse_unordered(graph.builder.nodes)
    return graph


class _Reader:
    def __init__(
        self,
        module: fx.GraphModule,
        *,
        deterministic: bool,
        templates: bool | Collection[fx.Node],
        unmeasured: Collection[fx.Node],
    ) -> None:
        self._module = module
        self._graph = LoweredGraph(GraphBuilder())
        self._graph.builder.deterministic = deterministic
        self._values: dict[fx.Node, Any] = {}
        # Nodes whose values leave the graph and are read inside of it too, so that both must have
        # the same bits.
        self._kept = _kept_nodes(module.graph)
        chosen = module.graph.nodes if templates is True else templates or ()
        self._templates, self._unmeasured = frozenset(chosen), frozenset(unmeasured)
        # Of products, which convolutions are with all templates, none gains by it.
        self._channels_last = frozenset() if templates is True else in_channels_last(module)
        self._added_behind = added_behind(module) - self._templates
        self._sums = running_sums(module, self._templates)
        self._summed = {one.product: one for one in self._sums.values()}
        # (Buffer of an input, what it becomes), in the order of the graph.
        self._mutations: list[tuple[str, LazyTensor]] = []
        # Lazy tensors that belong to a node, by id; kept alive, so that no id is used twice.
        self._bound_tensors: dict[int, LazyTensor] = {}
        self._environment: Any = None
        self._sizes = SizeValues(self._example_of, self._bounds_of)
        self._graph.guarded, self._graph.hints = self._guarded, self._sizes.hints
        self._graph.conditions = self.conditions
        self._graph.callers_results = module.meta.get(CALLERS_RESULTS)
        self._graph.device = program_device(n.meta.get("val") for n in module.graph.nodes)
        self._host = HostTensors(self._graph.builder, self._graph.fallbacks, self._graph.device)
        self._graph.builder.hints = self._sizes.hints
        self._graph.builder.precision = float32_precision()

    def read(self) -> LoweredGraph:
        for node in self._module.graph.nodes:
            known = len(self._graph.fallbacks)
            with located(node):
                self._values[node] = self._value_of(node)
            self._graph.sources.lowered(node, self._values[node], self._graph.builder.buffers)
            for number, called in enumerate(self._graph.fallbacks[known:], known):
                self._graph.fallbacks[number] = replace(called, line=user_line(node))
        self._graph.values = {name: value.text for name, value in self._sizes.values.items()}
        self._check_shown()
        return self._graph

    def _check_shown(self) -> None:
        """Raise for a size that no input shows."""
        shown = {item for item in self._graph.inputs if isinstance(item, sympy.Symbol)}
        for item in self._graph.inputs:
            if isinstance(item, str):
                layout = self._graph.builder.buffers[item].layout
                shown |= {*layout.sizes, *layout.strides}
        hidden = sorted(map(str, set(self._sizes.sizes.values()) - shown))
        if hidden:
            raise UnsupportedOperator(
                f"the sizes {', '.join(hidden)} are sizes, strides or numbers of no input: expected"
                " to read each of them there",
                operator="a size that no input shows",
            )

    def conditions(self) -> list[str]:
        """Return the conditions on sizes under which the graph is the function's."""
        exported = bool(self._module.meta.get(EXPORTED))
        return (
            []
            if self._environment is None
            else guards_of(self._environment, self._sizes, ranges=not exported)
        )

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
            f"{node.op} {node.target}: expected a call of an ATen operator",
            operator=str(node.target),
        )

    # --------------------------------------------------------------------------------------- Inputs

    def _input(self, node: fx.Node) -> Any:
        value, number = node.meta.get("val"), len(self._graph.inputs)
        # torch passes None for a token.
        if _is_token(node):
            self._graph.inputs.append(None)
            return None
        if isinstance(value, torch.Tensor):
            name = f"arg{number}"
            self._graph.inputs.append(name)
            layout, own = self._layout(value), node.meta.get(STORED_STRIDES)
            if own is not None:
                own = tuple(map(sympy.sympify, own))
                layout = replace(layout, strides=own)
            aligned = _is_aligned(value) and not layout.device
            if FREED in node.meta:
                self._graph.freed |= {name}
                if DONATED in node.meta:
                    self._graph.donated |= {name}
            tensor = self._graph.builder.stored(name, layout, "input", aligned=aligned)
            tensor.own_strides = own
            return self._bound(tensor, value, None)
        if isinstance(value, torch.SymInt):
            expr = self._size(value)
            self._graph.inputs.append(expr if isinstance(expr, sympy.Symbol) else None)
            return expr
        if isinstance(value, torch.SymFloat):
            self._environment = value.node.shape_env
            symbol = self._sizes.given(value.node.expr, "float64")
            self._graph.inputs.append(symbol)
            return self._on_host(symbol, "float64")
        self._graph.inputs.append(value if isinstance(value, (bool, int, float)) else None)
        return value

    def _constant(self, node: fx.Node) -> Any:
        value = self._module
        for part in str(node.target).split("."):
            value = getattr(value, part)
        if isinstance(value, fx.GraphModule) and all(str(u.target) == _SCAN for u in node.users):
            return value
        if not isinstance(value, torch.Tensor):
            raise UnsupportedOperator(
                f"{node.target}: the graph holds a {type(value).__name__}",
                operator=str(node.target),
            )
        builder, fake = self._graph.builder, node.meta.get("val", value)
        # A number that the graph holds is written into the kernels that use it, unless it changes.
        # So is none that a module names: other weights have other ones.
        number = number_of(value, fake)
        if number is not None and not _is_changed(node) and not self._names_of(node):
            dtype = dtype_name(value.dtype)
            tensor = builder.lazy(
                (), dtype, lambda _: builder.pool.constant(number, dtype), frozenset()
            )
            if self._graph.device != CPU:
                tensor.host = cache(lambda: str(self._stored_constant(node, value, fake).buffer))
            return tensor
        return self._stored_constant(node, value, fake)

    def _names_of(self, node: fx.Node) -> tuple[str, ...]:
        """Return what the user's module calls a tensor that the graph holds."""
        names: Mapping[str, tuple[str, ...]] = self._module.meta.get(MODULE_NAMES, {})
        return names.get(str(node.target), ())

    def _stored_constant(
        self, node: fx.Node, value: torch.Tensor, fake: torch.Tensor
    ) -> LazyTensor:
        name = f"constant{len(self._graph.constants)}"
        self._graph.constants[name] = value
        self._graph.attributes[name] = str(node.target)
        self._graph.names[name] = self._names_of(node)
        stored = self._graph.builder.stored(name, self._layout(fake), "constant")
        return self._bound(stored, fake, None)

    # ------------------------------------------------------------------------------------ Operators

    def _called(self, node: fx.Node) -> Any:
        value = node.meta.get("val")
        if _is_number(node):
            # torch's symbols say what it is made of. Where only other such numbers use it, they
            # have it inside their own expressions.
            inner = node.users and all(map(_is_number, node.users))
            return None if inner else self._size(value)
        if node.target is operator.getitem:
            source, key = node.args
            return self._values[source][key]
        if isinstance(node.target, HigherOrderOperator):
            return self._higher_order(node)
        if not isinstance(node.target, OpOverload):
            raise UnsupportedOperator(
                f"{node.target}: no operator of ATen", operator=str(node.target)
            )
        if node.target is torch.ops.aten.copy_.default:
            return self._mutated(node)
        if node.target._schema.is_mutable:  # noqa: SLF001  # torch shows a schema nowhere else
            raise UnsupportedOperator(
                f"{node.target}: changes its arguments", operator=str(node.target)
            )
        return self._lowered(node)

    def _higher_order(self, node: fx.Node) -> Any:
        """Return the results of one of torch's operators that take operators or texts."""
        name = str(node.target)
        if name == _ASSEMBLY:
            return self._assembly(node)
        if name == _SCAN:
            return self._scan(node)
        readers: Mapping[str, Callable[..., Any]] = {
            _EFFECT: self._effect,
            _SAVED_STATE: self._drawn_and_saved,
            _GIVEN_STATE: self._drawn_again,
        }
        if name not in readers:
            raise UnsupportedOperator(f"{name}: no operator of ATen", operator=name)
        return readers[name](*node.args, **node.kwargs)

    def _lowered(self, node: fx.Node) -> Any:
        if not node.target._schema.returns:  # noqa: SLF001
            return self._checked(node.target, node.args, node.kwargs)
        value, builder = node.meta.get("val"), self._graph.builder
        constant = self._copied_for_caller(node)
        if constant is not None:
            return constant
        single = not isinstance(value, (list, tuple))
        if single and not isinstance(value, torch.Tensor):
            raise UnsupportedOperator(
                f"{node.target}: gives a number that values decide, {value}: expected a tensor",
                operator=str(node.target),
            )
        values = [value] if single else value
        # Buffers that appear from here on were made by this operator.
        results, before = tuple(self._result(item) for item in values), builder.made
        if self._is_laid_out(node):
            results = tuple(_in_channels_last(layout) for layout in results)
        returned = any(user.op == "output" for user in node.users)
        found, base = self._found(node, results, single=single, returned=returned)
        made = builder.made_since(before)
        bound: list[LazyTensor | None] = []
        for lowered, layout, given in zip(found, results, values, strict=True):
            if lowered is None or layout is None:
                bound.append(None)
                continue
            known = self._rounded(lowered) if node in self._kept else lowered
            tensor = self._bound(known, given, base)
            tensor.made, tensor.own_strides = made, self._own_strides(node, tensor, given)
            builder.mark_reuse(tensor, len(node.users), returned=returned)
            bound.append(tensor)
        return bound[0] if single else tuple(bound)

    def _found(
        self,
        node: fx.Node,
        results: tuple[TensorLayout | None, ...],
        *,
        single: bool,
        returned: bool,
    ) -> tuple[tuple[LazyTensor | None, ...], LazyTensor | None]:
        """Return the results of a node, and what they show a view of."""
        if node in self._sums:  # its product was added to what is before
            shown = self._values[self._sums[node].shown]
            return (shown,), shown
        call = self._with_sum(node, self._operator_call(node, results, single=single))
        narrow = None if returned else _narrower(call)
        if narrow is not None:
            # What is computed of all bits in one kernel must not meet the stored ones in another.
            self._graph.builder.mark_reuse(narrow, len(node.users), rounded=True)
        apart, known = node in self._added_behind, len(self._graph.builder.nodes)
        found = self._host.computed(call) or self._generated(call, apart=apart)
        if node in self._unmeasured:
            self._leave_unmeasured(known)
        return found, self._viewed(node)

    def _leave_unmeasured(self, known: int) -> None:
        """Have products with one candidate of those that are behind the first so many nodes."""
        nodes = self._graph.builder.nodes
        for place, one in enumerate(nodes[known:], known):
            if isinstance(one, Loop) and one.is_product:
                nodes[place] = replace(one, measured=False)

    def _with_sum(self, node: fx.Node, call: OperatorCall) -> OperatorCall:
        """Return the call of a node, which adds a product to the sum of those before where it is
        one of many.
        """
        if node not in self._summed:
            return call
        before = shown = self._values[self._summed[node].before]
        if self._summed[node].turned:
            before = permuted(shown, (1, 0))
            before.strides, before.storage_offset = shown.strides[::-1], shown.storage_offset
        given = (before, *call.positional)
        named = dict(zip(("self", "mat1", "mat2"), given, strict=True))
        return replace(call, name="aten.addmm.default", arguments=named, positional=given)

    def _generated(self, call: OperatorCall, *, apart: bool) -> tuple[LazyTensor | None, ...]:
        """Return the results of an operator on the program's device.

        Args:
            call: of the operator.
            apart: have what reads a product add its bias.
        """
        builder, fallbacks = self._graph.builder, self._graph.fallbacks
        if apart:
            bias, *factors = call.positional
            named = dict(zip(("self", "mat2"), factors, strict=True))
            positional = tuple(factors)
            product = replace(call, name="aten.mm.default", arguments=named, positional=positional)
            (found,) = lower(builder, product, fallbacks)
            assert found is not None
            return self._biased(found, bias, call)
        if call.name != "aten.convolution.default" or (call.template and is_patches(call)):
            return lower(builder, call, fallbacks)
        images, weight, bias, *rest = call.positional
        product = replace(call, positional=(images, weight, None, *rest))
        of_pixels = is_of_pixels(call)
        if of_pixels:
            product = pixel_product(call)
        elif bias is None or call.dtype not in _FLOATS or self._graph.device == CPU:
            return lower(builder, call, fallbacks)
        (found,) = lower(builder, product, fallbacks)
        assert found is not None
        found = as_images(found, call.sizes) if of_pixels else found
        if bias is None:
            return (found,)
        # torch adds the bias behind cuDNN's convolution; a kernel that reads the result can do it.
        one = sympy.Integer(1)
        shift = reshaped(bias, (*bias.sizes, *[one] * (len(call.sizes) - 2)))
        return self._biased(found, shift, call)

    def _biased(
        self, product: LazyTensor, bias: LazyTensor, call: OperatorCall
    ) -> tuple[LazyTensor | None, ...]:
        """Return the result of an operator that is called, and a bias that its readers add."""
        builder, fallbacks = self._graph.builder, self._graph.fallbacks
        given = {"self": product, "other": bias}
        added = replace(
            call, name="aten.add.Tensor", arguments=given, positional=tuple(given.values())
        )
        return lower(builder, replace(added, operand_dtype=call.dtype), fallbacks)

    def _is_laid_out(self, node: fx.Node) -> bool:
        """Whether a node is a convolution that is given, and returns, channels last."""
        if node not in self._channels_last or not is_convolution(node):
            return False
        return str(node.args[0].meta["val"].device) == self._graph.device

    def _in_channels_last(self, tensor: LazyTensor, *, exact: bool) -> Reference:
        """Return where a convolution is given a tensor.

        Args:
            tensor: that it is given; only images and weights have channels.
            exact: have its strides tell channels last where each dimension of several elements has
                the same stride in rows: of images with one channel.
        """
        if len(tensor.sizes) != _IMAGE_DIMENSIONS:
            return self._graph.builder.reference(tensor)
        strides = channels_last_strides(tensor.sizes)
        found = self._graph.builder.placed(tensor, strides)
        return replace(found, layout=replace(found.layout, strides=strides)) if exact else found

    def _in_rows(self, tensor: LazyTensor) -> Reference:
        """Return where a convolution is given a tensor: sequences, and weights of them, in rows,
        since torch would copy them into rows in front of each convolution that reads them.
        """
        builder = self._graph.builder
        if len(tensor.sizes) != _SEQUENCE_DIMENSIONS:
            return builder.reference(tensor)
        return builder.placed(tensor, contiguous_strides(tensor.sizes))

    def _own_strides(
        self, node: fx.Node, tensor: LazyTensor, value: torch.Tensor
    ) -> Strides | None:
        """Return the strides that a node's tensor is stored in among our kernels, None where those
        are torch's.
        """
        if tensor.base is not None or tensor.host is not None:
            return None
        assert tensor.strides is not None
        if node in self._channels_last and has_images(value):
            strides = channels_last_strides(tensor.sizes)
        else:
            strides = contiguous_strides(tensor.sizes)
        if are_same_strides(tensor.sizes, strides, tensor.strides):
            return None
        return strides if self._may_lie(tensor, strides, value) else None

    def _may_lie(self, tensor: LazyTensor, strides: Strides, value: torch.Tensor) -> bool:
        """Whether a tensor had better have other strides than torch's among our kernels."""
        if strides != contiguous_strides(tensor.sizes):
            return True
        # Only of images is a backward graph told where they lie.
        is_forward = CALLERS_RESULTS in self._module.meta
        known = all(isinstance(part, int) for part in (*value.shape, *value.stride()))
        if tensor.buffer is not None or not known or (is_forward and not has_images(value)):
            return False
        names = variables("i", tensor.sizes)
        return reads_rows(tensor.at(names), names, tensor.sizes)

    def _copied_for_caller(self, node: fx.Node) -> LazyTensor | None:
        """Return the constant on the host whose copy a node is, where that is a result of its own
        and nothing else reads it; None for any other node.
        """
        made = node
        while made.target in _SAME:
            made = made.args[0]
        if made.target is not torch.ops.aten.lift_fresh_copy.default:
            return None
        last = made
        while len(last.users) == 1 and next(iter(last.users)).target in _SAME:
            last = next(iter(last.users))
        held, results = made.args[0], node.graph.output_node()
        if held.op != "get_attr" or _is_changed(held) or [*last.users] != [results]:
            return None
        found = self._tensor(held)
        once = tree_leaves(results.args[0]).count(last) == 1
        return found if once and found is not None and found.host is not None else None

    def _checked(self, target: OpOverload, given: Sequence[Any], named: Mapping[str, Any]) -> None:
        """Call an operator without results, which raises where values are not as it asks."""
        if target.overloadpacket in _CHECKED_IN_TRACING:
            return
        name, reason = str(target), "it has no result: it is called for what it checks"
        positional = tuple(self._argument(item) for item in given)
        keywords = {key: self._argument(item) for key, item in named.items()}
        self._graph.fallbacks.append(RefusedOperator(name, reason))
        self._graph.builder.call(name, positional, keywords, (None,), reason, single=True)

    def _effect(self, token: Any, target: Any, *given: Any, **named: Any) -> tuple[Any, None]:
        """Return the token that torch orders operators by, and call one without results, whose
        order the program keeps itself.
        """
        schema = getattr(target, "_schema", None)
        if schema is None or schema.returns or schema.is_mutable:
            raise UnsupportedOperator(
                f"{target}: it does more than its results say", operator=str(target)
            )
        self._checked(target, given, named)
        return self._argument(token), None

    def _bound(
        self, tensor: LazyTensor, value: torch.Tensor, base: LazyTensor | None
    ) -> LazyTensor:
        """Return a tensor as that of one node, with what torch knows of it.

        Args:
            tensor: what a lowering returned, which may be one of its arguments.
            value: torch's fake tensor.
            base: what the operator shows a view of.
        """
        # A lowering may return one of its arguments; each node gets a tensor of its own, since base
        # and strides differ.
        if id(tensor) in self._bound_tensors:
            tensor = LazyTensor(
                tensor.sizes, tensor.dtype, tensor.at, tensor.origins, host=tensor.host
            )
        self._bound_tensors[id(tensor)] = tensor
        # Equal numbers, but spelled as torch spells them, so that later comparisons succeed.
        tensor.sizes = tuple(map(self._size, value.shape))
        tensor.strides = tuple(map(self._size, value.stride()))
        tensor.storage_offset = self._size(value.storage_offset())
        tensor.base = base if tensor.buffer is None else None
        return tensor

    def _rounded(self, tensor: LazyTensor) -> LazyTensor:
        """Return a value rounded to the 16 bits that are stored of it, wherever it is computed.

        The backward graph loads the stored value. If the forward graph computed a statistic from
        the unrounded one, the two would disagree, and batch norm of a nearly constant column
        multiplies that difference by a huge number.
        """
        if tensor.buffer is not None or not data_type(tensor.dtype).is_half:
            return tensor
        rounded = self._graph.builder.pool.rounded
        return LazyTensor(
            tensor.sizes,
            tensor.dtype,
            lambda indices: rounded(tensor.at(indices)),
            tensor.origins,
            host=tensor.host,
        )

    def _viewed(self, node: fx.Node) -> LazyTensor | None:
        """Return the argument whose memory the results of a node share, as the operator's schema
        says; None where they are new.
        """
        schema = node.target._schema  # noqa: SLF001
        if node.target in _UNSAFE_VIEWS:
            return self._tensor(node.args[0])
        if all(result.alias_info is None for result in schema.returns):
            return None
        given = dict(zip((a.name for a in schema.arguments), node.args, strict=False)) | node.kwargs
        for argument in schema.arguments:
            if argument.alias_info is not None:
                return self._tensor(given.get(argument.name))
        return None

    def _tensor(self, item: Any) -> LazyTensor | None:
        found = self._values.get(item) if isinstance(item, fx.Node) else None
        return found if isinstance(found, LazyTensor) else None

    def _assembly(self, node: fx.Node) -> LazyTensor:
        """Return the result of torch's operator for assembly, which takes tensors and texts."""
        keywords = {name: self._argument(item) for name, item in node.kwargs.items()}
        positional = tuple(self._argument(item) for item in node.args)
        results = (self._result(node.meta["val"]),)
        call = OperatorCall(
            f"{HIGHER_ORDER}.{_ASSEMBLY}.default",
            {},
            positional,
            keywords,
            results,
            True,
            None,
            frozenset({_ASSEMBLY}),
        )
        (found,) = lower(self._graph.builder, call, self._graph.fallbacks)
        assert found is not None
        return self._bound(found, node.meta["val"], None)

    def _scan(self, node: fx.Node) -> tuple[LazyTensor | None, ...]:
        """Return the results of torch's scan with a function of the user's, along dimension 0."""
        graph, sources, lifted = map(self._argument, node.args)
        values = node.meta["val"]
        call = OperatorCall(
            f"{HIGHER_ORDER}.{_SCAN}.default",
            {"combine": partial(self._combined, graph, lifted)},
            tuple(sources),
            {},
            tuple(map(self._result, values)),
            False,
            None,
            frozenset({_SCAN}),
        )
        # Sizes, which are no tensors, are there for the shapes that the function is traced with.
        if any(isinstance(item, LazyTensor) for item in lifted):
            raise call.refusal("its function has tensors from elsewhere")
        found = lower(self._graph.builder, call, self._graph.fallbacks)
        return tuple(
            None if one is None else self._bound(one, value, None)
            for one, value in zip(found, values, strict=True)
        )

    def _combined(
        self,
        graph: fx.GraphModule,
        lifted: Sequence[Any],
        left: Sequence[Term],
        right: Sequence[Term],
    ) -> list[Term]:
        """Return what a graph computes of two elements; it has to do so element by element."""
        builder, given = self._graph.builder, iter([*left, *right, *lifted])
        before = len(builder.nodes)
        for node in graph.graph.nodes:
            with located(node):
                if node.op == "placeholder":
                    item = next(given)
                    of_row = isinstance(item, Term)
                    self._values[node] = self._element(item, node.meta["val"]) if of_row else item
                elif node.op == "call_function":
                    self._values[node] = self._called(node)
                elif node.op != "output":
                    raise UnsupportedOperator(
                        f"{node.target}: the function of a scan holds it", operator=_SCAN
                    )
        if len(builder.nodes) != before:
            raise UnsupportedOperator(
                "the function of a scan has more than operators that are generated element by"
                " element",
                operator=_SCAN,
            )
        results = map(self._argument, tree_leaves(graph.graph.output_node().args[0]))
        return [result.at(variables("i", result.sizes)) for result in results]

    def _element(self, term: Term, value: torch.Tensor) -> LazyTensor:
        """Return an argument of a scan's function: the same term at the place of the result, and
        nothing elsewhere.
        """
        sizes = tuple(map(self._size, value.shape))
        names = variables("i", sizes)
        here = tuple(
            sympy.Integer(0) if size == 1 else name for name, size in zip(names, sizes, strict=True)
        )

        def read(indices: Sequence[sympy.Expr]) -> Term:
            if tuple(indices) != here:
                raise UnsupportedOperator(
                    "the function of a scan reads an element of another place", operator=_SCAN
                )
            return term

        return self._graph.builder.lazy(sizes, dtype_name(value.dtype), read, frozenset())

    def _drawn_and_saved(self, target: OpOverload, *given: Any, **named: Any) -> Any:
        """Return the state of the generator, and the results of an operator that draws in it."""
        state, _ = self._rng_state()
        return state, self._drawn(target, given, named)

    def _drawn_again(self, state: Any, target: OpOverload, *given: Any, **named: Any) -> Any:
        """Return the results of an operator that draws in a state of the generator, which has its
        own one again afterwards.
        """
        kept, device = self._rng_state()
        self._called_in_order(_SET_RNG_STATE, [self._argument(state), device], {}, (None,))
        results = self._drawn(target, given, named)
        self._called_in_order(_SET_RNG_STATE, [kept, device], {}, (None,))
        return results

    def _rng_state(self) -> tuple[LazyTensor, str]:
        device = self._graph.device.partition(":")[0]
        sizes = (sympy.Integer(_state_elements(device)),)
        away = HOST if device != CPU else ""
        layout = TensorLayout("uint8", sizes, (sympy.Integer(1),), device=away)
        (state,) = self._called_in_order(_RNG_STATE, [device], {}, (layout,))
        assert state is not None
        state.strides = layout.strides
        return state, device

    def _drawn(self, target: OpOverload, given: Sequence[Any], named: Mapping[str, Any]) -> Any:
        """Return the results of an operator that draws random numbers of torch's."""
        examples = [_example_values([*given]), _example_values(dict(named))]
        mode = detect_fake_mode(tree_leaves(examples)) or FakeTensorMode()
        with mode:
            value = target(*examples[0], **examples[1])
        single = not isinstance(value, (list, tuple))
        values = [value] if single else value
        found = self._called_in_order(
            str(target),
            [self._argument(item) for item in given],
            {name: self._argument(item) for name, item in named.items()},
            tuple(self._result(item) for item in values),
            single=single,
        )
        bound = [
            None if one is None else self._bound(one, fake, None)
            for one, fake in zip(found, values, strict=True)
        ]
        return bound[0] if single else tuple(bound)

    def _called_in_order(
        self,
        operator: str,
        arguments: Any,
        keywords: dict[str, Any],
        results: tuple[TensorLayout | None, ...],
        *,
        single: bool = True,
    ) -> tuple[LazyTensor | None, ...]:
        """Call an operator that reads or changes the state of torch's generators."""
        reason = "random numbers that are drawn twice are drawn by torch"
        self._graph.fallbacks.append(RefusedOperator(operator, reason))
        return self._graph.builder.call(
            operator, arguments, keywords, results, reason, single=single, ordered=True
        )

    def _operator_call(
        self, node: fx.Node, results: tuple[TensorLayout | None, ...], *, single: bool
    ) -> OperatorCall:
        schema = node.target._schema  # noqa: SLF001
        positional = tuple(self._argument(item) for item in node.args)
        keywords = {name: self._argument(item) for name, item in node.kwargs.items()}
        named = {
            argument.name: value
            for argument, value in zip(schema.arguments, positional, strict=False)
        } | keywords
        arguments = {
            name: value.name if isinstance(value, TorchValue) else value
            for name, value in named.items()
            if name not in _PLACEMENT
        }
        return OperatorCall(
            str(node.target),
            arguments,
            positional,
            keywords,
            results,
            single,
            _operand_dtype(node),
            _origins(node),
            view=any(result.alias_info is not None for result in schema.returns),
            refused=self._host.refusal(results, positional, keywords),
            read=frozenset({0}) if single else _results_read(node),
            place=self._place(node),
            template=node in self._templates,
        )

    def _place(self, node: fx.Node) -> Callable[[LazyTensor], Reference] | None:
        """Return where a node that is called is given tensors, None for where torch has them."""
        if self._is_laid_out(node):
            return partial(self._in_channels_last, exact=has_one_channel(node))
        return self._in_rows if node.target is torch.ops.aten.convolution.default else None

    def _argument(self, item: Any) -> Any:
        if isinstance(item, fx.Node):
            return self._values[item]
        if isinstance(item, (list, tuple)):
            return [self._argument(part) for part in item]
        for kind, cls in _TORCH_KINDS.items():
            if isinstance(item, cls):
                name = str(item).removeprefix("torch.")
                away = kind == "device" and name == CPU != self._graph.device
                return TorchValue(kind, HOST if away else name)
        if isinstance(item, torch.Generator):
            raise UnsupportedOperator(
                "a generator of random numbers: expected torch's own", operator="generator"
            )
        return item

    def _result(self, value: Any) -> TensorLayout | None:
        return self._layout(value) if isinstance(value, torch.Tensor) else None

    # -------------------------------------------------------------------------------------- Results

    def _mutated(self, node: fx.Node) -> Any:
        target, value = (self._values[argument] for argument in node.args[:2])
        if not isinstance(target, LazyTensor) or target.buffer is None:
            raise UnsupportedOperator("aten.copy_: changes what is no input", operator="aten.copy_")
        self._mutations.append((target.buffer, value))
        return value

    def _finish(self, node: fx.Node) -> None:
        builder = self._graph.builder
        results = tree_leaves(node.args[0])
        values = [self._argument(item) for item in results]
        # Inputs are changed last. What still reads an old value is computed into a buffer first.
        changed = {buffer for buffer, _ in self._mutations}
        for buffer, value in self._mutations:
            if value.host is None and self._reads_elsewhere(buffer, value, changed):
                builder.realize(value)
        held = [self._host.held(value, changed) for _, value in self._mutations]
        self._graph.outputs = [
            self._returned(place) or self._output(place, value, changed)
            for place, value in enumerate(values)
        ]
        for place, item in enumerate(results):
            output = self._graph.outputs[place]
            copied = isinstance(item, fx.Node) and self._copied_for_caller(item) is not None
            if copied and isinstance(output, Reference):
                self._graph.outputs[place] = replace(output, fresh=True)
        self._graph.changed = frozenset(changed)
        for (buffer, value), source in zip(self._mutations, held, strict=True):
            layout = builder.buffers[buffer].layout
            away = layout.device or (value.host is not None and value.sizes)
            if away or layout.dtype not in DATA_TYPES:
                self._host.copy(source or builder.reference(value), buffer)
            else:
                builder.write(buffer, value, layout)

    def _reads_elsewhere(self, buffer: str, value: LazyTensor, changed: set[str]) -> bool:
        """Whether what an input becomes is computed of elements that a kernel may have changed
        already.
        """
        builder = self._graph.builder
        names = variables("i", value.sizes)
        # Reading the element that is about to be written is harmless: each lane loads before it
        # stores.
        own = sympy.expand(builder.buffers[buffer].layout.index(names))
        return any(
            read in changed and (read != buffer or sympy.expand(index - own) != 0)
            for read, index, _ in loads_of(value.at(names))
        )

    def _returned(self, place: int) -> Reference | None:
        """Return a result that is an input, or a view of one: as torch has it, in the input's
        memory, where the program may have changed it.
        """
        found = self._module.meta.get(RETURNED_INPUTS, {}).get(place)
        if found is None:
            return None
        name = f"arg{found.number}"
        layout = self._graph.builder.buffers[name].layout
        if found.itself:
            return Reference(name, layout)
        sizes, strides = (tuple(map(self._size, part)) for part in (found.sizes, found.strides))
        offset = self._size(found.offset)
        seen = replace(layout, sizes=sizes, strides=strides, offset=offset)
        return Reference(name, seen, view=True)

    def _output(self, place: int, value: Any, changed: set[str]) -> Reference | sympy.Expr | None:
        if isinstance(value, LazyTensor):
            if value.host is not None:
                return self._host.held(value, changed)
            seen = self._graph.callers_results
            of_backward = seen is not None and place >= seen and value.buffer not in changed
            builder = self._graph.builder
            found = builder.kept(value) if of_backward else builder.owned(value)
            return replace(found, view=value.base is not None)
        return None if value is None else sympy.sympify(value)

    # ----------------------------------------------------------------------- torch's values as ours

    def _layout(self, tensor: torch.Tensor) -> TensorLayout:
        dtype = dtype_name(tensor.dtype)
        if tensor.layout is not torch.strided or tensor.is_quantized:
            raise UnsupportedOperator(
                f"a tensor of layout {tensor.layout}: expected a strided one", operator="layout"
            )
        sizes, strides = (tuple(map(self._size, part)) for part in (tensor.shape, tensor.stride()))
        away = str(tensor.device) != self._graph.device
        return TensorLayout(dtype, sizes, strides, device=HOST if away else "")

    def _size(self, value: Any) -> Any:
        """Return a number of torch's as ours: an index expression for a SymInt, the symbol of a
        value for a SymFloat or SymBool.
        """
        if not isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return sympy.sympify(value)
        self._environment = value.node.shape_env
        if isinstance(value, torch.SymInt):
            return self._sizes.integer(value.node.expr)
        dtype = "float64" if isinstance(value, torch.SymFloat) else "bool"
        found = self._sizes.number(value.node.expr, dtype)
        return self._on_host(found, dtype) if isinstance(found, sympy.Symbol) else found

    def _on_host(self, symbol: sympy.Symbol, dtype: str) -> sympy.Symbol:
        """Make a number that the host computes known as a buffer, which kernels load it from."""
        layout = TensorLayout(dtype, (), ())
        self._graph.builder.buffers[str(symbol)] = Buffer(str(symbol), layout, "value")
        return symbol

    def _guarded(self, size: sympy.Expr) -> bool:
        if self._environment is None or self._environment.frozen:
            return False
        asked = narrow_guard(self._environment, _of_torch(self._sizes.theirs(size)))
        self._graph.asked.append(asked)
        return asked.fits

    def _example_of(self, symbol: sympy.Symbol) -> int | float | None:
        return example_of(self._environment, symbol)

    def _bounds_of(self, expr: sympy.Expr) -> tuple[int | None, int | None]:
        found = self._environment.bound_sympy(_of_torch(expr))
        least, most = (
            int(end) if getattr(end, "is_Integer", False) else None
            for end in (found.lower, found.upper)
        )
        return least, most


_TORCH_KINDS: Mapping[str, type] = {
    "dtype": torch.dtype,
    "device": torch.device,
    "memory_format": torch.memory_format,
    "layout": torch.layout,
}


def _narrower(call: OperatorCall) -> LazyTensor | None:
    """Return what an operator converts to a wider dtype, which is kept in the place of its result:
    it takes less memory.
    """
    source = call.positional[0] if call.name in _CONVERSIONS else None
    if not isinstance(source, LazyTensor) or source.host is not None or source.root is not source:
        return None
    return source if item_bytes(source.dtype) < item_bytes(call.dtype) else None


def example_of(environment: Any, symbol: sympy.Symbol) -> int | float | None:
    """Return the value that one of torch's symbols has in the example; None where it has none."""
    known = getattr(environment, "backed_var_to_val", None)
    # The name before torch 2.12; from then on it warns.
    if known is None:
        known = environment.var_to_val
    value = known.get(symbol)
    return None if value is None else float(value) if value.is_Float else int(value)


def narrow_guard(environment: Any, size: sympy.Expr) -> NarrowGuard:
    """Ask torch, whose environment of sizes this is, whether a size is at most 2**31 - 1, and have
    it guard the answer.
    """
    before = len(environment.guards)
    fits = bool(environment.evaluate_expr(sympy.Le(size, _LARGEST_NARROW)))
    return NarrowGuard(size, fits, len(environment.guards) - before)


def number_of(value: torch.Tensor, fake: torch.Tensor) -> bool | float | None:
    """Return the number that a tensor which the graph holds is, where it lies on the host; None for
    any other tensor.
    """
    known = value.dim() == 0 and fake.device.type == CPU and type(value) is torch.Tensor
    if not known or value.dtype not in _NUMBERS:
        return None
    # torch.compile traces with fake tensors, which have no value to read.
    with unset_fake_temporarily():
        number: bool | float = value.item()
    return number


def float32_precision() -> str:
    """Return what torch's setting allows products of float32 to be computed in: `ieee` or
    `tf32`.
    """
    return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee"


def _in_channels_last(layout: TensorLayout | None) -> TensorLayout | None:
    """Return how a result of a convolution lies that is given channels last."""
    if layout is None or len(layout.sizes) != _IMAGE_DIMENSIONS:
        return layout
    return replace(layout, strides=channels_last_strides(layout.sizes))


def dtype_name(dtype: torch.dtype) -> str:
    """Return a dtype's name without `torch.`."""
    return str(dtype).removeprefix("torch.")


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


def _is_number(node: fx.Node) -> bool:
    """Whether a node computes a number of sizes."""
    kinds = (torch.SymInt, torch.SymFloat, torch.SymBool, int, float, bool)
    known = not isinstance(node.target, OpOverload) or node.target.overloadpacket in _SHAPES
    return node.op == "call_function" and known and isinstance(node.meta.get("val"), kinds)


def _kept_nodes(graph: fx.Graph) -> set[fx.Node]:
    """Return the nodes whose values leave the graph, by themselves or through a view, and are read
    inside of it as well.
    """
    (output,) = graph.find_nodes(op="output")
    ends = [item for item in tree_leaves(output.args[0]) if isinstance(item, fx.Node)]
    copies = graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
    # A value that an input is set to leaves the graph as well.
    ends += [node.args[1] for node in copies if isinstance(node.args[1], fx.Node)]
    found: set[fx.Node] = set()
    while ends:
        node = ends.pop()
        if node in found or not isinstance(node.target, OpOverload):
            continue
        found.add(node)
        schema = node.target._schema  # noqa: SLF001  # torch shows a schema nowhere else
        if any(result.alias_info is not None for result in schema.returns):
            ends.append(node.args[0])
    return {node for node in found if len(node.users) > 1}


def _is_token(node: fx.Node) -> bool:
    """Whether an input is none but what torch orders operators by."""
    return bool(node.users) and all(
        str(user.target) == _EFFECT and user.args[0] is node for user in node.users
    )


def _is_changed(node: fx.Node) -> bool:
    """Whether the graph changes a tensor that it holds."""
    return any(
        user.target is torch.ops.aten.copy_.default and user.args[0] is node for user in node.users
    )


def _is_aligned(tensor: torch.Tensor) -> bool:
    """Whether a tensor's offset in its storage is a multiple of 16 bytes, as that of a whole tensor
    is.
    """
    offset = tensor.storage_offset()
    return isinstance(offset, int) and offset * tensor.element_size() % _ALIGNED_BYTES == 0


def _operand_dtype(node: fx.Node) -> str | None:
    """Return what torch promotes the first tensor operands of a node to."""
    values: list[Any] = [_example(argument) for argument in node.args[:2]]
    found = [value for value in values if isinstance(value, (torch.Tensor, int, float, bool))]
    tensors = [value for value in found if isinstance(value, torch.Tensor)]
    if not tensors:
        return None
    return dtype_name(tensors[0].dtype if len(found) == 1 else torch.result_type(*found))


def _example_values(arguments: Any) -> Any:
    """Return arguments with torch's fake tensors and symbols in the place of nodes."""
    return tree_map(lambda item: item.meta["val"] if isinstance(item, fx.Node) else item, arguments)


def _example(argument: Any) -> Any:
    value = argument.meta.get("val") if isinstance(argument, fx.Node) else argument
    kinds = {torch.SymInt: 1, torch.SymFloat: 1.0, torch.SymBool: True}
    return kinds.get(type(value), value)


def _results_read(node: fx.Node) -> frozenset[int]:
    """Return the numbers of the results of a node that something reads."""
    return frozenset(user.args[1] for user in node.users if user.target is operator.getitem)


def _origins(node: fx.Node) -> frozenset[str]:
    """Return the name of the operator that the user's program called, before torch took it
    apart.
    """
    original = node.meta.get("original_aten")
    name = str(original) if original is not None else str(node.target)
    return frozenset({name.split(".")[1].lstrip("_") if "." in name else name})


def program_device(values: Iterable[Any]) -> str:
    """Return the device of a graph, as torch names it.

    Args:
        values: what the nodes of the graph are in the example: tensors, numbers, and lists of
            these.

    Raises:
        UnsupportedOperator: there are two devices beside the CPU.
    """
    found = sorted(
        {str(tensor.device) for value in values for tensor in _tensors_in(value)} - {CPU}
    )
    if len(found) > 1:
        raise UnsupportedOperator(
            f"tensors lie on {' and '.join(found)}: expected one device beside the CPU; "
            "generate a program for each device, and copy between them",
            operator="device",
        )
    return found[0] if found else CPU


def _tensors_in(value: Any) -> Iterable[Any]:
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors_in(item)
    elif hasattr(value, "device") and hasattr(value, "stride"):
        yield value


_LIBRARY.define("rng_state(str device) -> Tensor")
_LIBRARY.define("set_rng_state(Tensor state, str device) -> ()")


def _rng_state(device: str) -> torch.Tensor:
    return torch.get_rng_state() if device == "cpu" else _device_module(device).get_rng_state()


def _set_rng_state(state: torch.Tensor, device: str) -> None:
    if device == "cpu":
        torch.set_rng_state(state.cpu())
    else:
        _device_module(device).set_rng_state(state.cpu())


def _device_module(device: str) -> Any:
    return torch.get_device_module(device)


_LIBRARY.impl("rng_state", _rng_state, "CompositeImplicitAutograd")
_LIBRARY.impl("set_rng_state", _set_rng_state, "CompositeImplicitAutograd")


def _state_elements(device: str) -> int:
    """Return how many bytes the state of a device's generator has."""
    return int(_rng_state(device).numel())

# SPDX-License-Identifier: Apache-2.0
"""`faster_templates`: the products and attentions of a graph that are faster as kernels of the
program than as operators of torch, where that was measured.  Imports torch.

::

    operator   torch's, and kernels for what is computed of its result
    kernel     a template, which computes what follows element by element with the product

Both are programs, of the same piece of the graph: the operator; what is computed of inputs of the
graph for it alone; and what follows up to the next operator that is no loop of ours, with the sums
along rows that would read a stored result.  So the operator pays for writing its result and reading
it again, as it does in the graph.  Each call has random numbers that are in no cache.  Sizes that
change are those of the example.  Decisions are `MeasuredChoices`; without one, the operator is
called.

`program` calls it for `templates="where faster"`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import fx
from torch._guards import detect_fake_mode
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves

from bundler.codegen.graph_errors import refusals
from bundler.codegen.graph_key import graph_key
from bundler.codegen.lower import dtype_name, program_device
from bundler.codegen.lowerings.attention_lowerings import ATTENTIONS
from bundler.codegen.lowerings.operator_lowerings import SPLITS
from bundler.codegen.lowerings.pointwise_lowerings import POINTWISE
from bundler.codegen.lowerings.product_lowerings import PRODUCTS
from bundler.codegen.lowerings.reduction_lowerings import REDUCTIONS_BY_NAME
from bundler.codegen.lowerings.view_lowerings import VIEWS
from bundler.codegen.measured_choices import FormTexts, MeasuredChoices
from bundler.codegen.module_benchmarks import Example, random_arguments
from bundler.codegen.program_policy import ALL, NONE
from bundler.errors import UnsupportedOperator
from bundler.lifecycle.tuning_directory import Pair
from bundler.package_loggers import logger
from bundler.runtime.tuning.tuner_options import TunerOptions
from bundler.toolchain.torch_memory import TorchMemory

OPERATOR, KERNEL = "operator", "kernel"
_log = logger("bundler.codegen")
_TEMPLATES = frozenset({"attention", "product"})
# Convolutions are laid out channels last for cuDNN, which a product of patches would undo.
_DECIDED = (PRODUCTS.keys() | ATTENTIONS.keys()) - {"convolution"}
_OF_ELEMENTS = POINTWISE.keys() | VIEWS.keys() | SPLITS | {"cat"}
_FOLLOWING = _OF_ELEMENTS | REDUCTIONS_BY_NAME.keys()
# The programs of a piece, by form.
Programs = Mapping[str, Any]


class TemplateMeasurements(MeasuredChoices):
    """Decides whether an operator is called or becomes a kernel."""

    search, rule = "templates", OPERATOR

    def chosen(self, programs: Programs, inputs: Sequence[Example]) -> str:
        """Return the name of the form that is faster.

        Args:
            programs: of both forms.
            inputs: dtype, sizes and strides of each that they are given.
        """
        name = _template_of(programs[KERNEL])
        if not name:
            return OPERATOR
        # What is called is torch's, as the compiler is Triton's, which the device's record names.
        version = torch.__version__.partition("+")[0]
        texts = {
            f"{form} {part}": text
            for form, one in sorted(programs.items())
            for part, text in [*one.sources.items(), ("plan", one.plan.to_json().decode())]
        }
        about = FormTexts.of(name, {"torch": version, **texts}, repr(inputs).encode())
        return self.decided(about, (OPERATOR, KERNEL), partial(self._launches, programs, inputs))

    def _launches(self, programs: Programs, inputs: Sequence[Example]) -> dict[str, _ProgramLaunch]:
        tensors = random_arguments(inputs, self._device)
        return {
            form: _ProgramLaunch(program, tensors, self._device)
            for form, program in programs.items()
        }


def faster_templates(
    module: fx.GraphModule, options: Any, generate: Callable[[fx.GraphModule, Any], Any]
) -> tuple[frozenset[fx.Node], list[Pair]]:
    """Return the nodes of a graph whose kernels are faster than the operators that they call, and
    records of what was measured to know it.

    Args:
        module: whose nodes have fake tensors, as `lower_graph` takes it.
        options: `GenerateOptions` of its program.
        generate: makes the program of a graph by options.
    """
    if options.policy.deterministic or torch.are_deterministic_algorithms_enabled():
        return frozenset(), []
    device = program_device(node.meta.get("val") for node in module.graph.nodes)
    measurements = TemplateMeasurements.here(device, options.policy, options.sources)
    plain = replace(
        options,
        name="",
        verify=False,
        graphs=False,
        nan_checks=False,
        benchmark_harness=False,
        templates=NONE,
        policy=replace(options.policy, measured_fusion=False),
    )
    templates = {OPERATOR: plain, KERNEL: replace(plain, templates=ALL)}
    pieces, found = _Pieces(module.graph), set()
    known: dict[str, str] = {}
    for node in module.graph.nodes:
        if _name_of(node) not in _DECIDED:
            continue
        try:
            with refusals("a piece that is measured"):
                made, inputs = _module_of(pieces.of(node))
                key = graph_key(made, plain)
                digest = str(node) if key is None else key.digest
                if digest not in known:
                    known[digest] = OPERATOR
                    programs = {form: generate(made, how) for form, how in templates.items()}
                    known[digest] = measurements.chosen(programs, inputs)
        except UnsupportedOperator as error:
            _log.debug("%s is called: %s", node, error)
            continue
        if known[digest] == KERNEL:
            found.add(node)
    return frozenset(found), measurements.records


def _name_of(node: fx.Node) -> str:
    """Return the name of an operator without namespace and overload; empty for other nodes."""
    target = node.target
    return str(target).split(".")[1] if isinstance(target, OpOverload) else ""


def _template_of(program: Any) -> str:
    """Return the name of the template's kernel, without its number; empty where there is none."""
    texts = ((name, kernel.text) for name, kernel in program.kernels.items())
    found = (name for name, text in texts if text.kind in _TEMPLATES)
    return next(found, "").rpartition("_")[0]


class _Pieces:
    """The parts of a graph that are measured for one operator each.

    Args:
        graph: the whole.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self._order = {node: number for number, node in enumerate(graph.nodes)}
        self._computed = _of_inputs(graph)

    def of(self, node: fx.Node) -> list[fx.Node]:
        """Return the nodes of an operator's piece, in the graph's order; none is in two pieces:
        what two products are followed by is in that of the later one.
        """
        own = {node}
        waiting = [*node.users]
        while waiting:
            # The first: it may be given what others behind it in the list compute.
            waiting.sort(key=self._order.__getitem__, reverse=True)
            other = waiting.pop()
            if other not in own and self._follows(other, node, own):
                own.add(other)
                waiting += other.users
        waiting = [source for one in own for source in one.all_input_nodes]
        while waiting:
            other = waiting.pop()
            if other not in own and other in self._computed and own.issuperset(other.users):
                own.add(other)
                waiting += other.all_input_nodes
        return sorted(own, key=self._order.__getitem__)

    def _follows(self, node: fx.Node, first: fx.Node, own: set[fx.Node]) -> bool:
        """Whether a node that reads results of a piece is a part of it: one that is given what was
        computed in between waits for that.
        """
        known = node.target is operator.getitem or _name_of(node) in _FOLLOWING
        device = _device_of(first)
        return (
            known
            and all(_device_of(one) in {None, device} for one in (node, *node.all_input_nodes))
            and all(
                one in own or one in self._computed or self._order[one] < self._order[first]
                for one in node.all_input_nodes
            )
        )


def _module_of(nodes: Sequence[fx.Node]) -> tuple[fx.GraphModule, list[Example]]:
    """Return a piece as a graph of its own, of the example's sizes, and its inputs."""
    graph, inside = fx.Graph(), {*nodes}
    made: dict[fx.Node, Any] = {}
    inputs: list[Example] = []
    for node in (source for one in nodes for source in one.all_input_nodes):
        if node in inside or node in made:
            continue
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor):
            made[node] = _number(value)
            continue
        made[node] = graph.placeholder(f"input{len(inputs)}")
        known = made[node].meta["val"] = _of_example(value)
        inputs.append((dtype_name(known.dtype), tuple(known.shape), tuple(known.stride())))
    for node in nodes:
        copied = made[node] = graph.node_copy(node, made.__getitem__)
        if _changes(node.meta.get("val")):
            copied.meta["val"] = _computed(copied)
    graph.output(tuple(made[node] for node in nodes if not inside.issuperset(node.users)))
    return fx.GraphModule({}, graph), inputs


def _of_inputs(graph: fx.Graph) -> set[fx.Node]:
    """Return the nodes that are computed element by element of inputs of the graph alone."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        given = node.all_input_nodes
        plain = _name_of(node) in _OF_ELEMENTS and _device_of(node) is not None
        if plain and all(one in found or one.op in {"placeholder", "get_attr"} for one in given):
            found.add(node)
    return found


def _device_of(node: fx.Node) -> torch.device | None:
    value = node.meta.get("val")
    if isinstance(value, (list, tuple)):
        value = next((one for one in value if isinstance(one, torch.Tensor)), None)
    return value.device if isinstance(value, torch.Tensor) else None


def _number(value: Any) -> Any:
    """Return a number of the example.

    Raises:
        UnsupportedOperator: it is none, or the example has none, since values decide it.
    """
    if isinstance(value, (bool, int, float)):
        return value
    if not isinstance(value, (torch.SymInt, torch.SymFloat)) or not value.node.has_hint():
        raise UnsupportedOperator(
            f"{type(value).__name__} {value}: expected a tensor, or a number that is known before"
            " the program runs",
            operator="an input of a piece that is measured",
        )
    return value.node.hint


def _changes(value: Any) -> bool:
    """Whether a value has sizes that change."""
    values = value if isinstance(value, (list, tuple)) else [value]
    return any(
        isinstance(number, torch.SymInt)
        for one in values
        if isinstance(one, torch.Tensor) and one.layout is torch.strided
        for number in (*one.shape, *one.stride(), one.storage_offset())
    )


def _of_example(value: Any) -> Any:
    """Return a fake tensor with the example's sizes.

    Raises:
        UnsupportedOperator: it has no strides.
    """
    if value.layout is not torch.strided:
        raise UnsupportedOperator(
            f"a tensor of layout {value.layout}: expected a strided one",
            operator="an input of a piece that is measured",
        )
    if not _changes(value):
        return value
    sizes, strides = ([_number(size) for size in part] for part in (value.shape, value.stride()))
    with value.fake_mode:
        return torch.empty_strided(sizes, strides, dtype=value.dtype, device=value.device)


def _computed(node: fx.Node) -> Any:
    """Return the value of a node of a piece."""
    target: Any = node.target
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda one: one.meta["val"])
    with detect_fake_mode(tree_leaves(args)) or nullcontext():
        return target(*args, **kwargs)


class _ProgramLaunch:
    """Launches the program of one form.

    Args:
        program: of a piece.
        inputs: its tensors.
        device: where they lie, as torch names it.
    """

    def __init__(self, program: Any, inputs: Sequence[Any], device: str) -> None:
        self._program, self._inputs, self._device = program, inputs, device
        self._run: Callable[..., Any] = lambda *_: None

    def __call__(self) -> None:
        """Launch it."""
        self._run(*self._inputs)

    def prepare(self) -> None:
        """Compile and tune its kernels, each once."""
        # Their tuning is of no use to the program, whose kernels have other names.
        options = TunerOptions(record=False, reuse="none")
        kernels = {name: one.anew(options) for name, one in self._program.modules.items()}
        self._run = self._program.runner(TorchMemory(self._device), _Launcher(kernels))
        self()


class _Launcher:
    """Launches kernels that are tuned by themselves."""

    def __init__(self, kernels: Mapping[str, Any]) -> None:
        self._kernels = kernels

    def bound(self, name: str, _sizes: Mapping[str, int]) -> Callable[..., None]:
        """Return what launches a kernel, whose grid follows from its arguments."""
        found: Callable[..., None] = self._kernels[name].run
        return found

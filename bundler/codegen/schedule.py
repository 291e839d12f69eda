# SPDX-License-Identifier: Apache-2.0
"""`schedule_program`: a graph that was read becomes kernels and a plan: loops normalized, dead ones
dropped, the others fused, written, and put in order.

The maximum and the sum of a softmax over long rows become two reductions of one pass
(`_softmax_pairs`), and a buffer may take the memory of one that its kernel is the last to read
(`_reusable`). `program` calls it. Nothing here imports torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

import sympy

from bundler.codegen.kernels.combination_text import takes_turns, write_combination
from bundler.codegen.kernels.kernel_plan import (
    LARGEST_NARROW,
    Bounded,
    KernelText,
    has_two_forms,
    holds_rows,
    tiled,
    write_kernel,
)
from bundler.codegen.kernels.module_text import KernelModules, ProgramKernel, inductor_meta
from bundler.codegen.loops.combination import combined
from bundler.codegen.loops.data_types import store_type
from bundler.codegen.loops.fusion import LoopGroup, fused, is_extern
from bundler.codegen.loops.lazy_tensors import GraphBuilder
from bundler.codegen.loops.loop_nodes import (
    POINTWISE,
    SEEDS,
    Buffer,
    ExternCall,
    Loop,
    Node,
    Reference,
    TensorLayout,
    TorchValue,
    numel,
)
from bundler.codegen.loops.loop_order import normalized
from bundler.codegen.loops.loop_terms import Term, loads_of
from bundler.codegen.loops.range_trees import IterationSpace
from bundler.codegen.loops.size_text import size_text
from bundler.codegen.loops.split_reductions import is_split, split
from bundler.codegen.templates.product_kernel import write_product
from bundler.runtime.program.program_plan import (
    BUFFER_MARK,
    NUMBER_MARK,
    Allocate,
    Input,
    KernelEntry,
    Launch,
    OperatorStep,
    Output,
    ProgramPlan,
    Release,
    Seeds,
    Size,
    Step,
    TensorSpec,
    Weight,
)

# Shorter rows may be held whole, where two passes cost nothing.
_LEAST_ROW = 1025
_FLOATS = frozenset({"float32", "float64"})


class Measurements(Protocol):
    """Which of several forms of a computation is the fastest; as `measured_fusion` has it."""

    def chosen(self, forms: Mapping[str, Sequence[KernelText]]) -> str:
        """Return the name of a form."""


class Graph(Protocol):
    """What `lower` returns, without torch's types."""

    builder: GraphBuilder
    inputs: list[Any]
    outputs: list[Any]
    changed: frozenset[str]
    hints: dict[sympy.Symbol, int]
    values: dict[str, str]
    guards: list[str]
    names: dict[str, tuple[str, ...]]


@dataclass(frozen=True)
class ScheduledProgram:
    """Kernels by name, and what to do with them.

    Attributes:
        kernels, plan: of the program.
        groups: of nodes, each a launch or a call.
        launches: kernel and the buffers that it fills, in order.
    """

    kernels: Mapping[str, ProgramKernel]
    plan: ProgramPlan
    groups: tuple[LoopGroup, ...] = field(repr=False)
    launches: tuple[tuple[str, tuple[str, ...]], ...] = field(repr=False)


def schedule_program(
    graph: Graph,
    bounded: Bounded | None = None,
    *,
    asserted: bool = True,
    upcast: bool = True,
    modules: KernelModules | None = None,
    measurements: Measurements | None = None,
) -> ScheduledProgram:
    """Return the program of a graph.

    Args:
        graph: that was read.
        bounded, asserted, upcast: as `write_kernel` has them.
        modules: that get the kernels; None for plain ones.
        measurements: that decide what shares a kernel, or a launch; None for the rules alone.
    """
    how = {"bounded": bounded, "asserted": asserted, "upcast": upcast}
    return _Scheduler(graph, how, modules or KernelModules(), measurements).build()


class _Scheduler:
    def __init__(
        self,
        graph: Graph,
        how: Mapping[str, Any],
        modules: KernelModules,
        measurements: Measurements | None,
    ) -> None:
        self._graph, self._builder, self._how, self._modules = graph, graph.builder, how, modules
        self._measurements = measurements
        # Size -> the largest value that the 32-bit indices of some kernel allow.
        self._limits: dict[str, int] = {}
        self._buffers = graph.builder.buffers
        self._outputs = {item.buffer for item in graph.outputs if isinstance(item, Reference)}
        self._steps: list[Step] = []
        self._launches: list[tuple[str, tuple[str, ...]]] = []
        # Memory reuse: buffer -> the buffer whose memory it took over.
        self._alias: dict[str, str] = {}
        # Memory -> the buffers that took it over, in the order of the program.
        self._takers: dict[str, list[str]] = {}
        # Buffers whose memory a step of the plan allocates, or an operator returns.
        self._made: set[str] = set()

    def build(self) -> ScheduledProgram:
        nodes = [
            normalized(self._builder.pool, n) if isinstance(n, Loop) and not n.is_product else n
            for n in self._alive(self._builder.nodes)
        ]
        # Before fusion: a split reduction must not be fused as a whole one, and the pair of a
        # softmax becomes one pass only if it shares a kernel.
        hints = self._graph.hints
        nodes = split(self._builder, _softmax_pairs(nodes, hints), hints)
        measured = self._measurements
        forms = None if measured is None else _Forms(self._graph, nodes, self._how, measured)
        choose = None if forms is None else forms.chosen
        groups = combined(
            fused(nodes, self._buffers, hints, choose),
            self._buffers,
            hints,
            lambda group: len(tiled(group, hints)) == 1,
            choose,
        )
        # Counted after fusion, since memory is released, and reused, between launches.
        last = _last_uses(groups)
        uses = Counter(name for group in groups for name in group.touched)
        self._allocate_empty(groups)
        if any(SEEDS in group.touched for group in groups):
            self._steps.append(Seeds(SEEDS, int(numel(self._buffers[SEEDS].layout.sizes))))
        for number, group in enumerate(groups):
            if is_extern(group):
                self._call(group.nodes[0])
            else:
                self._launch(group, number, last, uses)
            for name in sorted(group.touched):
                if last[name] == number and self._is_own(name) and name not in self._outputs:
                    self._release(name)
        kernels = self._modules.kernels
        plan = ProgramPlan(
            tuple(self._input(item) for item in self._graph.inputs),
            self._size_places(),
            tuple(self._steps),
            tuple(self._output(item) for item in self._graph.outputs),
            {name: self._entry(kernel) for name, kernel in kernels.items()},
            tuple(name for name, buffer in self._buffers.items() if buffer.source == "constant"),
            dict(sorted(self._limits.items())),
            dict(self._graph.values),
            tuple(self._graph.guards),
            {
                name: Weight(self._spec(self._buffers[name].layout), names)
                for name, names in self._graph.names.items()
                if name in self._buffers
            },
        )
        return ScheduledProgram(kernels, plan, tuple(groups), tuple(self._launches))

    def _alive(self, nodes: Sequence[Node]) -> list[Node]:
        """Return the nodes without those that nobody needs: what they write is neither read nor
        returned, nor an input, and they check nothing.

        An operator's results that nobody needs get no buffer: torch may return None in their place.
        """
        needed = set(self._outputs)
        alive: list[Node] = []
        for node in reversed(nodes):
            # Buffers of inputs are never dead: the caller sees what is written there.
            checks = isinstance(node, ExternCall) and node.is_check
            if not checks and not any(n in needed or not self._is_own(n) for n in node.writes):
                continue
            if isinstance(node, ExternCall):
                used = (name if name in needed else None for name in node.outputs)
                alive.append(replace(node, outputs=tuple(used)))
            elif numel(node.sizes) != 0:
                alive.append(node)
            needed |= node.reads
        return alive[::-1]

    def _allocate_empty(self, groups: Sequence[LoopGroup]) -> None:
        """Allocate buffers without elements, which no kernel writes."""
        written = {name for group in groups for name in group.written}
        needed = self._outputs.union(*(group.touched for group in groups))
        for name in sorted(needed - written, key=_order):
            if self._is_own(name):
                self._allocate(name)

    def _allocate(self, name: str) -> None:
        self._steps.append(Allocate(name, self._spec(self._buffers[name].layout)))
        self._made.add(name)

    def _is_own(self, name: str) -> bool:
        return self._buffers[name].source == "node"

    # ---------------------------------------------------------------------------------------- Steps

    def _launch(
        self, group: LoopGroup, number: int, last: Mapping[str, int], uses: Mapping[str, int]
    ) -> None:
        written = {loop.buffer for loop in group.loops if self._is_own(loop.buffer)}
        # Buffers that a scatter changes hold values already: they exist, and are read again.
        added = {loop.buffer for loop in group.loops if loop.mode is not None}
        kept_elsewhere = {name for name in written if uses[name] > 1}
        # What only this kernel reads stays in registers: no memory, no store.
        removed = frozenset(written - self._outputs - kept_elsewhere - added)
        # What no later step reads: its memory may become that of a result.
        dying = {
            n
            for n in group.touched
            if last[n] == number and self._is_own(n) and n not in self._outputs and n not in written
        }
        reused: dict[str, str] = {}
        for part in group.parts or (group,):
            # A part must not write over what another one reads.
            others = (other.touched for other in group.parts if other is not part)
            own = dying.intersection(part.touched).difference(*others)
            new = (written - removed - added).intersection(part.written)
            reused |= _reusable(part, self._buffers, new, own)
        write = partial(
            _writer_of(group),
            group,
            self._builder.pool,
            self._buffers,
            removed,
            reused,
            self._graph.hints,
            **self._how,
        )
        text = write()
        self._limits |= {str(size_text(size)): LARGEST_NARROW for size in text.bounds}
        kernel = self._modules.add(text)
        both = not holds_rows(group) and has_two_forms(text)
        if both and self._modules.policy.get("multi_kernel"):
            self._modules.add_other(kernel, write(held=text.kind == "reduction"))
        self._launches.append((kernel.name, text.buffers))
        for name in sorted(written - removed, key=_order):
            if name in reused:
                # The chain may be long: the memory is that of the first buffer in it.
                memory = self._alias[name] = self._memory(reused[name])
                self._takers.setdefault(memory, []).append(name)
            elif name not in self._made:
                self._allocate(name)
        arguments = tuple(self._passed(parameter.outer) for parameter in text.parameters)
        sizes = {name: size_text(size) for name, size in text.grid_sizes.items()}
        self._steps.append(Launch(kernel.name, arguments, sizes))

    def _memory(self, name: str) -> str:
        return self._alias.get(name, name)

    def _passed(self, outer: str | sympy.Expr) -> Size:
        if not isinstance(outer, str):
            return size_text(outer)
        buffer = self._buffers[outer]
        if buffer.source == "value":
            return outer
        return f"{NUMBER_MARK if buffer.by_value else BUFFER_MARK}{self._memory(outer)}"

    def _release(self, name: str) -> None:
        memory = self._memory(name)
        # Memory that was taken over keeps the name of its first buffer. It is released with the
        # last buffer that took it, unless the caller gets one of them.
        takers = self._takers.get(memory, ())
        users = [other for other in takers if other != name]
        if (
            memory in self._made
            and not any(other in self._outputs for other in (*users, memory))
            and (not takers or takers[-1] == name)
        ):
            self._steps.append(Release(memory))

    def _call(self, node: Node) -> None:
        assert isinstance(node, ExternCall)
        made = [None if name is None else self._buffers[name] for name in node.outputs]
        self._made.update(buffer.name for buffer in made if buffer is not None)
        self._steps.append(
            OperatorStep(
                node.operator,
                tuple(self._encoded(item) for item in node.arguments),
                {name: self._encoded(item) for name, item in node.keywords},
                node.outputs,
                node.single,
                tuple(None if buffer is None else self._spec(buffer.layout) for buffer in made),
                any(buffer.bases for buffer in made if buffer is not None),
            )
        )

    def _seen(self, item: Reference) -> TensorSpec | None:
        """Return how a buffer's memory is seen; None where the tensor that was made there is meant,
        whole and with its own strides.
        """
        made = self._buffers[self._memory(item.buffer)].layout
        if not item.view and item.layout == made:
            return None
        return self._spec(item.layout)

    def _encoded(self, item: Any) -> Any:
        match item:
            case Reference(buffer):
                spec = self._seen(item)
                return {
                    "buffer": self._memory(buffer),
                    "spec": None if spec is None else vars(spec),
                }
            case TorchValue(kind, name):
                return {kind: name}
            case list() | tuple():
                return [self._encoded(part) for part in item]
            case sympy.Expr():
                return {"size": size_text(item)}
        return item

    # --------------------------------------------------------------------------- Inputs and outputs

    def _input(self, item: Any) -> Input:
        if isinstance(item, str):
            buffer = self._buffers[item]
            changed = item in self._graph.changed
            return Input(item, self._spec(buffer.layout), buffer.aligned, changed)
        if isinstance(item, (bool, int, float)):
            return Input("", number=item)
        return Input("" if item is None else str(item))

    def _size_places(self) -> dict[str, tuple[int, int]]:
        """Return where each size is read, by the places that `ProgramPlan.sizes` has."""
        found: dict[str, tuple[int, int]] = {}
        for number, item in enumerate(self._graph.inputs):
            if isinstance(item, sympy.Symbol):
                found[str(item)] = (number, -1)
            elif isinstance(item, str):
                layout = self._buffers[item].layout
                for place, size in enumerate((*layout.sizes, *layout.strides)):
                    if isinstance(size, sympy.Symbol) and str(size) not in self._graph.values:
                        found.setdefault(str(size), (number, place))
        return dict(sorted(found.items()))

    def _output(self, item: Any) -> Output:
        if isinstance(item, Reference):
            seen = self._spec(item.layout) if item.fresh else self._seen(item)
            return Output(self._memory(item.buffer), seen, fresh=item.fresh)
        return Output(None, size=None if item is None else size_text(item))

    def _entry(self, kernel: ProgramKernel) -> KernelEntry:
        text = kernel.text
        assert text is not None
        return KernelEntry(
            str(inductor_meta(text)["grid_type"]),
            tuple(parameter.name for parameter in text.parameters),
            others=self._modules.others.get(kernel.name, {}),
        )

    def _spec(self, layout: TensorLayout) -> TensorSpec:
        sizes, strides = (
            tuple(size_text(part) for part in parts) for parts in (layout.sizes, layout.strides)
        )
        return TensorSpec(layout.dtype, sizes, strides, size_text(layout.offset), layout.device)


class _Forms:
    """Has several forms of a computation measured, as they would be if nothing else were fused."""

    def __init__(
        self,
        graph: Graph,
        nodes: Sequence[Node],
        how: Mapping[str, Any],
        measurements: Measurements,
    ) -> None:
        self._graph, self._measurements = graph, measurements
        self._buffers = graph.builder.buffers
        # A kernel that is only tried takes no guards, and asserts what could fail.
        bounded = None if how["bounded"] is None else (lambda _: True)
        self._how = {**how, "bounded": bounded, "asserted": True}
        # Buffer -> the nodes that touch it.
        self._users: dict[str, set[int]] = {}
        for node in nodes:
            for name in node.reads.union(node.writes):
                self._users.setdefault(name, set()).add(id(node))
        self._outputs = {item.buffer for item in graph.outputs if isinstance(item, Reference)}

    def chosen(self, parts: Sequence[LoopGroup], together: LoopGroup) -> LoopGroup | None:
        """Return what groups are launched as: one kernel, or None for each by itself."""
        whole, turned = self._text(together), replace(together, in_turn=True)
        forms = {"apart": [self._text(part) for part in parts], "together": [whole]}
        if together.parts and takes_turns(whole):
            forms["in turn"] = [self._text(turned)]
        found = self._measurements.chosen(forms)
        return None if found == "apart" else turned if found == "in turn" else together

    def _text(self, group: LoopGroup) -> KernelText:
        own = {id(node) for node in group.nodes}
        kept = {loop.buffer for loop in group.loops if loop.mode is not None} | self._outputs
        removed = frozenset(
            name
            for name in group.written - kept
            if self._buffers[name].source == "node" and self._users[name] <= own
        )
        pool, hints = self._graph.builder.pool, self._graph.hints
        return _writer_of(group)(group, pool, self._buffers, removed, {}, hints, **self._how)


def _order(name: str) -> tuple[int, str]:
    digits = name.lstrip("abcdefghijklmnopqrstuvwxyz")
    return (int(digits) if digits.isdigit() else 0, name)


def _writer_of(group: LoopGroup) -> Callable[..., KernelText]:
    if group.parts:
        return write_combination
    return write_kernel if group.product is None else write_product


def _last_uses(groups: Iterable[LoopGroup]) -> dict[str, int]:
    """Return the number of the last group that touches each buffer."""
    return {name: number for number, group in enumerate(groups) for name in group.touched}


def _reusable(
    group: LoopGroup,
    buffers: Mapping[str, Buffer],
    written: Collection[str],
    dying: Collection[str],
) -> dict[str, str]:
    """Return buffer that is written -> buffer whose memory it may take over.

    The old buffer is read last by this kernel, only at the address where the new one is written, so
    each lane has read its element before it stores. Both have the same elements in memory, and the
    old one is no view that an operator returned.

    Args:
        group: of the kernel.
        buffers: of the program.
        written: buffers that the kernel stores.
        dying: buffers that nobody reads after it.
    """
    if any(loop.kind != POINTWISE for loop in group.loops):
        # A looped reduction may read its row again after a store of an earlier pass changed it; the
        # programs of a product read rows and columns of others.
        return {}
    space = IterationSpace(group.dimensions)
    reads: dict[str, set[sympy.Expr]] = {}
    stores: dict[str, sympy.Expr] = {}
    for loop in group.loops:
        place = space.place(loop)
        assert place is not None
        for root in loop.roots:
            for name, index, _ in loads_of(root):
                reads.setdefault(name, set()).add(place(index))
        stores[loop.buffer] = place(loop.index)
    found: dict[str, str] = {}
    for new in sorted(written):
        for old in sorted(set(dying) - set(found.values())):
            if (
                not buffers[old].shared
                and reads.get(old) == {stores[new]}
                and _same_memory(buffers[new].layout, buffers[old].layout)
            ):
                found[new] = old
                break
    return found


def _same_memory(one: TensorLayout, other: TensorLayout) -> bool:
    # The same dtype, not only the same width: the kernel has one pointer for both.
    same_type = one.dtype == other.dtype and store_type(one.dtype) == store_type(other.dtype)
    return (
        same_type
        and one.device == other.device
        and bool(sympy.expand(one.storage - other.storage) == 0)
    )


def _softmax_pairs(nodes: Sequence[Node], hints: Mapping[sympy.Symbol, int]) -> list[Node]:
    """Return the nodes with the maximum and the sum of each long softmax as kinds of their own,
    `softmax_max` and `softmax_sum`, of the same values.

    An online softmax computes both in one pass over the row, where the sum alone would have to wait
    for the whole maximum and read the row once more.
    """
    maxima = {
        n.buffer: n
        for n in nodes
        if isinstance(n, Loop) and n.kind == "max" and _is_long_row(n, hints)
    }
    changed: dict[str, Loop] = {}
    for node in nodes:
        top = (
            _softmax_maximum(node, maxima)
            if isinstance(node, Loop) and node.kind == "sum"
            else None
        )
        if top is not None:
            assert isinstance(node, Loop)
            changed[top.buffer] = replace(top, kind="softmax_max")
            changed[node.buffer] = replace(node, kind="softmax_sum", value=top.value)
    return [changed.get(node.buffer, node) if isinstance(node, Loop) else node for node in nodes]


def _is_long_row(loop: Loop, hints: Mapping[sympy.Symbol, int]) -> bool:
    row = numel(loop.reduced_sizes)
    return (
        loop.value.dtype in _FLOATS
        and not is_split(loop, hints)
        and not (row.is_Integer and row < _LEAST_ROW)
    )


def _softmax_maximum(loop: Loop, maxima: dict[str, Loop]) -> Loop | None:
    """Return the maximum of the values whose exponentials, relative to it, a loop sums up; None
    where it sums up something else.
    """
    exponential = loop.value
    if exponential.operator != "exp":
        return None
    difference = exponential.arguments[0]
    if not isinstance(difference, Term) or difference.operator != "sub":
        return None
    value, top = difference.arguments
    if not isinstance(top, Term) or top.operator != "load" or top.details[0] not in maxima:
        return None
    found = maxima[top.details[0]]
    # Terms are shared in the pool, so equal values are the same object.
    same_rows = (found.variables, found.sizes, found.reduced, found.reduced_sizes) == (
        loop.variables,
        loop.sizes,
        loop.reduced,
        loop.reduced_sizes,
    )
    return found if same_rows and value is found.value and top.details[1] == found.index else None

# SPDX-License-Identifier: Apache-2.0
"""`schedule_program`: a graph that was read becomes kernels and a plan: loops normalized, dead ones
dropped, the others fused, written, and put in order.

A buffer may take the memory of one that its kernel is the last to read (`_reusable`). `program`
calls it. Nothing here imports torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import sympy

from bundler.codegen.kernels.combination_text import takes_turns, write_combination
from bundler.codegen.kernels.kernel_arguments import COUNTERS
from bundler.codegen.kernels.kernel_plan import (
    LARGEST_NARROW,
    Bounded,
    KernelText,
    has_descriptors,
    has_two_forms,
    holds_rows,
    is_worth_holding,
    rows_change,
    tiled,
    write_kernel,
)
from bundler.codegen.kernels.module_text import (
    KernelModules,
    ProgramKernel,
    inductor_meta,
    module_text,
)
from bundler.codegen.loops.combination import combined
from bundler.codegen.loops.data_types import store_type
from bundler.codegen.loops.equal_results import with_equal_results_once
from bundler.codegen.loops.fusion import LoopGroup, fused, is_extern
from bundler.codegen.loops.in_place_writes import with_writes_in_place
from bundler.codegen.loops.launch_order import in_less_memory
from bundler.codegen.loops.lazy_tensors import GraphBuilder
from bundler.codegen.loops.loop_nodes import (
    POINTWISE,
    REDUCTIONS,
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
from bundler.codegen.loops.loop_terms import ATTENTION
from bundler.codegen.loops.range_trees import IterationSpace
from bundler.codegen.loops.shared_rows import can_share, shareable
from bundler.codegen.loops.size_text import size_text
from bundler.codegen.loops.softmax_pairs import with_softmax_pairs
from bundler.codegen.loops.split_reductions import split
from bundler.codegen.templates.attention_kernel import write_attention
from bundler.codegen.templates.product_kernel import write_product
from bundler.codegen.templates.prologues import with_prologues
from bundler.codegen.templates.row_products import row_products
from bundler.codegen.templates.sibling_products import with_siblings, write_siblings
from bundler.codegen.templates.split_products import split_products
from bundler.runtime.program.program_plan import (
    BUFFER_MARK,
    NUMBER_MARK,
    Allocate,
    Cooperation,
    GridCounters,
    Input,
    KernelEntry,
    Launch,
    OperatorStep,
    Output,
    Overwrite,
    ProgramPlan,
    Release,
    Seeds,
    Size,
    Step,
    TensorSpec,
    Weight,
)


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
    freed: frozenset[str]
    donated: frozenset[str]


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
        # Inputs whose memory the program may have.
        self._donated = graph.donated.difference(graph.changed)
        # Buffers whose rows several programs share.
        self._shared: frozenset[str] = frozenset()
        # Buffers whose memory a step of the plan allocates, or an operator returns.
        self._made: set[str] = set()

    def build(self) -> ScheduledProgram:
        alive = self._alive(self._builder.nodes)
        alive = with_writes_in_place(self._builder.pool, alive, self._buffers, self._outputs)
        alive = with_prologues(self._builder, alive, self._outputs, self._graph.hints)
        alive = row_products(self._builder, alive)
        nodes = [
            normalized(self._builder.pool, n) if isinstance(n, Loop) and not n.is_product else n
            for n in split_products(self._builder, alive)
        ]
        # Before fusion: a split reduction must not be fused as a whole one, and the pair of a
        # softmax becomes one pass only if it shares a kernel.
        self._shared = self._worth_sharing(nodes)
        groups = self._grouped(with_softmax_pairs(nodes, self._graph.hints, shared=self._shared))
        uses = Counter(name for group in groups for name in group.touched)
        groups = with_siblings(groups, lambda *both: self._are_alike(both, uses))
        # Counted after fusion, since memory is released, and reused, between launches.
        uses = Counter(name for group in groups for name in group.touched)
        groups = in_less_memory(
            groups,
            self._buffers,
            self._graph.hints,
            self._outputs,
            self._graph.freed,
            lambda group: self._taken(group, uses),
        )
        last = _last_uses(groups)
        self._allocate_empty(groups)
        if any(SEEDS in group.touched for group in groups):
            self._steps.append(Seeds(SEEDS, int(numel(self._buffers[SEEDS].layout.sizes))))
        for number, group in enumerate(groups):
            if is_extern(group):
                self._call(group.nodes[0])
            elif self._shared.isdisjoint(group.written):
                self._launch(group, number, last, uses)
            else:
                self._cooperate(group, nodes, uses)
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

    def _grouped(self, nodes: Sequence[Node]) -> list[LoopGroup]:
        """Return the groups of nodes, each a launch or a call."""
        hints = self._graph.hints
        nodes = split(self._builder, nodes, hints, self._shared)
        # A kernel whose programs share rows has other forms to be measured beside.
        measured = None if self._shared else self._measurements
        forms = None if measured is None else _Forms(self._graph, nodes, self._how, measured)
        choose = None if forms is None else forms.chosen
        groups = fused(nodes, self._buffers, hints, choose)
        if not self._shared:
            pool, buffers = self._builder.pool, self._buffers
            groups = with_equal_results_once(pool, groups, buffers, self._outputs)
        return combined(
            groups,
            self._buffers,
            hints,
            lambda group: len(tiled(group, hints)) == 1,
            self._shared,
            choose,
        )

    def _worth_sharing(self, nodes: Sequence[Node]) -> frozenset[str]:
        """Return the buffers whose rows programs may share, where that was asked for; none whose
        pieces share launches with what belongs to other rows.
        """
        policy = self._modules.policy
        if not (policy.get("cooperative_reductions") or policy.get("max_autotune")):
            return frozenset()
        found = shareable(nodes)
        groups = self._grouped(nodes) if found else []
        return found.difference(*(group.written for group in groups if group.parts))

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

    def _taken(self, group: LoopGroup, uses: Mapping[str, int]) -> dict[str, str]:
        """Return buffer that a kernel stores -> buffer whose memory it takes over, where nobody
        reads that later.
        """
        added = {loop.buffer for loop in group.loops if loop.mode is not None}
        own = {name for name in group.touched if self._is_own(name)}
        stored = {name for name in own & group.written if uses[name] > 1 or name in self._outputs}
        read = (own - group.written - self._outputs) | (self._donated & group.touched)
        return _reusable(group, self._buffers, stored - added, read, self._may_take)

    def _allocate(self, name: str) -> None:
        self._steps.append(Allocate(name, self._spec(self._buffers[name].layout)))
        self._made.add(name)

    def _is_own(self, name: str) -> bool:
        return self._buffers[name].source == "node"

    # ---------------------------------------------------------------------------------------- Steps

    def _cooperate(self, group: LoopGroup, nodes: Sequence[Node], uses: Mapping[str, int]) -> None:
        """Have a group computed by one launch whose programs share its rows, or by several where
        they cannot.
        """
        hints, modules = self._graph.hints, self._modules
        written = {loop.buffer for loop in group.loops if self._is_own(loop.buffer)}
        needed = {name for name in written if uses[name] > 1 or name in self._outputs}
        for name in sorted(needed - self._made, key=_order):
            self._allocate(name)
        can = can_share(group, self._buffers, hints)
        shared, self._shared = self._shared, frozenset()
        whole = {node.buffer: node for node in nodes if isinstance(node, Loop)}
        loops = [whole[loop.buffer] if loop.buffer in shared else loop for loop in group.loops]
        apart = self._steps_of(self._grouped(loops), needed)
        self._shared = shared
        if not can:
            self._steps += apart
            return
        text = write_kernel(
            group,
            self._builder.pool,
            self._buffers,
            frozenset(written - needed),
            {},
            hints,
            **self._how,
            shared=True,
        )
        launch = self._launched(modules.add(text), text)
        begin: list[Step] = [
            GridCounters(name, int(layout.storage))
            if name == COUNTERS
            else Allocate(name, self._spec(layout))
            for name, layout in text.workspaces.items()
        ]
        together = (*begin, launch, *map(Release, text.workspaces))
        measured = bool(modules.policy.get("max_autotune"))
        self._steps.append(Cooperation(together, tuple(apart), measured))

    def _steps_of(self, groups: Sequence[LoopGroup], needed: Collection[str]) -> list[Step]:
        """Return the steps of groups in the midst of a program; they may run again and again, and
        leave nothing but what is needed behind.
        """
        before = self._steps, self._outputs, set(self._made)
        self._steps, self._outputs = [], self._outputs.union(needed)
        last, uses = _last_uses(groups), Counter(n for group in groups for n in group.touched)
        for number, group in enumerate(groups):
            self._launch(group, number, last, uses, reuse=False)
            for name in sorted(self._made - before[2] - self._outputs):
                if last[name] == number:
                    self._release(name)
        found = self._steps
        self._steps, self._outputs, self._made = before
        return found

    def _launched(self, kernel: ProgramKernel, text: KernelText) -> Launch:
        """Return the launch of a kernel, and note what it counts on."""
        self._limits |= {str(size_text(size)): LARGEST_NARROW for size in text.bounds}
        self._launches.append((kernel.name, text.buffers))
        arguments = tuple(self._passed(parameter.outer) for parameter in text.parameters)
        sizes = {name: size_text(size) for name, size in text.grid_sizes.items()}
        return Launch(kernel.name, arguments, sizes)

    def _launch(
        self,
        group: LoopGroup,
        number: int,
        last: Mapping[str, int],
        uses: Mapping[str, int],
        *,
        reuse: bool = True,
    ) -> None:
        written = {loop.buffer for loop in group.loops if self._is_own(loop.buffer)}
        # Buffers that a scatter changes hold values already: they exist, and are read again.
        added = {loop.buffer for loop in group.loops if loop.mode is not None}
        # What only this kernel reads stays in registers: no memory, no store.
        removed = self._unread(written - added, uses)
        # What no later step reads: its memory may become that of a result.
        dying = {
            n
            for n in group.touched
            if last[n] == number
            and self._is_free(n)
            and n not in self._outputs
            and n not in written
        }
        reused: dict[str, str] = {}
        for part in (group.parts or (group,)) if reuse else ():
            # A part must not write over what another one reads.
            others = (other.touched for other in group.parts if other is not part)
            own = dying.intersection(part.touched).difference(*others)
            new = (written - removed - added).intersection(part.written)
            reused |= _reusable(part, self._buffers, new, own, self._may_take)
        kernel, text = self._kernel(group, removed, reused)
        for name in sorted(written - removed, key=_order):
            if name in reused:
                # The chain may be long: the memory is that of the first buffer in it.
                memory = self._alias[name] = self._memory(reused[name])
                if memory in self._donated and memory not in self._takers:
                    self._steps.append(Overwrite(memory))
                self._takers.setdefault(memory, []).append(name)
            elif name not in self._made:
                self._allocate(name)
        self._steps.append(self._launched(kernel, text))

    def _unread(self, written: Iterable[str], uses: Mapping[str, int]) -> frozenset[str]:
        """Return the buffers that nothing but the kernel which writes them reads."""
        return frozenset(n for n in written if uses[n] == 1 and n not in self._outputs)

    def _are_alike(self, groups: Sequence[LoopGroup], uses: Mapping[str, int]) -> bool:
        """Whether products have one text but for the names of their tensors."""
        pool, hints = self._builder.pool, self._graph.hints
        found = set()
        for group in groups:
            removed = self._unread(filter(self._is_own, group.written), uses)
            text = write_product(group, pool, self._buffers, removed, {}, hints, **self._how)
            found.add(module_text(text, {}))
        return len(found) == 1

    def _kernel(
        self, group: LoopGroup, removed: frozenset[str], reused: Mapping[str, str]
    ) -> tuple[ProgramKernel, KernelText]:
        """Return the kernel that is launched for a group, and its text; other forms of it are with
        the modules.
        """
        hints, told = self._graph.hints, self._modules.policy
        plain = not group.parts and group.product is None
        by_rule = plain and bool(told.get("use_tensor_descriptor"))

        def write(group: LoopGroup, **form: bool) -> KernelText:
            return _writer_of(group)(
                group,
                self._builder.pool,
                self._buffers,
                removed,
                reused,
                hints,
                **self._how,
                **({"descriptors": True} if by_rule else {}),
                **form,
            )

        if plain and rows_change(group):
            # Where it is looped over, a row of any length has the two passes of an online softmax.
            pairs = with_softmax_pairs(group.nodes, hints, least=0)
            looped = write(replace(group, nodes=pairs))
            held = write(group, held=True) if is_worth_holding(looped) else None
            if held is not None and self._modules.add_bounded(held, looped):
                return self._modules.add(held), held
            return self._modules.add(looped), looped
        text = write(group)
        kernel = self._modules.add(text)
        both = not holds_rows(group) and has_two_forms(text)
        if both and told.get("multi_kernel"):
            self._modules.add_other(kernel, write(group, held=text.kind == "reduction"))
        if plain and told.get("max_autotune") and not by_rule:
            tiles = write(group, descriptors=True)
            if has_descriptors(tiles):
                self._modules.add_other(kernel, tiles)
        return kernel, text

    def _is_free(self, name: str) -> bool:
        """Whether a buffer's memory is the program's when nobody reads it any more."""
        return self._is_own(name) or name in self._donated

    def _may_take(self, new: str, old: str) -> bool:
        """Whether a buffer may take the memory of another one: what the caller may get, itself or
        as a view that an operator returned, not that of an input, nor what is aligned that of an
        input which may not be.
        """
        memory = self._buffers[self._memory(old)]
        if memory.source == "node":
            return True
        return memory.aligned and new not in self._outputs and not self._buffers[new].shared

    def _memory(self, name: str) -> str:
        return self._alias.get(name, name)

    def _passed(self, outer: str | sympy.Expr) -> Size:
        if not isinstance(outer, str):
            return size_text(outer)
        buffer = self._buffers.get(outer)
        if buffer is None:  # a workspace
            return f"{BUFFER_MARK}{outer}"
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
            most=text.most,
            beyond=self._modules.beyond.get(kernel.name, {}),
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
        self._users: dict[str, set[object]] = {}
        for node in nodes:
            for name in node.reads.union(node.writes):
                self._users.setdefault(name, set()).add(_identity(node))
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
        own = {_identity(node) for node in group.nodes}
        kept = {loop.buffer for loop in group.loops if loop.mode is not None} | self._outputs
        removed = frozenset(
            name
            for name in group.written - kept
            if self._buffers[name].source == "node" and self._users[name] <= own
        )
        pool, hints = self._graph.builder.pool, self._graph.hints
        return _writer_of(group)(group, pool, self._buffers, removed, {}, hints, **self._how)


def _identity(node: Node) -> object:
    """Return what a node has in common with itself turned, and with no other one."""
    return (node.buffer, node.index, id(node.value)) if isinstance(node, Loop) else id(node)


def _order(name: str) -> tuple[int, str]:
    digits = name.lstrip("abcdefghijklmnopqrstuvwxyz")
    return (int(digits) if digits.isdigit() else 0, name)


def _writer_of(group: LoopGroup) -> Callable[..., KernelText]:
    if group.parts:
        return write_combination if group.product is None else write_siblings
    if group.product is None:
        return write_kernel
    return write_attention if group.product.kind == ATTENTION else write_product


def _last_uses(groups: Iterable[LoopGroup]) -> dict[str, int]:
    """Return the number of the last group that touches each buffer."""
    return {name: number for number, group in enumerate(groups) for name in group.touched}


def _reusable(
    group: LoopGroup,
    buffers: Mapping[str, Buffer],
    written: Collection[str],
    dying: Collection[str],
    may_take: Callable[[str, str], bool],
) -> dict[str, str]:
    """Return buffer that is written -> buffer whose memory it may take over.

    The old buffer is read last by this kernel, only at the address where the new one is written, so
    each lane has read its element before it stores. Both have the same elements in memory, and the
    old one is no view that an operator returned. A kernel of rows may read one again in each pass
    over it, so that only what the last pass stores is written over it.

    Args:
        group: of the kernel.
        buffers: of the program.
        written: buffers that the kernel stores.
        dying: buffers that nobody reads after it.
        may_take: whether a buffer may take another one's memory, whatever the kernel does.
    """
    if any(loop.kind not in {POINTWISE, *REDUCTIONS} or loop.rows_each for loop in group.loops):
        # The programs of a product read rows and columns of others, and a scan those of its row.
        return {}
    passes: dict[str, int] = {}
    space = IterationSpace(group.dimensions)
    reads: dict[str, set[sympy.Expr]] = {}
    stores: dict[str, sympy.Expr] = {}
    for loop in group.loops:
        place = space.place(loop)
        assert place is not None
        before = [item for item in group.loops if item.buffer in loop.reads & passes.keys()]
        passes[loop.buffer] = max(
            (passes[item.buffer] + item.is_reduction for item in before), default=0
        )
        for name, index, _ in loop.loads:
            reads.setdefault(name, set()).add(place(index))
        stores[loop.buffer] = place(loop.index)
    own = {name for name in dying if buffers[name].source == "node"}
    found: dict[str, str] = {}
    last = max(passes.values(), default=0)
    for new in sorted(name for name in written if passes[name] == last):
        # An input last: a call that leaves it to the caller has to copy it.
        free = sorted(set(dying) - set(found.values()), key=lambda n: (n not in own, n))
        for old in free:
            if (
                not buffers[old].shared
                and reads.get(old) == {stores[new]}
                and _same_memory(buffers[new].layout, buffers[old].layout)
                and may_take(new, old)
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

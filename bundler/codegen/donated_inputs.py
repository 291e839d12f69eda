# SPDX-License-Identifier: Apache-2.0
"""`DonatedInputs`: which inputs of a backward graph its program may write over.  Imports torch.

An input is donated where AOTAutograd says so, as to TorchInductor: it was saved for backward, and
is neither an input or a result of the function nor a gradient, nor a view of one.  Beside that it
has to be alone in its memory as the forward graph's program fills that: torch traces a copy where
the program may save one tensor in two ways.

torch refuses a backward pass that keeps the graph where anything is donated.  Ours need no refusal:
a call of which somebody may read the inputs again (`is_graph_kept`) writes over copies.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._functorch import config

from bundler.codegen.channels_last import DONATED, FREED
from bundler.codegen.program import Program
from bundler.runtime.program.bound_plan import in_one_result
from bundler.runtime.program.program_plan import Allocate, OperatorStep, ProgramPlan

_TORCHS = "aten."


class DonatedInputs:
    """Those of one backward graph; the forward graph is told first."""

    def __init__(self) -> None:
        # Places among the backward graph's inputs.
        self._places: frozenset[int] = frozenset()
        # What is saved for backward -> its place among the forward graph's results.
        self._saved: Mapping[str, int] = {}
        # What is alone in memory of those.
        self._alone: frozenset[str] = frozenset()

    def take(self, forward: fx.GraphModule, known: Any) -> None:
        """Take over from torch what is donated, so that it refuses no backward pass.

        Args:
            forward: the graph.
            known: what AOTAutograd knows of it.
        """
        if config.donated_buffer:
            self._places = frozenset(known.bw_donated_idxs or ())
        known.bw_donated_idxs = []
        results = forward.graph.output_node().args[0]
        storages = [_storage(node) for node in results]
        times = Counter(storages)
        self._saved = {
            results[place].name: place
            for place in range(known.num_forward, len(results))
            if storages[place] is not None and times[storages[place]] == 1
        }

    def filled_by(self, program: Program) -> None:
        """Take over from the forward graph's program what is alone in memory."""
        alone = results_alone(program.plan)
        self._alone = frozenset(name for name, place in self._saved.items() if place in alone)

    def mark(self, inputs: Sequence[fx.Node]) -> None:
        """Mark the inputs of the backward graph that are donated."""
        for place, node in enumerate(inputs):
            if place in self._places and node.name in self._alone and FREED in node.meta:
                node.meta[DONATED] = True


def results_alone(plan: ProgramPlan) -> frozenset[int]:
    """Return the places of the results that the program made memory for, which nothing else of what
    the caller has is in.
    """
    made: set[str | None] = set()
    for step in plan.steps:
        if isinstance(step, Allocate):
            made.add(step.name)
        # An operator of the user's may return what it keeps.
        elif isinstance(step, OperatorStep) and step.single and step.operator.startswith(_TORCHS):
            made.update(step.outputs)
    made &= in_one_result(plan, plan.constants)
    return frozenset(n for n, output in enumerate(plan.outputs) if output.buffer in made)


def is_graph_kept() -> bool:
    """Whether a backward pass keeps what was saved for another one; so outside of any, too."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())  # noqa: SLF001  # as torch


def consumer(program: Program) -> Callable[[list[Any]], Sequence[Any]]:
    """Return what runs a program and empties the list of its inputs."""
    if not program.plan.overwritten:
        return program.consume

    def call(inputs: list[Any]) -> Sequence[Any]:
        if not is_graph_kept():
            return program.consume(inputs)
        given = list(inputs)
        inputs.clear()
        return program.run(*given)

    return call


def _storage(node: Any) -> int | None:
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
        return None
    return int(value.untyped_storage()._cdata)  # noqa: SLF001  # as torch compares

# SPDX-License-Identifier: Apache-2.0
"""`InductorCalls`: which operators Inductor calls instead of generating a kernel, noted where it
has scheduled a graph.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch._functorch.aot_autograd import make_boxed_func
from torch._inductor import compile_fx, ir, scheduler

aten = torch.ops.aten
# Nodes that call nothing: parts of a result, assertions and sizes, memory that others fill.
_NO_CALLS = (
    "MultiOutput",
    "AssertScalar",
    "DynamicScalar",
    "NopKernel",
    "DynamicSelectStorageOffset",
)


class _Scheduled(Exception):
    """Ends the compilation of a graph before its code is generated."""


class InductorCalls:
    """Counts by operator over the graphs that `backend` compiles."""

    def __init__(self) -> None:
        self.operators: Counter[str] = Counter()
        self.graphs = 0
        self.kernels = 0

    def backend(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        """Be a backend of `torch.compile` which runs the graphs as they came to Inductor: their
        kernels would take most of the time and say nothing about calls.
        """
        made: Callable[..., Any] = compile_fx.compile_fx(graph, inputs, inner_compile=self._counted)
        return made

    def _counted(
        self, graph: torch.fx.GraphModule, inputs: list[Any], **settings: Any
    ) -> Callable[..., Any]:
        def counting(scheduled: Any) -> None:
            self._count(scheduled)
            raise _Scheduled

        whole, before = torch.fx.GraphModule(graph, copy.deepcopy(graph.graph)), self.graphs
        for view in whole.graph.find_nodes(op="call_function", target=aten.view.default):
            # Some results on a GPU have other strides than were traced.
            view.target = aten.reshape.default
        whole.recompile()
        try:
            with mock.patch.object(scheduler.Scheduler, "codegen", counting):
                compile_fx.compile_fx_inner(graph, inputs, **settings)
        except Exception:
            # Inductor wraps what is raised within it.
            if self.graphs == before:
                raise
        run: Callable[..., Any] = make_boxed_func(whole.forward)
        return run

    def _count(self, graph: Any) -> None:
        self.graphs += 1
        for node in graph.nodes:
            if isinstance(node, scheduler.NopKernelSchedulerNode):
                continue
            if not isinstance(node, scheduler.ExternKernelSchedulerNode):
                self.kernels += 1
            elif type(node.node).__name__ not in _NO_CALLS:
                self.operators[_name(node.node)] += 1


def _name(node: Any) -> str:
    """Return the name of what a node calls: `aten.mm.default`, `extern_kernels.mm`."""
    overload = getattr(node, "op_overload", None)
    if overload is not None and not isinstance(node, ir.ExternKernelOut):
        return str(overload)
    return str(getattr(node, "python_kernel_name", None) or type(node).__name__)

# SPDX-License-Identifier: Apache-2.0
"""`InductorCalls`: which operators Inductor calls instead of generating a kernel, noted where it
schedules its graphs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch._inductor import ir, scheduler

# Nodes that call nothing: parts of a result, assertions and sizes, memory that others fill.
_NO_CALLS = (
    "MultiOutput",
    "AssertScalar",
    "DynamicScalar",
    "NopKernel",
    "DynamicSelectStorageOffset",
)


class InductorCalls:
    """Counts, while `noted` is open, by operator; a graph that is read from torch's cache of graphs
    is not counted, so that cache must be off.
    """

    def __init__(self) -> None:
        self.operators: Counter[str] = Counter()
        self.graphs = 0
        self.kernels = 0

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Count the graphs that are scheduled in between."""
        generate = scheduler.Scheduler.codegen

        def counting(graph: Any) -> Any:
            self._count(graph)
            return generate(graph)

        scheduler.Scheduler.codegen = counting
        try:
            yield
        finally:
            scheduler.Scheduler.codegen = generate

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

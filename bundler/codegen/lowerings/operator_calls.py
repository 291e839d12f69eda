# SPDX-License-Identifier: Apache-2.0
"""`OperatorCall`: one operator of a graph with its arguments by name and what torch knows of its
results; free of torch.

`lower` makes one for each node of a graph, `lowerings` turns it into tensors of the loop-level
form.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import sympy

from bundler.codegen.loops.lazy_tensors import LazyTensor
from bundler.codegen.loops.loop_nodes import Reference, TensorLayout
from bundler.errors import UnsupportedOperator


@dataclass(frozen=True)
class OperatorCall:
    """One call of an ATen or primitive operator.

    Attributes:
        name: `namespace.operator.overload`.
        arguments: parameter -> value, without defaults: `LazyTensor`s, numbers, index expressions,
            names of dtypes, and lists of these.
        positional, keywords: the same as the graph has them, for an extern call.
        results: layout of each result; None for one that is no tensor.
        single: whether it returns one tensor instead of a tuple.
        operand_dtype: what torch promotes the tensor operands to; None where there are none.
        origins: names of the operators that the user wrote.
        view: whether its results may share memory with its arguments.
        refused: why it is called as it is, whatever kernels could do; empty where nothing says so.
        read: numbers of the results that something reads.
        place: where it is given a tensor if it is called; None for where torch has the tensor lie.
        template: whether a product or attention becomes a kernel.
    """

    name: str
    arguments: Mapping[str, Any]
    positional: tuple[Any, ...]
    keywords: Mapping[str, Any]
    results: tuple[TensorLayout | None, ...]
    single: bool
    operand_dtype: str | None
    origins: frozenset[str]
    view: bool = False
    refused: str = ""
    read: frozenset[int] = frozenset({0})
    place: Callable[[LazyTensor], Reference] | None = None
    template: bool = False

    @property
    def operator(self) -> str:
        """The name between namespace and overload."""
        return self.name.split(".")[1]

    @property
    def namespace(self) -> str:
        """`aten` or `prims`, mostly."""
        return self.name.split(".", maxsplit=1)[0]

    @property
    def overload(self) -> str:
        """What stands behind the operator."""
        return self.name.rpartition(".")[2]

    @property
    def result(self) -> TensorLayout:
        """The layout of the only result, or of the first."""
        layout = self.results[0]
        if layout is None:
            raise self.refusal("its result is no tensor")
        return layout

    @property
    def sizes(self) -> tuple[sympy.Expr, ...]:
        """The sizes of the first result."""
        return self.result.sizes

    @property
    def dtype(self) -> str:
        """The dtype of the first result."""
        return self.result.dtype

    def refusal(self, reason: str) -> UnsupportedOperator:
        """Return the error that says why no kernel is generated; the operator is called as it is
        then.
        """
        return UnsupportedOperator(f"{self.name}: {reason}", operator=self.name)

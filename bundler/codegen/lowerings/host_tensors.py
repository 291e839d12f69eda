# SPDX-License-Identifier: Apache-2.0
"""`HostTensors`: tensors on the host in a graph whose program runs on another device.

A kernel cannot read them.  Operators that make or take them are called as they are, with one
exception: what is computed of numbers, one element each, is computed by the kernel that reads it,
which is given these numbers.  `lower` asks for each operator.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from bundler.codegen.loops.lazy_tensors import GraphBuilder, LazyTensor
from bundler.codegen.loops.loop_nodes import ExternCall, Reference, TensorLayout
from bundler.codegen.lowerings.operator_calls import OperatorCall
from bundler.codegen.lowerings.operator_lowerings import (
    RefusedOperator,
    generated,
    is_elementwise,
    lower,
)
from bundler.errors import UnsupportedOperator

_COPY, _CLONE = "aten.copy_.default", "aten.clone.default"


class HostTensors:
    """What becomes of tensors on the host.

    Args:
        builder: of the program.
        fallbacks: gets the operators that are called.
        device: of the program, as torch names it.
    """

    def __init__(
        self, builder: GraphBuilder, fallbacks: list[RefusedOperator], device: str
    ) -> None:
        self._builder, self._fallbacks, self._device = builder, fallbacks, device

    def refusal(
        self,
        results: Sequence[TensorLayout | None],
        positional: Sequence[Any],
        keywords: Mapping[str, Any],
    ) -> str:
        """Return why an operator is called as it is: it makes a tensor on the host, or takes one of
        several elements; empty for any other.
        """
        if any(layout is not None and layout.device for layout in results):
            return f"its result lies on another device than the program's, {self._device}"
        given = _tensors([*positional, *keywords.values()])
        if any(tensor.host is not None and tensor.sizes for tensor in given):
            return f"takes a tensor of another device than the program's, {self._device}"
        return ""

    def computed(self, call: OperatorCall) -> tuple[LazyTensor] | None:
        """Return a number of the host that is computed where kernels read it; None for any other
        operator.
        """
        layout = call.results[0]
        given = list(_tensors([*call.positional, *call.keywords.values()]))
        if layout is None or not layout.device or layout.sizes or not is_elementwise(call):
            return None
        if any(tensor.host is None or tensor.sizes for tensor in given):
            return None
        try:
            (found,) = generated(self._builder, replace(call, refused=""))
        except UnsupportedOperator:
            return None
        assert found is not None
        # Kernels compute it of the numbers; only a called operator needs it in the host's memory.
        found.host = cache(lambda: self._called(call))
        return (found,)

    def _called(self, call: OperatorCall) -> str:
        """Call an operator, since another one that is called needs its result; returns the
        buffer.
        """
        (found,) = lower(self._builder, call, self._fallbacks)
        assert found is not None
        assert found.buffer is not None
        return found.buffer

    def held(self, value: LazyTensor, changed: Collection[str]) -> Reference | None:
        """Return where a tensor lies on the host, with what it holds before inputs are changed;
        None for one of the program's device.
        """
        if value.host is None:
            return None
        name = value.host()
        layout = self._builder.buffers[name].layout
        if name not in changed:
            return Reference(name, layout)
        # The input is changed before the result is read, so what it held is copied first.
        held = self._builder.new_buffer(layout)
        self._call(_CLONE, Reference(name, layout), outputs=(held,))
        return Reference(held, layout)

    def copy(self, source: Reference, buffer: str) -> None:
        """Copy a tensor into an input that no kernel writes: one of the two lies on the host, or
        has complex numbers.
        """
        target = Reference(buffer, self._builder.buffers[buffer].layout)
        self._call(_COPY, target, source, mutated=(buffer,))

    def _call(
        self,
        operator: str,
        *arguments: Reference,
        outputs: tuple[str | None, ...] = (None,),
        mutated: tuple[str, ...] = (),
    ) -> None:
        reason = (
            f"an input of complex numbers, or on another device than the program's, {self._device},"
            " is changed"
        )
        self._fallbacks.append(RefusedOperator(operator, reason))
        self._builder.nodes.append(
            ExternCall(operator, arguments, (), outputs, reason, mutated=mutated)
        )


def _tensors(values: Iterable[Any]) -> Iterable[LazyTensor]:
    for value in values:
        if isinstance(value, LazyTensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)

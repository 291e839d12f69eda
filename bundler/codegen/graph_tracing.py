# SPDX-License-Identifier: Apache-2.0
"""`trace`: a function, module or exported program as an FX graph of ATen operators, taken apart by torch's own decompositions.  Imports torch.

`program_builder` calls it, and `torch_backend` takes the decompositions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import fx
from torch._decomp import core_aten_decompositions, get_decompositions
from torch.fx.experimental.proxy_tensor import make_fx

aten = torch.ops.aten
# Beyond torch's table for a small set of operators: these have decompositions, and as kernels they are loops and reductions.
_TAKEN_APART = (
    aten._softmax, aten._log_softmax, aten.native_layer_norm, aten.native_group_norm, aten.gelu, aten.silu, aten.embedding, aten.addcmul,
    aten.addcdiv, aten.addmm, aten.nll_loss_forward, aten.mse_loss, aten.leaky_relu, aten.hardtanh, aten.elu, aten.softplus, aten.lerp,
    aten.native_dropout, aten._fused_rms_norm, aten.glu, aten.logsumexp, aten.native_batch_norm, aten.masked_fill,
)  # fmt: skip
# A reduction of its own computes mean and squares in one pass.
_KEPT = (aten.var, aten.var_mean, aten.std, aten.any, aten.all, aten.isinf, aten.isnan, aten.sum, aten.mean)


@lru_cache(maxsize=1)
def decompositions() -> dict[Any, Callable[..., Any]]:
    """Return the functions that take operators apart, by operator."""
    table = {**core_aten_decompositions(), **get_decompositions(list(_TAKEN_APART))}
    for packet in _KEPT:
        for overload in packet.overloads():
            table.pop(getattr(packet, overload), None)
    return table


def trace(function: Any, example_inputs: Sequence[Any], *, dynamic: bool = False) -> fx.GraphModule:
    """Return the functional graph of a call.

    Args:
        function: a function of tensors, or a `torch.export.ExportedProgram`.
        example_inputs: one tensor or number for each argument.
        dynamic: keep sizes symbolic; else the graph is for the sizes of the example.
    """
    if isinstance(function, torch.export.ExportedProgram):
        taken_apart = function.run_decompositions(decompositions())
        state = [*taken_apart.state_dict.values()]
        return _lifted(taken_apart.graph_module, [*state, *example_inputs])
    mode = "symbolic" if dynamic else "fake"
    with torch.enable_grad():
        functional = torch.func.functionalize(function, remove="mutations")
        traced = make_fx(functional, decomposition_table=decompositions(), tracing_mode=mode)(*example_inputs)
    traced.graph.eliminate_dead_code()
    traced.recompile()
    return traced


def _lifted(module: fx.GraphModule, _inputs: Sequence[Any]) -> fx.GraphModule:
    return module

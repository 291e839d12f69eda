# SPDX-License-Identifier: Apache-2.0
"""`trace`: a function, module or exported program as an FX graph of ATen operators, taken apart by torch's own decompositions.  Imports torch.

`program_builder` calls it, and `torch_backend` takes the decompositions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

import torch
from torch import fx
from torch._decomp import core_aten_decompositions, get_decompositions
from torch._ops import OpOverload
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_leaves

from bundler.codegen.list_decompositions import list_decompositions
from bundler.errors import UnsupportedOperator

aten = torch.ops.aten
# Of a graph's `meta`: place of a result -> number of the input that it is, which the graph itself does not say once it is functional.
RETURNED_INPUTS = "returned_inputs"
# Beyond torch's table for a small set of operators: these have decompositions, and as kernels they are loops and reductions.
_TAKEN_APART = [
    "_softmax",
    "_log_softmax",
    "native_layer_norm",
    "native_group_norm",
    "gelu",
    "silu",
    "embedding",
    "addcmul",
    "addcdiv",
    "addmm",
    "nll_loss_forward",
    "mse_loss",
    "leaky_relu",
    "hardtanh",
    "elu",
    "softplus",
    "lerp",
    "_fused_rms_norm",
    "glu",
    "logsumexp",
    "native_batch_norm",
    "masked_fill",
    "linalg_vector_norm",
    "dist",
    "unfold",
    "max_pool2d_with_indices_backward",
    "_native_batch_norm_legit",
    "_native_batch_norm_legit_no_training",
    "_adaptive_avg_pool2d",
    "upsample_bilinear2d",
]
# A reduction of its own computes mean and squares in one pass.
_KEPT = ["bernoulli", "native_dropout", "var", "var_mean", "std", "any", "all", "isinf", "isnan", "sum", "mean"]


@lru_cache(maxsize=1)
def decompositions() -> dict[Any, Callable[..., Any]]:
    """Return the functions that take operators apart, by operator."""
    table = {**core_aten_decompositions(), **get_decompositions([getattr(aten, name) for name in _TAKEN_APART])}
    table |= list_decompositions()
    for packet in (getattr(aten, name) for name in _KEPT):
        for overload in packet.overloads():
            table.pop(getattr(packet, overload), None)
    return table


def trace(function: Any, example_inputs: Sequence[Any], *, dynamic: bool = False) -> fx.GraphModule:
    """Return the functional graph of a call.

    Args:
        function: a function of tensors, or a `torch.export.ExportedProgram`, whose parameters and buffers are inputs in front of the user's.
        example_inputs: one tensor or number for each argument.
        dynamic: keep sizes symbolic; else the graph is for the sizes of the example.

    Raises:
        UnsupportedOperator: with `dynamic`, an operator that cannot be traced so.
    """
    if isinstance(function, torch.export.ExportedProgram):
        return function.run_decompositions(decompositions()).graph_module

    returned: dict[int, int] = {}

    # make_fx counts parameters, and those with a default may be left out.
    def called(*inputs: Any) -> Any:
        before = {id(given): (number, _layout(given)) for number, given in enumerate(inputs)}
        result = function(*inputs)
        for place, leaf in enumerate(tree_leaves(result)):
            number, layout = before.get(id(leaf), (None, None))
            if number is not None and isinstance(leaf, torch.Tensor) and _layout(leaf) == layout:
                returned[place] = number
        return result

    functional = torch.func.functionalize(called, remove="mutations")
    mode = "symbolic" if dynamic else "fake"
    # Tensors that the function has from elsewhere, as a module its parameters, are constants of the graph.
    take = partial(make_fx, tracing_mode=mode, _allow_non_fake_inputs=True)
    try:
        traced = take(functional, decomposition_table=decompositions())(*example_inputs)
    except RuntimeError as error:
        if not dynamic or "symbolic sizes" not in str(error):
            raise
        raise UnsupportedOperator(
            "an operator asks in C++ for sizes that are symbols, as dropout does: generate for the sizes of the example, or use "
            'torch.compile(backend="triton_bundler", dynamic=True)', operator=str(error).partition("\n")[0],
        ) from error  # fmt: skip
    if _changes_what_it_made(traced):
        functional = torch.func.functionalize(traced, remove="mutations")
        traced = take(functional)(*example_inputs)
    traced.graph.eliminate_dead_code()
    traced.recompile()
    traced.meta[RETURNED_INPUTS] = returned
    return traced


def _layout(value: Any) -> Any:
    return (value.shape, value.stride(), value.storage_offset()) if isinstance(value, torch.Tensor) else None


def _changes_what_it_made(traced: fx.GraphModule) -> bool:
    """Whether some operator of a graph changes a tensor that is no input, as decompositions do that came after the graph was made functional."""
    return any(
        node.op == "call_function"
        and isinstance(node.target, OpOverload)
        and node.target._schema.is_mutable  # noqa: SLF001
        and node.args[0].op != "placeholder"
        for node in traced.graph.nodes
    )

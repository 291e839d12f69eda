# SPDX-License-Identifier: Apache-2.0
"""`imitated_autocast`: `torch.autocast("cuda")` for fake tensors, which torch's C++ code does not take for tensors of a GPU.

torch casts in C++, above autograd, by the device that it sees (`fake_tensors.py` says why that is another one).  While autocast is on, a
function mode casts the arguments of the same functions here, also above autograd, so that gradients have the types that they would have.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from bundler.toolchain.replaced_attributes import Replacements

# torch's own lists, by the names of the functions: in the lower type, and in float32.
_LOWER = frozenset({
    "__matmul__", "__rmatmul__", "addbmm", "addmm", "addmv", "addr", "baddbmm", "bilinear", "bmm", "chain_matmul", "conv1d", "conv2d",
    "conv3d", "conv_tbc", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "convolution", "einsum", "linear", "matmul", "mm",
    "mv", "prelu", "scaled_dot_product_attention",
})  # fmt: skip
_SINGLE = frozenset({
    "__pow__", "__rdiv__", "__rpow__", "acos", "asin", "binary_cross_entropy_with_logits", "cdist", "cosh", "cosine_embedding_loss",
    "cosine_similarity", "cross_entropy", "cumprod", "cumsum", "dist", "erfinv", "exp", "expm1", "group_norm", "hinge_embedding_loss",
    "huber_loss", "kl_div", "l1_loss", "layer_norm", "log", "log10", "log1p", "log2", "log_softmax", "logsumexp", "margin_ranking_loss",
    "mse_loss", "nll_loss", "norm", "pdist", "poisson_nll_loss", "pow", "prod", "reciprocal", "renorm", "rsqrt", "sinh",
    "smooth_l1_loss", "soft_margin_loss", "softmax", "softmin", "softplus", "sum", "tan", "triplet_margin_loss",
})  # fmt: skip


class _Autocast(TorchFunctionMode):  # type: ignore[misc]
    """Casts arguments as autocast does, while torch says that it is on."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        name = getattr(func, "__name__", "")
        if (name in _LOWER or name in _SINGLE) and torch.is_autocast_enabled("cuda"):
            dtype = torch.get_autocast_dtype("cuda") if name in _LOWER else torch.float32
            # Without autocast, as in torch: what the function calls is not cast again.
            args, given = _cast(args, dtype), _cast(given, dtype)
        return func(*args, **given)


def _cast(tree: Any, dtype: Any) -> Any:
    if isinstance(tree, torch.Tensor):
        counts = (
            tree.is_cuda and tree.is_floating_point() and tree.dtype not in {torch.float64, dtype}
        )
        return tree.to(dtype) if counts else tree
    if isinstance(tree, (list, tuple)) and type(tree) in {list, tuple}:
        return type(tree)(_cast(item, dtype) for item in tree)
    if isinstance(tree, dict):
        return {name: _cast(item, dtype) for name, item in tree.items()}
    return tree


@contextlib.contextmanager
def imitated_autocast() -> Iterator[None]:
    """Let `torch.autocast` cast fake tensors of a GPU while the block runs."""
    changes = Replacements()
    enter, leave = torch.autocast.__enter__, torch.autocast.__exit__
    modes: list[_Autocast] = []

    def entering(autocast: Any) -> Any:
        result = enter(autocast)
        if autocast.device == "cuda":
            modes.append(_Autocast())
            modes[-1].__enter__()
        return result

    def leaving(autocast: Any, *error: Any) -> Any:
        if autocast.device == "cuda":
            modes.pop().__exit__(*error)
        return leave(autocast, *error)

    try:
        changes.put_all(torch.autocast, {"__enter__": entering, "__exit__": leaving})
        yield
    finally:
        changes.undo()

# SPDX-License-Identifier: Apache-2.0
"""`attention_kept_whole`: torch's attention as one operator of a traced graph, of which a kernel
can be made. Imports torch.

torch takes `scaled_dot_product_attention` apart while it traces: into the operator of a library of
its own, or into products and a softmax, as device, dtypes and strides decide. In place of these the
graph gets `triton_bundler.attention`, with sizes and strides of what torch would have made.
Dropout, gradients, and what no kernel is made for, stay as torch has them; float64 and larger heads
become products and a softmax.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch._C._functorch import TransformType, get_interpreter_stack
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from bundler.runtime.heuristics.attention_rules import LARGEST_HEAD

_NAME = "triton_bundler::attention"
_DTYPES = frozenset({torch.float16, torch.bfloat16, torch.float32})
_LEAST_RANK = 2
aten = torch.ops.aten
_THEIRS = frozenset(
    {
        functional.scaled_dot_product_attention,
        aten.scaled_dot_product_attention,
        aten.scaled_dot_product_attention.default,
    }
)
_LIBRARY = torch.library.Library("triton_bundler", "FRAGMENT")
_LIBRARY.define(
    "attention(Tensor query, Tensor key, Tensor value, Tensor? attn_mask, bool is_causal,"
    " float? scale, bool enable_gqa) -> Tensor"
)


@contextmanager
def attention_kept_whole() -> Iterator[None]:
    """Return a context in which attention is traced as one operator where a kernel is made of
    it.
    """
    before = functional.scaled_dot_product_attention
    functional.scaled_dot_product_attention = whole = partial(_whole, before)
    try:
        with _Kept(whole):
            yield
    finally:
        functional.scaled_dot_product_attention = before


class _Kept(TorchFunctionMode):  # type: ignore[misc]  # torch has no types for it
    """Meets who has torch's function under a name of its own."""

    def __init__(self, whole: Callable[..., Any]) -> None:
        super().__init__()
        self._whole = whole

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        called = self._whole if function in _THEIRS else function
        return called(*args, **(kwargs or {}))


def _whole(
    before: Any,
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    if dropout_p == 0 and _has_kernel(query, key, value, attn_mask, scale):
        operator = torch.ops.triton_bundler.attention
        return operator(query, key, value, attn_mask, is_causal, scale, enable_gqa)
    named = {"scale": scale, "enable_gqa": enable_gqa}
    theirs = before(query, key, value, attn_mask, dropout_p, is_causal, **named)
    large = max(query.shape[-1], value.shape[-1]) > LARGEST_HEAD
    if dropout_p != 0 or not (large or query.dtype == torch.float64) or not _is_plain(query):
        return theirs
    result, _ = aten._scaled_dot_product_attention_math(  # noqa: SLF001  # torch names it so
        query, key, value, attn_mask, 0.0, is_causal, **named
    )
    # What nobody reads of theirs, which tells strides alone, is no part of the graph.
    return torch.empty_like(theirs).copy_(result)


def _has_kernel(query: Any, key: Any, value: Any, mask: Any, scale: Any) -> bool:
    """Whether a kernel is made of attention of these; the others are as torch has them."""
    tensors = (query, key, value)
    plain = all(
        isinstance(one, torch.Tensor)
        and not one.is_nested
        and one.dtype == query.dtype
        and one.dim() == query.dim()
        and one.device == query.device
        for one in tensors
    )
    if not plain or query.dtype not in _DTYPES or query.dim() < _LEAST_RANK:
        return False
    # Blocks hold heads whole, so that their sizes are the same in each call, also where others
    # change.
    if not all(0 < int(size) <= LARGEST_HEAD for size in (query.shape[-1], value.shape[-1])):
        return False
    known = mask is None or (
        type(mask) is torch.Tensor and mask.device == query.device and not mask.requires_grad
    )
    given = scale is None or isinstance(scale, (int, float))
    return known and given and _is_plain(query)


def _is_plain(query: Any) -> bool:
    """Whether torch computes as it is told: no autocast, and no transformation by torch.func, which
    takes gradients, or a batch, of torch's own operators alone.
    """
    stack = get_interpreter_stack() or ()
    functional_alone = all(one.key() == TransformType.Functionalize for one in stack)
    return functional_alone and not torch.is_autocast_enabled(query.device.type)


def _called(
    query: Any, key: Any, value: Any, mask: Any, causal: bool, scale: Any, gqa: bool
) -> Any:
    """Compute it as torch does, also for what torch traces: sizes and strides of the result."""
    attend = functional.scaled_dot_product_attention
    if isinstance(attend, partial):
        (attend,) = attend.args
    with torch._C.DisableTorchFunction():  # noqa: SLF001  # no public name for it
        return attend(query, key, value, mask, 0.0, causal, scale=scale, enable_gqa=gqa)


_LIBRARY.impl("attention", _called, "CompositeExplicitAutograd")
torch.library.register_fake(_NAME, _called, lib=_LIBRARY)

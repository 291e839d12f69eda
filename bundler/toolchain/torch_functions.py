# SPDX-License-Identifier: Apache-2.0
"""`quick_function`: torch's own function for an operator, which reads arguments some microseconds
faster than the operator's own call, which compares each with the operator's schema.

Only operators that models call again and again are listed.  A function of torch stands for several
overloads; `tests/test_codegen/test_called_functions.py` holds that each here calls the listed one,
with the arguments that it is given.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_ATTENTION = "Tensor query, Tensor key, Tensor value"
# Operator -> its schema, behind the name.  A torch whose schema is another one is called as ever.
SCHEMAS = {
    "aten.mm.default": "(Tensor self, Tensor mat2) -> Tensor",
    "aten.bmm.default": "(Tensor self, Tensor mat2) -> Tensor",
    "aten.addmm.default": (
        "(Tensor self, Tensor mat1, Tensor mat2, *, Scalar beta=1, Scalar alpha=1) -> Tensor"
    ),
    "aten.baddbmm.default": (
        "(Tensor self, Tensor batch1, Tensor batch2, *, Scalar beta=1, Scalar alpha=1) -> Tensor"
    ),
    "aten.convolution.default": (
        "(Tensor input, Tensor weight, Tensor? bias, SymInt[] stride, SymInt[] padding,"
        " SymInt[] dilation, bool transposed, SymInt[] output_padding, SymInt groups) -> Tensor"
    ),
    "aten._scaled_dot_product_flash_attention.default": (
        f"({_ATTENTION}, float dropout_p=0., bool is_causal=False, bool return_debug_mask=False, *,"
        " float? scale=None) -> (Tensor output, Tensor logsumexp, Tensor cum_seq_q,"
        " Tensor cum_seq_k, SymInt max_q, SymInt max_k, Tensor rng_state, Tensor unused,"
        " Tensor debug_attn_mask)"
    ),
    "aten._scaled_dot_product_efficient_attention.default": (
        f"({_ATTENTION}, Tensor? attn_bias, bool compute_log_sumexp, float dropout_p=0.,"
        " bool is_causal=False, *, float? scale=None) -> (Tensor output, Tensor log_sumexp,"
        " Tensor philox_seed, Tensor philox_offset)"
    ),
    "aten._scaled_dot_product_cudnn_attention.default": (
        f"({_ATTENTION}, Tensor? attn_bias, bool compute_log_sumexp, float dropout_p=0.,"
        " bool is_causal=False, bool return_debug_mask=False, *, float? scale=None) ->"
        " (Tensor output, Tensor logsumexp, Tensor cum_seq_q, Tensor cum_seq_k, SymInt max_q,"
        " SymInt max_k, Tensor philox_seed, Tensor philox_offset, Tensor debug_attn_mask)"
    ),
    "aten._scaled_dot_product_flash_attention_for_cpu.default": (
        f"({_ATTENTION}, float dropout_p=0., bool is_causal=False, *, Tensor? attn_mask=None,"
        " float? scale=None) -> (Tensor output, Tensor logsumexp)"
    ),
}


def quick_function(torch: Any, name: str, operator: Any) -> Callable[..., Any] | None:
    """Return torch's function that calls an operator, None where none is known to.

    Args:
        torch: the module.
        name: of the operator, as `aten.mm.default`.
        operator: of that name.
    """
    known, (_, packet, _) = SCHEMAS.get(name), name.rsplit(".", 2)
    if known is None or not str(operator._schema).endswith(f"{packet}{known}"):  # noqa: SLF001
        return None
    return getattr(torch._C._VariableFunctions, packet, None)  # noqa: SLF001  # as `torch` has them

# SPDX-License-Identifier: Apache-2.0
"""`refuse_unordered`: a program that has to give the same numbers in every run calls no operator of
torch's whose sums or stores are in any order.

Our own kernels have none: where values decide the places, `lower` has torch's operator called.
torch's are in order after `torch.use_deterministic_algorithms(True)`, or raise.
"""

from __future__ import annotations

from collections.abc import Iterable

from bundler.codegen.loops.loop_nodes import ExternCall, Node
from bundler.errors import UnsupportedOperator

# What the documentation of `torch.use_deterministic_algorithms` lists, and gradients of attention.
_UNORDERED = frozenset(
    {
        "_adaptive_avg_pool2d_backward",
        "_adaptive_avg_pool3d_backward",
        "_ctc_loss_backward",
        "_efficient_attention_backward",
        "_embedding_bag_backward",
        "_embedding_bag_dense_backward",
        "_flash_attention_backward",
        "_index_put_impl",
        "_scaled_dot_product_cudnn_attention_backward",
        "_scaled_dot_product_efficient_attention_backward",
        "_scaled_dot_product_flash_attention_backward",
        "_scaled_dot_product_fused_attention_overrideable_backward",
        "_unsafe_index_put",
        "_upsample_bicubic2d_aa_backward",
        "_upsample_bilinear2d_aa_backward",
        "adaptive_max_pool2d_backward",
        "avg_pool3d_backward",
        "bincount",
        "convolution",
        "convolution_backward",
        "cudnn_convolution",
        "cumsum",
        "fractional_max_pool2d_backward",
        "fractional_max_pool3d_backward",
        "grid_sampler_2d_backward",
        "grid_sampler_3d_backward",
        "histc",
        "index_add",
        "index_copy",
        "index_put",
        "index_reduce",
        "max_pool3d_with_indices_backward",
        "max_unpool2d",
        "max_unpool3d",
        "median",
        "miopen_convolution",
        "nanmedian",
        "nll_loss2d_forward",
        "put",
        "reflection_pad1d_backward",
        "reflection_pad2d_backward",
        "reflection_pad3d_backward",
        "replication_pad1d_backward",
        "replication_pad2d_backward",
        "replication_pad3d_backward",
        "scatter",
        "scatter_add",
        "scatter_reduce",
        "upsample_bicubic2d_backward",
        "upsample_bilinear2d_backward",
        "upsample_linear1d_backward",
        "upsample_trilinear3d_backward",
    }
)


def refuse_unordered(nodes: Iterable[Node]) -> None:
    """Raise for an operator that gives other numbers from call to call.

    Raises:
        UnsupportedOperator: the first; its `deterministic` is True.
    """
    for node in nodes:
        if not isinstance(node, ExternCall):
            continue
        name = node.operator.split(".")[1].rstrip("_") if "." in node.operator else node.operator
        if name in _UNORDERED:
            raise UnsupportedOperator(
                f"{node.operator}: policy deterministic: it adds or stores in an open order,"
                " so its numbers may differ from call to call; call"
                " torch.use_deterministic_algorithms(True) before, so that torch's own is in order"
                " or refuses, or leave the policy out",
                operator=node.operator,
                deterministic=True,
            )

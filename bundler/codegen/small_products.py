# SPDX-License-Identifier: Apache-2.0
"""`small_products`: products of matrices that a GPU computes in less time than the host takes to
ask a library for them, so that kernels of ours had better compute them.  Imports torch.

On an H200 the host asks cuBLAS for a product in some 17 us, and launches a kernel in 5.5.  33
products of at most 2**29 multiplications in 16 bits (8 to 401,408 rows, sums of 16 to 2,048), with
GELU behind them, took 1.02 x the time of cuBLAS without it (geometric mean; 0.74 to 1.35), and
0.70 x that of cuBLAS and a kernel for it (0.43 to 0.86).  Twelve larger ones, or sums of 4,096,
which cuBLAS splits, took 1.09 to 1.44 x.  The first candidate took 1.02 x the fastest one's time,
so none is measured.

Convolutions that are products (`pixel_products`) stay calls: a network has so many different ones
that compiling them takes longer than all else of a first call.

`program` calls it for `templates="by rule"`, which is torch.compile's default.
"""

from __future__ import annotations

import torch
from torch import fx

from bundler.codegen.gradient_sums import running_sums
from bundler.codegen.uneven_products import HALVES, PRODUCTS, multiplies_halves

# Where it was measured.
_DEVICE = "cuda"
#: Multiplications, and terms of a sum, at most.
MOST, LONGEST = 1 << 29, 2048


def small_products(module: fx.GraphModule) -> frozenset[fx.Node]:
    """Return the nodes whose operators had better be kernels, of which the first candidate will do.

    Args:
        module: whose nodes have fake tensors, as `lower_graph` takes it.
    """
    if torch.are_deterministic_algorithms_enabled():
        return frozenset()
    found = {node for node in module.graph.nodes if node.target in PRODUCTS and _is_small(node)}
    # Else all products of a sum that a library adds up one by one would have to be there at once.
    return frozenset(found.difference(one.product for one in running_sums(module).values()))


def _is_small(node: fx.Node) -> bool:
    left, right = (one.meta["val"] for one in node.args[-2:])
    sizes = (*left.shape, right.shape[1])
    if any(type(size) is not int or size == 1 for size in sizes) or node.kwargs:
        return False
    rows, length, columns = sizes
    small = rows * length * columns <= MOST and length <= LONGEST
    halves = left.dtype in HALVES and right.dtype == left.dtype
    here = left.device.type == _DEVICE and multiplies_halves(left.device)
    return bool(small and halves and here)

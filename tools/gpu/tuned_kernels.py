# SPDX-License-Identifier: Apache-2.0
"""Kernels with something to choose, for `python -m tools.gpu autotune`: how each is called, and
which configs it has.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: ANN001, D103, N803

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import triton
import triton.language as tl

from tools.gpu.kernels import add, matmul, softmax

SEED = 7


@triton.jit
def layer_norm(x, weight, out, stride, columns, epsilon, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    squares = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, columns, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        value = tl.load(x + row * stride + offsets, mask=offsets < columns, other=0.0)
        total += value
        squares += value * value
    mean = tl.sum(total, axis=0) / columns
    scale = tl.rsqrt(tl.sum(squares, axis=0) / columns - mean * mean + epsilon)
    for start in range(0, columns, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        mask = offsets < columns
        value = tl.load(x + row * stride + offsets, mask=mask, other=0.0)
        tl.store(
            out + row * stride + offsets,
            (value - mean) * scale * tl.load(weight + offsets, mask=mask),
            mask=mask,
        )


@triton.jit
def partial_sums(x, out, n, parts, BLOCK: tl.constexpr):
    part = tl.program_id(0)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(part * BLOCK, n, parts * BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        total += tl.load(x + offsets, mask=offsets < n, other=0.0)
    tl.store(out + part, tl.sum(total, axis=0))


@triton.jit
def whole_sum(x, out, n, BLOCK: tl.constexpr):
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, n, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        total += tl.load(x + offsets, mask=offsets < n, other=0.0)
    tl.store(out, tl.sum(total, axis=0))


@triton.jit
def accumulate(x, out, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    tl.store(
        out + offsets,
        tl.load(out + offsets, mask=mask) + tl.load(x + offsets, mask=mask),
        mask=mask,
    )


@dataclass(frozen=True)
class Tuned:
    """One kernel with its configs: `arguments(torch)` returns the values, the output is at
    `output`.
    """

    function: Any
    configs: tuple[Any, ...]
    key: tuple[str, ...]
    grid: Callable[[Any], tuple[int, ...]]
    arguments: Callable[[Any], list[Any]]
    output: int
    constants: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The kernel's name."""
        return str(self.function.__name__)


def tuned() -> tuple[Tuned, ...]:
    """Return vector add, softmax, layer norm, fp16 matmul and the two passes of a reduction."""
    long, side = 1 << 25, 4096

    def vectors(t: Any) -> list[Any]:
        return [_random(t, long), _random(t, long), _empty(t, long), long]

    def rows(_meta: Any) -> tuple[int, ...]:
        return (8192,)

    def tiles(meta: Any) -> tuple[int, ...]:
        return side // meta["BLOCK_M"], side // meta["BLOCK_N"]

    def halves(t: Any) -> list[Any]:
        out = t.empty(side, side, dtype=t.float16, device="cuda")
        return [_half(t, side, side), _half(t, side, side), out, side, side]

    def matrix(t: Any, *more: Any) -> list[Any]:
        return [_random(t, 8192, 4000), *more, _empty(t, 8192, 4000), 4000, 4000]

    wide = (256, 512, 1024, 2048, 4096)
    return (
        Tuned(add, _blocks(wide, (4, 8)), ("n",), _over("n"), vectors, 2),
        Tuned(
            softmax, _warps((1, 2, 4, 8, 16, 32)), ("columns",), rows, matrix, 1, {"BLOCK": 4096}
        ),
        Tuned(
            layer_norm,
            _blocks(wide, (2, 4, 8)),
            ("columns",),
            rows,
            lambda t: [*matrix(t, _random(t, 4000)), 1e-5],
            2,
        ),
        Tuned(matmul, _tiles(), ("n", "k"), tiles, halves, 2),
        Tuned(
            partial_sums,
            _blocks((512, 1024, 2048, 4096, 8192), (4, 8)),
            ("n",),
            lambda _meta: (2112,),
            lambda t: [_random(t, 1 << 26), _empty(t, 2112), 1 << 26, 2112],
            1,
        ),
        Tuned(
            whole_sum,
            _blocks((256, 1024, 4096, 8192), (4, 8, 16)),
            ("n",),
            lambda _meta: (1,),
            lambda t: [_random(t, 1 << 18), _empty(t, 1), 1 << 18],
            1,
        ),
    )


def _blocks(blocks: tuple[int, ...], warps: tuple[int, ...]) -> tuple[Any, ...]:
    return tuple(
        triton.Config({"BLOCK": block}, num_warps=count) for block in blocks for count in warps
    )


def _warps(warps: tuple[int, ...]) -> tuple[Any, ...]:
    return tuple(triton.Config({}, num_warps=count) for count in warps)


def _tiles() -> tuple[Any, ...]:
    shapes = (
        (64, 64, 32, 4, 3),
        (64, 64, 64, 4, 4),
        (64, 128, 32, 4, 4),
        (64, 128, 64, 4, 3),
        (128, 64, 32, 4, 4),
        (128, 64, 64, 4, 3),
        (128, 128, 32, 4, 4),
        (128, 128, 64, 8, 3),
        (128, 128, 64, 4, 4),
        (128, 256, 64, 8, 3),
        (256, 128, 64, 8, 3),
        (64, 256, 64, 4, 4),
        (256, 64, 64, 8, 3),
        (128, 256, 32, 8, 4),
        # More shared memory than there is: has to be left out.
        (256, 256, 128, 8, 5),
    )
    return tuple(
        triton.Config(
            {"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k}, num_warps=warps, num_stages=stages
        )
        for m, n, k, warps, stages in shapes
    )


def _over(size: str) -> Callable[[Any], tuple[int, ...]]:
    return lambda meta: (triton.cdiv(meta[size], meta["BLOCK"]),)


def _random(torch: Any, *shape: int) -> Any:
    return torch.randn(shape, generator=torch.Generator("cuda").manual_seed(SEED), device="cuda")


def _half(torch: Any, *shape: int) -> Any:
    return _random(torch, *shape).to(torch.float16)


def _empty(torch: Any, *shape: int) -> Any:
    return torch.full(shape, -1.0, device="cuda")

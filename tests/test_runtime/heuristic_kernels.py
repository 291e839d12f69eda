# SPDX-License-Identifier: Apache-2.0
"""A program: runs a kernel of each heuristic, and prints the largest error of each as JSON.

With TRITON_INTERPRET=1 in Triton's interpreter on the CPU, else on a GPU.
"""

import json
import os

import torch
import triton
import triton.language as tl

from bundler.runtime import heuristics
from bundler.runtime.heuristics.combo_rules import SubKernel
from bundler.runtime.heuristics.facts import Device, Facts, Policy, ReductionHint, Setting
from bundler.runtime.heuristics.launch_grids import FixedGrid, open_grid

H200 = Device("cuda", 132, 32, 9, 65536, 2048, 1024)
SETTING = Setting(H200)
ERRORS = {}
PLACE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"


def report(name, got, expected):
    ERRORS[name] = float((got - expected).abs().max())


@heuristics.pointwise({"x": 1024}, SETTING)
@triton.jit
def scale(in_ptr0, out_ptr0, xnumel, XBLOCK: tl.constexpr):
    x = tl.program_id(0) * XBLOCK + tl.arange(0, XBLOCK)
    tl.store(out_ptr0 + x, 2 * tl.load(in_ptr0 + x, x < xnumel), x < xnumel)


@heuristics.pointwise({"y": 64, "x": 128}, SETTING)
@triton.jit
def transpose(in_ptr0, out_ptr0, ynumel, xnumel, YBLOCK: tl.constexpr, XBLOCK: tl.constexpr):
    row = (tl.program_id(1) + tl.program_id(2) * tl.num_programs(1)) * YBLOCK
    y = row + tl.arange(0, YBLOCK)[:, None]
    x = tl.program_id(0) * XBLOCK + tl.arange(0, XBLOCK)[None, :]
    mask = (x < xnumel) & (y < ynumel)
    tl.store(out_ptr0 + x * ynumel + y, tl.load(in_ptr0 + y * xnumel + x, mask), mask)


@heuristics.pointwise({"z": 4, "y": 8, "x": 32}, SETTING)
@triton.jit
def add_axes(
    out_ptr0,
    znumel,
    ynumel,
    xnumel,
    ZBLOCK: tl.constexpr,
    YBLOCK: tl.constexpr,
    XBLOCK: tl.constexpr,
):
    z = tl.program_id(2) * ZBLOCK + tl.arange(0, ZBLOCK)[:, None, None]
    y = tl.program_id(1) * YBLOCK + tl.arange(0, YBLOCK)[None, :, None]
    x = tl.program_id(0) * XBLOCK + tl.arange(0, XBLOCK)[None, None, :]
    mask = (x < xnumel) & (y < ynumel) & (z < znumel)
    tl.store(out_ptr0 + (z * ynumel + y) * xnumel + x, 10000 * z + 100 * y + x, mask)


@heuristics.reduction({"x": 16, "r0_": 4096}, SETTING, hint=ReductionHint.INNER)
@triton.jit
def looped_sum(in_ptr0, out_ptr0, xnumel, r0_numel, XBLOCK: tl.constexpr, R0_BLOCK: tl.constexpr):
    x = tl.program_id(0) * XBLOCK + tl.arange(0, XBLOCK)[:, None]
    total = tl.zeros([XBLOCK, R0_BLOCK], tl.float32)
    for start in range(0, r0_numel, R0_BLOCK):
        r = start + tl.arange(0, R0_BLOCK)[None, :]
        total += tl.load(in_ptr0 + x * r0_numel + r, (x < xnumel) & (r < r0_numel), other=0.0)
    tl.store(out_ptr0 + x, tl.sum(total, 1)[:, None], x < xnumel)


@heuristics.persistent_reduction({"x": 32, "r0_": 128}, SETTING)
@triton.jit
def softmax(in_ptr0, out_ptr0, xnumel, r0_numel, XBLOCK: tl.constexpr):
    R0_BLOCK: tl.constexpr = 128
    x = tl.program_id(0) * XBLOCK + tl.arange(0, XBLOCK)[:, None]
    r = tl.arange(0, R0_BLOCK)[None, :]
    mask = (x < xnumel) & (r < r0_numel)
    row = tl.load(in_ptr0 + x * r0_numel + r, mask, other=-float("inf"))
    power = tl.exp(row - tl.max(row, 1)[:, None])
    tl.store(out_ptr0 + x * r0_numel + r, power / tl.sum(power, 1)[:, None], mask)


@heuristics.cooperative_reduction(
    {"x": 2, "r0_": 8192}, SETTING, hint=ReductionHint.INNER, zeroed=("out_ptr0",)
)
@triton.jit
def shared_sum(
    in_ptr0,
    out_ptr0,
    xnumel,
    r0_numel,
    XBLOCK: tl.constexpr,
    R0_BLOCK: tl.constexpr,
    RSPLIT: tl.constexpr,
):
    part = tl.program_id(0)
    x = tl.program_id(1) * XBLOCK + tl.arange(0, XBLOCK)[:, None]
    length = tl.cdiv(r0_numel, RSPLIT)
    total = tl.zeros([XBLOCK, R0_BLOCK], tl.float32)
    for start in range(part * length, (part + 1) * length, R0_BLOCK):
        r = start + tl.arange(0, R0_BLOCK)[None, :]
        inside = (x < xnumel) & (r < (part + 1) * length) & (r < r0_numel)
        total += tl.load(in_ptr0 + x * r0_numel + r, inside, other=0.0)
    tl.atomic_add(out_ptr0 + x, tl.sum(total, 1)[:, None], x < xnumel)


@heuristics.mix_order_reduction({"x": 256, "r0_": 64}, SETTING, zeroed=("columns_ptr",))
@triton.jit
def both_sums(
    in_ptr0,
    rows_ptr,
    columns_ptr,
    xnumel,
    r0_numel,
    XBLOCK: tl.constexpr,
    RSPLIT_SIZE: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    R0_BLOCK: tl.constexpr = 64
    r = tl.arange(0, R0_BLOCK)[None, :]
    column = tl.zeros([R0_BLOCK], tl.float32)
    for start in tl.range(0, RSPLIT_SIZE, XBLOCK, num_stages=NUM_STAGES):
        x = tl.program_id(0) * RSPLIT_SIZE + start + tl.arange(0, XBLOCK)[:, None]
        tile = tl.load(in_ptr0 + x * r0_numel + r, (x < xnumel) & (r < r0_numel), other=0.0)
        tl.store(rows_ptr + x, tl.sum(tile, 1)[:, None], x < xnumel)
        column += tl.sum(tile, 0)
    tl.atomic_add(columns_ptr + tl.arange(0, R0_BLOCK), column)


@heuristics.split_scan(
    {"x": 4, "r0_": 4096},
    Setting(H200, Facts(no_x_dim=True)),
    hint=ReductionHint.INNER,
    zeroed=("done_ptr",),
)
@triton.jit
def running_sum(in_ptr0, carry_ptr, done_ptr, out_ptr0, xnumel, r0_numel, R0_BLOCK: tl.constexpr):
    block, x = tl.program_id(0), tl.program_id(1)
    r = block * R0_BLOCK + tl.arange(0, R0_BLOCK)
    here = tl.load(in_ptr0 + x * r0_numel + r, r < r0_numel, other=0.0)
    width = tl.num_programs(0)
    before = 0.0
    if block > 0:
        while tl.atomic_add(done_ptr + x * width + block - 1, 0) == 0:
            pass
        before = tl.load(carry_ptr + x * width + block - 1)
    tl.store(out_ptr0 + x * r0_numel + r, before + tl.cumsum(here, 0), r < r0_numel)
    tl.store(carry_ptr + x * width + block, before + tl.sum(here, 0))
    tl.atomic_xchg(done_ptr + x * width + block, 1)


@heuristics.template(
    2, 8, SETTING, grid=FixedGrid(), extra_arguments=("_grid_0", "_grid_1", "_grid_2")
)
@triton.jit
def matmul(a_ptr, b_ptr, c_ptr):
    i = tl.program_id(0) * 16 + tl.arange(0, 16)[:, None]
    j = tl.program_id(1) * 16 + tl.arange(0, 16)[None, :]
    k = tl.arange(0, 16)
    tile = tl.dot(
        tl.load(a_ptr + i * 16 + k[None, :]),
        tl.load(b_ptr + k[:, None] * 32 + j),
        input_precision="ieee",
    )
    tl.store(c_ptr + i * 32 + j, tile)


@heuristics.fixed_config({"XBLOCK": 64, "num_warps": 2}, SETTING, grid="Grid1D")
@triton.jit
def fixed_scale(in_ptr0, out_ptr0, xnumel, XBLOCK: tl.constexpr):
    x = tl.program_id(0) * XBLOCK + tl.arange(0, XBLOCK)
    tl.store(out_ptr0 + x, 3 * tl.load(in_ptr0 + x, x < xnumel), x < xnumel)


COMPUTED = {
    "precomputed_grids": [{"config": {"BLOCK": 128}, "python": ["(n + 127) // 128", "1", "1"]}]
}


@heuristics.user_autotune(
    [{"BLOCK": 128, "num_stages": 2}], SETTING, grid=open_grid("PrecomputedGrid", COMPUTED)
)
@triton.jit
def user_scale(in_ptr0, out_ptr0, n, BLOCK: tl.constexpr):
    x = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr0 + x, 5 * tl.load(in_ptr0 + x, x < n), x < n)


def combined(kind, **sizes):
    """The grid of two kernels in one launch; the second has its size from the call."""
    meta = {
        "num_kernels": 2,
        "min_blocks": 0,
        "default_config": None,
        "no_x_dim_0": False,
        "no_x_dim_1": False,
    }
    return open_grid(kind, {"combo_grid_meta": meta | {"xnumel_1": None} | sizes})


LISTED = Setting(H200, policy=Policy(max_autotune=True))


@heuristics.foreach(
    LISTED,
    mutated=("a_ptr", "b_ptr"),
    grid=combined(
        "SequentialFlattenComboKernelGrid",
        xnumel_0=300,
        default_config={"XBLOCK_0": 128, "XBLOCK_1": 128},
    ),
)
@triton.jit
def negate_two(a_ptr, b_ptr, xnumel_1):
    block = tl.program_id(0)
    if block < 3:
        x = block * 128 + tl.arange(0, 128)
        tl.store(a_ptr + x, -tl.load(a_ptr + x, x < 300), x < 300)
    else:
        x = (block - 3) * 128 + tl.arange(0, 128)
        tl.store(b_ptr + x, -tl.load(b_ptr + x, x < xnumel_1), x < xnumel_1)


@heuristics.combo(
    "pointwise",
    [SubKernel("pointwise", {"x": 1024}), SubKernel("pointwise", {"x": 256})],
    SETTING,
    grid=combined("SequentialFlattenComboKernelGrid", xnumel_0=1000),
    mutated=("a_ptr", "b_ptr"),
)
@triton.jit
def scale_two(a_ptr, b_ptr, xnumel_1, XBLOCK_0: tl.constexpr, XBLOCK_1: tl.constexpr):
    block = tl.program_id(0)
    first = tl.cdiv(1000, XBLOCK_0)
    if block < first:
        x = block * XBLOCK_0 + tl.arange(0, XBLOCK_0)
        tl.store(a_ptr + x, 2 * tl.load(a_ptr + x, x < 1000), x < 1000)
    else:
        y = (block - first) * XBLOCK_1 + tl.arange(0, XBLOCK_1)
        tl.store(b_ptr + y, 3 * tl.load(b_ptr + y, y < xnumel_1), y < xnumel_1)


def run_pointwise():
    x = torch.randn(1000)
    out = torch.zeros_like(x)
    scale.run(x, out, x.numel())
    report("pointwise 1-D", out, 2 * x)
    matrix = torch.randn(50, 100)
    turned = torch.zeros(100, 50)
    transpose.run(
        matrix,
        turned,
        50,
        100,
        stream=0 if PLACE == "cpu" else torch.cuda.current_stream().cuda_stream,
    )
    report("pointwise 2-D", turned, matrix.T)
    cube = torch.zeros(3, 7, 20)
    add_axes.run(cube, 3, 7, xnumel=20)
    z, y, x = torch.meshgrid(torch.arange(3), torch.arange(7), torch.arange(20), indexing="ij")
    report("pointwise 3-D", cube, (10000 * z + 100 * y + x).float())
    nothing = torch.full((4,), 7.0)
    scale.run(nothing, nothing, 0)
    report("nothing", nothing, torch.full((4,), 7.0))


def run_reductions():
    rows = torch.randn(10, 3000)
    out = torch.zeros(10)
    looped_sum.run(rows, out, 10, 3000)
    report("reduction", out, rows.sum(1))
    rows = torch.randn(20, 100)
    out = torch.zeros_like(rows)
    softmax.run(rows, out, 20, 100)
    report("persistent reduction", out, rows.softmax(1))
    rows = torch.randn(2, 8000)
    out = torch.zeros(2)
    shared_sum.run(rows, out, 2, 8000)
    report("cooperative reduction", out, rows.sum(1))
    matrix = torch.randn(200, 64)
    down, across = torch.zeros(64), torch.zeros(200)
    both_sums.run(matrix, across, down, 200, 64)
    report("mix-order rows", across, matrix.sum(1))
    report("mix-order columns", down, matrix.sum(0))
    rows = torch.randn(3, 4000)
    blocks = -(-4000 // running_sum.configs[0].kwargs["R0_BLOCK"])
    carry, done, out = (
        torch.zeros(3, blocks),
        torch.zeros(3, blocks, dtype=torch.int32),
        torch.zeros_like(rows),
    )
    running_sum.run(rows, carry, done, out, 3, 4000)
    report("split scan", out, rows.cumsum(1))


def run_given():
    a, b, c = torch.randn(32, 16), torch.randn(16, 32), torch.zeros(32, 32)
    matmul.run(a, b, c, 2, 2, 1)
    report("template", c, a @ b)
    x = torch.randn(1000)
    out = torch.zeros_like(x)
    fixed_scale.run(x, out, 1000)
    report("fixed", out, 3 * x)
    user_scale.run(x, out, 1000)
    report("user", out, 5 * x)
    a, b = torch.randn(300), torch.randn(200)
    for kernel, name, factors in (
        (negate_two, "foreach", (-1, -1)),
        (scale_two, "combination", (2, 3)),
    ):
        a, b = torch.randn(300 if kernel is negate_two else 1000), torch.randn(200)
        expected = [factor * tensor for factor, tensor in zip(factors, (a, b), strict=True)]
        kernel.run(a, b, 200)
        report(f"{name} first", a, expected[0])
        report(f"{name} second", b, expected[1])


if __name__ == "__main__":
    torch.manual_seed(0)
    torch.set_default_device(PLACE)
    run_pointwise()
    run_reductions()
    run_given()
    print(json.dumps(ERRORS))

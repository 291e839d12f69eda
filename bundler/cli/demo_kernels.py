# SPDX-License-Identifier: Apache-2.0
"""Eight small Triton kernels of the kinds that real models use, and a program that runs them. It needs triton; torch only to launch.

With a GPU, each kernel is launched and its numbers are compared with torch's:

    python examples/kernels.py
    python examples/kernels.py --json before.json

Without one, or with ``--target``, each is compiled for the named targets:

    python examples/kernels.py --target cuda:90 --target hip:gfx942

Every kernel gives the same bits each time it runs on one machine, whichever configuration the autotuner picks: the only atomics
are integer additions, and the autotuned kernel computes each element on its own. Two ``--json`` files can be compared bit by bit.
"""

import argparse
import hashlib
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel
from triton.runtime import Autotuner

DEFAULT_TARGETS = ("cuda:90", "hip:gfx942")


# The kernels ----------------------------------------------------------------------------------------------------------


@triton.jit
def gelu_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    """out = gelu(x), element by element."""
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    x = tl.load(x_ptr + offsets, mask=mask)
    tl.store(out_ptr + offsets, 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476)), mask=mask)


@triton.jit
def softmax_kernel(x_ptr, out_ptr, row_stride, n_columns, BLOCK: tl.constexpr):
    """out = softmax(x) along each row; one program holds one row."""
    row = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    mask = columns < n_columns
    x = tl.load(x_ptr + row * row_stride + columns, mask=mask, other=-float("inf"))
    numerator = tl.exp(x - tl.max(x, axis=0))
    tl.store(out_ptr + row * row_stride + columns, numerator / tl.sum(numerator, axis=0), mask=mask)


@triton.jit
def layer_norm_kernel(
    x_ptr, weight_ptr, bias_ptr, out_ptr, row_stride, n_columns, eps, BLOCK: tl.constexpr
):
    """out = (x - mean) / sqrt(variance + eps) * weight + bias along each row."""
    row = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    mask = columns < n_columns
    x = tl.load(x_ptr + row * row_stride + columns, mask=mask, other=0.0)
    mean = tl.sum(x, axis=0) / n_columns
    centered = tl.where(mask, x - mean, 0.0)
    variance = tl.sum(centered * centered, axis=0) / n_columns
    weight = tl.load(weight_ptr + columns, mask=mask)
    bias = tl.load(bias_ptr + columns, mask=mask)
    tl.store(
        out_ptr + row * row_stride + columns,
        centered * tl.rsqrt(variance + eps) * weight + bias,
        mask=mask,
    )


@triton.jit
def matmul_kernel(
    a_ptr,
    b_ptr,
    out_ptr,
    m,
    n,
    k,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """out = a @ b for row-major half-precision matrices, one tile a program, summed in single precision."""
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inner = tl.arange(0, BLOCK_K)
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in range(0, k, BLOCK_K):
        depth = start + inner
        a_mask = (rows[:, None] < m) & (depth[None, :] < k)
        b_mask = (depth[:, None] < k) & (columns[None, :] < n)
        a = tl.load(a_ptr + rows[:, None] * k + depth[None, :], mask=a_mask, other=0.0)
        b = tl.load(b_ptr + depth[:, None] * n + columns[None, :], mask=b_mask, other=0.0)
        total = tl.dot(a, b, total)
    mask = (rows[:, None] < m) & (columns[None, :] < n)
    tl.store(out_ptr + rows[:, None] * n + columns[None, :], total.to(tl.float16), mask=mask)


@triton.jit
def row_sum_kernel(x_ptr, out_ptr, row_stride, n_columns, BLOCK: tl.constexpr):
    """out = the sum of each row, however long the row is."""
    row = tl.program_id(0)
    partial = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, n_columns, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        partial += tl.load(x_ptr + row * row_stride + columns, mask=columns < n_columns, other=0.0)
    tl.store(out_ptr + row, tl.sum(partial, axis=0))


@triton.jit
def cumsum_kernel(x_ptr, out_ptr, row_stride, n_columns, BLOCK: tl.constexpr):
    """out = the running sum along each row: an associative scan."""
    row = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    mask = columns < n_columns
    x = tl.load(x_ptr + row * row_stride + columns, mask=mask, other=0.0)
    tl.store(out_ptr + row * row_stride + columns, tl.cumsum(x, axis=0), mask=mask)


@triton.jit
def histogram_kernel(x_ptr, counts_ptr, n, BLOCK: tl.constexpr):
    """counts[v] += how often v occurs in x, with atomic additions."""
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    values = tl.load(x_ptr + offsets, mask=mask, other=0)
    tl.atomic_add(counts_ptr + values, 1, mask=mask)


@triton.autotune(
    configs=[
        triton.Config({"BLOCK": 256}, num_warps=2, num_stages=2),
        triton.Config({"BLOCK": 512}, num_warps=4, num_stages=2),
        triton.Config({"BLOCK": 1024}, num_warps=4, num_stages=3),
        triton.Config({"BLOCK": 2048}, num_warps=8, num_stages=3),
    ],
    key=["n"],
)
@triton.jit
def swiglu_kernel(gate_ptr, up_ptr, out_ptr, n, BLOCK: tl.constexpr):
    """out = silu(gate) * up; Triton times the configurations at the first launch and keeps the fastest."""
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    gate = tl.load(gate_ptr + offsets, mask=mask)
    up = tl.load(up_ptr + offsets, mask=mask)
    tl.store(out_ptr + offsets, gate * tl.sigmoid(gate) * up, mask=mask)


# Compiling them for a target, with no GPU in sight --------------------------------------------------------------------


@dataclass(frozen=True)
class Recipe:
    """What a kernel has to be told to be compiled ahead of its first launch."""

    kernel: Any  # triton gives no type for "a jitted function, perhaps autotuned"
    signature: dict[str, str]  # argument name -> type; block sizes follow as constants
    constants: dict[str, int] = field(default_factory=dict)
    options: dict[str, int] = field(default_factory=dict)

    def variants(self) -> Iterator[tuple[Any, dict[str, int], dict[str, int]]]:
        """Yield (jitted function, constants, options): once, or for each configuration the autotuner would try."""
        if not isinstance(self.kernel, Autotuner):
            yield self.kernel, self.constants, self.options
            return
        for config in self.kernel.configs:
            yield (
                self.kernel.fn,
                config.kwargs,
                {"num_warps": config.num_warps, "num_stages": config.num_stages},
            )


def rows_of(*pointers: str, **more: str) -> dict[str, str]:
    """Return the signature of a kernel that goes over rows of single-precision matrices."""
    return {**dict.fromkeys(pointers, "*fp32"), "row_stride": "i32", "n_columns": "i32", **more}


RECIPES = {
    "gelu": Recipe(
        gelu_kernel, {"x_ptr": "*fp32", "out_ptr": "*fp32", "n": "i32"}, {"BLOCK": 1024}
    ),
    "softmax": Recipe(softmax_kernel, rows_of("x_ptr", "out_ptr"), {"BLOCK": 1024}),
    "layer_norm": Recipe(
        layer_norm_kernel,
        rows_of("x_ptr", "weight_ptr", "bias_ptr", "out_ptr", eps="fp32"),
        {"BLOCK": 1024},
    ),
    "matmul": Recipe(
        matmul_kernel,
        {
            "a_ptr": "*fp16",
            "b_ptr": "*fp16",
            "out_ptr": "*fp16",
            "m": "i32",
            "n": "i32",
            "k": "i32",
        },
        {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 32},
        {"num_warps": 4, "num_stages": 3},
    ),
    "row_sum": Recipe(row_sum_kernel, rows_of("x_ptr", "out_ptr"), {"BLOCK": 1024}),
    "cumsum": Recipe(cumsum_kernel, rows_of("x_ptr", "out_ptr"), {"BLOCK": 1024}),
    "histogram": Recipe(
        histogram_kernel, {"x_ptr": "*i32", "counts_ptr": "*i32", "n": "i32"}, {"BLOCK": 512}
    ),
    "swiglu": Recipe(
        swiglu_kernel, {"gate_ptr": "*fp32", "up_ptr": "*fp32", "out_ptr": "*fp32", "n": "i32"}
    ),
}

# The same as plain data, which `triton-bundler build` reads: ":16" says that an address or a number is a multiple of 16.
PREBUILD = [
    {
        "kernel": recipe.kernel,
        "signature": {
            name: kind if kind == "fp32" else f"{kind}:16"
            for name, kind in recipe.signature.items()
        },
        "constants": recipe.constants,
        "options": recipe.options,
    }
    for recipe in RECIPES.values()
]


def parse_target(text: str) -> GPUTarget:
    """Return Triton's target for a name such as ``cuda:90`` or ``hip:gfx942``."""
    backend, _, arch = text.partition(":")
    if backend == "cuda" and arch.isdigit():
        return GPUTarget("cuda", int(arch), 32)
    if backend == "hip" and arch.startswith("gfx"):
        # AMD's data-centre chips (gfx9...) run 64 threads in step, its graphics chips 32.
        return GPUTarget("hip", arch, 64 if arch.startswith("gfx9") else 32)
    raise ValueError(
        f"unknown target {text!r}: write cuda:CAPABILITY or hip:GFX, e.g. cuda:90, hip:gfx942"
    )


def compile_one(name: str, target: str) -> list[CompiledKernel]:
    """Compile one kernel for one target: a list of one, or of as many as the autotuner would try."""
    recipe = RECIPES[name]
    # Tensors and row lengths are multiples of 16 here; telling the compiler so gives it wide loads.
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, kind in enumerate(recipe.signature.values())
        if kind != "fp32"
    }
    compiled = []
    for function, constants, options in recipe.variants():
        signature = {**recipe.signature, **dict.fromkeys(constants, "constexpr")}
        source = ASTSource(function, signature, constexprs=constants, attrs=aligned)
        compiled.append(triton.compile(source, target=parse_target(target), options=options))
    return compiled


def compile_all(targets: list[str]) -> list[CompiledKernel]:
    """Compile every kernel, in every configuration, for every target."""
    return [
        kernel for target in targets for name in RECIPES for kernel in compile_one(name, target)
    ]


# Launching them on a GPU ----------------------------------------------------------------------------------------------


def run_all(device: str) -> dict[str, Any]:
    """Launch every kernel on fixed input and return its output tensor by name."""
    x, weight, bias, a, b, levels = inputs(device)
    rows, columns = x.shape
    n = x.numel()
    out = {
        name: x.new_empty(x.shape) for name in ("gelu", "softmax", "layer_norm", "cumsum", "swiglu")
    }
    out["matmul"] = a.new_empty((a.shape[0], b.shape[1]))
    out["row_sum"] = x.new_empty(rows)
    out["histogram"] = levels.new_zeros(256)

    gelu_kernel[(triton.cdiv(n, 1024),)](x, out["gelu"], n, BLOCK=1024)
    softmax_kernel[(rows,)](x, out["softmax"], columns, columns, BLOCK=1024)
    layer_norm_kernel[(rows,)](
        x, weight, bias, out["layer_norm"], columns, columns, 1e-5, BLOCK=1024
    )
    matmul_grid = (triton.cdiv(a.shape[0], 64), triton.cdiv(b.shape[1], 64))
    sizes = (a.shape[0], b.shape[1], a.shape[1])
    matmul_kernel[matmul_grid](
        a, b, out["matmul"], *sizes, BLOCK_M=64, BLOCK_N=64, BLOCK_K=32, num_warps=4, num_stages=3
    )
    row_sum_kernel[(rows,)](x, out["row_sum"], columns, columns, BLOCK=1024)
    cumsum_kernel[(rows,)](x, out["cumsum"], columns, columns, BLOCK=1024)
    histogram_kernel[(triton.cdiv(levels.numel(), 512),)](
        levels, out["histogram"], levels.numel(), BLOCK=512
    )
    swiglu_kernel[lambda meta: (triton.cdiv(n, meta["BLOCK"]),)](x, x.flip(0), out["swiglu"], n)
    return out


def inputs(device: str) -> tuple[Any, ...]:
    """Return the same tensors on every machine: they are drawn on the CPU."""
    import torch

    draw = torch.Generator().manual_seed(0)
    x = torch.randn(512, 784, generator=draw)
    weight, bias = torch.randn(2, 784, generator=draw)
    a, b = (
        torch.randn(512, 256, generator=draw).half(),
        torch.randn(256, 384, generator=draw).half(),
    )
    levels = torch.randint(0, 256, (100_000,), generator=draw, dtype=torch.int32)
    return tuple(tensor.to(device) for tensor in (x, weight, bias, a, b, levels))


def expected(device: str) -> dict[str, Any]:
    """Return what torch says the outputs should be."""
    import torch
    from torch.nn import functional

    x, weight, bias, a, b, levels = inputs(device)
    return {
        "gelu": functional.gelu(x),
        "softmax": torch.softmax(x, dim=1),
        "layer_norm": functional.layer_norm(x, (x.shape[1],), weight, bias),
        "matmul": a @ b,
        "row_sum": x.sum(dim=1),
        "cumsum": x.cumsum(dim=1),
        "histogram": torch.bincount(levels, minlength=256).int(),
        "swiglu": functional.silu(x) * x.flip(0),
    }


def checksum(tensor: Any) -> str:
    """Return the sha256 of a tensor's bytes."""
    import torch

    raw = tensor.contiguous().cpu().flatten().view(torch.uint8)
    return hashlib.sha256(bytes(raw.tolist())).hexdigest()


# The program ----------------------------------------------------------------------------------------------------------


def gpu_is_visible() -> bool:
    """Say whether there is something to launch on; torch calls AMD's GPUs cuda too."""
    try:
        import torch
    except ImportError:
        return False
    return bool(torch.cuda.is_available())


def launch_and_check(device: str) -> tuple[bool, dict[str, str]]:
    """Launch every kernel, print how far it is from torch, and return (all close, checksums)."""
    want, checksums, all_close = expected(device), {}, True
    print(f"{'kernel':<12}{'max abs error':>15}")
    for name, got in run_all(device).items():
        error = (got.double() - want[name].double()).abs().max().item()
        tolerance = (
            1 / 16 if name == "matmul" else 1e-3
        )  # between 64 and 128, 1/16 is one step of half precision
        close = error <= tolerance
        all_close &= close
        checksums[name] = checksum(got)
        print(f"{name:<12}{error:>15.3g}  {'ok' if close else 'WRONG'}")
    return all_close, checksums


def compile_and_list(targets: list[str]) -> dict[str, str]:
    """Compile every kernel for every target, print what came out, and return the binaries' checksums."""
    checksums = {}
    print(f"{'kernel':<20}{'target':<14}{'warps':>5}  {'binary':<7}{'bytes':>8}")
    for target in targets:
        for name in RECIPES:
            for number, kernel in enumerate(compile_one(name, target)):
                kind = "hsaco" if target.startswith("hip") else "cubin"
                binary = kernel.asm[kind]
                checksums[f"{name}/{number}/{target}"] = hashlib.sha256(binary).hexdigest()
                print(
                    f"{kernel.metadata.name:<20}{target:<14}{kernel.metadata.num_warps:>5} "
                    f" {kind:<7}{len(binary):>8}"
                )
    return checksums


def main(arguments: list[str] | None = None) -> int:
    """Launch on the GPU there is, or compile for the targets asked for."""
    parser = argparse.ArgumentParser(
        description="Run real Triton kernels, or compile them where there is no GPU."
    )
    parser.add_argument(
        "--target", action="append", metavar="T", help="compile for T even when a GPU is visible"
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write each kernel's name and checksum to FILE"
    )
    options = parser.parse_args(arguments)
    for target in options.target or ():
        try:
            parse_target(target)
        except ValueError as problem:
            parser.error(str(problem))
    if options.target or not gpu_is_visible():
        fine, checksums = True, compile_and_list(options.target or list(DEFAULT_TARGETS))
    else:
        fine, checksums = launch_and_check("cuda")
    if options.json:
        options.json.write_text(
            json.dumps(checksums, indent=2, sort_keys=True) + "\n", encoding="utf-8"
        )
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())

# SPDX-License-Identifier: Apache-2.0
"""Small products beside cuBLAS, on a GPU: those that torch.compile has as kernels by the rule of
`bundler.codegen.small_products`, and some beyond it.

    python -m tools.codegen small-products [--results DIR]

45 shapes with their epilogue, as `products` has them; and 15 without any, in bfloat16, with the
operands' rows or columns along memory, as forward and backward multiply.  Times are those of the
first candidate, which is the one that runs.  The result goes to
docs/results/codegen-small-products.json.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tools.codegen import products
from tools.codegen.command_line import parser
from tools.shared import measurement

NAME = "codegen-small-products"
# Rows, columns, what is summed up: layers of small transformers, few tokens of larger ones, and
# pixels of convolutional networks.
SHAPES = (
    (1576, 192, 192),
    (1576, 576, 192),
    (1576, 768, 192),
    (1576, 192, 768),
    (1024, 384, 512),
    (1024, 512, 384),
    (1024, 1024, 512),
    (1024, 512, 1024),
    (1024, 2048, 1024),
    (1024, 1024, 2048),
    (1024, 3072, 1024),
    (1024, 1024, 3072),
    (2048, 128, 512),
    (2048, 128, 128),
    (2048, 512, 128),
    (2048, 512, 512),
    (16384, 128, 512),
    (16384, 128, 128),
    (16384, 512, 128),
    (512, 1024, 1024),
    (512, 4096, 1024),
    (512, 1024, 4096),
    (256, 1024, 1024),
    (64, 1024, 1024),
    (64, 4096, 1024),
    (64, 1024, 4096),
    (128, 2048, 2048),
    (128, 1280, 960),
    (128, 1000, 1280),
    (401408, 16, 16),
    (401408, 64, 16),
    (100352, 24, 64),
    (100352, 72, 24),
    (25088, 40, 120),
    (25088, 240, 40),
    (25088, 256, 128),
    (25088, 64, 256),
    (6272, 80, 240),
    (6272, 480, 80),
    (6272, 112, 672),
    (6272, 1024, 256),
    (1568, 960, 160),
    (1568, 160, 960),
    (1568, 2048, 512),
    (8, 1000, 2048),
)
PLAIN = (
    (1576, 192, 576),
    (1576, 768, 192),
    (2048, 128, 512),
    (2048, 512, 128),
    (1024, 512, 1024),
    (512, 1024, 1024),
    (576, 192, 1576),
    (192, 768, 1576),
    (128, 512, 2048),
    (512, 512, 2048),
    (1024, 1024, 512),
    (32, 768, 768),
    (768, 768, 32),
    (16, 1000, 1280),
    (1280, 1000, 16),
)
# Each is a function of two operands, and which of them is stored transposed.
LAYOUTS: dict[str, tuple[Callable[[Any, Any], Any], bool, bool]] = {
    "x @ y": (lambda x, y: x @ y, False, False),
    "x @ y.t()": (lambda x, y: x @ y.t(), False, True),
    "x.t() @ y": (lambda x, y: x.t() @ y, True, False),
}
# By a shorter clock than that of large ones.
_WARMUP_MS, _REP_MS = 2.0, 8.0


def main() -> int:
    """Measure all, print and save."""
    options = parser(__doc__, "results").parse_args()
    rows = products.measured_all("bf16", SHAPES)
    plain = measured_plain(PLAIN)
    result = {**measurement.facts(), "rows": rows, "plain": plain, **summary(rows, plain)}
    measurement.save(NAME, result, Path(options.results))
    for row in (*rows, *plain):
        ours = row["chosen_ms"]
        print(
            f"{row['shape']!s:<22} {row.get('layout', 'gelu'):<10} cuBLAS"
            f" {row['cublas_ms'] * 1e3:6.1f} us  ours {ours * 1e3:6.1f} us"
        )
    print({name: round(value, 3) for name, value in summary(rows, plain).items()})
    return 0


def is_small(shape: Sequence[int]) -> bool:
    """Whether the rule makes a kernel of a product."""
    from bundler.codegen.small_products import LONGEST, MOST

    rows, columns, length = shape
    return rows * columns * length <= MOST and length <= LONGEST


def summary(rows: Sequence[dict[str, Any]], plain: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return the time of small ones beside cuBLAS's with its bias alone, with a kernel for the
    epilogue behind it, and beside that of the fastest candidate, geometric means and worst; of
    those without an epilogue beside cuBLAS's; and of those that the rule leaves alone.
    """
    small = [row for row in rows if is_small(row["shape"])]
    large = [row for row in rows if not is_small(row["shape"])]
    compared = {
        "bias_alone": (small, "cublas_ms"),
        "kernel_behind": (small, "eager_ms"),
        "chosen_over_tuned": (small, "tuned_ms"),
        "plain": (plain, "cublas_ms"),
        "others": (large, "cublas_ms"),
    }
    found: dict[str, float] = {}
    for name, (some, beside) in compared.items():
        ratios = [row["chosen_ms"] / row[beside] for row in some]
        found |= {name: statistics.geometric_mean(ratios), f"{name}_worst": max(ratios)}
    return found


def measured_plain(shapes: Sequence[products.Shape]) -> list[dict[str, Any]]:
    """Return the times of products with nothing behind them, in each layout."""
    from bundler.codegen.module_benchmarks import candidate_launches
    from bundler.runtime.tuning.benchmark import CudaClock

    clock, rows = CudaClock(_WARMUP_MS, _REP_MS), []
    made = [
        (shape, layout, problem(shape, layout, "cuda")) for layout in LAYOUTS for shape in shapes
    ]
    products.compile_all([found for *_, found in made])
    for shape, layout, found in made:
        firsts = [
            next(iter(candidate_launches(kernel, arguments).values()))
            for kernel, arguments in found.launches
        ]
        rows.append(
            {
                "shape": list(shape),
                "layout": layout,
                "cublas_ms": products.taken(clock, partial(LAYOUTS[layout][0], *found.inputs)),
                "chosen_ms": products.taken(clock, *firsts),
            }
        )
    return rows


def problem(shape: products.Shape, layout: str, device: str) -> products.Problem:
    """Return the program of a shape in a layout."""
    import torch

    function, first, last = LAYOUTS[layout]
    rows, columns, length = shape
    sizes = (
        (length, rows) if first else (rows, length),
        (columns, length) if last else (length, columns),
    )
    inputs = [torch.randn(one, device=device).bfloat16() for one in sizes]
    return products.launched(function, inputs, "by rule", device)


if __name__ == "__main__":
    sys.exit(main())

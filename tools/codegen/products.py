# SPDX-License-Identifier: Apache-2.0
"""Products of matrices with their epilogue as one kernel, `gelu(x @ w.t() + bias)`, beside cuBLAS,
which is given the product and the bias alone: 10 shapes of models, on a GPU.

    python -m tools.codegen products [--dtype bf16|fp16|fp32|tf32] [--results DIR]

For each shape: the time of the candidate that the rule chooses without a measurement, that of the
fastest candidate, that of cuBLAS, and that of eager torch with the epilogue; all by events, with a
cold cache. Numbers are compared with float64's first. The result goes to
docs/results/codegen-products-DTYPE.json.
"""

from __future__ import annotations

import math
import sys
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from tools.codegen.command_line import parser
from tools.shared import measurement

NAME = "codegen-products"
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "tf32": "float32"}
# Rows of x, columns of the result, what is summed up: decoding, then more and more rows, the
# layers of a transformer, and sizes that are no multiple of anything.
SHAPES = (
    (1, 4096, 4096),
    (16, 4096, 4096),
    (128, 4096, 4096),
    (512, 4096, 4096),
    (2048, 4096, 4096),
    (4096, 2304, 768),
    (4096, 14336, 4096),
    (4096, 4096, 14336),
    (8192, 8192, 8192),
    (1000, 1003, 777),
)
# What a sum of this precision may be off by, relative to the sum of the absolute products.
_OFF = {"bf16": 2.0**-7, "fp16": 2.0**-10, "fp32": 2.0**-18, "tf32": 2.0**-9}


class Problem(NamedTuple):
    """A program of one product, its inputs, and the arguments of its only launch."""

    program: Any
    inputs: list[Any]
    kernel: Any
    arguments: list[Any]


def main() -> int:
    """Measure all shapes, print and save."""
    line = parser(__doc__, "results")
    line.add_argument("--dtype", choices=tuple(DTYPES), default="bf16", help="of the operands")
    options = line.parse_args()
    rows = [measured(shape, options.dtype) for shape in SHAPES]
    result = {**measurement.facts(), "dtype": options.dtype, "rows": rows, **summary(rows)}
    measurement.save(f"{NAME}-{options.dtype}", result, Path(options.results))
    for row in rows:
        print(
            f"{row['shape']!s:<22} cuBLAS {row['cublas_ms']:8.4f} ms  tuned"
            f" {row['cublas_ms'] / row['tuned_ms']:5.2f} x  chosen"
            f" {row['cublas_ms'] / row['chosen_ms']:5.2f} x  {row['tuned']}"
        )
    print({name: round(value, 3) for name, value in summary(rows).items()})
    return 0


def summary(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Return speeds beside cuBLAS's, geometric mean and least, and how much longer what the rule
    chooses takes than the fastest candidate.
    """
    speeds = [row["cublas_ms"] / row["tuned_ms"] for row in rows]
    chosen = [row["chosen_ms"] / row["tuned_ms"] for row in rows]
    return {
        "speed": math.exp(sum(map(math.log, speeds)) / len(speeds)),
        "least_speed": min(speeds),
        "chosen_over_tuned": math.exp(sum(map(math.log, chosen)) / len(chosen)),
    }


def problem(shape: tuple[int, int, int], dtype: str, device: str) -> Problem:
    """Return the program of a shape.

    Raises:
        AssertionError: it has another number of launches than one.
    """
    import torch

    from bundler.codegen.program import GenerateOptions, generate
    from bundler.runtime.program.program_plan import Launch

    rows, columns, length = shape
    kind = getattr(torch, DTYPES[dtype])
    torch.backends.cuda.matmul.fp32_precision = "tf32" if dtype == "tf32" else "ieee"
    torch.manual_seed(0)
    sizes = ((rows, length), (columns, length), (columns,))
    inputs = [torch.randn(one, device=device).to(kind) for one in sizes]
    program = generate(_function, inputs, options=GenerateOptions(templates="all"))
    (launch,) = [step for step in program.plan.steps if isinstance(step, Launch)]
    tensors = {
        f"@{given.name}": one for given, one in zip(program.plan.inputs, inputs, strict=True)
    }
    result = torch.empty(rows, columns, dtype=kind, device=device)
    arguments = [
        tensors.get(item, result) if isinstance(item, str) else item for item in launch.arguments
    ]
    return Problem(program, inputs, program.modules[launch.kernel], arguments)


def _function(x: Any, weight: Any, bias: Any) -> Any:
    from torch.nn import functional

    return functional.gelu(functional.linear(x, weight, bias))


def off(found: Problem, dtype: str) -> float:
    """Return by how much a program is off float64 where it is most, 1 for as much as it may be."""
    x, weight, bias = (item.double() for item in found.inputs)
    (got,) = found.program.run(*found.inputs)
    most = (x.abs() @ weight.abs().t() + bias.abs()) * _OFF[dtype]
    return float(((got.double() - _function(x, weight, bias)).abs() / most).max())


def measured(shape: tuple[int, int, int], dtype: str) -> dict[str, Any]:
    """Return the times of a shape.

    Raises:
        AssertionError: the numbers are wrong.
    """
    from torch.nn import functional

    from bundler.codegen.module_benchmarks import candidate_times
    from bundler.runtime.tuning.benchmark import CudaClock

    found, clock = problem(shape, dtype, "cuda"), CudaClock()
    wrong = off(found, dtype)
    assert wrong <= 1, f"{shape} {dtype}: {wrong} times as far from float64 as it may be"
    times = candidate_times(found.kernel, found.arguments, clock)
    tuned = min(times, key=times.__getitem__)

    def taken(function: Any) -> float:
        return clock.sample(partial(function, *found.inputs), lambda: None).median_ms

    return {
        "shape": list(shape),
        "off": wrong,
        "cublas_ms": taken(functional.linear),
        "eager_ms": taken(_function),
        "chosen_ms": next(iter(times.values())),
        "tuned_ms": times[tuned],
        "tuned": tuned,
        "candidates": times,
    }


if __name__ == "__main__":
    sys.exit(main())

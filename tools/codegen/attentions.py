# SPDX-License-Identifier: Apache-2.0
"""Attention as a kernel beside torch's: cuDNN's and FlashAttention's, as
`scaled_dot_product_attention` calls them: 12 shapes of models, from prefill to decoding, on a GPU.

    python -m tools.codegen attentions [--dtype bf16|fp16] [--results DIR]

For each shape: the time of the candidate that the rule chooses without a measurement, that of the
fastest candidate, and those of torch's backends, each by events with a cold cache; where keys are
split, the kernel that adds up the parts is part of ours. Numbers are compared with float64's first.
The result goes to docs/results/codegen-attentions-DTYPE.json.
"""

from __future__ import annotations

import math
import statistics
import sys
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from tools.codegen.command_line import parser
from tools.shared import measurement

NAME = "codegen-attentions"
DTYPES = {"bf16": "bfloat16", "fp16": "float16"}
BACKENDS = {"cudnn": "CUDNN_ATTENTION", "flash": "FLASH_ATTENTION"}
# What a result of this precision may be off by, relative to the sum of the absolute values by their
# weights: of the weights, and of the result itself.
_OFF = {"bf16": 2.0**-7, "fp16": 2.0**-10}
# Of so many rows at once float64's scores are computed.
_ROWS = 1024


class Shape(NamedTuple):
    """Batch, heads, heads of keys, queries, keys, elements of a head, and whether it is causal."""

    batch: int
    heads: int
    shared: int
    rows: int
    keys: int
    length: int
    causal: bool


SHAPES = (
    Shape(4, 32, 8, 2048, 2048, 128, causal=True),
    Shape(1, 32, 8, 8192, 8192, 128, causal=True),
    Shape(8, 16, 16, 1024, 1024, 64, causal=True),
    Shape(8, 16, 16, 2048, 2048, 64, causal=False),
    Shape(32, 12, 12, 512, 512, 64, causal=False),
    Shape(64, 12, 12, 197, 197, 64, causal=False),
    Shape(2, 16, 16, 4096, 4096, 80, causal=False),
    Shape(2, 8, 8, 2048, 2048, 256, causal=True),
    Shape(1, 32, 8, 1, 4096, 128, causal=False),
    Shape(16, 32, 8, 1, 4096, 128, causal=False),
    Shape(1, 32, 32, 1, 8192, 128, causal=False),
    Shape(1, 32, 8, 1, 32768, 64, causal=False),
)


class AttentionProblem(NamedTuple):
    """A program of one attention, its inputs, and what launches each kernel of it."""

    program: Any
    inputs: list[Any]
    launches: list[tuple[Any, list[Any]]]


def main() -> int:
    """Measure all shapes, print and save."""
    line = parser(__doc__, "results")
    line.add_argument("--dtype", choices=tuple(DTYPES), default="bf16", help="of the tensors")
    options = line.parse_args()
    rows = measured_all(options.dtype)
    result = {**measurement.facts(), "dtype": options.dtype, "rows": rows, **summary(rows)}
    measurement.save(f"{NAME}-{options.dtype}", result, Path(options.results))
    for row in rows:
        theirs = "  ".join(
            f"{name} {row[name] / row['tuned_ms']:5.2f} x" for name in BACKENDS if row[name]
        )
        print(f"{row['shape']!s:<40} {row['tuned_ms']:8.4f} ms  {theirs}  {row['tuned']}")
    print({name: value and round(value, 3) for name, value in summary(rows).items()})
    return 0


def measured_all(dtype: str) -> list[dict[str, Any]]:
    """Return the times of all shapes, whose candidates are compiled side by side first."""
    from bundler.codegen import compile_ahead

    problems = [problem(shape, dtype, "cuda") for shape in SHAPES]
    compiled = [compile_ahead.start(found.program, None) for found in problems]
    for started in compiled:
        compile_ahead.wait(started)
    return [measured(shape, found, dtype) for shape, found in zip(SHAPES, problems, strict=True)]


def summary(rows: list[dict[str, Any]]) -> dict[str, float | None]:
    """Return speeds beside those of torch's backends, of prefill and of decoding, geometric means,
    and how much longer what the rule chooses takes than the fastest candidate.
    """
    found: dict[str, float | None] = {}
    for name in BACKENDS:
        for kind, few in (("prefill", False), ("decode", True)):
            of_kind = [row for row in rows if (row["shape"][3] == 1) is few and row[name]]
            found[f"{kind}_{name}"] = _mean([row[name] / row["tuned_ms"] for row in of_kind])
    found["chosen_over_tuned"] = _mean([row["chosen_ms"] / row["tuned_ms"] for row in rows])
    return found


def _mean(ratios: list[float]) -> float | None:
    return statistics.geometric_mean(ratios) if ratios else None


def problem(shape: Shape, dtype: str, device: str) -> AttentionProblem:
    """Return the program of a shape."""
    import torch

    from bundler.codegen.program import GenerateOptions, generate
    from bundler.runtime.program.program_plan import Allocate, Launch

    kind = getattr(torch, DTYPES[dtype])
    torch.manual_seed(0)
    of_keys = (shape.batch, shape.shared, shape.keys, shape.length)
    sizes = ((shape.batch, shape.heads, shape.rows, shape.length), of_keys, of_keys)
    inputs = [torch.randn(one, device=device).to(kind) for one in sizes]
    options = GenerateOptions(templates="all")
    program = generate(partial(_function, shape), inputs, options=options)
    tensors = {
        f"@{given.name}": one for given, one in zip(program.plan.inputs, inputs, strict=True)
    }
    for step in program.plan.steps:
        if isinstance(step, Allocate):
            made = getattr(torch, step.spec.dtype)
            size = [int(one) for one in step.spec.sizes]
            tensors[f"@{step.name}"] = torch.empty(size, dtype=made, device=device)
    launches = [
        (
            program.modules[step.kernel],
            [tensors[a] if isinstance(a, str) else a for a in step.arguments],
        )
        for step in program.plan.steps
        if isinstance(step, Launch)
    ]
    return AttentionProblem(program, inputs, launches)


def _function(shape: Shape, query: Any, key: Any, value: Any) -> Any:
    from torch.nn import functional

    return functional.scaled_dot_product_attention(
        query, key, value, is_causal=shape.causal, enable_gqa=shape.heads != shape.shared
    )


def off(found: AttentionProblem, shape: Shape, dtype: str) -> float:
    """Return by how much a program is off float64 where it is most, 1 for as much as it may be."""
    import torch

    query, key, value = (item.double() for item in found.inputs)
    key, value = (one.repeat_interleave(shape.heads // shape.shared, 1) for one in (key, value))
    (got,) = found.program.run(*found.inputs)
    worst = 0.0
    for head in range(shape.heads):
        for first in range(0, shape.rows, _ROWS):
            rows = slice(first, first + _ROWS)
            scores = query[:, head, rows] @ key[:, head].mT / math.sqrt(shape.length)
            if shape.causal:
                numbers = torch.arange(shape.keys, device=scores.device)
                seen = numbers <= torch.arange(shape.rows, device=scores.device)[rows, None]
                scores = scores.masked_fill(~seen, -math.inf)
            weights = scores.softmax(-1)
            most = weights @ value[:, head].abs() * _OFF[dtype]
            wrong = (got[:, head, rows].double() - weights @ value[:, head]).abs() / most
            worst = max(worst, float(wrong.max()))
    return worst


def measured(shape: Shape, found: AttentionProblem, dtype: str) -> dict[str, Any]:
    """Return the times of a shape.

    Raises:
        AssertionError: the numbers are wrong.
    """
    from bundler.codegen.module_benchmarks import candidate_times
    from bundler.runtime.tuning.benchmark import CudaClock

    clock = CudaClock()
    wrong = off(found, shape, dtype)
    assert wrong <= 1, f"{shape} {dtype}: {wrong} times as far from float64 as it may be"
    every = [candidate_times(kernel, arguments, clock) for kernel, arguments in found.launches]
    best = [min(times, key=times.__getitem__) for times in every]
    return {
        "shape": list(shape),
        "off": wrong,
        **{name: _theirs(name, shape, found, clock) for name in BACKENDS},
        "chosen_ms": sum(next(iter(times.values())) for times in every),
        "tuned_ms": sum(times[one] for times, one in zip(every, best, strict=True)),
        "tuned": "; ".join(best),
        "candidates": every,
    }


def _theirs(name: str, shape: Shape, found: AttentionProblem, clock: Any) -> float | None:
    """Return the time of a backend of torch's; None where it has nothing for the shape."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    call = partial(_function, shape, *found.inputs)
    with sdpa_kernel(getattr(SDPBackend, BACKENDS[name])):
        try:
            call()
        except RuntimeError as error:
            if "No available kernel" not in str(error):
                raise
            return None
        return float(clock.sample(call, lambda: None).median_ms)


if __name__ == "__main__":
    sys.exit(main())

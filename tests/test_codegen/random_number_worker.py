# SPDX-License-Identifier: Apache-2.0
"""Draws random numbers by a generated program in Triton's interpreter, and prints what the test
asks about them, as JSON: `random_number_worker.py SOURCES`.

Statistics are of fixed seeds, so they are the same in every run.
"""

import hashlib
import json
import sys

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from bundler.codegen.program import GenerateOptions, generate
from bundler.runtime.program.run import seed_numbers

ROWS, COLUMNS = 32, 128
COUNT = ROWS * COLUMNS
SIDES = 16


def drawn(x):
    """Return numbers of each distribution."""
    return {
        "uniform": torch.rand(ROWS, COLUMNS),
        "normal": torch.randn(ROWS, COLUMNS),
        "integers": torch.randint(3, 3 + SIDES, (ROWS, COLUMNS)),
        "again": torch.rand_like(x),
        "transposed": torch.rand(COLUMNS, ROWS).t(),
        "half": torch.rand(ROWS, COLUMNS, dtype=torch.float16),
        "bfloat16": torch.rand(ROWS, COLUMNS, dtype=torch.bfloat16),
        "between": torch.empty(ROWS, COLUMNS).uniform_(2, 3),
        "shifted": torch.empty(ROWS, COLUMNS).normal_(5, 2),
        "exponential": torch.empty(ROWS, COLUMNS).exponential_(2),
        "coins": torch.bernoulli(x * 0.25),
        "bools": torch.empty(ROWS, COLUMNS, dtype=torch.bool).bernoulli_(0.75),
        "dropped": F.dropout(x, 0.25),
    }


NAMES = list(drawn(torch.ones(ROWS, COLUMNS)))


@triton.jit
def oracle(seeds, uniform, normal, COUNT: tl.constexpr):
    place = tl.arange(0, COUNT)
    tl.store(uniform + place, tl.rand(tl.load(seeds), place.to(tl.uint32)))
    tl.store(normal + place, tl.randn(tl.load(seeds + 1), place.to(tl.uint32)))


def statistics(numbers):
    values = numbers.double()
    return {
        "mean": float(values.mean()),
        "variance": float(values.var()),
        "least": float(values.min()),
        "most": float(values.max()),
        "of rows": float((values[:, 1:] * values[:, :-1]).mean() - values.mean() ** 2),
    }


def chi_square(counts):
    expected = counts.sum() / counts.numel()
    return float(((counts - expected) ** 2 / expected).sum())


def gradient(x):
    """Return a dropout's result and its gradient."""
    result, backward = torch.func.vjp(
        lambda given: torch.ops.aten.native_dropout(given, 0.25, True)[0], x
    )
    return result, backward(torch.ones_like(x))[0]


def layers(x):
    """Drop twice: the kernels differ in their seeds alone."""
    first = F.dropout(x, 0.5).sum(1, keepdim=True)
    second = F.dropout(first.expand(-1, 2) @ torch.ones(2, COLUMNS), 0.5).sum(1, keepdim=True)
    return second.expand(-1, 2) @ torch.ones(2, COLUMNS)


def read_often(x):
    """Read random numbers in several kernels, in loops over rows of two passes, transposed and
    masked.
    """
    noise = torch.rand(3, 1300)
    return (
        noise,
        noise.sum(1),
        noise.sum(0),
        torch.softmax(noise + x, -1),
        noise.t() * 2,
        F.pad(noise, (1, 2)),
        torch.rand(()),
        torch.rand(1),
    )


def read_alike(x, found):
    noise = found[0]
    right = (
        noise.sum(1),
        noise.sum(0),
        torch.softmax(noise + x, -1),
        noise.t() * 2,
        F.pad(noise, (1, 2)),
    )
    return [
        torch.allclose(one, other, rtol=1e-5) for one, other in zip(found[1:], right, strict=False)
    ]


def main(sources):
    options = GenerateOptions(sources=sources)
    x = torch.ones(ROWS, COLUMNS)
    program = generate(lambda x: tuple(drawn(x).values()), [x], options=options)
    found = dict(zip(NAMES, program.run(x, seed=7), strict=True))
    seeds = torch.tensor(seed_numbers(7, 0, 2))
    uniform, normal = torch.zeros(ROWS, COLUMNS), torch.zeros(ROWS, COLUMNS)
    oracle[(1,)](seeds, uniform, normal, COUNT=COUNT)
    cells = torch.histc(found["uniform"], bins=SIDES, min=0, max=1)
    sides = torch.bincount(found["integers"].flatten() - 3, minlength=SIDES).double()
    by_torch = []
    for seed in (1, 2, 1):
        torch.manual_seed(seed)
        by_torch.append(program.run(x)[0])
    drop = generate(gradient, [x], options=options)
    result, gradients = drop.run(x, seed=1)
    twice = generate(layers, [x], options=options)
    often = generate(read_often, [torch.zeros(3, 1300)], options=options)
    print(
        json.dumps(
            {
                "fallbacks": [*program.fallbacks, *drop.fallbacks],
                "kernels": [len(program.kernels), len(drop.kernels)],
                "statistics": {name: statistics(numbers) for name, numbers in found.items()},
                "dtypes": {name: str(numbers.dtype) for name, numbers in found.items()},
                "chi square": [chi_square(cells), chi_square(sides)],
                "oracle": [
                    torch.equal(found["uniform"], uniform),
                    torch.equal(found["normal"], normal),
                ],
                "digest": hashlib.sha256(
                    b"".join(
                        t.contiguous().view(torch.uint8).numpy().tobytes() for t in found.values()
                    )
                ).hexdigest(),
                "differ": not torch.equal(found["uniform"], found["again"]),
                "by torch": [
                    torch.equal(by_torch[0], by_torch[1]),
                    torch.equal(by_torch[0], by_torch[2]),
                ],
                "read alike": read_alike(
                    torch.zeros(3, 1300), often.run(torch.zeros(3, 1300), seed=2)
                ),
                "gradient": torch.equal(result, gradients),
                "launches": [type(step).__name__ for step in twice.plan.steps].count("Launch"),
                "kernels of layers": len(twice.kernels),
                "seeds": [
                    step.count for step in twice.plan.steps if type(step).__name__ == "Seeds"
                ],
            }
        )
    )


main(*sys.argv[1:])

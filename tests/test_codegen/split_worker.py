# SPDX-License-Identifier: Apache-2.0
"""Runs reductions of few long rows, whose length changes from call to call or has no divisor near
the number of pieces wanted, in Triton's interpreter; prints launches, and what is wrong as JSON.

Run as a program: `split_worker.py`, with TRITON_INTERPRET=1.
"""

import json
import sys

import torch

from bundler.codegen import generate
from bundler.codegen.loops import split_reductions
from bundler.runtime.program.program_plan import Launch

# A row that is long for a GPU takes the interpreter minutes.
split_reductions._SHORT_ROW, split_reductions._PROGRAM_THREADS = 64, 8
split_reductions._LEAST_EACH, split_reductions._COLUMNS = 4, 4
split_reductions._LEAST_ROWS = 8


def whole(x):
    return (x * 2).sum(), x.amax(), (x > 4).any(), torch.var_mean(x), x.std(correction=0)


def rows(x):
    return (x * 2).sum(1), x.amin(1), x.isnan().any(1), torch.var_mean(x, 1), x.amax(1) + 1


def columns(x):
    x = x.view(-1, 6)
    return (x * 2).sum(0), x.amax(0), torch.var_mean(x, 0)


def of_rows(x):
    return ((x - x.amax(1, keepdim=True)) * 2).sum()


def places(x):
    return x.argmax(-1), x.argmin(-1), x.max(-1).indices, x.bfloat16().argmax(-1)


#: Function, example's sizes, and further ones: shorter than there are pieces, and longer.
CHANGING = [
    (whole, (301,), [(5,), (64,), (500,)]),
    (rows, (3, 301), [(2, 2), (4, 97)]),
    (columns, (1806,), [(12,), (600,), (2406,)]),
]
FIXED = [(whole, (307,)), (rows, (2, 307)), (columns, (6 * 307,)), (of_rows, (12, 307))]


def flat(value):
    parts = [value] if isinstance(value, torch.Tensor) else [p for v in value for p in flat(v)]
    return [part.double() for part in parts]


def wrong(function, program, sizes, scale):
    """Return the results of a call that are farther from float64 than rounding."""
    # Far from zero: squares of what is not centred would lose all digits.
    x = torch.randn(sizes, generator=torch.Generator().manual_seed(sum(sizes))) + 1000
    x *= scale
    pairs = zip(flat(program.run(x)), flat(function(x.double())), strict=True)
    return [
        place
        for place, (found, exact) in enumerate(pairs)
        if not torch.allclose(found, exact, rtol=1e-4, atol=0, equal_nan=True)
    ]


def found_places(values):
    """Return the launches of a search in rows, and whether torch finds the same places, of equal
    ones the first, and of NaN the first.
    """
    program = generate(places, [values])
    same = all(torch.equal(*pair) for pair in zip(program.run(values), places(values), strict=True))
    return sum(isinstance(step, Launch) for step in program.plan.steps), [] if same else ["places"]


def searched():
    """Return rows of few different numbers, of one, with NaN and infinities, and in order; one and
    several, of even pieces and others.
    """
    torch.manual_seed(0)
    for sizes in ((307,), (2, 320)):
        few = torch.randint(-3, 3, sizes)
        floats = few.float()
        yield from (few, floats, torch.zeros(sizes), torch.full(sizes, float("-inf")))
        yield torch.where(torch.rand(sizes) < 0.02, float("nan"), floats)
        yield torch.where(few > 1, float("inf"), floats)
        yield torch.where(few > 0, -0.0, 0.0)
        # The extreme is the last element, beyond which the last piece may reach.
        rising = torch.arange(few.numel()).reshape(sizes).float()
        yield from (rising, -rising)


def outcome(function, sizes, others, dynamic):
    program = generate(function, [torch.empty(sizes)], dynamic=dynamic)
    # The larger numbers have no square in float32.
    bad = {
        f"{given} {scale}": wrong(function, program, given, scale)
        for given in (sizes, *others)
        for scale in (1, 1e17)
    }
    launches = sum(isinstance(step, Launch) for step in program.plan.steps)
    return launches, [given for given, places in bad.items() if places]


if __name__ == "__main__":
    json.dump(
        {
            **{f"{f.__name__} {sizes}": outcome(f, sizes, [], False) for f, sizes in FIXED},
            **{f"{f.__name__} changing": outcome(f, *given, True) for f, *given in CHANGING},
            **{f"places {number}": found_places(x) for number, x in enumerate(searched())},
        },
        sys.stdout,
    )

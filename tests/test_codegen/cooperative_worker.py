# SPDX-License-Identifier: Apache-2.0
"""Runs reductions whose programs share rows in Triton's interpreter, and prints what is wrong as
JSON.

Programs run one after the other there, so none can wait for another one.  `alone` gives each row
one program.  `phases` runs the whole grid again and again without the wait: each time all parts of
one more exchange are there, of the time before, so after as many times as there are exchanges every
program has what it would have waited for.  `split` runs the launches that do not wait.

Run as a program: `cooperative_worker.py [CASE ...]`, with TRITON_INTERPRET=1.
"""

import json
import sys

import torch

from bundler.codegen import lib
from bundler.codegen.loops import shared_rows, split_reductions
from bundler.codegen.program import GenerateOptions, ProgramPolicy, generate
from bundler.runtime.program.program_plan import Cooperation
from bundler.toolchain.torch_memory import TorchMemory

# A row that is long for a GPU takes the interpreter minutes.
shared_rows._LONG_ROW_EACH = 64
split_reductions._SHORT_ROW, split_reductions._PROGRAM_THREADS = 64, 8
split_reductions._LEAST_EACH = 4
FORCED = GenerateOptions(policy=ProgramPolicy(cooperative_reductions=True))
BLOCK, SHARES = 32, 4


def extremes(x):
    return x.amax(1), x.argmax(1), x.amin(1), x.argmin(1), (x > 2).any(1), (x > -9).all(1)


def sums(x):
    return (x * 2).sum(1), (x / 8 + 1).prod(1), x.mean(1, keepdim=True)


def moments(x):
    return torch.var_mean(x, 1), x.std(1, correction=0)


def whole(x):
    return x.sum(), torch.var_mean(x), x.argmax()


def softmax(x):
    return torch.softmax(x, -1), torch.logsumexp(x, -1)


def norm(x):
    return torch.nn.functional.layer_norm(x, x.shape[1:]), x.amax(1)


def far(x):
    return (x - x.mean(1, keepdim=True)).abs().sum(1, keepdim=True) * x


def halves(x):
    return torch.softmax(x.bfloat16(), -1), x.half().sum(1)


def integers(x):
    return (x * 8).int().sum(1), (x * 8).to(torch.int8).amin(1), (x > 0).sum(1)


#: Rows with a length that is no multiple of a block, or shorter than the parts that there are.
CASES = [
    (extremes, (3, 307)),
    (extremes, (1, 70)),
    (sums, (4, 512)),
    (moments, (2, 130)),
    (moments, (2, 307)),
    (whole, (5, 333)),
    (softmax, (2, 512)),
    (softmax, (3, 307)),
    (norm, (2, 309)),
    (far, (2, 130)),
    (halves, (2, 307)),
    (integers, (3, 307)),
]


def passing(_counter, _programs):
    """Wait for nobody."""


class Launcher:
    """Runs the form of one launch: each row by one program, or by several in phases."""

    def __init__(self, program, shares):
        self._program, self._shares, self.ran = program, shares, 0

    def bound(self, name, sizes):
        """Return what launches a kernel."""
        kernel = self._program.modules[name]
        if not kernel.shares_rows:
            return kernel.run

        def launch(*arguments):
            self.ran += 1
            if self._shares == 1:
                kernel.run(*arguments)
                return
            exchanges = self._program.sources[name].count("grid_barrier")
            names = self._program.plan.kernels[name].parameters
            given = dict(zip(names, arguments, strict=True))
            blocks = {"XBLOCK": 2, "R0_BLOCK": BLOCK, "RSPLIT": self._shares}
            grid = (self._shares, -(-sizes["xnumel"] // 2), 1)
            for _ in range(exchanges + 1):
                kernel.fn.run(**given, **blocks, grid=grid, warmup=False)

        return launch

    def choose(self, _step, together, _apart):
        """Return the form of one launch."""
        return together


def flat(value):
    return [value] if isinstance(value, torch.Tensor) else [p for v in value for p in flat(v)]


def differs(function, x, results):
    """Return the results that are farther from float64's than rounding."""
    exact = flat(function(x.double())) if function is not halves else flat(function(x))
    bad = []
    for place, (found, expected) in enumerate(zip(results, exact, strict=True)):
        tolerance = 1e-2 if function is halves else 1e-5
        right = torch.allclose(
            found.double(), expected.double(), rtol=tolerance, atol=tolerance, equal_nan=True
        )
        if not right:
            bad.append(place)
    return bad


def outcome(function, sizes):
    """Return which results of which form are wrong, and how often the form was run."""
    program = generate(function, [torch.empty(sizes)], options=FORCED)
    (step,) = (one for one in program.plan.steps if isinstance(one, Cooperation))
    generator = torch.Generator().manual_seed(sum(sizes))
    plain = torch.randn(sizes, generator=generator)
    odd = plain.clone()
    odd[0, 5], odd[-1, -2], odd[-1, 3] = float("nan"), float("inf"), -float("inf")
    found = {"launches": len(step.kernels), "wrong": []}
    for name, x in (("plain", plain), ("odd", odd)):
        if name == "odd" and function not in {extremes, sums, softmax}:
            continue
        results = {"split": program.run(x)}
        for form, shares, barrier in (("alone", 1, lib.grid_barrier), ("phases", SHARES, passing)):
            real, lib.grid_barrier = lib.grid_barrier, barrier
            launcher = Launcher(program, shares)
            results[form] = program.runner(TorchMemory(), launcher)(x)
            lib.grid_barrier = real
            assert launcher.ran == 1
        found["wrong"] += [
            (name, form, bad) for form, one in results.items() if (bad := differs(function, x, one))
        ]
    return found


if __name__ == "__main__":
    named = {f"{function.__name__} {sizes}": (function, sizes) for function, sizes in CASES}
    json.dump({name: outcome(*named[name]) for name in sys.argv[1:] or named}, sys.stdout)

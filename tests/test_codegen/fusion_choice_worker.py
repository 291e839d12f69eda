# SPDX-License-Identifier: Apache-2.0
"""Runs functions in Triton's interpreter with what shares a kernel or a launch decided in each way,
and prints JSON: what is wrong, and how often each form was chosen; TRITON_INTERPRET=1.

`python fusion_choice_worker.py DIRECTORY compiled | graphs FIRST COUNT | lists NAME ... | rows | sizes`
"""

import hashlib
import json
import os
import sys
import warnings
from collections import Counter
from unittest import mock

os.environ["XDG_CACHE_HOME"] = sys.argv[1]

import torch
import torch.nn.functional as F
from combination_cases import CASES, inputs_of
from random_graphs import checked, drawn, function, inputs
from torch.utils._pytree import tree_leaves

from bundler.codegen.loops import mixed_reductions
from bundler.codegen.measured_fusion import FusionMeasurements
from bundler.codegen.program import GenerateOptions, ProgramPolicy, generate
from bundler.runtime import DryDriver
from bundler.runtime.program.program_plan import Launch, read_plan
from bundler.runtime.tuning.benchmark import Sample

OPTIONS = GenerateOptions(
    sources=f"{sys.argv[1]}/sources", policy=ProgramPolicy(measured_fusion=True)
)
counts = Counter()


class Decided:
    """Chooses the form that is asked for where there is one, or any, by the kernels' text."""

    records = ()

    def __init__(self, wanted):
        self.wanted = wanted

    def chosen(self, forms):
        """Return the name of a form."""
        said = repr([text.body for texts in forms.values() for text in texts])
        number = int(hashlib.sha256(said.encode()).hexdigest(), 16)
        drawn = sorted(forms)[number % len(forms)]
        found = drawn if self.wanted == "any" else self.wanted
        found = found if found in forms else "together"
        counts[found] += 1
        return found


def made(wanted, *given, **options):
    """Return a program whose forms are chosen in one way."""
    decided = Decided(wanted)
    with mock.patch.object(FusionMeasurements, "here", return_value=decided):
        return generate(*given, options=OPTIONS, **options)


def launches(program):
    """Return how many launches a program has."""
    steps = read_plan(program.plan.to_json()).steps
    return sum(isinstance(step, Launch) for step in steps)


def graphs(first, count):
    """Return which random graphs differ from torch, with which choice."""
    found = {}
    for seed in range(int(first), int(first) + int(count)):
        description = drawn(seed)
        for wanted in ("apart", "any"):
            program = made(wanted, function(description), inputs(description))
            wrong = checked(description, program.run(*inputs(description)))
            if wrong:
                found[f"{seed} {wanted}"] = wrong
    return {"wrong": found, "counts": counts}


def bits(tensors):
    """Return all bytes."""
    leaves = [one for one in tree_leaves(tensors) if isinstance(one, torch.Tensor)]
    return [one.detach().reshape(-1).view(torch.uint8).tolist() for one in leaves]


def lists(*names):
    """Return, for lists of tensors, launches by choice, whether parts took turns, and whether all
    have the same bytes.
    """
    report = {}
    for name in names or ("changed", "unlike", "norms", "stepped"):
        results, numbers, turned = [], [], False
        for wanted in ("together", "in turn", "apart"):
            program, given = made(wanted, CASES[name][0], inputs_of(name)), inputs_of(name)
            results.append(bits([program.run(*given, seed=3), given]))
            numbers.append(launches(program))
            turned |= any(kernel.text.in_turn for kernel in program.kernels.values())
        report[name] = [numbers, turned, results[0] == results[1] == results[2]]
    return report


ROWS = (
    lambda a, w: torch.softmax(a, -1),
    lambda a, w: torch.log_softmax(a, -1) * w,
    lambda a, w: F.layer_norm(a, a.shape[1:], w),
    lambda a, w: (a.var(1), a.argmax(1), a.cumsum(1) * w),
    lambda a, w: (a * a.sum(0)).sum(1) + torch.stack([a.sum(), a.amax()]).sum(),
    lambda a, w: torch.func.vjp(lambda x: F.rms_norm(x, x.shape[1:], w), a)[1](a + 1),
)


def rows():
    """Return what differs from torch of reductions that belong together, as the maximum and the sum
    of a softmax, and of sums along and across rows, with each choice.
    """
    mixed_reductions._LEAST_ELEMENTS, mixed_reductions._LEAST_ROWS = 0, 32
    mixed_reductions._ROWS_FOR_A_COLUMN = 0
    found = []
    for number, function_ in enumerate(ROWS):
        for shape in ((70, 96), (3, 1500)):
            given = [torch.randn(shape), torch.randn(shape[1])]
            for wanted in ("together", "apart", "any"):
                results = made(wanted, function_, given).run(*given)
                pairs = zip(results, tree_leaves(function_(*given)), strict=True)
                if not all(torch.allclose(a, b, 1e-3, 1e-3) for a, b in pairs):
                    found.append(f"{number} {shape} {wanted}")
    return found


class Halved:
    """A clock for which each form takes half as long as the one that was timed before."""

    def __init__(self):
        self.ms = 1.0

    def sample(self, launch, reset):
        """Launch, and return the time."""
        reset()
        launch()
        self.ms /= 2
        return Sample(self.ms, self.ms, self.ms)


def compiled():
    """Return what torch.compile makes where each form is really launched: how many decisions a
    measurement made, whether numbers are eager torch's, and whether random numbers stay the same.
    """
    os.environ["TRITON_CACHE_DIR"] = f"{sys.argv[1]}/triton"

    def here(device, policy, sources):
        return FusionMeasurements(device, policy, DryDriver("cuda"), Halved, sources)

    def function_(a, b):
        return torch.softmax(a, -1).sum(0) + b.mean(), b.exp()

    programs, given = [], [torch.randn(8, 64, requires_grad=True), torch.randn(300)]
    options = {"benchmark_fusion": True, "programs": programs, "workers": 1}
    before = torch.get_rng_state()
    with mock.patch.object(FusionMeasurements, "here", here):
        results = torch.compile(function_, backend="triton_bundler", options=options)(*given)
        results[0].sum().backward()
    unchanged = torch.equal(before, torch.get_rng_state())
    gradient, given[0].grad = given[0].grad, None
    expected = function_(*given)
    expected[0].sum().backward()
    pairs = [*zip(results, expected, strict=True), (gradient, given[0].grad)]
    near = all(torch.allclose(a, b, 1e-4, 1e-6) for a, b in pairs)
    timed = [t.time_ns for p in programs for _, tuning in p.decisions for t in tuning.timings]
    return [len(programs), len(timed) > 4, None not in timed, near, unchanged]


def sums(*given):
    """Elements, and sums of all of a tensor, of three lengths."""
    return [*torch._foreach_mul(given, 2), *(one.sum() for one in given)]


def products(*given):
    """Lengths that are products of sizes, and indices that need them."""
    return [(one.t() + 1).contiguous() for one in given]


def several(a, b):
    """Elements alone."""
    return a + 1, b * 2


def sizes():
    """Return, for sizes that change, launches, whether parts are in one, and what differs."""
    report = {}
    for function_, shapes in (
        (sums, [((9,), (40,), (9,)), ((300,), (3,), (300,)), ((2,), (700,), (2,))]),
        (products, [((3, 8), (5, 6)), ((20, 7), (2, 2))]),
        (several, [((6,), (7,)), ((1025,), (11,)), ((2,), (300,))]),
    ):
        for wanted in ("together", "in turn"):
            program = made(wanted, function_, [torch.rand(one) for one in shapes[0]], dynamic=True)
            near = []
            for shape in shapes:
                given = [torch.rand(one) for one in shape]
                pairs = zip(program.run(*given), function_(*given), strict=True)
                near += [torch.allclose(a, b, 1e-5, 1e-6) for a, b in pairs]
            parts = [len(kernel.text.parts) for kernel in program.kernels.values()]
            report[f"{function_.__name__} {wanted}"] = [launches(program), max(parts), all(near)]
    return report


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    print(
        json.dumps(
            {f.__name__: f for f in (compiled, graphs, lists, rows, sizes)}[sys.argv[2]](
                *sys.argv[3:]
            )
        )
    )

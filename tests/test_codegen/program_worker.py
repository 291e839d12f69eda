# SPDX-License-Identifier: Apache-2.0
"""Generates the programs of `program_cases`, runs each in Triton's interpreter, and prints what
differs from torch, as JSON.

Run as a program: `program_worker.py DIRECTORY [NAME ...]`, with TRITON_INTERPRET=1.
"""

import copy
import json
import sys
import traceback

import function_cases
import torch
from program_cases import CASES

from bundler.codegen.program import GenerateOptions, generate
from bundler.runtime.program.program_plan import read_plan

assert function_cases, "importing adds its functions"


def difference(found, expected, tolerance):
    """Return why two results differ, None where they do not."""
    if not isinstance(expected, torch.Tensor):
        return None if found == expected else f"{found} is not {expected}"
    if found.dtype != expected.dtype or found.shape != expected.shape:
        return f"{found.dtype} {tuple(found.shape)} is not {expected.dtype} {tuple(expected.shape)}"
    if expected.numel() and found.stride() != expected.stride():
        return f"strides {found.stride()} are not {expected.stride()}"
    exact = not expected.dtype.is_floating_point
    close = (
        torch.equal(found, expected)
        if exact
        else torch.allclose(
            found.double(), expected.double(), rtol=tolerance, atol=tolerance, equal_nan=True
        )
    )
    return (
        None if close else f"largest difference {(found.double() - expected.double()).abs().max()}"
    )


def flat(value):
    return (
        [value]
        if not isinstance(value, (tuple, list))
        else [part for item in value for part in flat(item)]
    )


def run(name, sources):
    function, make, fallbacks, kernels, tolerance = CASES[name]
    program = generate(function, make(), options=GenerateOptions(sources=sources))
    read_plan(program.plan.to_json())  # raises for what no generated program does
    given, reference = make(), copy.deepcopy(make())
    found, expected = program.run(*given), flat(function(*reference))
    problems = [difference(a, b, tolerance) for a, b in zip(found, expected, strict=True)]
    problems += [difference(a, b, tolerance) for a, b in zip(given, reference, strict=True)]
    if len(program.fallbacks) != fallbacks:
        problems.append(f"fallbacks: {program.fallbacks}")
    if kernels is not None and len(program.kernels) != kernels:
        problems.append(
            f"{len(program.kernels)} kernels instead of {kernels}: {list(program.kernels)}"
        )
    return {"problems": [p for p in problems if p], "kernels": list(program.kernels)}


def main(sources, *names):
    report = {}
    for name in names or CASES:
        try:
            report[name] = run(name, sources)
        except Exception:  # noqa: BLE001  # a case that fails must not hide the others
            report[name] = {"problems": [traceback.format_exc(limit=-6)], "kernels": []}
    print(json.dumps(report))


main(*sys.argv[1:])

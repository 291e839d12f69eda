# SPDX-License-Identifier: Apache-2.0
"""Texts of kernels that load their arguments, compute one operator, and store its result."""

import re

from bundler.codegen.kernels.operation_text import OPERATORS, Value, render
from bundler.codegen.loops.data_types import DATA_TYPES, loaded_text, stored_text
from bundler.errors import UnsupportedOperator

BLOCK = 1024
HEADER = """import triton
import triton.language as tl
from triton.language import math as tl_math
from triton.language.extra import libdevice

from bundler.codegen import lib
"""


def argument_dtypes(operator, dtype):
    """Return the dtype of each argument of an operator that is tried for a dtype."""
    if operator.name == "ldexp":
        return [dtype, "int64"]
    conditions = 0 if operator.name.startswith("logical_") else operator.conditions
    return ["bool"] * conditions + [dtype] * (operator.arity - conditions)


def _load(place, dtype):
    return f"tl.load(in{place} + index, mask, other={'0.0' if 'float' in dtype else '0'})"


def body_lines(operator, dtype, options, number=""):
    """Return the statements that compute an operator from what the pointers hold, and the dtype of
    the result.
    """
    dtypes = argument_dtypes(operator, dtype)
    names = [f"tmp{number}{letter}" for letter in "abcd"[: len(dtypes)]]
    lines = [
        f"{name} = {loaded_text(_load(place, given), given)}"
        for place, (name, given) in enumerate(zip(names, dtypes, strict=True))
    ]
    arguments = [Value(name, given) for name, given in zip(names, dtypes, strict=True)]
    result = render(operator.name, arguments, **options)
    return [*lines, f"result{number} = {result.text}"], result.dtype


def kernel_text(name, operator, dtype, options):
    """Return a kernel's text, and the dtype of what it stores."""
    lines, result = body_lines(operator, dtype, options)
    pointers = ", ".join(f"in{place}" for place in range(operator.arity))
    body = "\n    ".join(lines)
    return (
        f"""
@triton.jit
def {name}({pointers}, out, count, BLOCK: tl.constexpr):
    index = tl.arange(0, BLOCK)
    mask = index < count
    {body}
    tl.store(out + index, {stored_text("result", result)}, mask)
""",
        result,
    )


# What an operator of the table needs beside its arguments.
OPTIONS = {
    "device_assert_then": {"message": "never"},
    "inline_asm_elementwise": None,
    "constant": None,
    **{f"{way}_to_int": {"dtype": "int64"} for way in ("trunc", "floor", "ceil", "round")},
}
EIGHTS = ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")


def cells(dtype, backend, eights):
    """Yield each operator with options that a kernel for one dtype can hold, for a target that has
    the named 8-bit floats.
    """
    for operator in OPERATORS.values():
        options = OPTIONS.get(operator.name, {})
        if operator.name == "to_dtype":
            yield from (
                (operator, {"dtype": name})
                for name in DATA_TYPES
                if name not in EIGHTS or name in eights
            )
        elif operator.name == "to_dtype_bitcast":
            same = [
                n
                for n, row in DATA_TYPES.items()
                if row.bits == DATA_TYPES[dtype].bits and n != "bool"
            ]
            yield from (
                (operator, {"dtype": name}) for name in same if name not in EIGHTS or name in eights
            )
        elif operator.name in {"rand", "randn", "randint64"}:
            if dtype == "int64":
                yield operator, {}
        elif options is not None:
            yield operator, {**options, "backend": backend}


def whole_kernel(name, dtype, backend, eights=()):
    """Return the text of a kernel that computes every operator for a dtype, and the dtypes that its
    pointers point to, by name.
    """
    lines, pointers = [], {"in0": dtype, "in1": dtype, "in2": dtype, "in3": dtype}
    for number, (operator, options) in enumerate(cells(dtype, backend, eights)):
        conditions = operator.conditions
        given = ["bool"] * conditions + [
            "int64" if operator.name == "ldexp" and k else dtype
            for k in range(operator.arity - conditions)
        ]
        names = [
            f"mask{k}" if k < conditions else "number" if given[k] != dtype else f"tmp{k}"
            for k in range(len(given))
        ]
        try:
            value = render(
                operator.name, [Value(n, g) for n, g in zip(names, given, strict=True)], **options
            )
        except UnsupportedOperator:
            continue
        out = f"out_{value.dtype}"
        pointers[out] = value.dtype
        lines += [
            f"result{number} = {value.text}",
            (
                f"tl.store({out} + index + {number * BLOCK},"
                f" {stored_text(f'result{number}', value.dtype)})"
            ),
        ]
    loads = [f"tmp{k} = {loaded_text(f'tl.load(in{k} + index)', dtype)}" for k in range(4)]
    loads += ["mask0 = index > 3", "mask1 = index > 5", "number = index.to(tl.int64)"]
    body = "\n    ".join(["index = tl.arange(0, BLOCK)", *loads, *lines])
    return (
        f"\n@triton.jit\ndef {name}({', '.join(pointers)}, BLOCK: tl.constexpr):\n    {body}\n",
        pointers,
    )


def pointer_type(dtype):
    """Return Triton's name of a pointer to a dtype, as a signature has it."""
    short = {
        "float8_e4m3fn": "fp8e4nv",
        "float8_e5m2": "fp8e5",
        "float8_e4m3fnuz": "fp8e4b8",
        "float8_e5m2fnuz": "fp8e5b16",
        "bool": "i1",
        "bfloat16": "bf16",
    }
    return "*" + short.get(
        dtype, re.sub("^float", "fp", re.sub("u?int", lambda found: found[0][0], dtype))
    )

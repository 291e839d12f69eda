# SPDX-License-Identifier: Apache-2.0
"""Texts of kernels that load their arguments, compute one operator, and store its result."""

from bundler.codegen.data_types import loaded_text, stored_text
from bundler.codegen.operation_text import Value, render

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
    """Return the statements that compute an operator from what the pointers hold, and the dtype of the result."""
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

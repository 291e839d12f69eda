# SPDX-License-Identifier: Apache-2.0
"""Runs torch's element-wise functions for each dtype as generated programs in Triton's interpreter:
`graph_operator_worker.py SOURCES`; TRITON_INTERPRET=1.

Prints JSON: for each `function/dtype` an empty text where the program agrees with torch, `torch`
where torch refuses the dtype, `fallback` where the operator is called as it is, else what is wrong.
"""

import json
import sys
import warnings

import torch
import torch.nn.functional as F
from operator_cases import numbers

from bundler.codegen.program import GenerateOptions, generate
from bundler.errors import UnsupportedOperator

DTYPES = (
    "float64",
    "float32",
    "float16",
    "bfloat16",
    "int8",
    "int16",
    "int32",
    "int64",
    "uint8",
    "bool",
)
special = torch.special
_ONE = (
    "abs acos acosh asin asinh atan atanh ceil cos cosh deg2rad erf erfc erfinv exp exp2 expm1"
    " floor frac isfinite isinf isnan isneginf isposinf lgamma log log10 log1p log2 logical_not"
    " logit nan_to_num neg positive rad2deg reciprocal relu round rsqrt sgn sigmoid sign signbit"
    " sin sinc sinh sqrt square tan tanh trunc bitwise_not"
)
_OF_SPECIAL = (
    "bessel_j0 bessel_j1 bessel_y0 bessel_y1 erfcx i0 i1 modified_bessel_i0 modified_bessel_i1"
    " log_ndtr ndtr entr"
)
_OF_LAYERS = (
    "elu gelu hardsigmoid hardswish hardtanh leaky_relu logsigmoid mish relu6 selu silu softplus"
    " softsign tanhshrink hardshrink softshrink"
)
_TWO = (
    "add sub mul true_divide maximum minimum fmax fmin atan2 hypot copysign eq ne lt le gt ge"
    " logical_and logical_or logical_xor bitwise_and bitwise_or bitwise_xor xlogy heaviside"
    " logaddexp logaddexp2 nextafter fmod remainder floor_divide pow bitwise_left_shift"
    " bitwise_right_shift"
)
_DIVISIONS = frozenset({"fmod", "remainder", "floor_divide", "divide_down", "divide_off"})
ONE = {
    **{name: getattr(torch, name) for name in _ONE.split()},
    **{name: getattr(special, name) for name in _OF_SPECIAL.split()},
    **{name: getattr(F, name) for name in _OF_LAYERS.split()},
    "gelu_tanh": lambda a: F.gelu(a, approximate="tanh"),
    "clamp": lambda a: a.clamp(0, 2),
    "clamp_min": lambda a: a.clamp_min(1),
    "add_number": lambda a: a + 1.5,
    "add_integer": lambda a: a + 3,
    "subtract_from": lambda a: 3 - a,
    "divide_number": lambda a: a / 3,
    "power_2": lambda a: a**2,
    "power_3": lambda a: a**3,
    "power_half": lambda a: a**0.5,
    "power_of_2": lambda a: 2 ** a.clamp(0, 6) if a.dtype != torch.bool else a,
    "round_2": lambda a: torch.round(a, decimals=2),
    "round_-1": lambda a: torch.round(a, decimals=-1),
    "mantissa": lambda a: torch.frexp(a)[0],
    "exponent": lambda a: torch.where(torch.isfinite(a), torch.frexp(a)[1], 0),
    "shift_2": lambda a: a << 2,
    "shift_back": lambda a: a >> 1,
    "threshold": lambda a: F.threshold(a, 1, 5),
    "to_bool": lambda a: a.bool(),
    "to_float": lambda a: a.float(),
    "to_half": lambda a: a.half(),
    "to_double": lambda a: a.double(),
    "masked_fill": lambda a: a.masked_fill(a > 0, 1),
    "cube_of_sum": lambda a: (a + a) * a,
}
TWO = {
    **{name: getattr(torch, name) for name in _TWO.split()},
    "add_twice": lambda a, b: torch.add(a, b, alpha=2),
    "subtract_twice": lambda a, b: torch.sub(a, b, alpha=2),
    "divide_down": lambda a, b: torch.div(a, b, rounding_mode="floor"),
    "divide_off": lambda a, b: torch.div(a, b, rounding_mode="trunc"),
    "where": lambda a, b: torch.where(a > b, a, b),
    "ldexp": lambda a, b: torch.ldexp(a, torch.arange(a.numel()) % 40 - 20),
    "ldexp_half": lambda a, b: torch.ldexp(a, torch.arange(a.numel()) % 40 / 2 - 10),
    "ldexp_far": lambda a, b: torch.ldexp(a, torch.arange(a.numel()) % 600 - 300),
    "addcmul": lambda a, b: torch.addcmul(a, a, b, value=2),
    "addcdiv": lambda a, b: torch.addcdiv(a, a, b, value=2),
    "lerp": lambda a, b: torch.lerp(a, b, 0.25),
}
# How far a result may be from torch's, in steps of its dtype: both round, and torch's functions of
# float32 are off by up to 4 steps themselves.
STEPS = {
    torch.float64: 2.0**-52,
    torch.float32: 2.0**-23,
    torch.float16: 2.0**-10,
    torch.bfloat16: 2.0**-7,
}
MOST_STEPS = 12
# torch's own functions differ from each other, or gelu from processor to processor, in which zero
# they choose.
EITHER_ZERO = frozenset({"relu6", "clamp", "fmax", "fmin", "gelu", "softshrink"})
NEAR_ZERO = frozenset({"logaddexp", "logaddexp2"})
# The interpreter rounds, and overflows, between product and sum.
FUSED = frozenset({"add_twice", "subtract_twice"})


def given(name, functions, dtype):
    """Return tensors of all pairs of a dtype's numbers, without those that torch itself leaves
    open.
    """
    tried = numbers(dtype)
    if functions is ONE:
        return [tried]
    left, right = (part.flatten() for part in torch.meshgrid(tried, tried, indexing="ij"))
    keep = torch.ones(left.shape, dtype=torch.bool)
    if name in FUSED and tried.dtype.is_floating_point:
        keep = ~(left.abs() > 1e38) & ~(right.abs() > 1e38)
    if not tried.dtype.is_floating_point and tried.dtype != torch.bool:
        if name in _DIVISIONS:
            keep = (right != 0) & ~((right == -1) & (left == torch.iinfo(tried.dtype).min))
        if name == "addcdiv":
            keep = right != 0
    return [left[keep], right[keep]]


def verdict(name, functions, dtype, sources):
    """Return what is wrong with one function for one dtype."""
    function, tensors = functions[name], given(name, functions, dtype)
    try:
        right = function(*tensors)
    except (RuntimeError, TypeError, NotImplementedError):
        return "torch"
    try:
        program = generate(function, tensors, options=GenerateOptions(sources=sources))
    except UnsupportedOperator as error:
        return f"refused: {error.message}"
    if program.fallbacks:
        return f"fallback: {program.fallbacks[0].reason}"
    (got,) = program.run(*tensors)
    return compared(name, got, right, exact(function, tensors, right), tensors)


def exact(function, tensors, right):
    """Return what torch computes in float64."""
    if not right.dtype.is_floating_point:
        return None
    try:
        # Integers are rounded to the result's dtype first.
        return function(
            *((t if t.dtype.is_floating_point else t.to(right.dtype)).double() for t in tensors)
        ).double()
    except RuntimeError:
        return None


def compared(name, got, right, wide, tensors):
    if (got.dtype, got.shape) != (right.dtype, right.shape):
        return f"{got.dtype} instead of {right.dtype}"
    if not right.dtype.is_floating_point:
        wrong = got != right
    else:
        one, other = got.double(), right.double()
        if name in EITHER_ZERO:
            one, other = torch.where(one == 0, 0.0, one), torch.where(other == 0, 0.0, other)
        limit = STEPS[right.dtype]
        near = [
            (one - each).abs()
            <= MOST_STEPS * limit * each.abs()
            + limit * (name in NEAR_ZERO)
            + torch.finfo(right.dtype).tiny
            for each in ((other,) if wide is None else (other, wide))
        ]
        same = (one == other) & ((one != 0) | (one.signbit() == other.signbit()))
        same |= torch.stack(near).any(0) & ((one != 0) | (name in NEAR_ZERO))
        same |= (one == 0) & (other == 0) & (one.signbit() == other.signbit())
        if wide is not None:
            # Where torch overflows on the way, or flushes, the exact result counts.
            same |= (one == wide.to(right.dtype).double()) & (
                (one != 0) | (one.signbit() == wide.signbit())
            )
        # Some of torch's vectorized functions give NaN where their float64 does not.
        open_ = one.isnan() & wide.isnan() if wide is not None else torch.zeros_like(same)
        wrong = ~same & ~(one.isnan() & other.isnan()) & ~open_
    if not wrong.any():
        return ""
    place = int(wrong.nonzero()[0])
    return (
        f"{int(wrong.sum())} of {wrong.numel()}, as {[t[place].item() for t in tensors]}: got"
        f" {got[place].item()}, expected {right[place].item()}"
    )


def main(sources, *chosen):
    warnings.simplefilter("ignore")
    found = {}
    for functions in (ONE, TWO):
        for name in functions:
            for dtype in DTYPES:
                if not chosen or name in chosen or dtype in chosen:
                    try:
                        found[f"{name}/{dtype}"] = verdict(name, functions, dtype, sources)
                    except Exception as error:  # noqa: BLE001  (whatever is raised is the cell's verdict)
                        found[f"{name}/{dtype}"] = f"{type(error).__name__}: {error}"[:300]
    print(json.dumps(found))


main(*sys.argv[1:])

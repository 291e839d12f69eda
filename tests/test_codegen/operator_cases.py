# SPDX-License-Identifier: Apache-2.0
"""The table of operators by dtypes: numbers to try, and what torch says of them.

`operator_worker.py` computes the cells in Triton's interpreter; `test_operator_compiles.py` builds
them.
"""

import itertools
import math
from dataclasses import dataclass

import numpy as np
import torch

from bundler.codegen.loops.data_types import DATA_TYPES, NumberKind

NAN, INFINITY = math.nan, math.inf
#: Triton's interpreter has no such types; a compile test has them.
NOT_INTERPRETED = ("float8_e4m3fnuz", "float8_e5m2fnuz")
FLOAT_NUMBERS = (
    0.0,
    -0.0,
    1.0,
    -1.0,
    0.5,
    -0.5,
    1.5,
    -1.5,
    2.5,
    2.0,
    -2.0,
    3.0,
    -3.0,
    math.pi,
    10.0,
    -7.25,
    100.5,
    1e-3,
    -0.1,
    0.999,
    5.877e-39,
    1e-40,
    3e38,
    -65504.0,
    INFINITY,
    -INFINITY,
    NAN,
    0.7,
)
SMALL_FLOATS = (0.0, -0.0, 1.0, -1.0, 0.5, 1.5, -1.5, 2.0, 3.0, -3.0, 10.0, -7.0, 0.1, 96.0, -0.02)
# Names that only to_dtype and its like take an option for.
CAST_TARGETS = (
    "float32",
    "float16",
    "bfloat16",
    "float64",
    "int8",
    "int16",
    "int32",
    "int64",
    "uint8",
    "bool",
    "float8_e4m3fn",
    "float8_e5m2",
)


def torch_dtype(name):
    return getattr(torch, name)


def compute_dtype(name):
    """Return the dtype of torch that the generator computes a dtype in."""
    return (
        torch.float32
        if DATA_TYPES[name].is_half or DATA_TYPES[name].kind is NumberKind.FLOAT8
        else torch_dtype(name)
    )


def numbers(name):
    """Return the numbers of a dtype that are tried: zeros of both signs, ties, extremes,
    infinities, NaN.
    """
    row = DATA_TYPES[name]
    if row.kind is NumberKind.BOOL:
        return torch.tensor([False, True])
    if row.is_integer:
        low, high = torch.iinfo(torch_dtype(name)).min, torch.iinfo(torch_dtype(name)).max
        near = [0, 1, 2, 3, 5, 7, 8, 10, 31, 32, 63, 64, 100, high, high - 1, low, low + 1]
        near += [-1, -2, -3, -7, -8, -10, -100] if row.kind is NumberKind.SIGNED else []
        return torch.tensor(sorted(set(near)), dtype=torch_dtype(name))
    chosen = torch.tensor(
        SMALL_FLOATS if row.kind is NumberKind.FLOAT8 else FLOAT_NUMBERS, dtype=torch.float64
    )
    if name == "bfloat16":
        # The interpreter takes subnormal numbers of bfloat16 for zero; a GPU does not.
        chosen = chosen[(chosen.abs() > 1.2e-38) | (chosen == 0) | chosen.isnan()]
    return chosen.to(torch_dtype(name))


def arguments(name, arity, condition):
    """Return that many tensors of a dtype in which every pair of numbers stands side by side, the
    first a bool if it is a condition.
    """
    tried = numbers(name)
    if arity - condition == 1:
        tensors = [tried]
    else:
        pairs = torch.tensor(list(itertools.product(range(len(tried)), repeat=2)))
        tensors = [tried[pairs[:, 0]], tried[pairs[:, 1]], tried[pairs.sum(1) % len(tried)]][
            : arity - condition
        ]
    if condition:
        tensors.insert(0, torch.arange(len(tensors[0])) % 3 == 0)
    return tensors


def arguments_of(operator, name):
    """Return tensors to call an operator of the table with, for a dtype."""
    if operator.name == "ldexp":
        pairs = list(
            itertools.product(
                numbers(name).tolist(), (0, 1, -1, 30, -40, 150, -160, 2000, -2000, 2**31 - 1)
            )
        )
        first, second = zip(*pairs, strict=True)
        return [
            torch.tensor(first, dtype=torch.float64).to(torch_dtype(name)),
            torch.tensor(second, dtype=torch.int64),
        ]
    if operator.name == "device_assert_then":
        return [torch.ones(len(numbers(name)), dtype=torch.bool), numbers(name)]
    if operator.name.startswith("logical_"):
        return arguments(name, operator.arity, 0)
    if operator.name == "fma":
        # The interpreter rounds the product too, so only what needs no rounding can be compared.
        tensors = arguments(name, 3, 0)
        exact = torch.stack(
            [
                (t.double() * 2 == (t.double() * 2).round()) & (t.double().abs() < 1000)
                for t in tensors
            ]
        ).all(0)
        return [t[exact] for t in tensors] if DATA_TYPES[name].kind is NumberKind.FLOAT else tensors
    return arguments(name, operator.arity, operator.conditions)


# ---------------------------------------------------------------------------------- what torch says


@dataclass(frozen=True)
class Reference:
    """What torch computes for an operator.

    `wide`: in float64, and the kernel may be off by rounding; otherwise in the kernel's own width,
    bit for bit but for NaN's. `smallest`: how far a result that should be close to zero may be from
    it. `options`: what the operator needs. `avoid`: where torch's answer is not defined, from the
    arguments.
    """

    compute: object
    wide: bool = False
    options: tuple = ({},)
    smallest: float = 0.0
    avoid: object = None


def _wide(compute):
    return Reference(compute, wide=True)


def _by_kind(floats, integers, bools=None):
    def compute(*tensors):
        first = tensors[0]
        if first.dtype == torch.bool:
            return (bools or integers)(*tensors)
        return (floats if first.dtype.is_floating_point else integers)(*tensors)

    compute.takes_unsigned = getattr(integers, "takes_unsigned", False)
    return compute


def _by_integers(function):
    """Return a function of integer tensors that computes with Python's integers, modulo the width;
    torch's own traps at the least integer over -1.
    """

    def compute(a, b):
        bits = torch.iinfo(a.dtype).bits
        out = [
            function(one, other, bits) % 2**bits
            for one, other in zip(a.tolist(), b.tolist(), strict=True)
        ]
        least = 2 ** (bits - 1) if a.dtype.is_signed else 2**bits
        return torch.tensor(
            [number - 2**bits if number >= least else number for number in out], dtype=a.dtype
        )

    compute.takes_unsigned = True
    return compute


def _floor_divide(a, b, bits):
    return a // b if b else 0


def _truncated_divide(a, b, bits):
    return (abs(a) // abs(b)) * (-1 if (a < 0) != (b < 0) else 1) if b else 0


def _remainder(a, b, bits):
    return a - _floor_divide(a, b, bits) * b


def _truncated_remainder(a, b, bits):
    return a - _truncated_divide(a, b, bits) * b


def _integer_power(base, exponent, bits):
    if exponent >= 0:
        return pow(base, exponent, 2**bits)
    return {1: 1, -1: -1 if exponent % 2 else 1}.get(base, 0)


def _left(value, count, bits):
    return value << count if 0 <= count < bits else 0


def _right(value, count, bits):
    return value >> (count if 0 <= count < bits else bits)


def _casts():
    return tuple({"dtype": name} for name in CAST_TARGETS)


def _cast(a, dtype):
    """Return numbers in the dtype that the target is computed in; whoever compares them rounds."""
    return a.to(compute_dtype(dtype))


def _rounded(function):
    """Return a function that rounds floats to whole numbers and converts them."""
    return lambda a, dtype: _cast(function(a) if a.dtype.is_floating_point else a, dtype)


def _cannot_be_held(a, dtype):
    """Where C leaves a conversion open, or the interpreter errs: a float outside the integers'
    range, and what an 8-bit float has to round.
    """
    row = DATA_TYPES[dtype]
    if row.kind is NumberKind.FLOAT8:
        wide = a.double()
        return wide.to(torch_dtype(dtype)).double() != wide
    if dtype == "bfloat16":
        return (a.double().abs() < 1.2e-38) & (a != 0)
    if not a.dtype.is_floating_point or not row.is_integer:
        return torch.zeros(a.shape, dtype=torch.bool)
    own, limits = (
        torch.iinfo(torch_dtype(dtype)),
        torch.iinfo(torch.int32 if row.bits < 64 else torch.int64),
    )
    low = own.min if row.kind is NumberKind.SIGNED else limits.min
    return ~((a.double() > low - 1.0) & (a.double() < float(own.max)))


def _cannot_be_read(a, dtype):
    """Which bits the interpreter takes for another number than they are: subnormal numbers of
    bfloat16, NaN of 8-bit floats.
    """
    bits = a.view(torch_dtype(dtype))
    if dtype == "bfloat16":
        return (bits.double().abs() < 1.2e-38) & (bits != 0)
    if DATA_TYPES[dtype].kind is NumberKind.FLOAT8:
        return ~torch.isfinite(bits.double())
    return torch.zeros(a.shape, dtype=torch.bool)


def _same(*tensors):
    return tensors[0]


def _fmod(a, b):
    # torch's own is NaN where the quotient is very large.
    with np.errstate(all="ignore"):
        return torch.from_numpy(np.fmod(a.numpy(), b.numpy()))


def _remainder_of_floats(a, b):
    rest = _fmod(a, b)
    return torch.where((rest != 0) & ((rest < 0) != (b < 0)), rest + b, rest)


def _sign(a):
    return torch.where(a != a, 0, torch.sign(a)).to(a.dtype)


def _signed(function, unsigned):
    """Return a function that, of unsigned integers, computes something else."""

    def compute(a):
        return function(a) if a.dtype.is_signed and a.dtype != torch.bool else unsigned(a)

    compute.takes_unsigned = True
    return compute


def _ldexp(a, b):
    with np.errstate(all="ignore"):
        a = a if a.dtype.is_floating_point else a.float()
        return torch.from_numpy(np.ldexp(a.numpy(), b.clamp(-5000, 5000).to(torch.int32).numpy()))


def _never(a):
    return torch.zeros(a.shape, dtype=torch.bool)


TO_INTEGERS = ({"dtype": "int32"}, {"dtype": "int64"})
BITCASTS = tuple({"dtype": name} for name in DATA_TYPES if name not in {"bool", *NOT_INTERPRETED})
LEFT, RIGHT = Reference(_by_integers(_left)), Reference(_by_integers(_right))
MATHEMATICS = {
    **{
        n: getattr(torch, n)
        for n in (
            "exp",
            "exp2",
            "expm1",
            "log",
            "log1p",
            "log2",
            "log10",
            "sin",
            "cos",
            "tan",
            "sinh",
            "cosh",
            "tanh",
            "asin",
            "acos",
            "atan",
            "asinh",
            "acosh",
            "atanh",
            "erf",
            "erfc",
            "erfinv",
            "lgamma",
            "rsqrt",
            "sqrt",
            "sigmoid",
            "atan2",
            "hypot",
            "copysign",
            "reciprocal",
        )
    },
    "erfcx": torch.special.erfcx,
    "i0": torch.special.i0,
    "i1": torch.special.i1,
    "modified_bessel_i0": torch.special.i0,
    "modified_bessel_i1": torch.special.i1,
    "bessel_j0": torch.special.bessel_j0,
    "bessel_j1": torch.special.bessel_j1,
    "bessel_y0": torch.special.bessel_y0,
    "bessel_y1": torch.special.bessel_y1,
    "truediv": torch.div,
    "int_truediv": torch.div,
    "div_rn": torch.div,
    "mul_rn": torch.mul,
}
REFERENCES = {
    **{name: _wide(function) for name, function in MATHEMATICS.items()},
    **{
        n: Reference(getattr(torch, n))
        for n in (
            "eq",
            "ne",
            "lt",
            "gt",
            "le",
            "ge",
            "add",
            "mul",
            "sub",
            "maximum",
            "minimum",
            "bitwise_and",
            "bitwise_or",
            "bitwise_xor",
            "bitwise_not",
            "logical_and",
            "logical_or",
            "logical_xor",
            "logical_not",
            "nextafter",
        )
    },
    "and_": Reference(torch.bitwise_and),
    "or_": Reference(torch.bitwise_or),
    "xor": Reference(torch.bitwise_xor),
    "bitwise_left_shift": LEFT,
    "lshift": LEFT,
    "bitwise_right_shift": RIGHT,
    "rshift": RIGHT,
    "neg": Reference(torch.neg),
    "abs": Reference(_signed(torch.abs, _same)),
    "relu": Reference(_signed(torch.relu, _same)),
    "sign": Reference(_signed(_sign, lambda a: (a != 0).to(a.dtype))),
    "square": Reference(lambda a: a * a),
    # The exponential overflows where the result is a subnormal number.
    "sigmoid": Reference(torch.sigmoid, wide=True, smallest=1.2e-38),
    "fma": Reference(lambda a, b, c: a * b + c, wide=True),
    "floordiv": Reference(
        _by_kind(lambda a, b: torch.div(a, b, rounding_mode="floor"), _by_integers(_floor_divide))
    ),
    "truncdiv": Reference(_by_integers(_truncated_divide)),
    "remainder": Reference(_by_kind(_remainder_of_floats, _by_integers(_remainder))),
    "mod": Reference(_by_kind(_fmod, _by_integers(_truncated_remainder))),
    "fmod": Reference(_by_kind(_fmod, _by_integers(_truncated_remainder))),
    "floor": Reference(_by_kind(torch.floor, _same)),
    "ceil": Reference(_by_kind(torch.ceil, _same)),
    "trunc": Reference(_by_kind(torch.trunc, _same)),
    "round": Reference(_by_kind(torch.round, _same)),
    "isnan": Reference(_by_kind(torch.isnan, _never)),
    "isinf": Reference(_by_kind(torch.isinf, _never)),
    "signbit": Reference(_signed(torch.signbit, _never)),
    "pow": Reference(
        _by_kind(lambda a, b: torch.pow(a.double(), b.double()), _by_integers(_integer_power)),
        wide=True,
    ),
    "frexp_mantissa": Reference(lambda a: torch.frexp(a).mantissa),
    "frexp_exponent": Reference(
        lambda a: torch.where(torch.isfinite(a), torch.frexp(a).exponent, 0).int()
    ),
    "ldexp": Reference(_ldexp),
    "identity": Reference(_same),
    "where": Reference(torch.where),
    "masked": Reference(torch.where),
    "device_assert_then": Reference(lambda condition, a: a, options=({"message": "never"},)),
    "to_dtype": Reference(
        _cast, options=(*_casts(), {"dtype": "float16", "rounded": True}), avoid=_cannot_be_held
    ),
    "trunc_to_int": Reference(_rounded(torch.trunc), options=TO_INTEGERS, avoid=_cannot_be_held),
    "floor_to_int": Reference(_rounded(torch.floor), options=TO_INTEGERS, avoid=_cannot_be_held),
    "ceil_to_int": Reference(_rounded(torch.ceil), options=TO_INTEGERS, avoid=_cannot_be_held),
    "round_to_int": Reference(_rounded(torch.round), options=TO_INTEGERS, avoid=_cannot_be_held),
    "to_dtype_bitcast": Reference(
        lambda a, dtype: a.view(torch_dtype(dtype)), options=BITCASTS, avoid=_cannot_be_read
    ),
}
#: Operators whose results a test of their own looks at.
ELSEWHERE = {
    "constant": "test_literals.py",
    "inline_asm_elementwise": "test_operator_compiles.py",
    "rand": "lib_number_cases.py",
    "randn": "lib_number_cases.py",
    "randint64": "lib_number_cases.py",
}


def expected(operator, dtype, tensors, options):
    """Return what an operator should compute, in float64 where rounding is allowed, else in the
    dtype it is computed in; and where that is undefined.
    """
    reference = REFERENCES[operator.name]
    given = {key: value for key, value in options.items() if key == "dtype"}
    if operator.name == "to_dtype_bitcast":
        if DATA_TYPES[dtype].bits != DATA_TYPES[given["dtype"]].bits:
            raise AssertionError("the generator refuses a bitcast between widths")
        return reference.compute(*tensors, **given), reference.avoid(*tensors, **given)
    kept = len(tensors) - 1 if operator.name == "ldexp" else len(tensors)
    computed = [
        t if place < _conditions(operator) or place >= kept else _computed(t, dtype, operator)
        for place, t in enumerate(tensors)
    ]
    undefined = reference.avoid(*computed, **given) if reference.avoid else None
    if reference.wide and computed[-1].dtype.is_floating_point:
        computed = [t if t.dtype == torch.bool else t.double() for t in computed]
    if (
        dtype in NOT_IN_TORCH
        and not computed[-1].dtype.is_floating_point
        and computed[-1].dtype != torch.bool
    ):
        return _as_signed(reference, operator, computed, given), undefined
    return reference.compute(*computed, **given), undefined


# torch has next to no operators for these.
NOT_IN_TORCH = ("uint16", "uint32", "uint64")
_ORDERED = ("lt", "gt", "le", "ge", "maximum", "minimum")


def _as_signed(reference, operator, tensors, given):
    """Return what an operator computes of unsigned integers, by way of int64, whose order is that
    of uint64 once the sign bits are turned.
    """
    own = tensors[-1].dtype
    if "dtype" in given or getattr(reference.compute, "takes_unsigned", False):
        return reference.compute(*tensors, **given)
    if own != torch.uint64:
        result = reference.compute(*(t.long() if t.dtype == own else t for t in tensors), **given)
        return result.to(own) if result.dtype == torch.int64 else result
    turn = -(2**63) if operator.name in _ORDERED else 0
    result = reference.compute(
        *(t.view(torch.int64) ^ turn if t.dtype == own else t for t in tensors), **given
    )
    return (result ^ turn).view(own) if result.dtype == torch.int64 else result


def _conditions(operator):
    return 0 if operator.name.startswith("logical_") else operator.conditions


def _computed(tensor, dtype, operator):
    if operator.name.startswith("logical_"):
        return tensor != 0
    if operator.as_float and not tensor.dtype.is_floating_point:
        return tensor.float()
    return tensor.to(compute_dtype(dtype))

# SPDX-License-Identifier: Apache-2.0
"""`install`: the functions of `libdevice` for Triton's interpreter, in which Triton's own do
nothing and return None.

`bundler/codegen/lib.py`, which every generated kernel's module imports, has them installed in a
process that interprets (`tuner_toolchain.prepare_interpreter`). They compute in float64 and round
once. A call with arguments that the library of a GPU does not take is a TypeError, as it is one for
a GPU. Needs numpy, which the interpreter imports itself, and torch, whose tensors kernels are given.
"""

from __future__ import annotations

import ctypes
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.language.extra import libdevice
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

Compute = Callable[..., Any]

_SAME_TEXT = """
    abs acos acosh asin asinh atan atanh ceil cos cosh erf erfc erfinv exp exp2 expm1 floor lgamma
    log log10 log1p log2 rsqrt sin sinh sqrt tan tanh trunc atan2 copysign hypot pow
"""
_SAME_NAME = _SAME_TEXT.split()
_RENAMED = {"nearbyint": "round", "rint": "round", "mul_rn": "mul", "div_rn": "div"}
_SPECIAL = {
    "cyl_bessel_i0": "i0",
    "cyl_bessel_i1": "i1",
    "erfcx": "erfcx",
    "j0": "bessel_j0",
    "j1": "bessel_j1",
    "y0": "bessel_y0",
    "y1": "bessel_y1",
}
_TWO_ARGUMENTS = frozenset(
    {"atan2", "copysign", "div_rn", "fmod", "hypot", "mul_rn", "nextafter", "pow"}
)


def install() -> None:
    """Replace the functions of `libdevice` in this process, which interprets, and mend the
    interpreter's atomics, casts and products.
    """
    for name, function in functions().items():
        if _does_nothing(getattr(libdevice, name, None)):
            setattr(libdevice, name, function)
    mended = {
        "create_atomic_rmw": _atomic,
        "cast_impl": _nearest,
        "create_dot": _dot,
        "create_splat": _spread,
    }
    for name, mend in mended.items():
        theirs = getattr(InterpreterBuilder, name)
        if theirs.__module__ != __name__:
            setattr(InterpreterBuilder, name, mend(theirs))


# Bits of bfloat16.
_NAN = 0x7FC0


def functions() -> Mapping[str, Compute]:
    """Return the functions, by the name that `libdevice` has for each."""
    table: dict[str, Compute] = {name: getattr(torch, name) for name in _SAME_NAME}
    table |= {name: getattr(torch, torchs) for name, torchs in _RENAMED.items()}
    table |= {name: getattr(torch.special, torchs) for name, torchs in _SPECIAL.items()}
    table |= {"round": _round_away, "fmod": _fmod}
    found = {name: _of_floats(name, compute) for name, compute in table.items()}
    # A step to the next float is one of the argument's own width.
    found["nextafter"] = _of_floats("nextafter", torch.nextafter, widened=False)
    found["ldexp"] = _ldexp
    return found


def _does_nothing(function: Any) -> bool:
    """Whether a function has no body: one that a later Triton has for its interpreter calls
    something.
    """
    code = getattr(inspect.unwrap(function), "__code__", None) if callable(function) else None
    return code is None or not code.co_names


def _fmod(x: Any, y: Any) -> Any:
    # torch's own is NaN where the quotient is very large.

    return torch.from_numpy(np.fmod(x.numpy(), y.numpy()))


def _round_away(x: Any) -> Any:
    """Round, away from zero at halves."""
    return torch.trunc(x + torch.copysign(torch.full_like(x, 0.5), x))


def _of_floats(name: str, compute: Compute, *, widened: bool = True) -> Compute:
    """Return a function of blocks of one float dtype, computed by torch, in float64 where
    `widened`.
    """
    arity = 2 if name in _TWO_ARGUMENTS else 1

    def call(*given: Any, _semantic: Any = None) -> Any:
        arguments = [_block(value) for value in given]
        dtypes = {argument.dtype.scalar for argument in arguments}
        if len(arguments) != arity or len(dtypes) != 1 or not all(map(_is_float, dtypes)):
            raise _refused(name, arguments)
        numbers = [argument.handle.data for argument in arguments]
        wide = (n.astype(np.float64) if widened else np.ascontiguousarray(n) for n in numbers)
        with np.errstate(all="ignore"):
            computed = compute(*map(torch.from_numpy, wide)).numpy().astype(numbers[0].dtype)
        return _result(arguments, computed, dtypes.pop())

    return call


def _ldexp(x: Any, exponent: Any, _semantic: Any = None) -> Any:

    arguments = [_block(x), _block(exponent)]
    number, power = arguments
    if not _is_float(number.dtype.scalar) or str(power.dtype.scalar) != "int32":
        raise _refused("ldexp", arguments)
    with np.errstate(all="ignore"):
        computed = np.ldexp(number.handle.data, power.handle.data)
    return _result(arguments, computed, number.dtype.scalar)


def _is_float(dtype: Any) -> bool:
    return str(dtype) in {"fp32", "fp64"}


def _refused(name: str, arguments: Sequence[Any]) -> TypeError:
    got = ", ".join(str(argument.dtype) for argument in arguments)
    return TypeError(f"libdevice.{name} does not take {got}")


def _block(value: Any) -> Any:
    """Return an argument as the interpreter's tensor; a number becomes one of float32, as Triton
    makes it.
    """
    value = value.value if isinstance(value, tl.constexpr) else value
    if isinstance(value, tl.tensor):
        return value
    return tl.tensor(TensorHandle(np.array([value], dtype=np.float32), tl.float32), tl.float32)


def _result(arguments: Sequence[Any], data: Any, dtype: Any) -> Any:

    shape = np.broadcast_shapes(*(argument.handle.data.shape for argument in arguments))
    blocks = any(argument.type.is_block() for argument in arguments)
    handle = TensorHandle(np.broadcast_to(data, shape).copy(), dtype)
    return tl.tensor(handle, tl.block_type(dtype, list(shape)) if blocks else dtype)


def _atomic(original: Compute) -> Compute:
    """Return the interpreter's atomic operation, which reads wrong memory of blocks that were
    broadcast, and has no sums of bfloat16.
    """

    def laid_out(part: Any) -> Any:
        is_block = isinstance(part, TensorHandle)
        return TensorHandle(np.ascontiguousarray(part.data), part.dtype) if is_block else part

    def call(builder: Any, operation: Any, pointer: Any, value: Any, mask: Any, *rest: Any) -> Any:
        parts = [laid_out(part) for part in (pointer, value, mask)]
        if value.dtype.scalar == tl.bfloat16 and operation.name == "FADD":
            return TensorHandle(_bfloat16_sums(*(part.data for part in parts)), tl.bfloat16)
        return original(builder, operation, *parts, *rest)

    return call


def _bfloat16_sums(pointers: Any, values: Any, mask: Any) -> Any:
    """Add bits of bfloat16 to those at addresses, one after another, each sum rounded; returns what
    was there.
    """
    added = torch.from_numpy(values.view(np.int16).copy()).view(torch.bfloat16).float().ravel()
    before = np.zeros(pointers.size, dtype=np.uint16)
    for place in np.flatnonzero(np.broadcast_to(mask, pointers.shape)):
        held = ctypes.c_int16.from_address(int(pointers.flat[place]))
        before[place] = held.value & 0xFFFF
        number = torch.tensor([held.value], dtype=torch.int16).view(torch.bfloat16)
        total = (number.float() + added[place]).to(torch.bfloat16)
        held.value = int(total.view(torch.int16).item())
    return before.reshape(pointers.shape)


def _nearest(original: Compute) -> Compute:
    """Return the interpreter's cast, which cuts off what bfloat16 has no bits for: a GPU rounds to
    the nearest, as torch does.
    """

    def call(builder: Any, source: Any, to: Any) -> Any:
        if (source.dtype.scalar, to.scalar) != (tl.float32, tl.bfloat16):
            return original(builder, source, to)
        rounded = torch.from_numpy(np.array(source.data)).to(torch.bfloat16)
        bits = rounded.view(torch.int16).numpy().view(np.uint16)
        # torch's own NaN has other bits in its vector instructions than one by one.
        bits = np.where(np.isnan(source.data), np.uint16(_NAN), bits)
        return TensorHandle(bits, to.scalar)

    return call


def _dot(original: Compute) -> Compute:
    """Return the interpreter's product of matrices, which multiplies the bits of bfloat16, and
    warns of infinities.
    """

    def widened(operand: Any) -> Any:
        if operand.dtype.scalar != tl.bfloat16:
            return operand
        bits = operand.data.astype(np.uint32) << np.uint32(16)
        return TensorHandle(bits.view(np.float32), tl.float32)

    def call(builder: Any, left: Any, right: Any, *rest: Any) -> Any:
        with np.errstate(all="ignore"):
            return original(builder, widened(left), widened(right), *rest)

    return call


def _spread(original: Compute) -> Compute:
    """Return what makes a block of a number, with the truth of two floats compared as a truth: the
    interpreter's has the floats' type.
    """

    def call(builder: Any, to: Any, source: Any) -> Any:
        is_truth = source.data.dtype == bool
        return original(builder, to, TensorHandle(source.data, tl.int1) if is_truth else source)

    return call

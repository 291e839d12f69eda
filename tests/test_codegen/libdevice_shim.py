# SPDX-License-Identifier: Apache-2.0
"""Triton's device library for its interpreter, where the functions of `libdevice` return None.

`install()` replaces them in this process by functions that compute in float64 and round once, with torch, so that what a test compares is the
kernel and not the library. A call with arguments that the real library does not take is a TypeError.
"""

import numpy as np
import torch
import triton.language as tl
from triton.language.extra import libdevice
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

FLOATS = (tl.float32, tl.float64)


def _fmod(x, y):
    # torch's own is NaN where the quotient is very large.
    return torch.from_numpy(np.fmod(x.numpy(), y.numpy()))


def _round(x):
    # libdevice.round goes away from zero at halves.
    return torch.trunc(x + torch.copysign(torch.full_like(x, 0.5), x))


UNARY = {
    "abs": torch.abs, "acos": torch.acos, "acosh": torch.acosh, "asin": torch.asin, "asinh": torch.asinh, "atan": torch.atan, "atanh": torch.atanh,
    "ceil": torch.ceil, "cos": torch.cos, "cosh": torch.cosh, "cyl_bessel_i0": torch.special.i0, "cyl_bessel_i1": torch.special.i1,
    "erf": torch.erf, "erfc": torch.erfc, "erfcx": torch.special.erfcx, "erfinv": torch.erfinv, "exp": torch.exp, "exp2": torch.exp2, "expm1": torch.expm1,
    "floor": torch.floor, "j0": torch.special.bessel_j0, "j1": torch.special.bessel_j1, "lgamma": torch.lgamma, "log": torch.log, "log10": torch.log10,
    "log1p": torch.log1p, "log2": torch.log2, "nearbyint": torch.round, "rint": torch.round, "round": _round, "rsqrt": torch.rsqrt, "sin": torch.sin,
    "sinh": torch.sinh, "sqrt": torch.sqrt, "tan": torch.tan, "tanh": torch.tanh, "trunc": torch.trunc, "y0": torch.special.bessel_y0,
    "y1": torch.special.bessel_y1,
}  # fmt: skip
BINARY = {
    "atan2": torch.atan2, "copysign": torch.copysign, "fmod": _fmod, "hypot": torch.hypot, "mul_rn": torch.mul, "div_rn": torch.div, "pow": torch.pow,
}  # fmt: skip
# A step to the next float is one of the argument's own width.
OWN_WIDTH = {"nextafter": torch.nextafter}


def _tensor(value):
    """Return an argument as the interpreter's tensor."""
    value = value.value if isinstance(value, tl.constexpr) else value
    if isinstance(value, tl.tensor):
        return value
    return tl.tensor(TensorHandle(np.array([value], dtype=np.float32), tl.float32), tl.float32)


def _result(arguments, data, dtype):
    shape = np.broadcast_shapes(*(argument.handle.data.shape for argument in arguments))
    blocks = any(argument.type.is_block() for argument in arguments)
    data = np.broadcast_to(data, shape).copy()
    return tl.tensor(TensorHandle(data, dtype), tl.block_type(dtype, list(shape)) if blocks else dtype)


def _function(name, compute, arity, own_width=False):
    def call(*arguments, _semantic=None):
        arguments = [_tensor(argument) for argument in arguments]
        dtypes = {argument.dtype.scalar for argument in arguments}
        if len(arguments) != arity or len(dtypes) != 1 or not dtypes <= set(FLOATS):
            raise TypeError(f"libdevice.{name} does not take {[str(argument.dtype) for argument in arguments]}")
        (dtype,) = dtypes
        numbers = [argument.handle.data for argument in arguments]
        wide = [torch.from_numpy(np.ascontiguousarray(n if own_width else n.astype(np.float64))) for n in numbers]
        with np.errstate(all="ignore"):
            computed = compute(*wide).numpy().astype(numbers[0].dtype)
        return _result(arguments, computed, dtype)

    return call


def _ldexp(x, exponent, _semantic=None):
    x, exponent = _tensor(x), _tensor(exponent)
    if x.dtype.scalar not in FLOATS or exponent.dtype.scalar != tl.int32:
        raise TypeError(f"libdevice.ldexp does not take {x.dtype}, {exponent.dtype}")
    with np.errstate(all="ignore"):
        return _result([x, exponent], np.ldexp(x.handle.data, exponent.handle.data), x.dtype.scalar)


def _atomic(original):
    """Return the interpreter's atomic operation, which takes a block that was broadcast for one whose elements lie one after another."""

    def call(builder, operation, pointer, value, mask, sem, scope):
        parts = (TensorHandle(np.ascontiguousarray(part.data), part.dtype) for part in (pointer, value, mask))
        return original(builder, operation, *parts, sem, scope)

    return call


def install():
    """Replace the functions of `libdevice` in this process, and mend the interpreter's atomics."""
    if InterpreterBuilder.create_atomic_rmw.__module__ != __name__:
        InterpreterBuilder.create_atomic_rmw = _atomic(InterpreterBuilder.create_atomic_rmw)
    for name, compute in UNARY.items():
        setattr(libdevice, name, _function(name, compute, 1))
    for name, compute in BINARY.items():
        setattr(libdevice, name, _function(name, compute, 2))
    for name, compute in OWN_WIDTH.items():
        setattr(libdevice, name, _function(name, compute, 2, own_width=True))
    libdevice.ldexp = _ldexp

# SPDX-License-Identifier: Apache-2.0
"""Kernels with every kind of argument; loaded by path, in a process that has Triton."""

import triton
import triton.language as tl


@triton.jit
def double(x):
    return x + x


@triton.jit
def add(x, y, out, n, BLOCK: tl.constexpr = 64):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = i < n
    tl.store(out + i, tl.load(x + i, mask=mask) + tl.load(y + i, mask=mask), mask=mask)


@triton.jit
def integers(
    out,
    a: tl.int8,
    b: tl.int16,
    c: tl.int32,
    d: tl.int64,
    e: tl.uint8,
    f: tl.uint16,
    g: tl.uint32,
    h: tl.uint64,
    i: tl.int1,
):
    tl.store(out, a.to(tl.int64) + b + c + d)
    tl.store(out + 1, (e.to(tl.uint64) + f + g + h).to(tl.int64))
    tl.store(out + 2, i.to(tl.int64))


@triton.jit
def floats(out, a: tl.float16, b: tl.bfloat16, c: tl.float32, d: tl.float64, e):
    tl.store(out, a.to(tl.float64))
    tl.store(out + 1, b.to(tl.float64))
    tl.store(out + 2, c.to(tl.float64))
    tl.store(out + 3, d + e)


@triton.jit
def loose(out, flag, scale, count):
    """Nothing is annotated: a bool, a float and an int as they come."""
    tl.store(out, tl.where(flag, scale * count, 0.0))


@triton.jit
def optional(x, bias, out, scale: tl.constexpr, BLOCK: tl.constexpr = 32):
    i = tl.arange(0, BLOCK)
    value = tl.load(x + i)
    if bias is not None:
        value += tl.load(bias + i)
    if scale is not None:
        value *= scale
    tl.store(out + i, value)


@triton.jit
def nested(pair, sizes, out, BLOCK: tl.constexpr = 32):
    i = tl.arange(0, BLOCK)
    tl.store(
        out + i,
        tl.load(pair[0] + i * sizes[0]) + tl.load(pair[1] + i) * sizes[1][0],
        mask=i < sizes[1][1],
    )


@triton.jit(do_not_specialize=["n", "k"], do_not_specialize_on_alignment=["out", "m"])
def unspecialized(x, out, n, m, k: tl.int64, w: tl.int64, BLOCK: tl.constexpr = 32):
    i = tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(x + i) * m + k + w, mask=i < n)


@triton.jit
def read_only(x: tl.const, out, BLOCK: tl.constexpr = 32):
    i = tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(x + i))


@triton.jit
def declared(x: "*fp32", out, BLOCK: tl.constexpr = 32):  # noqa: F722
    """A pointer by declaration, so that an integer is an address."""
    i = tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(x + i))


@triton.jit
def eighths(x, out, BLOCK: tl.constexpr = 32):
    """Pointers to eight-bit floats."""
    i = tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(x + i).to(tl.float32))


@triton.jit
def eighth(out, value: tl.float8e5):
    """An eight-bit float by value, which no launcher can pass."""
    tl.store(out, value.to(tl.float32))


@triton.jit
def constants(out, KIND: tl.constexpr, WORD: tl.constexpr, SHAPE: tl.constexpr, FN: tl.constexpr):
    value = FN(tl.full((), SHAPE[1], KIND).to(tl.float32))
    if WORD == "twice":
        value *= 2
    tl.store(out, value)


@triton.jit
def nothing():
    pass


@triton.jit
def host_descriptor(source, out, SIZE: tl.constexpr = 16):
    tile = source.load([0, 0])
    i = tl.arange(0, SIZE)
    tl.store(out + i[:, None] * SIZE + i[None, :], tile)


@triton.jit
def device_descriptor(x, out, rows, columns, SIZE: tl.constexpr = 16):
    source = tl.make_tensor_descriptor(x, [rows, columns], [columns, 1], [SIZE, SIZE])
    tile = source.load([0, 0])
    i = tl.arange(0, SIZE)
    tl.store(out + i[:, None] * SIZE + i[None, :], tile)


FUNCTIONS = {
    function.__name__: function
    for function in (
        add,
        integers,
        floats,
        loose,
        optional,
        nested,
        unspecialized,
        read_only,
        declared,
        eighths,
        eighth,
        constants,
        nothing,
        host_descriptor,
        device_descriptor,
    )
}

# SPDX-License-Identifier: Apache-2.0
"""Products of matrices as kernels, each beside float64: what `product_worker` runs in Triton's
interpreter.

A result is off by what its dtype rounds, once, and by what a sum in float32 of so many products may
be, whatever its order: K + 4 roundings of the sum of the absolute products.
"""

from unittest import mock

import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from bundler.codegen.program import GenerateOptions, generate
from bundler.codegen.templates import split_products
from bundler.runtime.configs import Config
from bundler.runtime.program.program_plan import Allocate, Launch
from bundler.toolchain.descriptor_arguments import with_descriptors

TEMPLATES = GenerateOptions(templates="all")
# Half of the distance to the next number, relative; and the least number above 0.
ROUNDED = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
LEAST = {torch.float32: 2.0**-149, torch.float16: 2.0**-24, torch.bfloat16: 2.0**-133}
# An epilogue's own roundings.
MORE = 4
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def checked(function, inputs, left, right, added=0.0, *, slope=1.0):
    """Raise where a function of one product is off by more than the bound.

    Args:
        function: whose only result is compared.
        inputs: of it.
        left, right: returns of inputs in float64 what is multiplied.
        added: what is added to the product, in float64.
        slope: by how much more than the product what is computed of it may change.
    """
    program = generate(function, inputs, options=TEMPLATES)
    assert not program.fallbacks, program.fallbacks
    (got,) = program.run(*inputs)
    eager = function(*inputs)
    assert (got.dtype, got.shape) == (eager.dtype, eager.shape)
    assert not got.numel() or strides(got) == strides(eager)
    wide = [item.double() if item.is_floating_point() else item for item in inputs]
    exact = function(*wide)
    products = (left(*wide).abs() @ right(*wide).abs()).reshape(exact.shape)
    steps = (left(*wide).shape[-1] + MORE) * 2.0**-24
    bound = slope * steps * (products + abs(added)) + ROUNDED[got.dtype] * exact.abs()
    excess = (got.double() - exact).abs() - bound * 1.01 - LEAST[got.dtype]
    assert not got.numel() or excess.max() <= 0, f"{got.dtype} {got.shape}: {excess.max()}"
    return program


def strides(tensor):
    """Return the strides of dimensions of several elements; others say nothing."""
    return [step for size, step in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]


def drawn(*sizes, dtype=torch.float32):
    return torch.randn(sizes).to(dtype)


# ------------------------------------------------------------------------------------- Drawn shapes


@st.composite
def matrices(draw, length):
    """Return a tensor of the last two sizes that are asked for, which may lie in any way."""
    rows, columns, batch, dtype = length
    kind = draw(st.sampled_from(["rows", "columns", "sliced", "offset", "repeated"]))
    sizes = (*batch, rows, columns)
    if kind == "columns":
        return drawn(*batch, columns, rows, dtype=dtype).mT
    if kind == "sliced":
        return drawn(*batch, rows * 2, columns * 3, dtype=dtype)[..., ::2, ::3]
    if kind == "offset":
        return drawn(*batch, rows + 1, columns + 2, dtype=dtype)[..., 1:, 2:]
    if kind == "repeated":
        along = draw(st.integers(0, len(sizes) - 1))
        return drawn(*(1 if n == along else s for n, s in enumerate(sizes)), dtype=dtype).expand(
            sizes
        )
    return drawn(*sizes, dtype=dtype)


# What operands are computed by, exactly.
BEFORE = [lambda a: a, lambda a: a * 2, torch.abs, lambda a: a.clamp(-1, 1)]
SIZES = st.one_of(
    st.integers(0, 3), st.integers(4, 40), st.sampled_from([16, 32, 64, 65, 128, 130])
)


@st.composite
def problems(draw):
    """Return two factors, and what may be added to their product."""
    rows, columns, length = draw(SIZES), draw(SIZES), draw(st.one_of(SIZES, st.just(2048)))
    dtype = draw(st.sampled_from(DTYPES))
    batches = [(), (2,), (1,), (3, 2), (1, 2)]
    left = draw(matrices((rows, length, draw(st.sampled_from(batches)), dtype)))
    right = draw(matrices((length, columns, draw(st.sampled_from(batches)), dtype)))
    return left, right


def drawn_products(count):
    """Compare products of drawn shapes, strides and dtypes."""

    @settings(max_examples=count, deadline=None, derandomize=True, database=None)
    @given(problems(), st.booleans(), st.sampled_from(BEFORE), st.sampled_from(BEFORE))
    def compared(problem, is_relu, one, other):
        torch.manual_seed(0)
        left, right = problem
        if len(left.shape) > 2 and len(right.shape) > 2:
            try:
                torch.broadcast_shapes(left.shape[:-2], right.shape[:-2])
            except RuntimeError:
                right = right.reshape(-1, *right.shape[-2:])[0] if right.numel() else right[0]

        def function(a, b):
            product = one(a) @ other(b)
            return product.relu() if is_relu else product

        checked(function, [left, right], lambda a, _: one(a), lambda _, b: other(b))

    compared()


# -------------------------------------------------------------------------------------- Named cases


def sums():
    """Add to a product: vectors, matrices, scaled, and what is ignored."""
    dtype = torch.bfloat16
    a, b, c = drawn(20, 33, dtype=dtype), drawn(33, 17, dtype=dtype), drawn(17, dtype=dtype)
    wide = c.double().abs()
    checked(torch.addmm, [c, a, b], lambda _, a, b: a, lambda _, a, b: b, wide)
    checked(
        lambda c, a, b: torch.addmm(c, a, b, beta=0.5, alpha=2),
        [c, a, b],
        lambda _, a, b: 2 * a,
        lambda _, a, b: b,
        wide,
    )
    lost = torch.full_like(c, float("nan"))
    program = generate(
        lambda c, a, b: torch.addmm(c, a, b, beta=0), [lost, a, b], options=TEMPLATES
    )
    assert not program.run(lost, a, b)[0].isnan().any()
    x, y, z = (
        drawn(3, 4, 21, dtype=dtype),
        drawn(3, 21, 5, dtype=dtype),
        drawn(3, 1, 5, dtype=dtype),
    )
    checked(torch.baddbmm, [z, x, y], lambda _, a, b: a, lambda _, a, b: b, z.double().abs())
    checked(
        torch.addbmm,
        [z[0], x, y],
        lambda _, a, b: a.permute(1, 0, 2).reshape(4, 63),
        lambda _, a, b: b.reshape(63, 5),
        z[0].double().abs(),
    )
    checked(
        F.linear,
        [x, drawn(7, 21, dtype=dtype), drawn(7, dtype=dtype)],
        lambda x, w, b: x,
        lambda x, w, b: w.t(),
        10.0,
    )


def repeated():
    """Multiply what lies once and is repeated along rows, columns, and what is summed up."""
    for left, right in (
        (drawn(1, 33).expand(20, 33), drawn(33, 1).expand(33, 17)),
        (drawn(20, 1).expand(20, 33), drawn(1, 17).expand(33, 17)),
        (drawn(1, 20, 33).expand(3, 20, 33), drawn(1, 1, 1).expand(3, 33, 17)),
    ):
        program = checked(torch.matmul, [left, right], lambda a, _: a, lambda _, b: b)
        assert len(program.sources) == 1, program.sources


def epilogues():
    """Compute of a product, in its kernel: activation, residual, gate, cast, a random mask."""
    a, b, c = drawn(20, 33), drawn(33, 40), drawn(20, 40)
    left, right = (lambda a, *_: a), (lambda a, b, *_: b)
    for function, inputs in {
        lambda a, b: F.gelu(a @ b): [a, b],
        lambda a, b, c: F.silu(a @ b) * 0.25 + c: [a, b, c],
        lambda a, b, c: torch.sigmoid(a @ b) * c.clamp(-1, 1): [a, b, c],
        lambda a, b: (a @ b).to(torch.bfloat16): [a, b],
        lambda a, b, c: (a @ b).view(4, 5, 40) + c.view(4, 5, 40): [a, b, c],
        lambda a, b: torch.where((a @ b) > 0, 1.5, -1.0) * 2: [a, b],
    }.items():
        program = checked(function, inputs, left, right, 8.0, slope=1.2)
        assert len(program.sources) == 1, program.sources
    for dtype in (torch.bfloat16, torch.float16):
        halves = [a.to(dtype), b.to(dtype)]
        program = checked(lambda a, b: F.gelu(a @ b), halves, left, right, 8.0, slope=1.2)
        assert "lib.one_plus_erf(" in "".join(program.sources.values())
    program = generate(lambda a, b: F.dropout((a @ b).exp(), 0.5), [a, b], options=TEMPLATES)
    (got,) = program.run(a, b, seed=3)
    kept = got != 0
    assert 0.3 < kept.double().mean() < 0.7
    torch.testing.assert_close(got[kept], (2 * (a @ b).exp())[kept], rtol=1e-4, atol=1e-5)


def laid_out():
    """Store a product's elements in another order, in its kernel: of heads, of their keys, turned
    as a whole, cut where no row ends, beside what lies as it is, of a batch; and by another one,
    where that is none.
    """

    def compared(function, *inputs, kernels=1):
        program = generate(function, inputs, options=TEMPLATES)
        assert len(program.sources) == kernels, program.sources
        found, exact = program.run(*inputs), function(*(item.double() for item in inputs))
        for got, one in zip(found, exact if isinstance(exact, tuple) else (exact,), strict=True):
            assert got.stride() == one.stride()
            bound = {"rtol": 4 * ROUNDED[got.dtype], "atol": 1e-4 + 16 * ROUNDED[got.dtype]}
            torch.testing.assert_close(got.double(), one, **bound)

    def heads(y):
        return y.view(6, 5, 4, 8).permute(0, 2, 1, 3)

    for dtype in DTYPES:
        a, b, c = (drawn(*sizes, dtype=dtype) for sizes in ((30, 33), (33, 32), (6, 4, 5, 8)))
        compared(lambda a, b: heads(a @ b).contiguous(), a, b)
        compared(lambda a, b: heads(a @ b).transpose(2, 3).contiguous(), a, b)
        compared(lambda a, b: (a @ b).t().contiguous(), a, b)
        compared(lambda a, b: (a @ b).view(3, 320).t().contiguous(), a, b)
        compared(lambda a, b: (lambda y: (y, heads(y).contiguous()))(a @ b), a, b)
        compared(lambda a, b, c: heads(a @ b).contiguous() * 0.5 + c, a, b, c)
        compared(lambda a, b: heads(a @ b).flip(0), a, b, kernels=2)
        compared(lambda a, b: heads(a @ b).contiguous() + (a @ b).view(6, 4, 5, 8), a, b, kernels=2)
        batch = a.expand(3, -1, -1).contiguous(), b.expand(3, -1, -1).contiguous()
        compared(lambda a, b: torch.bmm(a, b).transpose(0, 1).contiguous(), *batch)


def changed_inputs():
    """Write the product to an input, of which it is made, and add to it in place."""

    def step(w, x):
        w.add_(x.t() @ (x @ w), alpha=-0.1)
        return w * 2

    w, x = drawn(9, 9), drawn(20, 9)
    program = generate(step, [w, x], options=TEMPLATES)
    given, expected = w.clone(), w.clone()
    (got,) = program.run(given, x)
    torch.testing.assert_close(got, step(expected, x))
    torch.testing.assert_close(given, expected)


def prologues():
    """Compute operands where they are loaded: casts, scales, a norm, gates; with lengths that are
    no multiple of a block, where of zeros something else is computed.
    """
    half = torch.bfloat16
    x, w, g = drawn(5, 100), drawn(40, 100), drawn(100)
    eight = torch.randint(-8, 8, (40, 100), dtype=torch.int8)
    scale = torch.rand(40, 1) + 0.5
    for function, inputs, left, right in (
        (
            lambda x, w: F.linear(x.float(), w.float()),
            [x.to(half), w.to(half)],
            lambda x, w: x,
            lambda x, w: w.t(),
        ),
        (
            lambda x, w, s: F.linear(x, w.to(x.dtype) * s),
            [x, eight, scale],
            lambda x, w, s: x,
            lambda x, w, s: (w.double() * s).t(),
        ),
        (
            lambda x, g, w: F.linear(x * (x.square().mean(-1, keepdim=True) + 1).rsqrt() * g, w),
            [x, g, w],
            lambda x, g, w: x * g,
            lambda x, g, w: w.t(),
        ),
        (
            lambda x, w: (x.exp() + 1) @ (w.t().cos() - 3),
            [x, w],
            lambda x, w: x.exp() + 1,
            lambda x, w: w.t().cos().abs() + 3,
        ),
        (
            lambda x, w: torch.bmm(x.expand(3, 5, 100) * 2, (w / 3).t().expand(3, 100, 40)),
            [x, w],
            lambda x, w: (2 * x).expand(3, 5, 100),
            lambda x, w: w.t() / 3,
        ),
    ):
        program = checked(function, inputs, left, right, slope=4.0)
        sums = "mean" in "".join(program.sources)
        assert len(program.sources) == 1 + sums, list(program.sources)
    # Rounded as it would be if it was stored, so that no bit differs.
    for dtype in (half, torch.float16):
        a, b, w = drawn(5, 128, dtype=dtype), drawn(5, 128, dtype=dtype), drawn(64, 128).to(dtype)
        one = generate(lambda a, b, w: F.linear(F.silu(a) * b, w), [a, b, w], options=TEMPLATES)
        (got,) = one.run(a, b, w)
        two = generate(lambda a, b: F.silu(a) * b, [a, b])
        last = generate(F.linear, [a, w], options=TEMPLATES)
        assert len(one.sources) == 1
        assert torch.equal(got, last.run(two.run(a, b)[0], w)[0])


def wide_prologues():
    """Convert 8-bit floats where they are loaded, which needs blocks of some length."""
    for length, kernels in ((96, 1), (32, 2)):
        w = drawn(33, length).to(torch.float8_e4m3fn)
        x = drawn(4, length, dtype=torch.bfloat16)
        program = generate(lambda x, w: F.linear(x, w.to(x.dtype)), [x, w], options=TEMPLATES)
        assert len(program.sources) == kernels
        expected = x.double() @ w.double().t()
        torch.testing.assert_close(program.run(x, w)[0].double(), expected, rtol=1e-2, atol=1e-2)


def split_sums():
    """Sum up pieces of few rows and columns, and compute of their sum what follows."""
    left, right = (lambda a, *_: a), (lambda a, b, *_: b)
    for dtype, function, more in (
        (torch.float32, torch.mm, ()),
        (torch.bfloat16, lambda a, b, c: F.gelu(a @ b + c), ((40,),)),
        (torch.float16, lambda a, b, c: torch.addmm(c, a, b), ((40,),)),
        (torch.bfloat16, lambda a, b: (a.float() * 2) @ b.float(), ()),
    ):
        inputs = [drawn(*sizes, dtype=dtype) for sizes in ((3, 2048), (2048, 40), *more)]
        program = checked(function, inputs, left, right, 8.0, slope=2.0)
        assert "znumel = 4" in "".join(program.sources.values())
        assert len(program.sources) == 2
        assert torch.equal(program.run(*inputs)[0], program.run(*inputs)[0])
    # A row and a column: a number.
    checked(torch.mm, [drawn(1, 4096), drawn(4096, 1)], lambda a, _: a, lambda _, b: b)
    for count in (3, 6):
        with mock.patch.object(split_products, "pieces_of", return_value=count):
            in_pieces(count)


def in_pieces(count):
    """Sum up so many pieces, for rows and columns that fill no block, and all that follows."""
    left, right = (lambda a, *_: a), (lambda _, b, *__: b.t())
    rows, columns, length = 37, 50, 768
    for dtype, function, more in (
        (torch.float32, F.linear, ((columns,),)),
        (torch.bfloat16, lambda a, b, c: F.gelu(F.linear(a, b, c)), ((columns,),)),
        (torch.float16, lambda a, b, c, d: F.linear(a, b, c) + d, ((columns,), (1, columns))),
    ):
        inputs = [
            drawn(*sizes, dtype=dtype) for sizes in ((rows, length), (columns, length), *more)
        ]
        program = checked(function, inputs, left, right, 24.0, slope=2.0)
        assert f"znumel = {count}" in "".join(program.sources.values())
        assert len(program.sources) == 2
        assert torch.equal(program.run(*inputs)[0], program.run(*inputs)[0])
    scales = [torch.tensor(one) for one in (0.5, 1.5)]
    x, w = (drawn(size, length).to(EIGHT) for size in (32, 48))

    def scaled(a, b, one, other):
        return torch._scaled_mm(a, b.t(), one, other, out_dtype=torch.bfloat16)

    program = generate(scaled, [x, w, *scales], options=TEMPLATES)
    exact = x.double() @ w.double().t() * 0.75
    torch.testing.assert_close(program.run(x, w, *scales)[0].double(), exact, rtol=1e-2, atol=1e-2)
    assert f"znumel = {count}" in "".join(program.sources.values())

    def normed(a, b, c, d):
        return F.layer_norm(F.linear(a, b, c) + d, (columns,))

    sizes = (rows, length), (columns, length), (columns,), (rows, columns)
    inputs = [drawn(*one) for one in sizes]
    program = generate(normed, inputs, options=TEMPLATES)
    torch.testing.assert_close(program.run(*inputs)[0], normed(*inputs), rtol=1e-4, atol=1e-4)
    # Few pieces are added up where their sum is read.
    assert len(program.sources) == 2 + (count > 4)


def siblings():
    """Multiply in one launch what is alike but for its tensors: an operand by several, with a bias
    of each; products with no tensor in common, of sizes that are no multiple of a block.
    """

    def compared(function, inputs, members):
        program = generate(function, inputs, options=TEMPLATES)
        steps = [step for step in program.plan.steps if isinstance(step, Launch)]
        assert [step.sizes["znumel"] for step in steps] == [members]
        for got, exact in zip(
            program.run(*inputs), function(*(item.double() for item in inputs)), strict=True
        ):
            bound = {"rtol": 2 * ROUNDED[got.dtype], "atol": 1e-4}
            torch.testing.assert_close(got.double(), exact, **bound)

    for dtype in DTYPES:
        x, *weights = (drawn(*sizes, dtype=dtype) for sizes in ((50, 72), *[(40, 72)] * 3))
        biases = [drawn(40, dtype=dtype) for _ in weights]
        compared(
            lambda x, a, b, c, *d: [
                F.gelu(F.linear(x, *w)) for w in zip((a, b, c), d, strict=True)
            ],
            [x, *weights, *biases],
            3,
        )
        a, b, c, d = (drawn(33, 33, dtype=dtype) for _ in range(4))
        compared(lambda a, b, c, d: (a @ b, c @ d), [a, b, c, d], 2)


EIGHT = torch.float8_e4m3fn


def single_rows():
    """Multiply a row, or a column, with a matrix that memory runs along: sums along its rows, with
    what is computed of the matrix, and of the result, in their kernel.
    """
    left, right = (lambda a, *_: a), (lambda a, b, *_: b.t())
    for dtype, columns, length in (
        (torch.float32, 33, 100),
        (torch.bfloat16, 40, 2048),
        (torch.float16, 5, 1300),
        (torch.bfloat16, 1, 9000),
    ):
        x, w, c = (
            drawn(*sizes, dtype=dtype) for sizes in ((1, length), (columns, length), (columns,))
        )
        for function, more in (
            (F.linear, ()),
            (lambda x, w, c: F.gelu(F.linear(x, w, c)), (c,)),
            (lambda x, w, c: torch.addmm(c, x, w.t(), beta=0.5) + 1, (c,)),
        ):
            program = checked(function, [x, w, *more], left, right, 9.0, slope=2.0)
            assert "tl.dot(" not in "".join(program.sources.values())
        checked(lambda w, x: w @ x, [w, x[0]], lambda w, _: w, lambda _, x: x[:, None])
        checked(lambda x, w: F.linear(x, w[:, ::2]), [x[:, ::2], w], left, lambda x, w: w[:, ::2].T)
    # Gates that read one row are one kernel; what is computed of a row is stored before.
    half = torch.bfloat16
    a, b, w, v = (drawn(*s, dtype=half) for s in ((1, 2048), (1, 2048), (40, 2048), (40, 2048)))
    program = generate(
        lambda x, w, v: F.silu(F.linear(x, w)) * F.linear(x, v), [a, w, v], options=TEMPLATES
    )
    assert len(program.sources) == 1
    wide = [one.double() for one in (a, w, v)]
    exact = F.silu(F.linear(*wide[:2])) * F.linear(wide[0], wide[2])
    torch.testing.assert_close(program.run(a, w, v)[0].double(), exact, rtol=1e-2, atol=1e-1)
    one = generate(lambda a, b, w: F.linear(F.silu(a) * b, w), [a, b, w], options=TEMPLATES)
    assert len(one.sources) == 2
    stored = generate(lambda a, b: F.silu(a) * b, [a, b]).run(a, b)[0]
    last = generate(F.linear, [a, w], options=TEMPLATES)
    assert torch.equal(one.run(a, b, w)[0], last.run(stored, w)[0])
    # Weights of 8 bits have the bits that they would have if they were stored.
    eight, scale = drawn(40, 2048).mul(20).to(torch.int8), drawn(40, 1, dtype=half)
    program = generate(
        lambda x, w, s: F.linear(x, w.to(x.dtype) * s), [a, eight, scale], options=TEMPLATES
    )
    assert len(program.sources) == 1
    assert torch.equal(program.run(a, eight, scale)[0], last.run(a, eight.to(half) * scale)[0])


def scaled():
    """Multiply 8-bit floats with scales of the whole, or of rows and columns; a bias; results in
    each dtype; zeros beyond what is summed up, which is 16 or more.
    """

    def function(a, b, one, other, bias=None, *, dtype=torch.bfloat16, fast=False):
        return torch._scaled_mm(
            a, b.t(), one, other, bias=bias, out_dtype=dtype, use_fast_accum=fast
        )

    for rows, columns, length in ((20, 48, 16), (1, 32, 144), (33, 16, 64)):
        a, b = drawn(rows, length).to(EIGHT), drawn(columns, length).to(EIGHT)
        bias = drawn(columns, dtype=torch.bfloat16)
        whole = torch.tensor(0.7), torch.tensor([1.3])
        each = torch.rand(rows, 1) + 0.5, torch.rand(1, columns) + 0.5
        kinds = {
            20: [([], torch.bfloat16, False), ([bias], torch.bfloat16, True)],
            1: [([], torch.float32, False)],
            33: [([bias.half()], torch.float16, False)],
        }
        for scales in (whole, each):
            for more, dtype, fast in kinds[rows]:
                how = {"dtype": dtype, "fast": fast}
                inputs = [a, b, *scales, *more]
                program = generate(lambda *g: function(*g, **how), inputs, options=TEMPLATES)  # noqa: B023
                assert len(program.sources) == 1
                (source,) = program.sources.values()
                # A single row is added up by no matrix unit.
                assert ("max_num_imprecise_acc=R0_BLOCK" in source) == (rows > 1 and not fast)
                (got,) = program.run(*inputs)
                left, right = a.double() * scales[0], b.double().t() * scales[1]
                exact = left @ right + (more[0].double() if more else 0.0)
                steps = (length + MORE) * 2.0**-24
                added = more[0].double().abs() if more else 0.0
                bound = steps * (left.abs() @ right.abs() + added) + ROUNDED[dtype] * exact.abs()
                assert got.dtype == dtype
                assert ((got.double() - exact).abs() <= bound * 1.01).all()


def patches():
    """Convolve windows that do not overlap, in one dimension, two and three, whatever is left over
    at the end of an image, in either order of memory.
    """
    last = torch.channels_last
    for images, weight, bias in (
        (drawn(2, 3, 12, 17), drawn(20, 3, 4, 4), drawn(20)),
        (drawn(2, 3, 12, 17), drawn(20, 3, 4, 4), None),
        (drawn(2, 3, 12, 17).to(memory_format=last), drawn(20, 3, 4, 4), drawn(20)),
        (drawn(3, 5, 6, 7), drawn(9, 5, 1, 1), drawn(9)),
        (drawn(2, 4, 10), drawn(7, 4, 3), drawn(7)),
        (drawn(2, 4, 4, 6, 5), drawn(7, 4, 2, 2, 2), drawn(7)),
    ):
        convolve = (F.conv1d, F.conv2d, F.conv3d)[weight.dim() - 3]
        given = [images, weight] if bias is None else [images, weight, bias]
        stride = weight.shape[2:]

        def function(images, weight, bias=None, convolve=convolve, stride=stride):
            return convolve(images, weight, bias, stride=stride).relu()

        program = generate(function, given, options=TEMPLATES)
        assert len(program.sources) == 1, list(program.sources)
        (got,), expected = program.run(*given), function(*given)
        assert got.stride() == expected.stride()
        exact = function(*(item.double() for item in given))
        absolute = [item.double().abs() for item in given]
        bound = (weight[0].numel() + MORE) * 2.0**-24 * function(*absolute) * 1.01
        assert ((got.double() - exact).abs() <= bound).all()
    # What is computed of images is stored as they lie, or not at all, and no patches are copied.
    for channels, kernels in ((9, 1), (130, 2)):
        images, weight = drawn(2, 3, 33, 38), drawn(channels, 3, 4, 4)
        program = generate(
            lambda x, w: F.conv2d(x.abs() - 1, w, stride=4), [images, weight], options=TEMPLATES
        )
        assert len(program.sources) == kernels
        expected = F.conv2d(images.abs() - 1, weight, stride=4)
        torch.testing.assert_close(program.run(images, weight)[0], expected, rtol=1e-5, atol=1e-5)
    images, weight = drawn(2, 3, 8, 12), drawn(16, 3, 4, 4)
    places = drawn(6, 16)
    program = generate(
        lambda x, w, p: F.conv2d(x, w, stride=4).flatten(2).transpose(1, 2) + p,
        [images, weight, places],
        options=TEMPLATES,
    )
    assert len(program.sources) == 1
    expected = F.conv2d(images, weight, stride=4).flatten(2).transpose(1, 2) + places
    torch.testing.assert_close(program.run(images, weight, places)[0], expected)


def other_dtypes():
    """Multiply integers and float64, which no matrix unit has."""
    for dtype in (torch.int64, torch.int32, torch.int8, torch.uint8, torch.float64):
        a, b = (drawn(*sizes) * 9 for sizes in ((6, 20), (20, 5)))
        a, b = a.abs().to(dtype), b.abs().to(dtype)
        program = generate(lambda a, b: torch.addmm(b[0], a, b, alpha=2), [a, b], options=TEMPLATES)
        torch.testing.assert_close(program.run(a, b)[0], torch.addmm(b[0], a, b, alpha=2))


def framed(rows, columns, dtype):
    """Return a matrix between rows and columns of NaN, which lies as descriptors ask for."""
    whole = torch.full((rows + 2, -columns // 8 * -8 + 16), float("nan"))
    whole[1:-1, 8 : 8 + columns] = drawn(rows, columns)
    return whole.to(dtype)[1:-1, 8 : 8 + columns]


def turns():
    """Have any number of programs take blocks in turn by descriptors: the bits are those of a
    program for each block with pointers, and nothing beyond the end of a matrix is read.
    """
    half = torch.bfloat16
    many = 1 << 20
    for function, inputs in (
        (F.linear, [framed(70, 48, half), framed(40, 48, half), drawn(40, dtype=half)]),
        (lambda a, b: (a.t() @ b).relu(), [framed(48, 72, half), framed(48, 40, half)]),
        (torch.mm, [drawn(9, 80).half(), framed(80, 33, torch.float16)]),
        # A pointer that something else is read by, too, stays one.
        (lambda a: a @ a.t(), [drawn(40, 48, dtype=half)]),
        (lambda a, b: a @ b + a, [drawn(33, 48, dtype=half), drawn(48, 48, dtype=half)]),
        (lambda a, b: a[2:, 8:56] @ b[:, 16:48], [drawn(9, 64).half(), drawn(48, 64).half()]),
        (torch.bmm, [drawn(3, 70, 48, dtype=half), drawn(3, 40, 48, dtype=half).mT]),
        (
            lambda a, b: torch.bmm(a, b.expand(3, -1, -1)),
            [drawn(3, 5, 40, dtype=half), drawn(40, 72, dtype=half)],
        ),
        (
            lambda a, b, s: torch._scaled_mm(a, b.t(), s, s, out_dtype=half),
            [drawn(33, 48).to(EIGHT), drawn(64, 48).to(EIGHT), torch.tensor(0.5)],
        ),
    ):
        program = generate(function, inputs, options=TEMPLATES)
        (source,) = program.sources.values()
        assert "PROGRAMS" in source
        step = next(one for one in program.plan.steps if isinstance(one, Launch))
        tensors = {f"@{i.name}": t for i, t in zip(program.plan.inputs, inputs, strict=True)}
        for made in program.plan.steps:
            if isinstance(made, Allocate):
                kind = getattr(torch, made.spec.dtype)
                tensors[f"@{made.name}"] = torch.empty(made.spec.sizes, dtype=kind)
        arguments = [tensors.get(a, a) if isinstance(a, str) else a for a in step.arguments]
        kernel = program.modules[step.kernel].here()
        out = [one for one in arguments if isinstance(one, torch.Tensor)][-1]
        results = {}
        for programs in (0, 3, many):
            blocks = {"YBLOCK": 16, "XBLOCK": 32, "R0_BLOCK": 32, "GROUP": 2}
            config = Config({**blocks, "PROGRAMS": programs}, num_warps=4, num_stages=2)
            bound = kernel.bind(*arguments)
            grid = kernel.grid_of(config, bound)
            assert grid[0] <= (programs or many)
            out.fill_(float("nan"))
            call = {**bound, **config.all_kwargs(), **kernel.constants}
            kernel.fn[grid](**with_descriptors(kernel.fn, call))
            results[programs] = out.clone()
        assert not results[0].isnan().any()
        for one in results.values():
            assert torch.equal(results[0], one)
        expected = function(*inputs).double()
        torch.testing.assert_close(results[0].double(), expected, rtol=2e-2, atol=2e-1)


def changing_sizes():
    """Run one program at other sizes, of which none was known, nor is a multiple of a block."""
    linear = generate(
        lambda x, w, b: F.relu(F.linear(x, w, b)),
        [drawn(6, 20), drawn(24, 20), drawn(24)],
        options=TEMPLATES,
        dynamic=True,
    )
    batched = generate(
        torch.bmm, [drawn(3, 6, 20), drawn(3, 20, 9)], options=TEMPLATES, dynamic=True
    )
    assert not linear.fallbacks + batched.fallbacks
    wide = generate(
        torch.mm,
        [drawn(6, 20), drawn(20, 24)],
        options=GenerateOptions(templates="all", wide_indices=True),
        dynamic=True,
    )
    assert "tl.int64" in "".join(wide.sources.values())
    for rows, columns, length in ((6, 24, 20), (50, 3, 17), (300, 2, 130), (2, 70, 64)):
        x, w, b = drawn(rows, length), drawn(columns, length), drawn(columns)
        right = F.relu(F.linear(x, w, b))
        torch.testing.assert_close(linear.run(x, w, b)[0], right, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(
            wide.run(x, w.t().contiguous())[0], x @ w.t(), rtol=1e-4, atol=1e-5
        )
        y, z = drawn(5, rows, length), drawn(5, length, columns)
        torch.testing.assert_close(batched.run(y, z)[0], y @ z, rtol=1e-4, atol=1e-5)


def measured():
    """Launch what `tools.codegen products` measures, and compare it as it does."""
    from tools.codegen import products

    for dtype in products.DTYPES:
        for rows, columns, length in ((33, 64, 48), (1, 16, 2048)):
            found = products.problem((rows, columns, length), dtype, "cpu")
            for kernel, arguments in found.launches:
                kernel.run(*arguments)
            result = found.launches[-1][1]
            sizes = (rows, columns)
            result = next(a for a in result if getattr(a, "shape", ()) == sizes)
            torch.testing.assert_close(result, found.program.run(*found.inputs)[0])
            assert 0 < products.off(found, dtype) <= 1
    assert len(set(products.SHAPES)) == 30
    rows = [
        {"cublas_ms": 2.0, "eager_ms": 4.0, "tuned_ms": one, "chosen_ms": 3.0} for one in (1.0, 4.0)
    ]
    rows[1]["fused_ms"] = 1.0
    assert products.summary(rows) == {
        "speed": 1.0,
        "least_speed": 0.5,
        "speed_with_epilogue": 1.0,
        "least_with_epilogue": 0.25,
        "chosen_over_tuned": 1.5,
        "most_chosen_over_tuned": 3.0,
        "passes": False,
    }


def small():
    """By torch.compile's rule, as the GPU has them that it is for: in each order of the operands,
    as `tools.codegen small-products` measures them, and in a layer with activation and residual.
    """
    from bundler.codegen import small_products as rule
    from tools.codegen import small_products

    by_rule = GenerateOptions(templates="by rule")
    with mock.patch.object(rule, "_DEVICE", "cpu"):
        for layout, (function, *_) in small_products.LAYOUTS.items():
            found = small_products.problem((33, 24, 16), layout, "cpu")
            ((kernel, arguments),) = found.launches
            kernel.run(*arguments)
            result = next(one for one in arguments if getattr(one, "shape", ()) == (33, 24))
            exact = function(*(one.double() for one in found.inputs))
            torch.testing.assert_close(result.double(), exact, rtol=2.0**-8, atol=1e-4)
        for dtype in (torch.bfloat16, torch.float16):
            layers = nn.Linear(32, 72), nn.Linear(72, 32)
            inputs = [drawn(3, 7, 32), *(one for layer in layers for one in layer.parameters())]
            inputs = [one.detach().to(dtype) for one in inputs]

            def layer(x, up, first, down, last):
                return x + F.linear(F.silu(F.linear(x, up, first)), down, last)

            program = generate(layer, inputs, options=by_rule)
            assert not program.fallbacks
            (got,), exact = program.run(*inputs), layer(*(one.double() for one in inputs))
            off, eager = ((one.double() - exact).norm() for one in (got, layer(*inputs)))
            assert off <= 1.5 * eager
    assert len(set(small_products.SHAPES)) == 45
    rows = [
        {"shape": shape, "cublas_ms": 2.0, "eager_ms": 4.0, "tuned_ms": 1.0, "chosen_ms": one}
        for shape, one in (((8, 8, 8), 1.0), ((8, 8, 16), 4.0), ((8, 8, 1 << 20), 2.0))
    ]
    found = small_products.summary(rows, rows[:1])
    assert (found["bias_alone"], found["bias_alone_worst"]) == (1.0, 2.0)
    assert (found["kernel_behind"], found["chosen_over_tuned"]) == (0.5, 2.0)
    assert (found["plain"], found["others_worst"]) == (0.5, 1.0)


class Block(nn.Module):
    """A layer as transformers have it, attention and what follows, in products."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.of_queries, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.gate, self.up = (nn.Linear(width, 2 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * width, width)

    def forward(self, x):
        batch, length, width = x.shape
        parts = self.of_queries(self.norms[0](x)).view(batch, length, 3, self.heads, -1)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        mask = torch.ones(length, length, dtype=torch.bool).tril()
        weights = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~mask, float("-inf")).softmax(-1)
        x = x + self.out((weights @ v).transpose(1, 2).reshape(batch, length, width))
        y = self.norms[1](x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def modules():
    """Run whole modules: one of ours, and torch's own attention with its weights."""
    torch.manual_seed(0)
    x = drawn(2, 10, 32)
    others = nn.MultiheadAttention(32, 4, batch_first=True).eval()
    with torch.no_grad():
        for function, kernels in ((Block(32, 4), 11), (lambda x: others(x, x, x), 9)):
            program = generate(function, [x], options=TEMPLATES)
            assert not program.fallbacks
            assert len(program.sources) <= kernels, list(program.sources)
            expected = function(x)
            expected = expected if isinstance(expected, tuple) else (expected,)
            for got, right in zip(program.run(x), expected, strict=True):
                torch.testing.assert_close(got, right, rtol=1e-4, atol=1e-5)


CASES = {
    case.__name__: case
    for case in (
        sums,
        epilogues,
        laid_out,
        small,
        changed_inputs,
        other_dtypes,
        patches,
        prologues,
        repeated,
        single_rows,
        scaled,
        siblings,
        split_sums,
        changing_sizes,
        measured,
        modules,
        turns,
        wide_prologues,
    )
}

# SPDX-License-Identifier: Apache-2.0
"""Attention as kernels, each beside float64: what `attention_worker` runs in Triton's interpreter.

Scores are sums of E products, each off by (E + 4) roundings of float32 of the absolute products. A
weight is off by as much as its score, twice, since the softmax divides by a sum of such, and by
what the dtype of the values rounds; a result by that of the absolute values, and by the sum's own
roundings.
"""

import functools
import math

import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from bundler.codegen.program import GenerateOptions, generate

TEMPLATES = GenerateOptions(templates="all")
attend = F.scaled_dot_product_attention
# Half of the distance to the next number, relative; and the least number above 0.
ROUNDED = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
LEAST = {torch.float32: 2.0**-149, torch.float16: 2.0**-24, torch.bfloat16: 2.0**-133}
MORE = 4


def exact(query, key, value, mask=None, *, causal=False, scale=None):
    """Return attention in float64, and by how much a kernel's may be off.

    Written here: no code of torch's attention, so that rows without a key are what is promised.
    """
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    dtype = query.dtype
    query, key, value = (one.double() for one in (query, key, value))
    scores = query @ key.mT * scale
    size = query.abs() @ key.abs().mT * abs(scale)
    if mask is not None:
        added = torch.where(mask, 0.0, -math.inf) if mask.dtype == torch.bool else mask.double()
        scores = scores + added
        size = size + added.abs().nan_to_num(0, 0, 0)
    if causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        scores = scores.masked_fill(~seen, -math.inf)
    weights = scores.softmax(-1).nan_to_num(0)
    off = (query.shape[-1] + MORE) * 2.0**-24 * size.masked_fill(weights == 0, 0)
    off = weights * (off.exp() ** 2 - 1 + ROUNDED[dtype] * 2)
    # What all weights are off by together, their sum is off by, too.
    off = off + weights * off.sum(-1, keepdim=True)
    steps = (key.shape[-2] + 16) * 2.0**-24
    result = weights @ value
    bound = off @ value.abs() + steps * (weights @ value.abs()) + ROUNDED[dtype] * result.abs()
    return result, bound * 1.01 + LEAST[dtype] * (1 + key.shape[-2])


def checked(function, inputs, result, bound, **options):
    """Raise where a function's only result is off by more than the bound; returns the program."""
    program = generate(function, inputs, options=TEMPLATES, **options)
    assert not program.fallbacks, program.fallbacks
    assert any("_att_" in name for name in program.sources), list(program.sources)
    compared(program, function, inputs, result, bound)
    return program


def compared(program, function, inputs, result, bound):
    (got,) = program.run(*inputs)
    eager = function(*inputs)
    assert (got.dtype, got.shape) == (eager.dtype, eager.shape)
    assert strides(got) == strides(eager), (got.stride(), eager.stride())
    excess = (got.double() - result).abs() - bound
    assert excess.isnan().sum() == 0
    assert excess.max() <= 0, f"{got.dtype} {got.shape}: {excess.max()}"


def strides(tensor):
    """Return the strides of dimensions of several elements; others say nothing."""
    return [step for size, step in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]


def drawn(*sizes, dtype=torch.float32):
    return torch.randn(sizes).to(dtype)


# ------------------------------------------------------------------------------------- Drawn shapes


def laid(draw, batch, rows, columns, dtype):
    """Return a tensor of these sizes that may lie in any way."""
    kind = draw(st.sampled_from(["rows", "heads inside", "columns", "sliced"]))
    if kind == "heads inside":
        return drawn(*batch[:-1], rows, batch[-1], columns, dtype=dtype).transpose(-2, -3)
    if kind == "columns":
        return drawn(*batch, columns, rows, dtype=dtype).mT
    if kind == "sliced":
        return drawn(*batch, rows + 3, columns * 2, dtype=dtype)[..., 2:-1, ::2]
    return drawn(*batch, rows, columns, dtype=dtype)


@st.composite
def problems(draw):
    """Return query, key, value, mask and the options of attention."""
    dtype = draw(st.sampled_from([torch.float32, torch.float16, torch.bfloat16]))
    shared = draw(st.sampled_from([1, 1, 2, 3]))
    heads = draw(st.integers(1, 2))
    front = draw(st.sampled_from([(), (1,), (2,)]))
    rows, keys = draw(st.sampled_from([1, 2, 5, 16, 17, 70])), draw(st.integers(1, 300))
    length, columns = (draw(st.sampled_from([1, 8, 24, 64, 80, 96, 144])) for _ in range(2))
    query = laid(draw, (*front, heads * shared), rows, length, dtype)
    key, value = (laid(draw, (*front, heads), keys, size, dtype) for size in (length, columns))
    kind = draw(st.sampled_from(["", "", "causal", "bool", "float"]))
    mask = None
    if kind in {"bool", "float"}:
        sizes = draw(
            st.sampled_from([(rows, keys), (1, keys), (heads * shared, rows, keys), (1, rows, 1)])
        )
        mask = torch.rand(sizes) > draw(st.sampled_from([0.1, 0.5, 0.97]))
        if kind == "float":
            mask = torch.randn(sizes).masked_fill(~mask, -math.inf).to(dtype)
    scale = draw(st.sampled_from([None, 0.25, -1.5]))
    return query, key, value, mask, kind == "causal", scale, shared


def drawn_attention(count):
    """Compare attention of drawn shapes, strides, masks and dtypes."""

    @settings(max_examples=count, deadline=None, derandomize=True, database=None)
    @given(problems())
    def each(problem):
        torch.manual_seed(0)
        query, key, value, mask, causal, scale, shared = problem
        inputs = [one for one in (query, key, value, mask) if one is not None]

        def function(query, key, value, mask=None):
            return attend(
                query, key, value, mask, is_causal=causal, scale=scale, enable_gqa=shared > 1
            )

        every = [one.repeat_interleave(shared, -3) for one in (key, value)]
        checked(function, inputs, *exact(query, *every, mask, causal=causal, scale=scale))

    each()


# -------------------------------------------------------------------------------------- Named cases


def forms():
    """Run what has lines of its own: causal, masks, parts of keys, columns of another number."""
    q, k, v = drawn(1, 2, 1, 24), drawn(1, 1, 300, 24), drawn(1, 1, 300, 40)
    shared = functools.partial(attend, enable_gqa=True)
    program = checked(shared, [q, k, v], *exact(q, k, v))
    assert len(program.sources) == 2, list(program.sources)
    q, k, v = drawn(1, 1, 20, 24), drawn(1, 1, 70, 24), drawn(1, 1, 70, 40)
    causal = functools.partial(attend, is_causal=True, scale=0.5)
    checked(causal, [q, k, v], *exact(q, k, v, causal=True, scale=0.5))
    # Of more heads than take turns, and of several blocks of rows.
    q, k = drawn(1, 20, 150, 16), drawn(1, 20, 150, 16)
    checked(causal, [q, k, k], *exact(q, k, k, causal=True, scale=0.5))
    q, k, v = drawn(1, 1, 20, 24), drawn(1, 1, 70, 24), drawn(1, 1, 70, 40)
    seen = torch.rand(20, 70) > 0.5
    seen[3] = False
    checked(attend, [q, k, v, seen], *exact(q, k, v, seen))
    added = torch.randn(1, 1, 1, 70).masked_fill(torch.rand(70) > 0.8, -math.inf)
    checked(attend, [q, k, v, added], *exact(q, k, v, added))


def decoding():
    """Split keys among programs, some of which see none, with heads that share them."""
    q, k, v = drawn(1, 4, 1, 32), drawn(1, 2, 300, 32), drawn(1, 2, 300, 32)
    every = [one.repeat_interleave(2, 1) for one in (k, v)]
    shared = functools.partial(attend, enable_gqa=True)
    program = checked(shared, [q, k, v], *exact(q, *every))
    assert len(program.sources) == 2, list(program.sources)
    assert "ynumel = 2\n" in next(iter(program.sources.values()))

    def expanded(q, k, v):
        k, v = (one[:, :, None].expand(-1, -1, 2, -1, -1).reshape(1, 4, 300, 32) for one in (k, v))
        return attend(q, k, v)

    same = checked(expanded, [q, k, v], *exact(q, *every))
    assert "ynumel = 2\n" in next(iter(same.sources.values()))
    mask = torch.zeros(1, 300, dtype=torch.bool)
    mask[:, 200:210] = True
    checked(attend, [q, *every, mask], *exact(q, *every, mask))
    checked(attend, [q, *every, ~mask & mask], *exact(q, *every, ~mask & mask))


def two_parts():
    """Compute heads in blocks of 64 and more and of what is left: masks, heads that share keys,
    parts of keys, and what is computed of the result along its columns and its rows.
    """
    dtype, length = torch.bfloat16, 80
    q = drawn(1, 2, 40, length, dtype=dtype)
    k, v = drawn(1, 1, 70, length, dtype=dtype), drawn(1, 1, 70, length, dtype=dtype)
    every = [one.repeat_interleave(2, 1) for one in (k, v)]
    seen = torch.rand(40, 70) > 0.5
    for function, options in (
        (functools.partial(attend, is_causal=True, enable_gqa=True), {"causal": True}),
        (functools.partial(attend, attn_mask=seen, enable_gqa=True), {"mask": seen}),
    ):
        program = checked(function, [q, k, v], *exact(q, *every, **options))
        assert "accumulator_rest" in "".join(program.sources.values())
    # Powers of two, so that a product of them is off by nothing more.
    columns, rows = (2.0 ** torch.randint(0, 3, size) for size in ((length,), (40, 1)))
    result, bound = (one * columns * rows for one in exact(q, *every))

    def scaled(q, k, v, columns, rows):
        return attend(q, k, v) * columns.to(q.dtype) * rows.to(q.dtype)

    checked(scaled, [q, *every, columns, rows], result, bound)
    one, keys = drawn(1, 2, 1, length, dtype=dtype), drawn(1, 2, 300, length, dtype=dtype)
    program = checked(attend, [one, keys, keys], *exact(one, keys, keys))
    assert len(program.sources) == 2, list(program.sources)


def logarithms():
    """Return the logarithms of the sums, which backward passes read."""
    q, k, v = drawn(2, 2, 20, 24), drawn(2, 2, 30, 24), drawn(2, 2, 30, 24)
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    program = generate(lambda *given: flash(*given)[:2], [q, k, v], options=TEMPLATES)
    result, sums = program.run(q, k, v)
    right, bound = exact(q, k, v)
    assert ((result.double() - right).abs() <= bound).all()
    torch.testing.assert_close(sums, (q @ k.mT / math.sqrt(24)).logsumexp(-1))


def what_is_no_number():
    """Keep what torch keeps: a NaN of a query is its row's, one of a value its column's."""
    q, k, v = drawn(1, 1, 20, 16), drawn(1, 1, 30, 16), drawn(1, 1, 30, 16)
    q[0, 0, 3, 5], v[0, 0, 7, 2], k[0, 0, 2, 1] = math.nan, math.nan, math.inf
    mask = torch.ones(20, 30, dtype=torch.bool)
    mask[4] = False
    (got,) = generate(attend, [q, k, v, mask], options=TEMPLATES).run(q, k, v, mask)
    with nn.attention.sdpa_kernel(nn.attention.SDPBackend.MATH):
        expected = attend(q, k, v, mask)
    assert (got.isnan() == expected.isnan()).all()
    assert 0 < got.isnan().sum() < got.numel()


def changing_sizes():
    """Run one program at other sizes; a head has the size of the example in each call."""
    causal = functools.partial(attend, is_causal=True)
    q, k = drawn(2, 3, 20, 24), drawn(2, 3, 30, 24)
    program = generate(causal, [q, k, k], options=TEMPLATES, dynamic=True)
    assert not program.fallbacks
    for batch, heads, rows, keys in ((2, 2, 7, 9), (3, 5, 70, 33)):
        q, k = drawn(batch, heads, rows, 24), drawn(batch, heads, keys, 24)
        v = k.cos()
        compared(program, causal, [q, k, v], *exact(q, k, v, causal=True))


def as_torch_has_them():
    """Take apart what no kernel is made for: float64."""
    q = drawn(1, 2, 10, 16).double()
    program = generate(attend, [q, q, q], options=TEMPLATES)
    torch.testing.assert_close(program.run(q, q, q)[0], attend(q, q, q))


def modules():
    """Run torch's own layer, whose attention has another name there."""
    x = drawn(2, 10, 32)
    layer = nn.MultiheadAttention(32, 4, batch_first=True)
    program = generate(lambda x: layer(x, x, x, need_weights=False)[0], [x], options=TEMPLATES)
    assert any("_att_" in name for name in program.sources), list(program.sources)
    torch.testing.assert_close(
        program.run(x)[0], layer(x, x, x, need_weights=False)[0], rtol=1e-4, atol=1e-5
    )


def measured():
    """Launch what `tools.codegen attentions` measures, and compare it as it does."""
    from tools.codegen import attentions

    for sizes in ((1, 2, 1, 20, 20, 16, True), (1, 2, 1, 1, 300, 16, False)):
        shape = attentions.Shape(*sizes)
        found = attentions.problem(shape, "bf16", "cpu")
        for kernel, arguments in found.launches:
            kernel.run(*arguments)
        (right,) = found.program.run(*found.inputs)
        *_, result = (a for a in found.launches[-1][1] if getattr(a, "shape", ()) == right.shape)
        torch.testing.assert_close(result, right)
        assert 0 < attentions.off(found, shape, "bf16") <= 1
    rows = [
        {"shape": (1, 1, 1, n), "cudnn": 2.0, "flash": None, "tuned_ms": 4.0, "chosen_ms": 6.0}
        for n in (1, 8)
    ]
    found = attentions.summary(rows)
    assert (found["decode_cudnn"], found["prefill_flash"]) == (0.5, None)
    assert found["chosen_over_tuned"] == 1.5


CASES = {
    case.__name__: case
    for case in (
        as_torch_has_them,
        changing_sizes,
        decoding,
        forms,
        logarithms,
        measured,
        modules,
        two_parts,
        what_is_no_number,
    )
}

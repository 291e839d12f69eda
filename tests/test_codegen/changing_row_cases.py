# SPDX-License-Identifier: Apache-2.0
"""Rows whose length changes from call to call, in Triton's interpreter, with eager torch as the
judge: held whole up to a block, looped over beyond it, in pieces where there are few of them.

Run as a program: `changing_row_cases.py [OPTIONS OF PYTEST]`, with TRITON_INTERPRET=1.
"""

import contextlib
import math
import os
import sys
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from bundler.codegen import generate
from bundler.codegen.loops import split_reductions

# The example's rows, and the block that holds them.
ROW, BLOCK = 20, 32
ODD = (math.nan, math.inf, -math.inf, -0.0)


def centred(a):
    var, mean = torch.var_mean(a, -1, keepdim=True)
    return (a - mean) / (var + 1e-5).sqrt()


def above_least(a):
    whole = a.nan_to_num(0, 9, -9).int()
    return whole - whole.amin(-1, keepdim=True)


def both_dimensions(a):
    return F.layer_norm(a, a.shape[1:]), torch.softmax(a.flatten(1), -1)


def softmax_gradient(a):
    out, backward = torch.func.vjp(lambda x: torch.log_softmax(x, -1), a)
    return out, *backward(a * 2)


#: Function of rows -> the rank of its input.
FUNCTIONS = {
    "softmax": (lambda a: torch.softmax(a, -1), 2),
    "softmax of halves": (lambda a: torch.log_softmax(a.bfloat16(), -1), 2),
    "gradient": (softmax_gradient, 2),
    "layer norm": (lambda a: F.layer_norm(a, a.shape[-1:], a[0], a[1]), 2),
    "rms norm": (lambda a: a * torch.rsqrt(a.square().mean(-1, keepdim=True) + 1e-6), 2),
    "variance": (centred, 2),
    "extremes": (lambda a: (a.argmax(-1), a - a.amax(-1, keepdim=True), a.isnan().any(-1)), 2),
    "scan": (lambda a: a.cumsum(-1) - a.sum(-1, keepdim=True), 2),
    "integers": (above_least, 2),
    "across": (lambda a: a - a.sum(0), 2),
    "two dimensions": (both_dimensions, 3),
}
EMPTY = {
    "no elements": lambda a: torch.softmax(a[:, 2:], -1).sum(-1),
    "sums of none": lambda a: a[:, 2:] / a[:, 2:].square().sum(-1, keepdim=True),
}


@cache
def program_of(name):
    function, rank = FUNCTIONS[name]
    example = torch.empty(6, ROW) if rank == 2 else torch.empty(6, ROW // 5, 5)
    return generate(function, [example], dynamic=True)


def results(value):
    return list(value) if isinstance(value, (tuple, list)) else [value]


def judged(name, function, program, x):
    """Compare a call with eager torch: floats to rounding, all else exactly."""
    for found, right in zip(results(program(x)), results(function(x)), strict=True):
        assert (found.dtype, found.shape) == (right.dtype, right.shape), name
        if not right.is_floating_point():
            assert torch.equal(found, right), name
            continue
        finite = right[right.isfinite()].double().abs()
        scale = max(float(finite.max()) if finite.numel() else 0.0, 1.0)
        tolerance = 2e-2 if right.dtype is torch.bfloat16 else 2e-5
        torch.testing.assert_close(
            found, right, rtol=tolerance, atol=tolerance * scale, equal_nan=True, msg=name
        )


def numbers(*sizes, odd=None, at=0):
    x = torch.randn(sizes, generator=torch.Generator().manual_seed(sum(sizes))) * 3
    if odd is not None:
        x.view(-1)[at % x.numel()] = odd
    return x


lengths = st.sampled_from([2, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 300]) | st.integers(2, 80)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(sorted(FUNCTIONS)),
    st.integers(2, 9),
    lengths,
    st.sampled_from([None, None, *ODD]),
    st.integers(0, 1000),
)
def test_rows_of_any_length_have_torchs_numbers(name, count, length, odd, at):
    function, rank = FUNCTIONS[name]
    sizes = (count, length) if rank == 2 else (count, 2 + length % 7, 2 + length // 7)
    judged(name, function, program_of(name).run, numbers(*sizes, odd=odd, at=at))


@pytest.mark.parametrize("length", [3, BLOCK, BLOCK + 1, 300])
@pytest.mark.parametrize("name", ["softmax", "layer norm", "two dimensions"])
def test_a_few_lengths_have_torchs_numbers(name, length):
    function, rank = FUNCTIONS[name]
    sizes = (5, length) if rank == 2 else (5, 2, length // 2 + 1)
    judged(name, function, program_of(name).run, numbers(*sizes))


@pytest.mark.parametrize("name", EMPTY)
def test_rows_may_have_no_elements(name):
    """torch compiles anew for sizes of 0 and 1, so by torch.compile."""
    compiled = torch.compile(EMPTY[name], backend="triton_bundler", dynamic=True, fullgraph=True)
    for length in (ROW, 2, 3, 4, BLOCK + 2, BLOCK + 3, 300):
        judged(name, EMPTY[name], compiled, numbers(3, length))


@pytest.mark.parametrize("name", ["softmax", "variance", "scan"])
def test_compiled_functions_take_any_length(name):
    function, _ = FUNCTIONS[name]
    compiled = torch.compile(function, backend="triton_bundler", dynamic=True, fullgraph=True)
    for length in (ROW, 1, 2, BLOCK, BLOCK + 1, 300):
        judged(name, function, compiled, numbers(3, length))


# ------------------------------------------------------------------------------------ Few long rows


PIECES = {
    "sums": (lambda a: (a.sum((1, 2)), a.amax((1, 2)), torch.var_mean(a, (1, 2))[0]), 3),
    "all": (lambda a: (a.mean(), a.amin(), a.isnan().any()), 3),
    "across": (lambda a: (a.sum((0, 1)), a.amax((0, 1))), 3),
    "sliced": (lambda a: (a[:, 1:, 2:] * 2).sum((1, 2)), 3),
    "turned": (lambda a: a.permute(2, 0, 1).sum((1, 2)), 3),
    "cumsum": (lambda a: a.cumsum(-1), 2),
    "cummax": (lambda a: tuple(a.cummax(-1)), 2),
    "logcumsumexp": (lambda a: a.logcumsumexp(-1), 2),
    "of columns": (lambda a: tuple(a.cummin(0)), 2),
    "flat": (lambda a: a.flatten().cumsum(0).relu(), 2),
}


@pytest.fixture(scope="module")
def short_is_long():
    """A row that is long for a GPU takes the interpreter minutes."""
    with pytest.MonkeyPatch.context() as patched:
        for name, value in (("_SHORT_ROW", 64), ("_PROGRAM_THREADS", 8), ("_COLUMNS", 4)):
            patched.setattr(split_reductions, name, value)
        patched.setattr(split_reductions, "_LEAST_EACH", 4)
        yield


@pytest.mark.parametrize("name", PIECES)
def test_few_long_rows_are_cut_whatever_their_sizes(short_is_long, name):
    """Also where a row has fewer elements than there are pieces."""
    function, rank = PIECES[name]
    turn = -1 if name == "of columns" else 1
    example = numbers(*(3, 301)[::turn]) if rank == 2 else numbers(3, 24, 18)
    program = generate(function, [example], dynamic=True)
    assert program.fallbacks == ()
    assert len(program.kernels) >= 2
    cubes, squares = ((2, 3, 4), (4, 9, 13), (3, 30, 48)), ((2, 2), (4, 97), (2, 700))
    sizes = cubes if rank == 3 else squares
    for given_sizes, odd in zip(sizes, (None, math.nan, math.inf), strict=True):
        x = numbers(*given_sizes[::turn], odd=odd, at=sum(given_sizes))
        judged(name, function, program.run, x)


if __name__ == "__main__":
    plain = ["-q", "-p", "no:cacheprovider", "-p", "no:logging", "--noconftest", "-c", os.devnull]
    with contextlib.redirect_stdout(sys.stderr):
        sys.exit(pytest.main([__file__, *plain, *sys.argv[1:]]))

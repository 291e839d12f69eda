# SPDX-License-Identifier: Apache-2.0
"""`masked_scatter` and its gradient against torch, where `scan_cases` runs its own; `test_scans.py`
runs these with pytest in a process of their own.
"""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scan_cases import DEVICE, compared, numbers

from bundler.codegen import generate
from bundler.codegen.torch_backend import triton_bundler


def masks(*sizes):
    """Return a mask that holds for about half of the elements."""
    return numbers(*sizes, dtype=torch.bool)


def put(values, mask, source):
    return values.masked_scatter(mask, source)


@settings(max_examples=8, deadline=None)
@given(
    st.lists(st.sampled_from((1, 2, 5, 40)), max_size=3),
    st.booleans(),
    st.sampled_from((torch.float32, torch.bfloat16, torch.int64, torch.bool)),
    st.integers(0, 3),
)
def test_sources_are_taken_in_order(sizes, turned, dtype, more):
    """In the order of the result, whatever the strides; a mask may be broadcast."""
    values, mask = numbers(*sizes, dtype=dtype), masks(*sizes[:-1], 1) if sizes else masks()
    source = numbers(values.numel() + more, 2, dtype=dtype)
    if turned and len(sizes) > 1:
        values = values.transpose(0, -1).contiguous().transpose(0, -1)
        source = source.t().contiguous().t()
    compared(put, values, mask, source, tolerance=0)


def test_masks_without_elements_and_in_many_pieces():
    """Nothing holds in an empty mask; a long one is counted in pieces."""
    compared(put, numbers(0, 3), masks(0, 3), numbers(4), tolerance=0)
    compared(put, numbers(2, 20_000), masks(2, 20_000), numbers(40_000), tolerance=0)
    program = generate(put, [numbers(4), masks(4), numbers(0)])
    assert [fallback.operator for fallback in program.fallbacks] == ["aten.masked_scatter.default"]


def test_a_source_that_may_be_too_short_is_asserted_to_be_long_enough():
    """Of what the mask holds for alone; the program reads nothing else."""
    program = generate(put, [numbers(6), masks(6), numbers(3)])
    held = torch.tensor([True, False, True, False, True, False], device=DEVICE)
    torch.testing.assert_close(
        program.run(numbers(6), held, numbers(3))[0], put(numbers(6), held, numbers(3))
    )
    (source,) = program.sources.values()
    (line,) = [line for line in source.splitlines() if "tl.device_assert(" in line]
    assert "< 3)" in line


def test_gradients_go_to_what_was_taken():
    """Through torch.compile: elements of the source that nobody took have none."""
    values, mask = numbers(4, 6, 8).requires_grad_(), masks(4, 6, 1)
    source = numbers(9, 5, 8).requires_grad_()

    def function(values, mask, source):
        return (values * 2).masked_scatter(mask, source * 3).sin().sum()

    theirs = torch.autograd.grad(function(values, mask, source), [values, source])
    programs = []
    options = {"programs": programs, "keep": False}
    compiled = torch.compile(function, backend=triton_bundler, options=options)
    ours = torch.autograd.grad(compiled(values, mask, source), [values, source])
    for found, right in zip(ours, theirs, strict=True):
        torch.testing.assert_close(found, right)
    assert len(programs) == 2
    assert not any(program.fallbacks for program in programs)

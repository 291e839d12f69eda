# SPDX-License-Identifier: Apache-2.0
"""Runs functions that write to places of their inputs in Triton's interpreter, beside eager torch;
prints for each how many copies of an input its program makes, and whether all numbers are torch's.

Run as a program: `in_place_worker.py`, with TRITON_INTERPRET=1.
"""

import json
import sys

import torch

from bundler.codegen import generate
from bundler.runtime.program.program_plan import Allocate

SIZES = (6, 50)


def appended(cache, places, rows):
    cache.index_copy_(0, places, rows)
    return cache.sum(1) + 1


def put(cache, places, rows):
    cache[places] = rows * 2
    return (cache * rows.sum()).amax(1)


def added(cache, places, rows):
    cache.index_put_((places,), rows, accumulate=True)
    return cache.amax(0)


def read_before(cache, places, rows):
    sums = cache.sum(1)
    cache.index_copy_(0, places, rows)
    return sums + cache.sum(1)


def both_changed(cache, places, rows):
    cache.index_copy_(0, places, rows)
    rows.add_(1)
    return cache.sum()


def read_at_the_same_places(cache, places, rows):
    old = cache[places] + 1
    cache.index_copy_(0, places, rows)
    return old, cache.amin(0)


def input_is_returned(cache, places, rows):
    cache.index_copy_(0, places, rows)
    return cache, cache[2:]


def old_is_read_later(cache, places, rows):
    twice = cache * 2
    cache.index_copy_(0, places, rows)
    return twice.exp().sum(0) + cache.sum(0)


def old_is_written(cache, places, rows):
    cache.index_copy_(0, places, cache[places - 1] + rows)
    return cache.sum(0)


def copy_is_returned(cache, places, rows):
    found = cache.index_copy(0, places, rows)
    cache.copy_(found)
    return found


def only_read(cache, places, rows):
    return cache.index_copy(0, places, rows).sum(0)


def copied_further(cache, places, rows):
    cache.index_copy_(0, places, rows)
    rows.copy_(cache[1:3])
    return cache[0] + 1


def decides_places(cache, places, rows):
    cache.index_copy_(0, places, rows.abs())
    return rows[(cache[:, 0] > 0).long()].sum(0)


def other_shape_back(cache, places, rows):
    cache.copy_(cache.t().reshape(SIZES).index_copy(0, places, rows))
    return cache.sum(0)


#: Functions, and how many copies of the input each needs.
CASES = {
    appended: 0,
    put: 0,
    added: 0,
    read_before: 0,
    read_at_the_same_places: 1,
    both_changed: 0,
    copied_further: 0,
    input_is_returned: 0,
    old_is_read_later: 1,
    old_is_written: 1,
    copy_is_returned: 1,
    only_read: 1,
    decides_places: 1,
    other_shape_back: 1,
}


def given(transposed):
    cache = torch.randn(*SIZES[::-1]).t() if transposed else torch.randn(*SIZES)
    return [cache, torch.tensor([4, 1]), torch.randn(2, SIZES[1])]


def outcome(function, transposed):
    """Return how many tensors as large as the input are made for its copies, and whether results
    and inputs are eager torch's.
    """
    torch.manual_seed(0)
    ours = given(transposed)
    theirs = [one.clone() for one in ours]
    program = generate(function, [one.clone() for one in ours])
    assert not program.fallbacks, program.fallbacks
    results, expected = program.run(*ours), function(*theirs)
    expected = expected if isinstance(expected, tuple) else (expected,)
    pairs = zip([*results, *ours], [*expected, *theirs], strict=True)
    equal = all(torch.allclose(one, other, rtol=1e-5, atol=1e-5) for one, other in pairs)
    steps = [step for step in program.plan.steps if isinstance(step, Allocate)]
    return sum(step.spec.sizes == SIZES for step in steps), equal


if __name__ == "__main__":
    outcomes = {
        f"{function.__name__}{' transposed' if transposed else ''}": [
            *outcome(function, transposed),
            copies,
        ]
        for function, copies in CASES.items()
        for transposed in (False, True)
    }
    json.dump(outcomes, sys.stdout)

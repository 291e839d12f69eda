# SPDX-License-Identifier: Apache-2.0
"""Which pairs of loops are tried for one kernel, and which of them go first."""

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402

from bundler.codegen.program import generate  # noqa: E402
from bundler.runtime.program.program_plan import Launch  # noqa: E402


def launches_of(function, *tensors):
    """Return the arguments of each launch of a function's program."""
    program = generate(function, [tensor.to("meta") for tensor in tensors])
    return [step.arguments for step in program.plan.steps if isinstance(step, Launch)]


@pytest.mark.parametrize("wide", [0, 1])
def test_bytes_decide_and_not_elements(wide):
    """One loop could share a kernel with either of two others, each of which reads what it reads:
    that with the wider elements gets it.
    """

    def function(p, q):
        first = p
        for number in range(20):  # so much that it is stored, and not computed again
            first = first * 3 + number
        # Reads all of the first loop at other places, so these two are never one kernel.
        last = q * 2 + first.flip(0)
        return first, last, p * 3 + q * 5

    dtypes = [torch.int8, torch.int8]
    dtypes[wide] = torch.float64
    launches = launches_of(function, *(torch.empty(4096, dtype=dtype) for dtype in dtypes))
    assert len(launches) == 2
    read = [sum(f"@arg{n}" in map(str, launch) for launch in launches) for n in (0, 1)]
    assert read[wide] == 1


def test_what_saves_far_less_waits_for_what_the_better_pairs_became():
    """Two small sums over the labels would share a kernel; then what is between them keeps the
    large loops of a cross entropy apart, which read the scores once more.
    """

    def function(scores, labels, upstream):
        loss, backward = torch.func.vjp(
            lambda one: torch.nn.functional.cross_entropy(one, labels), scores
        )
        return loss, *backward(upstream)

    labels = torch.zeros(256, dtype=torch.int64)
    launches = launches_of(function, torch.empty(256, 4000), labels, torch.empty(()))
    assert len(launches) == 3
    assert sum(4000 in launch for launch in launches) == 1


@pytest.mark.parametrize(("batch", "apart"), [(8, True), (512, False)])
def test_windows_before_few_rows_have_a_kernel_of_their_own(batch, apart):
    """Eight programs would read each window for long rows; of many rows there are as many programs
    as a kernel of windows has.
    """

    def function(a):
        windows = F.avg_pool2d(a, 3, 1, 1, count_include_pad=False)
        return F.group_norm(a + windows, 1)

    program = generate(function, [torch.empty(batch, 16, 16, 16, device="meta")])
    kernels = [kernel.text for kernel in program.kernels.values()]
    (norm,) = [one for one in kernels if one.kind == "reduction"]
    assert (norm.counts["num_load"] < 9) is apart
    assert any(one.counts["num_load"] >= 9 and one.kind == "pointwise" for one in kernels) is apart


def _norm_across(x, scale):
    spread, mean = torch.var_mean(x, 0, correction=0)
    return torch.relu((x - mean) * torch.rsqrt(spread + 1e-5) * scale), mean


@pytest.mark.parametrize(("rows", "kernels"), [(48, 1), (128, 1), (160, 2)])
def test_who_reads_results_of_short_rows_across_memory_is_computed_with_them(rows, kernels):
    """A batch norm of few pixels has short rows: what is computed of each element goes through
    memory along the channels, and is turned to go through the rows; longer rows would be read once
    more by fewer programs. So many channels need no pieces of rows.
    """
    launches = launches_of(_norm_across, torch.empty(rows, 1 << 14), torch.empty(1 << 14))
    assert len(launches) == kernels

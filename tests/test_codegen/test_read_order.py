# SPDX-License-Identifier: Apache-2.0
"""What torch would keep in the order of a permuted operand lies in rows where half of what it reads
does.
"""

import pytest

pytest.importorskip("triton")
torch = pytest.importorskip("torch")

import sympy  # noqa: E402
import torch.nn.functional as F  # noqa: E402

from bundler.codegen.loops import read_order  # noqa: E402
from bundler.codegen.loops.lazy_tensors import variables  # noqa: E402
from bundler.codegen.loops.loop_terms import TermPool  # noqa: E402
from bundler.codegen.program import generate  # noqa: E402
from bundler.runtime.program.program_plan import Launch  # noqa: E402

# So many that the sum is stored between them, since it reads too much to be computed again.
BLOCKS = 8


def blocks(image, weight):
    """Residual blocks, as of a transformer, over the pixels of an image."""
    x = image.permute(0, 2, 3, 1)
    for _ in range(BLOCKS):
        x = x + F.layer_norm(x, (96,)) @ weight
    return x.mean((1, 2))


def launched(function, *inputs, **options):
    with torch.no_grad():
        program = generate(function, inputs, device="cuda", **options)
    kernels = [step.kernel for step in program.plan.steps if isinstance(step, Launch)]
    return [program.kernels[name].text for name in kernels]


def images():
    return torch.ones(2, 96, 14, 14), torch.ones(96, 96)


def norms(kernels):
    return [one for one in kernels if dict(one.dimensions).get("r0_") == 96]


def test_the_norm_of_a_sum_is_one_kernel():
    """Blocks behind a permuted image are normed along memory, by one kernel that adds and norms, as
    soon as a sum was stored.
    """
    kernels = launched(blocks, *images())
    alone = [one for one in norms(kernels) if one.reduction_hint == "INNER"]
    assert len(alone) >= BLOCKS // 2
    assert all(one.kind == "persistent_reduction" for one in alone)


def test_without_rows_each_norm_reads_across(monkeypatch):
    """The sum of the image and what lies in rows has torch's order, that of the image, unless it is
    asked.
    """
    asked = len(launched(blocks, *images()))
    monkeypatch.setattr("bundler.codegen.lower.reads_rows", lambda *_: False)
    kernels = launched(blocks, *images())
    assert len(kernels) > asked
    assert not any(one.reduction_hint == "INNER" for one in norms(kernels))


@pytest.mark.parametrize(
    ("reads", "rows"),
    [
        (["12*i0 + 4*i1 + i2"], True),
        (["12*i0 + i1 + 3*i2"], False),
        (["12*i0 + 4*i1 + i2", "12*i0 + i1 + 3*i2"], True),
        (["12*i0 + 4*i1 + i2", "12*i0 + i1 + 3*i2", "24*i0 + i1 + 6*i2"], False),
        (["i2", "12*i0 + i1 + 3*i2"], False),
        (["i2"], False),
    ],
)
def test_reads_vote(reads, rows):
    """Half of the reads that have each element decide; one that many elements share does not."""
    pool, sizes = TermPool(), tuple(map(sympy.Integer, (5, 3, 4)))
    names = variables("i", sizes)
    places = {str(name): name for name in names}
    body = pool.load("a", sympy.sympify(reads[0], locals=places), "float32")
    for number, index in enumerate(reads[1:]):
        more = pool.load(f"b{number}", sympy.sympify(index, locals=places), "float32")
        body = pool.operate("add", body, more, dtype="float32")
    assert read_order.reads_rows(body, names, sizes) is rows

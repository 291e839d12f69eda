# SPDX-License-Identifier: Apache-2.0
"""Products that are small enough for the host's time to count: by `templates="by rule"` they are
kernels of one candidate.
"""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from bundler.codegen import GenerateOptions, ProgramPolicy, generate

BY_RULE = GenerateOptions(templates="by rule")
HALF, FULL = torch.bfloat16, torch.float32


def empty(*sizes, dtype=HALF):
    return torch.empty(sizes, dtype=dtype)


def layer(x, weight, bias):
    return F.gelu(F.linear(x, weight, bias))


def launched(program):
    return [name for name in program.kernels if name.startswith("triton_mm")]


@pytest.mark.parametrize(
    ("rows", "columns", "length", "dtype", "is_kernel"),
    [
        (512, 1024, 1024, HALF, True),
        (512, 1032, 1024, HALF, False),
        (512, 1024, 1024, torch.float16, True),
        (512, 1024, 1024, FULL, False),
        (64, 1024, 2048, HALF, True),
        (64, 1024, 2056, HALF, False),
        (401408, 16, 16, HALF, True),
        (4, 3, 5, HALF, True),
    ],
)
def test_small_products_of_16_bits_are_kernels(rows, columns, length, dtype, is_kernel):
    """Of up to 2**29 multiplications, and short sums; what is computed of them goes with them."""
    inputs = [
        empty(*sizes, dtype=dtype) for sizes in ((rows, length), (columns, length), (columns,))
    ]
    program = generate(layer, inputs, device="cuda", options=BY_RULE)
    assert len(launched(program)) == is_kernel
    assert bool(program.fallbacks) != is_kernel
    assert len(program.kernels) == 1


def test_sizes_that_change_stay_calls():
    """Nobody knows whether they are small."""
    inputs = [empty(24, 64), empty(32, 64), empty(32)]
    program = generate(layer, inputs, device="cuda", dynamic=True, options=BY_RULE)
    assert program.fallbacks
    assert not launched(program)


@pytest.mark.parametrize(
    ("options", "device"),
    [
        (GenerateOptions(), "cuda"),
        (GenerateOptions(templates="by rule", policy=ProgramPolicy(deterministic=True)), "cuda"),
        (BY_RULE, "cpu"),
    ],
)
def test_without_the_rule_they_are_called(options, device):
    """Without a word about templates, where the order of additions counts, and elsewhere."""
    inputs = [empty(24, 64), empty(32, 64), empty(32)]
    program = generate(layer, inputs, device=device, options=options)
    assert program.fallbacks
    assert not launched(program)


@pytest.mark.parametrize(
    "function",
    [
        lambda x, y, z: x[:1] @ y.t(),
        lambda x, y, z: x @ y[:1].t(),
        lambda x, y, z: torch.addmm(z, x, y.t(), alpha=2),
    ],
    ids=["a row", "a column", "a factor"],
)
def test_vectors_and_sums_with_factors_are_left_alone(function):
    """Others have rules for the one, and nobody measured the other."""
    inputs = [empty(24, 64), empty(32, 64), empty(32)]
    program = generate(function, inputs, device="cuda", options=BY_RULE)
    assert program.fallbacks
    assert not launched(program)


def test_torchs_switch_for_one_order_of_additions_calls_them():
    inputs = [empty(24, 64), empty(32, 64), empty(32)]
    torch.use_deterministic_algorithms(True)
    try:
        assert not launched(generate(layer, inputs, device="cuda", options=BY_RULE))
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(("capability", "is_kernel"), [((7, 5), False), ((8, 0), True)])
def test_a_gpu_before_ampere_calls_them(monkeypatch, capability, is_kernel):
    """Triton has no product in bfloat16 for it; large uneven ones are called there, too."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: capability)
    for rows, columns, length in ((24, 32, 64), (256, 2049, 1536)):
        inputs = [empty(rows, length), empty(columns, length), empty(columns)]
        program = generate(layer, inputs, device="cuda", options=BY_RULE)
        assert bool(launched(program)) == is_kernel


def scaled(x, weight, scale):
    return (x * scale) @ weight.t()


@pytest.mark.parametrize("templates", ["by rule", "all"])
def test_their_only_candidate_loads_both_operands(templates):
    """A kernel that computes one takes more shared memory than its rule knows of, and has others to
    try.
    """
    inputs = [empty(4096, 64), empty(64, 64), empty(4096, 1)]
    options = GenerateOptions(templates=templates)
    program = generate(scaled, inputs, device="cuda", options=options)
    alone = templates == "by rule"
    (name,) = launched(program)
    assert len(program.kernels) == 1 + alone
    assert ("unmeasured=True" in program.sources[name]) == alone


@pytest.mark.parametrize("templates", ["by rule", "all"])
def test_they_have_no_form_that_takes_turns(templates):
    """It is for many large tiles, and more text to compile."""
    inputs = [empty(4096, 64), empty(64, 64), empty(64)]
    program = generate(layer, inputs, device="cuda", options=GenerateOptions(templates=templates))
    (name,) = launched(program)
    assert ("PROGRAMS" in program.sources[name]) == (templates == "all")


def test_sums_of_many_large_products_are_added_up_by_the_library():
    """Kernels would need all of the products at once."""
    shared, right = empty(2048, 1024), empty(256, 1024)
    steps = [empty(2048, 256) for _ in range(5)]

    def gradient(shared, right, *steps):
        for one in steps:
            shared = shared + one @ right
        return shared

    program = generate(gradient, [shared, right, *steps], device="cuda", options=BY_RULE)
    assert len(program.fallbacks) == len(steps)


class Block(nn.Module):
    """A part of a transformer, whose products are small."""

    def __init__(self, width=64):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.projections = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.out, self.up, self.down = (
            nn.Linear(*sizes) for sizes in ((width, width), (width, 4 * width), (4 * width, width))
        )

    def forward(self, x):
        query, key, value = (one(self.norm(x)) for one in self.projections)
        x = x + self.out(F.scaled_dot_product_attention(query, key, value))
        return x + self.down(F.gelu(self.up(x)))


def test_every_candidate_of_a_block_compiles(tmp_path, monkeypatch):
    """With its bias, activation and residual, for both makers; none of a transformer is called."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    model = Block().to(HALF).eval()
    with torch.no_grad():
        program = generate(model, [empty(2, 24, 64)], device="cuda", options=BY_RULE)
    # What attention is taken apart into has a batch.
    assert {one.operator for one in program.fallbacks} == {"aten.bmm.default"}
    bundle = program.build(["cuda:90", "hip:gfx942"], candidates="all")
    names = [kernel.name for kernel in bundle.kernels if kernel.name.startswith("triton_mm")]
    assert len(names) == 2 * len(launched(program))


# -------------------------------------------------------------------------------------------- A GPU


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [HALF, torch.float16])
def test_a_block_and_its_gradients_are_eager_torchs(dtype, tmp_path, monkeypatch):
    """Results are as near to float64's as eager's, and half again, and nothing is measured."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    torch.manual_seed(0)
    model = Block().cuda()
    given = torch.randn(8, 24, 64, device="cuda")

    def results(function, dtype):
        x = given.to(dtype).requires_grad_()
        (function(x) ** 2).mean().backward()
        return [x.grad, *(one.grad for one in model.parameters())]

    def of(dtype, **options):
        model.to(dtype).zero_grad(set_to_none=True)
        called = torch.compile(model, **options) if options else model
        return [one.double() for one in results(called, dtype)]

    programs = []
    options = {"programs": programs, "keep": False}
    exact, eager = of(torch.float64), of(dtype)
    ours = of(dtype, backend="triton_bundler", options=options)
    assert sum(len(launched(one)) for one in programs) > len([*model.children()])
    for one, other, truth in zip(ours, eager, exact, strict=True):
        off, allowed = ((it - truth).norm() / truth.norm() for it in (one, other))
        assert off <= 1.5 * allowed + 1e-3

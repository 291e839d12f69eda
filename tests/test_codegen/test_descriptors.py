# SPDX-License-Identifier: Apache-2.0
"""Tensor descriptors of generated kernels: which loads and stores have them, that no bit tells,
what they compile to, and that a launch without Triton brings their scratch memory.
"""

import math
import re

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from bundler.codegen.program import GenerateOptions, ProgramPolicy, generate  # noqa: E402
from bundler.format.opaque_files import program_name  # noqa: E402
from bundler.runtime import DryDriver  # noqa: E402
from bundler.runtime.heuristics.facts import Device, Policy  # noqa: E402
from bundler.runtime.launch.bundle_kernels import load  # noqa: E402
from bundler.runtime.program.bundle_programs import StaticLauncher  # noqa: E402
from bundler.runtime.program.program_plan import read_plan  # noqa: E402

TILES = GenerateOptions(policy=ProgramPolicy(use_tensor_descriptor=True))
TARGETS = ("cuda:80", "cuda:90", "cuda:100", "hip:gfx942", "hip:gfx950")
LIMIT_S = 580
SCRATCH_BYTES = 128  # of each descriptor, on GPUs with the engine for bulk copies


def meta(*sizes, dtype=torch.float32):
    return torch.empty(sizes, dtype=dtype, device="meta")


def turned(a, b):
    return a + b.t()


def of_48_columns(a):
    """Return the maxima of rows whose length torch knows by that of a constant."""
    return (a + torch.arange(48.0, device=a.device)).amax(1)


SQUARES = (meta(64, 48), meta(48, 64))


def text_of(function, *inputs, options=TILES, **named):
    return "\n".join(generate(function, [*inputs], options=options, **named).sources.values())


def lines_of(text):
    return re.findall(r"(\w+) = tl.make_tensor_descriptor\((.*)\)$", text, re.MULTILINE)


def counts(text):
    """Return how many loads, and how many stores, go through descriptors."""
    found = [len(re.findall(rf"desc\d+\.{name}\(", text)) for name in ("load", "store")]
    return tuple(found)


@pytest.mark.parametrize(
    ("function", "inputs", "expected"),
    [
        (turned, SQUARES, (2, 1)),
        (lambda a: a - a.amax(1, keepdim=True), [meta(64, 48)], (1, 1)),
        (lambda a: a.amax(1), [meta(64, 4800)], (1, 0)),
        (lambda a: a.argmin(1), [meta(64, 48)], (1, 0)),
        (lambda a: a.sum(1), [meta(64, 48, dtype=torch.int32)], (1, 0)),
        (lambda a: a[:, 4:].amax(1), [meta(64, 48)], (1, 0)),
        (lambda a, b: a.add_(b.t()), SQUARES, (2, 1)),
        # The row of a bias is one run of memory, and so is a kernel of one dimension.
        (lambda a, b, c: a + b.t() + c, [*SQUARES, meta(48)], (2, 1)),
        (lambda a: a + 1, [meta(64, 48)], (0, 0)),
        # Sums of floats in another order have other bits, and so have scans.
        (lambda a: a.sum(1), [meta(64, 48)], (0, 0)),
        (lambda a: a.var(1), [meta(64, 48)], (0, 0)),
        (lambda a: torch.softmax(a, 1), [meta(64, 48)], (0, 0)),
        (lambda a: a.cumsum(1), [meta(64, 48)], (0, 0)),
        # Strides, first elements and rows that are no multiples of 16 bytes, or shorter.
        (lambda a: a.amax(1), [meta(64, 47)], (0, 0)),
        (lambda a: a[:, 3:].amax(1), [meta(64, 48)], (0, 0)),
        (lambda a: a.amax(1), [meta(64, 4)[:, :3]], (0, 0)),
        (lambda a: a.amax(1), [meta(64, 40, dtype=torch.uint8)], (0, 0)),
        # Memory does not run along a dimension, or runs back.
        (lambda a: a[:, ::2].amax(1), [meta(64, 48)], (0, 0)),
        (lambda a: a.flip(1).amax(1), [meta(64, 48)], (0, 0)),
        # One dimension is made of two, an address of values, and elements are behind a mask.
        (lambda a: a.amax((0, 2)), [meta(8, 16, 32)], (0, 0)),
        (lambda a, i: a[i].amax(1), [meta(64, 48), meta(9, dtype=torch.int64)], (0, 0)),
        (lambda a: torch.nn.functional.pad(a, (0, 0, 0, 8)).amax(1), [meta(64, 48)], (0, 0)),
        (lambda a: a.any(1), [meta(64, 48, dtype=torch.bool)], (0, 0)),
    ],
)
def test_what_descriptors_reach(function, inputs, expected):
    """Whole dimensions with strides of 16 bytes times a number, in kernels whose bits do not depend
    on an order.
    """
    assert counts(text_of(function, *inputs)) == expected


def test_rows_overlap_or_lie_beyond_32_bits():
    """A stride shorter than a row, and addresses of 64 bits, have pointers."""
    overlapping = meta(4096).as_strided((64, 48), (16, 1))
    assert counts(text_of(lambda a: a.amax(1), overlapping)) == (0, 0)
    wide = GenerateOptions(policy=TILES.policy, wide_indices=True)
    assert counts(text_of(of_48_columns, meta(64, 48), dynamic=True, options=wide)) == (0, 0)


def test_rows_may_change_from_call_to_call_but_not_strides():
    """The number of rows is an argument of the kernel; a stride is known to be a multiple of 16
    bytes only if it is a number.
    """
    (line,) = lines_of(text_of(of_48_columns, meta(64, 48), dynamic=True))
    assert line == ("desc0", "in_ptr0, [xnumel, r0_numel], [48, 1], [XBLOCK, R0_BLOCK]")
    assert counts(text_of(lambda a: a.amax(1), meta(64, 48), dynamic=True)) == (0, 0)


def test_without_the_policy_nothing_has_descriptors():
    """Nor does its name stand in the text."""
    assert "descriptor" not in text_of(turned, *SQUARES, options=GenerateOptions())


def test_blocks_are_as_long_as_descriptors_need():
    """At least 16 bytes along memory, for heuristics and for descent, of each candidate."""
    program = generate(turned, [one.to(torch.bfloat16) for one in SQUARES], options=TILES)
    (kernel,) = program.modules.values()
    assert kernel.facts.tma_min_blocks == {"XBLOCK": 8, "YBLOCK": 8}
    for device in (Device("cuda", 132, major=9), Device("hip", 304, 64)):
        made = kernel.on(device, Policy(max_autotune=True))
        for config in made.configs:
            assert min(config.kwargs[name] for name in ("XBLOCK", "YBLOCK")) >= 8
        assert made.tuned.options.space.min_blocks == {"x": 8, "y": 8}


def test_max_autotune_measures_both_forms():
    """Plain first; with the rule there is only the form with descriptors, and where they reach
    nothing only the plain one.
    """
    both = GenerateOptions(policy=ProgramPolicy(max_autotune=True))
    plain, tiles = generate(turned, SQUARES, options=both).sources.values()
    assert (counts(plain), counts(tiles)) == ((0, 0), (2, 1))
    program = generate(turned, SQUARES, options=both)
    first, second = program.kernels
    assert program.plan.kernels[first].others == {second: (0, 1, 2, 3, 4)}
    rule = GenerateOptions(policy=ProgramPolicy(max_autotune=True, use_tensor_descriptor=True))
    assert len(generate(turned, SQUARES, options=rule).kernels) == 1
    assert len(generate(lambda a: a + 1, [meta(64)], options=both).kernels) == 1
    assert ProgramPolicy(deterministic=True, use_tensor_descriptor=True).metadata


@pytest.mark.slow
@pytest.mark.toolchain
@pytest.mark.parametrize("target", TARGETS)
def test_every_kind_of_tile_compiles(tmp_path, monkeypatch, target):
    """For GPUs without the engine, too, where Triton makes pointers of them."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.int8, torch.float8_e5m2):
        square = meta(64, 64, dtype=dtype)
        program = generate(lambda a: a.t().contiguous(), [square], options=TILES)
        assert counts("".join(program.sources.values())) == (1, 1)
        assert program.build([target]).kernels
    for function, inputs in (
        (lambda a: (a.argmax(1), a - a.amax(1, keepdim=True)), [meta(32, 4800)]),
        (lambda a: a - a.amax(1, keepdim=True), [meta(64, 48)]),
        (lambda a, b: a + b.permute(2, 0, 1), [meta(32, 48, 64), meta(48, 64, 32)]),
    ):
        program = generate(function, inputs, options=TILES)
        assert lines_of("".join(program.sources.values()))
        assert program.build([target]).kernels


class OnTheGpu:
    """What a tensor is to a launch: an address, and where it lies."""

    dtype = torch.float32

    def data_ptr(self):
        return 1 << 40

    def get_device(self):
        return 0


def plan_of(built):
    """Return the plan that a bundle has."""
    (entry,) = (one for one in built.opaque if program_name(one.path) is not None)
    return read_plan(built.read(entry.artifact))


@pytest.mark.toolchain
def test_a_launch_without_triton_brings_scratch_memory(tmp_path, monkeypatch):
    """128 bytes for each descriptor of each program, on the GPUs that have the engine, and none
    elsewhere.
    """
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    program = generate(turned, SQUARES, options=TILES)
    built = program.build(["cuda:90", "hip:gfx942"])
    (name,) = program.kernels
    x, driver = OnTheGpu(), DryDriver("cuda")
    launcher = StaticLauncher(plan_of(built), load(built, driver=driver))
    launcher.bound(name, {"xnumel": 48, "ynumel": 64})(x, x, x, 64, 48)
    launch = driver.launches[-1]
    assert launch.scratch_bytes == (math.prod(launch.grid) * 3 * SCRATCH_BYTES, 0)
    amd = next(one for one in built.kernels if one.target.backend == "hip")
    assert not amd.launch.global_scratch_bytes
    binary = next(one for one in built.kernels if one.target.backend == "cuda")
    text = built.read(next(one for one in binary.artifacts if one.kind == "ptx")).decode()
    assert "cp.async.bulk.tensor.2d" in text


def test_some_bits_are_equal_with_and_without(passed):
    """Of a sum with a transposed input, one of them unaligned, which has to be copied first."""
    passed("descriptor_cases.py", "-k", "first_element")


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S + 20)
def test_all_bits_are_equal_with_and_without(passed):
    """Of any sizes, strides, dtypes and first elements."""
    passed("descriptor_cases.py")


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S + 20)
def test_all_bits_are_equal_on_a_gpu(passed):
    """Whose threads hold a tile in another way behind a descriptor."""
    passed("descriptor_cases.py", interpreted=False)

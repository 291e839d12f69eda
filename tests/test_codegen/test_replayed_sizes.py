# SPDX-License-Identifier: Apache-2.0
"""Calls that a program of a bundle takes: any sizes and seeds by one binary, also multiples of 16,
or 1; programs without kernels.
"""

import pytest

pytest.importorskip("triton")
torch = pytest.importorskip("torch")

from bundler.codegen.program import GenerateOptions, generate  # noqa: E402
from bundler.runtime.launch.drivers.dry_driver import DryDriver  # noqa: E402
from bundler.runtime.program.bundle_programs import load_program  # noqa: E402
from bundler.runtime.program.device_tensors import DeviceTensor  # noqa: E402

pytestmark = pytest.mark.slow


class Memory:
    """Gives out addresses."""

    def __init__(self):
        self.taken = 0

    def allocate(self, dtype, sizes, strides):
        self.taken += 1
        return DeviceTensor(
            0x1000_0000 + 0x100_0000 * self.taken, dtype, tuple(sizes), tuple(strides)
        )

    def view(self, tensor, sizes, strides, offset):
        return DeviceTensor(tensor.address + 4 * offset, tensor.dtype, tuple(sizes), tuple(strides))

    def integers(self, numbers):
        return self.allocate("int64", (len(numbers),), (1,))


def launches(bundle, *shapes):
    memory, driver = Memory(), DryDriver("cuda")
    given = [memory.allocate("float32", shape, (shape[1], 1)) for shape in shapes]
    load_program(bundle, memory=memory, driver=driver)(*given)
    return len(driver.launches)


def test_sizes_that_change_are_launched_whatever_divides_them(tmp_path):
    """The example's sizes are no multiples of 16; those of later calls are, or are not."""

    def function(a):
        return torch.softmax(a, -1), (a + 1).sum(0)

    options = GenerateOptions(sources=str(tmp_path))
    bundle = generate(function, [torch.ones(40, 72)], dynamic=True, options=options).build(
        ["cuda:90"]
    )
    counts = {
        shape: launches(bundle, shape)
        for shape in ((40, 72), (64, 128), (16, 16), (17, 33), (2, 1024))
    }
    assert len(set(counts.values())) == 1
    assert min(counts.values()) >= 1


def test_seeds_are_launched_from_any_place(tmp_path):
    """Kernels that differ in the place of their seed alone are one, launched with 0, 1, 2 and so
    on.
    """

    def function(a):
        return tuple(torch.nn.functional.dropout(a, 0.5).sum(1) for _ in range(3))

    options = GenerateOptions(sources=str(tmp_path))
    program = generate(function, [torch.ones(64, 64)], options=options)
    assert launches(program.build(["cuda:90"]), (64, 64)) >= 1


def test_a_program_without_kernels_is_replayed(tmp_path):
    """What only returns views has no kernel for any device, and needs none."""
    options = GenerateOptions(sources=str(tmp_path))
    bundle = generate(lambda a: a[2:].unsqueeze(1), [torch.ones(8, 4)], options=options).build(
        ["cuda:90"]
    )
    memory = Memory()
    given = memory.allocate("float32", (8, 4), (4, 1))
    (result,) = load_program(bundle, memory=memory, driver=DryDriver("cuda"))(given)
    assert (result.address, result.shape) == (given.address + 2 * 4 * 4, (6, 1, 4))

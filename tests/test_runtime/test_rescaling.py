# SPDX-License-Identifier: Apache-2.0
"""Registers and spills are read off binaries, and decide whether a reduction block is halved."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from bundler.errors import FormatError
from bundler.format.entries import Target
from bundler.runtime import Config, DryDriver
from bundler.runtime.tuning.occupancy import Occupancy, usage_of
from bundler.runtime.tuning.tuner import may_rescale, rescaled

H100 = Occupancy("cuda", 9, 65536, 2048, 32, 132)
HINTS = {"x": 4096, "r0_": 4096}


@pytest.mark.parametrize(
    ("x_block", "r_block", "warps", "registers", "size", "expected"),
    [
        (1, 2048, 16, 32, 4096, None),
        (1, 2048, 16, 64, 256, None),
        (1, 2048, 16, 64, 265, 1024),
        (1, 2048, 16, 255, 133, 1024),
        (8, 64, 8, 128, 65536, None),
        (1, 2048, 16, None, 4096, None),
        # A size that is no power of two counts in whole blocks.
        (2, 2048, 16, 64, 528, None),
        (2, 2048, 16, 64, 529, 1024),
    ],
)
def test_a_reduction_block_is_halved_as_in_the_table(
    x_block, r_block, warps, registers, size, expected
):
    """Only where many registers keep blocks waiting, and more blocks than fit are there to run."""
    found = rescaled(
        Config({"XBLOCK": x_block, "R0_BLOCK": r_block}, warps), registers, {"x": size}, H100
    )
    assert (found and found.kwargs["R0_BLOCK"]) == expected


def test_the_largest_block_is_halved_and_a_split_is_none():
    """Of two reduction blocks the larger; RSPLIT begins with an R and is no block; a floor and a
    mark hold.
    """
    both = Config({"XBLOCK": 1, "R0_BLOCK": 32, "R1_BLOCK": 64, "RSPLIT_SIZE": 4096}, 16)
    assert dict(rescaled(both, 255, HINTS, H100).kwargs) == {**both.kwargs, "R1_BLOCK": 32}
    assert rescaled(both.with_kwargs(R0_BLOCK=128), 255, HINTS, H100, min_r=128) is None
    assert (
        rescaled(both, 255, HINTS, H100, min_r=128).kwargs["R1_BLOCK"] == 32
    )  # torch's floor is one of R0_BLOCK
    assert rescaled(Config({"R0_BLOCK": 2048}, 16, dynamic_scale=False), 255, HINTS, H100) is None


def test_only_looped_reductions_on_new_devices_are_looked_at():
    """Not in deterministic mode, not persistent, not without size hints, not before compute
    capability 8.
    """
    assert may_rescale("reduction", HINTS, H100, deterministic=False)
    assert not may_rescale("reduction", HINTS, H100, deterministic=True)
    assert not may_rescale("persistent_reduction", HINTS, H100, deterministic=False)
    assert not may_rescale("reduction", {}, H100, deterministic=False)
    assert not may_rescale(
        "reduction", HINTS, Occupancy("cuda", 7, 65536, 1024, 32, 68), deterministic=False
    )
    assert may_rescale(
        "reduction", HINTS, Occupancy("hip", 0, 65536, 2048, 64, 304), deterministic=False
    )


def test_what_a_multiprocessor_has_follows_from_the_architecture():
    """An H200 holds 2048 threads a multiprocessor, so 32 registers a thread fill it."""
    found = Occupancy.of("cuda", DryDriver("cuda").properties(0))
    assert (found.major, found.registers // found.threads, found.multiprocessors) == (9, 32, 132)
    assert Occupancy.of("hip", DryDriver("hip").properties(0)).warp_size == 64


def test_registers_and_spills_are_those_that_the_vendors_tool_shows(recorded, tmp_path):
    """For every recorded cubin, as cuobjdump prints them; AMD's metadata tell them too."""
    triton = pytest.importorskip("triton")
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    cubins = [kernel for kernel in recorded.bundle.kernels if kernel.target.backend == "cuda"]
    if not tool.exists() or shutil.which(str(tool)) is None:
        pytest.skip("this Triton has no cuobjdump")
    names = []
    for number, kernel in enumerate(cubins):
        (tmp_path / f"{number}.cubin").write_bytes(recorded.bundle.read(kernel.binary))
        names.append(str(tmp_path / f"{number}.cubin"))
    for name, kernel in list(zip(names, cubins, strict=True))[::4]:
        shown = subprocess.run(
            [tool, "--dump-resource-usage", name], capture_output=True, text=True, check=True
        ).stdout
        registers, stack = map(int, re.search(r"REG:(\d+) STACK:(\d+)", shown).groups())
        usage = usage_of(Path(name).read_bytes(), kernel.spec.entry, kernel.target)
        assert (usage.registers, usage.spills) == (registers, stack // 4)
    for kernel in recorded.bundle.kernels:
        if kernel.target.backend == "hip":
            usage = usage_of(recorded.bundle.read(kernel.binary), kernel.spec.entry, kernel.target)
            assert usage.registers >= 0
            assert usage.spills == 0


def test_a_damaged_binary_is_a_typed_error(recorded):
    """Nothing is guessed about bytes that are no binary."""
    kernel = next(k for k in recorded.bundle.kernels if k.target.backend == "hip")
    with pytest.raises(FormatError):
        usage_of(recorded.bundle.read(kernel.binary), "another", Target("hip", "gfx942", 64))

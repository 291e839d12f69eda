# SPDX-License-Identifier: Apache-2.0
"""Candidates for products of matrices: they fit each device, suit the sizes, and are the same
everywhere.
"""

import itertools
import json
import math
from pathlib import Path

import pytest

from bundler.errors import ConfigError
from bundler.runtime import heuristics
from bundler.runtime.heuristics.block_limits import max_block
from bundler.runtime.heuristics.facts import Device, Facts, Policy, Setting
from bundler.runtime.heuristics.product_rules import (
    LARGEST_BLOCKS,
    largest_block,
    product_configs,
)

H200 = Device("cuda", 132, major=9)
# Shared memory of a program.
DEVICES = {
    Device("cuda", 108, major=8): 99 << 10,
    H200: 227 << 10,
    Device("cuda", 188, major=12): 99 << 10,
    Device("cuda", 40, major=7): 48 << 10,
    Device("hip", 304, warp_size=64): 64 << 10,
}
BYTES = {"fp32": 4, "tf32": 4, "fp16": 2, "bf16": 2, "fp8": 1}


def sizes(z, y, x, r0_):
    return {"z": z, "y": y, "x": x, "r0_": r0_}


def tile(config):
    return tuple(config.kwargs[name] for name in ("YBLOCK", "XBLOCK", "R0_BLOCK"))


@pytest.mark.parametrize("device", DEVICES, ids=str)
@pytest.mark.parametrize("operands", BYTES)
def test_each_candidate_fits_sizes_and_shared_memory(device, operands):
    """Blocks are powers of two within the limits that masks count on, never below what matrix units
    take, and so many stages of both operands lie in shared memory, one less on AMD.
    """
    for numbers in itertools.product((1, 64), (1, 33, 4096), (16, 8192), (1, 63, 8192)):
        hints = sizes(*numbers)
        found = product_configs(hints, Setting(device), operands=operands)
        assert found
        assert len(set(found)) == len(found) <= 8
        for config in found:
            y, x, r = tile(config)
            for axis, block in zip(("y", "x", "r0_"), (y, x, r), strict=True):
                assert block & (block - 1) == 0
                least = 32 if operands == "fp8" and axis == "r0_" else 16
                most = max(least, 1 << (hints[axis] - 1).bit_length())
                assert least <= block <= min(LARGEST_BLOCKS[axis], most)
                assert block <= largest_block(axis, hints[axis], operands)
            assert config.num_stages >= 1
            held = config.num_stages - device.is_hip
            assert held * (y + x) * r * BYTES[operands] <= DEVICES[device]


def test_the_first_candidate_fills_the_device():
    """Large tiles where there are many, small ones where those would leave processors idle."""

    def first(*numbers, operands="bf16"):
        return tile(product_configs(sizes(*numbers), Setting(H200), operands=operands)[0])

    assert first(1, 8192, 8192, 8192) == (128, 256, 64)
    assert first(1, 8192, 8192, 8192, operands="tf32") == (128, 256, 32)
    assert first(1, 16, 4096, 4096)[0] == 16
    small = first(1, 512, 512, 4096)
    assert small[0] * small[1] <= 64 * 64
    assert first(64, 512, 512, 64)[:2] in {(128, 128), (128, 256), (256, 128)}


TILED = Facts(tma_min_blocks={"R0_BLOCK": 16})


@pytest.mark.parametrize("device", [*DEVICES, Device("cuda", 148, major=10)], ids=str)
@pytest.mark.parametrize("operands", ["bf16", "fp8"])
def test_programs_take_turns_where_an_engine_brings_operands(device, operands):
    """On devices that have one, as many programs as run at once, whose stages lie in shared memory
    beside what is stored; on others each block has a program, whatever the kernel can.
    """
    setting = Setting(device, TILED, Policy(max_autotune=True))
    found = product_configs(sizes(1, 8192, 8192, 8192), setting, operands=operands)
    assert all(config.kwargs["PROGRAMS"] % device.multiprocessors == 0 for config in found)
    turns = [config for config in found if config.kwargs["PROGRAMS"]]
    assert bool(turns) == (device.major in {9, 10})
    assert len(turns) < len(found)
    for config in turns:
        y, x, r = tile(config)
        at_once = config.kwargs["PROGRAMS"] // device.multiprocessors
        held = config.num_stages * (y + x) * r * BYTES[operands]
        assert at_once * (held + (1 << 10)) <= 228 << 10
    plain = product_configs(sizes(1, 8192, 8192, 8192), Setting(device), operands=operands)
    assert all("PROGRAMS" not in config.kwargs for config in plain)


def test_a_long_sum_of_one_round_has_many_stages():
    """No other program of a processor multiplies while one waits. More rounds leave two room."""

    def stages(*numbers):
        return product_configs(sizes(1, *numbers), Setting(H200, TILED), operands="bf16")[0]

    assert tile(stages(512, 768, 3072))[:2] == (64, 64)
    assert tile(stages(1576, 768, 3072))[:2] == (128, 128)
    assert stages(512, 768, 3072).num_stages == 6
    # Taken by descriptors, with room for what follows the sum.
    assert stages(1576, 768, 3072).num_stages == 5
    assert stages(4096, 2304, 768).num_stages == 3


@pytest.mark.parametrize("operands", ["bf16", "fp8"])
def test_the_first_candidate_is_almost_as_fast_as_the_fastest_that_was_measured(operands):
    """Of the table's shapes on an H200, where the first one was among those that were measured: at
    most 1.15 times, but for the smallest product in 8 bits.
    """
    path = Path(__file__).parents[2] / "docs" / "results" / f"codegen-products-{operands}.json"
    known = []
    for row in json.loads(path.read_text())["rows"]:
        (rows, columns, length), times = row["shape"], row["candidates"][0]
        if rows == 1:  # no product, but a sum
            continue
        facts = TILED if "PROGRAMS" in next(iter(times)) else Facts()
        hints = sizes(1, rows, columns, length)
        first = str(product_configs(hints, Setting(H200, facts), operands=operands)[0])
        if first in times:
            known.append(times[first] / min(times.values()))
    assert len(known) >= 19
    assert max(known) <= (1.18 if operands == "fp8" else 1.15)
    assert math.prod(known) ** (1 / len(known)) <= 1.03


@pytest.mark.parametrize("rows", [1, 2, 8, 16])
@pytest.mark.parametrize("columns", [1024, 4096, 14336, 128256])
def test_few_rows_are_read_by_many_programs(rows, columns):
    """The other operand comes from memory once, by blocks of 16 rows, each as long as lets most
    processors have a program.
    """
    y, x, r = tile(
        product_configs(sizes(1, rows, columns, 4096), Setting(H200), operands="bf16")[0]
    )
    assert y == 16
    assert r >= 64
    assert -(-columns // x) >= min(columns // 32, 96)


def test_sizes_count_as_they_are():
    """A product of 2,304 columns has not as many programs as one of 4,096."""

    def order(columns):
        found = product_configs(sizes(1, 2048, columns, 4096), Setting(H200), operands="bf16")
        return [tile(config)[:2] for config in found]

    assert order(2304) != order(4096)


def test_a_policy_that_wants_all_gets_all():
    """Else a tuner measures a few."""
    setting = Setting(H200, policy=Policy(max_autotune=True))
    assert len(product_configs(sizes(1, 4096, 4096, 4096), setting, operands="fp16")) > 8


def test_a_deterministic_policy_leaves_the_first():
    """Which candidate runs decides the order of a sum, so no measurement may choose."""
    given = {"hints": sizes(1, 4096, 4096, 4096), "operands": "fp16"}
    (only,) = product_configs(setting=Setting(H200, policy=Policy(deterministic=True)), **given)
    assert only == product_configs(setting=Setting(H200), **given)[0]


@pytest.mark.parametrize(
    ("hints", "operands"),
    [
        (sizes(1, 16, 16, 16), "int8"),
        ({"y": 16, "x": 16, "r0_": 16}, "bf16"),
        (sizes(1, 0, 16, 16), "bf16"),
    ],
)
def test_other_sizes_and_operands_are_refused(hints, operands):
    """A batch of one counts too."""
    with pytest.raises(ConfigError, match="product: expected"):
        product_configs(hints, Setting(H200), operands=operands)


def test_no_descent_leaves_what_masks_count_on():
    """A kernel without a mask has no larger blocks, whatever tunes it."""

    def kernel(x_ptr, znumel, ynumel, xnumel, r0_numel, YBLOCK, XBLOCK, R0_BLOCK, GROUP):
        """Stand in for a product."""

    setting = Setting(H200, Facts(max_blocks=LARGEST_BLOCKS))
    assert {axis: max_block(axis, setting) for axis in LARGEST_BLOCKS} == LARGEST_BLOCKS
    decorate = heuristics.product(
        sizes(1, 4096, 4096, 4096), Setting(H200), operands="bf16", grid="ProductGrid"
    )
    triton = pytest.importorskip("triton")
    tl = pytest.importorskip("triton.language")
    kernel.__annotations__ = dict.fromkeys(("YBLOCK", "XBLOCK", "R0_BLOCK", "GROUP"), tl.constexpr)
    space = decorate(triton.jit(kernel)).space()
    assert {axis: space.max_blocks[axis] for axis in LARGEST_BLOCKS} == LARGEST_BLOCKS
    assert not space.legal("YBLOCK", 512)
    assert space.legal("YBLOCK", 256)

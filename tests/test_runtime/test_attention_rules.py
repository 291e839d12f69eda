# SPDX-License-Identifier: Apache-2.0
"""Candidates for attention: they fit each device, suit the sizes, and are the same everywhere."""

import itertools

import pytest

from bundler.errors import ConfigError
from bundler.runtime.heuristics.attention_rules import LARGEST_BLOCKS, attention_configs
from bundler.runtime.heuristics.facts import Device, Policy, Setting

H200 = Device("cuda", 132, major=9)
# Shared memory of a program.
DEVICES = {
    Device("cuda", 108, major=8): 99 << 10,
    H200: 227 << 10,
    Device("cuda", 188, major=12): 99 << 10,
    Device("hip", 304, warp_size=64): 64 << 10,
}
BYTES = {"fp32": 4, "tf32": 4, "fp16": 2, "bf16": 2}


def sizes(z, y, keys, head):
    return {"z": z, "y": y, "x": head, "r0_": keys, "r1_": head}


def tile(config):
    return tuple(config.kwargs[name] for name in ("YBLOCK", "R0_BLOCK"))


@pytest.mark.parametrize("device", DEVICES, ids=str)
@pytest.mark.parametrize("operands", BYTES)
def test_each_candidate_fits_sizes_and_shared_memory(device, operands):
    """Blocks are powers of two within the limits that masks count on, never below 16, columns and
    elements are whole, and queries and so many stages of keys and values lie in shared memory.
    """
    for z, y, keys, head in itertools.product(
        (1, 64), (1, 32, 4096), (16, 8192), (8, 64, 128, 256)
    ):
        found = attention_configs(sizes(z, y, keys, head), Setting(device), operands=operands)
        assert found, (device, operands, head)
        assert len(set(found)) == len(found) <= 6
        for config in found:
            width = config.kwargs["XBLOCK"]
            assert width == max(16, head)
            for axis, block, size in zip(("y", "r0_"), tile(config), (y, keys), strict=True):
                assert block & (block - 1) == 0
                assert 16 <= block <= min(LARGEST_BLOCKS[axis], max(16, size))
            rows, columns = tile(config)
            held = config.num_stages - device.is_hip
            used = (rows + held * 2 * columns) * width * BYTES[operands]
            assert used <= DEVICES[device], (config, head)


def test_the_first_candidate_fills_the_device():
    """Many queries where there are many, few where they would leave processors idle."""

    def first(*numbers, operands="bf16"):
        return tile(attention_configs(sizes(*numbers), Setting(H200), operands=operands)[0])

    assert first(64, 4096, 4096, 64) == (64, 64)
    assert first(64, 4096, 4096, 128) == (128, 64)
    assert first(256, 1, 4096, 128)[0] == 16
    assert first(8, 1024, 1024, 128)[0] == 64


def test_policies_choose_how_many():
    """All where all are wanted; one where no measurement may choose the order of a sum."""
    hints = sizes(64, 4096, 4096, 128)
    every = attention_configs(
        hints, Setting(H200, policy=Policy(max_autotune=True)), operands="fp16"
    )
    assert len(every) > 6
    few = attention_configs(hints, Setting(H200), operands="fp16")
    (only,) = attention_configs(
        hints, Setting(H200, policy=Policy(deterministic=True)), operands="fp16"
    )
    assert only == few[0] == every[0]


@pytest.mark.parametrize(
    ("hints", "operands"),
    [
        (sizes(1, 16, 16, 64), "int8"),
        ({"z": 1, "y": 16, "x": 64, "r0_": 16}, "bf16"),
        (sizes(1, 16, 16, 512), "bf16"),
        (sizes(1, 100, 16, 64), "bf16"),
    ],
)
def test_other_sizes_and_operands_are_refused(hints, operands):
    """Larger heads do not fit a program."""
    with pytest.raises(ConfigError, match=r"attention: expected|power of two"):
        attention_configs(hints, Setting(H200), operands=operands)

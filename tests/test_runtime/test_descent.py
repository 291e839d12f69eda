# SPDX-License-Identifier: Apache-2.0
"""Coordinate descent over surfaces whose lowest point is known, counted in measurements."""

import math

import pytest

from bundler.errors import ConfigError
from bundler.runtime import Config, Descent, Space

HINTS = {"x": 4096, "r0_": 512}
SPACE = Space(HINTS, max_blocks={"x": 4096, "y": 1024, "z": 1024, "r0_": 65536}, max_warps=32)


def config(warps=4, stages=1, **blocks):
    return Config(blocks, warps, stages)


class Surface:
    """A cost for each config, and the configs that were asked for, in order."""

    def __init__(self, cost):
        self.cost, self.asked = cost, []

    def __call__(self, asked):
        self.asked.append(asked)
        return self.cost(asked)


def bowl(**lowest):
    """A cost that grows with the distance, in doublings, from one config."""

    def cost(asked):
        fields = {**asked.kwargs, "num_warps": asked.num_warps}
        return 1 + sum(abs(math.log2(fields[name] / value)) for name, value in lowest.items())

    return Surface(cost)


@pytest.mark.parametrize(
    ("start", "name", "radius", "expected"),
    [
        (config(XBLOCK=64), "XBLOCK", 1, [128, 32]),
        (config(XBLOCK=64), "XBLOCK", 2, [128, 256, 32, 16]),
        (config(XBLOCK=1), "XBLOCK", 1, [2]),
        (config(XBLOCK=4096), "XBLOCK", 1, [2048]),
        (config(R0_BLOCK=512), "R0_BLOCK", 1, [256]),
        (config(32, XBLOCK=1), "num_warps", 1, [16]),
        (config(XBLOCK=1, NUM_STAGES=1), "NUM_STAGES", 1, [2, 3]),
        (config(XBLOCK=1, NUM_STAGES=3), "NUM_STAGES", 1, [4, 5, 2, 1]),
    ],
)
def test_the_neighbors_of_a_field_are_those_of_the_table(start, name, radius, expected):
    """Upward first, each direction until the first illegal value, never the value itself."""
    assert SPACE.neighbors(start, name, radius) == expected


def test_the_search_takes_the_steps_of_the_table():
    """From XBLOCK 32 with 4 warps to 256 with 8: thirteen measurements, in this order."""
    surface = bowl(XBLOCK=256, num_warps=8)
    best, time = Descent().run(config(XBLOCK=32), SPACE, surface)
    assert (best.kwargs["XBLOCK"], best.num_warps, time) == (256, 8, 1)
    assert [(asked.kwargs["XBLOCK"], asked.num_warps) for asked in surface.asked] == [
        (32, 4),
        (64, 4),
        (16, 4),
        (64, 8),
        (64, 2),
        (128, 8),
        (32, 8),
        (128, 16),
        (128, 4),
        (256, 8),
        (256, 16),
        (256, 4),
        (512, 8),
    ]


@pytest.mark.parametrize("lowest", [(1, 1), (4096, 16), (8, 32), (64, 4)])
def test_a_bowl_is_searched_to_its_lowest_point(lowest):
    """Wherever the lowest point is, it is found, and no config is measured twice."""
    block, warps = lowest
    surface = bowl(XBLOCK=block, num_warps=warps)
    best, time = Descent().run(config(XBLOCK=64), SPACE, surface)
    assert (best.kwargs["XBLOCK"], best.num_warps, time) == (block, warps, 1)
    assert len(surface.asked) == len(set(surface.asked)) <= 60


@pytest.mark.parametrize(
    ("best", "time", "better"),
    [(1.0, 0.999, False), (1.0, 0.9989, True), (math.inf, 1.0, True), (math.inf, math.inf, False)],
)
def test_a_time_counts_as_better_from_the_threshold_on(best, time, better):
    """A thousandth is noise; any time is better than none."""
    assert Descent().better(time, best) == better


def test_fields_are_tried_in_order_and_only_those_there_are():
    """Blocks before warps; stages for matrix products; waves on AMD; what is frozen stays."""
    whole = config(XBLOCK=8, YBLOCK=8, R0_BLOCK=8)
    assert SPACE.fields_of(whole) == ["XBLOCK", "YBLOCK", "R0_BLOCK", "num_warps"]
    assert Space(matmul=True).fields_of(config(BLOCK_M=64, BLOCK_K=32)) == [
        "BLOCK_M",
        "BLOCK_K",
        "num_warps",
        "num_stages",
    ]
    assert Space(hip=True).fields_of(config(XBLOCK=8)) == ["XBLOCK", "num_warps", "waves_per_eu"]
    assert Space(frozen=frozenset({"XBLOCK"})).fields_of(config(XBLOCK=8)) == ["num_warps"]
    assert Space(native_matmul=True).fields_of(config(XBLOCK=16, ZBLOCK=1)) == [
        "XBLOCK",
        "num_warps",
        "num_stages",
    ]
    assert Space(mix_order=True).fields_of(config(XBLOCK=1, NUM_STAGES=1)) == [
        "XBLOCK",
        "num_warps",
        "NUM_STAGES",
    ]
    assert Space(first=("YBLOCK",)).fields_of(config(XBLOCK=8, YBLOCK=8)) == [
        "YBLOCK",
        "XBLOCK",
        "num_warps",
    ]


def test_all_directions_find_what_single_steps_cannot():
    """Where only two fields together help, the product of their neighbors is tried: 27 configs for
    three fields.
    """
    target = {"XBLOCK": 128, "R0_BLOCK": 16, "num_warps": 8}

    def cost(asked):
        fields = {**asked.kwargs, "num_warps": asked.num_warps}
        return 0.5 if fields == target else 1.0

    start = config(XBLOCK=64, R0_BLOCK=32)
    alone = Surface(cost)
    assert Descent().run(start, SPACE, alone) == (start, 1.0)
    together = Surface(cost)
    best, time = Descent(all_directions=True).run(start, SPACE, together)
    assert ({**best.kwargs, "num_warps": best.num_warps}, time) == (target, 0.5)
    grown = [
        c
        for c in together.asked
        if c.kwargs["XBLOCK"] in (32, 64, 128)
        and c.kwargs["R0_BLOCK"] in (16, 32, 64)
        and c.num_warps in (2, 4, 8)
    ]
    assert len(grown) == 27


def test_limits_of_special_kernels_hold():
    """A native matrix product has no block below 16 and a bounded tile; a mix-order block is at
    most its split.
    """
    native = Space({"x": 4096, "y": 4096, "r0_": 4096}, native_matmul=True)
    assert native.neighbors(config(XBLOCK=16), "XBLOCK") == [32]
    assert not native.valid(config(XBLOCK=256, YBLOCK=128, R0_BLOCK=64))
    assert native.valid(config(XBLOCK=128, YBLOCK=128, R0_BLOCK=64))
    mixed = Space(mix_order=True)
    assert not mixed.valid(config(XBLOCK=8, RSPLIT_SIZE=4))
    assert mixed.valid(config(XBLOCK=4, RSPLIT_SIZE=4))
    floors = Space(HINTS, min_blocks={"x": 32})
    assert floors.neighbors(config(XBLOCK=32), "XBLOCK") == [64]


def test_sizes_that_are_no_powers_of_two_bound_blocks_all_the_same():
    """A block doubles as long as it is within the size."""
    odd = Space({"x": 1000})
    assert odd.neighbors(config(XBLOCK=256), "XBLOCK", 3) == [512, 128, 64, 32]


def test_waves_have_a_default_that_follows_from_the_warps():
    """Where a config says nothing, eight by the number of warps; what is tried becomes an
    option.
    """
    space = Space(hip=True, max_blocks={"x": 64})
    surface = Surface(lambda asked: 0.5 if asked.options.get("waves_per_eu") == 4 else 1.0)
    best, _ = Descent().run(config(XBLOCK=64), space, surface)
    assert best.options == {"waves_per_eu": 4}


def test_a_config_that_cannot_run_is_no_improvement():
    """An infinite time is worse than any, and from an infinite start any time is an improvement."""
    surface = Surface(
        lambda asked: math.inf if asked.num_warps > 4 else 1.0 / asked.kwargs["XBLOCK"]
    )
    best, _ = Descent().run(config(XBLOCK=2048), SPACE, surface)
    assert (best.kwargs["XBLOCK"], best.num_warps) == (4096, 4)
    lost = Surface(lambda asked: math.inf if asked.kwargs["XBLOCK"] == 64 else 1.0)
    assert Descent().run(config(XBLOCK=64), SPACE, lost)[1] == 1.0


def test_the_number_of_measurements_can_be_bounded():
    """After so many the search ends with what it has."""
    surface = bowl(XBLOCK=4096)
    best, _ = Descent(most=3).run(config(XBLOCK=1), SPACE, surface)
    assert len(surface.asked) == 3
    assert best.kwargs["XBLOCK"] == 2


@pytest.mark.parametrize(
    "wrong", [{"radius": 0}, {"threshold": 1.0}, {"threshold": -0.1}, {"most": 0}]
)
def test_what_cannot_be_searched_with_is_refused(wrong):
    """The error says which values are possible."""
    with pytest.raises(ConfigError, match="expected"):
        Descent(**wrong)

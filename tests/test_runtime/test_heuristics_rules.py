# SPDX-License-Identifier: Apache-2.0
"""Rules behind the tables: filters, tiles by scores, what users gave, combinations; what holds of
every list; bad input.
"""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bundler.errors import ConfigError
from bundler.runtime.configs import (
    Config,
    fixed_configs,
    foreach_configs,
    template_configs,
    user_configs,
)
from bundler.runtime.heuristics.block_limits import (
    ceil_div,
    check_blocks,
    max_block,
    pow2_down,
    pow2_up,
)
from bundler.runtime.heuristics.combo_rules import SubKernel, combo_plan, shared_blocks
from bundler.runtime.heuristics.facts import Device, Facts, Policy, ReductionHint, Setting, TileHint
from bundler.runtime.heuristics.pointwise_rules import pointwise_configs
from bundler.runtime.heuristics.reduction_rules import (
    cooperative_reduction_configs,
    persistent_reduction_configs,
    reduction_configs,
    split_scan_configs,
)
from bundler.runtime.heuristics.tiles import (
    meet_descriptor_floors,
    one_for_determinism,
    raise_to_floors,
    share_by_score,
    spread_row,
)

H200 = Device("cuda", 132, 32, 9, 65536, 2048, 1024)
MI300 = Device("hip", 304, 64, 9, 65536, 2048, 1024)
SETTING = Setting(H200)
LARGE = {"x": 4096, "r0_": 8192}


def setting(device=H200, *, deterministic=False, max_autotune=False, **facts):
    return Setting(device, Facts(**facts), Policy(max_autotune, True, deterministic))


def tiles(configs):
    return [(*config.kwargs.values(), config.num_warps) for config in configs]


def test_powers_of_two():
    """Rounding up and down, with nothing rounded up to one."""
    assert [pow2_up(n) for n in (-1, 0, 1, 2, 3, 100, 1024)] == [1, 1, 1, 2, 4, 128, 1024]
    assert [pow2_down(n) for n in (1, 2, 3, 132, 304)] == [1, 2, 2, 128, 256]


# ----------------------------------------------------------- What is changed after a list was built


def test_the_deterministic_choice():
    """Of several candidates the one with the second largest R block, then warps, then X block; of
    one that one.
    """
    assert tiles(reduction_configs(LARGE, setting(deterministic=True))) == [(8, 512, 16)]
    rows = {"x": 8192, "r0_": 64}
    assert tiles(persistent_reduction_configs(rows, setting(deterministic=True))) == [(8, 4)]
    one = [Config({"XBLOCK": 1, "R0_BLOCK": 2})]
    assert one_for_determinism(one, setting(deterministic=True)) == one
    tiny = [Config({"XBLOCK": 64, "R0_BLOCK": 4}), Config({"XBLOCK": 32, "R0_BLOCK": 4})]
    assert one_for_determinism(tiny, setting(deterministic=True)) == tiny[1:]


@pytest.mark.parametrize(
    ("x", "row", "blocks", "warps"),
    [
        (65536, 512, (32, 64), 4),
        (8192, 128, (16, 64), 4),
        (1024, 128, (8, 64), 4),
        (64, 256, (4, 256), 4),
        (2, 16, (2, 16), 4),
    ],
)
def test_tiles_of_columns(x, row, blocks, warps):
    """Reductions across memory that ask for it have one tile, by how many columns there are; where
    nothing was measured, that of torch.
    """
    hints, hint = {"x": x, "r0_": row}, ReductionHint.OUTER
    config, *wider = reduction_configs(hints, setting(column_tiles=True), hint=hint)
    long = hints["r0_"] >= 512 and hints["x"] > 1024
    assert [(one.kwargs, one.num_warps) for one in wider] == [
        ({"XBLOCK": 16, "R0_BLOCK": 128}, 16)
    ] * long
    assert (tuple(config.kwargs.values()), config.num_warps) == (blocks, warps)
    elsewhere = reduction_configs(hints, setting(MI300, column_tiles=True), hint=hint)
    assert elsewhere == reduction_configs(hints, setting(MI300), hint=hint)


@pytest.mark.parametrize(
    ("x", "row", "block", "warps"),
    [(128, 8, 8, 1), (1024, 64, 8, 1), (4096, 32, 32, 1), (2**19, 64, 32, 1), (4, 8, 4, 1)],
)
def test_held_columns_are_of_one_warp(x, row, block, warps):
    """Columns that are held whole are added by the threads of one warp, a few at a time; longer
    ones, and those of other devices, have torch's tile, and a search has all.
    """
    hints, hint = {"x": x, "r0_": row}, ReductionHint.OUTER
    (config,) = persistent_reduction_configs(hints, setting(column_tiles=True), hint=hint)
    assert (dict(config.kwargs), config.num_warps) == ({"XBLOCK": block}, warps)
    every = setting(column_tiles=True, max_autotune=True)
    assert config in persistent_reduction_configs(hints, every, hint=hint)
    for sizes, device in (({**hints, "r0_": 128}, H200), (hints, MI300)):
        found = persistent_reduction_configs(sizes, setting(device, column_tiles=True), hint=hint)
        assert found == persistent_reduction_configs(sizes, setting(device), hint=hint)


def test_without_a_contiguous_row_single_rows_are_left_out():
    """When no access runs along the row, X = 1 is taken only when nothing else is left."""
    configs = [Config({"XBLOCK": 1, "R0_BLOCK": 64}), Config({"XBLOCK": 2, "R0_BLOCK": 64})]
    across = setting(deterministic=True, contiguous_row=False)
    assert one_for_determinism(configs, across) == configs[1:]
    assert one_for_determinism(configs[:1], across) == configs[:1]
    assert one_for_determinism(configs, setting(deterministic=True)) == configs[:1]


def test_pointwise_kernels_are_tuned_under_a_deterministic_policy():
    """Tiles do not change the numbers of a pointwise kernel, so it keeps its candidates."""
    assert len(pointwise_configs({"x": 2**20}, setting(deterministic=True))) == 2


def test_a_kernel_whose_tensors_lie_across_each_other_has_no_lines():
    """A tile along one axis alone suits half of what it reads; along a short axis it is whole."""

    def lines(hints, *, crossed=True, **policy):
        setting = Setting(H200, Facts(crossed=crossed), Policy(**policy))
        blocks = [config.kwargs for config in pointwise_configs(hints, setting)]
        return sum(1 in (one["XBLOCK"], one["YBLOCK"]) for one in blocks), len(blocks)

    assert lines({"x": 1024, "y": 8192}) == (0, 4)
    assert lines({"x": 1024, "y": 8192}, crossed=False) == (2, 6)
    assert lines({"x": 1024, "y": 8192}, max_autotune=True) == (2, 6)
    assert lines({"x": 8, "y": 8192})[0] == 1
    assert lines({"x": 8192, "y": 8})[0] == 1


def test_descriptor_floors():
    """A copy of the first, raised, and those that are large enough; a floor for something else is
    an error.
    """
    configs = [Config({"XBLOCK": 32}, num_warps=4), Config({"XBLOCK": 128}, num_warps=8)]
    floors = setting(tma_min_blocks={"XBLOCK": 64})
    assert tiles(meet_descriptor_floors(configs, floors)) == [(64, 4), (128, 8)]
    row = setting(tma_min_blocks={"XBLOCK": 64, "R0_BLOCK": 32})
    assert tiles(meet_descriptor_floors(configs, row, persistent=True)) == [(64, 4), (128, 8)]
    with pytest.raises(ConfigError, match="no R0_BLOCK"):
        meet_descriptor_floors(configs, row)


@pytest.mark.parametrize(
    ("blocks", "floors", "expected"),
    [
        ((1, 2048), {"min_xblock": 8}, (8, 256)),
        ((64, 8), {"min_rblock": 128}, (4, 128)),
        ((64, 8), {"min_xblock": 64, "min_rblock": 128}, (64, 128)),
        ((64, 8), {"min_xblock": 2}, (64, 8)),
    ],
)
def test_block_floors(blocks, floors, expected):
    """A block is raised to its floor and the other one is halved for it, but not below its own."""
    config = Config({"XBLOCK": blocks[0], "R0_BLOCK": blocks[1]})
    (raised,) = raise_to_floors([config], LARGE, setting(**floors))
    assert tuple(raised.kwargs.values()) == expected


def test_block_floors_are_for_two_axes():
    """Floors with a third axis are an error, as is a floor over a limit."""
    with pytest.raises(ConfigError, match="YBLOCK"):
        raise_to_floors(
            [Config({"XBLOCK": 1, "YBLOCK": 1, "R0_BLOCK": 1})], LARGE, setting(min_xblock=2)
        )
    with pytest.raises(ConfigError, match="XBLOCK=8192"):
        reduction_configs(LARGE, setting(min_xblock=8192))
    assert (
        reduction_configs(LARGE, setting(min_xblock=2), hint=ReductionHint.INNER)[0].kwargs[
            "XBLOCK"
        ]
        == 2
    )


# -------------------------------------------------------------------------------------------- Tiles


def test_a_row_is_spread_over_its_axes_last_first():
    """The contiguous axis takes what it can; a row that no block holds is an error."""
    square = {"x": 8, "r0_": 32, "r1_": 32}
    assert spread_row(square, SETTING, 64) == {"r1_": 32, "r0_": 2}
    assert spread_row(square, SETTING, 4096) == {"r1_": 32, "r0_": 32}
    with pytest.raises(ConfigError, match="131072 elements does not fit"):
        spread_row({"x": 1, "r0_": 2**17}, SETTING, 2**17)
    with pytest.raises(ConfigError, match="does not fit"):
        persistent_reduction_configs({"x": 1, "r0_": 2**17}, SETTING)


def test_tiles_are_shared_by_score():
    """The axis with most to gain grows first; without scores all grow alike; one that gains nothing
    grows last.
    """
    cube = {"x": 1024, "y": 1024, "r0_": 1024}
    shared = share_by_score(cube, {"x": 10, "y": 5, "r0_": 5}, 2048, SETTING)
    assert shared == {"x": 16, "y": 8, "r0_": 16}
    assert share_by_score(cube, dict.fromkeys(cube, 0), 256, SETTING) == {"x": 4, "y": 4, "r0_": 16}
    flat = {"x": 4, "y": 1024, "r0_": 16}
    assert share_by_score(flat, {"x": 1, "y": 0, "r0_": 1}, 1024, SETTING) == {
        "x": 4,
        "y": 16,
        "r0_": 16,
    }


def test_reductions_with_two_outer_axes_are_tiled():
    """With y every candidate is offered, whatever the hint, and each has a block for every axis."""
    hints = {"x": 1024, "y": 1024, "r0_": 1024}
    configs = reduction_configs(
        hints, setting(tiling_scores={"x": 10, "y": 5, "r0_": 5}), hint=ReductionHint.INNER
    )
    assert configs[0].kwargs == {"XBLOCK": 16, "YBLOCK": 8, "R0_BLOCK": 16}
    assert len(configs) > 1
    persistent = persistent_reduction_configs({"x": 64, "y": 64, "r0_": 128}, SETTING)
    assert [set(config.kwargs) for config in persistent] == [{"XBLOCK", "YBLOCK"}] * len(persistent)
    with pytest.raises(ConfigError, match="none for y"):
        reduction_configs(hints, setting(tiling_scores={"x": 10, "r0_": 5}))
    with pytest.raises(ConfigError, match="no tile holds a row of 8192"):
        persistent_reduction_configs({"x": 64, "y": 64, "r0_": 8192}, SETTING)


# ------------------------------------------------------------------------ What somebody has decided


def test_templates_and_fixed_configs():
    """Counts become fields, the rest parameters; warp specialization only where there is some."""
    assert template_configs(3, 8, num_consumer_groups=0) == [Config({}, 8, 3)]
    assert template_configs(3, 8, num_consumer_groups=2) == [
        Config({}, 8, 3, options={"num_consumer_groups": 2})
    ]
    flat = {
        "XBLOCK": 64,
        "num_warps": 2,
        "num_stages": 5,
        "num_ctas": 2,
        "maxnreg": 64,
        "num_buffers_warp_spec": 0,
    }
    assert fixed_configs(flat) == [Config({"XBLOCK": 64}, 2, 5, 2, 64)]
    assert flat["num_warps"] == 2


def test_user_configs():
    """In their order; without any the compiler's defaults."""
    listed = [{"BLOCK": 64, "num_warps": 8}, {"BLOCK": 32}]
    expected = [Config({"BLOCK": 64}, 8), Config({"BLOCK": 32})]
    assert user_configs(listed) == expected
    assert user_configs([]) == [Config({}, 4, 3)]
    with pytest.raises(ConfigError, match="num_warps"):
        user_configs([{"num_warps": "many"}])
    with pytest.raises(ConfigError, match="expected a dictionary"):
        fixed_configs([1])


def test_foreach_configs():
    """Eight warps, with max_autotune several."""
    assert [c.num_warps for c in foreach_configs(max_autotune=False)] == [8]
    assert [c.num_warps for c in foreach_configs(max_autotune=True)] == [1, 2, 4, 8]
    assert {c.num_stages for c in foreach_configs(max_autotune=False)} == {1}


def test_matrix_products():
    """Nineteen tiles, sixteen without the inner dimension, cut so that one tensor holds them;
    batches have a block of one.
    """
    product, batched = {"x": 512, "y": 512, "r0_": 512}, {"x": 512, "y": 512, "z": 8, "r0_": 512}
    native = setting(native_matmul=True)
    configs = reduction_configs(product, native)
    assert len(configs) == 19
    assert (configs[0].kwargs, configs[0].num_warps, configs[0].num_stages) == (
        {"XBLOCK": 32, "YBLOCK": 32, "R0_BLOCK": 16},
        2,
        1,
    )
    assert configs[-1] == Config({"XBLOCK": 128, "YBLOCK": 128, "R0_BLOCK": 64}, 8, 5)
    assert {c.kwargs["ZBLOCK"] for c in reduction_configs(batched, native)} == {1}
    whole = persistent_reduction_configs({**product, "r0_": 64}, native)
    assert len(whole) == 16
    long = persistent_reduction_configs({**product, "r0_": 4096}, native)
    assert max(c.kwargs["XBLOCK"] * c.kwargs["YBLOCK"] for c in long) * 4096 <= 2**20
    with pytest.raises(ConfigError, match="no tile holds"):
        persistent_reduction_configs(
            product, setting(native_matmul=True, native_matmul_rblock=2**14)
        )
    with pytest.raises(ConfigError, match="x, y and r0_"):
        reduction_configs({"x": 64, "r0_": 64}, native)


# ------------------------------------------------------------------------------------- Combinations


def test_a_combination_begins_with_the_first_candidate_of_each():
    """Blocks carry their kernel's number, warps are the most of all, groups are tuned largest first
    within their limits.
    """
    kernels = [
        SubKernel("pointwise", {"x": 1024}),
        SubKernel("reduction", LARGE, reduction_hint=ReductionHint.INNER),
        SubKernel("persistent_reduction", {"x": 64, "r0_": 64}),
        SubKernel("pointwise", {"x": 1024}),
    ]
    plan = combo_plan(kernels, SETTING)
    blocks = {"XBLOCK_0": 256, "XBLOCK_1": 1, "R0_BLOCK_1": 2048, "XBLOCK_2": 1, "XBLOCK_3": 256}
    assert plan.base == Config(blocks, 16, 1)
    assert plan.field_limits == {
        "XBLOCK_0": 1024,
        "XBLOCK_1": 4096,
        "R0_BLOCK_1": 8192,
        "XBLOCK_2": 64,
        "XBLOCK_3": 1024,
    }
    assert [group.members for group in plan.groups] == [(1,), (2,), (0,), (3,)]
    assert plan.groups[0].fields == ("XBLOCK_1", "R0_BLOCK_1")
    grouped = combo_plan(kernels, SETTING, grouping=True)
    assert [group.members for group in grouped.groups] == [(1,), (2,), (0, 3)]
    assert grouped.base == plan.base


def test_balanced_blocks_give_each_kernel_about_as_many_programs():
    """Blocks of kernels of elements get smaller until these need as many as another one, or each
    thread has one element; rows stay as they are.
    """
    sizes = {"x": 1 << 19}, {"x": 1 << 17}, {"x": 1 << 12}
    parts = [
        SubKernel("pointwise", size, members=n) for size, n in zip(sizes, (1, 2, 1), strict=True)
    ]
    parts.append(SubKernel("persistent_reduction", {"x": 64, "r0_": 64}, members=1))
    first, second, third, rows = combo_plan(parts, SETTING).base.kwargs.values()
    apart = [replace(part, members=None) for part in parts]
    before = combo_plan(apart, SETTING).base
    assert [*before.kwargs.values()] == [first, first, 256, rows]
    assert second == first // 2
    assert third == 32 * before.num_warps


def test_names_that_the_combined_kernel_does_not_have_stay_as_they_are():
    """Only a parameter of the combined kernel gets a number; compiler options of its parts become
    its own.
    """
    kernels = [SubKernel("pointwise", {"x": 1024})]
    assert combo_plan(kernels, SETTING, parameters={"XBLOCK"}).base.kwargs == {"XBLOCK": 256}
    amd = combo_plan(
        [SubKernel("reduction", LARGE, Facts(max_persistent_rblock=4))], setting(MI300)
    )
    assert amd.base.options == {}
    assert shared_blocks({"x": 64}) == {"XBLOCK": 1024}
    assert shared_blocks({"x": 64, "y": 64}) == {"XBLOCK": 32, "YBLOCK": 32}


def test_a_combination_of_nothing_or_of_scans_is_refused():
    """There must be kernels, and of kinds that can be combined."""
    with pytest.raises(ConfigError, match="at least one"):
        combo_plan([], SETTING)
    with pytest.raises(ConfigError, match="'split_scan' kernels cannot be combined"):
        combo_plan([SubKernel("split_scan", LARGE)], SETTING)


# ------------------------------------------------------------------------- What holds of every list

powers = st.integers(0, 20).map(lambda n: 2**n)
devices = st.sampled_from(
    [H200, MI300, Device("cuda", 58, 32, 8), Device("xpu", 448, 32), Device("hip", 48, 32, 11)]
)
policies = st.builds(Policy, st.booleans(), st.booleans(), st.booleans())
some_facts = st.builds(
    Facts,
    num_load=st.integers(0, 9),
    num_reduction=st.integers(0, 3),
    one_element_per_thread=st.booleans(),
    min_elem_per_thread=st.sampled_from([0, 2, 4]),
    add_persistent_rblock=st.booleans(),
)


@st.composite
def problems(draw):
    """A kind of kernel and a problem for it."""
    policy = draw(policies)
    kind = draw(
        st.sampled_from(
            ["pointwise", "reduction", "persistent_reduction", "cooperative", "split_scan"]
        )
    )
    which = Setting(draw(devices), draw(some_facts), policy)
    if kind == "pointwise":
        axes = draw(st.integers(1, 3))
        hints = {axis: draw(powers) for axis in "xyz"[:axes]}
        tile_hint = draw(st.sampled_from(TileHint))
        return hints, which, lambda: pointwise_configs(hints, which, tile_hint=tile_hint)
    r = draw(st.integers(0, 12 if kind == "persistent_reduction" else 20).map(lambda n: 2**n))
    hints = {"x": draw(powers), "r0_": r}
    choose = {
        "reduction": reduction_configs,
        "persistent_reduction": persistent_reduction_configs,
        "cooperative": cooperative_reduction_configs,
        "split_scan": split_scan_configs,
    }[kind]
    hint = draw(st.sampled_from(ReductionHint))
    return hints, which, lambda: choose(hints, which, hint=hint)


@settings(max_examples=300, deadline=None)
@given(problems())
def test_every_list_can_be_launched(problem):
    """Lists are never empty, have nothing twice, come out the same again; blocks and warps are
    powers of two within limits.
    """
    hints, which, choose = problem
    configs = choose()
    assert configs
    assert len(set(configs)) == len(configs)
    assert choose() == configs
    for config in configs:
        assert all(
            value & (value - 1) == 0 for value in (*config.kwargs.values(), config.num_warps)
        )
        check_blocks(config.kwargs, hints, which)
        assert config.origin
        x = config.kwargs["XBLOCK"]
        assert x <= min(hints["x"], max_block("x", which))
        assert ceil_div(hints["x"], x) <= 2**31 - 1
        assert 1 <= config.num_warps <= 32


# ---------------------------------------------------------------------------------------- Bad input


@pytest.mark.parametrize(
    ("choose", "hints", "words"),
    [
        (pointwise_configs, {"x": 100}, "x is 100, expected a power of two; round it up, as x=128"),
        (pointwise_configs, {"x": 0}, "x is 0"),
        (pointwise_configs, {"x": -4}, "x is -4"),
        (pointwise_configs, {"x": "64"}, "x is '64'"),
        (pointwise_configs, {"x": True}, "x is True"),
        (pointwise_configs, {}, "expected sizes for x"),
        (pointwise_configs, {"y": 4}, "expected sizes for x"),
        (pointwise_configs, {"x": 4, "w": 4}, "expected sizes for x"),
        (pointwise_configs, {"x": 4, "z": 4}, "x, x and y, or x, y and z"),
        (pointwise_configs, {"x": 4, "r0_": 4}, "x, x and y, or x, y and z"),
        (pointwise_configs, {"x": 2**44}, "do not fit a grid"),
        (reduction_configs, {"x": 4}, "r0_"),
        (reduction_configs, {"x": 4, "r": 4}, "r0_"),
        (reduction_configs, {"x": 4, "z": 4, "r0_": 4}, "r0_"),
        (persistent_reduction_configs, {"x": 4, "r0_": 100}, "r0_ is 100"),
        (cooperative_reduction_configs, {"x": 4, "r0_": 4, "r1_": 4}, "one reduced axis"),
        (split_scan_configs, {"x": 4, "y": 4, "r0_": 4}, "one reduced axis"),
    ],
)
def test_bad_sizes_are_refused(choose, hints, words):
    """Sizes that are no powers of two, missing or of other axes are named, with what was
    expected.
    """
    with pytest.raises(ConfigError, match=words):
        choose(hints, SETTING)


def test_a_pointwise_kernel_without_x_is_refused():
    """Each program of it would have one element."""
    with pytest.raises(ConfigError, match="with a block along x"):
        pointwise_configs({"x": 4}, setting(no_x_dim=True))

# SPDX-License-Identifier: Apache-2.0
"""Grids of generated kernels are the numbers that were seen to come out of torch, also at zero and
over the limits.
"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bundler.errors import CannotLaunchStatically, ConfigError
from bundler.runtime.heuristics.launch_expressions import MAX_TEXT, evaluate
from bundler.runtime.heuristics.launch_grids import launch_grid, open_grid

MAX_Y = 65535
CASE_A = {
    "num_kernels": 3,
    "min_blocks": 0,
    "default_config": None,
    "xnumel_0": 1000,
    "no_x_dim_0": False,
    "xnumel_1": None,
    "no_x_dim_1": False,
    "xnumel_2": 7,
    "no_x_dim_2": True,
}
CASE_B = CASE_A | {"ynumel_0": 100, "ynumel_1": 20, "min_blocks": 64}


def grid(kind, blocks, metadata=None, **sizes):
    return open_grid(kind, metadata or {})(blocks, sizes)


def combo(kind, case, blocks, **sizes):
    return grid(kind, blocks, {"combo_grid_meta": case}, **sizes)


@pytest.mark.parametrize(
    ("kind", "blocks", "sizes", "expected"),
    [
        ("Grid1D", {"XBLOCK": 128}, {"xnumel": 1000}, (8, 1, 1)),
        ("Grid1D", {"XBLOCK": 128}, {"xnumel": 0}, (0, 1, 1)),
        ("Grid1D", {}, {"xnumel": 1000}, (1000, 1, 1)),
        ("Grid2D", {"XBLOCK": 32, "YBLOCK": 16}, {"xnumel": 100, "ynumel": 1000}, (4, 63, 1)),
        (
            "Grid3D",
            {"XBLOCK": 32, "YBLOCK": 16, "ZBLOCK": 2},
            {"xnumel": 33, "ynumel": 17, "znumel": 3},
            (2, 2, 2),
        ),
        (
            "BatchMatmulGrid3D",
            {"XBLOCK": 32, "YBLOCK": 16},
            {"xnumel": 33, "ynumel": 17, "znumel": 9},
            (9, 2, 2),
        ),
        (
            "ProductGrid",
            {"XBLOCK": 32, "YBLOCK": 16, "R0_BLOCK": 64, "GROUP": 8},
            {"xnumel": 33, "ynumel": 17, "znumel": 70_000, "r0_numel": 1000},
            (2 * 2 * 70_000, 1, 1),
        ),
        (
            "ProductGrid",
            {"XBLOCK": 32, "YBLOCK": 16},
            {"xnumel": 0, "ynumel": 17, "znumel": 3},
            (0, 1, 1),
        ),
        (
            "Grid2DWithYZOverflow",
            {"XBLOCK": 32, "YBLOCK": 16},
            {"xnumel": 100, "ynumel": 1000},
            (4, 63, 1),
        ),
        (
            "Grid2DWithYZOverflow",
            {"XBLOCK": 32, "YBLOCK": 16},
            {"xnumel": 100, "ynumel": 16 * MAX_Y * 3 + 5},
            (4, 49152, 4),
        ),
        (
            "Grid2DWithYZOverflow",
            {"XBLOCK": 32, "YBLOCK": 16},
            {"xnumel": 100, "ynumel": 0},
            (4, 0, 0),
        ),
        ("MixOrderReductionGrid", {"RSPLIT_SIZE": 64, "XBLOCK": 2}, {"xnumel": 1000}, (16, 1, 1)),
        ("CooperativeReductionGrid", {"RSPLIT": 8, "XBLOCK": 2}, {"xnumel": 5}, (8, 3, 1)),
        (
            "SplitScanGrid",
            {"XBLOCK": 1, "R0_BLOCK": 256},
            {"xnumel": 5, "r0_numel": 1000},
            (4, 5, 1),
        ),
    ],
)
def test_grid_table(kind, blocks, sizes, expected):
    """Each kind covers its sizes as the table says."""
    assert grid(kind, blocks, **sizes) == expected


def test_combined_kernels():
    """Kernels one after another, flattened, and in turn; least blocks, and default blocks under the
    config's.
    """
    x = {"XBLOCK": 128}
    assert combo("SequentialComboKernelGrid", CASE_A, x, xnumel_1=300) == (18, 1, 1)
    assert combo("RoundRobinComboKernelGrid", CASE_A, x, xnumel_1=300) == (24, 1, 1)
    assert combo("SequentialComboKernelGrid", CASE_B, x | {"YBLOCK": 16}, xnumel_1=300) == (
        64,
        7,
        1,
    )
    own = {"XBLOCK_0": 128, "YBLOCK_0": 16, "XBLOCK_1": 64, "YBLOCK_1": 8}
    assert combo("SequentialFlattenComboKernelGrid", CASE_B, own, xnumel_1=300) == (78, 1, 1)
    # As many for each of three as the one with most needs.
    turned = combo("RoundRobinFlattenComboKernelGrid", CASE_B, own, xnumel_1=300)
    assert turned == (3 * 56, 1, 1)
    with_default = CASE_A | {"default_config": {"XBLOCK": 1024}}
    assert combo("SequentialComboKernelGrid", with_default, {}, xnumel_1=300) == (9, 1, 1)
    assert combo("SequentialComboKernelGrid", with_default, x, xnumel_1=300) == (18, 1, 1)


def test_grids_by_expression():
    """A fixed grid evaluates its expressions; a precomputed one those of the config."""
    fixed = {"fixed_grid": ["_grid_0", "_grid_1", "_grid_2"]}
    assert grid("FixedGrid", {}, fixed, _grid_0=3, _grid_1=2, _grid_2=1) == (3, 2, 1)
    computed = {
        "precomputed_grids": [
            {"config": {"BLOCK": 64}, "python": ["-((n) // -(64))", "1", 1]},
            {
                "config": {"BLOCK": 128, "num_warps": 4},
                "python": ["(n + 127) // 128", "max(1, n % 7)", "2*3 - 5"],
            },
        ]
    }
    assert grid("PrecomputedGrid", {"BLOCK": 64}, computed, n=1000) == (16, 1, 1)
    assert grid("PrecomputedGrid", {"BLOCK": 128, "num_warps": 4}, computed, n=1000) == (8, 6, 1)
    with pytest.raises(ConfigError, match="none was computed"):
        grid("PrecomputedGrid", {"BLOCK": 32}, computed, n=1000)


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os').system('true')",
        "n.bit_length()",
        "(lambda: 1)()",
        "[1][0]",
        "n ** n",
        "n / 2",
        "1 << 40",
        "'a' * 3",
        "True",
        "1.5",
        "n if n else 1",
        "max()",
        "max(*[1])",
        "abs(1, 2)",
        "eval('1')",
        "1 // 0",
        "m",
        "",
        "(",
        "-" * 200 + "1",
        "(" * 1500 + ")" * 1500,
        "1" * (MAX_TEXT + 1),
        None,
        b"1",
    ],
)
def test_only_arithmetic_is_evaluated(text):
    """Whatever else stands where a grid's expression should is refused with a typed error, and
    never runs.
    """
    with pytest.raises(ConfigError):
        evaluate(text, {"n": 5})


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_expressions_have_pythons_value(data):
    """An expression of sums, products, quotients, remainders, maxima and signs has the value that
    Python gives it.
    """
    numbers = st.integers(1, 99).map(str) | st.sampled_from(["n", "m"])
    text = data.draw(
        st.recursive(
            numbers,
            lambda inner: (
                st.builds("({} {} {})".format, inner, st.sampled_from(["+", "-", "*"]), inner)
                | st.builds("-(({}) // -({}))".format, inner, st.integers(1, 9))
                | st.builds("(({}) % {})".format, inner, st.integers(1, 9))
                | st.builds("max({}, {}, 3)".format, inner, inner)
            ),
            max_leaves=12,
        )
    )
    assert evaluate(text, {"n": 1000, "m": 7}) == eval(text, {"n": 1000, "m": 7})


@given(st.integers(0, 2**40), st.sampled_from([1, 2, 16, 1024]))
def test_overflow_covers_all_blocks(size, block):
    """Blocks along y and z together are at least as many as needed, fewer than one z more, and
    within the limit.
    """
    _, y, z = grid("Grid2DWithYZOverflow", {"YBLOCK": block}, xnumel=1, ynumel=size)
    needed = -(-size // block)
    assert 0 <= y * z - needed < max(z, 1)
    assert y <= MAX_Y


def test_a_grid_that_no_device_launches_is_refused_before_the_driver():
    """Over the limits: a typed error; at zero: a grid that launches nothing; on a CPU there is no
    limit.
    """
    two = open_grid("Grid2D", {})
    with pytest.raises(CannotLaunchStatically, match="65536 blocks along y"):
        launch_grid(two, {}, {"xnumel": 1, "ynumel": 65536})
    with pytest.raises(CannotLaunchStatically, match="along x"):
        launch_grid(two, {}, {"xnumel": 2**31, "ynumel": 1})
    assert launch_grid(two, {}, {"xnumel": 1, "ynumel": 65536}, backend="cpu") == (1, 65536, 1)
    assert launch_grid(two, {}, {"xnumel": 0, "ynumel": 5}) == (0, 5, 1)


@pytest.mark.parametrize(
    ("kind", "blocks", "metadata", "sizes", "words"),
    [
        ("Grid9D", {}, {}, {}, "no kind 'Grid9D'"),
        ("Grid1D", {"XBLOCK": 128}, {}, {}, "'xnumel'"),
        ("Grid1D", {"XBLOCK": 0}, {}, {"xnumel": 3}, "'XBLOCK'"),
        ("Grid1D", {"XBLOCK": "128"}, {}, {"xnumel": 3}, "'XBLOCK'"),
        ("Grid1D", {"XBLOCK": 128}, {}, {"xnumel": -1}, "at least 0"),
        ("MixOrderReductionGrid", {"XBLOCK": 2}, {}, {"xnumel": 3}, "RSPLIT_SIZE"),
        (
            "MixOrderReductionGrid",
            {"XBLOCK": 3, "RSPLIT_SIZE": 64},
            {},
            {"xnumel": 3},
            "no multiple",
        ),
        ("CooperativeReductionGrid", {"XBLOCK": 2}, {}, {"xnumel": 3}, "RSPLIT"),
        ("SplitScanGrid", {"XBLOCK": 2}, {}, {"xnumel": 3, "r0_numel": 3}, "XBLOCK=1"),
        ("FixedGrid", {}, {}, {}, "incomplete"),
        ("FixedGrid", {}, {"fixed_grid": ["1", "1"]}, {}, "incomplete"),
        ("PrecomputedGrid", {}, {"precomputed_grids": [{}]}, {}, "incomplete"),
        (
            "SequentialComboKernelGrid",
            {},
            {"combo_grid_meta": {"num_kernels": 1}},
            {},
            "incomplete",
        ),
        (
            "SequentialComboKernelGrid",
            {},
            {"combo_grid_meta": CASE_A | {"xnumel_0": 0}},
            {},
            "a size of 0",
        ),
    ],
)
def test_bad_metadata_is_a_typed_error(kind, blocks, metadata, sizes, words):
    """An unknown kind, a missing size or block, and odd metadata are named."""
    with pytest.raises(ConfigError, match=words):
        grid(kind, blocks, metadata, **sizes)

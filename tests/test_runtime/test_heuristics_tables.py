# SPDX-License-Identifier: Apache-2.0
"""The tables of configurations that were seen to come out of torch 2.13, row by row."""

import pytest

from bundler.runtime.heuristics.block_limits import grow_for_grid, warp_rule
from bundler.runtime.heuristics.facts import Device, Facts, Policy, ReductionHint, Setting, TileHint
from bundler.runtime.heuristics.pointwise_rules import pointwise_configs
from bundler.runtime.heuristics.reduction_rules import (
    choose_rsplit_size,
    cooperative_reduction_configs,
    persistent_reduction_configs,
    reduction_configs,
    split_scan_configs,
)

H200 = Device("cuda", 132, 32, 9, 65536, 2048, 1024)
B200 = Device("cuda", 148, 32, 10, 65536, 2048, 1024)
MI300 = Device("hip", 304, 64, 9, 65536, 2048, 1024)
NO_GPU_RULE = Device("xpu", 132, 32)
HINTS = {hint.name: hint for hint in ReductionHint}


def setting(device=H200, *, max_autotune=False, off=False, deterministic=False, **facts):
    policy = Policy(max_autotune, not off, deterministic)
    return Setting(device, Facts(**facts), policy)


def shown(configs):
    """Candidates as the tables write them: blocks, other options, warps, stages where they are not
    1.
    """
    return "; ".join(_shown(config) for config in configs)


def _shown(config):
    blocks = ",".join(str(value) for value in config.kwargs.values())
    waves = "".join(
        f" waves{value}" for name, value in config.options.items() if name == "waves_per_eu"
    )
    stages = f" s{config.num_stages}" if config.num_stages != 1 else ""
    return f"{blocks}{waves} w{config.num_warps}{stages}"


def reduction_sizes(x, r):
    return {"x": x, "r0_": r}


@pytest.mark.parametrize(
    ("n", "default", "sixteen", "sixteen_registers", "least_one", "wave_64"),
    [
        (0, 2, 2, 2, 1, 1),
        (1, 2, 2, 2, 1, 1),
        (2, 2, 2, 2, 2, 2),
        (3, 4, 4, 4, 4, 4),
        (4, 4, 4, 4, 4, 4),
        (5, 8, 8, 8, 8, 4),
        (8, 8, 8, 8, 8, 4),
        (9, 8, 16, 8, 8, 4),
        (1000, 8, 16, 8, 8, 4),
    ],
)
def test_warp_rule(n, default, sixteen, sixteen_registers, least_one, wave_64):
    """The number of warps is a power of two within bounds, which are lower on devices with wide
    warps.
    """
    got = (
        warp_rule(n, H200),
        warp_rule(n, H200, most=16),
        warp_rule(n, H200, most=16, registers=True),
        warp_rule(n, H200, least=1),
        warp_rule(n, MI300),
    )
    assert got == (default, sixteen, sixteen_registers, least_one, wave_64)


def test_grid_rule_counts_blocks_on_nvidia_and_threads_on_amd():
    """A grid that is too long is covered with larger blocks: by its blocks on NVIDIA, by its
    threads on AMD.
    """
    assert grow_for_grid(512, 2**33, 8, setting()) == 512
    assert grow_for_grid(512, 2**33, 8, setting(MI300)) == 4096


DEFAULT_SQUARE = "32,32 w4; 64,64 w8; 256,16 w8; 16,256 w8; 1024,1 w4; 1,1024 w4"
CUBE = "16,16,16 w8; 64,8,8 w8; 8,64,8 w8; 8,8,64 w8; 64,16,1 w4; 16,64,1 w4; 16,1,64 w4"


@pytest.mark.parametrize(
    ("hints", "tuned", "off"),
    [
        ({"x": 1}, "1 w1", "1 w1"),
        ({"x": 64}, "64 w1", "64 w1"),
        ({"x": 128}, "128 w4", "128 w4"),
        ({"x": 1024}, "256 w4; 128 w4", "256 w4"),
        ({"x": 65536}, "512 w4; 256 w4", "512 w4"),
        ({"x": 2**20}, "1024 w4; 512 w8", "1024 w4"),
        ({"x": 2**40}, "1024 w4; 1024 w8", "1024 w4"),
        ({"x": 1024, "y": 1024}, DEFAULT_SQUARE, "32,32 w4"),
        ({"x": 16, "y": 8}, "16,8 w4; 16,2 w1; 4,8 w1", "16,8 w4"),
        ({"x": 1, "y": 4096}, "1,1024 w4; 1,256 w4", "1,1024 w4"),
        ({"x": 64, "y": 2**24}, "32,512 w8; 64,512 w8; 16,512 w8; 1,1024 w4", "32,512 w8"),
    ],
)
def test_pointwise_table(hints, tuned, off):
    """Pointwise candidates, tuned and with tuning switched off."""
    assert shown(pointwise_configs(hints, setting())) == tuned
    assert shown(pointwise_configs(hints, setting(off=True))) == off


def test_pointwise_with_three_axes_is_tuned_only_on_demand():
    """Three axes: one candidate, and the whole list with max_autotune."""
    cube = {"x": 64, "y": 64, "z": 64}
    assert shown(pointwise_configs(cube, setting())) == "16,16,16 w8"
    assert shown(pointwise_configs(cube, setting(max_autotune=True))) == CUBE


def test_a_square_pointwise_kernel_has_one_candidate():
    """A square tile hint settles the tile, unless max_autotune asks for all of them."""
    hints = {"x": 1024, "y": 1024}
    assert shown(pointwise_configs(hints, setting(), tile_hint=TileHint.SQUARE)) == "32,32 w4"
    everything = setting(max_autotune=True)
    assert shown(pointwise_configs(hints, everything, tile_hint=TileHint.SQUARE)) == DEFAULT_SQUARE


def test_pointwise_extras():
    """One element for each thread adds a tile; AMD's devices add theirs, and one more where the
    kernel adds atomically.
    """
    large = {"x": 2**20}
    assert (
        shown(pointwise_configs(large, setting(one_element_per_thread=True)))
        == "1024 w4; 512 w8; 256 w8"
    )
    amd = "1024 w4; 512 w4; 8192 waves2 w4; 4096 w4; 2048 waves1 w8 s2"
    assert shown(pointwise_configs(large, setting(MI300))) == amd
    assert shown(pointwise_configs(large, setting(MI300, atomic_add=True))) == f"{amd}; 64 w1"


SAME = None


@pytest.mark.parametrize(
    ("x", "r", "rows"),
    [
        (
            1,
            2**20,
            {"INNER": "1,2048 w16", "OUTER": "1,64 w2", "OUTER_TINY": "1,2048 w16"},
        ),
        (
            128,
            1024,
            {"INNER": "2,1024 w8", "OUTER": "2,64 w2", "OUTER_TINY": "1,1024 w8"},
        ),
        (
            1024,
            256,
            {"INNER": "2,256 w2", "OUTER": "8,64 w4", "OUTER_TINY": "2,256 w4"},
        ),
        (
            1024,
            1024,
            {"INNER": "2,1024 w8", "OUTER": "8,64 w4", "OUTER_TINY": "1,1024 w8"},
        ),
        (
            4096,
            2048,
            {
                "INNER": "2,2048 w16",
                "OUTER": "16,32 w4",
                "OUTER_TINY": "1,2048 w16",
            },
        ),
        (
            4096,
            8192,
            {"INNER": "1,2048 w16", "OUTER": "16,32 w4", "OUTER_TINY": "1,2048 w16"},
        ),
        (
            65536,
            128,
            {"INNER": "2,128 w2", "OUTER": "64,8 w4", "OUTER_TINY": "4,128 w4"},
        ),
        (65536, 4096, {"INNER": "1,2048 w16", "OUTER": "64,8 w4", "OUTER_TINY": "1,2048 w16"}),
        (
            2**20,
            64,
            {"INNER": "2,64 w2", "OUTER": "256,2 w4", "OUTER_TINY": "8,64 w4"},
        ),
    ],
)
def test_looped_reduction_table(x, r, rows):
    """The one candidate that each hint gives."""
    for name, expected in rows.items():
        assert (
            shown(reduction_configs(reduction_sizes(x, r), setting(), hint=HINTS[name])) == expected
        ), name


@pytest.mark.parametrize(
    ("x", "r", "expected"),
    [
        (
            4096,
            8192,
            "1,2048 w16; 16,32 w4; 64,64 w16; 8,512 w16; 64,4 w8",
        ),
        (
            1024,
            256,
            "2,256 w4; 8,64 w4; 64,64 w16; 8,256 w16; 64,4 w8",
        ),
        (1, 2**20, "1,2048 w16; 1,64 w2; 1,512 w4; 1,4 w8"),
    ],
)
def test_looped_reduction_without_a_hint(x, r, expected):
    """Without a hint all candidates are offered, each once."""
    assert shown(reduction_configs(reduction_sizes(x, r), setting())) == expected


def test_looped_reduction_special_cases():
    """Heavy kernels, Blackwell, max_autotune, a persistent block beside, and AMD."""
    new = reduction_sizes(4096, 8192)
    inner = ReductionHint.INNER
    heavy = {"num_load": 8, "num_reduction": 2}
    assert shown(reduction_configs(new, setting(**heavy), hint=inner)) == "1,1024 w8"
    assert shown(reduction_configs(new, setting(B200), hint=inner)) == "1,1024 w8"
    everything = reduction_configs(new, setting(max_autotune=True), hint=inner)
    assert shown(everything) == "1,2048 w16; 16,32 w2; 64,64 w2; 8,512 w4; 64,4 w8"
    beside = reduction_configs(
        new, setting(add_persistent_rblock=True, num_load=2, num_reduction=1), hint=inner
    )
    assert shown(beside) == "1,8192 w16; 1,2048 w16"
    assert [config.dynamic_scale for config in beside] == [False, True]
    amd = "1,2048 w8; 64,8 w4; 64,64 w8; 8,512 w8; 64,4 w8; 1024,8 waves2 w4; 512,8 waves1 w4"
    assert shown(reduction_configs(new, setting(MI300))) == amd
    assert shown(reduction_configs(new, setting(no_x_dim=True), hint=inner)) == "1,2048 w16"


def test_a_persistent_kernel_beside_keeps_tiles_small_on_amd():
    """A combined kernel with a long row in one of its parts keeps only small tiles on AMD."""
    configs = reduction_configs(
        reduction_sizes(4096, 8192), setting(MI300, max_persistent_rblock=512)
    )
    assert shown(configs) == "1,2048 w8; 8,512 w8"


@pytest.mark.parametrize(
    ("x", "r", "hint", "expected", "without_gpu"),
    [
        (8192, 256, "INNER", "4 w1", "8 w8"),
        (8192, 512, "INNER", "2 w1", "8 w8"),
        (8192, 1024, "INNER", "1 w1", "8 w8"),
        (8192, 2048, "INNER", "1 w8", "1 w8"),
        (512, 512, "INNER", "1 w4", "1 w4"),
        (8192, 64, "INNER", "8 w2; 1 w2; 32 w2", "1 w2; 8 w2; 32 w2"),
        (8192, 64, "DEFAULT", "8 w4; 1 w2; 32 w8", "1 w2; 8 w4; 32 w8"),
        (8192, 32, "DEFAULT", "32 w8; 1 w2; 8 w2; 128 w8", "1 w2; 8 w2; 32 w8; 128 w8"),
        (8192, 64, "OUTER", "32 w8", SAME),
        (8192, 64, "OUTER_TINY", "8 w4", SAME),
        (1024, 256, "DEFAULT", "1 w2; 8 w8", SAME),
        (65536, 2, "INNER", "128 w2; 1 w2; 8 w2; 32 w2", "1 w2; 8 w2; 32 w2; 128 w2"),
        (2048, 32, "INNER", "8 w2; 1 w2; 32 w2; 128 w2", "1 w2; 8 w2; 32 w2; 128 w2"),
        (4, 64, "DEFAULT", "1 w2", SAME),
        (4, 64, "OUTER_TINY", "4 w2", SAME),
    ],
)
def test_persistent_reduction_table(x, r, hint, expected, without_gpu):
    """Persistent candidates; the last column is what torch gives where it sees no GPU, and we for a
    device it has no rule for.
    """
    got = [
        shown(persistent_reduction_configs(reduction_sizes(x, r), which, hint=HINTS[hint]))
        for which in (setting(), setting(NO_GPU_RULE))
    ]
    assert got == [expected, without_gpu or expected]


def test_persistent_reduction_special_cases():
    """AMD has blocks of its own; many accesses make tiles small where torch has no rule."""
    hints = reduction_sizes(8192, 64)
    amd = shown(persistent_reduction_configs(hints, setting(MI300)))
    assert amd == "1 w1; 4 w2; 8 w4; 16 w4; 32 w4; 64 w4"
    busy = setting(NO_GPU_RULE, num_load=4, num_store=1)
    assert (
        shown(
            persistent_reduction_configs(reduction_sizes(8192, 256), busy, hint=ReductionHint.INNER)
        )
        == "1 w2"
    )


def test_batch_invariance_hides_small_batches():
    """With batch invariance a small batch gets the candidates of a large one."""
    policy = Policy(batch_invariant=True)
    few, many = reduction_sizes(8, 512), reduction_sizes(4096, 512)
    found = persistent_reduction_configs(
        few, Setting(H200, policy=policy), hint=ReductionHint.INNER
    )
    assert found == persistent_reduction_configs(many, Setting(H200), hint=ReductionHint.INNER)


def test_a_cooperative_reduction_shares_a_long_row():
    """A long row is shared by up to 64 programs."""
    inner, hints = ReductionHint.INNER, reduction_sizes(1, 2**20)
    assert shown(cooperative_reduction_configs(hints, setting(), hint=inner)) == "1,2048,64 w16"
    persistent = cooperative_reduction_configs(hints, setting(), hint=inner, is_persistent=True)
    assert shown(persistent) == "1,64 w16"


@pytest.mark.parametrize(
    ("x", "r", "device", "split"),
    [(16, 65536, H200, 8), (128, 8192, H200, 1), (128, 8192, MI300, 2)],
)
def test_cooperative_split(x, r, device, split):
    """There are never more programs than multiprocessors, as a power of two."""
    configs = cooperative_reduction_configs(
        reduction_sizes(x, r), setting(device), hint=ReductionHint.INNER
    )
    assert {config.kwargs["RSPLIT"] for config in configs} == {split}


@pytest.mark.parametrize(
    ("x", "r", "split", "max_autotune", "expected"),
    [
        (32768, 1024, 64, False, [(2, 3, 4)]),
        (32768, 4096, 128, False, [(4, 3, 8)]),
        (32768, 512, 32, True, [(4, 2, 2)]),
    ],
)
def test_mix_order_table(x, r, split, max_autotune, expected):
    """Mix-order candidates: X block, stages and warps."""
    which = setting(max_autotune=max_autotune, rsplit_size=split)
    configs = persistent_reduction_configs(reduction_sizes(x, r), which, hint=ReductionHint.INNER)
    assert [(c.kwargs["XBLOCK"], c.kwargs["NUM_STAGES"], c.num_warps) for c in configs] == expected
    assert {config.kwargs["RSPLIT_SIZE"] for config in configs} == {split}


def test_mix_order_rules():
    """Long rows get more warps on demand and fewer stages; without stages there is one; the split
    follows the device.
    """
    tried = setting(max_autotune=True, rsplit_size=128)
    configs = persistent_reduction_configs(
        reduction_sizes(32768, 16384), tried, hint=ReductionHint.INNER
    )
    assert [(c.num_warps, c.kwargs["NUM_STAGES"]) for c in configs] == [(16, 2), (32, 2)]
    single = setting(rsplit_size=128, allow_multi_stages=False)
    configs = persistent_reduction_configs(
        reduction_sizes(32768, 1024), single, hint=ReductionHint.INNER
    )
    assert [c.kwargs["NUM_STAGES"] for c in configs] == [1]
    assert [choose_rsplit_size(x, H200) for x in (1024, 32768, 65536, 2**20)] == [16, 16, 32, 128]


@pytest.mark.parametrize(
    ("hint", "expected"),
    [
        ("INNER", "1,2048 w16"),
        ("OUTER", "2,256 w2"),
        ("DEFAULT", "1,2048 w16; 2,256 w2; 16,256 w8; 8,512 w16"),
    ],
)
def test_split_scan_table(hint, expected):
    """Split scans never have a short block; the warps are those of the block before it was
    raised.
    """
    assert (
        shown(split_scan_configs(reduction_sizes(16, 65536), setting(), hint=HINTS[hint]))
        == expected
    )

# SPDX-License-Identifier: Apache-2.0
"""Kernels in one launch are tuned step by step: the blocks of each group, then warps and stages;
the result is a record.
"""

import launch_calls as calls
import pytest

from bundler.compile.source_modules import source_module
from bundler.lifecycle.tuning_directory import TuningFolder
from bundler.runtime import Config, Descent, DryDriver, Space, TunerOptions, heuristics
from bundler.runtime.heuristics.combo_rules import SubKernel, combo_plan
from bundler.runtime.heuristics.facts import Device, Policy, ReductionHint, Setting
from bundler.runtime.tuning.benchmark import GivenClock, Sample
from bundler.runtime.tuning.tuner import Search

H200 = Device("cuda", 132, 32, 9, 65536, 2048, 1024)
SETTING = Setting(H200)
SMALL, LARGE = SubKernel("pointwise", {"x": 1024}), SubKernel("pointwise", {"x": 2**20})
ROWS = SubKernel("reduction", {"x": 4096, "r0_": 8192}, reduction_hint=ReductionHint.INNER)
TEXT = """import triton
import triton.language as tl


@triton.jit
def scale_two(a, b, xnumel_0, xnumel_1, XBLOCK_0: tl.constexpr, XBLOCK_1: tl.constexpr):
    block = tl.program_id(0)
    first = tl.cdiv(xnumel_0, XBLOCK_0)
    if block < first:
        x = block * XBLOCK_0 + tl.arange(0, XBLOCK_0)
        tl.store(a + x, 2 * tl.load(a + x, x < xnumel_0), x < xnumel_0)
    else:
        y = (block - first) * XBLOCK_1 + tl.arange(0, XBLOCK_1)
        tl.store(b + y, 3 * tl.load(b + y, y < xnumel_1), y < xnumel_1)
"""


def test_the_plan_has_each_groups_candidates_then_warps_and_stages():
    """Largest group first, under the names that the fields have in the combination; a single
    candidate is no step.
    """
    plan = combo_plan([SMALL, LARGE, ROWS], SETTING)
    assert [group.members for group in plan.groups] == [(2,), (1,), (0,)]
    assert plan.steps == (
        ({"XBLOCK_1": 1024}, {"XBLOCK_1": 512}),
        ({"XBLOCK_0": 256}, {"XBLOCK_0": 128}),
        tuple({"num_warps": warps, "num_stages": 1} for warps in (4, 8, 16)),
    )
    assert plan.warp_stages == ((4, 1), (8, 1), (16, 1))


def test_members_of_a_group_get_the_same_candidate():
    """Kernels with equal fingerprints are tuned as one."""
    plan = combo_plan([SMALL, LARGE, SMALL], SETTING, grouping=True)
    assert plan.steps[1] == ({"XBLOCK_0": 256, "XBLOCK_2": 256}, {"XBLOCK_0": 128, "XBLOCK_2": 128})


class Candidate:
    def __init__(self, config):
        self.config, self.key, self.registers, self.spills, self.loaded = config, "", 32, 0, True

    def close(self):
        self.loaded = False


class Builder:
    def __init__(self):
        self.made = []

    def build(self, configs):
        found = [Candidate(config) for config in configs]
        self.made += found
        return found


def searched(plan, cost, descent=None, space=None):
    """Search from a plan's base; returns the winner, how it was found, and what was timed, in
    order.
    """
    builder, timed = Builder(), []

    def bench(candidate):
        assert candidate.loaded
        timed.append(candidate.config)
        time_ms = cost(candidate.config)
        return Sample(time_ms, time_ms, time_ms)

    options = TunerOptions(
        kind="pointwise", space=space or Space(), custom=False, steps=plan.steps, descent=descent
    )
    outcome = Search("f", builder, bench, options).run([plan.base])
    assert [made.config for made in builder.made if made.loaded] == [outcome.winner.config]
    return outcome.winner.config, outcome.found_by, timed


def test_each_step_goes_on_from_the_best_so_far():
    """A change that is not faster changes nothing; what is the best already is not measured
    again.
    """
    plan = combo_plan([SMALL, LARGE], SETTING)

    def cost(config):
        blocks = config.kwargs
        return (
            10.0
            + (blocks["XBLOCK_1"] != 512)
            + (blocks["XBLOCK_0"] != 256)
            + abs(config.num_warps - 8) / 10
        )

    winner, found_by, timed = searched(plan, cost)
    assert (winner, found_by) == (Config({"XBLOCK_0": 256, "XBLOCK_1": 512}, 8, 1), "steps")
    shown = [(c.kwargs["XBLOCK_0"], c.kwargs["XBLOCK_1"], c.num_warps) for c in timed]
    assert shown == [(256, 1024, 4), (256, 512, 4), (128, 512, 4), (256, 512, 8)]
    base, found_by, timed = searched(plan, lambda config: 1.0)
    assert (base, found_by, len(timed)) == (plan.base, "steps", 4)


def test_a_config_that_cannot_run_ends_no_step():
    """It is infinitely slow, as any other config of a list."""
    plan = combo_plan([SMALL, LARGE], SETTING)
    winner, _, _ = searched(
        plan, lambda c: float("inf") if c.kwargs["XBLOCK_1"] == 512 else float(c.num_warps)
    )
    assert winner == plan.base


def test_coordinate_descent_goes_on_from_the_last_step():
    """The fields of the combination come first, within their limits."""
    plan = combo_plan([SMALL, LARGE], SETTING)
    fields = tuple(name for group in plan.groups for name in group.fields)
    space = Space(size_hints=plan.field_limits, first=fields, max_warps=32)

    def cost(config):
        return (
            abs(config.kwargs["XBLOCK_1"] - 2048) / 1000 + abs(config.kwargs["XBLOCK_0"] - 256) + 1
        )

    winner, found_by, timed = searched(plan, cost, Descent(), space)
    assert (winner.kwargs["XBLOCK_1"], found_by) == (2048, "coordinate_descent")
    assert len(timed) == len(set(timed))


def test_a_way_of_searching_in_steps_has_records_of_its_own():
    """A winner of other steps, or of none, is no answer; a deterministic program takes no step."""
    plan = combo_plan([SMALL, LARGE], SETTING)
    plain, steps = TunerOptions(kind="pointwise"), TunerOptions(kind="pointwise", steps=plan.steps)
    other = TunerOptions(kind="pointwise", steps=combo_plan([SMALL, ROWS], SETTING).steps)
    assert len({plain.search, steps.search, other.search}) == 3
    assert (
        steps.search
        == TunerOptions(kind="pointwise", steps=combo_plan([SMALL, LARGE], SETTING).steps).search
    )
    same = Setting(H200, policy=Policy(deterministic=True))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bundler.toolchain.tuner_toolchain.interpreted", lambda fn: False)
        function = source_module(TEXT).load().scale_two
        for setting, taken in ((SETTING, plan.steps), (same, ())):
            kernel = heuristics.combo("pointwise", [SMALL, LARGE], setting, grid="Grid1D")(function)
            assert kernel.tuned.options.steps == taken


@pytest.mark.toolchain
@pytest.mark.parametrize("descent", [None, Descent()])
def test_a_combined_kernel_is_tuned_once_and_found_again(tmp_path, monkeypatch, descent):
    """With and without coordinate descent: the first object measures, the next takes the record,
    and launches the same.
    """
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    function, a, b = source_module(TEXT).load().scale_two, calls.X, calls.Y

    def run():
        driver, asked = DryDriver("cuda"), []

        def bench(fn, quantiles):
            asked.append(fn)
            fn()
            return [
                float(driver.launches[-1].plan.block_threads) + 1 / driver.launches[-1].grid[0]
            ] * 3

        kernel = heuristics.combo(
            "pointwise",
            [SMALL, LARGE],
            SETTING,
            grid=lambda blocks, sizes: (
                -(-sizes["xnumel_0"] // blocks["XBLOCK_0"])
                - (-sizes["xnumel_1"] // blocks["XBLOCK_1"]),
                1,
                1,
            ),
            options=TunerOptions(driver=driver, workers=1, descent=descent),
            clock=lambda: GivenClock(bench),
        )(function)
        kernel.run(a, b, 1024, 4096)
        (choice,) = kernel.tuned.choices.values()
        return choice, len(asked), driver.launches[-1]

    choice, measured, launch = run()
    assert choice.how == ("steps" if descent is None else "coordinate_descent")
    assert measured > 3
    again, asked, last = run()
    assert (again.how, again.config, asked) == ("record", choice.config, 0)
    assert (last.plan.key, last.grid) == (launch.plan.key, launch.grid)
    ((record, _),) = TuningFolder(tmp_path / "cache").records("scale_two")
    assert record.found_by == choice.how

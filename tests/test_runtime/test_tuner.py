# SPDX-License-Identifier: Apache-2.0
"""The search for the fastest config, over candidates that are made here and clocks that are told
what to say.
"""

import math

import pytest

from bundler.errors import CompileFailed, DriverError, NoValidConfig
from bundler.format.entries import Target
from bundler.runtime import Config, Descent, Space, TunerOptions
from bundler.runtime.tuning.benchmark import Sample, summary
from bundler.runtime.tuning.candidate_compiler import Refused
from bundler.runtime.tuning.config_list import ListedConfigs
from bundler.runtime.tuning.occupancy import Occupancy
from bundler.runtime.tuning.result_lookup import Choice, LookupQuestion, ResultLookup
from bundler.runtime.tuning.tuner import Search
from bundler.runtime.tuning.tuning_winners import describe

H100 = Occupancy("cuda", 9, 65536, 2048, 32, 132)
BLOCKS = [Config({"XBLOCK": block}) for block in (64, 128, 256, 512)]


class Made:
    """A candidate that knows what it takes, and whether it is on the device."""

    def __init__(self, config, registers, spills):
        self.config, self.key, self.registers, self.spills = (
            config,
            f"key {config}",
            registers,
            spills,
        )
        self.loaded = True

    def close(self):
        self.loaded = False


class FakeCompiler:
    """Makes a candidate of each config but for those with a reason not to."""

    def __init__(self, refused=(), registers=lambda config: 32, spills=lambda config: 0):
        self.refused, self.registers, self.spills = dict(refused), registers, spills
        self.made, self.asked = [], []

    def build(self, configs):
        self.asked.append(list(configs))
        found = []
        for config in configs:
            if config in self.refused:
                found.append(Refused(config, self.refused[config]))
            else:
                self.made.append(Made(config, self.registers(config), self.spills(config)))
                found.append(self.made[-1])
        return found


class Clock:
    """Says how long each config takes, and counts."""

    def __init__(self, cost):
        self.cost, self.timed = cost, []

    def __call__(self, candidate):
        assert candidate.loaded
        self.timed.append(candidate.config)
        time = self.cost(candidate.config)
        if isinstance(time, Exception):
            raise time
        return Sample(time, time, time)


def search(compiler, clock, occupancy=None, **options):
    return Search("kernel", compiler, clock, TunerOptions(**options), occupancy)


def by_block(config):
    return abs(math.log2(config.kwargs["XBLOCK"] / 256)) + 1


def test_every_config_is_timed_once_and_the_fastest_wins():
    """Four configs, four measurements; only the winner stays loaded."""
    compiler, clock = FakeCompiler(), Clock(by_block)
    outcome = search(compiler, clock).run(BLOCKS)
    assert (outcome.winner.config, outcome.found_by) == (BLOCKS[2], "autotune")
    assert clock.timed == BLOCKS
    assert [made.config for made in compiler.made if made.loaded] == [BLOCKS[2]]
    assert [timing.time_ns for timing in outcome.timings] == [
        3_000_000,
        2_000_000,
        1_000_000,
        2_000_000,
    ]


def test_what_else_the_gpu_runs_decides_nothing():
    """Most launches of the fastest config were disturbed, and none of a slower one."""
    launches = {BLOCKS[0]: [3.0] * 10, BLOCKS[1]: [1.0] * 4 + [9.0] * 6, BLOCKS[2]: [2.0] * 10}
    outcome = search(FakeCompiler(), lambda made: summary(launches[made.config])).run(BLOCKS[:3])
    assert outcome.winner.config == BLOCKS[1]
    (found,) = (one for one in outcome.timings if one.low_ns == 1_000_000)
    assert (found.time_ns, found.high_ns) == (9_000_000, 9_000_000)


def test_the_first_of_equally_fast_configs_wins():
    """A tie is decided by the order of the list."""
    assert search(FakeCompiler(), Clock(lambda config: 1.0)).run(BLOCKS).winner.config == BLOCKS[0]


def test_configs_that_do_not_compile_are_left_out_with_their_reason():
    """Two of three fail: the third is launched, and nothing is timed."""
    compiler = FakeCompiler(
        {BLOCKS[0]: "OutOfResources: shared memory", BLOCKS[1]: "PTXASError: no"}
    )
    clock = Clock(by_block)
    outcome = search(compiler, clock).run(BLOCKS[:3])
    assert (outcome.winner.config, outcome.found_by, clock.timed) == (BLOCKS[2], "only", [])
    assert [timing.reason for timing in outcome.timings] == [
        "OutOfResources: shared memory",
        "PTXASError: no",
        "not measured: nothing to choose",
    ]


def test_when_none_is_left_the_error_has_every_reason():
    """One typed error names each config and why it cannot be used."""
    reasons = {config: f"OutOfResources: {config}" for config in BLOCKS}
    with pytest.raises(NoValidConfig) as caught:
        search(FakeCompiler(reasons), Clock(by_block)).run(BLOCKS)
    assert len(caught.value.reasons) == 4
    assert all(f"OutOfResources: {config}" in str(caught.value) for config in BLOCKS)


def test_when_no_launch_succeeds_nothing_is_chosen():
    """Infinite times and refused launches are no winners; all modules are released."""
    clock = Clock(
        lambda config: (
            math.inf if config.kwargs["XBLOCK"] < 256 else DriverError("too many registers")
        )
    )
    compiler = FakeCompiler()
    with pytest.raises(NoValidConfig) as caught:
        search(compiler, clock).run(BLOCKS)
    assert {reason for _, reason in caught.value.reasons} == {
        "invalid configuration: the benchmark returned no time",
        "cannot be launched: too many registers",
    }
    assert not any(made.loaded for made in compiler.made)


def test_a_fault_of_the_kernel_ends_the_search():
    """What fails for another reason than its size is not left out: the user has to see it."""

    class Broken(FakeCompiler):
        def build(self, configs):
            raise CompileFailed("kernel does not compile: NameError: x", reason="NameError: x")

    with pytest.raises(CompileFailed):
        search(Broken(), Clock(by_block)).run(BLOCKS)


def test_spilling_configs_are_not_timed_unless_the_kernel_is_a_users():
    """Above the threshold of 16 words; 32 on AMD; a threshold that was given counts."""
    compiler = FakeCompiler(spills=lambda config: 20 if config == BLOCKS[2] else 0)
    clock = Clock(by_block)
    outcome = search(compiler, clock, custom=False).run(BLOCKS)
    assert outcome.winner.config == BLOCKS[1]
    assert BLOCKS[2] not in clock.timed
    assert "spilling: 20 words, and 16 are allowed" in outcome.timings[2].reason
    assert search(compiler, Clock(by_block), custom=True).run(BLOCKS).winner.config == BLOCKS[2]
    amd = Occupancy("hip", 0, 65536, 2048, 64, 304)
    assert (
        search(compiler, Clock(by_block), amd, custom=False).run(BLOCKS).winner.config == BLOCKS[2]
    )
    assert (
        search(compiler, Clock(by_block), amd, custom=False, spill_threshold=10)
        .run(BLOCKS)
        .winner.config
        == BLOCKS[1]
    )


def test_reductions_with_many_registers_are_tried_with_half_the_block():
    """The halved config is compiled, timed with the others, and may win; one that is known is not
    added.
    """
    start = [
        Config({"XBLOCK": 1, "R0_BLOCK": 2048}, 16),
        Config({"XBLOCK": 1, "R0_BLOCK": 1024}, 16),
    ]
    space = Space({"x": 4096, "r0_": 4096})
    compiler, clock = (
        FakeCompiler(registers=lambda config: 64),
        Clock(lambda config: config.kwargs["R0_BLOCK"] / 1000),
    )
    outcome = search(compiler, clock, H100, kind="reduction", space=space).run(start)
    assert [config.kwargs["R0_BLOCK"] for config in clock.timed] == [2048, 1024, 512]
    assert outcome.winner.config.kwargs["R0_BLOCK"] == 512
    fixed = Clock(lambda config: config.kwargs["R0_BLOCK"] / 1000)
    search(
        FakeCompiler(registers=lambda config: 64),
        fixed,
        H100,
        kind="reduction",
        space=space,
        rescale=False,
    ).run(start)
    assert len(fixed.timed) == 2
    floored = Clock(lambda config: config.kwargs["R0_BLOCK"] / 1000)
    floor = Space({"x": 4096, "r0_": 4096}, min_blocks={"r0_": 1024})
    halved = FakeCompiler(registers=lambda config: 64)
    search(halved, floored, H100, kind="reduction", space=floor).run(start)
    assert len(floored.timed) == 2


@pytest.mark.parametrize(
    ("block", "options", "chosen"),
    [
        ({"XBLOCK": 1, "R0_BLOCK": 2048}, {}, False),
        ({"XBLOCK": 32, "R0_BLOCK": 64}, {}, True),
        ({"XBLOCK": 4096, "R0_BLOCK": 2048}, {}, True),
        ({"XBLOCK": 1, "R0_BLOCK": 2048}, {"rescale": False}, True),
        ({"XBLOCK": 1, "R0_BLOCK": 2048}, {"deterministic": True}, True),
        ({"XBLOCK": 1, "R0_BLOCK": 2048}, {"kind": "pointwise"}, True),
    ],
)
def test_an_only_config_is_chosen_where_its_block_cannot_be_halved(
    launch_kernels, block, options, chosen
):
    """Where it can be, the tuner compiles it and looks at its registers, also when it is alone."""
    options = {"kind": "reduction", "space": Space({"x": 4096, "r0_": 4096}), **options}
    lookup = ResultLookup(
        "kernel", launch_kernels.add, None, TunerOptions(**options, reuse="none"), results=False
    )
    listed = ListedConfigs.of([Config(block, 16)])
    question = LookupQuestion({"source": "", "arguments": ""}, (), Target("cuda", "90", 32), listed)
    assert isinstance(lookup.find(question), Choice) == chosen


def test_descent_goes_on_from_the_best_config():
    """Each further config is compiled and timed once; the record says how the winner was found."""
    space = Space({"x": 4096}, max_warps=32)
    compiler, clock = (
        FakeCompiler(),
        Clock(lambda config: by_block(config) + abs(config.num_warps - 8) / 10),
    )
    outcome = search(compiler, clock, kind="pointwise", space=space, descent=Descent()).run(
        BLOCKS[:2]
    )
    assert (outcome.winner.config.kwargs["XBLOCK"], outcome.winner.config.num_warps) == (256, 8)
    assert outcome.found_by == "coordinate_descent"
    assert len(clock.timed) == len(set(clock.timed))
    assert [made.config for made in compiler.made if made.loaded] == [outcome.winner.config]


@pytest.mark.parametrize(
    ("kind", "deterministic", "refined"),
    [
        ("pointwise", False, True),
        ("pointwise", True, True),
        ("reduction", False, True),
        ("reduction", True, False),
        ("persistent_reduction", True, False),
        ("split_scan", True, False),
        ("template", False, False),
        ("user_autotune", False, False),
        ("fixed", False, False),
    ],
)
def test_who_is_refined_depends_on_the_kind(kind, deterministic, refined):
    """Templates, users' kernels and fixed configs are not; reductions are not in deterministic
    mode.
    """
    clock = Clock(by_block)
    search(
        FakeCompiler(),
        clock,
        kind=kind,
        space=Space({"x": 4096}),
        deterministic=deterministic,
        descent=Descent(),
    ).run(BLOCKS[:1])
    assert (len(clock.timed) > 1) == refined


def test_a_users_kernel_is_refined_in_the_fields_that_were_named():
    """Without names the list is what its user wanted."""
    space = Space(fields=("XBLOCK",))
    outcome = search(FakeCompiler(), Clock(by_block), space=space, descent=Descent()).run(
        BLOCKS[:1]
    )
    assert (outcome.winner.config.kwargs["XBLOCK"], outcome.winner.config.num_warps) == (256, 4)


@pytest.mark.parametrize("kind", ["user_autotune", "reduction"])
def test_in_deterministic_mode_no_measurement_decides(kind):
    """The first config that compiles is taken, in every process the same; the others are
    released.
    """
    compiler, clock = FakeCompiler({BLOCKS[0]: "OutOfResources: shared memory"}), Clock(by_block)
    outcome = search(compiler, clock, kind=kind, deterministic=True).run(BLOCKS)
    assert (outcome.winner.config, clock.timed) == (BLOCKS[1], [])
    assert [made.config for made in compiler.made if made.loaded] == [BLOCKS[1]]


def test_pointwise_kernels_are_measured_in_deterministic_mode_too():
    """Their config changes no number."""
    clock = Clock(by_block)
    assert (
        search(FakeCompiler(), clock, kind="pointwise", deterministic=True)
        .run(BLOCKS)
        .winner.config
        == BLOCKS[2]
    )
    assert len(clock.timed) == 4


def test_what_fails_while_refining_is_only_no_improvement():
    """A neighbor that does not compile is passed over, and its reason kept."""

    class Picky(FakeCompiler):
        def build(self, configs):
            if configs[0].kwargs["XBLOCK"] == 512:
                raise CompileFailed("broken for 512", reason="ValueError: 512")
            return super().build(configs)

    outcome = search(
        Picky(), Clock(by_block), kind="pointwise", space=Space({"x": 4096}), descent=Descent()
    ).run(BLOCKS[:3])
    assert outcome.winner.config == BLOCKS[2]
    assert any(timing.reason == "broken for 512" for timing in outcome.timings)


def test_a_config_is_told_without_what_everybody_has():
    """Defaults that are silent in Triton are silent here."""
    outcome = search(FakeCompiler(), Clock(by_block)).run(
        [Config({"XBLOCK": 64}, maxnreg=128, options={"kpack": 2})]
    )
    assert (
        describe(outcome.timings[0].config)
        == "XBLOCK=64, num_warps=4, num_stages=3, maxnreg=128, option.kpack=2"
    )

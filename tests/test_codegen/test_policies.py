# SPDX-License-Identifier: Apache-2.0
"""Policies of programs: which candidates a kernel gets, that what was tuned is a record that
travels, that a deterministic program measures nothing and adds in order, and torch's names for all
of that.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from torch._functorch.aot_autograd import make_boxed_func  # noqa: E402

import bundler  # noqa: E402
from bundler.codegen import module_decorators  # noqa: E402
from bundler.codegen.graph_key import graph_key  # noqa: E402
from bundler.codegen.program import (  # noqa: E402
    GenerateOptions,
    ProgramPolicy,
    _JitLauncher,
    generate,
)
from bundler.codegen.torch_backend import MODES, triton_bundler  # noqa: E402
from bundler.codegen.trace import trace  # noqa: E402
from bundler.compile.source_modules import source_module  # noqa: E402
from bundler.errors import ConfigError, FormatError, UnsupportedOperator  # noqa: E402
from bundler.format.bundle_union import merge  # noqa: E402
from bundler.format.opaque_files import program_name  # noqa: E402
from bundler.runtime import DryDriver  # noqa: E402
from bundler.runtime.heuristics.facts import Device  # noqa: E402
from bundler.runtime.launch.bundle_kernels import load  # noqa: E402
from bundler.runtime.program.bundle_programs import StaticLauncher  # noqa: E402
from bundler.runtime.program.program_plan import read_plan  # noqa: E402
from bundler.runtime.tuning import autotuned_kernel, tuner  # noqa: E402
from bundler.runtime.tuning.benchmark import GivenClock  # noqa: E402

H100, MI300 = Device("cuda", 132, major=9), Device("hip", 304, 64)
MEASURED = GenerateOptions(policy=ProgramPolicy(multi_kernel=True))
TUNED = {"max_autotune": True, "coordinate_descent_tuning": True}
# Of each kind of kernel one whose sizes suggest less than all candidates.
KINDS = {
    "pointwise": (lambda a: a.sin(), (1 << 20,)),
    "tiled": (lambda a: a.t().contiguous(), (4096, 4096)),
    "three": (
        lambda a, b, c: a + b.permute(2, 0, 1) + c.permute(1, 2, 0),
        (32, 48, 64),
        (48, 64, 32),
        (64, 32, 48),
    ),
    "looped": (lambda a: a.sum(1), (2048, 4096)),
    "held": (lambda a: a.sum(1), (2048, 512)),
    "across": (lambda a: a.sum(0), (512, 1 << 16)),
}


def kernel_of(kind="pointwise", **policy):
    function, *sizes = KINDS[kind]
    inputs = [torch.empty(size, device="meta") for size in sizes]
    options = GenerateOptions(policy=ProgramPolicy(**policy))
    program = generate(function, inputs, options=options)
    name = next(iter(program.kernels))  # behind it, what is measured beside it
    return program.modules[name], program.sources[name]


@pytest.mark.parametrize("device", [H100, MI300], ids=lambda device: device.type)
@pytest.mark.parametrize("kind", KINDS)
def test_a_policy_decides_which_candidates_a_kernel_gets(kind, device):
    """More than by default where all are asked for, and one where nothing may be measured."""
    default, most, fixed = (
        kernel_of(kind, **policy)[0].on(device)
        for policy in ({}, {"max_autotune": True}, {"deterministic": True})
    )
    assert most.configs[: len(default.configs)] == default.configs
    if kind in {"three", "looped", "held"}:
        assert len(most.configs) > len(default.configs)
    assert len(fixed.configs) == 1
    assert fixed.tuned.options.descent is None


def test_descent_begins_at_the_fastest_candidate_where_it_is_asked_for():
    """It knows what blocks masks count on; a kernel whose threads need several elements is left at
    what its rule says.
    """
    tuned = kernel_of(coordinate_descent_tuning=True)[0].on(H100).tuned
    assert tuned.options.descent is not None
    assert tuned.options.space.max_blocks == {"x": 4096}
    assert kernel_of()[0].on(H100).tuned.options.descent is None
    narrow = generate(
        lambda a: a.to(torch.float8_e5m2),
        [torch.zeros(4096)],
        options=GenerateOptions(policy=ProgramPolicy(**TUNED)),
    )
    (module,) = narrow.modules.values()
    assert module.facts.min_elem_per_thread > 1
    assert module.on(H100).tuned.options.descent is None


def test_a_search_is_tried_with_one_element_for_each_thread():
    """The hint that torch's `bucketize` gives its kernels: one more candidate, of small tiles."""
    bounds, values = torch.zeros(100), torch.zeros(1 << 16)
    (found,) = generate(torch.bucketize, [values, bounds]).modules.values()
    assert found.facts.one_element_per_thread
    blocks = [config.kwargs["XBLOCK"] for config in found.on(H100).configs]
    assert blocks == [512, 256, 128]
    assert not kernel_of()[0].facts.one_element_per_thread


def test_tensors_that_lie_across_each_other_have_no_narrow_tiles():
    """One that runs along x for all of them has no second axis at all."""
    sizes = (4, 2048, 1024), (4, 1024, 2048)
    inputs = [torch.empty(one, device="meta") for one in sizes]

    def function(a, b):
        return (a + b.mT).relu() + a.sin() * b.mT

    (found,) = generate(function, inputs).modules.values()
    assert found.facts.crossed
    assert len(found.on(H100).configs) == 4
    assert all(1 not in config.kwargs.values() for config in found.on(H100).configs)
    assert not kernel_of()[0].facts.crossed


def test_a_fixed_tile_spans_neighbours_where_memory_runs_across_the_rows():
    """With one column for each program every read would bring elements that nobody needs."""
    kernel = kernel_of("across", deterministic=True)[0]
    assert not kernel.facts.contiguous_row
    assert kernel.on(H100).configs[0].kwargs["XBLOCK"] > 1
    assert kernel_of("looped")[0].facts.contiguous_row


def test_a_policy_stands_in_the_metadata_and_changes_no_line_of_the_kernel():
    """By torch's names of its settings; a compiler is asked for the same kernel."""
    (_, plain), (_, tuned) = kernel_of(), kernel_of(**TUNED)
    assert "'max_autotune': True, 'coordinate_descent_tuning': True}" in tuned
    without = tuned.replace(", 'max_autotune': True, 'coordinate_descent_tuning': True", "")
    assert without == plain
    assert "max_autotune" not in plain


def test_a_policy_is_part_of_a_graphs_key():
    """Two policies are two programs; so are two ways of computing 16-bit floats."""
    module = trace(lambda a: a + 1, [torch.zeros(8)], dynamic=False, device=None)
    module.meta.clear()
    options = [
        GenerateOptions(),
        GenerateOptions(upcast=False),
        *(GenerateOptions(policy=ProgramPolicy(**{name: True})) for name in TUNED),
        MEASURED,
        GenerateOptions(policy=ProgramPolicy(deterministic=True)),
    ]
    assert len({graph_key(module, one).digest for one in options}) == len(options)


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        ({"max_autotune": 1}, "expected True or False, got max_autotune=1"),
        ({"deterministic": True, "max_autotune": True}, "max_autotune asks for one"),
    ],
)
def test_a_policy_that_cannot_be_is_refused(policy, words):
    """With what contradicts what."""
    with pytest.raises(ConfigError, match=words):
        ProgramPolicy(**policy)


# ------------------------------------------------------------------------------------ torch's names


def test_modes_mean_what_torch_means_by_them():
    """Each of ours is one of torch's, and switches on what torch's does."""
    theirs = pytest.importorskip("torch._inductor").list_mode_options()
    names = {"triton.cudagraphs": "graphs"}
    ours = {mode: dict(switches) for mode, switches in MODES.items() if mode is not None}
    assert {*theirs} - {*ours} <= {"lite"}
    for mode, switches in ours.items():
        assert switches == {names.get(name, name): on for name, on in theirs[mode].items()}, mode


@pytest.mark.parametrize("mode", ["lite", "fastest"])
def test_a_mode_that_nothing_is_known_of_is_refused(mode):
    """With those that are known."""
    with pytest.raises(ConfigError, match=r"max-autotune-no-cudagraphs, max-autotune$"):
        triton_bundler(None, [], mode=mode)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_autotune": 3}, "max_autotune=3"),
        ({"coordinate_descent": True}, "'coordinate_descent'"),
        ({"deterministic": True, "max_autotune": True}, "leave one of them out"),
    ],
)
def test_an_option_that_cannot_be_is_refused(options, words):
    """Names are torch's; values are True or False."""
    with pytest.raises(ConfigError, match=words):
        triton_bundler(None, [], options=options)


def test_torch_compile_hands_modes_and_options_to_programs(monkeypatch):
    """What a graph's program is generated by."""
    seen = []

    def compiled(module, inputs, *, options, **_):
        seen.append(options)
        return make_boxed_func(module.forward)

    monkeypatch.setattr("bundler.codegen.torch_backend.compile_graph", compiled)
    for how in (
        {"mode": "max-autotune"},
        {"mode": "max-autotune-no-cudagraphs"},
        {"options": {"deterministic": True, "upcast": False}},
    ):
        torch._dynamo.reset()
        torch.compile(lambda a: a + 1, backend="triton_bundler", **how)(torch.zeros(8))
    tuned = ProgramPolicy(**TUNED)
    assert seen == [
        GenerateOptions(graphs=True, policy=tuned, templates="by rule"),
        GenerateOptions(policy=tuned, templates="by rule"),
        GenerateOptions(
            policy=ProgramPolicy(deterministic=True), upcast=False, templates="by rule"
        ),
    ]


# ------------------------------------------------------------------------------------ Deterministic


def added(a, places, values):
    return a.index_add(0, places, values) * 2


INPUTS = [torch.zeros(8, 4), torch.zeros(3, dtype=torch.int64), torch.zeros(3, 4)]
DETERMINISTIC = GenerateOptions(policy=ProgramPolicy(deterministic=True))


def test_a_deterministic_program_adds_nothing_by_atomics():
    """It is refused, unless torch's own operators are asked to be in order: these are called."""
    assert "tl.atomic_add" in "".join(generate(added, INPUTS).sources.values())
    with pytest.raises(UnsupportedOperator, match="policy deterministic: it adds or stores") as got:
        generate(added, INPUTS, options=DETERMINISTIC)
    assert got.value.operator.startswith("aten.index_")
    torch.use_deterministic_algorithms(True)
    try:
        program = generate(added, INPUTS, options=DETERMINISTIC)
    finally:
        torch.use_deterministic_algorithms(False)
    assert not any(
        "atomic" in re.sub("atomic_add_found", "", one) for one in program.sources.values()
    )
    assert [call.operator for call in program.fallbacks]


@pytest.mark.parametrize("convolved", [True, False])
def test_torch_compile_raises_the_refusal(convolved):
    """The graph as torch has it would give other numbers from call to call as well."""
    given = INPUTS if not convolved else [torch.zeros(1, 2, 8, 8), torch.zeros(2, 2, 3, 3)]
    function = torch.nn.functional.conv2d if convolved else added
    torch._dynamo.reset()
    compiled = torch.compile(function, backend="triton_bundler", options={"deterministic": True})
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed) as caught:
        compiled(*given)
    assert isinstance(caught.value.inner_exception, UnsupportedOperator)
    assert "torch.use_deterministic_algorithms" in str(caught.value)


def test_after_torchs_own_switch_nothing_is_measured():
    """As in TorchInductor, whatever else was asked for."""
    torch.use_deterministic_algorithms(True)
    try:
        module, text = kernel_of("looped", **TUNED)
    finally:
        torch.use_deterministic_algorithms(False)
    assert "'deterministic': True" in text
    assert len(module.on(H100).configs) == 1


# ---------------------------------------------------------------------------------- Tuning, records


class OnTheGpu:
    """What a tensor is to a launch: an address, and where it lies."""

    dtype = torch.float32

    def data_ptr(self):
        return 1 << 40

    def get_device(self):
        return 0


@pytest.fixture
def gpu(tmp_path, monkeypatch):
    """A GPU that is not there, where a launch of fewer programs is faster; and the launches that
    were timed.
    """
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    driver, timed = DryDriver("cuda"), []

    def programs(call, quantiles):
        call()
        timed.append(driver.launches[-1].grid[0])
        return [float(timed[-1])] * len(quantiles)

    monkeypatch.setattr(module_decorators, "_driver", lambda: driver)
    monkeypatch.setattr(autotuned_kernel, "open_first_driver", lambda _: driver)
    monkeypatch.setattr(tuner, "CudaClock", lambda *_: GivenClock(programs))
    return driver, timed


def plan_of(built):
    """Return the plan that a bundle has."""
    (entry,) = (one for one in built.opaque if program_name(one.path) is not None)
    return read_plan(built.read(entry.artifact))


@pytest.mark.toolchain
def test_what_descent_found_is_a_record_that_a_bundle_brings(gpu, tmp_path, monkeypatch):
    """Another machine launches it, and measures nothing: none of the candidates is what was
    found.
    """
    driver, timed = gpu
    found, size = [], 1 << 20
    function, _ = KINDS["pointwise"]
    program = generate(
        function,
        [torch.empty(size)],
        device="cuda",
        options=GenerateOptions(policy=ProgramPolicy(coordinate_descent_tuning=True)),
    )
    (name,) = program.kernels
    for machine in ("first", "second"):
        monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / machine))
        source = source_module(program.sources[name])
        source.unload()  # what a process has of a kernel is made of its text alone
        kernel = getattr(source.load(), name)
        if machine == "first":
            with bundler.recording() as recording:
                kernel.bound()(OnTheGpu(), OnTheGpu(), size)
            recording.collect().save(tmp_path / "x.tbundle")
        else:
            bundler.restore(tmp_path / "x.tbundle")
            kernel.bound()(OnTheGpu(), OnTheGpu(), size)
        (made,) = kernel._made.values()
        (choice,) = made.tuned.choices.values()
        found.append((choice.how, choice.config.kwargs["XBLOCK"], len(timed)))
        timed.clear()
        assert driver.launches[-1].grid == (size // 4096, 1, 1)
        assert 4096 not in {config.kwargs["XBLOCK"] for config in made.configs}
    brought = bundler.Bundle.load(tmp_path / "x.tbundle")
    fixed = generate(function, [torch.empty(size)], device="cuda", options=DETERMINISTIC)
    # A replay without Triton launches it, too, where the bundle has record and kernel; but not
    # where nothing that was measured may decide.
    for replayed, tuned, expected in (
        (program, [], 1024),
        (program, [brought], 4096),
        (fixed, [brought], 1024),
    ):
        built = replayed.build(["cuda:90"])
        bundle = merge([built, *tuned])
        launcher = StaticLauncher(
            plan_of(built), load(bundle, driver=driver), brought.tuning_records
        )
        launcher.bound(name, {"xnumel": size})(OnTheGpu(), OnTheGpu(), size)
        assert driver.launches[-1].grid == (size // expected, 1, 1)
    (how, block, measured), second = found
    assert (how, block, measured > 2) == ("coordinate_descent", 4096, True)
    assert second == ("record", 4096, 0)


def test_a_reduction_has_two_forms_where_a_measurement_tells():
    """Rows of 16 times the length that is held whole by default, as in torch; both forms are of the
    same arguments, and the plan says so, which is as before without them.
    """
    function, rows, across = lambda a: a.sum(1), (1 << 14, 16 * 1024), (16 * 64, 1 << 18)
    forms = {
        rows: ["reduction", "persistent_reduction"],
        (64, 300): ["persistent_reduction", "reduction"],
        (1 << 14, 16 * 1024 + 1): ["reduction"],
    }
    for size, kinds in forms.items():
        program = generate(function, [torch.empty(size, device="meta")], options=MEASURED)
        assert [kernel.text.kind for kernel in program.kernels.values()] == kinds
        first, *others = program.plan.kernels
        found = program.plan.kernels[first].others
        assert [*found] == others
        assert all(places == (0, 1, 2, 3) for places in found.values())
        assert read_plan(program.plan.to_json()) == program.plan
        assert (b"others" in program.plan.to_json()) is bool(others)
    program = generate(lambda a: a.sum(0), [torch.empty(across, device="meta")], options=MEASURED)
    assert len(program.kernels) == 2
    assert len(generate(lambda a: a + 1, [torch.empty(64)], options=MEASURED).kernels) == 1
    assert len(generate(function, [torch.empty(64, 300)]).kernels) == 1


@pytest.mark.parametrize(
    "others",
    [{"none": [0, 1, 2, 3]}, {"self": [0, 1, 2, 3]}, {"b": [0, 1, 2]}, {"b": [0, 1, 2, 4]}],
)
def test_a_plan_whose_other_forms_cannot_be_is_refused(others):
    """They are kernels of the plan, each with a place for each of its parameters."""
    program = generate(lambda a: a.sum(1), [torch.empty(64, 300)], options=MEASURED)
    data = json.loads(program.plan.to_json())
    first, second = program.kernels
    names = {"b": second, "self": first}
    data["kernels"][first]["others"] = {names.get(k, k): places for k, places in others.items()}
    with pytest.raises(FormatError):
        read_plan(json.dumps(data).encode())


@pytest.mark.toolchain
def test_the_faster_form_is_a_record_that_a_bundle_brings(gpu, tmp_path, monkeypatch):
    """The first call measures both; another machine measures nothing, and neither does one without
    Triton, whose bundle has the program.
    """
    driver, _ = gpu
    measured, found, x = [], [], OnTheGpu()

    def held_is_faster(kernel, args):
        kernel(*args)
        measured.append(driver.launches[-1].plan.kernel)
        return 1.0 if "_per_" in measured[-1] else 2.0

    monkeypatch.setattr(module_decorators, "_time_on_clones", held_is_faster)
    program = generate(lambda a: a.sum(1), [torch.empty(64, 2048)], device="cuda", options=MEASURED)
    looped, held = program.kernels
    for machine in ("first", "second"):
        monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / machine))
        modules = {}
        for name, source in program.sources.items():
            module = source_module(source)
            module.unload()
            modules[name] = getattr(module.load(), name)
        run = _JitLauncher(modules, program.plan.kernels).bound(looped, {})
        if machine == "first":
            with bundler.recording() as recording:
                run(x, x, 64, 2048)
            brought = recording.collect()
        else:
            bundler.restore(brought)
            run(x, x, 64, 2048)
        found.append((run.how, run.choice, [*measured]))
        measured.clear()
        assert driver.launches[-1].plan.kernel == held
    assert found == [("measured", held, [looped, held]), ("record", held, [])]
    built = program.build(["cuda:90"])
    plan = plan_of(built)
    for bundle, expected in ((built, looped), (merge([built, brought]), held)):
        launcher = StaticLauncher(plan, load(bundle, driver=driver), bundle.tuning_records)
        launcher.bound(looped, {"xnumel": 64})(x, x, 64, 2048)
        assert driver.launches[-1].plan.kernel == expected


@pytest.mark.slow
@pytest.mark.toolchain
@pytest.mark.parametrize(
    ("policy", "hows"),
    [
        ({}, ("autotune", "only")),
        ({"max_autotune": True}, ("autotune", "autotune")),
        (TUNED, ("coordinate_descent", "coordinate_descent")),
        ({"deterministic": True}, ("only", "only")),
    ],
    ids=["default", "max_autotune", "descent", "deterministic"],
)
def test_a_second_process_measures_nothing(tmp_path, policy, hows):
    """Two processes on two machines: the second has a bundle of the first, which says also of an
    only candidate that its block was not halved.
    """
    found = []
    for how in ("save", "restore"):
        environment = {
            **os.environ,
            "TRITON_CACHE_DIR": str(tmp_path / how),
            "XDG_CACHE_HOME": str(tmp_path / how),
        }
        worker = Path(__file__).with_name("policy_worker.py")
        done = subprocess.run(
            [sys.executable, worker, json.dumps(policy), how, tmp_path / "x.tbundle"],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        found.append(json.loads(done.stdout))
    first, second = found
    assert tuple(one["how"] for one in first) == hows
    assert [one["config"] for one in first] == [one["config"] for one in second]
    assert not any(one["timed"] for one in second)
    looked_up = "only" if policy.get("deterministic") else "record"
    assert [one["how"] for one in second] == [looked_up] * 2

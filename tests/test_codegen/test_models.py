# SPDX-License-Identifier: Apache-2.0
"""Whole models through the backend: what judges them, how they are run, and a sample; models of
libraries are among the slow tests.
"""

import argparse
import contextlib
import copy
import importlib.metadata
import json
import os
import sys
import threading
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from bundler.codegen import torch_backend  # noqa: E402
from bundler.errors import BundlerError  # noqa: E402
from tools.codegen import (  # noqa: E402
    model_cases,
    model_process,
    model_rows,
    model_times,
    models,
)
from tools.codegen.model_judge import flat, wrong, wrong_beside_all  # noqa: E402


@pytest.fixture(scope="module")
def begun():
    """What starts the processes of models stands ready, and stays for the tests that follow."""
    models._ready(options(starts=True))


def sides(exact, eager_error=1e-6, our_error=1e-6, name="result"):
    """Three sides of a result: float64, and two in float32 that are off by so much."""
    noise = torch.randn(exact.shape, generator=torch.Generator().manual_seed(1), dtype=exact.dtype)
    size = exact.square().mean().sqrt()
    eager, ours = ((exact + error * size * noise).float() for error in (eager_error, our_error))
    return {name: ours}, {name: eager}, {name: exact}


def drawn(*shape, scale=1.0):
    return scale * torch.randn(
        shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )


def test_results_as_good_as_those_of_eager_mode_are_right():
    """Close results, and results no further from float64 than eager's, are right."""
    assert wrong(*sides(drawn(40, 50)), 1e-3) == []
    assert wrong(*sides(drawn(40, 50), eager_error=0.5, our_error=0.6), 1e-3) == []


def test_results_worse_than_those_of_eager_mode_are_wrong():
    """What is neither close nor as good as eager's is wrong, with its name and by how much."""
    (line,) = wrong(*sides(drawn(40, 50), eager_error=0.1, our_error=0.5), 1e-3)
    assert line.startswith("result: RMSE")
    assert "off by 0.5 of its size, eager by 0.1" in line


def test_results_as_good_as_another_run_of_eager_mode_are_right():
    """A run with weights that differ in the last bit may be as far off as ours; what is further off
    than all of them stays wrong.
    """
    ours, eager, exact = sides(drawn(40, 50), eager_error=1e-6, our_error=0.05)
    _, other, _ = sides(drawn(40, 50), eager_error=0.04)
    lines = wrong(ours, eager, exact, 1e-3)
    assert len(lines) == 1
    assert wrong_beside_all(lines, ours, [eager, other], exact, 1e-3) == []
    worse, _, _ = sides(drawn(40, 50), our_error=0.5)
    assert wrong_beside_all(lines, worse, [eager, other], exact, 1e-3) == lines


class _OneStep(torch.nn.Module):
    """A model whose gradient has a step: on which side a number lies is decided by its last bit."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.linspace(0.5, 2.0, 8))

    def forward(self, x):
        return (self.weight * x).relu().sum()


@pytest.mark.parametrize(
    ("where", "at_a_step"), [("everywhere", False), ("at these weights", True)]
)
def test_a_gradient_at_a_step_is_told_from_one_that_is_wrong(where, at_a_step):
    """What is wrong with all nudged weights is wrong; what is right with some stood at a step."""
    lists = SimpleNamespace(
        build=lambda _name, _device: _OneStep(),
        inputs=lambda _name, batch, _device: {"x": torch.ones(batch, 8)},
        loss=lambda outputs, _given: outputs,
    )
    subject = model_process.Subject(lists, "one step", "training", "cpu")
    ours = copy.deepcopy(subject.model)
    plain = subject.steps(ours)[0]

    def step():
        found = plain()
        if where == "everywhere" or torch.equal(ours.weight, subject.model.weight):
            found["gradient of weight"] = found["gradient of weight"] * 1.5
        return found

    (eager,), (exact,) = (
        subject.results(subject.model, only=0),
        subject.results(subject.exact(), only=0),
    )
    lines = wrong(step(), eager, exact, 1e-2)
    assert len(lines) == 1
    found = model_process._at_a_step(subject, ours, 0, step, lines, (1e-2, False))
    assert found == at_a_step
    assert torch.equal(ours.weight, subject.model.weight)


def test_small_gradients_are_judged_on_their_own_scale():
    """A gradient far under the tolerance is wrong when it is half as large again; the dashboard's
    own rule would let it pass.
    """
    ours, eager, exact = sides(drawn(40, 50, scale=1e-4))
    ours["result"] = ours["result"] * 1.5
    assert torch._dynamo.utils.same(eager["result"], ours["result"], exact["result"], tol=1e-2)
    assert len(wrong(ours, eager, exact, 1e-2)) == 1


def test_scaling_does_not_round_two_sides_apart():
    """A loss halfway between two numbers of bfloat16: whoever takes the other one is as near."""
    low, high = torch.tensor(0.69140625).bfloat16(), torch.tensor(0.6953125).bfloat16()
    exact = {"loss": (low.double() + high.double()) / 2 - 1e-9}
    assert wrong({"loss": low}, {"loss": high}, exact, 1e-3) == []
    assert wrong({"loss": high}, {"loss": low}, exact, 1e-3) == []
    assert len(wrong({"loss": high + 0.01}, {"loss": low}, exact, 1e-3)) == 1


def test_gradients_that_are_zero_but_for_rounding_are_right():
    """The gradient of a bias that softmax cancels is rounding: it is judged on the scale of the
    others.
    """
    ours, eager, exact = sides(drawn(40, 50))
    ours["zero"], eager["zero"] = torch.full((64,), 5e-9), torch.full((64,), -1e-9)
    exact["zero"] = torch.zeros(64, dtype=torch.float64)
    assert wrong(ours, eager, exact, 1e-2) == []
    ours["zero"] += 1e-3
    assert len(wrong(ours, eager, exact, 1e-2)) == 1


@pytest.mark.parametrize(
    ("ours", "words"),
    [
        (torch.ones(3, dtype=torch.float64), "float64"),
        (torch.ones(3, 1), "(3, 1)"),
        (torch.full((3,), float("nan")), "nan"),
        (torch.tensor([1.0, 1.0, float("inf")]), "inf"),
    ],
)
def test_other_types_shapes_and_infinities_are_wrong(ours, words):
    """A result has eager's dtype and shape, and is finite where eager's is."""
    (line,) = wrong({"a": ours}, {"a": torch.ones(3)}, {"a": torch.ones(3).double()}, 1e-2)
    assert words in line


def test_integers_are_equal_and_no_result_is_missing():
    """Counts of batches seen have to be equal, and both sides have the same results."""
    two, three = torch.tensor(2), torch.tensor(3)
    assert wrong({"a": two}, {"a": two}, {"a": two}, 1e-2) == []
    assert wrong({"a": three}, {"a": two}, {"a": two}, 1e-2) == ["a: integers differ"]
    assert wrong({}, {"a": two}, {"a": two}, 1e-2) == ["results ['a'] are not on both sides"]


def test_tensors_of_nested_results_are_named_by_where_they_are():
    """Dictionaries, tuples and what is no tensor: each tensor has one name."""
    a, b = torch.ones(1), torch.ones(2)
    found = flat({"loss": a, "more": (None, {"x": b}), "text": "no"})
    assert list(found) == ["loss", "more.1.x"]
    assert flat(a) == {"result": a}


def test_parameters_that_are_one_number_are_moved_and_dropout_is_off():
    """No branch of a model is multiplied by zero, and nothing random is drawn: neither what is
    dropped nor a router's noise.
    """
    model = torch.nn.Sequential(torch.nn.BatchNorm2d(4), torch.nn.Dropout(0.5))
    model.jitter_noise = 0.01
    model_process.without_dropout(model)
    model_process.without_constants(model)
    assert model[1].p == 0.0
    assert model.jitter_noise == 0.0
    assert all(one.std() > 0 for one in model.parameters())


def options(**overrides):
    """The command line of `models`, parsed."""
    given = {
        "kind": "cases",
        "mode": "inference,training",
        "only": [],
        "shard": (1, 1),
        "resume": False,
        "again": False,
        "device": "cpu",
        "workers": 2,
        "seconds": 60.0,
        "limit": None,
        "no_inductor": True,
        "time": False,
        "starts": False,
        "graphs": False,
        "drawn_candidates": False,
    }
    return argparse.Namespace(**{**given, **overrides})


def test_shards_have_each_task_once_and_forty_of_each_library():
    """The parts of a run are disjoint and complete, and the lists are long enough."""
    everything = models.chosen(options(kind="transformers,timm,cases"))
    parts = [
        models.chosen(options(kind="transformers,timm,cases", shard=(part, 3)))
        for part in (1, 2, 3)
    ]
    assert sorted(task for part in parts for task in part) == sorted(everything)
    assert len(set(everything)) == len(everything)
    for library in ("transformers", "timm"):
        assert len({name for kind, name, _ in everything if kind == library}) >= 80


@pytest.mark.parametrize("given", [{"kind": "models"}, {"mode": "eager"}, {"only": ["Bert"]}])
def test_a_name_that_is_not_there_is_refused(given):
    """Kinds, modes and models are named from lists."""
    with pytest.raises(SystemExit, match="models: "):
        models.chosen(options(**given))


@pytest.mark.parametrize(
    ("code", "limit_s", "words"),
    [
        (
            "import os\ndef main():\n    print('last words', flush=True); os.abort()",
            60.0,
            "ended with -6: last words",
        ),
        ("import time\ndef main():\n    time.sleep(60)", 0.5, "not done in 0 s"),
    ],
)
@pytest.mark.usefixtures("begun")
def test_a_crash_and_a_hang_are_each_a_model_that_raises(
    monkeypatch, tmp_path, code, limit_s, words
):
    """A process that dies, or takes too long, is one answer and no more."""
    (tmp_path / "broken_model.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(models, "_OF_LIBRARIES", "broken_model")
    found = models.judged(("timm", "vgg", "training"), "cpu", limit_s, inductor="no")
    assert found["status"] == "raises"
    assert words in found["error"]


@pytest.mark.usefixtures("begun")
def test_an_answer_counts_though_what_inductor_calls_takes_too_long(monkeypatch, tmp_path):
    """Ours is noted before Inductor begins."""
    (tmp_path / "slow_peer.py").write_text(
        "import time\n"
        "from tools.codegen import model_process\n"
        "def judged(*_):\n"
        "    yield {'status': 'right'}\n"
        "    time.sleep(60)\n"
        "def main():\n"
        "    model_process.judged = judged\n"
        "    return model_process.main()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(models, "_OF_LIBRARIES", "slow_peer")
    found = models.judged(("timm", "vgg", "training"), "cpu", 5.0, inductor="too")
    assert found["status"] == "right"
    assert "inductor" not in found


def test_a_run_goes_on_where_it_was_and_begins_anew_for_other_sources(monkeypatch, tmp_path):
    """`--resume` asks for what has no answer; answers about other sources are dropped, and what
    Inductor calls is kept for its torch, of which a distribution's name for itself may be shorter.
    """
    asked = []

    def judged(task, *_, **__):
        asked.append(task[1])
        return {"status": "right", "inductor": {"called": {}}}

    monkeypatch.setattr(models, "judged", judged)
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "2.11.0")
    path = tmp_path / "models.json"
    given = options(out=path, resume=True)
    for _ in range(2):
        models.run(models.chosen(given), models.begun(path, "cpu"), given)
    assert sorted(asked) == sorted(model_cases.names("cases"))
    saved = json.loads(path.read_text())
    assert models.merged([saved, saved])["models"] == saved["models"]
    with pytest.raises(SystemExit, match="same sources"):
        models.merged([saved, {**saved, "sources": "others"}])
    monkeypatch.setattr(models, "sources", lambda: "others")
    begun = models.begun(path, "cpu")
    assert begun["models"] == {}
    assert begun["inductor"] == saved["inductor"]
    assert {f"cases {name}" for name in asked} <= begun["inductor"].keys()
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "2.12.0")
    assert models.begun(path, "cpu")["inductor"] == {}


RIGHT = {
    "status": "right",
    "graphs": 1,
    "as_torch_has_them": [],
    "breaks": {},
    "called": {"aten.mm.default": 2},
    "launches": 1,
    "first_call_s": 1.0,
}
INDUCTOR = {"called": {"extern_kernels.mm": 2}, "breaks": {}, "torch": "2"}


@pytest.mark.parametrize(
    ("change", "missed"),
    [
        ({}, None),
        ({"called": {"aten.mm.default": 2, "aten.sort.stable": 1}}, None),
        (
            {"called": {"aten.mm.default": 2, "aten.cummax.default": 1}},
            "that call more operators than Inductor",
        ),
        ({"called": {"aten.mm.default": 3}}, "that call more operators than Inductor"),
        ({"breaks": {"a reason": 1}}, "with more graph breaks than Inductor"),
        ({"as_torch_has_them": ["no operator"]}, "with a graph that runs as torch has it"),
        (
            {"status": "wrong", "wrong": {"batch 8, static": ["1 of 9"]}},
            "models and cases that are wrong",
        ),
        ({"status": "raises", "error": "RuntimeError: no"}, "that raise"),
        ({"status": "broken", "error": "eager mode has a NaN"}, "that eager mode cannot run"),
    ],
)
def test_each_target_is_missed_by_what_it_is_about(capsys, change, missed):
    """More calls and breaks than Inductor's, graphs that torch runs, and wrong numbers give status
    1; sorts may be called.
    """
    name = "timm vgg training"
    result = {"models": {name: {**RIGHT, **change}}, "inductor": {name: INDUCTOR}}
    assert models.show(result) == (missed is not None)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("! ")]
    assert [line[2:].split(":")[0] for line in lines] == ([missed] if missed else [])


def test_a_committed_result_has_both_libraries_and_what_inductor_calls(capsys):
    """`--check` misses models that were never run, and those with nothing to compare with."""
    result = {"models": {"timm vgg training": RIGHT}, "inductor": {}}
    assert models.show(result) == 0
    assert models.show(result, whole=True) == 1
    out = capsys.readouterr().out
    assert "! models of transformers that were judged: 0" in out
    assert "! without Inductor's calls to compare with: 1" in out


def judged(kind, name, mode=""):
    return models.judged((kind, name, mode), "cpu", 400.0, inductor="no")


@pytest.mark.parametrize(
    ("tells", "reason"), [(True, "Dynamo's graphs, run by torch"), (False, "")]
)
def test_a_model_that_computes_something_else_when_it_is_traced_is_no_case(tells, reason):
    """Torch's own run of the graphs decides, not ours."""

    class Told(torch.nn.Linear):
        def forward(self, x):
            return super().forward(x) * (2 if tells and torch.compiler.is_compiling() else 1)

    source = SimpleNamespace(
        build=lambda *_: Told(8, 8),
        inputs=lambda _name, batch, _device: {"x": torch.randn(batch, 8)},
        loss=None,
        dtype=lambda *_: torch.bfloat16,
    )
    subject = model_process.Subject(source, "", "inference", "cpu")
    eager, exact = subject.results(subject.model), subject.results(subject.exact())
    told = model_process._as_traced(subject, eager, exact, (1e-3, False))
    assert told.startswith(reason)
    assert bool(told) == tells


class _Noisy(torch.nn.Linear):
    """Results of which a part is drawn, by a name that nobody turns off."""

    def __init__(self, noise):
        super().__init__(8, 8)
        self.noise = noise

    def forward(self, x):
        return super().forward(x) + self.noise * torch.rand_like(x)


@pytest.mark.parametrize(("noise", "status"), [(0.5, "broken"), (0.0, "right")])
def test_a_model_that_draws_random_numbers_is_not_judged(monkeypatch, noise, status):
    """No side would draw the numbers of another: by luck it were right, or wrong."""
    source = SimpleNamespace(
        build=lambda *_: _Noisy(noise),
        inputs=lambda _name, batch, _device: {"x": torch.randn(batch, 8)},
        loss=None,
        tolerance=lambda *_: (1e-3, False),
    )
    monkeypatch.setitem(sys.modules, "tools.codegen.noisy_models", source)
    monkeypatch.setattr(model_process, "_ours", lambda *_, **__: {"status": "right"})
    (found,) = model_process.judged("noisy", "", "inference", "cpu", "no")
    assert found["status"] == status
    assert ("draws random numbers: result: RMSE" in found.get("error", "")) == (noise > 0)


@pytest.mark.usefixtures("begun")
def test_a_model_with_batch_norm_is_trained_to_the_same_state():
    """A sample of what `models` judges: convolutions and batch norm, four steps, parameters and
    running statistics.
    """
    found = judged("cases", "running-statistics")
    assert found["status"] == "right", found
    assert found["as_torch_has_them"] == []
    assert found["kernels"] > 0


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["autocast", "dropout", "checkpointing", "generate-static-cache"])
@pytest.mark.usefixtures("begun")
def test_uses_of_models_have_the_results_of_eager_mode(name):
    """Autocast, dropout, checkpoints and `generate` of transformers."""
    if name == "generate-static-cache":
        pytest.importorskip("transformers")
    found = judged("cases", name)
    assert found["status"] == "right", found
    assert found["as_torch_has_them"] == []


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["DistilBertForMaskedLM", "Llama-3.2-1B", "ResNet"])
@pytest.mark.usefixtures("begun")
def test_models_of_transformers_are_trained_as_in_eager_mode(name):
    """Attention with and without a mask of time, and convolutions with batch norm: results and
    gradients, at sizes that change.
    """
    pytest.importorskip(
        "transformers", reason="transformers is not installed: no whole model is judged"
    )
    found = judged("transformers", name, "training")
    assert found["status"] == "right", found
    assert found["as_torch_has_them"] == []


def test_a_second_start_is_told_without_what_torch_does_before():
    """Dynamo's part is that of its frames outside of the backend, AOTAutograd's that outside of the
    compilers; a warm Inductor has no part of AOTAutograd's.
    """
    frames = {"_compile.compile_inner": 9.0, "OutputGraph.call_user_compiler": 6.0}
    ours = frames | {"create_aot_dispatcher_function": 5.0}
    assert model_times._by_torch(ours, inside=1.0) == 3.0 + 4.0
    cold = ours | {"compile_fx.<locals>.fw_compiler_base": 4.5}
    assert model_times._by_torch(cold, inside=0.0) == 3.0 + 0.5
    assert model_times._by_torch(frames, inside=0.0) == 3.0
    sides = {
        "ours": {"whole_s": 3.0, "rest_s": 1.0},
        "inductor": {"whole_s": 4.0, "rest_s": 2.0},
    }
    first = {side: {"whole_s": 8.0, "rest_s": 0.0} for side in sides}
    assert model_times.start_ratios({"first": first, "second": sides}) == {
        "first start": 1.0,
        "second start": 0.75,
        "second start's rest": 0.5,
    }


_TOLD_START = """
import atexit, json, os, sys
from pathlib import Path

def main():
    *_, path, asked = sys.argv
    left = Path(os.environ["XDG_CACHE_HOME"])
    number = len(list(left.glob("*")))
    left.mkdir(exist_ok=True)
    atexit.register(Path(left, str(number)).touch)
    start = {
        # The last one is the shortest.
        "whole_s": 9.0 - number,
        "number": number,
        "asked": asked,
        "hash": hash("a"),
        "cores": sorted(os.sched_getaffinity(0)),
        "threads of the server": len(os.listdir(f"/proc/{os.getppid()}/task")),
        "imported": sorted({"torch", "timm", "torch._inductor.async_compile"} & {*sys.modules}),
        "is forked": "forkserver" in " ".join(sys.orig_argv),
    }
    Path(path).write_text(json.dumps({"status": "", "start": start}))
    return 0
"""


@pytest.mark.usefixtures("begun")
def test_each_start_is_forked_and_finds_only_what_the_first_of_its_side_left(monkeypatch, tmp_path):
    """First starts have empty caches, second ones theirs, and other hashes of strings; processes
    are forked where no thread runs, with libraries imported but not what compiles in Inductor, and
    end as others do.
    """
    (tmp_path / "told_start.py").write_text(_TOLD_START)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(models, "_OF_LIBRARIES", "told_start")
    core = max(os.sched_getaffinity(0))
    found = models.started_anew(("timm", "vgg", "training"), "cpu", 60.0, [core])["times"]
    hashes = {}
    for start, number in (("first", 0), ("second", 2)):
        for side in models.STARTED:
            one = found[start][side]
            assert (one["asked"], one["number"]) == (f"start-{side}", number)
            assert one["cores"] == [core]
            assert one["threads of the server"] == 1
            assert one["is forked"]
            assert "torch" in one["imported"]
            assert "torch._inductor.async_compile" not in one["imported"]
            hashes.setdefault(start, set()).add(one["hash"])
    assert len(hashes["first"]) == len(hashes["second"]) == 1
    assert hashes["first"] != hashes["second"]


@pytest.mark.usefixtures("begun")
def test_a_start_that_fails_is_a_model_that_raises(monkeypatch, tmp_path):
    """What the process said last is told, and no start follows."""
    (tmp_path / "failing_start.py").write_text("def main():\n    raise SystemExit('no start')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(models, "_OF_LIBRARIES", "failing_start")
    found = models.started_anew(("timm", "vgg", "training"), "cpu", 60.0, [0])
    assert found["status"] == "raises"
    assert "no start" in found["error"]


def test_starts_of_models_side_by_side_have_equal_shares_and_stand_beside_times(
    monkeypatch, tmp_path
):
    """Seven cores are two shares of three; times stay, and a model with starts is not asked again.
    Other tasks have one core.
    """
    shares, both = [], threading.Barrier(2, timeout=60)
    start = {side: {"whole_s": 1.0, "rest_s": 0.5, "cores": 3} for side in models.STARTED}

    def started(_task, _device, _limit_s, cores):
        shares.append(cores)
        both.wait()
        return {"status": "", "times": {"first": start, "second": start}}

    def judged(_task, _device, _limit_s, *, cores, **_):
        shares.append(cores)
        return {"status": "right"}

    monkeypatch.setattr(models, "started_anew", started)
    monkeypatch.setattr(models, "judged", judged)
    monkeypatch.setattr(models, "_ready", lambda _: None)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {*range(7)})
    tasks = [("timm", name, "training") for name in ("vgg", "resnet18")]
    times = {"ours": {"wall": 7.0}}
    result = {"models": {}, "inductor": {}, "times": {"timm vgg training": times}}
    given = options(out=tmp_path / "models.json", time=True, starts=True, resume=True)
    for _ in range(2):
        models.run(tasks, result, given)
    assert sorted(shares) == [[0, 1, 2], [3, 4, 5]]
    assert result["times"]["timm vgg training"] == times | {"first": start, "second": start}
    assert result["times"]["timm resnet18 training"] == {"first": start, "second": start}
    (line, *_) = model_times.lines({"resnet18": result["times"]["timm resnet18 training"]})
    assert line == (
        "resnet18: first start 1.00, first start's rest 1.00, second start 1.00, second start's"
        " rest 1.00; starts on 3 cores"
    )
    shares.clear()
    models.run(tasks[:1], result, options(out=tmp_path / "models.json"))
    assert shares in ([[0]], [[3]])


class _Timed(torch.nn.Linear):
    def __init__(self):
        super().__init__(8, 8, bias=False)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch, where Inductor is imported
@pytest.mark.parametrize("falls_back", [False, True])
def test_a_graph_that_runs_as_torch_has_it_is_told_beside_times(monkeypatch, falls_back):
    """In the process that is timed, and in one that is started."""

    def refuse(*_, **__):
        raise BundlerError("no program")

    if falls_back:
        monkeypatch.setattr(torch_backend, "program_of_graph", refuse)
    source = SimpleNamespace(
        build=lambda *_: _Timed(),
        inputs=lambda _name, batch, _device: {"input": torch.randn(batch, 8)},
        loss=None,
    )
    subject = model_process.Subject(source, "", "inference", "cpu")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(model_times, "_alone", contextlib.nullcontext)
    monkeypatch.setattr(model_times, "_stopped", lambda *_: 0.0)
    monkeypatch.setattr(model_times, "_profiled", lambda _: {})
    monkeypatch.setattr(model_times, "_peak", lambda *_: 0)
    monkeypatch.setattr(model_times, "_ROUNDS", 1)
    settings = importlib.import_module("torch._inductor.config")
    # Inductor's side is not what this test is about, and compiles for long.
    compiled = torch.compile

    def compile_(model, backend, **named):
        return compiled(model, backend="eager" if backend == "inductor" else backend, **named)

    monkeypatch.setattr(torch, "compile", compile_)
    assert model_times.measured(subject)["ours"]["fallbacks"] == int(falls_back)
    torch._dynamo.reset()
    with settings.patch(compile_threads=0):
        start = model_times.first_call(subject, "ours")
        assert start["cores"] == settings.compile_threads == len(os.sched_getaffinity(0))
    assert start["fallbacks"] == int(falls_back)


@pytest.mark.parametrize(
    ("where", "missed"), [(None, False), ((), True), (("first",), True), (("second",), True)]
)
def test_times_of_a_model_that_fell_back_miss_their_target(
    monkeypatch, tmp_path, capsys, where, missed
):
    """`--time` says so and ends with 1, as does `--check`; so do the rows of the page."""

    def timed():
        theirs = {"wall": 1.0, "device": 1.0, "first_s": 1.0, "peak": 1}
        return {"inductor": {**theirs}, "ours": {**theirs, "fallbacks": 0}}

    start = {"whole_s": 1.0, "rest_s": 0.5, "cores": 3, "fallbacks": 0}
    starts = {name: {side: {**start} for side in models.STARTED} for name in ("first", "second")}
    times = {"timm vgg training": {**timed(), **starts}}
    if where is not None:
        one = times["timm vgg training"]
        (one[where[0]] if where else one)["ours"]["fallbacks"] = 2
    monkeypatch.setattr(models, "run", lambda *_: None)
    path = tmp_path / "models.json"
    result = {"models": {}, "inductor": {}, "times": times}
    result |= {"sources": models.sources(), "device": "cuda"}
    path.write_text(json.dumps(result))
    monkeypatch.setattr(sys, "argv", ["models", "--time", "--out", str(path)])
    assert models.main() == missed
    assert ("FALLBACKS, graphs that run as torch has them: 2" in capsys.readouterr().out) == missed
    assert models.show(result) == missed
    (row,) = (one for one in model_rows.rows(times) if "runs as torch has it" in one["work"])
    assert row["ok"] == (not missed)


@pytest.mark.slow  # timm and transformers are imported
@pytest.mark.filterwarnings("ignore:Mapping deprecated model name", "ignore:.torch.jit.script")
def test_the_dashboards_models_can_be_built_in_their_own_sizes():
    """Rows are taken for a quarter of the dashboard's batch."""
    pytest.importorskip("timm", reason="timm is not installed")
    pytest.importorskip("transformers", reason="transformers is not installed")
    from tools.codegen import dashboard_models

    assert len(dashboard_models.ROWS) > 80
    for name, row in dashboard_models.ROWS.items():
        with torch.device("meta"):
            model = dashboard_models.build(name, "cuda")
        assert sum(one.numel() for one in model.parameters()) > 1e6, name
        given = dashboard_models.inputs(name, 8, "cuda")
        assert {len(one) for one in given.values()} == {row.batch}, name


def test_the_rows_of_times_tell_busy_models_from_idle_ones():
    """Of those that keep the GPU busy the worst counts, of those that leave it idle the mean; one
    in between is neither.
    """

    def timed(wall, device, ours):
        theirs = {"wall": wall, "device": device, "peak": 1.0, "first_s": 1.0}
        return {"inductor": theirs, "ours": theirs | {"wall": ours}}

    times = {
        "busy": timed(10.0, 9.5, 10.1),
        "slower": timed(10.0, 9.5, 10.3),
        "between": timed(10.0, 7.0, 30.0),
        "idle": timed(10.0, 2.0, 4.0),
        "less so": timed(10.0, 4.0, 9.0),
    }
    found = {row["work"]: row for row in model_rows.rows(times)}
    busy = found["wall time, the worst of 2 models that keep the GPU busy"]
    idle = found["wall time, geometric mean of 2 models that leave the GPU idle"]
    assert (busy["figure"], busy["ok"]) == (1.03, False)
    assert (round(idle["figure"], 6), idle["ok"]) == (0.6, True)

# SPDX-License-Identifier: Apache-2.0
"""The example's Llama: its tokens are eager torch's, it builds for GPUs that are not here, and runs
where torch cannot be imported; encoders do likewise; and their judge judges.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

np = pytest.importorskip("numpy")
pytest.importorskip("torch")
pytest.importorskip("triton")

from bundler import Bundle  # noqa: E402
from tools.codegen import without_torch  # noqa: E402
from tools.codegen.encoder_launch import BUNDLE  # noqa: E402
from tools.codegen.llama_files import PROMPT, TOKENS  # noqa: E402

ROOT = Path(__file__).parents[2]
TARGETS = ("cuda:90", "hip:gfx942")
# Runs the example's conversation with a driver that launches nothing.
RUN = """
import json, sys
sys.modules |= dict.fromkeys(("torch", "triton"))
sys.path.insert(0, "examples")
import llama_run
from bundler.runtime import DeviceMemory, DryDriver

driver = DryDriver(sys.argv[3])
memory = DeviceMemory(driver=driver)
programs = llama_run.loaded(*sys.argv[1:3], memory)
talk = llama_run.Conversation(programs, memory)
weights = memory.pool.allocations - len(talk.state)
talk.begin([1, 2, 3])
for _ in range(6):
    talk.step()
before = memory.pool.allocations
for _ in range(6):
    talk.step()
made, refused = memory.pool.allocations - before, []
for prompt, steps in ((range(17), 0), ([3, 512], 0), ([3, -1], 0), ([1], 95)):
    try:
        talk.begin(list(prompt))
        for _ in range(steps):
            talk.step()
    except ValueError as error:
        refused.append(str(error))
use = programs["decode"].graph_use
print(json.dumps([weights, [use.captures, use.replays, use.refusal], made, refused]))
"""

# The same of an encoder.
ENCODER_RUN = """
import json, pathlib, sys
sys.modules |= dict.fromkeys(("torch", "triton"))
from bundler.runtime import DeviceMemory, DryDriver
from tools.codegen.encoder_launch import loaded

memory = DeviceMemory(driver=DryDriver(sys.argv[2]))
runner, inputs = loaded(pathlib.Path(sys.argv[1]), memory)
for _ in range(6):
    runner(*inputs)
use = runner.graph_use
print(json.dumps([use.captures, use.replays, use.refusal]))
"""


@pytest.mark.slow
def test_its_tokens_are_eager_torchs(interpreted):
    """Prefill and decode in the interpreter, on a DeviceMemory, decode as a graph; keys and values
    are changed in place.
    """
    pytest.importorskip("safetensors")
    found = json.loads(interpreted("llama_worker.py"))
    assert found["tokens"] == found["eager"]
    assert max(found["off"], found["caches"]) < 1e-4
    assert found["graph"] == [3, 2, ""]


@pytest.mark.slow
def test_it_is_built_without_a_gpu_and_runs_without_torch(tmp_path):
    """Of two makers; each weight is copied once, and a step of decode is one launch then."""
    pytest.importorskip("safetensors")
    bundle, weights = str(tmp_path / "llama.tbundle"), str(tmp_path / "llama.safetensors")
    line = [sys.executable, "examples/llama.py", "--tiny", "--bundle", bundle, "--weights", weights]
    line += [word for target in TARGETS for word in ("--target", target)]
    environment = {key: one for key, one in os.environ.items() if key != "TRITON_INTERPRET"}
    subprocess.run([*line, "--workers", "1"], cwd=ROOT, env=environment, check=True)
    with Bundle.load(bundle) as opened:
        assert opened.programs == ("decode", "prefill_16")
        assert {str(kernel.target) for kernel in opened.kernels} == {*TARGETS}
    for maker in ("cuda", "hip"):
        run = [sys.executable, "-c", RUN, bundle, weights, maker]
        done = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, check=True)
        copied, graph, made, refused = json.loads(done.stdout)
        assert (copied, made) == (16, 0)
        assert graph == [1, 9 + 94, ""]
        assert refused == [
            "a prompt: expected 1 to 16 tokens, got 17",
            "token 1: expected 0 to 511, got 512",
            "token 1: expected 0 to 511, got -1",
            "a step: expected 1 to 95 tokens before it, got 96",
        ]


@pytest.fixture
def folder(tmp_path):
    """Logits of three steps: float64's, eager torch's beside these, and ours as good."""
    wide = np.random.default_rng(1).normal(size=(3, 50))
    wide[:, 7] = 9
    noise = np.random.default_rng(2).normal(size=(3, 50)) * 1e-2
    for name, logits in (("float64", wide), ("eager", wide + noise), ("ours", wide - noise)):
        np.save(tmp_path / f"{name}.npy", logits.astype("float32"))
    (tmp_path / TOKENS).write_text(json.dumps([0] * PROMPT + [7] * 3))
    return tmp_path


RESULT = {
    "ours": {"ms_a_token": 0.7},
    "cold": {"ms_a_token": 1.1},
    "warm": {"ms_a_token": 1.0},
    "greedy": {"first_token_s": 1.5},
    "memory": {"used": 100 << 20, "weights": 30 << 20, "state": 5 << 20, "step": 2 << 20},
}


def judged(folder, answer=(7, 7, 7), **other):
    return without_torch.missed({**RESULT, **without_torch.compared(folder, [*answer]), **other})


def test_the_judge_passes_what_is_as_good_as_eager_torch(folder):
    assert judged(folder) == []
    found = without_torch.compared(folder, [7, 7, 7])
    assert (found["logits"]["steps"], found["tokens"]["sure"]) == (3, 3)


def test_the_judge_sees_what_is_worse(folder):
    """Logits that are off, a token that is another one, slow steps and starts, and memory."""
    assert judged(folder, (7, 8, 7)) == ["tokens are not eager torch's"]
    ours = np.load(folder / "ours.npy")
    np.save(folder / "ours.npy", ours + np.float32(0.1))
    assert judged(folder) == ["logits are too far from float64's"]
    np.save(folder / "ours.npy", ours * np.float32("nan"))
    assert judged(folder)[0] == "logits are too far from float64's"
    np.save(folder / "ours.npy", ours)
    assert len(judged(folder, ours={"ms_a_token": 0.81})) == 1
    assert len(judged(folder, greedy={"first_token_s": 2.1})) == 1
    assert len(judged(folder, memory={**RESULT["memory"], "used": 102 << 20})) == 1


def test_an_encoder_is_judged_likewise():
    """By its results, and by the bounds of time and memory of a Llama."""
    good = {
        "results": {"off": 1e-3, "allowed": 2e-3},
        "ours": {"ms": 0.7, "first_s": 1.5},
        "cold": {"ms": 1.1},
        "warm": {"ms": 1.0},
        "memory": RESULT["memory"],
    }
    for part, changed, words in (
        ("results", {"off": 3e-3}, "results are too far from float64's"),
        ("results", {"off": float("nan")}, "results are too far from float64's"),
        ("ours", {"ms": 0.81}, "a result takes more than 0.8 of torch.compile's time"),
        ("ours", {"first_s": 2.1}, "the first result comes after more than 2.0 s"),
        ("memory", {"used": 102 << 20}, "more memory than weights, state, one step and 64 MiB"),
    ):
        other = {**good, part: {**good[part], **changed}}
        assert without_torch.missed({"models": {"one": good, "other": other}}) == [
            f"other: {words}"
        ]
    several = {"bert-base-8": {**good, "ours": {"ms": 1.01, "first_s": 1.5}}}
    assert without_torch.missed({"models": several}) == [
        "bert-base-8: a result takes more than 1.0 of torch.compile's time"
    ]
    several["bert-base-8"]["ours"]["ms"] = 0.99
    assert without_torch.missed({"models": several}) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", without_torch.ENCODERS)
def test_an_encoder_is_built_without_a_gpu_and_runs_without_torch(tmp_path, name):
    """One layer of each, for two makers; a call that repeats is one launch."""
    for package in ("safetensors", "timm", "transformers"):
        pytest.importorskip(package)
    environment = {key: one for key, one in os.environ.items() if key != "TRITON_INTERPRET"}
    words = ["build", str(tmp_path), name, "--tiny"]
    words += [word for target in TARGETS for word in ("--target", target)]
    line = [sys.executable, "-m", "tools.codegen.encoder_sides", *words]
    subprocess.run(line, cwd=ROOT, env=environment, check=True)
    with Bundle.load(tmp_path / BUNDLE) as opened:
        assert {str(kernel.target) for kernel in opened.kernels} == {*TARGETS}
    for maker in ("cuda", "hip"):
        run = [sys.executable, "-c", ENCODER_RUN, str(tmp_path), maker]
        done = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, check=True)
        assert json.loads(done.stdout) == [1, 3, ""]


def test_a_token_that_eager_torch_is_not_sure_of_may_be_another(folder):
    """Where its two best are nearer than twice its error."""
    for name in ("float64", "eager", "ours"):
        logits = np.load(folder / f"{name}.npy")
        logits[:, 8] = 9 + (1e-3 if name == "ours" else -1e-3)
        np.save(folder / f"{name}.npy", logits)
    assert judged(folder, (8, 8, 8)) == []
    assert without_torch.compared(folder, [8, 8, 8])["tokens"]["sure"] == 0

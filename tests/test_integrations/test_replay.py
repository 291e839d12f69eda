# SPDX-License-Identifier: Apache-2.0
"""A server that replays what was recorded makes no call of Triton's compiler, fires no hook of it
and benchmarks nothing.
"""

import plugged
import pytest

import bundler
from bundler.errors import ConfigError, NotFound

pytest.importorskip("triton")
pytestmark = pytest.mark.toolchain

# A server without a GPU: the stand-in takes launches; `serve` calls each kernel as
# examples/kernels.py does with tensors.
_SERVER = """
from types import ModuleType, SimpleNamespace
import warnings
sys.modules["torch"] = torch = ModuleType("torch")  # Triton would import the real one, which takes seconds
torch.Tensor = type("Tensor", (), {})
from triton.runtime.driver import driver
from triton.runtime.jit import MockTensor
import bundler

class Gpu:
    benchmarks = 0
    def get_current_target(self):
        from triton.backends.compiler import GPUTarget
        return GPUTarget("cuda", 90, 32)
    def get_current_device(self):
        return 0
    def get_current_stream(self, device):
        return 0
    def get_benchmarker(self):
        def benchmark(call, quantiles):
            Gpu.benchmarks += 1
            call()
            return [float(Gpu.benchmarks)] * 3
        return benchmark
    launches = []
    utils = SimpleNamespace(load_binary=lambda *_: (1, 2, 16, 0, 1024), unload_module=lambda module: None,
                            get_device_properties=lambda device: {"max_shared_mem": 1 << 20})
    def launcher_cls(self, src, metadata):
        return lambda *_: Gpu.launches.append(metadata.name)

driver.set_active(Gpu())
x, half, whole = MockTensor("float32"), MockTensor("float16"), MockTensor("int32")
CALLS = [
    ("gelu_kernel", (x, x, 401408), {"BLOCK": 1024}),
    ("softmax_kernel", (x, x, 784, 784), {"BLOCK": 1024}),
    ("layer_norm_kernel", (x, x, x, x, 784, 784, 1e-5), {"BLOCK": 1024}),
    ("matmul_kernel", (half, half, half, 512, 384, 256),
     {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 32, "num_warps": 4, "num_stages": 3}),
    ("histogram_kernel", (whole, whole, 100_000), {"BLOCK": 512}),
    ("swiglu_kernel", (x, x, x, 401408), {}),
]

def load():
    spec = importlib.util.spec_from_file_location("served", sys.argv[1])
    module = sys.modules["served"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module

def serve(module, rounds=1):
    for _ in range(rounds):
        for name, arguments, options in CALLS:
            getattr(module, name)[(8,)](*arguments, **options)

def arm():
    def fired(**facts):
        raise AssertionError("the hook fired for " + facts["fn"].name)
    knobs.runtime.jit_post_compile_hook = fired
    heard.clear()
"""

_RECORD = """
served = load()
with bundler.session(sys.argv[2], "prod"), bundler.recording() as recording:
    serve(served)
recording.collect().save(sys.argv[3])
say([Gpu.benchmarks, len(Gpu.launches)])
"""


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """A store whose tag `prod`, and a bundle, hold what a server called."""
    folder = tmp_path_factory.mktemp("recorded")
    (folder / "kernels.py").write_bytes(plugged.KERNELS.read_bytes())
    env = plugged.environment(
        None,
        folder / "cache",
        TRITON_CACHE_MANAGER=None,
        TRITON_BUNDLER_LOCAL=folder / "local",
        TRITON_CACHE_AUTOTUNING=1,
    )
    (benchmarks, launches), _ = plugged.run(
        _SERVER + _RECORD, env, f"file://{folder}/store", folder / "b.tbundle"
    )
    assert (benchmarks, launches) == (4, 10)
    return folder


def _serve(code, recorded, tmp_path, *, kernels=plugged.KERNELS, **more):
    ours = {"TRITON_CACHE_MANAGER": None, "TRITON_BUNDLER_LOCAL": tmp_path / "local", **more}
    env = plugged.environment(None, tmp_path / "cache", **ours)
    return plugged.run(
        _SERVER + code, env, f"file://{recorded}/store", recorded / "b.tbundle", kernels=kernels
    )


_SESSION = """
served = load()
with bundler.session(sys.argv[2], "prod", push=None, replay=True) as session:
    session.arm_strict("error")
    arm()
    serve(served, 17)
    report = session.replayed
say([len(report.replayed), len(report.tuned), report.later, report.not_found, report.changed, report.skipped,
     report.milliseconds > 0, heard, Gpu.benchmarks, len(Gpu.launches), session.counters.misses])
"""


@pytest.mark.release
def test_a_session_replays_its_tag_and_serves_100_calls_silently(recorded, tmp_path):
    """With replay=True, strict mode armed and a hook that raises: no compile, no hit, no benchmark,
    in more than 100 calls.
    """
    (replayed, tuned, *empty, took, heard, benchmarks, launches, misses), err = _serve(
        _SESSION, recorded, tmp_path
    )
    assert (replayed, tuned, empty) == (9, 1, [[], [], [], []])
    assert (took, heard, benchmarks, launches, misses) == (True, [], 0, 102, 0)
    assert "BundlerWarning" not in err


@pytest.mark.slow
def test_without_a_replay_the_hook_fires(recorded, tmp_path):
    """The same server with replay=False: Triton calls the hook for a kernel that it finds
    on disk.
    """
    code = _SESSION.replace("replay=True", "replay=False").replace("    serve(served, 17)", _TRIED)
    assert (
        _serve(code, recorded, tmp_path, TRITON_BUNDLER_REPLAY=1)[0]
        == "the hook fired for gelu_kernel"
    )


_TRIED = """
    try:
        serve(served)
    except AssertionError as error:
        say(str(error))
    sys.exit()
"""

_MOVED = """
served = load()
CALLS.pop()  # a tuner's results are by its function's hash, and of one that moved there are none
how = sys.argv[4]
with bundler.session(sys.argv[2], "prod", push=None, replay=how == "session", moved=True) as session:
    report = session.replayed if how == "session" else bundler.replay(sys.argv[3], moved=True)
    session.arm_strict("error")
    arm()
    serve(served, 17)
say([len(report.replayed), len(report.moved), heard, len(Gpu.launches), session.counters.misses])
"""


@pytest.mark.parametrize("how", ["session", "call"])
def test_kernels_of_functions_that_moved_are_replayed(recorded, tmp_path, how):
    """By a session and by a call that ask for it: comments above all functions, and no compile, no
    hit, no hook.
    """
    moved = tmp_path / "moved.py"
    moved.write_text(f"# a comment\n{plugged.KERNELS.read_text()}")
    env = plugged.environment(
        None, tmp_path / "cache", TRITON_CACHE_MANAGER=None, TRITON_BUNDLER_LOCAL=tmp_path / "local"
    )
    said, _ = plugged.run(
        _SERVER + _MOVED,
        env,
        f"file://{recorded}/store",
        recorded / "b.tbundle",
        how,
        kernels=moved,
    )
    assert said == [9, 9, [], 85, 0]


_LATER = """
report = bundler.replay(sys.argv[3], modules=["served"])
arm()
served = load()
serve(served, 17)
say([len(report.not_found), len(report.not_tuned), heard, Gpu.benchmarks, len(Gpu.launches), type(served.swiglu_kernel.cache).__name__])
"""


@pytest.mark.release
@pytest.mark.slow
def test_kernels_that_are_imported_later_are_served_silently_too(recorded, tmp_path):
    """`bundler.replay` before the import: functions and tuners get theirs when they are first
    called.
    """
    assert _serve(_LATER, recorded, tmp_path)[0] == [9, 1, [], 0, 102, "FilledCache"]


_BY_ENVIRONMENT = """
served = load()
arm()
serve(served, 17)
say([heard, Gpu.benchmarks, len(Gpu.launches)])
"""


@pytest.mark.slow
@pytest.mark.release
def test_by_environment_the_first_kernel_brings_all_others(recorded, tmp_path):
    """TRITON_BUNDLER_REPLAY=1: the session begins with the first kernel that Triton asks for, and
    replays the tag; no hook fires, not even there.
    """
    more = {
        "TRITON_CACHE_MANAGER": plugged.MANAGER,
        "TRITON_BUNDLER_STORE": f"file://{recorded}/store",
        "TRITON_BUNDLER_TAG": "prod",
        "TRITON_BUNDLER_MODE": "read",
        "TRITON_BUNDLER_REPLAY": 1,
        "TRITON_BUNDLER_STRICT": "error",
    }
    # Triton's own listener hears that first kernel, as a hit.
    assert _serve(_BY_ENVIRONMENT, recorded, tmp_path, **more)[0] == [
        [["gelu_kernel", True]],
        0,
        102,
    ]


_IN_THREADS = """
import threading
served = load()
arm()
failed = []
threading.excepthook = lambda facts: failed.append(str(facts.exc_value))
barrier = threading.Barrier(4)
def first(call):
    name, arguments, options = call
    barrier.wait()
    getattr(served, name)[(8,)](*arguments, **options)
threads = [threading.Thread(target=first, args=(call,)) for call in CALLS[:4]]
for one in threads:
    one.start()
for one in threads:
    one.join()
serve(served, 2)
say([failed, [name for name, hit in heard if not hit]])
"""


@pytest.mark.slow
def test_by_environment_first_calls_of_several_threads_are_silent(recorded, tmp_path):
    """Whichever thread's kernel begins the session, the others wait for it, and no hook fires for
    theirs.
    """
    more = {
        "TRITON_CACHE_MANAGER": plugged.MANAGER,
        "TRITON_BUNDLER_STORE": f"file://{recorded}/store",
        "TRITON_BUNDLER_TAG": "prod",
        "TRITON_BUNDLER_MODE": "read",
        "TRITON_BUNDLER_REPLAY": 1,
    }
    assert _serve(_IN_THREADS, recorded, tmp_path, **more)[0] == [[], []]


_IMPORTED = """
sys.path.insert(0, sys.argv[4])
report = bundler.replay(sys.argv[3])
arm()
import served
filled = len(served.gelu_kernel.device_caches[0][0]), len(served.swiglu_kernel.cache), type(served.swiglu_kernel.cache).__name__
serve(served, 17)
say([*filled, heard, Gpu.benchmarks, len(Gpu.launches)])
"""


@pytest.mark.slow
def test_an_import_fills_functions_and_tuners_when_it_ends(recorded, tmp_path):
    """`import` after a replay: caches are full before the first call."""
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "served.py").write_bytes(plugged.KERNELS.read_bytes())
    code = _IMPORTED.replace("sys.argv[4]", repr(str(tmp_path / "code")))
    found = _serve(code, recorded, tmp_path)[0]
    assert found[0] >= 1
    assert found[1:] == [1, "FilledCache", [], 0, 102]


_STRICT = """
served = load()
with bundler.session(sys.argv[2], "prod", push=None, replay=True, STRICT) as session:
    serve(served)
    served.gelu_kernel[(8,)](x, x, 401408, BLOCK=2048)
    say([session.counters.strict_warnings, [name for name, hit in heard if not hit]])
"""


@pytest.mark.slow
@pytest.mark.parametrize(("strict", "warnings"), [("strict=None", 1), ("strict='off'", 0)])
def test_a_compile_after_a_replay_is_told_unless_it_is_fine(recorded, tmp_path, strict, warnings):
    """A session that replays arms strict mode, as a warning that ends nothing; `off` is the user's
    word.
    """
    (told, compiled), err = _serve(_STRICT.replace("STRICT", strict), recorded, tmp_path)
    assert (told, compiled) == (warnings, ["gelu_kernel"])
    assert ("was not recorded" in err) is bool(warnings)


_CHANGED = """
served = load()
report = bundler.replay("prod")
serve(served)
say([sorted(reason for _, reason in report.changed), len(report.replayed), [name for name, hit in heard if not hit],
     [reason for _, reason in report.not_tuned], Gpu.benchmarks])
"""


@pytest.mark.slow
def test_a_changed_kernel_is_named_with_what_differs_and_compiled(recorded, tmp_path):
    """A tag of TRITON_BUNDLER_STORE; one kernel was edited since: one warning, the others are
    replayed.
    """
    edited = tmp_path / "kernels.py"
    text = plugged.KERNELS.read_text()
    edited.write_text(text.replace("gate * tl.sigmoid(gate) * up", "up * gate * tl.sigmoid(gate)"))
    store = f"file://{recorded}/store"
    (changed, replayed, compiled, not_tuned, benchmarks), err = _serve(
        _CHANGED, recorded, tmp_path, kernels=edited, TRITON_BUNDLER_STORE=store
    )
    said = "swiglu_kernel: source.text: the code of served.swiglu_kernel was edited"
    assert (changed, replayed, compiled, benchmarks) == ([said] * 4, 5, ["swiglu_kernel"] * 4, 4)
    assert not_tuned == [
        "it is of another source, other configurations, another target or another toolchain"
    ]
    assert err.count("BundlerWarning") == 1
    assert f"4 of 9 kernels were not replayed, the report says why; {said}" in err


_TUNED = """
import json, pathlib
served = load()
bundler.restore(sys.argv[3])
(file,) = pathlib.Path(os.environ["TRITON_CACHE_DIR"]).glob("*/*.autotune.json")
document = json.loads(file.read_text())
told = []
for change in ({"key": [7, "torch.float32"]}, {"key": 7}, {"configs_timings": []}, {"configs_timings": [[{"num_warps": 3}, [1.0]]]}, None):
    file.write_text(json.dumps({**document, **change}) if change else "{")
    from bundler.integrations.replayed_kernels import replay_restored
    with bundler.Bundle.load(sys.argv[3]) as bundle:
        report, _ = replay_restored(bundle, [os.environ["TRITON_CACHE_DIR"]])
    told += [len(report.tuned), len(report.not_tuned), len(served.swiglu_kernel.cache)]
say(told)
"""


def test_a_result_file_that_was_changed_is_not_used(recorded, tmp_path):
    """Another key, other configurations or no JSON: the tuner's cache stays empty, and the report
    says why.
    """
    assert _serve(_TUNED, recorded, tmp_path)[0] == [0, 1, 0] * 5


_WITHOUT = """
class NoGpu:
    def get_current_device(self):
        raise RuntimeError("0 active drivers")

driver.set_active(NoGpu())
try:
    bundler.replay(sys.argv[3])
except bundler.errors.DriverUnavailable as error:
    first = str(error)
with bundler.session(sys.argv[2], "prod", push=None, replay=True) as session:
    say([first, session.replayed, session.counters.errors])
"""


def test_without_a_gpu_it_says_so_and_a_session_goes_on(recorded, tmp_path):
    """`replay` raises; a session warns once."""
    (first, replayed, errors), err = _serve(_WITHOUT, recorded, tmp_path)
    assert first == "Triton finds no GPU to replay for (RuntimeError: 0 active drivers)"
    assert (replayed, errors) == (None, {"driver-unavailable": 1})
    assert err.count("BundlerWarning") == 1


def test_wrong_arguments(tmp_path, monkeypatch):
    """A missing file, a tag without a store, and modules as one text are errors that say so."""
    monkeypatch.delenv("TRITON_BUNDLER_STORE", raising=False)
    with pytest.raises(NotFound):
        bundler.replay(tmp_path / "none.tbundle")
    with pytest.raises(NotFound, match="TRITON_BUNDLER_STORE names no store"):
        bundler.replay("prod")
    with pytest.raises(ConfigError, match="expected a list of module names"):
        bundler.replay("prod", modules="served")

# SPDX-License-Identifier: Apache-2.0
"""Plug-ins of servers: the cache manager in each process, a replay before the monitor is armed, a
tag after the warm-up; never an error.
"""

import importlib.metadata
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import plugged
import pytest

import bundler
from tools.servers.wheels import VARIABLE
from tools.shared.vllm_monitor import lay_out_monitor, monitor_in

ROOT = Path(__file__).resolve().parents[2]
pytest.importorskip("triton")
pytestmark = pytest.mark.toolchain

_STAND_IN = """
def activate(*, mode="warn", verbose=False):
    from triton import knobs

    def fired(**facts):
        raise RuntimeError("Triton kernel JIT compilation during inference: " + facts["fn"].name)

    if mode == "error":
        knobs.runtime.jit_post_compile_hook = fired
"""

# A worker of vLLM: it loads plug-ins, warms a kernel up, arms its monitor and serves.  A stand-in
# takes its launches.
_WORKER = (
    plugged.STAND_IN_GPU
    + """

def gelu():
    kernels.gelu_kernel[(8,)](x, x, 401408, BLOCK=1024)

def softmax():
    kernels.softmax_kernel[(8,)](x, x, 784, 784, BLOCK=1024)

def load_plugins():
    from bundler.integrations.server_plugins import vllm_plugin
    vllm_plugin()
    vllm_plugin()

def arm():
    from vllm.utils.jit_monitor import activate
    activate(mode="error")

def told():
    try:
        softmax()
    except RuntimeError as error:
        return str(error)
    return "silent"
"""
)
_SERVE = """
load_plugins()
gelu()
arm()
say(told())
"""
_WARM_UP = """
load_plugins()
gelu()
softmax()
arm()
with bundler.open_store(os.environ["TRITON_BUNDLER_STORE"], read_only=True) as store, store.pull("prod") as bundle:
    say(sorted(kernel.name for kernel in bundle.kernels))
"""


def _monitors():
    sources = os.environ.get(VARIABLE)
    yield pytest.param("stand-in", id="stand-in")
    reason = f"{VARIABLE} names no folder that python -m tools.servers wheels filled"
    yield pytest.param(sources, id="vllm", marks=[] if sources else pytest.mark.skip(reason=reason))


@pytest.fixture(params=list(_monitors()))
def server(request, tmp_path):
    """The environment of a worker whose monitor is a stand-in, or vLLM's own."""
    monitor = tmp_path / "monitor.py"
    monitor.write_text(_STAND_IN)
    if request.param != "stand-in":
        monitor = monitor_in(Path(request.param))
    package = lay_out_monitor(tmp_path / "server", monitor)
    path = os.pathsep.join([str(package), *filter(None, sys.path)])
    return plugged.environment(
        f"file://{tmp_path}/store",
        tmp_path / "cache",
        TRITON_CACHE_MANAGER=None,
        TRITON_BUNDLER_TAG="prod",
        TRITON_BUNDLER_LOCAL=tmp_path / "local",
        PYTHONPATH=path,
    )


def _run(code, env, **more):
    return plugged.run(_WORKER + "import bundler\n" + code, {**env, **more})


@pytest.mark.slow
def test_a_monitor_in_error_mode_is_silent_after_the_plug_in_replayed_and_raises_without(
    server, tmp_path
):
    """What one worker's warm-up made is in the tag when its monitor is armed; a worker that did not
    warm it up serves it silently.
    """
    names, err = _run(_WARM_UP, server)
    assert names == ["gelu_kernel", "softmax_kernel"]
    assert err.count("BundlerWarning") == 1  # a first run has no tag yet
    fresh = {"TRITON_CACHE_DIR": str(tmp_path / "other")}
    assert _run(_SERVE, server, TRITON_BUNDLER_REPLAY="1", **fresh)[0] == "silent"
    said, _ = _run(_SERVE, server, TRITON_CACHE_DIR=str(tmp_path / "third"))
    assert "JIT compilation during inference: " in said
    assert "softmax_kernel" in said


def test_children_of_a_process_with_the_plug_in_have_the_manager(server):
    """The plug-in opens nothing and imports no Triton; what it sets is in the environment of the
    workers that start.
    """
    code = """
from bundler.integrations.server_plugins import vllm_plugin
import sys, os
before = "triton" in sys.modules
vllm_plugin()
print(before, "triton" in sys.modules, os.environ.get("TRITON_CACHE_MANAGER"))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], env=server, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["False", "False", plugged.MANAGER]
    assert done.stderr == ""


_PLUG = "from bundler.integrations import server_plugins\n"


def _plug_in(code, env=None, **more):
    ours = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("TRITON_", "VLLM_"))
    }
    path = os.pathsep.join(filter(None, sys.path))
    line = [sys.executable, "-W", "always", "-c", _PLUG + code]
    return subprocess.run(
        line,
        env={**ours, "PYTHONPATH": path, **(env or {}), **more},
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize("plugin", ["vllm_plugin", "sglang_plugin"])
def test_without_a_variable_of_ours_a_plug_in_does_nothing(plugin):
    """No variable of ours: the environment stays as it is, nothing is said, nothing but the plug-in
    is imported.
    """
    code = f"""
import os, sys
before = dict(os.environ)
server_plugins.{plugin}()
assert dict(os.environ) == before
assert "bundler.integrations._process" not in sys.modules
"""
    done = _plug_in(code)
    assert (done.returncode, done.stderr) == (0, "")


def test_switched_off_it_does_nothing(tmp_path):
    """TRITON_BUNDLER_DISABLE=1 holds for plug-ins too."""
    code = (
        "import os\nserver_plugins.vllm_plugin()\nassert 'TRITON_CACHE_MANAGER' not in os.environ\n"
    )
    done = _plug_in(
        code, TRITON_BUNDLER_STORE=f"file://{tmp_path}/store", TRITON_BUNDLER_DISABLE="1"
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_tag_without_a_store_is_one_warning():
    """What was forgotten is named once, however often plug-ins are loaded."""
    done = _plug_in(
        "server_plugins.vllm_plugin()\nserver_plugins.vllm_plugin()\n", TRITON_BUNDLER_TAG="prod"
    )
    assert done.returncode == 0
    assert done.stderr.count("TRITON_BUNDLER_STORE is not") == 1


@pytest.mark.parametrize("setting", [{"TRITON_BUNDLER_DISABLE": "maybe"}, {}])
def test_a_plug_in_that_fails_is_one_warning_and_the_server_goes_on(setting, tmp_path):
    """Whatever is raised inside, also with warnings as errors, vLLM hears nothing of it."""
    code = """
import bundler.integrations._process as process
def broken():
    raise OSError("no such place")
process.install_from_environment = broken
import warnings
warnings.simplefilter("error")
server_plugins.vllm_plugin()
server_plugins.vllm_plugin()
print("serving")
"""
    done = _plug_in(code, TRITON_BUNDLER_STORE=f"file://{tmp_path}/store", **setting)
    assert (done.returncode, done.stdout) == (0, "serving\n")
    assert done.stderr.count("runs without triton-bundler") == 1


@pytest.mark.parametrize("moment", ["begin_from_environment", "publish_from_environment"])
def test_what_fails_when_workers_are_warm_is_a_warning(server, moment):
    """The monitor is armed whatever a replay or a push meets."""
    code = f"""
import bundler.integrations._process as process
def broken():
    raise ValueError("torn")
process.{moment} = broken
load_plugins()
arm()
say("armed")
"""
    said, err = _run(code, server)
    assert said == "armed"
    assert err.count("torn") == 1


def test_a_warm_up_without_a_monitor_publishes_too(tmp_path):
    """Where vLLM's monitor is off, the end of the worker's warm-up is the moment; both moments are
    of one process.
    """
    package = tmp_path / "server" / "vllm" / "v1" / "worker"
    package.mkdir(parents=True)
    for folder in (package, package.parent, package.parent.parent):
        (folder / "__init__.py").touch()
    (package / "gpu_worker.py").write_text(
        "class Worker:\n    def compile_or_warm_up_model(self, more=0):\n        return 41 + more\n"
    )
    code = f"""
import sys
sys.path.insert(0, {str(tmp_path / "server")!r})
import bundler.integrations._process as process
heard = []
process.publish_from_environment = lambda: heard.append("published")
server_plugins.vllm_plugin()
from vllm.v1.worker.gpu_worker import Worker
print(Worker().compile_or_warm_up_model(more=1), heard, Worker.compile_or_warm_up_model.__name__)
"""
    done = _plug_in(code, TRITON_BUNDLER_STORE=f"file://{tmp_path}/store")
    assert done.stdout == "42 ['published'] compile_or_warm_up_model\n", done.stderr


@pytest.mark.parametrize("imported", ["before", "after"])
def test_ray_actors_of_vllm_get_our_variables(imported, tmp_path):
    """The names that vLLM copies to Ray actors have ours among them, and no variable that vLLM
    hashes was set for it.
    """
    package = tmp_path / "server" / "vllm" / "ray"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").touch()
    (package / "__init__.py").touch()
    (package / "ray_env.py").write_text(
        "def get_env_vars_to_copy(destination=None):\n    return {'VLLM_PORT'}\n"
    )
    early = "import vllm.ray.ray_env" if imported == "before" else ""
    code = f"""
import os, sys
sys.path.insert(0, {str(tmp_path / "server")!r})
{early}
server_plugins.vllm_plugin()
server_plugins.vllm_plugin()
from vllm.ray.ray_env import get_env_vars_to_copy
print(sorted(get_env_vars_to_copy(destination="actor")), [name for name in os.environ if name.startswith("VLLM_")])
"""
    done = _plug_in(
        code, TRITON_BUNDLER_STORE=f"file://{tmp_path}/store", TRITON_BUNDLER_TAG="prod"
    )
    assert done.stdout == "['TRITON_BUNDLER_STORE', 'TRITON_BUNDLER_TAG', 'VLLM_PORT'] []\n", (
        done.stderr
    )


def test_a_server_whose_modules_look_otherwise_is_one_warning(tmp_path):
    """A coming vLLM without a function that we stand by serves on, and the user is told."""
    package = tmp_path / "server" / "vllm" / "utils"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").touch()
    (package / "__init__.py").touch()
    (package / "jit_monitor.py").write_text("def arm_differently():\n    return 1\n")
    code = f"""
import sys
sys.path.insert(0, {str(tmp_path / "server")!r})
server_plugins.vllm_plugin()
from vllm.utils.jit_monitor import arm_differently
print(arm_differently())
"""
    done = _plug_in(code, TRITON_BUNDLER_STORE=f"file://{tmp_path}/store")
    assert done.stdout == "1\n"
    assert done.stderr.count("vllm.utils.jit_monitor has no activate") == 1


def test_a_scheduler_of_sglang_is_warm_when_its_event_loop_begins(tmp_path):
    """SGLang loads plug-ins in a function of the module that we stand by, which is imported
    then.
    """
    package = tmp_path / "server" / "sglang" / "srt" / "managers"
    package.mkdir(parents=True)
    for folder in (package, package.parent, package.parent.parent):
        (folder / "__init__.py").touch()
    (package / "scheduler.py").write_text(
        "heard = []\nclass Scheduler:\n    def run_event_loop(self):\n       "
        " heard.append('loop')\n"
    )
    code = f"""
import sys
sys.path.insert(0, {str(tmp_path / "server")!r})
import sglang.srt.managers.scheduler as scheduler
import bundler.integrations._process as process
process.begin_from_environment = lambda: scheduler.heard.append("replayed")
process.publish_from_environment = lambda: scheduler.heard.append("published")
server_plugins.sglang_plugin()
server_plugins.sglang_plugin()
scheduler.Scheduler().run_event_loop()
print(scheduler.heard)
"""
    done = _plug_in(code, TRITON_BUNDLER_STORE=f"file://{tmp_path}/store")
    assert done.stdout == "['replayed', 'published', 'loop']\n", done.stderr


def test_servers_find_the_plug_ins():
    """Each entry point leads to a function that takes no argument, in the groups that vLLM 0.33 and
    SGLang 0.5.23 read.
    """
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    assert sorted(declared) == [
        "sglang.srt.plugins",
        "torch_dynamo_backends",
        "vllm.general_plugins",
    ]
    for group in ("sglang.srt.plugins", "vllm.general_plugins"):
        for name, value in declared[group].items():
            importlib.metadata.EntryPoint(name, value, group).load()()


_LOADERS = {
    "vllm": (
        """
import types
sys.modules["vllm"] = types.ModuleType("vllm")
sys.modules["vllm"].envs = sys.modules["vllm.envs"] = types.SimpleNamespace(VLLM_PLUGINS=None)
sys.modules["vllm"].__path__ = [sys.argv[1] + "/vllm/vllm"]
from vllm.plugins import load_general_plugins as load
"""
    ),
    "sglang": (
        """
import types
for name in ("sglang", "sglang.srt"):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [sys.argv[1] + "/sglang/" + name.replace(".", "/")]
class Unset:
    get = staticmethod(lambda: "")
class Envs:
    SGLANG_PLUGINS = SGLANG_PLATFORM = Unset
sys.modules["sglang.srt.environ"] = types.SimpleNamespace(envs=Envs)
from sglang.srt.plugins import load_plugins as load
"""
    ),
}


@pytest.mark.skipif(
    VARIABLE not in os.environ, reason=f"{VARIABLE} names no folder with the servers' wheels"
)
@pytest.mark.parametrize("server", sorted(_LOADERS))
def test_released_servers_load_the_plug_ins_by_their_own_code(server, tmp_path):
    """vLLM's and SGLang's own loaders, from their wheels, find the entry point of an installed
    package and call it.
    """
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    installed = tmp_path / "site" / "triton_bundler_of_this_checkout-1.dist-info"
    installed.mkdir(parents=True)
    (installed / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: triton-bundler-of-this-checkout\nVersion: 1\n"
    )
    lines = [
        f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in points.items())
        for group, points in declared.items()
    ]
    (installed / "entry_points.txt").write_text("\n".join(lines))
    code = (
        f"import os, sys\n{_LOADERS[server]}load()\nprint(os.environ.get('TRITON_CACHE_MANAGER'))\n"
    )
    path = os.pathsep.join([str(installed.parent), *filter(None, sys.path)])
    env = {**os.environ, "PYTHONPATH": path, "TRITON_BUNDLER_STORE": f"file://{tmp_path}/store"}
    env.pop("TRITON_CACHE_MANAGER", None)
    line = [sys.executable, "-c", code, os.environ[VARIABLE]]
    done = subprocess.run(line, env=env, capture_output=True, text=True)
    assert done.stdout == f"{plugged.MANAGER}\n", done.stderr


@pytest.mark.skipif(
    VARIABLE not in os.environ, reason=f"{VARIABLE} names no folder with the servers' wheels"
)
def test_released_servers_have_what_the_plug_ins_stand_by():
    """vLLM 0.33.0 and SGLang 0.5.23, as released, define each function that we wrap, and read the
    groups that we declare.
    """
    sources = Path(os.environ[VARIABLE])
    from bundler.integrations import server_plugins

    for server, moments in (("vllm", server_plugins._VLLM), ("sglang", server_plugins._SGLANG)):
        for moment in moments:
            text = (
                (sources / server / Path(*moment.module.split("."))).with_suffix(".py").read_text()
            )
            name = moment.name.rpartition(".")[2]
            assert f"def {name}(" in text or f"import {name}" in text, moment
    assert '"vllm.general_plugins"' in (sources / "vllm/vllm/plugins/__init__.py").read_text()
    assert '"sglang.srt.plugins"' in (sources / "sglang/sglang/srt/plugins/__init__.py").read_text()


@pytest.mark.slow
def test_the_session_of_a_worker_can_publish_twice(tmp_path):
    """A tag after the warm-up, and again at the end with what came later: it holds both."""
    store = f"file://{tmp_path}/store"
    env = plugged.environment(
        store,
        tmp_path / "cache",
        TRITON_CACHE_MANAGER=None,
        TRITON_BUNDLER_TAG="prod",
        TRITON_BUNDLER_LOCAL=tmp_path / "local",
    )
    code = """
from bundler.integrations import _process
load_plugins()
gelu()
_process.publish_from_environment()
softmax()
_process.publish_from_environment()
"""
    _run(code, env)
    with bundler.open_store(store, read_only=True) as opened, opened.pull("prod") as bundle:
        assert sorted(kernel.name for kernel in bundle.kernels) == ["gelu_kernel", "softmax_kernel"]

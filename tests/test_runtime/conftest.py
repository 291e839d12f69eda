# SPDX-License-Identifier: Apache-2.0
"""Kernels with every kind of argument, compiled once a session through Triton's JIT, and a machine
that is not there.
"""

import importlib
import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from bundler import Bundle
from bundler.runtime.launch import compiled_dispatch

HERE = Path(__file__).resolve().parent
TARGETS = ("cuda:90", "hip:gfx942")


def load_beside(name, folder=HERE):
    """Import a file that lies beside this one; tests are imported by path, so `import` finds it
    only afterwards.
    """
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, folder / f"{name}.py")
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules[name]


calls = load_beside("launch_calls")
compiling = load_beside("compiling")
load_beside("triton_stand_in")
for helper in ("branch_record", "hip_machine", "hip_scenarios"):
    load_beside(helper, HERE / "drivers")


@dataclass(frozen=True)
class Recorded:
    """The bundle of all calls' kernels, and for each target and call the key of the kernel that
    Triton chose.
    """

    path: Path
    bundle: Bundle
    chosen: dict[str, list[str | None]]

    def kernel(self, number, target):
        """The kernel that Triton chose for a call."""
        key = self.chosen[target][number]
        return next(kernel for kernel in self.bundle.kernels if kernel.key == key)


@pytest.fixture(scope="session")
def recorded(made_once):
    """Make each call of launch_calls.py through Triton in a process of its own, once a run."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed, so there is nothing to compile with")
    folder = made_once("recorded", _compile_calls)
    path = folder / "b.tbundle"
    # In memory: a session's fixture must not hold a file open, which tests would be blamed for.
    return Recorded(
        path,
        Bundle.from_bytes(path.read_bytes()),
        json.loads((folder / "chosen.json").read_bytes()),
    )


def _compile_calls(folder):
    clean = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
    done = subprocess.run(
        [
            sys.executable,
            "-P",
            "-W",
            "ignore",
            str(HERE / "compile_calls.py"),
            str(folder / "b.tbundle"),
        ],
        env=clean | {"TRITON_CACHE_DIR": str(folder / "cache"), "HOME": str(folder)},
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr
    (folder / "chosen.json").write_text(done.stdout.splitlines()[-1])


@pytest.fixture(scope="session")
def dispatch_extension(tmp_path_factory):
    """Return the extension `_launch`: the installed one, or compiled now."""
    if compiled_dispatch.dispatcher_type() is not None:
        return importlib.import_module("bundler.runtime.launch._launch")
    return compiling.compile_extension("_launch", tmp_path_factory.mktemp("dispatch"))


@pytest.fixture(scope="session")
def dispatcher_type(dispatch_extension):
    """Return the compiled dispatcher."""
    return dispatch_extension.Dispatcher


@pytest.fixture(params=TARGETS)
def target(request):
    return request.param


@pytest.fixture
def driver(target):
    """A machine with two devices of the target's kind."""
    from bundler.runtime import DryDriver

    return DryDriver(target.partition(":")[0], devices=2)


@pytest.fixture
def kernels(recorded, driver):
    """All recorded kernels, on that machine."""
    from bundler.runtime import load

    with load(recorded.bundle, driver=driver) as found:
        yield found


@pytest.fixture(params=["python", "compiled"])
def cuda(request, recorded, monkeypatch):
    """All recorded kernels, on a machine with CUDA, once without our extension and once with its
    dispatcher.
    """
    from bundler.runtime import DryDriver, load

    driver = DryDriver("cuda", devices=2)
    if request.param == "compiled":
        kind = request.getfixturevalue("dispatcher_type")
        monkeypatch.setattr(
            "bundler.runtime.launch.compiled_dispatch.dispatcher_type", lambda: kind
        )
        driver.launch_path = "compiled"
    with load(recorded.bundle, driver=driver) as found:
        yield found


@pytest.fixture
def described_kernels():
    """A kernel that takes a descriptor in the place of a pointer."""
    pytest.importorskip("triton")
    return load_beside("described_kernels")


@pytest.fixture
def launch_kernels():
    """The kernels as JIT functions."""
    pytest.importorskip("triton")
    return load_beside("launch_kernels")

# SPDX-License-Identifier: Apache-2.0
"""Compiling without a GPU, in a cache of each test's own."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

KERNELS = Path(__file__).with_name("kernels_for_tests.py")
TARGETS = {
    "cuda:90": ("cuda", 90, 32),
    "cuda:80": ("cuda", 80, 32),
    "hip:gfx942": ("hip", "gfx942", 64),
}
ADD = {"x": "*fp32", "y": "*fp32", "out": "*fp32", "n": "i32", "BLOCK": "constexpr"}


def _gpu_target(text):
    from triton.backends.compiler import GPUTarget

    return GPUTarget(*TARGETS[text])


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty Triton cache."""
    directory = tmp_path / "cache"
    monkeypatch.setenv("TRITON_CACHE_DIR", str(directory))
    for name in ("TRITON_CACHE_MANAGER", "TRITON_ALWAYS_COMPILE", "TRITON_DEFAULT_FP_FUSION"):
        monkeypatch.delenv(name, raising=False)
    return directory


@pytest.fixture
def load_kernels():
    """Import a file of kernels; each call makes new functions."""
    pytest.importorskip("triton")
    modules = {}

    def load(path=KERNELS, name="kernels_for_tests"):
        spec = importlib.util.spec_from_file_location(name, path)
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        modules.setdefault(name, []).append(module)
        spec.loader.exec_module(module)
        return module

    yield load
    for name, loaded in modules.items():
        sys.modules.pop(name, None)
        # Triton holds every function for ever, and a recording looks into each: kernels of past
        # tests would slow all later ones.
        for function in (value for module in loaded for value in vars(module).values()):
            getattr(function, "device_caches", {}).clear()


@pytest.fixture
def kernels(cache, load_kernels):
    return load_kernels()


@pytest.fixture
def compile_kernel(cache):
    import triton
    from triton.compiler import ASTSource

    def compile_kernel(
        fn, signature, constants=None, attributes=None, target="cuda:90", options=None
    ):
        return triton.compile(
            ASTSource(fn, signature, constants, attributes),
            target=_gpu_target(target),
            options=options,
        )

    return compile_kernel


@pytest.fixture
def compile_add(kernels, compile_kernel):
    def compile_add(block=64, signature=ADD, **more):
        return compile_kernel(kernels.add, signature, {"BLOCK": block}, **more)

    return compile_add


@pytest.fixture
def events(cache):
    """What the listener heard while the test ran."""
    from bundler.toolchain.recording.compile_listener import listening

    heard = []
    hear = heard.append
    listening.attach(hear)
    yield heard
    listening.detach(hear)


@pytest.fixture
def parts_of():
    from bundler.toolchain import keytext

    def parts_of(event):
        return keytext.key_parts(
            event.src, event.backend, event.options, event.env_vars, event.hash, event.stages_key
        )

    return parts_of


class FakeDriver:
    """A Triton driver for a GPU that is not there; enough to compile through the JIT."""

    target, device = "cuda:90", 3

    def get_current_target(self):
        return _gpu_target(self.target)

    def get_current_device(self):
        return self.device

    def get_current_stream(self, device):
        return 0


@pytest.fixture
def fake_driver():
    pytest.importorskip("triton")
    from triton.runtime.driver import driver

    before = driver._active
    fake = FakeDriver()
    driver.set_active(fake)
    yield fake
    driver._active = before


@pytest.fixture
def warm_up(kernels, fake_driver):
    """Compile `add` through the JIT, as a launch would."""
    from triton.runtime.jit import MockTensor

    def warm_up(n=100, **more):
        tensor = MockTensor("float32")
        return kernels.add.warmup(tensor, tensor, tensor, n, grid=(1,), **{"BLOCK": 64, **more})

    return warm_up


@pytest.fixture
def run_python():
    """Run code in a new Python; returns the words it printed."""

    def run_python(code, *args, env=None):
        done = subprocess.run(
            [sys.executable, "-P", "-c", code, *map(str, args)],
            capture_output=True,
            text=True,
            env=env,
            timeout=100,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.split()

    return run_python

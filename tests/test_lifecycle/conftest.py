# SPDX-License-Identifier: Apache-2.0
"""Caches to record, break and restore into."""

import importlib.util
import shutil
import sys
from pathlib import Path

import pytest


def _load_support():
    # Tests are imported by path, so a module beside them has to be put where `import` finds it.
    spec = importlib.util.spec_from_file_location("support", Path(__file__).with_name("support.py"))
    module = sys.modules["support"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


support = _load_support()


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """This process's Triton cache: empty, of this test."""
    directory = tmp_path / "cache"
    directory.mkdir()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(directory))
    return directory


@pytest.fixture
def kernels(cache):
    """The example kernels as a program imports them; each test gets functions of its own."""
    pytest.importorskip("triton")
    module = support.load(support.KERNELS, "kernels")
    yield module
    sys.modules.pop("kernels", None)
    # Triton holds every function for ever, and a recording looks into each: kernels of past tests
    # would slow all later ones.
    for value in vars(module).values():
        for function in (value, getattr(value, "fn", None)):  # an autotuner has its function there
            getattr(function, "device_caches", {}).clear()


@pytest.fixture(autouse=True)
def only_this_tests_kernels(monkeypatch, tmp_path):
    """Kernels that other tests left in the JIT's memory are none of this test's."""
    from bundler.toolchain.recording import compile_listener

    everything = compile_listener.loaded_kernels
    monkeypatch.setattr(
        compile_listener,
        "loaded_kernels",
        lambda: (e for e in everything() if e.directory.startswith(str(tmp_path))),
    )


@pytest.fixture
def nobody_listens():
    """Nothing of ours hangs on Triton's listener before and after the test."""
    from triton import knobs

    from bundler.toolchain.recording.compile_listener import listening

    assert knobs.compilation.listener is None
    yield
    left, knobs.compilation.listener = knobs.compilation.listener, None
    listening.reset_after_fork()  # so that one test's fault is not the next one's
    assert left is None


@pytest.fixture
def bundle(compiled):
    """All the kernels, open."""
    import bundler

    with bundler.Bundle.load(compiled.bundle) as opened:
        yield opened


@pytest.fixture
def small(bundle):
    """One kernel for CUDA."""
    return bundle.select(target="cuda:90", names="gelu_kernel")


@pytest.fixture
def key(compiled):
    """The key of the kernel in `small`."""
    (found,) = compiled.keys_of("gelu_kernel")
    return found


@pytest.fixture
def planted(compiled, key, tmp_path):
    """A cache directory with the kernel of `small`, as Triton would have left it there."""
    return support.plant(compiled.cache, tmp_path / "planted", [key])


@pytest.fixture
def full_cache(compiled, tmp_path):
    """A copy of the whole cache, with group files that name it."""
    return support.plant(compiled.cache, tmp_path / "full", compiled.keys)


@pytest.fixture
def copy_of(tmp_path):
    """Return a function that copies a directory to a new place."""
    return lambda directory, name: Path(shutil.copytree(directory, tmp_path / name, symlinks=True))

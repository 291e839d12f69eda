# SPDX-License-Identifier: Apache-2.0
"""Records of `bundler.autotune` fill the caches of Triton's own tuners, where source,
configurations, device and toolchain are the same.
"""

import dataclasses
import importlib.util
import sys
from types import SimpleNamespace

import pytest

import bundler
from bundler.integrations.replayed_tunings import RecordedWinner
from bundler.runtime import DryDriver, TunerOptions
from bundler.toolchain.tuner_caches import FilledCache, TunerCaches

pytest.importorskip("triton")
pytestmark = pytest.mark.toolchain

_KERNEL = """
import triton
import triton.language as tl

@triton.jit
def add(x, y, out, n, BLOCK: tl.constexpr):
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = places < n
    tl.store(out + places, tl.load(x + places, mask=inside) + tl.load(y + places, mask=inside), mask=inside)
"""


class _Gpu:
    """The device of `DryDriver`, as Triton's driver tells it."""

    utils = SimpleNamespace(
        get_device_properties=lambda _: {"max_shared_mem": 227 * 1024, "multiprocessor_count": 132}
    )

    def get_current_device(self):
        return 0

    def get_current_target(self):
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_stream(self, device):
        return 0

    def get_benchmarker(self):
        return lambda *_, **__: pytest.fail("a benchmark")


class _Tensor:
    def __init__(self, address):
        import torch

        self.dtype, self._address = torch.float32, address

    def data_ptr(self):
        return self._address


@pytest.fixture
def triton(monkeypatch, tmp_path):
    """Triton with a GPU that is not there, and a cache directory of the test's own."""
    import triton
    from triton.runtime.driver import driver

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    before = driver._active
    driver.set_active(_Gpu())
    yield triton
    driver._active = before


@pytest.fixture
def add(tmp_path, monkeypatch):
    """Return a function that imports the kernel anew, from a file with this text."""

    def add(text=_KERNEL, name="tuned_here"):
        path = tmp_path / f"{name}.py"
        path.write_text(text)
        spec = importlib.util.spec_from_file_location(name, path)
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, module)
        spec.loader.exec_module(module)
        return module.add

    return add


@pytest.fixture
def record(triton, add):
    """The record of a kernel that our tuner tuned: a block of 128 was the fastest."""
    pytest.importorskip("torch")
    driver = DryDriver()

    def bench(call, quantiles):
        call()
        return [1.0 + abs(driver.launches[-1].grid[0] - 8)] * 3

    options = TunerOptions(driver=driver, workers=1)
    kernel = bundler.autotune(configs(triton), ["n"], do_bench=bench, options=options)(add())
    with bundler.recording() as recording:
        kernel[lambda meta: (-(-meta["n"] // meta["BLOCK"]),)](
            _Tensor(4096), _Tensor(8192), _Tensor(12288), 1024
        )
    (found,) = recording.collect().tuning_records
    return found


def configs(triton, *blocks):
    return [triton.Config({"BLOCK": block}) for block in blocks or (64, 128)]


def test_a_tuner_of_triton_gets_our_winner(triton, add, record):
    """Its key is the one that Triton's tuner makes; its value the tuner's own configuration; a
    tuner that is made later gets it, too.
    """
    caches, tuner = TunerCaches(), triton.autotune(configs(triton), ["n"])(add(name="tuned_there"))
    winner = RecordedWinner(record)
    assert caches.offer([winner]) == {winner.path: ""}
    key = (1024, "torch.float32", "torch.float32", "torch.float32")
    assert tuner.cache == {key: tuner.configs[1]}
    later = triton.autotune(configs(triton), ["n"])(add(name="tuned_later"))
    assert key in later.cache
    assert type(later.cache) is FilledCache
    assert later.cache[key] is later.configs[1]


@pytest.mark.parametrize("part", ["source", "configs", "device", "toolchain"])
def test_a_record_of_something_else_is_not_used(triton, add, record, part):
    """Each part that differs is named, and the tuner tunes."""
    parts = tuple((name, "another" if name == part else value) for name, value in record.parts)
    caches, tuner = TunerCaches(), triton.autotune(configs(triton), ["n"])(add(name="tuned_there"))
    (reason,) = caches.offer([RecordedWinner(dataclasses.replace(record, parts=parts))]).values()
    assert reason.startswith(f"{part}: recorded another, here ")
    assert tuner.cache == {}


def test_an_edited_kernel_and_another_module_are_not_tuned(triton, add, record):
    """The source is the kernel's own; `modules` limits a record as it limits kernels."""
    edited = triton.autotune(configs(triton), ["n"])(
        add(_KERNEL.replace("tl.load(x", "2 * tl.load(x"), "edited")
    )
    (reason,) = TunerCaches().offer([RecordedWinner(record)]).values()
    assert reason.startswith("source: recorded ")
    assert edited.cache == {}
    (reason,) = TunerCaches().offer([RecordedWinner(record, ("elsewhere",))]).values()
    assert reason == "no tuner of that function is here yet"
    assert edited.cache == {}


def test_a_winner_that_the_tuner_does_not_have_is_not_used(triton, add, record):
    """A record that was changed by hand names a configuration outside of the list."""
    config = tuple(
        (name, dataclasses.replace(value, payload=3) if name == "BLOCK" else value)
        for name, value in record.config
    )
    caches, tuner = TunerCaches(), triton.autotune(configs(triton), ["n"])(add(name="tuned_there"))
    (reason,) = caches.offer([RecordedWinner(dataclasses.replace(record, config=config))]).values()
    assert reason == "the tuner has no such configuration, or one with a hook"
    assert tuner.cache == {}

# SPDX-License-Identifier: Apache-2.0
"""A target that is declared to one thread is none for the others, and their kernels stay as they
are.
"""

import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from bundler.format.entries import Target
from bundler.toolchain import declared_target, jit_specialization, targets, tuner_toolchain

pytest.importorskip("triton")
pytestmark = [pytest.mark.toolchain, pytest.mark.release]
OTHER = Target("cuda", "80")


@pytest.fixture
def elsewhere():
    """Return a function that calls another one in another thread."""
    with ThreadPoolExecutor(1) as pool:
        yield lambda function: pool.submit(function).result()


def arch():
    from triton.runtime.driver import driver

    return driver.active.get_current_target().arch


def test_other_threads_keep_their_driver(fake_driver, elsewhere):
    """While a target is declared here, another thread's launches find the driver that was active
    before.
    """
    from triton.runtime.driver import driver

    with declared_target.declared(OTHER), declared_target.declared(Target("cuda", "75")):
        assert (arch(), elsewhere(arch)) == (75, 90)
        assert elsewhere(declared_target.active_driver) is fake_driver
        assert elsewhere(targets.current_device) == fake_driver.device
    assert driver._active is fake_driver


def test_other_threads_get_what_triton_finds(fake_driver, elsewhere, monkeypatch):
    """Where Triton had looked for no driver yet, another thread gets Triton's default, or Triton's
    own error.
    """
    module = sys.modules["triton.runtime.driver"]
    config = module.driver
    monkeypatch.setattr(config, "_active", None)
    monkeypatch.setattr(config, "_default", None)
    monkeypatch.setattr(module, "_create_driver", lambda: fake_driver)
    with declared_target.declared(OTHER):
        assert (
            arch(),
            elsewhere(declared_target.active_driver),
            elsewhere(targets.current_device),
        ) == (80, None, None)
        assert elsewhere(arch) == 90
    monkeypatch.setattr(config, "_default", None)

    def fail():
        raise RuntimeError("0 active drivers")

    monkeypatch.setattr(module, "_create_driver", fail)
    with declared_target.declared(OTHER), pytest.raises(RuntimeError, match="0 active drivers"):
        elsewhere(arch)


def test_a_thread_declares_a_target_although_another_one_did(fake_driver, elsewhere):
    """Who needs the target of the active driver does not wait for, nor sees, what another thread
    declares.
    """

    def same_target():
        with tuner_toolchain.for_target(Target("cuda", "90")):
            return arch()

    with declared_target.declared(OTHER):
        assert elsewhere(same_target) == 90


def test_a_kernel_can_be_launched_while_a_call_is_looked_at(kernels, fake_driver, monkeypatch):
    """Finding out what a call compiles to leaves the function as it is: another thread's launch of
    it compiles and launches.
    """
    from triton.runtime.jit import MockTensor

    before = {
        name: value
        for name, value in vars(kernels.add).items()
        if name not in {"hash", "used_global_vals"}
    }
    seen = []

    def look():
        seen.append({name: vars(kernels.add).get(name) for name in before})
        return 3

    monkeypatch.setattr(fake_driver, "get_current_device", look)
    tensor = MockTensor("float32")
    stopped = jit_specialization.stop_call(
        kernels.add, {"x": tensor, "y": tensor, "out": tensor, "n": 100, "num_warps": 8}
    )
    assert (stopped.source.fn, stopped.options.num_warps) == (kernels.add, 8)
    assert seen == [before]
    assert dict(kernels.add.device_caches) == {}

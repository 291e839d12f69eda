# SPDX-License-Identifier: Apache-2.0
"""What was not recorded is compiled by Triton, recorded, and launched without Triton from
then on.
"""

import launch_calls as calls
import pytest
import triton_stand_in

from bundler.errors import CannotLaunchStatically, NotFound
from bundler.runtime import DryDriver, load

pytestmark = pytest.mark.toolchain
X, Y, OUT = calls.X, calls.Y, calls.OUT


@pytest.fixture
def triton_driver(tmp_path, monkeypatch):
    pytest.importorskip("triton")
    from triton.runtime.driver import driver

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    before, fake = driver._active, triton_stand_in.TritonDriver(lambda metadata: metadata.name)
    driver.set_active(fake)
    yield fake
    driver._active = before


@pytest.fixture
def functions(triton_driver, launch_kernels):
    """The JIT functions, with nothing in their memory before and after."""
    found = launch_kernels.FUNCTIONS
    for function in found.values():
        function.device_caches.clear()
    yield found
    for function in found.values():
        function.device_caches.clear()


def test_a_call_without_a_match_is_compiled_once_and_then_launched_statically(
    recorded, functions, triton_driver, monkeypatch
):
    """The first such call is Triton's; the second, and those of a process with the new bundle, are
    ours.
    """
    # A recording also takes what is loaded already, here by other tests of this process.
    monkeypatch.setattr(
        "bundler.toolchain.recording.compile_listener.loaded_kernels", lambda: iter(())
    )
    with load(recorded.bundle, driver=DryDriver(), fallback={"add": functions["add"]}) as kernels:
        kernels["add"][(2,)](X, Y, OUT, 1024)
        assert (triton_driver.launches, kernels.compiled) == ([], None)
        for _ in range(3):
            kernels["add"][(5,)](X, Y, OUT, 1024, BLOCK=32)
        assert triton_driver.launches == [("add", (5, 1, 1))]
        assert [launch.grid for launch in kernels.driver.launches] == [
            (2, 1, 1),
            (5, 1, 1),
            (5, 1, 1),
        ]
        compiled = kernels.compiled
        assert [kernel.name for kernel in compiled.kernels] == ["add"]
        assert {launch.plan.key for launch in kernels.driver.launches[1:]} == {
            compiled.kernels[0].key
        }
    with load(compiled, driver=DryDriver()) as kernels:
        kernels["add"][(5,)](X, Y, OUT, 1024, BLOCK=32)
        with pytest.raises(NotFound):
            kernels["add"][(5,)](X, Y, OUT, 1024)


def test_a_kernel_that_no_bundle_has_can_have_a_fallback(recorded, functions, triton_driver):
    """Starting from a bundle without the kernel, its first call brings it in."""
    empty = recorded.bundle.select(names="nothing")
    with load(empty, driver=DryDriver(), fallback={"read_only": functions["read_only"]}) as kernels:
        for _ in range(2):
            kernels["read_only"][(1,)](X, OUT)
        assert (len(triton_driver.launches), len(kernels.driver.launches)) == (1, 1)


def test_what_triton_has_in_memory_stays_with_triton(recorded, functions, triton_driver):
    """When Triton compiles nothing there is nothing to record, and Triton goes on to launch."""
    empty = recorded.bundle.select(names="nothing")
    functions["read_only"][(1,)](X, OUT)
    with load(empty, driver=DryDriver(), fallback={"read_only": functions["read_only"]}) as kernels:
        for _ in range(3):
            kernels["read_only"][(1,)](X, OUT)
        launched = len(triton_driver.launches) - 1 + len(kernels.driver.launches)
        assert launched == 3


def test_an_error_that_is_no_miss_does_not_go_to_triton(recorded, functions, triton_driver):
    """A CPU tensor is refused, with a fallback as without."""
    with load(recorded.bundle, driver=DryDriver(), fallback={"add": functions["add"]}) as kernels:
        with pytest.raises(CannotLaunchStatically, match="host memory"):
            kernels["add"][(1,)](X, calls.Tensor(index=-1), OUT, 1024)
        assert (triton_driver.launches, kernels.driver.launches) == ([], [])

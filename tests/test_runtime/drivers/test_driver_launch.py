# SPDX-License-Identifier: Apache-2.0
"""Both launch paths hand to a driver's library just what the plan says, on CUDA and on HIP, from
any thread.
"""

import struct
import threading

import pytest

from bundler.errors import CannotLaunchStatically, DriverError

BOTH = pytest.mark.parametrize("backend", ["cuda", "hip"])


@BOTH
def test_a_launch_reaches_the_library(ready, fake, plan, tensor, backend):
    """Grid, block, shared memory, stream, function and parameters arrive as the plan and the call
    say.
    """
    one = plan("pointer", "pointer", "i32", "fp32", backend=backend, shared_bytes=512)
    _, module, launch = ready(one)
    launch(7, 2, 3, 99, tensor(0xD00010), 0xD00020, -5, 1.5)
    last = fake.last
    assert (list(last.grid), list(last.block)) == ([7, 2, 3], [128, 1, 1])
    assert (last.shared, last.stream, last.function) == (512, 99, module.function)
    assert fake.parameters(one) == struct.pack("<QQif16x", 0xD00010, 0xD00020, -5, 1.5)
    assert last.attribute_count == 0
    launch(1, 1, 1, 98, None, tensor(0xD00030), 6, 2.5)
    assert (list(fake.last.grid), fake.last.stream) == ([1, 1, 1], 98)
    assert fake.parameters(one) == struct.pack("<QQif16x", 0, 0xD00030, 6, 2.5)


@BOTH
@pytest.mark.parametrize("grid", [(0, 1, 1), (1, 0, 1), (5, 5, 0)])
def test_an_empty_grid_is_no_launch(ready, fake, plan, backend, grid):
    """A grid with no program reaches no driver, but its values are looked at."""
    _, _, launch = ready(plan("i32", backend=backend))
    launch(*grid, 0, 4)
    with pytest.raises(CannotLaunchStatically):
        launch(*grid, 0, "four")
    assert fake.number("fake_launches").value == 0


@pytest.mark.parametrize("grid", [(-1, 1, 1), (1, 2**31, 1), (1, 1, 2.0), ("1", 1, 1)])
def test_a_grid_that_is_none_is_refused(ready, fake, plan, grid):
    """Negative, huge and broken grids are typed errors that name the kernel."""
    _, _, launch = ready(plan("i32"))
    with pytest.raises(CannotLaunchStatically, match="kernel: a grid is three whole numbers"):
        launch(*grid, 0, 4)
    assert fake.number("fake_launches").value == 0


def test_a_cluster_multiplies_the_grid(ready, fake, plan):
    """With clusters the first axis counts blocks, and the attributes are those of Triton's own
    launcher.
    """
    one = plan("i32", cluster=2, cooperative=True, pdl=True)
    _, _, launch = ready(one)
    launch(5, 3, 1, 0, 4)
    assert list(fake.last.grid) == [10, 3, 1]
    attributes = bytes(fake.last.attributes)
    found = [
        struct.unpack_from("<I4x3I", attributes, 72 * index)
        for index in range(fake.last.attribute_count)
    ]
    assert found == [(6, 1, 0, 0), (2, 1, 0, 0), (4, 2, 1, 1), (5, 1, 0, 0)]
    with pytest.raises(CannotLaunchStatically):
        launch(2**30, 1, 1, 0, 4)


@pytest.mark.parametrize(
    ("fields", "call"),
    [
        ({}, "hipModuleLaunchKernel"),
        ({"cooperative": True}, "hipModuleLaunchCooperativeKernel"),
        ({"cluster": 2}, "hipDrvLaunchKernelEx"),
    ],
)
def test_hip_launches_as_triton_does(ready, fake, plan, fields, call):
    """HIP has a function for each kind of launch."""
    one = plan("i64", backend="hip", **fields)
    _, _, launch = ready(one)
    launch(1, 1, 1, 0, 4)
    assert fake.calls[-1] == call
    assert fake.parameters(one)[:8] == struct.pack("<q", 4)


@BOTH
def test_large_parameter_buffers_fit(ready, fake, plan, backend):
    """More than 4 KiB of parameters, and more than 128 of them, arrive whole."""
    for kinds in (("tensormap",) * 40, ("i8",) * 300):
        one = plan(*kinds, backend=backend)
        _, _, launch = ready(one)
        values = [
            bytes([index]) * 128 if kinds[0] == "tensormap" else index % 100
            for index in range(len(kinds))
        ]
        launch(1, 1, 1, 0, *values)
        wanted = b"".join(values) if kinds[0] == "tensormap" else bytes(values)
        assert fake.parameters(one)[: len(wanted)] == wanted


@BOTH
def test_threads_share_no_buffer(ready, fake, plan, backend):
    """Calls of one launcher in several threads at once never mix their values."""
    _, _, launch = ready(plan("i64", "i64", backend=backend))

    def many(number):
        for count in range(300):
            launch(1, 1, 1, 0, number + count, number + count)

    threads = [threading.Thread(target=many, args=(number << 32,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (fake.number("fake_launches").value, fake.number("fake_torn").value) == (1200, 0)


def test_a_new_thread_has_no_context(ready, fake, plan):
    """A thread that never used the GPU launches in the module's context, which it keeps."""
    _, module, launch = ready(plan("i32"))
    found = []

    def other():
        launch(1, 1, 1, 0, 4)
        found.append(fake.last.context)

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert found == [module.place]


def test_a_launch_leaves_the_context_as_it_was(ready, fake, plan):
    """With the context of another device current, a launch goes to its own and back."""
    driver, module, launch = ready(plan("i32"), device=1)
    fake.library.cuCtxSetCurrent(0xC0)
    fake.fail("cuLaunchKernelEx", 400)  # what the driver says to a stream of another context
    launch(1, 1, 1, 0, 4)
    assert (fake.last.context, module.place) == (0xC1, 0xC1)
    assert driver.device() == 0


@BOTH
@pytest.mark.parametrize("status", [1, 400, 700])
def test_a_refused_launch_is_an_error(ready, fake, plan, backend, status):
    """The error names the kernel and says what the driver said; the next launch works."""
    _, _, launch = ready(plan("i32", backend=backend))
    launch(1, 1, 1, 0, 4)
    name = fake.calls[-1]
    fake.fail(name, status)
    with pytest.raises(
        DriverError, match=r"kernel: the launch failed: .*as the test wished"
    ) as caught:
        launch(1, 1, 1, 0, 4)
    assert (caught.value.status, caught.value.kernel, caught.value.backend) == (
        status,
        "kernel",
        backend,
    )
    launch(1, 1, 1, 0, 4)
    assert fake.number("fake_launches").value == 2


@BOTH
def test_an_unloaded_module_launches_nothing(ready, fake, plan, backend):
    """Unloading works once, and then the launcher says why it does not launch; so does a
    later one.
    """
    driver, module, launch = ready(plan("i32", backend=backend))
    module.unload()
    module.unload()
    assert fake.number("fake_unloaded").value == 1
    for one in (launch, driver.launcher(module)):
        with pytest.raises(
            DriverError, match="kernel: cannot be launched, since its module was unloaded"
        ):
            one(1, 1, 1, 0, 4)
    assert fake.number("fake_launches").value == 0


@BOTH
def test_scratch_is_there_for_one_launch(ready, fake, plan, backend):
    """Scratch is grid x cluster x size, at the alignment asked for, and given back also when the
    launch fails.
    """
    one = plan(
        "i32", backend=backend, cluster=2, global_scratch_bytes=100, global_scratch_align=128
    )
    _, _, launch = ready(one)
    launch(3, 2, 1, 0, 4)
    assert fake.number("fake_scratch_bytes").value == 3 * 2 * 2 * 100
    assert fake.parameters(one)[8:] == struct.pack("<QQ", 0xABC100, 0)
    assert fake.number("fake_live_scratch").value == 0
    fake.fail("cuLaunchKernelEx" if backend == "cuda" else "hipDrvLaunchKernelEx", 700)
    with pytest.raises(DriverError):
        launch(3, 2, 1, 0, 4)
    assert fake.number("fake_live_scratch").value == 0


def test_profile_scratch_and_large_alignment(ready, fake, plan):
    """Both kinds at once; an alignment beyond the allocator's is made by allocating more."""
    one = plan("i32", global_scratch_bytes=64, global_scratch_align=4096, profile_scratch_bytes=8)
    _, _, launch = ready(one)
    launch(1, 1, 1, 0, 4)
    assert fake.parameters(one)[8:] == struct.pack("<QQ", 0xABD000, 0xABC100)
    assert fake.calls.count("cuMemAllocAsync") == fake.calls.count("cuMemFreeAsync") == 2


def test_out_of_scratch_memory(ready, fake, plan):
    """When there is no memory for the second scratch, the first is given back and nothing is
    launched.
    """
    _, _, launch = ready(plan("i32", global_scratch_bytes=64, profile_scratch_bytes=8))
    launch(1, 1, 1, 0, 4)
    fake.fail("cuMemAllocAsync", 2)
    with pytest.raises(DriverError, match="allocating 64 bytes of scratch memory failed"):
        launch(1, 1, 1, 0, 4)
    assert (fake.number("fake_launches").value, fake.number("fake_live_scratch").value) == (1, 0)

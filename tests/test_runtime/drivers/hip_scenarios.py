# SPDX-License-Identifier: Apache-2.0
"""What a process does with AMD GPUs, one function a sequence of calls; `test_hip_sequences.py`
compares each with its file.

`SCENARIOS` are on a library that has every function, `LACKING` on one that has not.
"""

import sys
import types
from dataclasses import replace

import hip_machine
import launch_calls as calls

from bundler.errors import CannotLaunchStatically, DriverError, DriverUnavailable, ToolchainMismatch
from bundler.format.entries import Target
from bundler.runtime import load

HOST, DEVICE, MANAGED = 1, 2, 3
VALUES = (0xD00010, 0xD00020, 0xD00030, 1000)


def opening(machine):
    """A process with two GPUs asks what there is."""
    machine.device()
    machine.device("gfx942:sramecc+:xnack+", cooperative=False)
    driver = machine.open(named=True)
    machine.say(
        f"{driver.device_count()} devices, current {driver.device()}, stream {driver.stream(0)}"
    )
    for device in (0, 1):
        machine.say(str(driver.properties(device)))


def no_device(machine):
    """A machine without a GPU."""
    with machine.refuses(DriverUnavailable):
        machine.open()


def forked(machine):
    """A process that was forked after its parent used HIP."""
    machine.device()
    machine.fail("hipInit", 3)
    with machine.refuses(DriverUnavailable):
        machine.open()


def wrong_device(machine):
    """A question about a device that is not there."""
    machine.device()
    driver = machine.open()
    with machine.refuses(DriverError):
        driver.properties(5)
    machine.fail("hipGetDevice", 101)
    with machine.refuses(DriverError):
        driver.device()


def launches(machine):
    """A kernel is loaded, launched twice, and unloaded; later launches reach no library."""
    machine.device()
    driver, (plan, image) = machine.open(), machine.kernel(cooperative=False)
    module = driver.load(plan, image, 0)
    launch = driver.launcher(module)
    machine.say("grid 16, default stream")
    launch(16, 1, 1, 0, *VALUES)
    machine.say("grid 4 x 3 x 2, no tensor for the second argument")
    launch(4, 3, 2, 0x5000, 0xD00010, None, 0xD00030, -1)
    machine.say("an empty grid is no launch")
    launch(0, 1, 1, 0, *VALUES)
    machine.say("unload, twice")
    module.unload()
    module.unload()
    with machine.refuses(DriverError):
        launch(16, 1, 1, 0, *VALUES)


def other_device(machine):
    """A kernel on a device that is not the current one: by the default stream, then by one of its
    own.
    """
    machine.device()
    machine.device()
    driver, (plan, image) = machine.open(), machine.kernel(cooperative=False)
    launch = driver.launcher(driver.load(plan, image, 1))
    machine.say("default stream")
    launch(16, 1, 1, 0, *VALUES)
    machine.say("a stream of device 1")
    launch(16, 1, 1, hip_machine.STREAM_OF_1, *VALUES)
    machine.fail("hipSetDevice", 101)
    with machine.refuses(DriverError):
        driver.load(plan, image, 1)


def cooperative(machine):
    """A kernel whose programs wait for each other; with more of them than fit, the launch is
    refused.
    """
    machine.device()
    driver, (plan, image) = machine.open(), machine.kernel(cooperative=True)
    launch = driver.launcher(driver.load(plan, image, 0))
    launch(16, 1, 1, 0, *VALUES)
    machine.limits(blocks=8)
    with machine.refuses(DriverError):
        launch(16, 1, 1, 0, *VALUES)


def not_cooperative(machine):
    """The same on a device that cannot: the binary is not loaded."""
    machine.device(cooperative=False)
    driver, (plan, image) = machine.open(), machine.kernel(cooperative=True)
    with machine.refuses(DriverError):
        driver.load(plan, image, 0)


def clusters(machine):
    """Blocks in clusters of two, each program one cluster; then cooperative ones."""
    machine.device()
    driver, (plan, image) = machine.open(), machine.kernel(cooperative=False)
    for each in (replace(plan, cluster=2), replace(plan, cluster=2, cooperative=True)):
        driver.launcher(driver.load(each, image, 0))(16, 1, 1, 0, *VALUES)


def scratch(machine):
    """Memory for a launch comes from the stream's order and goes back; when there is none, nothing
    is launched.
    """
    machine.device()
    machine.device()
    driver, (plan, image) = machine.open(), machine.kernel(cooperative=False)
    plan = replace(plan, global_scratch_bytes=96, global_scratch_align=128)
    launch = driver.launcher(driver.load(plan, image, 1))
    machine.say("16 programs of 96 bytes")
    launch(16, 1, 1, hip_machine.STREAM_OF_1, *VALUES)
    machine.fail("hipMallocAsync", 2)
    with machine.refuses(DriverError):
        launch(16, 1, 1, hip_machine.STREAM_OF_1, *VALUES)
    machine.fail("hipModuleLaunchKernel", 719)
    with machine.refuses(DriverError):
        launch(16, 1, 1, hip_machine.STREAM_OF_1, *VALUES)


def refused_images(machine):
    """Binaries that HIP refuses, and an entry that one lacks; what was loaded by then is
    unloaded.
    """
    machine.device()
    driver, (plan, image) = machine.open(), machine.kernel(cooperative=False)
    for words, error, bad in (
        ("no code object", DriverError, b"no code object"),
        ("an x86 library", DriverError, image[:18] + b"\x3e\x00" + image[20:]),
        ("gfx950", ToolchainMismatch, hip_machine.retargeted(image, "gfx950")),
        (
            "xnack on",
            ToolchainMismatch,
            hip_machine.retargeted(image, "gfx942", xnack=hip_machine.ON),
        ),
        (
            "sramecc off",
            ToolchainMismatch,
            hip_machine.retargeted(image, "gfx942", sramecc=hip_machine.OFF),
        ),
    ):
        machine.say(words)
        with machine.refuses(error):
            driver.load(plan, bad, 0)
    machine.say("xnack off, sramecc on: as the device is")
    matching = hip_machine.retargeted(
        image, "gfx942", xnack=hip_machine.OFF, sramecc=hip_machine.ON
    )
    driver.load(plan, matching, 0).unload()
    machine.fail("hipModuleLoadData", 2)
    with machine.refuses(DriverError):
        driver.load(plan, image, 0)
    with machine.refuses(DriverError):
        driver.load(replace(plan, entry="missing"), image, 0)
    machine.limits(threads=64)
    with machine.refuses(DriverError):
        driver.load(plan, image, 0)


def other_architectures(machine):
    """Kernels of gfx942 reach neither a gfx950 nor a gfx1100; one compiled for 32 lanes runs on the
    latter.
    """
    machine.device("gfx950:sramecc+:xnack-", shared=163840, units=256)
    machine.device("gfx1100", units=48, warp=32)
    driver, (plan, image) = machine.open(), machine.kernel(cooperative=False)
    for device in (0, 1):
        with machine.refuses(ToolchainMismatch):
            driver.load(plan, image, device)
    narrow = replace(
        plan, target=Target("hip", "gfx1100", 32), block_threads=plan.block_threads // 2
    )
    launch = driver.launcher(driver.load(narrow, hip_machine.retargeted(image, "gfx1100"), 1))
    launch(16, 1, 1, hip_machine.STREAM_OF_1, *VALUES)
    wide = replace(plan, target=Target("hip", "gfx950", 64), shared_bytes=131072)
    launch = driver.launcher(driver.load(wide, hip_machine.retargeted(image, "gfx950"), 0))
    launch(16, 1, 1, 0, *VALUES)
    with machine.refuses(DriverError):
        driver.load(replace(wide, shared_bytes=163841), image, 0)


def failed_launches(machine):
    """What a launch may answer; the library's last error is forgotten each time, and the next
    launch works.
    """
    machine.device()
    driver, (plan, image) = machine.open(), machine.kernel(cooperative=False)
    launch = driver.launcher(driver.load(plan, image, 0))
    for status in (719, 2, 101):
        machine.fail("hipModuleLaunchKernel", status)
        with machine.refuses(DriverError):
            launch(16, 1, 1, 0, *VALUES)
        assert machine.last_error == 0
    machine.say("more threads than HIP counts")
    with machine.refuses(DriverError):
        launch(2**31 - 1, 1, 1, 0, *VALUES)
    launch(16, 1, 1, 0, *VALUES)


def addresses(machine):
    """Where memory lies; HIP answers an error for what it does not know, which stays behind unless
    it is fetched.
    """
    machine.device()
    machine.device()
    for number, (kind, device, managed) in enumerate(
        [
            (DEVICE, 0, False),
            (DEVICE, 1, False),
            (HOST, 0, False),
            (MANAGED, 1, False),
            (DEVICE, 1, True),
            (0, -2, False),
        ]
    ):
        machine.memory((number + 1) << 20, (number + 2) << 20, kind, device, managed=managed)
    driver = machine.open()
    for address in (1 << 20, (2 << 20) + 16, 3 << 20, 4 << 20, 5 << 20, 6 << 20, 7 << 20, 0):
        machine.say(f"belongs to {driver.pointer_device(address)}")
    assert machine.last_error == 0


def tensor_maps(machine):
    """HIP has none."""
    machine.device()
    driver, (plan, _) = machine.open(), machine.kernel(cooperative=False)
    with machine.refuses(CannotLaunchStatically):
        driver.tensor_map(plan, None, None)


def with_torch(machine):
    """With torch in the process its device and stream count, and scratch is its own."""
    machine.device()
    machine.device()
    driver, (plan, image) = machine.open(), machine.kernel(cooperative=False)
    cuda = types.SimpleNamespace(
        is_initialized=lambda: True,
        caching_allocator_alloc=lambda size, device, stream: 0x7F00_0000_0000,
        caching_allocator_delete=lambda address: None,
    )
    raw = types.SimpleNamespace(
        _cuda_getDevice=lambda: 1, _cuda_getCurrentRawStream=lambda device: 0x5000 + device
    )
    sys.modules["torch"] = types.SimpleNamespace(
        cuda=cuda, _C=raw, version=types.SimpleNamespace(hip="7.1")
    )
    try:
        device = driver.device()
        machine.say(f"device {device}, stream {driver.stream(device):#x}")
        launch = driver.launcher(driver.load(replace(plan, global_scratch_bytes=96), image, device))
        launch(16, 1, 1, driver.stream(device), *VALUES)
    finally:
        del sys.modules["torch"]


def a_bundle(machine):
    """A bundle is opened, its kernel called as a user does, and let go of."""
    machine.device()
    machine.memory(calls.ADDRESS, calls.ADDRESS + (1 << 20), DEVICE)
    machine.kernel(cooperative=False)
    with load(machine.recorded.bundle, driver=machine.open()) as kernels:
        for _ in range(2):
            kernels["add"][(16,)](calls.X, calls.Y, calls.OUT, 1024)
        machine.say("the end of the with")


def lacking_clusters(machine):
    """A library without hipDrvLaunchKernelEx launches all but clusters."""
    machine.device()
    driver, (plan, image) = machine.open(), machine.kernel(cooperative=False)
    module = driver.load(replace(plan, cluster=2), image, 0)
    with machine.refuses(DriverError):
        driver.launcher(module)
    driver.launcher(driver.load(plan, image, 0))(16, 1, 1, 0, *VALUES)


def lacking_words(machine):
    """A library that has no words for a status: the number stands alone."""
    machine.device()
    machine.fail("hipInit", 100)
    with machine.refuses(DriverUnavailable):
        machine.open()


SCENARIOS = (
    opening,
    no_device,
    forked,
    wrong_device,
    launches,
    other_device,
    cooperative,
    not_cooperative,
    clusters,
    scratch,
    refused_images,
    other_architectures,
    failed_launches,
    addresses,
    tensor_maps,
    with_torch,
    a_bundle,
)
LACKING = (lacking_clusters, lacking_words)

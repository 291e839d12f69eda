# SPDX-License-Identifier: Apache-2.0
"""Devices, contexts, modules, forks and torch: what a driver does around its launches."""

import ctypes
import struct
import sys
import threading
import types

import pytest

from bundler.errors import (
    CannotLaunchStatically,
    ConfigError,
    DriverError,
    DriverUnavailable,
    ToolchainMismatch,
)
from bundler.format.entries import Target
from bundler.runtime.launch.drivers.cuda import CudaDriver
from bundler.runtime.launch.drivers.driver import DeviceProperties
from bundler.runtime.launch.drivers.driver_opening import open_driver
from bundler.runtime.launch.drivers.hip import HipDriver
from bundler.runtime.launch.drivers.native_driver import TorchPool, scratch_for
from bundler.runtime.launch.plan import TensorMap

BOTH = pytest.mark.parametrize("backend", ["cuda", "hip"])
MAP = TensorMap(0, swizzle=3, elem_size=4, elem_type=9, block_size=(16, 64), fp4_padded=False)


@pytest.fixture(autouse=True)
def path(request, monkeypatch):
    """What is tested here does not depend on the launch path."""
    monkeypatch.setattr("bundler.runtime.launch.drivers.launchers.compiled_type", lambda: None)
    return "ctypes"


@pytest.fixture
def torch(monkeypatch):
    """Put a torch into the process that uses the GPU, on device 1 and a stream of its own."""
    freed = []
    cuda = types.SimpleNamespace(
        is_initialized=lambda: True,
        caching_allocator_alloc=lambda size, device, stream: 0x700 + size + device + stream,
        caching_allocator_delete=freed.append,
    )
    raw = types.SimpleNamespace(
        _cuda_getDevice=lambda: 1, _cuda_getCurrentRawStream=lambda device: 70 + device
    )
    module = types.SimpleNamespace(
        cuda=cuda, _C=raw, version=types.SimpleNamespace(hip=None), freed=freed
    )
    return lambda: monkeypatch.setitem(sys.modules, "torch", module) or module


@BOTH
def test_properties(open_driver, backend):
    """A device says what it can do, and is asked once."""
    driver = open_driver(backend)
    wanted = {
        "cuda": DeviceProperties("90", 1024, 232448, 32, 132, cooperative=True),
        "hip": DeviceProperties("gfx942", 1024, 65536, 64, 304, cooperative=True),
    }
    assert (driver.properties(1), driver.device_count(), driver.backend) == (
        wanted[backend],
        2,
        backend,
    )
    assert driver.properties(1) is driver.properties(1)


def test_there_is_no_such_device(open_driver):
    """A device that is not there is an error of the driver's, in its words."""
    with pytest.raises(DriverError, match="properties of device 5 failed: CUDA_ERROR_OF_A_TEST"):
        open_driver().properties(5)


@BOTH
def test_without_torch_the_driver_decides(open_driver, fake, backend):
    """Without torch the current device is the driver's, and the stream the default one."""
    driver = open_driver(backend)
    assert (driver.device(), driver.stream(0)) == (0, 0)
    fake.library.cuCtxSetCurrent(0xC1)
    fake.library.hipSetDevice(1)
    assert driver.device() == 1


def test_torch_is_followed(open_driver, torch):
    """With torch in the process, its current device and stream count, from the moment that it uses
    the GPU.
    """
    driver = open_driver()
    assert driver.device() == 0
    module = torch()
    module.cuda.is_initialized = lambda: False
    assert (driver.device(), driver.stream(1)) == (0, 0)
    module.cuda.is_initialized = lambda: True
    assert (driver.device(), driver.stream(1)) == (1, 71)


def test_a_torch_for_the_other_vendor_is_not_followed(open_driver, torch):
    """A torch for ROCm says nothing about CUDA's devices."""
    torch().version.hip = "6.4"
    assert open_driver().device() == 0
    assert HipDriver.backend == "hip"


def test_torch_lends_scratch(open_driver, torch, plan):
    """With torch in the process scratch is torch's, for the stream of the launch, and given
    back.
    """
    module = torch()
    one = plan("i32", global_scratch_bytes=64, global_scratch_align=128)
    allocate = scratch_for(one, lambda: TorchPool(1))
    address, nothing, release = allocate(2, 1, 1, 9)
    assert (address, nothing, module.freed) == (0x700 + 128 + 1 + 9, 0, [])
    release()
    assert module.freed == [address]


def test_torch_is_asked_directly_where_the_device_is_the_current_one(torch, plan):
    """Another device has to be made current first, which torch's own function does; what was taken
    is given back when more is refused.
    """
    module = torch()
    asked = []
    module._C._cuda_cudaCachingAllocator_raw_alloc = lambda size, stream: (
        asked.append((size, stream)) or 0x1080
    )
    one = plan("i32", global_scratch_bytes=64, global_scratch_align=512)
    assert scratch_for(one, lambda: TorchPool(1))(2, 3, 1, 9)[:2] == (0x1200, 0)
    assert scratch_for(one, lambda: TorchPool(0))(1, 1, 1, 9)[0] == 0xA00
    assert asked == [(64 * 6 + 512, 9)]
    both = plan("i32", global_scratch_bytes=64, profile_scratch_bytes=32)
    answers = iter([0x2000, MemoryError("full")])

    def allocate(size, stream):
        found = next(answers)
        if isinstance(found, Exception):
            raise found
        return found

    module._C._cuda_cudaCachingAllocator_raw_alloc = allocate
    with pytest.raises(MemoryError, match="full"):
        scratch_for(both, lambda: TorchPool(1))(1, 1, 1, 9)
    assert module.freed == [0x2000]


@BOTH
@pytest.mark.parametrize(
    ("address", "device"),
    [(0xD00010, 0), (0xE00010, 1), (0xF00010, 0), (0x10, None), (0xC00010, None)],
)
def test_where_an_address_lies(open_driver, backend, address, device):
    """Device memory belongs to its device, pinned host memory to the current one, other memory to
    none.
    """
    assert open_driver(backend).pointer_device(address) == device


@BOTH
def test_a_current_context_is_respected(open_driver, fake, plan, backend):
    """Loading on another device leaves the current one as it was; without any, CUDA's primary
    context is made current.
    """
    driver = open_driver(backend)
    if backend == "cuda":
        first = driver.load(plan("i32"), b"image", 0)
        assert (first.place, fake.calls.count("cuCtxSetCurrent")) == (0xC0, 1)
    second = driver.load(plan("i32", backend=backend), b"image", 1)
    assert (second.device, second.place) == (1, 0xC1 if backend == "cuda" else 1)
    assert driver.device() == 0


@BOTH
@pytest.mark.parametrize(
    ("fields", "kind", "words"),
    [
        (
            {"block_threads": 2048},
            DriverError,
            "needs 2048 threads a block, and device 0 has at most 1024",
        ),
        ({"shared_bytes": 300_000}, DriverError, "needs 300000 bytes of shared memory a block"),
        ({"target": None}, ToolchainMismatch, "compiled for .*:other, but device 0 is"),
    ],
)
def test_a_kernel_that_does_not_fit_the_device(
    open_driver, fake, plan, backend, fields, kind, words
):
    """Too many threads, too much shared memory, another architecture: the driver never sees the
    binary.
    """
    driver = open_driver(backend)
    fields = {name: value or Target(backend, "other") for name, value in fields.items()}
    with pytest.raises(kind, match="kernel: " + words):
        driver.load(plan("i32", backend=backend, **fields), b"image", 0)
    assert fake.number("fake_loaded").value == 0


@pytest.mark.parametrize("quick", [True, False])
def test_a_binary_is_loaded_where_its_context_is_current(open_driver, fake, plan, quick):
    """In one call of the extension where there is one: the same calls, the same kernel, and the
    same errors as elsewhere.
    """
    driver = open_driver("cuda")
    fake.library.cuCtxSetCurrent(ctypes.c_void_p(0xC1))
    if not quick:
        driver.load_image = None
    elif driver.launch_path == "compiled" and driver.load_image is None:
        pytest.skip(
            "the extension is not built into this installation; `make test` installs a wheel that"
            " has it"
        )
    fake.forget()
    module = driver.load(plan("i32", shared_bytes=60000), b"im\0age", 1)
    assert fake.calls == [
        "cuModuleLoadData",
        "cuModuleGetFunction",
        "cuFuncSetCacheConfig",
        "cuFuncSetAttribute 8 60000",
    ]
    assert (module.place, module.function) == (0xC1, module.handle + 1)
    driver.load(plan("i32"), b"image", 0)  # elsewhere
    assert fake.calls[4:] == [
        "cuDevicePrimaryCtxRetain",
        "cuCtxPushCurrent",
        "cuModuleLoadData",
        "cuModuleGetFunction",
        "cuCtxPopCurrent",
    ]
    for image, fields, kind, words in (
        (b"BAD", {}, DriverError, "loading the binary failed"),
        (b"OTHER", {}, ToolchainMismatch, "holds no code for device 1"),
        (b"image", {"entry": "missing"}, DriverError, "looking for the entry 'missing' failed"),
    ):
        with pytest.raises(kind, match=words):
            driver.load(plan("i32", **fields), image, 1)
    fake.number("fake_max_threads").value = 64
    with pytest.raises(
        DriverError,
        match="needs 128 threads a block, and with its registers device 1 runs at most 64",
    ):
        driver.load(plan("i32"), b"image", 1)
    assert (fake.number("fake_loaded").value, fake.number("fake_unloaded").value) == (4, 2)


@BOTH
def test_registers_limit_the_threads(open_driver, fake, plan, backend):
    """A kernel whose registers allow fewer threads than it was compiled for is refused and
    unloaded.
    """
    driver = open_driver(backend)
    fake.number("fake_max_threads").value = 64
    with pytest.raises(
        DriverError,
        match="needs 128 threads a block, and with its registers device 0 runs at most 64",
    ):
        driver.load(plan("i32", backend=backend), b"image", 0)
    assert fake.number("fake_loaded").value == fake.number("fake_unloaded").value == 1


@BOTH
def test_a_binary_that_the_driver_refuses(open_driver, fake, plan, backend):
    """The error names the kernel; another architecture is a mismatch; a missing entry leaves
    nothing loaded.
    """
    driver = open_driver(backend)
    with pytest.raises(DriverError, match="kernel: loading the binary failed"):
        driver.load(plan("i32", backend=backend), b"BAD", 0)
    with pytest.raises(ToolchainMismatch, match="kernel: the binary holds no code for device 0"):
        driver.load(plan("i32", backend=backend), b"OTHER", 0)
    with pytest.raises(DriverError, match="kernel: looking for the entry 'missing' failed"):
        driver.load(plan("i32", backend=backend, entry="missing"), b"image", 0)
    assert fake.number("fake_loaded").value == fake.number("fake_unloaded").value == 1


@pytest.mark.parametrize(
    ("shared", "static", "asked"),
    [(49152, 0, False), (49153, 0, True), (40000, 10000, True), (0, 0, False)],
)
def test_much_shared_memory_is_asked_for(open_driver, fake, plan, shared, static, asked):
    """Above 48 kB, static and dynamic together, the kernel is allowed what it needs, and no
    more.
    """
    fake.number("fake_static_shared").value = static
    open_driver().load(plan("i32", shared_bytes=shared), b"image", 0)
    assert (f"cuFuncSetAttribute 8 {shared}" in fake.calls) == asked


@pytest.mark.parametrize(("cluster", "asked"), [(8, False), (16, True)])
def test_large_clusters_are_asked_for(open_driver, fake, plan, cluster, asked):
    """Clusters of more than 8 blocks need a permission."""
    open_driver().load(plan("i32", cluster=cluster), b"image", 0)
    assert ("cuFuncSetAttribute 14 1" in fake.calls) == asked


class Descriptor:
    padding = "nan"
    round_f32_to_tf32 = False
    shape, strides, block_shape = (100, 200), (256, 1), (16, 64)

    def __init__(self, base, **fields):
        self.base = base
        self.__dict__.update(fields)


def test_a_tensor_descriptor_becomes_a_map(open_driver, plan, tensor):
    """Dimensions are counted from the innermost, strides are bytes, and fp32 has the driver's
    number.
    """
    found = open_driver().tensor_map(plan("tensormap"), MAP, Descriptor(tensor(0xD00000)))
    words = struct.unpack("<16Q", found)
    # The stand-in writes what it was given; the bit of drivers up to 13.1 is cleared in the second
    # word.
    assert words[:3] == (0xD00000, 2**64 - 1 - 2**21, 8 << 32 | 3 << 16 | 1 << 8 | 2)
    assert words[3:5] == (200 << 32 | 64, 100 << 32 | 16)
    assert words[8] == 256 * 4


def test_a_large_tensor_keeps_its_map(open_driver, plan, tensor):
    """Only maps of tensors below 128 KiB are touched; tf32 has a number of its own."""
    large = Descriptor(tensor(0xD00000), shape=(1000, 200), round_f32_to_tf32=True, padding="zero")
    words = struct.unpack("<16Q", open_driver().tensor_map(plan("tensormap"), MAP, large))
    assert words[1:3] == (2**64 - 1, 11 << 32 | 3 << 16 | 2)


@pytest.mark.parametrize(
    ("descriptor", "words"),
    [
        (object(), "object is no tensor descriptor"),
        (Descriptor(None), "is no tensor descriptor"),
        (Descriptor(0xD00000, shape=(1, 2, 3)), "takes 2 dimensions"),
        (Descriptor(0xD00000, strides=(1, 256)), "the last of them contiguous"),
        (Descriptor(0xD00001), "the driver makes no tensor map .*address 0xd00001"),
    ],
)
def test_a_descriptor_that_does_not_fit(open_driver, plan, descriptor, words):
    """What is no descriptor, or one that the driver refuses, is a typed error that names the
    kernel.
    """
    with pytest.raises(CannotLaunchStatically, match="kernel: .*" + words):
        open_driver().tensor_map(plan("tensormap"), MAP, descriptor)


def test_hip_has_no_tensor_maps(open_driver, plan, tensor):
    """On HIP a kernel that wants a map is refused."""
    with pytest.raises(CannotLaunchStatically, match="HIP has no tensor maps"):
        open_driver("hip").tensor_map(
            plan("tensormap", backend="hip"), MAP, Descriptor(tensor(0xD00000))
        )


@pytest.mark.parametrize("kind", [CudaDriver, HipDriver])
def test_a_missing_library(kind, tmp_path):
    """Without the library the error says what is missing; so it does for a library that is
    something else.
    """
    with pytest.raises(DriverUnavailable, match=r"need the driver's library libnone\.so"):
        kind("libnone.so")
    with pytest.raises(DriverUnavailable, match="undefined symbol"):
        kind("libc.so.6")


@BOTH
@pytest.mark.parametrize(("status", "words"), [(100, "is there a GPU"), (3, "before .*forked")])
def test_a_driver_that_does_not_start(open_driver, fake, backend, status, words):
    """No device, and a process forked after somebody used the GPU, are told apart."""
    fake.fail("cuInit" if backend == "cuda" else "hipInit", status)
    with pytest.raises(DriverUnavailable, match=words):
        open_driver(backend)


def test_there_is_no_such_backend():
    """A backend that nobody knows is a mistake of the caller's."""
    with pytest.raises(ConfigError, match="no driver for 'metal'"):
        open_driver("metal")


def test_many_threads_make_one_context(open_driver, fake, plan):
    """Of threads that load at once, one retains the context of a device."""
    driver = open_driver()
    threads = [
        threading.Thread(target=driver.load, args=(plan("i32"), b"image", 1)) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (fake.calls.count("cuDevicePrimaryCtxRetain"), fake.number("fake_loaded").value) == (
        1,
        8,
    )

# SPDX-License-Identifier: Apache-2.0
"""Pools of CUDA's and HIP's memory, over a library that counts what is in use: what is called, on
which device, and that all is given back; the declarations are those of the vendors' headers.
"""

import ctypes
import gc
import importlib.util
import re
from pathlib import Path

import numpy as np
import pytest

from bundler import DriverError, DriverUnavailable, OutOfDeviceMemory
from bundler.runtime import DeviceMemory
from bundler.runtime.launch.drivers import cuda_api, hip_api
from bundler.runtime.launch.drivers.cuda import CudaDriver
from bundler.runtime.launch.drivers.hip import HipDriver
from bundler.runtime.program.dlpack import described
from tools.hip import headers

DRIVERS = {"cuda": CudaDriver, "hip": HipDriver}
CALLED = dict([*cuda_api.POOL.values(), *cuda_api.GRAPHS.values()])
PLACES = {"cuda": (2, 1), "hip": (10, 1)}


@pytest.fixture(params=["cuda", "hip"])
def driver(request, fake):
    """The driver of each maker, over the library."""
    return DRIVERS[request.param](fake.path, compiled=False)


@pytest.fixture
def in_use(fake):
    """What the library counts: allocations, pinned memory, streams, events, pools."""
    found = (ctypes.c_int * 5).in_dll(fake.library, "fake_in_use")
    yield found
    gc.collect()  # errors that a test caught are in circles with what raised them
    assert list(found) == [0] * 5


def test_everything_is_given_back(driver, fake, in_use):
    """Tensors, pinned memory, streams and the pool, on the device that was asked for."""
    memory = DeviceMemory(1, driver=driver)
    assert fake.number("fake_pool_device").value == 1
    assert ctypes.c_uint64.in_dll(fake.library, "fake_pool_keeps").value == 2**64 - 1
    values = np.arange(6, dtype="float32").reshape(2, 3)
    pinned = memory.pinned(24)
    with memory.use(memory.new_stream()) as nothing:
        tensor = memory.put(values)
        memory.copy(pinned, tensor)
        assert list(in_use) == [1, 1, 1, 0, 1]
        on = ctypes.c_uint64.in_dll(fake.library, "fake_copied_on").value
        assert on == memory.stream != 0
    assert nothing is None
    memory.fill(tensor, 1)
    assert memory.array(tensor).view("int32").tolist() == [[0x01010101] * 3] * 2
    assert np.frombuffer(pinned.buffer, "float32").tolist() == values.flatten().tolist()
    del tensor, pinned, memory


def test_a_device_without_memory_says_what_it_has(driver, fake, in_use):
    """The pool is trimmed once, and the allocation tried again, before it gives up."""
    memory = DeviceMemory(1, driver=driver)
    trimmed = fake.number("fake_trimmed")
    trimmed.value = 0
    with pytest.raises(OutOfDeviceMemory) as caught:
        memory.allocate("uint8", (1 << 21,))
    facts = caught.value.facts
    assert facts == {"asked": 1 << 21, "free": 1000, "total": 2000, "device": 1}
    assert trimmed.value == 1
    assert memory.allocate("uint8", (1 << 20,)).shape == (1 << 20,)
    assert trimmed.value == 1
    name = next(call for call in fake.calls if "FromPoolAsync" in call)
    fake.fail(name, 2)  # once: what was freed is enough after the trim
    assert memory.allocate("uint8", (1,)).shape == (1,)
    fake.fail(name, 700)
    with pytest.raises(DriverError, match="allocating 1 bytes") as other:
        memory.allocate("uint8", (1,))
    assert not isinstance(other.value, OutOfDeviceMemory)


def test_streams_are_ordered_by_events(driver, fake, in_use):
    """The one records, the other waits; on one stream nobody has to."""
    memory = DeviceMemory(driver=driver, stream=0x77)
    fake.forget()
    memory.pool.order(0x77, 0x77)
    assert fake.calls == []
    with memory.use(0x88):
        pass
    told = [call for call in fake.calls if call.startswith(("record", "order"))]
    assert told == ["record on 77", "order 88", "record on 88", "order 77"]
    memory.synchronize()
    assert fake.calls[-1 if driver.backend == "cuda" else -2] == "wait for 77"


def test_pinned_memory_is_given_back_after_its_copies(driver, fake, in_use):
    """The stream of each is waited for first."""
    memory = DeviceMemory(driver=driver, stream=0x77)
    pinned, tensor = memory.pinned(4), memory.allocate("int8", (4,))
    memory.copy(pinned, tensor)
    with memory.use(0x88):
        memory.copy(tensor, pinned)
    fake.forget()
    del pinned
    assert [call for call in fake.calls if "wait" in call] == ["wait for 77", "wait for 88"]
    assert in_use[1] == 0


def test_dlpack_tells_the_device_and_orders_the_streams(driver, fake, in_use):
    """The reader's stream waits for ours; the default one has another name with CUDA."""
    memory = DeviceMemory(1, driver=driver)
    tensor = memory.allocate("bfloat16", (2, 3))
    fake.forget()
    found = described(tensor.__dlpack__(stream=5))
    assert (found.device, found.dtype, found.address) == (
        PLACES[driver.backend],
        "bfloat16",
        tensor.address,
    )
    told = [call for call in fake.calls if call.startswith(("record", "order"))]
    assert told == [f"record on {1 if driver.backend == 'cuda' else 0}", "order 5"]


def test_a_driver_that_did_not_survive_a_fork_frees_nothing(driver, fake, in_use):
    """Each call says so, and what goes is left alone."""
    memory = DeviceMemory(driver=driver)
    tensor = memory.allocate("int8", (1,))
    driver.lose()
    with pytest.raises(DriverUnavailable, match="forked"):
        memory.allocate("int8", (1,))
    del tensor, memory
    assert list(in_use) == [1, 0, 0, 0, 1]
    for place in (0, 4):
        in_use[place] = 0


def test_a_library_without_pools_is_refused(driver):
    """The functions that it lacks are named."""
    found = driver._library.find
    driver._library.find = lambda name, types=None: None if "TrimTo" in name else found(name, types)
    with pytest.raises(DriverError, match="MemPoolTrimTo"):
        DeviceMemory(driver=driver)


def test_a_graph_is_captured_on_a_stream_of_its_own(driver, fake, in_use):
    """What is allocated meanwhile is allocated on the stream of before, and kept by the graph; what
    the capture made on the way is given back.
    """
    memory = DeviceMemory(driver=driver, stream=0x77)
    graphs, there = memory.graphs(), (ctypes.c_int * 2).in_dll(fake.library, "fake_graphs")
    assert not graphs.is_capturing()
    fake.forget()

    def run():
        assert graphs.is_capturing()
        assert memory.stream != 0x77
        passing = memory.allocate("float32", (200,))
        first = passing.address
        del passing
        result = memory.allocate("float32", (100,))
        assert result.address == first
        return (result, None)

    launch, (result, nothing) = graphs.captured(run)
    assert (memory.stream, nothing, result.shape) == (0x77, None, (100,))
    assert (list(there), list(in_use)) == ([0, 1], [1, 0, 0, 0, 1])
    launch()
    assert "graph on 77" in fake.calls
    del launch
    assert (list(there), in_use[0]) == ([0, 0], 1)
    del result
    assert in_use[0] == 0


def test_what_cannot_be_captured_leaves_nothing(driver, fake, in_use):
    """The capture ends, and the next one works."""
    memory = DeviceMemory(driver=driver)
    graphs, there = memory.graphs(), (ctypes.c_int * 2).in_dll(fake.library, "fake_graphs")
    with pytest.raises(ZeroDivisionError):
        graphs.captured(lambda: memory.allocate("int8", (1 // 0,)))
    fake.fail(driver.pool_calls.graphs["instantiate"][0], 900)
    with pytest.raises(DriverError, match="GraphInstantiateWithFlags failed"):
        graphs.captured(tuple)
    assert list(there) == [0, 0]
    assert not graphs.is_capturing()
    launch, _ = graphs.captured(tuple)
    launch()


def test_a_library_without_graphs_is_refused(driver, fake, in_use):
    """When the first is captured; a pool without them is a pool."""
    found = driver._library.find
    driver._library.find = lambda name, types=None: None if "Graph" in name else found(name, types)
    memory = DeviceMemory(driver=driver)
    with pytest.raises(DriverError, match=r"lacks .*GraphInstantiateWithFlags"):
        memory.graphs().captured(tuple)


def include(maker):
    """The vendor's headers, which Triton brings."""
    triton = importlib.util.find_spec("triton")
    if triton is None:
        pytest.skip("triton is not installed, so there are no headers")
    return Path(triton.origin).parent / "backends" / maker / "include"


@pytest.mark.toolchain
def test_hip_declares_what_pools_call(monkeypatch):
    """Bytes of each argument, by the C compiler."""
    called = dict([*hip_api.POOL.values(), *hip_api.GRAPHS.values()])
    monkeypatch.setattr(hip_api, "SIGNATURES", called)
    rows = {row["what"]: row["ok"] for row in headers.compared(headers.of_headers(include("amd")))}
    assert {rows[name] for name in called} == {True}


@pytest.mark.toolchain
@pytest.mark.parametrize("name", CALLED)
def test_cuda_declares_what_pools_call(name):
    """Bytes of each argument."""
    text = (include("nvidia") / "cuda.h").read_text()
    plain = name.removesuffix("_v2")
    plain = "cuGraphInstantiate" if plain == "cuGraphInstantiateWithFlags" else plain
    if plain != name:
        assert re.search(rf"define {plain} +(__CUDA_API_PTSZ\()?{name}\b", text)
    declared = re.search(rf"CUresult CUDAAPI {plain}\(([^)]*)\)", text)[1]
    wide = (
        "*",
        "CUgraph",
        "long long",
        "CUdeviceptr",
        "CUstream ",
        "CUevent",
        "CUmemoryPool",
        "size_t",
    )
    expected = [
        1 if "unsigned char" in one else 8 if any(word in one for word in wide) else 4
        for one in declared.split(",")
    ]
    assert [ctypes.sizeof(kind) for kind in CALLED[name]] == expected

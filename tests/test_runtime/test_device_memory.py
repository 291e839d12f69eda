# SPDX-License-Identifier: Apache-2.0
"""`DeviceMemory` over a driver whose memory is the host's and is counted: tensors, copies both
ways, streams, other libraries' arrays, and that nothing stays behind.
"""

import gc
import os
import threading

import numpy as np
import pytest

from bundler import CannotLaunchStatically, ConfigError, NotFound, OutOfDeviceMemory
from bundler.runtime import DeviceMemory, DryDriver
from bundler.runtime.program import dlpack
from bundler.runtime.program.device_tensors import DeviceTensor, device_tensor


@pytest.fixture
def driver():
    """A driver with 1 MiB of memory."""
    return DryDriver(memory_bytes=1 << 20)


@pytest.fixture
def memory(driver):
    """Memory of its only device, on a stream of its own."""
    return DeviceMemory(driver=driver, stream=7)


@pytest.fixture
def pool(memory):
    """What counts that memory."""
    return memory.pool


class Stream:
    """A stream of another library."""

    def __init__(self, handle, version=0):
        self.handle, self.version = handle, version

    def __cuda_stream__(self):
        return self.version, self.handle


@pytest.mark.parametrize(
    "values",
    [
        np.arange(12, dtype="float32").reshape(3, 4),
        np.arange(12, dtype="int16").reshape(3, 4).T,
        np.array(3.5),
        np.zeros((0, 4)),
        np.array([True, False]),
        np.array([1 + 2j], "complex64"),
        np.arange(20, dtype="int64")[::3],
    ],
)
def test_what_is_put_comes_back(memory, pool, values):
    """Elements, shape and strides, of a read-only array as well; all is free again after."""
    values.flags.writeable = False
    tensor = memory.put(values)
    found = memory.array(tensor)
    assert (found.dtype, found.shape) == (values.dtype, values.shape)
    np.testing.assert_array_equal(found, values)
    del tensor
    assert pool.live == {}


def test_elements_that_numpy_lacks_are_bytes(memory):
    """bfloat16 goes in as its bits and comes out as bytes; a dtype of another size is refused."""
    bits = np.array([[0x3F80, 0x4000]], "uint16")
    tensor = memory.put(bits, "bfloat16")
    assert (tensor.dtype, tensor.shape) == ("bfloat16", (1, 2))
    assert memory.get(tensor) == bits.tobytes()
    with pytest.raises(ConfigError, match="numpy has no bfloat16"):
        memory.array(tensor)
    with pytest.raises(ConfigError, match="expected elements of 2 bytes"):
        memory.put(bits, "float32")
    for data in (b"\1\2\3\4", bytearray(b"\1\2\3\4"), memoryview(b"\1\2\3\4")):
        assert memory.get(memory.put_bytes(data, "float8_e4m3fn", (2, 2))) == b"\1\2\3\4"
    with pytest.raises(ConfigError, match="expected 8 bytes, got 4"):
        memory.put_bytes(b"\1\2\3\4", "bfloat16", (4,))


@pytest.mark.parametrize("values", [[1, 2], "text", np.arange(4)[::-1], np.array(["a"])])
def test_what_is_no_array_of_the_host_is_refused(memory, pool, values):
    """Lists, texts, what lies backwards, and elements that no kernel takes."""
    with pytest.raises(ConfigError, match="expected"):
        memory.put(values)
    assert pool.live == {}


def test_a_view_keeps_the_memory_and_stays_in_it(memory, pool):
    """Views of views have one allocation; one that is longer is refused."""
    tensor = memory.put(np.arange(6, dtype="float32"))
    view = memory.view(memory.view(tensor, (2, 2), (2, 1), 2), (2,), (2,), 1)
    del tensor
    assert memory.array(view).tolist() == [3.0, 5.0]
    assert len(pool.live) == 1
    for sizes, strides, offset in (((4,), (2,), 0), ((1,), (1,), 3), ((1,), (1,), -1)):
        with pytest.raises(ConfigError, match="expected at most the 3 elements"):
            memory.view(view, sizes, strides, offset)
    del view
    assert pool.live == {}


def test_too_much_memory_says_how_much(memory):
    """What was asked, what is free, and what there is, as an error that is a MemoryError, too."""
    held = memory.allocate("uint8", (1000,))
    with pytest.raises(OutOfDeviceMemory, match="asked for 1048576 bytes") as caught:
        memory.allocate("float32", (1 << 18,))
    assert isinstance(caught.value, MemoryError)
    found = (caught.value.asked, caught.value.free, caught.value.total, caught.value.device)
    assert found == (1 << 20, (1 << 20) - 1000, 1 << 20, 0)
    del held
    assert memory.allocate("float32", (1 << 18,)).shape == (1 << 18,)


@pytest.mark.parametrize(
    ("dtype", "sizes", "strides"),
    [("float33", (1,), None), ("int8", (-1,), None), ("int8", (2, 2), (1,)), ("int8", (2,), (-1,))],
)
def test_a_tensor_that_cannot_be_is_refused(memory, dtype, sizes, strides):
    """No such dtype, sizes below 0, other strides than sizes."""
    with pytest.raises(ConfigError, match="expected a dtype of torch"):
        memory.allocate(dtype, sizes, strides)


def test_copies_of_pinned_memory_go_both_ways(memory, pool):
    """In the order of a stream, without a wait; sizes have to agree; the buffer keeps the
    memory.
    """
    pinned, back = memory.pinned(16), memory.pinned(16)
    np.frombuffer(pinned.buffer, "float32")[:] = [1, 2, 3, 4]
    tensor = memory.allocate("float32", (2, 2))
    memory.copy(tensor, pinned)
    memory.copy(back, tensor)
    memory.synchronize()
    values = np.frombuffer(back.buffer, "float32")
    with pytest.raises(ConfigError, match="a copy to 16 bytes: expected as many, got 8"):
        memory.copy(pinned, memory.allocate("float32", (2,)))
    del pinned, back
    gc.collect()
    assert values.tolist() == [1, 2, 3, 4]
    assert len(pool.pinned) == 1
    del values
    assert pool.pinned == {}


def test_bytes_are_set_and_copied(memory):
    """`fill`, `integers`, and `copied` of a tensor as it lies; another layout needs a kernel."""
    tensor = memory.integers([1, -(2**63)])
    copy = memory.copied(tensor, (2,), (1,))
    memory.fill(tensor)
    assert memory.array(tensor).tolist() == [0, 0]
    assert memory.array(copy).tolist() == [1, -(2**63)]
    with pytest.raises(ConfigError, match="strides"):
        memory.copied(tensor, (1, 2), (2, 1))
    with pytest.raises(ConfigError, match="got ndarray"):
        memory.copied(np.ones(2), (2,), (1,))


def test_operators_are_refused(memory):
    """There is no torch, and the error says what to pass."""
    with pytest.raises(NotFound, match=r"aten\.mm\.default.*TorchMemory"):
        memory.call("aten.mm.default", [], {})


# ---------------------------------------------------------------------------------------- Streams


def test_streams_of_others_come_after_and_before_ours(driver):
    """By number or by protocol: what was done comes first, what is done after comes last."""
    driver.handle = 3
    memory = DeviceMemory(driver=driver)
    assert (memory.stream, memory.driver.stream(0)) == (3, 3)
    with memory.use(Stream(5)):
        assert (memory.stream, memory.driver.stream(0)) == (5, 5)
        with memory.use(9):
            assert memory.stream == 9
    assert memory.pool.waits == [(3, 5), (5, 9), (9, 5), (5, 3)]
    assert memory.stream == 3


def test_a_stream_lives_as_long_as_memory_of_it(memory, pool):
    """Its handle is the protocol's; memory that is freed on it keeps it."""
    stream = memory.new_stream()
    assert stream.__cuda_stream__() == (0, stream.handle)
    with memory.use(stream):
        tensor, pinned = memory.allocate("int8", (4,)), memory.pinned(4)
        memory.copy(pinned, tensor)
    del stream
    assert len(pool.streams) == 1
    del tensor
    assert len(pool.streams) == 1
    del pinned
    assert pool.streams == set()


def test_memory_that_was_used_on_two_streams_is_freed_after_both(memory, pool):
    """The stream that it was allocated on waits for the one that is current when it goes."""
    tensor = memory.allocate("int8", (4,))
    with memory.use(11):
        pool.waits.clear()
        del tensor
        assert pool.waits == [(11, 7)]
    assert pool.live == {}


def test_each_thread_has_its_own_stream(memory):
    """What one uses is not the other's."""
    found = []
    with memory.use(11):
        thread = threading.Thread(target=lambda: found.append(memory.stream))
        thread.start()
        thread.join()
    assert found == [7]


@pytest.mark.parametrize("stream", ["7", -1, True, None, Stream(1, version=1)])
def test_what_is_no_stream_is_refused(driver, stream):
    """Texts, numbers below 0, and another version of the protocol."""
    memory = DeviceMemory(driver=driver)
    with pytest.raises(ConfigError, match="stream"), memory.use(stream):
        pass
    assert memory.pool.waits == []


# ------------------------------------------------------------------------------- Other libraries


def test_numpy_reads_our_memory_by_dlpack(memory, pool):
    """The same memory, which lives as long as the array."""
    tensor = memory.put(np.arange(6, dtype="float32").reshape(2, 3).T)
    array = np.from_dlpack(tensor)
    assert array.tolist() == [[0, 3], [1, 4], [2, 5]]
    assert array.__array_interface__["data"][0] == tensor.address
    del tensor
    assert len(pool.live) == 1
    del array
    assert pool.live == {}


def test_a_capsule_that_nobody_takes_frees_the_memory(memory, pool):
    """So does one whose tensor has no library for its elements."""
    capsule = memory.allocate("float8_e5m2", (3,)).__dlpack__()
    assert dlpack.described(capsule).dtype == "float8_e5m2"
    assert len(pool.live) == 1
    del capsule
    assert pool.live == {}


@pytest.mark.parametrize(
    "dtype", ["float32", "bfloat16", "float16", "bool", "int8", "uint8", "int64", "complex64"]
)
def test_torch_reads_and_gives_memory_by_dlpack(memory, pool, dtype):
    """Both ways, without a copy; a tensor with a gradient is given without it."""
    torch = pytest.importorskip("torch")
    tensor = memory.allocate(dtype, (2, 3), (1, 2))
    memory.fill(tensor)
    theirs = torch.from_dlpack(tensor)
    assert (theirs.dtype, theirs.stride()) == (getattr(torch, dtype), (1, 2))
    assert (theirs.data_ptr(), int(theirs.count_nonzero())) == (tensor.address, 0)
    if theirs.is_floating_point():
        theirs.requires_grad_()
    back = memory.tensor(theirs)
    assert (back.address, back.dtype, back.strides) == (tensor.address, dtype, (1, 2))
    del tensor, theirs
    assert len(pool.live) == 1
    del back
    assert pool.live == {}


def test_memory_that_came_by_its_address_is_not_passed_on(memory):
    """Nobody knows its device; a copy, or another device, is not what `__dlpack__` gives."""
    with pytest.raises(BufferError, match="by its address"):
        DeviceTensor(16, "int8", (1,), (1,)).__dlpack__()
    tensor = memory.allocate("int8", (1,))
    for wanted in ({"copy": True}, {"dl_device": (2, 0)}):
        with pytest.raises(BufferError, match="not copied"):
            tensor.__dlpack__(**wanted)
    assert not hasattr(tensor, "__cuda_array_interface__")  # it is the host's


class Array:
    """An array of a library for GPUs, with an interface and the stream that it is written on."""

    def __init__(self, device=(2, 0), stream=5):
        self.device = device
        self.__cuda_array_interface__ = {
            "shape": (2,),
            "typestr": "<f4",
            "data": (0xD00, False),
            "version": 3,
            "stream": stream,
        }


def test_arrays_of_others_are_taken_in_the_order_of_their_stream(memory, pool):
    """The stream that the interface names comes first; none means that nobody has to wait."""
    found = memory.tensor(Array())
    assert (found.address, found.shape, found.memory) == (0xD00, (2,), memory)
    assert pool.waits == [(5, 7)]
    memory.tensor(Array(stream=None))
    assert pool.waits == [(5, 7)]
    assert memory.tensor(found) is found
    with pytest.raises(CannotLaunchStatically, match="got list"):
        memory.tensor([1])


def test_memory_of_another_device_is_refused(memory):
    """By what DLPack says of it."""

    class Elsewhere:
        def __dlpack_device__(self):
            return 2, 1

        def __dlpack__(self, **_):
            raise AssertionError

    with pytest.raises(CannotLaunchStatically, match=r"expected it on.*got \(2, 1\)"):
        memory.tensor(Elsewhere())


def test_an_array_of_ours_says_its_stream():
    """A default stream has the number 1 there; memory of a GPU alone has the interface."""
    memory = DeviceMemory(driver=DryDriver())
    tensor = memory.allocate("float32", (2, 3))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(memory.pool), "place", (2, 0))
        assert tensor.__cuda_array_interface__["stream"] == 1
        assert tensor.__dlpack_device__() == (2, 0)
        with memory.use(9):
            assert tensor.__cuda_array_interface__["stream"] == 9
            taken = device_tensor(tensor)
            assert taken is tensor
            memory.pool.waits.clear()
            tensor.__dlpack__(stream=4)
            tensor.__dlpack__()
            tensor.__dlpack__(stream=-1)
            assert memory.pool.waits == [(9, 4), (9, 1)]


# ------------------------------------------------------------------------------------------ Leaks


def test_nothing_stays_behind(driver):
    """After 10,000 rounds of all of it, without the collector: no memory, stream or pool."""
    memory = DeviceMemory(driver=driver)
    (pool,) = driver.pools
    values = np.ones((4, 4), "float32")
    gc.disable()
    try:
        for _ in range(10_000):
            with memory.use(memory.new_stream()):
                tensor = memory.put(values)
                np.from_dlpack(memory.view(tensor, (2,), (1,), 3))
                memory.copy(memory.pinned(64), memory.tensor(tensor))
            pool.waits.clear()
        del tensor
        assert (pool.live, pool.pinned, pool.streams) == ({}, {}, set())
        assert pool.allocations == 10_000
        assert pool.is_open
        del memory
        assert not pool.is_open
    finally:
        gc.enable()


def test_a_forked_child_frees_nothing(memory, pool):
    """What it has is its parent's, and no error is printed."""
    tensor, pinned, stream = memory.allocate("int8", (4,)), memory.pinned(4), memory.new_stream()
    child = os.fork()
    if not child:
        held = dict(pool.live)
        del tensor
        os._exit(0 if pool.live == held else 1)
    assert os.waitpid(child, 0)[1] == 0
    del pinned, stream, tensor
    assert (pool.live, pool.pinned, pool.streams) == ({}, {}, set())


@pytest.mark.parametrize(("backend", "default"), [((2, 0), 1), ((10, 0), 0)])
def test_a_library_is_told_on_which_stream_its_tensor_is_read(backend, default):
    """So that its work comes first; the default stream has another name with CUDA."""
    memory = DeviceMemory(driver=DryDriver())
    told = []

    class Theirs:
        def __dlpack_device__(self):
            return backend

        def __dlpack__(self, *, stream):
            told.append(stream)
            return held.__dlpack__(stream=-1)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(memory.pool), "place", backend)
        held = memory.allocate("float32", (2,))
        assert memory.tensor(Theirs()).address == held.address
        with memory.use(9):
            memory.tensor(Theirs())
    assert told == [default, 9]


def test_a_tensor_of_another_device_is_refused(driver, memory):
    """Which an address alone does not say: the driver is asked."""
    values = np.arange(4, dtype="float32")
    driver.host_addresses.add(values.ctypes.data)
    with pytest.raises(CannotLaunchStatically, match="on device 0, got one in host memory"):
        memory.tensor(values)


def test_dtypes_of_tensors_are_the_same_objects(memory):
    """The compiled dispatcher tells them apart by their addresses."""
    spelled = str(b"float32", "ascii")
    one, other = memory.allocate("float32", (2,)), memory.allocate(spelled, (2,))
    assert one.dtype is other.dtype
    assert memory.view(other, (1,), (1,), 0).dtype is one.dtype
    assert (one.get_device(), other.dtype is spelled) == (0, False)

# SPDX-License-Identifier: Apache-2.0
"""`DeviceMemory`: memory of a GPU without torch, as programs and their callers need it: tensors,
copies from and to the host, streams, and tensors of other libraries.

    memory = bundler.runtime.DeviceMemory()
    x = memory.put(numpy.ones((128, 512), "float32"))
    (result,) = bundler.runtime.load_program("model.tbundle", memory=memory)(x, weight)
    memory.array(result)

It is a `ProgramMemory` over the `MemoryPool` of a driver.  numpy is needed by `array` alone, other
libraries of arrays for nothing: their arrays come and go by DLPack and by
`__cuda_array_interface__`.
"""

from __future__ import annotations

import ctypes
import importlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from bundler.errors import CannotLaunchStatically, ConfigError, DriverUnavailable, NotFound
from bundler.runtime.launch.drivers.driver import Driver, MemoryPool
from bundler.runtime.launch.drivers.driver_opening import open_first_driver
from bundler.runtime.program import dlpack
from bundler.runtime.program.device_tensors import (
    ARRAY_NAMES,
    DTYPES,
    LEGACY_STREAM,
    DeviceTensor,
    PlacedTensor,
    array_tensor,
    contiguous,
    device_tensor,
    item_bytes,
    span,
)
from bundler.runtime.program.driver_graphs import DriverGraphs

_INT64_BYTES = 8
# What is passed to `__dlpack__` so that nobody waits for anybody.
_NO_ORDER = -1


class DeviceStream:
    """A stream of a `DeviceMemory`; other libraries take it by `__cuda_stream__`.

    It is forgotten when nobody has it any more, nor memory that was allocated on it.
    """

    def __init__(self, pool: MemoryPool) -> None:
        self._pool = pool
        #: The driver's number of it.
        self.handle = pool.new_stream()

    def __cuda_stream__(self) -> tuple[int, int]:
        """Return the version of the protocol, and the handle."""
        return 0, self.handle

    def __repr__(self) -> str:
        return f"<stream {self.handle:#x}>"

    def synchronize(self) -> None:
        """Wait until all that it was given is done."""
        self._pool.synchronize(self.handle)

    def __del__(self) -> None:
        if hasattr(self, "handle"):
            _unless_forked(self._pool.drop_stream, self.handle)


class PinnedMemory:
    """Memory of the host that a GPU reads and writes by itself, so that copies wait for nobody.

    `DeviceMemory.pinned` makes it.  `buffer` is its bytes; numpy.frombuffer makes an array of it.
    """

    def __init__(self, pool: MemoryPool, size_bytes: int) -> None:
        self._pool, self.size_bytes = pool, size_bytes
        self.address = pool.pin(max(size_bytes, 1))
        # Streams with copies that may still run.
        self._used_on: dict[int, Any] = {}

    @property
    def buffer(self) -> memoryview:
        """The bytes, which keep the memory; of a copy that runs, wait for its stream first."""
        there = (ctypes.c_ubyte * self.size_bytes).from_address(self.address)
        there.owner = self  # type: ignore[attr-defined]  # such an array has attributes
        return memoryview(there).cast("B")

    def used_on(self, stream: int, kept_by: Any) -> None:
        """Note that a stream copies from here or to here, and what keeps the stream."""
        self._used_on[stream] = kept_by

    def __del__(self) -> None:
        if hasattr(self, "_used_on"):
            _unless_forked(self._given_back)

    def _given_back(self) -> None:
        for stream in self._used_on:
            self._pool.synchronize(stream)
        self._pool.unpin(self.address)


class _Allocation:
    """Memory that is freed when no tensor has it any more."""

    __slots__ = ("_address", "_kept", "_memory", "_stream", "arena", "size_bytes")

    def __init__(self, memory: DeviceMemory, size_bytes: int, arena: Any = None) -> None:
        self._memory, self.size_bytes = memory, max(size_bytes, 1)
        #: Of the graph that is captured in this thread, where one is.
        self.arena = arena
        if self.arena is not None:
            self._address = self.arena.allocate(self.size_bytes)
            return
        # A stream is kept as long as memory that is to be freed on it.
        self._stream, self._kept = memory.current
        self._address = memory.pool.allocate(self.size_bytes, self._stream)

    @property
    def address(self) -> int:
        found: int = self._address
        return found

    def __del__(self) -> None:
        if hasattr(self, "_address"):
            _unless_forked(self._free)

    def _free(self) -> None:
        if self.arena is not None:
            self.arena.free(self._address)
            return
        pool = self._memory.pool
        # It may have been used on the stream that is current now, too.
        pool.order(self._memory.stream, self._stream)
        pool.free(self._address, self._stream)


def _unless_forked(release: Any, *arguments: Any) -> None:
    """Give something back, but not in a forked child: what it has is its parent's."""
    try:
        release(*arguments)
    except DriverUnavailable:
        return


class _Streams(threading.local):
    """The streams of a memory, of which each thread has its own current one.

    Args:
        chosen: a handle, and what keeps the stream; None for the driver's current one.
        ask: returns the driver's.
    """

    def __init__(self, chosen: tuple[int, Any] | None, ask: Callable[[], int]) -> None:
        self._chosen, self._ask = chosen, ask
        #: Those that are used now, the last one first of all.
        self.used: list[tuple[int, Any]] = []
        #: What memory comes from while a graph is captured.
        self.arena: Any = None

    @contextmanager
    def captured(self, stream: DeviceStream, arena: Any) -> Iterator[None]:
        """Work on a stream that is captured, with memory of its graph; nobody waits for anybody."""
        self.used.append((stream.handle, stream))
        self.arena = arena
        try:
            yield
        finally:
            self.arena = None
            self.used.pop()

    def current(self) -> tuple[int, Any]:
        """Return the handle of the current stream, and what keeps it."""
        if self.used:
            return self.used[-1]
        return self._chosen or (self._ask(), None)


class DeviceMemory:
    """Memory of one GPU.

    Guarantees: memory of a tensor is free again when nobody has the tensor or a view of it, in the
    order of the stream that it was allocated on and of the one that is then current; what was freed
    is kept for what comes, in a pool that no other library shares.  A view is never longer than its
    tensor.  No guarantee for a tensor that is read on a third stream: let that one be waited for
    before the tensor is dropped, as with torch.

    Any thread may use it; each has its own current stream.  A forked child cannot.

    Args:
        device: number of the GPU.
        driver: of its maker; None opens CUDA's, or else HIP's.
        stream: on which it works; None for torch's current stream where torch uses the GPU, else
            the default stream, which other libraries work on, too.  A handle, or what has
            `__cuda_stream__`, as streams of cuda.core and CuPy.

    Raises:
        DriverUnavailable: there is no driver and no GPU.
        ConfigError: the stream is none.
    """

    def __init__(
        self, device: int = 0, *, driver: Driver | None = None, stream: Any = None
    ) -> None:
        self._inner = driver or open_first_driver(("cuda", "hip"))
        #: Number of the GPU.
        self.device_number = device
        chosen = None if stream is None else (_handle(stream), stream)
        self._streams = _Streams(chosen, partial(self._inner.stream, device))
        #: What it allocates from.
        self.pool = self._inner.pool(device)
        #: What launches on its device and on its current stream: `load(..., driver=)` takes it.
        self.driver: Any = _DriverOnStream(self._inner, device, self._streams)
        #: Whether its tensors are the host's, as with a `DryDriver`.
        self.host = self.pool.place[0] == dlpack.HOST

    def __repr__(self) -> str:
        return f"<memory of {self._inner.backend} device {self.device_number}>"

    def __del__(self) -> None:
        if hasattr(self, "host"):
            _unless_forked(self.pool.close)

    # ------------------------------------------------------------------------------------- Streams

    @property
    def stream(self) -> int:
        """Handle of the stream that this thread's work goes to."""
        return self.current[0]

    @property
    def current(self) -> tuple[int, Any]:
        """That handle, and what keeps the stream."""
        return self._streams.current()

    def new_stream(self) -> DeviceStream:
        """Return a stream, which waits for no other one."""
        return DeviceStream(self.pool)

    @contextmanager
    def use(self, stream: Any) -> Iterator[None]:
        """Work on a stream in this thread, of any library: as cuda.core's or CuPy's current one.

        What was done before on the memory's stream comes first, and what is done after the context
        comes last.

        Args:
            stream: a handle, or what has `__cuda_stream__`.

        Raises:
            ConfigError: it is neither.
        """
        given = _handle(stream)
        self.pool.order(self.stream, given)
        self._streams.used.append((given, stream))
        try:
            yield
        finally:
            self._streams.used.pop()
            self.pool.order(given, self.stream)

    @property
    def workspaces(self) -> DeviceMemory:
        """The memory that buffers of a program are of, which lie in one allocation a call."""
        return self

    def graphs(self) -> Any:
        """Return what captures graphs, for a `GraphRunner`."""
        return DriverGraphs(self, self._streams)

    def info(self) -> tuple[int, int]:
        """Return how many bytes of the device are free, and how many it has; what this memory keeps
        for what comes is not free.
        """
        return self.pool.info()

    def synchronize(self) -> None:
        """Wait until all work of the current stream is done."""
        self.pool.synchronize(self.stream)

    # ------------------------------------------------------------------------------------- Tensors

    def allocate(
        self, dtype: str, sizes: tuple[int, ...], strides: tuple[int, ...] | None = None
    ) -> DeviceTensor:
        """Return a new tensor, whose elements may be anything.

        Args:
            dtype: as torch names it.
            sizes, strides: in elements; no strides for a tensor that lies row by row.

        Raises:
            OutOfDeviceMemory: there is not so much; `asked`, `free` and `total` say more.
            ConfigError: sizes or strides are negative, or there is no such dtype.
        """
        sizes = tuple(sizes)
        strides = contiguous(sizes) if strides is None else tuple(strides)
        if dtype not in DTYPES or len(sizes) != len(strides) or min((0, *sizes, *strides)) < 0:
            raise ConfigError(
                f"a tensor of {dtype}, sizes {sizes}, strides {strides}: expected a dtype of torch,"
                " and as many strides as sizes, from 0",
                got=(dtype, sizes, strides),
            )
        size_bytes = span(sizes, strides) * item_bytes(dtype)
        made = _Allocation(self, size_bytes, self._streams.arena)
        return PlacedTensor(made.address, dtype, sizes, strides, made, self)

    def view(
        self, tensor: Any, sizes: tuple[int, ...], strides: tuple[int, ...], offset: int
    ) -> DeviceTensor:
        """Return a tensor's memory seen in another way; the offset counts in elements.

        Raises:
            ConfigError: not all of it is the tensor's.
        """
        held, reach = span(tensor.shape, tensor.strides), span(sizes, strides)
        if min(offset, 0, *sizes, *strides) < 0 or (reach and offset + reach > held):
            raise ConfigError(
                f"a view of sizes {sizes}, strides {strides}, offset {offset}: expected at most the"
                f" {held} elements of its tensor",
                got=offset + reach,
            )
        address = tensor.data_ptr() + offset * item_bytes(tensor.dtype)
        owner = tensor if tensor.owner is None else tensor.owner
        kind = PlacedTensor if tensor.memory is self else DeviceTensor
        return kind(address, tensor.dtype, tuple(sizes), tuple(strides), owner, tensor.memory)

    def copied(
        self, tensor: DeviceTensor, sizes: Sequence[int], strides: Sequence[int]
    ) -> DeviceTensor:
        """Return a tensor's elements in new memory.

        Raises:
            ConfigError: with other strides than the tensor's, which needs a kernel, or of no
                device's tensor.
        """
        if not isinstance(tensor, DeviceTensor):
            raise ConfigError(
                f"a copy: expected a tensor of a device, got {type(tensor).__name__}; use"
                " TorchMemory",
                got=type(tensor).__name__,
            )
        if (tuple(sizes), tuple(strides)) != (tensor.shape, tensor.strides):
            raise ConfigError(
                f"a copy of sizes {tensor.shape}, strides {tensor.strides}: expected these, got"
                f" sizes {tuple(sizes)}, strides {tuple(strides)}; use TorchMemory",
                got=tuple(strides),
            )
        made = self.allocate(tensor.dtype, tensor.shape, tensor.strides)
        self.copy(made, tensor)
        return made

    def integers(self, numbers: Sequence[int]) -> DeviceTensor:
        """Return a new int64 tensor that holds these numbers, as the seeds of a program."""
        made = self.allocate("int64", (len(numbers),))
        source = (ctypes.c_int64 * len(numbers))(*numbers)
        self._copy(made.address, ctypes.addressof(source), _INT64_BYTES * len(numbers))
        return made

    def counters(self, count: int) -> DeviceTensor:
        """Return a new int32 tensor of zeros, for programs of a launch that wait for each other."""
        made = self.allocate("int32", (count,))
        self.fill(made)
        return made

    def fill(self, tensor: DeviceTensor, byte: int = 0) -> None:
        """Set every byte that a tensor spans."""
        self.pool.fill(tensor.address, byte, tensor.ptr_range(), self.stream)

    def operator(self, name: str) -> Any:
        """Refuse: there is no torch that could call it.

        Raises:
            NotFound: in any case.
        """
        raise NotFound(
            f"operator {name}: the program calls it by torch, which DeviceMemory does without; pass"
            " memory=bundler.toolchain.torch_memory.TorchMemory('cuda') where torch is",
            name=name,
        )

    def call(self, operator: str, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> Any:
        """Refuse as `operator` does."""
        return self.operator(operator)

    # -------------------------------------------------------------------------------------- Copies

    def put(self, values: Any, dtype: str | None = None) -> DeviceTensor:
        """Copy an array of the host, which may be changed when this returns.

        Args:
            values: of numpy, or of a library that has DLPack, as torch's on the CPU.
            dtype: as torch names it, where the array has only its bits, as bfloat16 in uint16.

        Raises:
            ConfigError: no array of the host, negative strides, or elements of another size.
            OutOfDeviceMemory: there is not so much.
        """
        host = _host_array(values, dtype)
        made = self.allocate(host.dtype, host.shape, host.strides)
        self._copy(made.address, host.address, host.ptr_range())
        self.synchronize()
        return made

    def put_bytes(self, data: Any, dtype: str, sizes: tuple[int, ...]) -> DeviceTensor:
        """Copy the bytes of a tensor that lies row by row, from anything with a buffer.

        Raises:
            ConfigError: there are more or fewer bytes.
            OutOfDeviceMemory: there is not so much.
        """
        made = self.allocate(dtype, sizes)
        view = memoryview(data).cast("B")
        if len(view) != made.ptr_range():
            raise ConfigError(
                f"{dtype}{list(sizes)}: expected {made.ptr_range()} bytes, got {len(view)}",
                expected=made.ptr_range(),
                got=len(view),
            )
        kind = ctypes.c_char * len(view)
        there = kind.from_buffer_copy(view) if view.readonly else kind.from_buffer(view)
        self._copy(made.address, ctypes.addressof(there), len(view))
        self.synchronize()
        return made

    def get(self, tensor: DeviceTensor) -> bytearray:
        """Return the bytes that a tensor spans, when all work so far is done."""
        found = bytearray(tensor.ptr_range())
        if found:
            there = (ctypes.c_char * len(found)).from_buffer(found)
            self._copy(ctypes.addressof(there), tensor.address, len(found))
            self.synchronize()
        return found

    def array(self, tensor: DeviceTensor) -> Any:
        """Return a tensor as an array of numpy, when all work so far is done.

        Raises:
            ConfigError: numpy is not installed, or has no such elements, as bfloat16.
        """
        name = ARRAY_NAMES.get(tensor.dtype)
        if name is None:
            raise ConfigError(
                f"numpy has no {tensor.dtype}: take the bytes by `get`", got=tensor.dtype
            )
        try:
            numpy: Any = importlib.import_module("numpy")
        except ImportError as error:
            raise ConfigError(
                f"an array of numpy was asked for, and numpy cannot be imported: {error}"
            ) from error
        flat = numpy.frombuffer(self.get(tensor), name)
        if not flat.size:
            return numpy.empty(tensor.shape, name)
        steps = [stride * flat.itemsize for stride in tensor.strides]
        return numpy.lib.stride_tricks.as_strided(flat, tensor.shape, steps)

    def pinned(self, size_bytes: int) -> PinnedMemory:
        """Return memory of the host for copies that wait for nobody."""
        return PinnedMemory(self.pool, size_bytes)

    def copy(
        self, target: DeviceTensor | PinnedMemory, source: DeviceTensor | PinnedMemory
    ) -> None:
        """Copy all bytes in the order of the current stream, and return at once.

        Raises:
            ConfigError: one has more bytes than the other.
        """
        sizes = [_size_bytes(one) for one in (target, source)]
        if sizes[0] != sizes[1]:
            raise ConfigError(
                f"a copy to {sizes[0]} bytes: expected as many, got {sizes[1]}",
                expected=sizes[0],
                got=sizes[1],
            )
        for one in (target, source):
            if isinstance(one, PinnedMemory):
                one.used_on(*self.current)
        self._copy(target.address, source.address, sizes[0])

    def _copy(self, target: int, source: int, size_bytes: int) -> None:
        if size_bytes:
            self.pool.copy(target, source, size_bytes, self.stream)

    # --------------------------------------------------------------------------- Other libraries

    @property
    def place(self) -> tuple[int, int]:
        """The kind and the number of the device, as DLPack has them."""
        return self.pool.place

    def tensor(self, value: Any) -> DeviceTensor:
        """Return a tensor of another library as ours: the same memory; its work comes before ours.

        Args:
            value: with `__dlpack__` or `__cuda_array_interface__`, as those of CuPy, torch, numba.

        Raises:
            CannotLaunchStatically: it is no such tensor, on another device, or of elements that no
                kernel takes.
        """
        if isinstance(value, DeviceTensor):
            return value
        if getattr(value, "requires_grad", False):
            value = value.detach()  # torch passes on no other
        if hasattr(value, "__dlpack_device__"):
            kind, number = map(int, value.__dlpack_device__())
            if kind in {dlpack.CUDA, dlpack.ROCM} and (kind, number) != self.place:
                raise CannotLaunchStatically(
                    f"a tensor of {type(value).__name__}: expected it on DLPack's device"
                    f" {self.place}, got {(kind, number)}; copy it there first",
                    expected=self.place,
                    got=(kind, number),
                )
            order = {"stream": self._number_for_others()} if kind in dlpack.DEVICES else {}
            found = device_tensor(_OnlyDlpack(value), host=self.host, **order)
        else:
            found = device_tensor(value, host=self.host)
            described = getattr(value, "__cuda_array_interface__", {})
            if described.get("stream") is not None:
                self.pool.order(int(described["stream"]), self.stream)
        if not isinstance(found, DeviceTensor):
            raise CannotLaunchStatically(
                f"a tensor of {type(value).__name__}: expected __dlpack__ or"
                " __cuda_array_interface__",
                got=type(value).__name__,
            )
        self._check_device(type(value).__name__, found.address)
        return PlacedTensor(
            found.address, found.dtype, found.shape, found.strides, found.owner, self
        )

    def _check_device(self, kind: str, address: int) -> None:
        where = self._inner.pointer_device(address) if address else self.device_number
        if where != self.device_number:
            there = "host memory" if where is None else f"device {where}"
            raise CannotLaunchStatically(
                f"a tensor of {kind}: expected it on device {self.device_number}, got one in"
                f" {there}; copy it there first",
                expected=self.device_number,
                got=where,
            )

    def order_before(self, stream: int | None) -> None:
        """Let a stream of another library, as DLPack numbers them, wait for what was launched."""
        if self.place[0] == dlpack.HOST:
            self.synchronize()
        elif stream != _NO_ORDER:
            default = LEGACY_STREAM if self.place[0] == dlpack.CUDA else 0
            self.pool.order(self._number_for_others(), default if stream is None else stream)

    def _number_for_others(self) -> int:
        """Return the current stream as DLPack numbers it: CUDA's default one has another number."""
        return self.stream or (LEGACY_STREAM if self.place[0] == dlpack.CUDA else 0)


class _OnlyDlpack:
    """A tensor without what else it has: torch's would be passed as they are."""

    def __init__(self, value: Any) -> None:
        self.__dlpack__ = value.__dlpack__


def _handle(stream: Any) -> int:
    """Return the handle of a stream of any library."""
    asked = getattr(stream, "__cuda_stream__", None)
    if asked is not None:
        version, found = asked() if callable(asked) else asked
        if version != 0:
            raise ConfigError(
                f"a stream of {type(stream).__name__}: expected version 0 of the protocol"
                f" __cuda_stream__, got {version!r}",
                got=version,
            )
        return int(found)
    if type(stream) is not int or stream < 0:
        raise ConfigError(
            f"a stream: expected a handle, or what has __cuda_stream__, got {stream!r:.80}",
            got=repr(stream)[:80],
        )
    return stream


def _host_array(values: Any, dtype: str | None) -> DeviceTensor:
    """Return where an array of the host lies, which the tensor keeps."""
    described = getattr(values, "__array_interface__", None)
    found: DeviceTensor
    try:
        if described is None:
            found = device_tensor(_OnlyDlpack(values), host=True)
        else:
            typed = described["typestr"]
            if dtype is not None and typed[0] != ">":
                typed = f"|u{typed[2:]}"  # numpy need not know the elements
            found = array_tensor(values, {**described, "typestr": typed})
    except (AttributeError, CannotLaunchStatically) as error:
        raise ConfigError(
            f"values to copy to a device: expected an array of the host, got"
            f" {type(values).__name__}: {error}",
            got=type(values).__name__,
        ) from error
    if min((0, *found.strides)) < 0:
        raise ConfigError(
            f"an array with strides {found.strides}: expected none below 0; pass a copy",
            got=found.strides,
        )
    if dtype is None:
        return found
    if dtype not in DTYPES or item_bytes(dtype) != item_bytes(found.dtype):
        raise ConfigError(
            f"dtype={dtype!r}: expected elements of {item_bytes(found.dtype)} bytes, as the array"
            " has them",
            got=dtype,
        )
    return DeviceTensor(found.address, dtype, found.shape, found.strides, found.owner)


def _size_bytes(one: DeviceTensor | PinnedMemory) -> int:
    return one.size_bytes if isinstance(one, PinnedMemory) else one.ptr_range()


class _DriverOnStream:
    """A driver whose current device and stream are those of a `DeviceMemory`."""

    def __init__(self, driver: Driver, device: int, streams: _Streams) -> None:
        self._driver, self._device, self._streams = driver, device, streams

    def __getattr__(self, name: str) -> Any:
        return getattr(self._driver, name)

    def device(self) -> int:
        """Return the memory's device."""
        return self._device

    def stream(self, device: int) -> int:
        """Return the memory's current stream."""
        return self._streams.current()[0]

# SPDX-License-Identifier: Apache-2.0
"""The compiled dispatcher reads torch's tensors by what torch has for C, and launches what their
own methods would have told it.

That is a table of DLPack's, or functions that are quicker, where Python found them; each test runs
with both.
"""

import ctypes
import struct
import sys
import types

import pytest

from bundler.errors import CannotLaunchStatically, NotFound
from bundler.runtime import load
from bundler.runtime.launch import compiled_dispatch
from bundler.runtime.launch.drivers import launchers
from bundler.runtime.launch.drivers.cuda import CudaDriver

ON_HOST, ON_CUDA, STREAM = 1, 2, 0x57
FIRST, SECOND = 0xD00000, 0xE00000  # on device 0, and on device 1
CODES = {"float32": (2, 32), "float16": (2, 16)}
DTYPES = {"float32": 6, "float16": 5}  # as torch numbers them for the functions
GRID = (4,)


class Found(ctypes.Structure):
    """DLTensor."""

    _fields_ = (
        ("data", ctypes.c_uint64),
        ("device_type", ctypes.c_int32),
        ("device", ctypes.c_int32),
        ("dimensions", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
    )


READ = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.POINTER(Found))
TELL = ctypes.PYFUNCTYPE(
    ctypes.c_int, ctypes.POINTER(ctypes.py_object), ctypes.POINTER(ctypes.c_int32)
)
TELL_ADDRESS = ctypes.PYFUNCTYPE(
    ctypes.c_int, ctypes.POINTER(ctypes.py_object), ctypes.POINTER(ctypes.c_uint64)
)
ASK = ctypes.PYFUNCTYPE(
    ctypes.c_int, ctypes.c_int32, ctypes.c_int32, ctypes.POINTER(ctypes.c_uint64)
)


class Table(ctypes.Structure):
    """DLPackExchangeAPI."""

    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("older", ctypes.c_void_p),
        ("others", ctypes.c_void_p * 3),
        ("read", READ),
        ("stream", ASK),
    )


class Handle:
    """Has what torch's objects have: behind the object's head, the place of what the functions tell
    of.
    """

    __slots__ = ("handle",)


class Tensor:
    """A tensor that notes by which way it was read."""

    def __init__(self, address=FIRST, dtype="float32", place=ON_CUDA):
        self.address, self.dtype, self.place, self.asked = address, dtype, place, []
        device = max(self.get_device(), 0)
        self.handle = {
            "asked": self.asked,
            "address": address,
            "device": device,
            "type": place - 1,
            "dtype": DTYPES.get(dtype, 99),
        }

    def data_ptr(self):
        self.asked.append("method")
        return self.address

    def get_device(self):
        return -1 if self.place == ON_HOST else (self.address >> 20) - 0xD

    def element_size(self):
        return CODES[self.dtype][1] // 8

    def storage_offset(self):
        return 0


def read(tensor, found):
    tensor.asked.append("table")
    if tensor.dtype not in CODES:
        return -1
    code, bits = CODES[tensor.dtype]
    # As torch: all of it in the address; another library may have a part of it in the offset.
    found[0] = Found(
        tensor.address - 64,
        tensor.place,
        max(tensor.get_device(), 0),
        1,
        code,
        bits,
        1,
        None,
        None,
        64,
    )
    return 0


def teller(fact, kind=TELL):
    """Return a function that tells a fact of a tensor; it fails where the tensor has none."""

    def tell(handle, found):
        facts = handle[0]
        if fact == "address":
            facts["asked"].append("functions")
        if facts[fact] is None:
            return 1
        found[0] = facts[fact]
        return 0

    return kind(tell)


def stream(_kind, device, found):
    found[0] = STREAM + device
    return 0


_kept = []  # for the life of the process, as the table of a library is


_functions = (
    teller("address", TELL_ADDRESS),
    *map(teller, ("type", "device", "dtype")),
)  # for the life of the process, too


@pytest.fixture(params=["table", "functions"])
def way(request):
    """By which of the two ways tensors are read."""
    return request.param


@pytest.fixture
def tensor_type(monkeypatch, way):
    """Return torch.Tensor of a torch that has nothing else."""
    table = Table(1, 3, None, (ctypes.c_void_p * 3)(), READ(read), ASK(stream))
    _kept.append(table)
    new = ctypes.pythonapi.PyCapsule_New
    new.argtypes, new.restype = (
        [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p],
        ctypes.py_object,
    )
    members = {
        "__dlpack_c_exchange_api__": new(ctypes.addressof(table), b"dlpack_exchange_api", None)
    }
    found = type("Tensor", (Handle, Tensor), members)
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(Tensor=found))
    launcher = launchers.compiled_type()
    if way == "functions" and launcher is not None:
        tell_functions(launcher, found)
    yield found
    if launcher is not None:
        launcher.tell_tensors((), None, 0, 0)


def tell_functions(launcher, kind):
    address, *others = (ctypes.cast(function, ctypes.c_void_p).value for function in _functions)
    launcher.tell_tensors(
        (kind,), kind.data_ptr, address, object.__basicsize__, *others, ON_CUDA - 1
    )


@pytest.fixture
def kernels(recorded, fake, tensor_type):
    """All recorded kernels, over the library that stands in for CUDA's, with the compiled launcher
    and dispatcher.
    """
    if compiled_dispatch.dispatcher_type() is None or launchers.compiled_type() is None:
        pytest.skip(
            "the extensions are not built into this installation; `make test` installs a wheel that"
            " has them"
        )
    with load(recorded.bundle, driver=CudaDriver(fake.path, compiled=True)) as found:
        yield found


@pytest.fixture
def add(kernels, fake, tensor_type):
    """Return the kernel `add`, which was launched once, with the record of the library empty."""
    kernel = kernels["add"]
    tensors = [tensor_type() for _ in range(3)]
    kernel[GRID](*tensors, 1024, BLOCK=64)
    fake.expect(kernel.handle(*tensors, 1024, BLOCK=64).plan)
    fake.number("fake_launches").value = 0
    return kernel


def test_a_launch_asks_no_method(add, fake, tensor_type, way):
    """Addresses, grid and stream reach the driver; neither the tensors' methods nor the driver's
    stream are asked.
    """
    tensors = [tensor_type(FIRST + 256 * number) for number in range(1, 4)]
    add[(5, 2)](*tensors, 1024, BLOCK=64)
    assert [tensor.asked for tensor in tensors] == [[way]] * 3
    assert struct.unpack_from("<3Qi", bytes(fake.last.parameters)) == (
        *(t.address for t in tensors),
        1024,
    )
    assert (list(fake.last.grid), fake.last.stream) == ([5, 2, 1], STREAM)


@pytest.mark.parametrize("grid", [lambda meta: (meta["n"] // 256,), [4], 4])
def test_grids_of_other_kinds_launch_the_same(add, fake, tensor_type, grid):
    """A function, a list and a number are Python's to read; tensors are read by the table all the
    same.
    """
    tensors = [tensor_type(FIRST + 256) for _ in range(3)]
    add[grid](*tensors, 1024, BLOCK=64)
    assert list(fake.last.grid) == [4, 1, 1]
    assert struct.unpack_from("<3Q", bytes(fake.last.parameters)) == (FIRST + 256,) * 3


@pytest.mark.parametrize("grid", [(1, 65536), (2**31,), (-1,), (1.5,), (1, 1, 1, 1), ()])
def test_a_grid_that_is_none_is_refused(add, fake, tensor_type, grid):
    """What a device cannot launch is refused as ever, and launches nothing."""
    with pytest.raises(CannotLaunchStatically):
        add[grid](*[tensor_type() for _ in range(3)], 1024, BLOCK=64)
    add[(0,)](*[tensor_type() for _ in range(3)], 1024, BLOCK=64)
    assert fake.number("fake_launches").value == 0


def test_a_thread_that_is_elsewhere_launches_nothing_there(add, fake, tensor_type, way):
    """With another device current, tensors of the first one are refused, and launched again once it
    is current.
    """
    tensors = [tensor_type() for _ in range(3)]
    fake.library.cuCtxPushCurrent_v2(ctypes.c_void_p(0xC1))
    with pytest.raises(
        CannotLaunchStatically, match="in device 0, and the kernel is launched on device 1"
    ):
        add[GRID](*tensors, 1024, BLOCK=64)
    there = [tensor_type(SECOND) for _ in range(3)]
    for _ in range(3):
        add[GRID](*there, 1024, BLOCK=64)
    assert (fake.number("fake_launches").value, fake.last.context) == (3, 0xC1)
    assert there[0].asked[-1] == way
    fake.library.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))
    add[GRID](*tensors, 1024, BLOCK=64)
    assert (fake.number("fake_launches").value, fake.last.context) == (4, 0xC0)
    with pytest.raises(
        CannotLaunchStatically, match="in device 1, and the kernel is launched on device 0"
    ):
        add[GRID](*there, 1024, BLOCK=64)


def test_tensors_of_two_devices_are_refused(add, fake, tensor_type):
    """The second tensor is named, also after launches that were right."""
    with pytest.raises(CannotLaunchStatically, match="argument 'y' is a tensor"):
        add[GRID](tensor_type(), tensor_type(SECOND), tensor_type(), 1024, BLOCK=64)
    with pytest.raises(CannotLaunchStatically, match=r"argument 'y' is a tensor .* in host memory"):
        add[GRID](tensor_type(), tensor_type(place=ON_HOST), tensor_type(), 1024, BLOCK=64)
    assert fake.number("fake_launches").value == 0


def test_types_and_alignments_are_told_apart(add, fake, tensor_type):
    """A tensor of another type, or at an odd address, is another kind of call: none is recorded for
    it.
    """
    tensors = [tensor_type() for _ in range(3)]
    for other in (
        tensor_type(dtype="float16"),
        tensor_type(FIRST + 4),
        tensor_type(dtype="unknown"),
    ):
        for _ in range(2):
            with pytest.raises((NotFound, CannotLaunchStatically)):
                add[GRID](tensors[0], other, tensors[2], 1024, BLOCK=64)
    assert fake.number("fake_launches").value == 0


def test_hooks_hear_of_such_launches(kernels, add, fake, tensor_type):
    """A hook that is added, or set in place of the list, hears the next launch; none hears those
    after it is gone.
    """
    tensors, heard = [tensor_type() for _ in range(3)], []
    kernels.hooks.leave = [heard.append]
    add[GRID](*tensors, 1024, BLOCK=64)
    kernels.hooks.leave = []
    kernels.hooks.enter.append(heard.append)
    add[GRID](*tensors, 1024, BLOCK=64)
    kernels.hooks.enter.clear()
    add[GRID](*tensors, 1024, BLOCK=64)
    assert ([facts["name"] for facts in heard], fake.number("fake_launches").value) == (
        ["add", "add"],
        3,
    )


def test_a_class_with_methods_of_its_own_is_asked_by_them(add, fake, tensor_type):
    """A subclass that says where it lies, or that handles torch's functions in Python, is not read
    behind its back.
    """

    class Moved(tensor_type):
        def data_ptr(self):
            return FIRST + 512

    class Handled(tensor_type):
        @classmethod
        def __torch_function__(cls, *_):
            raise AssertionError("not called here")

    for kind, address in ((Moved, FIRST + 512), (Handled, FIRST)):
        tensors = [kind() for _ in range(3)]
        for _ in range(3):
            add[GRID](*tensors, 1024, BLOCK=64)
        assert struct.unpack_from("<3Q", bytes(fake.last.parameters)) == (address,) * 3
        assert not {"table", "functions"} & set(tensors[0].asked)


def test_functions_that_are_told_later_are_asked_from_then_on(add, fake, tensor_type):
    """What was kept of a class is looked at again when other functions are told, or none."""
    launcher = launchers.compiled_type()
    for tell, way in (
        (tell_functions, "functions"),
        (lambda kind, _: kind.tell_tensors((), None, 0, 0), "table"),
    ) * 2:
        tell(launcher, tensor_type)
        for _ in range(2):  # the first call of each way is one that is not known yet
            tensors = [tensor_type(FIRST + 256) for _ in range(3)]
            add[GRID](*tensors, 1024, BLOCK=64)
        assert [tensor.asked for tensor in tensors] == [[way]] * 3
    assert fake.number("fake_launches").value == 8


@pytest.mark.parametrize("way", ["table"], indirect=True)
def test_launches_of_the_dispatcher_count_until_the_functions_are_told(add, fake, tensor_type):
    """The table tells tensors until so many launches were made; the next calls are asked the
    functions, and pass the same addresses.
    """
    launcher, asked, passed = launchers.compiled_type(), [], []
    launcher.ask_later(lambda: tell_functions(launcher, tensor_type), 3)
    for _ in range(6):
        tensors = [tensor_type(FIRST + 256) for _ in range(3)]
        add[GRID](*tensors, 1024, BLOCK=64)
        asked.append(tensors[2].asked[0])
        passed.append(struct.unpack_from("<3Q", bytes(fake.last.parameters)))
    assert asked == ["table"] * 3 + ["functions"] * 3
    assert passed == [(FIRST + 256,) * 3] * 6
    assert fake.number("fake_launches").value == 6


@pytest.mark.parametrize("fact", ["address", "type", "device", "dtype"])
def test_a_tensor_of_which_a_function_tells_nothing_is_asked_by_its_methods(
    add, fake, tensor_type, fact, way
):
    """Python launches then what the methods tell, as it does where the table tells nothing."""
    tensors = [tensor_type(FIRST + 256) for _ in range(3)]
    tensors[1].handle[fact] = None
    add[GRID](*tensors, 1024, BLOCK=64)
    assert struct.unpack_from("<3Q", bytes(fake.last.parameters)) == (FIRST + 256,) * 3
    assert ("method" in tensors[1].asked) == (way == "functions")


def test_a_tensor_without_a_handle_is_asked_by_its_methods(add, fake, tensor_type):
    """An object that was not finished, or given up, is not read behind its back."""
    tensors = [tensor_type(FIRST + 256) for _ in range(3)]
    del tensors[2].handle
    add[GRID](*tensors, 1024, BLOCK=64)
    assert struct.unpack_from("<3Q", bytes(fake.last.parameters)) == (FIRST + 256,) * 3


def test_a_method_put_in_place_of_torchs_is_not_passed_by(add, tensor_type, way, monkeypatch):
    """The functions stand for the `data_ptr` that Python told with them; with another one the table
    is asked.
    """
    monkeypatch.setattr(tensor_type, "data_ptr", lambda self: self.address)
    tensors = [tensor_type() for _ in range(3)]
    for _ in range(2):
        add[GRID](*tensors, 1024, BLOCK=64)
    assert "functions" not in tensors[0].asked
    monkeypatch.undo()


def test_an_unloaded_kernel_is_loaded_again(kernels, add, fake, tensor_type):
    """What the dispatcher knew goes with the modules."""
    kernels.unload()
    add[GRID](*[tensor_type() for _ in range(3)], 1024, BLOCK=64)
    assert fake.number("fake_launches").value == 1


def test_references_to_tensors_are_given_back(add, tensor_type):
    """Launches keep no tensor alive."""
    tensors = [tensor_type() for _ in range(3)]
    before = sys.getrefcount(tensors[0])
    seen = []
    for grid in (GRID, [4], (0,)) * 20:
        add[grid](*tensors, 1024, BLOCK=64)
        seen.append(sys.getrefcount(tensors[0]))
    assert seen == [before] * 60


def test_what_torch_itself_tells_is_the_same():
    """torch's own table and methods agree on address, device and type of plain tensors, views,
    empty tensors and parameters.
    """
    torch = pytest.importorskip("torch")
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.argtypes, pointer.restype = [ctypes.py_object, ctypes.c_char_p], ctypes.c_void_p
    table = Table.from_address(
        pointer(torch.Tensor.__dlpack_c_exchange_api__, b"dlpack_exchange_api")
    )
    plain = torch.zeros(64)
    kinds = {}
    for dtype in (
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.bool,
        torch.complex64,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.uint16,
        torch.uint32,
        torch.uint64,
    ):
        found = Found()
        assert table.read(torch.zeros(4, dtype=dtype), ctypes.pointer(found)) == 0
        kinds[found.code, found.bits, found.lanes] = dtype
    assert (table.major, len(kinds)) == (1, 16)
    for tensor in (
        plain,
        plain[3:],
        plain[::2],
        torch.empty(0),
        torch.nn.Parameter(plain),
        plain.reshape(8, 8).T,
    ):
        found = Found()
        assert table.read(tensor, ctypes.pointer(found)) == 0
        assert (found.data or 0) + found.byte_offset == tensor.data_ptr()
        assert (found.device_type, kinds[found.code, found.bits, found.lanes]) == (
            ON_HOST,
            torch.float32,
        )

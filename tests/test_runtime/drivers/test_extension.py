# SPDX-License-Identifier: Apache-2.0
"""The compiled launcher packs byte for byte as `Packer` does, refuses what it refuses, and can be
left out.
"""

import ctypes
import gc
import math
import struct
import subprocess
import sys
import threading
import types
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bundler.errors import CannotLaunchStatically, DriverError, DriverUnavailable
from bundler.runtime.launch.drivers import launchers
from bundler.runtime.launch.drivers.cuda import CudaDriver
from bundler.runtime.launch.parameter_buffer import Packer
from bundler.toolchain.tensor_handles import find_handles

KINDS = (
    "pointer",
    "i1",
    "i8",
    "i16",
    "i32",
    "i64",
    "u1",
    "u8",
    "u16",
    "u32",
    "u64",
    "fp16",
    "bf16",
    "fp32",
    "fp64",
    "tensormap",
)


class Odd:
    """Looks like a tensor, and has no address."""

    dtype = "float32"

    def data_ptr(self):
        raise RuntimeError("no storage")


class Text:
    def data_ptr(self):
        return "0xD00000"


class Whole(int):
    """An integer of a class of its own."""


EDGES = [2**bits + step for bits in (7, 8, 15, 16, 31, 32, 63, 64) for step in (-1, 0, 1)]
VALUES = st.one_of(
    st.sampled_from(
        [
            None,
            True,
            False,
            "text",
            b"\1" * 128,
            b"short",
            bytearray(128),
            1j,
            Odd(),
            Text(),
            Whole(7),
            [],
            (),
        ]
    ),
    st.sampled_from([*EDGES, *[-edge for edge in EDGES], 0, 1]),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.sampled_from(
        [65504.0, 65519.99, 65520.0, -65520.0, 3.4e38, 3.5e38, 1e-46, 5e-324, -0.0, math.pi]
    ),
)


@pytest.fixture(scope="module")
def launcher(launcher_type, plan):
    """Return a function that makes a compiled launcher which reaches no driver."""
    made = {}

    def make(*kinds):
        if kinds not in made:
            binding = launchers.Binding(
                plan(*kinds), 1, 1, b"", len, None, len, None, None, None, None, frozenset(), print
            )
            # Never called: packing needs no driver.
            made[kinds] = launchers.compiled_launcher(launcher_type, _Addressed(binding))
        return made[kinds]

    return make


class _Addressed:
    """A binding whose functions have no address."""

    def __init__(self, binding):
        self.__dict__.update(binding._asdict())
        self.plain = self.ask_place = launchers.ctypes.c_void_p(0)


def packed(pack, values):
    """Return the buffer, or the words of the refusal."""
    try:
        return bytes(pack(values))
    except CannotLaunchStatically as error:
        return error.message
    except RuntimeError as error:  # a tensor's own words for why it has no address
        return str(error)


@given(st.sampled_from(KINDS), VALUES)
def test_c_and_python_pack_the_same(launcher, plan, kind, value):
    """Whatever the value, both give the same bytes or the same refusal."""
    compiled = packed(lambda values: launcher(kind).pack(*values), (value,))
    python = packed(Packer(plan(kind)).pack, (value,))
    assert compiled == python


def test_all_kinds_in_one_buffer(launcher, plan, tensor):
    """Each value lands where the plan says, and what lies between is zero."""
    values = (
        tensor(5),
        True,
        -1,
        -2,
        -3,
        -4,
        False,
        1,
        2,
        3,
        4,
        1.5,
        2.5,
        3.5,
        4.5,
        bytes(range(128)),
    )
    assert launcher(*KINDS).pack(*values) == bytes(Packer(plan(*KINDS)).pack(values))


def test_bf16_is_cut_off_and_fp16_rounded(launcher):
    """1.999 is 0x3FFF in bf16, cut off, and 0x3FFF in fp16, rounded to even."""
    assert launcher("bf16").pack(1.999)[:2] == struct.pack("<H", 0x3FFF)
    assert launcher("bf16").pack(-1.999)[:2] == struct.pack("<H", 0xBFFF)
    assert launcher("fp16").pack(1.999)[:2] == struct.pack("<e", 1.999)


@pytest.mark.parametrize("values", [(), (1,), (1, 2, 3)])
def test_the_number_of_values_is_checked(launcher, values):
    """Too few or too many are refused by name."""
    assert launcher("i32", "i32").pack(1, 2)[:8] == struct.pack("<ii", 1, 2)
    with pytest.raises(CannotLaunchStatically, match=f"takes 2 values .*got {len(values)}"):
        launcher("i32", "i32").pack(*values)


@pytest.mark.parametrize(
    "wrong",
    [
        {"fields": (("i128", 0, 0),)},
        {"fields": (("i32", 30, 0),)},
        {"fields": (("i32", 0, 1),)},
        {"fields": (("i32", 0, -1),)},
        {"fields": (("global_scratch", 0, 0),)},
        {"fields": ("i32",)},
        {"fields": None},
        {"attributes": "text"},
        {"place": -1.5},
    ],
)
def test_nonsense_makes_no_launcher(launcher_type, wrong):
    """Fields outside the buffer, of unknown kinds or for no argument are errors, never memory
    written elsewhere.
    """
    right = {
        "plain": 1,
        "extended": 0,
        "where": 1,
        "place": 0,
        "function": 1,
        "block": 1,
        "cluster": 1,
        "shared": 0,
        "attributes": b"",
        "buffer_bytes": 32,
        "arguments": 1,
        "fields": (("i32", 0, 0),),
        "slow_pack": len,
        "fail": len,
        "enter": len,
        "scratch": None,
    }
    assert launcher_type(**right).pack(1) == struct.pack("<i28x", 1)
    with pytest.raises((TypeError, ValueError)):
        launcher_type(**right | wrong)
    with pytest.raises(TypeError):
        launcher_type()


@pytest.mark.parametrize("arguments", [(), (1, 1, 1), (1, 1, 1, "stream", 5)])
def test_a_call_without_a_grid_or_stream(ready, plan, arguments):
    """What is no call of a launcher is a TypeError, by both paths."""
    _, _, launch = ready(plan("i32"))
    with pytest.raises((TypeError, struct.error)):
        launch(*arguments)
    with pytest.raises(TypeError):
        launch(1, 1, 1, 0, a0=5)


def test_launchers_are_collected(ready, plan):
    """A launcher that nobody holds goes away, with the module that it held."""
    driver, module, launch = ready(plan("i32"))
    launch(1, 1, 1, 0, 4)
    gone = [weakref.ref(launch), weakref.ref(module)]
    del launch, module
    gc.collect()
    assert [reference() for reference in gone] == [None, None]
    driver.check_alive()


def test_references_are_given_back(ready, plan, tensor):
    """Ten thousand launches, half of them refused, keep nothing alive."""
    _, _, launch = ready(plan("pointer", "fp32"))
    held = tensor(0xD00000)
    before = sys.getrefcount(held)
    for _ in range(500):
        launch(1, 1, 1, 0, held, 2.5)
        with pytest.raises(CannotLaunchStatically):
            launch(1, 1, 1, 0, held, "text")
    gc.collect()
    assert sys.getrefcount(held) == before


def test_without_the_extension(fake, monkeypatch):
    """A machine where the extension was not built launches through ctypes, and says so when asked
    for the other.
    """
    monkeypatch.setattr(launchers, "compiled_type", lambda: None)
    assert CudaDriver(fake.path).launch_path == "ctypes"
    with pytest.raises(DriverUnavailable, match="not built"):
        CudaDriver(fake.path, compiled=True)


def test_the_extension_needs_no_driver():
    """The sources include Python's headers, C's and their own, and link to nothing else."""
    folder, wanted, found = (
        Path(__file__).parents[3] / "bundler" / "runtime" / "launch",
        ["_launch.c"],
        set(),
    )
    for file in wanted:
        lines = (folder / file).read_text().splitlines()
        includes = {line.split()[1] for line in lines if line.startswith("#include")}
        found |= {include for include in includes if include.startswith("<")}
        wanted += [
            include.strip('"') for include in includes - found if include.strip('"') not in wanted
        ]
    assert found == {"<Python.h>", "<structmember.h>", "<stddef.h>", "<stdint.h>", "<string.h>"}


def test_an_installed_extension_is_taken():
    """Where it was built, a driver takes it without being asked."""
    if launchers.compiled_type() is None:
        pytest.skip(
            "the extension is not built into this installation; `make test` installs a wheel that"
            " has it"
        )
    code = "from bundler.runtime.launch.drivers import launchers; print(launchers.compiled_type().__module__)"
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "bundler.runtime.launch._launch"


def test_tensors_of_torch(launcher):
    """torch's tensors, parameters and subclasses, also one with an address of its own, give what
    data_ptr() gives.
    """
    torch = pytest.importorskip("torch")

    class Own(torch.Tensor):
        pass

    class Moved(torch.Tensor):
        def data_ptr(self):
            return 0xD00000

    plain = torch.zeros(4)
    values = (
        plain,
        torch.nn.Parameter(plain),
        plain.as_subclass(Own),
        plain.as_subclass(Moved),
        plain[1:],
    )
    wanted = [plain.data_ptr()] * 3 + [0xD00000, plain.data_ptr() + 4]
    for _ in range(2):  # the second time a type is known
        for value, address in zip(values, wanted, strict=True):
            assert struct.unpack_from("<Q", launcher("pointer").pack(value)) == (address,)
    Own.data_ptr = lambda self: 0xE00000
    assert struct.unpack_from("<Q", launcher("pointer").pack(values[2])) == (0xE00000,)


class Slotted:
    """Has a handle in the first word after an object's head."""

    __slots__ = ("handle",)

    def __init__(self, handle):
        self.handle = handle

    def data_ptr(self):
        return 0xD00000


class Derived(Slotted):
    """Inherits all of it, and is another class."""


@pytest.fixture
def untold(launcher_type):
    """Return what lets objects of `Slotted` be read by a function that adds 256 to an int at the
    handle; it fails for 0.

    With it comes the list of what the function is asked.
    """
    asked = []

    @ctypes.CFUNCTYPE(
        ctypes.c_int32, ctypes.POINTER(ctypes.py_object), ctypes.POINTER(ctypes.c_uint64)
    )
    def read(handle, address):
        asked.append(handle[0])
        address[0] = handle[0] + 256
        return handle[0] == 0

    def tell():
        launcher_type.tell_tensors(
            (Slotted,),
            Slotted.data_ptr,
            ctypes.cast(read, ctypes.c_void_p).value,
            object.__basicsize__,
        )

    yield tell, asked
    launcher_type.tell_tensors((), None, 0, 0)


@pytest.fixture
def told(untold):
    """Let them be read so, and return the list."""
    tell, asked = untold
    tell()
    return asked


def address(launcher, value):
    return struct.unpack_from("<Q", launcher("pointer").pack(value))[0]


def test_objects_are_read_by_the_function_that_python_told(launcher, told, monkeypatch):
    """Only objects of the class itself, while `data_ptr` is the method that was told; what the
    function refuses is asked the method.
    """
    for _ in range(2):  # the second time the classes are known
        assert [address(launcher, kind(one)) for kind in (Slotted, Derived) for one in (1, 2)] == [
            257,
            258,
            0xD00000,
            0xD00000,
        ]
    assert told == [1, 2, 1, 2]
    assert address(launcher, Slotted(0)) == 0xD00000
    empty = Slotted(1)
    del empty.handle
    assert address(launcher, empty) == 0xD00000
    monkeypatch.setattr(Slotted, "data_ptr", lambda self: 0xE00000)
    assert address(launcher, Slotted(1)) == 0xE00000
    monkeypatch.undo()
    assert told == [1, 2, 1, 2, 0]
    assert address(launcher, Slotted(1)) == 257


def test_a_driver_has_the_extension_told_some_launches_after_torch_is_in_use(fake, monkeypatch):
    """Before torch uses the GPU nothing is looked for; then the launcher asks once, after so many
    launches, and is told.
    """
    told, asked, in_use = [], [], []
    kind = types.SimpleNamespace(
        tell_tensors=lambda *found: told.append(found), ask_later=lambda *later: asked.append(later)
    )
    monkeypatch.setattr(launchers, "compiled_type", lambda: kind)
    monkeypatch.setattr(launchers, "find_handles", lambda: ((), None, 0, 0))
    torch = types.SimpleNamespace(
        cuda=types.SimpleNamespace(is_initialized=lambda: bool(in_use)),
        version=types.SimpleNamespace(hip=None),
        _C=types.SimpleNamespace(
            _cuda_getDevice=lambda: 1, _cuda_getCurrentRawStream=lambda device: 5
        ),
    )
    monkeypatch.setitem(sys.modules, "torch", torch)
    driver = CudaDriver(fake.path, compiled=True)
    driver.stream(1)
    assert asked == []
    in_use.append(True)
    assert [driver.device(), driver.stream(1), driver.device()] == [1, 5, 1]
    ((tell, launches),) = asked
    assert (launches, told) == (launchers.LAUNCHES_BEFORE_TELLING, [])
    tell()
    assert told == [((), None, 0, 0)]


@pytest.fixture
def counted(fake, launcher_type, monkeypatch, plan):
    """Return a launcher of a kernel with one pointer; what it was to ask for is forgotten in the
    end.
    """
    monkeypatch.setattr(launchers, "compiled_type", lambda: launcher_type)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    driver, taken = CudaDriver(fake.path, compiled=True), plan("pointer")
    fake.expect(taken)
    module = driver.load(taken, b"image", 0)
    yield driver.launcher(module)
    launcher_type.ask_later(None, 0)


def test_what_is_asked_later_is_called_once_after_so_many_launches(counted, launcher_type):
    """Launches of any kernel count, those that fail do not; what is called finds the launch made,
    and may launch.
    """
    calls = []
    launcher_type.ask_later(lambda: (calls.append(1), counted(1, 1, 1, 0, 64)), 3)
    counted(1, 1, 1, 0, 64)
    counted(0, 1, 1, 0, 64)
    with pytest.raises(CannotLaunchStatically):
        counted(-1, 1, 1, 0, 64)
    assert calls == []
    for _ in range(4):
        counted(1, 1, 1, 0, 64)
    assert calls == [1]


def test_what_fails_when_it_is_called_later_fails_in_that_launch_alone(counted, launcher_type):
    """An interruption is not lost; the launches that follow are as ever, and nothing is called
    again.
    """
    launcher_type.ask_later(lambda: 1 // 0, 2)
    counted(1, 1, 1, 0, 64)
    with pytest.raises(ZeroDivisionError):
        counted(1, 1, 1, 0, 64)
    for _ in range(3):
        counted(1, 1, 1, 0, 64)


def test_objects_are_read_by_their_method_until_the_extension_is_told(
    counted, launcher_type, untold
):
    """The launch after which Python tells the extension still asks the method; each launch from
    then on asks the function.
    """
    tell, asked = untold
    launcher_type.ask_later(tell, 2)
    read = []
    for _ in range(4):
        counted(1, 1, 1, 0, Slotted(1))
        read.append(struct.unpack_from("<Q", counted.pack(Slotted(1)))[0])
    assert (read, asked) == ([0xD00000, 257, 257, 257], [1] * 5)


def test_threads_may_launch_while_the_extension_is_told(counted, launcher_type, untold):
    """Four threads launch at once: one of them calls what was to be called, and none gets
    an error.
    """
    calls = []
    launcher_type.ask_later(lambda: (calls.append(threading.get_ident()), untold[0]()), 1000)
    with ThreadPoolExecutor(4) as threads:
        done = [
            threads.submit(lambda: [counted(1, 1, 1, 0, Slotted(1)) for _ in range(500)])
            for _ in range(4)
        ]
        assert [one.result() for one in done] == [[None] * 500] * 4
    assert len(calls) == 1
    assert 990 <= len(untold[1]) <= 1000


def test_more_classes_than_are_kept(launcher):
    """Values of ten classes take turns, and each gives its own address."""
    kinds = [
        type(f"Tensor{number}", (), {"data_ptr": lambda self, number=number: 64 * number})
        for number in range(10)
    ]
    for _ in range(3):
        assert [address(launcher, kind()) for kind in kinds] == [
            64 * number for number in range(10)
        ]


def test_tensors_of_torch_are_read_by_torchs_function(launcher, launcher_type):
    """With what is found for this torch, tensors give what data_ptr() gives, and one without an
    address the same refusal.
    """
    torch = pytest.importorskip("torch")
    plain = torch.zeros(4)
    values = (
        plain,
        plain[1:],
        torch.nn.Parameter(plain),
        torch.empty(0),
        torch.empty(4, device="meta"),
    )
    words = packed(lambda values: launcher("pointer").pack(*values), (torch.eye(3).to_sparse(),))
    found = find_handles()
    assert found is not None
    launcher_type.tell_tensors(*found)
    try:
        assert [address(launcher, value) for value in values] == [
            value.data_ptr() for value in values
        ]
        assert (
            packed(lambda values: launcher("pointer").pack(*values), (torch.eye(3).to_sparse(),))
            == words
        )
    finally:
        launcher_type.tell_tensors((), None, 0, 0)
    assert isinstance(words, str)


def test_kernels_of_one_kind_have_launchers_alike(fake, launcher_type, monkeypatch, plan, tensor):
    """The second is a copy of the first for another function: it launches that, fails by itself,
    and outlives the first.
    """
    monkeypatch.setattr(launchers, "compiled_type", lambda: launcher_type)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    driver = CudaDriver(fake.path, compiled=True)
    shape = plan("pointer", "i32")
    fake.expect(shape)
    one, two = (
        driver.load(shape, b"image", 0),
        driver.load(replace(shape, kernel="second"), b"image", 0),
    )
    one.function, two.function = 0xF1, 0xF2
    made = []
    compiled_launcher = launchers.compiled_launcher
    monkeypatch.setattr(
        launchers, "compiled_launcher", lambda *args: made.append(args) or compiled_launcher(*args)
    )
    first, second = driver.launcher(one), driver.launcher(two)
    assert len(made) == 1
    for launch, function in ((first, 0xF1), (second, 0xF2), (first, 0xF1)):
        launch(2, 1, 1, 0, tensor(64), 7)
        assert (fake.last.function, bytes(fake.last.grid)) == (
            function,
            struct.pack("<III", 2, 1, 1),
        )
        assert fake.parameters(shape)[:12] == struct.pack("<Qi", 64, 7)
    with pytest.raises(CannotLaunchStatically, match="second: argument 'a1'"):
        second(2, 1, 1, 0, tensor(64), 2**40)
    one.unload()
    with pytest.raises(DriverError, match="its module was unloaded"):
        first(2, 1, 1, 0, tensor(64), 7)
    second(3, 1, 1, 0, tensor(64), 7)
    assert fake.last.function == 0xF2
    del first
    gc.collect()
    assert driver.launcher(two) is not None
    other = driver.launcher(driver.load(replace(shape, block_threads=64), b"image", 0))
    other(1, 1, 1, 0, tensor(64), 7)
    assert fake.last.block[0] == 64


class Interrupted:
    """Looks like a tensor; whoever asks for its address is interrupted."""

    dtype = "float32"

    def data_ptr(self):
        raise KeyboardInterrupt


def test_an_interrupt_while_a_value_is_packed_is_not_forgotten(launcher_type):
    """It comes only once, so that Python, asked to pack in its place, would not meet it."""
    asked = []
    launcher = launcher_type(
        plain=0,
        extended=0,
        where=0,
        place=0,
        function=0,
        block=1,
        cluster=1,
        shared=0,
        attributes=b"",
        buffer_bytes=8,
        arguments=1,
        fields=(("pointer", 0, 0),),
        slow_pack=asked.append,
        fail=print,
        enter=print,
        scratch=None,
    )
    with pytest.raises(KeyboardInterrupt):
        launcher.pack(Interrupted())
    assert asked == []

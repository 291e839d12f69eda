# SPDX-License-Identifier: Apache-2.0
"""Where an object of torch holds its tensor's handle, and what tells of it, is found in this torch,
and not guessed in one that is made otherwise.
"""

import ctypes
import sys
import types

import pytest

from bundler.toolchain.tensor_handles import find_handles

torch = pytest.importorskip("torch")
TELL = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, ctypes.POINTER(ctypes.c_int32))
ASK = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, ctypes.POINTER(ctypes.c_uint64))


def test_handles_of_this_torch():
    """The function tells the address of any tensor of the classes; views, empty ones and parameters
    are no exception.
    """
    found = find_handles()
    assert found is not None
    assert found.classes == (torch.Tensor, torch.nn.Parameter)
    ask = ASK(found.function)
    base = torch.zeros(64)
    for tensor in (
        base,
        base[5:],
        base.reshape(8, 8).t(),
        torch.empty(0),
        torch.nn.Parameter(base),
        base.half(),
    ):
        address = ctypes.c_uint64()
        assert ask(id(tensor) + found.offset, address) == 0
        assert address.value == tensor.data_ptr()


def test_functions_tell_device_and_type_of_this_torch():
    """They agree with the tensors of each type, also with one on no device that has memory; `cuda`
    is none of theirs.
    """
    found = find_handles()
    assert found is not None
    device_type, device, dtype = (
        TELL(place) for place in (found.device_type, found.device, found.dtype)
    )
    library = ctypes.CDLL("libtorch_cpu.so")

    def told(ask, tensor):
        number = ctypes.c_int32(-5)
        assert ask(id(tensor) + found.offset, number) == 0
        return number.value

    for name in (
        "float64",
        "float32",
        "float16",
        "bfloat16",
        "int64",
        "int32",
        "int16",
        "int8",
        "uint8",
        "bool",
    ):
        tensor = torch.zeros(4, dtype=getattr(torch, name))
        assert told(dtype, tensor) == getattr(library, f"aoti_torch_dtype_{name}")()
        assert (told(device_type, tensor), told(device, tensor)) == (
            library.aoti_torch_device_type_cpu(),
            -1,
        )
    assert told(device_type, torch.empty(4, device="meta")) == library.aoti_torch_device_type_meta()
    assert found.cuda == library.aoti_torch_device_type_cuda()


@pytest.mark.parametrize(
    "missing",
    [
        "aoti_torch_get_device_type",
        "aoti_torch_get_dtype",
        "aoti_torch_dtype_int64",
        "aoti_torch_device_type_cuda",
    ],
)
def test_a_torch_without_a_function_tells_addresses_alone(monkeypatch, missing):
    """Device and type are left to torch's table, and addresses are read as ever."""
    whole = find_handles()

    class Library:
        def __getattr__(self, name):
            if name == missing:
                raise AttributeError(name)
            return getattr(library, name)

    library = ctypes.CDLL("libtorch_cpu.so")
    monkeypatch.setattr("bundler.toolchain.tensor_handles.ctypes.CDLL", lambda *_, **__: Library())
    assert find_handles() == whole._replace(device_type=0, device=0, dtype=0, cuda=0)


def test_functions_that_tell_otherwise_are_not_taken(monkeypatch):
    """A torch whose numbers are not those of its own names is read by its table."""
    monkeypatch.setattr("bundler.toolchain.tensor_handles._INT64", "aoti_torch_dtype_int32")
    found = find_handles()
    assert found is not None
    assert (found.function != 0, found[4:]) == (True, (0, 0, 0, 0))


def test_without_torch_nothing_is_imported(monkeypatch):
    """A process without torch has none afterwards."""
    monkeypatch.delitem(sys.modules, "torch")
    assert find_handles() is None
    assert "torch" not in sys.modules


def test_a_mode_that_makes_other_tensors_teaches_nothing():
    """Under a mode of torch's that returns tensors without memory nothing is read of them."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        assert find_handles() is None
    with torch.device("meta"):
        assert find_handles() is not None


def test_a_method_that_was_replaced_counts(monkeypatch):
    """Where data_ptr() tells another address than torch's function, it is asked."""
    monkeypatch.setattr(torch.Tensor, "data_ptr", lambda self: 64)
    assert find_handles() is None


class Sample:
    """A tensor of a torch that is made otherwise: its object may hold the number that `_cdata`
    tells, or not.
    """

    __slots__ = ("_cdata", "word")

    def __init__(self, word):
        self.word, self._cdata = word, id(word)

    def __getitem__(self, _key):
        return Sample(object())

    def data_ptr(self):
        return 64


class Parameter(Sample):
    """What its module calls a parameter."""

    __slots__ = ()


def other_torch(**members):
    nothing = types.SimpleNamespace
    made = {
        "Tensor": Sample,
        "nn": nothing(Parameter=Parameter),
        "empty": lambda *_, **__: Sample(object()),
        "_C": nothing(TensorBase=Sample),
    }
    return nothing(**made | members)


@pytest.mark.parametrize(
    "members",
    [
        {"nn": types.SimpleNamespace()},
        {"_C": types.SimpleNamespace()},
        {"_C": types.SimpleNamespace(TensorBase=object)},
        {"empty": lambda *_, **__: object()},
    ],
)
def test_another_torch_is_left_alone(monkeypatch, members):
    """Where a class, a member or the place is not as expected, tensors are read by their own
    data_ptr().
    """
    monkeypatch.setitem(sys.modules, "torch", other_torch(**members))
    assert find_handles() is None

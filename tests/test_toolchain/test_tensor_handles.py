# SPDX-License-Identifier: Apache-2.0
"""Where an object of torch holds its tensor's handle is found in this torch, and not guessed in one that is made otherwise."""

import ctypes
import sys
import types

import pytest

from bundler.toolchain.tensor_handles import find_handles

torch = pytest.importorskip("torch")
ASK = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, ctypes.POINTER(ctypes.c_uint64))


def test_handles_of_this_torch():
    """The function tells the address of any tensor of the classes; views, empty ones and parameters are no exception."""
    found = find_handles()
    assert found is not None
    assert found.classes == (torch.Tensor, torch.nn.Parameter)
    ask = ASK(found.function)
    base = torch.zeros(64)
    for tensor in (base, base[5:], base.reshape(8, 8).t(), torch.empty(0), torch.nn.Parameter(base), base.half()):
        address = ctypes.c_uint64()
        assert ask(id(tensor) + found.offset, address) == 0
        assert address.value == tensor.data_ptr()


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
    """A tensor of a torch that is made otherwise: its object may hold the number that `_cdata` tells, or not."""

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
        "Tensor": Sample, "nn": nothing(Parameter=Parameter), "empty": lambda *_, **__: Sample(object()),
        "_C": nothing(TensorBase=Sample),
    }  # fmt: skip
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
    """Where a class, a member or the place is not as expected, tensors are read by their own data_ptr()."""
    monkeypatch.setitem(sys.modules, "torch", other_torch(**members))
    assert find_handles() is None

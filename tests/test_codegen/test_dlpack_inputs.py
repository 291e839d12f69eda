# SPDX-License-Identifier: Apache-2.0
"""Inputs of programs that come by DLPack: address, dtype, shape and strides as the library has
them; memory of the host only where kernels can read it.
"""

import gc
import weakref

import pytest

from bundler.errors import CannotLaunchStatically
from bundler.runtime.program.device_tensors import device_tensor

torch = pytest.importorskip("torch")


class Array:
    """A tensor of a library that speaks DLPack and nothing else."""

    def __init__(self, tensor):
        self.tensor, self.shape = tensor, tuple(tensor.shape)

    def __dlpack__(self, **_):
        return self.tensor.__dlpack__()


@pytest.mark.parametrize(
    "name",
    [
        "float32",
        "float64",
        "float16",
        "bfloat16",
        "bool",
        "int8",
        "uint8",
        "int64",
        "float8_e4m3fn",
        "float8_e5m2",
    ],
)
def test_a_tensor_is_taken_as_it_lies(name):
    """A view with an offset and strides that are not dense has the address of its first element."""
    tensor = torch.zeros(6, 4, dtype=getattr(torch, name)).t()[1:]
    found = device_tensor(Array(tensor), host=True)
    assert (found.dtype, found.shape, found.strides) == (name, (3, 6), (1, 4))
    assert found.data_ptr() == tensor.data_ptr()


def test_memory_lives_as_long_as_the_input():
    """The library's tensor is kept, and let go with ours."""
    array = Array(torch.zeros(4))
    seen, found = weakref.ref(array), device_tensor(array, host=True)
    del array
    gc.collect()
    assert seen() is not None
    assert found.shape == (4,)
    del found
    gc.collect()
    assert seen() is None


def test_memory_that_no_kernel_reads_is_refused():
    """Memory of the host goes to no GPU; elements that no kernel takes, and capsules of something
    else, are refused.
    """
    with pytest.raises(CannotLaunchStatically, match="device type 1, expected a GPU's"):
        device_tensor(Array(torch.zeros(4)))
    array = Array(torch.zeros(4))
    capsule = array.__dlpack__()
    consumed = torch.utils.dlpack.from_dlpack(capsule)
    array.__dlpack__ = lambda: capsule
    with pytest.raises(CannotLaunchStatically, match="gives no tensor"):
        device_tensor(array, host=True)
    assert consumed.shape == (4,)
    with pytest.raises(CannotLaunchStatically, match="__dlpack__, got list"):
        device_tensor([1, 2])

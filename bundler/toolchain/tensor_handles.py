# SPDX-License-Identifier: Apache-2.0
"""`find_handles`: how C reads address, device and type of a tensor of torch without calling Python.

torch keeps a C interface stable for the models that it compiles ahead of time
(torch/csrc/inductor/aoti_torch/c/shim.h).  Its functions take a handle, which is the address of
torch's own tensor, and the object of Python holds that tensor within itself.  Where, no interface
says: it is looked for in a few tensors by what `_cdata` tells, and taken only where each of them
then has the address that its `data_ptr()` returns.  On a machine where driver and Python take 4 us
for a launch, this saves 50 ns a tensor.

`bundler/runtime/launch/drivers/launchers.py` passes what is found to the compiled launcher, after a
process's first thousand launches.  Until then, and where nothing is found, the launcher calls
`data_ptr()`; the compiled dispatcher, which needs device and type as well, asks torch's table of
DLPack.
"""

from __future__ import annotations

import ctypes
import os
import sys
from typing import Any, NamedTuple

from bundler.package_loggers import logger

_LOG = logger("bundler.toolchain")
_LIBRARY = "libtorch_cpu.so"
_ADDRESS = "aoti_torch_get_data_ptr"
_FACTS = ("aoti_torch_get_device_type", "aoti_torch_get_device_index", "aoti_torch_get_dtype")
_CPU, _CUDA = "aoti_torch_device_type_cpu", "aoti_torch_device_type_cuda"
_FLOAT32, _INT64 = "aoti_torch_dtype_float32", "aoti_torch_dtype_int64"
# What is raised where torch is not as it is expected.
_OTHERWISE = (
    ArithmeticError,
    AttributeError,
    LookupError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
)
_WORD = ctypes.sizeof(ctypes.c_void_p)


class TensorHandles(NamedTuple):
    """How tensors are read.

    Attributes:
        classes: whose objects are read so; not those of other classes, which may have a `data_ptr`
            of their own.
        data_ptr: the method of these classes for which the function stands.
        function: the address of torch's function, which takes a handle and where to write the
            address, and returns 0 or an error.
        offset: how far into an object of Python its handle lies, in bytes.
        device_type, device, dtype: the addresses of torch's functions for these, which write a
            number of 32 bits; 0 where torch has not all three, or they tell of the CPU what is not
            so.
        cuda: the device type of tensors on a GPU.
    """

    classes: tuple[type, ...]
    data_ptr: Any
    function: int
    offset: int
    device_type: int = 0
    device: int = 0
    dtype: int = 0
    cuda: int = 0


def find_handles() -> TensorHandles | None:
    """Return how tensors are read here, None where torch is not imported, or not as it is expected;
    imports nothing.
    """
    torch: Any = sys.modules.get("torch")
    if torch is None:
        return None
    try:
        return _looked_for(torch)
    except _OTHERWISE as error:
        _LOG.debug("tensors are read by their data_ptr() (%s: %s)", type(error).__name__, error)
        return None


def _looked_for(torch: Any) -> TensorHandles | None:
    classes = (torch.Tensor, torch.nn.Parameter)
    data_ptr = torch.Tensor.data_ptr
    whole = torch.empty(8, device="cpu")
    samples = (whole, whole[3:], torch.nn.Parameter(torch.empty(2, device="cpu")))
    # Under a mode that makes tensors of other kinds nothing is learnt.
    if {type(sample) for sample in samples} != set(classes) or any(
        kind.data_ptr is not data_ptr for kind in classes
    ):
        return None
    places = set.intersection(*(_places(torch, sample) for sample in samples))
    if len(places) != 1:
        return None
    (offset,) = places
    library = ctypes.CDLL(_LIBRARY, mode=os.RTLD_NOLOAD)
    address = _function(library, _ADDRESS, ctypes.c_void_p)
    for sample in samples:
        if (_asked(address, sample, offset, ctypes.c_void_p) or 0) != sample.data_ptr():
            return None
    found = TensorHandles(classes, data_ptr, _place_of(address), offset)
    numbers = torch.empty(2, dtype=torch.int64, device="cpu")
    try:
        return _with_facts(found, library, {_FLOAT32: whole, _INT64: numbers})
    except AttributeError as error:
        _LOG.debug("device and type of tensors are read by torch's table (%s)", error)
        return found


def _with_facts(found: TensorHandles, library: Any, samples: dict[str, Any]) -> TensorHandles:
    """Add what tells device and type, where it tells those of the samples, which lie on the CPU;
    they stand by the name of their type.
    """
    asked = [_function(library, name, ctypes.c_int32) for name in _FACTS]
    for name, sample in samples.items():
        told = tuple(_asked(ask, sample, found.offset, ctypes.c_int32) for ask in asked)
        if told != (getattr(library, _CPU)(), sample.get_device(), getattr(library, name)()):
            return found
    device_type, device, dtype = map(_place_of, asked)
    cuda = getattr(library, _CUDA)()
    return found._replace(device_type=device_type, device=device, dtype=dtype, cuda=cuda)


def _function(library: Any, name: str, kind: type) -> Any:
    function = getattr(library, name)
    function.argtypes, function.restype = [ctypes.c_void_p, ctypes.POINTER(kind)], ctypes.c_int32
    return function


def _asked(
    function: Any, sample: Any, offset: int, kind: type[ctypes.c_void_p | ctypes.c_int32]
) -> int | None:
    """Return what a function tells of a tensor; torch's errors are raised."""
    found = kind()
    if function(id(sample) + offset, found):
        message = "torch's function failed for a tensor of the CPU"
        raise ValueError(message)
    return found.value


def _place_of(function: Any) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0


def _places(torch: Any, sample: Any) -> set[int]:
    """Return where in an object of Python the address of its tensor stands, in bytes from its
    beginning.
    """
    # no public class has it: this one's members alone, without those of its heirs
    size = torch._C.TensorBase.__basicsize__  # noqa: SLF001
    words = (ctypes.c_size_t * (size // _WORD)).from_address(id(sample))
    wanted = sample._cdata  # noqa: SLF001  # the address, as torch itself passes it to its tools
    return {index * _WORD for index, word in enumerate(words) if word == wanted}

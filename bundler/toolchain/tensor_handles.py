# SPDX-License-Identifier: Apache-2.0
"""`find_handles`: how C reads the address of a tensor of torch without calling Python.

torch keeps a C interface stable for the models that it compiles ahead of time (torch/csrc/inductor/aoti_torch/c/shim.h).  Its functions take
a handle, which is the address of torch's own tensor, and the object of Python holds that tensor within itself.  Where, no interface says:
it is looked for in a few tensors by what `_cdata` tells, and taken only where each of them then has the address that its `data_ptr()`
returns.  On a machine where driver and Python take 4 us for a launch, this saves 50 ns a tensor.

`bundler/runtime/launch/launchers.py` passes what is found to the compiled launcher, which calls `data_ptr()` where nothing is.
"""

from __future__ import annotations

import ctypes
import os
import sys
from typing import Any, NamedTuple

from bundler.package_loggers import logger

_LOG = logger("bundler.toolchain")
_LIBRARY, _FUNCTION = "libtorch_cpu.so", "aoti_torch_get_data_ptr"
_WORD = ctypes.sizeof(ctypes.c_void_p)


class TensorHandles(NamedTuple):
    """How tensors are read.

    Attributes:
        classes: whose objects are read so; not those of other classes, which may have a `data_ptr` of their own.
        data_ptr: the method of these classes for which the function stands.
        function: the address of torch's function, which takes a handle and where to write the address, and returns 0 or an error.
        offset: how far into an object of Python its handle lies, in bytes.
    """

    classes: tuple[type, ...]
    data_ptr: Any
    function: int
    offset: int


def find_handles() -> TensorHandles | None:
    """Return how tensors are read here, None where torch is not imported, or not as it is expected; imports nothing."""
    torch: Any = sys.modules.get("torch")
    if torch is None:
        return None
    try:
        return _looked_for(torch)
    except (ArithmeticError, AttributeError, LookupError, OSError, RuntimeError, TypeError, ValueError) as error:
        _LOG.debug("tensors are read by their data_ptr() (%s: %s)", type(error).__name__, error)
        return None


def _looked_for(torch: Any) -> TensorHandles | None:
    classes = (torch.Tensor, torch.nn.Parameter)
    data_ptr = torch.Tensor.data_ptr
    whole = torch.empty(8, device="cpu")
    samples = (whole, whole[3:], torch.nn.Parameter(torch.empty(2, device="cpu")))
    # Under a mode that makes tensors of other kinds nothing is learnt.
    if {type(sample) for sample in samples} != set(classes) or any(kind.data_ptr is not data_ptr for kind in classes):
        return None
    places = set.intersection(*(_places(torch, sample) for sample in samples))
    if len(places) != 1:
        return None
    (offset,) = places
    function = getattr(ctypes.CDLL(_LIBRARY, mode=os.RTLD_NOLOAD), _FUNCTION)
    function.argtypes, function.restype = [ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p)], ctypes.c_int32
    for sample in samples:
        found = ctypes.c_void_p()
        if function(id(sample) + offset, found) or (found.value or 0) != sample.data_ptr():
            return None
    return TensorHandles(classes, data_ptr, ctypes.cast(function, ctypes.c_void_p).value or 0, offset)


def _places(torch: Any, sample: Any) -> set[int]:
    """Return where in an object of Python the address of its tensor stands, in bytes from its beginning."""
    size = torch._C.TensorBase.__basicsize__  # noqa: SLF001  # no public class has it: this one's members alone, without those of its heirs
    words = (ctypes.c_size_t * (size // _WORD)).from_address(id(sample))
    wanted = sample._cdata  # noqa: SLF001  # the address, as torch itself passes it to its tools
    return {index * _WORD for index, word in enumerate(words) if word == wanted}

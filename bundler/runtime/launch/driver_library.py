# SPDX-License-Identifier: Apache-2.0
"""`Library`: the shared library of a GPU's driver, and `Calls`, what CUDA's and HIP's call the
functions that both have.

`native_driver.py` calls it; `cuda.py` and `hip.py` open it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any, NamedTuple

from bundler.errors import DriverUnavailable


class Calls(NamedTuple):
    """The names of the functions that take the same arguments in both libraries: HIP's API mirrors
    CUDA's.
    """

    device_count: str
    device_attribute: str
    module_load: str
    module_unload: str
    module_function: str
    function_attribute: str
    allocate: str
    free: str


class Library:
    """A driver's shared library: its functions as attributes, with their argument types."""

    def __init__(
        self, name: str, signatures: Mapping[str, tuple[object, ...]], backend: str
    ) -> None:
        self._found: dict[str, Any | None] = {}
        try:
            self._library = ctypes.CDLL(name)
            for function, types in signatures.items():
                getattr(self._library, function).argtypes = types
        except (OSError, AttributeError) as error:
            raise DriverUnavailable(
                f"{backend} kernels need the driver's library {name}, which cannot be used here:"
                f" {error}; install the GPU's driver, or run where there is one",
                backend=backend,
                library=name,
            ) from error

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._library, name)
        setattr(self, name, function)
        return function

    def find(self, name: str, types: tuple[object, ...] | None = None) -> Any | None:
        """Return a function that older libraries lack, None when this one does."""
        if name not in self._found:
            function = getattr(self._library, name, None)
            if function is not None:
                function.argtypes = types
            self._found[name] = function
        return self._found[name]

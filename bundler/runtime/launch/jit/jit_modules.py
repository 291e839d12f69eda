# SPDX-License-Identifier: Apache-2.0
"""`JitModules`: what Triton's NVIDIA driver would have the C compiler build, from our compiled
extension `_jit_driver`.

`cuda_utils` in the form of each release, and the launcher of a signature for Triton 3.6.  Nothing
is compiled and no file read but the extension's own.  `bundler/integrations/_process.py` hands it
to the toolchain, which asks it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from bundler.errors import CannotLaunchStatically

LIBRARY = "libcuda.so.1"
_ALWAYS = ("cuOccupancyMaxActiveClusters", "set_printf_fifo_size", "PyCUtensorMap")
_PLAIN = (*_ALWAYS, "load_binary", "get_device_properties")
_ANY_SIGNATURE = (
    "fill_tma_descriptor_tiled",
    "build_signature_metadata",
    "PyKernelArg",
    "ARG_CONSTEXPR",
    "ARG_KERNEL",
    "ARG_TUPLE",
)
_DEVICES = (
    "unload_module",
    "get_current_device",
    "set_current_device",
    "get_default_stream",
    "get_device_capability",
)


def _same(*names: str, **others: str) -> Mapping[str, str]:
    return {**{name: name for name in names}, **others}


_OVERSIZED = {
    "load_binary": "load_binary_oversized",
    "get_device_properties": "get_device_properties_oversized",
    "launch": "launch_oversized",
}
_LATER = (*_ALWAYS, *_ANY_SIGNATURE, *_DEVICES, "fill_tma_descriptor_im2col")
# Release -> name in its `cuda_utils` -> name in our extension.
_NAMES: Mapping[str, Mapping[str, str]] = {
    "3.6": _same(*_PLAIN, "fill_tma_descriptor"),
    "3.7": _same(
        *_PLAIN,
        *_ANY_SIGNATURE,
        "launch",
        fill_tma_descriptor_im2col="fill_tma_descriptor_im2col_apart",
    ),
    "3.8": _same(*_LATER, **_OVERSIZED),
    "3.9": _same(*_LATER, "is_stream_capturing", **_OVERSIZED),
}


def compiled_driver() -> Any | None:
    """Return the extension, None where it was not built."""
    try:
        from bundler.runtime.launch.jit import _jit_driver  # type: ignore[attr-defined, unused-ignore]
    except ImportError:
        return None
    return _jit_driver


class JitModules:
    """A supplier of the toolchain's `driver_modules`; safe from any thread.

    Args:
        told: hears of each module: None that ours was given, else why Triton builds its own.
        library: the driver's library.
    """

    def __init__(self, told: Callable[[str | None], None], library: str = LIBRARY) -> None:
        self.answered, self._library = told, library

    def utilities(self, family: str) -> ModuleType:
        """Return what stands in for `cuda_utils` of a release.

        Raises:
            CannotLaunchStatically: the extension was not built, the driver's library cannot be
                opened, or another release is asked for.
        """
        extension, names = _opened(self._library), _NAMES.get(family)
        if names is None:
            raise CannotLaunchStatically(f"cuda_utils of Triton {family} is not known")
        made = ModuleType("cuda_utils", f"Of triton-bundler, in the form of Triton {family}.")
        made.__file__ = extension.__file__
        for name, ours in names.items():
            setattr(made, name, getattr(extension, ours))
        return made

    def launcher(self, signature: tuple[Any, ...]) -> Callable[..., None]:
        """Return what stands in for a launcher of Triton 3.6; raises as `utilities`, also for a
        type that is not known.
        """
        extension = _opened(self._library)
        try:
            made: Callable[..., None] = extension.Launcher(signature)
        except (RuntimeError, TypeError) as error:
            raise CannotLaunchStatically(f"a launcher of {signature}: {error}") from None
        return made


@functools.cache
def _opened(library: str) -> Any:
    extension = compiled_driver()
    if extension is None:
        raise CannotLaunchStatically("the compiled extension was not built here")
    try:
        extension.open(library)
    except OSError as error:
        raise CannotLaunchStatically(str(error)) from None
    return extension

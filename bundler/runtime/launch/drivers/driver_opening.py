# SPDX-License-Identifier: Apache-2.0
"""Opens the driver of a backend; the only module of the launch room that knows all drivers.

`open_driver` is public; `open_first_driver` serves `load` and the tuner, which take the first
backend with a device.
"""

from __future__ import annotations

from collections.abc import Sequence

from bundler.errors import ConfigError, DriverUnavailable
from bundler.runtime.launch.drivers.driver import Driver


def open_driver(backend: str) -> Driver:
    """Open the driver of a backend, `cuda` or `hip`.

    Raises:
        DriverUnavailable: its library is not there, or it finds no device.
        ConfigError: there is no such backend.
    """
    if backend == "cuda":
        from bundler.runtime.launch.drivers.cuda import CudaDriver

        return CudaDriver()
    if backend == "hip":
        from bundler.runtime.launch.drivers.hip import HipDriver

        return HipDriver()
    raise ConfigError(
        f"there is no driver for {backend!r}; kernels run on 'cuda' or 'hip'", backend=backend
    )


def open_first_driver(backends: Sequence[str]) -> Driver:
    """Open the first driver that opens; raises `DriverUnavailable` with the reason of each when
    none does.
    """
    problems = []
    for backend in backends:
        try:
            return open_driver(backend)
        except DriverUnavailable as error:
            problems.append(str(error))
    raise DriverUnavailable("; ".join(problems), backends=tuple(backends))

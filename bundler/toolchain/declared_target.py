# SPDX-License-Identifier: Apache-2.0
"""`declared`: a driver that declares one target, so that Triton specializes and compiles for a GPU
that is not here.

Used around every compile and every import of kernels for a given target; `active_driver` says which
driver Triton uses in this thread.
"""

from __future__ import annotations

import contextlib
import re
import sys
import threading
from collections.abc import Iterator
from typing import Any

from bundler.errors import RecordingError
from bundler.format.entries import Target

# Triton has one active driver a process, so threads that declare another one take turns.
declaring = threading.RLock()
_DEVICE = 0
_GFX = re.compile(r"gfx(\d+)([0-9a-f])[0-9a-f]")


class UndeclaredError(AttributeError):
    """Somebody asked for a fact of a GPU that is only declared; also an `AttributeError`, so that
    `hasattr` says no.
    """


class DeclaredDriver:
    """Answers what the target is, and refuses every other question, since no GPU is there to know.

    Stands where Triton's driver object stands; a plain Triton without a GPU raises "0 active
    drivers" there.

    Attributes:
        refused: names that it was asked for and does not know, in order; the module that asked may
            have gone on with a guess.
    """

    def __init__(self, target: Target) -> None:
        self._target = target
        self.refused: list[str] = []

    def get_current_target(self) -> Any:
        """Return Triton's own object for the target."""
        return triton_target(self._target)

    def get_current_device(self) -> int:
        """Return the one device's index."""
        return _DEVICE

    def get_current_stream(self, _device: int | None = None) -> int:
        """Return the default stream, on which nothing runs."""
        return 0

    def get_device_capability(self, _device: int | None = None) -> tuple[int, int]:
        """Return (major, minor), as torch says it for such a GPU."""
        if self._target.backend == "hip":
            match = _GFX.fullmatch(self._target.arch)
            return (int(match[1]), int(match[2], 16)) if match is not None else (0, 0)
        return divmod(int(self._target.arch), 10)

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("_") and name not in self.refused:
            self.refused.append(name)
        raise UndeclaredError(
            f"a module asks Triton's driver for {name}; while we build for {self._target} without"
            " such a GPU, only its target, capability and device index are known"
        )


def triton_target(target: Target) -> Any:
    """Return Triton's object for a target; raises `RecordingError` when Triton is not installed."""
    try:
        from triton.backends.compiler import GPUTarget
    except ImportError as error:
        from bundler.project import install

        raise RecordingError(
            f"Triton cannot be imported ({error}), so nothing can be compiled; {install('triton')}"
        ) from error
    return GPUTarget(
        target.backend,
        int(target.arch) if target.arch.isdecimal() else target.arch,
        target.warp_size,
    )


class _OneThreadsDriver:
    """Stands where Triton's driver stands: for the thread that made it the declared one, for every
    other thread its own.

    Triton's own would be the one that was active before, or the one that Triton finds now; another
    thread may launch meanwhile.
    """

    def __init__(self, declared: DeclaredDriver, config: Any) -> None:
        self._declared, self._config = declared, config
        self._before = config._active  # noqa: SLF001  # reading `active` would look for a GPU
        self._thread = threading.get_ident()

    def known_here(self) -> Any:
        """Return the driver for this thread; None where Triton has looked for none yet."""
        return (
            self._declared if threading.get_ident() == self._thread else _known_here(self._before)
        )

    def __getattr__(self, name: str) -> Any:
        driver = self.known_here()
        return getattr(self._config.default if driver is None else driver, name)


def _known_here(driver: Any) -> Any:
    return driver.known_here() if isinstance(driver, _OneThreadsDriver) else driver


def active_driver() -> Any:
    """Return the driver that Triton uses in this thread; None when Triton is not imported, or has
    looked for none yet.
    """
    config: Any = getattr(sys.modules.get("triton.runtime.driver"), "driver", None)
    return _known_here(getattr(config, "_active", None))


@contextlib.contextmanager
def declared(target: Target) -> Iterator[DeclaredDriver]:
    """Declare a target, to this thread alone, while the block runs; the driver that was active
    before is active again afterwards.

    One block at a time in a process: another thread's waits.
    """
    with declaring:
        triton_target(target)
        config: Any = sys.modules["triton.runtime.driver"].driver
        before = config._active  # noqa: SLF001  # as above
        driver = DeclaredDriver(target)
        config.set_active(_OneThreadsDriver(driver, config))
        try:
            yield driver
        finally:
            # as above; None stands for "not looked for yet"
            config._active = before  # noqa: SLF001

# SPDX-License-Identifier: Apache-2.0
"""`ImitatedDriver`: Triton's driver for a GPU that a program is captured for; it knows the target's
device, and launches nothing.

Unlike `DeclaredDriver`, which serves imports and single compiles, it answers what a running program
asks: device properties, torch's device, streams, a benchmarker.  `program_imitation.py` makes it
Triton's active driver, for all threads.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from bundler.errors import ConfigError
from bundler.format.entries import Target
from bundler.toolchain.declared_target import DeclaredDriver, triton_target
from bundler.toolchain.imitation.target_devices import TargetDevice

# What a benchmark of a kernel that does not run says, in milliseconds; equal for all, so that the
# first configuration counts as the best.
BENCHMARK_MS = 1.0
_KILOHERTZ = 1_000_000


class ImitatedDriver(DeclaredDriver):
    """Answers as the driver of a machine with the target's GPU would, as far as no kernel runs."""

    def __init__(self, target: Target, device: TargetDevice) -> None:
        super().__init__(target)
        self.utils = _ImitatedUtilities(device, target)

    def set_current_device(self, _device: int) -> None:
        """Accept any device: all are alike."""

    def get_device_interface(self) -> Any:
        """Return torch's module for the device."""
        import torch

        return torch.cuda

    def get_active_torch_device(self) -> Any:
        """Return torch's name for the device."""
        import torch

        return torch.device("cuda", 0)

    def get_benchmarker(self) -> Callable[..., Any]:
        """Return a function that calls what it should measure once, and says the same time for
        everything.
        """
        return benchmark_once

    def get_empty_cache_for_benchmark(self) -> Any:
        """Return a buffer that nobody reads."""
        import torch

        return torch.empty(1, dtype=torch.int, device="cuda")

    def clear_cache(self, _cache: Any) -> None:
        """Do nothing: there is no cache."""


class _ImitatedUtilities:
    """What Triton's driver keeps in its helper library, as far as programs ask for it."""

    def __init__(self, device: TargetDevice, target: Target) -> None:
        self._properties = {
            "max_shared_mem": device.shared_memory_per_block_optin,
            "max_num_regs": device.regs_per_multiprocessor,
            "multiprocessor_count": device.multi_processor_count,
            "warpSize": target.warp_size,
            "sm_clock_rate": _KILOHERTZ,
            "mem_clock_rate": _KILOHERTZ,
            "mem_bus_width": 1024,
        }
        if target.backend == "hip":
            self._properties["arch"] = target.arch  # type: ignore[assignment]

    def get_device_properties(self, _device: int = 0) -> dict[str, Any]:
        """Return the device's properties, as Triton names them."""
        return dict(self._properties)


def benchmark_once(
    call: Callable[[], Any], *_: Any, quantiles: Sequence[float] | None = None, **_options: Any
) -> Any:
    """Call what should be measured once, and return a time that is the same for everything."""
    call()
    return BENCHMARK_MS if quantiles is None else [BENCHMARK_MS] * len(quantiles)


@contextlib.contextmanager
def imitating_driver(target: Target, device: TargetDevice) -> Iterator[ImitatedDriver]:
    """Make Triton ask an imitated driver, in every thread, while the block runs.

    Raises:
        RecordingError: Triton is not installed.
        ConfigError: an imitated driver is active already.
    """
    triton_target(target)
    config: Any = sys.modules["triton.runtime.driver"].driver
    before = config._active  # noqa: SLF001  # reading `active` would look for a GPU
    if isinstance(before, ImitatedDriver):
        raise ConfigError(
            f"this process captures for {before.get_current_target()} already; end that block first"
        )
    driver = ImitatedDriver(target, device)
    config.set_active(driver)
    try:
        yield driver
    finally:
        config._active = before  # noqa: SLF001  # as above; None stands for "not looked for yet"

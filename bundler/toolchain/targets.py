# SPDX-License-Identifier: Apache-2.0
"""`visible_targets`, `current_device`: which targets this process can run kernels on, and for which
device the current thread compiles.

Restores compare kernels with the targets; the listener and the spool note the device of each
compile.
"""

from __future__ import annotations

import functools
import os
import sys
from typing import Any

from bundler.format.entries import Target
from bundler.package_loggers import logger
from bundler.toolchain import probes

_LOG = logger("bundler.toolchain")


def visible_targets() -> tuple[Target, ...] | None:
    """Return the targets of all GPUs this process may use, sorted, each once; None when unknown, or
    when there is none.

    Never raises, makes no context and does not initialize CUDA (see `probes`).  The answer is kept
    for each process and each value of the variables that hide devices, so a forked child asks
    again.
    """
    try:
        return listed_targets()
    finally:
        wait_for_drivers()


def wait_for_drivers() -> None:
    """Return when the libraries of drivers that were asked are taken down, before which nobody
    should fork.
    """
    probes.wait_until_ended()


def listed_targets() -> tuple[Target, ...] | None:
    """Return what `visible_targets` does, some milliseconds earlier: the caller calls
    `wait_for_drivers` when it has nothing else to do.
    """
    cuda = _initialized_cuda()
    hidden = tuple(os.environ.get(name) for name in probes.VISIBILITY_VARIABLES)
    try:
        return _from_torch(os.getpid()) if cuda is not None else _from_drivers(os.getpid(), hidden)
    except Exception as error:  # noqa: BLE001  # the seam: a driver's fault must not become the user's
        _LOG.warning("the GPUs of this machine cannot be listed: %s", error)
        return None


def asking_takes_long() -> bool:
    """Tell whether `visible_targets` may take tens of milliseconds the first time: a library of the
    driver is asked, which wakes GPUs up.
    """
    return _initialized_cuda() is None and probes.has_nvidia_driver()


def forget_targets() -> None:
    """Ask torch again: what it said was of a GPU that is imitated."""
    _from_torch.cache_clear()


def current_device() -> int | None:
    """Return the index of the device that the current thread would compile for; None when unknown.

    Only asks torch, or the driver object that Triton uses, where it is already initialized.  Never
    raises.
    """
    cuda = _initialized_cuda()
    if cuda is not None:
        device: int = cuda.current_device()
        return device
    from bundler.toolchain.declared_target import active_driver  # a restore compiles nothing

    ask = getattr(active_driver(), "get_current_device", None)
    if ask is None or str(getattr(ask, "__module__", "")).startswith("torch"):
        # The stock drivers ask torch, which would initialize CUDA here.
        return None
    try:
        index = ask()
    except Exception as error:  # noqa: BLE001  # the seam: a driver object of the user's may raise anything
        _LOG.debug("the driver does not tell its device: %s", error)
        return None
    return index if type(index) is int else None


def _initialized_cuda() -> Any | None:
    cuda: Any = getattr(sys.modules.get("torch"), "cuda", None)
    is_initialized = getattr(cuda, "is_initialized", None)
    return cuda if is_initialized is not None and is_initialized() else None


@functools.lru_cache(maxsize=4)
def _from_torch(_pid: int) -> tuple[Target, ...] | None:
    torch: Any = sys.modules["torch"]
    targets = []
    for device in range(torch.cuda.device_count()):
        if torch.version.hip:
            name = torch.cuda.get_device_properties(device).gcnArchName.partition(":")[0]
            targets.append(Target("hip", name, 64 if name.startswith("gfx9") else 32))
        else:
            major, minor = torch.cuda.get_device_capability(device)
            targets.append(Target("cuda", str(major * 10 + minor)))
    return tuple(sorted(set(targets))) or None


@functools.lru_cache(maxsize=16)
def _from_drivers(_pid: int, _hidden: tuple[str | None, ...]) -> tuple[Target, ...] | None:
    nvidia, amd = probes.nvidia_targets(), probes.amd_targets()
    if nvidia is None or amd is None:
        return None
    return tuple(sorted({*nvidia, *amd})) or None

# SPDX-License-Identifier: Apache-2.0
"""`nvidia_targets`, `amd_targets`: which GPUs the drivers of this machine show to this process,
found without initializing CUDA in it.

`cuInit` in a process that forks later breaks CUDA in the child, so it is never called here.  NVML
answers without it, but knows nothing of CUDA_VISIBLE_DEVICES, which is applied to its answer; where
that is not exact (MIG slices, or ordinals on a machine with different GPUs, whose order only CUDA
knows) a short-lived process asks CUDA itself.  AMD's kernel driver publishes its GPUs as files.

`targets.py` asks it where torch has not been imported.
"""

from __future__ import annotations

import _thread
import os
import re
import sys
from collections.abc import Iterator
from typing import Any

from bundler.format.entries import Target
from bundler.package_loggers import logger

_LOG = logger("bundler.toolchain")
_NVIDIA_DEVICES = ("/dev/nvidiactl", "/dev/dxg", "/dev/nvhost-ctrl")
_AMD_DEVICE = "/dev/kfd"
_AMD_NODES = "/sys/class/kfd/kfd/topology/nodes"
_AMD_VISIBILITY = (
    "HIP_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
    "GPU_DEVICE_ORDINAL",
    "CUDA_VISIBLE_DEVICES",
)
VISIBILITY_VARIABLES = (*_AMD_VISIBILITY, "CUDA_DEVICE_ORDER", "HSA_OVERRIDE_GFX_VERSION")
_UUID_BYTES = 96
# CUDA needs a second or two to wake up a machine with many GPUs; a broken driver can take for ever.
_PROBE_TIMEOUT_S = 30
_PROBE = """
import ctypes
cuda = ctypes.CDLL("libcuda.so.1")
count, value, capability = ctypes.c_int(), ctypes.c_int(), []
status = cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count))
for device in range(0 if status else count.value):
    for attribute in (75, 76):  # compute capability, major and minor
        status = status or cuda.cuDeviceGetAttribute(ctypes.byref(value), attribute, device)
        capability.append(value.value)
print("status", status, *capability)
"""
_NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE
# What takes NVML down, and in which process; a forked child has no such thread.
_ending: list[tuple[int, _thread.LockType]] = []


def nvidia_targets() -> tuple[Target, ...] | None:
    """Return the targets of the NVIDIA GPUs this process may use; empty when there are none, None
    when unknown.
    """
    if not has_nvidia_driver():
        return ()
    capabilities = visible_capabilities(_nvml_devices())
    if capabilities is None:
        capabilities = _ask_cuda()
    return (
        None
        if capabilities is None
        else tuple(Target("cuda", str(capability)) for capability in capabilities)
    )


def has_nvidia_driver() -> bool:
    """Tell whether there may be NVIDIA GPUs: then asking takes tens of milliseconds, which NVML
    wakes them up for.
    """
    return any(os.path.exists(path) for path in _NVIDIA_DEVICES)


def visible_capabilities(devices: list[tuple[str, int]] | None) -> list[int] | None:
    """Apply CUDA_VISIBLE_DEVICES as CUDA does to (UUID, compute capability) pairs in PCI order;
    None when that is not exact.
    """
    if devices is None:
        return None
    wanted = os.environ.get("CUDA_VISIBLE_DEVICES")
    if wanted is None:
        return [capability for _, capability in devices]
    ordinals_known = len({capability for _, capability in devices}) == 1 or (
        os.environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
    )
    visible: list[int] = []
    for item in (part.strip() for part in wanted.split(",")):
        if item.startswith("MIG") or (item.isdecimal() and not ordinals_known):
            return None
        capability = _find(item, devices)
        if capability is None:
            break  # CUDA hides every device from the first invalid entry on.
        visible.append(capability)
    return visible


def _find(item: str, devices: list[tuple[str, int]]) -> int | None:
    if item.isdecimal():
        return devices[int(item)][1] if int(item) < len(devices) else None
    named = [
        capability
        for uuid, capability in devices
        if item.startswith("GPU-") and uuid.startswith(item)
    ]
    return named[0] if len(named) == 1 else None


def _nvml_devices() -> list[tuple[str, int]] | None:
    import ctypes  # as in `_read_nvml`: where there is no GPU, nothing is asked

    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        if nvml.nvmlInit_v2() != 0:
            return None
    except (OSError, AttributeError):
        return None
    try:
        return list(_read_nvml(nvml))
    except (OSError, AttributeError) as error:
        _LOG.info("NVML does not list its devices: %s", error)
        return None
    finally:
        _begin_to_end(nvml)


def _begin_to_end(nvml: Any) -> None:
    """Take NVML down in a thread: that takes milliseconds, and who asked has its answer."""
    ended = _thread.allocate_lock()
    ended.acquire()

    def end() -> None:
        try:
            nvml.nvmlShutdown()
        finally:
            ended.release()

    _ending.append((os.getpid(), ended))
    try:
        _thread.start_new_thread(end, ())
    except RuntimeError:  # no thread can be had
        end()


def wait_until_ended() -> None:
    """Return when no library of a driver is being taken down any more: a child that is forked in
    the midst of it may hang in that library.
    """
    while _ending:
        process, ended = _ending.pop()
        if process == os.getpid():
            with ended:
                continue


def _read_nvml(nvml: Any) -> Iterator[tuple[str, int]]:
    import ctypes

    count = ctypes.c_uint()
    _check(nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)))
    for index in range(count.value):
        handle, major, minor = ctypes.c_void_p(), ctypes.c_int(), ctypes.c_int()
        uuid = ctypes.create_string_buffer(_UUID_BYTES)
        _check(nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle)))
        _check(
            nvml.nvmlDeviceGetCudaComputeCapability(
                handle, ctypes.byref(major), ctypes.byref(minor)
            )
        )
        _check(nvml.nvmlDeviceGetUUID(handle, uuid, _UUID_BYTES))
        yield uuid.value.decode("ascii", "replace"), major.value * 10 + minor.value


def _check(status: int) -> None:
    if status != 0:
        raise OSError(f"NVML status {status}")


def _ask_cuda() -> list[int] | None:
    import subprocess

    try:
        answer = subprocess.run(
            [sys.executable, "-I", "-S", "-c", _PROBE],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            check=True,
            timeout=_PROBE_TIMEOUT_S,
        )
        status, *numbers = (int(word) for word in answer.stdout.split()[1:])
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        _LOG.info("CUDA does not list its devices: %s", error)
        return None
    if status == _NO_DEVICE:
        return []
    pairs = zip(numbers[::2], numbers[1::2], strict=False)
    return None if status else [major * 10 + minor for major, minor in pairs]


def amd_targets() -> tuple[Target, ...] | None:
    """Return the targets of the AMD GPUs this process may use; empty when there are none, None when
    unknown.
    """
    if not os.access(_AMD_DEVICE, os.R_OK | os.W_OK):
        return ()
    targets = tuple(
        Target("hip", name, 64 if name.startswith("gfx9") else 32) for name in _amd_names()
    )
    limits = [os.environ[name].strip() for name in _AMD_VISIBILITY if name in os.environ]
    if any(limit in {"", "-1"} for limit in limits):
        return ()
    if "HSA_OVERRIDE_GFX_VERSION" in os.environ or (limits and len(set(targets)) > 1):
        return None
    return targets


def _amd_names() -> Iterator[str]:
    """Yield `gfx942` for each GPU; the file has it as a decimal number, two digits each for minor
    and stepping.
    """
    for node in sorted(os.listdir(_AMD_NODES)) if os.path.isdir(_AMD_NODES) else ():
        try:
            with open(os.path.join(_AMD_NODES, node, "properties"), encoding="ascii") as file:
                match = re.search(r"^gfx_target_version (\d+)$", file.read(), re.MULTILINE)
        except (OSError, UnicodeDecodeError):
            continue  # a node that another container owns cannot be read
        version = int(match[1]) if match is not None else 0
        if version:  # a processor is a node too, with version 0
            yield f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}"

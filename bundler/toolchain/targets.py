# SPDX-License-Identifier: Apache-2.0
"""`visible_targets`, `current_device`: which targets this process can run kernels on, and for which
device the current thread compiles.

Where torch has initialized CUDA it is asked.  Elsewhere CUDA is never initialized: `cuInit` in a
process that forks later breaks CUDA in the child.  NVML answers without it, but knows nothing of
CUDA_VISIBLE_DEVICES, which is applied to its answer; where that is not exact (MIG slices, or
ordinals on a machine with different GPUs, whose order only CUDA knows) a short-lived process asks
CUDA itself.  AMD's kernel driver publishes its GPUs as files.

Restores compare kernels with the targets; the listener and the spool note the device of each
compile.
"""

from __future__ import annotations

import _thread
import functools
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


def visible_targets() -> tuple[Target, ...] | None:
    """Return the targets of all GPUs this process may use, sorted, each once; None when unknown, or
    when there is none.

    Never raises, makes no context and does not initialize CUDA (see above).  The answer is kept
    for each process and each value of the variables that hide devices, so a forked child asks
    again.
    """
    try:
        return listed_targets()
    finally:
        wait_for_drivers()


def wait_for_drivers() -> None:
    """Return when no library of a driver is being taken down any more: a child that is forked in
    the midst of it may hang in that library.
    """
    while _ending:
        process, ended = _ending.pop()
        if process == os.getpid():
            with ended:
                continue


def listed_targets() -> tuple[Target, ...] | None:
    """Return what `visible_targets` does, some milliseconds earlier: the caller calls
    `wait_for_drivers` when it has nothing else to do.
    """
    cuda = _initialized_cuda()
    hidden = tuple(os.environ.get(name) for name in VISIBILITY_VARIABLES)
    try:
        return _from_torch(os.getpid()) if cuda is not None else _from_drivers(os.getpid(), hidden)
    except Exception as error:  # noqa: BLE001  # the seam: a driver's fault must not become the user's
        _LOG.warning("the GPUs of this machine cannot be listed: %s", error)
        return None


def asking_takes_long() -> bool:
    """Tell whether `visible_targets` may take tens of milliseconds the first time: a library of the
    driver is asked, which wakes GPUs up.
    """
    return _initialized_cuda() is None and has_nvidia_driver()


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
            targets.append(_amd_target(name))
        else:
            major, minor = torch.cuda.get_device_capability(device)
            targets.append(Target("cuda", str(major * 10 + minor)))
    return tuple(sorted(set(targets))) or None


@functools.lru_cache(maxsize=16)
def _from_drivers(_pid: int, _hidden: tuple[str | None, ...]) -> tuple[Target, ...] | None:
    nvidia, amd = nvidia_targets(), amd_targets()
    if nvidia is None or amd is None:
        return None
    return tuple(sorted({*nvidia, *amd})) or None


def nvidia_targets() -> tuple[Target, ...] | None:
    """Return the targets of the NVIDIA GPUs this process may use; empty when there are none, None
    when unknown.
    """
    if not has_nvidia_driver():
        return ()
    capabilities = visible_capabilities(_nvml_devices())
    if capabilities is None:
        capabilities = _ask_cuda()
    if capabilities is None:
        return None
    return tuple(Target("cuda", str(capability)) for capability in capabilities)


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
    named = [capability for uuid, capability in devices if uuid.startswith(item)]
    return named[0] if len(named) == 1 and item.startswith("GPU-") else None


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
    targets = tuple(map(_amd_target, _amd_names()))
    limits = [os.environ[name].strip() for name in _AMD_VISIBILITY if name in os.environ]
    if any(limit in {"", "-1"} for limit in limits):
        return ()
    if "HSA_OVERRIDE_GFX_VERSION" in os.environ or (limits and len(set(targets)) > 1):
        return None
    return targets


def _amd_target(name: str) -> Target:
    return Target("hip", name, 64 if name.startswith("gfx9") else 32)


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

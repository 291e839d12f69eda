# SPDX-License-Identifier: Apache-2.0
"""The functions, numbers and structures of the HIP runtime that `hip.py` uses, as hip_runtime_api.h
declares them.

`python -m tools.hip headers` compares each with AMD's headers; `NAMES` says what the headers call
the numbers.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_char_p, c_int, c_size_t, c_uint, c_uint64, c_void_p

from bundler.runtime.launch.drivers.native_pool import CallTable

NOT_INITIALIZED, NO_BINARY_FOR_GPU = 3, 209
INVALID_DEVICE, INVALID_HANDLE, INVALID_CONTEXT = 101, 400, 201

# Device attributes
COOPERATIVE_LAUNCH, MAX_THREADS_PER_BLOCK, MULTIPROCESSORS, MAX_SHARED, WARP_SIZE = (
    10,
    56,
    63,
    74,
    87,
)

# Function attributes
FUNCTION_MAX_THREADS = 0

# hipDeviceProp_tR0600, of which we read one string; room for what later releases add.
PROPERTIES_BYTES, ARCH_AT, ARCH_BYTES = 4096, 1160, 256

# Types of memory, by the numbers that they have since ROCm 6
UNREGISTERED, ON_DEVICE = 0, 2

# Launch attributes.  Headers before those of ROCm 10 have no name for the first; Triton's driver.c
# gives it the same number.
CLUSTER_DIMENSION, COOPERATIVE = 4, 2

# What the headers call each number above.
NAMES = {
    "NOT_INITIALIZED": "hipErrorNotInitialized",
    "NO_BINARY_FOR_GPU": "hipErrorNoBinaryForGpu",
    "INVALID_DEVICE": "hipErrorInvalidDevice",
    "INVALID_HANDLE": "hipErrorInvalidHandle",
    "INVALID_CONTEXT": "hipErrorInvalidContext",
    "COOPERATIVE_LAUNCH": "hipDeviceAttributeCooperativeLaunch",
    "MAX_THREADS_PER_BLOCK": "hipDeviceAttributeMaxThreadsPerBlock",
    "MULTIPROCESSORS": "hipDeviceAttributeMultiprocessorCount",
    "MAX_SHARED": "hipDeviceAttributeMaxSharedMemoryPerBlock",
    "WARP_SIZE": "hipDeviceAttributeWarpSize",
    "FUNCTION_MAX_THREADS": "HIP_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK",
    "UNREGISTERED": "hipMemoryTypeUnregistered",
    "ON_DEVICE": "hipMemoryTypeDevice",
    "CLUSTER_DIMENSION": "hipLaunchAttributeClusterDimension",
    "COOPERATIVE": "hipLaunchAttributeCooperative",
}

_OUT, _OUT_INT = POINTER(c_void_p), POINTER(c_int)
# What both drivers call, as CUDA's in `cuda_api`.
CALLS: CallTable = {
    "device_count": ("hipGetDeviceCount", (_OUT_INT,)),
    "device_attribute": ("hipDeviceGetAttribute", (_OUT_INT, c_int, c_int)),
    "module_load": ("hipModuleLoadData", (_OUT, c_char_p)),
    "module_unload": ("hipModuleUnload", (c_void_p,)),
    "module_function": ("hipModuleGetFunction", (_OUT, c_void_p, c_char_p)),
    "function_attribute": ("hipFuncGetAttribute", (_OUT_INT, c_int, c_void_p)),
    "allocate": ("hipMallocAsync", (POINTER(c_uint64), c_size_t, c_void_p)),
    "free": ("hipFreeAsync", (c_uint64, c_void_p)),
    "current_place": ("hipGetDevice", (_OUT_INT,)),
}
# Argument types of all functions that every library has.
SIGNATURES: dict[str, tuple[object, ...]] = {
    **dict(CALLS.values()),
    "hipInit": (c_uint,),
    "hipGetLastError": (),
    "hipSetDevice": (c_int,),
    "hipGetDevicePropertiesR0600": (c_void_p, c_int),
    "hipPointerGetAttributes": (c_void_p, c_void_p),
}
# Of memory pools, as CUDA's in `cuda_api`.
POOL: CallTable = {
    "create": ("hipMemPoolCreate", (_OUT, c_void_p)),
    "destroy": ("hipMemPoolDestroy", (c_void_p,)),
    "set_attribute": ("hipMemPoolSetAttribute", (c_void_p, c_int, c_void_p)),
    "trim": ("hipMemPoolTrimTo", (c_void_p, c_size_t)),
    "allocate": ("hipMallocFromPoolAsync", (POINTER(c_uint64), c_size_t, c_void_p, c_void_p)),
    "free": ("hipFreeAsync", (c_uint64, c_void_p)),
    "info": ("hipMemGetInfo", (POINTER(c_size_t), POINTER(c_size_t))),
    "pin": ("hipHostMalloc", (POINTER(c_uint64), c_size_t, c_uint)),
    "unpin": ("hipHostFree", (c_uint64,)),
    "copy": ("hipMemcpyAsync", (c_uint64, c_uint64, c_size_t, c_int, c_void_p)),
    "fill": ("hipMemsetAsync", (c_uint64, c_int, c_size_t, c_void_p)),
    "new_stream": ("hipStreamCreateWithFlags", (_OUT, c_uint)),
    "drop_stream": ("hipStreamDestroy", (c_void_p,)),
    "synchronize": ("hipStreamSynchronize", (c_void_p,)),
    "new_event": ("hipEventCreateWithFlags", (_OUT, c_uint)),
    "drop_event": ("hipEventDestroy", (c_void_p,)),
    "record": ("hipEventRecord", (c_void_p, c_void_p)),
    "wait": ("hipStreamWaitEvent", (c_void_p, c_void_p, c_uint)),
}
# Of graphs, as CUDA's in `cuda_api`.
GRAPHS: CallTable = {
    "is_capturing": ("hipStreamIsCapturing", (c_void_p, _OUT_INT)),
    "begin": ("hipStreamBeginCapture", (c_void_p, c_int)),
    "end": ("hipStreamEndCapture", (c_void_p, _OUT)),
    "instantiate": ("hipGraphInstantiateWithFlags", (_OUT, c_void_p, c_uint64)),
    "launch": ("hipGraphLaunch", (c_void_p, c_void_p)),
    "drop_template": ("hipGraphDestroy", (c_void_p,)),
    "drop": ("hipGraphExecDestroy", (c_void_p,)),
}
# A copy whose direction HIP finds by the addresses
COPY_BY_ADDRESS = 4
# Returns a string.
ERROR_STRING = "hipGetErrorString"
# Called with ready-made arguments, so without declared types: converting them costs more than the
# call.
LAUNCH, LAUNCH_COOPERATIVE, LAUNCH_EXTENDED = (
    "hipModuleLaunchKernel",
    "hipModuleLaunchCooperativeKernel",
    "hipDrvLaunchKernelEx",
)


class PointerAttributes(ctypes.Structure):
    """hipPointerAttribute_t."""

    _fields_ = (
        ("type", c_int),
        ("device", c_int),
        ("device_pointer", c_void_p),
        ("host_pointer", c_void_p),
        ("managed", c_int),
        ("flags", c_uint),
    )

# SPDX-License-Identifier: Apache-2.0
"""The functions and numbers of the CUDA driver that `cuda.py` uses, as cuda.h declares them."""

from __future__ import annotations

from ctypes import POINTER, c_char_p, c_int, c_size_t, c_uint, c_uint8, c_uint64, c_void_p

from bundler.runtime.launch.drivers.native_pool import CallTable

LIBRARY = "libcuda.so.1"

NOT_INITIALIZED, NO_BINARY_FOR_GPU = 3, 209
INVALID_CONTEXT, INVALID_HANDLE, CONTEXT_IS_DESTROYED = 201, 400, 709

# Device attributes
MAX_THREADS_PER_BLOCK, WARP_SIZE, MULTIPROCESSORS, MAJOR, MINOR = 1, 10, 16, 75, 76
COOPERATIVE_LAUNCH, MAX_SHARED_OPTIN = 95, 97

# Function attributes
FUNCTION_STATIC_SHARED, FUNCTION_MAX_DYNAMIC_SHARED, FUNCTION_NON_PORTABLE_CLUSTER = 1, 8, 14
CACHE_PREFER_SHARED = 1

# Pointer attributes
POINTER_MEMORY_TYPE, POINTER_IS_MANAGED, POINTER_DEVICE_ORDINAL = 2, 8, 9
MEMORY_ON_HOST = 1

# Launch attributes
ATTRIBUTE_BYTES = 72
COOPERATIVE, CLUSTER_DIMENSION, CLUSTER_SCHEDULING, PROGRAMMATIC_SERIALIZATION = 2, 4, 5, 6
CLUSTER_SPREAD = 1
# More blocks a cluster than this need a permission.
PORTABLE_CLUSTER = 8

# Tensor maps
INTERLEAVE_NONE, PROMOTION_L2_128B, FILL_NONE, FILL_NAN = 0, 2, 0, 1
TENSOR_MAP_TF32 = 11

_OUT = POINTER(c_void_p)
_OUT_INT = POINTER(c_int)
# What both drivers call, as HIP's API mirrors CUDA's -> the function, and its argument types; each
# returns a status.  `current_place` writes the place of the thread: a context of CUDA, a device of
# HIP.
CALLS: CallTable = {
    "device_count": ("cuDeviceGetCount", (_OUT_INT,)),
    "device_attribute": ("cuDeviceGetAttribute", (_OUT_INT, c_int, c_int)),
    "module_load": ("cuModuleLoadData", (_OUT, c_char_p)),
    "module_unload": ("cuModuleUnload", (c_void_p,)),
    "module_function": ("cuModuleGetFunction", (_OUT, c_void_p, c_char_p)),
    "function_attribute": ("cuFuncGetAttribute", (_OUT_INT, c_int, c_void_p)),
    "allocate": ("cuMemAllocAsync", (POINTER(c_uint64), c_size_t, c_void_p)),
    "free": ("cuMemFreeAsync", (c_uint64, c_void_p)),
    "current_place": ("cuCtxGetCurrent", (_OUT,)),
}
# Argument types of all functions that every library has.
SIGNATURES: dict[str, tuple[object, ...]] = {
    **dict(CALLS.values()),
    "cuInit": (c_uint,),
    "cuDriverGetVersion": (_OUT_INT,),
    "cuGetErrorName": (c_int, POINTER(c_char_p)),
    "cuGetErrorString": (c_int, POINTER(c_char_p)),
    "cuDevicePrimaryCtxRetain": (_OUT, c_int),
    "cuCtxSetCurrent": (c_void_p,),
    "cuCtxGetDevice": (_OUT_INT,),
    "cuCtxPushCurrent_v2": (c_void_p,),
    "cuCtxPopCurrent_v2": (_OUT,),
    "cuFuncSetAttribute": (c_void_p, c_int, c_int),
    "cuFuncSetCacheConfig": (c_void_p, c_int),
    "cuPointerGetAttribute": (c_void_p, c_int, c_uint64),
}
# Newer than the rest: a driver before CUDA 12 lacks them, and then the kernels that need them are
# refused.
OPTIONAL_SIGNATURES: dict[str, tuple[object, ...]] = {
    "cuTensorMapEncodeTiled": (
        c_void_p,
        c_int,
        c_uint,
        c_uint64,
        c_void_p,
        c_void_p,
        c_void_p,
        c_void_p,
        c_int,
        c_int,
        c_int,
        c_int,
    ),
}
# Of memory pools, which programs without another library of arrays have; looked up when one is
# made.
POOL: CallTable = {
    "create": ("cuMemPoolCreate", (_OUT, c_void_p)),
    "destroy": ("cuMemPoolDestroy", (c_void_p,)),
    "set_attribute": ("cuMemPoolSetAttribute", (c_void_p, c_int, c_void_p)),
    "trim": ("cuMemPoolTrimTo", (c_void_p, c_size_t)),
    "allocate": ("cuMemAllocFromPoolAsync", (POINTER(c_uint64), c_size_t, c_void_p, c_void_p)),
    "free": ("cuMemFreeAsync", (c_uint64, c_void_p)),
    "info": ("cuMemGetInfo_v2", (POINTER(c_size_t), POINTER(c_size_t))),
    "pin": ("cuMemHostAlloc", (POINTER(c_uint64), c_size_t, c_uint)),
    "unpin": ("cuMemFreeHost", (c_uint64,)),
    "copy": ("cuMemcpyAsync", (c_uint64, c_uint64, c_size_t, c_void_p)),
    "fill": ("cuMemsetD8Async", (c_uint64, c_uint8, c_size_t, c_void_p)),
    "new_stream": ("cuStreamCreate", (_OUT, c_uint)),
    "drop_stream": ("cuStreamDestroy_v2", (c_void_p,)),
    "synchronize": ("cuStreamSynchronize", (c_void_p,)),
    "new_event": ("cuEventCreate", (_OUT, c_uint)),
    "drop_event": ("cuEventDestroy_v2", (c_void_p,)),
    "record": ("cuEventRecord", (c_void_p, c_void_p)),
    "wait": ("cuStreamWaitEvent", (c_void_p, c_void_p, c_uint)),
}
# Of graphs, which came later; looked up when the first is captured.
GRAPHS: CallTable = {
    "is_capturing": ("cuStreamIsCapturing", (c_void_p, _OUT_INT)),
    "begin": ("cuStreamBeginCapture_v2", (c_void_p, c_int)),
    "end": ("cuStreamEndCapture", (c_void_p, _OUT)),
    "instantiate": ("cuGraphInstantiateWithFlags", (_OUT, c_void_p, c_uint64)),
    "launch": ("cuGraphLaunch", (c_void_p, c_void_p)),
    "drop_template": ("cuGraphDestroy", (c_void_p,)),
    "drop": ("cuGraphExecDestroy", (c_void_p,)),
}
# What the extension calls to load a binary, in the order in which it takes their addresses.
LOADING = (
    "cuCtxGetCurrent",
    "cuCtxGetDevice",
    "cuModuleLoadData",
    "cuModuleGetFunction",
    "cuFuncGetAttribute",
)
# Called with ready-made arguments, so without declared types: converting them costs more than the
# call.
LAUNCH, LAUNCH_EXTENDED = "cuLaunchKernel", "cuLaunchKernelEx"

/* SPDX-License-Identifier: Apache-2.0
 *
 * The extension _jit_driver: what Triton otherwise has the C compiler build before its first launch on a GPU of NVIDIA's.
 *
 * Here are the driver's library, its errors and contexts, the functions of `cuda_utils` for devices and binaries, and the module, to
 * which _jit_tensor_maps.c, _jit_launch.c and _jit_launcher.c add theirs.  Each function takes the arguments and raises the errors of
 * Triton's own.  The library is opened when Python says so, never linked.
 *
 * Called from bundler/runtime/launch/jit_modules.py (`open`), and from Triton's driver.py and compiler.py, which take what is here for
 * the `cuda_utils` that they would have compiled.
 */

#include "_jit_driver.h"
#include <dlfcn.h>
#include <stddef.h>
#include <string.h>

#define PREFER_SHARED 1
#define PRINTF_FIFO_SIZE 1
#define LEGACY_SHARED_BYTES 49152

/* ------------------------------------------------------------------------------------------- the library, errors, contexts */

struct driver cuda;

static const struct {
  const char *symbol;
  size_t offset;
  int needed;
} functions[] = {
#define FUNCTION(symbol, member, needed) {#symbol, offsetof(struct driver, member), needed}
    FUNCTION(cuGetErrorString, get_error, 1),
    FUNCTION(cuCtxGetCurrent, get_context, 1),
    FUNCTION(cuCtxSetCurrent, set_context, 1),
    FUNCTION(cuDeviceGet, get_device, 1),
    FUNCTION(cuDevicePrimaryCtxRetain, retain_context, 1),
    FUNCTION(cuDeviceGetAttribute, device_attribute, 1),
    FUNCTION(cuModuleLoadData, load_module, 1),
    FUNCTION(cuModuleUnload, unload_module, 1),
    FUNCTION(cuModuleGetFunction, find_function, 1),
    FUNCTION(cuFuncGetAttribute, function_attribute, 1),
    FUNCTION(cuFuncSetAttribute, set_function_attribute, 1),
    FUNCTION(cuFuncSetCacheConfig, set_function_cache, 1),
    FUNCTION(cuCtxGetLimit, get_limit, 1),
    FUNCTION(cuCtxSetLimit, set_limit, 1),
    FUNCTION(cuDriverGetVersion, driver_version, 1),
    FUNCTION(cuPointerGetAttribute, pointer_attribute, 1),
    FUNCTION(cuCtxGetDevice, context_device, 1),
    FUNCTION(cuStreamIsCapturing, is_capturing, 0),
    FUNCTION(cuOccupancyMaxActiveClusters, most_clusters, 0),
    FUNCTION(cuTensorMapEncodeTiled, encode_tiled, 0),
    FUNCTION(cuTensorMapEncodeIm2col, encode_im2col, 0),
    FUNCTION(cuLaunchKernelEx, launch, 0),
};

int check(int status) {
  const char *words = NULL;
  if (status == SUCCESS)
    return 0;
  cuda.get_error(status, &words);
  PyErr_Format(PyExc_RuntimeError, "Triton Error [CUDA]: %s", words != NULL ? words : "unknown error");
  return -1;
}

int require(const void *function, const char *symbol) {
  if (function != NULL)
    return 0;
  PyErr_Format(PyExc_RuntimeError, "Failed to retrieve %s from libcuda.so.1", symbol);
  return -1;
}

/* Opens the driver's library under a name; Python calls it before any other function. */
static PyObject *open_driver(PyObject *module, PyObject *name) {
  const char *path = PyUnicode_AsUTF8(name);
  void *library = path == NULL ? NULL : dlopen(path, RTLD_LAZY);
  size_t index;
  if (library == NULL) {
    if (path != NULL)
      PyErr_Format(PyExc_OSError, "%s cannot be opened: %s", path, dlerror());
    return NULL;
  }
  for (index = 0; index < sizeof(functions) / sizeof(*functions); index++) {
    void *found = dlsym(library, functions[index].symbol);
    if (found == NULL && functions[index].needed) {
      PyErr_Format(PyExc_OSError, "%s has no %s", path, functions[index].symbol);
      return NULL;
    }
    memcpy((char *)&cuda + functions[index].offset, &found, sizeof(found));
  }
  Py_RETURN_NONE;
}

/* The context of `device` becomes current where none is; the status of the driver. */
static int ensure_context(int device) {
  void *context = NULL;
  int status = cuda.get_context(&context);
  if (status == SUCCESS && context == NULL && (status = cuda.retain_context(&context, device)) == SUCCESS)
    status = cuda.set_context(context);
  return status;
}

int ensure_first_context(void) {
  void *context = NULL;
  int device, status = cuda.get_context(&context);
  if (status != SUCCESS || context != NULL)
    return check(status);
  return check(cuda.get_device(&device, 0)) < 0 ? -1 : check(ensure_context(device));
}

/* ------------------------------------------------------------------------------------------------- devices and binaries */

static PyObject *device_properties(PyObject *args, int oversized) {
  static const int wanted[] = {SHARED_OPTIN, REGISTERS, PROCESSORS, WARP_SIZE, CLOCK_RATE, MEMORY_CLOCK_RATE, BUS_WIDTH};
  int number, device = 0, major = 0, minor = 0, found[7] = {0}, index;
  if (!PyArg_ParseTuple(args, "i", &number))
    return NULL;
  cuda.get_device(&device, number);
  if (oversized && (check(cuda.device_attribute(&major, CAPABILITY_MAJOR, device)) < 0 ||
                    check(cuda.device_attribute(&minor, CAPABILITY_MINOR, device)) < 0))
    return NULL;
  for (index = 0; index < 7; index++) {
    int attribute = index == 0 && major == 10 && minor == 7 ? SHARED_OVERSIZED : wanted[index];
    if (check(cuda.device_attribute(&found[index], attribute, device)) < 0)
      return NULL;
  }
  return Py_BuildValue("{s:i, s:i, s:i, s:i, s:i, s:i, s:i}", "max_shared_mem", found[0], "max_num_regs", found[1],
                       "multiprocessor_count", found[2], "warpSize", found[3], "sm_clock_rate", found[4], "mem_clock_rate", found[5],
                       "mem_bus_width", found[6]);
}

static PyObject *get_device_properties(PyObject *module, PyObject *args) { return device_properties(args, 0); }
static PyObject *get_device_properties_oversized(PyObject *module, PyObject *args) { return device_properties(args, 1); }

static PyObject *get_device_capability(PyObject *module, PyObject *args) {
  int number, device, major, minor;
  if (!PyArg_ParseTuple(args, "i", &number) || check(cuda.get_device(&device, number)) < 0 ||
      check(cuda.device_attribute(&major, CAPABILITY_MAJOR, device)) < 0 ||
      check(cuda.device_attribute(&minor, CAPABILITY_MINOR, device)) < 0)
    return NULL;
  return Py_BuildValue("(ii)", major, minor);
}

static PyObject *get_current_device(PyObject *module, PyObject *none) {
  int device;
  if (ensure_first_context() < 0 || check(cuda.context_device(&device)) < 0)
    return NULL;
  return PyLong_FromLong(device);
}

static int set_device(int device) {
  void *context = NULL;
  int status;
  Py_BEGIN_ALLOW_THREADS
  status = cuda.retain_context(&context, device);
  if (status == SUCCESS)
    status = cuda.set_context(context);
  Py_END_ALLOW_THREADS
  return check(status);
}

static PyObject *set_current_device(PyObject *module, PyObject *args) {
  int device;
  if (!PyArg_ParseTuple(args, "i", &device) || set_device(device) < 0)
    return NULL;
  Py_RETURN_NONE;
}

static PyObject *get_default_stream(PyObject *module, PyObject *args) {
  int device;
  if (!PyArg_ParseTuple(args, "i", &device) || set_device(device) < 0)
    return NULL;
  return PyLong_FromLong(0);
}

static PyObject *is_stream_capturing(PyObject *module, PyObject *args) {
  unsigned long long stream;
  int state;
  if (!PyArg_ParseTuple(args, "K", &stream) || require(cuda.is_capturing, "cuStreamIsCapturing") < 0 ||
      check(cuda.is_capturing((void *)(uintptr_t)stream, &state)) < 0)
    return NULL;
  return PyBool_FromLong(state != 0);
}

/* Lets a function use more shared memory than the usual 48 KiB; the status of the driver. */
static int raise_shared(void *function, int device, int available, int oversized) {
  int total, fixed, status;
  if (oversized && cuda.set_function_attribute(function, SHARED_MODE, ALLOW_OVERSIZED) == SUCCESS)
    return SUCCESS;
  if ((status = cuda.set_function_cache(function, PREFER_SHARED)) != SUCCESS ||
      (status = cuda.device_attribute(&total, SHARED_OF_PROCESSOR, device)) != SUCCESS ||
      (status = cuda.function_attribute(&fixed, SHARED_STATIC, function)) != SUCCESS)
    return status;
  return cuda.set_function_attribute(function, SHARED_DYNAMIC, available - fixed);
}

typedef struct {
  void *module, *function;
  int registers, spills, threads;
} loaded_t;

static int load(loaded_t *found, const char *name, const char *data, int shared, int device, int oversized) {
  int available, status;
  if ((status = ensure_context(device)) != SUCCESS || (status = cuda.load_module(&found->module, data)) != SUCCESS ||
      (status = cuda.find_function(&found->function, found->module, name)) != SUCCESS ||
      (status = cuda.function_attribute(&found->registers, FUNCTION_REGISTERS, found->function)) != SUCCESS ||
      (status = cuda.function_attribute(&found->spills, LOCAL_BYTES, found->function)) != SUCCESS ||
      (status = cuda.function_attribute(&found->threads, MOST_THREADS, found->function)) != SUCCESS ||
      (status = cuda.device_attribute(&available, SHARED_OPTIN, device)) != SUCCESS)
    return status;
  if (shared > LEGACY_SHARED_BYTES && available > LEGACY_SHARED_BYTES)
    return raise_shared(found->function, device, available, oversized);
  return SUCCESS;
}

static PyObject *load_from(PyObject *args, int oversized) {
  const char *name, *data;
  Py_ssize_t size;
  int shared, device, status;
  loaded_t found = {0};
  if (!PyArg_ParseTuple(args, "ss#ii", &name, &data, &size, &shared, &device))
    return NULL;
  Py_BEGIN_ALLOW_THREADS
  status = load(&found, name, data, shared, device, oversized);
  Py_END_ALLOW_THREADS
  if (check(status) < 0)
    return NULL;
  return Py_BuildValue("(KKiii)", (unsigned long long)(uintptr_t)found.module, (unsigned long long)(uintptr_t)found.function,
                       found.registers, found.spills / 4, found.threads);
}

static PyObject *load_binary(PyObject *module, PyObject *args) { return load_from(args, 0); }
static PyObject *load_binary_oversized(PyObject *module, PyObject *args) { return load_from(args, 1); }

static PyObject *unload_module(PyObject *self, PyObject *args) {
  unsigned long long module;
  int status;
  if (!PyArg_ParseTuple(args, "K", &module))
    return NULL;
  Py_BEGIN_ALLOW_THREADS
  status = cuda.unload_module((void *)(uintptr_t)module);
  Py_END_ALLOW_THREADS
  if (check(status) < 0)
    return NULL;
  Py_RETURN_NONE;
}

static PyObject *most_active_clusters(PyObject *module, PyObject *args) {
  unsigned long long handle;
  int shared, size, status, found = -1;
  attribute_t attribute = {CLUSTER_DIMENSION, 0, {0, 1, 1}};
  config_t config = {{0, 1, 1}, {128, 1, 1}, 0, NULL, &attribute, 1};
  void *function;
  if (!PyArg_ParseTuple(args, "Kii", &handle, &shared, &size) ||
      require(cuda.most_clusters, "cuOccupancyMaxActiveClusters") < 0)
    return NULL;
  function = (void *)(uintptr_t)handle;
  config.grid[0] = attribute.value[0] = (uint32_t)size;
  config.shared = (uint32_t)shared;
  Py_BEGIN_ALLOW_THREADS
  if ((status = cuda.set_function_attribute(function, SHARED_DYNAMIC, shared)) == SUCCESS &&
      (status = cuda.set_function_attribute(function, NON_PORTABLE_CLUSTER, 1)) == SUCCESS)
    status = cuda.most_clusters(&found, function, &config);
  Py_END_ALLOW_THREADS
  return check(status) < 0 ? NULL : PyLong_FromLong(found);
}

static PyObject *set_printf_fifo_size(PyObject *module, PyObject *args) {
  long wanted;
  size_t present = 0;
  int status;
  if (!PyArg_ParseTuple(args, "l", &wanted))
    return NULL;
  if (wanted < 0) {
    PyErr_SetString(PyExc_ValueError, "fifo size must be non-negative");
    return NULL;
  }
  Py_BEGIN_ALLOW_THREADS
  /* Once a kernel has printed, the driver refuses to set even the size that it has. */
  if ((status = ensure_context(0)) == SUCCESS && (status = cuda.get_limit(&present, PRINTF_FIFO_SIZE)) == SUCCESS &&
      present != (size_t)wanted)
    status = cuda.set_limit(PRINTF_FIFO_SIZE, (size_t)wanted);
  Py_END_ALLOW_THREADS
  if (check(status) < 0)
    return NULL;
  Py_RETURN_NONE;
}

/* --------------------------------------------------------------------------------------------------------------- module */

static PyMethodDef methods[] = {
    {"open", open_driver, METH_O, "Open the driver's library; before anything else."},
    {"get_device_properties", get_device_properties, METH_VARARGS, "Return what Triton wants to know of a device."},
    {"get_device_properties_oversized", get_device_properties_oversized, METH_VARARGS, "The same, with oversized shared memory."},
    {"get_device_capability", get_device_capability, METH_VARARGS, "Return (major, minor)."},
    {"get_current_device", get_current_device, METH_NOARGS, "Return the number of the current device."},
    {"set_current_device", set_current_device, METH_VARARGS, "Make a device current."},
    {"get_default_stream", get_default_stream, METH_VARARGS, "Make a device current and return its default stream, 0."},
    {"is_stream_capturing", is_stream_capturing, METH_VARARGS, "Tell whether a stream is being captured."},
    {"load_binary", load_binary, METH_VARARGS, "Load a device binary; (module, function, registers, spills, threads)."},
    {"load_binary_oversized", load_binary_oversized, METH_VARARGS, "The same, with oversized shared memory."},
    {"unload_module", unload_module, METH_VARARGS, "Unload a module."},
    {"cuOccupancyMaxActiveClusters", most_active_clusters, METH_VARARGS, "Return how many clusters fit the device."},
    {"set_printf_fifo_size", set_printf_fifo_size, METH_VARARGS, "Say how many bytes kernels may print."},
    {NULL, NULL, 0, NULL}};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_jit_driver", "What Triton has built before its first launch.", -1,
                                    methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__jit_driver(void) {
  PyObject *made;
  const uint16_t one = 1;
  if (*(const unsigned char *)&one != 1) {
    PyErr_SetString(PyExc_ImportError, "the compiled driver packs for little-endian machines");
    return NULL;
  }
  made = PyModule_Create(&module);
  if (made != NULL && (add_tensor_maps(made) < 0 || add_launch(made) < 0 || add_launcher(made) < 0))
    Py_CLEAR(made);
  return made;
}

/* SPDX-License-Identifier: Apache-2.0
 *
 * The extension _jit_driver: what Triton otherwise has the C compiler build before its first launch
 * on a GPU of NVIDIA's.
 *
 * Here are the driver's library, its errors and contexts, the functions of `cuda_utils` for devices
 * and binaries, and the module, to which _jit_tensor_maps.c and _jit_launch.c add theirs.  Each
 * function takes the arguments and raises the errors of Triton's own.  The library is opened when
 * Python says so, never linked.
 *
 * Called from bundler/runtime/launch/jit/jit_modules.py (`open`), and from Triton's driver.py and
 * compiler.py, which take what is here for the `cuda_utils` that they would have compiled.
 */

#include "_jit_driver.h"
#include <dlfcn.h>
#include <stddef.h>
#include <string.h>

#define PREFER_SHARED 1
#define PRINTF_FIFO_SIZE 1
#define LEGACY_SHARED_BYTES 49152

/* --------------------------------------------------------------- the library, errors, contexts */

static const struct {
  const char *symbol;
  size_t offset;
  int needed;
} functions[] = {
#define FUNCTION(symbol, member, needed) {#symbol, offsetof(driver_t, member), needed}
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

int check(state_t *state, int status) {
  const char *words = NULL;
  if (status == SUCCESS)
    return 0;
  state->cuda.get_error(status, &words);
  PyErr_Format(PyExc_RuntimeError, "Triton Error [CUDA]: %s",
               words != NULL ? words : "unknown error");
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
    memcpy((char *)&((state_t *)PyModule_GetState(module))->cuda + functions[index].offset, &found,
           sizeof(found));
  }
  Py_RETURN_NONE;
}

/* The context of `device` becomes current where none is; the status of the driver. */
static int ensure_context(state_t *state, int device) {
  void *context = NULL;
  int status = state->cuda.get_context(&context);
  if (status == SUCCESS && context == NULL &&
      (status = state->cuda.retain_context(&context, device)) == SUCCESS)
    status = state->cuda.set_context(context);
  return status;
}

int ensure_first_context(state_t *state) {
  void *context = NULL;
  int device, status = state->cuda.get_context(&context);
  if (status != SUCCESS || context != NULL)
    return check(state, status);
  return check(state, state->cuda.get_device(&device, 0)) < 0
             ? -1
             : check(state, ensure_context(state, device));
}

/* ------------------------------------------------------------------------ devices and binaries */

static PyObject *device_properties(state_t *state, PyObject *args, int oversized) {
  static const int wanted[] = {SHARED_OPTIN, REGISTERS,         PROCESSORS, WARP_SIZE,
                               CLOCK_RATE,   MEMORY_CLOCK_RATE, BUS_WIDTH};
  int number, device = 0, major = 0, minor = 0, found[7] = {0}, index;
  if (!PyArg_ParseTuple(args, "i", &number))
    return NULL;
  state->cuda.get_device(&device, number);
  if (oversized &&
      (check(state, state->cuda.device_attribute(&major, CAPABILITY_MAJOR, device)) < 0 ||
       check(state, state->cuda.device_attribute(&minor, CAPABILITY_MINOR, device)) < 0))
    return NULL;
  for (index = 0; index < 7; index++) {
    int attribute = index == 0 && major == 10 && minor == 7 ? SHARED_OVERSIZED : wanted[index];
    if (check(state, state->cuda.device_attribute(&found[index], attribute, device)) < 0)
      return NULL;
  }
  return Py_BuildValue("{s:i, s:i, s:i, s:i, s:i, s:i, s:i}", "max_shared_mem", found[0],
                       "max_num_regs", found[1], "multiprocessor_count", found[2], "warpSize",
                       found[3], "sm_clock_rate", found[4], "mem_clock_rate", found[5],
                       "mem_bus_width", found[6]);
}

static PyObject *get_device_properties(PyObject *module, PyObject *args) {
  return device_properties(PyModule_GetState(module), args, 0);
}
static PyObject *get_device_properties_oversized(PyObject *module, PyObject *args) {
  return device_properties(PyModule_GetState(module), args, 1);
}

static PyObject *get_device_capability(PyObject *module, PyObject *args) {
  state_t *state = PyModule_GetState(module);
  int number, device, major, minor;
  if (!PyArg_ParseTuple(args, "i", &number) ||
      check(state, state->cuda.get_device(&device, number)) < 0 ||
      check(state, state->cuda.device_attribute(&major, CAPABILITY_MAJOR, device)) < 0 ||
      check(state, state->cuda.device_attribute(&minor, CAPABILITY_MINOR, device)) < 0)
    return NULL;
  return Py_BuildValue("(ii)", major, minor);
}

static PyObject *get_current_device(PyObject *module, PyObject *none) {
  (void)none;
  state_t *state = PyModule_GetState(module);
  int device;
  if (ensure_first_context(state) < 0 || check(state, state->cuda.context_device(&device)) < 0)
    return NULL;
  return PyLong_FromLong(device);
}

static int set_device(state_t *state, int device) {
  void *context = NULL;
  int status;
  Py_BEGIN_ALLOW_THREADS
  status = state->cuda.retain_context(&context, device);
  if (status == SUCCESS)
    status = state->cuda.set_context(context);
  Py_END_ALLOW_THREADS
  return check(state, status);
}

static PyObject *set_current_device(PyObject *module, PyObject *args) {
  state_t *state = PyModule_GetState(module);
  int device;
  if (!PyArg_ParseTuple(args, "i", &device) || set_device(state, device) < 0)
    return NULL;
  Py_RETURN_NONE;
}

static PyObject *get_default_stream(PyObject *module, PyObject *args) {
  state_t *state = PyModule_GetState(module);
  int device;
  if (!PyArg_ParseTuple(args, "i", &device) || set_device(state, device) < 0)
    return NULL;
  return PyLong_FromLong(0);
}

static PyObject *is_stream_capturing(PyObject *module, PyObject *args) {
  state_t *state = PyModule_GetState(module);
  unsigned long long stream;
  int capturing;
  if (!PyArg_ParseTuple(args, "K", &stream) ||
      require(state->cuda.is_capturing, "cuStreamIsCapturing") < 0 ||
      check(state, state->cuda.is_capturing((void *)(uintptr_t)stream, &capturing)) < 0)
    return NULL;
  return PyBool_FromLong(capturing != 0);
}

/* Lets a function use more shared memory than the usual 48 KiB; the status of the driver. */
static int raise_shared(state_t *state, void *function, int device, int available, int oversized) {
  int total, fixed, status;
  if (oversized &&
      state->cuda.set_function_attribute(function, SHARED_MODE, ALLOW_OVERSIZED) == SUCCESS)
    return SUCCESS;
  if ((status = state->cuda.set_function_cache(function, PREFER_SHARED)) != SUCCESS ||
      (status = state->cuda.device_attribute(&total, SHARED_OF_PROCESSOR, device)) != SUCCESS ||
      (status = state->cuda.function_attribute(&fixed, SHARED_STATIC, function)) != SUCCESS)
    return status;
  return state->cuda.set_function_attribute(function, SHARED_DYNAMIC, available - fixed);
}

typedef struct {
  void *module, *function;
  int registers, spills, threads;
} loaded_t;

static int load(state_t *state, loaded_t *found, const char *name, const char *data, int shared,
                int device, int oversized) {
  int available, status;
  if ((status = ensure_context(state, device)) != SUCCESS ||
      (status = state->cuda.load_module(&found->module, data)) != SUCCESS ||
      (status = state->cuda.find_function(&found->function, found->module, name)) != SUCCESS ||
      (status = state->cuda.function_attribute(&found->registers, FUNCTION_REGISTERS,
                                               found->function)) != SUCCESS ||
      (status = state->cuda.function_attribute(&found->spills, LOCAL_BYTES, found->function)) !=
          SUCCESS ||
      (status = state->cuda.function_attribute(&found->threads, MOST_THREADS, found->function)) !=
          SUCCESS ||
      (status = state->cuda.device_attribute(&available, SHARED_OPTIN, device)) != SUCCESS)
    return status;
  if (shared > LEGACY_SHARED_BYTES && available > LEGACY_SHARED_BYTES)
    return raise_shared(state, found->function, device, available, oversized);
  return SUCCESS;
}

static PyObject *load_from(state_t *state, PyObject *args, int oversized) {
  const char *name, *data;
  Py_ssize_t size;
  int shared, device, status;
  loaded_t found = {0};
  if (!PyArg_ParseTuple(args, "ss#ii", &name, &data, &size, &shared, &device))
    return NULL;
  Py_BEGIN_ALLOW_THREADS
  status = load(state, &found, name, data, shared, device, oversized);
  Py_END_ALLOW_THREADS
  if (check(state, status) < 0)
    return NULL;
  return Py_BuildValue("(KKiii)", (unsigned long long)(uintptr_t)found.module,
                       (unsigned long long)(uintptr_t)found.function, found.registers,
                       found.spills / 4, found.threads);
}

static PyObject *load_binary(PyObject *module, PyObject *args) {
  return load_from(PyModule_GetState(module), args, 0);
}
static PyObject *load_binary_oversized(PyObject *module, PyObject *args) {
  return load_from(PyModule_GetState(module), args, 1);
}

static PyObject *unload_module(PyObject *self, PyObject *args) {
  state_t *state = PyModule_GetState(self);
  unsigned long long module;
  int status;
  if (!PyArg_ParseTuple(args, "K", &module))
    return NULL;
  Py_BEGIN_ALLOW_THREADS
  status = state->cuda.unload_module((void *)(uintptr_t)module);
  Py_END_ALLOW_THREADS
  if (check(state, status) < 0)
    return NULL;
  Py_RETURN_NONE;
}

static PyObject *most_active_clusters(PyObject *module, PyObject *args) {
  state_t *state = PyModule_GetState(module);
  unsigned long long handle;
  int shared, size, status, found = -1;
  attribute_t attribute = {CLUSTER_DIMENSION, 0, {0, 1, 1}};
  config_t config = {{0, 1, 1}, {128, 1, 1}, 0, NULL, &attribute, 1};
  void *function;
  if (!PyArg_ParseTuple(args, "Kii", &handle, &shared, &size) ||
      require(state->cuda.most_clusters, "cuOccupancyMaxActiveClusters") < 0)
    return NULL;
  function = (void *)(uintptr_t)handle;
  config.grid[0] = attribute.value[0] = (uint32_t)size;
  config.shared = (uint32_t)shared;
  Py_BEGIN_ALLOW_THREADS
  if ((status = state->cuda.set_function_attribute(function, SHARED_DYNAMIC, shared)) == SUCCESS &&
      (status = state->cuda.set_function_attribute(function, NON_PORTABLE_CLUSTER, 1)) == SUCCESS)
    status = state->cuda.most_clusters(&found, function, &config);
  Py_END_ALLOW_THREADS
  return check(state, status) < 0 ? NULL : PyLong_FromLong(found);
}

static PyObject *set_printf_fifo_size(PyObject *module, PyObject *args) {
  state_t *state = PyModule_GetState(module);
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
  if ((status = ensure_context(state, 0)) == SUCCESS &&
      (status = state->cuda.get_limit(&present, PRINTF_FIFO_SIZE)) == SUCCESS &&
      present != (size_t)wanted)
    status = state->cuda.set_limit(PRINTF_FIFO_SIZE, (size_t)wanted);
  Py_END_ALLOW_THREADS
  if (check(state, status) < 0)
    return NULL;
  Py_RETURN_NONE;
}

/* -------------------------------------------------------------------------------------- module */

static PyMethodDef methods[] = {
    {"open", open_driver, METH_O, "Open the driver's library; before anything else."},
    {"get_device_properties", get_device_properties, METH_VARARGS,
     "Return what Triton wants to know of a device."},
    {"get_device_properties_oversized", get_device_properties_oversized, METH_VARARGS,
     "The same, with oversized shared memory."},
    {"get_device_capability", get_device_capability, METH_VARARGS, "Return (major, minor)."},
    {"get_current_device", get_current_device, METH_NOARGS,
     "Return the number of the current device."},
    {"set_current_device", set_current_device, METH_VARARGS, "Make a device current."},
    {"get_default_stream", get_default_stream, METH_VARARGS,
     "Make a device current and return its default stream, 0."},
    {"is_stream_capturing", is_stream_capturing, METH_VARARGS,
     "Tell whether a stream is being captured."},
    {"load_binary", load_binary, METH_VARARGS,
     "Load a device binary; (module, function, registers, spills, threads)."},
    {"load_binary_oversized", load_binary_oversized, METH_VARARGS,
     "The same, with oversized shared memory."},
    {"unload_module", unload_module, METH_VARARGS, "Unload a module."},
    {"cuOccupancyMaxActiveClusters", most_active_clusters, METH_VARARGS,
     "Return how many clusters fit the device."},
    {"set_printf_fifo_size", set_printf_fifo_size, METH_VARARGS,
     "Say how many bytes kernels may print."},
    {NULL, NULL, 0, NULL}};

static int visit_state(PyObject *module, visitproc visit, void *arg) {
  state_t *state = PyModule_GetState(module);
  Py_VISIT(state->map_type);
  Py_VISIT(state->argument_type);
  return 0;
}

static int clear_state(PyObject *module) {
  state_t *state = PyModule_GetState(module);
  Py_CLEAR(state->map_type);
  Py_CLEAR(state->argument_type);
  return 0;
}

static void free_state(void *module) {
  clear_state(module);
  Py_CLEAR(((state_t *)PyModule_GetState(module))->word_data_ptr);
}

static int set_up(PyObject *module) {
  const uint16_t one = 1;
  if (*(const unsigned char *)&one != 1) {
    PyErr_SetString(PyExc_ImportError, "the compiled driver packs for little-endian machines");
    return -1;
  }
  return add_tensor_maps(module) < 0 ? -1 : add_launch(module);
}

static PyModuleDef_Slot slots[] = {{Py_mod_exec, set_up}, {0, NULL}};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_jit_driver", "What Triton has built before its first launch.",
    sizeof(state_t),       methods,       slots,
    visit_state,           clear_state,   free_state};

PyMODINIT_FUNC PyInit__jit_driver(void) { return PyModuleDef_Init(&definition); }

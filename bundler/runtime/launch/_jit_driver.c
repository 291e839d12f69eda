/* SPDX-License-Identifier: Apache-2.0
 *
 * What Triton otherwise has the C compiler build before its first launch on a GPU of NVIDIA's: the functions of `cuda_utils`, and
 * the launcher of one signature (Launcher), as Triton up to 3.6 builds one for each.
 *
 * Each takes the arguments and raises the errors of Triton's own.  The driver's library is opened when Python says so, never linked.
 */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <dlfcn.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <structmember.h>

#define MAP_ALIGNMENT 128
#define MAP_BYTES 128
#define MOST_DIMENSIONS 5
/* Values of a call that lie on the stack; more are allocated. */
#define STACK_VALUES 96
#define MOST_ATTRIBUTES 5
/* Of a call of Launcher: three for the grid, stream, function, two switches, two scratch buffers, two of metadata, two hooks. */
#define LEADING 13

/* ------------------------------------------------------------------------------------------- the driver's own definitions */

#define SUCCESS 0
#define INVALID_VALUE 1

enum device_attribute {
  WARP_SIZE = 10, REGISTERS = 12, CLOCK_RATE = 13, PROCESSORS = 16, MEMORY_CLOCK_RATE = 36, BUS_WIDTH = 37, CAPABILITY_MAJOR = 75,
  CAPABILITY_MINOR = 76, SHARED_OF_PROCESSOR = 81, SHARED_OPTIN = 97, SHARED_OVERSIZED = 150
};
enum function_attribute {
  MOST_THREADS = 0, SHARED_STATIC = 1, LOCAL_BYTES = 3, FUNCTION_REGISTERS = 4, SHARED_DYNAMIC = 8, NON_PORTABLE_CLUSTER = 14,
  SHARED_MODE = 17
};
enum launch_attribute {
  COOPERATIVE = 2, CLUSTER_DIMENSION = 4, CLUSTER_SCHEDULING = 5, PROGRAMMATIC_SERIALIZATION = 6, LAUNCH_SHARED_MODE = 18
};
#define ALLOW_OVERSIZED 3
#define SPREAD 1
#define PREFER_SHARED 1
#define PRINTF_FIFO_SIZE 1
#define DEVICE_POINTER 3
#define INTERLEAVE_NONE 0
#define PROMOTION_L2_128B 2
#define FILL_NAN 1
/* Up to this version the driver sets a bit that makes reads from small tensors fault. */
#define LAST_VERSION_WITH_FAULT 13010
#define SMALL_TENSOR_BYTES (128 * 1024)
#define FAULTY_BIT 21
#define LEGACY_SHARED_BYTES 49152
#define LARGEST_USUAL_SHARED_BYTES (228 * 1024)

typedef struct {
  uint32_t id, padding;
  uint32_t value[16];
} attribute_t;
typedef struct {
  uint32_t grid[3], block[3], shared;
  void *stream;
  attribute_t *attributes;
  uint32_t count;
} config_t;

/* Functions of the driver; one that an old driver lacks is NULL. */
static struct driver {
  int (*get_error)(int, const char **);
  int (*get_context)(void **);
  int (*set_context)(void *);
  int (*get_device)(int *, int);
  int (*retain_context)(void **, int);
  int (*device_attribute)(int *, int, int);
  int (*load_module)(void **, const void *);
  int (*unload_module)(void *);
  int (*find_function)(void **, void *, const char *);
  int (*function_attribute)(int *, int, void *);
  int (*set_function_attribute)(void *, int, int);
  int (*set_function_cache)(void *, int);
  int (*get_limit)(size_t *, int);
  int (*set_limit)(int, size_t);
  int (*driver_version)(int *);
  int (*pointer_attribute)(void *, int, uint64_t);
  int (*context_device)(int *);
  int (*is_capturing)(void *, int *);
  int (*most_clusters)(int *, void *, const config_t *);
  int (*encode_tiled)(void *, int, uint32_t, void *, const uint64_t *, const uint64_t *, const uint32_t *, const uint32_t *, int, int,
                      int, int);
  int (*encode_im2col)(void *, int, uint32_t, void *, const uint64_t *, const uint64_t *, const int *, const int *, uint32_t, uint32_t,
                       const uint32_t *, int, int, int, int);
  int (*launch)(const config_t *, void *, void **, void **);
} cuda;

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

static PyObject *word_data_ptr;

/* Returns 0 for success, -1 with the exception that Triton raises. */
static int check(int status) {
  const char *words = NULL;
  if (status == SUCCESS)
    return 0;
  cuda.get_error(status, &words);
  PyErr_Format(PyExc_RuntimeError, "Triton Error [CUDA]: %s", words != NULL ? words : "unknown error");
  return -1;
}

static int require(const void *function, const char *symbol) {
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

static int ensure_first_context(void) {
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

/* ----------------------------------------------------------------------------------------------------------- tensor maps */

typedef struct {
  PyObject_HEAD
  _Alignas(MAP_ALIGNMENT) unsigned char map[MAP_BYTES];
} tensor_map_t;

static PyObject *allocate_map(PyTypeObject *type, Py_ssize_t count) {
  void *memory = NULL;
  if (posix_memalign(&memory, MAP_ALIGNMENT, (size_t)type->tp_basicsize) != 0)
    return PyErr_NoMemory();
  return PyObject_Init(memory, type);
}

static void free_map(PyObject *self) { free(self); }

static PyTypeObject TensorMap = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "triton.backends.nvidia.PyCUtensorMap",
    .tp_basicsize = sizeof(tensor_map_t),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_doc = "A tensor map of the driver's.",
    .tp_new = PyType_GenericNew,
    .tp_alloc = allocate_map,
    .tp_dealloc = free_map,
};

/* Reads integers into `to`, the last one first, as the driver counts dimensions; returns how many, -1 with an exception. */
static int read_backwards(PyObject *sequence, const char *what, long long *to) {
  char words[64];
  Py_ssize_t index, count;
  PyObject *items;
  snprintf(words, sizeof(words), "%s must be a sequence", what);
  items = PySequence_Fast(sequence, words);
  if (items == NULL)
    return -1;
  count = PySequence_Fast_GET_SIZE(items);
  if (count > MOST_DIMENSIONS) {
    PyErr_Format(PyExc_RuntimeError, "%s has %zd dimensions, a tensor map at most %d", what, count, MOST_DIMENSIONS);
    count = -1;
  }
  for (index = 0; index < count; index++) {
    PyObject *item = PySequence_Fast_GET_ITEM(items, index);
    if (!PyLong_Check(item))
      PyErr_Format(PyExc_TypeError, "%s must be an int", strcmp(what, "blockSize") == 0 ? "block size" : what);
    else
      to[count - index - 1] = PyLong_AsLongLong(item);
    if (PyErr_Occurred()) {
      count = -1;
      break;
    }
  }
  Py_DECREF(items);
  return (int)count;
}

typedef struct {
  unsigned long long address;
  int swizzle, element_bytes, element_type, padding, rank, block_rank;
  uint64_t shape[MOST_DIMENSIONS], strides[MOST_DIMENSIONS];
  uint32_t block[MOST_DIMENSIONS];
} tensor_t;

static int read_tensor(tensor_t *tensor, PyObject *block, PyObject *shape, PyObject *strides) {
  long long sizes[MOST_DIMENSIONS], steps[MOST_DIMENSIONS], blocks[MOST_DIMENSIONS];
  int index, rank = read_backwards(shape, "shape", sizes), step_rank;
  tensor->block_rank = rank < 0 ? -1 : read_backwards(block, "blockSize", blocks);
  step_rank = tensor->block_rank < 0 ? -1 : read_backwards(strides, "strides", steps);
  if (step_rank < 0)
    return -1;
  if (rank == 0 || step_rank != rank) {
    PyErr_SetString(PyExc_RuntimeError, "Rank mismatch");
    return -1;
  }
  tensor->rank = rank;
  for (index = 0; index < tensor->block_rank; index++)
    tensor->block[index] = (uint32_t)blocks[index];
  for (index = 0; index < rank; index++)
    tensor->shape[index] = (uint64_t)sizes[index];
  /* The stride of the innermost dimension goes without saying. */
  for (index = 0; index + 1 < rank; index++)
    tensor->strides[index] = (uint64_t)(tensor->element_bytes * steps[index + 1]);
  tensor->strides[rank - 1] = tensor->shape[rank - 1] * (rank == 1 ? (uint64_t)tensor->element_bytes : tensor->strides[rank - 2]);
  return 0;
}

/* Appends "NAME=[1, 2]" and what follows it. */
static void add_numbers(char *words, size_t room, const char *name, const uint64_t *numbers, int count, const char *end) {
  size_t used = strlen(words);
  int index;
  used += (size_t)snprintf(words + used, room - used, "%s=[", name);
  for (index = 0; index < count; index++)
    used += (size_t)snprintf(words + used, room - used, index > 0 ? ", %llu" : "%llu", (unsigned long long)numbers[index]);
  snprintf(words + used, room - used, "]%s", end);
}

/* Raises what Triton says; at most five numbers a list, so that the words fit. */
static PyObject *refuse_map(PyObject *map, int status, const char *what, const tensor_t *tensor, const uint64_t *steps) {
  char words[2048];
  const char *reason = NULL;
  uint64_t block[MOST_DIMENSIONS];
  int index;
  for (index = 0; index < MOST_DIMENSIONS; index++)
    block[index] = tensor->block[index];
  cuda.get_error(status, &reason);
  snprintf(words, sizeof(words),
           "Triton Error [CUDA]: Failed to create %s: %.200s\nelemType=%d rank=%d global_address=0x%llx elemSize=%d swizzle=%d "
           "padding=%d\n",
           what, reason != NULL ? reason : "Unknown error", tensor->element_type, tensor->rank, tensor->address,
           tensor->element_bytes, tensor->swizzle, tensor->padding);
  add_numbers(words, sizeof(words), "shape", tensor->shape, tensor->rank, "\n");
  add_numbers(words, sizeof(words), "strides", tensor->strides, tensor->rank - 1, "\n");
  add_numbers(words, sizeof(words), "blockSize", block, tensor->block_rank, steps != NULL ? " " : "\n");
  if (steps != NULL)
    add_numbers(words, sizeof(words), "elementStrides", steps, tensor->rank, tensor->padding == 1 ? " fill=1\n" : " fill=0\n");
  PyErr_SetString(PyExc_RuntimeError, words);
  Py_DECREF(map);
  return NULL;
}

static void mend_map(unsigned char *map, const tensor_t *tensor) {
  int index, version = 0, last = 0;
  uint64_t word;
  if (cuda.driver_version(&version) != SUCCESS || version > LAST_VERSION_WITH_FAULT)
    return;
  for (index = 0; index < tensor->rank; index++) {
    int step = index == 0 ? tensor->element_bytes : (int)tensor->strides[index - 1];
    last += (int)((tensor->shape[index] - 1) * (uint64_t)step);
  }
  if (last + 1 >= SMALL_TENSOR_BYTES)
    return;
  memcpy(&word, map + sizeof(word), sizeof(word));
  word &= ~(1ull << FAULTY_BIT);
  memcpy(map + sizeof(word), &word, sizeof(word));
}

static PyObject *fill_tiled(PyObject *args, int mends) {
  static const uint32_t ones[MOST_DIMENSIONS] = {1, 1, 1, 1, 1};
  static const uint64_t steps[MOST_DIMENSIONS] = {1, 1, 1, 1, 1};
  PyObject *block, *shape, *strides, *map;
  tensor_t tensor = {0};
  int status;
  if (!PyArg_ParseTuple(args, "KiiiOOOi", &tensor.address, &tensor.swizzle, &tensor.element_bytes, &tensor.element_type, &block,
                        &shape, &strides, &tensor.padding) ||
      read_tensor(&tensor, block, shape, strides) < 0 || require(cuda.encode_tiled, "cuTensorMapEncodeTiled") < 0)
    return NULL;
  if (tensor.block_rank != tensor.rank) {
    PyErr_SetString(PyExc_RuntimeError, "Rank mismatch");
    return NULL;
  }
  if ((map = PyObject_CallNoArgs((PyObject *)&TensorMap)) == NULL)
    return NULL;
  status = cuda.encode_tiled(((tensor_map_t *)map)->map, tensor.element_type, (uint32_t)tensor.rank,
                             (void *)(uintptr_t)tensor.address, tensor.shape, tensor.strides, tensor.block, ones, INTERLEAVE_NONE,
                             tensor.swizzle, PROMOTION_L2_128B, tensor.padding == 1 ? FILL_NAN : 0);
  if (status != SUCCESS)
    return refuse_map(map, status, "tensor map descriptor", &tensor, steps);
  if (mends)
    mend_map(((tensor_map_t *)map)->map, &tensor);
  return map;
}

static PyObject *fill_tma_descriptor(PyObject *module, PyObject *args) { return fill_tiled(args, 0); }
static PyObject *fill_tma_descriptor_tiled(PyObject *module, PyObject *args) { return fill_tiled(args, 1); }

typedef struct {
  int lower[MOST_DIMENSIONS], upper[MOST_DIMENSIONS], channels, pixels;
  uint32_t steps[MOST_DIMENSIONS];
} pixels_t;

static int read_pixels(pixels_t *box, int rank, PyObject *lower, PyObject *upper, PyObject *steps) {
  long long low[MOST_DIMENSIONS] = {0}, high[MOST_DIMENSIONS] = {0}, step[MOST_DIMENSIONS];
  int index, low_rank = read_backwards(lower, "pixelBoxLower", low);
  int high_rank = low_rank < 0 ? -1 : read_backwards(upper, "pixelBoxUpper", high);
  int step_rank = high_rank < 0 ? -1 : read_backwards(steps, "elementStrides", step);
  if (step_rank < 0)
    return -1;
  if (low_rank != high_rank || step_rank != rank) {
    PyErr_SetString(PyExc_RuntimeError,
                    low_rank != high_rank ? "Pixel box corner rank mismatch" : "elementStrides length must match tensor rank");
    return -1;
  }
  for (index = 0; index < MOST_DIMENSIONS; index++) {
    box->lower[index] = (int)low[index];
    box->upper[index] = (int)high[index];
    box->steps[index] = index < rank ? (uint32_t)step[index] : 1;
  }
  return 0;
}

/* `apart`: channels and pixels are arguments of their own; else they are the two numbers of the block. */
static PyObject *fill_im2col(PyObject *args, int apart) {
  PyObject *block, *shape, *strides, *lower, *upper, *steps, *map;
  tensor_t tensor = {0};
  pixels_t box = {{0}};
  int status, read;
  if (apart)
    read = PyArg_ParseTuple(args, "KiiiOOOiOOiiO", &tensor.address, &tensor.swizzle, &tensor.element_bytes, &tensor.element_type,
                            &block, &shape, &strides, &tensor.padding, &lower, &upper, &box.channels, &box.pixels, &steps);
  else
    read = PyArg_ParseTuple(args, "KiiiOOOiOOO", &tensor.address, &tensor.swizzle, &tensor.element_bytes, &tensor.element_type,
                            &block, &shape, &strides, &tensor.padding, &lower, &upper, &steps);
  if (!read || read_tensor(&tensor, block, shape, strides) < 0 || read_pixels(&box, tensor.rank, lower, upper, steps) < 0 ||
      require(cuda.encode_im2col, "cuTensorMapEncodeIm2col") < 0)
    return NULL;
  if (!apart) {
    if (tensor.block_rank != 2) {
      PyErr_SetString(PyExc_RuntimeError, "blockSize must have exactly 2 dimensions for im2col");
      return NULL;
    }
    box.channels = (int)tensor.block[0];
    box.pixels = (int)tensor.block[1];
  }
  if ((map = PyObject_CallNoArgs((PyObject *)&TensorMap)) == NULL)
    return NULL;
  status = cuda.encode_im2col(((tensor_map_t *)map)->map, tensor.element_type, (uint32_t)tensor.rank,
                              (void *)(uintptr_t)tensor.address, tensor.shape, tensor.strides, box.lower, box.upper,
                              (uint32_t)box.channels, (uint32_t)box.pixels, box.steps, INTERLEAVE_NONE, tensor.swizzle,
                              PROMOTION_L2_128B, tensor.padding == 1 ? FILL_NAN : 0);
  return status == SUCCESS ? map : refuse_map(map, status, "im2col tensor map descriptor", &tensor, NULL);
}

static PyObject *fill_tma_descriptor_im2col(PyObject *module, PyObject *args) { return fill_im2col(args, 0); }
static PyObject *fill_tma_descriptor_im2col_apart(PyObject *module, PyObject *args) { return fill_im2col(args, 1); }

/* --------------------------------------------------------------------------------------------------------------- values */

enum kind { UNKNOWN, POINTER, I8, I16, I32, I64, U8, U16, U32, U64, FP16, BF16, FP32, FP64, MAP, BYTE_36, KINDS };

/* Triton 3.7 and later; the numbers stand in what `build_signature_metadata` returns, which only `launch` reads. */
static const struct {
  const char *name;
  unsigned char kind;
} kinds_37[] = {{"i1", I32},    {"i8", I8},     {"i16", I16},   {"i32", I32},   {"i64", I64},   {"u1", U32},
                {"u8", U8},     {"u16", U16},   {"u32", U32},   {"u64", U64},   {"fp16", FP16}, {"bf16", BF16},
                {"fp32", FP32}, {"f32", FP32},  {"fp64", FP64}, {"nvTmaDesc", MAP}, {NULL, UNKNOWN}};

/* Returns UNKNOWN with an exception for a type that is none. */
static unsigned char kind_of(PyObject *type) {
  const char *name = PyUnicode_AsUTF8(type);
  int index;
  if (name == NULL)
    return UNKNOWN;
  if (name[0] == '*')
    return POINTER;
  for (index = 0; kinds_37[index].name != NULL; index++)
    if (strcmp(name, kinds_37[index].name) == 0)
      return kinds_37[index].kind;
  PyErr_Format(PyExc_RuntimeError, "Unknown data type: %R", type);
  return UNKNOWN;
}

/* `place` is the number of the argument for the words of an error; -1 for none. */
static int read_pointer(PyObject *value, uint64_t *to, Py_ssize_t place) {
  PyObject *address;
  int status;
  *to = 0;
  if (value == Py_None)
    return 0;
  if (PyLong_Check(value)) {
    *to = PyLong_AsUnsignedLongLong(value);
    return *to == (uint64_t)-1 && PyErr_Occurred() ? -1 : 0;
  }
  address = PyObject_CallMethodNoArgs(value, word_data_ptr);
  if (address == NULL || !PyLong_Check(address)) {
    PyErr_SetString(PyExc_TypeError, address == NULL ? "Pointer argument must be either uint64 or have data_ptr method"
                                                     : "data_ptr method of Pointer object must return 64-bit int");
    Py_XDECREF(address);
    return -1;
  }
  *to = PyLong_AsUnsignedLongLong(address);
  Py_DECREF(address);
  if (*to == 0)
    return 0;
  if (*to == (uint64_t)-1 && PyErr_Occurred())
    return -1;
  status = cuda.pointer_attribute(to, DEVICE_POINTER, *to);
  if (status != INVALID_VALUE)
    return check(status);
  if (place >= 0)
    PyErr_Format(PyExc_ValueError, "Pointer argument (at %zd) cannot be accessed from Triton (cpu tensor?)", place);
  else
    PyErr_SetString(PyExc_ValueError, "Pointer argument cannot be accessed from Triton (cpu tensor?)");
  return -1;
}

static int read_float(PyObject *value, uint64_t *to, unsigned char kind) {
  double number = PyFloat_AsDouble(value);
  float single = (float)number;
  uint32_t bits;
  *to = 0;
  if (number == -1.0 && PyErr_Occurred())
    return -1;
  if (kind == FP64) {
    memcpy(to, &number, sizeof(number));
  } else if (kind == FP16) {
    return PyFloat_Pack2(number, (char *)to, 1);
  } else {
    memcpy(&bits, &single, sizeof(bits));
    *to = kind == BF16 ? bits >> 16 : bits;
  }
  return 0;
}

/* As `PyArg_Parse` reads them for Triton 3.6: signed ones are compared with their range, unsigned ones wrap. */
static int check_range(long number, long least, long most, const char *what) {
  if (number == -1 && PyErr_Occurred())
    return -1;
  if (number >= least && number <= most)
    return 0;
  PyErr_Format(PyExc_OverflowError, "%s is %s", what, number < least ? "less than minimum" : "greater than maximum");
  return -1;
}

static int read_integer_36(PyObject *value, uint64_t *to, unsigned char kind) {
  switch (kind) {
  case I64:
    *to = (uint64_t)PyLong_AsLongLong(value);
    break;
  case U64:
    if (!PyLong_Check(value)) {
      PyErr_Format(PyExc_TypeError, "argument must be int, not %.50s", Py_TYPE(value)->tp_name);
      return -1;
    }
    *to = PyLong_AsUnsignedLongLongMask(value);
    break;
  case BYTE_36:
    *to = (uint64_t)PyLong_AsLong(value);
    return check_range((long)*to, 0, UINT8_MAX, "unsigned byte integer");
  case I16:
    *to = (uint64_t)PyLong_AsLong(value);
    return check_range((long)*to, INT16_MIN, INT16_MAX, "signed short integer");
  case I32:
    *to = (uint64_t)PyLong_AsLong(value);
    return check_range((long)*to, INT32_MIN, INT32_MAX, "signed integer");
  default:
    *to = PyLong_AsUnsignedLongMask(value);
  }
  return *to == (uint64_t)-1 && PyErr_Occurred() ? -1 : 0;
}

static int read_integer(PyObject *value, uint64_t *to, unsigned char kind) {
  if (kind == I64)
    *to = (uint64_t)PyLong_AsLongLong(value);
  else if (kind == U64)
    *to = PyLong_AsUnsignedLongLong(value);
  else if (kind >= U8)
    *to = PyLong_AsUnsignedLong(value);
  else
    *to = (uint64_t)PyLong_AsLong(value);
  return *to == (uint64_t)-1 && PyErr_Occurred() ? -1 : 0;
}

/* The map stays where it is: the driver copies parameters before it returns, and the caller holds the object. */
static int find_map(PyObject *value, void **parameter) {
  if (Py_TYPE(value) != &TensorMap) {
    PyErr_Format(PyExc_TypeError, "object must be of type PyCUtensorMap, got %s", Py_TYPE(value)->tp_name);
    return -1;
  }
  *parameter = ((tensor_map_t *)value)->map;
  return 0;
}

/* ------------------------------------------------------------------------------------------------------------- launching */

typedef struct {
  int grid[3], cooperative, serial, warps, clusters, shared, oversized;
  unsigned long long stream, function;
} request_t;

static attribute_t *add_attribute(config_t *config, uint32_t id) {
  attribute_t *added = &config->attributes[config->count++];
  memset(added, 0, sizeof(*added));
  added->id = id;
  return added;
}

static void add_attributes(config_t *config, const request_t *request) {
  attribute_t *cluster;
  if (request->oversized && request->shared > LARGEST_USUAL_SHARED_BYTES)
    add_attribute(config, LAUNCH_SHARED_MODE)->value[0] = ALLOW_OVERSIZED;
  if (request->serial)
    add_attribute(config, PROGRAMMATIC_SERIALIZATION)->value[0] = 1;
  if (request->cooperative)
    add_attribute(config, COOPERATIVE)->value[0] = 1;
  if (request->clusters == 1)
    return;
  cluster = add_attribute(config, CLUSTER_DIMENSION);
  cluster->value[0] = (uint32_t)request->clusters;
  cluster->value[1] = cluster->value[2] = 1;
  add_attribute(config, CLUSTER_SCHEDULING)->value[0] = SPREAD;
}

static int call_driver(const request_t *request, void **parameters) {
  attribute_t attributes[MOST_ATTRIBUTES];
  void *function = (void *)(uintptr_t)request->function;
  config_t config = {{(uint32_t)(request->grid[0] * request->clusters), (uint32_t)request->grid[1], (uint32_t)request->grid[2]},
                     {(uint32_t)(32 * request->warps), 1, 1}, (uint32_t)request->shared, (void *)(uintptr_t)request->stream,
                     attributes, 0};
  int status = SUCCESS;
  if (!((double)request->grid[0] * request->grid[1] * request->grid[2] > 0))
    return 0;
  if (require(cuda.launch, "cuLaunchKernelEx") < 0)
    return -1;
  add_attributes(&config, request);
  /* The driver waits when its queue is full, perhaps for a callback that needs the interpreter. */
  Py_BEGIN_ALLOW_THREADS
  if (request->clusters == 16) /* more than every GPU must be able to */
    status = cuda.set_function_attribute(function, NON_PORTABLE_CLUSTER, 1);
  if (status == SUCCESS)
    status = cuda.launch(&config, function, parameters, NULL);
  Py_END_ALLOW_THREADS
  return check(status);
}

static int call_hook(PyObject *hook, PyObject *metadata) {
  PyObject *answer;
  if (hook == Py_None)
    return 0;
  answer = PyObject_CallOneArg(hook, metadata);
  Py_XDECREF(answer);
  return answer == NULL ? -1 : 0;
}

/* Room for the values of a call, their parameters, and the addresses of these; `allocated` is NULL while the stack does. */
typedef struct {
  PyObject *values_on_stack[STACK_VALUES], **values;
  uint64_t numbers_on_stack[STACK_VALUES + 2], *numbers;
  void *parameters_on_stack[STACK_VALUES + 2], **parameters, *allocated;
} room_t;

static int make_room(room_t *room, Py_ssize_t count) {
  room->values = room->values_on_stack;
  room->numbers = room->numbers_on_stack;
  room->parameters = room->parameters_on_stack;
  room->allocated = NULL;
  if (count <= STACK_VALUES)
    return 0;
  room->allocated = PyMem_Malloc((size_t)(count + 2) * (sizeof(PyObject *) + sizeof(uint64_t) + sizeof(void *)));
  if (room->allocated == NULL) {
    PyErr_NoMemory();
    return -1;
  }
  room->values = room->allocated;
  room->numbers = (uint64_t *)(room->values + count + 2);
  room->parameters = (void **)(room->numbers + count + 2);
  return 0;
}

/* Reads the two scratch buffers behind the values. */
static int read_scratch(room_t *room, Py_ssize_t count, PyObject *global, PyObject *profile, Py_ssize_t place) {
  room->parameters[count] = &room->numbers[count];
  room->parameters[count + 1] = &room->numbers[count + 1];
  return read_pointer(global, &room->numbers[count], place) < 0 ? -1 : read_pointer(profile, &room->numbers[count + 1], place);
}

static int read_value(PyObject *value, unsigned char kind, uint64_t *number, void **parameter) {
  *parameter = number;
  if (kind == POINTER)
    return read_pointer(value, number, -1);
  if (kind == MAP)
    return find_map(value, parameter);
  return kind >= FP16 ? read_float(value, number, kind) : read_integer(value, number, kind);
}

/* ----------------------------------------------------------------- one launch for all signatures: Triton 3.7 and later */

enum annotation { CONSTANT, VALUE, TUPLE };

typedef struct {
  PyObject_HEAD
  PyObject *nested;
  int type;
} argument_t;

static int argument_init(argument_t *self, PyObject *args, PyObject *keywords) {
  static char *words[] = {"nested_tuple", "type", NULL};
  PyObject *nested = NULL;
  int type = 0;
  if (!PyArg_ParseTupleAndKeywords(args, keywords, "O|i", words, &nested, &type))
    return -1;
  Py_XSETREF(self->nested, Py_NewRef(nested));
  self->type = type;
  return 0;
}

static void argument_dealloc(argument_t *self) {
  Py_XDECREF(self->nested);
  Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyTypeObject Argument = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "triton.backends.nvidia.PyKernelArg",
    .tp_basicsize = sizeof(argument_t),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_doc = "Says of one argument whether it is a value, a constant or a tuple of these.",
    .tp_new = PyType_GenericNew,
    .tp_init = (initproc)argument_init,
    .tp_dealloc = (destructor)argument_dealloc,
};

static PyObject *build_signature_metadata(PyObject *module, PyObject *args) {
  PyObject *signature, *types, *found;
  Py_ssize_t index;
  if (!PyArg_ParseTuple(args, "O", &signature) ||
      (types = PySequence_Fast(signature, "Expected kernel_arg_types to be a sequence or iterable")) == NULL)
    return NULL;
  found = PyBytes_FromStringAndSize(NULL, PySequence_Fast_GET_SIZE(types));
  for (index = 0; found != NULL && index < PySequence_Fast_GET_SIZE(types); index++) {
    unsigned char kind = kind_of(PySequence_Fast_GET_ITEM(types, index));
    if (kind == UNKNOWN)
      Py_CLEAR(found);
    else
      PyBytes_AS_STRING(found)[index] = (char)kind;
  }
  Py_DECREF(types);
  return found;
}

static int too_few(void) {
  PyErr_SetString(PyExc_TypeError, "a kernel was called with more or fewer values than its signature has");
  return -1;
}

/* Only these hold their items for as long as the caller holds them. */
static int is_row(PyObject *object) {
  if (PyTuple_Check(object) || PyList_Check(object))
    return 1;
  PyErr_Format(PyExc_TypeError, "the values of a tuple must be a tuple or a list, not %.50s", Py_TYPE(object)->tp_name);
  return 0;
}

/* Writes the values without constants, tuples taken apart; they are the caller's. */
static int flatten(PyObject *annotations, PyObject *given, PyObject **values, Py_ssize_t *used, Py_ssize_t most) {
  Py_ssize_t index;
  if (!is_row(annotations) || !is_row(given))
    return -1;
  if (PySequence_Fast_GET_SIZE(given) < PySequence_Fast_GET_SIZE(annotations))
    return too_few();
  for (index = 0; index < PySequence_Fast_GET_SIZE(annotations); index++) {
    PyObject *mark = PySequence_Fast_GET_ITEM(annotations, index), *item = PySequence_Fast_GET_ITEM(given, index);
    if (Py_TYPE(mark) != &Argument) {
      PyErr_SetString(PyExc_TypeError, "arg_annotations must hold PyKernelArg");
      return -1;
    }
    if (((argument_t *)mark)->type == TUPLE) {
      if (flatten(((argument_t *)mark)->nested, item, values, used, most) < 0)
        return -1;
    } else if (((argument_t *)mark)->type == VALUE) {
      if (*used == most)
        return too_few();
      values[(*used)++] = item;
    }
  }
  return 0;
}

static int read_and_launch(request_t *request, room_t *room, const Py_buffer *signature, PyObject *annotations, PyObject *given,
                           PyObject *global, PyObject *profile) {
  const unsigned char *kinds = signature->buf;
  Py_ssize_t index, used = 0, count = signature->len;
  if (flatten(annotations, given, room->values, &used, count) < 0)
    return -1;
  if (used != count)
    return too_few();
  for (index = 0; index < count; index++)
    if (read_value(room->values[index], kinds[index], &room->numbers[index], &room->parameters[index]) < 0)
      return -1;
  return read_scratch(room, count, global, profile, -1) < 0 ? -1 : call_driver(request, room->parameters);
}

static PyObject *launch_any(PyObject *args, int oversized) {
  request_t request = {.oversized = oversized};
  PyObject *metadata, *enter, *leave, *global, *profile, *annotations, *given;
  Py_buffer signature;
  room_t room;
  int done = -1;
  if (ensure_first_context() < 0 ||
      !PyArg_ParseTuple(args, "iiiKKpp(iii)OOOOOOy*O", &request.grid[0], &request.grid[1], &request.grid[2], &request.stream,
                        &request.function, &request.cooperative, &request.serial, &request.warps, &request.clusters,
                        &request.shared, &metadata, &enter, &leave, &global, &profile, &annotations, &signature, &given))
    return NULL;
  if (make_room(&room, signature.len) == 0) {
    if (call_hook(enter, metadata) == 0 &&
        read_and_launch(&request, &room, &signature, annotations, given, global, profile) == 0)
      done = call_hook(leave, metadata);
    PyMem_Free(room.allocated);
  }
  PyBuffer_Release(&signature);
  if (done < 0)
    return NULL;
  Py_RETURN_NONE;
}

static PyObject *launch(PyObject *module, PyObject *args) { return launch_any(args, 0); }
static PyObject *launch_oversized(PyObject *module, PyObject *args) { return launch_any(args, 1); }

/* ------------------------------------------------------------------------------- a launcher for one signature: Triton 3.6 */

/* One argument: a value with its kind, a constant, or a tuple of the `count` nodes that follow it, their own ones included. */
typedef struct {
  unsigned char annotation, kind;
  Py_ssize_t count;
} node_t;

typedef struct {
  PyObject_HEAD
  vectorcallfunc vectorcall;
  Py_ssize_t node_count, value_count, argument_count;
  node_t *nodes;
  unsigned char *kinds;
  Py_ssize_t *places; /* of each value among arguments, constants included */
} launcher_t;

static unsigned char kind_36(PyObject *type) {
  const char *name = PyUnicode_AsUTF8(type);
  if (name != NULL && (strcmp(name, "i1") == 0 || strcmp(name, "i8") == 0))
    return BYTE_36;
  return name != NULL && strcmp(name, "u1") == 0 ? U8 : kind_of(type);
}

static Py_ssize_t count_nodes(PyObject *signature) {
  Py_ssize_t index, count = PyTuple_GET_SIZE(signature);
  for (index = 0; index < PyTuple_GET_SIZE(signature); index++)
    if (PyTuple_Check(PyTuple_GET_ITEM(signature, index)))
      count += count_nodes(PyTuple_GET_ITEM(signature, index));
  return count;
}

static int read_signature(launcher_t *self, PyObject *signature, Py_ssize_t *place) {
  Py_ssize_t index, count = PyTuple_GET_SIZE(signature);
  for (index = 0; index < count; index++) {
    PyObject *type = PyTuple_GET_ITEM(signature, index);
    node_t *node = &self->nodes[self->node_count++];
    if (PyTuple_Check(type)) {
      node->annotation = TUPLE;
      node->count = PyTuple_GET_SIZE(type);
      if (read_signature(self, type, place) < 0)
        return -1;
      continue;
    }
    node->annotation = PyUnicode_Check(type) && PyUnicode_CompareWithASCIIString(type, "constexpr") == 0 ? CONSTANT : VALUE;
    if (node->annotation == VALUE) {
      if ((node->kind = kind_36(type)) == UNKNOWN)
        return -1;
      self->places[self->value_count] = *place;
      self->kinds[self->value_count++] = node->kind;
    }
    (*place)++;
  }
  return 0;
}

/* Writes the values of `count` arguments; moves `node` behind theirs. */
static int take_apart(const node_t **node, PyObject *const *given, Py_ssize_t count, PyObject ***values) {
  Py_ssize_t index;
  for (index = 0; index < count; index++) {
    const node_t *present = (*node)++;
    if (present->annotation == VALUE) {
      *(*values)++ = given[index];
    } else if (present->annotation == TUPLE) {
      PyObject *item = given[index];
      if (!is_row(item))
        return -1;
      if (PySequence_Fast_GET_SIZE(item) != present->count)
        return too_few();
      if (take_apart(node, PySequence_Fast_ITEMS(item), present->count, values) < 0)
        return -1;
    }
  }
  return 0;
}

static int is_pointer(unsigned char kind) { return kind == POINTER || kind == MAP; }

/* Numbers are read before the hook is called, pointers after it. */
static int read_numbers(launcher_t *self, room_t *room) {
  Py_ssize_t index;
  for (index = 0; index < self->value_count; index++) {
    unsigned char kind = self->kinds[index];
    room->parameters[index] = &room->numbers[index];
    if (!is_pointer(kind) && (kind >= FP16 && kind <= FP64 ? read_float(room->values[index], &room->numbers[index], kind)
                                                           : read_integer_36(room->values[index], &room->numbers[index], kind)) < 0)
      return -1;
  }
  return 0;
}

static int read_pointers(launcher_t *self, room_t *room) {
  Py_ssize_t index;
  for (index = 0; index < self->value_count; index++) {
    if (self->kinds[index] == POINTER && read_pointer(room->values[index], &room->numbers[index], self->places[index]) < 0)
      return -1;
    if (self->kinds[index] == MAP && find_map(room->values[index], &room->parameters[index]) < 0)
      return -1;
  }
  return 0;
}

static int read_int(PyObject *value, int *to) {
  long number = PyLong_AsLong(value);
  *to = (int)number;
  return check_range(number, INT32_MIN, INT32_MAX, "signed integer");
}

static int read_handle(PyObject *value, unsigned long long *to) {
  if (!PyLong_Check(value)) {
    PyErr_Format(PyExc_TypeError, "a stream and a function are int, not %.50s", Py_TYPE(value)->tp_name);
    return -1;
  }
  *to = PyLong_AsUnsignedLongLongMask(value);
  return *to == (unsigned long long)-1 && PyErr_Occurred() ? -1 : 0;
}

static int read_request(request_t *request, PyObject *const *args) {
  int axis;
  for (axis = 0; axis < 3; axis++)
    if (read_int(args[axis], &request->grid[axis]) < 0)
      return -1;
  if (read_handle(args[3], &request->stream) < 0 || read_handle(args[4], &request->function) < 0 ||
      (request->cooperative = PyObject_IsTrue(args[5])) < 0 || (request->serial = PyObject_IsTrue(args[6])) < 0)
    return -1;
  if (!PyTuple_Check(args[9])) {
    PyErr_SetString(PyExc_TypeError, "kernel_metadata must be a tuple");
    return -1;
  }
  return PyArg_ParseTuple(args[9], "iii", &request->warps, &request->clusters, &request->shared) ? 0 : -1;
}

static int launch_36(launcher_t *self, PyObject *const *args, room_t *room) {
  const node_t *node = self->nodes;
  PyObject **values = room->values;
  request_t request = {.oversized = 0};
  if (read_request(&request, args) < 0 || take_apart(&node, args + LEADING, self->argument_count, &values) < 0 ||
      read_numbers(self, room) < 0 || call_hook(args[11], args[10]) < 0 ||
      read_scratch(room, self->value_count, args[7], args[8], -1) < 0 || read_pointers(self, room) < 0 ||
      call_driver(&request, room->parameters) < 0)
    return -1;
  return call_hook(args[12], args[10]);
}

static PyObject *call_launcher(PyObject *object, PyObject *const *args, size_t flagged, PyObject *names) {
  launcher_t *self = (launcher_t *)object;
  room_t room;
  int done;
  if (PyVectorcall_NARGS(flagged) != LEADING + self->argument_count || (names != NULL && PyTuple_GET_SIZE(names) > 0)) {
    PyErr_Format(PyExc_TypeError, "function takes exactly %zd arguments (%zd given)", LEADING + self->argument_count,
                 PyVectorcall_NARGS(flagged));
    return NULL;
  }
  if (ensure_first_context() < 0 || make_room(&room, self->value_count) < 0)
    return NULL;
  done = launch_36(self, args, &room);
  PyMem_Free(room.allocated);
  if (done < 0)
    return NULL;
  Py_RETURN_NONE;
}

static PyObject *launcher_new(PyTypeObject *type, PyObject *args, PyObject *keywords) {
  PyObject *signature;
  launcher_t *self;
  Py_ssize_t count, place = 0;
  if (!PyArg_ParseTuple(args, "O!", &PyTuple_Type, &signature) || (self = (launcher_t *)type->tp_alloc(type, 0)) == NULL)
    return NULL;
  count = count_nodes(signature) + 1;
  self->vectorcall = call_launcher;
  self->argument_count = PyTuple_GET_SIZE(signature);
  self->nodes = PyMem_Calloc((size_t)count, sizeof(node_t));
  self->kinds = PyMem_Calloc((size_t)count, 1);
  self->places = PyMem_Calloc((size_t)count, sizeof(Py_ssize_t));
  if (self->nodes == NULL || self->kinds == NULL || self->places == NULL)
    PyErr_NoMemory();
  else if (read_signature(self, signature, &place) == 0)
    return (PyObject *)self;
  Py_DECREF(self);
  return NULL;
}

static void launcher_dealloc(launcher_t *self) {
  PyTypeObject *type = Py_TYPE(self);
  PyMem_Free(self->nodes);
  PyMem_Free(self->kinds);
  PyMem_Free(self->places);
  type->tp_free(self);
  Py_DECREF(type);
}

static PyMemberDef launcher_members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(launcher_t, vectorcall), READONLY, NULL}, {NULL, 0, 0, 0, NULL}};

static PyType_Slot launcher_slots[] = {{Py_tp_new, launcher_new},
                                       {Py_tp_dealloc, launcher_dealloc},
                                       {Py_tp_call, PyVectorcall_Call},
                                       {Py_tp_members, launcher_members},
                                       {Py_tp_doc, "Launches kernels of one signature, as the function `launch` of Triton 3.6."},
                                       {0, NULL}};

static PyType_Spec launcher_spec = {"bundler.runtime.launch._jit_driver.Launcher", sizeof(launcher_t), 0,
                                    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL, launcher_slots};

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
    {"fill_tma_descriptor", fill_tma_descriptor, METH_VARARGS, "Return a tensor map, as the driver makes it."},
    {"fill_tma_descriptor_tiled", fill_tma_descriptor_tiled, METH_VARARGS, "Return a tensor map without the driver's fault."},
    {"fill_tma_descriptor_im2col", fill_tma_descriptor_im2col, METH_VARARGS, "Return a tensor map in im2col mode."},
    {"fill_tma_descriptor_im2col_apart", fill_tma_descriptor_im2col_apart, METH_VARARGS, "The same, channels and pixels apart."},
    {"build_signature_metadata", build_signature_metadata, METH_VARARGS, "Return the kinds of types, for `launch`."},
    {"launch", launch, METH_VARARGS, "Launch a kernel of any signature."},
    {"launch_oversized", launch_oversized, METH_VARARGS, "The same, with oversized shared memory."},
    {NULL, NULL, 0, NULL}};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_jit_driver", "What Triton has built before its first launch.", -1,
                                    methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__jit_driver(void) {
  PyObject *made = NULL, *launcher;
  const uint16_t one = 1;
  if (*(const unsigned char *)&one != 1) {
    PyErr_SetString(PyExc_ImportError, "the compiled driver packs for little-endian machines");
    return NULL;
  }
  launcher = PyType_FromSpec(&launcher_spec);
  word_data_ptr = PyUnicode_InternFromString("data_ptr");
  if (word_data_ptr != NULL && launcher != NULL && PyType_Ready(&TensorMap) == 0 && PyType_Ready(&Argument) == 0)
    made = PyModule_Create(&module);
  if (made != NULL &&
      (PyModule_AddObjectRef(made, "Launcher", launcher) < 0 || PyModule_AddObjectRef(made, "PyCUtensorMap", (PyObject *)&TensorMap) < 0 ||
       PyModule_AddObjectRef(made, "PyKernelArg", (PyObject *)&Argument) < 0 ||
       PyModule_AddIntConstant(made, "ARG_CONSTEXPR", CONSTANT) < 0 || PyModule_AddIntConstant(made, "ARG_KERNEL", VALUE) < 0 ||
       PyModule_AddIntConstant(made, "ARG_TUPLE", TUPLE) < 0))
    Py_CLEAR(made);
  Py_XDECREF(launcher);
  return made;
}

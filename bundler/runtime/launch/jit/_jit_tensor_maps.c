/* SPDX-License-Identifier: Apache-2.0
 *
 * Tensor maps: the type PyCUtensorMap, and the functions of `cuda_utils` by which the driver makes
 * a map.
 *
 * Called from Triton's driver.py, for each tensor descriptor that a launch is given; _jit_launch.c
 * asks `find_map` for the map of such an argument.
 */

#include "_jit_driver.h"
#include <stdlib.h>
#include <string.h>

#define MAP_ALIGNMENT 128
#define MAP_BYTES 128
#define MOST_DIMENSIONS 5
#define INTERLEAVE_NONE 0
#define PROMOTION_L2_128B 2
#define FILL_NAN 1
/* Up to this version the driver sets a bit that makes reads from small tensors fault. */
#define LAST_VERSION_WITH_FAULT 13010
#define SMALL_TENSOR_BYTES (128 * 1024)
#define FAULTY_BIT 21

typedef struct {
  PyObject_HEAD
  _Alignas(MAP_ALIGNMENT) unsigned char map[MAP_BYTES];
} tensor_map_t;

/* The driver wants a map aligned, which Python's own allocator does not promise. */
static PyObject *allocate_map(PyTypeObject *type, Py_ssize_t count) {
  void *memory = NULL;
  (void)count;
  if (posix_memalign(&memory, MAP_ALIGNMENT, (size_t)type->tp_basicsize) != 0)
    return PyErr_NoMemory();
  return PyObject_Init(memory, type);
}

static void free_map(PyObject *self) {
  PyTypeObject *type = Py_TYPE(self);
  free(self);
  Py_DECREF(type);
}

static PyType_Slot map_slots[] = {{Py_tp_new, PyType_GenericNew},
                                  {Py_tp_alloc, allocate_map},
                                  {Py_tp_dealloc, free_map},
                                  {Py_tp_doc, "A tensor map of the driver's."},
                                  {0, NULL}};

static PyType_Spec map_spec = {"triton.backends.nvidia.PyCUtensorMap", sizeof(tensor_map_t), 0,
                               Py_TPFLAGS_DEFAULT, map_slots};

/* Reads integers into `to`, the last one first, as the driver counts dimensions; returns how many,
 * -1 with an exception. */
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
    PyErr_Format(PyExc_RuntimeError, "%s has %zd dimensions, a tensor map at most %d", what, count,
                 MOST_DIMENSIONS);
    count = -1;
  }
  for (index = 0; index < count; index++) {
    PyObject *item = PySequence_Fast_GET_ITEM(items, index);
    if (!PyLong_Check(item))
      PyErr_Format(PyExc_TypeError, "%s must be an int",
                   strcmp(what, "blockSize") == 0 ? "block size" : what);
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
  tensor->strides[rank - 1] = tensor->shape[rank - 1] * (rank == 1 ? (uint64_t)tensor->element_bytes
                                                                   : tensor->strides[rank - 2]);
  return 0;
}

/* Appends "NAME=[1, 2]" and what follows it. */
static void add_numbers(char *words, size_t room, const char *name, const uint64_t *numbers,
                        int count, const char *end) {
  size_t used = strlen(words);
  int index;
  used += (size_t)snprintf(words + used, room - used, "%s=[", name);
  for (index = 0; index < count; index++)
    used += (size_t)snprintf(words + used, room - used, index > 0 ? ", %llu" : "%llu",
                             (unsigned long long)numbers[index]);
  snprintf(words + used, room - used, "]%s", end);
}

/* Raises what Triton says; at most five numbers a list, so that the words fit. */
static PyObject *refuse_map(state_t *state, PyObject *map, int status, const char *what,
                            const tensor_t *tensor, const uint64_t *steps) {
  char words[2048];
  const char *reason = NULL;
  uint64_t block[MOST_DIMENSIONS];
  int index;
  for (index = 0; index < MOST_DIMENSIONS; index++)
    block[index] = tensor->block[index];
  state->cuda.get_error(status, &reason);
  snprintf(words, sizeof(words),
           "Triton Error [CUDA]: Failed to create %s: %.200s\nelemType=%d rank=%d "
           "global_address=0x%llx elemSize=%d swizzle=%d "
           "padding=%d\n",
           what, reason != NULL ? reason : "Unknown error", tensor->element_type, tensor->rank,
           tensor->address, tensor->element_bytes, tensor->swizzle, tensor->padding);
  add_numbers(words, sizeof(words), "shape", tensor->shape, tensor->rank, "\n");
  add_numbers(words, sizeof(words), "strides", tensor->strides, tensor->rank - 1, "\n");
  add_numbers(words, sizeof(words), "blockSize", block, tensor->block_rank,
              steps != NULL ? " " : "\n");
  if (steps != NULL)
    add_numbers(words, sizeof(words), "elementStrides", steps, tensor->rank,
                tensor->padding == 1 ? " fill=1\n" : " fill=0\n");
  PyErr_SetString(PyExc_RuntimeError, words);
  Py_DECREF(map);
  return NULL;
}

static void mend_map(state_t *state, unsigned char *map, const tensor_t *tensor) {
  int index, version = 0, last = 0;
  uint64_t word;
  if (state->cuda.driver_version(&version) != SUCCESS || version > LAST_VERSION_WITH_FAULT)
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

static PyObject *fill_tiled(state_t *state, PyObject *args, int mends) {
  static const uint32_t ones[MOST_DIMENSIONS] = {1, 1, 1, 1, 1};
  static const uint64_t steps[MOST_DIMENSIONS] = {1, 1, 1, 1, 1};
  PyObject *block, *shape, *strides, *map;
  tensor_t tensor = {0};
  int status;
  if (!PyArg_ParseTuple(args, "KiiiOOOi", &tensor.address, &tensor.swizzle, &tensor.element_bytes,
                        &tensor.element_type, &block, &shape, &strides, &tensor.padding) ||
      read_tensor(&tensor, block, shape, strides) < 0 ||
      require(state->cuda.encode_tiled, "cuTensorMapEncodeTiled") < 0)
    return NULL;
  if (tensor.block_rank != tensor.rank) {
    PyErr_SetString(PyExc_RuntimeError, "Rank mismatch");
    return NULL;
  }
  if ((map = PyObject_CallNoArgs((PyObject *)state->map_type)) == NULL)
    return NULL;
  status = state->cuda.encode_tiled(
      ((tensor_map_t *)map)->map, tensor.element_type, (uint32_t)tensor.rank,
      (void *)(uintptr_t)tensor.address, tensor.shape, tensor.strides, tensor.block, ones,
      INTERLEAVE_NONE, tensor.swizzle, PROMOTION_L2_128B, tensor.padding == 1 ? FILL_NAN : 0);
  if (status != SUCCESS)
    return refuse_map(state, map, status, "tensor map descriptor", &tensor, steps);
  if (mends)
    mend_map(state, ((tensor_map_t *)map)->map, &tensor);
  return map;
}

static PyObject *fill_tma_descriptor(PyObject *module, PyObject *args) {
  return fill_tiled(PyModule_GetState(module), args, 0);
}
static PyObject *fill_tma_descriptor_tiled(PyObject *module, PyObject *args) {
  return fill_tiled(PyModule_GetState(module), args, 1);
}

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
    PyErr_SetString(PyExc_RuntimeError, low_rank != high_rank
                                            ? "Pixel box corner rank mismatch"
                                            : "elementStrides length must match tensor rank");
    return -1;
  }
  for (index = 0; index < MOST_DIMENSIONS; index++) {
    box->lower[index] = (int)low[index];
    box->upper[index] = (int)high[index];
    box->steps[index] = index < rank ? (uint32_t)step[index] : 1;
  }
  return 0;
}

/* `apart`: channels and pixels are arguments of their own; else they are the two numbers of the
 * block. */
static PyObject *fill_im2col(state_t *state, PyObject *args, int apart) {
  PyObject *block, *shape, *strides, *lower, *upper, *steps, *map;
  tensor_t tensor = {0};
  pixels_t box = {.channels = 0};
  int status, read;
  if (apart)
    read = PyArg_ParseTuple(args, "KiiiOOOiOOiiO", &tensor.address, &tensor.swizzle,
                            &tensor.element_bytes, &tensor.element_type, &block, &shape, &strides,
                            &tensor.padding, &lower, &upper, &box.channels, &box.pixels, &steps);
  else
    read = PyArg_ParseTuple(args, "KiiiOOOiOOO", &tensor.address, &tensor.swizzle,
                            &tensor.element_bytes, &tensor.element_type, &block, &shape, &strides,
                            &tensor.padding, &lower, &upper, &steps);
  if (!read || read_tensor(&tensor, block, shape, strides) < 0 ||
      read_pixels(&box, tensor.rank, lower, upper, steps) < 0 ||
      require(state->cuda.encode_im2col, "cuTensorMapEncodeIm2col") < 0)
    return NULL;
  if (!apart) {
    if (tensor.block_rank != 2) {
      PyErr_SetString(PyExc_RuntimeError, "blockSize must have exactly 2 dimensions for im2col");
      return NULL;
    }
    box.channels = (int)tensor.block[0];
    box.pixels = (int)tensor.block[1];
  }
  if ((map = PyObject_CallNoArgs((PyObject *)state->map_type)) == NULL)
    return NULL;
  status = state->cuda.encode_im2col(
      ((tensor_map_t *)map)->map, tensor.element_type, (uint32_t)tensor.rank,
      (void *)(uintptr_t)tensor.address, tensor.shape, tensor.strides, box.lower, box.upper,
      (uint32_t)box.channels, (uint32_t)box.pixels, box.steps, INTERLEAVE_NONE, tensor.swizzle,
      PROMOTION_L2_128B, tensor.padding == 1 ? FILL_NAN : 0);
  return status == SUCCESS
             ? map
             : refuse_map(state, map, status, "im2col tensor map descriptor", &tensor, NULL);
}

static PyObject *fill_tma_descriptor_im2col(PyObject *module, PyObject *args) {
  return fill_im2col(PyModule_GetState(module), args, 0);
}
static PyObject *fill_tma_descriptor_im2col_apart(PyObject *module, PyObject *args) {
  return fill_im2col(PyModule_GetState(module), args, 1);
}

int find_map(state_t *state, PyObject *value, void **parameter) {
  if (Py_TYPE(value) != state->map_type) {
    PyErr_Format(PyExc_TypeError, "object must be of type PyCUtensorMap, got %s",
                 Py_TYPE(value)->tp_name);
    return -1;
  }
  *parameter = ((tensor_map_t *)value)->map;
  return 0;
}

static PyMethodDef methods[] = {{"fill_tma_descriptor", fill_tma_descriptor, METH_VARARGS,
                                 "Return a tensor map, as the driver makes it."},
                                {"fill_tma_descriptor_tiled", fill_tma_descriptor_tiled,
                                 METH_VARARGS, "Return a tensor map without the driver's fault."},
                                {"fill_tma_descriptor_im2col", fill_tma_descriptor_im2col,
                                 METH_VARARGS, "Return a tensor map in im2col mode."},
                                {"fill_tma_descriptor_im2col_apart",
                                 fill_tma_descriptor_im2col_apart, METH_VARARGS,
                                 "The same, channels and pixels apart."},
                                {NULL, NULL, 0, NULL}};

int add_tensor_maps(PyObject *module) {
  state_t *state = PyModule_GetState(module);
  state->map_type = (PyTypeObject *)PyType_FromModuleAndSpec(module, &map_spec, NULL);
  if (state->map_type == NULL || PyModule_AddFunctions(module, methods) < 0)
    return -1;
  return PyModule_AddObjectRef(module, "PyCUtensorMap", (PyObject *)state->map_type);
}

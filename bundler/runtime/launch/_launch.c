/* SPDX-License-Identifier: Apache-2.0
 *
 * One type, Launcher: packs a call's values into a parameter buffer and hands it to the driver.
 *
 * It knows no driver: Python gives it the addresses of the functions, and everything that happens seldom (a value that
 * needs care, an error, scratch memory, a thread in another context) is Python's to do, so that both launch paths
 * agree.  Nothing is shared between two calls: the buffer lies on the stack, or is allocated when it is large.
 */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include "_launch_call.h"
#include "_tensor_addresses.h"

#define STACK_BYTES 4096
#define STACK_PARAMETERS 128
/* A tensor map must be aligned like this. */
#define ALIGNMENT 128
#define ATTRIBUTE_BYTES 72
/* Three for the grid, one for the stream. */
#define LEADING 4
/* What `fail` is told when it was not the driver that refused. */
#define CLOSED (-1)
#define BAD_GRID (-2)

/* cuLaunchKernel, hipModuleLaunchKernel. */
typedef int (*plain_t)(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **,
                       void **);
/* CUlaunchConfig and HIP_LAUNCH_CONFIG have one layout. */
typedef struct {
  unsigned grid[3], block[3], shared;
  void *stream, *attributes;
  unsigned count;
} config_t;
/* cuLaunchKernelEx, hipDrvLaunchKernelEx. */
typedef int (*extended_t)(const config_t *, void *, void **, void **);
/* cuCtxGetCurrent writes a pointer, hipGetDevice an int. */
typedef int (*place_t)(uint64_t *);

enum kind {
  POINTER, I1, I8, I16, I32, I64, U1, U8, U16, U32, U64, FP16, BF16, FP32, FP64, TENSOR_MAP, GLOBAL_SCRATCH,
  PROFILE_SCRATCH, KINDS
};

static const char *const kind_names[KINDS] = {
    "pointer", "i1", "i8", "i16", "i32", "i64", "u1", "u8", "u16", "u32", "u64", "fp16", "bf16", "fp32", "fp64",
    "tensormap", "global_scratch", "profile_scratch"};
static const unsigned kind_bytes[KINDS] = {8, 1, 1, 2, 4, 8, 1, 1, 2, 4, 8, 2, 2, 4, 8, 128, 8, 8};

typedef struct {
  enum kind kind;
  unsigned offset;
  Py_ssize_t argument;
} field_t;

typedef struct {
  PyObject_HEAD
  vectorcallfunc vectorcall;
  plain_t plain;
  extended_t extended;
  place_t where;
  uint64_t place;
  void *function;
  unsigned block, cluster, shared;
  unsigned char *attributes;
  unsigned attribute_count;
  Py_ssize_t buffer_bytes, field_count, argument_count;
  field_t *fields;
  PyObject *slow_pack, *fail, *enter, *scratch, *weak;
} launcher_t;

/* ---------------------------------------------------------------------------------------------------------- packing */

/* Each returns 1 when the value was packed, 0 when Python has to look at it; no exception is left either way. */

/* Reads an integer; returns 0 for one that has more than 64 bits. */
static inline int read_integer(PyObject *value, long long *number) {
  int overflow;
#ifdef PyUnstable_Long_IsCompact
  /* Nearly all are small, and a function less is called; after a launch nothing of ours is in the processor's caches. */
  if (PyUnstable_Long_IsCompact((PyLongObject *)value)) {
    *number = PyUnstable_Long_CompactValue((PyLongObject *)value);
    return 1;
  }
#endif
  *number = PyLong_AsLongLongAndOverflow(value, &overflow);
  return !overflow;
}

/* Reads an integer from 0 to 2^64-1; -1 with an exception for another. */
static inline unsigned long long as_unsigned(PyObject *value) {
#if SIZEOF_LONG == SIZEOF_LONG_LONG
  return PyLong_AsUnsignedLong(value); /* the other goes through an array of bytes */
#else
  return PyLong_AsUnsignedLongLong(value);
#endif
}

static int pack_signed(PyObject *value, unsigned char *to, unsigned bytes) {
  long long number;
  if (!PyLong_Check(value) || !read_integer(value, &number))
    return 0;
  if (bytes < 8) {
    long long limit = 1LL << (8 * bytes - 1);
    if (number < -limit || number >= limit)
      return 0;
  }
  memcpy(to, &number, bytes); /* little-endian, as every machine with such a GPU is; PyInit refuses another */
  return 1;
}

static int pack_unsigned(PyObject *value, unsigned char *to, unsigned bytes) {
  unsigned long long number;
  if (!PyLong_Check(value))
    return 0;
  number = as_unsigned(value);
  if (number == (unsigned long long)-1 && PyErr_Occurred()) {
    PyErr_Clear();
    return 0;
  }
  if (bytes < 8 && number >> (8 * bytes))
    return 0;
  memcpy(to, &number, bytes);
  return 1;
}

static int pack_bool(PyObject *value, unsigned char *to) {
  if (!PyBool_Check(value))
    return 0;
  *to = value == Py_True;
  return 1;
}

static int pack_float(PyObject *value, unsigned char *to, enum kind kind) {
  double number;
  float single;
  uint32_t bits;
  if (!PyFloat_CheckExact(value))
    return 0;
  number = PyFloat_AS_DOUBLE(value);
  if (kind == FP64) {
    memcpy(to, &number, 8);
    return 1;
  }
  single = (float)number;
  /* Whether a finite number that no float holds is an error or infinity is Python's to say. */
  if (single - single != 0)
    return 0;
  if (kind == FP32) {
    memcpy(to, &single, 4);
  } else if (kind == BF16) {
    memcpy(&bits, &single, 4);
    bits >>= 16; /* truncated, as the compiler's own launcher does */
    memcpy(to, &bits, 2);
  } else if (PyFloat_Pack2(number, (char *)to, 1) < 0) {
    PyErr_Clear();
    return 0;
  }
  return 1;
}

/* Tensors come first: most pointers are, and nothing else of theirs is looked at. */
static int pack_pointer(PyObject *value, unsigned char *to) {
  const known_t *row;
  PyObject *number;
  uint64_t address;
  int done;
  if (value == Py_None) {
    memset(to, 0, 8);
    return 1;
  }
  row = find_known(Py_TYPE(value));
  if (row == NULL) {
    if (PyLong_Check(value))
      return PyBool_Check(value) ? 0 : pack_unsigned(value, to, 8);
    row = get_to_know(Py_TYPE(value));
  }
  if (row != NULL && row->direct && read_directly(value, &address)) {
    memcpy(to, &address, 8);
    return 1;
  }
  number = ask_address(value, row);
  if (number == NULL) {
    PyErr_Clear();
    return 0;
  }
  done = pack_unsigned(number, to, 8);
  Py_DECREF(number);
  return done;
}

static int pack_map(PyObject *value, unsigned char *to) {
  if (!PyBytes_CheckExact(value) || PyBytes_GET_SIZE(value) != kind_bytes[TENSOR_MAP])
    return 0;
  memcpy(to, PyBytes_AS_STRING(value), kind_bytes[TENSOR_MAP]);
  return 1;
}

static inline int pack_one(const field_t *field, PyObject *value, unsigned char *buffer) {
  unsigned char *to = buffer + field->offset;
  if (field->kind == POINTER) /* most are; a jump through a table would have to be foretold */
    return pack_pointer(value, to);
  switch (field->kind) {
  case I1:
  case U1:
    return pack_bool(value, to);
  case I8:
  case I16:
  case I32:
  case I64:
    return pack_signed(value, to, kind_bytes[field->kind]);
  case U8:
  case U16:
  case U32:
  case U64:
    return pack_unsigned(value, to, kind_bytes[field->kind]);
  case TENSOR_MAP:
    return pack_map(value, to);
  default:
    return pack_float(value, to, field->kind);
  }
}

/* Asks Python, which returns the whole buffer or raises. */
static int pack_slowly(launcher_t *self, PyObject *const *values, const uint64_t *addresses, Py_ssize_t count,
                       unsigned char *buffer) {
  Py_ssize_t index;
  PyObject *packed, *tuple = PyTuple_New(count);
  for (index = 0; tuple != NULL && index < count; index++) {
    PyObject *value = values[index] != NULL ? Py_NewRef(values[index]) : PyLong_FromUnsignedLongLong(addresses[index]);
    if (value == NULL)
      Py_CLEAR(tuple);
    else
      PyTuple_SET_ITEM(tuple, index, value);
  }
  if (tuple == NULL)
    return -1;
  packed = PyObject_CallOneArg(self->slow_pack, tuple);
  Py_DECREF(tuple);
  if (packed == NULL)
    return -1;
  if (!PyBytes_Check(packed) || PyBytes_GET_SIZE(packed) != self->buffer_bytes) {
    PyErr_SetString(PyExc_SystemError, "slow_pack must return the parameter buffer as bytes");
    Py_DECREF(packed);
    return -1;
  }
  memcpy(buffer, PyBytes_AS_STRING(packed), (size_t)self->buffer_bytes);
  Py_DECREF(packed);
  return 0;
}

/* A value that is NULL is a pointer that was read before; it stands in `addresses`.  What lies between the parameters is left as it
 * is: a driver is told where each of them is. */
static int pack(launcher_t *self, PyObject *const *values, const uint64_t *addresses, Py_ssize_t count,
                unsigned char *buffer) {
  Py_ssize_t index;
  if (count != self->argument_count)
    return pack_slowly(self, values, addresses, count, buffer);
  for (index = 0; index < self->field_count; index++) {
    const field_t *field = &self->fields[index];
    PyObject *value;
    if (field->argument < 0) {
      memset(buffer + field->offset, 0, 8); /* scratch memory: what needs some gets its address later */
      continue;
    }
    value = values[field->argument];
    if (value == NULL && field->kind == POINTER)
      memcpy(buffer + field->offset, &addresses[field->argument], 8);
    else if (value == NULL || !pack_one(field, value, buffer))
      return pack_slowly(self, values, addresses, count, buffer);
  }
  return 0;
}

/* -------------------------------------------------------------------------------------------------------- launching */

static PyObject *fail(launcher_t *self, int status) {
  PyObject *code = PyLong_FromLong(status), *answer = NULL;
  if (code != NULL)
    answer = PyObject_CallOneArg(self->fail, code);
  Py_XDECREF(code);
  if (answer != NULL) {
    Py_DECREF(answer);
    PyErr_SetString(PyExc_SystemError, "fail must raise");
  }
  return NULL;
}

/* 1: launch, 0: nothing to do, -1: no grid. */
static int read_grid(launcher_t *self, PyObject *const *args, unsigned *grid) {
  int axis, some = 1;
  for (axis = 0; axis < 3; axis++) {
    long long programs;
    if (!PyLong_Check(args[axis]) || !read_integer(args[axis], &programs) || programs < 0 || programs > INT32_MAX)
      return -1;
    some = some && programs > 0;
    grid[axis] = (unsigned)programs;
  }
  if ((uint64_t)grid[0] * self->cluster > INT32_MAX)
    return -1;
  grid[0] *= self->cluster;
  return some;
}

static int call_driver(launcher_t *self, const unsigned *grid, void *stream, unsigned char *buffer) {
  void *function = self->function; /* close() may come while others have the interpreter */
  void *on_stack[STACK_PARAMETERS], **parameters = on_stack;
  Py_ssize_t index;
  int status;
  if (self->field_count > STACK_PARAMETERS && (parameters = PyMem_New(void *, self->field_count)) == NULL)
    return 2; /* out of memory, in both drivers' numbers */
  for (index = 0; index < self->field_count; index++)
    parameters[index] = buffer + self->fields[index].offset;
  /* The driver waits when its queue is full, perhaps for a callback that needs the interpreter. */
  Py_BEGIN_ALLOW_THREADS
  if (self->extended != NULL) {
    config_t config = {{grid[0], grid[1], grid[2]}, {self->block, 1, 1}, self->shared, stream, self->attributes,
                       self->attribute_count};
    status = self->extended(&config, function, parameters, NULL);
  } else {
    status = self->plain(function, grid[0], grid[1], grid[2], self->block, 1, 1, self->shared, stream,
                         parameters, NULL);
  }
  Py_END_ALLOW_THREADS
  if (parameters != on_stack)
    PyMem_Free(parameters);
  return status;
}

/* Writes the addresses of scratch memory; `*release` gives it back, in the order of the stream, after the launch. */
static int add_scratch(launcher_t *self, PyObject *const *args, unsigned char *buffer, PyObject **release) {
  PyObject *found = PyObject_Vectorcall(self->scratch, args, LEADING, NULL);
  unsigned long long addresses[2];
  Py_ssize_t index;
  if (found == NULL)
    return -1;
  if (!PyArg_ParseTuple(found, "KKO", &addresses[0], &addresses[1], release)) {
    Py_DECREF(found);
    return -1;
  }
  Py_INCREF(*release);
  Py_DECREF(found);
  for (index = 0; index < self->field_count; index++) {
    const field_t *field = &self->fields[index];
    if (field->kind >= GLOBAL_SCRATCH)
      memcpy(buffer + field->offset, &addresses[field->kind - GLOBAL_SCRATCH], 8);
  }
  return 0;
}

/* Calls what Python gave us to call afterwards, whether or not an exception is on its way. */
static void call_after(PyObject *function) {
  PyObject *type, *value, *trace, *answer;
  PyErr_Fetch(&type, &value, &trace);
  answer = PyObject_CallNoArgs(function);
  Py_DECREF(function);
  Py_XDECREF(answer);
  if (type != NULL) {
    PyErr_Clear();
    PyErr_Restore(type, value, trace);
  }
}

static PyObject *launch_packed(launcher_t *self, PyObject *const *args, const unsigned *grid, unsigned char *buffer) {
  PyObject *leave = NULL, *release = NULL, *result = NULL;
  uint64_t here = 0;
  int status;
  void *stream = (void *)(uintptr_t)as_unsigned(args[3]);
  if (stream == (void *)-1 && PyErr_Occurred())
    return NULL;
  status = self->where(&here);
  if ((status != 0 || here != self->place) && (leave = PyObject_CallNoArgs(self->enter)) == NULL)
    return NULL;
  if (self->scratch == Py_None || add_scratch(self, args, buffer, &release) == 0) {
    status = call_driver(self, grid, stream, buffer);
    if (status == 0)
      result = Py_NewRef(Py_None);
    else
      fail(self, status);
  }
  if (release != NULL)
    call_after(release);
  if (leave != NULL)
    call_after(leave);
  if (result != NULL && (release != NULL || leave != NULL) && PyErr_Occurred())
    Py_CLEAR(result);
  return result;
}

static int is_ready(PyObject *object, const int64_t *programs) {
  launcher_t *self = (launcher_t *)object;
  uint64_t here = 0;
  return self->function != NULL && self->scratch == Py_None && self->buffer_bytes <= STACK_BYTES &&
         programs[0] * (int64_t)self->cluster <= INT32_MAX && self->where(&here) == 0 && here == self->place;
}

static PyObject *launch_read(PyObject *object, const int64_t *programs, void *stream, PyObject *const *values,
                             const uint64_t *addresses, Py_ssize_t count) {
  launcher_t *self = (launcher_t *)object;
  _Alignas(ALIGNMENT) unsigned char buffer[STACK_BYTES];
  unsigned grid[3] = {(unsigned)programs[0] * self->cluster, (unsigned)programs[1], (unsigned)programs[2]};
  int status;
  if (pack(self, values, addresses, count, buffer) < 0)
    return NULL;
  status = call_driver(self, grid, stream, buffer);
  return status == 0 ? Py_NewRef(Py_None) : fail(self, status);
}

static PyObject *launch(PyObject *object, PyObject *const *args, size_t flagged, PyObject *names) {
  launcher_t *self = (launcher_t *)object;
  _Alignas(ALIGNMENT) unsigned char on_stack[STACK_BYTES];
  unsigned char *allocated = NULL, *buffer = on_stack;
  Py_ssize_t count = PyVectorcall_NARGS(flagged);
  PyObject *result = NULL;
  unsigned grid[3];
  int some;
  if (count < LEADING || (names != NULL && PyTuple_GET_SIZE(names) > 0)) {
    PyErr_SetString(PyExc_TypeError, "a launcher takes (grid_x, grid_y, grid_z, stream, *values), none by keyword");
    return NULL;
  }
  if (self->function == NULL)
    return fail(self, CLOSED);
  some = read_grid(self, args, grid);
  if (some < 0)
    return fail(self, BAD_GRID);
  if (self->buffer_bytes > STACK_BYTES) {
    allocated = PyMem_Malloc((size_t)self->buffer_bytes + ALIGNMENT);
    if (allocated == NULL)
      return PyErr_NoMemory();
    buffer = (unsigned char *)(((uintptr_t)allocated + ALIGNMENT - 1) & ~(uintptr_t)(ALIGNMENT - 1));
  }
  if (pack(self, args + LEADING, NULL, count - LEADING, buffer) == 0)
    result = some ? launch_packed(self, args, grid, buffer) : Py_NewRef(Py_None);
  PyMem_Free(allocated);
  return result;
}

/* ----------------------------------------------------------------------------------------------------- device binaries */

#define ELF_HEADER_BYTES 64
#define SEGMENT_BYTES 56
#define SECTION_BYTES 64
/* Of a binary with more of them Python looks at each. */
#define MOST_ROWS 256

static uint64_t number_at(const unsigned char *data, unsigned bytes) {
  uint64_t number = 0;
  memcpy(&number, data, bytes);
  return number;
}

/* Whether a table lies inside the binary, and so does what each of its rows names by offset and size. */
static int is_whole(const Py_buffer *image, uint64_t table, uint64_t rows, uint64_t row_bytes, unsigned offset, unsigned size) {
  const unsigned char *data = image->buf;
  uint64_t length = (uint64_t)image->len, row;
  if (rows > MOST_ROWS || table > length || rows * row_bytes > length - table)
    return 0;
  for (row = 0; row < rows; row++) {
    const unsigned char *at = data + table + row * row_bytes;
    uint64_t from = number_at(at + offset, 8);
    if (from > length || number_at(at + size, 8) > length - from)
      return 0;
  }
  return 1;
}

/* Returns the bytes of the last section of a name, None where there is none, NotImplemented for what is not as linkers write it. */
static PyObject *find_in(const Py_buffer *image, const Py_buffer *name) {
  const unsigned char *data = image->buf, *names;
  uint64_t table, rows, names_row, names_bytes;
  if (image->len < ELF_HEADER_BYTES || memcmp(data, "\177ELF\2", 5) != 0 || number_at(data + 54, 2) != SEGMENT_BYTES ||
      number_at(data + 58, 2) != SECTION_BYTES)
    Py_RETURN_NOTIMPLEMENTED;
  table = number_at(data + 40, 8);
  rows = number_at(data + 60, 2);
  names_row = number_at(data + 62, 2);
  if (names_row >= rows || !is_whole(image, number_at(data + 32, 8), number_at(data + 56, 2), SEGMENT_BYTES, 8, 32) ||
      !is_whole(image, table, rows, SECTION_BYTES, 24, 32))
    Py_RETURN_NOTIMPLEMENTED;
  names = data + number_at(data + table + names_row * SECTION_BYTES + 24, 8);
  names_bytes = number_at(data + table + names_row * SECTION_BYTES + 32, 8);
  while (rows-- > 0) {
    const unsigned char *row = data + table + rows * SECTION_BYTES;
    uint64_t at = number_at(row, 4);
    if (at < names_bytes && (uint64_t)name->len < names_bytes - at && names[at + (uint64_t)name->len] == 0 &&
        memcmp(names + at, name->buf, (size_t)name->len) == 0)
      return PyBytes_FromStringAndSize((const char *)data + number_at(row + 24, 8), (Py_ssize_t)number_at(row + 32, 8));
  }
  Py_RETURN_NONE;
}

/* Loads a binary and finds its kernel, where the context for the device is current: five calls of the driver in one of Python's.
 * Takes (cuCtxGetCurrent, cuCtxGetDevice, cuModuleLoadData, cuModuleGetFunction, cuFuncGetAttribute), the image, the entry, the device
 * and an attribute; returns None where another context is current, else (failed step, its status, context, module, function, the
 * attribute's value). */
static PyObject *load_image(PyObject *module_object, PyObject *args) {
  unsigned long long calls[5];
  const char *image, *entry;
  Py_ssize_t image_bytes, entry_bytes;
  int device, attribute, here = -1, step = 0, status = 0, value = 0;
  void *context = NULL, *loaded = NULL, *function = NULL;
  if (!PyArg_ParseTuple(args, "(KKKKK)y#y#ii", &calls[0], &calls[1], &calls[2], &calls[3], &calls[4], &image, &image_bytes,
                        &entry, &entry_bytes, &device, &attribute))
    return NULL;
  if (((int (*)(void **))(uintptr_t)calls[0])(&context) != 0 || context == NULL ||
      ((int (*)(int *))(uintptr_t)calls[1])(&here) != 0 || here != device)
    Py_RETURN_NONE;
  Py_BEGIN_ALLOW_THREADS
  if ((status = ((int (*)(void **, const void *))(uintptr_t)calls[2])(&loaded, image)) != 0)
    step = 1;
  else if ((status = ((int (*)(void **, void *, const char *))(uintptr_t)calls[3])(&function, loaded, entry)) != 0)
    step = 2;
  else if ((status = ((int (*)(int *, int, void *))(uintptr_t)calls[4])(&value, attribute, function)) != 0)
    step = 3;
  Py_END_ALLOW_THREADS
  return Py_BuildValue("iiKKKi", step, status, (unsigned long long)(uintptr_t)context,
                       (unsigned long long)(uintptr_t)loaded, (unsigned long long)(uintptr_t)function, value);
}

static PyObject *find_section(PyObject *module_object, PyObject *args) {
  Py_buffer image, name;
  PyObject *found;
  if (!PyArg_ParseTuple(args, "y*y*", &image, &name))
    return NULL;
  found = find_in(&image, &name);
  PyBuffer_Release(&image);
  PyBuffer_Release(&name);
  return found;
}

/* --------------------------------------------------------------------------------------------------------- the type */

static PyObject *pack_method(launcher_t *self, PyObject *const *values, Py_ssize_t count) {
  PyObject *packed = PyBytes_FromStringAndSize(NULL, self->buffer_bytes);
  if (packed == NULL)
    return NULL;
  memset(PyBytes_AS_STRING(packed), 0, (size_t)self->buffer_bytes);
  if (pack(self, values, NULL, count, (unsigned char *)PyBytes_AS_STRING(packed)) < 0)
    Py_CLEAR(packed);
  return packed;
}

static PyObject *close_method(launcher_t *self, PyObject *ignored) {
  self->function = NULL;
  Py_RETURN_NONE;
}

static int read_field(field_t *field, PyObject *item, Py_ssize_t buffer_bytes, Py_ssize_t arguments) {
  const char *name;
  int kind = 0;
  if (!PyTuple_Check(item)) {
    PyErr_SetString(PyExc_TypeError, "a field is (kind, offset, argument)");
    return -1;
  }
  if (!PyArg_ParseTuple(item, "sIn", &name, &field->offset, &field->argument))
    return -1;
  while (kind < KINDS && strcmp(kind_names[kind], name) != 0)
    kind++;
  if (kind == KINDS || (kind >= GLOBAL_SCRATCH) != (field->argument < 0) || field->argument >= arguments ||
      (Py_ssize_t)field->offset + kind_bytes[kind] > buffer_bytes) {
    PyErr_Format(PyExc_ValueError, "field %R is of no known kind, or lies outside the buffer", item);
    return -1;
  }
  field->kind = (enum kind)kind;
  return 0;
}

static int read_fields(launcher_t *self, PyObject *fields) {
  Py_ssize_t index;
  self->field_count = PyTuple_GET_SIZE(fields);
  self->fields = PyMem_New(field_t, self->field_count ? self->field_count : 1);
  if (self->fields == NULL) {
    PyErr_NoMemory();
    return -1;
  }
  for (index = 0; index < self->field_count; index++)
    if (read_field(&self->fields[index], PyTuple_GET_ITEM(fields, index), self->buffer_bytes, self->argument_count) < 0)
      return -1;
  return 0;
}

static PyObject *launcher_new(PyTypeObject *type, PyObject *args, PyObject *keywords) {
  static char *words[] = {"plain", "extended", "where", "place", "function", "block", "cluster", "shared",
                          "attributes", "buffer_bytes", "arguments", "fields", "slow_pack", "fail", "enter",
                          "scratch", NULL};
  unsigned long long plain, extended, where, place, function;
  const char *attributes;
  Py_ssize_t attribute_bytes;
  PyObject *fields;
  launcher_t *self = (launcher_t *)type->tp_alloc(type, 0);
  if (self == NULL)
    return NULL;
  if (!PyArg_ParseTupleAndKeywords(args, keywords, "$KKKKKIIIy#nnO!OOOO", words, &plain, &extended, &where, &place,
                                   &function, &self->block, &self->cluster, &self->shared, &attributes,
                                   &attribute_bytes, &self->buffer_bytes, &self->argument_count, &PyTuple_Type,
                                   &fields, &self->slow_pack, &self->fail, &self->enter, &self->scratch)) {
    self->slow_pack = self->fail = self->enter = self->scratch = NULL; /* borrowed so far */
    Py_DECREF(self);
    return NULL;
  }
  Py_INCREF(self->slow_pack);
  Py_INCREF(self->fail);
  Py_INCREF(self->enter);
  Py_INCREF(self->scratch);
  self->vectorcall = launch;
  self->plain = (plain_t)(uintptr_t)plain;
  self->extended = (extended_t)(uintptr_t)extended;
  self->where = (place_t)(uintptr_t)where;
  self->place = place;
  self->function = (void *)(uintptr_t)function;
  self->attribute_count = (unsigned)(attribute_bytes / ATTRIBUTE_BYTES);
  self->attributes = PyMem_Malloc(attribute_bytes ? (size_t)attribute_bytes : 1);
  if (self->attributes == NULL) {
    Py_DECREF(self);
    return PyErr_NoMemory();
  }
  memcpy(self->attributes, attributes, (size_t)attribute_bytes);
  if (read_fields(self, fields) < 0) {
    Py_DECREF(self);
    return NULL;
  }
  return (PyObject *)self;
}

/* Returns a copy for another kernel that takes the same parameters in the same place; with the rest shared kernels of one signature
 * cost a sixth of what the first one did. */
static PyObject *sibling_method(launcher_t *self, PyObject *args) {
  PyTypeObject *type = Py_TYPE(self);
  PyObject *slow_pack, *fail;
  unsigned long long function;
  size_t field_bytes = (size_t)(self->field_count ? self->field_count : 1) * sizeof(field_t);
  size_t attribute_bytes = (size_t)self->attribute_count * ATTRIBUTE_BYTES;
  launcher_t *made;
  if (!PyArg_ParseTuple(args, "KOO", &function, &slow_pack, &fail) || (made = (launcher_t *)type->tp_alloc(type, 0)) == NULL)
    return NULL;
  memcpy((char *)made + offsetof(launcher_t, vectorcall), (char *)self + offsetof(launcher_t, vectorcall),
         offsetof(launcher_t, fields) - offsetof(launcher_t, vectorcall));
  made->function = (void *)(uintptr_t)function;
  made->slow_pack = Py_NewRef(slow_pack);
  made->fail = Py_NewRef(fail);
  made->enter = Py_NewRef(self->enter);
  made->scratch = Py_NewRef(self->scratch);
  made->fields = PyMem_Malloc(field_bytes);
  made->attributes = PyMem_Malloc(attribute_bytes ? attribute_bytes : 1);
  if (made->fields == NULL || made->attributes == NULL) {
    Py_DECREF(made);
    return PyErr_NoMemory();
  }
  memcpy(made->fields, self->fields, field_bytes);
  memcpy(made->attributes, self->attributes, attribute_bytes);
  return (PyObject *)made;
}

static int launcher_traverse(launcher_t *self, visitproc visit, void *arg) {
  Py_VISIT(Py_TYPE(self));
  Py_VISIT(self->slow_pack);
  Py_VISIT(self->fail);
  Py_VISIT(self->enter);
  Py_VISIT(self->scratch);
  return 0;
}

static int launcher_clear(launcher_t *self) {
  Py_CLEAR(self->slow_pack);
  Py_CLEAR(self->fail);
  Py_CLEAR(self->enter);
  Py_CLEAR(self->scratch);
  return 0;
}

static void launcher_dealloc(launcher_t *self) {
  PyTypeObject *type = Py_TYPE(self);
  PyObject_GC_UnTrack(self);
  if (self->weak != NULL)
    PyObject_ClearWeakRefs((PyObject *)self);
  launcher_clear(self);
  PyMem_Free(self->fields);
  PyMem_Free(self->attributes);
  type->tp_free(self);
  Py_DECREF(type);
}

static PyMethodDef methods[] = {
    {"pack", (PyCFunction)(void (*)(void))pack_method, METH_FASTCALL, "Return the parameter buffer of these values."},
    {"tell_tensors", tell_tensors, METH_STATIC | METH_VARARGS, "Say how tensors of torch are read without a call of theirs."},
    {"sibling", (PyCFunction)sibling_method, METH_VARARGS, "sibling(function, slow_pack, fail): the same for another function."},
    {"close", (PyCFunction)close_method, METH_NOARGS, "Launch nothing any more: each call fails."},
    {NULL, NULL, 0, NULL}};

static PyMemberDef members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(launcher_t, vectorcall), READONLY, NULL},
    {"__weaklistoffset__", T_PYSSIZET, offsetof(launcher_t, weak), READONLY, NULL},
    {NULL, 0, 0, 0, NULL}};

static PyType_Slot slots[] = {{Py_tp_new, launcher_new},
                              {Py_tp_dealloc, launcher_dealloc},
                              {Py_tp_traverse, launcher_traverse},
                              {Py_tp_clear, launcher_clear},
                              {Py_tp_call, PyVectorcall_Call},
                              {Py_tp_methods, methods},
                              {Py_tp_members, members},
                              {Py_tp_doc, "Launches one kernel: launcher(grid_x, grid_y, grid_z, stream, *values)."},
                              {0, NULL}};

static PyType_Spec spec = {"bundler.runtime.launch._launch.Launcher", sizeof(launcher_t), 0,
                           Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL, slots};

static PyMethodDef functions[] = {
    {"find_section", find_section, METH_VARARGS, "Return a section of a device binary that is whole."},
    {"load_image", load_image, METH_VARARGS, "Load a binary where its context is current, and find its kernel."},
    {NULL, NULL, 0, NULL}};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_launch", "The compiled launcher.", -1, functions,
                                    NULL, NULL, NULL, NULL};

static launch_call_t call_of_others = {LAUNCH_CALL_VERSION, NULL, is_ready, launch_read};

PyMODINIT_FUNC PyInit__launch(void) {
  PyObject *made, *type, *call;
  const uint16_t one = 1;
  if (*(const unsigned char *)&one != 1) {
    PyErr_SetString(PyExc_ImportError, "the compiled launcher packs for little-endian machines");
    return NULL;
  }
  word_data_ptr = PyUnicode_InternFromString("data_ptr");
  type = PyType_FromSpec(&spec);
  made = PyModule_Create(&module);
  call_of_others.launcher = (PyTypeObject *)Py_XNewRef(type);
  call = PyCapsule_New(&call_of_others, LAUNCH_CALL, NULL);
  if (word_data_ptr == NULL || type == NULL || made == NULL || call == NULL ||
      PyModule_AddObjectRef(made, "Launcher", type) < 0 || PyModule_AddObjectRef(made, "call", call) < 0)
    Py_CLEAR(made);
  Py_XDECREF(call);
  Py_XDECREF(type);
  return made;
}

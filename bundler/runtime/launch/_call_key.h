/* SPDX-License-Identifier: Apache-2.0
 *
 * What a Dispatcher holds, and `read_call`, which makes of a call the bytes that tell it apart from
 * others, the same distinctions as `Reader` makes in Python (call_key.py).
 *
 * A `call_t` lies on the caller's stack; `give_back` drops what it owns.  Reading a value may run
 * Python, which may make another call, so nothing of a Dispatcher is relied on across it.  The
 * interpreter's lock is held.
 */

#ifndef BUNDLER_CALL_KEY_H
#define BUNDLER_CALL_KEY_H

#include "_packing.h"

#define MOST_VALUES 64
#define KEY_BYTES 1024
#define TEXT_BYTES 64
#define UNALIGNED 15
/* A value that counts by itself, and one of which the shape of a call says nothing. */
#define BY_VALUE 1
#define OPEN 2
/* The device of a call until it is known. */
#define UNKNOWN (-1)

typedef struct {
  PyObject_HEAD
  state_t *state;
  vectorcallfunc vectorcall;
  PyObject *driver, *enter, *leave, *present, *slow, *first, *measure;
  /* Where Triton's hooks are, and the flag of torch's profiler, for _profiler_hooks.h; without the
   * second, NULL, nobody looks whether torch's profiler records. */
  PyObject *chains, *recording;
  PyObject *positions; /* bytes: for each parameter, whether it counts by its value */
  PyObject *names;     /* dict: the same by name */
  /* Key -> ((launcher, values it takes, grids, bound, again), what the key points to), or None. */
  PyObject *known;
  PyObject *shapes; /* key without constants -> (again, what the key points to) */
  /* Of the last call that was known: loops launch one kind of call again and again. */
  PyObject *last_key, *last_row;
  PyObject *last_names; /* of the last call with keywords, and whether each counts by its value */
  char last_flags[MOST_VALUES];
  Py_ssize_t capacity;
  int numbers; /* in front of a call stand numbers that a grid was found for, not a grid */
} dispatcher_t;

/* What is read of one call.  `owned` is what has to be given back. */
typedef struct {
  unsigned char key[KEY_BYTES];
  size_t used;
  Py_ssize_t count;
  /* Where the first tensor lies that torch told C of.  A launch from a thread that is elsewhere is
   * Python's. */
  const exchange_t *exchange;
  /* The current device, or where the tensors lie. */
  long device;
  /* Where in the key the constants are, which calls of one shape differ in, and which values they
   * are. */
  int opens;
  struct {
    size_t from, to;
    PyObject *value;
  } open[MOST_VALUES];
  /* A value that is NULL is a tensor; its address stands in `addresses`. */
  PyObject *values[MOST_VALUES], *owned[MOST_VALUES], *dtypes[MOST_VALUES];
  uint64_t addresses[MOST_VALUES];
} call_t;

/* Each returns 1 when it was read, 0 when Python has to look at the call, or with an exception
 * where that is an interrupt. */

static inline int put(call_t *call, unsigned char tag, const void *data, size_t size) {
  if (call->used + 1 + size > KEY_BYTES)
    return 0;
  call->key[call->used] = tag;
  memcpy(call->key + call->used + 1, data, size);
  call->used += 1 + size;
  return 1;
}

/* What a launch has to know of a tensor. */
typedef struct {
  unsigned char tag, dtype[4]; /* by which way it was told, and the type as that way has it */
  int32_t device;
  uint64_t address;
} told_t;

/* Asks torch's functions.  Where a tensor has no address, its device comes first: torch writes a
 * line for an address it refuses. */
static inline int ask_functions(const torch_tensors_t *torch, PyObject *tensor, told_t *told) {
  void *handle = read_handle(torch, tensor), *address;
  int32_t type, dtype;
  if (handle == NULL || torch->device_type(handle, &type) != 0 || type != torch->cuda ||
      torch->device(handle, &told->device) != 0 || torch->dtype(handle, &dtype) != 0 ||
      torch->address(handle, &address) != 0)
    return 0;
  told->tag = 'S';
  memcpy(told->dtype, &dtype, sizeof(dtype));
  told->address = (uint64_t)(uintptr_t)address;
  return 1;
}

static inline int ask_table(const exchange_t *exchange, PyObject *tensor, told_t *told) {
  dl_tensor_t found;
  if (!read_exchanged(exchange, tensor, &found) || found.device_type != ON_CUDA)
    return 0;
  told->tag = 'D';
  memcpy(told->dtype, found.dtype, sizeof(found.dtype));
  told->device = found.device;
  told->address = (uint64_t)(uintptr_t)found.data + found.byte_offset;
  return 1;
}

/* Reads a tensor by what torch has for C; nothing is made for it. */
static int read_by_torch(const torch_tensors_t *torch, call_t *call, PyObject *tensor,
                         const tensor_class_t *row) {
  unsigned char entry[sizeof(((told_t *)NULL)->dtype) + 1];
  told_t told;
  if (!(row->told_all ? ask_functions(torch, tensor, &told)
                      : ask_table(row->exchange, tensor, &told)))
    return 0;
  if (call->device == UNKNOWN) {
    call->device = told.device;
    call->exchange = row->exchange;
  }
  if (call->device != told.device)
    return 0;
  call->addresses[call->count] = told.address;
  call->values[call->count] = NULL;
  memcpy(entry, told.dtype, sizeof(told.dtype));
  entry[sizeof(told.dtype)] = (told.address & UNALIGNED) == 0;
  return put(call, told.tag, entry, sizeof(entry));
}

/* Asks the driver for the current device, unless it was asked or a tensor told. */
static int know_device(dispatcher_t *self, call_t *call) {
  PyObject *device;
  if (call->device != UNKNOWN)
    return 1;
  device = PyObject_CallMethodNoArgs(self->driver, self->state->word_device);
  call->device = device == NULL ? UNKNOWN : PyLong_AsLong(device);
  Py_XDECREF(device);
  return call->device != UNKNOWN;
}

static int read_tensor(dispatcher_t *self, call_t *call, PyObject *tensor,
                       const tensor_class_t *row) {
  PyObject *device, *dtype, *address;
  unsigned long long number;
  long where;
  unsigned char entry[sizeof(void *) + 1];
  state_t *state = self->state;
  PyCFunction get_device = row->get_device;
  PyGetSetDef *property = row->dtype;
  if (row->exchange != NULL)
    return read_by_torch(&state->torch, call, tensor, row);
  if (!know_device(self, call))
    return 0;
  address = call_method(tensor, state->word_data_ptr, row->data_ptr);
  if (address == NULL)
    return 0;
  call->owned[call->count] = address;
  call->values[call->count] = address;
  number = PyLong_AsUnsignedLongLong(address);
  device = PyErr_Occurred() ? NULL : call_method(tensor, state->word_get_device, get_device);
  if (device == NULL)
    return 0;
  where = PyLong_AsLong(device);
  Py_DECREF(device);
  if (where != call->device) /* also after an error, which is -1 */
    return 0;
  dtype = property != NULL ? property->get(tensor, property->closure)
                           : PyObject_GetAttr(tensor, state->word_dtype);
  if (dtype == NULL)
    return 0;
  call->dtypes[call->count] = dtype;
  memcpy(entry, &dtype, sizeof(void *));
  entry[sizeof(void *)] = (number & UNALIGNED) == 0;
  return put(call, 'T', entry, sizeof(entry));
}

/* The classes of integers for which Triton compiles the same kernel, as in call_key.py. */
static int read_size(call_t *call, PyObject *value) {
  int overflow;
  unsigned char kind;
  long long number = PyLong_AsLongLongAndOverflow(value, &overflow);
  if (overflow)
    return 0;
  if (number == 1)
    kind = 1;
  else
    kind = (unsigned char)((number >= INT32_MIN && number <= INT32_MAX ? 2 : 4) +
                           ((number & UNALIGNED) == 0));
  return put(call, 'I', &kind, 1);
}

static int read_constant(call_t *call, PyObject *value) {
  if (PyLong_CheckExact(value)) {
    int overflow;
    long long number = PyLong_AsLongLongAndOverflow(value, &overflow);
    return overflow ? 0 : put(call, 'i', &number, sizeof(number));
  }
  if (PyBool_Check(value))
    return put(call, value == Py_True ? 't' : 'f', "", 0);
  if (value == Py_None)
    return put(call, 'n', "", 0);
  if (PyFloat_CheckExact(value)) {
    double number = PyFloat_AS_DOUBLE(value); /* its bits: -0.0 equals 0.0, and NaN not itself */
    return put(call, 'd', &number, sizeof(number));
  }
  if (PyUnicode_CheckExact(value) && PyUnicode_IS_COMPACT_ASCII(value)) {
    Py_ssize_t size = PyUnicode_GET_LENGTH(value);
    unsigned char text[TEXT_BYTES + 1];
    if (size > TEXT_BYTES)
      return 0;
    text[0] = (unsigned char)size;
    memcpy(text + 1, PyUnicode_1BYTE_DATA(value), (size_t)size);
    return put(call, 's', text, (size_t)size + 1);
  }
  return 0;
}

static int read_value(dispatcher_t *self, call_t *call, PyObject *value, int by_value) {
  const tensor_class_t *row;
  int done;
  size_t from = call->used;
  call->values[call->count] = value;
  call->owned[call->count] = call->dtypes[call->count] = NULL;
  if (by_value)
    done = read_constant(call, value);
  else if (PyLong_CheckExact(value))
    done = read_size(call, value);
  else if (value == Py_None || PyBool_Check(value) || PyFloat_CheckExact(value))
    done = put(call, value == Py_None ? 'N' : PyBool_Check(value) ? 'B' : 'F', "", 0);
  else if (((row = find_known(self->state, Py_TYPE(value))) != NULL ||
            (row = get_to_know(self->state, Py_TYPE(value))) != NULL) &&
           row->has_device)
    done = read_tensor(self, call, value, row);
  else
    done = 0;
  call->count++;
  if (!done) {
    forget_error();
  } else if (by_value == OPEN) {
    call->open[call->opens].from = from;
    call->open[call->opens].to = call->used;
    call->open[call->opens++].value = value;
  }
  return done;
}

/* Writes for each name whether its value counts as such; calls from one place in a program have one
 * tuple of names. */
static int read_flags(dispatcher_t *self, PyObject *names) {
  Py_ssize_t index;
  for (index = 0; index < PyTuple_GET_SIZE(names); index++) {
    PyObject *flag = PyDict_GetItemWithError(self->names, PyTuple_GET_ITEM(names, index));
    if (PyErr_Occurred()) {
      Py_CLEAR(self->last_names);
      return 0;
    }
    /* A name that is no parameter is an option. */
    self->last_flags[index] = flag == NULL ? BY_VALUE : flag == Py_False ? 0 : OPEN;
  }
  Py_XSETREF(self->last_names, Py_NewRef(names));
  return 1;
}

static int read_named(dispatcher_t *self, call_t *call, PyObject *const *values, PyObject *names) {
  char flags[MOST_VALUES]; /* reading a value may run Python, which may make another call */
  Py_ssize_t index, count = PyTuple_GET_SIZE(names);
  if (names != self->last_names && !read_flags(self, names)) {
    forget_error();
    return 0;
  }
  memcpy(flags, self->last_flags, (size_t)count);
  for (index = 0; index < count; index++) {
    PyObject *name = PyTuple_GET_ITEM(names, index);
    /* Names are interned where calls are written; another string of the same letters only makes
     * another key. */
    if (!put(call, 'k', &name, sizeof(name)) ||
        !read_value(self, call, values[index], flags[index]))
      return 0;
  }
  return 1;
}

static int read_call(dispatcher_t *self, call_t *call, PyObject *const *args, Py_ssize_t count,
                     PyObject *names) {
  const char *by_value = PyBytes_AS_STRING(self->positions);
  Py_ssize_t index;
  if (count > PyBytes_GET_SIZE(self->positions) ||
      count + (names == NULL ? 0 : PyTuple_GET_SIZE(names)) > MOST_VALUES)
    return 0;
  put(call, 'c', &call->device, sizeof(call->device));
  for (index = 0; index < count; index++)
    if (!read_value(self, call, args[index], by_value[index] ? OPEN : 0))
      return 0;
  if ((names != NULL && !read_named(self, call, args + count, names)) || !know_device(self, call))
    return 0;
  memcpy(call->key + 1, &call->device, sizeof(call->device));
  return 1;
}

static void give_back(call_t *call) {
  Py_ssize_t index;
  for (index = 0; index < call->count; index++) {
    Py_XDECREF(call->owned[index]);
    Py_XDECREF(call->dtypes[index]);
  }
}

#endif

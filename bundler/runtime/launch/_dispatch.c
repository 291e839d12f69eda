/* SPDX-License-Identifier: Apache-2.0
 *
 * Dispatcher, the quick half of StaticKernel's launch, and Gridded, the type under StaticKernel, whose `kernel[grid]` it makes.
 *
 * It makes of a call the same distinctions as Reader does in Python, as bytes, finds what such calls were bound to, and
 * launches.  Whatever is not common (a call not seen before, a value that needs care, a hook) goes to Python as it came.
 */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include "_launch_call.h"
#include "_tensor_exchange.h"

#define MOST_VALUES 64
#define KEY_BYTES 1024
#define TEXT_BYTES 64
#define TYPES 4
#define UNALIGNED 15
/* Three for the grid, one for the stream; and one in front that a callee may use. */
#define LEADING 4
/* A value that counts by itself, and one of which the shape of a call says nothing. */
#define BY_VALUE 1
/* Of what Python tells of a call: launches others of its shape, or None. */
#define AGAIN 4
#define OPEN 2
/* Blocks along y and z, as grids.py has it. */
#define MOST_BLOCKS 65535
/* The device of a call until it is known. */
#define UNKNOWN (-1)

typedef struct {
  PyObject_HEAD
  vectorcallfunc vectorcall;
  PyObject *driver, *enter, *leave, *present, *slow, *first, *measure;
  PyObject *positions; /* bytes: for each parameter, whether it counts by its value */
  PyObject *names;     /* dict: the same by name */
  PyObject *known;     /* dict: key -> ((launcher, values it takes, grids, bound, again), what the key points to), or None */
  PyObject *shapes;    /* dict: key without constants -> (again, what the key points to) */
  PyObject *last_key, *last_row; /* of the last call that was known: loops launch one kind of call again and again */
  PyObject *last_names;          /* of the last call with keywords, and whether each counts by its value */
  char last_flags[MOST_VALUES];
  Py_ssize_t capacity;
  int numbers; /* what stands in front of a call is no grid, but numbers that a grid was found for */
} dispatcher_t;

/* What is read of one call.  `owned` is what has to be given back. */
typedef struct {
  unsigned char key[KEY_BYTES];
  size_t used;
  Py_ssize_t count;
  /* Where the first tensor lies that torch told of by its table.  A launch from a thread that is elsewhere is Python's. */
  const exchange_t *exchange;
  /* The current device, or where the tensors lie. */
  long device;
  /* Where in the key the constants are, which calls of one shape differ in, and which values they are. */
  int opens;
  struct {
    size_t from, to;
    PyObject *value;
  } open[MOST_VALUES];
  /* A value that is NULL is a tensor; its address stands in `addresses`. */
  PyObject *values[MOST_VALUES], *owned[MOST_VALUES], *dtypes[MOST_VALUES];
  uint64_t addresses[MOST_VALUES];
} call_t;

static PyObject *word_device, *word_stream, *word_data_ptr, *word_get_device, *word_dtype;

/* Types of tensors.  Where a method is a function of C, as torch's are, it is kept: looking it up would cost more than calling
 * it.  Where it is not, the row has NULL. */
static struct {
  PyTypeObject *type;
  unsigned version; /* changes when the type does */
  PyCFunction data_ptr, get_device;
  PyGetSetDef *dtype;
  const exchange_t *exchange; /* tells all three at once; NULL where there is none */
} tensors[TYPES];
static unsigned next_type;

/* How the compiled launcher is called with what was read; NULL where it was not built. */
static const launch_call_t *quick;

/* ---------------------------------------------------------------------------------------------------------- reading */

/* Each returns 1 when it was read, 0 when Python has to look at the call; no exception is left either way. */

static int put(call_t *call, unsigned char tag, const void *data, size_t size) {
  if (call->used + 1 + size > KEY_BYTES)
    return 0;
  call->key[call->used] = tag;
  memcpy(call->key + call->used + 1, data, size);
  call->used += 1 + size;
  return 1;
}

/* Writes the function of C that a method is, or NULL; returns whether there is such a method. */
static int find_method(PyTypeObject *type, PyObject *name, PyCFunction *found) {
  PyObject *method = PyObject_GetAttr((PyObject *)type, name);
  *found = NULL;
  if (method == NULL) {
    PyErr_Clear();
    return 0;
  }
  if (Py_TYPE(method) == &PyMethodDescr_Type && ((PyMethodDescrObject *)method)->d_method->ml_flags == METH_NOARGS &&
      PyType_IsSubtype(type, PyDescr_TYPE(method)))
    *found = ((PyMethodDescrObject *)method)->d_method->ml_meth;
  Py_DECREF(method);
  return 1;
}

/* Returns the property of C that an attribute is, or NULL; the type of the object holds it as long as it has this version. */
static PyGetSetDef *find_property(PyTypeObject *type, PyObject *name) {
  PyObject *found = PyObject_GetAttr((PyObject *)type, name);
  PyGetSetDef *property = NULL;
  if (found == NULL) {
    PyErr_Clear();
    return NULL;
  }
  if (Py_TYPE(found) == &PyGetSetDescr_Type && PyType_IsSubtype(type, PyDescr_TYPE(found)))
    property = ((PyGetSetDescrObject *)found)->d_getset;
  Py_DECREF(found);
  return property != NULL && property->get != NULL ? property : NULL;
}

static PyObject *call_method(PyObject *object, PyObject *name, PyCFunction function) {
  return function != NULL ? function(object, NULL)
                          : PyObject_VectorcallMethod(name, &object, 1 | PY_VECTORCALL_ARGUMENTS_OFFSET, NULL);
}

/* Returns the row of a type, -1 when its values are no tensors that can be read quickly. */
static int tensor_type(PyTypeObject *type) {
  PyCFunction data_ptr, get_device;
  unsigned row;
  for (row = 0; row < TYPES; row++)
    if (tensors[row].type == type && tensors[row].version == type->tp_version_tag && tensors[row].version != 0)
      return (int)row;
  if (!find_method(type, word_data_ptr, &data_ptr) || !find_method(type, word_get_device, &get_device) ||
      type->tp_version_tag == 0)
    return -1;
  row = next_type++ % TYPES;
  Py_INCREF(type); /* kept, so that no other type gets its address */
  Py_XSETREF(tensors[row].type, type);
  tensors[row].version = type->tp_version_tag;
  tensors[row].data_ptr = data_ptr;
  tensors[row].get_device = get_device;
  tensors[row].dtype = find_property(type, word_dtype);
  tensors[row].exchange = quick == NULL ? NULL : find_exchange(type);
  return (int)row;
}

/* Reads a tensor by torch's table; nothing is made for it. */
static int read_by_exchange(call_t *call, PyObject *tensor, const exchange_t *exchange) {
  dl_tensor_t found;
  unsigned char entry[sizeof(found.dtype) + 1];
  uint64_t address;
  if (!read_exchanged(exchange, tensor, &found) || found.device_type != ON_CUDA)
    return 0;
  if (call->device == UNKNOWN) {
    call->device = found.device;
    call->exchange = exchange;
  }
  if (call->device != found.device)
    return 0;
  address = (uint64_t)(uintptr_t)found.data + found.byte_offset;
  call->addresses[call->count] = address;
  call->values[call->count] = NULL;
  memcpy(entry, found.dtype, sizeof(found.dtype));
  entry[sizeof(found.dtype)] = (address & UNALIGNED) == 0;
  return put(call, 'D', entry, sizeof(entry));
}

/* Asks the driver for the current device, unless it was asked or a tensor told. */
static int know_device(dispatcher_t *self, call_t *call) {
  PyObject *device;
  if (call->device != UNKNOWN)
    return 1;
  device = PyObject_CallMethodNoArgs(self->driver, word_device);
  call->device = device == NULL ? UNKNOWN : PyLong_AsLong(device);
  Py_XDECREF(device);
  return call->device != UNKNOWN;
}

static int read_tensor(dispatcher_t *self, call_t *call, PyObject *tensor, int row) {
  PyObject *device, *dtype, *address;
  PyGetSetDef *property;
  unsigned long long number;
  long where;
  unsigned char entry[sizeof(void *) + 1];
  if (tensors[row].exchange != NULL)
    return read_by_exchange(call, tensor, tensors[row].exchange);
  if (!know_device(self, call))
    return 0;
  address = call_method(tensor, word_data_ptr, tensors[row].data_ptr);
  if (address == NULL)
    return 0;
  call->owned[call->count] = address;
  call->values[call->count] = address;
  number = PyLong_AsUnsignedLongLong(address);
  device = PyErr_Occurred() ? NULL : call_method(tensor, word_get_device, tensors[row].get_device);
  if (device == NULL)
    return 0;
  where = PyLong_AsLong(device);
  Py_DECREF(device);
  if (where != call->device) /* also after an error, which is -1 */
    return 0;
  property = tensors[row].dtype;
  dtype = property != NULL ? property->get(tensor, property->closure) : PyObject_GetAttr(tensor, word_dtype);
  if (dtype == NULL)
    return 0;
  call->dtypes[call->count] = dtype;
  memcpy(entry, &dtype, sizeof(void *));
  entry[sizeof(void *)] = (number & UNALIGNED) == 0;
  return put(call, 'T', entry, sizeof(entry));
}

/* The classes of integers for which Triton compiles the same kernel, as in call_key.py. */
static int read_integer(call_t *call, PyObject *value) {
  int overflow;
  unsigned char kind;
  long long number = PyLong_AsLongLongAndOverflow(value, &overflow);
  if (overflow)
    return 0;
  if (number == 1)
    kind = 1;
  else
    kind = (unsigned char)((number >= INT32_MIN && number <= INT32_MAX ? 2 : 4) + ((number & UNALIGNED) == 0));
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
  int done, row;
  size_t from = call->used;
  call->values[call->count] = value;
  call->owned[call->count] = call->dtypes[call->count] = NULL;
  if (by_value)
    done = read_constant(call, value);
  else if (PyLong_CheckExact(value))
    done = read_integer(call, value);
  else if (value == Py_None || PyBool_Check(value) || PyFloat_CheckExact(value))
    done = put(call, value == Py_None ? 'N' : PyBool_Check(value) ? 'B' : 'F', "", 0);
  else if ((row = tensor_type(Py_TYPE(value))) >= 0)
    done = read_tensor(self, call, value, row);
  else
    done = 0;
  call->count++;
  if (!done) {
    PyErr_Clear();
  } else if (by_value == OPEN) {
    call->open[call->opens].from = from;
    call->open[call->opens].to = call->used;
    call->open[call->opens++].value = value;
  }
  return done;
}

/* Writes for each name whether its value counts as such; calls from one place in a program have one tuple of names. */
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
    PyErr_Clear();
    return 0;
  }
  memcpy(flags, self->last_flags, (size_t)count);
  for (index = 0; index < count; index++) {
    PyObject *name = PyTuple_GET_ITEM(names, index);
    /* Names are interned where calls are written; another string of the same letters only makes another key. */
    if (!put(call, 'k', &name, sizeof(name)) || !read_value(self, call, values[index], flags[index]))
      return 0;
  }
  return 1;
}

static int read_call(dispatcher_t *self, call_t *call, PyObject *const *args, Py_ssize_t count, PyObject *names) {
  const char *by_value = PyBytes_AS_STRING(self->positions);
  Py_ssize_t index;
  if (count > PyBytes_GET_SIZE(self->positions) || count + (names == NULL ? 0 : PyTuple_GET_SIZE(names)) > MOST_VALUES)
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

/* -------------------------------------------------------------------------------------------------------- launching */

static PyObject *keywords_of(PyObject *const *values, PyObject *names) {
  Py_ssize_t index;
  PyObject *found = PyDict_New();
  for (index = 0; found != NULL && names != NULL && index < PyTuple_GET_SIZE(names); index++)
    if (PyDict_SetItem(found, PyTuple_GET_ITEM(names, index), values[index]) < 0)
      Py_CLEAR(found);
  return found;
}

static PyObject *tuple_of(PyObject *const *values, Py_ssize_t count) {
  Py_ssize_t index;
  PyObject *found = PyTuple_New(count);
  for (index = 0; found != NULL && index < count; index++)
    PyTuple_SET_ITEM(found, index, Py_XNewRef(values[index] == NULL ? Py_None : values[index]));
  return found;
}

/* Calls one of Python's functions with something, the arguments, and the keywords. */
static PyObject *ask(PyObject *function, PyObject *first, PyObject *second, PyObject *const *args, Py_ssize_t count,
                     PyObject *names) {
  PyObject *answer = NULL, *tuple = tuple_of(args, count), *keywords = keywords_of(args + count, names);
  if (tuple != NULL && keywords != NULL)
    answer = PyObject_CallFunctionObjArgs(function, first, tuple, keywords, second, NULL);
  Py_XDECREF(tuple);
  Py_XDECREF(keywords);
  return answer;
}

/* Returns the key without its constants. */
static PyObject *shape_of(const call_t *call) {
  unsigned char shape[KEY_BYTES + MOST_VALUES];
  size_t used = 0, from = 0;
  int index;
  for (index = 0; index <= call->opens; index++) {
    size_t to = index < call->opens ? call->open[index].from : call->used;
    memcpy(shape + used, call->key + from, to - from);
    used += to - from;
    if (index < call->opens) {
      shape[used++] = 'o';
      from = call->open[index].to;
    }
  }
  return PyBytes_FromStringAndSize((char *)shape, (Py_ssize_t)used);
}

static int keep(dispatcher_t *self, PyObject *table, PyObject *key, PyObject *row) {
  if (PyDict_Size(table) >= self->capacity)
    PyDict_Clear(table);
  return PyDict_SetItem(table, key, row);
}

/* Returns (entry, what the key points to), or (again, ...): what lies at the addresses in a key must not go away. */
static PyObject *row_of(PyObject *first, const call_t *call, PyObject *names) {
  PyObject *row = NULL, *kept = tuple_of(call->dtypes, call->count);
  if (kept != NULL)
    row = Py_BuildValue("(OOO)", first, kept, names == NULL ? Py_None : names);
  Py_XDECREF(kept);
  return row;
}

/* Returns the row of a call that differs from a known one in constants alone, a new reference; NULL without an exception where only
 * Python can tell. */
static PyObject *row_by_shape(dispatcher_t *self, const call_t *call, PyObject *key, PyObject *names) {
  PyObject *constants[MOST_VALUES], *shape, *found, *again, *entry, *row = NULL;
  int index;
  if (call->opens == 0 || PyDict_GET_SIZE(self->shapes) == 0 || (shape = shape_of(call)) == NULL)
    return NULL;
  found = PyDict_GetItemWithError(self->shapes, shape);
  Py_DECREF(shape);
  if (found == NULL)
    return NULL;
  again = Py_NewRef(PyTuple_GET_ITEM(found, 0)); /* others may forget it while it runs */
  for (index = 0; index < call->opens; index++)
    constants[index] = call->open[index].value;
  entry = PyObject_Vectorcall(again, constants, (size_t)call->opens, NULL);
  Py_DECREF(again);
  if (entry != NULL && entry != Py_None && (row = row_of(entry, call, names)) != NULL && keep(self, self->known, key, row) < 0)
    Py_CLEAR(row);
  Py_XDECREF(entry);
  return row;
}

/* Lets Python launch, and keeps what it bound such calls to. */
static PyObject *launch_and_learn(dispatcher_t *self, call_t *call, PyObject *key, PyObject *const *all, size_t flagged,
                                  PyObject *names) {
  PyObject *again, *row, *shape, *entry = PyObject_Vectorcall(self->first, all, flagged, names);
  int done;
  if (entry == NULL)
    return NULL;
  if (entry == Py_False) { /* nothing is known of such calls yet */
    Py_DECREF(entry);
    Py_RETURN_NONE;
  }
  if (entry != Py_None) {
    again = PyTuple_GET_SIZE(entry) > AGAIN ? PyTuple_GET_ITEM(entry, AGAIN) : Py_None;
    if (again != Py_None && call->opens > 0) {
      shape = shape_of(call);
      row = shape == NULL ? NULL : row_of(again, call, names);
      done = row == NULL ? -1 : keep(self, self->shapes, shape, row);
      Py_XDECREF(shape);
      Py_XDECREF(row);
      if (done < 0) {
        Py_DECREF(entry);
        return NULL;
      }
    }
    row = row_of(entry, call, names);
    Py_SETREF(entry, row);
    if (entry == NULL)
      return NULL;
  }
  done = keep(self, self->known, key, entry);
  Py_DECREF(entry);
  if (done < 0)
    return NULL;
  Py_RETURN_NONE;
}

/* Returns (x, y, z) for a grid, a new reference. */
static PyObject *sizes_of(dispatcher_t *self, PyObject *grids, PyObject *bound, PyObject *const *all, Py_ssize_t count,
                          PyObject *names) {
  PyObject *grid = all[0];
  if (PyTuple_CheckExact(grid)) {
    PyObject *found = PyDict_GetItemWithError(grids, grid);
    if (found != NULL)
      return Py_NewRef(found);
    PyErr_Clear(); /* sizes of a kind that has no hash are Python's to check */
  }
  return ask(self->measure, bound, grid, all + 1, count, names);
}

/* Reads a grid that is written as one to three numbers a device can launch; returns 0 for any other. */
static int read_grid(PyObject *grid, int64_t *programs) {
  Py_ssize_t axis, count = PyTuple_CheckExact(grid) ? PyTuple_GET_SIZE(grid) : 0;
  if (count < 1 || count > 3)
    return 0;
  programs[1] = programs[2] = 1;
  for (axis = 0; axis < count; axis++) {
    PyObject *size = PyTuple_GET_ITEM(grid, axis);
    int overflow;
    if (!PyLong_CheckExact(size))
      return 0;
    programs[axis] = PyLong_AsLongLongAndOverflow(size, &overflow);
    if (overflow || programs[axis] < 0 || programs[axis] > (axis == 0 ? INT32_MAX : MOST_BLOCKS))
      return 0;
  }
  return 1;
}

/* Returns how many of a call's values a launcher takes: the first ones, or those at places, which are NULL then; -1 with an exception. */
static Py_ssize_t places_of(const call_t *call, PyObject *which, const unsigned char **places) {
  Py_ssize_t index, taken;
  *places = NULL;
  if (PyBytes_Check(which)) {
    taken = PyBytes_GET_SIZE(which);
    *places = (const unsigned char *)PyBytes_AS_STRING(which);
  } else if ((taken = PyLong_AsSsize_t(which)) == -1 && PyErr_Occurred()) {
    return -1;
  }
  if (taken >= 0 && taken <= call->count) {
    for (index = 0; index < taken && (*places == NULL || (*places)[index] < call->count); index++)
      ;
    if (index == taken)
      return taken;
  }
  PyErr_SetString(PyExc_SystemError, "a launcher takes values that its call does not have");
  return -1;
}

/* Launches what torch's table told of all tensors, where the stream is torch's as well; NULL without an exception where it is to be
 * launched as other calls are. */
static PyObject *launch_read(call_t *call, PyObject *launcher, PyObject *grid, const unsigned char *places,
                             Py_ssize_t taken) {
  PyObject *values[MOST_VALUES];
  uint64_t addresses[MOST_VALUES];
  int64_t programs[3];
  Py_ssize_t index;
  void *stream = NULL;
  if (call->exchange == NULL || Py_TYPE(launcher) != quick->launcher || !read_grid(grid, programs) ||
      !quick->is_ready(launcher, programs))
    return NULL;
  if (programs[0] == 0 || programs[1] == 0 || programs[2] == 0)
    Py_RETURN_NONE;
  if (call->exchange->stream(ON_CUDA, (int32_t)call->device, &stream) != 0) {
    PyErr_Clear();
    return NULL;
  }
  if (places == NULL)
    return quick->launch(launcher, programs, stream, call->values, call->addresses, taken);
  for (index = 0; index < taken; index++) {
    values[index] = call->values[places[index]];
    addresses[index] = call->addresses[places[index]];
  }
  return quick->launch(launcher, programs, stream, values, addresses, taken);
}

/* Makes what stands for the tensors that were read by torch's table. */
static int make_values(call_t *call) {
  Py_ssize_t index;
  for (index = 0; index < call->count; index++)
    if (call->values[index] == NULL) {
      call->owned[index] = call->values[index] = PyLong_FromUnsignedLongLong(call->addresses[index]);
      if (call->values[index] == NULL)
        return 0;
    }
  return 1;
}

/* 1 when the current device is the one that the call's tensors lie on, 0 when not, -1 with an exception. */
static int is_current(dispatcher_t *self, const call_t *call) {
  PyObject *device;
  long number;
  if (call->exchange == NULL) /* it is the current one that tensors were compared with */
    return 1;
  device = PyObject_CallMethodNoArgs(self->driver, word_device);
  number = device == NULL ? UNKNOWN : PyLong_AsLong(device);
  Py_XDECREF(device);
  return PyErr_Occurred() ? -1 : number == call->device;
}

/* As `launch_read`, with the grid that was found for the numbers in its place, where that is how calls give it. */
static PyObject *launch_numbered(dispatcher_t *self, call_t *call, PyObject *entry, PyObject *grid,
                                 const unsigned char *places, Py_ssize_t taken) {
  PyObject *found, *result;
  if (!self->numbers)
    return launch_read(call, PyTuple_GET_ITEM(entry, 0), grid, places, taken);
  found = PyTuple_CheckExact(grid) ? PyDict_GetItemWithError(PyTuple_GET_ITEM(entry, 2), grid) : NULL;
  if (found == NULL) {
    PyErr_Clear(); /* numbers of a kind that has no hash are Python's to look at */
    return NULL;
  }
  Py_INCREF(found);
  result = launch_read(call, PyTuple_GET_ITEM(entry, 0), found, places, taken);
  Py_DECREF(found);
  return result;
}

static PyObject *launch_known(dispatcher_t *self, call_t *call, PyObject *entry, PyObject *const *all, Py_ssize_t count,
                              PyObject *names) {
  PyObject *stack[LEADING + MOST_VALUES + 1], **out = stack + 1, *sizes, *device, *stream, *result;
  const unsigned char *places;
  Py_ssize_t index, taken = places_of(call, PyTuple_GET_ITEM(entry, 1), &places);
  int some = 1;
  if (taken < 0)
    return NULL;
  result = launch_numbered(self, call, entry, all[0], places, taken);
  if (result != NULL || PyErr_Occurred())
    return result;
  if ((some = is_current(self, call)) <= 0)
    return some < 0 ? NULL : PyObject_Vectorcall(self->slow, all, (size_t)count + 1, names);
  if (!make_values(call))
    return NULL;
  sizes = sizes_of(self, PyTuple_GET_ITEM(entry, 2), PyTuple_GET_ITEM(entry, 3), all, count, names);
  if (sizes == NULL)
    return NULL;
  if (!PyTuple_Check(sizes) || PyTuple_GET_SIZE(sizes) != 3) {
    PyErr_SetString(PyExc_SystemError, "a grid is three sizes");
    Py_DECREF(sizes);
    return NULL;
  }
  for (index = 0; index < 3; index++) {
    out[index] = PyTuple_GET_ITEM(sizes, index);
    some = some && PyObject_IsTrue(out[index]) > 0;
  }
  if (!some) {
    Py_DECREF(sizes);
    Py_RETURN_NONE;
  }
  device = PyLong_FromLong(call->device);
  stream = device == NULL ? NULL : PyObject_CallMethodOneArg(self->driver, word_stream, device);
  Py_XDECREF(device);
  if (stream != NULL) {
    out[3] = stream;
    for (index = 0; index < taken; index++)
      out[LEADING + index] = call->values[places == NULL ? index : places[index]];
    result = PyObject_Vectorcall(PyTuple_GET_ITEM(entry, 0), out,
                                 (size_t)(LEADING + taken) | PY_VECTORCALL_ARGUMENTS_OFFSET, NULL);
    Py_DECREF(stream);
  }
  Py_DECREF(sizes);
  return result;
}

/* 1: Python has to be asked to launch, since hooks are to be called; -1: an exception. */
static int hooked(dispatcher_t *self) {
  PyObject *answer;
  int found;
  if (PyList_GET_SIZE(self->enter) > 0 || PyList_GET_SIZE(self->leave) > 0)
    return 1;
  answer = PyObject_CallNoArgs(self->present);
  found = answer == NULL ? -1 : PyObject_IsTrue(answer);
  Py_XDECREF(answer);
  return found;
}

static int is_last(dispatcher_t *self, call_t *call) {
  return self->last_key != NULL && PyBytes_GET_SIZE(self->last_key) == (Py_ssize_t)call->used &&
         memcmp(PyBytes_AS_STRING(self->last_key), call->key, call->used) == 0;
}

/* Returns the row of a known call, a new reference; NULL without an exception for an unknown one, with its key in `*key`. */
static PyObject *find_row(dispatcher_t *self, call_t *call, PyObject **key) {
  PyObject *row;
  *key = NULL;
  if (is_last(self, call))
    return Py_NewRef(self->last_row);
  *key = PyBytes_FromStringAndSize((char *)call->key, (Py_ssize_t)call->used);
  row = *key == NULL ? NULL : PyDict_GetItemWithError(self->known, *key);
  if (row == NULL)
    return NULL;
  Py_XSETREF(self->last_key, Py_NewRef(*key));
  Py_XSETREF(self->last_row, Py_NewRef(row));
  return Py_NewRef(row); /* others may forget it while the launch lets them run */
}

static PyObject *find_and_launch(dispatcher_t *self, call_t *call, PyObject *const *all, size_t flagged,
                                 PyObject *names) {
  PyObject *key, *result = NULL, *row = find_row(self, call, &key);
  int hooks;
  if (row == NULL && !PyErr_Occurred())
    row = row_by_shape(self, call, key, names);
  if (row == NULL) {
    int here = PyErr_Occurred() ? -1 : is_current(self, call);
    /* What Python binds a call to, it binds to the current device. */
    result = here < 0 ? NULL
             : here   ? launch_and_learn(self, call, key, all, flagged, names)
                      : PyObject_Vectorcall(self->slow, all, flagged, names);
  } else if (row == Py_None || (hooks = hooked(self)) > 0) {
    result = PyObject_Vectorcall(self->slow, all, flagged, names);
  } else if (hooks == 0) {
    result = launch_known(self, call, PyTuple_GET_ITEM(row, 0), all, PyVectorcall_NARGS(flagged) - 1, names);
  }
  Py_XDECREF(row);
  Py_XDECREF(key);
  return result;
}

static PyObject *dispatch(PyObject *object, PyObject *const *all, size_t flagged, PyObject *names) {
  dispatcher_t *self = (dispatcher_t *)object;
  PyObject *result;
  call_t call;
  Py_ssize_t count = PyVectorcall_NARGS(flagged) - 1;
  if (count < 0)
    return PyObject_Vectorcall(self->slow, all, flagged, names);
  call.used = 0;
  call.count = 0;
  call.opens = 0;
  call.exchange = NULL;
  call.device = UNKNOWN;
  if (read_call(self, &call, all + 1, count, names))
    result = find_and_launch(self, &call, all, flagged, names);
  else if (PyErr_Occurred())
    result = NULL;
  else
    result = PyObject_Vectorcall(self->slow, all, flagged, names);
  give_back(&call);
  return result;
}

/* --------------------------------------------------------------------------------------------------------- the type */

static PyObject *dispatcher_new(PyTypeObject *type, PyObject *args, PyObject *keywords) {
  static char *words[] = {"driver", "enter", "leave", "present", "slow", "first", "measure", "positions", "names", "capacity",
                          "numbers", NULL};
  PyObject *driver, *enter, *leave, *present, *slow, *first, *measure, *positions, *names;
  Py_ssize_t capacity;
  int numbers;
  dispatcher_t *self;
  if (!PyArg_ParseTupleAndKeywords(args, keywords, "$OO!O!OOOOO!O!np", words, &driver, &PyList_Type, &enter,
                                   &PyList_Type, &leave, &present, &slow, &first, &measure, &PyBytes_Type, &positions,
                                   &PyDict_Type, &names, &capacity, &numbers))
    return NULL;
  self = (dispatcher_t *)type->tp_alloc(type, 0);
  if (self == NULL)
    return NULL;
  self->vectorcall = dispatch;
  self->driver = Py_NewRef(driver);
  self->enter = Py_NewRef(enter);
  self->leave = Py_NewRef(leave);
  self->present = Py_NewRef(present);
  self->slow = Py_NewRef(slow);
  self->first = Py_NewRef(first);
  self->measure = Py_NewRef(measure);
  self->positions = Py_NewRef(positions);
  self->names = Py_NewRef(names);
  self->capacity = capacity;
  self->numbers = numbers;
  self->known = PyDict_New();
  self->shapes = PyDict_New();
  if (self->known == NULL || self->shapes == NULL)
    Py_CLEAR(self);
  return (PyObject *)self;
}

static int dispatcher_traverse(dispatcher_t *self, visitproc visit, void *arg) {
  Py_VISIT(Py_TYPE(self));
  Py_VISIT(self->driver);
  Py_VISIT(self->enter);
  Py_VISIT(self->leave);
  Py_VISIT(self->present);
  Py_VISIT(self->slow);
  Py_VISIT(self->first);
  Py_VISIT(self->measure);
  Py_VISIT(self->names);
  Py_VISIT(self->known);
  Py_VISIT(self->shapes);
  Py_VISIT(self->last_row);
  Py_VISIT(self->last_names);
  return 0;
}

static int dispatcher_clear(dispatcher_t *self) {
  Py_CLEAR(self->driver);
  Py_CLEAR(self->enter);
  Py_CLEAR(self->leave);
  Py_CLEAR(self->present);
  Py_CLEAR(self->slow);
  Py_CLEAR(self->first);
  Py_CLEAR(self->measure);
  Py_CLEAR(self->positions);
  Py_CLEAR(self->names);
  Py_CLEAR(self->known);
  Py_CLEAR(self->shapes);
  Py_CLEAR(self->last_key);
  Py_CLEAR(self->last_row);
  Py_CLEAR(self->last_names);
  return 0;
}

static void dispatcher_dealloc(dispatcher_t *self) {
  PyTypeObject *type = Py_TYPE(self);
  PyObject_GC_UnTrack(self);
  dispatcher_clear(self);
  type->tp_free(self);
  Py_DECREF(type);
}

static PyMemberDef members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(dispatcher_t, vectorcall), READONLY, NULL},
    {NULL, 0, 0, 0, NULL}};

static PyType_Slot slots[] = {{Py_tp_new, dispatcher_new},
                              {Py_tp_dealloc, dispatcher_dealloc},
                              {Py_tp_traverse, dispatcher_traverse},
                              {Py_tp_clear, dispatcher_clear},
                              {Py_tp_call, PyVectorcall_Call},
                              {Py_tp_members, members},
                              {Py_tp_doc, "Launches a kernel: dispatcher(grid, *arguments, **keywords)."},
                              {0, NULL}};

static PyType_Spec spec = {"bundler.runtime.launch._dispatch.Dispatcher", sizeof(dispatcher_t), 0,
                           Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL, slots};

/* ------------------------------------------------------------------------------------------------------ kernel[grid] */

/* What `kernel[grid]` returns: calls a function with the grid in front.  functools.partial does the same, and took, with the method
 * that made it, a sixth of a launch. */
typedef struct {
  PyObject_HEAD
  vectorcallfunc vectorcall;
  PyObject *function, *grid;
} bound_t;

static PyTypeObject *bound_type;
/* The memory of the last one that went away: nearly every call makes one, and drops it. */
static bound_t *spare;

static PyObject *call_bound(PyObject *object, PyObject *const *args, size_t flagged, PyObject *names) {
  bound_t *self = (bound_t *)object;
  Py_ssize_t count = PyVectorcall_NARGS(flagged), all = count + (names == NULL ? 0 : PyTuple_GET_SIZE(names));
  PyObject *on_stack[MOST_VALUES + 1], **with_grid = on_stack, *result, *kept;
  if (flagged & PY_VECTORCALL_ARGUMENTS_OFFSET) { /* the caller lets us write in front of its arguments */
    with_grid = (PyObject **)args - 1;
    kept = with_grid[0];
    with_grid[0] = self->grid;
    result = PyObject_Vectorcall(self->function, with_grid, (size_t)count + 1, names);
    with_grid[0] = kept;
    return result;
  }
  if (all > MOST_VALUES && (with_grid = PyMem_New(PyObject *, all + 1)) == NULL)
    return PyErr_NoMemory();
  with_grid[0] = self->grid;
  memcpy(with_grid + 1, args, (size_t)all * sizeof(PyObject *));
  result = PyObject_Vectorcall(self->function, with_grid, (size_t)count + 1, names);
  if (with_grid != on_stack)
    PyMem_Free(with_grid);
  return result;
}

static int bound_traverse(bound_t *self, visitproc visit, void *arg) {
  Py_VISIT(Py_TYPE(self));
  Py_VISIT(self->function);
  Py_VISIT(self->grid);
  return 0;
}

static int bound_clear(bound_t *self) {
  Py_CLEAR(self->function);
  Py_CLEAR(self->grid);
  return 0;
}

static void bound_dealloc(bound_t *self) {
  PyTypeObject *type = Py_TYPE(self);
  PyObject_GC_UnTrack(self);
  bound_clear(self);
  if (spare == NULL)
    spare = self;
  else
    type->tp_free(self);
  Py_DECREF(type);
}

static PyMemberDef bound_members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(bound_t, vectorcall), READONLY, NULL}, {NULL, 0, 0, 0, NULL}};

static PyType_Slot bound_slots[] = {{Py_tp_dealloc, bound_dealloc},
                                    {Py_tp_traverse, bound_traverse},
                                    {Py_tp_clear, bound_clear},
                                    {Py_tp_call, PyVectorcall_Call},
                                    {Py_tp_members, bound_members},
                                    {Py_tp_doc, "A kernel with its grid: call it with the kernel's arguments."},
                                    {0, NULL}};

static PyType_Spec bound_spec = {"bundler.runtime.launch._dispatch.Bound", sizeof(bound_t), 0,
                                 Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL |
                                     Py_TPFLAGS_DISALLOW_INSTANTIATION,
                                 bound_slots};

typedef struct {
  PyObject_HEAD
  PyObject *launch;
} gridded_t;

static PyObject *subscript(PyObject *object, PyObject *grid) {
  PyObject *function = ((gridded_t *)object)->launch;
  bound_t *made;
  if (function == NULL) {
    PyErr_SetString(PyExc_AttributeError, "_launch");
    return NULL;
  }
  if (spare != NULL) {
    made = (bound_t *)PyObject_Init((PyObject *)spare, bound_type);
    spare = NULL;
  } else if ((made = PyObject_GC_New(bound_t, bound_type)) == NULL) {
    return NULL;
  }
  made->vectorcall = call_bound;
  made->function = Py_NewRef(function);
  made->grid = Py_NewRef(grid);
  PyObject_GC_Track(made);
  return (PyObject *)made;
}

static int gridded_traverse(gridded_t *self, visitproc visit, void *arg) {
  Py_VISIT(Py_TYPE(self));
  Py_VISIT(self->launch);
  return 0;
}

static int gridded_clear(gridded_t *self) {
  Py_CLEAR(self->launch);
  return 0;
}

static void gridded_dealloc(gridded_t *self) {
  PyTypeObject *type = Py_TYPE(self);
  PyObject_GC_UnTrack(self);
  gridded_clear(self);
  type->tp_free(self);
  Py_DECREF(type);
}

static PyMemberDef gridded_members[] = {{"_launch", T_OBJECT_EX, offsetof(gridded_t, launch), 0, "launch(grid, *arguments)"},
                                        {NULL, 0, 0, 0, NULL}};

static PyType_Slot gridded_slots[] = {{Py_tp_dealloc, gridded_dealloc},
                                      {Py_tp_traverse, gridded_traverse},
                                      {Py_tp_clear, gridded_clear},
                                      {Py_mp_subscript, subscript},
                                      {Py_tp_members, gridded_members},
                                      {Py_tp_doc, "Has `_launch`, which `self[grid]` calls with the grid in front."},
                                      {0, NULL}};

static PyType_Spec gridded_spec = {"bundler.runtime.launch._dispatch.Gridded", sizeof(gridded_t), 0,
                                   Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_BASETYPE, gridded_slots};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_dispatch", "The compiled dispatcher.", -1, NULL,
                                    NULL, NULL, NULL, NULL};

/* Finds the compiled launcher, which may not have been built. */
static const launch_call_t *find_launcher(void) {
  PyObject *other = PyImport_ImportModule("bundler.runtime.launch._launch");
  PyObject *capsule = other == NULL ? NULL : PyObject_GetAttrString(other, "call");
  const launch_call_t *found = capsule == NULL ? NULL : PyCapsule_GetPointer(capsule, LAUNCH_CALL);
  PyErr_Clear();
  Py_XDECREF(capsule);
  Py_XDECREF(other);
  return found != NULL && found->version == LAUNCH_CALL_VERSION ? found : NULL;
}

PyMODINIT_FUNC PyInit__dispatch(void) {
  PyObject *made = PyModule_Create(&module), *type = PyType_FromSpec(&spec), *gridded = PyType_FromSpec(&gridded_spec);
  bound_type = (PyTypeObject *)PyType_FromSpec(&bound_spec);
  quick = find_launcher();
  word_device = PyUnicode_InternFromString("device");
  word_stream = PyUnicode_InternFromString("stream");
  word_data_ptr = PyUnicode_InternFromString("data_ptr");
  word_get_device = PyUnicode_InternFromString("get_device");
  word_dtype = PyUnicode_InternFromString("dtype");
  if (type == NULL || gridded == NULL || bound_type == NULL || made == NULL || !word_device || !word_stream ||
      !word_data_ptr || !word_get_device || !word_dtype || PyModule_AddObjectRef(made, "Dispatcher", type) < 0 ||
      PyModule_AddObjectRef(made, "Gridded", gridded) < 0)
    Py_CLEAR(made);
  Py_XDECREF(type);
  Py_XDECREF(gridded);
  return made;
}

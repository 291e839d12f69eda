/* SPDX-License-Identifier: Apache-2.0
 *
 * Launcher, which launches kernels of one signature, as the function `launch` that Triton up to 3.6 has compiled for each.
 *
 * Made by bundler/runtime/launch/jit_modules.py for a signature, and called from the driver.py of Triton 3.6, for each launch.
 */

#include "_jit_driver.h"
#include <stddef.h>
#include <string.h>
#include <structmember.h>

/* Of a call of Launcher: three for the grid, stream, function, two switches, two scratch buffers, two of metadata, two hooks. */
#define LEADING 13

/* ------------------------------------------------------------------------------------------------------------- signature */

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
  if (name == NULL)
    return UNKNOWN;
  if (strcmp(name, "i1") == 0 || strcmp(name, "i8") == 0)
    return BYTE_36;
  return strcmp(name, "u1") == 0 ? U8 : kind_of(type);
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

/* ---------------------------------------------------------------------------------------------------------------- values */

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

/* ---------------------------------------------------------------------------------------------------------------- launch */

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

int add_launcher(PyObject *module) {
  PyObject *launcher = PyType_FromSpec(&launcher_spec);
  int status = launcher == NULL ? -1 : PyModule_AddObjectRef(module, "Launcher", launcher);
  Py_XDECREF(launcher);
  return status;
}

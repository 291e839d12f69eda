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
#include "_launch_packing.h"
#include "_launcher.h"
#include "_device_images.h"

#define STACK_BYTES 4096
#define STACK_PARAMETERS 128
/* A tensor map must be aligned like this. */
#define ALIGNMENT 128
/* Three for the grid, one for the stream. */
#define LEADING 4
/* What `fail` is told when it was not the driver that refused. */
#define CLOSED (-1)
#define BAD_GRID (-2)

/* ---------------------------------------------------------------------------------------------------------- packing */

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
      return PyErr_Occurred() ? -1 : pack_slowly(self, values, addresses, count, buffer);
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
  return status == 0 ? count_launch(Py_NewRef(Py_None)) : fail(self, status);
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
  return count_launch(result);
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

static PyMethodDef methods[] = {
    {"pack", (PyCFunction)(void (*)(void))pack_method, METH_FASTCALL, "Return the parameter buffer of these values."},
    {"tell_tensors", tell_tensors, METH_STATIC | METH_VARARGS, "Say how tensors of torch are read without a call of theirs."},
    {"ask_later", ask_later, METH_STATIC | METH_VARARGS, "ask_later(function, launches): call it after so many launches."},
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

static launch_call_t call_of_others = {LAUNCH_CALL_VERSION, NULL, is_ready, launch_read, &of_torch};

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

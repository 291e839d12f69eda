/* SPDX-License-Identifier: Apache-2.0
 *
 * Launcher, which packs a call's values into a parameter buffer and hands it to the driver.
 *
 * It knows no driver: Python gives it the addresses of the functions, and everything that happens
 * seldom (a value that needs care, an error, scratch memory, a thread in another context) is
 * Python's to do, so that both launch paths agree.
 *
 * A Launcher owns its fields and attributes, and holds what it calls.  Nothing is shared between
 * two calls: the buffer lies on the stack, or is allocated when it is large.  The interpreter's
 * lock is held, and released while the driver launches: `function` is read before, since `close`
 * may come meanwhile.
 */

#ifndef BUNDLER_LAUNCHER_H
#define BUNDLER_LAUNCHER_H

#include "_packing.h"

#define STACK_BYTES 4096
#define STACK_PARAMETERS 128
/* A tensor map must be aligned like this. */
#define ALIGNMENT 128
/* Three for the grid, one for the stream. */
#define LEADING 4
/* What `fail` is told when it was not the driver that refused. */
#define CLOSED (-1)
#define BAD_GRID (-2)
#define ATTRIBUTE_BYTES 72

/* cuLaunchKernel, hipModuleLaunchKernel. */
typedef int (*plain_t)(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                       void *, void **, void **);
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

typedef struct {
  PyObject_HEAD
  state_t *state;
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

/* ------------------------------------------------------------------------------------- packing */

/* Asks Python, which returns the whole buffer or raises. */
static int pack_slowly(launcher_t *self, PyObject *const *values, const uint64_t *addresses,
                       Py_ssize_t count, unsigned char *buffer) {
  Py_ssize_t index;
  PyObject *packed, *tuple = PyTuple_New(count);
  for (index = 0; tuple != NULL && index < count; index++) {
    PyObject *value = values[index] != NULL ? Py_NewRef(values[index])
                                            : PyLong_FromUnsignedLongLong(addresses[index]);
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

/* A value that is NULL is a pointer that was read before; it stands in `addresses`.  What lies
 * between the parameters is left as it is: a driver is told where each of them is. */
static int pack_values(launcher_t *self, PyObject *const *values, const uint64_t *addresses,
                       Py_ssize_t count, unsigned char *buffer) {
  Py_ssize_t index;
  if (count != self->argument_count)
    return pack_slowly(self, values, addresses, count, buffer);
  for (index = 0; index < self->field_count; index++) {
    const field_t *field = &self->fields[index];
    PyObject *value;
    if (field->argument < 0) {
      /* Scratch memory: what needs some gets its address later. */
      memset(buffer + field->offset, 0, 8);
      continue;
    }
    value = values[field->argument];
    if (value == NULL && field->kind == POINTER)
      memcpy(buffer + field->offset, &addresses[field->argument], 8);
    else if (value == NULL || !pack_one(self->state, field, value, buffer))
      return PyErr_Occurred() ? -1 : pack_slowly(self, values, addresses, count, buffer);
  }
  return 0;
}

/* ----------------------------------------------------------------------------------- launching */

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
static int read_sizes(launcher_t *self, PyObject *const *args, unsigned *grid) {
  int axis, some = 1;
  for (axis = 0; axis < 3; axis++) {
    long long programs;
    if (!PyLong_Check(args[axis]) || !read_integer(args[axis], &programs) || programs < 0 ||
        programs > INT32_MAX)
      return -1;
    some = some && programs > 0;
    grid[axis] = (unsigned)programs;
  }
  if ((uint64_t)grid[0] * self->cluster > INT32_MAX)
    return -1;
  grid[0] *= self->cluster;
  return some;
}

static int call_driver(launcher_t *self, const unsigned *grid, void *stream,
                       unsigned char *buffer) {
  void *function = self->function; /* close() may come while others have the interpreter */
  void *on_stack[STACK_PARAMETERS], **parameters = on_stack;
  Py_ssize_t index;
  int status;
  if (self->field_count > STACK_PARAMETERS &&
      (parameters = PyMem_New(void *, self->field_count)) == NULL)
    return 2; /* out of memory, in both drivers' numbers */
  for (index = 0; index < self->field_count; index++)
    parameters[index] = buffer + self->fields[index].offset;
  /* The driver waits when its queue is full, perhaps for a callback that needs the interpreter. */
  Py_BEGIN_ALLOW_THREADS
  if (self->extended != NULL) {
    config_t config = {
        {grid[0], grid[1], grid[2]}, {self->block, 1, 1}, self->shared, stream, self->attributes,
        self->attribute_count};
    status = self->extended(&config, function, parameters, NULL);
  } else {
    status = self->plain(function, grid[0], grid[1], grid[2], self->block, 1, 1, self->shared,
                         stream, parameters, NULL);
  }
  Py_END_ALLOW_THREADS
  if (parameters != on_stack)
    PyMem_Free(parameters);
  return status;
}

/* Writes the addresses of scratch memory; `*release` gives it back, in the order of the stream,
 * after the launch. */
static int add_scratch(launcher_t *self, PyObject *const *args, unsigned char *buffer,
                       PyObject **release) {
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

static PyObject *launch_packed(launcher_t *self, PyObject *const *args, const unsigned *grid,
                               unsigned char *buffer) {
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

/* Whether `launch_values` may be called, here and now: the thread is where the kernel was loaded,
 * the grid is one that can be launched, and the kernel needs no scratch memory. */
static int is_ready(PyObject *object, const int64_t *programs) {
  launcher_t *self = (launcher_t *)object;
  uint64_t here = 0;
  return self->function != NULL && self->scratch == Py_None && self->buffer_bytes <= STACK_BYTES &&
         programs[0] * (int64_t)self->cluster <= INT32_MAX && self->where(&here) == 0 &&
         here == self->place;
}

/* Launches with what was read of a call, without an object for each number.  A value that is NULL
 * is a pointer, and stands in `addresses`. */
static PyObject *launch_values(PyObject *object, const int64_t *programs, void *stream,
                               PyObject *const *values, const uint64_t *addresses,
                               Py_ssize_t count) {
  launcher_t *self = (launcher_t *)object;
  _Alignas(ALIGNMENT) unsigned char buffer[STACK_BYTES];
  unsigned grid[3] = {(unsigned)programs[0] * self->cluster, (unsigned)programs[1],
                      (unsigned)programs[2]};
  int status;
  if (pack_values(self, values, addresses, count, buffer) < 0)
    return NULL;
  status = call_driver(self, grid, stream, buffer);
  return status == 0 ? count_launch(self->state, Py_NewRef(Py_None)) : fail(self, status);
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
    PyErr_SetString(PyExc_TypeError,
                    "a launcher takes (grid_x, grid_y, grid_z, stream, *values), none by keyword");
    return NULL;
  }
  if (self->function == NULL)
    return fail(self, CLOSED);
  some = read_sizes(self, args, grid);
  if (some < 0)
    return fail(self, BAD_GRID);
  if (self->buffer_bytes > STACK_BYTES) {
    allocated = PyMem_Malloc((size_t)self->buffer_bytes + ALIGNMENT);
    if (allocated == NULL)
      return PyErr_NoMemory();
    buffer =
        (unsigned char *)(((uintptr_t)allocated + ALIGNMENT - 1) & ~(uintptr_t)(ALIGNMENT - 1));
  }
  if (pack_values(self, args + LEADING, NULL, count - LEADING, buffer) == 0)
    result = some ? launch_packed(self, args, grid, buffer) : Py_NewRef(Py_None);
  PyMem_Free(allocated);
  return count_launch(self->state, result);
}

/* ------------------------------------------------------------------------------------ the type */

static int read_field(field_t *field, PyObject *item, Py_ssize_t buffer_bytes,
                      Py_ssize_t arguments) {
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
  if (kind == KINDS || (kind >= GLOBAL_SCRATCH) != (field->argument < 0) ||
      field->argument >= arguments || (Py_ssize_t)field->offset + kind_bytes[kind] > buffer_bytes) {
    PyErr_Format(PyExc_ValueError, "field %R is of no known kind, or lies outside the buffer",
                 item);
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
    if (read_field(&self->fields[index], PyTuple_GET_ITEM(fields, index), self->buffer_bytes,
                   self->argument_count) < 0)
      return -1;
  return 0;
}

static PyObject *launcher_new(PyTypeObject *type, PyObject *args, PyObject *keywords) {
  static char *words[] = {"plain",     "extended", "where",     "place",      "function",
                          "block",     "cluster",  "shared",    "attributes", "buffer_bytes",
                          "arguments", "fields",   "slow_pack", "fail",       "enter",
                          "scratch",   NULL};
  unsigned long long plain, extended, where, place, function;
  const char *attributes;
  Py_ssize_t attribute_bytes;
  PyObject *fields;
  launcher_t *self = (launcher_t *)type->tp_alloc(type, 0);
  if (self == NULL)
    return NULL;
  if (!PyArg_ParseTupleAndKeywords(
          args, keywords, "$KKKKKIIIy#nnO!OOOO", words, &plain, &extended, &where, &place,
          &function, &self->block, &self->cluster, &self->shared, &attributes, &attribute_bytes,
          &self->buffer_bytes, &self->argument_count, &PyTuple_Type, &fields, &self->slow_pack,
          &self->fail, &self->enter, &self->scratch)) {
    self->slow_pack = self->fail = self->enter = self->scratch = NULL; /* borrowed so far */
    Py_DECREF(self);
    return NULL;
  }
  Py_INCREF(self->slow_pack);
  Py_INCREF(self->fail);
  Py_INCREF(self->enter);
  Py_INCREF(self->scratch);
  self->state = PyType_GetModuleState(type);
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

/* Returns a copy for another kernel that takes the same parameters in the same place; with the rest
 * shared kernels of one signature cost a sixth of what the first one did. */
static PyObject *sibling_method(launcher_t *self, PyObject *args) {
  PyTypeObject *type = Py_TYPE(self);
  PyObject *slow_pack, *fail;
  unsigned long long function;
  size_t field_bytes = (size_t)(self->field_count ? self->field_count : 1) * sizeof(field_t);
  size_t attribute_bytes = (size_t)self->attribute_count * ATTRIBUTE_BYTES;
  launcher_t *made;
  if (!PyArg_ParseTuple(args, "KOO", &function, &slow_pack, &fail) ||
      (made = (launcher_t *)type->tp_alloc(type, 0)) == NULL)
    return NULL;
  memcpy((char *)made + offsetof(launcher_t, state), (char *)self + offsetof(launcher_t, state),
         offsetof(launcher_t, fields) - offsetof(launcher_t, state));
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

static PyObject *pack_method(launcher_t *self, PyObject *const *values, Py_ssize_t count) {
  PyObject *packed = PyBytes_FromStringAndSize(NULL, self->buffer_bytes);
  if (packed == NULL)
    return NULL;
  memset(PyBytes_AS_STRING(packed), 0, (size_t)self->buffer_bytes);
  if (pack_values(self, values, NULL, count, (unsigned char *)PyBytes_AS_STRING(packed)) < 0)
    Py_CLEAR(packed);
  return packed;
}

static PyObject *close_method(launcher_t *self, PyObject *ignored) {
  (void)ignored;
  self->function = NULL;
  Py_RETURN_NONE;
}

static PyMethodDef launcher_methods[] = {
    {"pack", (PyCFunction)(void (*)(void))pack_method, METH_FASTCALL,
     "Return the parameter buffer of these values."},
    {"tell_tensors", tell_tensors, METH_CLASS | METH_VARARGS,
     "Say how tensors of torch are read without a call of theirs."},
    {"ask_later", ask_later, METH_CLASS | METH_VARARGS,
     "ask_later(function, launches): call it after so many launches."},
    {"sibling", (PyCFunction)sibling_method, METH_VARARGS,
     "sibling(function, slow_pack, fail): the same for another function."},
    {"close", (PyCFunction)close_method, METH_NOARGS, "Launch nothing any more: each call fails."},
    {NULL, NULL, 0, NULL}};

static PyMemberDef launcher_members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(launcher_t, vectorcall), READONLY, NULL},
    {"__weaklistoffset__", T_PYSSIZET, offsetof(launcher_t, weak), READONLY, NULL},
    {NULL, 0, 0, 0, NULL}};

static PyType_Slot launcher_slots[] = {
    {Py_tp_new, launcher_new},
    {Py_tp_dealloc, launcher_dealloc},
    {Py_tp_traverse, launcher_traverse},
    {Py_tp_clear, launcher_clear},
    {Py_tp_call, PyVectorcall_Call},
    {Py_tp_methods, launcher_methods},
    {Py_tp_members, launcher_members},
    {Py_tp_doc, "Launches one kernel: launcher(grid_x, grid_y, grid_z, stream, *values)."},
    {0, NULL}};

static PyType_Spec launcher_spec = {
    "bundler.runtime.launch._launch.Launcher", sizeof(launcher_t), 0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL, launcher_slots};

#endif

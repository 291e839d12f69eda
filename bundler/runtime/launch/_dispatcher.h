/* SPDX-License-Identifier: Apache-2.0
 *
 * Dispatcher, the quick half of StaticKernel's launch.
 *
 * It finds by the key of a call (_call_key.h) what such calls were bound to, and launches. Whatever
 * is not common (a call not seen before, a value that needs care, a hook) goes to Python as it
 * came.
 *
 * A Dispatcher owns its tables.  A row is a new reference while it is used: launching lets other
 * threads run, which may forget it.  The interpreter's lock is held throughout.
 */

#ifndef BUNDLER_DISPATCHER_H
#define BUNDLER_DISPATCHER_H

#include "_call_key.h"
#include "_launcher.h"
#include "_profiler_hooks.h"

/* Blocks along y and z, as grids.py has it. */
#define MOST_BLOCKS 65535

/* Of what Python tells of a call: launches others of its shape, or None. */
#define AGAIN 4

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
static PyObject *ask(PyObject *function, PyObject *first, PyObject *second, PyObject *const *args,
                     Py_ssize_t count, PyObject *names) {
  PyObject *answer = NULL, *tuple = tuple_of(args, count),
           *keywords = keywords_of(args + count, names);
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

/* Returns (entry, what the key points to), or (again, ...): what lies at the addresses in a key
 * must not go away. */
static PyObject *row_of(PyObject *first, const call_t *call, PyObject *names) {
  PyObject *row = NULL, *kept = tuple_of(call->dtypes, call->count);
  if (kept != NULL)
    row = Py_BuildValue("(OOO)", first, kept, names == NULL ? Py_None : names);
  Py_XDECREF(kept);
  return row;
}

/* Returns the row of a call that differs from a known one in constants alone, a new reference; NULL
 * without an exception where only Python can tell. */
static PyObject *row_by_shape(dispatcher_t *self, const call_t *call, PyObject *key,
                              PyObject *names) {
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
  if (entry != NULL && entry != Py_None && (row = row_of(entry, call, names)) != NULL &&
      keep(self, self->known, key, row) < 0)
    Py_CLEAR(row);
  Py_XDECREF(entry);
  return row;
}

/* Lets Python launch, and keeps what it bound such calls to. */
static PyObject *launch_and_learn(dispatcher_t *self, call_t *call, PyObject *key,
                                  PyObject *const *all, size_t flagged, PyObject *names) {
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

static int is_last(dispatcher_t *self, call_t *call) {
  return self->last_key != NULL && PyBytes_GET_SIZE(self->last_key) == (Py_ssize_t)call->used &&
         memcmp(PyBytes_AS_STRING(self->last_key), call->key, call->used) == 0;
}

/* Returns the row of a known call, a new reference; NULL without an exception for an unknown one,
 * with its key in `*key`. */
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

/* ----------------------------------------------------------------------------------- launching */

/* Returns (x, y, z) for a grid, a new reference. */
static PyObject *sizes_of(dispatcher_t *self, PyObject *grids, PyObject *bound,
                          PyObject *const *all, Py_ssize_t count, PyObject *names) {
  PyObject *grid = all[0];
  if (PyTuple_CheckExact(grid)) {
    PyObject *found = PyDict_GetItemWithError(grids, grid);
    if (found != NULL)
      return Py_NewRef(found);
    forget_error(); /* sizes of a kind that has no hash are Python's to check */
    if (PyErr_Occurred())
      return NULL;
  }
  return ask(self->measure, bound, grid, all + 1, count, names);
}

/* Reads a grid that is written as one to three numbers a device can launch; returns 0 for any
 * other. */
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

/* Returns how many of a call's values a launcher takes: the first ones, or those at places, which
 * are NULL then; -1 with an exception. */
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

/* Launches what torch told C of all tensors, where the stream is torch's as well; NULL without an
 * exception where it is to be launched as other calls are. */
static PyObject *launch_read(state_t *state, call_t *call, PyObject *launcher, PyObject *grid,
                             const unsigned char *places, Py_ssize_t taken) {
  PyObject *values[MOST_VALUES];
  uint64_t addresses[MOST_VALUES];
  int64_t programs[3];
  Py_ssize_t index;
  void *stream = NULL;
  if (call->exchange == NULL || Py_TYPE(launcher) != state->launcher_type ||
      !read_grid(grid, programs) || !is_ready(launcher, programs))
    return NULL;
  if (programs[0] == 0 || programs[1] == 0 || programs[2] == 0)
    Py_RETURN_NONE;
  if (call->exchange->stream(ON_CUDA, (int32_t)call->device, &stream) != 0) {
    PyErr_Clear();
    return NULL;
  }
  if (places == NULL)
    return launch_values(launcher, programs, stream, call->values, call->addresses, taken);
  for (index = 0; index < taken; index++) {
    values[index] = call->values[places[index]];
    addresses[index] = call->addresses[places[index]];
  }
  return launch_values(launcher, programs, stream, values, addresses, taken);
}

/* Makes what stands for the tensors whose addresses alone were read. */
static int make_values(call_t *call) {
  Py_ssize_t index;
  for (index = 0; index < call->count; index++)
    if (call->values[index] == NULL) {
      call->owned[index] = call->values[index] =
          PyLong_FromUnsignedLongLong(call->addresses[index]);
      if (call->values[index] == NULL)
        return 0;
    }
  return 1;
}

/* 1 when the current device is the one that the call's tensors lie on, 0 when not, -1 with an
 * exception. */
static int is_current(dispatcher_t *self, const call_t *call) {
  PyObject *device;
  long number;
  if (call->exchange == NULL) /* it is the current one that tensors were compared with */
    return 1;
  device = PyObject_CallMethodNoArgs(self->driver, self->state->word_device);
  number = device == NULL ? UNKNOWN : PyLong_AsLong(device);
  Py_XDECREF(device);
  return PyErr_Occurred() ? -1 : number == call->device;
}

/* As `launch_read`, with the grid that was found for the numbers in its place, where that is how
 * calls give it. */
static PyObject *launch_numbered(dispatcher_t *self, call_t *call, PyObject *entry, PyObject *grid,
                                 const unsigned char *places, Py_ssize_t taken) {
  PyObject *found, *result;
  if (!self->numbers)
    return launch_read(self->state, call, PyTuple_GET_ITEM(entry, 0), grid, places, taken);
  found =
      PyTuple_CheckExact(grid) ? PyDict_GetItemWithError(PyTuple_GET_ITEM(entry, 2), grid) : NULL;
  if (found == NULL) {
    forget_error(); /* numbers of a kind that has no hash are Python's to look at */
    return NULL;
  }
  Py_INCREF(found);
  result = launch_read(self->state, call, PyTuple_GET_ITEM(entry, 0), found, places, taken);
  Py_DECREF(found);
  return result;
}

static PyObject *launch_known(dispatcher_t *self, call_t *call, PyObject *entry,
                              PyObject *const *all, Py_ssize_t count, PyObject *names) {
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
    if (some > 0)
      some = PyObject_IsTrue(out[index]);
  }
  if (some <= 0) {
    Py_DECREF(sizes);
    return some < 0 ? NULL : Py_NewRef(Py_None);
  }
  device = PyLong_FromLong(call->device);
  stream = device == NULL
               ? NULL
               : PyObject_CallMethodOneArg(self->driver, self->state->word_stream, device);
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
  if (!may_be_called(&self->state->hooks, self->chains) &&
      (self->recording == NULL || !may_record(self->recording)))
    return 0;
  answer = PyObject_CallNoArgs(self->present);
  found = answer == NULL ? -1 : PyObject_IsTrue(answer);
  Py_XDECREF(answer);
  return found;
}

static PyObject *find_and_launch(dispatcher_t *self, call_t *call, PyObject *const *all,
                                 size_t flagged, PyObject *names) {
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
    result = launch_known(self, call, PyTuple_GET_ITEM(row, 0), all,
                          PyVectorcall_NARGS(flagged) - 1, names);
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

/* ------------------------------------------------------------------------------------ the type */

static PyObject *dispatcher_new(PyTypeObject *type, PyObject *args, PyObject *keywords) {
  static char *words[] = {"driver",    "enter", "leave",    "present", "slow",   "first", "measure",
                          "positions", "names", "capacity", "numbers", "chains", "recording", NULL};
  PyObject *driver, *enter, *leave, *present, *slow, *first, *measure, *positions, *names, *chains;
  PyObject *recording;
  Py_ssize_t capacity;
  int numbers;
  dispatcher_t *self;
  if (!PyArg_ParseTupleAndKeywords(args, keywords, "$OO!O!OOOOO!O!npOO", words, &driver,
                                   &PyList_Type, &enter, &PyList_Type, &leave, &present, &slow,
                                   &first, &measure, &PyBytes_Type, &positions, &PyDict_Type,
                                   &names, &capacity, &numbers, &chains,
                                   &recording))
    return NULL;
  if (!are_chains(chains)) {
    PyErr_SetString(PyExc_TypeError,
                    "chains are (modules, module, attribute, two hooks, their members)");
    return NULL;
  }
  if (recording != Py_None && !is_flag(recording)) {
    PyErr_SetString(PyExc_TypeError, "recording is (modules, module, its flag), or None");
    return NULL;
  }
  self = (dispatcher_t *)type->tp_alloc(type, 0);
  if (self == NULL)
    return NULL;
  self->state = PyType_GetModuleState(type);
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
  self->chains = Py_NewRef(chains);
  self->recording = recording == Py_None ? NULL : Py_NewRef(recording);
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
  Py_VISIT(self->chains);
  Py_VISIT(self->recording);
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
  Py_CLEAR(self->chains);
  Py_CLEAR(self->recording);
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

static PyMemberDef dispatcher_members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(dispatcher_t, vectorcall), READONLY, NULL},
    {NULL, 0, 0, 0, NULL}};

static PyType_Slot dispatcher_slots[] = {
    {Py_tp_new, dispatcher_new},
    {Py_tp_dealloc, dispatcher_dealloc},
    {Py_tp_traverse, dispatcher_traverse},
    {Py_tp_clear, dispatcher_clear},
    {Py_tp_call, PyVectorcall_Call},
    {Py_tp_members, dispatcher_members},
    {Py_tp_doc, "Launches a kernel: dispatcher(grid, *arguments, **keywords)."},
    {0, NULL}};

static PyType_Spec dispatcher_spec = {
    "bundler.runtime.launch._launch.Dispatcher", sizeof(dispatcher_t), 0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL, dispatcher_slots};

#endif

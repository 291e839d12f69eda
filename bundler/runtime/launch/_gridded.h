/* SPDX-License-Identifier: Apache-2.0
 *
 * Gridded, the type under StaticKernel, and Bound, which its `kernel[grid]` makes.
 *
 * A Bound holds its function and grid.  The memory of the last one that went is kept in the
 * module's state for the next, which every call makes; the interpreter's lock is held whenever it
 * changes hands.
 */

#ifndef BUNDLER_GRIDDED_H
#define BUNDLER_GRIDDED_H

#include "_launch_state.h"

/* Values of a call that need no memory of their own. */
#define MOST_ON_STACK 64

/* What `kernel[grid]` returns: calls a function with the grid in front.  functools.partial does the
 * same, and took, with the method that made it, a sixth of a launch. */
typedef struct {
  PyObject_HEAD
  vectorcallfunc vectorcall;
  PyObject *function, *grid;
} bound_t;

static PyObject *call_bound(PyObject *object, PyObject *const *args, size_t flagged,
                            PyObject *names) {
  bound_t *self = (bound_t *)object;
  Py_ssize_t count = PyVectorcall_NARGS(flagged),
             all = count + (names == NULL ? 0 : PyTuple_GET_SIZE(names));
  PyObject *on_stack[MOST_ON_STACK + 1], **with_grid = on_stack, *result, *kept;
  if (flagged &
      PY_VECTORCALL_ARGUMENTS_OFFSET) { /* the caller lets us write in front of its arguments */
    with_grid = (PyObject **)args - 1;
    kept = with_grid[0];
    with_grid[0] = self->grid;
    result = PyObject_Vectorcall(self->function, with_grid, (size_t)count + 1, names);
    with_grid[0] = kept;
    return result;
  }
  if (all > MOST_ON_STACK && (with_grid = PyMem_New(PyObject *, all + 1)) == NULL)
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
  PyObject *module;
  state_t *state;
  PyObject_GC_UnTrack(self);
  bound_clear(self);
  /* None where the type goes in the same collection, as at the end of a process. */
  module = ((PyHeapTypeObject *)type)->ht_module;
  state = module == NULL ? NULL : PyModule_GetState(module);
  if (state != NULL && state->spare == NULL)
    state->spare = self;
  else
    type->tp_free(self);
  Py_DECREF(type);
}

static PyMemberDef bound_members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(bound_t, vectorcall), READONLY, NULL},
    {NULL, 0, 0, 0, NULL}};

static PyType_Slot bound_slots[] = {
    {Py_tp_dealloc, bound_dealloc},
    {Py_tp_traverse, bound_traverse},
    {Py_tp_clear, bound_clear},
    {Py_tp_call, PyVectorcall_Call},
    {Py_tp_members, bound_members},
    {Py_tp_doc, "A kernel with its grid: call it with the kernel's arguments."},
    {0, NULL}};

static PyType_Spec bound_spec = {"bundler.runtime.launch._launch.Bound", sizeof(bound_t), 0,
                                 Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC |
                                     Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_DISALLOW_INSTANTIATION,
                                 bound_slots};

typedef struct {
  PyObject_HEAD
  state_t *state;
  PyObject *launch;
} gridded_t;

static struct PyModuleDef launch_module;

/* Takes any arguments: they are for the class that inherits. */
static PyObject *gridded_new(PyTypeObject *type, PyObject *args, PyObject *keywords) {
  PyObject *module = PyType_GetModuleByDef(type, &launch_module);
  gridded_t *self = module == NULL ? NULL : (gridded_t *)type->tp_alloc(type, 0);
  (void)args;
  (void)keywords;
  if (self != NULL)
    self->state = PyModule_GetState(module);
  return (PyObject *)self;
}

static PyObject *subscript(PyObject *object, PyObject *grid) {
  state_t *state = ((gridded_t *)object)->state;
  PyObject *function = ((gridded_t *)object)->launch;
  bound_t *made;
  if (function == NULL) {
    PyErr_SetString(PyExc_AttributeError, "_launch");
    return NULL;
  }
  if (state->spare != NULL) {
    made = (bound_t *)PyObject_Init(state->spare, state->bound_type);
    state->spare = NULL;
  } else if ((made = PyObject_GC_New(bound_t, state->bound_type)) == NULL) {
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

static PyMemberDef gridded_members[] = {
    {"_launch", T_OBJECT_EX, offsetof(gridded_t, launch), 0, "launch(grid, *arguments)"},
    {NULL, 0, 0, 0, NULL}};

static PyType_Slot gridded_slots[] = {
    {Py_tp_new, gridded_new},
    {Py_tp_dealloc, gridded_dealloc},
    {Py_tp_traverse, gridded_traverse},
    {Py_tp_clear, gridded_clear},
    {Py_mp_subscript, subscript},
    {Py_tp_members, gridded_members},
    {Py_tp_doc, "Has `_launch`, which `self[grid]` calls with the grid in front."},
    {0, NULL}};

static PyType_Spec gridded_spec = {"bundler.runtime.launch._launch.Gridded", sizeof(gridded_t), 0,
                                   Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_BASETYPE,
                                   gridded_slots};

#endif

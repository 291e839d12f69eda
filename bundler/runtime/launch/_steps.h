/* SPDX-License-Identifier: Apache-2.0
 *
 * The steps of a bound program (runtime/program/called_steps.py): Step calls a function with values
 * of a list, and puts what it returns there; `run_steps` takes all steps of a call.
 *
 * A Step holds what it was made of, and two things that later calls change: what recognizes its
 * result, and what launches its kernel.  Both are held by who uses them, since whatever is called
 * may run Python, which may take the same step.  The list is looked at anew after each call.
 */

#ifndef BUNDLER_STEPS_H
#define BUNDLER_STEPS_H

#include "_addresses.h"

/* Arguments of a function that need no memory of their own. */
#define MOST_GIVEN 64
/* In front of them: room for who is called, and the numbers of a launch. */
#define IN_FRONT 2

typedef struct {
  PyObject_HEAD
  vectorcallfunc vectorcall;
  state_t *state;
  PyObject *function; /* NULL: the places are emptied */
  PyObject *names;    /* of the last arguments, a tuple; NULL: none has one */
  PyObject *finish;   /* looks at a result, and puts it at its place; NULL: that is done here */
  PyObject *apart;    /* a tuple of places where no result may begin; NULL: it may */
  PyObject *recognizer; /* says whether a result is like one that `finish` let pass, or NULL */
  PyObject *tuned;      /* has `again`, which launches a kernel quickly; NULL: no launch */
  /* As it was last, its `launch`, NULL where it cannot be used, and numbers that end the call. */
  PyObject *again, *launch, *numbers;
  Py_ssize_t taken;  /* how many arguments `launch` takes behind the numbers */
  Py_ssize_t result; /* a place; -1: what is returned is dropped */
  uint64_t alignment;
  Py_ssize_t count, *places;
} step_t;

/* ------------------------------------------------------------------------------------- results */

/* 1 where a result was recognized, 0 where it was not, -1 with an exception. */
static int is_recognized(step_t *self, PyObject *values, PyObject *result) {
  PyObject *recognizer = Py_XNewRef(self->recognizer), *answer;
  int found;
  if (recognizer == NULL)
    return 0;
  answer = PyObject_CallOneArg(recognizer, result);
  Py_DECREF(recognizer);
  found = answer == NULL ? -1 : PyObject_IsTrue(answer);
  Py_XDECREF(answer);
  return found <= 0 || self->apart == NULL
             ? found
             : begins_apart(self->state, self->alignment, result, values, self->apart);
}

/* Takes the reference to a result; returns -1 with an exception. */
static int put_result(step_t *self, PyObject *values, PyObject *result) {
  PyObject *found;
  int known = self->finish == NULL ? self->result >= 0 : is_recognized(self, values, result);
  if (known > 0)
    return PyList_SetItem(values, self->result, result);
  if (known < 0 || self->finish == NULL) {
    Py_DECREF(result);
    return known;
  }
  found = PyObject_CallFunctionObjArgs(self->finish, values, result, NULL);
  Py_DECREF(result);
  if (found == NULL)
    return -1;
  if (found == Py_None)
    Py_DECREF(found);
  else
    Py_XSETREF(self->recognizer, found);
  return 0;
}

/* ------------------------------------------------------------------------------------ launches */

/* Notes how `again` launches calls of this step; returns -1 with an exception. */
static int learn_again(step_t *self, PyObject *again, PyObject *const *given) {
  PyObject *launch = PyObject_GetAttrString(again, "launch"), *numbers = NULL, *old[3];
  PyObject *start = PyObject_GetAttrString(again, "start"),
           *count = PyObject_GetAttrString(again, "count");
  Py_ssize_t from = start == NULL ? -1 : PyLong_AsSsize_t(start),
             taken = count == NULL ? -1 : PyLong_AsSsize_t(count), index;
  int fits = launch != NULL && from >= 0 && from <= self->count && taken >= 0 &&
             taken <= self->count;
  Py_XDECREF(start);
  Py_XDECREF(count);
  for (index = from; fits && index < self->count; index++)
    fits = PyLong_CheckExact(given[index]); /* any other may differ from call to call */
  if (fits && (numbers = PyTuple_New(self->count - from)) != NULL)
    for (index = from; index < self->count; index++)
      PyTuple_SET_ITEM(numbers, index - from, Py_NewRef(given[index]));
  if (PyErr_Occurred()) {
    Py_XDECREF(launch);
    Py_XDECREF(numbers);
    return -1;
  }
  if (!fits)
    Py_CLEAR(launch);
  old[0] = self->launch;
  old[1] = self->numbers;
  old[2] = self->again;
  self->taken = taken;
  self->launch = launch;
  self->numbers = numbers;
  self->again = Py_NewRef(again);
  for (index = 0; index < 3; index++) /* when all are in place: what goes may run Python */
    Py_XDECREF(old[index]);
  return 0;
}

/* Returns what launches this step's kernel quickly now, a new reference; NULL without an exception
 * where its function has to. */
static PyObject *quick_launch(step_t *self, PyObject *const *given) {
  PyObject *again;
  int status = 0;
  if (self->tuned == NULL)
    return NULL;
  again = PyObject_GetAttr(self->tuned, self->state->word_again);
  if (again == NULL)
    return NULL;
  if (again == Py_None || again == Py_False) {
    Py_DECREF(again);
    return NULL;
  }
  if (again != self->again)
    status = learn_again(self, again, given);
  Py_DECREF(again);
  return status < 0 ? NULL : Py_XNewRef(self->launch);
}

/* ---------------------------------------------------------------------------------------- calls */

/* `given` has room for `IN_FRONT` more in front of the arguments. */
static PyObject *call_function(step_t *self, PyObject **given) {
  Py_ssize_t named = self->names == NULL ? 0 : PyTuple_GET_SIZE(self->names);
  PyObject *launch = quick_launch(self, given), *result;
  if (launch == NULL)
    return PyErr_Occurred() ? NULL
                            : PyObject_Vectorcall(self->function, given,
                                                  (size_t)(self->count - named) |
                                                      PY_VECTORCALL_ARGUMENTS_OFFSET,
                                                  self->names);
  given[-1] = Py_NewRef(self->numbers);
  result = PyObject_Vectorcall(launch, given - 1,
                               (size_t)(self->taken + 1) | PY_VECTORCALL_ARGUMENTS_OFFSET, NULL);
  Py_DECREF(given[-1]);
  Py_DECREF(launch);
  return result;
}

static int empty_places(step_t *self, PyObject *values) {
  Py_ssize_t index;
  for (index = 0; index < self->count; index++)
    if (PyList_SetItem(values, self->places[index], Py_NewRef(Py_None)) < 0)
      return -1;
  return 0;
}

/* Returns -1 with an exception. */
static int take_step(step_t *self, PyObject *values) {
  PyObject *on_stack[IN_FRONT + MOST_GIVEN], **room = on_stack, **given, *result = NULL;
  Py_ssize_t count = 0;
  if (self->function == NULL)
    return empty_places(self, values);
  if (self->count > MOST_GIVEN &&
      (room = PyMem_New(PyObject *, IN_FRONT + self->count)) == NULL) {
    PyErr_NoMemory();
    return -1;
  }
  for (given = room + IN_FRONT; count < self->count; count++)
    if ((given[count] = Py_XNewRef(PyList_GetItem(values, self->places[count]))) == NULL)
      break;
  if (count == self->count)
    result = call_function(self, given);
  while (count > 0)
    Py_DECREF(given[--count]);
  if (room != on_stack)
    PyMem_Free(room);
  return result == NULL ? -1 : put_result(self, values, result);
}

static int is_list(PyObject *values) {
  if (PyList_CheckExact(values))
    return 1;
  PyErr_SetString(PyExc_TypeError, "the values of a program must be a list");
  return 0;
}

static PyObject *call_step(PyObject *object, PyObject *const *args, size_t flagged,
                           PyObject *names) {
  if (PyVectorcall_NARGS(flagged) != 1 || names != NULL) {
    PyErr_SetString(PyExc_TypeError, "a step takes the values of a program");
    return NULL;
  }
  if (!is_list(args[0]) || take_step((step_t *)object, args[0]) < 0)
    return NULL;
  Py_RETURN_NONE;
}

/* run_steps(steps, values): a tuple, each item a Step or a function of the values */
static PyObject *run_steps(PyObject *module, PyObject *const *args, Py_ssize_t count) {
  state_t *state = PyModule_GetState(module);
  Py_ssize_t index;
  if (count != 2 || !PyTuple_CheckExact(args[0])) {
    PyErr_SetString(PyExc_TypeError, "run_steps takes a tuple and a list");
    return NULL;
  }
  if (!is_list(args[1]))
    return NULL;
  for (index = 0; index < PyTuple_GET_SIZE(args[0]); index++) {
    PyObject *step = PyTuple_GET_ITEM(args[0], index), *answer;
    if (Py_TYPE(step) == state->step_type) {
      if (take_step((step_t *)step, args[1]) < 0)
        return NULL;
      continue;
    }
    if ((answer = PyObject_CallOneArg(step, args[1])) == NULL)
      return NULL;
    Py_DECREF(answer);
  }
  Py_RETURN_NONE;
}

/* ------------------------------------------------------------------------------------ the type */

static PyObject *held_or_null(PyObject *object) {
  return object == Py_None ? NULL : Py_NewRef(object);
}

static int read_places(step_t *self, PyObject *places) {
  Py_ssize_t index;
  self->places = PyMem_New(Py_ssize_t, PyTuple_GET_SIZE(places) + 1);
  if (self->places == NULL) {
    PyErr_NoMemory();
    return -1;
  }
  self->count = PyTuple_GET_SIZE(places);
  for (index = 0; index < self->count; index++)
    self->places[index] = PyLong_AsSsize_t(PyTuple_GET_ITEM(places, index));
  return PyErr_Occurred() ? -1 : 0;
}

static PyObject *step_new(PyTypeObject *type, PyObject *args, PyObject *keywords) {
  static char *words[] = {"alignment", "function", "places", "names", "result",
                          "finish",    "apart",    "tuned",  NULL};
  PyObject *function, *places, *names = NULL, *finish = Py_None, *apart = Py_None,
                               *tuned = Py_None;
  unsigned long long alignment;
  Py_ssize_t result = -1;
  step_t *self;
  if (!PyArg_ParseTupleAndKeywords(args, keywords, "KOO!|O!nOOO", words, &alignment, &function,
                                   &PyTuple_Type, &places, &PyTuple_Type, &names, &result, &finish,
                                   &apart, &tuned))
    return NULL;
  if (alignment == 0 || (apart != Py_None && !PyTuple_CheckExact(apart)) ||
      (names != NULL && PyTuple_GET_SIZE(names) > PyTuple_GET_SIZE(places))) {
    PyErr_SetString(PyExc_TypeError, "Step: no alignment, or places or names that do not fit");
    return NULL;
  }
  if ((self = (step_t *)type->tp_alloc(type, 0)) == NULL)
    return NULL;
  self->vectorcall = call_step;
  self->state = PyType_GetModuleState(type);
  self->function = held_or_null(function);
  self->names = names == NULL || PyTuple_GET_SIZE(names) == 0 ? NULL : Py_NewRef(names);
  self->finish = held_or_null(finish);
  self->apart = held_or_null(apart);
  self->tuned = held_or_null(tuned);
  self->result = result;
  self->alignment = alignment;
  if (read_places(self, places) < 0)
    Py_CLEAR(self);
  return (PyObject *)self;
}

static int step_traverse(step_t *self, visitproc visit, void *arg) {
  Py_VISIT(Py_TYPE(self));
  Py_VISIT(self->function);
  Py_VISIT(self->names);
  Py_VISIT(self->finish);
  Py_VISIT(self->apart);
  Py_VISIT(self->recognizer);
  Py_VISIT(self->tuned);
  Py_VISIT(self->again);
  Py_VISIT(self->launch);
  Py_VISIT(self->numbers);
  return 0;
}

static int step_clear(step_t *self) {
  Py_CLEAR(self->function);
  Py_CLEAR(self->names);
  Py_CLEAR(self->finish);
  Py_CLEAR(self->apart);
  Py_CLEAR(self->recognizer);
  Py_CLEAR(self->tuned);
  Py_CLEAR(self->again);
  Py_CLEAR(self->launch);
  Py_CLEAR(self->numbers);
  return 0;
}

static void step_dealloc(step_t *self) {
  PyTypeObject *type = Py_TYPE(self);
  PyObject_GC_UnTrack(self);
  step_clear(self);
  PyMem_Free(self->places);
  type->tp_free(self);
  Py_DECREF(type);
}

static PyMemberDef step_members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(step_t, vectorcall), READONLY, NULL},
    {NULL, 0, 0, 0, NULL}};

static PyType_Slot step_slots[] = {
    {Py_tp_new, step_new},
    {Py_tp_dealloc, step_dealloc},
    {Py_tp_traverse, step_traverse},
    {Py_tp_clear, step_clear},
    {Py_tp_call, PyVectorcall_Call},
    {Py_tp_members, step_members},
    {Py_tp_doc, "Calls a function with values of a list, and keeps what it returns there."},
    {0, NULL}};

static PyType_Spec step_spec = {"bundler.runtime.launch._launch.Step", sizeof(step_t), 0,
                                Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC |
                                    Py_TPFLAGS_HAVE_VECTORCALL,
                                step_slots};

#endif

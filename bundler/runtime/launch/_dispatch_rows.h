/* SPDX-License-Identifier: Apache-2.0
 *
 * What `_dispatch.c` keeps of the calls that it knows: finding it, and asking Python for it.
 */

#ifndef BUNDLER_DISPATCH_ROWS_H
#define BUNDLER_DISPATCH_ROWS_H

#include <Python.h>
#include <string.h>
#include "_dispatch_call.h"

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

#endif

/* SPDX-License-Identifier: Apache-2.0
 *
 * Where tensors lie, for what a program checks in each call (runtime/program/tensor_addresses.py):
 * `misplaced`, and `is_apart`.  Tensors are read as launches read them; what one raises is raised.
 */

#ifndef BUNDLER_ADDRESSES_H
#define BUNDLER_ADDRESSES_H

#include "_packing.h"

/* Reads a tensor's address; returns -1 with an exception for what has none. */
static inline int read_address(state_t *state, PyObject *tensor, uint64_t *address) {
  const tensor_class_t *row = find_known(state, Py_TYPE(tensor));
  PyObject *number;
  if (row == NULL)
    row = get_to_know(state, Py_TYPE(tensor));
  if (row != NULL && row->told_address && read_told(&state->torch, tensor, address))
    return 0;
  number = call_method(tensor, state->word_data_ptr, row == NULL ? NULL : row->data_ptr);
  if (number == NULL)
    return -1;
  *address = as_unsigned(number);
  Py_DECREF(number);
  return PyErr_Occurred() ? -1 : 0;
}

/* Reads the address of what lies at a place of a list; returns -1 with an exception where there is
 * none. */
static inline int read_place(state_t *state, PyObject *values, PyObject *place, uint64_t *address) {
  Py_ssize_t number = PyLong_AsSsize_t(place);
  PyObject *tensor;
  int status;
  if (number == -1 && PyErr_Occurred())
    return -1;
  tensor = PyList_GetItem(values, number); /* which refuses numbers below 0 */
  if (tensor == NULL)
    return -1;
  Py_INCREF(tensor); /* a method may be Python's, which may change the list */
  status = read_address(state, tensor, address);
  Py_DECREF(tensor);
  return status;
}

/* Whether the last of some arguments are a list and a tuple of places in it, behind an alignment;
 * -1 with an exception where they are not. */
static inline int read_arguments(const char *name, PyObject *const *args, Py_ssize_t count,
                                 Py_ssize_t expected, uint64_t *alignment) {
  if (count != expected || !PyList_CheckExact(args[count - 2]) ||
      !PyTuple_CheckExact(args[count - 1])) {
    PyErr_Format(PyExc_TypeError, "%s: expected %zd arguments, of which the last are a list and a "
                                  "tuple", name, expected);
    return -1;
  }
  *alignment = PyLong_AsUnsignedLongLong(args[0]);
  if (PyErr_Occurred())
    return -1;
  if (*alignment == 0) {
    PyErr_Format(PyExc_ValueError, "%s: expected an alignment from 1, got 0", name);
    return -1;
  }
  return 0;
}

/* misplaced(alignment, values, places) */
static PyObject *misplaced(PyObject *module, PyObject *const *args, Py_ssize_t count) {
  uint64_t alignment, address = 0;
  PyObject *places, *found;
  if (read_arguments("misplaced", args, count, 3, &alignment) < 0 || !(found = PyList_New(0)))
    return NULL;
  places = args[2];
  for (Py_ssize_t index = 0; index < PyTuple_GET_SIZE(places); index++) {
    PyObject *place = PyTuple_GET_ITEM(places, index);
    int status = read_place(PyModule_GetState(module), args[1], place, &address);
    if (status == 0 && address % alignment != 0)
      status = PyList_Append(found, place);
    if (status < 0) {
      Py_DECREF(found);
      return NULL;
    }
  }
  return found;
}

/* 1 where a tensor is aligned and begins where none at the places does, 0 where not, -1 with an
 * exception. */
static int begins_apart(state_t *state, uint64_t alignment, PyObject *tensor, PyObject *values,
                        PyObject *places) {
  uint64_t address = 0, other = 0;
  if (read_address(state, tensor, &address) < 0)
    return -1;
  if (address % alignment != 0)
    return 0;
  /* tensors without elements are all at 0 */
  for (Py_ssize_t index = 0; address != 0 && index < PyTuple_GET_SIZE(places); index++) {
    if (read_place(state, values, PyTuple_GET_ITEM(places, index), &other) < 0)
      return -1;
    if (other == address)
      return 0;
  }
  return 1;
}

/* is_apart(alignment, tensor, values, places) */
static PyObject *is_apart(PyObject *module, PyObject *const *args, Py_ssize_t count) {
  uint64_t alignment;
  int found;
  if (read_arguments("is_apart", args, count, 4, &alignment) < 0)
    return NULL;
  found = begins_apart(PyModule_GetState(module), alignment, args[1], args[2], args[3]);
  return found < 0 ? NULL : PyBool_FromLong(found);
}

#endif

/* SPDX-License-Identifier: Apache-2.0
 *
 * How `_launch.c` reads the address of a tensor: `read_address`, for what has `data_ptr`, and `tell_tensors`, by which Python says how
 * tensors of torch are read without a call of theirs.  `ask_later` has Python asked for that after some launches: to find it out takes
 * as long as it saves in thousands of them.
 *
 * Calling torch's `data_ptr` makes an integer object, and asks whether the program replaced torch's functions: 60 ns a tensor on a
 * machine where the driver's part of a launch takes 3.6 us.  The function of C that torch gives compiled models takes 3 ns.
 */

#ifndef BUNDLER_TENSOR_ADDRESSES_H
#define BUNDLER_TENSOR_ADDRESSES_H

#include <Python.h>
#include <stdint.h>
#include <string.h>
#include "_launch_call.h"

/* Classes whose `data_ptr` is kept.  A call rarely mixes more than tensors and parameters. */
#define KNOWN_TYPES 4

/* What `tell_tensors` was told; nothing before. */
static torch_tensors_t of_torch;

typedef struct {
  PyTypeObject *type;
  unsigned version;     /* changes when the type does */
  int direct;           /* `of_torch.address` tells the address */
  PyObject *method;     /* kept, so that its function stays */
  PyCFunction data_ptr; /* NULL where the method is no function of C that takes nothing */
} known_t;

/* After so many more launches `ask_now` is called; 0 where nothing is to be. */
static unsigned long launches_left;
static PyObject *ask_now;

static known_t known[KNOWN_TYPES];
static unsigned next_known;
static PyObject *word_data_ptr;

/* Notes a type; returns NULL, and leaves no exception, for one that has no `data_ptr` or no version. */
static __attribute__((noinline)) const known_t *get_to_know(PyTypeObject *type) {
  PyObject *method = PyObject_GetAttr((PyObject *)type, word_data_ptr);
  known_t *row = &known[next_known % KNOWN_TYPES];
  if (method == NULL || type->tp_version_tag == 0) {
    PyErr_Clear();
    Py_XDECREF(method);
    return NULL;
  }
  next_known++;
  row->version = 0; /* giving back what the row held may run Python, which may launch */
  Py_INCREF(type);  /* kept, so that no other type gets its address */
  Py_XSETREF(row->type, type);
  Py_XSETREF(row->method, method);
  row->data_ptr = NULL;
  if (Py_TYPE(method) == &PyMethodDescr_Type && ((PyMethodDescrObject *)method)->d_method->ml_flags == METH_NOARGS &&
      PyType_IsSubtype(type, PyDescr_TYPE(method)))
    row->data_ptr = ((PyMethodDescrObject *)method)->d_method->ml_meth;
  row->direct = is_read_directly(&of_torch, type, method);
  row->version = type->tp_version_tag;
  return row;
}

/* Returns the row of a type that is known as it is now, or NULL. */
static inline const known_t *find_known(PyTypeObject *type) {
  int row;
  for (row = 0; row < KNOWN_TYPES; row++)
    if (known[row].type == type && known[row].version == type->tp_version_tag && known[row].version != 0)
      return &known[row];
  return NULL;
}

/* Reads a tensor of torch; returns 0 for one that has no address to tell, whose `data_ptr` says why. */
static inline int read_directly(PyObject *tensor, uint64_t *address) {
  void *handle = (char *)tensor + of_torch.handle, *found;
  if (*(void **)handle == NULL || of_torch.address(handle, &found) != 0)
    return 0;
  *address = (uint64_t)(uintptr_t)found;
  return 1;
}

/* Calls `data_ptr`; returns NULL with an exception where that raises. */
static PyObject *ask_address(PyObject *value, const known_t *row) {
  if (row != NULL && row->data_ptr != NULL)
    return row->data_ptr(value, NULL);
  return PyObject_VectorcallMethod(word_data_ptr, &value, 1 | PY_VECTORCALL_ARGUMENTS_OFFSET, NULL);
}

/* tell_tensors(classes, data_ptr, address, handle[, device_type, device, dtype, cuda]); bundler/toolchain/tensor_handles.py finds them. */
static PyObject *tell_tensors(PyObject *ignored, PyObject *args) {
  PyObject *classes, *method;
  unsigned long long address, device_type = 0, device = 0, dtype = 0;
  Py_ssize_t handle;
  int row, cuda = 0;
  if (!PyArg_ParseTuple(args, "O!OKn|KKKi", &PyTuple_Type, &classes, &method, &address, &handle, &device_type, &device,
                        &dtype, &cuda))
    return NULL;
  of_torch.told++;
  of_torch.address = (int (*)(void *, void **))(uintptr_t)address;
  of_torch.handle = handle;
  of_torch.device_type = device && dtype ? (int (*)(void *, int32_t *))(uintptr_t)device_type : NULL;
  of_torch.device = (int (*)(void *, int32_t *))(uintptr_t)device;
  of_torch.dtype = (int (*)(void *, int32_t *))(uintptr_t)dtype;
  of_torch.cuda = cuda;
  for (row = 0; row < KNOWN_TYPES; row++)
    known[row].version = 0;
  Py_INCREF(classes);
  Py_XSETREF(of_torch.classes, classes);
  Py_INCREF(method);
  Py_XSETREF(of_torch.method, method);
  Py_RETURN_NONE;
}

/* ask_later(function, launches): calls it when so many launches were made, once; of several the last one counts. */
static PyObject *ask_later(PyObject *ignored, PyObject *args) {
  PyObject *function;
  unsigned long launches;
  if (!PyArg_ParseTuple(args, "Ok", &function, &launches))
    return NULL;
  launches_left = launches;
  Py_INCREF(function);
  Py_XSETREF(ask_now, function);
  Py_RETURN_NONE;
}

/* Counts a launch, which returned `result`; returns that, or NULL with the exception of what was called. */
static inline PyObject *count_launch(PyObject *result) {
  PyObject *function, *answer;
  if (launches_left == 0 || result == NULL || --launches_left != 0)
    return result;
  function = ask_now; /* taken away before it runs: it may launch, or let other threads launch */
  ask_now = NULL;
  answer = PyObject_CallNoArgs(function);
  Py_DECREF(function);
  if (answer == NULL)
    Py_CLEAR(result);
  Py_XDECREF(answer);
  return result;
}

#endif

/* SPDX-License-Identifier: Apache-2.0
 *
 * How `_dispatch.c` reads a tensor of torch: by the table of functions that torch has for it, DLPack's exchange API.
 *
 * torch.Tensor.__dlpack_c_exchange_api__ is a capsule with a table of C functions.  One call of it tells address, device and type of a
 * tensor in the time of one of the calls `data_ptr`, `get_device` and `dtype`.  The functions of
 * `torch_tensors_t` (_launch_call.h) are quicker still, and asked in its place where Python found them.
 */

#ifndef BUNDLER_TENSOR_EXCHANGE_H
#define BUNDLER_TENSOR_EXCHANGE_H

#include <Python.h>
#include <stdint.h>

#define EXCHANGE_MAJOR 1
#define ON_CUDA 2

/* DLTensor, DLPackExchangeAPI of DLPack 1.x. */
typedef struct {
  void *data;
  int32_t device_type, device, dimensions;
  unsigned char dtype[4];
  int64_t *shape, *strides;
  uint64_t byte_offset;
} dl_tensor_t;

typedef struct exchange {
  uint32_t major, minor;
  const struct exchange *older;
  void *allocate, *from_object, *to_object;
  int (*read)(void *object, dl_tensor_t *tensor);
  int (*stream)(int32_t device_type, int32_t device, void **stream);
} exchange_t;

/* Whether a class has the functions that torch.Tensor has, none of them put in place of torch's. */
static int is_plain_tensor(PyTypeObject *type, PyObject *torch_tensor) {
  static const char *const names[] = {"data_ptr", "get_device", "dtype"};
  PyObject *handler;
  int index, plain;
  if ((PyObject *)type == torch_tensor)
    return 1;
  if (!PyType_Check(torch_tensor) || !PyType_IsSubtype(type, (PyTypeObject *)torch_tensor))
    return 0;
  for (index = 0; index < 3; index++) {
    PyObject *own = PyObject_GetAttrString((PyObject *)type, names[index]);
    PyObject *other = own == NULL ? NULL : PyObject_GetAttrString(torch_tensor, names[index]);
    int same = own != NULL && own == other;
    Py_XDECREF(own);
    Py_XDECREF(other);
    if (!same)
      return 0;
  }
  /* Parameter's is torch's function for "as if there were none", in C; one in Python may answer otherwise. */
  handler = PyObject_GetAttrString((PyObject *)type, "__torch_function__");
  plain = handler != NULL && PyCFunction_Check(handler);
  Py_XDECREF(handler);
  return plain;
}

/* Returns the table for tensors of a class, NULL where it is no class of torch's, or torch has none; leaves no exception. */
static const exchange_t *find_exchange(PyTypeObject *type) {
  PyObject *name = PyUnicode_InternFromString("torch"), *torch = name == NULL ? NULL : PyImport_GetModule(name);
  PyObject *tensor = torch == NULL ? NULL : PyObject_GetAttrString(torch, "Tensor");
  PyObject *capsule = tensor == NULL || !is_plain_tensor(type, tensor)
                          ? NULL
                          : PyObject_GetAttrString((PyObject *)type, "__dlpack_c_exchange_api__");
  const exchange_t *found = capsule == NULL ? NULL : PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
  PyErr_Clear();
  while (found != NULL && found->major > EXCHANGE_MAJOR)
    found = found->older;
  if (found != NULL && (found->major != EXCHANGE_MAJOR || found->read == NULL || found->stream == NULL))
    found = NULL;
  Py_XDECREF(capsule);
  Py_XDECREF(tensor);
  Py_XDECREF(torch);
  Py_XDECREF(name);
  return found;
}

/* Reads a tensor; returns 0, and leaves no exception, for one that has no memory to tell of. */
static inline int read_exchanged(const exchange_t *exchange, PyObject *object, dl_tensor_t *tensor) {
  if (exchange->read(object, tensor) == 0)
    return 1;
  PyErr_Clear();
  return 0;
}

#endif

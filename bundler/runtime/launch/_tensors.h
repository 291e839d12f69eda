/* SPDX-License-Identifier: Apache-2.0
 *
 * How tensors are read: by their methods, by the table of functions that torch has for it (DLPack's
 * exchange API, in a capsule on torch.Tensor), or by functions of C whose addresses Python tells
 * (`tell_tensors`).
 *
 * Calling torch's `data_ptr` makes an integer object, and asks whether the program replaced torch's
 * functions: 60 ns a tensor on a machine where the driver's part of a launch takes 3.6 us.  One
 * call of the table tells address, device and type in as much time; a function of C that torch
 * gives compiled models takes 3 ns.  Finding those takes as long as it saves in thousands of
 * launches, so `ask_later` has Python asked for them after some.
 *
 * The last way reads the handle of a tensor inside torch's object, and that in one place:
 * `read_handle`. bundler/toolchain/tensor_handles.py finds where it lies, and proves it on tensors,
 * before it tells.
 */

#ifndef BUNDLER_TENSORS_H
#define BUNDLER_TENSORS_H

#include "_launch_state.h"

#define EXCHANGE_MAJOR 1
#define ON_CUDA 2

/* ------------------------------------------------------------------------------------- classes */

/* Returns the function of C that a method is, or NULL. */
static PyCFunction function_of(PyTypeObject *type, PyObject *method) {
  if (Py_TYPE(method) != &PyMethodDescr_Type ||
      ((PyMethodDescrObject *)method)->d_method->ml_flags != METH_NOARGS ||
      !PyType_IsSubtype(type, PyDescr_TYPE(method)))
    return NULL;
  return ((PyMethodDescrObject *)method)->d_method->ml_meth;
}

/* Returns the property of C that an attribute is, or NULL. */
static PyGetSetDef *property_of(PyTypeObject *type, PyObject *name) {
  PyObject *found = PyObject_GetAttr((PyObject *)type, name);
  PyGetSetDef *property = NULL;
  if (found == NULL) {
    PyErr_Clear();
    return NULL;
  }
  if (Py_TYPE(found) == &PyGetSetDescr_Type && PyType_IsSubtype(type, PyDescr_TYPE(found)))
    property = ((PyGetSetDescrObject *)found)->d_getset;
  Py_DECREF(found);
  return property != NULL && property->get != NULL ? property : NULL;
}

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
  /* Parameter's is torch's function for "as if there were none", in C; one in Python may answer
   * otherwise. */
  handler = PyObject_GetAttrString((PyObject *)type, "__torch_function__");
  plain = handler != NULL && PyCFunction_Check(handler);
  Py_XDECREF(handler);
  return plain;
}

/* Returns the table for tensors of a class, NULL where it is no class of torch's, or torch has
 * none; leaves no exception. */
static const exchange_t *find_exchange(PyTypeObject *type) {
  PyObject *name = PyUnicode_InternFromString("torch");
  PyObject *torch = name == NULL ? NULL : PyImport_GetModule(name);
  PyObject *tensor = torch == NULL ? NULL : PyObject_GetAttrString(torch, "Tensor");
  PyObject *capsule = tensor == NULL || !is_plain_tensor(type, tensor)
                          ? NULL
                          : PyObject_GetAttrString((PyObject *)type, "__dlpack_c_exchange_api__");
  const exchange_t *found =
      capsule == NULL ? NULL : PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
  PyErr_Clear();
  while (found != NULL && found->major > EXCHANGE_MAJOR)
    found = found->older;
  if (found != NULL &&
      (found->major != EXCHANGE_MAJOR || found->read == NULL || found->stream == NULL))
    found = NULL;
  Py_XDECREF(capsule);
  Py_XDECREF(tensor);
  Py_XDECREF(torch);
  Py_XDECREF(name);
  return found;
}

/* Whether torch's functions were told for a class whose `data_ptr` is `method`. */
static int is_told(const torch_tensors_t *torch, PyTypeObject *type, PyObject *method) {
  Py_ssize_t index;
  if (torch->address == NULL || method != torch->method)
    return 0;
  for (index = 0; index < PyTuple_GET_SIZE(torch->classes); index++)
    if (PyTuple_GET_ITEM(torch->classes, index) == (PyObject *)type)
      return 1;
  return 0;
}

/* Notes a class; returns NULL, and leaves no exception, for one that has no `data_ptr` or no
 * version. */
static __attribute__((noinline)) const tensor_class_t *get_to_know(state_t *state,
                                                                   PyTypeObject *type) {
  PyObject *method = PyObject_GetAttr((PyObject *)type, state->word_data_ptr), *get_device;
  tensor_class_t *row;
  if (method == NULL || type->tp_version_tag == 0) {
    PyErr_Clear();
    Py_XDECREF(method);
    return NULL;
  }
  get_device = PyObject_GetAttr((PyObject *)type, state->word_get_device);
  PyErr_Clear();
  row = &state->classes[state->next_class++ % KNOWN_CLASSES];
  row->version = 0;
  Py_INCREF(type);
  Py_XSETREF(row->type, type);
  Py_XSETREF(row->method, method);
  row->data_ptr = function_of(type, method);
  row->has_device = get_device != NULL;
  row->get_device = get_device == NULL ? NULL : function_of(type, get_device);
  row->dtype = property_of(type, state->word_dtype);
  row->exchange = find_exchange(type);
  row->told_address = is_told(&state->torch, type, method);
  row->told_all = row->told_address && row->exchange != NULL && state->torch.device_type != NULL;
  row->version = type->tp_version_tag;
  Py_XDECREF(get_device);
  return row;
}

/* Returns the row of a class that is known as it is now, or NULL. */
static inline const tensor_class_t *find_known(state_t *state, PyTypeObject *type) {
  int index;
  for (index = 0; index < KNOWN_CLASSES; index++) {
    const tensor_class_t *row = &state->classes[index];
    if (row->type == type && row->version == type->tp_version_tag && row->version != 0)
      return row;
  }
  return NULL;
}

/* ------------------------------------------------------------------------------------- tensors */

/* Returns the handle of a tensor of torch, NULL for one that has none. */
static inline void *read_handle(const torch_tensors_t *torch, PyObject *tensor) {
  void *handle = (char *)tensor + torch->handle;
  return *(void **)handle == NULL ? NULL : handle;
}

/* Reads a tensor of torch; returns 0 for one that has no address to tell, whose `data_ptr` says
 * why. */
static inline int read_told(const torch_tensors_t *torch, PyObject *tensor, uint64_t *address) {
  void *handle = read_handle(torch, tensor), *found;
  if (handle == NULL || torch->address(handle, &found) != 0)
    return 0;
  *address = (uint64_t)(uintptr_t)found;
  return 1;
}

static inline PyObject *call_method(PyObject *object, PyObject *name, PyCFunction function) {
  if (function != NULL)
    return function(object, NULL);
  return PyObject_VectorcallMethod(name, &object, 1 | PY_VECTORCALL_ARGUMENTS_OFFSET, NULL);
}

/* Reads a tensor by torch's table; returns 0, and leaves no exception, for one that has no memory
 * to tell of. */
static inline int read_exchanged(const exchange_t *exchange, PyObject *object,
                                 dl_tensor_t *tensor) {
  if (exchange->read(object, tensor) == 0)
    return 1;
  PyErr_Clear();
  return 0;
}

/* ------------------------------------------------------------------------------ told by Python */

/* tell_tensors(classes, data_ptr, address, handle[, device_type, device, dtype, cuda]) */
static PyObject *tell_tensors(PyObject *type, PyObject *args) {
  state_t *state = PyType_GetModuleState((PyTypeObject *)type);
  torch_tensors_t *torch = &state->torch;
  PyObject *classes, *method;
  unsigned long long address, device_type = 0, device = 0, dtype = 0;
  Py_ssize_t handle;
  int row, cuda = 0;
  if (!PyArg_ParseTuple(args, "O!OKn|KKKi", &PyTuple_Type, &classes, &method, &address, &handle,
                        &device_type, &device, &dtype, &cuda))
    return NULL;
  torch->address = (int (*)(void *, void **))(uintptr_t)address;
  torch->handle = handle;
  torch->device_type = device && dtype ? (int (*)(void *, int32_t *))(uintptr_t)device_type : NULL;
  torch->device = (int (*)(void *, int32_t *))(uintptr_t)device;
  torch->dtype = (int (*)(void *, int32_t *))(uintptr_t)dtype;
  torch->cuda = cuda;
  for (row = 0; row < KNOWN_CLASSES; row++)
    state->classes[row].version = 0;
  Py_INCREF(classes);
  Py_XSETREF(torch->classes, classes);
  Py_INCREF(method);
  Py_XSETREF(torch->method, method);
  Py_RETURN_NONE;
}

/* ask_later(function, launches): calls it when so many launches were made, once; of several the
 * last one counts. */
static PyObject *ask_later(PyObject *type, PyObject *args) {
  state_t *state = PyType_GetModuleState((PyTypeObject *)type);
  PyObject *function;
  unsigned long launches;
  if (!PyArg_ParseTuple(args, "Ok", &function, &launches))
    return NULL;
  state->launches_left = launches;
  Py_INCREF(function);
  Py_XSETREF(state->ask_now, function);
  Py_RETURN_NONE;
}

/* Counts a launch, which returned `result`; returns that, or NULL with the exception of what was
 * called. */
static inline PyObject *count_launch(state_t *state, PyObject *result) {
  PyObject *function, *answer;
  if (state->launches_left == 0 || result == NULL || --state->launches_left != 0)
    return result;
  function =
      state->ask_now; /* taken away before it runs: it may launch, or let other threads launch */
  state->ask_now = NULL;
  answer = PyObject_CallNoArgs(function);
  Py_DECREF(function);
  if (answer == NULL)
    Py_CLEAR(result);
  Py_XDECREF(answer);
  return result;
}

#endif

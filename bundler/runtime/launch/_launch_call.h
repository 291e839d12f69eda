/* SPDX-License-Identifier: Apache-2.0
 *
 * What `_launch.c` lends `_dispatch.c`: launching with what was read of a call, without an object for each number,
 * and how tensors of torch are read.
 */

#ifndef BUNDLER_LAUNCH_CALL_H
#define BUNDLER_LAUNCH_CALL_H

#include <Python.h>
#include <stdint.h>

#define LAUNCH_CALL "bundler.runtime.launch._launch.call"
#define LAUNCH_CALL_VERSION 2

/* How tensors of torch are read without a call of theirs, as Python told `_launch.c` (tell_tensors in _tensor_addresses.h).  The functions
 * are those that torch keeps stable for compiled models; each returns 0, or an error. */
typedef struct {
  unsigned told;     /* how often Python told: what was kept of a class before is void */
  PyObject *classes; /* a tuple: objects of just these classes are read so, */
  PyObject *method;  /* while this is their `data_ptr` */
  Py_ssize_t handle; /* where in such an object its tensor's handle lies */
  int (*address)(void *handle, void **address);
  /* NULL where torch has not all three. */
  int (*device_type)(void *handle, int32_t *type);
  int (*device)(void *handle, int32_t *device);
  int (*dtype)(void *handle, int32_t *dtype);
  int32_t cuda; /* the device type of tensors on a GPU */
} torch_tensors_t;

typedef struct {
  int version;
  PyTypeObject *launcher;
  /* Whether a launcher can be called as below, here and now: the thread is where the kernel was loaded, the grid is one that can be
   * launched, and the kernel needs no scratch memory. */
  int (*is_ready)(PyObject *launcher, const int64_t *programs);
  /* Launches.  A value that is NULL is a pointer, and stands in `addresses`. */
  PyObject *(*launch)(PyObject *launcher, const int64_t *programs, void *stream, PyObject *const *values,
                      const uint64_t *addresses, Py_ssize_t count);
  const torch_tensors_t *tensors;
} launch_call_t;

/* Forgets an error after which Python is asked anew, which meets it again.  An interrupt comes only once, and stays. */
static inline void forget_error(void) {
  if (PyErr_Occurred() && PyErr_ExceptionMatches(PyExc_Exception))
    PyErr_Clear();
}

/* Whether objects of a class are read so, `method` being their `data_ptr`. */
static inline int is_read_directly(const torch_tensors_t *torch, PyTypeObject *type, PyObject *method) {
  Py_ssize_t index;
  if (torch->address == NULL || method != torch->method)
    return 0;
  for (index = 0; index < PyTuple_GET_SIZE(torch->classes); index++)
    if (PyTuple_GET_ITEM(torch->classes, index) == (PyObject *)type)
      return 1;
  return 0;
}

#endif

/* SPDX-License-Identifier: Apache-2.0
 *
 * What `_launch.c` lends `_dispatch.c`: launching with what was read of a call, without an object for each number.
 */

#ifndef BUNDLER_LAUNCH_CALL_H
#define BUNDLER_LAUNCH_CALL_H

#include <Python.h>
#include <stdint.h>

#define LAUNCH_CALL "bundler.runtime.launch._launch.call"
#define LAUNCH_CALL_VERSION 1

typedef struct {
  int version;
  PyTypeObject *launcher;
  /* Whether a launcher can be called as below, here and now: the thread is where the kernel was loaded, the grid is one that can be
   * launched, and the kernel needs no scratch memory. */
  int (*is_ready)(PyObject *launcher, const int64_t *programs);
  /* Launches.  A value that is NULL is a pointer, and stands in `addresses`. */
  PyObject *(*launch)(PyObject *launcher, const int64_t *programs, void *stream, PyObject *const *values,
                      const uint64_t *addresses, Py_ssize_t count);
} launch_call_t;

#endif

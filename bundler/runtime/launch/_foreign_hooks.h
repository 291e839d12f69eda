/* SPDX-License-Identifier: Apache-2.0
 *
 * How `_dispatch.c` sees that Triton calls nothing around a launch: `may_be_called`, which answers for nearly every launch what
 * `are_present` of bundler/toolchain/profiler_hooks.py answers, and takes a third of its time.
 */

#ifndef BUNDLER_FOREIGN_HOOKS_H
#define BUNDLER_FOREIGN_HOOKS_H

#include <Python.h>

/* CHAINS of profiler_hooks.py: modules, the name of one, of its attribute, of two hooks in that, and of the members of a hook. */
enum { MODULES, MODULE, RUNTIME, ENTER, LEAVE, MEMBERS, CHAIN_PARTS };

static int are_chains(PyObject *chains) {
  Py_ssize_t index;
  if (!PyTuple_Check(chains) || PyTuple_GET_SIZE(chains) != CHAIN_PARTS || !PyDict_Check(PyTuple_GET_ITEM(chains, MODULES)))
    return 0;
  for (index = MODULE; index < CHAIN_PARTS && PyUnicode_Check(PyTuple_GET_ITEM(chains, index)); index++)
    ;
  return index == CHAIN_PARTS;
}

static int is_empty(PyObject *runtime, PyObject *name, PyObject *members) {
  PyObject *hook = PyObject_GetAttr(runtime, name), *found = hook == NULL ? NULL : PyObject_GetAttr(hook, members);
  int empty = found != NULL && PyList_CheckExact(found) && PyList_GET_SIZE(found) == 0;
  if (found == NULL)
    PyErr_Clear();
  Py_XDECREF(hook);
  Py_XDECREF(found);
  return empty;
}

/* Returns 0 where nothing is called: Triton is not loaded, or its hooks are chains without members; 1 where Python has to be asked.
 * Leaves no exception.  Nothing is kept from launch to launch, since whatever is looked at here may be replaced. */
static int may_be_called(PyObject *chains) {
  PyObject *module = PyDict_GetItemWithError(PyTuple_GET_ITEM(chains, MODULES), PyTuple_GET_ITEM(chains, MODULE));
  PyObject *runtime = NULL;
  int called;
  if (module != NULL && PyModule_CheckExact(module))
    runtime = PyDict_GetItemWithError(PyModule_GetDict(module), PyTuple_GET_ITEM(chains, RUNTIME));
  if (runtime == NULL) {
    called = module != NULL || PyErr_Occurred() != NULL;
    PyErr_Clear();
    return called;
  }
  Py_INCREF(runtime);
  called = !is_empty(runtime, PyTuple_GET_ITEM(chains, ENTER), PyTuple_GET_ITEM(chains, MEMBERS)) ||
           !is_empty(runtime, PyTuple_GET_ITEM(chains, LEAVE), PyTuple_GET_ITEM(chains, MEMBERS));
  Py_DECREF(runtime);
  return called;
}

#endif

/* SPDX-License-Identifier: Apache-2.0
 *
 * How a Dispatcher sees that Triton calls nothing around a launch: `may_be_called`, which answers
 * for nearly every launch what `are_present` of bundler/toolchain/profiler_hooks.py answers, and
 * takes a third of its time.  What it found of the class that has the hooks is kept in the module's
 * state; the interpreter's lock is held.
 */

#ifndef BUNDLER_PROFILER_HOOKS_H
#define BUNDLER_PROFILER_HOOKS_H

#include "_launch_state.h"

/* CHAINS of profiler_hooks.py: modules, the name of one, of its attribute, of two hooks in that,
 * and of the members of a hook. */
enum { MODULES, MODULE, RUNTIME, ENTER, LEAVE, MEMBERS, CHAIN_PARTS };

static int are_chains(PyObject *chains) {
  Py_ssize_t index;
  if (!PyTuple_Check(chains) || PyTuple_GET_SIZE(chains) != CHAIN_PARTS ||
      !PyDict_Check(PyTuple_GET_ITEM(chains, MODULES)))
    return 0;
  for (index = MODULE; index < CHAIN_PARTS && PyUnicode_Check(PyTuple_GET_ITEM(chains, index));
       index++)
    ;
  return index == CHAIN_PARTS;
}

/* Looks at a class, and notes what it finds.  That takes longer than asking Python, and is done
 * when the class changes. */
static __attribute__((noinline)) void look_at(hooks_class_t *seen, PyTypeObject *type,
                                              PyObject *chains) {
  PyObject *enter = Py_XNewRef(_PyType_Lookup(type, PyTuple_GET_ITEM(chains, ENTER)));
  PyObject *leave = Py_XNewRef(_PyType_Lookup(type, PyTuple_GET_ITEM(chains, LEAVE)));
  PyTypeObject *chain = enter == NULL || leave == NULL ? NULL : Py_TYPE(leave);
  PyObject *kept[] = {(PyObject *)seen->type, (PyObject *)seen->chain, seen->hooks[0],
                      seen->hooks[1]};
  size_t index;
  seen->plain = chain != NULL && Py_TYPE(enter) == chain &&
                type->tp_getattro == PyObject_GenericGetAttr &&
                chain->tp_getattro == PyObject_GenericGetAttr && chain->tp_descr_get == NULL &&
                _PyType_Lookup(chain, PyTuple_GET_ITEM(chains, MEMBERS)) == NULL &&
                chain->tp_version_tag != 0;
  seen->type = (PyTypeObject *)Py_NewRef(type);
  seen->version = type->tp_version_tag;
  seen->chain = (PyTypeObject *)Py_XNewRef(chain);
  seen->chain_version = seen->plain ? chain->tp_version_tag : 0;
  seen->hooks[0] = enter;
  seen->hooks[1] = leave;
  for (index = 0; index < 4; index++)
    Py_XDECREF(kept[index]); /* at the end: it may run Python, which may launch */
}

static int is_seen(const hooks_class_t *seen, PyTypeObject *type) {
  return seen->type == type && seen->version == type->tp_version_tag && seen->version != 0 &&
         (!seen->plain || seen->chain_version == seen->chain->tp_version_tag);
}

/* Returns what a dictionary has by a name, a new reference, or NULL; leaves no exception. */
static inline PyObject *member_of(PyObject *members, PyObject *name) {
  PyObject *found = PyDict_GetItemWithError(members, name);
  if (found == NULL && PyErr_Occurred() != NULL)
    PyErr_Clear();
  return Py_XNewRef(found);
}

/* Returns the dictionary of what an object has of its own, a new reference, or NULL; leaves no
 * exception. */
static inline PyObject *members_of(PyObject *object) {
  PyObject *members = PyObject_GenericGetDict(object, NULL);
  if (members == NULL)
    PyErr_Clear();
  return members;
}

/* Whether a hook, which stands among an object's own members or is that of its class, is a chain
 * without members. */
static inline int is_empty(PyTypeObject *chain, PyObject *own, PyObject *name, PyObject *of_class,
                           PyObject *members) {
  PyObject *hook = PyDict_GET_SIZE(own) > 0 ? member_of(own, name) : NULL, *chained, *found = NULL;
  int empty;
  if (hook == NULL)
    hook = Py_NewRef(of_class);
  chained = Py_TYPE(hook) == chain ? members_of(hook) : NULL;
  if (chained != NULL)
    found = member_of(chained, members);
  empty = found != NULL && PyList_CheckExact(found) && PyList_GET_SIZE(found) == 0;
  Py_XDECREF(found);
  Py_XDECREF(chained);
  Py_DECREF(hook);
  return empty;
}

static int are_empty(hooks_class_t *seen, PyObject *runtime, PyObject *chains) {
  PyObject *own, *members = PyTuple_GET_ITEM(chains, MEMBERS);
  int empty;
  if (!is_seen(seen, Py_TYPE(runtime)))
    look_at(seen, Py_TYPE(runtime), chains);
  if (!seen->plain || (own = members_of(runtime)) == NULL)
    return 0;
  empty = is_empty(seen->chain, own, PyTuple_GET_ITEM(chains, ENTER), seen->hooks[0], members) &&
          is_empty(seen->chain, own, PyTuple_GET_ITEM(chains, LEAVE), seen->hooks[1], members);
  Py_DECREF(own);
  return empty;
}

/* Returns 0 where nothing is called: Triton is not loaded, or its hooks are chains without members;
 * 1 where Python has to be asked. Leaves no exception.  Modules, objects and members are looked up
 * at each launch, since each may be replaced. */
static int may_be_called(hooks_class_t *seen, PyObject *chains) {
  PyObject *module =
      PyDict_GetItemWithError(PyTuple_GET_ITEM(chains, MODULES), PyTuple_GET_ITEM(chains, MODULE));
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
  called = !are_empty(seen, runtime, chains);
  Py_DECREF(runtime);
  return called;
}

/* RECORDING of profiler_hooks.py: modules, the name of one, and of its flag. */
enum { FLAG_MODULES, FLAG_MODULE, FLAG, FLAG_PARTS };

static int is_flag(PyObject *flag) {
  return PyTuple_Check(flag) && PyTuple_GET_SIZE(flag) == FLAG_PARTS &&
         PyDict_Check(PyTuple_GET_ITEM(flag, FLAG_MODULES)) &&
         PyUnicode_Check(PyTuple_GET_ITEM(flag, FLAG_MODULE)) &&
         PyUnicode_Check(PyTuple_GET_ITEM(flag, FLAG));
}

/* Returns 0 where torch's profiler does not record: its module is not loaded, or the flag there is
 * False; 1 where Python has to be asked.  Leaves no exception. */
static int may_record(PyObject *flag) {
  PyObject *module = PyDict_GetItemWithError(PyTuple_GET_ITEM(flag, FLAG_MODULES),
                                             PyTuple_GET_ITEM(flag, FLAG_MODULE));
  PyObject *set = NULL;
  if (module != NULL && PyModule_CheckExact(module))
    set = PyDict_GetItemWithError(PyModule_GetDict(module), PyTuple_GET_ITEM(flag, FLAG));
  if (PyErr_Occurred() != NULL) {
    PyErr_Clear();
    return 1;
  }
  return module != NULL && set != Py_False;
}

#endif

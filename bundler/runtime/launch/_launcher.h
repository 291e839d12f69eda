/* SPDX-License-Identifier: Apache-2.0
 *
 * What a Launcher of `_launch.c` holds, and how one is made, copied for another kernel, and dropped.
 */

#ifndef BUNDLER_LAUNCHER_H
#define BUNDLER_LAUNCHER_H

#include <Python.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include "_launch_packing.h"

#define ATTRIBUTE_BYTES 72

/* cuLaunchKernel, hipModuleLaunchKernel. */
typedef int (*plain_t)(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **,
                       void **);
/* CUlaunchConfig and HIP_LAUNCH_CONFIG have one layout. */
typedef struct {
  unsigned grid[3], block[3], shared;
  void *stream, *attributes;
  unsigned count;
} config_t;
/* cuLaunchKernelEx, hipDrvLaunchKernelEx. */
typedef int (*extended_t)(const config_t *, void *, void **, void **);
/* cuCtxGetCurrent writes a pointer, hipGetDevice an int. */
typedef int (*place_t)(uint64_t *);

typedef struct {
  PyObject_HEAD
  vectorcallfunc vectorcall;
  plain_t plain;
  extended_t extended;
  place_t where;
  uint64_t place;
  void *function;
  unsigned block, cluster, shared;
  unsigned char *attributes;
  unsigned attribute_count;
  Py_ssize_t buffer_bytes, field_count, argument_count;
  field_t *fields;
  PyObject *slow_pack, *fail, *enter, *scratch, *weak;
} launcher_t;

/* Launches; `_launch.c` has it. */
static PyObject *launch(PyObject *object, PyObject *const *args, size_t flagged, PyObject *names);

static int read_field(field_t *field, PyObject *item, Py_ssize_t buffer_bytes, Py_ssize_t arguments) {
  const char *name;
  int kind = 0;
  if (!PyTuple_Check(item)) {
    PyErr_SetString(PyExc_TypeError, "a field is (kind, offset, argument)");
    return -1;
  }
  if (!PyArg_ParseTuple(item, "sIn", &name, &field->offset, &field->argument))
    return -1;
  while (kind < KINDS && strcmp(kind_names[kind], name) != 0)
    kind++;
  if (kind == KINDS || (kind >= GLOBAL_SCRATCH) != (field->argument < 0) || field->argument >= arguments ||
      (Py_ssize_t)field->offset + kind_bytes[kind] > buffer_bytes) {
    PyErr_Format(PyExc_ValueError, "field %R is of no known kind, or lies outside the buffer", item);
    return -1;
  }
  field->kind = (enum kind)kind;
  return 0;
}

static int read_fields(launcher_t *self, PyObject *fields) {
  Py_ssize_t index;
  self->field_count = PyTuple_GET_SIZE(fields);
  self->fields = PyMem_New(field_t, self->field_count ? self->field_count : 1);
  if (self->fields == NULL) {
    PyErr_NoMemory();
    return -1;
  }
  for (index = 0; index < self->field_count; index++)
    if (read_field(&self->fields[index], PyTuple_GET_ITEM(fields, index), self->buffer_bytes, self->argument_count) < 0)
      return -1;
  return 0;
}

static PyObject *launcher_new(PyTypeObject *type, PyObject *args, PyObject *keywords) {
  static char *words[] = {"plain", "extended", "where", "place", "function", "block", "cluster", "shared",
                          "attributes", "buffer_bytes", "arguments", "fields", "slow_pack", "fail", "enter",
                          "scratch", NULL};
  unsigned long long plain, extended, where, place, function;
  const char *attributes;
  Py_ssize_t attribute_bytes;
  PyObject *fields;
  launcher_t *self = (launcher_t *)type->tp_alloc(type, 0);
  if (self == NULL)
    return NULL;
  if (!PyArg_ParseTupleAndKeywords(args, keywords, "$KKKKKIIIy#nnO!OOOO", words, &plain, &extended, &where, &place,
                                   &function, &self->block, &self->cluster, &self->shared, &attributes,
                                   &attribute_bytes, &self->buffer_bytes, &self->argument_count, &PyTuple_Type,
                                   &fields, &self->slow_pack, &self->fail, &self->enter, &self->scratch)) {
    self->slow_pack = self->fail = self->enter = self->scratch = NULL; /* borrowed so far */
    Py_DECREF(self);
    return NULL;
  }
  Py_INCREF(self->slow_pack);
  Py_INCREF(self->fail);
  Py_INCREF(self->enter);
  Py_INCREF(self->scratch);
  self->vectorcall = launch;
  self->plain = (plain_t)(uintptr_t)plain;
  self->extended = (extended_t)(uintptr_t)extended;
  self->where = (place_t)(uintptr_t)where;
  self->place = place;
  self->function = (void *)(uintptr_t)function;
  self->attribute_count = (unsigned)(attribute_bytes / ATTRIBUTE_BYTES);
  self->attributes = PyMem_Malloc(attribute_bytes ? (size_t)attribute_bytes : 1);
  if (self->attributes == NULL) {
    Py_DECREF(self);
    return PyErr_NoMemory();
  }
  memcpy(self->attributes, attributes, (size_t)attribute_bytes);
  if (read_fields(self, fields) < 0) {
    Py_DECREF(self);
    return NULL;
  }
  return (PyObject *)self;
}

/* Returns a copy for another kernel that takes the same parameters in the same place; with the rest shared kernels of one signature
 * cost a sixth of what the first one did. */
static PyObject *sibling_method(launcher_t *self, PyObject *args) {
  PyTypeObject *type = Py_TYPE(self);
  PyObject *slow_pack, *fail;
  unsigned long long function;
  size_t field_bytes = (size_t)(self->field_count ? self->field_count : 1) * sizeof(field_t);
  size_t attribute_bytes = (size_t)self->attribute_count * ATTRIBUTE_BYTES;
  launcher_t *made;
  if (!PyArg_ParseTuple(args, "KOO", &function, &slow_pack, &fail) || (made = (launcher_t *)type->tp_alloc(type, 0)) == NULL)
    return NULL;
  memcpy((char *)made + offsetof(launcher_t, vectorcall), (char *)self + offsetof(launcher_t, vectorcall),
         offsetof(launcher_t, fields) - offsetof(launcher_t, vectorcall));
  made->function = (void *)(uintptr_t)function;
  made->slow_pack = Py_NewRef(slow_pack);
  made->fail = Py_NewRef(fail);
  made->enter = Py_NewRef(self->enter);
  made->scratch = Py_NewRef(self->scratch);
  made->fields = PyMem_Malloc(field_bytes);
  made->attributes = PyMem_Malloc(attribute_bytes ? attribute_bytes : 1);
  if (made->fields == NULL || made->attributes == NULL) {
    Py_DECREF(made);
    return PyErr_NoMemory();
  }
  memcpy(made->fields, self->fields, field_bytes);
  memcpy(made->attributes, self->attributes, attribute_bytes);
  return (PyObject *)made;
}

static int launcher_traverse(launcher_t *self, visitproc visit, void *arg) {
  Py_VISIT(Py_TYPE(self));
  Py_VISIT(self->slow_pack);
  Py_VISIT(self->fail);
  Py_VISIT(self->enter);
  Py_VISIT(self->scratch);
  return 0;
}

static int launcher_clear(launcher_t *self) {
  Py_CLEAR(self->slow_pack);
  Py_CLEAR(self->fail);
  Py_CLEAR(self->enter);
  Py_CLEAR(self->scratch);
  return 0;
}

static void launcher_dealloc(launcher_t *self) {
  PyTypeObject *type = Py_TYPE(self);
  PyObject_GC_UnTrack(self);
  if (self->weak != NULL)
    PyObject_ClearWeakRefs((PyObject *)self);
  launcher_clear(self);
  PyMem_Free(self->fields);
  PyMem_Free(self->attributes);
  type->tp_free(self);
  Py_DECREF(type);
}

#endif

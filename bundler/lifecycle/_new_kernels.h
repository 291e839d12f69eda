/* SPDX-License-Identifier: Apache-2.0
 *
 * `kernel_t`: a kernel that is to be written, and `read_kernel`, which makes one of a NewKernel
 * (bundler/lifecycle/kernel_writer.py).  _kernel_writer.c, which alone includes this file, has one
 * for each kernel of a batch.
 *
 * Names and digests point into the tuple that was read, whose owner keeps it; a kernel holds the
 * buffers of its files, and memory for what is changed in them, until `release_kernel`.  Both
 * functions need the interpreter.
 */

#ifndef BUNDLER_NEW_KERNELS_H
#define BUNDLER_NEW_KERNELS_H

#include "_kernel_threads.h"

#define ALREADY_CHECKED (-1)

/* What is written in the place of some bytes of a file. */
typedef struct {
  Py_ssize_t offset, old_size, new_size;
  const char *old, *new;
} edit_t;

typedef struct {
  const char *name;
  const char *expected; /* a digest, NULL where the caller has compared it */
  unsigned char digest[DIGEST_BYTES];
  Py_buffer data;
  edit_t *edits;
  Py_ssize_t edit_count;
} file_t;

typedef struct {
  const char *temporary, *key, *group_name, *group_text;
  Py_ssize_t group_size;
  file_t *files;
  Py_ssize_t count;
  Py_ssize_t binary, metadata; /* which files these are, or ALREADY_CHECKED */
  int differs;                 /* a file does not have the bytes that are to be changed */
  int code;
} kernel_t;

/* Returns a text that is one component of a path; NULL with an exception. */
static const char *component(PyObject *text) {
  Py_ssize_t size;
  const char *name = PyUnicode_AsUTF8AndSize(text, &size);
  if (name == NULL)
    return NULL;
  if (size == 0 || strlen(name) != (size_t)size || strchr(name, '/') != NULL ||
      strcmp(name, ".") == 0 || strcmp(name, "..") == 0) {
    PyErr_Format(PyExc_ValueError, "not the name of a file: %R", text);
    return NULL;
  }
  return name;
}

/* As PyArg_ParseTuple, which takes it for granted that it is given a tuple. */
#define PARSE(tuple, ...)                                                                          \
  (PyTuple_Check(tuple) ? PyArg_ParseTuple(tuple, __VA_ARGS__)                                     \
                        : (PyErr_SetString(PyExc_TypeError, "expected a tuple"), 0))

static int wrong(const char *why) {
  PyErr_SetString(PyExc_ValueError, why);
  return 0;
}

/* Reads where something is changed; a place beyond all files is as good as any other that is not in
 * this one.  Returns 0 with an exception. */
static int read_offset(PyObject *given, Py_ssize_t *offset) {
  *offset = PyLong_AsSsize_t(given);
  if (*offset != -1 || !PyErr_Occurred())
    return 1;
  if (!PyErr_ExceptionMatches(PyExc_OverflowError))
    return 0;
  PyErr_Clear();
  *offset = PY_SSIZE_T_MAX;
  return 1;
}

/* Reads what is changed in one file, whose buffer is there, and of which nothing was hashed yet. */
static int read_edits(PyObject *given, kernel_t *kernel, file_t *file) {
  Py_ssize_t count = PyTuple_Size(given), end = 0;
  if (file->edits != NULL)
    return wrong("a file is to be changed twice");
  file->edits = calloc((size_t)count + 1, sizeof(edit_t));
  if (file->edits == NULL)
    return PyErr_NoMemory(), 0;
  for (; file->edit_count < count; file->edit_count++) {
    edit_t *edit = &file->edits[file->edit_count];
    PyObject *offset;
    if (!PARSE(PyTuple_GetItem(given, file->edit_count), "Oy#y#;expected (offset, old, new)",
               &offset, &edit->old, &edit->old_size, &edit->new, &edit->new_size) ||
        !read_offset(offset, &edit->offset))
      return 0;
    if (edit->offset < end || edit->offset > file->data.len ||
        edit->old_size > file->data.len - edit->offset ||
        memcmp((const char *)file->data.buf + edit->offset, edit->old, (size_t)edit->old_size) != 0)
      kernel->differs = 1;
    else
      end = edit->offset + edit->old_size;
  }
  return 1;
}

static int read_changes(PyObject *changes, kernel_t *kernel) {
  for (Py_ssize_t number = 0; number < PyTuple_Size(changes); number++) {
    PyObject *edits;
    Py_ssize_t position;
    if (!PARSE(PyTuple_GetItem(changes, number), "nO!;expected (position, edits)", &position,
               &PyTuple_Type, &edits))
      return 0;
    if (position < 0 || position >= kernel->count)
      return wrong("what is to be changed is none of the files");
    if (!read_edits(edits, kernel, &kernel->files[position]))
      return 0;
  }
  return 1;
}

static const char *read_digest(PyObject *given, const sha256_t *sha256) {
  char *digest;
  Py_ssize_t size;
  if (PyBytes_AsStringAndSize(given, &digest, &size) < 0)
    return NULL;
  if (size == DIGEST_BYTES && can_hash(sha256))
    return digest;
  wrong(can_hash(sha256) ? "not a SHA-256 digest" : "no digest can be compared here");
  return NULL;
}

/* The tuples have a name, bytes and, unless there are none at all, a digest for each file. */
static int read_files(PyObject *names, PyObject *contents, PyObject *digests,
                      const sha256_t *sha256, kernel_t *kernel) {
  Py_ssize_t count = PyTuple_Size(names), compared = PyTuple_Size(digests);
  if (PyTuple_Size(contents) != count || (compared != 0 && compared != count))
    return wrong("expected bytes, and a digest or none at all, for each name");
  kernel->files = calloc((size_t)count + 1, sizeof(file_t));
  if (kernel->files == NULL)
    return PyErr_NoMemory(), 0;
  for (Py_ssize_t number = 0; number < count; number++) {
    file_t *file = &kernel->files[number];
    file->name = component(PyTuple_GetItem(names, number));
    if (file->name == NULL ||
        (compared &&
         (file->expected = read_digest(PyTuple_GetItem(digests, number), sha256)) == NULL) ||
        PyObject_GetBuffer(PyTuple_GetItem(contents, number), &file->data, PyBUF_SIMPLE) < 0)
      return 0;
    kernel->count++; /* what is read of it is released */
  }
  return 1;
}

/* Reads a NewKernel. */
static int read_kernel(PyObject *given, const sha256_t *sha256, kernel_t *kernel, int *compares) {
  PyObject *temporary, *key, *names, *contents, *digests, *changes, *group;
  if (!PARSE(given, "UUO!O!O!O!nnUy#;expected a NewKernel", &temporary, &key, &PyTuple_Type, &names,
             &PyTuple_Type, &contents, &PyTuple_Type, &digests, &PyTuple_Type, &changes,
             &kernel->binary, &kernel->metadata, &group, &kernel->group_text, &kernel->group_size))
    return 0;
  kernel->temporary = component(temporary);
  kernel->key = kernel->temporary == NULL ? NULL : component(key);
  kernel->group_name = kernel->key == NULL ? NULL : component(group);
  if (kernel->group_name == NULL || !read_files(names, contents, digests, sha256, kernel) ||
      !read_changes(changes, kernel))
    return 0;
  *compares |= PyTuple_Size(digests) > 0;
  if (kernel->binary < ALREADY_CHECKED || kernel->binary >= kernel->count)
    return wrong("the binary is none of the files");
  /* Of which kind the binary has to be stands in the metadata. */
  if (kernel->metadata < ALREADY_CHECKED ||
      kernel->metadata >= (kernel->binary == ALREADY_CHECKED ? 0 : kernel->count))
    return wrong("the metadata is none of the files, or without a binary");
  return 1;
}

/* Lets go of what `read_kernel` took, as far as it came. */
static void release_kernel(kernel_t *kernel) {
  while (kernel->count > 0) {
    PyBuffer_Release(&kernel->files[--kernel->count].data);
    free(kernel->files[kernel->count].edits);
  }
  free(kernel->files);
}

#endif

/* SPDX-License-Identifier: Apache-2.0
 *
 * What `_launch.c` does with a device binary before there is a launcher: `find_section` reads a section of it, `load_image` lets a driver
 * load it.
 */

#ifndef BUNDLER_DEVICE_IMAGES_H
#define BUNDLER_DEVICE_IMAGES_H

#include <Python.h>
#include <stdint.h>
#include <string.h>

#define ELF_HEADER_BYTES 64
#define SEGMENT_BYTES 56
#define SECTION_BYTES 64
/* Of a binary with more of them Python looks at each. */
#define MOST_ROWS 256

static uint64_t number_at(const unsigned char *data, unsigned bytes) {
  uint64_t number = 0;
  memcpy(&number, data, bytes);
  return number;
}

/* Whether a table lies inside the binary, and so does what each of its rows names by offset and size. */
static int is_whole(const Py_buffer *image, uint64_t table, uint64_t rows, uint64_t row_bytes, unsigned offset, unsigned size) {
  const unsigned char *data = image->buf;
  uint64_t length = (uint64_t)image->len, row;
  if (rows > MOST_ROWS || table > length || rows * row_bytes > length - table)
    return 0;
  for (row = 0; row < rows; row++) {
    const unsigned char *at = data + table + row * row_bytes;
    uint64_t from = number_at(at + offset, 8);
    if (from > length || number_at(at + size, 8) > length - from)
      return 0;
  }
  return 1;
}

/* Returns the bytes of the last section of a name, None where there is none, NotImplemented for what is not as linkers write it. */
static PyObject *find_in(const Py_buffer *image, const Py_buffer *name) {
  const unsigned char *data = image->buf, *names;
  uint64_t table, rows, names_row, names_bytes;
  if (image->len < ELF_HEADER_BYTES || memcmp(data, "\177ELF\2", 5) != 0 || number_at(data + 54, 2) != SEGMENT_BYTES ||
      number_at(data + 58, 2) != SECTION_BYTES)
    Py_RETURN_NOTIMPLEMENTED;
  table = number_at(data + 40, 8);
  rows = number_at(data + 60, 2);
  names_row = number_at(data + 62, 2);
  if (names_row >= rows || !is_whole(image, number_at(data + 32, 8), number_at(data + 56, 2), SEGMENT_BYTES, 8, 32) ||
      !is_whole(image, table, rows, SECTION_BYTES, 24, 32))
    Py_RETURN_NOTIMPLEMENTED;
  names = data + number_at(data + table + names_row * SECTION_BYTES + 24, 8);
  names_bytes = number_at(data + table + names_row * SECTION_BYTES + 32, 8);
  while (rows-- > 0) {
    const unsigned char *row = data + table + rows * SECTION_BYTES;
    uint64_t at = number_at(row, 4);
    if (at < names_bytes && (uint64_t)name->len < names_bytes - at && names[at + (uint64_t)name->len] == 0 &&
        memcmp(names + at, name->buf, (size_t)name->len) == 0)
      return PyBytes_FromStringAndSize((const char *)data + number_at(row + 24, 8), (Py_ssize_t)number_at(row + 32, 8));
  }
  Py_RETURN_NONE;
}

/* Loads a binary and finds its kernel, where the context for the device is current: five calls of the driver in one of Python's.
 * Takes (cuCtxGetCurrent, cuCtxGetDevice, cuModuleLoadData, cuModuleGetFunction, cuFuncGetAttribute), the image, the entry, the device
 * and an attribute; returns None where another context is current, else (failed step, its status, context, module, function, the
 * attribute's value). */
static PyObject *load_image(PyObject *module_object, PyObject *args) {
  unsigned long long calls[5];
  const char *image, *entry;
  Py_ssize_t image_bytes, entry_bytes;
  int device, attribute, here = -1, step = 0, status = 0, value = 0;
  void *context = NULL, *loaded = NULL, *function = NULL;
  if (!PyArg_ParseTuple(args, "(KKKKK)y#y#ii", &calls[0], &calls[1], &calls[2], &calls[3], &calls[4], &image, &image_bytes,
                        &entry, &entry_bytes, &device, &attribute))
    return NULL;
  if (((int (*)(void **))(uintptr_t)calls[0])(&context) != 0 || context == NULL ||
      ((int (*)(int *))(uintptr_t)calls[1])(&here) != 0 || here != device)
    Py_RETURN_NONE;
  Py_BEGIN_ALLOW_THREADS
  if ((status = ((int (*)(void **, const void *))(uintptr_t)calls[2])(&loaded, image)) != 0)
    step = 1;
  else if ((status = ((int (*)(void **, void *, const char *))(uintptr_t)calls[3])(&function, loaded, entry)) != 0)
    step = 2;
  else if ((status = ((int (*)(int *, int, void *))(uintptr_t)calls[4])(&value, attribute, function)) != 0)
    step = 3;
  Py_END_ALLOW_THREADS
  return Py_BuildValue("iiKKKi", step, status, (unsigned long long)(uintptr_t)context,
                       (unsigned long long)(uintptr_t)loaded, (unsigned long long)(uintptr_t)function, value);
}

static PyObject *find_section(PyObject *module_object, PyObject *args) {
  Py_buffer image, name;
  PyObject *found;
  if (!PyArg_ParseTuple(args, "y*y*", &image, &name))
    return NULL;
  found = find_in(&image, &name);
  PyBuffer_Release(&image);
  PyBuffer_Release(&name);
  return found;
}

#endif

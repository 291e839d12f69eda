/* SPDX-License-Identifier: Apache-2.0
 *
 * How one value is packed into a parameter buffer: the kinds of parameters there are, and
 * `pack_one`, which packs a value as `Packer` does in Python (parameter_buffer.py), or leaves it to
 * that.  It writes into the caller's buffer and keeps nothing; the interpreter's lock is held.
 */

#ifndef BUNDLER_PACKING_H
#define BUNDLER_PACKING_H

#include "_tensors.h"

enum kind {
  POINTER,
  I1,
  I8,
  I16,
  I32,
  I64,
  U1,
  U8,
  U16,
  U32,
  U64,
  FP16,
  BF16,
  FP32,
  FP64,
  TENSOR_MAP,
  GLOBAL_SCRATCH,
  PROFILE_SCRATCH,
  KINDS
};

static const char *const kind_names[KINDS] = {"pointer",
                                              "i1",
                                              "i8",
                                              "i16",
                                              "i32",
                                              "i64",
                                              "u1",
                                              "u8",
                                              "u16",
                                              "u32",
                                              "u64",
                                              "fp16",
                                              "bf16",
                                              "fp32",
                                              "fp64",
                                              "tensormap",
                                              "global_scratch",
                                              "profile_scratch"};
static const unsigned kind_bytes[KINDS] = {8, 1, 1, 2, 4, 8, 1, 1, 2, 4, 8, 2, 2, 4, 8, 128, 8, 8};

typedef struct {
  enum kind kind;
  unsigned offset;
  Py_ssize_t argument;
} field_t;

/* Each returns 1 when the value was packed, 0 when Python has to look at it, or with an exception
 * where that is an interrupt. */

/* Reads an integer; returns 0 for one that has more than 64 bits. */
static inline int read_integer(PyObject *value, long long *number) {
  int overflow;
#ifdef PyUnstable_Long_IsCompact
  /* Nearly all are small, and a function less is called; after a launch nothing of ours is in the
   * processor's caches. */
  if (PyUnstable_Long_IsCompact((PyLongObject *)value)) {
    *number = PyUnstable_Long_CompactValue((PyLongObject *)value);
    return 1;
  }
#endif
  *number = PyLong_AsLongLongAndOverflow(value, &overflow);
  return !overflow;
}

/* Reads an integer from 0 to 2^64-1; -1 with an exception for another. */
static inline unsigned long long as_unsigned(PyObject *value) {
#if SIZEOF_LONG == SIZEOF_LONG_LONG
  return PyLong_AsUnsignedLong(value); /* the other goes through an array of bytes */
#else
  return PyLong_AsUnsignedLongLong(value);
#endif
}

static int pack_signed(PyObject *value, unsigned char *to, unsigned bytes) {
  long long number;
  if (!PyLong_Check(value) || !read_integer(value, &number))
    return 0;
  if (bytes < 8) {
    long long limit = 1LL << (8 * bytes - 1);
    if (number < -limit || number >= limit)
      return 0;
  }
  memcpy(to, &number,
         bytes); /* little-endian, as every machine with such a GPU is; PyInit refuses another */
  return 1;
}

static int pack_unsigned(PyObject *value, unsigned char *to, unsigned bytes) {
  unsigned long long number;
  if (!PyLong_Check(value))
    return 0;
  number = as_unsigned(value);
  if (number == (unsigned long long)-1 && PyErr_Occurred()) {
    PyErr_Clear();
    return 0;
  }
  if (bytes < 8 && number >> (8 * bytes))
    return 0;
  memcpy(to, &number, bytes);
  return 1;
}

static int pack_bool(PyObject *value, unsigned char *to) {
  if (!PyBool_Check(value))
    return 0;
  *to = value == Py_True;
  return 1;
}

static int pack_float(PyObject *value, unsigned char *to, enum kind kind) {
  double number;
  float single;
  uint32_t bits;
  if (!PyFloat_CheckExact(value))
    return 0;
  number = PyFloat_AS_DOUBLE(value);
  if (kind == FP64) {
    memcpy(to, &number, 8);
    return 1;
  }
  single = (float)number;
  /* Whether a finite number that no float holds is an error or infinity is Python's to say. */
  if (single - single != 0)
    return 0;
  if (kind == FP32) {
    memcpy(to, &single, 4);
  } else if (kind == BF16) {
    memcpy(&bits, &single, 4);
    bits >>= 16; /* truncated, as the compiler's own launcher does */
    memcpy(to, &bits, 2);
  } else if (PyFloat_Pack2(number, (char *)to, 1) < 0) {
    PyErr_Clear();
    return 0;
  }
  return 1;
}

/* Tensors come first: most pointers are, and nothing else of theirs is looked at. */
static int pack_pointer(state_t *state, PyObject *value, unsigned char *to) {
  const tensor_class_t *row;
  PyObject *number;
  uint64_t address;
  int done;
  if (value == Py_None) {
    memset(to, 0, 8);
    return 1;
  }
  row = find_known(state, Py_TYPE(value));
  if (row == NULL) {
    if (PyLong_Check(value))
      return PyBool_Check(value) ? 0 : pack_unsigned(value, to, 8);
    row = get_to_know(state, Py_TYPE(value));
  }
  if (row != NULL && row->told_address && read_told(&state->torch, value, &address)) {
    memcpy(to, &address, 8);
    return 1;
  }
  number = call_method(value, state->word_data_ptr, row == NULL ? NULL : row->data_ptr);
  if (number == NULL) {
    forget_error();
    return 0;
  }
  done = pack_unsigned(number, to, 8);
  Py_DECREF(number);
  return done;
}

static int pack_map(PyObject *value, unsigned char *to) {
  if (!PyBytes_CheckExact(value) || PyBytes_GET_SIZE(value) != kind_bytes[TENSOR_MAP])
    return 0;
  memcpy(to, PyBytes_AS_STRING(value), kind_bytes[TENSOR_MAP]);
  return 1;
}

static inline int pack_one(state_t *state, const field_t *field, PyObject *value,
                           unsigned char *buffer) {
  unsigned char *to = buffer + field->offset;
  if (field->kind == POINTER) /* most are; a jump through a table would have to be foretold */
    return pack_pointer(state, value, to);
  switch (field->kind) {
  case I1:
  case U1:
    return pack_bool(value, to);
  case I8:
  case I16:
  case I32:
  case I64:
    return pack_signed(value, to, kind_bytes[field->kind]);
  case U8:
  case U16:
  case U32:
  case U64:
    return pack_unsigned(value, to, kind_bytes[field->kind]);
  case TENSOR_MAP:
    return pack_map(value, to);
  default:
    return pack_float(value, to, field->kind);
  }
}

#endif

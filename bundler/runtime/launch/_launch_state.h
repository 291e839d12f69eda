/* SPDX-License-Identifier: Apache-2.0
 *
 * The state of the extension _launch, one for each interpreter, and what its other files share.
 *
 * `state_t` owns what it names: references go when the module does.  Each object of our types
 * points to it, and holds the module by its type, so that the state outlives them all.  The
 * interpreter's lock guards everything in it; whoever gives back a reference may let Python run,
 * which may launch, so a row is made void before it is changed.
 */

#ifndef BUNDLER_LAUNCH_STATE_H
#define BUNDLER_LAUNCH_STATE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <structmember.h>

/* Classes of tensors that are known.  A call rarely mixes more than tensors and parameters. */
#define KNOWN_CLASSES 4

/* How tensors of torch are read without a call of theirs, as Python told (`tell_tensors` of
 * _tensors.h).  The functions are those that torch keeps stable for compiled models; each returns
 * 0, or an error. */
typedef struct {
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

/* DLTensor and DLPackExchangeAPI of DLPack 1.x. */
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

/* A class whose objects have an address.  Where a method is a function of C, as torch's are, it is
 * kept: looking it up would cost more than calling it. */
typedef struct {
  PyTypeObject *type;   /* kept, so that no other class gets its address */
  unsigned version;     /* changes when the class does; 0: the row is void */
  PyObject *method;     /* `data_ptr`; kept, so that its function stays */
  /* Functions of C; NULL where the class has it in another form. */
  PyCFunction data_ptr, get_device;
  PyGetSetDef *dtype;
  int has_device;             /* whether there is a `get_device` at all */
  const exchange_t *exchange; /* tells address, device and type at once; NULL where there is none */
  int told_address;           /* whether torch's functions tell the address, quicker, */
  int told_all; /* and the other two; not without an exchange, which tells the stream */
} tensor_class_t;

/* The class of the object that has Triton's hooks, as _profiler_hooks.h looked at it. */
typedef struct {
  PyTypeObject *type, *chain; /* it, and the class of both hooks; both kept, as above */
  unsigned version, chain_version; /* change when the classes do */
  int plain; /* what an object has of its own stands in its dictionary, and nothing computes it */
  PyObject *hooks[2]; /* the class's own, for objects that have none */
} hooks_class_t;

typedef struct {
  PyTypeObject *launcher_type, *dispatcher_type, *gridded_type, *bound_type, *step_type;
  PyObject *word_again, *word_data_ptr, *word_device, *word_dtype, *word_get_device, *word_stream;
  torch_tensors_t torch; /* nothing before `tell_tensors` */
  tensor_class_t classes[KNOWN_CLASSES];
  unsigned next_class;
  /* After so many more launches `ask_now` is called; 0 where nothing is to be. */
  unsigned long launches_left;
  PyObject *ask_now;
  hooks_class_t hooks;
  void *spare; /* memory of the last Bound that went: nearly every call makes one, and drops it */
} state_t;

/* Forgets an error after which Python is asked anew, which meets it again.  An interrupt comes only
 * once, and stays. */
static inline void forget_error(void) {
  if (PyErr_Occurred() && PyErr_ExceptionMatches(PyExc_Exception))
    PyErr_Clear();
}

#endif

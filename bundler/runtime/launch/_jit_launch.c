/* SPDX-License-Identifier: Apache-2.0
 *
 * How a kernel is launched: the values of a call as the driver takes them, the call of the driver, and `launch` of `cuda_utils`, which
 * launches kernels of any signature, with what it is given to describe these.
 *
 * `launch` is called from the driver.py of Triton 3.7 and later, for each launch.  What the header lists is also
 * called from _jit_launcher.c.
 */

#include "_jit_driver.h"
#include <string.h>

#define MOST_ATTRIBUTES 5
#define DEVICE_POINTER 3
#define SPREAD 1
#define LARGEST_USUAL_SHARED_BYTES (228 * 1024)

static PyObject *word_data_ptr;

/* --------------------------------------------------------------------------------------------------------------- values */

/* Triton 3.7 and later; the numbers stand in what `build_signature_metadata` returns, which only `launch` reads. */
static const struct {
  const char *name;
  unsigned char kind;
} kinds_37[] = {{"i1", I32},    {"i8", I8},     {"i16", I16},   {"i32", I32},   {"i64", I64},   {"u1", U32},
                {"u8", U8},     {"u16", U16},   {"u32", U32},   {"u64", U64},   {"fp16", FP16}, {"bf16", BF16},
                {"fp32", FP32}, {"f32", FP32},  {"fp64", FP64}, {"nvTmaDesc", MAP}, {NULL, UNKNOWN}};

unsigned char kind_of(PyObject *type) {
  const char *name = PyUnicode_AsUTF8(type);
  int index;
  if (name == NULL)
    return UNKNOWN;
  if (name[0] == '*')
    return POINTER;
  for (index = 0; kinds_37[index].name != NULL; index++)
    if (strcmp(name, kinds_37[index].name) == 0)
      return kinds_37[index].kind;
  PyErr_Format(PyExc_RuntimeError, "Unknown data type: %R", type);
  return UNKNOWN;
}

int read_pointer(PyObject *value, uint64_t *to, Py_ssize_t place) {
  PyObject *address;
  int status;
  *to = 0;
  if (value == Py_None)
    return 0;
  if (PyLong_Check(value)) {
    *to = PyLong_AsUnsignedLongLong(value);
    return *to == (uint64_t)-1 && PyErr_Occurred() ? -1 : 0;
  }
  address = PyObject_CallMethodNoArgs(value, word_data_ptr);
  if (address == NULL && !PyErr_ExceptionMatches(PyExc_Exception))
    return -1; /* an interrupt */
  if (address == NULL || !PyLong_Check(address)) {
    PyErr_SetString(PyExc_TypeError, address == NULL ? "Pointer argument must be either uint64 or have data_ptr method"
                                                     : "data_ptr method of Pointer object must return 64-bit int");
    Py_XDECREF(address);
    return -1;
  }
  *to = PyLong_AsUnsignedLongLong(address);
  Py_DECREF(address);
  if (*to == 0)
    return 0;
  if (*to == (uint64_t)-1 && PyErr_Occurred())
    return -1;
  status = cuda.pointer_attribute(to, DEVICE_POINTER, *to);
  if (status != INVALID_VALUE)
    return check(status);
  if (place >= 0)
    PyErr_Format(PyExc_ValueError, "Pointer argument (at %zd) cannot be accessed from Triton (cpu tensor?)", place);
  else
    PyErr_SetString(PyExc_ValueError, "Pointer argument cannot be accessed from Triton (cpu tensor?)");
  return -1;
}

int read_float(PyObject *value, uint64_t *to, unsigned char kind) {
  double number = PyFloat_AsDouble(value);
  float single = (float)number;
  uint32_t bits;
  *to = 0;
  if (number == -1.0 && PyErr_Occurred())
    return -1;
  if (kind == FP64) {
    memcpy(to, &number, sizeof(number));
  } else if (kind == FP16) {
    return PyFloat_Pack2(number, (char *)to, 1);
  } else {
    memcpy(&bits, &single, sizeof(bits));
    *to = kind == BF16 ? bits >> 16 : bits;
  }
  return 0;
}

static int read_integer(PyObject *value, uint64_t *to, unsigned char kind) {
  if (kind == I64)
    *to = (uint64_t)PyLong_AsLongLong(value);
  else if (kind == U64)
    *to = PyLong_AsUnsignedLongLong(value);
  else if (kind >= U8)
    *to = PyLong_AsUnsignedLong(value);
  else
    *to = (uint64_t)PyLong_AsLong(value);
  return *to == (uint64_t)-1 && PyErr_Occurred() ? -1 : 0;
}

/* ------------------------------------------------------------------------------------------------------------- launching */

static attribute_t *add_attribute(config_t *config, uint32_t id) {
  attribute_t *added = &config->attributes[config->count++];
  memset(added, 0, sizeof(*added));
  added->id = id;
  return added;
}

static void add_attributes(config_t *config, const request_t *request) {
  attribute_t *cluster;
  if (request->oversized && request->shared > LARGEST_USUAL_SHARED_BYTES)
    add_attribute(config, LAUNCH_SHARED_MODE)->value[0] = ALLOW_OVERSIZED;
  if (request->serial)
    add_attribute(config, PROGRAMMATIC_SERIALIZATION)->value[0] = 1;
  if (request->cooperative)
    add_attribute(config, COOPERATIVE)->value[0] = 1;
  if (request->clusters == 1)
    return;
  cluster = add_attribute(config, CLUSTER_DIMENSION);
  cluster->value[0] = (uint32_t)request->clusters;
  cluster->value[1] = cluster->value[2] = 1;
  add_attribute(config, CLUSTER_SCHEDULING)->value[0] = SPREAD;
}

int call_driver(const request_t *request, void **parameters) {
  attribute_t attributes[MOST_ATTRIBUTES];
  void *function = (void *)(uintptr_t)request->function;
  config_t config = {{(uint32_t)(request->grid[0] * request->clusters), (uint32_t)request->grid[1], (uint32_t)request->grid[2]},
                     {(uint32_t)(32 * request->warps), 1, 1}, (uint32_t)request->shared, (void *)(uintptr_t)request->stream,
                     attributes, 0};
  int status = SUCCESS;
  if (!((double)request->grid[0] * request->grid[1] * request->grid[2] > 0))
    return 0;
  if (require(cuda.launch, "cuLaunchKernelEx") < 0)
    return -1;
  add_attributes(&config, request);
  /* The driver waits when its queue is full, perhaps for a callback that needs the interpreter. */
  Py_BEGIN_ALLOW_THREADS
  if (request->clusters == 16) /* more than every GPU must be able to */
    status = cuda.set_function_attribute(function, NON_PORTABLE_CLUSTER, 1);
  if (status == SUCCESS)
    status = cuda.launch(&config, function, parameters, NULL);
  Py_END_ALLOW_THREADS
  return check(status);
}

int call_hook(PyObject *hook, PyObject *metadata) {
  PyObject *answer;
  if (hook == Py_None)
    return 0;
  answer = PyObject_CallOneArg(hook, metadata);
  Py_XDECREF(answer);
  return answer == NULL ? -1 : 0;
}

int make_room(room_t *room, Py_ssize_t count) {
  room->values = room->values_on_stack;
  room->numbers = room->numbers_on_stack;
  room->parameters = room->parameters_on_stack;
  room->allocated = NULL;
  if (count <= STACK_VALUES)
    return 0;
  room->allocated = PyMem_Malloc((size_t)(count + 2) * (sizeof(PyObject *) + sizeof(uint64_t) + sizeof(void *)));
  if (room->allocated == NULL) {
    PyErr_NoMemory();
    return -1;
  }
  room->values = room->allocated;
  room->numbers = (uint64_t *)(room->values + count + 2);
  room->parameters = (void **)(room->numbers + count + 2);
  return 0;
}

int read_scratch(room_t *room, Py_ssize_t count, PyObject *global, PyObject *profile, Py_ssize_t place) {
  room->parameters[count] = &room->numbers[count];
  room->parameters[count + 1] = &room->numbers[count + 1];
  return read_pointer(global, &room->numbers[count], place) < 0 ? -1 : read_pointer(profile, &room->numbers[count + 1], place);
}

static int read_value(PyObject *value, unsigned char kind, uint64_t *number, void **parameter) {
  *parameter = number;
  if (kind == POINTER)
    return read_pointer(value, number, -1);
  if (kind == MAP)
    return find_map(value, parameter);
  return kind >= FP16 ? read_float(value, number, kind) : read_integer(value, number, kind);
}

/* ----------------------------------------------------------------- one launch for all signatures: Triton 3.7 and later */

typedef struct {
  PyObject_HEAD
  PyObject *nested;
  int type;
} argument_t;

static int argument_init(argument_t *self, PyObject *args, PyObject *keywords) {
  static char *words[] = {"nested_tuple", "type", NULL};
  PyObject *nested = NULL;
  int type = 0;
  if (!PyArg_ParseTupleAndKeywords(args, keywords, "O|i", words, &nested, &type))
    return -1;
  Py_XSETREF(self->nested, Py_NewRef(nested));
  self->type = type;
  return 0;
}

static void argument_dealloc(argument_t *self) {
  Py_XDECREF(self->nested);
  Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyTypeObject Argument = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "triton.backends.nvidia.PyKernelArg",
    .tp_basicsize = sizeof(argument_t),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_doc = "Says of one argument whether it is a value, a constant or a tuple of these.",
    .tp_new = PyType_GenericNew,
    .tp_init = (initproc)argument_init,
    .tp_dealloc = (destructor)argument_dealloc,
};

static PyObject *build_signature_metadata(PyObject *module, PyObject *args) {
  PyObject *signature, *types, *found;
  Py_ssize_t index;
  if (!PyArg_ParseTuple(args, "O", &signature) ||
      (types = PySequence_Fast(signature, "Expected kernel_arg_types to be a sequence or iterable")) == NULL)
    return NULL;
  found = PyBytes_FromStringAndSize(NULL, PySequence_Fast_GET_SIZE(types));
  for (index = 0; found != NULL && index < PySequence_Fast_GET_SIZE(types); index++) {
    unsigned char kind = kind_of(PySequence_Fast_GET_ITEM(types, index));
    if (kind == UNKNOWN)
      Py_CLEAR(found);
    else
      PyBytes_AS_STRING(found)[index] = (char)kind;
  }
  Py_DECREF(types);
  return found;
}

int too_few(void) {
  PyErr_SetString(PyExc_TypeError, "a kernel was called with more or fewer values than its signature has");
  return -1;
}

/* Only these hold their items for as long as the caller holds them. */
int is_row(PyObject *object) {
  if (PyTuple_Check(object) || PyList_Check(object))
    return 1;
  PyErr_Format(PyExc_TypeError, "the values of a tuple must be a tuple or a list, not %.50s", Py_TYPE(object)->tp_name);
  return 0;
}

/* Writes the values without constants, tuples taken apart; they are the caller's. */
static int flatten(PyObject *annotations, PyObject *given, PyObject **values, Py_ssize_t *used, Py_ssize_t most) {
  Py_ssize_t index;
  if (!is_row(annotations) || !is_row(given))
    return -1;
  if (PySequence_Fast_GET_SIZE(given) < PySequence_Fast_GET_SIZE(annotations))
    return too_few();
  for (index = 0; index < PySequence_Fast_GET_SIZE(annotations); index++) {
    PyObject *mark = PySequence_Fast_GET_ITEM(annotations, index), *item = PySequence_Fast_GET_ITEM(given, index);
    if (Py_TYPE(mark) != &Argument) {
      PyErr_SetString(PyExc_TypeError, "arg_annotations must hold PyKernelArg");
      return -1;
    }
    if (((argument_t *)mark)->type == TUPLE) {
      if (flatten(((argument_t *)mark)->nested, item, values, used, most) < 0)
        return -1;
    } else if (((argument_t *)mark)->type == VALUE) {
      if (*used == most)
        return too_few();
      values[(*used)++] = item;
    }
  }
  return 0;
}

static int read_and_launch(request_t *request, room_t *room, const Py_buffer *signature, PyObject *annotations, PyObject *given,
                           PyObject *global, PyObject *profile) {
  const unsigned char *kinds = signature->buf;
  Py_ssize_t index, used = 0, count = signature->len;
  if (flatten(annotations, given, room->values, &used, count) < 0)
    return -1;
  if (used != count)
    return too_few();
  for (index = 0; index < count; index++)
    if (read_value(room->values[index], kinds[index], &room->numbers[index], &room->parameters[index]) < 0)
      return -1;
  return read_scratch(room, count, global, profile, -1) < 0 ? -1 : call_driver(request, room->parameters);
}

static PyObject *launch_any(PyObject *args, int oversized) {
  request_t request = {.oversized = oversized};
  PyObject *metadata, *enter, *leave, *global, *profile, *annotations, *given;
  Py_buffer signature;
  room_t room;
  int done = -1;
  if (ensure_first_context() < 0 ||
      !PyArg_ParseTuple(args, "iiiKKpp(iii)OOOOOOy*O", &request.grid[0], &request.grid[1], &request.grid[2], &request.stream,
                        &request.function, &request.cooperative, &request.serial, &request.warps, &request.clusters,
                        &request.shared, &metadata, &enter, &leave, &global, &profile, &annotations, &signature, &given))
    return NULL;
  if (make_room(&room, signature.len) == 0) {
    if (call_hook(enter, metadata) == 0 &&
        read_and_launch(&request, &room, &signature, annotations, given, global, profile) == 0)
      done = call_hook(leave, metadata);
    PyMem_Free(room.allocated);
  }
  PyBuffer_Release(&signature);
  if (done < 0)
    return NULL;
  Py_RETURN_NONE;
}

static PyObject *launch(PyObject *module, PyObject *args) { return launch_any(args, 0); }
static PyObject *launch_oversized(PyObject *module, PyObject *args) { return launch_any(args, 1); }

static PyMethodDef methods[] = {
    {"build_signature_metadata", build_signature_metadata, METH_VARARGS, "Return the kinds of types, for `launch`."},
    {"launch", launch, METH_VARARGS, "Launch a kernel of any signature."},
    {"launch_oversized", launch_oversized, METH_VARARGS, "The same, with oversized shared memory."},
    {NULL, NULL, 0, NULL}};

int add_launch(PyObject *module) {
  word_data_ptr = PyUnicode_InternFromString("data_ptr");
  if (word_data_ptr == NULL || PyType_Ready(&Argument) < 0 || PyModule_AddFunctions(module, methods) < 0 ||
      PyModule_AddObjectRef(module, "PyKernelArg", (PyObject *)&Argument) < 0 ||
      PyModule_AddIntConstant(module, "ARG_CONSTEXPR", CONSTANT) < 0 || PyModule_AddIntConstant(module, "ARG_KERNEL", VALUE) < 0)
    return -1;
  return PyModule_AddIntConstant(module, "ARG_TUPLE", TUPLE);
}

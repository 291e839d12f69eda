/* SPDX-License-Identifier: Apache-2.0
 *
 * How a kernel is launched: the values of a call as the driver takes them, the call of the driver,
 * and its two users. `launch` of `cuda_utils` launches kernels of any signature, with what it is
 * given to describe these: driver.py of Triton 3.7 and later calls it for each launch.  Launcher
 * launches kernels of one signature, as the function that Triton up to 3.6 has compiled for each:
 * bundler/runtime/launch/jit/jit_modules.py makes it, and driver.py of Triton 3.6 calls it.
 *
 * Values are the caller's; what is read of them lies in a `room_t` on the stack, whose `allocated`
 * the caller frees.
 */

#include "_jit_driver.h"
#include <stddef.h>
#include <string.h>
#include <structmember.h>

#define MOST_ATTRIBUTES 5
#define DEVICE_POINTER 3
#define SPREAD 1
#define LARGEST_USUAL_SHARED_BYTES (228 * 1024)

enum kind {
  UNKNOWN,
  POINTER,
  I8,
  I16,
  I32,
  I64,
  U8,
  U16,
  U32,
  U64,
  FP16,
  BF16,
  FP32,
  FP64,
  MAP,
  BYTE_36,
  KINDS
};
enum annotation { CONSTANT, VALUE, TUPLE };

typedef struct {
  int grid[3], cooperative, serial, warps, clusters, shared, oversized;
  unsigned long long stream, function;
} request_t;

/* Values of a call that lie on the stack; more are allocated. */
#define STACK_VALUES 96
/* Room for the values of a call, their parameters, and the addresses of these; `allocated` is NULL
 * while the stack does. */
typedef struct {
  PyObject *values_on_stack[STACK_VALUES], **values;
  uint64_t numbers_on_stack[STACK_VALUES + 2], *numbers;
  void *parameters_on_stack[STACK_VALUES + 2], **parameters, *allocated;
} room_t;

/* -------------------------------------------------------------------------------------- values */

/* Triton 3.7 and later; the numbers stand in what `build_signature_metadata` returns, which only
 * `launch` reads. */
static const struct {
  const char *name;
  unsigned char kind;
} kinds_37[] = {{"i1", I32},        {"i8", I8},     {"i16", I16},   {"i32", I32},  {"i64", I64},
                {"u1", U32},        {"u8", U8},     {"u16", U16},   {"u32", U32},  {"u64", U64},
                {"fp16", FP16},     {"bf16", BF16}, {"fp32", FP32}, {"f32", FP32}, {"fp64", FP64},
                {"nvTmaDesc", MAP}, {NULL, UNKNOWN}};

/* Returns UNKNOWN with an exception for a type that is none. */
static unsigned char kind_of(PyObject *type) {
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

/* Each of these writes one value as the driver takes it; -1 with an exception.  `place` is the
 * number of the argument for the words of an error; -1 for none. */
static int read_pointer(state_t *state, PyObject *value, uint64_t *to, Py_ssize_t place) {
  PyObject *address;
  int status;
  *to = 0;
  if (value == Py_None)
    return 0;
  if (PyLong_Check(value)) {
    *to = PyLong_AsUnsignedLongLong(value);
    return *to == (uint64_t)-1 && PyErr_Occurred() ? -1 : 0;
  }
  address = PyObject_CallMethodNoArgs(value, state->word_data_ptr);
  if (address == NULL && !PyErr_ExceptionMatches(PyExc_Exception))
    return -1; /* an interrupt */
  if (address == NULL || !PyLong_Check(address)) {
    PyErr_SetString(PyExc_TypeError,
                    address == NULL
                        ? "Pointer argument must be either uint64 or have data_ptr method"
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
  status = state->cuda.pointer_attribute(to, DEVICE_POINTER, *to);
  if (status != INVALID_VALUE)
    return check(state, status);
  if (place >= 0)
    PyErr_Format(PyExc_ValueError,
                 "Pointer argument (at %zd) cannot be accessed from Triton (cpu tensor?)", place);
  else
    PyErr_SetString(PyExc_ValueError,
                    "Pointer argument cannot be accessed from Triton (cpu tensor?)");
  return -1;
}

static int read_float(PyObject *value, uint64_t *to, unsigned char kind) {
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

/* ----------------------------------------------------------------------------------- launching */

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

static int call_driver(state_t *state, const request_t *request, void **parameters) {
  attribute_t attributes[MOST_ATTRIBUTES];
  void *function = (void *)(uintptr_t)request->function;
  config_t config = {{(uint32_t)(request->grid[0] * request->clusters), (uint32_t)request->grid[1],
                      (uint32_t)request->grid[2]},
                     {(uint32_t)(32 * request->warps), 1, 1},
                     (uint32_t)request->shared,
                     (void *)(uintptr_t)request->stream,
                     attributes,
                     0};
  int status = SUCCESS;
  if (!((double)request->grid[0] * request->grid[1] * request->grid[2] > 0))
    return 0;
  if (require(state->cuda.launch, "cuLaunchKernelEx") < 0)
    return -1;
  add_attributes(&config, request);
  /* The driver waits when its queue is full, perhaps for a callback that needs the interpreter. */
  Py_BEGIN_ALLOW_THREADS
  if (request->clusters == 16) /* more than every GPU must be able to */
    status = state->cuda.set_function_attribute(function, NON_PORTABLE_CLUSTER, 1);
  if (status == SUCCESS)
    status = state->cuda.launch(&config, function, parameters, NULL);
  Py_END_ALLOW_THREADS
  return check(state, status);
}

static int call_hook(PyObject *hook, PyObject *metadata) {
  PyObject *answer;
  if (hook == Py_None)
    return 0;
  answer = PyObject_CallOneArg(hook, metadata);
  Py_XDECREF(answer);
  return answer == NULL ? -1 : 0;
}

static int make_room(room_t *room, Py_ssize_t count) {
  room->values = room->values_on_stack;
  room->numbers = room->numbers_on_stack;
  room->parameters = room->parameters_on_stack;
  room->allocated = NULL;
  if (count <= STACK_VALUES)
    return 0;
  room->allocated =
      PyMem_Malloc((size_t)(count + 2) * (sizeof(PyObject *) + sizeof(uint64_t) + sizeof(void *)));
  if (room->allocated == NULL) {
    PyErr_NoMemory();
    return -1;
  }
  room->values = room->allocated;
  room->numbers = (uint64_t *)(room->values + count + 2);
  room->parameters = (void **)(room->numbers + count + 2);
  return 0;
}

/* Reads the two scratch buffers behind the values. */
static int read_scratch(state_t *state, room_t *room, Py_ssize_t count, PyObject *global,
                        PyObject *profile, Py_ssize_t place) {
  room->parameters[count] = &room->numbers[count];
  room->parameters[count + 1] = &room->numbers[count + 1];
  return read_pointer(state, global, &room->numbers[count], place) < 0
             ? -1
             : read_pointer(state, profile, &room->numbers[count + 1], place);
}

static int read_value(state_t *state, PyObject *value, unsigned char kind, uint64_t *number,
                      void **parameter) {
  *parameter = number;
  if (kind == POINTER)
    return read_pointer(state, value, number, -1);
  if (kind == MAP)
    return find_map(state, value, parameter);
  return kind >= FP16 ? read_float(value, number, kind) : read_integer(value, number, kind);
}

/* ----------------------------------------- one launch for all signatures: Triton 3.7 and later */

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
  PyTypeObject *type = Py_TYPE(self);
  Py_XDECREF(self->nested);
  type->tp_free((PyObject *)self);
  Py_DECREF(type);
}

static PyType_Slot argument_slots[] = {
    {Py_tp_new, PyType_GenericNew},
    {Py_tp_init, argument_init},
    {Py_tp_dealloc, argument_dealloc},
    {Py_tp_doc, "Says of one argument whether it is a value, a constant or a tuple of these."},
    {0, NULL}};

static PyType_Spec argument_spec = {"triton.backends.nvidia.PyKernelArg", sizeof(argument_t), 0,
                                    Py_TPFLAGS_DEFAULT, argument_slots};

static PyObject *build_signature_metadata(PyObject *module, PyObject *args) {
  (void)module;
  PyObject *signature, *types, *found;
  Py_ssize_t index;
  if (!PyArg_ParseTuple(args, "O", &signature) ||
      (types = PySequence_Fast(signature,
                               "Expected kernel_arg_types to be a sequence or iterable")) == NULL)
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

/* Returns -1 with an exception, for a call with more or fewer values than the signature. */
static int too_few(void) {
  PyErr_SetString(PyExc_TypeError,
                  "a kernel was called with more or fewer values than its signature has");
  return -1;
}

/* Whether an object is a tuple or a list; 0 with an exception.  Only these hold their items for as
 * long as the caller holds them. */
static int is_row(PyObject *object) {
  if (PyTuple_Check(object) || PyList_Check(object))
    return 1;
  PyErr_Format(PyExc_TypeError, "the values of a tuple must be a tuple or a list, not %.50s",
               Py_TYPE(object)->tp_name);
  return 0;
}

/* Writes the values without constants, tuples taken apart; they are the caller's. */
static int flatten(state_t *state, PyObject *annotations, PyObject *given, PyObject **values,
                   Py_ssize_t *used, Py_ssize_t most) {
  Py_ssize_t index;
  if (!is_row(annotations) || !is_row(given))
    return -1;
  if (PySequence_Fast_GET_SIZE(given) < PySequence_Fast_GET_SIZE(annotations))
    return too_few();
  for (index = 0; index < PySequence_Fast_GET_SIZE(annotations); index++) {
    PyObject *mark = PySequence_Fast_GET_ITEM(annotations, index),
             *item = PySequence_Fast_GET_ITEM(given, index);
    if (Py_TYPE(mark) != state->argument_type) {
      PyErr_SetString(PyExc_TypeError, "arg_annotations must hold PyKernelArg");
      return -1;
    }
    if (((argument_t *)mark)->type == TUPLE) {
      if (flatten(state, ((argument_t *)mark)->nested, item, values, used, most) < 0)
        return -1;
    } else if (((argument_t *)mark)->type == VALUE) {
      if (*used == most)
        return too_few();
      values[(*used)++] = item;
    }
  }
  return 0;
}

static int read_and_launch(state_t *state, request_t *request, room_t *room,
                           const Py_buffer *signature, PyObject *annotations, PyObject *given,
                           PyObject *global, PyObject *profile) {
  const unsigned char *kinds = signature->buf;
  Py_ssize_t index, used = 0, count = signature->len;
  if (flatten(state, annotations, given, room->values, &used, count) < 0)
    return -1;
  if (used != count)
    return too_few();
  for (index = 0; index < count; index++)
    if (read_value(state, room->values[index], kinds[index], &room->numbers[index],
                   &room->parameters[index]) < 0)
      return -1;
  return read_scratch(state, room, count, global, profile, -1) < 0
             ? -1
             : call_driver(state, request, room->parameters);
}

static PyObject *launch_any(state_t *state, PyObject *args, int oversized) {
  request_t request = {.oversized = oversized};
  PyObject *metadata, *enter, *leave, *global, *profile, *annotations, *given;
  Py_buffer signature;
  room_t room;
  int done = -1;
  if (ensure_first_context(state) < 0 ||
      !PyArg_ParseTuple(args, "iiiKKpp(iii)OOOOOOy*O", &request.grid[0], &request.grid[1],
                        &request.grid[2], &request.stream, &request.function, &request.cooperative,
                        &request.serial, &request.warps, &request.clusters, &request.shared,
                        &metadata, &enter, &leave, &global, &profile, &annotations, &signature,
                        &given))
    return NULL;
  if (make_room(&room, signature.len) == 0) {
    if (call_hook(enter, metadata) == 0 &&
        read_and_launch(state, &request, &room, &signature, annotations, given, global, profile) ==
            0)
      done = call_hook(leave, metadata);
    PyMem_Free(room.allocated);
  }
  PyBuffer_Release(&signature);
  if (done < 0)
    return NULL;
  Py_RETURN_NONE;
}

static PyObject *launch(PyObject *module, PyObject *args) {
  return launch_any(PyModule_GetState(module), args, 0);
}
static PyObject *launch_oversized(PyObject *module, PyObject *args) {
  return launch_any(PyModule_GetState(module), args, 1);
}

/* Of a call of Launcher: three for the grid, stream, function, two switches, two scratch buffers,
 * two of metadata, two hooks. */
#define LEADING 13

/* ------------------------------------------------------- launches of one signature: Triton 3.6 */

/* One argument: a value with its kind, a constant, or a tuple of the `count` nodes that follow it,
 * their own ones included. */
typedef struct {
  unsigned char annotation, kind;
  Py_ssize_t count;
} node_t;

typedef struct {
  PyObject_HEAD
  state_t *state;
  vectorcallfunc vectorcall;
  Py_ssize_t node_count, value_count, argument_count;
  node_t *nodes;
  unsigned char *kinds;
  Py_ssize_t *places; /* of each value among arguments, constants included */
} launcher_t;

static unsigned char kind_36(PyObject *type) {
  const char *name = PyUnicode_AsUTF8(type);
  if (name == NULL)
    return UNKNOWN;
  if (strcmp(name, "i1") == 0 || strcmp(name, "i8") == 0)
    return BYTE_36;
  return strcmp(name, "u1") == 0 ? U8 : kind_of(type);
}

static Py_ssize_t count_nodes(PyObject *signature) {
  Py_ssize_t index, count = PyTuple_GET_SIZE(signature);
  for (index = 0; index < PyTuple_GET_SIZE(signature); index++)
    if (PyTuple_Check(PyTuple_GET_ITEM(signature, index)))
      count += count_nodes(PyTuple_GET_ITEM(signature, index));
  return count;
}

static int read_signature(launcher_t *self, PyObject *signature, Py_ssize_t *place) {
  Py_ssize_t index, count = PyTuple_GET_SIZE(signature);
  for (index = 0; index < count; index++) {
    PyObject *type = PyTuple_GET_ITEM(signature, index);
    node_t *node = &self->nodes[self->node_count++];
    if (PyTuple_Check(type)) {
      node->annotation = TUPLE;
      node->count = PyTuple_GET_SIZE(type);
      if (read_signature(self, type, place) < 0)
        return -1;
      continue;
    }
    node->annotation =
        PyUnicode_Check(type) && PyUnicode_CompareWithASCIIString(type, "constexpr") == 0 ? CONSTANT
                                                                                          : VALUE;
    if (node->annotation == VALUE) {
      if ((node->kind = kind_36(type)) == UNKNOWN)
        return -1;
      self->places[self->value_count] = *place;
      self->kinds[self->value_count++] = node->kind;
    }
    (*place)++;
  }
  return 0;
}

/* Writes the values of `count` arguments; moves `node` behind theirs. */
static int take_apart(const node_t **node, PyObject *const *given, Py_ssize_t count,
                      PyObject ***values) {
  Py_ssize_t index;
  for (index = 0; index < count; index++) {
    const node_t *present = (*node)++;
    if (present->annotation == VALUE) {
      *(*values)++ = given[index];
    } else if (present->annotation == TUPLE) {
      PyObject *item = given[index];
      if (!is_row(item))
        return -1;
      if (PySequence_Fast_GET_SIZE(item) != present->count)
        return too_few();
      if (take_apart(node, PySequence_Fast_ITEMS(item), present->count, values) < 0)
        return -1;
    }
  }
  return 0;
}

/* -------------------------------------------------------------------------------------- values */

/* As `PyArg_Parse` reads them for Triton 3.6: signed ones are compared with their range, unsigned
 * ones wrap. */
static int check_range(long number, long least, long most, const char *what) {
  if (number == -1 && PyErr_Occurred())
    return -1;
  if (number >= least && number <= most)
    return 0;
  PyErr_Format(PyExc_OverflowError, "%s is %s", what,
               number < least ? "less than minimum" : "greater than maximum");
  return -1;
}

static int read_integer_36(PyObject *value, uint64_t *to, unsigned char kind) {
  switch (kind) {
  case I64:
    *to = (uint64_t)PyLong_AsLongLong(value);
    break;
  case U64:
    if (!PyLong_Check(value)) {
      PyErr_Format(PyExc_TypeError, "argument must be int, not %.50s", Py_TYPE(value)->tp_name);
      return -1;
    }
    *to = PyLong_AsUnsignedLongLongMask(value);
    break;
  case BYTE_36:
    *to = (uint64_t)PyLong_AsLong(value);
    return check_range((long)*to, 0, UINT8_MAX, "unsigned byte integer");
  case I16:
    *to = (uint64_t)PyLong_AsLong(value);
    return check_range((long)*to, INT16_MIN, INT16_MAX, "signed short integer");
  case I32:
    *to = (uint64_t)PyLong_AsLong(value);
    return check_range((long)*to, INT32_MIN, INT32_MAX, "signed integer");
  default:
    *to = PyLong_AsUnsignedLongMask(value);
  }
  return *to == (uint64_t)-1 && PyErr_Occurred() ? -1 : 0;
}

static int is_pointer(unsigned char kind) { return kind == POINTER || kind == MAP; }

/* Numbers are read before the hook is called, pointers after it. */
static int read_numbers(launcher_t *self, room_t *room) {
  Py_ssize_t index;
  for (index = 0; index < self->value_count; index++) {
    unsigned char kind = self->kinds[index];
    room->parameters[index] = &room->numbers[index];
    if (!is_pointer(kind) &&
        (kind >= FP16 && kind <= FP64
             ? read_float(room->values[index], &room->numbers[index], kind)
             : read_integer_36(room->values[index], &room->numbers[index], kind)) < 0)
      return -1;
  }
  return 0;
}

static int read_pointers(launcher_t *self, room_t *room) {
  Py_ssize_t index;
  for (index = 0; index < self->value_count; index++) {
    if (self->kinds[index] == POINTER &&
        read_pointer(self->state, room->values[index], &room->numbers[index], self->places[index]) <
            0)
      return -1;
    if (self->kinds[index] == MAP &&
        find_map(self->state, room->values[index], &room->parameters[index]) < 0)
      return -1;
  }
  return 0;
}

static int read_int(PyObject *value, int *to) {
  long number = PyLong_AsLong(value);
  *to = (int)number;
  return check_range(number, INT32_MIN, INT32_MAX, "signed integer");
}

static int read_handle(PyObject *value, unsigned long long *to) {
  if (!PyLong_Check(value)) {
    PyErr_Format(PyExc_TypeError, "a stream and a function are int, not %.50s",
                 Py_TYPE(value)->tp_name);
    return -1;
  }
  *to = PyLong_AsUnsignedLongLongMask(value);
  return *to == (unsigned long long)-1 && PyErr_Occurred() ? -1 : 0;
}

/* -------------------------------------------------------------------------------------- launch */

static int read_request(request_t *request, PyObject *const *args) {
  int axis;
  for (axis = 0; axis < 3; axis++)
    if (read_int(args[axis], &request->grid[axis]) < 0)
      return -1;
  if (read_handle(args[3], &request->stream) < 0 || read_handle(args[4], &request->function) < 0 ||
      (request->cooperative = PyObject_IsTrue(args[5])) < 0 ||
      (request->serial = PyObject_IsTrue(args[6])) < 0)
    return -1;
  if (!PyTuple_Check(args[9])) {
    PyErr_SetString(PyExc_TypeError, "kernel_metadata must be a tuple");
    return -1;
  }
  return PyArg_ParseTuple(args[9], "iii", &request->warps, &request->clusters, &request->shared)
             ? 0
             : -1;
}

static int launch_36(launcher_t *self, PyObject *const *args, room_t *room) {
  const node_t *node = self->nodes;
  PyObject **values = room->values;
  request_t request = {.oversized = 0};
  if (read_request(&request, args) < 0 ||
      take_apart(&node, args + LEADING, self->argument_count, &values) < 0 ||
      read_numbers(self, room) < 0 || call_hook(args[11], args[10]) < 0 ||
      read_scratch(self->state, room, self->value_count, args[7], args[8], -1) < 0 ||
      read_pointers(self, room) < 0 || call_driver(self->state, &request, room->parameters) < 0)
    return -1;
  return call_hook(args[12], args[10]);
}

static PyObject *call_launcher(PyObject *object, PyObject *const *args, size_t flagged,
                               PyObject *names) {
  launcher_t *self = (launcher_t *)object;
  room_t room;
  int done;
  if (PyVectorcall_NARGS(flagged) != LEADING + self->argument_count ||
      (names != NULL && PyTuple_GET_SIZE(names) > 0)) {
    PyErr_Format(PyExc_TypeError, "function takes exactly %zd arguments (%zd given)",
                 LEADING + self->argument_count, PyVectorcall_NARGS(flagged));
    return NULL;
  }
  if (ensure_first_context(self->state) < 0 || make_room(&room, self->value_count) < 0)
    return NULL;
  done = launch_36(self, args, &room);
  PyMem_Free(room.allocated);
  if (done < 0)
    return NULL;
  Py_RETURN_NONE;
}

static PyObject *launcher_new(PyTypeObject *type, PyObject *args, PyObject *keywords) {
  (void)keywords;
  PyObject *signature;
  launcher_t *self;
  Py_ssize_t count, place = 0;
  if (!PyArg_ParseTuple(args, "O!", &PyTuple_Type, &signature) ||
      (self = (launcher_t *)type->tp_alloc(type, 0)) == NULL)
    return NULL;
  count = count_nodes(signature) + 1;
  self->state = PyType_GetModuleState(type);
  self->vectorcall = call_launcher;
  self->argument_count = PyTuple_GET_SIZE(signature);
  self->nodes = PyMem_Calloc((size_t)count, sizeof(node_t));
  self->kinds = PyMem_Calloc((size_t)count, 1);
  self->places = PyMem_Calloc((size_t)count, sizeof(Py_ssize_t));
  if (self->nodes == NULL || self->kinds == NULL || self->places == NULL)
    PyErr_NoMemory();
  else if (read_signature(self, signature, &place) == 0)
    return (PyObject *)self;
  Py_DECREF(self);
  return NULL;
}

static void launcher_dealloc(launcher_t *self) {
  PyTypeObject *type = Py_TYPE(self);
  PyMem_Free(self->nodes);
  PyMem_Free(self->kinds);
  PyMem_Free(self->places);
  type->tp_free(self);
  Py_DECREF(type);
}

static PyMemberDef launcher_members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(launcher_t, vectorcall), READONLY, NULL},
    {NULL, 0, 0, 0, NULL}};

static PyType_Slot launcher_slots[] = {
    {Py_tp_new, launcher_new},
    {Py_tp_dealloc, launcher_dealloc},
    {Py_tp_call, PyVectorcall_Call},
    {Py_tp_members, launcher_members},
    {Py_tp_doc, "Launches kernels of one signature, as the function `launch` of Triton 3.6."},
    {0, NULL}};

static PyType_Spec launcher_spec = {
    "bundler.runtime.launch.jit._jit_driver.Launcher", sizeof(launcher_t), 0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL, launcher_slots};

/* ----------------------------------------------------------------- what is added to the module */

static PyMethodDef methods[] = {
    {"build_signature_metadata", build_signature_metadata, METH_VARARGS,
     "Return the kinds of types, for `launch`."},
    {"launch", launch, METH_VARARGS, "Launch a kernel of any signature."},
    {"launch_oversized", launch_oversized, METH_VARARGS, "The same, with oversized shared memory."},
    {NULL, NULL, 0, NULL}};

int add_launch(PyObject *module) {
  state_t *state = PyModule_GetState(module);
  PyObject *launcher = PyType_FromModuleAndSpec(module, &launcher_spec, NULL);
  int added = launcher == NULL ? -1 : PyModule_AddObjectRef(module, "Launcher", launcher);
  Py_XDECREF(launcher);
  state->word_data_ptr = PyUnicode_InternFromString("data_ptr");
  state->argument_type = (PyTypeObject *)PyType_FromModuleAndSpec(module, &argument_spec, NULL);
  if (added < 0 || state->word_data_ptr == NULL || state->argument_type == NULL ||
      PyModule_AddFunctions(module, methods) < 0 ||
      PyModule_AddObjectRef(module, "PyKernelArg", (PyObject *)state->argument_type) < 0 ||
      PyModule_AddIntConstant(module, "ARG_CONSTEXPR", CONSTANT) < 0 ||
      PyModule_AddIntConstant(module, "ARG_KERNEL", VALUE) < 0)
    return -1;
  return PyModule_AddIntConstant(module, "ARG_TUPLE", TUPLE);
}

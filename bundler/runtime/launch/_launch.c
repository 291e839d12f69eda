/* SPDX-License-Identifier: Apache-2.0
 *
 * The extension _launch: kernels are launched without Python between a call and the driver.
 *
 * _launch_state.h    what the module has
 * _tensors.h         reading tensors
 * _packing.h         one value into a parameter buffer
 * _addresses.h       where tensors lie
 * _steps.h           Step: a step of a program
 * _launcher.h        Launcher: the values of a call, and the call of the driver
 * _call_key.h        the bytes that tell calls apart
 * _profiler_hooks.h  whether Triton calls anything around a launch
 * _dispatcher.h      Dispatcher: the launcher for a call
 * _gridded.h         Gridded: `kernel[grid]`
 *
 * Here are the module, and what happens to a device binary before there is a launcher:
 * `find_section` reads a section of it, `load_image` lets a driver load it.
 */

#include "_launch_state.h"
#include "../../format/_elf.h"
#include "_addresses.h"
#include "_dispatcher.h"
#include "_gridded.h"
#include "_steps.h"

/* ----------------------------------------------------------------------------- device binaries */

/* Returns the bytes of the last section of a name, None where there is none, NotImplemented for
 * what is not as linkers write it. */
static PyObject *find_section(PyObject *module, PyObject *args) {
  Py_buffer image, name;
  elf_bytes_t found;
  int answer;
  (void)module;
  if (!PyArg_ParseTuple(args, "y*y*", &image, &name))
    return NULL;
  answer = elf_section(image.buf, (uint64_t)image.len, name.buf, (uint64_t)name.len, &found);
  PyBuffer_Release(&name);
  PyObject *bytes =
      answer < 0    ? Py_NewRef(Py_NotImplemented)
      : answer == 0 ? Py_NewRef(Py_None)
                    : PyBytes_FromStringAndSize((const char *)found.data, (Py_ssize_t)found.size);
  PyBuffer_Release(&image);
  return bytes;
}

/* Loads a binary and finds its kernel, where the context for the device is current: five calls of
 * the driver in one of Python's. Takes (cuCtxGetCurrent, cuCtxGetDevice, cuModuleLoadData,
 * cuModuleGetFunction, cuFuncGetAttribute), the image, the entry, the device and an attribute;
 * returns None where another context is current, else (failed step, its status, context, module,
 * function, the attribute's value). */
static PyObject *load_image(PyObject *module, PyObject *args) {
  unsigned long long calls[5];
  const char *image, *entry;
  Py_ssize_t image_bytes, entry_bytes;
  int device, attribute, here = -1, step = 0, status = 0, value = 0;
  (void)module;
  void *context = NULL, *loaded = NULL, *function = NULL;
  if (!PyArg_ParseTuple(args, "(KKKKK)y#y#ii", &calls[0], &calls[1], &calls[2], &calls[3],
                        &calls[4], &image, &image_bytes, &entry, &entry_bytes, &device, &attribute))
    return NULL;
  if (((int (*)(void **))(uintptr_t)calls[0])(&context) != 0 || context == NULL ||
      ((int (*)(int *))(uintptr_t)calls[1])(&here) != 0 || here != device)
    Py_RETURN_NONE;
  Py_BEGIN_ALLOW_THREADS
  if ((status = ((int (*)(void **, const void *))(uintptr_t)calls[2])(&loaded, image)) != 0)
    step = 1;
  else if ((status = ((int (*)(void **, void *, const char *))(uintptr_t)calls[3])(
                &function, loaded, entry)) != 0)
    step = 2;
  else if ((status = ((int (*)(int *, int, void *))(uintptr_t)calls[4])(&value, attribute,
                                                                        function)) != 0)
    step = 3;
  Py_END_ALLOW_THREADS
  return Py_BuildValue("iiKKKi", step, status, (unsigned long long)(uintptr_t)context,
                       (unsigned long long)(uintptr_t)loaded,
                       (unsigned long long)(uintptr_t)function, value);
}

/* ---------------------------------------------------------------------------------- the module */

static int add_types(PyObject *module, state_t *state) {
  struct {
    PyType_Spec *spec;
    PyTypeObject **type;
  } types[] = {{&launcher_spec, &state->launcher_type},
               {&dispatcher_spec, &state->dispatcher_type},
               {&gridded_spec, &state->gridded_type},
               {&bound_spec, &state->bound_type},
               {&step_spec, &state->step_type}};
  for (size_t index = 0; index < sizeof(types) / sizeof(*types); index++) {
    *types[index].type = (PyTypeObject *)PyType_FromModuleAndSpec(module, types[index].spec, NULL);
    if (*types[index].type == NULL || PyModule_AddType(module, *types[index].type) < 0)
      return -1;
  }
  return 0;
}

static int set_up(PyObject *module) {
  state_t *state = PyModule_GetState(module);
  const uint16_t one = 1;
  if (*(const unsigned char *)&one != 1) {
    PyErr_SetString(PyExc_ImportError, "the compiled launcher packs for little-endian machines");
    return -1;
  }
  state->word_again = PyUnicode_InternFromString("again");
  state->word_data_ptr = PyUnicode_InternFromString("data_ptr");
  state->word_device = PyUnicode_InternFromString("device");
  state->word_dtype = PyUnicode_InternFromString("dtype");
  state->word_get_device = PyUnicode_InternFromString("get_device");
  state->word_stream = PyUnicode_InternFromString("stream");
  if (!state->word_again || !state->word_data_ptr || !state->word_device || !state->word_dtype ||
      !state->word_get_device || !state->word_stream)
    return -1;
  return add_types(module, state);
}

static int visit_state(PyObject *module, visitproc visit, void *arg) {
  state_t *state = PyModule_GetState(module);
  Py_VISIT(state->launcher_type);
  Py_VISIT(state->dispatcher_type);
  Py_VISIT(state->gridded_type);
  Py_VISIT(state->bound_type);
  Py_VISIT(state->step_type);
  Py_VISIT(state->torch.classes);
  Py_VISIT(state->torch.method);
  Py_VISIT(state->ask_now);
  Py_VISIT(state->hooks.type);
  Py_VISIT(state->hooks.chain);
  Py_VISIT(state->hooks.hooks[0]);
  Py_VISIT(state->hooks.hooks[1]);
  for (int row = 0; row < KNOWN_CLASSES; row++) {
    Py_VISIT(state->classes[row].type);
    Py_VISIT(state->classes[row].method);
  }
  return 0;
}

/* The words stay: no cycle goes through them, and a launch at the very end may still need one. */
static int clear_state(PyObject *module) {
  state_t *state = PyModule_GetState(module);
  Py_CLEAR(state->launcher_type);
  Py_CLEAR(state->dispatcher_type);
  Py_CLEAR(state->gridded_type);
  Py_CLEAR(state->bound_type);
  Py_CLEAR(state->step_type);
  state->torch.address = NULL;
  Py_CLEAR(state->torch.classes);
  Py_CLEAR(state->torch.method);
  state->launches_left = 0;
  Py_CLEAR(state->ask_now);
  state->hooks.version = 0;
  Py_CLEAR(state->hooks.type);
  Py_CLEAR(state->hooks.chain);
  Py_CLEAR(state->hooks.hooks[0]);
  Py_CLEAR(state->hooks.hooks[1]);
  for (int row = 0; row < KNOWN_CLASSES; row++) {
    state->classes[row].version = 0;
    Py_CLEAR(state->classes[row].type);
    Py_CLEAR(state->classes[row].method);
  }
  return 0;
}

static void free_state(void *module) {
  state_t *state = PyModule_GetState(module);
  clear_state(module);
  Py_CLEAR(state->word_again);
  Py_CLEAR(state->word_data_ptr);
  Py_CLEAR(state->word_device);
  Py_CLEAR(state->word_dtype);
  Py_CLEAR(state->word_get_device);
  Py_CLEAR(state->word_stream);
  if (state->spare != NULL)
    PyObject_GC_Del(state->spare);
  state->spare = NULL;
}

static PyMethodDef functions[] = {
    {"find_section", find_section, METH_VARARGS,
     "Return a section of a device binary that is whole."},
    {"load_image", load_image, METH_VARARGS,
     "Load a binary where its context is current, and find its kernel."},
    {"misplaced", (PyCFunction)(void (*)(void))misplaced, METH_FASTCALL,
     "Return the places of tensors that are not aligned."},
    {"is_apart", (PyCFunction)(void (*)(void))is_apart, METH_FASTCALL,
     "Whether a tensor is aligned, and begins where no other does."},
    {"run_steps", (PyCFunction)(void (*)(void))run_steps, METH_FASTCALL,
     "Take the steps of a program, which are given its values."},
    {NULL, NULL, 0, NULL}};

static PyModuleDef_Slot module_slots[] = {{Py_mod_exec, set_up}, {0, NULL}};

static struct PyModuleDef launch_module = {
    PyModuleDef_HEAD_INIT, "_launch",   "The compiled launcher and dispatcher.",
    sizeof(state_t),       functions,   module_slots,
    visit_state,           clear_state, free_state};

PyMODINIT_FUNC PyInit__launch(void) { return PyModuleDef_Init(&launch_module); }

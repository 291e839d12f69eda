/* SPDX-License-Identifier: Apache-2.0
 *
 * What the sources of the extension _jit_driver share, and no other file includes: the driver's
 * definitions and functions, the state of the module, and what each file offers the others.
 *
 * _jit_driver.c       opens the driver's library; the functions of `cuda_utils` for devices and
 * binaries; the module _jit_tensor_maps.c  the functions of `cuda_utils` for tensor maps
 * _jit_launch.c       the values of a call and the call of the driver: `launch` of Triton 3.7 and
 * later, Launcher for 3.6
 *
 * The state belongs to the module, one for each interpreter; Python fills in the driver's functions
 * by `open` before it calls any other, and nothing changes afterwards, so that they are called
 * without a lock, the interpreter's released.
 */

#ifndef BUNDLER_JIT_DRIVER_H
#define BUNDLER_JIT_DRIVER_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>

/* The names below are known inside the extension alone, so that a library of the process cannot
 * take their place. */
#pragma GCC visibility push(hidden)

/* ---------------------------------------------------------------- the driver's own definitions */

#define SUCCESS 0
#define INVALID_VALUE 1

enum device_attribute {
  WARP_SIZE = 10,
  REGISTERS = 12,
  CLOCK_RATE = 13,
  PROCESSORS = 16,
  MEMORY_CLOCK_RATE = 36,
  BUS_WIDTH = 37,
  CAPABILITY_MAJOR = 75,
  CAPABILITY_MINOR = 76,
  SHARED_OF_PROCESSOR = 81,
  SHARED_OPTIN = 97,
  SHARED_OVERSIZED = 150
};
enum function_attribute {
  MOST_THREADS = 0,
  SHARED_STATIC = 1,
  LOCAL_BYTES = 3,
  FUNCTION_REGISTERS = 4,
  SHARED_DYNAMIC = 8,
  NON_PORTABLE_CLUSTER = 14,
  SHARED_MODE = 17
};
enum launch_attribute {
  COOPERATIVE = 2,
  CLUSTER_DIMENSION = 4,
  CLUSTER_SCHEDULING = 5,
  PROGRAMMATIC_SERIALIZATION = 6,
  LAUNCH_SHARED_MODE = 18
};
#define ALLOW_OVERSIZED 3

typedef struct {
  uint32_t id, padding;
  uint32_t value[16];
} attribute_t;
typedef struct {
  uint32_t grid[3], block[3], shared;
  void *stream;
  attribute_t *attributes;
  uint32_t count;
} config_t;

/* Functions of the driver; one that an old driver lacks is NULL. */
typedef struct {
  int (*get_error)(int, const char **);
  int (*get_context)(void **);
  int (*set_context)(void *);
  int (*get_device)(int *, int);
  int (*retain_context)(void **, int);
  int (*device_attribute)(int *, int, int);
  int (*load_module)(void **, const void *);
  int (*unload_module)(void *);
  int (*find_function)(void **, void *, const char *);
  int (*function_attribute)(int *, int, void *);
  int (*set_function_attribute)(void *, int, int);
  int (*set_function_cache)(void *, int);
  int (*get_limit)(size_t *, int);
  int (*set_limit)(int, size_t);
  int (*driver_version)(int *);
  int (*pointer_attribute)(void *, int, uint64_t);
  int (*context_device)(int *);
  int (*is_capturing)(void *, int *);
  int (*most_clusters)(int *, void *, const config_t *);
  int (*encode_tiled)(void *, int, uint32_t, void *, const uint64_t *, const uint64_t *,
                      const uint32_t *, const uint32_t *, int, int, int, int);
  int (*encode_im2col)(void *, int, uint32_t, void *, const uint64_t *, const uint64_t *,
                       const int *, const int *, uint32_t, uint32_t, const uint32_t *, int, int,
                       int, int);
  int (*launch)(const config_t *, void *, void **, void **);
} driver_t;

typedef struct {
  driver_t cuda;
  PyTypeObject *map_type, *argument_type; /* PyCUtensorMap, PyKernelArg */
  PyObject *word_data_ptr;
} state_t;

/* ---------------------------------------------------------- _jit_driver.c: errors and contexts */

/* Returns 0 for success, -1 with the exception that Triton raises. */
int check(state_t *state, int status);
/* Returns 0 where the driver has the function, else -1 with an exception. */
int require(const void *function, const char *symbol);
/* The context of device 0 becomes current where none is; -1 with an exception. */
int ensure_first_context(state_t *state);

/* -------------------------------------------------------------------------- _jit_tensor_maps.c */

/* Writes where the map of a PyCUtensorMap lies; -1 with an exception.  The map stays where it is:
 * the driver copies parameters before it returns, and the caller holds the object. */
int find_map(state_t *state, PyObject *value, void **parameter);

/* ------------------------------------- what each file adds to the module; -1 with an exception */

int add_tensor_maps(PyObject *module);
int add_launch(PyObject *module);

#pragma GCC visibility pop

#endif

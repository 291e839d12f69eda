/* SPDX-License-Identifier: Apache-2.0
 *
 * Stands in for libcuda and libamdhip64: two devices, memory that is never touched, and a record of what was asked.
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define DEVICES 2
#define MAX_PARAMETERS 600

/* What the last launch was; tests read it. */
struct launch {
  uint32_t grid[3], block[3], shared, attribute_count;
  uint64_t stream, function, context;
  unsigned char attributes[4 * 72];
  unsigned char parameters[16384];
};
struct launch fake_last;
/* Launches whose first two parameters, of eight bytes each, differed: a sign of two calls in one buffer. */
int fake_torn;
int fake_launches, fake_loaded, fake_unloaded, fake_live_scratch;
uint64_t fake_scratch_bytes, fake_static_shared, fake_max_threads = 1024;
/* The sizes of the parameters of the kernel under test, and where they go in `parameters`. */
int fake_parameter_count;
/* Memory of a pool is the host's.  What is in use: allocations, pinned memory, streams, events, pools. */
int fake_in_use[5];
uint32_t fake_parameter_sizes[MAX_PARAMETERS], fake_parameter_offsets[MAX_PARAMETERS];
/* The next call of this name fails so. */
char fake_failing[64];
int fake_status;
/* Every call, one a line. */
char fake_calls[1 << 16];

static _Thread_local uint64_t stack[8];
static _Thread_local int depth, device;
#define CURRENT (depth ? stack[depth - 1] : 0)
#define PRIMARY(d) (0xC0 + (uint64_t)(d))

static int call(const char *name) {
  size_t length = strlen(fake_calls);
  if (length + strlen(name) + 2 < sizeof fake_calls)
    sprintf(fake_calls + length, "%s\n", name);
  if (strcmp(name, fake_failing) == 0) {
    fake_failing[0] = 0;
    return fake_status;
  }
  return 0;
}
#define CALL(name)                                                                                                     \
  do {                                                                                                                 \
    int status = call(name);                                                                                           \
    if (status)                                                                                                        \
      return status;                                                                                                   \
  } while (0)

static void keep(void **parameters) {
  int index;
  memset(fake_last.parameters, 0, sizeof fake_last.parameters);
  for (index = 0; index < fake_parameter_count; index++)
    memcpy(fake_last.parameters + fake_parameter_offsets[index], parameters[index], fake_parameter_sizes[index]);
  if (fake_parameter_count > 1 && memcmp(parameters[0], parameters[1], 8) != 0)
    __atomic_add_fetch(&fake_torn, 1, __ATOMIC_SEQ_CST);
  __atomic_add_fetch(&fake_launches, 1, __ATOMIC_SEQ_CST);
}

static int load(void **module, const char *image) {
  static uint64_t next = 0x1000;
  if (strncmp(image, "BAD", 3) == 0)
    return 200;
  if (strncmp(image, "OTHER", 5) == 0)
    return 209;
  *module = (void *)(next += 0x10);
  fake_loaded++;
  return 0;
}

static int function(void **found, void *module, const char *name) {
  if (strcmp(name, "missing") == 0)
    return 500;
  *found = (void *)((uint64_t)module + 1);
  return 0;
}

static int launch(void *f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared,
                  void *stream, void **parameters) {
  struct launch found = {{gx, gy, gz}, {bx, by, bz}, shared, 0, (uint64_t)stream, (uint64_t)f, CURRENT, {0}, {0}};
  fake_last = found;
  keep(parameters);
  return 0;
}

struct config {
  unsigned grid[3], block[3], shared;
  void *stream;
  unsigned char *attributes;
  unsigned count;
};

static int launch_extended(const struct config *c, void *f, void **parameters) {
  launch(f, c->grid[0], c->grid[1], c->grid[2], c->block[0], c->block[1], c->block[2], c->shared, c->stream, parameters);
  fake_last.attribute_count = c->count;
  if (c->count)
    memcpy(fake_last.attributes, c->attributes, 72 * c->count);
  return 0;
}

static int allocate(uint64_t *address, size_t bytes) {
  *address = 0xABC100;
  fake_scratch_bytes = bytes;
  fake_live_scratch++;
  return 0;
}

/* Gives back scratch memory, which is one address for all, or memory of a pool. */
static int freed(uint64_t address) {
  if (address == 0xABC100) {
    fake_live_scratch--;
    return 0;
  }
  free((void *)address);
  fake_in_use[0]--;
  return 0;
}

/* ------------------------------------------------------------------------------------------------------------- CUDA */

int cuInit(unsigned flags) { CALL("cuInit"); return 0; }
int cuDriverGetVersion(int *version) { *version = 13000; return 0; }
int cuGetErrorName(int status, const char **name) { *name = "CUDA_ERROR_OF_A_TEST"; return 0; }
int cuGetErrorString(int status, const char **text) { *text = "as the test wished"; return 0; }
int cuDeviceGetCount(int *count) { CALL("cuDeviceGetCount"); *count = DEVICES; return 0; }
int cuDeviceGet(int *found, int index) { *found = index; return 0; }
int cuDeviceGetAttribute(int *value, int attribute, int index) {
  if (index < 0 || index >= DEVICES)
    return 101;
  *value = attribute == 1 ? 1024 : attribute == 10 ? 32 : attribute == 16 ? 132 : attribute == 75 ? 9
           : attribute == 76 ? 0 : attribute == 95 ? 1 : attribute == 97 ? 232448 : -1;
  return 0;
}
int cuDevicePrimaryCtxRetain(void **context, int index) {
  CALL("cuDevicePrimaryCtxRetain");
  *context = (void *)PRIMARY(index);
  return 0;
}
int cuCtxGetCurrent(void **context) { *context = (void *)CURRENT; return 0; }
int cuCtxSetCurrent(void *context) {
  CALL("cuCtxSetCurrent");
  depth = 1;
  stack[0] = (uint64_t)context;
  return 0;
}
int cuCtxGetDevice(int *index) {
  if (!CURRENT)
    return 201;
  *index = (int)(CURRENT - PRIMARY(0));
  return 0;
}
int cuCtxPushCurrent_v2(void *context) {
  CALL("cuCtxPushCurrent");
  stack[depth++] = (uint64_t)context;
  return 0;
}
int cuCtxPopCurrent_v2(void **context) {
  CALL("cuCtxPopCurrent");
  *context = (void *)stack[--depth];
  return 0;
}
int cuModuleLoadData(void **module, const char *image) { CALL("cuModuleLoadData"); return load(module, image); }
int cuModuleUnload(void *module) { CALL("cuModuleUnload"); fake_unloaded++; return 0; }
int cuModuleGetFunction(void **found, void *module, const char *name) {
  CALL("cuModuleGetFunction");
  return function(found, module, name);
}
int cuFuncGetAttribute(int *value, int attribute, void *f) {
  *value = attribute == 0 ? (int)fake_max_threads : (int)fake_static_shared;
  return 0;
}
int cuFuncSetAttribute(void *f, int attribute, int value) {
  char words[64];
  sprintf(words, "cuFuncSetAttribute %d %d", attribute, value);
  CALL(words);
  return 0;
}
int cuFuncSetCacheConfig(void *f, int config) { CALL("cuFuncSetCacheConfig"); return 0; }
/* Addresses from 0xD00000 belong to device 0, from 0xE00000 to device 1, from 0xF00000 to pinned host memory. */
int cuPointerGetAttribute(void *value, int attribute, uint64_t address) {
  uint64_t region = address >> 20;
  if (region < 0xD || region > 0xF || !CURRENT)
    return 1;
  *(int *)value = attribute == 2 ? (region == 0xF ? 1 : 2) : attribute == 8 ? 0 : (int)(region - 0xD);
  return 0;
}
int cuMemAllocAsync(uint64_t *address, size_t bytes, void *stream) {
  CALL("cuMemAllocAsync");
  return allocate(address, bytes);
}
int cuMemFreeAsync(uint64_t address, void *stream) { CALL("cuMemFreeAsync"); return freed(address); }
/* Writes its arguments where the map would be, so that a test can see them. */
int cuTensorMapEncodeTiled(uint64_t *map, int type, unsigned rank, uint64_t address, uint64_t *sizes, uint64_t *strides,
                           uint32_t *box, uint32_t *steps, int interleave, int swizzle, int promotion, int fill) {
  unsigned index;
  CALL("cuTensorMapEncodeTiled");
  if ((uintptr_t)map % 64 || address % 16)
    return 1;
  map[0] = address;
  map[1] = ~(uint64_t)0;
  map[2] = (uint64_t)type << 32 | (uint64_t)swizzle << 16 | (uint64_t)fill << 8 | rank;
  for (index = 0; index < rank; index++)
    map[3 + index] = sizes[index] << 32 | box[index];
  for (index = 0; index + 1 < rank; index++)
    map[8 + index] = strides[index];
  return 0;
}
int cuLaunchKernel(void *f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared,
                   void *stream, void **parameters, void **extra) {
  CALL("cuLaunchKernel");
  return CURRENT >= PRIMARY(0) ? launch(f, gx, gy, gz, bx, by, bz, shared, stream, parameters) : 201;
}
int cuLaunchKernelEx(const struct config *config, void *f, void **parameters, void **extra) {
  CALL("cuLaunchKernelEx");
  return CURRENT >= PRIMARY(0) ? launch_extended(config, f, parameters) : 201;
}

/* -------------------------------------------------------------------------------------------------------------- HIP */

struct pointer_attributes {
  int type, device;
  void *device_pointer, *host_pointer;
  int managed;
  unsigned flags;
};

int hipInit(unsigned flags) { CALL("hipInit"); return 0; }
int hipGetLastError(void) { CALL("hipGetLastError"); return 0; }
const char *hipGetErrorString(int status) { return "as the test wished"; }
int hipGetDeviceCount(int *count) { CALL("hipGetDeviceCount"); *count = DEVICES; return 0; }
int hipGetDevice(int *index) { *index = device; return 0; }
int hipSetDevice(int index) {
  char words[64];
  sprintf(words, "hipSetDevice %d", index);
  CALL(words);
  device = index;
  return 0;
}
int hipDeviceGetAttribute(int *value, int attribute, int index) {
  *value = attribute == 10 ? 1 : attribute == 56 ? 1024 : attribute == 63 ? 304 : attribute == 74 ? 65536
           : attribute == 87 ? 64 : -1;
  return 0;
}
int hipGetDevicePropertiesR0600(char *properties, int index) {
  memset(properties, 7, 1472);
  strcpy(properties + 1160, "gfx942:sramecc+:xnack-");
  return 0;
}
int hipModuleLoadData(void **module, const char *image) { CALL("hipModuleLoadData"); return load(module, image); }
int hipModuleUnload(void *module) { CALL("hipModuleUnload"); fake_unloaded++; return 0; }
int hipModuleGetFunction(void **found, void *module, const char *name) {
  CALL("hipModuleGetFunction");
  return function(found, module, name);
}
int hipFuncGetAttribute(int *value, int attribute, void *f) { *value = (int)fake_max_threads; return 0; }
int hipPointerGetAttributes(struct pointer_attributes *found, uint64_t address) {
  uint64_t region = address >> 20;
  memset(found, 0, sizeof *found);
  if (region == 0xC)
    return 1; /* as libraries before ROCm 6 */
  if (region == 0xD || region == 0xE) {
    found->type = 2;
    found->device = (int)(region - 0xD);
  } else if (region == 0xF) {
    found->type = 1;
  }
  return 0;
}
int hipMallocAsync(uint64_t *address, size_t bytes, void *stream) {
  CALL("hipMallocAsync");
  return allocate(address, bytes);
}
int hipFreeAsync(uint64_t address, void *stream) { CALL("hipFreeAsync"); return freed(address); }
int hipModuleLaunchKernel(void *f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                          unsigned shared, void *stream, void **parameters, void **extra) {
  CALL("hipModuleLaunchKernel");
  launch(f, gx, gy, gz, bx, by, bz, shared, stream, parameters);
  fake_last.context = device;
  return 0;
}
int hipModuleLaunchCooperativeKernel(void *f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                                     unsigned bz, unsigned shared, void *stream, void **parameters) {
  CALL("hipModuleLaunchCooperativeKernel");
  return launch(f, gx, gy, gz, bx, by, bz, shared, stream, parameters);
}
int hipDrvLaunchKernelEx(const struct config *config, void *f, void **parameters, void **extra) {
  CALL("hipDrvLaunchKernelEx");
  return launch_extended(config, f, parameters);
}

/* -------------------------------------------------------------------------------------------------- Pools of memory */

/* From how many bytes on an allocation fails, and how often a pool was trimmed. */
uint64_t fake_pool_bytes = 1 << 20;
int fake_trimmed;
/* The pool that was made last: its device, and what it keeps. */
int fake_pool_device;
uint64_t fake_pool_keeps, fake_copied_on;
struct pool_properties {
  int allocation, handles, place, device;
  void *security;
  size_t most;
  unsigned char reserved[56];
};
_Static_assert(sizeof(struct pool_properties) == 88, "as both libraries have it");

static int pool_create(void **pool, const struct pool_properties *wanted, uint64_t context) {
  if (wanted->allocation != 1 || wanted->handles || wanted->place != 1 || wanted->security || wanted->most)
    return 1;
  fake_pool_device = wanted->device;
  *pool = (void *)context;
  fake_in_use[4]++;
  return 0;
}
static int pool_set(void *pool, int attribute, uint64_t *value) {
  fake_pool_keeps = attribute == 4 ? *value : 0;
  return 0;
}
static int pool_allocate(void **address, size_t bytes, void *pool, uint64_t context) {
  if ((uint64_t)pool != context)
    return 400; /* the thread is on another device */
  if (bytes > fake_pool_bytes)
    return 2;
  *address = malloc(bytes);
  fake_in_use[0]++;
  return 0;
}
static int pool_trim(void) { fake_trimmed++; return 0; }
static int pool_info(size_t *left, size_t *total) { *left = 1000; *total = 2000; return 0; }
static int pin(void **address, size_t bytes, unsigned flags) {
  *address = malloc(bytes);
  fake_in_use[1]++;
  return flags == 1 ? 0 : 1;
}
static int unpin(void *address) { free(address); fake_in_use[1]--; return 0; }
static int copy(void *to, const void *from, size_t bytes, void *stream) {
  memcpy(to, from, bytes);
  fake_copied_on = (uint64_t)stream;
  return 0;
}
static int new_handle(void **made, unsigned flags, unsigned expected, int kind) {
  *made = (void *)(0x500 + 0x10 * (uint64_t)++fake_in_use[kind]);
  return flags == expected ? 0 : 1;
}
static int drop_handle(int kind) { fake_in_use[kind]--; return 0; }
static int noted(const char *format, uint64_t handle) {
  char words[64];
  sprintf(words, format, (unsigned long long)handle);
  return call(words);
}

int cuMemPoolCreate(void **pool, const struct pool_properties *wanted) { CALL("cuMemPoolCreate"); return pool_create(pool, wanted, CURRENT); }
int cuMemPoolDestroy(void *pool) { return drop_handle(4); }
int cuMemPoolSetAttribute(void *pool, int attribute, uint64_t *value) { return pool_set(pool, attribute, value); }
int cuMemPoolTrimTo(void *pool, size_t keep) { return pool_trim(); }
int cuMemAllocFromPoolAsync(void **address, size_t bytes, void *pool, void *stream) {
  CALL("cuMemAllocFromPoolAsync");
  return pool_allocate(address, bytes, pool, CURRENT);
}
int cuMemGetInfo_v2(size_t *left, size_t *total) { return pool_info(left, total); }
int cuMemHostAlloc(void **address, size_t bytes, unsigned flags) { return pin(address, bytes, flags); }
int cuMemFreeHost(void *address) { return unpin(address); }
int cuMemcpyAsync(void *to, const void *from, size_t bytes, void *stream) { CALL("cuMemcpyAsync"); return copy(to, from, bytes, stream); }
int cuMemsetD8Async(void *to, unsigned char byte, size_t bytes, void *stream) { memset(to, byte, bytes); return 0; }
int cuStreamCreate(void **made, unsigned flags) { return new_handle(made, flags, 1, 2); }
int cuStreamDestroy_v2(void *stream) { return drop_handle(2); }
int cuStreamSynchronize(void *stream) { return noted("wait for %llx", (uint64_t)stream); }
int cuEventCreate(void **made, unsigned flags) { return new_handle(made, flags, 2, 3); }
int cuEventDestroy_v2(void *event) { return drop_handle(3); }
int cuEventRecord(void *event, void *stream) { return noted("record on %llx", (uint64_t)stream); }
int cuStreamWaitEvent(void *stream, void *event, unsigned flags) { return noted("order %llx", (uint64_t)stream); }

int hipMemPoolCreate(void **pool, const struct pool_properties *wanted) { CALL("hipMemPoolCreate"); return pool_create(pool, wanted, 0xC0 + device); }
int hipMemPoolDestroy(void *pool) { return drop_handle(4); }
int hipMemPoolSetAttribute(void *pool, int attribute, uint64_t *value) { return pool_set(pool, attribute, value); }
int hipMemPoolTrimTo(void *pool, size_t keep) { return pool_trim(); }
int hipMallocFromPoolAsync(void **address, size_t bytes, void *pool, void *stream) {
  CALL("hipMallocFromPoolAsync");
  return pool_allocate(address, bytes, pool, 0xC0 + device);
}
int hipMemGetInfo(size_t *left, size_t *total) { return pool_info(left, total); }
int hipHostMalloc(void **address, size_t bytes, unsigned flags) { return pin(address, bytes, flags); }
int hipHostFree(void *address) { return unpin(address); }
int hipMemcpyAsync(void *to, const void *from, size_t bytes, int kind, void *stream) {
  CALL("hipMemcpyAsync");
  return kind == 4 ? copy(to, from, bytes, stream) : 1;
}
int hipMemsetAsync(void *to, int byte, size_t bytes, void *stream) { memset(to, byte, bytes); return 0; }
int hipStreamCreateWithFlags(void **made, unsigned flags) { return new_handle(made, flags, 1, 2); }
int hipStreamDestroy(void *stream) { return drop_handle(2); }
int hipStreamSynchronize(void *stream) { return noted("wait for %llx", (uint64_t)stream); }
int hipEventCreateWithFlags(void **made, unsigned flags) { return new_handle(made, flags, 2, 3); }
int hipEventDestroy(void *event) { return drop_handle(3); }
int hipEventRecord(void *event, void *stream) { return noted("record on %llx", (uint64_t)stream); }
int hipStreamWaitEvent(void *stream, void *event, unsigned flags) { return noted("order %llx", (uint64_t)stream); }

/* Graphs that are there: as they were captured, and ready to launch; and the stream that is captured. */
int fake_graphs[2];
static uint64_t captured_stream;

static int capture_begin(void *stream, int mode) {
  if (captured_stream)
    return 901;
  captured_stream = (uint64_t)stream;
  return mode == 2 ? noted("capture %llx", (uint64_t)stream) : 1;
}
static int capture_end(void *stream, void **graph) {
  if ((uint64_t)stream != captured_stream)
    return 401;
  captured_stream = 0;
  *graph = (void *)(0x700 + (uint64_t)++fake_graphs[0]);
  return 0;
}
static int graph_ready(void **ready, void *graph, uint64_t flags) {
  *ready = (void *)((uint64_t)graph + 0x100);
  fake_graphs[1]++;
  return flags == 0 ? 0 : 1;
}
static int graph_launch(void *ready, void *stream) {
  return (uint64_t)ready > 0x800 ? noted("graph on %llx", (uint64_t)stream) : 400;
}

int cuStreamIsCapturing(void *stream, int *found) { *found = stream && (uint64_t)stream == captured_stream; return 0; }
int cuStreamBeginCapture_v2(void *stream, int mode) { return capture_begin(stream, mode); }
int cuStreamEndCapture(void *stream, void **graph) { return capture_end(stream, graph); }
int cuGraphInstantiateWithFlags(void **ready, void *graph, uint64_t flags) {
  CALL("cuGraphInstantiateWithFlags");
  return graph_ready(ready, graph, flags);
}
int cuGraphLaunch(void *ready, void *stream) { return graph_launch(ready, stream); }
int cuGraphDestroy(void *graph) { fake_graphs[0]--; return 0; }
int cuGraphExecDestroy(void *ready) { fake_graphs[1]--; return 0; }
int hipStreamIsCapturing(void *stream, int *found) { *found = stream && (uint64_t)stream == captured_stream; return 0; }
int hipStreamBeginCapture(void *stream, int mode) { return capture_begin(stream, mode); }
int hipStreamEndCapture(void *stream, void **graph) { return capture_end(stream, graph); }
int hipGraphInstantiateWithFlags(void **ready, void *graph, uint64_t flags) {
  CALL("hipGraphInstantiateWithFlags");
  return graph_ready(ready, graph, flags);
}
int hipGraphLaunch(void *ready, void *stream) { return graph_launch(ready, stream); }
int hipGraphDestroy(void *graph) { fake_graphs[0]--; return 0; }
int hipGraphExecDestroy(void *ready) { fake_graphs[1]--; return 0; }

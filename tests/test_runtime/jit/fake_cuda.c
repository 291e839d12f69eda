/* SPDX-License-Identifier: Apache-2.0
 *
 * Stands in for libcuda where Triton's own driver runs without a GPU.  Every call is noted with its arguments; a binary that is loaded,
 * and a launch, are shown to functions of the test's before the call returns.
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Addresses below this one are no memory of a GPU. */
#define FIRST_ADDRESS 0x10000
#define BIG 232448

char fake_calls[1 << 20];
int fake_version = 12080, fake_capability[2] = {9, 0}, fake_oversized = 0;
void (*fake_loaded)(uint64_t module, const void *image);
void (*fake_launched)(const void *config, uint64_t function, void **parameters);

static uint64_t modules = 0x1000;
static void *context;

#define NOTE(...)                                                                                                      \
  do {                                                                                                                 \
    size_t used = strlen(fake_calls);                                                                                  \
    snprintf(fake_calls + used, sizeof(fake_calls) - used, __VA_ARGS__);                                               \
  } while (0)

int cuInit(unsigned flags) { return 0; }

int cuGetErrorString(int status, const char **words) {
  *words = status == 1 ? "invalid argument" : "another error";
  return 0;
}

int cuDriverGetVersion(int *version) {
  *version = fake_version;
  return 0;
}

int cuDeviceGetCount(int *count) {
  *count = 1;
  return 0;
}

int cuDeviceGet(int *device, int number) {
  *device = number;
  return 0;
}

int cuCtxGetCurrent(void **found) {
  *found = context;
  return 0;
}

int cuCtxSetCurrent(void *wanted) {
  NOTE("cuCtxSetCurrent %p\n", wanted);
  context = wanted;
  return 0;
}

int cuCtxGetDevice(int *device) {
  *device = (int)(uintptr_t)context - 0xC0;
  return 0;
}

int cuDevicePrimaryCtxRetain(void **found, int device) {
  NOTE("cuDevicePrimaryCtxRetain %d\n", device);
  *found = (void *)(uintptr_t)(0xC0 + device);
  return 0;
}

int cuDeviceGetAttribute(int *value, int attribute, int device) {
  NOTE("cuDeviceGetAttribute %d %d\n", attribute, device);
  *value = attribute == 97 || attribute == 81 ? BIG : attribute == 75 ? fake_capability[0] : attribute == 76 ? fake_capability[1]
                                                                                                            : 1000 + attribute;
  return 0;
}

int cuModuleLoadData(uint64_t *module, const void *image) {
  *module = modules += 0x10;
  NOTE("cuModuleLoadData\n");
  if (fake_loaded != NULL)
    fake_loaded(*module, image);
  return 0;
}

int cuModuleUnload(uint64_t module) {
  NOTE("cuModuleUnload %llx\n", (unsigned long long)module);
  return 0;
}

int cuModuleGetFunction(uint64_t *function, uint64_t module, const char *name) {
  NOTE("cuModuleGetFunction %s\n", name);
  *function = module + 1;
  return 0;
}

int cuFuncGetAttribute(int *value, int attribute, uint64_t function) {
  NOTE("cuFuncGetAttribute %d\n", attribute);
  *value = attribute == 0 ? 1024 : 16 * attribute;
  return 0;
}

int cuFuncSetAttribute(uint64_t function, int attribute, int value) {
  NOTE("cuFuncSetAttribute %d %d\n", attribute, value);
  return attribute == 17 && !fake_oversized ? 1 : 0;
}

int cuFuncSetCacheConfig(uint64_t function, int config) {
  NOTE("cuFuncSetCacheConfig %d\n", config);
  return 0;
}

int cuCtxGetLimit(size_t *value, int limit) {
  *value = 1 << 20;
  return 0;
}

int cuCtxSetLimit(int limit, size_t value) {
  NOTE("cuCtxSetLimit %d %zu\n", limit, value);
  return 0;
}

int cuPointerGetAttribute(uint64_t *value, int attribute, uint64_t address) {
  NOTE("cuPointerGetAttribute %d %llx\n", attribute, (unsigned long long)address);
  if (address < FIRST_ADDRESS)
    return address == 8 ? 7 : 1;
  *value = address;
  return 0;
}

int cuStreamIsCapturing(uint64_t stream, int *state) {
  *state = stream == 5;
  return 0;
}

int cuOccupancyMaxActiveClusters(int *count, uint64_t function, const void *config) {
  const uint32_t *words = config;
  NOTE("cuOccupancyMaxActiveClusters %u %u %u %u %u\n", words[0], words[1], words[3], words[6], words[12]);
  *count = 7;
  return 0;
}

static void mix(uint64_t *map, const void *data, size_t bytes) {
  size_t index;
  for (index = 0; index < bytes; index++)
    map[index % 16] = (map[index % 16] ^ ((const unsigned char *)data)[index]) * 1099511628211ull;
}

int cuTensorMapEncodeTiled(uint64_t *map, int type, uint32_t rank, void *address, const uint64_t *sizes, const uint64_t *strides,
                           const uint32_t *box, const uint32_t *steps, int interleave, int swizzle, int promotion, int fill) {
  int numbers[] = {type, (int)rank, interleave, swizzle, promotion, fill};
  if ((uintptr_t)map % 64 != 0 || type == 99)
    return 1;
  memset(map, 0xff, 128);
  mix(map, numbers, sizeof(numbers));
  mix(map, &address, sizeof(address));
  mix(map, sizes, 8 * rank);
  mix(map, strides, 8 * (rank - 1));
  mix(map, box, 4 * rank);
  mix(map, steps, 4 * rank);
  map[1] |= 1ull << 21;
  return 0;
}

int cuTensorMapEncodeIm2col(uint64_t *map, int type, uint32_t rank, void *address, const uint64_t *sizes, const uint64_t *strides,
                            const int *lower, const int *upper, uint32_t channels, uint32_t pixels, const uint32_t *steps,
                            int interleave, int swizzle, int promotion, int fill) {
  int numbers[] = {type, (int)rank, (int)channels, (int)pixels, interleave, swizzle, promotion, fill};
  memset(map, 0xff, 128);
  mix(map, numbers, sizeof(numbers));
  mix(map, &address, sizeof(address));
  mix(map, sizes, 8 * rank);
  mix(map, strides, 8 * (rank - 1));
  mix(map, lower, 4 * (rank - 2));
  mix(map, upper, 4 * (rank - 2));
  mix(map, steps, 4 * rank);
  return 0;
}

int cuLaunchKernelEx(const void *config, uint64_t function, void **parameters, void **extra) {
  NOTE("cuLaunchKernelEx\n");
  if (fake_launched != NULL)
    fake_launched(config, function, parameters);
  return ((const uint32_t *)config)[3] > 1024 ? 1 : 0;
}

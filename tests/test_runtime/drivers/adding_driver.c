/* SPDX-License-Identifier: Apache-2.0
 *
 * Stands in for libcuda where an exported vector add is launched: memory of the host is the device's, a launch adds as the kernel would, and
 * every call goes to the file that ADDING_DRIVER_LOG names.
 */
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct attribute { uint32_t id, pad, numbers[16]; };
struct config {
  uint32_t grid[3], block[3], shared_bytes;
  void *stream;
  struct attribute *attributes;
  uint32_t attribute_count;
};

static int note(const char *format, ...) {
  FILE *file = fopen(getenv("ADDING_DRIVER_LOG"), "a");
  va_list values;
  if (!file)
    return 999;
  va_start(values, format);
  vfprintf(file, format, values);
  va_end(values);
  fputc('\n', file);
  fclose(file);
  return 0;
}

int cuInit(unsigned flags) { return note("cuInit %u", flags); }
int cuDeviceGet(int *device, int number) { *device = number; return note("cuDeviceGet %d", number); }
int cuDevicePrimaryCtxRetain(void **context, int device) { *context = (void *)0xC0; return note("cuDevicePrimaryCtxRetain %d", device); }
int cuCtxSetCurrent(void *context) { return note("cuCtxSetCurrent %#lx", (unsigned long)(uintptr_t)context); }
int cuCtxSynchronize(void) { return note("cuCtxSynchronize"); }
int cuModuleLoadData(void **module, const void *image) {
  *module = (void *)0xA0;
  return note("cuModuleLoadData %s", memcmp(image, "\x7f" "ELF", 4) ? "no binary" : "binary");
}
int cuModuleGetFunction(void **function, void *module, const char *name) {
  (void)module;
  *function = (void *)0xF0;
  return note("cuModuleGetFunction %s", name);
}
int cuFuncGetAttribute(int *value, int attribute, void *function) { (void)function; *value = 0; return note("cuFuncGetAttribute %d", attribute); }
int cuFuncSetAttribute(void *function, int attribute, int value) { (void)function; return note("cuFuncSetAttribute %d %d", attribute, value); }
int cuMemAlloc_v2(uint64_t *address, size_t bytes) {
  *address = (uint64_t)(uintptr_t)aligned_alloc(256, (bytes + 255) / 256 * 256);
  return note("cuMemAlloc %zu", bytes);
}
int cuMemcpyHtoD_v2(uint64_t to, const void *from, size_t bytes) { memcpy((void *)(uintptr_t)to, from, bytes); return note("cuMemcpyHtoD %zu", bytes); }
int cuMemcpyDtoH_v2(void *to, uint64_t from, size_t bytes) { memcpy(to, (void *)(uintptr_t)from, bytes); return note("cuMemcpyDtoH %zu", bytes); }

/* Adds as the kernel does: x, y, out, n, in so many programs; each adds ADDING_DRIVER_BLOCK elements. */
int cuLaunchKernelEx(const struct config *config, void *function, void **parameters, void **extra) {
  const float *x = *(float **)parameters[0], *y = *(float **)parameters[1];
  float *out = *(float **)parameters[2];
  const int64_t n = *(int32_t *)parameters[3], block = atoll(getenv("ADDING_DRIVER_BLOCK"));
  int64_t at;
  for (at = 0; at < (int64_t)config->grid[0] * block && at < n; at++)
    out[at] = x[at] + y[at];
  return note("cuLaunchKernelEx %#lx grid %u %u %u block %u %u %u shared %u stream %#lx attributes %u extra %d scratch %#lx",
              (unsigned long)(uintptr_t)function, config->grid[0], config->grid[1], config->grid[2], config->block[0], config->block[1],
              config->block[2], config->shared_bytes, (unsigned long)(uintptr_t)config->stream, config->attribute_count, extra != NULL,
              (unsigned long)*(uint64_t *)parameters[4]);
}

/* SPDX-License-Identifier: Apache-2.0
 *
 * Stands in for libcuda where the code of a page runs: the stand-in of the launchers' tests, and memory of the host as the device's.
 */
#define cuPointerGetAttribute cuPointerGetAttribute_of_launchers
#include "../test_runtime/drivers/fake_driver.c"
#undef cuPointerGetAttribute

/* Every address is memory of the first device. */
int cuPointerGetAttribute(void *value, int attribute, uint64_t address) {
  *(int *)value = attribute == 2 ? 2 : 0;
  return 0;
}
int cuMemAlloc_v2(uint64_t *address, size_t bytes) {
  CALL("cuMemAlloc");
  *address = (uint64_t)(uintptr_t)aligned_alloc(512, (bytes + 511) / 512 * 512);
  return 0;
}
int cuMemFree_v2(uint64_t address) {
  CALL("cuMemFree");
  free((void *)(uintptr_t)address);
  return 0;
}
int cuMemcpyHtoD_v2(uint64_t to, const void *from, size_t bytes) {
  CALL("cuMemcpyHtoD");
  memcpy((void *)(uintptr_t)to, from, bytes);
  return 0;
}
int cuMemcpyDtoH_v2(void *to, uint64_t from, size_t bytes) {
  CALL("cuMemcpyDtoH");
  memcpy(to, (void *)(uintptr_t)from, bytes);
  return 0;
}

/* SPDX-License-Identifier: Apache-2.0
 *
 * Stands in for libcuda where the code of a page runs: the stand-in of the drivers' tests, whose pools have memory of the host.
 */
#define cuPointerGetAttribute cuPointerGetAttribute_of_launchers
#include "../test_runtime/drivers/fake_driver.c"
#undef cuPointerGetAttribute

/* Every address is memory of the first device. */
int cuPointerGetAttribute(void *value, int attribute, uint64_t address) {
  *(int *)value = attribute == 2 ? 2 : 0;
  return 0;
}

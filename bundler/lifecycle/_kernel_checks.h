/* SPDX-License-Identifier: Apache-2.0
 *
 * `is_whole_elf`: what _kernel_writer.c, which alone includes this file, checks of a device binary before it writes it.
 * bundler/lifecycle/elf.py has the same in Python.
 */

#ifndef BUNDLER_KERNEL_CHECKS_H
#define BUNDLER_KERNEL_CHECKS_H

#include <stdint.h>

static uint64_t number_at(const unsigned char *bytes, int size) {
  uint64_t number = 0;
  while (size > 0)
    number = number << 8 | bytes[--size];
  return number;
}

/* Whether each row of a table, and what it says where bytes are, lies within the file.  A section of type 8 has no bytes. */
static int is_within(const unsigned char *data, uint64_t size, uint64_t start, uint64_t row_bytes, uint64_t count, int sections) {
  uint64_t needed = sections ? 64 : 56;
  if (start > size || row_bytes * count > size - start)
    return 0;
  for (uint64_t number = 0; number < count; number++) {
    uint64_t offset, length, row = start + number * row_bytes;
    if (needed > size - row)
      return 0;
    offset = number_at(data + row + (sections ? 24 : 8), 8);
    length = sections && number_at(data + row + 4, 4) == 8 ? 0 : number_at(data + row + 32, 8);
    if (offset > size || length > size - offset)
      return 0;
  }
  return 1;
}

static int is_whole_elf(const unsigned char *data, uint64_t size) {
  if (size < 4 || memcmp(data, "\x7f" "ELF", 4) != 0)
    return 0;
  if (size > 4 && data[4] != 2)
    return 1; /* not of 64 bits: nothing is known against it */
  return size >= 64 &&
         is_within(data, size, number_at(data + 32, 8), number_at(data + 54, 2), number_at(data + 56, 2), 0) &&
         is_within(data, size, number_at(data + 40, 8), number_at(data + 58, 2), number_at(data + 60, 2), 1);
}

#endif

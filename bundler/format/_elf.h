/* SPDX-License-Identifier: Apache-2.0
 *
 * The ELF file that a device binary is, for the extensions that look into one: `is_whole_elf`,
 * which lifecycle/_kernel_writer.c asks before it writes a binary, and `elf_section`, by which
 * runtime/launch/_launch.c finds where a kernel's parameters are described.  device_elf.py, which
 * says the same in Python, knows the reasons.  Needs no interpreter; owns nothing, and every byte
 * is read as hostile.
 */

#ifndef BUNDLER_ELF_H
#define BUNDLER_ELF_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define ELF_SEGMENT_BYTES 56
#define ELF_SECTION_BYTES 64
#define ELF_WITHOUT_BYTES 8 /* SHT_NOBITS: such a section takes no room in the file */

typedef struct {
  const unsigned char *data;
  uint64_t size;
} elf_bytes_t;

static uint64_t elf_number(const unsigned char *bytes, int size) {
  uint64_t number = 0;
  while (size > 0)
    number = number << 8 | bytes[--size];
  return number;
}

/* Where a section's bytes are; those of one without bytes are none. */
static elf_bytes_t elf_bytes_of(const unsigned char *data, const unsigned char *row) {
  elf_bytes_t found = {data + elf_number(row + 24, 8), elf_number(row + 32, 8)};
  if (elf_number(row + 4, 4) == ELF_WITHOUT_BYTES)
    found.size = 0;
  return found;
}

/* Whether each row of a table, and the bytes that it names, lie within the file. */
static int elf_table_is_within(const unsigned char *data, uint64_t size, uint64_t start,
                               uint64_t row_bytes, uint64_t count, int sections) {
  uint64_t needed = sections ? ELF_SECTION_BYTES : ELF_SEGMENT_BYTES;
  if (start > size || row_bytes * count > size - start)
    return 0;
  for (uint64_t number = 0; number < count; number++) {
    uint64_t offset, length, row = start + number * row_bytes;
    if (needed > size - row)
      return 0;
    offset = elf_number(data + row + (sections ? 24 : 8), 8);
    length = elf_number(data + row + 32, 8);
    if (sections && elf_number(data + row + 4, 4) == ELF_WITHOUT_BYTES)
      length = 0;
    if (offset > size || length > size - offset)
      return 0;
  }
  return 1;
}

static int is_whole_elf(const unsigned char *data, uint64_t size) {
  if (size < 4 || memcmp(data,
                         "\x7f"
                         "ELF",
                         4) != 0)
    return 0;
  if (size > 4 && data[4] != 2)
    return 1; /* not of 64 bits: nothing is known against it */
  return size >= 64 &&
         elf_table_is_within(data, size, elf_number(data + 32, 8), elf_number(data + 54, 2),
                             elf_number(data + 56, 2), 0) &&
         elf_table_is_within(data, size, elf_number(data + 40, 8), elf_number(data + 58, 2),
                             elf_number(data + 60, 2), 1);
}

/* Finds the last section of a name in a file of 64 bits that is whole and as linkers write it.
 * Returns 1 and its bytes, 0 where there is none, -1 for any other file, about which Python is
 * asked. */
static inline int elf_section(const unsigned char *data, uint64_t size, const char *name,
                              uint64_t name_size, elf_bytes_t *found) {
  uint64_t table, rows, names_row;
  elf_bytes_t names;
  if (size < 64 || data[4] != 2 || !is_whole_elf(data, size) ||
      elf_number(data + 58, 2) != ELF_SECTION_BYTES)
    return -1;
  table = elf_number(data + 40, 8);
  rows = elf_number(data + 60, 2);
  names_row = elf_number(data + 62, 2);
  if (names_row >= rows)
    return -1;
  names = elf_bytes_of(data, data + table + names_row * ELF_SECTION_BYTES);
  while (rows-- > 0) {
    const unsigned char *row = data + table + rows * ELF_SECTION_BYTES;
    uint64_t at = elf_number(row, 4);
    if (at < names.size && name_size < names.size - at && names.data[at + name_size] == 0 &&
        memcmp(names.data + at, name, (size_t)name_size) == 0) {
      *found = elf_bytes_of(data, row);
      return 1;
    }
  }
  return 0;
}

#endif

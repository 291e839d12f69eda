/* SPDX-License-Identifier: Apache-2.0
 *
 * What _kernel_writer.c, which alone includes this file, checks of a kernel before it writes it: SHA-256 digests, and whether a device
 * binary is a whole ELF file.
 *
 * SHA-256 is OpenSSL's: of the very library that Python's own _hashlib is linked with, found by name when the module is loaded.  A Python that
 * has OpenSSL built in shows nothing of it; there it is the system's libcrypto, if there is one.  Where there is none either,
 * COMPARES_DIGESTS is false, and the caller compares digests itself.
 */

#ifndef BUNDLER_KERNEL_CHECKS_H
#define BUNDLER_KERNEL_CHECKS_H

#include <dlfcn.h>
#include <stdint.h>

/* ------------------------------------------------------------------------------------------------- SHA-256, without Python */

/* Functions of libcrypto, each of them in OpenSSL since 1.1; set once, when the module is loaded. */
static struct {
  void *(*new_context)(void);
  void (*free_context)(void *);
  int (*begin)(void *, const void *, void *);
  int (*update)(void *, const void *, size_t);
  int (*end)(void *, unsigned char *, unsigned int *);
  const void *sha256;
} crypto;

/* POSIX lets a function's address be taken from dlsym; the C language only knows the way through memory. */
static int find(void *library, const char *name, void *function) {
  void *address = dlsym(library, name);
  memcpy(function, &address, sizeof(address));
  return address != NULL;
}

/* Never closed: Python uses the one as long as the process lives, and we the other. */
static void *libcrypto(const char *hashlib) {
  void *library = hashlib == NULL ? NULL : dlopen(hashlib, RTLD_NOW | RTLD_NOLOAD);
  if (library == NULL || dlsym(library, "EVP_MD_CTX_new") == NULL)
    library = dlopen("libcrypto.so.3", RTLD_NOW | RTLD_LOCAL);
  return library != NULL ? library : dlopen("libcrypto.so.1.1", RTLD_NOW | RTLD_LOCAL);
}

/* `hashlib` is the file of Python's module, NULL where it has none. */
static void find_sha256(const char *hashlib) {
  void *(*fetch)(void *, const char *, const char *);
  const void *(*plain)(void);
  void *library = libcrypto(hashlib);
  if (library == NULL || !find(library, "EVP_MD_CTX_new", &crypto.new_context) ||
      !find(library, "EVP_MD_CTX_free", &crypto.free_context) || !find(library, "EVP_DigestInit_ex", &crypto.begin) ||
      !find(library, "EVP_DigestUpdate", &crypto.update) || !find(library, "EVP_DigestFinal_ex", &crypto.end))
    return;
  /* Since OpenSSL 3 the plain one is looked up again for each digest, under a lock that all threads share. */
  if (find(library, "EVP_MD_fetch", &fetch))
    crypto.sha256 = fetch(NULL, "SHA256", NULL);
  else if (find(library, "EVP_sha256", &plain))
    crypto.sha256 = plain();
}

/* ------------------------------------------------------------------------------------ ELF, as bundler/lifecycle/elf.py reads it */

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

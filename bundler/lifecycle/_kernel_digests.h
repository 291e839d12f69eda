/* SPDX-License-Identifier: Apache-2.0
 *
 * SHA-256 for _kernel_writer.c and _kernel_reader.c, which no other file includes: `find_sha256` once, then `hash_all` in any thread.
 *
 * Two files at once are hashed by _kernel_sha256.h where the processor can, and each by itself by OpenSSL elsewhere; a build with
 * BUNDLER_OPENSSL_ONLY leaves all to OpenSSL, so that a test can compare both.
 *
 * OpenSSL's is that of the very library that Python's own _hashlib is linked with, found by name when the module is loaded.  A Python that
 * has OpenSSL built in shows nothing of it; there it is the system's libcrypto, if there is one.  Where there is none either,
 * `can_hash` says no, and Python hashes itself.
 */

#ifndef BUNDLER_KERNEL_DIGESTS_H
#define BUNDLER_KERNEL_DIGESTS_H

#include "_kernel_sha256.h"
#include <dlfcn.h>

/* Functions of libcrypto, each of them in OpenSSL since 1.1; set once, when the module is loaded. */
static struct {
  void *(*new_context)(void);
  void (*free_context)(void *);
  int (*begin)(void *, const void *, void *);
  int (*update)(void *, const void *, size_t);
  int (*end)(void *, unsigned char *, unsigned int *);
  const void *sha256;
  int two_lanes; /* whether two files are hashed at once, without libcrypto */
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
static void find_sha256_beside(const char *hashlib) {
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

/* That there is no SHA-256 here is no error. */
static void find_sha256(void) {
#ifndef BUNDLER_OPENSSL_ONLY
  crypto.two_lanes = has_two_lanes();
  if (crypto.two_lanes)
    return;
#endif
  PyObject *hashlib = PyImport_ImportModule("_hashlib"), *file = NULL, *path = NULL;
  if (hashlib != NULL)
    file = PyObject_GetAttrString(hashlib, "__file__");
  if (file == NULL || !PyUnicode_FSConverter(file, &path))
    PyErr_Clear();
  find_sha256_beside(path == NULL ? NULL : PyBytes_AsString(path));
  Py_XDECREF(path);
  Py_XDECREF(file);
  Py_XDECREF(hashlib);
}

static int can_hash(void) { return crypto.two_lanes || crypto.sha256 != NULL; }

/* Returns what a thread hashes with, for `forget_context`; NULL where it cannot. */
static void *new_context(void) { return crypto.sha256 == NULL ? NULL : crypto.new_context(); }

static void forget_context(void *context) {
  if (context != NULL)
    crypto.free_context(context);
}

static int hash_by_openssl(void *context, const hashing_t *hashing) {
  unsigned char longest[64]; /* EVP_MAX_MD_SIZE */
  if (context == NULL || !crypto.begin(context, crypto.sha256, NULL) ||
      !crypto.update(context, hashing->data, hashing->size) || !crypto.end(context, longest, NULL))
    return 0;
  memcpy(hashing->digest, longest, DIGEST_BYTES);
  return 1;
}

/* Needs no interpreter; returns whether the digests are there. */
static int hash_all(void *context, next_hashing_t next, void *state) {
  hashing_t hashing;
  if (crypto.two_lanes) {
    hash_two(next, state);
    return 1;
  }
  while (next(state, &hashing))
    if (!hash_by_openssl(context, &hashing))
      return 0;
  return 1;
}

#endif

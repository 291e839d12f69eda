/* SPDX-License-Identifier: Apache-2.0
 *
 * SHA-256 for _kernel_writer.c and _kernel_reader.c: `find_sha256` once, then `hash_all` in any
 * thread.
 *
 * Two files at once are hashed by _sha256_pairs.h where the processor can, which
 * docs/decisions/0004 gives the reasons for, and each by itself by OpenSSL elsewhere; a build with
 * BUNDLER_OPENSSL_ONLY leaves all to OpenSSL, so that a test can compare both.
 *
 * OpenSSL's is that of the very library that Python's own _hashlib is linked with, found by name
 * when the module is loaded.  A Python that has OpenSSL built in shows nothing of it; there it is
 * the system's libcrypto, if there is one.  Where there is none either, `can_hash` says no, and
 * Python hashes itself.
 *
 * A `sha256_t` is part of a module's state: `find_sha256` fills it in, `forget_sha256` gives back
 * what it holds, and between the two any thread may hash, without a lock, each with a context of
 * its own.
 */

#ifndef BUNDLER_SHA256_H
#define BUNDLER_SHA256_H

#include <Python.h>
#include <dlfcn.h>
#include <stddef.h>
#include <string.h>
#include "_sha256_pairs.h"

/* Functions of libcrypto, each of them in OpenSSL since 1.1. */
typedef struct {
  void *(*new_context)(void);
  void (*free_context)(void *);
  int (*begin)(void *, const void *, void *);
  int (*update)(void *, const void *, size_t);
  int (*end)(void *, unsigned char *, unsigned int *);
  void *algorithm;                /* NULL where there is no libcrypto, or no need of it */
  void (*free_algorithm)(void *); /* NULL where nobody has to */
  int in_pairs;                   /* two files are hashed at once, without libcrypto */
} sha256_t;

/* POSIX lets a function's address be taken from dlsym; the C language only knows the way through
 * memory. */
static int find_symbol(void *library, const char *name, void *function) {
  void *address = dlsym(library, name);
  memcpy(function, &address, sizeof(address));
  return address != NULL;
}

/* Never closed: Python uses the one as long as the process lives, and we the other.  `hashlib` is
 * the file of Python's module, NULL where it has none. */
static void *open_libcrypto(const char *hashlib) {
  void *library = hashlib == NULL ? NULL : dlopen(hashlib, RTLD_NOW | RTLD_NOLOAD);
  if (library == NULL || dlsym(library, "EVP_MD_CTX_new") == NULL)
    library = dlopen("libcrypto.so.3", RTLD_NOW | RTLD_LOCAL);
  return library != NULL ? library : dlopen("libcrypto.so.1.1", RTLD_NOW | RTLD_LOCAL);
}

static void find_functions(sha256_t *sha256, void *library) {
  void *(*fetch)(void *, const char *, const char *);
  void *(*plain)(void);
  if (library == NULL || !find_symbol(library, "EVP_MD_CTX_new", &sha256->new_context) ||
      !find_symbol(library, "EVP_MD_CTX_free", &sha256->free_context) ||
      !find_symbol(library, "EVP_DigestInit_ex", &sha256->begin) ||
      !find_symbol(library, "EVP_DigestUpdate", &sha256->update) ||
      !find_symbol(library, "EVP_DigestFinal_ex", &sha256->end))
    return;
  /* Since OpenSSL 3 the plain one is looked up again for each digest, under a lock that all threads
   * share. */
  if (find_symbol(library, "EVP_MD_fetch", &fetch) &&
      find_symbol(library, "EVP_MD_free", &sha256->free_algorithm))
    sha256->algorithm = fetch(NULL, "SHA256", NULL);
  else if (find_symbol(library, "EVP_sha256", &plain))
    sha256->algorithm = plain();
}

/* That there is no SHA-256 here is no error. */
static void find_sha256(sha256_t *sha256) {
  sha256->in_pairs = can_hash_pairs();
  if (sha256->in_pairs)
    return;
  PyObject *hashlib = PyImport_ImportModule("_hashlib"), *file = NULL, *path = NULL;
  if (hashlib != NULL)
    file = PyObject_GetAttrString(hashlib, "__file__");
  if (file == NULL || !PyUnicode_FSConverter(file, &path))
    PyErr_Clear();
  find_functions(sha256, open_libcrypto(path == NULL ? NULL : PyBytes_AsString(path)));
  Py_XDECREF(path);
  Py_XDECREF(file);
  Py_XDECREF(hashlib);
}

static void forget_sha256(sha256_t *sha256) {
  if (sha256->algorithm != NULL && sha256->free_algorithm != NULL)
    sha256->free_algorithm(sha256->algorithm);
  sha256->algorithm = NULL;
}

static int can_hash(const sha256_t *sha256) {
  return sha256->in_pairs || sha256->algorithm != NULL;
}

/* Returns what a thread hashes with, for `forget_context`; NULL where it cannot. */
static void *new_context(const sha256_t *sha256) {
  return sha256->algorithm == NULL ? NULL : sha256->new_context();
}

static void forget_context(const sha256_t *sha256, void *context) {
  if (context != NULL)
    sha256->free_context(context);
}

static int hash_by_openssl(const sha256_t *sha256, void *context, const hashing_t *hashing) {
  unsigned char longest[64]; /* EVP_MAX_MD_SIZE */
  if (context == NULL || !sha256->begin(context, sha256->algorithm, NULL) ||
      !sha256->update(context, hashing->data, hashing->size) ||
      !sha256->end(context, longest, NULL))
    return 0;
  memcpy(hashing->digest, longest, DIGEST_BYTES);
  return 1;
}

/* Hashes what `next` tells of, until it tells of nothing more.  Needs no interpreter; returns
 * whether the digests are there. */
static int hash_all(const sha256_t *sha256, void *context, next_hashing_t next, void *state) {
  hashing_t hashing;
  if (sha256->in_pairs) {
    hash_pairs(next, state);
    return 1;
  }
  while (next(state, &hashing))
    if (!hash_by_openssl(sha256, context, &hashing))
      return 0;
  return 1;
}

#endif

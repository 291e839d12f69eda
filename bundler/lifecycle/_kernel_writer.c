/* SPDX-License-Identifier: Apache-2.0
 *
 * write_kernels(root, kernels, threads): writes kernels into a cache directory, each whole, by one rename.
 *
 * bundler/lifecycle/kernel_writer.py has the same function in Python, and says what it promises.  Here the interpreter lock is
 * released from the first kernel to the last, so that Python prepares the next kernels meanwhile.
 *
 * SHA-256 is OpenSSL's: the very library that Python's own _hashlib is linked with, found by name when this module is loaded.
 * Where it is not found (a Python with OpenSSL built in), COMPARES_DIGESTS is false, and the caller compares digests itself.
 */

#include "_kernel_threads.h"
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>

#define DIGEST_BYTES 32
/* Answers a kernel of which a file does not have its digest; no error number of a system is that large. */
#define DAMAGED (1 << 16)
/* Answers a kernel whose device binary is not a whole ELF file. */
#define NO_BINARY (DAMAGED + 1)
#define ALREADY_CHECKED (-1)
/* Linux writes no more in one call. */
#define MOST_BYTES ((size_t)0x7ffff000)

typedef struct {
  const char *name, *digest; /* no digest: the caller has compared it */
  Py_buffer data;
} file_t;

typedef struct {
  const char *temporary, *key;
  file_t *files;
  Py_ssize_t count;
  Py_ssize_t binary; /* which file is the device binary, or ALREADY_CHECKED */
  int code;
} kernel_t;

typedef struct {
  int root, compares;
  kernel_t *kernels;
  Py_ssize_t count;
  atomic_llong next;
  atomic_int stopped;
} batch_t;

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

static void find_sha256(const char *hashlib) {
  void *(*fetch)(void *, const char *, const char *);
  const void *(*plain)(void);
  /* Already loaded, and never closed: Python uses it as long as the process lives. */
  void *library = dlopen(hashlib, RTLD_NOW | RTLD_NOLOAD);
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

/* ---------------------------------------------------------------------------------------------- writing, without Python */

/* Returns 0, DAMAGED or an error number. */
static int compare_files(const kernel_t *kernel, void *context) {
  unsigned char digest[64]; /* EVP_MAX_MD_SIZE */
  for (Py_ssize_t number = 0; number < kernel->count; number++) {
    const file_t *file = &kernel->files[number];
    if (file->digest == NULL)
      continue;
    if (context == NULL || !crypto.begin(context, crypto.sha256, NULL) ||
        !crypto.update(context, file->data.buf, (size_t)file->data.len) || !crypto.end(context, digest, NULL))
      return ENOMEM;
    if (memcmp(digest, file->digest, DIGEST_BYTES) != 0)
      return DAMAGED;
  }
  return 0;
}

static int open_at(int folder, const char *name, int flags) {
  int fd;
  do
    fd = openat(folder, name, flags | O_NOFOLLOW | O_CLOEXEC, 0666);
  while (fd < 0 && errno == EINTR);
  return fd;
}

static int write_file(int folder, const file_t *file) {
  const char *data = file->data.buf;
  size_t left = (size_t)file->data.len;
  int error = 0, fd = open_at(folder, file->name, O_WRONLY | O_CREAT | O_EXCL);
  if (fd < 0)
    return errno;
  while (left > 0 && error == 0) {
    ssize_t done = write(fd, data, left < MOST_BYTES ? left : MOST_BYTES);
    if (done >= 0) {
      data += done;
      left -= (size_t)done;
    } else if (errno != EINTR)
      error = errno;
  }
  if (close(fd) < 0 && error == 0)
    error = errno;
  return error;
}

static int write_files(int root, const kernel_t *kernel) {
  Py_ssize_t written = 0;
  int error = 0, folder = open_at(root, kernel->temporary, O_RDONLY | O_DIRECTORY);
  if (folder < 0)
    return errno;
  while (written < kernel->count && error == 0)
    error = write_file(folder, &kernel->files[written++]);
  if (error != 0)
    while (written > 0)
      unlinkat(folder, kernel->files[--written].name, 0);
  close(folder);
  return error;
}

/* Returns 0, DAMAGED, NO_BINARY or an error, after which nothing is left, or minus the error of the rename, after which the temporary
 * directory is. */
static int write_kernel(int root, const kernel_t *kernel, void *context) {
  /* Shortly before they are written: they are in the processor's cache then. */
  int error = compare_files(kernel, context);
  if (error != 0)
    return error;
  if (kernel->binary != ALREADY_CHECKED) {
    const Py_buffer *binary = &kernel->files[kernel->binary].data;
    if (!is_whole_elf(binary->buf, (uint64_t)binary->len))
      return NO_BINARY;
  }
  if (mkdirat(root, kernel->temporary, 0777) < 0)
    return errno;
  error = write_files(root, kernel);
  if (error != 0) {
    unlinkat(root, kernel->temporary, AT_REMOVEDIR);
    return error;
  }
  return renameat(root, kernel->temporary, root, kernel->key) < 0 ? -errno : 0;
}

/* Whether the kernel, or what is in its place, is at fault; any other error would meet the next kernel too. */
static int is_its_own(int code) {
  return code == DAMAGED || code == NO_BINARY || code == -ENOTEMPTY || code == -EEXIST || code == -ENOTDIR || code == -EISDIR;
}

static void *write_some(void *argument) {
  batch_t *batch = argument;
  void *context = batch->compares ? crypto.new_context() : NULL;
  while (!atomic_load(&batch->stopped)) {
    long long number = atomic_fetch_add(&batch->next, 1);
    if (number >= batch->count)
      break;
    batch->kernels[number].code = write_kernel(batch->root, &batch->kernels[number], context);
    if (batch->kernels[number].code != 0 && !is_its_own(batch->kernels[number].code))
      atomic_store(&batch->stopped, 1);
  }
  if (context != NULL)
    crypto.free_context(context);
  return NULL;
}

static void write_all(const char *root, batch_t *batch, long threads) {
  Py_ssize_t number;
  do
    batch->root = open(root, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  while (batch->root < 0 && errno == EINTR);
  for (number = 0; number < batch->count; number++)
    batch->kernels[number].code = batch->root < 0 ? errno : ECANCELED;
  if (batch->root < 0)
    return;
  work_in_threads(write_some, batch, threads < batch->count ? threads : (long)batch->count);
  close(batch->root);
}

/* ------------------------------------------------------------------------------------------------------ from and to Python */

/* Returns a text that is one component of a path; NULL with an exception. */
static const char *component(PyObject *text) {
  Py_ssize_t size;
  const char *name = PyUnicode_AsUTF8AndSize(text, &size);
  if (name == NULL)
    return NULL;
  if (size == 0 || strlen(name) != (size_t)size || strchr(name, '/') != NULL || strcmp(name, ".") == 0 ||
      strcmp(name, "..") == 0) {
    PyErr_Format(PyExc_ValueError, "not the name of a file: %R", text);
    return NULL;
  }
  return name;
}

/* As PyArg_ParseTuple, which takes it for granted that it is given a tuple. */
#define PARSE(tuple, ...)                                                                                                       \
  (PyTuple_Check(tuple) ? PyArg_ParseTuple(tuple, __VA_ARGS__) : (PyErr_SetString(PyExc_TypeError, "expected a tuple"), 0))

static int read_file(PyObject *given, file_t *file, int *compares) {
  PyObject *name, *data;
  Py_ssize_t size = DIGEST_BYTES;
  if (!PARSE(given, "UO|y#;expected (name, data) or (name, data, digest)", &name, &data, &file->digest, &size))
    return 0;
  if (size != DIGEST_BYTES || (file->digest != NULL && crypto.sha256 == NULL)) {
    PyErr_SetString(PyExc_ValueError, crypto.sha256 == NULL ? "no digest can be compared here" : "not a SHA-256 digest");
    return 0;
  }
  *compares |= file->digest != NULL;
  file->name = component(name);
  return file->name != NULL && PyObject_GetBuffer(data, &file->data, PyBUF_SIMPLE) == 0;
}

static int read_kernel(PyObject *given, kernel_t *kernel, int *compares) {
  PyObject *temporary, *key, *files;
  Py_ssize_t number, count;
  kernel->binary = ALREADY_CHECKED;
  if (!PARSE(given, "UUO!|n;expected (temporary, key, files) or (temporary, key, files, binary)", &temporary, &key,
             &PyTuple_Type, &files, &kernel->binary))
    return 0;
  kernel->temporary = component(temporary);
  kernel->key = kernel->temporary == NULL ? NULL : component(key);
  count = PyTuple_Size(files);
  kernel->files = kernel->key == NULL ? NULL : calloc((size_t)count + 1, sizeof(file_t));
  if (kernel->files == NULL)
    return PyErr_Occurred() ? 0 : (PyErr_NoMemory(), 0);
  for (number = 0; number < count; number++) {
    if (!read_file(PyTuple_GetItem(files, number), &kernel->files[number], compares))
      return 0;
    kernel->count++;
  }
  if (PyTuple_Size(given) > 3 && (kernel->binary < 0 || kernel->binary >= count)) {
    PyErr_SetString(PyExc_ValueError, "the binary is none of the files");
    return 0;
  }
  return 1;
}

static void release(batch_t *batch) {
  for (Py_ssize_t number = 0; number < batch->count; number++) {
    kernel_t *kernel = &batch->kernels[number];
    while (kernel->count > 0)
      PyBuffer_Release(&kernel->files[--kernel->count].data);
    free(kernel->files);
  }
  free(batch->kernels);
}

static PyObject *codes_of(const batch_t *batch) {
  PyObject *codes = PyList_New(batch->count);
  for (Py_ssize_t number = 0; codes != NULL && number < batch->count; number++) {
    PyObject *code = PyLong_FromLong(batch->kernels[number].code);
    if (code == NULL || PyList_SetItem(codes, number, code) < 0)
      Py_CLEAR(codes);
  }
  return codes;
}

/* Everything given is a tuple, which no other thread can change while the lock is released. */
static PyObject *write_kernels(PyObject *module, PyObject *arguments) {
  PyObject *path, *kernels, *codes = NULL;
  batch_t batch = {.root = -1};
  long threads;
  int read = 1;
  (void)module;
  if (!PyArg_ParseTuple(arguments, "O&O!l", PyUnicode_FSConverter, &path, &PyTuple_Type, &kernels, &threads))
    return NULL;
  batch.count = PyTuple_Size(kernels);
  batch.kernels = calloc((size_t)batch.count + 1, sizeof(kernel_t));
  if (batch.kernels == NULL) {
    Py_DECREF(path);
    return PyErr_NoMemory();
  }
  for (Py_ssize_t number = 0; read && number < batch.count; number++)
    read = read_kernel(PyTuple_GetItem(kernels, number), &batch.kernels[number], &batch.compares);
  if (read) {
    const char *root = PyBytes_AsString(path);
    Py_BEGIN_ALLOW_THREADS
    write_all(root, &batch, threads);
    Py_END_ALLOW_THREADS
    codes = codes_of(&batch);
  }
  release(&batch);
  Py_DECREF(path);
  return codes;
}

static PyMethodDef methods[] = {
    {"write_kernels", write_kernels, METH_VARARGS,
     "write_kernels(root, kernels, threads): as bundler.lifecycle.kernel_writer says."},
    {NULL, NULL, 0, NULL}};

/* Without _hashlib, or without its file, there is no SHA-256 here; that is no error. */
static int set_up(PyObject *module) {
  PyObject *hashlib = PyImport_ImportModule("_hashlib"), *file = NULL, *path = NULL;
  if (hashlib != NULL)
    file = PyObject_GetAttrString(hashlib, "__file__");
  if (file != NULL && PyUnicode_FSConverter(file, &path)) {
    find_sha256(PyBytes_AsString(path));
    Py_DECREF(path);
  }
  PyErr_Clear();
  Py_XDECREF(file);
  Py_XDECREF(hashlib);
  return PyModule_AddIntConstant(module, "COMPARES_DIGESTS", crypto.sha256 != NULL);
}

static PyModuleDef_Slot slots[] = {{Py_mod_exec, set_up}, {0, NULL}};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_kernel_writer", "Writes kernels while Python runs.", 0, methods,
                                    slots, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__kernel_writer(void) { return PyModuleDef_Init(&module); }

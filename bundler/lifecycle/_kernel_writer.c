/* SPDX-License-Identifier: Apache-2.0
 *
 * begin_writing(root, kernels, threads): begins to write kernels into a cache directory, each
 * whole, by one rename.
 *
 * It returns at once, a Writing, whose `finish` waits and has the codes.
 * bundler/lifecycle/kernel_writer.py has the same in Python, and says what it promises.  Here
 * threads of our own write, which need no interpreter, so that Python prepares the next kernels
 * meanwhile.  start_threads(count) starts threads for many batches.
 *
 * A Writing owns its batch, and holds the tuples that the batch points into, until its job has
 * ended.  No lock is held: threads take kernels by an atomic number, and each writes the code of
 * its own.
 */

#include "_kernel_threads.h"
#include "../format/_elf.h"
#include "_kernel_metadata.h"
#include "_new_kernels.h"
#include <stdio.h>

/* Answers a kernel of which a file does not have its digest, or not the bytes that are to be
 * changed; no error number of a system is that large. */
#define DAMAGED (1 << 16)
/* Answers a kernel whose device binary is not a whole ELF file. */
#define NO_BINARY (DAMAGED + 1)
/* Answers a kernel whose metadata Python has to look at, before it is written. */
#define UNSURE (DAMAGED + 2)
/* Two files are hashed at once, and the largest files of two kernels are about as large. */
#define HASHED_TOGETHER 2
/* Linux writes no more in one call. */
#define MOST_BYTES ((size_t)0x7ffff000)
/* Of a name on any of its file systems, with the zero behind it. */
#define NAME_BYTES 256

typedef struct {
  int root, compares;
  const sha256_t *sha256;
  kernel_t *kernels;
  Py_ssize_t count;
  atomic_llong next;
  atomic_int stopped;
} batch_t;

/* --------------------------------------------------------------------- writing, without Python */

/* Kernels whose files are hashed together. */
typedef struct {
  kernel_t *kernels;
  Py_ssize_t count, kernel, file;
} hashed_t;

static int next_file(void *state, hashing_t *hashing) {
  hashed_t *hashed = state;
  for (; hashed->kernel < hashed->count; hashed->kernel++, hashed->file = 0) {
    kernel_t *kernel = &hashed->kernels[hashed->kernel];
    while (hashed->file < kernel->count) {
      file_t *file = &kernel->files[hashed->file++];
      if (file->expected != NULL) {
        *hashing = (hashing_t){file->data.buf, (size_t)file->data.len, file->digest};
        return 1;
      }
    }
  }
  return 0;
}

/* Returns 0 or DAMAGED. */
static int compare_digests(const kernel_t *kernel) {
  for (Py_ssize_t number = 0; number < kernel->count; number++) {
    const file_t *file = &kernel->files[number];
    if (file->expected != NULL && memcmp(file->digest, file->expected, DIGEST_BYTES) != 0)
      return DAMAGED;
  }
  return kernel->differs ? DAMAGED : 0;
}

static int create_at(int root, const char *path) {
  int fd;
  do
    fd = openat(root, path, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0666);
  while (fd < 0 && errno == EINTR);
  return fd;
}

static int write_bytes(int fd, const char *data, size_t left) {
  while (left > 0) {
    ssize_t done = write(fd, data, left < MOST_BYTES ? left : MOST_BYTES);
    if (done >= 0) {
      data += done;
      left -= (size_t)done;
    } else if (errno != EINTR)
      return errno;
  }
  return 0;
}

/* In one piece: a file of many pieces would be as many calls. */
static int write_edited(int fd, const file_t *file) {
  const char *data = file->data.buf;
  size_t size = (size_t)file->data.len, copied = 0, filled = 0;
  for (Py_ssize_t number = 0; number < file->edit_count; number++)
    size += (size_t)file->edits[number].new_size;
  char *whole = malloc(size + 1);
  if (whole == NULL)
    return ENOMEM;
  for (Py_ssize_t number = 0; number < file->edit_count; number++) {
    const edit_t *edit = &file->edits[number];
    size_t before = (size_t)edit->offset - copied;
    memcpy(whole + filled, data + copied, before);
    memcpy(whole + filled + before, edit->new, (size_t)edit->new_size);
    filled += before + (size_t)edit->new_size;
    copied = (size_t)(edit->offset + edit->old_size);
  }
  memcpy(whole + filled, data + copied, (size_t)file->data.len - copied);
  int error = write_bytes(fd, whole, filled + (size_t)file->data.len - copied);
  free(whole);
  return error;
}

/* The text of a group file has a zero byte wherever the kernel key stands. */
static int write_group_text(int fd, const kernel_t *kernel) {
  const char *text = kernel->group_text, *end = text + kernel->group_size;
  size_t key_size = strlen(kernel->key), size = (size_t)kernel->group_size, filled = 0;
  for (const char *at = text; (at = memchr(at, 0, (size_t)(end - at))) != NULL; at++)
    size += key_size;
  char *whole = malloc(size + 1);
  if (whole == NULL)
    return ENOMEM;
  for (const char *at = text; at < end;) {
    const char *next = memchr(at, 0, (size_t)(end - at));
    size_t part = (size_t)((next == NULL ? end : next) - at);
    memcpy(whole + filled, at, part);
    filled += part;
    if (next != NULL) {
      memcpy(whole + filled, kernel->key, key_size);
      filled += key_size;
    }
    at += part + 1;
  }
  int error = write_bytes(fd, whole, filled);
  free(whole);
  return error;
}

/* Fills in the path of a file below its temporary directory, whose own name ends at `slash`; to
 * open the directory first would take longer. Returns 0 or an error. */
static int name_file(char *path, size_t slash, const char *name) {
  size_t size = strnlen(name, NAME_BYTES);
  if (size == NAME_BYTES)
    return ENAMETOOLONG;
  memcpy(path + slash + 1, name, size + 1);
  return 0;
}

/* Without a file it is the group file that is written. */
static int write_file(int root, char *path, size_t slash, const kernel_t *kernel,
                      const file_t *file) {
  int error = name_file(path, slash, file == NULL ? kernel->group_name : file->name);
  int fd = error != 0 ? -1 : create_at(root, path);
  if (fd < 0)
    return error != 0 ? error : errno;
  if (file == NULL)
    error = write_group_text(fd, kernel);
  else if (file->edit_count > 0)
    error = write_edited(fd, file);
  else
    error = write_bytes(fd, file->data.buf, (size_t)file->data.len);
  if (close(fd) < 0 && error == 0)
    error = errno;
  return error;
}

static void remove_file(int root, char *path, size_t slash, const char *name) {
  if (name_file(path, slash, name) == 0)
    unlinkat(root, path, 0);
}

static int write_files(int root, const kernel_t *kernel) {
  char path[2 * NAME_BYTES];
  Py_ssize_t written = 0;
  int error = 0;
  size_t slash = strlen(kernel->temporary);
  memcpy(path, kernel->temporary, slash);
  path[slash] = '/';
  while (written < kernel->count && error == 0)
    error = write_file(root, path, slash, kernel, &kernel->files[written++]);
  if (error == 0)
    error = write_file(root, path, slash, kernel, NULL);
  if (error != 0) {
    remove_file(root, path, slash, kernel->group_name);
    while (written > 0)
      remove_file(root, path, slash, kernel->files[--written].name);
  }
  return error;
}

/* Whether Triton could surely read it, as far as nobody has looked.  Returns 0, NO_BINARY or
 * UNSURE. */
static int check_head(const kernel_t *kernel) {
  if (kernel->binary == ALREADY_CHECKED)
    return 0;
  const file_t *binary = &kernel->files[kernel->binary];
  if (!is_whole_elf(binary->data.buf, (uint64_t)binary->data.len))
    return NO_BINARY;
  if (kernel->metadata == ALREADY_CHECKED)
    return 0;
  const Py_buffer *metadata = &kernel->files[kernel->metadata].data;
  return is_readable_head(metadata->buf, (size_t)metadata->len, kernel->key, binary->name) ? 0
                                                                                           : UNSURE;
}

/* Its files were hashed.  Returns 0, DAMAGED, NO_BINARY, UNSURE or an error, after which nothing is
 * left, or minus the error of the rename, after which the temporary directory is. */
static int write_kernel(int root, const kernel_t *kernel) {
  int error = compare_digests(kernel);
  if (error == 0)
    error = check_head(kernel);
  if (error != 0)
    return error;
  if (strnlen(kernel->temporary, NAME_BYTES) == NAME_BYTES)
    return ENAMETOOLONG;
  if (mkdirat(root, kernel->temporary, 0777) < 0)
    return errno;
  error = write_files(root, kernel);
  if (error != 0) {
    unlinkat(root, kernel->temporary, AT_REMOVEDIR);
    return error;
  }
  return renameat(root, kernel->temporary, root, kernel->key) < 0 ? -errno : 0;
}

/* Whether the kernel, or what is in its place, is at fault; any other error would meet the next
 * kernel too. */
static int is_its_own(int code) {
  return code >= DAMAGED || code == -ENOTEMPTY || code == -EEXIST || code == -ENOTDIR ||
         code == -EISDIR;
}

/* Hashes a few kernels and writes them: what was just hashed is in the processor's cache.  Returns
 * whether another one is to be begun. */
static int write_together(batch_t *batch, kernel_t *kernels, Py_ssize_t count, void *context) {
  hashed_t hashed = {kernels, count, 0, 0};
  int is_hashed = hash_all(batch->sha256, context, next_file, &hashed);
  for (Py_ssize_t number = 0; number < count && !atomic_load(&batch->stopped); number++) {
    kernels[number].code = is_hashed ? write_kernel(batch->root, &kernels[number]) : ENOMEM;
    if (kernels[number].code != 0 && !is_its_own(kernels[number].code))
      atomic_store(&batch->stopped, 1);
  }
  return !atomic_load(&batch->stopped);
}

static void *write_some(void *argument) {
  batch_t *batch = argument;
  void *context = batch->compares ? new_context(batch->sha256) : NULL;
  for (int going = !atomic_load(&batch->stopped); going;) {
    long long number = atomic_fetch_add(&batch->next, HASHED_TOGETHER),
              left = batch->count - number;
    if (left <= 0)
      break;
    going = write_together(batch, &batch->kernels[number],
                           left < HASHED_TOGETHER ? left : HASHED_TOGETHER, context);
  }
  forget_context(batch->sha256, context);
  return NULL;
}

/* -------------------------------------------------------------------------- from and to Python */

static void release(batch_t *batch) {
  for (Py_ssize_t number = 0; number < batch->count; number++)
    release_kernel(&batch->kernels[number]);
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

/* Kernels that are being written.  Everything given is a tuple, which no other thread can change
 * meanwhile. */
typedef struct {
  PyObject_HEAD
  PyObject *path, *kernels, *threads; /* what the batch points into, and who works on it */
  batch_t batch;
  job_t job;
} writing_t;

static int open_directory(const char *path) {
  int fd;
  do
    fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  while (fd < 0 && errno == EINTR);
  return fd;
}

static void begin(writing_t *writing) {
  batch_t *batch = &writing->batch;
  const char *path = PyBytes_AsString(writing->path); /* which needs the interpreter */
  Py_BEGIN_ALLOW_THREADS
  batch->root = open_directory(path);
  for (Py_ssize_t number = 0; number < batch->count; number++)
    batch->kernels[number].code = batch->root < 0 ? errno : ECANCELED;
  Py_END_ALLOW_THREADS
  if (batch->root >= 0)
    begin_job(writing->threads, &writing->job, write_some, batch);
}

static void wait_for(writing_t *writing) {
  if (writing->job.begun && finish_job(writing->threads, &writing->job))
    close(writing->batch.root);
}

static PyObject *finish(PyObject *self, PyObject *nothing) {
  (void)nothing;
  wait_for((writing_t *)self);
  return codes_of(&((writing_t *)self)->batch);
}

static void forget(PyObject *self) {
  writing_t *writing = (writing_t *)self;
  PyTypeObject *type = Py_TYPE(self);
  wait_for(writing);
  release(&writing->batch);
  Py_XDECREF(writing->threads);
  Py_XDECREF(writing->path);
  Py_XDECREF(writing->kernels);
  ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
  Py_DECREF(type);
}

static PyMethodDef writing_methods[] = {
    {"finish", finish, METH_NOARGS,
     "finish(): waits until all is written; returns a code for each kernel."},
    {NULL, NULL, 0, NULL}};

static PyType_Slot writing_slots[] = {
    {Py_tp_dealloc, forget}, {Py_tp_methods, writing_methods}, {0, NULL}};

static PyType_Spec writing_spec = {"bundler.lifecycle._kernel_writer.Writing", sizeof(writing_t), 0,
                                   Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
                                   writing_slots};

static PyObject *begin_writing(PyObject *module, PyObject *arguments) {
  state_t *state = PyModule_GetState(module);
  writing_t *writing = (writing_t *)PyType_GenericAlloc((PyTypeObject *)state->work_type, 0);
  if (writing == NULL)
    return NULL;
  /* The allocation is zero: until the first kernel was read there is nothing to release, and
   * nothing to wait for. */
  PyObject *threads;
  if (!PyArg_ParseTuple(arguments, "O&O!O", PyUnicode_FSConverter, &writing->path, &PyTuple_Type,
                        &writing->kernels, &threads)) {
    writing->kernels = NULL;
    goto failed;
  }
  Py_INCREF(writing->kernels);
  Py_ssize_t count = PyTuple_Size(writing->kernels);
  writing->batch.sha256 = &state->sha256;
  writing->batch.kernels = calloc((size_t)count + 1, sizeof(kernel_t));
  if (writing->batch.kernels == NULL) {
    PyErr_NoMemory();
    goto failed;
  }
  for (Py_ssize_t number = 0; number < count; number++) {
    writing->batch.count++;
    if (!read_kernel(PyTuple_GetItem(writing->kernels, number), &state->sha256,
                     &writing->batch.kernels[number], &writing->batch.compares))
      goto failed;
  }
  writing->threads = threads_of(module, threads, count);
  if (writing->threads == NULL)
    goto failed;
  begin(writing);
  return (PyObject *)writing;
failed:
  Py_DECREF(writing);
  return NULL;
}

static PyMethodDef methods[] = {
    {"begin_writing", begin_writing, METH_VARARGS,
     "begin_writing(root, kernels, threads): begins what "
     "bundler.lifecycle.kernel_writer.write_kernels does; returns a Writing."},
    {"start_threads", start, METH_O,
     "start_threads(count): returns Threads, which one begin_writing after the other is given."},
    {NULL, NULL, 0, NULL}};

static int set_up(PyObject *module) {
  if (set_up_state(module, "Writing", &writing_spec) < 0)
    return -1;
  return PyModule_AddIntConstant(module, "COMPARES_DIGESTS",
                                 can_hash(&((state_t *)PyModule_GetState(module))->sha256));
}

static PyModuleDef_Slot slots[] = {{Py_mod_exec, set_up}, {0, NULL}};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_kernel_writer", "Writes kernels while Python runs.",
    sizeof(state_t),       methods,          slots,
    visit_state,           clear_state,      free_state};

PyMODINIT_FUNC PyInit__kernel_writer(void) { return PyModuleDef_Init(&definition); }

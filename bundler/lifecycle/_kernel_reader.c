/* SPDX-License-Identifier: Apache-2.0
 *
 * begin_reading(paths, most_files, most_bytes, threads): begins to read directories of a few small
 * files, as kernels have.
 *
 * bundler/lifecycle/kernel_directory.py says what for.  It returns at once, a Reading.  Threads of our
 * own list the files first; then `go_on` makes room for them, which needs the interpreter, and
 * threads read and hash them; `finish` has them.  Python looks at kernels that were read before
 * meanwhile.  Anything out of the ordinary is left to Python, which knows what to say about it.
 *
 * A Reading owns its batch, and holds the paths that the batch points into, until its job has
 * ended.  No lock is held: threads take directories by an atomic number.  The bytes objects are
 * made, given out and dropped with the interpreter; threads only fill their memory, before anybody
 * else has seen them.
 */

#include "_kernel_threads.h"
#include <dirent.h>

typedef struct {
  char *name;
  struct stat seen;
  PyObject *bytes;
  char *data;
  unsigned char digest[DIGEST_BYTES];
} file_t;

typedef struct {
  const char *path;
  file_t *files;
  Py_ssize_t count;
  int sound; /* 0: for Python to look at */
} directory_t;

typedef struct {
  directory_t *directories;
  const sha256_t *sha256;
  Py_ssize_t count, most_files;
  atomic_llong next;
} batch_t;

/* --------------------------------------------------------------------- reading, without Python */

static int is_same(const struct stat *one, const struct stat *two) {
#ifdef __APPLE__
  const struct timespec *here = &one->st_mtimespec, *there = &two->st_mtimespec;
#else
  const struct timespec *here = &one->st_mtim, *there = &two->st_mtim;
#endif
  return one->st_ino == two->st_ino && one->st_dev == two->st_dev && one->st_size == two->st_size &&
         S_ISREG(one->st_mode) && S_ISREG(two->st_mode) && here->tv_sec == there->tv_sec &&
         here->tv_nsec == there->tv_nsec;
}

/* Returns the next name, NULL after the last one; errno is 0 unless the listing failed. */
static const char *next_name(DIR *listing) {
  struct dirent *found;
  do {
    errno = 0;
    found = readdir(listing);
  } while (found != NULL && (strcmp(found->d_name, ".") == 0 || strcmp(found->d_name, "..") == 0));
  return found == NULL ? NULL : found->d_name;
}

static int add_file(directory_t *directory, int folder, const char *name, Py_ssize_t most) {
  file_t *file = &directory->files[directory->count];
  if (directory->count == most || fstatat(folder, name, &file->seen, AT_SYMLINK_NOFOLLOW) < 0 ||
      !S_ISREG(file->seen.st_mode))
    return 0;
  file->name = strdup(name);
  directory->count += file->name != NULL;
  return file->name != NULL;
}

/* Lists the files and notes what each looks like. */
static void look(directory_t *directory, Py_ssize_t most) {
  const char *name;
  DIR *listing = opendir(directory->path);
  directory->files = calloc((size_t)most + 1, sizeof(file_t));
  if (listing != NULL && directory->files != NULL) {
    int fine = 1;
    while (fine && (name = next_name(listing)) != NULL)
      fine = add_file(directory, dirfd(listing), name, most);
    directory->sound = fine && errno == 0;
  }
  if (listing != NULL)
    closedir(listing);
}

static int read_file(int folder, const file_t *file) {
  struct stat opened;
  off_t done = 0;
  /* Without O_NONBLOCK opening a named pipe waits for somebody to write to it. */
  int fd = openat(folder, file->name, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
  if (fd < 0)
    return 0;
  if (fstat(fd, &opened) == 0 && is_same(&opened, &file->seen))
    while (done < file->seen.st_size) {
      ssize_t part = read(fd, file->data + done, (size_t)(file->seen.st_size - done));
      if (part <= 0 && !(part < 0 && errno == EINTR))
        break;
      done += part > 0 ? part : 0;
    }
  else
    done = -1;
  close(fd);
  return done == file->seen.st_size;
}

/* Whether each file is the one that was listed, and no other is there. */
static int is_unchanged(const directory_t *directory, DIR *listing) {
  const char *name;
  struct stat now;
  Py_ssize_t found = 0;
  for (; (name = next_name(listing)) != NULL; found++) {
    Py_ssize_t number = 0;
    while (number < directory->count && strcmp(directory->files[number].name, name) != 0)
      number++;
    if (number == directory->count ||
        fstatat(dirfd(listing), name, &now, AT_SYMLINK_NOFOLLOW) < 0 ||
        !is_same(&now, &directory->files[number].seen))
      return 0;
  }
  return errno == 0 && found == directory->count;
}

/* The files of a directory that are hashed together. */
typedef struct {
  directory_t *directory;
  Py_ssize_t file;
} hashed_t;

static int next_file(void *state, hashing_t *hashing) {
  hashed_t *hashed = state;
  if (hashed->file == hashed->directory->count)
    return 0;
  file_t *file = &hashed->directory->files[hashed->file++];
  *hashing = (hashing_t){file->data, (size_t)file->seen.st_size, file->digest};
  return 1;
}

static void read_files(const batch_t *batch, directory_t *directory, void *context) {
  DIR *listing = directory->sound ? opendir(directory->path) : NULL;
  int fine = listing != NULL;
  for (Py_ssize_t number = 0; fine && number < directory->count; number++)
    fine = read_file(dirfd(listing), &directory->files[number]);
  hashed_t hashed = {directory, 0};
  fine = fine && (!can_hash(batch->sha256) || hash_all(batch->sha256, context, next_file, &hashed));
  directory->sound = fine && is_unchanged(directory, listing);
  if (listing != NULL)
    closedir(listing);
}

/* Returns the next directory that no thread has taken, NULL after the last one. */
static directory_t *next_directory(batch_t *batch) {
  long long number = atomic_fetch_add(&batch->next, 1);
  return number < batch->count ? &batch->directories[number] : NULL;
}

static void *look_at_some(void *argument) {
  batch_t *batch = argument;
  for (directory_t *directory; (directory = next_directory(batch)) != NULL;)
    look(directory, batch->most_files);
  return NULL;
}

static void *read_some(void *argument) {
  batch_t *batch = argument;
  void *context = new_context(batch->sha256);
  for (directory_t *directory; (directory = next_directory(batch)) != NULL;)
    read_files(batch, directory, context);
  forget_context(batch->sha256, context);
  return NULL;
}

/* -------------------------------------------------------------------------- from and to Python */

/* Makes room for the files of directories, as far as `most` bytes in all go; returns 0 with an
 * exception. */
static int allocate(batch_t *batch, Py_ssize_t most) {
  for (Py_ssize_t number = 0; number < batch->count; number++) {
    directory_t *directory = &batch->directories[number];
    Py_ssize_t needed = 0;
    for (Py_ssize_t each = 0; directory->sound && each < directory->count; each++) {
      directory->sound = directory->files[each].seen.st_size <= most - needed;
      needed += directory->sound ? (Py_ssize_t)directory->files[each].seen.st_size : 0;
    }
    for (Py_ssize_t each = 0; directory->sound && each < directory->count; each++) {
      file_t *file = &directory->files[each];
      file->bytes = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)file->seen.st_size);
      if (file->bytes == NULL)
        return 0;
      file->data = PyBytes_AsString(file->bytes);
    }
    most -= directory->sound ? needed : 0;
  }
  return 1;
}

static int set_item(PyObject *dict, PyObject *name, PyObject *value) {
  int fine = value != NULL && PyDict_SetItem(dict, name, value) == 0;
  Py_XDECREF(value);
  return fine;
}

/* Returns None, or two dicts: the bytes and the digest of each file by name. */
static PyObject *files_of(const directory_t *directory, int hashed) {
  PyObject *bytes, *digests, *both;
  if (!directory->sound)
    return Py_NewRef(Py_None);
  bytes = PyDict_New();
  digests = PyDict_New();
  both = bytes == NULL || digests == NULL ? NULL : PyTuple_Pack(2, bytes, digests);
  for (Py_ssize_t number = 0; both != NULL && number < directory->count; number++) {
    const file_t *file = &directory->files[number];
    PyObject *name = PyUnicode_DecodeFSDefault(file->name);
    if (name == NULL || !set_item(bytes, name, Py_NewRef(file->bytes)) ||
        (hashed && !set_item(digests, name,
                             PyBytes_FromStringAndSize((const char *)file->digest, DIGEST_BYTES))))
      Py_CLEAR(both);
    Py_XDECREF(name);
  }
  Py_XDECREF(bytes);
  Py_XDECREF(digests);
  return both;
}

static PyObject *found_by(const batch_t *batch) {
  PyObject *found = PyList_New(batch->count);
  for (Py_ssize_t number = 0; found != NULL && number < batch->count; number++) {
    PyObject *files = files_of(&batch->directories[number], can_hash(batch->sha256));
    if (files == NULL || PyList_SetItem(found, number, files) < 0)
      Py_CLEAR(found);
  }
  return found;
}

static void release(batch_t *batch) {
  for (Py_ssize_t number = 0; batch->directories != NULL && number < batch->count; number++) {
    directory_t *directory = &batch->directories[number];
    while (directory->count > 0) {
      directory->count--;
      free(directory->files[directory->count].name);
      Py_XDECREF(directory->files[directory->count].bytes);
    }
    free(directory->files);
  }
  free(batch->directories);
}

/* Directories that are being read. */
typedef struct {
  PyObject_HEAD
  PyObject *paths, *threads; /* what the batch points into, and who works on it */
  Py_ssize_t most_bytes;
  batch_t batch;
  job_t job;
  enum { LOOKING, READING_FILES } step;
} reading_t;

static void leave_to_python(batch_t *batch) {
  for (Py_ssize_t number = 0; number < batch->count; number++)
    batch->directories[number].sound = 0;
}

/* In a child that was forked meanwhile, nobody knows what the threads did. */
static void wait_for(reading_t *reading) {
  if (finish_job(reading->threads, &reading->job))
    return;
  reading->job.begun = 0;
  leave_to_python(&reading->batch);
}

/* Waits until the files are listed, and begins to read them; calling it again is fine.  Returns 0
 * with an exception. */
static int begin_files(reading_t *reading) {
  if (reading->step == READING_FILES)
    return 1;
  wait_for(reading);
  reading->step = READING_FILES;
  if (!allocate(&reading->batch, reading->most_bytes)) {
    leave_to_python(&reading->batch);
    return 0;
  }
  atomic_store(&reading->batch.next, 0);
  begin_job(reading->threads, &reading->job, read_some, &reading->batch);
  return 1;
}

static PyObject *go_on(PyObject *self, PyObject *nothing) {
  (void)nothing;
  return begin_files((reading_t *)self) ? Py_NewRef(Py_None) : NULL;
}

static PyObject *finish(PyObject *self, PyObject *nothing) {
  reading_t *reading = (reading_t *)self;
  (void)nothing;
  if (!begin_files(reading))
    return NULL;
  wait_for(reading);
  return found_by(&reading->batch);
}

static void forget(PyObject *self) {
  reading_t *reading = (reading_t *)self;
  PyTypeObject *type = Py_TYPE(self);
  wait_for(reading);
  release(&reading->batch);
  Py_XDECREF(reading->threads);
  Py_XDECREF(reading->paths);
  ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
  Py_DECREF(type);
}

static PyMethodDef reading_methods[] = {
    {"go_on", go_on, METH_NOARGS,
     "go_on(): waits until the files are listed, and begins to read them."},
    {"finish", finish, METH_NOARGS,
     "finish(): waits until all is read; returns bytes and digests for each directory, or None."},
    {NULL, NULL, 0, NULL}};

static PyType_Slot reading_slots[] = {
    {Py_tp_dealloc, forget}, {Py_tp_methods, reading_methods}, {0, NULL}};

static PyType_Spec reading_spec = {"bundler.lifecycle._kernel_reader.Reading", sizeof(reading_t), 0,
                                   Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
                                   reading_slots};

static PyObject *begin_reading(PyObject *module, PyObject *arguments) {
  state_t *state = PyModule_GetState(module);
  /* The allocation is zero: until the first path was read there is nothing to release, and nothing
   * to wait for. */
  reading_t *reading = (reading_t *)PyType_GenericAlloc((PyTypeObject *)state->work_type, 0);
  batch_t *batch = reading == NULL ? NULL : &reading->batch;
  if (reading == NULL)
    return NULL;
  batch->sha256 = &state->sha256;
  PyObject *threads;
  if (!PyArg_ParseTuple(arguments, "O!nnO", &PyTuple_Type, &reading->paths, &batch->most_files,
                        &reading->most_bytes, &threads)) {
    reading->paths = NULL;
    goto failed;
  }
  Py_INCREF(reading->paths);
  if (batch->most_files < 0 || batch->most_files > 4096) {
    PyErr_SetString(PyExc_ValueError, "most_files: expected 0 to 4096");
    goto failed;
  }
  Py_ssize_t count = PyTuple_Size(reading->paths);
  batch->directories = calloc((size_t)count + 1, sizeof(directory_t));
  if (batch->directories == NULL) {
    PyErr_NoMemory();
    goto failed;
  }
  for (; batch->count < count; batch->count++) {
    char *text = NULL; /* of bytes, which the tuple keeps alive */
    if (PyBytes_AsStringAndSize(PyTuple_GetItem(reading->paths, batch->count), &text, NULL) < 0)
      goto failed;
    batch->directories[batch->count].path = text;
  }
  reading->threads = threads_of(module, threads, count);
  if (reading->threads == NULL)
    goto failed;
  begin_job(reading->threads, &reading->job, look_at_some, batch);
  return (PyObject *)reading;
failed:
  Py_DECREF(reading);
  return NULL;
}

static PyMethodDef methods[] = {
    {"begin_reading", begin_reading, METH_VARARGS,
     "begin_reading(paths, most_files, most_bytes, threads): begins what "
     "bundler.lifecycle.kernel_reader says; returns a Reading."},
    {"start_threads", start, METH_O,
     "start_threads(count): returns Threads, which one begin_reading after the other is given."},
    {NULL, NULL, 0, NULL}};

static int set_up(PyObject *module) { return set_up_state(module, "Reading", &reading_spec); }

static PyModuleDef_Slot slots[] = {{Py_mod_exec, set_up}, {0, NULL}};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_kernel_reader", "Reads kernels while Python runs.",
    sizeof(state_t),       methods,          slots,
    visit_state,           clear_state,      free_state};

PyMODINIT_FUNC PyInit__kernel_reader(void) { return PyModuleDef_Init(&definition); }

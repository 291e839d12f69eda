/* SPDX-License-Identifier: Apache-2.0
 *
 * read_directories(paths, most_files, most_bytes, threads): reads directories of a few small files, as kernels have.
 *
 * bundler/lifecycle/kernel_reader.py says what for.  The interpreter lock is released while the disk is asked, so that Python looks
 * at kernels that were read before.  Anything out of the ordinary is left to Python, which knows what to say about it.
 */

#include "_kernel_threads.h"
#include <dirent.h>

typedef struct {
  char *name;
  struct stat seen;
  PyObject *bytes;
  char *data;
} file_t;

typedef struct {
  const char *path;
  file_t *files;
  Py_ssize_t count;
  int sound; /* 0: for Python to look at */
} directory_t;

typedef struct {
  directory_t *directories;
  Py_ssize_t count, most_files;
  void (*work)(directory_t *, Py_ssize_t);
  atomic_llong next;
} batch_t;

/* ---------------------------------------------------------------------------------------------- reading, without Python */

static int is_same(const struct stat *one, const struct stat *two) {
#ifdef __APPLE__
  const struct timespec *here = &one->st_mtimespec, *there = &two->st_mtimespec;
#else
  const struct timespec *here = &one->st_mtim, *there = &two->st_mtim;
#endif
  return one->st_ino == two->st_ino && one->st_dev == two->st_dev && one->st_size == two->st_size &&
         S_ISREG(one->st_mode) && S_ISREG(two->st_mode) && here->tv_sec == there->tv_sec && here->tv_nsec == there->tv_nsec;
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
  if (directory->count == most || fstatat(folder, name, &file->seen, AT_SYMLINK_NOFOLLOW) < 0 || !S_ISREG(file->seen.st_mode))
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
    if (number == directory->count || fstatat(dirfd(listing), name, &now, AT_SYMLINK_NOFOLLOW) < 0 ||
        !is_same(&now, &directory->files[number].seen))
      return 0;
  }
  return errno == 0 && found == directory->count;
}

static void read_all(directory_t *directory, Py_ssize_t most) {
  DIR *listing = directory->sound ? opendir(directory->path) : NULL;
  int fine = listing != NULL;
  (void)most;
  for (Py_ssize_t number = 0; fine && number < directory->count; number++)
    fine = read_file(dirfd(listing), &directory->files[number]);
  directory->sound = fine && is_unchanged(directory, listing);
  if (listing != NULL)
    closedir(listing);
}

static void *work_some(void *argument) {
  batch_t *batch = argument;
  for (;;) {
    long long number = atomic_fetch_add(&batch->next, 1);
    if (number >= batch->count)
      return NULL;
    batch->work(&batch->directories[number], batch->most_files);
  }
}

static void work_all(batch_t *batch, long threads, void (*work)(directory_t *, Py_ssize_t)) {
  batch->work = work;
  atomic_store(&batch->next, 0);
  work_in_threads(work_some, batch, threads);
}

/* ------------------------------------------------------------------------------------------------------ from and to Python */

/* Makes room for the files of directories, as far as `most` bytes in all go; returns 0 with an exception. */
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

static PyObject *files_of(const directory_t *directory) {
  PyObject *files;
  if (!directory->sound)
    return Py_NewRef(Py_None);
  files = PyDict_New();
  for (Py_ssize_t number = 0; files != NULL && number < directory->count; number++) {
    PyObject *name = PyUnicode_DecodeFSDefault(directory->files[number].name);
    if (name == NULL || PyDict_SetItem(files, name, directory->files[number].bytes) < 0)
      Py_CLEAR(files);
    Py_XDECREF(name);
  }
  return files;
}

static PyObject *found_by(const batch_t *batch) {
  PyObject *found = PyList_New(batch->count);
  for (Py_ssize_t number = 0; found != NULL && number < batch->count; number++) {
    PyObject *files = files_of(&batch->directories[number]);
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

static PyObject *read_directories(PyObject *module, PyObject *arguments) {
  PyObject *paths, *found = NULL;
  Py_ssize_t most_bytes;
  batch_t batch = {.count = 0};
  long threads;
  int fine = 1;
  (void)module;
  if (!PyArg_ParseTuple(arguments, "O!nnl", &PyTuple_Type, &paths, &batch.most_files, &most_bytes, &threads))
    return NULL;
  if (batch.most_files < 0 || batch.most_files > 4096) {
    PyErr_SetString(PyExc_ValueError, "most_files: expected 0 to 4096");
    return NULL;
  }
  batch.count = PyTuple_Size(paths);
  batch.directories = calloc((size_t)batch.count + 1, sizeof(directory_t));
  if (batch.directories == NULL)
    return PyErr_NoMemory();
  for (Py_ssize_t number = 0; fine && number < batch.count; number++) {
    char *text = NULL; /* of bytes, which the tuple keeps alive */
    fine = PyBytes_AsStringAndSize(PyTuple_GetItem(paths, number), &text, NULL) == 0;
    batch.directories[number].path = text;
  }
  if (fine) {
    Py_BEGIN_ALLOW_THREADS
    work_all(&batch, threads, look);
    Py_END_ALLOW_THREADS
    fine = allocate(&batch, most_bytes);
  }
  if (fine) {
    Py_BEGIN_ALLOW_THREADS
    work_all(&batch, threads, read_all);
    Py_END_ALLOW_THREADS
    found = found_by(&batch);
  }
  release(&batch);
  return found;
}

static PyMethodDef methods[] = {
    {"read_directories", read_directories, METH_VARARGS,
     "read_directories(paths, most_files, most_bytes, threads): as bundler.lifecycle.kernel_reader says."},
    {NULL, NULL, 0, NULL}};

static PyModuleDef_Slot slots[] = {{0, NULL}};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_kernel_reader", "Reads kernels while Python runs.", 0, methods,
                                    slots, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__kernel_reader(void) { return PyModuleDef_Init(&module); }

/* SPDX-License-Identifier: Apache-2.0
 *
 * The head of _kernel_writer.c and _kernel_reader.c, which no other file includes: what has to be
 * defined before the first header, the state of either module, and `Threads`, a Python object,
 * whose threads need no interpreter and work off jobs while Python does something else.
 *
 * The threads stay for the next job: a new one begins on the processor of the one that makes it,
 * which has to stop for it there.  Python threads would not do: they begin when the caller lets go
 * of the interpreter, after milliseconds.
 *
 * A pool owns its threads, and ends them when its Python object goes.  Its lock guards the list of
 * jobs and the counts in each job; it is never held while a job runs, nor by a thread that waits
 * for the interpreter.  A job is memory of whoever begins it, who waits for it before that memory
 * goes, and holds a reference to the `Threads`.
 */

#ifndef BUNDLER_KERNEL_THREADS_H
#define BUNDLER_KERNEL_THREADS_H

#define Py_LIMITED_API 0x030b0000
#define PY_SSIZE_T_CLEAN
#define _GNU_SOURCE
#define _FILE_OFFSET_BITS 64
#include <Python.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include "_sha256.h"

#define MOST_THREADS 16
/* A thread calls nothing that needs more; glibc's own stacks would take 8 MB of address space. */
#define STACK_BYTES (256 * 1024)

/* Starts at most `most` threads that call `work` with `argument`; returns how many there are. */
static long start_threads(pthread_t *threads, long most, void *(*work)(void *), void *argument) {
  pthread_attr_t attributes;
  sigset_t all, before;
  long started = 0;
  if (most <= 0 || pthread_attr_init(&attributes) != 0)
    return 0;
  pthread_attr_setstacksize(&attributes, STACK_BYTES);
  sigfillset(&all); /* signals are for the program's own threads */
  pthread_sigmask(SIG_SETMASK, &all, &before);
  while (started < most && pthread_create(&threads[started], &attributes, work, argument) == 0)
    started++;
  pthread_sigmask(SIG_SETMASK, &before, NULL);
  pthread_attr_destroy(&attributes);
  return started;
}

/* `work` is called with `argument` in some of the threads at once, and returns where nothing of the
 * job is left to be begun. */
typedef struct job {
  void *(*work)(void *);
  void *argument;
  struct job *following;
  pid_t process;
  int begun, apart, queued, workers, finished;
} job_t;

typedef struct {
  pthread_mutex_t lock;
  pthread_cond_t work, done;
  pthread_t threads[MOST_THREADS];
  long started, idle;
  pid_t process;
  int closing;
  job_t *first;
} pool_t;

static void *serve(void *argument) {
  pool_t *pool = argument;
  pthread_mutex_lock(&pool->lock);
  while (pool->first != NULL || !pool->closing) {
    job_t *job = pool->first;
    if (job == NULL) {
      pool->idle++;
      pthread_cond_wait(&pool->work, &pool->lock);
      pool->idle--;
      continue;
    }
    job->workers++;
    pthread_mutex_unlock(&pool->lock);
    job->work(job->argument);
    pthread_mutex_lock(&pool->lock);
    /* Only the first one is ever taken. */
    if (job->queued)
      pool->first = job->following;
    job->queued = 0;
    if (--job->workers == 0) {
      job->finished = 1;
      pthread_cond_broadcast(&pool->done);
    }
  }
  pthread_mutex_unlock(&pool->lock);
  return NULL;
}

/* A few of the threads begin with it.  One always leaves its processor to the caller, until that
 * waits; then all join in. */
static void add_job(pool_t *pool, job_t *job) {
  job_t **last = &pool->first;
  pthread_mutex_lock(&pool->lock);
  while (*last != NULL)
    last = &(*last)->following;
  *last = job;
  job->queued = 1;
  for (long wake = 0; wake <= pool->started / 4 && (wake < pool->idle - 1 || pool->started == 1);
       wake++)
    pthread_cond_signal(&pool->work);
  pthread_mutex_unlock(&pool->lock);
}

static void wait_for_job(pool_t *pool, job_t *job) {
  pthread_mutex_lock(&pool->lock);
  if (!job->finished)
    pthread_cond_broadcast(&pool->work);
  while (!job->finished)
    pthread_cond_wait(&pool->done, &pool->lock);
  pthread_mutex_unlock(&pool->lock);
}

/* In a child that was forked meanwhile the threads are not there, and the lock may be held for
 * ever. */
static int is_ours(const pool_t *pool) { return pool->process == getpid(); }

/* --------------------------------------------------------------------------------- with Python */

/* Of a module: its types, and how it hashes. */
typedef struct {
  PyObject *threads_type, *work_type; /* Threads, and Writing or Reading */
  sha256_t sha256;
} state_t;

static int visit_state(PyObject *module, visitproc visit, void *arg) {
  state_t *state = PyModule_GetState(module);
  Py_VISIT(state->threads_type);
  Py_VISIT(state->work_type);
  return 0;
}

static int clear_state(PyObject *module) {
  state_t *state = PyModule_GetState(module);
  Py_CLEAR(state->threads_type);
  Py_CLEAR(state->work_type);
  return 0;
}

static void free_state(void *module) {
  clear_state(module);
  forget_sha256(&((state_t *)PyModule_GetState(module))->sha256);
}

typedef struct {
  PyObject_HEAD
  pool_t pool;
} threads_t;

static PyObject *new_threads(PyObject *module, long count) {
  state_t *state = PyModule_GetState(module);
  threads_t *threads = (threads_t *)PyType_GenericAlloc((PyTypeObject *)state->threads_type, 0);
  if (threads == NULL)
    return NULL;
  pool_t *pool = &threads->pool;
  pthread_mutex_init(&pool->lock, NULL);
  pthread_cond_init(&pool->work, NULL);
  pthread_cond_init(&pool->done, NULL);
  pool->process = getpid();
  pool->started =
      start_threads(pool->threads, count < MOST_THREADS ? count : MOST_THREADS, serve, pool);
  return (PyObject *)threads;
}

/* Each job has a reference, so none is left. */
static void end_threads(PyObject *self) {
  PyTypeObject *type = Py_TYPE(self);
  pool_t *pool = &((threads_t *)self)->pool;
  if (is_ours(pool)) {
    Py_BEGIN_ALLOW_THREADS
    pthread_mutex_lock(&pool->lock);
    pool->closing = 1;
    pthread_cond_broadcast(&pool->work);
    pthread_mutex_unlock(&pool->lock);
    while (pool->started > 0)
      pthread_join(pool->threads[--pool->started], NULL);
    Py_END_ALLOW_THREADS
    pthread_cond_destroy(&pool->done);
    pthread_cond_destroy(&pool->work);
    pthread_mutex_destroy(&pool->lock);
  }
  ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
  Py_DECREF(type);
}

/* start_threads(count): returns Threads, for one job after the other. */
static PyObject *start(PyObject *module, PyObject *count) {
  long threads = PyLong_AsLong(count);
  return threads == -1 && PyErr_Occurred() ? NULL : new_threads(module, threads);
}

/* Returns the Threads that were given, or new ones for a job that has so many parts. */
static PyObject *threads_of(PyObject *module, PyObject *given, Py_ssize_t parts) {
  int is_threads = PyObject_IsInstance(given, ((state_t *)PyModule_GetState(module))->threads_type);
  if (is_threads != 0)
    return is_threads < 0 ? NULL : Py_NewRef(given);
  long count = PyLong_AsLong(given);
  return count == -1 && PyErr_Occurred() ? NULL
                                         : new_threads(module, count < parts ? count : (long)parts);
}

static void begin_job(PyObject *threads, job_t *job, void *(*work)(void *), void *argument) {
  pool_t *pool = &((threads_t *)threads)->pool;
  *job = (job_t){.work = work, .argument = argument, .process = getpid(), .begun = 1};
  job->apart = is_ours(pool) && pool->started > 0;
  if (job->apart)
    add_job(pool, job);
}

/* The interpreter lock is held, and released while this waits; where there is no thread, this does
 * everything.  Calling it again is fine, but not for two threads at once.  Returns 0 in a child
 * that was forked meanwhile: what was done of the job is unknown there. */
static int finish_job(PyObject *threads, job_t *job) {
  if (!job->begun)
    return 1;
  if (job->process != getpid())
    return 0;
  job->begun = 0;
  Py_BEGIN_ALLOW_THREADS
  if (job->apart)
    wait_for_job(&((threads_t *)threads)->pool, job);
  else
    job->work(job->argument);
  Py_END_ALLOW_THREADS
  return 1;
}

static PyType_Slot threads_slots[] = {{Py_tp_dealloc, end_threads}, {0, NULL}};

static PyType_Spec threads_spec = {"bundler.lifecycle.Threads", sizeof(threads_t), 0,
                                   Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
                                   threads_slots};

static PyObject *add_type(PyObject *module, const char *name, PyType_Spec *spec) {
  PyObject *type = PyType_FromModuleAndSpec(module, spec, NULL);
  if (type != NULL && PyModule_AddObjectRef(module, name, type) < 0)
    Py_CLEAR(type);
  return type;
}

/* Fills in the state of a module that is being loaded; -1 with an exception. */
static int set_up_state(PyObject *module, const char *name, PyType_Spec *spec) {
  state_t *state = PyModule_GetState(module);
  find_sha256(&state->sha256);
  state->threads_type = add_type(module, "Threads", &threads_spec);
  state->work_type = state->threads_type == NULL ? NULL : add_type(module, name, spec);
  return state->work_type == NULL ? -1 : 0;
}

#endif

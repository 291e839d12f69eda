/* SPDX-License-Identifier: Apache-2.0
 *
 * The head of _kernel_writer.c and _kernel_reader.c, which no other file includes: what has to be defined before the first header,
 * `work_in_threads`, by which both share their work among threads that need no interpreter, and `task_t`, work that goes on while Python
 * does something else.
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

#define MOST_THREADS 16
/* A thread calls nothing that needs more; glibc's own stacks would take 8 MB of address space each. */
#define STACK_BYTES (256 * 1024)

/* Starts at most `most` threads that call `work` with `argument`; returns how many there are now. */
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

/* Calls `work` with `batch` in each of the threads, and returns when all have returned.  The calling thread is one of the threads; where
 * no other can be had, it does everything. */
static void work_in_threads(void *(*work)(void *), void *batch, long threads) {
  pthread_t others[MOST_THREADS];
  long started = start_threads(others, threads - 1 < MOST_THREADS ? threads - 1 : MOST_THREADS, work, batch);
  work(batch);
  while (started > 0)
    pthread_join(others[--started], NULL);
}

/* Work that is begun now and waited for later.  All zero, it is done. */
typedef struct {
  void *(*work)(void *);
  void *argument;
  pthread_t thread;
  pid_t process;
  enum { DONE, NOT_BEGUN, UNDER_WAY } state;
} task_t;

/* A Python thread would not do: it begins only when the caller lets go of the interpreter, after milliseconds.  Unless the work is to go on
 * `apart`, or where no thread can be had, whoever waits does it. */
static void begin_task(task_t *task, void *(*work)(void *), void *argument, int apart) {
  *task = (task_t){.work = work, .argument = argument, .process = getpid(), .state = NOT_BEGUN};
  if (apart && start_threads(&task->thread, 1, work, argument) == 1)
    task->state = UNDER_WAY;
}

/* The interpreter lock is held, and released while this waits.  Not for two threads at once.  Returns 0 in a child that was forked
 * meanwhile: the thread is not there, and what it did of the work is unknown. */
static int wait_for_task(task_t *task) {
  int begun = task->state == UNDER_WAY;
  if (task->state == DONE)
    return 1;
  if (task->process != getpid())
    return 0;
  task->state = DONE;
  Py_BEGIN_ALLOW_THREADS
  if (begun)
    pthread_join(task->thread, NULL);
  else
    task->work(task->argument);
  Py_END_ALLOW_THREADS
  return 1;
}

#endif

/* SPDX-License-Identifier: Apache-2.0
 *
 * The head of _kernel_writer.c and _kernel_reader.c, which no other file includes: what has to be defined before the first header, and
 * `work_in_threads`, by which both share their work among threads while the interpreter lock is released.
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

/* Calls `work` with `batch` in each of the threads, and returns when all have returned.  The calling thread is one of the threads; where
 * no other can be had, it does everything. */
static void work_in_threads(void *(*work)(void *), void *batch, long threads) {
  pthread_t others[MOST_THREADS];
  pthread_attr_t attributes;
  sigset_t all, before;
  long started = 0;
  if (threads > 1 && pthread_attr_init(&attributes) == 0) {
    pthread_attr_setstacksize(&attributes, STACK_BYTES);
    sigfillset(&all); /* signals are for the program's own threads */
    pthread_sigmask(SIG_SETMASK, &all, &before);
    while (started < threads - 1 && started < MOST_THREADS && pthread_create(&others[started], &attributes, work, batch) == 0)
      started++;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&attributes);
  }
  work(batch);
  while (started > 0)
    pthread_join(others[--started], NULL);
}

#endif

// SPDX-License-Identifier: Apache-2.0
//
// Stops a program, or refuses it one thing, at its k-th call that changes files below a directory.
//
//   LD_PRELOAD=shim.so CRASH_ROOT=/dir CRASH_AT=7 CRASH_FAULT=torn CRASH_LOG=/elsewhere/log program
//
//   CRASH_ROOT   absolute path without symbolic links; only calls on what lies below it count
//   CRASH_AT     k, from 1; 0 or absent: a dry run, which only counts
//   CRASH_FAULT  kill          SIGKILL before the k-th call
//                killed-after  SIGKILL after it
//                torn          half of the bytes of a write, then SIGKILL; other calls: as kill
//                short         half of the bytes of a write, which is told, and no harm; other calls: nothing
//                enospc, eio   the k-th call fails with that error
//                enospc-from, eio-from   it and every later one fails
//   CRASH_LOG    file outside of CRASH_ROOT that gets a line a counted call: "name path", with "* " before each call that
//                got the fault. The number of lines of a dry run is the number of calls.
//
// A program that forks others for single runs preloads this without CRASH_ROOT, sets the variables in the child, and calls
// crash_arm() there; otherwise that happens when the program starts. Nothing is printed.
//
// The symbols are those that CPython's libpython imports from glibc (nm -D): it calls open64, openat64, pwrite64 and
// ftruncate64, never the names without 64, which are here for C extensions. What is not here: stdio (fopen), whose inner calls
// cannot be replaced; mkfifo, mknod, chown, extended attributes and io_uring, which we do not use. Reads are not counted.

#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

enum verdict { GO, FAIL, TEAR, SHORT, DIE_AFTER };

static char root[PATH_MAX];
static size_t root_length; // 0: not armed
static long fault_at;
static char fault[32];
static int error_number, lasting;
static int log_fd = -1;
static atomic_long counted;

void crash_arm(void) {
    const char *where = getenv("CRASH_ROOT"), *at = getenv("CRASH_AT"), *kind = getenv("CRASH_FAULT"), *log = getenv("CRASH_LOG");
    if (where == NULL || strlen(where) >= sizeof root)
        return;
    fault_at = at != NULL ? atol(at) : 0;
    snprintf(fault, sizeof fault, "%s", kind != NULL ? kind : "");
    error_number = strncmp(fault, "enospc", 6) == 0 ? ENOSPC : strncmp(fault, "eio", 3) == 0 ? EIO : 0;
    lasting = strstr(fault, "-from") != NULL;
    if (log != NULL)
        log_fd = (int)syscall(SYS_openat, AT_FDCWD, log, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    atomic_store(&counted, 0);
    strcpy(root, where);
    root_length = strlen(root);
    unsetenv("CRASH_ROOT"); // programs that this one starts are not counted
}

__attribute__((constructor)) static void at_start(void) { crash_arm(); }

static void die(void) {
    syscall(SYS_kill, getpid(), SIGKILL);
    for (;;)
        pause();
}

// Names relative to a descriptor, and descriptors alone (name NULL), are looked up in /proc, which follows renames.
static int absolute(char *out, int fd, const char *name) {
    char link[64];
    if (name != NULL && name[0] == '/')
        return snprintf(out, PATH_MAX, "%s", name) < PATH_MAX;
    if (fd == AT_FDCWD)
        snprintf(link, sizeof link, "/proc/self/cwd");
    else
        snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, out, PATH_MAX - 1);
    if (length < 0)
        return 0;
    return snprintf(out + length, PATH_MAX - length, "%s%s", name != NULL ? "/" : "", name != NULL ? name : "") < PATH_MAX - length;
}

static int below_root(const char *path) {
    return strncmp(path, root, root_length) == 0 && (path[root_length] == '/' || path[root_length] == '\0');
}

static void note(const char *call, const char *path, int hit) {
    char line[PATH_MAX + 64];
    int length = snprintf(line, sizeof line, "%s%s %s\n", hit ? "* " : "", call, path);
    // One write a line, so that the lines of two threads do not mix. Should the log be lost, the driver sees too few lines.
    if (log_fd >= 0 && length > 0)
        syscall(SYS_write, log_fd, line, length < (int)sizeof line ? (size_t)length : sizeof line - 1);
}

// Counts a call on one or two names (second NULL: one) and says what to do; does not return when that is to die at once.
static enum verdict judge(const char *call, int writes, int fd, const char *name, int second_fd, const char *second) {
    char path[PATH_MAX];
    int saved = errno;
    if (root_length == 0)
        return GO;
    int counts = absolute(path, fd, name) && below_root(path);
    if (!counts && second != NULL)
        counts = absolute(path, second_fd, second) && below_root(path);
    errno = saved;
    if (!counts)
        return GO;
    long number = atomic_fetch_add(&counted, 1) + 1;
    int hit = fault_at > 0 && (number == fault_at || (lasting && number > fault_at));
    note(call, path, hit);
    errno = saved;
    if (!hit)
        return GO;
    if (error_number != 0) {
        errno = error_number;
        return FAIL;
    }
    if (strcmp(fault, "killed-after") == 0)
        return DIE_AFTER;
    if (strcmp(fault, "short") == 0)
        return writes ? SHORT : GO;
    if (strcmp(fault, "torn") == 0 && writes)
        return TEAR;
    die();
    return GO;
}

static long after(enum verdict verdict, long result) {
    if (verdict == DIE_AFTER || verdict == TEAR)
        die();
    return result;
}

// The kernel is asked directly: no lookup of the replaced function, and one path for a name with and without 64.
#define ASK(verdict, ...) (verdict == FAIL ? -1 : after(verdict, syscall(__VA_ARGS__)))
#define ONE(call, fd, name) judge(call, 0, fd, name, 0, NULL)
#define PART(verdict, size) (verdict == TEAR || verdict == SHORT ? ((size) + 1) / 2 : (size))

static int open_any(const char *call, int fd, const char *name, int flags, mode_t mode) {
    enum verdict v = GO;
    if ((flags & O_ACCMODE) != O_RDONLY || (flags & (O_CREAT | O_TRUNC)) != 0)
        v = ONE(call, fd, name);
    return (int)ASK(v, SYS_openat, fd, name, flags, mode);
}

#define MODE_OF(flags, last)                                                                                                     \
    mode_t mode = 0;                                                                                                             \
    if (((flags) & O_CREAT) != 0 || ((flags) & O_TMPFILE) == O_TMPFILE) {                                                         \
        va_list more;                                                                                                            \
        va_start(more, last);                                                                                                    \
        mode = va_arg(more, mode_t);                                                                                             \
        va_end(more);                                                                                                            \
    }

int open(const char *name, int flags, ...) {
    MODE_OF(flags, flags)
    return open_any("open", AT_FDCWD, name, flags, mode);
}
int open64(const char *name, int flags, ...) {
    MODE_OF(flags, flags)
    return open_any("open", AT_FDCWD, name, flags, mode);
}
int openat(int fd, const char *name, int flags, ...) {
    MODE_OF(flags, flags)
    return open_any("openat", fd, name, flags, mode);
}
int openat64(int fd, const char *name, int flags, ...) {
    MODE_OF(flags, flags)
    return open_any("openat", fd, name, flags, mode);
}
int creat(const char *name, mode_t mode) { return open_any("creat", AT_FDCWD, name, O_CREAT | O_WRONLY | O_TRUNC, mode); }
int creat64(const char *name, mode_t mode) { return open_any("creat", AT_FDCWD, name, O_CREAT | O_WRONLY | O_TRUNC, mode); }

ssize_t write(int fd, const void *data, size_t size) {
    enum verdict v = judge("write", 1, fd, NULL, 0, NULL);
    return ASK(v, SYS_write, fd, data, PART(v, size));
}
static ssize_t pwrite_any(int fd, const void *data, size_t size, off_t offset) {
    enum verdict v = judge("pwrite", 1, fd, NULL, 0, NULL);
    return ASK(v, SYS_pwrite64, fd, data, PART(v, size), offset);
}
ssize_t pwrite(int fd, const void *data, size_t size, off_t offset) { return pwrite_any(fd, data, size, offset); }
ssize_t pwrite64(int fd, const void *data, size_t size, off64_t offset) { return pwrite_any(fd, data, size, offset); }
ssize_t writev(int fd, const struct iovec *parts, int count) {
    enum verdict v = judge("writev", 1, fd, NULL, 0, NULL);
    if (v == TEAR || v == SHORT) // half of the first part is as short as any
        return after(v, syscall(SYS_write, fd, parts[0].iov_base, PART(v, parts[0].iov_len)));
    return ASK(v, SYS_writev, fd, parts, count);
}
static ssize_t sendfile_any(int out, int in, off_t *offset, size_t size) {
    enum verdict v = judge("sendfile", 1, out, NULL, 0, NULL);
    return ASK(v, SYS_sendfile, out, in, offset, PART(v, size));
}
ssize_t sendfile(int out, int in, off_t *offset, size_t size) { return sendfile_any(out, in, offset, size); }
ssize_t sendfile64(int out, int in, off64_t *offset, size_t size) { return sendfile_any(out, in, offset, size); }
ssize_t copy_file_range(int in, off64_t *from, int out, off64_t *to, size_t size, unsigned flags) {
    enum verdict v = judge("copy_file_range", 1, out, NULL, 0, NULL);
    return ASK(v, SYS_copy_file_range, in, from, out, to, PART(v, size), flags);
}

static int rename_any(const char *call, int from, const char *old, int to, const char *new, unsigned flags) {
    enum verdict v = judge(call, 0, from, old, to, new);
    return (int)ASK(v, SYS_renameat2, from, old, to, new, flags);
}
int rename(const char *old, const char *new) { return rename_any("rename", AT_FDCWD, old, AT_FDCWD, new, 0); }
int renameat(int from, const char *old, int to, const char *new) { return rename_any("renameat", from, old, to, new, 0); }
int renameat2(int from, const char *old, int to, const char *new, unsigned flags) {
    return rename_any("renameat2", from, old, to, new, flags);
}
int linkat(int from, const char *old, int to, const char *new, int flags) {
    enum verdict v = judge("linkat", 0, to, new, from, old);
    return (int)ASK(v, SYS_linkat, from, old, to, new, flags);
}
int link(const char *old, const char *new) { return linkat(AT_FDCWD, old, AT_FDCWD, new, 0); }
int symlinkat(const char *text, int fd, const char *name) {
    enum verdict v = ONE("symlinkat", fd, name);
    return (int)ASK(v, SYS_symlinkat, text, fd, name);
}
int symlink(const char *text, const char *name) { return symlinkat(text, AT_FDCWD, name); }

int mkdirat(int fd, const char *name, mode_t mode) {
    enum verdict v = ONE("mkdirat", fd, name);
    return (int)ASK(v, SYS_mkdirat, fd, name, mode);
}
int mkdir(const char *name, mode_t mode) { return mkdirat(AT_FDCWD, name, mode); }
int unlinkat(int fd, const char *name, int flags) {
    enum verdict v = ONE((flags & AT_REMOVEDIR) != 0 ? "rmdir" : "unlinkat", fd, name);
    return (int)ASK(v, SYS_unlinkat, fd, name, flags);
}
int unlink(const char *name) { return unlinkat(AT_FDCWD, name, 0); }
int rmdir(const char *name) { return unlinkat(AT_FDCWD, name, AT_REMOVEDIR); }

int fsync(int fd) {
    enum verdict v = ONE("fsync", fd, NULL);
    return (int)ASK(v, SYS_fsync, fd);
}
int fdatasync(int fd) {
    enum verdict v = ONE("fdatasync", fd, NULL);
    return (int)ASK(v, SYS_fdatasync, fd);
}
int syncfs(int fd) {
    enum verdict v = ONE("syncfs", fd, NULL);
    return (int)ASK(v, SYS_syncfs, fd);
}
// Only of files open for writing. A close that fails has closed the file all the same: a second one could hit another's.
int close(int fd) {
    int saved = errno;
    int flags = root_length > 0 ? fcntl(fd, F_GETFL) : -1;
    errno = saved;
    enum verdict v = flags >= 0 && (flags & O_ACCMODE) != O_RDONLY ? ONE("close", fd, NULL) : GO;
    long result = after(v, syscall(SYS_close, fd));
    if (v == FAIL) {
        errno = error_number;
        return -1;
    }
    return (int)result;
}

static int ftruncate_any(int fd, off_t size) {
    enum verdict v = ONE("ftruncate", fd, NULL);
    return (int)ASK(v, SYS_ftruncate, fd, size);
}
int ftruncate(int fd, off_t size) { return ftruncate_any(fd, size); }
int ftruncate64(int fd, off64_t size) { return ftruncate_any(fd, size); }
static int truncate_any(const char *name, off_t size) {
    enum verdict v = ONE("truncate", AT_FDCWD, name);
    return (int)ASK(v, SYS_truncate, name, size);
}
int truncate(const char *name, off_t size) { return truncate_any(name, size); }
int truncate64(const char *name, off64_t size) { return truncate_any(name, size); }
// Unlike all the others it returns its error.
static int fallocate_any(int fd, off_t offset, off_t size) {
    enum verdict v = ONE("fallocate", fd, NULL);
    return ASK(v, SYS_fallocate, fd, 0, offset, size) < 0 ? errno : 0;
}
int posix_fallocate(int fd, off_t offset, off_t size) { return fallocate_any(fd, offset, size); }
int posix_fallocate64(int fd, off64_t offset, off64_t size) { return fallocate_any(fd, offset, size); }

static int set_times(int fd, const char *name, const struct timespec times[2], int flags) {
    enum verdict v = ONE("utimensat", fd, name);
    return (int)ASK(v, SYS_utimensat, fd, name, times, flags);
}
int utimensat(int fd, const char *name, const struct timespec times[2], int flags) { return set_times(fd, name, times, flags); }
int futimens(int fd, const struct timespec times[2]) { return set_times(fd, NULL, times, 0); }
int fchmod(int fd, mode_t mode) {
    enum verdict v = ONE("fchmod", fd, NULL);
    return (int)ASK(v, SYS_fchmod, fd, mode);
}
int fchmodat(int fd, const char *name, mode_t mode, int flags) {
    enum verdict v = ONE("fchmodat", fd, name);
    if (flags != 0 && v != FAIL) { // the system call has no flags; CPython asks for none where we use it
        errno = ENOTSUP;
        return -1;
    }
    return (int)ASK(v, SYS_fchmodat, fd, name, mode);
}
int chmod(const char *name, mode_t mode) { return fchmodat(AT_FDCWD, name, mode, 0); }

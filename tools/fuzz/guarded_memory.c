/* SPDX-License-Identifier: Apache-2.0
 * posix_memalign, which torch takes tensors of the CPU from, with blocks that end at a page without access.
 * An access behind the end of a tensor, or far from it, is a signal then.  Loaded by LD_PRELOAD, for tools/fuzz/operators.py.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define SLOTS (1 << 16)
#define PROBES 64
#define PAGE ((size_t)4096)
#define LINE ((size_t)64)
#define LARGEST ((size_t)1 << 32)

/* Blocks by address; a slot without one has block == NULL. */
static struct {
    void *block, *base;
    size_t bytes;
} slots[SLOTS];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static void (*real_free)(void *);

static size_t slot_of(const void *block) { return ((uintptr_t)block >> 6) * 2654435761u % SLOTS; }

int posix_memalign(void **out, size_t alignment, size_t size)
{
    size_t body = size ? (size + LINE - 1) / LINE * LINE : LINE, pages, place, probe;
    char *base, *block;

    if (size > LARGEST)
        return ENOMEM;
    pages = (body + PAGE - 1) / PAGE * PAGE;
    base = mmap(NULL, pages + 2 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (base == MAP_FAILED)
        return ENOMEM;
    mprotect(base, PAGE, PROT_NONE);
    mprotect(base + PAGE + pages, PAGE, PROT_NONE);
    block = base + PAGE + pages - body;
    block -= (uintptr_t)block % alignment;
    memset(block, 0x5a, body);
    pthread_mutex_lock(&lock);
    for (place = slot_of(block), probe = 0; probe < PROBES && slots[place].block; probe++)
        place = (place + 1) % SLOTS;
    if (probe < PROBES) {
        slots[place].block = block;
        slots[place].base = base;
        slots[place].bytes = pages + 2 * PAGE;
    }
    pthread_mutex_unlock(&lock);
    if (probe == PROBES) {
        munmap(base, pages + 2 * PAGE);
        return ENOMEM;
    }
    *out = block;
    return 0;
}

void free(void *block)
{
    size_t place, probe;

    if (!block)
        return;
    if (((uintptr_t)block & (LINE - 1)) == 0) {
        pthread_mutex_lock(&lock);
        for (place = slot_of(block), probe = 0; probe < PROBES; probe++, place = (place + 1) % SLOTS)
            if (slots[place].block == block) {
                munmap(slots[place].base, slots[place].bytes);
                slots[place].block = NULL;
                pthread_mutex_unlock(&lock);
                return;
            }
        pthread_mutex_unlock(&lock);
    }
    if (!real_free)
        real_free = (void (*)(void *))dlsym(RTLD_NEXT, "free");
    real_free(block);
}

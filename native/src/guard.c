/* Catches SIGBUS in mappings whose object was truncated; systemd's journal does likewise. */
#include "guard.h"

#include <errno.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include "shmring/layout.h"

/* Segments of a process: Linux allows 65,530 mappings unless told otherwise, and most take two. The table's
 * pages cost nothing until they are used. */
#define MAPPINGS_MAX 65536

static struct mapping {
    _Atomic uintptr_t start; /* 0: free. 1: being filled in */
    _Atomic size_t length;
    _Atomic int writable;
} mappings[MAPPINGS_MAX];
/* Places that ever held one. All lie in front, so nobody looks through more. */
static _Atomic int used_count;

static struct sigaction previous;

/* 1 if the address was in a mapping of ours, which is all zeros now. Only what a handler may call. */
static int replace(uintptr_t address) {
    /* acquire, pairs with shr_guard_add: a place that is handed out is counted first */
    int used = atomic_load_explicit(&used_count, memory_order_acquire);
    for (int i = 0; i < used; i++) {
        struct mapping *m = &mappings[i];
        /* acquire, pairs with shr_guard_add: the facts are there */
        uintptr_t start = atomic_load_explicit(&m->start, memory_order_acquire);
        size_t length = atomic_load_explicit(&m->length, memory_order_relaxed);
        if (start > 1 && address >= start && address - start < length) {
            int protection =
                atomic_load_explicit(&m->writable, memory_order_relaxed) ? PROT_READ | PROT_WRITE : PROT_READ;
            return mmap((void *)start, length, protection,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0) != MAP_FAILED;
        }
    }
    return 0;
}

static void on_sigbus(int number, siginfo_t *info, void *context) {
    int saved = errno;
    if (info->si_code == BUS_ADRERR && replace((uintptr_t)info->si_addr)) {
        errno = saved;
        return; /* to the same instruction, which finds memory now */
    }
    errno = saved;
    if (previous.sa_flags & SA_SIGINFO) {
        previous.sa_sigaction(number, info, context);
    } else if (previous.sa_handler == SIG_DFL || previous.sa_handler == SIG_IGN) {
        /* not ours: the same instruction, or the signal again, meets what stood here before us */
        sigaction(SIGBUS, &previous, NULL);
        if (info->si_code <= 0) {
            raise(number);
        }
    } else {
        previous.sa_handler(number);
    }
}

/* Once in a process, and never on top of a handler that came later: that one would hand the signal
 * down to us, and we to it. */
static void install(void) {
    static atomic_flag done = ATOMIC_FLAG_INIT;
    if (atomic_flag_test_and_set(&done)) {
        return;
    }
    struct sigaction ours;
    sigemptyset(&ours.sa_mask);
    ours.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_RESTART;
    ours.sa_sigaction = on_sigbus;
    sigaction(SIGBUS, NULL, &previous); /* first, so that the handler never sees it half written */
    sigaction(SIGBUS, &ours, NULL);
}

void shr_guard_add(void *base, size_t length, int writable) {
    install();
    for (int i = 0; i < MAPPINGS_MAX; i++) {
        struct mapping *m = &mappings[i];
        uintptr_t free_slot = 0;
        if (atomic_compare_exchange_strong_explicit(&m->start, &free_slot, 1, memory_order_acquire,
                                                    memory_order_relaxed)) {
            int used = atomic_load_explicit(&used_count, memory_order_relaxed);
            while (used <= i && !atomic_compare_exchange_weak_explicit(
                                    &used_count, &used, i + 1, memory_order_release, memory_order_relaxed)) {
            }
            atomic_store_explicit(&m->length, length, memory_order_relaxed);
            atomic_store_explicit(&m->writable, writable, memory_order_relaxed);
            /* release, pairs with replace() */
            atomic_store_explicit(&m->start, (uintptr_t)base, memory_order_release);
            return;
        }
    }
}

void shr_guard_remove(const void *base) {
    int used = atomic_load_explicit(&used_count, memory_order_acquire);
    for (int i = 0; i < used; i++) {
        if (atomic_load_explicit(&mappings[i].start, memory_order_relaxed) == (uintptr_t)base) {
            atomic_store_explicit(&mappings[i].start, 0, memory_order_release);
            return;
        }
    }
}

int shr_guard_is_whole(int fd, uint64_t capacity) {
    struct stat status;
    if (fstat(fd, &status) != 0) {
        return 1; /* nothing is known */
    }
    return (uint64_t)status.st_size >= SHR_HEADER_LENGTH + capacity;
}

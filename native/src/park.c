/* Parking: sync point S3. Announce, look again, sleep; the other side stores, then looks.
 *
 * All four accesses are seq_cst: store parked / load position here, store position / load parked in
 * shr_publish and shr_release. With release and acquire only, both loads may be satisfied before
 * both stores are visible, on x86 too, and a side sleeps beside the record it waits for. */
#include "shmring/park.h"

#include <errno.h>
#include <linux/futex.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "end.h"

#ifndef SYS_futex_waitv
#define SYS_futex_waitv 449
#endif

/* Kernel ABI of futex_waitv (Linux 5.16), spelled out because older headers lack it. */
struct waitv_entry {
    uint64_t value;
    uint64_t address;
    uint32_t flags;
    uint32_t reserved;
};
#define WAITV_U32 0x02
#define WAITV_PRIVATE 128
#define POLL_NS 1000000U /* without futex_waitv: look at all of them every millisecond */

int shr_wake(_Atomic uint32_t *parked) {
    /* seq_cst exchange: of two wakers one sends the wake; the sleeper's value compare sees the 0 */
    if (atomic_exchange_explicit(parked, 0, memory_order_seq_cst) == 0) {
        return 0;
    }
    syscall(SYS_futex, parked, FUTEX_WAKE, 1, NULL, NULL, 0);
    return 1;
}

void shr_bell_ring(shr_bell *bell) {
    /* release, pairs with the acquire in shr_bell_answer: what was done before ringing is seen */
    atomic_store_explicit(&bell->rung, 1, memory_order_release);
    syscall(SYS_futex, &bell->rung, FUTEX_WAKE_PRIVATE, 1, NULL, NULL, 0);
}

int shr_bell_is_rung(const shr_bell *bell) {
    return (int)atomic_load_explicit(&bell->rung, memory_order_acquire);
}

int shr_bell_answer(shr_bell *bell) {
    return (int)atomic_exchange_explicit(&bell->rung, 0, memory_order_acquire);
}

struct waitset {
    shr_consumer *const *consumers;
    uint32_t consumer_count;
    shr_producer *const *producers;
    const uint64_t *needs;
    uint32_t producer_count;
    shr_bell *bell;
};

/* SHR_NOT_NOW if nothing is up anywhere, SHR_DONE if something is, or what is wrong. */
static int look(const struct waitset *w) {
    for (uint32_t i = 0; i < w->consumer_count; i++) {
        int answer = shr_readable(w->consumers[i]);
        if (answer != SHR_NOT_NOW) {
            return answer == SHR_PEER_FINISHED ? SHR_DONE : answer;
        }
    }
    for (uint32_t i = 0; i < w->producer_count; i++) {
        int answer = shr_writable(w->producers[i], w->needs[i]);
        if (answer != SHR_NOT_NOW) {
            return answer == SHR_PEER_FINISHED ? SHR_DONE : answer;
        }
    }
    if (w->bell != NULL && atomic_load_explicit(&w->bell->rung, memory_order_acquire) != 0) {
        return SHR_DONE;
    }
    return SHR_NOT_NOW;
}

/* relaxed: a figure for people, which this side alone writes */
static void wait_began(_Atomic uint64_t *since, uint64_t now) {
    if (atomic_load_explicit(since, memory_order_relaxed) == 0) {
        atomic_store_explicit(since, now, memory_order_relaxed);
    }
}

/* An end that another thread closed meanwhile is left alone, here and below: its words may be those
 * of a successor by now, and a successor whose `parked` we reset would sleep beside its record. */
static void wait_ended(const struct waitset *w) {
    for (uint32_t i = 0; i < w->consumer_count; i++) {
        if (w->consumers[i]->usable) {
            atomic_store_explicit(&w->consumers[i]->header->consumer_statistics.waiting_since_ns, 0,
                                  memory_order_relaxed);
        }
    }
    for (uint32_t i = 0; i < w->producer_count; i++) {
        if (w->producers[i]->usable) {
            atomic_store_explicit(&w->producers[i]->header->producer_statistics.waiting_since_ns, 0,
                                  memory_order_relaxed);
        }
    }
}

static void announce(const struct waitset *w, uint32_t value, uint64_t now) {
    for (uint32_t i = 0; i < w->consumer_count; i++) {
        struct shr_header *h = w->consumers[i]->header;
        if (!w->consumers[i]->usable) {
            continue;
        }
        if (value != 0) {
            wait_began(&h->consumer_statistics.waiting_since_ns, now);
        }
        /* [S3] seq_cst, before tail is looked at; pairs with shr_publish */
        atomic_store_explicit(&h->consumer_parked, value, memory_order_seq_cst);
    }
    for (uint32_t i = 0; i < w->producer_count; i++) {
        struct shr_header *h = w->producers[i]->header;
        if (!w->producers[i]->usable) {
            continue;
        }
        if (value != 0) {
            wait_began(&h->producer_statistics.waiting_since_ns, now);
        }
        /* [S3] seq_cst, before head is looked at; pairs with shr_release */
        atomic_store_explicit(&h->producer_parked, value, memory_order_seq_cst);
    }
}

static void count_parked(const struct waitset *w, uint64_t ns) {
    for (uint32_t i = 0; i < w->consumer_count; i++) {
        struct shr_end_statistics *s = &w->consumers[i]->header->consumer_statistics;
        shr_count(&s->parks, 1);
        shr_count(&s->parked_ns, ns);
    }
    for (uint32_t i = 0; i < w->producer_count; i++) {
        struct shr_end_statistics *s = &w->producers[i]->header->producer_statistics;
        shr_count(&s->parks, 1);
        shr_count(&s->parked_ns, ns);
    }
}

static uint32_t entries(const struct waitset *w, struct waitv_entry *out) {
    uint32_t n = 0;
    for (uint32_t i = 0; i < w->consumer_count; i++) {
        out[n++] = (struct waitv_entry){1, (uint64_t)(uintptr_t)&w->consumers[i]->header->consumer_parked,
                                        WAITV_U32, 0};
    }
    for (uint32_t i = 0; i < w->producer_count; i++) {
        out[n++] = (struct waitv_entry){1, (uint64_t)(uintptr_t)&w->producers[i]->header->producer_parked,
                                        WAITV_U32, 0};
    }
    if (w->bell != NULL) {
        out[n++] = (struct waitv_entry){0, (uint64_t)(uintptr_t)&w->bell->rung, WAITV_U32 | WAITV_PRIVATE, 0};
    }
    return n;
}

/* One sleep. 0, or -EINTR. */
static int sleep_on(const struct waitv_entry *v, uint32_t n, uint64_t ns) {
    long rc;
    if (n == 1) {
        struct timespec relative = {(time_t)(ns / 1000000000U), (long)(ns % 1000000000U)};
        int op = v[0].flags & WAITV_PRIVATE ? FUTEX_WAIT_PRIVATE : FUTEX_WAIT;
        rc = syscall(SYS_futex, (uintptr_t)v[0].address, op, (uint32_t)v[0].value, &relative, NULL, 0);
    } else {
        struct timespec until;
        clock_gettime(CLOCK_MONOTONIC, &until);
        uint64_t at = (uint64_t)until.tv_nsec + ns % 1000000000U;
        until.tv_sec += (time_t)(ns / 1000000000U + at / 1000000000U);
        until.tv_nsec = (long)(at % 1000000000U);
        rc = syscall(SYS_futex_waitv, v, n, 0, &until, CLOCK_MONOTONIC);
        if (rc < 0 && errno != EAGAIN && errno != ETIMEDOUT && errno != EINTR) {
            /* ENOSYS of an old kernel, EPERM of a sandbox that does not know the call: either way
             * it did not sleep, and asking again at once would burn the processor */
            uint64_t poll = ns < POLL_NS ? ns : POLL_NS;
            struct timespec pause = {0, (long)poll};
            rc = clock_nanosleep(CLOCK_MONOTONIC, 0, &pause, NULL) == EINTR ? -1 : 0;
            errno = EINTR;
        }
    }
    return rc < 0 && errno == EINTR ? -EINTR : 0;
}

static inline void spin_pause(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

int shr_wait(shr_consumer *const *consumers, uint32_t consumer_count, shr_producer *const *producers,
             const uint64_t *needs, uint32_t producer_count, shr_bell *bell, uint64_t spin_ns,
             uint64_t timeout_ns) {
    const struct waitset w = {consumers, consumer_count, producers, needs, producer_count, bell};
    uint64_t n = (uint64_t)consumer_count + producer_count;
    if (n > SHR_WAIT_MAX || (n == 0 && bell == NULL)) {
        return SHR_TOO_LARGE;
    }
    int answer = look(&w);
    if (answer != SHR_NOT_NOW) {
        wait_ended(&w);
    }
    if (answer != SHR_NOT_NOW || timeout_ns == 0) {
        return answer;
    }
    uint64_t start = shr_clock_ns(CLOCK_MONOTONIC);
    uint64_t spin = spin_ns < timeout_ns ? spin_ns : timeout_ns;
    uint64_t now = start;
    while (now - start < spin) {
        for (int i = 0; i < 16; i++) {
            spin_pause();
        }
        if ((answer = look(&w)) != SHR_NOT_NOW) {
            return answer;
        }
        now = shr_clock_ns(CLOCK_MONOTONIC);
    }
    struct waitv_entry v[SHR_WAIT_MAX + 1];
    uint32_t entry_count = entries(&w, v);
    while (now - start < timeout_ns) {
        announce(&w, 1, now);
        if ((answer = look(&w)) != SHR_NOT_NOW) {
            break;
        }
        answer = sleep_on(v, entry_count, timeout_ns - (now - start));
        uint64_t woke = shr_clock_ns(CLOCK_MONOTONIC);
        count_parked(&w, woke - now);
        now = woke;
        if (answer != 0 || (answer = look(&w)) != SHR_NOT_NOW) {
            break;
        }
    }
    announce(&w, 0, 0);
    if (answer != SHR_NOT_NOW && answer != -EINTR) {
        wait_ended(&w);
    }
    return answer;
}

void shr_wait_over(shr_consumer *const *consumers, uint32_t consumer_count, shr_producer *const *producers,
                   uint32_t producer_count) {
    const struct waitset w = {consumers, consumer_count, producers, NULL, producer_count, NULL};
    wait_ended(&w);
}

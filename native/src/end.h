/* What both ends of a ring do alike. Internal to native/src. */
#ifndef SHMRING_END_H
#define SHMRING_END_H

#include <time.h>

#include "shmring/ring.h"

static inline uint64_t shr_padded(uint64_t length) {
    return (length + (SHR_RECORD_ALIGNMENT - 1)) & ~(uint64_t)(SHR_RECORD_ALIGNMENT - 1);
}

static inline uint64_t shr_clock_ns(clockid_t clock) {
    struct timespec t;
    clock_gettime(clock, &t);
    return (uint64_t)t.tv_sec * 1000000000U + (uint64_t)t.tv_nsec;
}

/* A counter with one writer: load and store, no locked instruction. Relaxed: nothing hangs on it. */
static inline void shr_count(_Atomic uint64_t *counter, uint64_t by) {
    uint64_t value = atomic_load_explicit(counter, memory_order_relaxed) + by;
    atomic_store_explicit(counter, value, memory_order_relaxed);
}

/* Say that this end is taken. The caller holds the role's lock. */
void shr_end_attach(struct shr_end_state *end, uint32_t pid);

/* Is it worth waiting for this peer? Asked only when there is no room or nothing to read; asks the
 * kernel at most ten times a second. SHR_NOT_NOW: yes. With `takeover` it always is, until the
 * name has gone. */
int shr_end_worth_waiting(const struct shr_header *header, const struct shr_end_state *peer, int fd, int role,
                          uint32_t takeover, uint64_t capacity, uint64_t *checked_ns);

/* See shr_consumer_state. */
int shr_end_look(const struct shr_end_state *peer, int fd, int role);

#endif

/* A ring in memory of our own, with both roles held, for tests that need no Python. */
#ifndef SHMRING_HARNESS_H
#define SHMRING_HARNESS_H

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "shmring/park.h"
#include "shmring/ring.h"
#include "shmring/segment.h"

#define CHECK(what)                                                                                          \
    do {                                                                                                     \
        if (!(what)) {                                                                                       \
            fprintf(stderr, "%s:%d: failed: %s\n", __FILE__, __LINE__, #what);                               \
            abort();                                                                                         \
        }                                                                                                    \
    } while (0)

struct ring {
    shr_producer producer;
    shr_consumer consumer;
    void *base;
    uint64_t capacity;
    int fds[3];
};

/* Both ends use one mapping: a thread sanitizer keys what it knows by address, and must see that what
 * one thread writes is what the other reads. Bytes behind the end of the first copy of the data have a
 * second address, at its start; there it may miss a race between two laps, and never invents one. */
static inline void ring_make(struct ring *r, uint64_t capacity, uint64_t start_position) {
    char path[64];
    int error;
    memset(r, 0, sizeof *r);
    r->capacity = capacity;
    r->fds[0] = memfd_create("shmring-test", MFD_CLOEXEC);
    CHECK(r->fds[0] >= 0);
    CHECK(ftruncate(r->fds[0], (off_t)(SHR_HEADER_LENGTH + capacity)) == 0);
    snprintf(path, sizeof path, "/proc/self/fd/%d", r->fds[0]);
    for (int i = 1; i < 3; i++) {
        r->fds[i] = open(path, O_RDWR | O_CLOEXEC);
        CHECK(r->fds[i] >= 0);
    }
    r->base = shr_map(r->fds[0], capacity, 1, 1, &error);
    CHECK(r->base != NULL);
    shr_header_init(r->base, SHR_KIND_RING, capacity, 1, 0, 0, start_position);
    CHECK(shr_header_ready(r->base) == 1);
    CHECK(shr_role_take(r->fds[1], SHR_ROLE_PRODUCER) == 0);
    CHECK(shr_role_take(r->fds[2], SHR_ROLE_CONSUMER) == 0);
    CHECK(shr_producer_init(&r->producer, r->base, capacity, r->fds[1], 1) == SHR_DONE);
    CHECK(shr_consumer_init(&r->consumer, r->base, capacity, r->fds[2], 1) == SHR_DONE);
}

static inline void ring_free(struct ring *r) {
    shr_unmap(r->base, r->capacity, 1);
    for (int i = 0; i < 3; i++) {
        close(r->fds[i]);
    }
}

struct dice {
    uint64_t state;
};

static inline uint64_t roll(struct dice *d) {
    d->state ^= d->state << 13;
    d->state ^= d->state >> 7;
    d->state ^= d->state << 17;
    return d->state;
}

/* Byte i of record n: any record, or any part of one, taken for another shows. */
static inline uint8_t byte_of(uint64_t n, uint64_t i) {
    return (uint8_t)((n * 0x9E3779B97F4A7C15ULL >> 32) + i * 0x9D);
}

/* Odd sizes, mostly small, now and then as large as the ring. Both sides know the length of record n. */
static inline uint64_t length_of(uint64_t n, uint64_t capacity) {
    struct dice d = {n * 2654435761U + 88172645463325252ULL};
    uint64_t r = roll(&d);
    if (r % 97 == 0) {
        return shr_payload_length_max(capacity) - (r >> 32) % 9;
    }
    return (r >> 32) % (r % 5 == 0 ? capacity / 3 : 61);
}

#endif

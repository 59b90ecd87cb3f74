/* Sleeping until a ring has something, or has room. These calls block: release the GIL. */
#ifndef SHMRING_PARK_H
#define SHMRING_PARK_H

#include "shmring/ring.h"

#define SHR_WAIT_MAX 127 /* futex_waitv takes 128; one is for the bell */
/* Between two looks at the peer's life, and the longest that Ctrl-C may have to wait. */
#define SHR_CHECK_INTERVAL_NS 250000000U

typedef struct shr_bell {
    _Atomic uint32_t rung; /* private to a process: lets another thread end a wait */
} shr_bell;

/* Wait until one of the consumers may have something to read (or its peer finished), one of the
 * producers has room for needs[i] bytes of payload (or its peer finished), or the bell rings.
 * Spins for spin_ns first. Returns SHR_DONE, SHR_NOT_NOW when timeout_ns has passed, -EINTR when
 * a signal came, SHR_CORRUPT / SHR_UNUSABLE when an end says so. `bell` may be NULL.
 *
 * A long wait is made of several calls, so that the caller can look at its peers in between:
 * after SHR_NOT_NOW and -EINTR the ends still count as waiting, since the first of these calls,
 * until one of them ends otherwise or shr_wait_over() is called. */
int shr_wait(shr_consumer *const *consumers, uint32_t consumer_count, shr_producer *const *producers,
             const uint64_t *needs, uint32_t producer_count, shr_bell *bell, uint64_t spin_ns,
             uint64_t timeout_ns);
/* The caller gave up: the ends no longer count as waiting. */
void shr_wait_over(shr_consumer *const *consumers, uint32_t consumer_count, shr_producer *const *producers,
                   uint32_t producer_count);
void shr_bell_ring(shr_bell *bell);
int shr_bell_is_rung(const shr_bell *bell);
/* Read and reset: 1 if it was rung since the last call. */
int shr_bell_answer(shr_bell *bell);

/* Used by ring.c: wake whoever sleeps on `parked`. Returns 1 if a wake was sent. */
int shr_wake(_Atomic uint32_t *parked);

#endif

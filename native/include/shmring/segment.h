/* A segment's memory and its kernel-held roles. */
#ifndef SHMRING_SEGMENT_H
#define SHMRING_SEGMENT_H

#include "shmring/layout.h"

/* Map header and data, the data a second time right behind the first, so that no record is
 * ever cut. Returns NULL and -errno in *error. `writable` 0 maps read-only, once.
 * The data of a blob is not doubled either (`doubled` 0). */
void *shr_map(int fd, uint64_t capacity, int writable, int doubled, int *error);
void shr_unmap(void *base, uint64_t capacity, int doubled);
/* Only the header page, read-only: for looking from outside. */
void *shr_map_header(int fd, int *error);

/* Fill in the constants of a fresh segment, positions included, and mark it ready [S4]. */
void shr_header_init(struct shr_header *header, uint32_t kind, uint64_t capacity, uint64_t segment_id,
                     uint64_t payload_length, uint32_t owner_pid, uint64_t start_position);
uint32_t shr_header_ready(const struct shr_header *header);
void shr_header_retire(struct shr_header *header);
uint32_t shr_header_retired(const struct shr_header *header);

/* Role locks (F_OFD_SETLK on one byte): 0 taken, -EAGAIN held by somebody, -errno. */
int shr_role_take(int fd, int role);
int shr_role_drop(int fd, int role);
/* 1 held through another open file description, 0 free, -errno. */
int shr_role_held(int fd, int role);

struct shr_end_snapshot {
    uint32_t state, generation, pid, parked;
    uint64_t attached_ns, position, records, bytes, batches, stalls, parks, parked_ns, wakes_sent, high_water,
        active_ns, waiting_since_ns, beats;
};
struct shr_snapshot {
    struct shr_end_snapshot producer, consumer;
    uint64_t wait_histogram[SHR_HISTOGRAM_BINS];
};
/* Copy the counters. Each is whole, together they are only near each other in time. */
void shr_snapshot_take(const struct shr_header *header, struct shr_snapshot *out);
uint64_t shr_now_ns(void); /* CLOCK_MONOTONIC */

#endif

/* The bytes that two processes share. Normative text: docs/reference/layout.md.
 *
 *   offset        owner       what
 *   0x000         creator     constants: written once before `ready`, never after
 *   0x080         creator     ready, retired
 *   0x100         producer    tail, and beside it the last timed publication
 *   0x180         producer    state of the end
 *   0x200         producer    statistics
 *   0x280         consumer    head
 *   0x300         consumer    state of the end
 *   0x380         consumer    statistics
 *   0x400         both        producer_parked   (futex)
 *   0x480         both        consumer_parked   (futex)
 *   0x500..0x6ff  consumer    wait_histogram
 *   0x1000        producer    data, `capacity` bytes, mapped twice back to back
 *
 * A record:
 *
 *    0               4       5       6        8
 *   +---------------+-------+-------+--------+----------------------------+
 *   | length   u32  | type  | flags | zero   | payload, padded to 8 bytes |
 *   +---------------+-------+-------+--------+----------------------------+
 *     bytes incl. this header, without padding; less than 8 is never valid
 *
 * Words with different writers never share a line pair: lines are fetched in
 * pairs on x86, so 64 bytes apart is not apart.
 */
#ifndef SHMRING_LAYOUT_H
#define SHMRING_LAYOUT_H

#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

#define SHR_MAGIC 0x474E49524D4853AAULL /* AA 'S' 'H' 'M' 'R' 'I' 'N' 'G' in memory order */
#define SHR_LAYOUT_VERSION 1u
#define SHR_HEADER_LENGTH 4096u
#define SHR_LINE_PAIR 128
#define SHR_KIND_RING 1u
#define SHR_KIND_BLOB 2u
#define SHR_CAPACITY_MAX (1ULL << 40)
#define SHR_RECORD_HEADER_LENGTH 8u
#define SHR_RECORD_ALIGNMENT 8u
#define SHR_RECORD_LENGTH_MAX 0xFFFFFFF0ULL /* of the u32, less what padding may add */
#define SHR_HISTOGRAM_BINS 64

/* State of an end, written by the holder of its role only. Whether an attached
 * end still lives is not here: only its lock tells. */
#define SHR_END_NEVER 0u
#define SHR_END_ATTACHED 1u
#define SHR_END_CLOSED 2u

/* One byte of the segment each, locked with F_OFD_SETLK. */
#define SHR_ROLE_OWNER 0
#define SHR_ROLE_PRODUCER 1
#define SHR_ROLE_CONSUMER 2
#define SHR_ROLE_REMOVER 3 /* of a dead owner's leftover */

struct shr_end_state {
    _Atomic uint32_t state;
    _Atomic uint32_t generation;  /* attaches so far */
    _Atomic uint32_t pid;         /* for people to read; never trusted, never signalled */
    _Atomic uint32_t poisoning;   /* consumer: 1 while released bytes are overwritten */
    _Atomic uint64_t attached_ns; /* CLOCK_REALTIME */
    _Atomic uint64_t poisoned_to; /* consumer, while `poisoning`: where that ends */
};

struct shr_end_statistics {
    _Atomic uint64_t records;
    _Atomic uint64_t bytes;            /* with record headers and padding */
    _Atomic uint64_t batches;          /* publications, or releases that freed something */
    _Atomic uint64_t stalls;           /* found it full (producer) or empty (consumer) */
    _Atomic uint64_t parks;            /* times asleep */
    _Atomic uint64_t parked_ns;        /* time asleep */
    _Atomic uint64_t wakes_sent;       /* futex wakes to the other side */
    _Atomic uint64_t high_water;       /* producer: most bytes ever seen in use */
    _Atomic uint64_t active_ns;        /* CLOCK_MONOTONIC_COARSE of the last batch */
    _Atomic uint64_t waiting_since_ns; /* CLOCK_MONOTONIC when it went to sleep, 0 = awake */
    _Atomic uint64_t beats;            /* times it said that it is at work, without doing any here */
};

struct shr_header {
    _Alignas(SHR_LINE_PAIR) uint64_t magic;
    uint32_t layout_version;
    uint32_t header_length;
    uint32_t kind;
    uint32_t owner_pid; /* for people to read */
    uint64_t capacity;  /* bytes of the data area; ring: a power of two */
    uint64_t segment_id;
    uint64_t created_ns;     /* CLOCK_REALTIME */
    uint64_t payload_length; /* blob: bytes of it; ring: 0 */

    _Alignas(SHR_LINE_PAIR) _Atomic uint32_t ready; /* [S4] */
    _Atomic uint32_t retired;                       /* the name is gone: nobody new will come */

    /* The consumer fetches tail's line anyway; among the statistics, a timed publication would cost
     * it a second line from the other core with every record. */
    _Alignas(SHR_LINE_PAIR) _Atomic uint64_t tail;         /* [S1] */
    _Atomic uint64_t sample_position;                      /* end of a timed publication, 0 = none */
    _Atomic uint64_t sample_ns;                            /* its CLOCK_MONOTONIC */
    _Alignas(SHR_LINE_PAIR) struct shr_end_state producer; /* its `state` is [S5] */
    _Alignas(SHR_LINE_PAIR) struct shr_end_statistics producer_statistics;

    _Alignas(SHR_LINE_PAIR) _Atomic uint64_t head; /* [S2] */
    _Alignas(SHR_LINE_PAIR) struct shr_end_state consumer;
    _Alignas(SHR_LINE_PAIR) struct shr_end_statistics consumer_statistics;

    _Alignas(SHR_LINE_PAIR) _Atomic uint32_t producer_parked; /* [S3] */
    _Alignas(SHR_LINE_PAIR) _Atomic uint32_t consumer_parked; /* [S3] */

    /* bin b counts timed records that waited 2^(b-1) <= ns < 2^b */
    _Alignas(SHR_LINE_PAIR) _Atomic uint64_t wait_histogram[SHR_HISTOGRAM_BINS];
};

struct shr_record_header {
    uint32_t length;
    uint8_t type;
    uint8_t flags;
    uint16_t reserved;
};

_Static_assert(sizeof(struct shr_record_header) == SHR_RECORD_HEADER_LENGTH, "record header");
_Static_assert(offsetof(struct shr_header, ready) == 0x080, "ready");
_Static_assert(offsetof(struct shr_header, tail) == 0x100, "tail");
_Static_assert(offsetof(struct shr_header, producer) == 0x180, "producer");
_Static_assert(offsetof(struct shr_header, producer_statistics) == 0x200, "producer_statistics");
_Static_assert(offsetof(struct shr_header, head) == 0x280, "head");
_Static_assert(offsetof(struct shr_header, consumer) == 0x300, "consumer");
_Static_assert(offsetof(struct shr_header, consumer_statistics) == 0x380, "consumer_statistics");
_Static_assert(offsetof(struct shr_header, producer_parked) == 0x400, "producer_parked");
_Static_assert(offsetof(struct shr_header, consumer_parked) == 0x480, "consumer_parked");
_Static_assert(offsetof(struct shr_header, wait_histogram) == 0x500, "wait_histogram");
_Static_assert(sizeof(struct shr_header) <= SHR_HEADER_LENGTH, "header fits its page");
_Static_assert(ATOMIC_LLONG_LOCK_FREE == 2 && ATOMIC_INT_LOCK_FREE == 2, "lock-free atomics");
#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the layout is little-endian"
#endif

#endif

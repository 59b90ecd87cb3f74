/* The two ends of a ring: private state of each side, and the calls that never wait.
 *
 * Nothing here allocates, blocks, calls into Python or sets errno. Nothing read from
 * the segment is used before it is checked: sizes were checked at attach and are kept
 * here, a peer's position is checked against ours, a record's length against what is
 * published. All calls are cheap enough to keep the GIL, save where said.
 */
#ifndef SHMRING_RING_H
#define SHMRING_RING_H

#include "shmring/layout.h"

/* Answers. Positive: done. Zero: not now. Negative: never. */
#define SHR_DONE 1
#define SHR_NOT_NOW 0
#define SHR_TOO_LARGE (-1)     /* can never fit this ring */
#define SHR_UNUSABLE (-2)      /* this end was closed, or was inherited by fork */
#define SHR_CORRUPT (-3)       /* the segment says what cannot be; see `bad_position`, `bad_value` */
#define SHR_PEER_FINISHED (-4) /* the other end closed, and nothing is left */
#define SHR_PEER_LOST (-5)     /* the other end died, and nothing is left */
#define SHR_CLAIM_OPEN (-6)
#define SHR_NO_CLAIM (-7)
#define SHR_NOTHING_DRAINED (-8)
#define SHR_BAD_FRAME (-9)
#define SHR_UNRELEASED (-10) /* what was drained is still in hand */

typedef struct shr_producer {
    struct shr_header *header;
    uint8_t *data;
    uint64_t capacity;
    uint64_t mask;
    uint64_t tail;      /* published */
    uint64_t pending;   /* committed up to here, published by the next publication */
    uint64_t claim;     /* bytes of the open claim, padded; 0 = none */
    uint64_t head_seen; /* last head read; the true one is at or beyond it */
    uint64_t pending_records;
    uint64_t peer_checked_ns;
    uint64_t bad_position;
    uint64_t bad_value;
    uint32_t sample_countdown;
    int32_t lock_fd;
    uint32_t usable;
    uint32_t takeover; /* a peer that went will be replaced: its end is no news here */
} shr_producer;

typedef struct shr_consumer {
    struct shr_header *header;
    uint8_t *data;
    uint64_t capacity;
    uint64_t mask;
    uint64_t head;         /* released */
    uint64_t read;         /* handed out up to here */
    uint64_t tail_seen;    /* last tail read; the true one is at or beyond it */
    uint64_t read_records; /* handed out and not released */
    uint64_t releases;     /* grows with each release: tells a stale view */
    uint64_t peer_checked_ns;
    uint64_t bad_position;
    uint64_t bad_value;
    uint64_t sample_position; /* the timed publication last seen */
    uint64_t sample_ns;
    uint64_t sample_done; /* the one last counted */
    int32_t lock_fd;
    uint32_t usable;
    uint32_t takeover; /* a peer that went will be replaced: its end is no news here */
    uint32_t poison;   /* debug: overwrite what is released */
} shr_consumer;

typedef struct shr_record {
    uint8_t *payload;
    uint32_t length; /* of the payload */
    uint8_t type;
    uint8_t flags;
} shr_record;

/* Take up the ends where the shared positions stand. `SHR_CORRUPT` if they cannot be. */
int shr_producer_init(shr_producer *p, struct shr_header *header, uint64_t capacity, int32_t lock_fd,
                      uint32_t pid);
int shr_consumer_init(shr_consumer *c, struct shr_header *header, uint64_t capacity, int32_t lock_fd,
                      uint32_t pid);

/* Largest payload that can ever fit. */
uint64_t shr_payload_length_max(uint64_t capacity);

/* Reserve room for a payload; *payload is where to write it. Nobody sees it yet. */
int shr_claim(shr_producer *p, uint64_t length, uint8_t **payload);
/* The claim becomes a record of `length` bytes (at most what was claimed), still unpublished. */
int shr_commit(shr_producer *p, uint64_t length, uint8_t type, uint8_t flags);
/* Give back the open claim. */
int shr_abort(shr_producer *p);
/* Give back everything committed since the last publication, and the open claim. */
void shr_discard(shr_producer *p);
/* Make all committed records visible, and wake a consumer that sleeps. */
int shr_publish(shr_producer *p);
/* Claim, copy, commit; publish unless told not to. */
int shr_push(shr_producer *p, const void *payload, uint64_t length, uint8_t type, uint8_t flags, int publish);
/* Room for a payload of this length right now? Looks with the order that parking needs. */
int shr_writable(shr_producer *p, uint64_t length);
int shr_free_bytes(shr_producer *p, uint64_t *bytes);

/* The next record not handed out yet. */
int shr_next(shr_consumer *c, shr_record *record);
/* Free all that was handed out, and wake a producer that sleeps. */
int shr_release(shr_consumer *c);
/* Hand out again what was handed out and not released. */
void shr_rewind(shr_consumer *c);
/* Anything that was not handed out yet? Looks with the order that parking needs. */
int shr_readable(shr_consumer *c);
/* Bytes published and not handed out. */
int shr_backlog_bytes(shr_consumer *c, uint64_t *bytes);
/* Say that this end's process is at work elsewhere: whoever looks sees a counter move. */
void shr_consumer_beat(shr_consumer *c);

/* End of this side: says so and wakes the other one. The caller drops the lock afterwards. */
void shr_producer_close(shr_producer *p);
void shr_consumer_close(shr_consumer *c);

/* Is the other end there? SHR_DONE attached and alive, SHR_NOT_NOW never there,
 * SHR_PEER_FINISHED, SHR_PEER_LOST. One system call (1.4 us) when attached. Once it has said
 * lost, the next call that finds no room or nothing to read asks too, and so says it at once. */
int shr_consumer_state(shr_producer *p);
int shr_producer_state(shr_consumer *c);

#endif

/* The producing end of a ring. It alone moves `tail`.
 * Sync points: S1 publish, S2 free, S3 park, S5 closed; docs/explanation/memory-model.md argues each.
 *
 * Invariant: head <= tail <= pending <= head + capacity. Positions only grow. */
#include <string.h>

#include "end.h"
#include "shmring/park.h"

#define SAMPLE_EVERY 64 /* publications between two timed ones; a clock read is 20 ns */

int shr_producer_init(shr_producer *p, struct shr_header *header, uint64_t capacity, int32_t lock_fd,
                      uint32_t pid) {
    memset(p, 0, sizeof *p);
    p->header = header;
    p->data = (uint8_t *)header + SHR_HEADER_LENGTH;
    p->capacity = capacity;
    p->mask = capacity - 1;
    p->lock_fd = lock_fd;
    /* acquire: the last producer's tail; taking the role's lock already ordered us behind it */
    uint64_t tail = atomic_load_explicit(&header->tail, memory_order_acquire);
    /* [S2] acquire, as in room_for() */
    uint64_t head = atomic_load_explicit(&header->head, memory_order_acquire);
    p->tail = p->pending = tail;
    p->head_seen = head;
    p->sample_countdown = 1;
    if (tail - head > capacity || tail % SHR_RECORD_ALIGNMENT != 0 || head % SHR_RECORD_ALIGNMENT != 0) {
        p->bad_position = tail;
        p->bad_value = head;
        return SHR_CORRUPT;
    }
    p->usable = 1;
    atomic_store_explicit(&header->producer_statistics.waiting_since_ns, 0, memory_order_relaxed);
    shr_end_attach(&header->producer, pid);
    return SHR_DONE;
}

uint64_t shr_payload_length_max(uint64_t capacity) {
    uint64_t record = capacity < SHR_RECORD_LENGTH_MAX ? capacity : SHR_RECORD_LENGTH_MAX;
    return record - SHR_RECORD_HEADER_LENGTH;
}

/* Remember how full it has been. `used` is true, so taken when the head was just read. */
static void mark_high_water(shr_producer *p, uint64_t used) {
    _Atomic uint64_t *mark = &p->header->producer_statistics.high_water;
    if (used > atomic_load_explicit(mark, memory_order_relaxed)) {
        atomic_store_explicit(mark, used, memory_order_relaxed);
    }
}

/* Read the shared head with this order and check it against ours. */
static int read_head(shr_producer *p, memory_order order) {
    /* [S2] acquire (or seq_cst, [S3]), pairs with the store in shr_release: without it we could
     * write into bytes that the consumer is still reading. */
    uint64_t head = atomic_load_explicit(&p->header->head, order);
    if (head - p->head_seen > p->tail - p->head_seen || /* went backwards, or past the tail */
        head % SHR_RECORD_ALIGNMENT != 0) {
        p->bad_position = p->tail;
        p->bad_value = head;
        return SHR_CORRUPT;
    }
    p->head_seen = head;
    return SHR_DONE;
}

static int room_for(const shr_producer *p, uint64_t record) {
    return p->capacity - (p->pending - p->head_seen) >= record;
}

int shr_claim(shr_producer *p, uint64_t length, uint8_t **payload) {
    if (!p->usable) {
        return SHR_UNUSABLE;
    }
    if (p->claim != 0) {
        return SHR_CLAIM_OPEN;
    }
    if (length > shr_payload_length_max(p->capacity)) {
        return SHR_TOO_LARGE;
    }
    uint64_t record = shr_padded(SHR_RECORD_HEADER_LENGTH + length);
    if (!room_for(p, record)) {
        int answer = read_head(p, memory_order_acquire);
        if (answer < 0) {
            return answer;
        }
        if (!room_for(p, record)) {
            mark_high_water(p, p->pending - p->head_seen);
            shr_count(&p->header->producer_statistics.stalls, 1);
            answer = shr_end_worth_waiting(p->header, &p->header->consumer, p->lock_fd, SHR_ROLE_CONSUMER,
                                           p->takeover, p->capacity, &p->peer_checked_ns);
            if (answer == SHR_NOT_NOW) {
                return answer;
            }
            if (answer == SHR_CORRUPT) {
                p->bad_position = p->tail;
                p->bad_value = p->header->magic;
                return answer;
            }
            /* it may have freed everything just before it went */
            int again = read_head(p, memory_order_acquire);
            if (again < 0 || !room_for(p, record)) {
                return again < 0 ? again : answer;
            }
        }
    }
    p->claim = record;
    *payload = p->data + (p->pending & p->mask) + SHR_RECORD_HEADER_LENGTH;
    return SHR_DONE;
}

int shr_commit(shr_producer *p, uint64_t length, uint8_t type, uint8_t flags) {
    if (!p->usable) {
        return SHR_UNUSABLE;
    }
    if (p->claim == 0) {
        return SHR_NO_CLAIM;
    }
    uint64_t record = SHR_RECORD_HEADER_LENGTH + length;
    if (length > p->claim || record > p->claim) {
        return SHR_TOO_LARGE;
    }
    struct shr_record_header header = {(uint32_t)record, type, flags, 0};
    memcpy(p->data + (p->pending & p->mask), &header, sizeof header);
    p->pending += shr_padded(record);
    p->pending_records += 1;
    p->claim = 0;
    return SHR_DONE;
}

int shr_abort(shr_producer *p) {
    if (!p->usable) {
        return SHR_UNUSABLE;
    }
    if (p->claim == 0) {
        return SHR_NO_CLAIM;
    }
    p->claim = 0;
    return SHR_DONE;
}

void shr_discard(shr_producer *p) {
    p->claim = 0;
    p->pending = p->tail;
    p->pending_records = 0;
}

/* Every now and then a publication is timed, and the consumer that frees it says how long it lay. */
static void sample_publication(shr_producer *p) {
    if (--p->sample_countdown == 0) {
        p->sample_countdown = SAMPLE_EVERY;
        atomic_store_explicit(&p->header->sample_ns, shr_clock_ns(CLOCK_MONOTONIC), memory_order_relaxed);
        /* release, pairs with the acquire in note_sample: the time belongs to this position */
        atomic_store_explicit(&p->header->sample_position, p->pending, memory_order_release);
    }
}

int shr_publish(shr_producer *p) {
    if (!p->usable) {
        return SHR_UNUSABLE;
    }
    if (p->claim != 0) {
        return SHR_CLAIM_OPEN;
    }
    if (p->pending == p->tail) {
        return SHR_NOT_NOW;
    }
    struct shr_end_statistics *s = &p->header->producer_statistics;
    shr_count(&s->records, p->pending_records);
    shr_count(&s->bytes, p->pending - p->tail);
    shr_count(&s->batches, 1);
    /* The head we know may be long past, and reading the true one costs a line from the other core:
     * only when the mark could rise by a 64th of the capacity. A bad head is told by the next claim. */
    uint64_t mark = atomic_load_explicit(&s->high_water, memory_order_relaxed);
    if (p->pending - p->head_seen > mark + p->capacity / 64 &&
        read_head(p, memory_order_acquire) == SHR_DONE) {
        mark_high_water(p, p->pending - p->head_seen);
    }
    atomic_store_explicit(&s->active_ns, shr_clock_ns(CLOCK_MONOTONIC_COARSE), memory_order_relaxed);
    sample_publication(p);
    /* [S1] at least release, pairs with the acquire of tail in the consumer: without it the position
     * may be seen before the bytes it covers.
     * [S3] seq_cst, store tail then load consumer_parked; the consumer stores consumer_parked then
     * loads tail. With less, both may miss each other and the consumer sleeps beside its record. */
    atomic_store_explicit(&p->header->tail, p->pending, memory_order_seq_cst);
    p->tail = p->pending;
    p->pending_records = 0;
    /* [S3] seq_cst, see above */
    if (atomic_load_explicit(&p->header->consumer_parked, memory_order_seq_cst) != 0) {
        shr_count(&s->wakes_sent, (uint64_t)shr_wake(&p->header->consumer_parked));
    }
    return SHR_DONE;
}

int shr_push(shr_producer *p, const void *payload, uint64_t length, uint8_t type, uint8_t flags,
             int publish) {
    uint8_t *to = NULL;
    int answer = shr_claim(p, length, &to);
    if (answer != SHR_DONE) {
        return answer;
    }
    memcpy(to, payload, length);
    shr_commit(p, length, type, flags);
    if (publish) {
        shr_publish(p);
    }
    return SHR_DONE;
}

int shr_writable(shr_producer *p, uint64_t length) {
    if (!p->usable) {
        return SHR_UNUSABLE;
    }
    if (length > shr_payload_length_max(p->capacity)) {
        return SHR_TOO_LARGE;
    }
    /* [S3] seq_cst, after producer_parked was stored; pairs with shr_release */
    int answer = read_head(p, memory_order_seq_cst);
    if (answer < 0) {
        return answer;
    }
    if (room_for(p, shr_padded(SHR_RECORD_HEADER_LENGTH + length))) {
        return SHR_DONE;
    }
    /* [S5] seq_cst, pairs with shr_consumer_close: a closed peer frees nothing any more */
    if (!p->takeover &&
        atomic_load_explicit(&p->header->consumer.state, memory_order_seq_cst) == SHR_END_CLOSED) {
        return SHR_PEER_FINISHED;
    }
    return SHR_NOT_NOW;
}

int shr_free_bytes(shr_producer *p, uint64_t *bytes) {
    if (!p->usable) {
        return SHR_UNUSABLE;
    }
    int answer = read_head(p, memory_order_acquire);
    *bytes = p->capacity - (p->pending - p->head_seen) - p->claim;
    return answer;
}

void shr_producer_close(shr_producer *p) {
    if (!p->usable) {
        return;
    }
    shr_discard(p);
    p->usable = 0;
    /* [S5] release, after the last tail store; the consumer acquires it, then reads tail once more:
     * without the order it could see the end and miss the last record. seq_cst because a consumer
     * may be about to park: it stores consumer_parked, then looks here. */
    atomic_store_explicit(&p->header->producer.state, SHR_END_CLOSED, memory_order_seq_cst);
    if (atomic_load_explicit(&p->header->consumer_parked, memory_order_seq_cst) != 0) {
        shr_wake(&p->header->consumer_parked);
    }
}

int shr_consumer_state(shr_producer *p) {
    if (!p->usable) {
        return SHR_UNUSABLE;
    }
    int answer = shr_end_look(&p->header->consumer, p->lock_fd, SHR_ROLE_CONSUMER);
    if (answer == SHR_PEER_LOST) {
        p->peer_checked_ns = 0;
    }
    return answer;
}

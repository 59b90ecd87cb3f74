/* The consuming end of a ring. It alone moves `head`.
 * Sync points: S1 publish, S2 free, S3 park, S5 closed; docs/explanation/memory-model.md argues each.
 *
 * Invariant: head <= read <= tail <= head + capacity. Positions only grow. */
#include <string.h>

#include "end.h"
#include "shmring/park.h"

/* A consumer that died while it overwrote what it released has left no records there: they count as
 * released. Relaxed: only holders of the role use these words, one after the other. */
static void finish_poisoning(shr_consumer *c, uint64_t tail) {
    struct shr_end_state *end = &c->header->consumer;
    if (atomic_load_explicit(&end->poisoning, memory_order_relaxed) == 0) {
        return;
    }
    uint64_t to = atomic_load_explicit(&end->poisoned_to, memory_order_relaxed);
    if (to - c->head <= tail - c->head && to % SHR_RECORD_ALIGNMENT == 0) {
        c->head = c->read = c->tail_seen = to;
        /* [S2] release, as in shr_release */
        atomic_store_explicit(&c->header->head, to, memory_order_release);
    }
    atomic_store_explicit(&end->poisoning, 0, memory_order_relaxed);
}

/* Overwrite what is about to be released. Before head moves, or it would hit the producer's next
 * records; and a successor must know of it if we are killed in between. */
static void poison(shr_consumer *c) {
    struct shr_end_state *end = &c->header->consumer;
    atomic_store_explicit(&end->poisoned_to, c->read, memory_order_relaxed);
    atomic_store_explicit(&end->poisoning, 1, memory_order_release);
    atomic_signal_fence(memory_order_seq_cst); /* in program order: a kill cuts it anywhere */
    memset(c->data + (c->head & c->mask), 0xDB, c->read - c->head);
}

int shr_consumer_init(shr_consumer *c, struct shr_header *header, uint64_t capacity, int32_t lock_fd,
                      uint32_t pid) {
    memset(c, 0, sizeof *c);
    c->header = header;
    c->data = (uint8_t *)header + SHR_HEADER_LENGTH;
    c->capacity = capacity;
    c->mask = capacity - 1;
    c->lock_fd = lock_fd;
    /* acquire: the last consumer's head; taking the role's lock already ordered us behind it */
    uint64_t head = atomic_load_explicit(&header->head, memory_order_acquire);
    /* [S1] acquire, as in read_tail() */
    uint64_t tail = atomic_load_explicit(&header->tail, memory_order_acquire);
    c->head = c->read = head;
    c->tail_seen = head; /* the first look is a real one */
    if (tail - head > capacity || head % SHR_RECORD_ALIGNMENT != 0 || tail % SHR_RECORD_ALIGNMENT != 0) {
        c->bad_position = head;
        c->bad_value = tail;
        return SHR_CORRUPT;
    }
    finish_poisoning(c, tail);
    c->usable = 1;
    atomic_store_explicit(&header->consumer_statistics.waiting_since_ns, 0, memory_order_relaxed);
    shr_end_attach(&header->consumer, pid);
    return SHR_DONE;
}

/* Remember the last timed publication while its line is here: it lies beside tail. */
static void note_sample(shr_consumer *c) {
    /* acquire, pairs with the release in sample_publication */
    uint64_t position = atomic_load_explicit(&c->header->sample_position, memory_order_acquire);
    if (position != c->sample_position) {
        c->sample_position = position;
        c->sample_ns = atomic_load_explicit(&c->header->sample_ns, memory_order_relaxed);
    }
}

static int read_tail(shr_consumer *c, memory_order order) {
    /* [S1] acquire (or seq_cst, [S3]), pairs with the store of tail in shr_publish: the bytes of all
     * records before this position are there. */
    uint64_t tail = atomic_load_explicit(&c->header->tail, order);
    if (tail - c->head > c->capacity || tail - c->head < c->tail_seen - c->head ||
        tail % SHR_RECORD_ALIGNMENT != 0) {
        c->bad_position = c->head;
        c->bad_value = tail;
        return SHR_CORRUPT;
    }
    if (tail != c->tail_seen) {
        c->tail_seen = tail;
        note_sample(c);
    }
    return SHR_DONE;
}

int shr_next(shr_consumer *c, shr_record *record) {
    if (!c->usable) {
        return SHR_UNUSABLE;
    }
    if (c->read == c->tail_seen) {
        int answer = read_tail(c, memory_order_acquire);
        if (answer < 0) {
            return answer;
        }
        if (c->read == c->tail_seen) {
            if (c->read_records == 0) { /* else the caller has something in hand, and is not stalled */
                shr_count(&c->header->consumer_statistics.stalls, 1);
            }
            answer = shr_end_worth_waiting(c->header, &c->header->producer, c->lock_fd, SHR_ROLE_PRODUCER,
                                           c->takeover, c->capacity, &c->peer_checked_ns);
            if (answer == SHR_NOT_NOW) {
                return answer;
            }
            if (answer == SHR_CORRUPT) {
                c->bad_position = c->head;
                c->bad_value = c->header->magic;
                return answer;
            }
            /* [S5] the last record may have come between the two looks */
            int again = read_tail(c, memory_order_acquire);
            if (again < 0 || c->read == c->tail_seen) {
                return again < 0 ? again : answer;
            }
        }
    }
    struct shr_record_header header;
    memcpy(&header, c->data + (c->read & c->mask), sizeof header);
    uint64_t available = c->tail_seen - c->read;
    if (header.length < SHR_RECORD_HEADER_LENGTH || shr_padded(header.length) > available) {
        c->bad_position = c->read;
        c->bad_value = header.length;
        return SHR_CORRUPT;
    }
    record->payload = c->data + (c->read & c->mask) + SHR_RECORD_HEADER_LENGTH;
    record->length = header.length - SHR_RECORD_HEADER_LENGTH;
    record->type = header.type;
    record->flags = header.flags;
    c->read += shr_padded(header.length);
    c->read_records += 1;
    return SHR_DONE;
}

/* If the released bytes cover a timed publication, say how long it waited. */
static void take_sample(shr_consumer *c) {
    uint64_t position = c->sample_position;
    if (position == c->sample_done || position - c->head - 1 >= c->read - c->head) {
        return;
    }
    c->sample_done = position;
    uint64_t waited = shr_clock_ns(CLOCK_MONOTONIC) - c->sample_ns;
    unsigned bin = waited == 0 ? 0 : 64U - (unsigned)__builtin_clzll(waited);
    if (bin < SHR_HISTOGRAM_BINS) {
        shr_count(&c->header->wait_histogram[bin], 1);
    }
}

int shr_release(shr_consumer *c) {
    if (!c->usable) {
        return SHR_UNUSABLE;
    }
    if (c->read == c->head) {
        return SHR_NOTHING_DRAINED;
    }
    struct shr_end_statistics *s = &c->header->consumer_statistics;
    uint64_t length = c->read - c->head;
    if (c->poison) {
        poison(c);
    }
    shr_count(&s->records, c->read_records);
    shr_count(&s->bytes, length);
    shr_count(&s->batches, 1);
    atomic_store_explicit(&s->active_ns, shr_clock_ns(CLOCK_MONOTONIC_COARSE), memory_order_relaxed);
    take_sample(c);
    /* [S2] at least release, pairs with the acquire of head in the producer: without it the producer
     * may overwrite bytes whose reading is not done.
     * [S3] seq_cst, store head then load producer_parked; mirrors shr_publish. */
    atomic_store_explicit(&c->header->head, c->read, memory_order_seq_cst);
    if (c->poison) {
        atomic_store_explicit(&c->header->consumer.poisoning, 0, memory_order_relaxed);
    }
    c->head = c->read;
    c->read_records = 0;
    c->releases += 1;
    /* [S3] seq_cst, see above */
    if (atomic_load_explicit(&c->header->producer_parked, memory_order_seq_cst) != 0) {
        shr_count(&s->wakes_sent, (uint64_t)shr_wake(&c->header->producer_parked));
    }
    return SHR_DONE;
}

void shr_rewind(shr_consumer *c) {
    c->read = c->head;
    c->read_records = 0;
    c->releases += 1; /* views taken so far are stale */
}

int shr_readable(shr_consumer *c) {
    if (!c->usable) {
        return SHR_UNUSABLE;
    }
    /* [S3] seq_cst, after consumer_parked was stored; pairs with shr_publish */
    int answer = read_tail(c, memory_order_seq_cst);
    if (answer < 0) {
        return answer;
    }
    if (c->read != c->tail_seen) {
        return SHR_DONE;
    }
    /* [S5] seq_cst, pairs with shr_producer_close */
    if (!c->takeover &&
        atomic_load_explicit(&c->header->producer.state, memory_order_seq_cst) == SHR_END_CLOSED) {
        return SHR_PEER_FINISHED;
    }
    return SHR_NOT_NOW;
}

void shr_consumer_beat(shr_consumer *c) {
    if (c->usable) {
        shr_count(&c->header->consumer_statistics.beats, 1);
    }
}

int shr_backlog_bytes(shr_consumer *c, uint64_t *bytes) {
    if (!c->usable) {
        return SHR_UNUSABLE;
    }
    int answer = read_tail(c, memory_order_acquire);
    *bytes = c->tail_seen - c->read;
    return answer;
}

void shr_consumer_close(shr_consumer *c) {
    if (!c->usable) {
        return;
    }
    c->usable = 0;
    c->releases += 1;
    /* [S5] mirrors shr_producer_close */
    atomic_store_explicit(&c->header->consumer.state, SHR_END_CLOSED, memory_order_seq_cst);
    if (atomic_load_explicit(&c->header->producer_parked, memory_order_seq_cst) != 0) {
        shr_wake(&c->header->producer_parked);
    }
}

int shr_producer_state(shr_consumer *c) {
    if (!c->usable) {
        return SHR_UNUSABLE;
    }
    int answer = shr_end_look(&c->header->producer, c->lock_fd, SHR_ROLE_PRODUCER);
    if (answer == SHR_PEER_LOST) {
        c->peer_checked_ns = 0;
    }
    return answer;
}

/* A process may be killed at any instruction: what does its successor find?
 *
 *     any_instruction
 *
 * A child goes through one operation step by step (ptrace). After each single instruction the shared
 * memory is as a kill at that moment would leave it; a copy of it is taken up by new ends, which must
 * find whole records, those and only those that may be there. So every moment of death is tried. */
#include "harness.h"

#include <signal.h>
#include <sys/ptrace.h>
#include <sys/wait.h>

#define CAPACITY 4096U
#define STEPS_MAX 200000

static uint64_t lengths_start;

static uint64_t payload_length(uint64_t n) { return length_of(n + lengths_start, CAPACITY / 8); }

static void push_to(shr_producer *p, uint64_t n, int publish) {
    uint8_t payload[CAPACITY];
    uint64_t length = payload_length(n);
    for (uint64_t i = 0; i < length; i++) {
        payload[i] = byte_of(n, i);
    }
    CHECK(shr_push(p, payload, length, (uint8_t)n, 0, publish) == SHR_DONE);
}

/* Records `first` to `last` lie there, whole, and nothing else. */
static uint64_t take_all(shr_consumer *c, uint64_t first) {
    shr_record record;
    uint64_t n = first;
    while (shr_next(c, &record) == SHR_DONE) {
        CHECK(record.type == (uint8_t)n && record.length == payload_length(n));
        for (uint64_t i = 0; i < record.length; i++) {
            CHECK(record.payload[i] == byte_of(n, i));
        }
        n++;
    }
    return n;
}

struct scene {
    const char *name;
    void (*act)(struct ring *);
    uint64_t before;    /* records published before it */
    uint64_t batch;     /* records that it publishes, all or none */
    uint64_t released;  /* records that it releases, all or none */
    int peer_is_parked; /* so that it sends a wake */
    int poison;
};

static void push_one(struct ring *r) { push_to(&r->producer, 3, 1); }

static void push_batch(struct ring *r) {
    for (uint64_t n = 3; n < 7; n++) {
        push_to(&r->producer, n, 0);
    }
    CHECK(shr_publish(&r->producer) == SHR_DONE);
}

static void claim_and_abort(struct ring *r) {
    uint8_t *payload;
    CHECK(shr_claim(&r->producer, 300, &payload) == SHR_DONE);
    memset(payload, 0xEE, 300);
    CHECK(shr_abort(&r->producer) == SHR_DONE);
    push_to(&r->producer, 3, 0);
    shr_discard(&r->producer);
}

static void close_producer(struct ring *r) {
    push_to(&r->producer, 3, 1);
    shr_producer_close(&r->producer);
}

static void drain_and_release(struct ring *r) {
    CHECK(take_all(&r->consumer, 0) == 3);
    CHECK(shr_release(&r->consumer) == SHR_DONE);
}

static void drain_and_rewind(struct ring *r) {
    CHECK(take_all(&r->consumer, 0) == 3);
    shr_rewind(&r->consumer);
}

static void wait_in_vain(struct ring *r) {
    shr_consumer *c = &r->consumer;
    CHECK(take_all(c, 0) == 3);
    CHECK(shr_wait(&c, 1, NULL, NULL, 0, NULL, 0, 1000000) == SHR_NOT_NOW);
}

static void attach_again(struct ring *r) {
    shr_producer p;
    shr_consumer c;
    CHECK(shr_producer_init(&p, r->base, CAPACITY, r->fds[1], 2) == SHR_DONE);
    CHECK(shr_consumer_init(&c, r->base, CAPACITY, r->fds[2], 2) == SHR_DONE);
}

static const struct scene scenes[] = {
    {"push one", push_one, 3, 1, 0, 0, 0},
    {"push one, waking the consumer", push_one, 3, 1, 0, 1, 0},
    {"push a batch", push_batch, 3, 4, 0, 0, 0},
    {"claim and abort, append and discard", claim_and_abort, 3, 0, 0, 0, 0},
    {"push and close", close_producer, 3, 1, 0, 1, 0},
    {"drain and release", drain_and_release, 3, 0, 3, 0, 0},
    {"drain and release, waking the producer", drain_and_release, 3, 0, 3, 1, 0},
    {"drain and release with poison", drain_and_release, 3, 0, 3, 0, 1},
    {"drain and rewind", drain_and_rewind, 3, 0, 0, 0, 0},
    {"wait in vain", wait_in_vain, 3, 0, 0, 0, 0},
    {"take up both ends", attach_again, 3, 0, 0, 0, 0},
};

/* What successors make of the memory as it is now. */
static void judge(const struct scene *s, const struct ring *r, struct ring *copy) {
    memcpy(copy->base, r->base, SHR_HEADER_LENGTH + CAPACITY);
    shr_consumer c;
    shr_producer p;
    CHECK(shr_producer_init(&p, copy->base, CAPACITY, copy->fds[1], 3) == SHR_DONE);
    CHECK(shr_consumer_init(&c, copy->base, CAPACITY, copy->fds[2], 3) == SHR_DONE);
    uint64_t first = c.head == 0 ? 0 : s->released;
    uint64_t last = take_all(&c, first);
    CHECK(last == s->before || last == s->before + s->batch);
    if (last != first) {
        CHECK(shr_release(&c) == SHR_DONE);
    }
    /* and the ring goes on from there */
    push_to(&p, last, 1);
    CHECK(take_all(&c, last) == last + 1);
}

static int play(const struct scene *s, struct ring *r, struct ring *copy) {
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        if (ptrace(PTRACE_TRACEME, 0, NULL, NULL) != 0) {
            _exit(77);
        }
        raise(SIGSTOP);
        s->act(r);
        _exit(0);
    }
    int steps = 0, status;
    for (;;) {
        CHECK(waitpid(child, &status, 0) == child);
        if (!WIFSTOPPED(status)) {
            break;
        }
        judge(s, r, copy);
        CHECK(++steps < STEPS_MAX);
        CHECK(ptrace(PTRACE_SINGLESTEP, child, NULL, NULL) == 0);
    }
    if (WIFEXITED(status) && WEXITSTATUS(status) == 77) {
        return -1;
    }
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    judge(s, r, copy);
    return steps;
}

int main(void) {
    for (size_t i = 0; i < sizeof scenes / sizeof *scenes; i++) {
        const struct scene *s = &scenes[i];
        int steps = 0;
        for (lengths_start = 0; lengths_start < 40; lengths_start += 7) {
            struct ring r, copy;
            ring_make(&r, CAPACITY, 0);
            ring_make(&copy, CAPACITY, 0);
            for (uint64_t n = 0; n < s->before; n++) {
                push_to(&r.producer, n, 1);
            }
            r.consumer.poison = (uint32_t)s->poison;
            struct shr_header *h = r.base;
            atomic_store(&h->consumer_parked, (uint32_t)s->peer_is_parked);
            atomic_store(&h->producer_parked, (uint32_t)s->peer_is_parked);
            int more = play(s, &r, &copy);
            if (more < 0) {
                puts("any_instruction: skipped: this machine does not let a process be traced");
                return 0;
            }
            steps += more;
            ring_free(&r);
            ring_free(&copy);
        }
        printf("%-40s %7d moments of death: ok\n", s->name, steps);
    }
    return 0;
}

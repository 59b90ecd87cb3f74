/* Threads push, read and sleep against each other; every byte of every record is checked.
 *
 *     stress RECORDS
 *
 * Run under the thread, address and undefined-behaviour sanitizers by run.sh. Prints what it counted;
 * aborts at the first wrong byte, and is silent about time. */
#include "harness.h"

#define WATCHDOG_NS 20000000000U
#define FAN 3

static uint64_t record_count;

struct side {
    struct ring *ring;
    uint64_t seed;
    uint64_t spin_ns;
    uint64_t waits;
};

static void wait_for_room(struct side *s, uint64_t length) {
    shr_producer *p = &s->ring->producer;
    s->waits++;
    CHECK(shr_wait(NULL, 0, &p, &length, 1, NULL, s->spin_ns, WATCHDOG_NS) == SHR_DONE);
}

static void write_record(uint8_t *to, uint64_t n, uint64_t length) {
    for (uint64_t i = 0; i < length; i++) {
        to[i] = byte_of(n, i);
    }
}

static void *produce(void *argument) {
    struct side *s = argument;
    shr_producer *p = &s->ring->producer;
    struct dice dice = {s->seed};
    uint8_t *scratch = malloc(s->ring->capacity);
    CHECK(scratch != NULL);
    for (uint64_t n = 0; n < record_count;) {
        uint64_t length = length_of(n, s->ring->capacity);
        uint64_t way = roll(&dice) % 8;
        uint8_t *payload;
        int answer;
        if (way < 3) {
            write_record(scratch, n, length);
            answer = shr_push(p, scratch, length, (uint8_t)n, (uint8_t)~n, way == 0);
        } else {
            /* claim more than needed, as one does who knows the length only at the end */
            uint64_t more = roll(&dice) % 40;
            uint64_t claim =
                length + more <= shr_payload_length_max(s->ring->capacity) ? length + more : length;
            answer = shr_claim(p, claim, &payload);
            if (answer == SHR_DONE) {
                write_record(payload, n, length);
                if (way == 3) {
                    CHECK(shr_abort(p) == SHR_DONE);
                    continue;
                }
                CHECK(shr_commit(p, length, (uint8_t)n, (uint8_t)~n) == SHR_DONE);
            }
        }
        if (answer == SHR_NOT_NOW) {
            if (shr_publish(p) == SHR_NOT_NOW) {
                wait_for_room(s, length);
            }
            continue;
        }
        CHECK(answer == SHR_DONE);
        n++;
        if (roll(&dice) % 4 == 0) {
            CHECK(shr_publish(p) >= 0);
        }
    }
    CHECK(shr_publish(p) >= 0);
    shr_producer_close(p);
    free(scratch);
    return NULL;
}

/* Read up to `most` records from number n on; return how many. -1: the end. */
static int64_t read_some(struct side *s, uint64_t n, uint64_t most) {
    shr_consumer *c = &s->ring->consumer;
    for (uint64_t k = 0; k < most; k++) {
        shr_record record;
        int answer = shr_next(c, &record);
        if (answer == SHR_NOT_NOW) {
            return (int64_t)k;
        }
        if (answer == SHR_PEER_FINISHED) {
            return k == 0 ? -1 : (int64_t)k;
        }
        CHECK(answer == SHR_DONE);
        CHECK(record.length == length_of(n + k, s->ring->capacity));
        CHECK(record.type == (uint8_t)(n + k) && record.flags == (uint8_t)~(n + k));
        for (uint32_t i = 0; i < record.length; i++) {
            CHECK(record.payload[i] == byte_of(n + k, i));
        }
    }
    return (int64_t)most;
}

static void *consume(void *argument) {
    struct side *s = argument;
    shr_consumer *c = &s->ring->consumer;
    struct dice dice = {s->seed};
    uint64_t n = 0;
    for (;;) {
        uint64_t most = 1 + roll(&dice) % 9;
        int64_t count = read_some(s, n, most);
        if (count < 0) {
            break;
        }
        if (count == 0) {
            s->waits++;
            CHECK(shr_wait(&c, 1, NULL, NULL, 0, NULL, s->spin_ns, WATCHDOG_NS) == SHR_DONE);
            continue;
        }
        if (roll(&dice) % 5 == 0) { /* as a handler that fails and starts again */
            shr_rewind(c);
            CHECK(read_some(s, n, (uint64_t)count) == count);
        }
        CHECK(shr_release(c) == SHR_DONE);
        n += (uint64_t)count;
    }
    CHECK(n == record_count);
    return NULL;
}

static void pair(uint64_t capacity, uint64_t start, uint64_t spin_ns, uint32_t poison) {
    struct ring ring;
    pthread_t threads[2];
    ring_make(&ring, capacity, start);
    ring.consumer.poison = poison;
    struct side sides[2] = {{&ring, 1 + capacity + spin_ns, spin_ns, 0},
                            {&ring, 2 + start + poison, spin_ns, 0}};
    CHECK(pthread_create(&threads[0], NULL, produce, &sides[0]) == 0);
    CHECK(pthread_create(&threads[1], NULL, consume, &sides[1]) == 0);
    pthread_join(threads[0], NULL);
    pthread_join(threads[1], NULL);
    struct shr_snapshot snapshot;
    shr_snapshot_take(ring.base, &snapshot);
    CHECK(snapshot.producer.position == snapshot.consumer.position);
    CHECK(snapshot.producer.records == record_count && snapshot.consumer.records == record_count);
    CHECK(snapshot.producer.bytes == snapshot.consumer.bytes);
    CHECK(snapshot.producer.high_water <= capacity);
    printf("pair: capacity=%" PRIu64 " start=%#" PRIx64 " spin_ns=%" PRIu64 " records=%" PRIu64
           " waits=%" PRIu64 "+%" PRIu64 "\n",
           capacity, start, spin_ns, record_count, sides[0].waits, sides[1].waits);
    ring_free(&ring);
}

/* One thread reads several rings and sleeps on all of them and a bell; another one looks on. */
struct fan {
    struct ring rings[FAN];
    shr_bell bell;
    _Atomic int over;
};

static void *watch(void *argument) {
    struct fan *fan = argument;
    struct shr_snapshot snapshot;
    while (!atomic_load(&fan->over)) {
        for (int i = 0; i < FAN; i++) {
            shr_snapshot_take(fan->rings[i].base, &snapshot);
            CHECK(snapshot.producer.position - snapshot.consumer.position <= fan->rings[i].capacity);
        }
        shr_bell_ring(&fan->bell);
        usleep(500);
    }
    return NULL;
}

static void fan_in(void) {
    static struct fan fan;
    struct side sides[FAN];
    pthread_t threads[FAN + 1];
    uint64_t read[FAN] = {0}, bells = 0;
    shr_consumer *consumers[FAN];
    for (int i = 0; i < FAN; i++) {
        ring_make(&fan.rings[i], 4096, 0);
        consumers[i] = &fan.rings[i].consumer;
        sides[i] = (struct side){&fan.rings[i], (uint64_t)i + 77, 0, 0};
        CHECK(pthread_create(&threads[i], NULL, produce, &sides[i]) == 0);
    }
    CHECK(pthread_create(&threads[FAN], NULL, watch, &fan) == 0);
    for (int ended = 0; ended < FAN;) {
        int moved = 0;
        ended = 0;
        for (int i = 0; i < FAN; i++) {
            int64_t count = read_some(&sides[i], read[i], 5);
            if (count > 0) {
                CHECK(shr_release(consumers[i]) == SHR_DONE);
                read[i] += (uint64_t)count;
                moved = 1;
            }
            ended += count < 0;
        }
        if (!moved && ended == 0) {
            CHECK(shr_wait(consumers, FAN, NULL, NULL, 0, &fan.bell, 0, WATCHDOG_NS) == SHR_DONE);
            bells += (uint64_t)shr_bell_answer(&fan.bell);
        }
    }
    atomic_store(&fan.over, 1);
    for (int i = 0; i <= FAN; i++) {
        pthread_join(threads[i], NULL);
    }
    for (int i = 0; i < FAN; i++) {
        CHECK(read[i] == record_count);
        ring_free(&fan.rings[i]);
    }
    printf("fan in: rings=%d records=%" PRIu64 " bells=%" PRIu64 "\n", FAN, record_count * FAN, bells);
}

int main(int argc, char **argv) {
    record_count = argc > 1 ? strtoull(argv[1], NULL, 10) : 20000;
    pair(4096, 0, 0, 0);
    pair(4096, 0 - (uint64_t)4096 * 3, 2000, 1); /* positions wrap on the way */
    pair(65536, (1ULL << 32) - 8, 20000, 0);
    fan_in();
    return 0;
}

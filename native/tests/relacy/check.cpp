// The C core under a checker of the C11 memory model. See README.md beside this file.
#include <fstream>

#include "model.hpp"

extern "C++" {
#include "core.inc"
}

#undef memcpy
#undef memset

namespace {

constexpr uint64_t FOR_EVER = UINT64_MAX;

struct memory {
    shr_header header;
    uint8_t pad[SHR_HEADER_LENGTH];
};

// One ring, made as segment.c makes it, and whatever ends a test gives it.
struct ring {
    memory *shared;
    arena area;

    explicit ring(int index, uint64_t capacity) {
        static_assert(sizeof(shr_header) <= SHR_HEADER_LENGTH);
        shared = (memory *)::calloc(1, sizeof(memory) + 2 * CAPACITY_MAX);
        ::new (&shared->header) shr_header();
        area.start = (uint8_t *)&shared->header + SHR_HEADER_LENGTH;
        area.capacity = capacity;
        arenas[index] = &area;
    }
    ~ring() {
        shared->header.~shr_header();
        ::free(shared);
    }
    // the object is all zero when it is new
    void zero() {
        shr_header &h = shared->header;
        for (auto *word : {&h.ready, &h.retired, &h.producer.state, &h.producer.generation, &h.producer.pid,
                           &h.producer.poisoning, &h.consumer.poisoning, &h.consumer.state,
                           &h.consumer.generation, &h.consumer.pid, &h.producer_parked, &h.consumer_parked}) {
            word->store(0, rl::mo_relaxed, $);
        }
        for (auto *word : {&h.tail, &h.head, &h.producer.poisoned_to, &h.consumer.poisoned_to}) {
            word->store(0, rl::mo_relaxed, $);
        }
    }
    void make(uint64_t start_position) {
        zero();
        shr_header_init(&shared->header, SHR_KIND_RING, area.capacity, 7, 0, 1, start_position);
    }
};

uint8_t byte_of(uint32_t n, uint32_t i) { return (uint8_t)(17 * n + i + 1); }

// 0: no more, the consumer has gone
int put(shr_producer *p, uint32_t n, uint32_t length) {
    uint8_t payload[CAPACITY_MAX];
    for (uint32_t i = 0; i < length; i++) {
        payload[i] = byte_of(n, i);
    }
    for (;;) {
        int answer = shr_push(p, payload, length, (uint8_t)n, 0, 1);
        if (answer == SHR_DONE || answer == SHR_PEER_FINISHED) {
            return answer == SHR_DONE;
        }
        RL_ASSERT(answer == SHR_NOT_NOW);
        uint64_t need = length;
        answer = shr_wait(nullptr, 0, &p, &need, 1, nullptr, 0, FOR_EVER);
        RL_ASSERT(answer == SHR_DONE);
    }
}

void check_record(const shr_record &record, uint32_t n, uint32_t length) {
    uint8_t payload[CAPACITY_MAX];
    RL_ASSERT(record.type == n && record.length == length);
    model_copy(payload, record.payload, length);
    for (uint32_t i = 0; i < length; i++) {
        RL_ASSERT(payload[i] == byte_of(n, i));
    }
}

// 0: no more, the producer has finished. Does not release.
int get(shr_consumer *c, uint32_t n, uint32_t length) {
    shr_record record;
    for (;;) {
        int answer = shr_next(c, &record);
        if (answer == SHR_DONE) {
            check_record(record, n, length);
            return 1;
        }
        if (answer == SHR_PEER_FINISHED) {
            return 0;
        }
        RL_ASSERT(answer == SHR_NOT_NOW);
        answer = shr_wait(&c, 1, nullptr, nullptr, 0, nullptr, 0, FOR_EVER);
        RL_ASSERT(answer == SHR_DONE);
    }
}

void take(shr_consumer *c, uint32_t n, uint32_t length) {
    RL_ASSERT(get(c, n, length));
    RL_ASSERT(shr_release(c) == SHR_DONE);
}

// Both ends attached; positions start where the sum of all passes 2^64.
template <class Test, int threads> struct one_ring : rl::test_suite<Test, threads> {
    kernel below;
    ring r;
    shr_producer producer;
    shr_consumer consumer;

    explicit one_ring(uint64_t capacity) : r(0, capacity) {
        machine = &below;
        arenas[1] = nullptr;
    }
    void before() {
        r.make((uint64_t)-16);
        RL_ASSERT(shr_producer_init(&producer, &r.shared->header, r.area.capacity, 1, 1) == SHR_DONE);
        RL_ASSERT(shr_consumer_init(&consumer, &r.shared->header, r.area.capacity, 2, 1) == SHR_DONE);
    }
};

// Records of several sizes through a ring of two, either side asleep whenever it can be: publish, free
// and park, round the edge of the data. A lost wake is a deadlock.
struct sleeps_on_full_and_empty : one_ring<sleeps_on_full_and_empty, 2> {
    sleeps_on_full_and_empty() : one_ring(32) {}
    static constexpr uint32_t lengths[] = {8, 16, 5, 0};
    void thread(unsigned index) {
        for (uint32_t n = 0; n < 4; n++) {
            if (index == 0) {
                RL_ASSERT(put(&producer, n, lengths[n]));
            } else {
                take(&consumer, n, lengths[n]);
            }
        }
    }
};

// The smallest that parks on both sides: the ring holds one record.
struct one_at_a_time : one_ring<one_at_a_time, 2> {
    one_at_a_time() : one_ring(16) {}
    void thread(unsigned index) {
        for (uint32_t n = 0; n < 2; n++) {
            if (index == 0) {
                RL_ASSERT(put(&producer, n, 8));
            } else {
                take(&consumer, n, 8);
            }
        }
    }
};

// A batch is seen whole, read in place and freed at once; poison is written before it is freed.
struct batch_in_place : one_ring<batch_in_place, 2> {
    batch_in_place() : one_ring(32) {}
    void thread(unsigned index) {
        if (index == 0) {
            RL_ASSERT(shr_push(&producer, "\x01\x02", 2, 0, 0, 0) == SHR_DONE);
            RL_ASSERT(shr_push(&producer, "\x12\x13", 2, 1, 0, 0) == SHR_DONE);
            RL_ASSERT(shr_publish(&producer) == SHR_DONE);
            RL_ASSERT(put(&producer, 2, 20));
        } else {
            consumer.poison = 1;
            RL_ASSERT(get(&consumer, 0, 2));
            shr_record second;
            RL_ASSERT(shr_next(&consumer, &second) == SHR_DONE);
            check_record(second, 1, 2);
            RL_ASSERT(shr_release(&consumer) == SHR_DONE);
            take(&consumer, 2, 20);
        }
    }
};

// Nothing is lost at the end: who sees it closed has seen all that came before, asleep or not.
struct last_record_before_close : one_ring<last_record_before_close, 2> {
    last_record_before_close() : one_ring(16) {}
    void thread(unsigned index) {
        if (index == 0) {
            RL_ASSERT(put(&producer, 0, 8));
            shr_producer_close(&producer);
        } else {
            take(&consumer, 0, 8);
            RL_ASSERT(get(&consumer, 1, 8) == 0);
        }
    }
};

// A consumer that goes away wakes a producer that waits for room.
struct consumer_closes : one_ring<consumer_closes, 2> {
    consumer_closes() : one_ring(16) {}
    void thread(unsigned index) {
        if (index == 0) {
            RL_ASSERT(put(&producer, 0, 8));
            RL_ASSERT(put(&producer, 1, 8));
            RL_ASSERT(put(&producer, 2, 8) == 0);
        } else {
            take(&consumer, 0, 8);
            shr_consumer_close(&consumer);
        }
    }
};

// The same with nothing else going on: asleep, or just about to be, when the other end closes.
struct close_wakes_the_consumer : one_ring<close_wakes_the_consumer, 2> {
    close_wakes_the_consumer() : one_ring(16) {}
    void thread(unsigned index) {
        if (index == 0) {
            shr_producer_close(&producer);
        } else {
            RL_ASSERT(get(&consumer, 0, 8) == 0);
        }
    }
};

struct close_wakes_the_producer : one_ring<close_wakes_the_producer, 2> {
    close_wakes_the_producer() : one_ring(16) {}
    void before() {
        one_ring::before();
        RL_ASSERT(put(&producer, 0, 8));
    }
    void thread(unsigned index) {
        if (index == 0) {
            RL_ASSERT(put(&producer, 1, 8) == 0);
        } else {
            shr_consumer_close(&consumer);
        }
    }
};

void wait_for_role(int fd, int role) {
    while (shr_role_take(fd, role) != 0) {
        machine->lock.lock($);
        while (machine->holder[role] != 0) {
            machine->changed.wait(machine->lock, false, $);
        }
        machine->lock.unlock($);
    }
}

// A producer dies in the middle of a record; its successor writes over what it left.
struct producer_dies : one_ring<producer_dies, 3> {
    producer_dies() : one_ring(32) {}
    void before() {
        one_ring::before();
        machine->holder[SHR_ROLE_PRODUCER] = 1;
        consumer.takeover = 1;
    }
    void thread(unsigned index) {
        if (index == 0) {
            RL_ASSERT(put(&producer, 0, 8));
            uint8_t *payload;
            if (shr_claim(&producer, 8, &payload) == SHR_DONE) {
                model_set(payload, 0xEE, 8);
            }
            shr_role_drop(1, SHR_ROLE_PRODUCER); // the kernel does it
        } else if (index == 1) {
            shr_producer successor;
            wait_for_role(3, SHR_ROLE_PRODUCER);
            RL_ASSERT(shr_producer_init(&successor, &r.shared->header, 32, 3, 2) == SHR_DONE);
            RL_ASSERT(put(&successor, 1, 16));
        } else {
            take(&consumer, 0, 8);
            take(&consumer, 1, 16);
        }
    }
};

// A consumer dies with a record in hand; its successor gets it again, and then the next.
struct consumer_dies : one_ring<consumer_dies, 3> {
    consumer_dies() : one_ring(16) {}
    void before() {
        one_ring::before();
        machine->holder[SHR_ROLE_CONSUMER] = 2;
        producer.takeover = 1;
    }
    void thread(unsigned index) {
        if (index == 0) {
            RL_ASSERT(put(&producer, 0, 8));
            RL_ASSERT(put(&producer, 1, 5));
            RL_ASSERT(put(&producer, 2, 8));
        } else if (index == 1) {
            take(&consumer, 0, 8);
            RL_ASSERT(get(&consumer, 1, 5));
            shr_role_drop(2, SHR_ROLE_CONSUMER); // the kernel does it
        } else {
            shr_consumer successor;
            wait_for_role(4, SHR_ROLE_CONSUMER);
            RL_ASSERT(shr_consumer_init(&successor, &r.shared->header, 16, 4, 2) == SHR_DONE);
            take(&successor, 1, 5);
            take(&successor, 2, 8);
        }
    }
};

// A producer that dies is told of once everything that it published was taken, and not before.
struct death_comes_after_the_last_record : one_ring<death_comes_after_the_last_record, 2> {
    death_comes_after_the_last_record() : one_ring(32) {}
    void before() {
        one_ring::before();
        machine->holder[SHR_ROLE_PRODUCER] = 1;
        machine->clock_step = 1; // each look at the peer is a look at its lock
    }
    void thread(unsigned index) {
        if (index == 0) {
            RL_ASSERT(put(&producer, 0, 8));
            RL_ASSERT(put(&producer, 1, 5));
            shr_role_drop(1, SHR_ROLE_PRODUCER); // the kernel does it
            return;
        }
        shr_record record;
        uint32_t seen = 0;
        for (int answer; (answer = shr_next(&consumer, &record)) != SHR_PEER_LOST;) {
            if (answer == SHR_DONE) {
                check_record(record, seen, seen == 0 ? 8 : 5);
                seen++;
                RL_ASSERT(shr_release(&consumer) == SHR_DONE);
            } else {
                RL_ASSERT(answer == SHR_NOT_NOW);
                rl::yield(1, $);
            }
        }
        RL_ASSERT(seen == 2);
    }
};

// Two rings and one sleeper.
struct either_of_two : one_ring<either_of_two, 3> {
    ring other;
    shr_producer other_producer;
    shr_consumer other_consumer;
    either_of_two() : one_ring(16), other(1, 16) { arenas[1] = &other.area; }
    void before() {
        one_ring::before();
        other.make(0);
        RL_ASSERT(shr_producer_init(&other_producer, &other.shared->header, 16, 3, 1) == SHR_DONE);
        RL_ASSERT(shr_consumer_init(&other_consumer, &other.shared->header, 16, 4, 1) == SHR_DONE);
    }
    void thread(unsigned index) {
        if (index < 2) {
            RL_ASSERT(put(index == 0 ? &producer : &other_producer, index, 8));
            return;
        }
        shr_consumer *both[] = {&consumer, &other_consumer};
        bool done[2] = {};
        while (!done[0] || !done[1]) {
            int answer = shr_wait(both, 2, nullptr, nullptr, 0, nullptr, 0, FOR_EVER);
            RL_ASSERT(answer == SHR_DONE);
            for (uint32_t i = 0; i < 2; i++) {
                shr_record record;
                if (!done[i] && shr_next(both[i], &record) == SHR_DONE) {
                    check_record(record, i, 8);
                    RL_ASSERT(shr_release(both[i]) == SHR_DONE);
                    done[i] = true;
                }
            }
        }
    }
};

// A bell ends a wait for a ring, and what was done before it was rung is seen.
struct bell_ends_a_wait : one_ring<bell_ends_a_wait, 2> {
    shr_bell bell;
    rl::var<int> message;
    bell_ends_a_wait() : one_ring(16) {}
    void before() {
        one_ring::before();
        bell.rung.store(0, rl::mo_relaxed, $);
    }
    void thread(unsigned index) {
        if (index == 0) {
            message($).store(1);
            shr_bell_ring(&bell);
        } else {
            shr_consumer *c = &consumer;
            RL_ASSERT(shr_wait(&c, 1, nullptr, nullptr, 0, &bell, 0, FOR_EVER) == SHR_DONE);
            if (shr_bell_answer(&bell)) {
                RL_ASSERT(message($).load() == 1);
            } else {
                RL_ASSERT(false);
            }
        }
    }
};

// Who sees a segment ready sees all of its header.
struct ready_means_whole : one_ring<ready_means_whole, 2> {
    ready_means_whole() : one_ring(16) {}
    void before() { r.zero(); }
    void thread(unsigned index) {
        shr_header *h = &r.shared->header;
        if (index == 0) {
            shr_header_init(h, SHR_KIND_RING, 16, 7, 0, 1, 64);
        } else if (shr_header_ready(h) == 1) {
            RL_ASSERT(h->magic == SHR_MAGIC && h->capacity == 16 && h->segment_id == 7);
            RL_ASSERT(shr_consumer_init(&consumer, h, 16, 2, 1) == SHR_DONE);
            RL_ASSERT(consumer.head == 64);
        }
    }
};

// Who sees an end attached sees who it is.
struct attached_means_named : one_ring<attached_means_named, 2> {
    attached_means_named() : one_ring(16) {}
    void before() { r.make(0); }
    void thread(unsigned index) {
        shr_end_state *end = &r.shared->header.producer;
        if (index == 0) {
            shr_end_attach(end, 99);
        } else if (end->state.load(rl::mo_acquire, $) == SHR_END_ATTACHED) {
            RL_ASSERT(end->pid.load(rl::mo_relaxed, $) == 99);
            RL_ASSERT(end->generation.load(rl::mo_relaxed, $) == 1);
        }
    }
};

// Who sees the name gone sees what was closed before it went.
struct retired_means_closed : one_ring<retired_means_closed, 2> {
    retired_means_closed() : one_ring(16) {}
    void thread(unsigned index) {
        if (index == 0) {
            shr_producer_close(&producer);
            shr_header_retire(&r.shared->header);
        } else if (shr_header_retired(&r.shared->header)) {
            shr_record record;
            RL_ASSERT(shr_next(&consumer, &record) == SHR_PEER_FINISHED);
        }
    }
};

constexpr unsigned ALL = UINT_MAX;

struct test {
    const char *name;
    bool (*run)(rl::test_params &);
    unsigned preemptions; // the exhaustive search goes through every schedule with so many
};
#define TEST(name, bound) {#name, &rl::simulate<name>, bound}
const test tests[] = {
    TEST(one_at_a_time, 4),
    TEST(sleeps_on_full_and_empty, 2),
    TEST(batch_in_place, 3),
    TEST(last_record_before_close, 5),
    TEST(consumer_closes, 4),
    TEST(close_wakes_the_consumer, ALL),
    TEST(close_wakes_the_producer, ALL),
    TEST(producer_dies, 2),
    TEST(consumer_dies, 2),
    TEST(death_comes_after_the_last_record, 4),
    TEST(either_of_two, 2),
    TEST(bell_ends_a_wait, ALL),
    TEST(ready_means_whole, ALL),
    TEST(attached_means_named, ALL),
    TEST(retired_means_closed, ALL),
};

// Orders that may be weaker without a test noticing, and why they stand as they do.
struct spare {
    const char *function, *expression, *reason; // parts of the names
} const spares[] = {
    {"shr_producer_init", "&header->tail", "taking the role's lock orders it behind the last producer"},
    {"shr_consumer_init", "&header->head", "taking the role's lock orders it behind the last consumer"},
    {"shr_consumer_init", "&header->tail", "only checked: the first look at a record reads it again"},
    {"poison", "poisoning", "for the next consumer only, and the role's lock orders that one behind"},
    {"", "sample_position", "statistics are not part of the model"},
    {"shr_wake", "parked", "the kernel compares the word under its lock; a second wake would be harmless"},
    {"look", "bell->rung", "shr_bell_answer acquires as well"},
    {"shr_bell_answer", "&bell->rung", "look acquires as well"},
};

struct finding {
    bool passed;
    rl::test_result_e result;
    uint64_t iterations;
};

// Relacy says on `out` what it found, step by step. A stream in memory would not do: its memory would be
// counted as the test's.
finding run(const test &t, std::ofstream &out, rl::scheduler_type_e scheduler, unsigned bound,
            uint64_t iterations) {
    rl::test_params params;
    params.iteration_count = iterations;
    params.search_type = scheduler;
    params.context_bound = bound;
    params.output_stream = &out;
    params.progress_stream = &out;
    params.progress_output_period = 1000000;
    bool passed = t.run(params);
    return {passed, params.test_result, params.stop_iteration};
}

int all(uint64_t iterations, bool exhaustive, bool quiet, const char *history) {
    for (const test &t : tests) {
        std::ofstream out(history, std::ios::trunc);
        finding f = run(t, out, rl::sched_random, 0, iterations);
        if (!quiet || !f.passed) {
            printf("%-34s %9llu schedules at random: %s\n", t.name, (unsigned long long)f.iterations,
                   f.passed ? "ok" : rl::test_result_str(f.result));
        }
        if (f.passed && exhaustive) {
            f = run(t, out, t.preemptions == ALL ? rl::sched_full : rl::sched_bound, t.preemptions,
                    UINT64_MAX >> 1);
            std::string which = t.preemptions == ALL
                                    ? "all there are"
                                    : "all with up to " + std::to_string(t.preemptions) + " preemptions";
            printf("%-34s %9llu schedules, %s: %s\n", t.name, (unsigned long long)f.iterations, which.c_str(),
                   f.passed ? "ok" : rl::test_result_str(f.result));
        }
        fflush(stdout);
        if (!f.passed) {
            return 1;
        }
    }
    return 0;
}

bool is_caught(uint64_t iterations, std::string &how) {
    std::ofstream out("/dev/null");
    for (const test &t : tests) {
        finding f = run(t, out, rl::sched_random, 0, iterations);
        if (!f.passed) {
            how = std::string(rl::test_result_str(f.result)) + " in " + t.name + ", schedule " +
                  std::to_string(f.iterations);
            return true;
        }
    }
    return false;
}

memory_order next_weaker(const site &s, memory_order order) {
    if (order != memory_order_seq_cst) {
        return memory_order_relaxed;
    }
    return s.operation == 'l'   ? memory_order_acquire
           : s.operation == 's' ? memory_order_release
                                : memory_order_acq_rel;
}

const spare *spare_of(const site &s) {
    for (const spare &known : spares) {
        if (strstr(s.function, known.function) != nullptr &&
            strstr(s.expression, known.expression) != nullptr) {
            return &known;
        }
    }
    return nullptr;
}

// Weaken one order at a time, by one step and by two. 1: an order that nobody misses and that is not
// known to be spare, or one known to be spare that is missed after all.
int weaken(uint64_t iterations) {
    int failed = 0, count = site_count; // known from the runs before
    for (int i = 0; i < count; i++) {
        const site &s = sites[i];
        const spare *known = spare_of(s);
        weakened_to = s.order;
        while (weakened_to != memory_order_relaxed) {
            weakened_to = next_weaker(s, weakened_to);
            weakened = i;
            std::string how;
            bool caught = is_caught(known != nullptr ? iterations / 5 : iterations, how);
            weakened = -1;
            failed |= caught != (known == nullptr);
            printf("%s(%s) %s as %s: %s\n", s.function, s.expression, rl::format(s.order),
                   rl::format(weakened_to),
                   caught  ? how.c_str()
                   : known ? known->reason
                           : "NOT NOTICED");
        }
        fflush(stdout);
    }
    return failed;
}

} // namespace

int main(int argc, char **argv) {
    uint64_t iterations = argc > 2 ? strtoull(argv[2], nullptr, 10) : 1000;
    const char *history = argc > 3 ? argv[3] : "/dev/null";
    if (argc > 1 && strcmp(argv[1], "weaken") == 0) {
        return all(1000, false, true, history) || weaken(iterations);
    }
    return all(iterations, argc > 1 && strcmp(argv[1], "exhaustive") == 0, false, history);
}

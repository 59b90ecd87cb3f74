/* Where the two positions of a ring lie, how often each side looks at the other's, and how often it tells
 * its own: what each choice is worth, in a ring that has nothing else.
 *
 *     cc -O2 -D_GNU_SOURCE benchmarks/alternatives/lines.c -o lines && ./lines
 *
 * Records of 64 bytes from processor 0 to processor 1, millions a second, the best of five rounds. */
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define SLOTS 4096U
#define COUNT 2000000U
#define APART_MAX 128U

struct shared {
    _Alignas(128) uint8_t positions[2 * APART_MAX];
    _Alignas(128) uint8_t data[SLOTS][64];
};

struct variant {
    const char *name;
    unsigned apart;   /* bytes from one position to the other */
    int is_cached;    /* the other's position is read only when the last one known is used up */
    unsigned publish; /* records a publication */
};

static const struct variant VARIANTS[] = {
    {"128 bytes apart, cached, each told", 128, 1, 1}, {"64 bytes apart", 64, 1, 1},
    {"on one line (false sharing)", 8, 1, 1},          {"128 bytes apart, looked at each time", 128, 0, 1},
    {"on one line, looked at each time", 8, 0, 1},     {"128 bytes apart, cached, told every 64", 128, 1, 64},
};

static double now_s(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

static void pin(int cpu) {
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(cpu % (int)sysconf(_SC_NPROCESSORS_ONLN), &set);
    sched_setaffinity(0, sizeof set, &set);
}

static void consume(struct shared *ring, const struct variant *v) {
    _Atomic uint64_t *tail_at = (_Atomic uint64_t *)ring->positions;
    _Atomic uint64_t *head_at = (_Atomic uint64_t *)(ring->positions + v->apart);
    volatile uint64_t sum = 0;
    uint64_t tail = 0;
    for (uint64_t head = 0; head < COUNT; head++) {
        if (!v->is_cached || head == tail) {
            while ((tail = atomic_load_explicit(tail_at, memory_order_acquire)) == head) {
            }
        }
        sum += ring->data[head % SLOTS][0] + ring->data[head % SLOTS][63];
        if ((head + 1) % v->publish == 0) {
            atomic_store_explicit(head_at, head + 1, memory_order_release);
        }
    }
}

static void produce(struct shared *ring, const struct variant *v) {
    _Atomic uint64_t *tail_at = (_Atomic uint64_t *)ring->positions;
    _Atomic uint64_t *head_at = (_Atomic uint64_t *)(ring->positions + v->apart);
    uint8_t payload[64] = {1};
    uint64_t head = 0;
    for (uint64_t tail = 0; tail < COUNT; tail++) {
        if (!v->is_cached || tail - head == SLOTS) {
            while (tail - (head = atomic_load_explicit(head_at, memory_order_acquire)) == SLOTS) {
            }
        }
        memcpy(ring->data[tail % SLOTS], payload, sizeof payload);
        if ((tail + 1) % v->publish == 0) {
            atomic_store_explicit(tail_at, tail + 1, memory_order_release);
        }
    }
}

static double round_s(const struct variant *v) {
    struct shared *ring =
        mmap(NULL, sizeof *ring, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
    double start = now_s();
    pid_t child = fork();
    if (child == 0) {
        pin(1);
        consume(ring, v);
        _exit(0);
    }
    pin(0);
    produce(ring, v);
    waitpid(child, NULL, 0);
    double took = now_s() - start;
    munmap(ring, sizeof *ring);
    return took;
}

int main(void) {
    double best[sizeof VARIANTS / sizeof *VARIANTS] = {0};
    for (int round = 0; round < 5; round++) {
        for (size_t i = 0; i < sizeof VARIANTS / sizeof *VARIANTS; i++) {
            double rate = COUNT / round_s(&VARIANTS[i]) / 1e6;
            best[i] = rate > best[i] ? rate : best[i];
        }
    }
    for (size_t i = 0; i < sizeof VARIANTS / sizeof *VARIANTS; i++) {
        printf("%-42s %6.1f M/s\n", VARIANTS[i].name, best[i]);
    }
    return 0;
}

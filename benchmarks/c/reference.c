/* What plain C does on this machine: the same ring without Python, a bare ring, memcpy, a futex.
 *
 *     reference ring SIZE COUNT BATCH     records through the project's ring, BATCH a publication
 *     reference bare SIZE COUNT           records through a textbook ring: two positions, nothing else
 *     reference pingpong POLICY COUNT     round trips of 64 bytes over two rings; POLICY: spin, park or
 *                                         nanoseconds of spinning before the sleep
 *     reference memcpy SIZE COUNT         copies from a warm buffer into a region of 8 MiB
 *     reference columns ROWS COUNT        copies of five warm columns of a decode step into the same region
 *     reference wake PAUSE_US COUNT       a record after each pause to a sleeper: what publishing takes, and
 *                                         until the sleeper has it
 *
 * One line of JSON. The producer runs on processor 0, the consumer on 1. */
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "shmring/park.h"
#include "shmring/ring.h"
#include "shmring/segment.h"

#define CAPACITY (8U << 20)
#define FOR_EVER 1000000000ULL

static uint64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000U + (uint64_t)t.tv_nsec;
}

static void pin(int cpu) {
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(cpu % (int)sysconf(_SC_NPROCESSORS_ONLN), &set);
    sched_setaffinity(0, sizeof set, &set);
}

static struct shr_header *make_ring(uint64_t capacity) {
    int fd = memfd_create("reference", 0), error;
    if (fd < 0 || ftruncate(fd, SHR_HEADER_LENGTH + (off_t)capacity) != 0) {
        abort();
    }
    struct shr_header *header = shr_map(fd, capacity, 1, 1, &error);
    if (header == NULL) {
        abort();
    }
    shr_header_init(header, SHR_KIND_RING, capacity, 1, 0, 0, 0);
    return header;
}

static void take_producer(shr_producer *p, struct shr_header *header) {
    shr_producer_init(p, header, header->capacity, -1, 0);
    p->takeover = 1; /* no locks here: nobody dies */
}

static void take_consumer(shr_consumer *c, struct shr_header *header) {
    shr_consumer_init(c, header, header->capacity, -1, 0);
    c->takeover = 1;
}

static int compare(const void *a, const void *b) {
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return (x > y) - (x < y);
}

static void run_ring(uint64_t size, uint64_t count, uint64_t batch) {
    struct shr_header *header = make_ring(CAPACITY);
    char *payload = calloc(1, size);
    volatile uint64_t sum = 0;
    pid_t child = fork();
    if (child == 0) {
        shr_consumer c;
        shr_record record;
        pin(1);
        take_consumer(&c, header);
        for (uint64_t got = 0; got < count;) {
            uint64_t taken = 0;
            while (taken < batch && shr_next(&c, &record) == SHR_DONE) {
                sum += record.payload[0] + record.payload[record.length - 1];
                taken++;
            }
            if (taken > 0) {
                shr_release(&c);
                got += taken;
            } else {
                shr_consumer *one = &c;
                shr_wait(&one, 1, NULL, NULL, 0, NULL, 10000, FOR_EVER);
            }
        }
        _exit(0);
    }
    shr_producer p;
    pin(0);
    take_producer(&p, header);
    usleep(20000);
    uint64_t start = now_ns();
    for (uint64_t sent = 0; sent < count;) {
        int answer = shr_push(&p, payload, size, 0, 0, batch == 1);
        if (answer == SHR_DONE) {
            if (++sent % batch == 0 && batch > 1) {
                shr_publish(&p);
            }
        } else {
            shr_publish(&p);
            shr_producer *one = &p;
            shr_wait(NULL, 0, &one, &size, 1, NULL, 10000, FOR_EVER);
        }
    }
    shr_publish(&p);
    waitpid(child, NULL, 0);
    printf("{\"per_s\": %.0f}\n", (double)count * 1e9 / (double)(now_ns() - start));
}

struct bare {
    _Alignas(128) _Atomic uint64_t tail;
    _Alignas(128) _Atomic uint64_t head;
    _Alignas(128) uint8_t data[CAPACITY];
};

static void run_bare(uint64_t size, uint64_t count) {
    struct bare *ring = mmap(NULL, sizeof *ring, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    uint64_t slot = (size + 15) & ~(uint64_t)7, slots = CAPACITY / slot;
    char *payload = calloc(1, size);
    volatile uint64_t sum = 0;
    pid_t child = fork();
    if (child == 0) {
        pin(1);
        for (uint64_t head = 0, tail = 0; head < count; head++) {
            while (head == tail) {
                tail = atomic_load_explicit(&ring->tail, memory_order_acquire);
            }
            const uint8_t *at = ring->data + head % slots * slot;
            sum += at[8] + at[7 + size];
            atomic_store_explicit(&ring->head, head + 1, memory_order_release);
        }
        _exit(0);
    }
    pin(0);
    usleep(20000);
    uint64_t start = now_ns();
    for (uint64_t tail = 0, head = 0; tail < count; tail++) {
        while (tail - head == slots) {
            head = atomic_load_explicit(&ring->head, memory_order_acquire);
        }
        uint8_t *at = ring->data + tail % slots * slot;
        memcpy(at, &size, sizeof size);
        memcpy(at + 8, payload, size);
        atomic_store_explicit(&ring->tail, tail + 1, memory_order_release);
    }
    waitpid(child, NULL, 0);
    printf("{\"per_s\": %.0f}\n", (double)count * 1e9 / (double)(now_ns() - start));
}

static void await(shr_consumer *c, shr_record *record, int polls, uint64_t spin_ns) {
    while (shr_next(c, record) != SHR_DONE) {
        if (!polls) {
            shr_wait(&c, 1, NULL, NULL, 0, NULL, spin_ns, FOR_EVER);
        }
    }
}

static void run_pingpong(const char *policy, uint64_t count) {
    int polls = strcmp(policy, "spin") == 0;
    uint64_t spin_ns = strcmp(policy, "park") == 0 ? 0 : strtoull(policy, NULL, 10);
    struct shr_header *there = make_ring(1 << 16), *back = make_ring(1 << 16);
    char payload[64] = {0};
    shr_record record;
    shr_producer p;
    shr_consumer c;
    pid_t child = fork();
    if (child == 0) {
        pin(1);
        take_producer(&p, back);
        take_consumer(&c, there);
        for (uint64_t i = 0; i < count; i++) {
            await(&c, &record, polls, spin_ns);
            memcpy(payload, record.payload, sizeof payload);
            shr_release(&c);
            shr_push(&p, payload, sizeof payload, 0, 0, 1);
        }
        _exit(0);
    }
    pin(0);
    take_producer(&p, there);
    take_consumer(&c, back);
    uint64_t *took = calloc(count, sizeof *took);
    usleep(20000);
    for (uint64_t i = 0; i < count; i++) {
        uint64_t start = now_ns();
        shr_push(&p, payload, sizeof payload, 0, 0, 1);
        await(&c, &record, polls, spin_ns);
        memcpy(payload, record.payload, sizeof payload);
        shr_release(&c);
        took[i] = now_ns() - start;
    }
    waitpid(child, NULL, 0);
    qsort(took, count, sizeof *took, compare);
    printf("{\"p50_us\": %.3f, \"p99_us\": %.3f}\n", (double)took[count / 2] / 1e3,
           (double)took[count * 99 / 100] / 1e3);
}

static void run_wake(uint64_t pause_us, uint64_t count) {
    struct shr_header *there = make_ring(1 << 16);
    uint64_t *took = calloc(count, sizeof *took);
    uint64_t *late =
        mmap(NULL, count * sizeof *late, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    pid_t child = fork();
    if (child == 0) {
        shr_consumer c;
        shr_record record;
        pin(1);
        take_consumer(&c, there);
        for (uint64_t i = 0; i < count; i++) {
            uint64_t sent;
            await(&c, &record, 0, 10000);
            memcpy(&sent, record.payload, sizeof sent);
            late[i] = now_ns() - sent;
            shr_release(&c);
        }
        _exit(0);
    }
    shr_producer p;
    pin(0);
    take_producer(&p, there);
    uint64_t next = now_ns();
    for (uint64_t i = 0; i < count; i++) {
        next += pause_us * 1000;
        while (now_ns() < next) {
        }
        uint64_t start = now_ns();
        shr_push(&p, &start, sizeof start, 0, 0, 1);
        took[i] = now_ns() - start;
    }
    waitpid(child, NULL, 0);
    qsort(took, count, sizeof *took, compare);
    qsort(late, count, sizeof *late, compare);
    printf("{\"wall_p50_us\": %.3f, \"p50_us\": %.3f, \"p99.9_us\": %.3f, \"delivery_p50_us\": %.3f}\n",
           (double)took[count / 2] / 1e3, (double)took[count / 2] / 1e3,
           (double)took[count * 999 / 1000] / 1e3, (double)late[count / 2] / 1e3);
}

static void run_memcpy(uint64_t size, uint64_t count) {
    char *from = malloc(size);
    char *to = mmap(NULL, CAPACITY, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
    memset(from, 1, size);
    pin(0);
    uint64_t start = now_ns();
    for (uint64_t i = 0, at = 0; i < count; i++, at += size) {
        at = at + size > CAPACITY ? 0 : at;
        memcpy(to + at, from, size);
        __asm__ volatile("" : : "r"(to) : "memory");
    }
    printf("{\"per_s\": %.0f}\n", (double)count * 1e9 / (double)(now_ns() - start));
}

static void run_columns(uint64_t rows, uint64_t count) {
    const uint64_t widths[] = {8, 4, 4, 1, 8}, length = rows * 25;
    char *from = malloc(length);
    char *to = mmap(NULL, CAPACITY, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
    memset(from, 1, length);
    pin(0);
    uint64_t start = now_ns();
    for (uint64_t i = 0, at = 0; i < count; i++) {
        at = at + length > CAPACITY ? 0 : at;
        const char *column = from;
        for (unsigned k = 0; k < 5; k++) {
            memcpy(to + at, column, rows * widths[k]);
            column += rows * widths[k];
            at += rows * widths[k];
        }
        __asm__ volatile("" : : "r"(to) : "memory");
    }
    printf("{\"writer_cpu_us\": %.4f}\n", (double)(now_ns() - start) / 1e3 / (double)count);
}

int main(int argc, char **argv) {
    if (argc == 5 && strcmp(argv[1], "ring") == 0) {
        run_ring(strtoull(argv[2], NULL, 10), strtoull(argv[3], NULL, 10), strtoull(argv[4], NULL, 10));
    } else if (argc == 4 && strcmp(argv[1], "bare") == 0) {
        run_bare(strtoull(argv[2], NULL, 10), strtoull(argv[3], NULL, 10));
    } else if (argc == 4 && strcmp(argv[1], "pingpong") == 0) {
        run_pingpong(argv[2], strtoull(argv[3], NULL, 10));
    } else if (argc == 4 && strcmp(argv[1], "memcpy") == 0) {
        run_memcpy(strtoull(argv[2], NULL, 10), strtoull(argv[3], NULL, 10));
    } else if (argc == 4 && strcmp(argv[1], "columns") == 0) {
        run_columns(strtoull(argv[2], NULL, 10), strtoull(argv[3], NULL, 10));
    } else if (argc == 4 && strcmp(argv[1], "wake") == 0) {
        run_wake(strtoull(argv[2], NULL, 10), strtoull(argv[3], NULL, 10));
    } else {
        fprintf(stderr, "ring SIZE COUNT BATCH | bare SIZE COUNT | pingpong POLICY COUNT | memcpy SIZE COUNT "
                        "| columns ROWS COUNT | wake PAUSE_US COUNT\n");
        return 2;
    }
    return 0;
}

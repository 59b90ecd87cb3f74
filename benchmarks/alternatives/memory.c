/* Ways to map a ring's memory and to walk it: what was tried beside the plain mapping.
 *
 *     cc -O2 -D_GNU_SOURCE benchmarks/alternatives/memory.c -o memory && ./memory
 *
 * The first round through 8 MiB of shared memory pays for its pages, one fault each; later rounds pay
 * for copying. `prefetch` asks for the next record's first line while this one is copied. */
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#define CAPACITY (8U << 20)
#define ROUNDS 40

static double now_us(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e6 + (double)t.tv_nsec / 1e3;
}

static double round_us(char *to, const char *from, size_t record, int prefetch) {
    double start = now_us();
    for (size_t at = 0; at + record <= CAPACITY; at += record) {
        if (prefetch) {
            __builtin_prefetch(to + at + record, 1);
        }
        memcpy(to + at, from, record);
        __asm__ volatile("" : : "r"(to) : "memory");
    }
    return now_us() - start;
}

static void measure(const char *name, int flags, int huge, int prefetch, size_t record) {
    int fd = memfd_create("memory", 0);
    if (fd < 0 || posix_fallocate(fd, 0, CAPACITY) != 0) {
        abort();
    }
    char *from = calloc(1, record);
    double start = now_us();
    char *to = mmap(NULL, CAPACITY, PROT_READ | PROT_WRITE, MAP_SHARED | flags, fd, 0);
    int refused = huge ? madvise(to, CAPACITY, MADV_HUGEPAGE) : 0;
    double mapped = now_us() - start;
    double first = round_us(to, from, record, prefetch), best = 1e9;
    for (int i = 0; i < ROUNDS; i++) {
        double took = round_us(to, from, record, prefetch);
        best = took < best ? took : best;
    }
    printf("%-28s record %7zu: map %7.0f us, first round %7.0f us, best round %7.0f us%s\n", name, record,
           mapped, first, best, refused ? " (huge pages refused)" : "");
    munmap(to, CAPACITY);
    close(fd);
    free(from);
}

int main(void) {
    static const size_t records[] = {64, 1024, 16384, 262144};
    for (size_t i = 0; i < sizeof records / sizeof *records; i++) {
        measure("plain", 0, 0, 0, records[i]);
        measure("MAP_POPULATE", MAP_POPULATE, 0, 0, records[i]);
        measure("MADV_HUGEPAGE", 0, 1, 0, records[i]);
        measure("prefetch for writing", 0, 0, 1, records[i]);
    }
    return 0;
}

/* A segment's memory and its kernel-held roles. Sync point S4 (ready) is here. */
#include "shmring/segment.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>

#include "end.h"
#include "guard.h"

/* An end of a ring up to this size has its pages mapped when it attaches. Otherwise every page costs a
 * fault of some microseconds when it is first written or read: a ring's first round takes ten times as
 * long as the later ones, and on an idle ring that first round lasts for hours. Larger rings would make
 * attaching slow, a millisecond a megabyte at worst. */
#define POPULATE_MAX (64U << 20)

void *shr_map(int fd, uint64_t capacity, int writable, int doubled, int *error) {
    size_t once = SHR_HEADER_LENGTH + (size_t)capacity;
    size_t whole = once + (doubled ? (size_t)capacity : 0);
    int protection = writable ? PROT_READ | PROT_WRITE : PROT_READ;
    int flags = MAP_SHARED | MAP_FIXED | (writable && doubled && capacity <= POPULATE_MAX ? MAP_POPULATE : 0);
    /* first the address space, so that the two halves land side by side */
    uint8_t *base = mmap(NULL, whole, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (base == MAP_FAILED) {
        *error = -errno;
        return NULL;
    }
    if (mmap(base, once, protection, flags, fd, 0) == MAP_FAILED ||
        (doubled &&
         mmap(base + once, (size_t)capacity, protection, flags, fd, SHR_HEADER_LENGTH) == MAP_FAILED)) {
        *error = -errno;
        munmap(base, whole);
        return NULL;
    }
    *error = 0;
    shr_guard_add(base, whole, writable);
    return base;
}

void shr_unmap(void *base, uint64_t capacity, int doubled) {
    shr_guard_remove(base);
    munmap(base, SHR_HEADER_LENGTH + (size_t)capacity * (doubled ? 2 : 1));
}

void *shr_map_header(int fd, int *error) {
    void *base = mmap(NULL, SHR_HEADER_LENGTH, PROT_READ, MAP_SHARED, fd, 0);
    if (base == MAP_FAILED) {
        *error = -errno;
        return NULL;
    }
    *error = 0;
    shr_guard_add(base, SHR_HEADER_LENGTH, 0);
    return base;
}

void shr_header_init(struct shr_header *header, uint32_t kind, uint64_t capacity, uint64_t segment_id,
                     uint64_t payload_length, uint32_t owner_pid, uint64_t start_position) {
    header->magic = SHR_MAGIC;
    header->layout_version = SHR_LAYOUT_VERSION;
    header->header_length = SHR_HEADER_LENGTH;
    header->kind = kind;
    header->owner_pid = owner_pid;
    header->capacity = capacity;
    header->segment_id = segment_id;
    header->created_ns = shr_clock_ns(CLOCK_REALTIME);
    header->payload_length = payload_length;
    /* relaxed: nobody else has the segment yet, and `ready` orders them */
    atomic_store_explicit(&header->tail, start_position, memory_order_relaxed);
    atomic_store_explicit(&header->head, start_position, memory_order_relaxed);
    /* [S4] release, last; pairs with shr_header_ready: whoever sees it sees all of the above */
    atomic_store_explicit(&header->ready, 1, memory_order_release);
}

uint32_t shr_header_ready(const struct shr_header *header) {
    /* [S4] acquire, first; pairs with shr_header_init */
    return atomic_load_explicit(&header->ready, memory_order_acquire);
}

void shr_header_retire(struct shr_header *header) {
    /* release: stands alone, but what was closed before is seen to be closed */
    atomic_store_explicit(&header->retired, 1, memory_order_release);
}

uint32_t shr_header_retired(const struct shr_header *header) {
    return atomic_load_explicit(&header->retired, memory_order_acquire);
}

static struct flock byte_of(int role, short type) {
    struct flock lock;
    memset(&lock, 0, sizeof lock);
    lock.l_type = type;
    lock.l_whence = SEEK_SET;
    lock.l_start = role;
    lock.l_len = 1;
    return lock;
}

int shr_role_take(int fd, int role) {
    struct flock lock = byte_of(role, F_WRLCK);
    if (fcntl(fd, F_OFD_SETLK, &lock) == 0) {
        return 0;
    }
    return errno == EACCES ? -EAGAIN : -errno;
}

int shr_role_drop(int fd, int role) {
    struct flock lock = byte_of(role, F_UNLCK);
    return fcntl(fd, F_OFD_SETLK, &lock) == 0 ? 0 : -errno;
}

int shr_role_held(int fd, int role) {
    struct flock lock = byte_of(role, F_WRLCK);
    if (fcntl(fd, F_OFD_GETLK, &lock) != 0) {
        return -errno;
    }
    return lock.l_type != F_UNLCK;
}

uint64_t shr_now_ns(void) { return shr_clock_ns(CLOCK_MONOTONIC); }

static struct shr_end_snapshot look_at(const struct shr_end_state *end, const struct shr_end_statistics *s,
                                       const _Atomic uint32_t *parked, const _Atomic uint64_t *position) {
    /* relaxed throughout: figures for people, each whole by itself */
    return (struct shr_end_snapshot){
        .state = atomic_load_explicit(&end->state, memory_order_relaxed),
        .generation = atomic_load_explicit(&end->generation, memory_order_relaxed),
        .pid = atomic_load_explicit(&end->pid, memory_order_relaxed),
        .parked = atomic_load_explicit(parked, memory_order_relaxed),
        .attached_ns = atomic_load_explicit(&end->attached_ns, memory_order_relaxed),
        .position = atomic_load_explicit(position, memory_order_relaxed),
        .records = atomic_load_explicit(&s->records, memory_order_relaxed),
        .bytes = atomic_load_explicit(&s->bytes, memory_order_relaxed),
        .batches = atomic_load_explicit(&s->batches, memory_order_relaxed),
        .stalls = atomic_load_explicit(&s->stalls, memory_order_relaxed),
        .parks = atomic_load_explicit(&s->parks, memory_order_relaxed),
        .parked_ns = atomic_load_explicit(&s->parked_ns, memory_order_relaxed),
        .wakes_sent = atomic_load_explicit(&s->wakes_sent, memory_order_relaxed),
        .high_water = atomic_load_explicit(&s->high_water, memory_order_relaxed),
        .active_ns = atomic_load_explicit(&s->active_ns, memory_order_relaxed),
        .waiting_since_ns = atomic_load_explicit(&s->waiting_since_ns, memory_order_relaxed),
        .beats = atomic_load_explicit(&s->beats, memory_order_relaxed),
    };
}

void shr_snapshot_take(const struct shr_header *header, struct shr_snapshot *out) {
    /* The ends run on meanwhile: if we were interrupted between the two, they may be apart by more than
     * the ring holds, which looks like damage. A real damage stays for all tries. */
    for (int tries = 0; tries < 16; tries++) {
        out->consumer =
            look_at(&header->consumer, &header->consumer_statistics, &header->consumer_parked, &header->head);
        out->producer =
            look_at(&header->producer, &header->producer_statistics, &header->producer_parked, &header->tail);
        if (out->producer.position - out->consumer.position <= header->capacity) {
            break;
        }
    }
    for (int i = 0; i < SHR_HISTOGRAM_BINS; i++) {
        out->wait_histogram[i] = atomic_load_explicit(&header->wait_histogram[i], memory_order_relaxed);
    }
}

/* What both ends of a ring do alike: taking a role, and judging the other end. */
#include "end.h"

#include "guard.h"

#include "shmring/segment.h"

#define PEER_CHECK_NS 100000000U /* a lock query is a system call: at most ten a second when polling */

void shr_end_attach(struct shr_end_state *end, uint32_t pid) {
    /* relaxed: only the holder of the role's lock writes here */
    uint32_t generation = atomic_load_explicit(&end->generation, memory_order_relaxed);
    atomic_store_explicit(&end->pid, pid, memory_order_relaxed);
    atomic_store_explicit(&end->attached_ns, shr_clock_ns(CLOCK_REALTIME), memory_order_relaxed);
    atomic_store_explicit(&end->generation, generation + 1, memory_order_relaxed);
    /* [S5] release: whoever sees ATTACHED sees the facts above */
    atomic_store_explicit(&end->state, SHR_END_ATTACHED, memory_order_release);
}

int shr_end_worth_waiting(const struct shr_header *header, const struct shr_end_state *peer, int fd, int role,
                          uint32_t takeover, uint64_t capacity, uint64_t *checked_ns) {
    if (header->magic != SHR_MAGIC) {
        return SHR_CORRUPT; /* zeros: it was truncated under us, and nobody will ever come (guard.h) */
    }
    uint64_t now = shr_clock_ns(CLOCK_MONOTONIC_COARSE);
    int is_due = now - *checked_ns >= PEER_CHECK_NS;
    if (is_due) {
        *checked_ns = now;
        if (!shr_guard_is_whole(fd, capacity)) {
            return SHR_CORRUPT; /* truncated, and we have not touched what is gone */
        }
    }
    /* [S5] acquire, pairs with the store in close: the caller looks at the position once more */
    uint32_t state = atomic_load_explicit(&peer->state, memory_order_acquire);
    if (state == SHR_END_CLOSED && !takeover) {
        return SHR_PEER_FINISHED;
    }
    if (state != SHR_END_ATTACHED) {
        /* nobody is there yet; nobody will come if the name is gone */
        return shr_header_retired(header) ? SHR_PEER_FINISHED : SHR_NOT_NOW;
    }
    if (!is_due || shr_role_held(fd, role) != 0) {
        return SHR_NOT_NOW;
    }
    if (takeover && !shr_header_retired(header)) {
        return SHR_NOT_NOW;
    }
    /* it may have closed between the two looks: the state is written before the lock is dropped */
    state = atomic_load_explicit(&peer->state, memory_order_acquire);
    return state == SHR_END_CLOSED ? SHR_PEER_FINISHED : SHR_PEER_LOST;
}

int shr_end_look(const struct shr_end_state *peer, int fd, int role) {
    /* [S5] acquire, pairs with close and attach */
    uint32_t state = atomic_load_explicit(&peer->state, memory_order_acquire);
    if (state == SHR_END_NEVER) {
        return SHR_NOT_NOW;
    }
    if (state == SHR_END_CLOSED) {
        return SHR_PEER_FINISHED;
    }
    if (state != SHR_END_ATTACHED) {
        return SHR_CORRUPT;
    }
    if (shr_role_held(fd, role) != 0) {
        return SHR_DONE;
    }
    /* it may have closed between the two looks: the state is written before the lock is dropped */
    state = atomic_load_explicit(&peer->state, memory_order_acquire);
    return state == SHR_END_CLOSED ? SHR_PEER_FINISHED : SHR_PEER_LOST;
}

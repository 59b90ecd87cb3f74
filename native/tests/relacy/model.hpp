// The machine below the C core, for the checker: memory orders, plain memory, the kernel.
//
// - An atomic access goes to Relacy, which lets a load see old values wherever C11 allows it. Every
//   access has a name (function and expression), so that main() can weaken the order of one.
// - memcpy into and out of the data area touches one rl::var per eight bytes: two sides that are not
//   ordered there are a data race, and bytes that nobody wrote are an uninitialised read.
// - A futex is a value compared under the kernel's lock, and a sleep that only a wake ends: no
//   timeouts, no spurious wakes. So a lost wake is a deadlock, which Relacy reports.
// - A lock of an open file description orders those who hold it one after the other.
#pragma once

#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <stdarg.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <relacy/relacy.hpp>

#undef memory_order_relaxed
#undef memory_order_acquire
#undef memory_order_release
#undef memory_order_acq_rel
#undef memory_order_seq_cst
#undef malloc
#undef calloc
#undef realloc
#undef free
#undef new
#undef delete
#undef errno
#define errno model_errno()

using rl::memory_order;
constexpr memory_order memory_order_relaxed = rl::mo_relaxed;
constexpr memory_order memory_order_acquire = rl::mo_acquire;
constexpr memory_order memory_order_release = rl::mo_release;
constexpr memory_order memory_order_acq_rel = rl::mo_acq_rel;
constexpr memory_order memory_order_seq_cst = rl::mo_seq_cst;

constexpr int THREADS_MAX = 3;

inline int &model_errno() {
    static int each[THREADS_MAX + 1];
    return each[rl::thread_index() < THREADS_MAX ? rl::thread_index() : THREADS_MAX];
}

// ---- memory orders

// One access of the core, with an order that it asks for.
struct site {
    const char *function, *expression;
    char operation; // l oad, s tore, x change
    memory_order order;
};
constexpr int SITES_MAX = 128;
inline site sites[SITES_MAX];
inline int site_count;
inline int weakened = -1; // index of the site whose order is `weakened_to`
inline memory_order weakened_to;

inline memory_order order_at(const char *function, const char *expression, char operation,
                             memory_order asked) {
    int i = 0;
    while (i < site_count && !(sites[i].function == function && sites[i].expression == expression &&
                               sites[i].operation == operation && sites[i].order == asked)) {
        i++;
    }
    if (i == site_count) {
        // the same function may be compiled once, but its literals need not be one object
        for (i = 0; i < site_count; i++) {
            if (strcmp(sites[i].function, function) == 0 && strcmp(sites[i].expression, expression) == 0 &&
                sites[i].operation == operation && sites[i].order == asked) {
                break;
            }
        }
    }
    if (i == site_count && site_count < SITES_MAX) {
        sites[site_count++] = {function, expression, operation, asked};
    }
    return i == weakened ? weakened_to : asked;
}

// A counter for people: one writer, nothing hangs on it, so it costs the search nothing.
struct statistic {
    uint64_t value = 0;
    uint64_t load(memory_order, rl::debug_info_param) const { return value; }
    void store(uint64_t v, memory_order, rl::debug_info_param) { value = v; }
};

template <class T> struct plain {
    mutable rl::var<T> cell;
    plain &operator=(T value) {
        cell($).store(value);
        return *this;
    }
    operator T() const { return cell($).load(); }
};

#define atomic_load_explicit(word, order) ((word)->load(order_at(__func__, #word, 'l', order), $))
#define atomic_store_explicit(word, value, order)                                                            \
    ((word)->store(value, order_at(__func__, #word, 's', order), $))
#define atomic_exchange_explicit(word, value, order)                                                         \
    ((word)->exchange(value, order_at(__func__, #word, 'x', order), $))

// ---- the data area: one real copy, seen twice

constexpr uint64_t CAPACITY_MAX = 64;
struct arena {
    uint8_t *start = nullptr;
    uint64_t capacity = 0;
    uint8_t bytes[CAPACITY_MAX] = {};
    rl::var<uint32_t> cells[CAPACITY_MAX / 8];
};
inline arena *arenas[2];

inline arena *arena_of(const void *address) {
    for (arena *a : arenas) {
        if (a != nullptr && address >= a->start && address < a->start + 2 * a->capacity) {
            return a;
        }
    }
    return nullptr;
}

inline void touch(arena *a, uint64_t offset, uint64_t length, bool write) {
    RL_ASSERT(offset + length <= 2 * a->capacity);
    for (uint64_t cell = offset / 8; length > 0 && cell <= (offset + length - 1) / 8; cell++) {
        rl::var<uint32_t> &v = a->cells[cell % (a->capacity / 8)];
        if (write) {
            v($).store(1);
        } else {
            (void)v($).load();
        }
    }
}

inline void *model_copy(void *to, const void *from, size_t length) {
    arena *in = arena_of(from), *out = arena_of(to);
    uint8_t between[CAPACITY_MAX * 2];
    if (in == nullptr && out == nullptr) {
        return __builtin_memcpy(to, from, length);
    }
    if (in != nullptr) {
        uint64_t offset = (uint64_t)((const uint8_t *)from - in->start);
        touch(in, offset, length, false);
        for (size_t i = 0; i < length; i++) {
            between[i] = in->bytes[(offset + i) % in->capacity];
        }
        from = between;
    }
    if (out == nullptr) {
        return __builtin_memcpy(to, from, length);
    }
    uint64_t offset = (uint64_t)((uint8_t *)to - out->start);
    touch(out, offset, length, true);
    for (size_t i = 0; i < length; i++) {
        out->bytes[(offset + i) % out->capacity] = ((const uint8_t *)from)[i];
    }
    return to;
}

inline void *model_set(void *to, int value, size_t length) {
    arena *out = arena_of(to);
    if (out == nullptr) {
        return __builtin_memset(to, value, length);
    }
    uint64_t offset = (uint64_t)((uint8_t *)to - out->start);
    touch(out, offset, length, true);
    for (size_t i = 0; i < length; i++) {
        out->bytes[(offset + i) % out->capacity] = (uint8_t)value;
    }
    return to;
}

// ---- the kernel

struct model_tag;
struct kernel {
    rl::generic_mutex<model_tag> lock;
    rl::condvar<model_tag> changed;
    struct sleeper {
        const rl::atomic<uint32_t> *words[4];
        int count = 0;
        bool awake = false;
    } sleepers[THREADS_MAX];
    int holder[4] = {};
    uint64_t clock_step = 0; // 0: time stands still, and nobody asks whether his peer lives
    uint64_t clock = 0;

    kernel() {
        lock.init(false, false, false, false, $);
        changed.init(false, $);
    }
    ~kernel() {
        changed.deinit($);
        lock.deinit($);
    }
};
inline kernel *machine;

inline long futex_wait(std::initializer_list<std::pair<rl::atomic<uint32_t> *, uint32_t>> words) {
    machine->lock.lock($);
    kernel::sleeper &me = machine->sleepers[rl::thread_index()];
    me.count = 0;
    me.awake = false;
    for (auto [word, value] : words) {
        // relaxed: the kernel's lock is all the order there is
        if (word->load(rl::mo_relaxed, $) != value) {
            me.count = 0;
            machine->lock.unlock($);
            errno = EAGAIN;
            return -1;
        }
        me.words[me.count++] = word;
    }
    while (!me.awake) {
        machine->changed.wait(machine->lock, false, $);
    }
    me.count = 0;
    machine->lock.unlock($);
    return 0;
}

inline long futex_wake(rl::atomic<uint32_t> *word) {
    machine->lock.lock($);
    for (kernel::sleeper &s : machine->sleepers) {
        for (int i = 0; i < s.count; i++) {
            if (s.words[i] == word && !s.awake) {
                s.awake = true;
                machine->changed.notify_all($);
                machine->lock.unlock($);
                return 1;
            }
        }
    }
    machine->lock.unlock($);
    return 0;
}

template <class... Rest> long model_syscall(long, rl::atomic<uint32_t> *word, int operation, Rest...) {
    RL_ASSERT(operation == FUTEX_WAKE || operation == FUTEX_WAKE_PRIVATE);
    return futex_wake(word);
}
template <class... Rest> long model_syscall(long, uintptr_t word, int operation, uint32_t value, Rest...) {
    RL_ASSERT(operation == FUTEX_WAIT || operation == FUTEX_WAIT_PRIVATE);
    return futex_wait({{(rl::atomic<uint32_t> *)word, value}});
}
template <class Entry, class... Rest> long model_syscall(long, const Entry *v, uint32_t count, Rest...) {
    RL_ASSERT(count == 2); // what the tests wait for together
    return futex_wait({{(rl::atomic<uint32_t> *)v[0].address, (uint32_t)v[0].value},
                       {(rl::atomic<uint32_t> *)v[1].address, (uint32_t)v[1].value}});
}

inline int model_clock(clockid_t, timespec *t) {
    machine->clock += machine->clock_step;
    *t = {(time_t)machine->clock, 0};
    return 0;
}

inline int model_fcntl(int fd, int command, struct flock *lock) {
    machine->lock.lock($);
    int &holder = machine->holder[lock->l_start];
    int answer = 0;
    if (command == F_OFD_GETLK) {
        lock->l_type = holder == 0 || holder == fd ? F_UNLCK : F_WRLCK;
    } else if (lock->l_type == F_UNLCK) {
        holder = holder == fd ? 0 : holder;
        machine->changed.notify_all($);
    } else if (holder == 0 || holder == fd) {
        holder = fd;
    } else {
        errno = EAGAIN;
        answer = -1;
    }
    machine->lock.unlock($);
    return answer;
}

inline void shr_guard_add(void *, size_t, int) {}
inline void shr_guard_remove(const void *) {}
inline int shr_guard_is_whole(int, uint64_t) { return 1; }

#define atomic_signal_fence(order) ((void)0)
#define memcpy model_copy
#define memset model_set
#define syscall model_syscall
#define clock_gettime model_clock
#define clock_nanosleep(...) 0
#define fcntl model_fcntl
#define __builtin_ia32_pause() ((void)0)

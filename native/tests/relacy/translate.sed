# From the C of native/ to C++ that the checker can run. Nothing of the algorithm is touched: types
# of shared words, and names of what the machine below provides. See model.hpp.

# the machine below: model.hpp includes what is real and replaces the rest
/^#include /d

# shared words; counters for people have one writer and nothing hangs on them
/^struct shr_end_statistics {/,/^};/ s/_Atomic uint64_t/statistic/
s/_Atomic uint64_t \(wait_histogram\|attached_ns\|sample_[a-z]*\)/statistic \1/
s/_Atomic uint64_t \*\(counter\|mark\|since\)/statistic *\1/
s/_Atomic uint64_t/rl::atomic<uint64_t>/g
s/_Atomic uint32_t/rl::atomic<uint32_t>/g

# the constants of a header: written before `ready`, plain memory that can be raced for
s/_Alignas([A-Z_]*) *//
/^struct shr_header {/,/^};/ s/^\( *\)\(uint32_t\|uint64_t\) \([a-z_]*\);/\1plain<\2> \3;/

# words of the model are larger than those of the machine
/_Static_assert/d
s/^#define SHR_HEADER_LENGTH .*/#define SHR_HEADER_LENGTH 16384u/

# what only looks on
/^static struct shr_end_snapshot look_at/,$d

# C says what C++ wants spelled out
s/uint8_t \*base = mmap/uint8_t *base = (uint8_t *)mmap/

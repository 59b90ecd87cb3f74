"""Builds `manager._detok`: the decoder core of native/src/detok.c for Python.

The structs end in `...`, so their true layout comes from the compiler, and a wrong member
type here is an error at build time.
"""

from __future__ import annotations

import cffi

CDEF = """
#define DETOK_PROMPT_TAIL_MAX ...
#define DETOK_ID_KNOWN ...
#define DETOK_ID_SPECIAL ...
#define DETOK_ID_WHOLE ...

struct detok_table {
    const uint8_t *text;
    const uint32_t *text_offsets;
    const uint8_t *first_text;
    const uint32_t *first_offsets;
    const uint8_t *flags;
    uint32_t id_count;
    uint8_t strip_byte;
    uint8_t strip_count;
    uint8_t swap_from_length;
    uint8_t swap_to_length;
    uint8_t swap_from[4];
    uint8_t swap_to[4];
    ...;
};

struct detok_state {
    uint8_t pending_length;
    uint8_t flags;
    uint32_t unknown_ids;
    ...;
};

int detok_table_check(const struct detok_table *table, size_t text_length, size_t first_text_length);
void detok_open(const struct detok_table *table, struct detok_state *state, int skip_special,
                const int32_t *prompt_tail, size_t prompt_tail_count);
uint64_t detok_decode_bound(const struct detok_table *table, const int32_t *token_ids, size_t token_count);
int64_t detok_decode(const struct detok_table *table, struct detok_state *states, size_t state_count,
                     const uint32_t *slots, const uint32_t *counts, size_t row_count,
                     const int32_t *token_ids, size_t token_count, uint8_t *out, size_t capacity,
                     uint32_t *lengths);
size_t detok_finish(struct detok_state *state, uint8_t *out);
"""

ffibuilder = cffi.FFI()
ffibuilder.cdef(CDEF)
ffibuilder.set_source(
    "manager._detok",
    '#include "shmring/detok.h"',
    sources=["native/src/detok.c"],
    include_dirs=["native/include"],
    extra_compile_args=["-std=c11", "-O2", "-fvisibility=hidden"],
)

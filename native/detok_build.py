"""Builds `manager._detok`: the decoder core of native/src/detok*.c for Python.

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

void detok_find_whole(const uint8_t *text, const uint32_t *offsets, uint32_t id_count, uint8_t *whole);
int detok_table_check(const struct detok_table *table, size_t text_length, size_t first_text_length);
void detok_open(const struct detok_table *table, struct detok_state *state, int skip_special,
                const int32_t *prompt_tail, size_t prompt_tail_count);
uint64_t detok_decode_bound(const struct detok_table *table, const int32_t *token_ids, size_t token_count);
int64_t detok_decode(const struct detok_table *table, struct detok_state *states, size_t state_count,
                     const uint32_t *slots, const uint32_t *counts, size_t row_count,
                     const int32_t *token_ids, size_t token_count, uint8_t *out, size_t capacity,
                     uint32_t *lengths);
int64_t detok_decode_each(const struct detok_table *table, const int32_t *token_ids, size_t token_count,
                          uint8_t *out, size_t capacity, uint32_t *lengths);
size_t detok_finish(struct detok_state *state, uint8_t *out);

#define DETOK_NO_STOP ...
#define DETOK_FINISH_NONE ...
#define DETOK_FINISH_STOP ...
#define DETOK_FINISH_STOP_TOKEN ...
#define DETOK_FINISH_LENGTH ...
#define DETOK_FINISH_ABORT ...
#define DETOK_FINISH_DETAILS ...

struct detok_stop_node { ...; };
struct detok_stops {
    const uint8_t *text;
    const uint32_t *offsets;
    const uint8_t *details;
    const uint32_t *details_offsets;
    struct detok_stop_node *nodes;
    uint32_t node_capacity;
    uint32_t count;
    uint32_t details_length_max;
    ...;
};
int detok_stops_build(struct detok_stops *stops);
uint32_t detok_stops_scan(const struct detok_stops *stops, uint32_t node, const uint8_t **at,
                          const uint8_t *end, int armed, int32_t *found);
const uint8_t *detok_stops_held(const struct detok_stops *stops, uint32_t node, uint32_t *length);

struct detok_request { ...; };
struct detok_requests {
    struct detok_request *places;
    uint32_t capacity;
    uint32_t count;
    uint32_t started_count;
    uint32_t started_max;
    uint64_t unknown_ids;
    ...;
};
struct detok_batch {
    const uint8_t *request_ids;
    const uint8_t *token_counts;
    const uint8_t *token_ids;
    const uint8_t *finish_codes;
    const uint8_t *finish_values;
    const uint8_t *details_lengths;
    const uint8_t *details;
    uint64_t token_count;
    uint64_t details_length;
    uint32_t row_count;
    uint32_t is_fresh;
    ...;
};
int detok_batch_read(struct detok_batch *batch, const uint8_t *payload, uint64_t length,
                     uint64_t fingerprint);
struct detok_row {
    int64_t value;
    uint64_t details_start;
    uint32_t details_length;
    uint32_t cut_from;
    uint32_t cut_length;
    uint8_t code;
    ...;
};
struct detok_report {
    uint64_t *unknown;
    uint64_t *refused;
    uint64_t *stopped;
    uint64_t *ended;
    uint64_t bound;
    uint64_t token_count;
    uint32_t kept_count;
    uint32_t unknown_count;
    uint32_t refused_count;
    uint32_t stopped_count;
    uint32_t ended_count;
    uint32_t late_count;
    uint32_t details_count;
    uint32_t bad_row;
    ...;
};
int detok_request_open(const struct detok_table *table, struct detok_requests *requests, uint64_t id,
                       uint64_t min_new_tokens, int skip_special, int no_stop_trim,
                       const struct detok_stops *stops, const int32_t *prompt_tail,
                       size_t prompt_tail_count);
int detok_request_close(struct detok_requests *requests, uint64_t id);
int detok_request_is_open(const struct detok_requests *requests, uint64_t id);
int detok_requests_move(const struct detok_requests *from, struct detok_requests *to);
int detok_step_look(const struct detok_table *table, struct detok_requests *requests,
                    const struct detok_batch *batch, struct detok_row *rows, struct detok_report *report);
int64_t detok_step_write(const struct detok_table *table, struct detok_requests *requests,
                         const struct detok_batch *batch, struct detok_row *rows, const uint8_t *cuts,
                         struct detok_report *report, uint64_t fingerprint, uint8_t *out,
                         uint64_t capacity);
"""

ffibuilder = cffi.FFI()
ffibuilder.cdef(CDEF)
ffibuilder.set_source(
    "manager._detok",
    '#include "shmring/detok_step.h"',
    sources=[
        "native/src/detok.c",
        "native/src/detok_stop.c",
        "native/src/detok_batch.c",
        "native/src/detok_step.c",
        "native/src/frame_check.c",
    ],
    include_dirs=["native/include"],
    define_macros=[("_GNU_SOURCE", "1")],
    extra_compile_args=["-std=c11", "-O2", "-fvisibility=hidden"],
)

/* A decode step of a worker: a frame of token ids in, a frame of text out, in two calls.
 *
 * `detok_step_look` finds the requests of all rows and says how much room the answer can take;
 * the caller reserves it, best in the ring itself; `detok_step_write` writes the answer there.
 * In between no request is opened or closed.
 *
 * A batch frame may be changed under us by whoever shares its memory. So what decides about
 * memory is copied by the first call and taken from the copy by the second, and ids, which are
 * read twice, are checked against the room that is left each time.
 *
 * No allocation, no locks, no errno; nothing here knows Python or a ring. Requests are kept in
 * memory that the caller gives and grows.
 */
#ifndef SHMRING_DETOK_STEP_H
#define SHMRING_DETOK_STEP_H

#include "shmring/detok.h"
#include "shmring/detok_stop.h"

/* Finish codes that mean something here; the others pass through. */
#define DETOK_FINISH_NONE 0u
#define DETOK_FINISH_STOP 1u
#define DETOK_FINISH_STOP_TOKEN 2u
#define DETOK_FINISH_LENGTH 3u
#define DETOK_FINISH_ABORT 4u
#define DETOK_FINISH_DETAILS 255u

#define DETOK_REQUEST_OPEN 1u
#define DETOK_REQUEST_STARTED 2u      /* its first row has come */
#define DETOK_REQUEST_NO_STOP_TRIM 4u /* the stop that was matched stays in the text */
#define DETOK_REQUEST_ENDED 8u        /* in this very frame; it is closed when the frame is done */

/* All that is known of a request. All zero: the place is free. */
struct detok_request {
    uint64_t id;
    uint64_t min_new_tokens;
    uint64_t completion_count;
    const struct detok_stops *stops; /* NULL: none. The caller keeps it. */
    struct detok_state text;
    uint32_t stop_node;
    uint32_t flags;
};

/* Open requests by id: open addressing, the next free place, at most half full. */
struct detok_requests {
    struct detok_request *places; /* `capacity` of them */
    uint32_t capacity;            /* a power of two, at least 2 */
    uint32_t count;
    uint32_t started_count;
    uint32_t started_max;
    uint64_t unknown_ids; /* of the requests that were closed */
};

/* A batch frame as its reader found it, n = row_count rows. Nothing in it need be aligned. */
struct detok_batch {
    const uint8_t *request_ids;     /* n u64 */
    const uint8_t *token_counts;    /* n u32 */
    const uint8_t *token_ids;       /* token_count i32 */
    const uint8_t *finish_codes;    /* n u8 */
    const uint8_t *finish_values;   /* n i64, or NULL */
    const uint8_t *details_lengths; /* n u32, or NULL */
    const uint8_t *details;         /* details_length bytes, or NULL */
    uint64_t token_count;
    uint64_t details_length;
    uint32_t row_count;
    uint32_t is_fresh; /* texts that start here do not continue their prompt */
};

/* Finds the columns of a batch frame in a record's payload, and leaves is_fresh alone. The columns:
 *
 *   request_ids u64, token_counts u32, token_ids i32 (ragged), finish_codes u8, finish_values i64 (or
 *   absent), finish_details_lengths u32 and finish_details u8 (ragged, or both absent)
 *
 * 0, or -EINVAL: it is no such frame. The counts are added up by detok_step_look. */
int detok_batch_read(struct detok_batch *batch, const uint8_t *payload, uint64_t length,
                     uint64_t fingerprint);

/* Of each row what the second call takes from the first. */
struct detok_row {
    int64_t value;
    uint64_t details_start;
    uint32_t details_length;
    uint32_t place; /* of its request; UINT32_MAX: the row is left out */
    uint32_t token_count;
    uint32_t shown_count; /* without a stop token that is trimmed */
    uint32_t text_length;
    int32_t found;       /* stop string, or DETOK_NO_STOP */
    uint32_t cut_from;   /* what the scheduler matched, to be cut off, in the caller's bytes; */
    uint32_t cut_length; /* the caller writes both between the calls. 0: nothing */
    uint8_t code;
    uint8_t reserved[7];
};

/* What came of a frame. The four lists have room for row_count ids each. */
struct detok_report {
    uint64_t *unknown; /* rows of requests that are not open: left out */
    uint64_t *refused; /* rows of requests that find no room to start: left out */
    uint64_t *stopped; /* requests that ended here, which the scheduler does not know */
    uint64_t *ended;   /* requests that have ended, for whatever reason: closed */
    uint64_t bound;    /* bytes that the answer needs at most */
    uint64_t tail_bound;
    uint64_t token_count; /* of the rows that were answered */
    uint32_t kept_count;  /* rows that were answered */
    uint32_t unknown_count;
    uint32_t refused_count;
    uint32_t stopped_count;
    uint32_t ended_count;
    uint32_t late_count;    /* rows behind the end of their request, in one frame: left out */
    uint32_t details_count; /* rows whose finish is in details, which only the caller can read */
    uint32_t bad_row;
};

/* Opens a request that continues `prompt_tail` (see detok_open); the same id again starts anew.
 * `table` NULL: without text. 0, or -ENOBUFS: no place is left, move to more room first. */
int detok_request_open(const struct detok_table *table, struct detok_requests *requests, uint64_t id,
                       uint64_t min_new_tokens, int skip_special, int no_stop_trim,
                       const struct detok_stops *stops, const int32_t *prompt_tail, size_t prompt_tail_count);

/* 1 if the request was open, or 0. */
int detok_request_close(struct detok_requests *requests, uint64_t id);
int detok_request_is_open(const struct detok_requests *requests, uint64_t id);

/* Moves everything to an empty table with more room. 0, or -EINVAL if it has not. */
int detok_requests_move(const struct detok_requests *from, struct detok_requests *to);

/* Reads a frame. `rows` has room for its rows. 0, or with no request changed
 *   -EINVAL   counts or lengths do not add up
 *   -EBADMSG  a finish cannot be: report->bad_row */
int detok_step_look(const struct detok_table *table, struct detok_requests *requests,
                    const struct detok_batch *batch, struct detok_row *rows, struct detok_report *report);

/* Writes the answer: the payload of a frame with columns
 *
 *   request_ids u64, texts_lengths u32, texts u8, token_counts u32, token_ids i32,
 *   completion_counts u32, finish_codes u8, finish_values i64 (where anything has finished),
 *   finish_details_lengths u32 and finish_details u8 (where any has details)
 *
 * at `out`, which has room for report->bound bytes. `cuts`: the bytes that rows[i].cut_from counts
 * in. Returns the length of the payload; 0: no row is left to answer. Or
 *   -ENOBUFS  capacity is less than the bound; nothing has changed
 *   -EFAULT   the frame is not what it was before. What its requests know is spoilt. */
int64_t detok_step_write(const struct detok_table *table, struct detok_requests *requests,
                         const struct detok_batch *batch, struct detok_row *rows, const uint8_t *cuts,
                         struct detok_report *report, uint64_t fingerprint, uint8_t *out, uint64_t capacity);

#endif

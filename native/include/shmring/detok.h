/* Token ids to UTF-8, for a whole batch in one call.
 *
 * A table says which bytes each id adds to the text; a state of a few bytes per
 * request remembers what the next id depends on: the first bytes of a character that
 * is not complete yet, and whether anything was said before. So a token costs the same
 * at any length of output, and what was handed out is final.
 *
 * Bytes that are not UTF-8 become U+FFFD, one for each maximal subpart (Unicode 3.9,
 * table 3-8), exactly as Python's bytes.decode("utf-8", "replace") does it. An
 * incomplete character is held until it is complete, broken, or flushed by
 * detok_finish.
 *
 * No allocation, no locks, no global state, no errno. A table may be shared by any
 * number of threads and processes; a state array belongs to one caller at a time.
 */
#ifndef SHMRING_DETOK_H
#define SHMRING_DETOK_H

#include <stddef.h>
#include <stdint.h>

/* How many of the prompt's last ids detok_open looks at. Three would complete every
 * character (a pending one has at most three bytes); the others are there because
 * special and unknown ids add nothing and may stand between. */
#define DETOK_PROMPT_TAIL_MAX 8

/* Flags of an id, in detok_table.flags. */
#define DETOK_ID_KNOWN 1u   /* the vocabulary has this id */
#define DETOK_ID_SPECIAL 2u /* left out when the request skips special tokens */
#define DETOK_ID_WHOLE 4u   /* both its texts are valid UTF-8 on their own */

/* Flags of a request, in detok_state.flags. */
#define DETOK_OPEN 1u         /* the slot is in use */
#define DETOK_SKIP_SPECIAL 2u /* special tokens add nothing */
#define DETOK_AT_FIRST 4u     /* the next token is the first of the text */
#define DETOK_PROMPT_BYTES 8u /* all pending bytes are the prompt's own */

/* What each id adds to the text. Read-only; flat, so that it can lie in shared memory.
 *
 *   text_offsets  0        3     3          8
 *   text          | a b c  |     | d e f g h |      id 0 adds "abc", id 1 nothing
 */
struct detok_table {
    const uint8_t *text;
    const uint32_t *text_offsets; /* id_count + 1 offsets into text, never falling */
    /* What an id adds as the first token of a text; NULL: the same as anywhere. */
    const uint8_t *first_text;
    const uint32_t *first_offsets; /* id_count + 1 offsets into first_text, or NULL */
    const uint8_t *flags;          /* id_count bytes of DETOK_ID_* */
    uint32_t id_count;
    /* Up to strip_count copies of the ASCII character strip_byte are taken off the
     * start of the whole text. */
    uint8_t strip_byte;
    uint8_t strip_count;
    /* A character put together from the bytes of several tokens is replaced by
     * swap_to if it equals swap_from. (Inside one token the table's text has it
     * replaced already.) swap_from_length == 0: nothing is replaced. */
    uint8_t swap_from_length;
    uint8_t swap_to_length;
    uint8_t swap_from[4];
    uint8_t swap_to[4];
};

/* All that is remembered of a request. All zero: the slot is free. */
struct detok_state {
    uint8_t pending[3];     /* first bytes of an incomplete character */
    uint8_t pending_length; /* 0..3 */
    uint8_t flags;          /* DETOK_OPEN, ... */
    uint8_t strip_left;     /* how many strip_byte may still be taken off */
    uint16_t reserved;      /* 0 */
    uint32_t unknown_ids;   /* ids outside the vocabulary so far; stays at its maximum */
};

/* Says of each of id_count texts whether it is valid UTF-8 on its own: 1 or 0. For whoever makes a
 * table: the offsets are believed. */
void detok_find_whole(const uint8_t *text, const uint32_t *offsets, uint32_t id_count, uint8_t *whole);

/* Checks a table whose memory somebody else wrote: offsets never fall and end within
 * their text, flags tell the truth about WHOLE, lengths fit. Reads everything once.
 * Returns 0, or -EINVAL. The other functions rely on it. */
int detok_table_check(const struct detok_table *table, size_t text_length, size_t first_text_length);

/* Opens a state for a text that continues `prompt_tail`, the last ids of the prompt, in
 * order. Of a longer tail the last DETOK_PROMPT_TAIL_MAX are looked at. A shorter one is
 * taken for the whole prompt, so an empty one (may be NULL) is the true start of a text.
 * A tail of full length is taken for a continuation, whatever it consists of. */
void detok_open(const struct detok_table *table, struct detok_state *state, int skip_special,
                const int32_t *prompt_tail, size_t prompt_tail_count);

/* The most bytes that detok_decode can write for these ids, whatever the states hold:
 * per id 3 (a pending character that breaks) plus its length, three times its length if
 * it is not whole. */
uint64_t detok_decode_bound(const struct detok_table *table, const int32_t *token_ids, size_t token_count);

/* Decodes row_count rows: row r is the next counts[r] ids of token_ids, of the request in
 * states[slots[r]]. The text of all rows lies back to back in `out`, always whole
 * characters; lengths[r] is the length of row r in bytes. A slot may come up in several
 * rows; they are taken in order. Ids outside the vocabulary add nothing and are counted.
 *
 * Returns the bytes written. Or, with nothing written and no state changed:
 *   -ERANGE   a slot is not below state_count
 *   -ENOENT   a slot is not open
 *   -EINVAL   the counts do not add up to token_count
 *   -ENOBUFS  capacity is less than detok_decode_bound of these ids
 */
int64_t detok_decode(const struct detok_table *table, struct detok_state *states, size_t state_count,
                     const uint32_t *slots, const uint32_t *counts, size_t row_count,
                     const int32_t *token_ids, size_t token_count, uint8_t *out, size_t capacity,
                     uint32_t *lengths);

/* What each of the ids adds in the midst of a text, by itself and special tokens shown: for texts
 * beside log probabilities. Back to back in `out`, lengths[i] bytes each; broken characters are
 * U+FFFD, unknown ids nothing. Returns the bytes written, or -ENOBUFS as detok_decode. */
int64_t detok_decode_each(const struct detok_table *table, const int32_t *token_ids, size_t token_count,
                          uint8_t *out, size_t capacity, uint32_t *lengths);

/* Writes what is held of an incomplete character, U+FFFD or nothing, and forgets it.
 * Returns the bytes written to `out`: 0 or 3. The state stays open. */
size_t detok_finish(struct detok_state *state, uint8_t out[3]);

#endif

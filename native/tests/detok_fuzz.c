/* Throws random tables, stop strings, requests and frames at the decoder core, sound and unsound
 * ones, in memory of exactly the size that was promised. What it proves is proved by the
 * sanitizers that it is built with; beside that the answers are checked for what must hold of any.
 *
 *     detok_fuzz ROUNDS [SEED]
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "shmring/detok_step.h"
#include "shmring/frame.h"

#define IDS 40u
#define ROWS_MAX 24u
#define SETS 6u
#define CHECK(what)                                                                                          \
    do {                                                                                                     \
        if (!(what)) {                                                                                       \
            fprintf(stderr, "%s:%d: not so: %s, seed=%llu\n", __FILE__, __LINE__, #what,                     \
                    (unsigned long long)seed);                                                               \
            exit(1);                                                                                         \
        }                                                                                                    \
    } while (0)

static uint64_t seed, state;

static uint32_t below(uint32_t n) { /* splitmix64 */
    state += 0x9E3779B97F4A7C15u;
    uint64_t z = state;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return (uint32_t)(((z ^ (z >> 31)) >> 32) * n >> 32);
}

static void *exactly(size_t length) {
    void *memory = malloc(length == 0 ? 1 : length);
    CHECK(memory != NULL);
    return memory;
}

struct some_table {
    struct detok_table table;
    uint8_t text[IDS * 8], first[IDS * 8], flags[IDS];
    uint32_t offsets[IDS + 1], first_offsets[IDS + 1];
};

static const char *const PIECES[] = {
    "a",        "b",        "ab",   " ",         "END", "E",        "\xE4",    "\xB8", "\xAD", "\xE4\xB8\xAD",
    "\xF0\x9F", "\x98\x80", "\xFF", "x\xE4\xB8", "",    "\xC0\x80", "\xED\xA0"};

static uint32_t fill(uint8_t *text, uint32_t *offsets) {
    uint32_t end = 0;
    for (uint32_t id = 0; id < IDS; id++) {
        const char *piece = PIECES[below(sizeof PIECES / sizeof *PIECES)];
        offsets[id] = end;
        memcpy(text + end, piece, strlen(piece));
        end += (uint32_t)strlen(piece);
    }
    offsets[IDS] = end;
    return end;
}

static void make_table(struct some_table *some) {
    uint32_t length = fill(some->text, some->offsets), first_length = fill(some->first, some->first_offsets);
    int has_first = below(2) != 0;
    some->table = (struct detok_table){.text = some->text,
                                       .text_offsets = some->offsets,
                                       .first_text = has_first ? some->first : NULL,
                                       .first_offsets = has_first ? some->first_offsets : NULL,
                                       .flags = some->flags,
                                       .id_count = IDS,
                                       .strip_byte = ' ',
                                       .strip_count = (uint8_t)below(3)};
    if (below(3) == 0) {
        some->table.swap_from_length = 3;
        memcpy(some->table.swap_from, "\xE4\xB8\xAD", 3);
        some->table.swap_to_length = (uint8_t)below(5);
        memcpy(some->table.swap_to, "zzzz", 4);
    }
    for (uint32_t id = 0; id < IDS; id++) {
        some->flags[id] = (uint8_t)((below(10) != 0 ? DETOK_ID_KNOWN : 0) |
                                    (below(8) == 0 ? DETOK_ID_SPECIAL : 0) | DETOK_ID_WHOLE);
        /* the check says whether that is true of this id */
        if (detok_table_check(&some->table, length, has_first ? first_length : 0) != 0)
            some->flags[id] &= (uint8_t)~DETOK_ID_WHOLE;
    }
    CHECK(detok_table_check(&some->table, length, has_first ? first_length : 0) == 0);
    uint32_t id = below(IDS), was = some->offsets[id];
    some->offsets[id] = below(1u << 30);
    int answer = detok_table_check(&some->table, length, has_first ? first_length : 0);
    CHECK(answer == 0 || answer == -EINVAL);
    some->offsets[id] = was;
}

struct some_stops {
    struct detok_stops stops;
    uint8_t text[64], details[64];
    uint32_t offsets[9], details_offsets[9];
};

static void make_stops(struct some_stops *some) {
    static const char *const WORDS[] = {"END", "E", "a", "ab", "b ", "\xE4\xB8\xAD", "aba", "EEND"};
    uint32_t count = 1 + below(8), end = 0, details_end = 0;
    some->offsets[0] = some->details_offsets[0] = 0;
    for (uint32_t i = 0; i < count; i++) {
        const char *word = WORDS[below(8)];
        memcpy(some->text + end, word, strlen(word));
        end += (uint32_t)strlen(word);
        some->offsets[i + 1] = end;
        uint32_t length = below(8);
        memset(some->details + details_end, 'd', length);
        details_end += length;
        some->details_offsets[i + 1] = details_end;
    }
    some->stops = (struct detok_stops){.text = some->text,
                                       .offsets = some->offsets,
                                       .details = some->details,
                                       .details_offsets = some->details_offsets,
                                       .nodes = exactly((end + 1) * sizeof(struct detok_stop_node)),
                                       .node_capacity = end + 1,
                                       .count = count,
                                       .details_length_max = 8};
    some->stops.node_capacity = below(end + 1);
    int answer = detok_stops_build(&some->stops);
    CHECK(answer == 0 || answer == -ENOBUFS);
    some->stops.node_capacity = end + 1;
    CHECK(detok_stops_build(&some->stops) == 0);
}

struct columns {
    uint8_t *ids, *counts, *tokens, *codes, *values, *lengths, *details;
};

static uint32_t make_batch(struct detok_batch *batch, struct columns *columns) {
    uint32_t rows = below(ROWS_MAX + 1), tokens = 0, details = 0;
    uint32_t counts[ROWS_MAX], lengths[ROWS_MAX];
    int has_details = below(3) == 0;
    uint8_t code_of[] = {0, 0, 0, 0, 1, 2, 3, 4, 255, (uint8_t)below(256)};
    *columns = (struct columns){.ids = exactly(8 * rows),
                                .counts = exactly(4 * rows),
                                .codes = exactly(rows),
                                .values = below(2) || has_details ? exactly(8 * rows) : NULL,
                                .lengths = has_details ? exactly(4 * rows) : NULL};
    for (uint32_t r = 0; r < rows; r++) {
        uint64_t id = below(30);
        counts[r] = below(3) == 0 ? below(12) : 1;
        uint8_t code = code_of[below(sizeof code_of - (below(9) != 0))];
        lengths[r] = has_details && (code == 0 || code == 255) ? below(6) : 0;
        int64_t value = code == 2 || code == 3 ? (int64_t)below(IDS) : 0;
        memcpy(columns->ids + 8 * r, &id, 8);
        memcpy(columns->counts + 4 * r, &counts[r], 4);
        columns->codes[r] = code;
        if (columns->values != NULL)
            memcpy(columns->values + 8 * r, &value, 8);
        if (has_details)
            memcpy(columns->lengths + 4 * r, &lengths[r], 4);
        tokens += counts[r];
        details += lengths[r];
    }
    columns->tokens = exactly(4 * tokens);
    for (uint32_t i = 0; i < tokens; i++) {
        int32_t id = below(20) == 0 ? (int32_t)(below(UINT32_MAX)) : (int32_t)below(IDS + 2);
        memcpy(columns->tokens + 4 * i, &id, 4);
    }
    columns->details = has_details ? exactly(details) : NULL;
    if (details > 0)
        memset(columns->details, 'D', details);
    *batch = (struct detok_batch){.request_ids = columns->ids,
                                  .token_counts = columns->counts,
                                  .token_ids = columns->tokens,
                                  .finish_codes = columns->codes,
                                  .finish_values = columns->values,
                                  .details_lengths = columns->lengths,
                                  .details = columns->details,
                                  .token_count = tokens + (below(30) == 0 ? below(3) : 0),
                                  .details_length = details + (below(30) == 0 ? below(3) : 0),
                                  .row_count = rows,
                                  .is_fresh = below(2)};
    return tokens;
}

static void free_batch(struct columns *columns) {
    free(columns->ids);
    free(columns->counts);
    free(columns->tokens);
    free(columns->codes);
    free(columns->values);
    free(columns->lengths);
    free(columns->details);
}

static void check_answer(const uint8_t *out, uint64_t length, const struct detok_report *report) {
    struct shr_column_entry entries[10];
    uint32_t rows;
    CHECK(length <= UINT32_MAX && shr_check_frame(out, (uint32_t)length, 7, 10, &rows, entries) == 0);
    CHECK(rows == report->kept_count);
    CHECK(entries[0].length == 8 * rows && entries[1].length == 4 * rows && entries[3].length == 4 * rows);
    CHECK(entries[5].length == 4 * rows && entries[6].length == rows);
    uint64_t text = 0, tokens = 0;
    for (uint32_t r = 0; r < rows; r++) {
        uint32_t value;
        memcpy(&value, out + entries[1].offset + 4 * r, 4);
        text += value;
        memcpy(&value, out + entries[3].offset + 4 * r, 4);
        tokens += value;
    }
    CHECK(text == entries[2].length && 4 * tokens == entries[4].length);
}

/* The batch as a record's payload in memory of just its length, sound or not; where its columns lie then. */
static uint8_t *as_payload(struct detok_batch *batch) {
    const void *columns[] = {batch->request_ids,  batch->token_counts,  batch->token_ids,
                             batch->finish_codes, batch->finish_values, batch->details_lengths,
                             batch->details};
    uint64_t lengths[] = {8 * (uint64_t)batch->row_count, 4 * (uint64_t)batch->row_count,
                          4 * batch->token_count,         batch->row_count,
                          8 * (uint64_t)batch->row_count, 4 * (uint64_t)batch->row_count,
                          batch->details_length};
    uint64_t length = shr_frame_length(7, columns, lengths);
    uint8_t *payload = exactly(length);
    shr_frame_write(payload, 9, batch->row_count, 7, columns, lengths);
    if (below(3) == 0)
        payload[below(below(2) ? 72 : (uint32_t)length)] ^= (uint8_t)(1u << below(8));
    if (below(9) == 0) {
        uint64_t shorter = below((uint32_t)length);
        uint8_t *rest = exactly(shorter);
        memcpy(rest, payload, shorter);
        free(payload);
        payload = rest;
        length = shorter;
    }
    uint32_t rows = batch->row_count;
    int answer = detok_batch_read(batch, payload, length, 9);
    CHECK(answer == 0 || answer == -EINVAL);
    if (answer != 0 || batch->row_count > rows) { /* no frame, or one with rows that nobody made room for */
        free(payload);
        return NULL;
    }
    return payload;
}

static uint64_t details_of(const struct columns *columns, uint32_t rows) {
    uint64_t sum = 0;
    for (uint32_t r = 0; columns->lengths != NULL && r < rows; r++) {
        uint32_t length;
        memcpy(&length, columns->lengths + 4 * r, 4);
        sum += length;
    }
    return sum;
}

static void one_frame(const struct detok_table *table, struct detok_requests *requests) {
    struct detok_batch batch;
    struct columns columns;
    uint32_t tokens = make_batch(&batch, &columns);
    uint8_t *payload = NULL;
    if (tokens == batch.token_count && details_of(&columns, batch.row_count) == batch.details_length &&
        below(2) == 0) {
        payload = as_payload(&batch);
        if (payload == NULL) {
            free_batch(&columns);
            return;
        }
        tokens = 0; /* those in `columns` are no longer looked at */
    }
    struct detok_row *rows = exactly(batch.row_count * sizeof *rows);
    struct detok_report report;
    report.unknown = exactly(8 * batch.row_count);
    report.refused = exactly(8 * batch.row_count);
    report.stopped = exactly(8 * batch.row_count);
    report.ended = exactly(8 * batch.row_count);
    int answer = detok_step_look(table, requests, &batch, rows, &report);
    CHECK(answer == 0 || answer == -EINVAL || answer == -EBADMSG);
    if (answer == 0) {
        static const uint8_t CUTS[] = "ENDa";
        for (uint32_t r = 0; r < batch.row_count; r++)
            if (below(3) == 0) {
                rows[r].cut_from = below(4);
                rows[r].cut_length = below(4 - rows[r].cut_from + 1);
            }
        if (below(4) == 0 && tokens > 0) { /* changed under us */
            int32_t id = (int32_t)below(IDS);
            memcpy(columns.tokens + 4 * below(tokens), &id, 4);
            columns.codes[0] ^= 1;
            memset(columns.counts, 0xFF, 4);
        }
        uint8_t *out = exactly(report.bound);
        if (report.bound > 0)
            CHECK(detok_step_write(table, requests, &batch, rows, CUTS, &report, 7, out, report.bound - 1) ==
                  -ENOBUFS);
        int64_t length = detok_step_write(table, requests, &batch, rows, CUTS, &report, 7, out, report.bound);
        CHECK(length >= 0 || length == -EFAULT);
        if (length > 0)
            check_answer(out, (uint64_t)length, &report);
        free(out);
    }
    free(report.unknown);
    free(report.refused);
    free(report.stopped);
    free(report.ended);
    free(rows);
    free(payload);
    free_batch(&columns);
}

static void one_round(void) {
    struct some_table *some = exactly(sizeof *some);
    struct some_stops *sets = exactly(SETS * sizeof *sets);
    make_table(some);
    for (uint32_t i = 0; i < SETS; i++)
        make_stops(&sets[i]);
    const struct detok_table *table = below(8) == 0 ? NULL : &some->table;
    struct detok_requests requests = {
        .places = calloc(4, sizeof(struct detok_request)), .capacity = 4, .started_max = 4 + below(20)};
    CHECK(requests.places != NULL);
    for (uint32_t frame = 0; frame < 30; frame++) {
        for (uint32_t i = below(4); i > 0; i--) {
            int32_t tail[DETOK_PROMPT_TAIL_MAX + 2];
            uint32_t tail_count = below(DETOK_PROMPT_TAIL_MAX + 3);
            for (uint32_t t = 0; t < tail_count; t++)
                tail[t] = (int32_t)below(IDS + 3) - 1;
            uint64_t id = below(30);
            const struct detok_stops *stops = below(2) ? &sets[below(SETS)].stops : NULL;
            int answer = detok_request_open(table, &requests, id, below(3) ? 0 : below(9), (int)below(2),
                                            (int)below(2), stops, tail, tail_count);
            if (answer == -ENOBUFS) {
                struct detok_requests larger = {
                    .places = calloc(2 * (size_t)requests.capacity, sizeof(struct detok_request)),
                    .capacity = 2 * requests.capacity};
                CHECK(larger.places != NULL && detok_requests_move(&requests, &larger) == 0);
                free(requests.places);
                requests = larger;
                continue;
            }
            CHECK(answer == 0 && detok_request_is_open(&requests, id));
        }
        if (below(4) == 0) {
            uint64_t id = below(30);
            detok_request_close(&requests, id);
            CHECK(!detok_request_is_open(&requests, id));
        }
        one_frame(table, &requests);
    }
    uint32_t open_count = 0;
    for (uint64_t id = 0; id < 30; id++)
        open_count += (uint32_t)detok_request_is_open(&requests, id);
    CHECK(open_count == requests.count);
    free(requests.places);
    for (uint32_t i = 0; i < SETS; i++)
        free(sets[i].stops.nodes);
    free(sets);
    free(some);
}

int main(int argc, char **argv) {
    unsigned long rounds = argc > 1 ? strtoul(argv[1], NULL, 10) : 1000;
    uint64_t first = argc > 2 ? strtoull(argv[2], NULL, 10) : 1;
    for (unsigned long i = 0; i < rounds; i++) {
        seed = first + i;
        state = seed * 0x9E3779B97F4A7C15u;
        one_round();
    }
    printf("detok_fuzz: %lu rounds from seed %llu\n", rounds, (unsigned long long)first);
    return 0;
}

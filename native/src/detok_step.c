#include "shmring/detok_step.h"

#include <errno.h>
#include <string.h>

#include "detok_core.h"
#include "shmring/frame.h"

#define NO_PLACE UINT32_MAX
#define COLUMN_COUNT 10u
#define PADDING_MAX 7u

static uint64_t load_u64(const uint8_t *at) {
    uint64_t value;
    memcpy(&value, at, sizeof value);
    return value;
}

static int64_t load_i64(const uint8_t *at) {
    int64_t value;
    memcpy(&value, at, sizeof value);
    return value;
}

static uint32_t load_u32(const uint8_t *at) {
    uint32_t value;
    memcpy(&value, at, sizeof value);
    return value;
}

static int32_t load_i32(const uint8_t *at) {
    int32_t value;
    memcpy(&value, at, sizeof value);
    return value;
}

/* Ids are given out in order, so neighbours would crowd; the upper bits of a product do not. */
static uint32_t home_of(const struct detok_requests *requests, uint64_t id) {
    return (uint32_t)((id * 0x9E3779B97F4A7C15u) >> 32) & (requests->capacity - 1);
}

static uint32_t place_of(const struct detok_requests *requests, uint64_t id) {
    uint32_t place = home_of(requests, id);
    while (requests->places[place].flags & DETOK_REQUEST_OPEN) {
        if (requests->places[place].id == id)
            return place;
        place = (place + 1) & (requests->capacity - 1);
    }
    return NO_PLACE;
}

/* There is always a free place: the table is at most half full. */
static struct detok_request *free_place(const struct detok_requests *requests, uint64_t id) {
    uint32_t place = home_of(requests, id);
    while (requests->places[place].flags & DETOK_REQUEST_OPEN)
        place = (place + 1) & (requests->capacity - 1);
    return &requests->places[place];
}

int detok_request_open(const struct detok_table *table, struct detok_requests *requests, uint64_t id,
                       uint64_t min_new_tokens, int skip_special, int no_stop_trim,
                       const struct detok_stops *stops, const int32_t *prompt_tail,
                       size_t prompt_tail_count) {
    detok_request_close(requests, id);
    if (requests->count >= requests->capacity / 2)
        return -ENOBUFS;
    struct detok_request *request = free_place(requests, id);
    *request =
        (struct detok_request){.id = id,
                               .min_new_tokens = min_new_tokens,
                               .stops = stops,
                               .flags = DETOK_REQUEST_OPEN | (no_stop_trim ? DETOK_REQUEST_NO_STOP_TRIM : 0)};
    if (table != NULL)
        detok_open(table, &request->text, skip_special, prompt_tail, prompt_tail_count);
    requests->count++;
    return 0;
}

int detok_request_is_open(const struct detok_requests *requests, uint64_t id) {
    return place_of(requests, id) != NO_PLACE;
}

int detok_request_close(struct detok_requests *requests, uint64_t id) {
    uint32_t hole = place_of(requests, id);
    if (hole == NO_PLACE)
        return 0;
    struct detok_request *places = requests->places;
    uint32_t mask = requests->capacity - 1;
    requests->unknown_ids += places[hole].text.unknown_ids;
    requests->started_count -= (places[hole].flags & DETOK_REQUEST_STARTED) != 0;
    requests->count--;
    /* Close the gap, so that a search may go on ending at the first free place: whoever behind it
     * is not nearer to its home than the hole is moves there. */
    for (uint32_t place = (hole + 1) & mask; places[place].flags & DETOK_REQUEST_OPEN;
         place = (place + 1) & mask) {
        uint32_t from_home = (place - home_of(requests, places[place].id)) & mask;
        if (from_home >= ((place - hole) & mask)) {
            places[hole] = places[place];
            hole = place;
        }
    }
    places[hole] = (struct detok_request){0};
    return 1;
}

int detok_requests_move(const struct detok_requests *from, struct detok_requests *to) {
    if (to->count != 0 || from->count > to->capacity / 2)
        return -EINVAL;
    for (uint32_t place = 0; place < from->capacity; place++)
        if (from->places[place].flags & DETOK_REQUEST_OPEN)
            *free_place(to, from->places[place].id) = from->places[place];
    to->count = from->count;
    to->started_count = from->started_count;
    to->started_max = from->started_max;
    to->unknown_ids = from->unknown_ids;
    return 0;
}

/* Can this be a finish? Details are for the caller to judge. */
static int is_finish(const struct detok_row *row) {
    switch (row->code) {
    case DETOK_FINISH_NONE: /* nothing has finished: neither is looked at */
        return 1;
    case DETOK_FINISH_STOP:
    case DETOK_FINISH_ABORT:
        return row->value == 0 && row->details_length == 0;
    case DETOK_FINISH_STOP_TOKEN:
    case DETOK_FINISH_LENGTH:
        return row->details_length == 0;
    case DETOK_FINISH_DETAILS:
        return row->value == 0;
    default:
        return 0;
    }
}

static int copy_rows(const struct detok_batch *batch, struct detok_row *rows, struct detok_report *report) {
    uint64_t token_sum = 0, details_sum = 0;
    for (uint32_t r = 0; r < batch->row_count; r++) {
        struct detok_row row = {.place = NO_PLACE, .found = DETOK_NO_STOP};
        row.token_count = load_u32(batch->token_counts + 4 * (size_t)r);
        row.code = batch->finish_codes[r];
        if (batch->finish_values != NULL)
            row.value = load_i64(batch->finish_values + 8 * (size_t)r);
        if (batch->details_lengths != NULL)
            row.details_length = load_u32(batch->details_lengths + 4 * (size_t)r);
        row.details_start = details_sum;
        token_sum += row.token_count;
        details_sum += row.details_length;
        rows[r] = row;
        if (!is_finish(&row)) {
            report->bad_row = r;
            return -EBADMSG;
        }
        report->details_count += row.code == DETOK_FINISH_DETAILS;
    }
    if (token_sum != batch->token_count || details_sum != (batch->details ? batch->details_length : 0))
        return -EINVAL;
    return 0;
}

/* Gives the request of a first row its place among the texts. 0 if there is none. */
static int start(const struct detok_table *table, struct detok_requests *requests,
                 struct detok_request *request, int is_fresh) {
    if (request->flags & DETOK_REQUEST_STARTED)
        return 1;
    if (table != NULL) {
        if (requests->started_count >= requests->started_max)
            return 0;
        if (is_fresh)
            detok_open(table, &request->text, request->text.flags & DETOK_SKIP_SPECIAL, NULL, 0);
    }
    requests->started_count++;
    request->flags |= DETOK_REQUEST_STARTED;
    return 1;
}

/* Bytes of text that a row can come to, without what its ids add. */
static uint64_t beside_ids(const struct detok_request *request) {
    uint32_t held = 0;
    if (request->stops != NULL)
        detok_stops_held(request->stops, request->stop_node, &held);
    return held + DETOK_REPLACEMENT_LENGTH;
}

int detok_step_look(const struct detok_table *table, struct detok_requests *requests,
                    const struct detok_batch *batch, struct detok_row *rows, struct detok_report *report) {
    uint64_t text_bound = 0, details_bound = 0;
    const uint8_t *ids = batch->token_ids;

    report->token_count = 0;
    report->kept_count = report->unknown_count = report->refused_count = report->stopped_count =
        report->ended_count = report->late_count = report->details_count = report->bad_row = 0;
    int wrong = copy_rows(batch, rows, report);
    if (wrong != 0)
        return wrong;
    for (uint32_t r = 0; r < batch->row_count; ids += 4 * (size_t)rows[r++].token_count) {
        uint64_t id = load_u64(batch->request_ids + 8 * (size_t)r);
        uint32_t place = place_of(requests, id);
        if (place == NO_PLACE) {
            report->unknown[report->unknown_count++] = id;
            continue;
        }
        struct detok_request *request = &requests->places[place];
        if (!start(table, requests, request, batch->is_fresh != 0)) {
            report->refused[report->refused_count++] = id;
            continue;
        }
        rows[r].place = place;
        report->kept_count++;
        report->token_count += rows[r].token_count;
        details_bound += rows[r].details_length;
        if (request->stops != NULL)
            details_bound += request->stops->details_length_max;
        if (table != NULL) {
            text_bound += beside_ids(request);
            for (uint32_t i = 0; i < rows[r].token_count; i++)
                text_bound += detok_id_bound(table, load_i32(ids + 4 * (size_t)i));
        }
    }
    /* all but the ids and the texts, which come first; one padding each */
    report->tail_bound = (uint64_t)report->kept_count * (4 + 4 + 1 + 8 + 4) + 4 * report->token_count +
                         details_bound + (uint64_t)COLUMN_COUNT * PADDING_MAX;
    report->bound = SHR_FRAME_HEADER_LENGTH + COLUMN_COUNT * SHR_COLUMN_ENTRY_LENGTH +
                    (uint64_t)report->kept_count * (8 + 4) + PADDING_MAX + text_bound + report->tail_bound;
    return 0;
}

/* Cuts the text at the first place where what the scheduler matched stands. */
static uint8_t *cut(const struct detok_row *row, const uint8_t *cuts, int keep, uint8_t *text, uint8_t *end) {
    const uint8_t *matched = cuts + row->cut_from;
    size_t length = row->cut_length;
    for (uint8_t *at = text; (size_t)(end - at) >= length; at++) {
        at = memchr(at, matched[0], (size_t)(end - at) - length + 1);
        if (at == NULL)
            break;
        if (memcmp(at, matched, length) == 0)
            return keep ? at + length : at;
    }
    return end;
}

/* Writes the text of a row. NULL: it does not fit before `limit`, as it must. */
static uint8_t *say_row(const struct detok_table *table, struct detok_request *request, struct detok_row *row,
                        const uint8_t *ids, const uint8_t *cuts, uint8_t *out, const uint8_t *limit) {
    const struct detok_stops *stops = request->stops;
    int keep = (request->flags & DETOK_REQUEST_NO_STOP_TRIM) != 0;
    uint8_t *end = out;
    const uint8_t *seen = out; /* looked through for stop strings */
    uint32_t node = request->stop_node;

    if ((uint64_t)(limit - end) < beside_ids(request))
        return NULL;
    if (stops != NULL) {
        uint32_t length;
        const uint8_t *held = detok_stops_held(stops, node, &length);
        memcpy(end, held, length);
        end += length;
        seen = end;
    }
    for (uint32_t i = 0; i < row->shown_count && row->found == DETOK_NO_STOP; i++) {
        int32_t id = load_i32(ids + 4 * (size_t)i);
        /* the flush at the end must still fit behind it */
        if ((uint64_t)(limit - end) < detok_id_bound(table, id) + DETOK_REPLACEMENT_LENGTH)
            return NULL;
        end = detok_say_id(table, &request->text, id, end);
        if (stops != NULL)
            node =
                detok_stops_scan(stops, node, &seen, end,
                                 request->completion_count + i + 1 >= request->min_new_tokens, &row->found);
    }
    request->completion_count += row->token_count;
    if (row->code != DETOK_FINISH_NONE && row->found == DETOK_NO_STOP) {
        end += detok_finish(&request->text, end);
        if (stops != NULL)
            node = detok_stops_scan(stops, node, &seen, end,
                                    request->completion_count >= request->min_new_tokens, &row->found);
    }
    if (row->found != DETOK_NO_STOP) { /* what comes behind it is thrown away */
        end = out + (seen - out);
        if (!keep)
            end -= stops->offsets[row->found + 1] - stops->offsets[row->found];
        return end;
    }
    if (row->code == DETOK_FINISH_NONE) {
        if (stops != NULL)
            end -= stops->nodes[node].held_length;
    } else if (row->cut_length > 0) {
        end = cut(row, cuts, keep, out, end);
    }
    request->stop_node = node;
    return end;
}

static uint8_t *padded(const uint8_t *start, uint8_t *end) {
    while ((end - start) % SHR_RECORD_ALIGNMENT != 0)
        *end++ = 0;
    return end;
}

/* Ends a column that began at `from`: its directory entry, and the padding. */
static uint8_t *close_column(uint8_t *out, uint32_t index, const uint8_t *from, uint8_t *end) {
    struct shr_column_entry entry = {(uint32_t)(from - out), (uint32_t)(end - from)};
    memcpy(out + SHR_FRAME_HEADER_LENGTH + index * SHR_COLUMN_ENTRY_LENGTH, &entry, sizeof entry);
    return padded(out, end);
}

static void trim_stop_token(const struct detok_request *request, struct detok_row *row, const uint8_t *ids) {
    row->shown_count = row->token_count;
    /* id 0 is no match, as in SGLang */
    if (row->code == DETOK_FINISH_STOP_TOKEN && !(request->flags & DETOK_REQUEST_NO_STOP_TRIM) &&
        row->value != 0 && row->token_count > 0 &&
        load_i32(ids + 4 * (size_t)(row->token_count - 1)) == row->value)
        row->shown_count--;
}

/* Bytes that a row's finish has to say. */
static const uint8_t *details_of(const struct detok_batch *batch, const struct detok_requests *requests,
                                 const struct detok_row *row, uint32_t *length) {
    if (row->found == DETOK_NO_STOP) {
        *length = row->details_length;
        return row->details_length == 0 ? NULL : batch->details + row->details_start;
    }
    const struct detok_stops *stops = requests->places[row->place].stops;
    *length = stops->details_offsets[row->found + 1] - stops->details_offsets[row->found];
    return stops->details + stops->details_offsets[row->found];
}

/* Ids, lengths and texts of all rows, whose number is known when the last was said. */
static uint8_t *say_rows(const struct detok_table *table, struct detok_requests *requests,
                         const struct detok_batch *batch, struct detok_row *rows, const uint8_t *cuts,
                         struct detok_report *report, uint8_t *out, const uint8_t *limit) {
    uint8_t *ids_at = out + SHR_FRAME_HEADER_LENGTH + COLUMN_COUNT * SHR_COLUMN_ENTRY_LENGTH;
    uint8_t *text_start = ids_at + (((size_t)report->kept_count * (8 + 4) + 7) & ~(size_t)7);
    uint8_t *end = text_start;
    const uint8_t *ids = batch->token_ids;
    uint32_t kept_count = 0;

    for (uint32_t r = 0; r < batch->row_count; ids += 4 * (size_t)rows[r++].token_count) {
        struct detok_row *row = &rows[r];
        if (row->place == NO_PLACE)
            continue;
        struct detok_request *request = &requests->places[row->place];
        if (request->flags & DETOK_REQUEST_ENDED) {
            row->place = NO_PLACE;
            report->late_count++;
            report->token_count -= row->token_count;
            continue;
        }
        trim_stop_token(request, row, ids);
        uint8_t *start = end;
        if (table != NULL) {
            end = say_row(table, request, row, ids, cuts, start, limit);
            if (end == NULL)
                return NULL;
        } else {
            request->completion_count += row->token_count;
        }
        row->text_length = (uint32_t)(end - start);
        if (row->found != DETOK_NO_STOP) {
            if (row->code == DETOK_FINISH_NONE)
                report->stopped[report->stopped_count++] = request->id;
            row->code = DETOK_FINISH_DETAILS;
            row->value = 0;
        }
        if (row->code != DETOK_FINISH_NONE) {
            request->flags |= DETOK_REQUEST_ENDED;
            report->ended[report->ended_count++] = request->id;
        }
        memcpy(ids_at + 8 * (size_t)kept_count++, &request->id, sizeof request->id);
    }
    if (kept_count < report->kept_count) { /* late rows: the columns before the text are shorter */
        uint8_t *nearer = ids_at + (((size_t)kept_count * (8 + 4) + 7) & ~(size_t)7);
        memmove(nearer, text_start, (size_t)(end - text_start));
        end = nearer + (end - text_start);
        text_start = nearer;
        report->kept_count = kept_count;
    }
    uint8_t *lengths_at = ids_at + 8 * (size_t)kept_count;
    uint8_t *at = lengths_at;
    close_column(out, 0, ids_at, lengths_at);
    for (uint32_t r = 0; r < batch->row_count; r++)
        if (rows[r].place != NO_PLACE) {
            memcpy(at, &rows[r].text_length, 4);
            at += 4;
        }
    close_column(out, 1, lengths_at, at);
    return close_column(out, 2, text_start, end);
}

/* The columns behind the text. */
static uint8_t *say_tail(const struct detok_requests *requests, const struct detok_batch *batch,
                         const struct detok_row *rows, uint8_t *out, uint8_t *at) {
    uint32_t n = batch->row_count;
    uint8_t *from = at;
    int any_finish = 0, any_details = 0;

    for (uint32_t r = 0; r < n; r++)
        if (rows[r].place != NO_PLACE) {
            memcpy(at, &rows[r].shown_count, 4);
            at += 4;
        }
    from = at = close_column(out, 3, from, at);
    const uint8_t *ids = batch->token_ids;
    for (uint32_t r = 0; r < n; ids += 4 * (size_t)rows[r++].token_count)
        if (rows[r].place != NO_PLACE) {
            memcpy(at, ids, 4 * (size_t)rows[r].shown_count);
            at += 4 * (size_t)rows[r].shown_count;
        }
    from = at = close_column(out, 4, from, at);
    for (uint32_t r = 0; r < n; r++)
        if (rows[r].place != NO_PLACE) {
            memcpy(at, &rows[r].token_count, 4);
            at += 4;
        }
    from = at = close_column(out, 5, from, at);
    for (uint32_t r = 0; r < n; r++)
        if (rows[r].place != NO_PLACE) {
            uint32_t length;
            details_of(batch, requests, &rows[r], &length);
            any_finish |= rows[r].code != DETOK_FINISH_NONE;
            any_details |= length > 0;
            *at++ = rows[r].code;
        }
    from = at = close_column(out, 6, from, at);
    memset(out + SHR_FRAME_HEADER_LENGTH + 7 * SHR_COLUMN_ENTRY_LENGTH, 0, 3 * SHR_COLUMN_ENTRY_LENGTH);
    if (any_finish) {
        for (uint32_t r = 0; r < n; r++)
            if (rows[r].place != NO_PLACE) {
                memcpy(at, &rows[r].value, 8);
                at += 8;
            }
        from = at = close_column(out, 7, from, at);
    }
    if (any_details) {
        for (uint32_t r = 0; r < n; r++)
            if (rows[r].place != NO_PLACE) {
                uint32_t length;
                details_of(batch, requests, &rows[r], &length);
                memcpy(at, &length, 4);
                at += 4;
            }
        from = at = close_column(out, 8, from, at);
        for (uint32_t r = 0; r < n; r++)
            if (rows[r].place != NO_PLACE) {
                uint32_t length;
                const uint8_t *details = details_of(batch, requests, &rows[r], &length);
                if (length > 0)
                    memcpy(at, details, length);
                at += length;
            }
        at = close_column(out, 9, from, at);
    }
    return at;
}

int64_t detok_step_write(const struct detok_table *table, struct detok_requests *requests,
                         const struct detok_batch *batch, struct detok_row *rows, const uint8_t *cuts,
                         struct detok_report *report, uint64_t fingerprint, uint8_t *out, uint64_t capacity) {
    if (capacity < report->bound)
        return -ENOBUFS;
    if (report->kept_count == 0)
        return 0;
    const uint8_t *limit = out + (report->bound - report->tail_bound);
    uint8_t *end = say_rows(table, requests, batch, rows, cuts, report, out, limit);
    if (end == NULL)
        return -EFAULT;
    end = say_tail(requests, batch, rows, out, end);
    struct shr_frame_header header = {SHR_FRAME_VERSION, COLUMN_COUNT, report->kept_count, fingerprint};
    memcpy(out, &header, sizeof header);
    for (uint32_t i = 0; i < report->ended_count; i++)
        detok_request_close(requests, report->ended[i]);
    return report->kept_count == 0 ? 0 : end - out;
}

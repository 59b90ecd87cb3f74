#include "shmring/detok.h"

#include <errno.h>
#include <string.h>

#include "detok_core.h"

_Static_assert(sizeof(struct detok_state) == 12, "numpy holds the states as rows of 12 bytes");

static uint8_t *say_replacement(uint8_t *out) {
    out[0] = 0xEF;
    out[1] = 0xBF;
    out[2] = 0xBD;
    return out + DETOK_REPLACEMENT_LENGTH;
}

/* Length of the character that `lead` begins; 0 if no character begins so. */
static unsigned character_length(uint8_t lead) {
    if (lead < 0x80)
        return 1;
    if (lead < 0xC2) /* continuation bytes; C0 and C1 would be overlong */
        return 0;
    if (lead < 0xE0)
        return 2;
    if (lead < 0xF0)
        return 3;
    return lead < 0xF5 ? 4 : 0;
}

/* Can `byte` be number `position` (1..3) of a character that `lead` begins? The second
 * byte is where overlong forms, surrogates and values above U+10FFFF are told. */
static int continues(uint8_t lead, unsigned position, uint8_t byte) {
    uint8_t low = 0x80, high = 0xBF;
    if (position == 1) {
        if (lead == 0xE0)
            low = 0xA0;
        else if (lead == 0xED)
            high = 0x9F;
        else if (lead == 0xF0)
            low = 0x90;
        else if (lead == 0xF4)
            high = 0x8F;
    }
    return byte >= low && byte <= high;
}

/* Bytes from p on that are the beginning of a character, at most the whole of it. */
static unsigned subpart_length(const uint8_t *p, size_t length, unsigned wanted) {
    unsigned n = 1;
    while (n < wanted && n < length && continues(p[0], n, p[n]))
        n++;
    return n;
}

/* Most tokens are shorter than a call of memcpy is long. Two copies that overlap do for 4 to 16
 * bytes, and neither reads nor writes beyond them. */
static void copy(uint8_t *to, const uint8_t *from, size_t length) {
    if (length > 16) {
        memcpy(to, from, length);
    } else if (length >= 8) {
        uint64_t first, last;
        memcpy(&first, from, 8);
        memcpy(&last, from + length - 8, 8);
        memcpy(to, &first, 8);
        memcpy(to + length - 8, &last, 8);
    } else if (length >= 4) {
        uint32_t first, last;
        memcpy(&first, from, 4);
        memcpy(&last, from + length - 4, 4);
        memcpy(to, &first, 4);
        memcpy(to + length - 4, &last, 4);
    } else {
        while (length-- > 0)
            *to++ = *from++;
    }
}

static uint8_t *say_assembled(const struct detok_table *table, const uint8_t *character, unsigned length,
                              uint8_t *out) {
    if (length == table->swap_from_length && memcmp(character, table->swap_from, length) == 0) {
        character = table->swap_to;
        length = table->swap_to_length;
    }
    memcpy(out, character, length);
    return out + length;
}

/* Goes on with the pending character. Returns how many bytes of p went into it. */
static size_t continue_pending(const struct detok_table *table, struct detok_state *state, const uint8_t *p,
                               size_t length, uint8_t **out) {
    uint8_t character[4] = {state->pending[0], state->pending[1], state->pending[2], 0};
    unsigned have = state->pending_length;
    unsigned wanted = character_length(character[0]);
    size_t used = 0;

    while (have < wanted && used < length && continues(character[0], have, p[used]))
        character[have++] = p[used++];

    if (used > 0) /* the request's own bytes are in it now: it answers for it */
        state->flags &= (uint8_t)~DETOK_PROMPT_BYTES;
    if (have == wanted) {
        *out = say_assembled(table, character, have, *out);
        state->pending_length = 0;
    } else if (used == length) {
        memcpy(state->pending, character, sizeof state->pending);
        state->pending_length = (uint8_t)have;
    } else { /* p[used] cannot belong to it */
        if (!(state->flags & DETOK_PROMPT_BYTES))
            *out = say_replacement(*out);
        state->flags &= (uint8_t)~DETOK_PROMPT_BYTES;
        state->pending_length = 0;
    }
    return used;
}

static uint8_t *say_bytes(const struct detok_table *table, struct detok_state *state, const uint8_t *p,
                          size_t length, uint8_t *out) {
    const uint8_t *end = p + length;

    if (state->pending_length > 0)
        p += continue_pending(table, state, p, length, &out);
    while (p < end) {
        unsigned wanted = character_length(*p);
        if (wanted == 0) {
            out = say_replacement(out);
            p++;
            continue;
        }
        unsigned have = subpart_length(p, (size_t)(end - p), wanted);
        if (have == wanted) {
            memcpy(out, p, have);
            out += have;
        } else if (p + have == end) {
            memcpy(state->pending, p, have);
            state->pending_length = (uint8_t)have;
        } else {
            out = say_replacement(out);
        }
        p += have;
    }
    return out;
}

/* Takes what may still be stripped off the start of the text. [start, end) is the first
 * text, or all before it was stripped. */
static uint8_t *strip(const struct detok_table *table, struct detok_state *state, uint8_t *start,
                      uint8_t *end) {
    uint8_t *from = start;
    while (state->strip_left > 0 && from < end) {
        if (*from == table->strip_byte) {
            from++;
            state->strip_left--;
        } else {
            state->strip_left = 0;
        }
    }
    if (from > start)
        memmove(start, from, (size_t)(end - from));
    return end - (from - start);
}

/* Does the id add nothing in this request? Then it is no token of the text at all: it is
 * not the first one, and does not end a character. */
static int left_out(const struct detok_state *state, uint8_t flags) {
    return !(flags & DETOK_ID_KNOWN) || ((flags & DETOK_ID_SPECIAL) && (state->flags & DETOK_SKIP_SPECIAL));
}

static uint8_t id_flags(const struct detok_table *table, int32_t id) {
    /* negative ids become large ones */
    return (uint32_t)id < table->id_count ? table->flags[(uint32_t)id] : 0;
}

/* The text of a known id; as the first token of the text it may be another. */
static const uint8_t *id_text(const struct detok_table *table, const struct detok_state *state, int32_t id,
                              size_t *length) {
    int first = table->first_text != NULL && (state->flags & DETOK_AT_FIRST);
    const uint8_t *text = first ? table->first_text : table->text;
    const uint32_t *offsets = (first ? table->first_offsets : table->text_offsets) + (uint32_t)id;
    *length = offsets[1] - offsets[0];
    return text + offsets[0];
}

uint8_t *detok_say_id(const struct detok_table *table, struct detok_state *state, int32_t id, uint8_t *out) {
    uint8_t flags = id_flags(table, id);
    if (left_out(state, flags)) {
        if (!(flags & DETOK_ID_KNOWN) && state->unknown_ids < UINT32_MAX)
            state->unknown_ids++;
        return out;
    }

    size_t length;
    const uint8_t *text = id_text(table, state, id, &length);
    uint8_t *start = out;
    state->flags &= (uint8_t)~DETOK_AT_FIRST;
    if (state->pending_length == 0 && (flags & DETOK_ID_WHOLE)) {
        copy(out, text, length);
        out += length;
    } else {
        out = say_bytes(table, state, text, length, out);
    }
    return state->strip_left > 0 ? strip(table, state, start, out) : out;
}

static int is_whole(const uint8_t *p, const uint8_t *end) {
    while (p < end) {
        if (*p < 0x80) { /* nearly all of most vocabularies */
            p++;
            continue;
        }
        unsigned wanted = character_length(*p);
        if (wanted == 0 || subpart_length(p, (size_t)(end - p), wanted) != wanted)
            return 0;
        p += wanted;
    }
    return 1;
}

void detok_find_whole(const uint8_t *text, const uint32_t *offsets, uint32_t id_count, uint8_t *whole) {
    for (uint32_t id = 0; id < id_count; id++)
        whole[id] = (uint8_t)is_whole(text + offsets[id], text + offsets[id + 1]);
}

static int texts_check(const struct detok_table *table, const uint8_t *text, const uint32_t *offsets,
                       size_t text_length) {
    if (offsets[0] != 0 || offsets[table->id_count] > text_length)
        return -EINVAL;
    for (uint32_t id = 0; id < table->id_count; id++) {
        /* against the total, too: a fall later on would come too late for this one */
        if (offsets[id] > offsets[id + 1] || offsets[id + 1] > text_length)
            return -EINVAL;
        if ((table->flags[id] & DETOK_ID_WHOLE) && !is_whole(text + offsets[id], text + offsets[id + 1]))
            return -EINVAL;
    }
    return 0;
}

int detok_table_check(const struct detok_table *table, size_t text_length, size_t first_text_length) {
    if (table->id_count > (uint32_t)INT32_MAX + 1u || table->strip_byte >= 0x80 ||
        table->swap_from_length > sizeof table->swap_from || table->swap_to_length > sizeof table->swap_to)
        return -EINVAL;
    if (texts_check(table, table->text, table->text_offsets, text_length) != 0)
        return -EINVAL;
    if (table->first_text == NULL)
        return 0;
    return texts_check(table, table->first_text, table->first_offsets, first_text_length);
}

/* Remembers the last (up to) three bytes of the prompt, of any shape. */
static void remember_last(struct detok_state *state, uint8_t byte) {
    if (state->pending_length == sizeof state->pending) {
        state->pending[0] = state->pending[1];
        state->pending[1] = state->pending[2];
        state->pending_length--;
    }
    state->pending[state->pending_length++] = byte;
}

/* Of the last bytes keeps the incomplete character at their end, if there is one. */
static void keep_incomplete(struct detok_state *state) {
    unsigned count = state->pending_length;
    state->pending_length = 0;
    for (unsigned start = 0; start < count; start++) {
        unsigned rest = count - start;
        unsigned wanted = character_length(state->pending[start]);
        if (wanted > rest && subpart_length(state->pending + start, rest, wanted) == rest) {
            memmove(state->pending, state->pending + start, rest);
            state->pending_length = (uint8_t)rest;
            state->flags |= (uint8_t)DETOK_PROMPT_BYTES;
            return;
        }
    }
}

void detok_open(const struct detok_table *table, struct detok_state *state, int skip_special,
                const int32_t *prompt_tail, size_t prompt_tail_count) {
    size_t skipped =
        prompt_tail_count > DETOK_PROMPT_TAIL_MAX ? prompt_tail_count - DETOK_PROMPT_TAIL_MAX : 0;

    *state = (struct detok_state){.flags = DETOK_OPEN | DETOK_AT_FIRST, .strip_left = table->strip_count};
    if (skip_special)
        state->flags |= (uint8_t)DETOK_SKIP_SPECIAL;
    if (prompt_tail_count >= DETOK_PROMPT_TAIL_MAX) {
        state->flags &= (uint8_t)~DETOK_AT_FIRST;
        state->strip_left = 0;
    }
    for (size_t i = skipped; i < prompt_tail_count; i++) {
        int32_t id = prompt_tail[i];
        if (left_out(state, id_flags(table, id)))
            continue;
        size_t length;
        const uint8_t *text = id_text(table, state, id, &length);
        state->flags &= (uint8_t)~DETOK_AT_FIRST;
        for (size_t k = 0; k < length; k++) {
            if (state->strip_left > 0)
                state->strip_left = text[k] == table->strip_byte ? (uint8_t)(state->strip_left - 1) : 0;
            if (length - k <= sizeof state->pending)
                remember_last(state, text[k]);
        }
    }
    keep_incomplete(state);
}

uint64_t detok_id_bound(const struct detok_table *table, int32_t id) {
    uint8_t flags = id_flags(table, id);
    if (!(flags & DETOK_ID_KNOWN))
        return 0;
    const uint32_t *offsets = table->text_offsets + (uint32_t)id;
    uint64_t length = offsets[1] - offsets[0];
    if (table->first_text != NULL) {
        const uint32_t *first_offsets = table->first_offsets + (uint32_t)id;
        uint64_t first_length = first_offsets[1] - first_offsets[0];
        if (first_length > length)
            length = first_length;
    }
    return DETOK_REPLACEMENT_LENGTH + (flags & DETOK_ID_WHOLE ? length : DETOK_REPLACEMENT_LENGTH * length);
}

uint64_t detok_decode_bound(const struct detok_table *table, const int32_t *token_ids, size_t token_count) {
    uint64_t bound = 0;
    for (size_t i = 0; i < token_count; i++)
        bound += detok_id_bound(table, token_ids[i]);
    return bound;
}

int64_t detok_decode(const struct detok_table *table, struct detok_state *states, size_t state_count,
                     const uint32_t *slots, const uint32_t *counts, size_t row_count,
                     const int32_t *token_ids, size_t token_count, uint8_t *out, size_t capacity,
                     uint32_t *lengths) {
    /* Everything is checked before anything is changed, so a refused batch can be
     * given again, and the loop below needs no check at all. */
    uint64_t count_sum = 0;
    for (size_t row = 0; row < row_count; row++) {
        if (slots[row] >= state_count)
            return -ERANGE;
        if (!(states[slots[row]].flags & DETOK_OPEN))
            return -ENOENT;
        count_sum += counts[row];
    }
    if (count_sum != token_count)
        return -EINVAL;
    uint64_t bound = detok_decode_bound(table, token_ids, token_count);
    if (bound > capacity || bound > UINT32_MAX) /* a row's length must fit */
        return -ENOBUFS;

    uint8_t *end = out;
    for (size_t row = 0; row < row_count; row++) {
        struct detok_state *state = &states[slots[row]];
        uint8_t *start = end;
        for (uint32_t i = 0; i < counts[row]; i++)
            end = detok_say_id(table, state, *token_ids++, end);
        lengths[row] = (uint32_t)(end - start);
    }
    return end - out;
}

int64_t detok_decode_each(const struct detok_table *table, const int32_t *token_ids, size_t token_count,
                          uint8_t *out, size_t capacity, uint32_t *lengths) {
    uint64_t bound = detok_decode_bound(table, token_ids, token_count);
    if (bound > capacity || bound > UINT32_MAX)
        return -ENOBUFS;
    uint8_t *end = out;
    for (size_t i = 0; i < token_count; i++) {
        struct detok_state alone = {.flags = DETOK_OPEN};
        uint8_t *start = end;
        end = detok_say_id(table, &alone, token_ids[i], end);
        end += detok_finish(&alone, end); /* the bound counts three bytes an id for it */
        lengths[i] = (uint32_t)(end - start);
    }
    return end - out;
}

size_t detok_finish(struct detok_state *state, uint8_t out[3]) {
    size_t length = 0;
    if (state->pending_length > 0 && !(state->flags & DETOK_PROMPT_BYTES)) {
        say_replacement(out);
        length = DETOK_REPLACEMENT_LENGTH;
    }
    state->pending_length = 0;
    state->flags &= (uint8_t)~DETOK_PROMPT_BYTES;
    return length;
}

/* A decode step dealt out over the rings of its shards, in one pass over its rows. */
#include "shmring/deal.h"

#include <string.h>

#include "end.h"

void shr_part_claim(shr_part *part, const shr_batch_kind *kind) {
    part->next = 0;
    part->ids = NULL;
    part->answer = SHR_DONE;
    if (part->rows == 0) {
        return;
    }
    const uint64_t n = part->rows;
    const uint64_t lengths[SHR_BATCH_COLUMNS] = {
        n * 8, n * 4, part->tokens * 4, n, part->has_values ? n * 8 : 0, 0, 0};
    struct shr_column_entry entries[SHR_BATCH_COLUMNS];
    uint64_t offset = SHR_FRAME_HEADER_LENGTH + SHR_BATCH_COLUMNS * SHR_COLUMN_ENTRY_LENGTH;
    for (uint32_t i = 0; i < SHR_BATCH_COLUMNS; i++) {
        int is_absent = i > 4 || (i == 4 && !part->has_values);
        entries[i] = is_absent ? (struct shr_column_entry){0, 0}
                               : (struct shr_column_entry){(uint32_t)offset, (uint32_t)lengths[i]};
        offset += shr_padded(lengths[i]);
    }
    part->length = offset;
    uint8_t *payload = NULL;
    part->answer = shr_claim(part->producer, offset, &payload);
    if (part->answer != SHR_DONE) {
        return;
    }
    struct shr_frame_header header = {SHR_FRAME_VERSION, SHR_BATCH_COLUMNS, part->rows, kind->fingerprint};
    memcpy(payload, &header, sizeof header);
    memcpy(payload + SHR_FRAME_HEADER_LENGTH, entries, sizeof entries);
    /* records and columns are 8-aligned in a page-aligned mapping */
    part->ids = (uint64_t *)(void *)(payload + entries[0].offset);
    part->counts = (uint32_t *)(void *)(payload + entries[1].offset);
    part->token_ids = part->next_token = (int32_t *)(void *)(payload + entries[2].offset);
    part->codes = payload + entries[3].offset;
    part->values = part->has_values ? (int64_t *)(void *)(payload + entries[4].offset) : NULL;
    memset(part->codes, 0, n);
}

void shr_part_publish(shr_part *part, const shr_batch_kind *kind) {
    if (part->ids != NULL) {
        shr_commit(part->producer, part->length, kind->type, kind->flags);
        shr_publish(part->producer);
    }
}

uint64_t shr_sum_counts(const uint32_t *counts, uint64_t count) {
    uint64_t sum = 0;
    for (uint64_t i = 0; i < count; i++) {
        sum += counts[i];
    }
    return sum;
}

static void count_rows(const shr_step *step, shr_part *parts, uint32_t shards, uint32_t *shard_of) {
    for (uint32_t s = 0; s < shards; s++) {
        parts[s].rows = 0;
        parts[s].tokens = 0;
        parts[s].has_values = step->values != NULL;
    }
    const uint64_t mask = (shards & (shards - 1)) == 0 ? shards - 1 : 0;
    for (uint32_t i = 0; i < step->rows; i++) {
        uint64_t id = step->ids[i];
        uint32_t s = (uint32_t)(mask != 0 ? id & mask : id % shards);
        shard_of[i] = s;
        parts[s].rows++;
        parts[s].tokens += step->counts[i];
    }
}

static void write_rows(const shr_step *step, shr_part *parts, const uint32_t *shard_of) {
    const int32_t *token = step->token_ids;
    for (uint32_t i = 0; i < step->rows; i++) {
        uint32_t count = step->counts[i];
        shr_part *part = &parts[shard_of[i]];
        if (part->ids != NULL) {
            uint32_t at = part->next++;
            part->ids[at] = step->ids[i];
            part->counts[at] = count;
            if (count == 1) {
                *part->next_token = *token;
            } else {
                memcpy(part->next_token, token, (size_t)count * sizeof *token);
            }
            part->next_token += count;
            if (step->codes != NULL) {
                part->codes[at] = step->codes[i];
            }
            if (step->values != NULL) {
                part->values[at] = step->values[i];
            }
        }
        token += count;
    }
}

uint32_t shr_deal(const shr_step *step, const shr_batch_kind *kind, shr_part *parts, uint32_t shards,
                  uint32_t *shard_of) {
    count_rows(step, parts, shards, shard_of);
    uint32_t left = 0;
    for (uint32_t s = 0; s < shards; s++) {
        shr_part_claim(&parts[s], kind);
        left += parts[s].answer != SHR_DONE;
    }
    write_rows(step, parts, shard_of);
    for (uint32_t s = 0; s < shards; s++) {
        shr_part_publish(&parts[s], kind);
    }
    return left;
}

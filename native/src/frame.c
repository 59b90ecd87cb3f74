/* Frames on their way in: columns copied into one record. */
#include "shmring/frame.h"

#include <string.h>

#include "end.h"

uint64_t shr_frame_length(uint32_t column_count, const void *const *columns, const uint64_t *lengths) {
    uint64_t total = SHR_FRAME_HEADER_LENGTH + (uint64_t)column_count * SHR_COLUMN_ENTRY_LENGTH;
    for (uint32_t i = 0; i < column_count; i++) {
        if (columns[i] != NULL) {
            /* each below 2^32 by this check, at most 64 of them: the sum cannot wrap */
            if (lengths[i] > SHR_RECORD_LENGTH_MAX) {
                return 0;
            }
            total += shr_padded(lengths[i]);
        }
    }
    return total;
}

void shr_frame_write(uint8_t *payload, uint64_t fingerprint, uint32_t rows, uint32_t column_count,
                     const void *const *columns, const uint64_t *lengths) {
    struct shr_frame_header header = {SHR_FRAME_VERSION, (uint16_t)column_count, rows, fingerprint};
    memcpy(payload, &header, sizeof header);
    uint64_t offset = SHR_FRAME_HEADER_LENGTH + (uint64_t)column_count * SHR_COLUMN_ENTRY_LENGTH;
    for (uint32_t i = 0; i < column_count; i++) {
        struct shr_column_entry entry = {0, 0};
        if (columns[i] != NULL) {
            entry = (struct shr_column_entry){(uint32_t)offset, (uint32_t)lengths[i]};
            memcpy(payload + offset, columns[i], lengths[i]);
            offset += shr_padded(lengths[i]);
        }
        memcpy(payload + SHR_FRAME_HEADER_LENGTH + i * SHR_COLUMN_ENTRY_LENGTH, &entry, sizeof entry);
    }
}

int shr_push_frame(shr_producer *p, uint8_t type, uint8_t flags, uint64_t fingerprint, uint32_t rows,
                   uint32_t column_count, const void *const *columns, const uint64_t *lengths, int publish) {
    if (column_count > SHR_COLUMNS_MAX) {
        return SHR_BAD_FRAME;
    }
    uint64_t total = shr_frame_length(column_count, columns, lengths);
    if (total == 0) {
        return SHR_TOO_LARGE;
    }
    uint8_t *payload;
    int answer = shr_claim(p, total, &payload);
    if (answer != SHR_DONE) {
        return answer;
    }
    shr_frame_write(payload, fingerprint, rows, column_count, columns, lengths);
    shr_commit(p, total, type, flags);
    if (publish) {
        shr_publish(p);
    }
    return SHR_DONE;
}

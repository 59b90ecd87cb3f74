/* Frames on their way out: a directory that is checked before it is used. */
#include <string.h>

#include "end.h"
#include "shmring/frame.h"

int shr_check_frame(const uint8_t *payload, uint32_t length, uint64_t fingerprint, uint32_t column_count,
                    uint32_t *rows, struct shr_column_entry *entries) {
    struct shr_frame_header header;
    if (length < SHR_FRAME_HEADER_LENGTH) {
        return SHR_FRAME_TOO_SHORT;
    }
    memcpy(&header, payload, sizeof header);
    if (header.version != SHR_FRAME_VERSION) {
        return SHR_FRAME_BAD_VERSION;
    }
    if (header.fingerprint != fingerprint) {
        return SHR_FRAME_BAD_FINGERPRINT;
    }
    if (header.column_count != column_count || column_count > SHR_COLUMNS_MAX) {
        return SHR_FRAME_BAD_COLUMN_COUNT;
    }
    uint64_t offset = SHR_FRAME_HEADER_LENGTH + (uint64_t)column_count * SHR_COLUMN_ENTRY_LENGTH;
    if (length < offset) {
        return SHR_FRAME_TOO_SHORT;
    }
    /* copied first, checked in the copy: the segment may change under us */
    memcpy(entries, payload + SHR_FRAME_HEADER_LENGTH, column_count * sizeof *entries);
    for (uint32_t i = 0; i < column_count; i++) {
        if (entries[i].offset == 0 && entries[i].length == 0) {
            continue;
        }
        if (entries[i].offset != offset || entries[i].length > length - offset) {
            return SHR_FRAME_BAD_COLUMN;
        }
        offset += shr_padded(entries[i].length);
        if (offset > length) {
            return SHR_FRAME_BAD_COLUMN;
        }
    }
    if (offset != length) {
        return SHR_FRAME_BAD_COLUMN;
    }
    *rows = header.rows;
    return 0;
}

/* Where the columns of a batch frame lie. */
#include <errno.h>

#include "shmring/detok_step.h"
#include "shmring/frame.h"

enum { IDS, COUNTS, TOKENS, CODES, VALUES, DETAILS_LENGTHS, DETAILS, COLUMN_COUNT };

/* A column of one item a row; `optional`: it may be absent. */
static int is_flat(const struct shr_column_entry *entry, uint32_t rows, uint32_t itemsize, int optional) {
    return (optional && entry->offset == 0) || entry->length == (uint64_t)rows * itemsize;
}

int detok_batch_read(struct detok_batch *batch, const uint8_t *payload, uint64_t length,
                     uint64_t fingerprint) {
    struct shr_column_entry entries[COLUMN_COUNT];
    const uint8_t *columns[COLUMN_COUNT];
    uint32_t rows;
    if (length > UINT32_MAX ||
        shr_check_frame(payload, (uint32_t)length, fingerprint, COLUMN_COUNT, &rows, entries) != 0)
        return -EINVAL;
    for (int i = 0; i < COLUMN_COUNT; i++) {
        columns[i] = entries[i].offset == 0 ? NULL : payload + entries[i].offset;
        if (i < VALUES && columns[i] == NULL)
            return -EINVAL;
    }
    if (!is_flat(&entries[IDS], rows, 8, 0) || !is_flat(&entries[COUNTS], rows, 4, 0) ||
        !is_flat(&entries[CODES], rows, 1, 0) || !is_flat(&entries[VALUES], rows, 8, 1) ||
        !is_flat(&entries[DETAILS_LENGTHS], rows, 4, 1) || entries[TOKENS].length % 4 != 0 ||
        (columns[DETAILS] != NULL && columns[DETAILS_LENGTHS] == NULL))
        return -EINVAL;
    batch->request_ids = columns[IDS];
    batch->token_counts = columns[COUNTS];
    batch->token_ids = columns[TOKENS];
    batch->finish_codes = columns[CODES];
    batch->finish_values = columns[VALUES];
    batch->details_lengths = columns[DETAILS_LENGTHS];
    batch->details = columns[DETAILS];
    batch->token_count = entries[TOKENS].length / 4;
    batch->details_length = entries[DETAILS].length;
    batch->row_count = rows;
    return 0;
}

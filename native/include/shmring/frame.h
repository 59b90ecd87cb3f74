/* A frame: a record whose payload is a set of typed columns.
 *
 *    0         2              4          8
 *   +---------+--------------+----------+-------------+----------------------------+-----------
 *   | version | column_count | rows u32 | fingerprint | directory: column_count x  | columns,
 *   |   u16   |     u16      |          |     u64     | {offset u32, length u32}   | 8-aligned
 *   +---------+--------------+----------+-------------+----------------------------+-----------
 *
 * Offsets count from the start of the payload, lengths are bytes; an absent column has offset 0
 * and length 0. Columns follow each other in the order of the schema, padded to 8 bytes.
 */
#ifndef SHMRING_FRAME_H
#define SHMRING_FRAME_H

#include "shmring/ring.h"

#define SHR_FRAME_VERSION 1u
#define SHR_FRAME_HEADER_LENGTH 16u
#define SHR_COLUMN_ENTRY_LENGTH 8u
#define SHR_COLUMNS_MAX 64u

struct shr_frame_header {
    uint16_t version;
    uint16_t column_count;
    uint32_t rows;
    uint64_t fingerprint;
};
struct shr_column_entry {
    uint32_t offset;
    uint32_t length;
};
_Static_assert(sizeof(struct shr_frame_header) == SHR_FRAME_HEADER_LENGTH, "frame header");
_Static_assert(sizeof(struct shr_column_entry) == SHR_COLUMN_ENTRY_LENGTH, "column entry");

/* Write one frame and commit it; publish unless told not to. columns[i] NULL: absent.
 * Copies with the lengths as given: the caller has checked them against its schema. */
int shr_push_frame(shr_producer *p, uint8_t type, uint8_t flags, uint64_t fingerprint, uint32_t rows,
                   uint32_t column_count, const void *const *columns, const uint64_t *lengths, int publish);

/* The same in steps, for a caller that does something else meanwhile: bytes of the payload (0: a
 * column is too long), and the writing of it into claimed room. */
uint64_t shr_frame_length(uint32_t column_count, const void *const *columns, const uint64_t *lengths);
void shr_frame_write(uint8_t *payload, uint64_t fingerprint, uint32_t rows, uint32_t column_count,
                     const void *const *columns, const uint64_t *lengths);

/* Check a payload's directory: all inside the payload, aligned, in order, not overlapping.
 * 0 or the number of what is wrong (see SHR_FRAME_* below). */
#define SHR_FRAME_TOO_SHORT 1
#define SHR_FRAME_BAD_VERSION 2
#define SHR_FRAME_BAD_FINGERPRINT 3
#define SHR_FRAME_BAD_COLUMN_COUNT 4
#define SHR_FRAME_BAD_COLUMN 5
int shr_check_frame(const uint8_t *payload, uint32_t length, uint64_t fingerprint, uint32_t column_count,
                    uint32_t *rows, struct shr_column_entry *entries);

#endif

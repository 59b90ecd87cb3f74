/* A decode step dealt out: each shard's rows written straight into the claim in its ring.
 *
 * The frames are BATCH frames as manager/messages.py declares them: request_ids, token_counts,
 * token_ids, finish_codes, finish_values (optional), and two columns of details, absent here.
 */
#ifndef SHMRING_DEAL_H
#define SHMRING_DEAL_H

#include "shmring/frame.h"

#define SHR_BATCH_COLUMNS 7u

/* What all frames of one kind have in common. */
typedef struct shr_batch_kind {
    uint64_t fingerprint;
    uint8_t type;
    uint8_t flags;
} shr_batch_kind;

/* One shard's part of a step: room for its columns in a claim that is not published yet. */
typedef struct shr_part {
    shr_producer *producer;
    uint32_t rows;
    uint64_t tokens;
    uint64_t length; /* of the payload */
    int has_values;
    int answer; /* SHR_DONE: claimed, then published; else as shr_claim, and nothing was written */
    /* where its columns are in the claim */
    uint64_t *ids;
    uint32_t *counts;
    int32_t *token_ids;
    uint8_t *codes;
    int64_t *values; /* NULL without them */
    uint32_t next;   /* row to be written next */
    int32_t *next_token;
} shr_part;

/* Claim room for part->rows rows and part->tokens tokens, and write all but the columns. Sets
 * part->answer; with no rows it is SHR_DONE and nothing is claimed. Finish codes start as zeros. */
void shr_part_claim(shr_part *part, const shr_batch_kind *kind);
/* Commit and publish what was claimed. */
void shr_part_publish(shr_part *part, const shr_batch_kind *kind);

/* The columns of a step, n rows each. */
typedef struct shr_step {
    uint32_t rows;
    const uint64_t *ids;
    const uint32_t *counts;
    const int32_t *token_ids; /* one row's after the other's */
    const uint8_t *codes;     /* NULL: nobody finished */
    const int64_t *values;    /* NULL: none */
} shr_step;

/* Deal a step to the shard that is `id % shards`. parts[i].producer is set by the caller; `shard_of` has
 * room for a number a row. Every shard with room gets its part, whether the others have or not. Returns
 * how many shards got none; parts[i].answer tells which and why. */
uint32_t shr_deal(const shr_step *step, const shr_batch_kind *kind, shr_part *parts, uint32_t shards,
                  uint32_t *shard_of);

/* The sum of counts. */
uint64_t shr_sum_counts(const uint32_t *counts, uint64_t count);

#endif

/* The rows of a running batch: ids, shards and places, kept up at the same cost whatever their number.
 *
 * A row is a request's place in the engine's own order. Each shard has its ids, and the row of each, back
 * to back, in the order of nothing: what leaves is replaced by the last.
 *
 * Invariant, for every row r with id i and shard s = i % shards: parts[s].ids[place[r]] == i,
 * parts[s].rows[place[r]] == r, and the table's slot[r] holds i and r. */
#ifndef SHMRING_RUNNING_ROWS_H
#define SHMRING_RUNNING_ROWS_H

#include <stdint.h>

#define RUNNING_ROWS_MAX (1U << 30)

typedef struct {
    uint64_t *ids;
    uint32_t *rows;
    uint32_t count;
    uint32_t capacity;
} RunningPart;

typedef struct {
    uint32_t shards;
    int closes_up;
    RunningPart *parts;
    uint32_t rows;
    uint32_t capacity; /* of the three below */
    uint64_t *ids;
    uint32_t *place; /* in its part */
    uint32_t *slot;  /* in the table */
    /* open addressing, linear, at most half full; id 0 is an empty slot, and no request's */
    uint64_t *table_ids;
    uint32_t *table_rows;
    uint32_t table_mask;
} RunningRows;

static inline uint32_t running_shard_of(const RunningRows *self, uint64_t id) {
    return (uint32_t)(id % self->shards);
}

/* 0, or -1 with an exception. */
int running_rows_init(RunningRows *self, uint32_t shards, int closes_up);
void running_rows_free(RunningRows *self);
/* The request takes the next row; 0, or -1 with an exception. */
int running_rows_add(RunningRows *self, uint64_t id);
/* The row of a request, or -1. */
int64_t running_rows_find(const RunningRows *self, uint64_t id);
/* `rows` are sorted, each once. */
void running_rows_remove(RunningRows *self, const uint32_t *rows, uint32_t count);
/* Down to so many, from the end. */
void running_rows_cut(RunningRows *self, uint32_t rows);

#endif

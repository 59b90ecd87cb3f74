/* The rows of a running batch. See running_rows.h. */
#include "running_rows.h"

#include <string.h>

#include "egress.h"

#define ROWS_MIN 64U

/* Fibonacci hashing: ids are counted up, so their low bits alone would do, but they may come strided. */
static uint32_t home_of(const RunningRows *self, uint64_t id) {
    return (uint32_t)((id * 0x9E3779B97F4A7C15ULL) >> 32) & self->table_mask;
}

/* The slot of an id, or the empty one where it would be. */
static uint32_t find(const RunningRows *self, uint64_t id) {
    uint32_t at = home_of(self, id);
    while (self->table_ids[at] != id && self->table_ids[at] != 0) {
        at = (at + 1) & self->table_mask;
    }
    return at;
}

/* Empty a slot and move up what was pushed beyond it, so that no search ends too early. */
static void forget_slot(RunningRows *self, uint32_t hole) {
    uint32_t at = hole;
    for (;;) {
        at = (at + 1) & self->table_mask;
        uint64_t id = self->table_ids[at];
        if (id == 0) {
            break;
        }
        if (((at - home_of(self, id)) & self->table_mask) >= ((at - hole) & self->table_mask)) {
            self->table_ids[hole] = id;
            self->table_rows[hole] = self->table_rows[at];
            self->slot[self->table_rows[hole]] = hole;
            hole = at;
        }
    }
    self->table_ids[hole] = 0;
}

static int grow_table(RunningRows *self, uint32_t slots) {
    uint64_t *ids = PyMem_Calloc(slots, sizeof *ids);
    uint32_t *rows = PyMem_Calloc(slots, sizeof *rows);
    if (ids == NULL || rows == NULL) {
        PyMem_Free(ids);
        PyMem_Free(rows);
        PyErr_NoMemory();
        return -1;
    }
    PyMem_Free(self->table_ids);
    PyMem_Free(self->table_rows);
    self->table_ids = ids;
    self->table_rows = rows;
    self->table_mask = slots - 1;
    for (uint32_t row = 0; row < self->rows; row++) {
        uint32_t at = find(self, self->ids[row]);
        self->table_ids[at] = self->ids[row];
        self->table_rows[at] = row;
        self->slot[row] = at;
    }
    return 0;
}

static int grow_rows(RunningRows *self) {
    uint32_t capacity = self->capacity == 0 ? ROWS_MIN : self->capacity * 2;
    if (capacity > RUNNING_ROWS_MAX) {
        PyErr_NoMemory();
        return -1;
    }
    void *grown;
    if ((grown = egress_grow(self->ids, capacity, sizeof *self->ids)) == NULL) {
        return -1;
    }
    self->ids = grown;
    if ((grown = egress_grow(self->place, capacity, sizeof *self->place)) == NULL) {
        return -1;
    }
    self->place = grown;
    if ((grown = egress_grow(self->slot, capacity, sizeof *self->slot)) == NULL) {
        return -1;
    }
    self->slot = grown;
    if (grow_table(self, capacity * 2) < 0) {
        return -1;
    }
    self->capacity = capacity;
    return 0;
}

static int grow_part(RunningPart *part) {
    uint32_t capacity = part->capacity == 0 ? ROWS_MIN : part->capacity * 2;
    void *grown;
    if ((grown = egress_grow(part->ids, capacity, sizeof *part->ids)) == NULL) {
        return -1;
    }
    part->ids = grown;
    if ((grown = egress_grow(part->rows, capacity, sizeof *part->rows)) == NULL) {
        return -1;
    }
    part->rows = grown;
    part->capacity = capacity;
    return 0;
}

int running_rows_add(RunningRows *self, uint64_t id) {
    if (id == 0) {
        PyErr_SetString(PyExc_ValueError, "request id 0 is nobody's: request_id=0");
        return -1;
    }
    if (self->rows == self->capacity && grow_rows(self) < 0) {
        return -1;
    }
    RunningPart *part = &self->parts[running_shard_of(self, id)];
    if (part->count == part->capacity && grow_part(part) < 0) {
        return -1;
    }
    uint32_t at = find(self, id);
    if (self->table_ids[at] == id) {
        PyErr_Format(PyExc_ValueError, "request runs already: request_id=%llu", (unsigned long long)id);
        return -1;
    }
    uint32_t row = self->rows++;
    self->table_ids[at] = id;
    self->table_rows[at] = row;
    self->slot[row] = at;
    self->ids[row] = id;
    self->place[row] = part->count;
    part->ids[part->count] = id;
    part->rows[part->count] = row;
    part->count++;
    return 0;
}

/* Out of its part and the table; its row stays, to be filled. */
static void forget(RunningRows *self, uint32_t row) {
    RunningPart *part = &self->parts[running_shard_of(self, self->ids[row])];
    uint32_t place = self->place[row], last = --part->count;
    if (place != last) {
        part->ids[place] = part->ids[last];
        part->rows[place] = part->rows[last];
        self->place[part->rows[place]] = place;
    }
    forget_slot(self, self->slot[row]);
}

static void move_row(RunningRows *self, uint32_t from, uint32_t to) {
    self->ids[to] = self->ids[from];
    self->place[to] = self->place[from];
    self->slot[to] = self->slot[from];
    self->parts[running_shard_of(self, self->ids[to])].rows[self->place[to]] = to;
    self->table_rows[self->slot[to]] = to;
}

/* `rows` are sorted, each once. */
void running_rows_remove(RunningRows *self, const uint32_t *rows, uint32_t count) {
    for (uint32_t i = 0; i < count; i++) {
        forget(self, rows[i]);
    }
    if (!self->closes_up) {
        for (uint32_t i = count; i-- > 0;) {
            uint32_t last = --self->rows;
            if (rows[i] != last) {
                move_row(self, last, rows[i]);
            }
        }
        return;
    }
    uint32_t to = rows[0], next = 0;
    for (uint32_t from = rows[0]; from < self->rows; from++) {
        if (next < count && rows[next] == from) {
            next++;
        } else {
            move_row(self, from, to++);
        }
    }
    self->rows = to;
}

int64_t running_rows_find(const RunningRows *self, uint64_t id) {
    uint32_t at = find(self, id);
    return id == 0 || self->table_ids[at] != id ? -1 : (int64_t)self->table_rows[at];
}

void running_rows_cut(RunningRows *self, uint32_t rows) {
    while (self->rows > rows) {
        forget(self, self->rows - 1);
        self->rows--;
    }
}

int running_rows_init(RunningRows *self, uint32_t shards, int closes_up) {
    memset(self, 0, sizeof *self);
    self->shards = shards;
    self->closes_up = closes_up;
    self->parts = PyMem_Calloc(shards, sizeof *self->parts);
    if (self->parts == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    return grow_rows(self);
}

void running_rows_free(RunningRows *self) {
    for (uint32_t s = 0; self->parts != NULL && s < self->shards; s++) {
        PyMem_Free(self->parts[s].ids);
        PyMem_Free(self->parts[s].rows);
    }
    PyMem_Free(self->parts);
    PyMem_Free(self->ids);
    PyMem_Free(self->place);
    PyMem_Free(self->slot);
    PyMem_Free(self->table_ids);
    PyMem_Free(self->table_rows);
}

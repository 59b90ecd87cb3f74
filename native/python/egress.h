/* What the files of the extension `manager._egress` share. */
#ifndef SHMRING_EGRESS_H
#define SHMRING_EGRESS_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
/* after it: */
#include "shmring/deal.h"

extern PyTypeObject Dealer_Type;
extern PyTypeObject RunningCore_Type;

/* The rings of all shards, and what their frames are. */
typedef struct {
    PyObject_HEAD PyObject *producers; /* keeps them alive */
    shr_batch_kind kind;
    uint32_t shards;
    shr_part *parts;
    uint32_t *shard_of; /* scratch: a number a row */
    uint32_t shard_of_capacity;
} Dealer;

/* numpy's C interface, for both files; 0, or -1 with an exception. */
int egress_init_dealer(void);
int egress_init_running(void);

/* The shards whose part was not written, as a list; None if there are none. */
PyObject *egress_left(const Dealer *dealer, uint32_t left);
/* A larger block, or NULL with an exception and the old one untouched. */
void *egress_grow(void *block, size_t count, size_t itemsize);

#endif

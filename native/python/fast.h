/* What the files of the extension `shmring._fast` share. */
#ifndef SHMRING_FAST_H
#define SHMRING_FAST_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
/* after it: */
#include <structmember.h>

#include "shmring/frame.h"
#include "shmring/ring.h"

extern PyTypeObject ProducerCore_Type;
extern PyTypeObject ConsumerCore_Type;
extern PyTypeObject Window_Type;
extern PyTypeObject Record_Type;
extern PyTypeObject FrameLayout_Type;

/* Bytes of a mapping, given out through the buffer protocol. `keep` keeps the memory mapped for as
 * long as a view of it lives. A record also knows its consumer, and is refused once released. */
typedef struct {
    PyObject_HEAD PyObject *keep;
    uint8_t *start;
    Py_ssize_t length;
    int readonly;
} Window;

typedef struct {
    PyObject_HEAD shr_consumer end;
    PyObject *keep;
    PyObject *weakrefs;
} ConsumerCore;

typedef struct {
    PyObject_HEAD shr_producer end;
    PyObject *keep;
    PyObject *weakrefs;
} ProducerCore;

typedef struct {
    PyObject_HEAD ConsumerCore *consumer;
    uint8_t *start;
    uint64_t releases; /* of the consumer when it was drained */
    uint32_t length;
    uint8_t type;
    uint8_t flags;
} Record;

enum column_shape { COLUMN_FLAT = 0, COLUMN_RAGGED = 1, COLUMN_FREE = 2 };

struct column {
    uint32_t itemsize;
    uint32_t counts_index; /* ragged: the column that holds one count a row */
    uint8_t shape;
    uint8_t optional;
    char kind;          /* i u f b V */
    const char *format; /* V: the buffer format that says what its fields are; owned by `entries` */
};

typedef struct {
    PyObject_HEAD uint64_t fingerprint;
    uint32_t column_count;
    uint8_t type;
    PyObject *names;   /* tuple of str, for messages */
    PyObject *entries; /* what it was made of */
    struct column columns[SHR_COLUMNS_MAX];
} FrameLayout;

/* Set the exception that shmring.errors makes of a negative answer; returns NULL. */
PyObject *fast_raise(int answer, uint64_t position, uint64_t value, uint64_t length, uint64_t length_max);
PyObject *fast_raise_column(const FrameLayout *layout, uint32_t column, const char *what);

Window *fast_window(PyObject *keep, uint8_t *start, uint64_t length, int readonly);

/* push_frame(layout, rows, columns, publish=True) */
PyObject *fast_push_frame(ProducerCore *self, PyObject *const *args, Py_ssize_t nargs);

#endif

/* A schema and a frame read with it, for the files that are about them. */
#ifndef SHMRING_FRAME_VIEW_H
#define SHMRING_FRAME_VIEW_H

#include "fast.h"
/* after Python.h: */
#define NPY_NO_DEPRECATED_API NPY_1_7_API_VERSION
#include <numpy/arrayobject.h>

enum column_shape { COLUMN_FLAT = 0, COLUMN_RAGGED = 1, COLUMN_FREE = 2 };

struct column {
    PyArray_Descr *descr;
    uint32_t itemsize;
    uint32_t counts_index; /* ragged: an earlier column of counts, itself flat or ragged */
    uint8_t shape;
    uint8_t optional;
    char kind;          /* i u f b V */
    const char *format; /* V: the buffer format that says what its fields are; owned by `entries` */
};

typedef struct {
    PyObject_HEAD uint64_t fingerprint;
    uint32_t column_count;
    uint8_t type;
    PyObject *names;   /* tuple of str */
    PyObject *indexes; /* dict from them */
    PyObject *entries; /* what it was made of */
    struct column columns[SHR_COLUMNS_MAX];
} FrameLayout;

struct place {
    uint32_t offset; /* in the payload; 0: the column is absent */
    uint32_t items;
};

typedef struct {
    PyObject_VAR_HEAD FrameLayout *layout;
    PyObject *record; /* keeps the bytes: a Record, or a memoryview of any other buffer */
    const uint8_t *payload;
    uint32_t rows;
    struct place places[]; /* one a column */
} Frame;

/* Raise ColumnError. `facts` is what follows the column's name, or NULL; takes over the reference. */
PyObject *fast_raise_column(const FrameLayout *layout, uint32_t column, const char *what, PyObject *facts);
/* 0, or -1 with an exception that names the first column whose length is wrong. An absent column's
 * bytes are NULL. */
int fast_check_lengths(const FrameLayout *layout, uint32_t rows, const void *const *bytes,
                       const uint64_t *lengths);
/* push(producer, rows, *columns, publish=True, flags=0, timeout_s=0), of a FrameLayout */
PyObject *fast_layout_push(FrameLayout *self, PyObject *const *args, Py_ssize_t nargs, PyObject *names);

#endif

/* What the files of the extension `shmring._fast` share. */
#ifndef SHMRING_FAST_H
#define SHMRING_FAST_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
/* after it: */
#include <structmember.h>

#include "shmring/frame.h"
#include "shmring/ring.h"

/* A copy of so many bytes lets other threads run meanwhile. Holding the GIL for it would be 0.1 to 0.3 ms;
 * giving it up may cost a switch interval of 5 ms when another thread is busy, so smaller ones keep it. */
#define COPY_RELEASES_GIL (4U << 20)

extern PyTypeObject ProducerCore_Type;
extern PyTypeObject ConsumerCore_Type;
extern PyTypeObject Window_Type;
extern PyTypeObject Record_Type;
extern PyTypeObject FrameLayout_Type;
extern PyTypeObject Frame_Type;

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
    uint64_t spin_ns; /* before a wait sleeps */
    int is_copying;   /* a thread copies out without the GIL: nobody else may use this end */
} ConsumerCore;

typedef struct {
    PyObject_HEAD shr_producer end;
    PyObject *keep;
    PyObject *weakrefs;
    uint64_t spin_ns;
    int is_copying;
} ProducerCore;

typedef struct {
    PyObject_HEAD ConsumerCore *consumer;
    uint8_t *start;
    uint64_t releases; /* of the consumer when it was drained */
    uint32_t length;
    uint8_t type;
    uint8_t flags;
} Record;

static inline int fast_is_released(const Record *record) {
    return record->releases != record->consumer->end.releases;
}

/* Set the exception that shmring.errors makes of a negative answer; returns NULL. */
PyObject *fast_raise(int answer, uint64_t position, uint64_t value, uint64_t length, uint64_t length_max);
/* As fast_raise, with what the producer knows of it. `length` is the payload's. */
PyObject *fast_raise_producer(const ProducerCore *producer, int answer, uint64_t length);
PyObject *fast_raise_copying(void);
PyObject *fast_raise_released(void);

/* Copy; without the GIL if it is long, with *is_copying set meanwhile. */
void fast_copy(void *to, const void *from, uint64_t length, int *is_copying);

/* A wait of several slices, so that signals are seen and a dead peer is noticed. */
typedef struct {
    uint64_t until_ns; /* CLOCK_MONOTONIC; UINT64_MAX: for ever, 0: do not wait */
    uint64_t spin_ns;  /* in the next slice */
} Deadline;

/* `timeout` is NULL or None (for ever) or seconds. 0, or -1 with an exception. */
int fast_deadline(PyObject *timeout, uint64_t spin_ns, Deadline *out);
/* Sleep until something is up, at most a slice; 1 slept, 0 time is over, -1 with an exception.
 * One of the two ends is NULL. */
int fast_wait_slice(Deadline *deadline, shr_consumer *consumer, shr_producer *producer, uint64_t need);

/* The values of arguments given by position or by name; those not given stay NULL. -1 with an exception. */
int fast_arguments(const char *function, PyObject *const *args, Py_ssize_t nargs, PyObject *names,
                   const char *const *parameters, size_t parameter_count, PyObject **values);
/* One byte named `what`, 0 to 255; -1 with an exception. */
int fast_byte(PyObject *value, const char *what);

Window *fast_window(PyObject *keep, uint8_t *start, uint64_t length, int readonly);

/* push_frame(layout, rows, columns, publish=True, flags=0, timeout_s=0) */
PyObject *fast_push_frame(ProducerCore *self, PyObject *const *args, Py_ssize_t nargs);
/* Set up numpy's C interface, once for each file that uses it; 0, or -1 with an exception. */
int fast_layout_init(void);
int fast_push_init(void);
int fast_view_init(void);

#endif

/* Frames on their way in: columns taken as they lie, checked, and copied into the ring in one call. */
#include <string.h>

#include "frame_view.h"
#include "shmring/park.h"

int fast_push_init(void) {
    import_array1(-1);
    return 0;
}

/* The kind of numpy's dtype that a buffer format stands for; 0 if it is none of ours. */
static char kind_of(const char *format) {
    if (format == NULL) {
        return 'u';
    }
    if (*format == '<' || *format == '=' || *format == '@') {
        format++;
    }
    if (*format == 'T') {
        return 'V';
    }
    if (format[0] == '\0' || format[1] != '\0') {
        return 0;
    }
    if (strchr("bhilq", *format)) {
        return 'i';
    }
    if (strchr("BHILQ", *format)) {
        return 'u';
    }
    if (strchr("efd", *format)) {
        return 'f';
    }
    return *format == '?' ? 'b' : 0;
}

/* The next character of a structure's format, as it would be if written in standard sizes: numpy marks
 * the byte order of a field only if the dtype was made with one, and calls eight bytes `l` or `q`. */
static char next_of(const char **at, int *in_name) {
    while (!*in_name && (**at == '<' || **at == '=' || **at == '@')) {
        (*at)++;
    }
    char c = **at;
    if (c != '\0') {
        (*at)++;
    }
    if (c == ':') {
        *in_name = !*in_name;
    }
    return *in_name ? c : (char)(c == 'l' ? 'q' : c == 'L' ? 'Q' : c);
}

static int same_format(const char *a, const char *b) {
    int name_a = 0, name_b = 0;
    for (;;) {
        char c = next_of(&a, &name_a);
        if (c != next_of(&b, &name_b)) {
            return 0;
        }
        if (c == '\0') {
            return 1;
        }
    }
}

/* A column on its way in: bytes and length, and what has to be given back afterwards. */
struct source {
    const void *bytes;
    uint64_t length;
    Py_buffer view; /* obj NULL: nothing to give back */
};

/* The buffer protocol makes a format string for every array, ten times the work of looking at it. */
static inline int take_array(const struct column *c, PyObject *from, struct source *out) {
    if (!PyArray_Check(from)) {
        return 0;
    }
    PyArrayObject *array = (PyArrayObject *)from;
    if (!PyArray_IS_C_CONTIGUOUS(array) || !PyArray_ISNOTSWAPPED(array) || c->kind == 'V' ||
        PyArray_DESCR(array)->kind != c->kind || PyArray_ITEMSIZE(array) != (int)c->itemsize) {
        return 0; /* the buffer protocol will say what is wrong, if anything is */
    }
    out->bytes = PyArray_DATA(array);
    out->length = (uint64_t)PyArray_NBYTES(array);
    return 1;
}

/* Raise with both dtypes; what is no array has the format of its buffer. */
__attribute__((cold, noinline)) static void raise_dtype(const FrameLayout *layout, uint32_t i, PyObject *from,
                                                        const char *format) {
    PyObject *wanted = (PyObject *)layout->columns[i].descr;
    PyObject *facts =
        PyArray_Check(from)
            ? PyUnicode_FromFormat(", dtype=%S, wanted=%S", PyArray_DESCR((PyArrayObject *)from), wanted)
            : PyUnicode_FromFormat(", format=%s, wanted=%S", format == NULL ? "B" : format, wanted);
    if (facts != NULL) {
        fast_raise_column(layout, i, "column has another dtype than the schema", facts);
    }
}

static int take_column(const FrameLayout *layout, uint32_t i, PyObject *from, struct source *out) {
    const struct column *c = &layout->columns[i];
    out->view.obj = NULL;
    if (from == Py_None) {
        out->bytes = NULL;
        out->length = 0;
        return 0;
    }
    if (take_array(c, from, out)) {
        return 0;
    }
    if (PyObject_GetBuffer(from, &out->view, PyBUF_FORMAT | PyBUF_C_CONTIGUOUS) < 0) {
        PyErr_Clear();
        if (PyArray_Check(from) && PyArray_IS_C_CONTIGUOUS((PyArrayObject *)from)) {
            raise_dtype(layout, i, from, NULL); /* numpy has no format for some, as for times */
            return -1;
        }
        fast_raise_column(layout, i,
                          PyObject_CheckBuffer(from)
                              ? "column is not one block of memory: pass a C-contiguous array"
                              : "column is no buffer: pass a numpy array",
                          NULL);
        return -1;
    }
    char kind = kind_of(out->view.format);
    if (kind != c->kind || out->view.itemsize != (Py_ssize_t)c->itemsize ||
        (c->format != NULL && !same_format(out->view.format, c->format))) {
        raise_dtype(layout, i, from, out->view.format);
        PyBuffer_Release(&out->view);
        return -1;
    }
    out->bytes = out->view.buf == NULL ? (const void *)"" : out->view.buf;
    out->length = (uint64_t)out->view.len;
    return 0;
}

/* Claim, copy, commit. A long copy lets other threads run; the claim stays open meanwhile. */
static int write_frame(ProducerCore *producer, const FrameLayout *layout, uint32_t rows,
                       const void *const *bytes, const uint64_t *lengths, uint8_t flags, int publish,
                       uint64_t *total) {
    shr_producer *end = &producer->end;
    *total = shr_frame_length(layout->column_count, bytes, lengths);
    if (*total == 0) {
        return SHR_TOO_LARGE;
    }
    uint8_t *payload;
    int answer = shr_claim(end, *total, &payload);
    if (answer != SHR_DONE) {
        return answer;
    }
    if (*total < COPY_RELEASES_GIL) {
        shr_frame_write(payload, layout->fingerprint, rows, layout->column_count, bytes, lengths);
    } else {
        producer->is_copying = 1;
        Py_BEGIN_ALLOW_THREADS;
        shr_frame_write(payload, layout->fingerprint, rows, layout->column_count, bytes, lengths);
        Py_END_ALLOW_THREADS;
        producer->is_copying = 0;
    }
    answer = shr_commit(end, *total, layout->type, flags);
    if (answer == SHR_DONE && publish) {
        shr_publish(end);
    }
    return answer;
}

/* As shr_frame_length, for a message: of a frame that can be no record as well. */
__attribute__((cold, noinline)) static uint64_t length_of(uint32_t column_count, const void *const *bytes,
                                                          const uint64_t *lengths) {
    uint64_t total = SHR_FRAME_HEADER_LENGTH + (uint64_t)column_count * SHR_COLUMN_ENTRY_LENGTH;
    for (uint32_t i = 0; i < column_count; i++) {
        total += bytes[i] == NULL ? 0 : (lengths[i] + 7) & ~(uint64_t)7;
    }
    return total;
}

/* What a push was asked to do, its arguments checked. */
struct request {
    PyObject *const *columns;
    uint32_t rows;
    int publish;
    uint8_t flags;
    Deadline deadline;
};

/* Rows that are no plain int that fits, with an exception set: 0 if they are an integer of another type. */
__attribute__((cold, noinline)) static int take_rows(PyObject *given, unsigned long *rows) {
    PyErr_Clear();
    PyObject *index = PyNumber_Index(given);
    if (index != NULL) {
        *rows = PyLong_AsUnsignedLong(index);
        Py_DECREF(index);
    }
    if (index != NULL && !PyErr_Occurred()) {
        return 0;
    }
    int no_integer = PyErr_ExceptionMatches(PyExc_TypeError);
    if (no_integer || PyErr_ExceptionMatches(PyExc_OverflowError)) {
        PyErr_Clear();
        PyErr_Format(no_integer ? PyExc_TypeError : PyExc_ValueError, "rows is a count: rows=%R, max=%lu",
                     given, (unsigned long)UINT32_MAX);
    }
    return -1;
}

static int take_request(ProducerCore *producer, const FrameLayout *layout, PyObject *rows_given,
                        PyObject *const *columns, Py_ssize_t column_count, PyObject *const values[3],
                        struct request *out) {
    unsigned long rows = PyLong_AsUnsignedLong(rows_given);
    if (rows == (unsigned long)-1 && PyErr_Occurred() && take_rows(rows_given, &rows) < 0) {
        return -1;
    }
    int publish = values[0] == NULL ? 1 : PyObject_IsTrue(values[0]);
    int flags = values[1] == NULL ? 0 : fast_byte(values[1], "flags");
    if (publish < 0 || (flags < 0 && PyErr_Occurred())) {
        return -1;
    }
    if (rows > UINT32_MAX || column_count != (Py_ssize_t)layout->column_count) {
        PyErr_Format(PyExc_ValueError,
                     "frame does not fit its schema: rows=%lu, columns=%zd, schema_columns=%u", rows,
                     column_count, layout->column_count);
        return -1;
    }
    *out = (struct request){columns, (uint32_t)rows, publish, (uint8_t)flags, {0, 0}};
    return values[2] == NULL ? 0 : fast_deadline(values[2], producer->spin_ns, &out->deadline);
}

/* Write the frame if there is room; what the ring answered, or -1 with an exception. */
static int push_now(ProducerCore *producer, FrameLayout *layout, const struct request *request,
                    uint64_t *total) {
    struct source sources[SHR_COLUMNS_MAX];
    const void *bytes[SHR_COLUMNS_MAX];
    uint64_t lengths[SHR_COLUMNS_MAX];
    /* all that is read is written below; a schema without columns is what the compiler thinks of */
    bytes[0] = NULL;
    lengths[0] = 0;
    uint32_t taken = 0;
    int answer = -1;
    while (taken < layout->column_count) {
        if (take_column(layout, taken, request->columns[taken], &sources[taken]) < 0) {
            goto done;
        }
        bytes[taken] = sources[taken].bytes;
        lengths[taken] = sources[taken].length;
        taken++;
    }
    if (fast_check_lengths(layout, request->rows, bytes, lengths) < 0) {
        goto done;
    }
    answer =
        write_frame(producer, layout, request->rows, bytes, lengths, request->flags, request->publish, total);
    if (answer < 0) {
        fast_raise_producer(producer, answer,
                            *total != 0 ? *total : length_of(layout->column_count, bytes, lengths));
        answer = -1;
    }
done:
    for (uint32_t i = 0; i < taken; i++) {
        if (sources[i].view.obj != NULL) {
            PyBuffer_Release(&sources[i].view);
        }
    }
    return answer;
}

/* As push_now, after waiting for room. The columns are looked at anew after each slice: others have run. */
static int push_waiting(ProducerCore *producer, FrameLayout *layout, struct request *request,
                        uint64_t total) {
    shr_producer *end = &producer->end;
    int answer = SHR_NOT_NOW;
    while (answer == SHR_NOT_NOW) {
        /* refused where what is unpublished leaves no room to wait for; each time, for columns grow */
        PyObject *checked =
            PyObject_CallMethod((PyObject *)producer, "_check_wait", "K", (unsigned long long)total);
        Py_XDECREF(checked);
        if (checked == NULL || fast_wait_slice(&request->deadline, NULL, end, total) <= 0) {
            break;
        }
        answer = push_now(producer, layout, request, &total);
    }
    shr_wait_over(NULL, 0, &end, 1);
    return PyErr_Occurred() ? -1 : answer;
}

static PyObject *push_columns(ProducerCore *producer, FrameLayout *layout, PyObject *rows,
                              PyObject *const *columns, Py_ssize_t column_count, PyObject *const values[3]) {
    struct request request;
    uint64_t total = 0;
    if (take_request(producer, layout, rows, columns, column_count, values, &request) < 0) {
        return NULL;
    }
    int answer = push_now(producer, layout, &request, &total);
    if (answer == SHR_NOT_NOW && request.deadline.until_ns != 0) {
        answer = push_waiting(producer, layout, &request, total);
    }
    return answer < 0 ? NULL : PyBool_FromLong(answer);
}

PyObject *fast_push_frame(ProducerCore *self, PyObject *const *args, Py_ssize_t nargs) {
    if (nargs < 3 || nargs > 6 || !PyObject_TypeCheck(args[0], &FrameLayout_Type) ||
        !PyTuple_Check(args[2])) {
        PyErr_SetString(
            PyExc_TypeError,
            "push_frame takes a FrameLayout, rows, a tuple of columns, publish, flags, timeout_s");
        return NULL;
    }
    PyObject *const values[3] = {nargs < 4 ? NULL : args[3], nargs < 5 ? NULL : args[4],
                                 nargs < 6 ? NULL : args[5]};
    return push_columns(self, (FrameLayout *)args[0], args[1], ((PyTupleObject *)args[2])->ob_item,
                        PyTuple_GET_SIZE(args[2]), values);
}

/* What stands in for a producer in a test, or wraps one, has a push_frame of its own. */
static PyObject *push_elsewhere(FrameLayout *self, PyObject *const *args, Py_ssize_t nargs,
                                PyObject *const values[3]) {
    PyObject *publish = values[0] == NULL ? Py_True : values[0];
    int flags = values[1] == NULL ? 0 : fast_byte(values[1], "flags");
    if (flags < 0) {
        return NULL;
    }
    PyObject *columns = PyTuple_New(nargs - 2);
    if (columns == NULL) {
        return NULL;
    }
    for (Py_ssize_t i = 2; i < nargs; i++) {
        PyTuple_SET_ITEM(columns, i - 2, Py_NewRef(args[i]));
    }
    /* not handed over by "N": where there is no such method, nobody would take it */
    PyObject *answer = values[2] == NULL ? PyObject_CallMethod(args[0], "push_frame", "OOOOi", self, args[1],
                                                               columns, publish, flags)
                                         : PyObject_CallMethod(args[0], "push_frame", "OOOOiO", self, args[1],
                                                               columns, publish, flags, values[2]);
    Py_DECREF(columns);
    return answer;
}

/* push(producer, rows, *columns, publish=True, flags=0, timeout_s=0) */
PyObject *fast_layout_push(FrameLayout *self, PyObject *const *args, Py_ssize_t nargs, PyObject *names) {
    static const char *const parameters[] = {"publish", "flags", "timeout_s"};
    PyObject *values[3] = {NULL, NULL, NULL};
    if (nargs < 2) {
        PyErr_SetString(PyExc_TypeError, "push takes a producer, rows and the columns");
        return NULL;
    }
    if (names != NULL && fast_arguments("push", args + nargs, 0, names, parameters, 3, values) < 0) {
        return NULL;
    }
    if (!PyObject_TypeCheck(args[0], &ProducerCore_Type)) {
        return push_elsewhere(self, args, nargs, values);
    }
    return push_columns((ProducerCore *)args[0], self, args[1], args + 2, nargs - 2, values);
}

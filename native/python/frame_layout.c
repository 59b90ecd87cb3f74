/* FrameLayout: what the columns of a frame must be, checked on the way in and on the way out. */
#include <string.h>

#include "frame_view.h"

int fast_layout_init(void) {
    import_array1(-1);
    return 0;
}

/* Raise ColumnError. `facts` is what follows the column's name, or NULL; takes over the reference. */
__attribute__((cold, noinline)) static PyObject *raise_column(const FrameLayout *layout, uint32_t column,
                                                              const char *what, PyObject *facts) {
    PyObject *name = PyTuple_GetItem(layout->names, (Py_ssize_t)column);
    PyObject *errors = name == NULL ? NULL : PyImport_ImportModule("shmring.errors");
    if (errors == NULL) {
        Py_XDECREF(facts);
        return NULL;
    }
    PyObject *type = PyObject_GetAttrString(errors, "ColumnError");
    Py_DECREF(errors);
    if (type != NULL) {
        PyObject *message = PyUnicode_FromFormat("%s: column=%U%V", what, name, facts, "");
        PyObject *error = message == NULL ? NULL : PyObject_CallFunctionObjArgs(type, message, name, NULL);
        Py_XDECREF(message);
        if (error != NULL) {
            PyErr_SetObject(type, error);
            Py_DECREF(error);
        }
        Py_DECREF(type);
    }
    Py_XDECREF(facts);
    return NULL;
}

static void layout_forget(FrameLayout *self) {
    for (uint32_t i = 0; i < self->column_count; i++) {
        Py_CLEAR(self->columns[i].descr);
    }
    self->column_count = 0;
    Py_CLEAR(self->names);
    Py_CLEAR(self->indexes);
    Py_CLEAR(self->entries);
}

/* One column, from (name, kind, itemsize, shape, counts_index, optional); 0, or -1 with an exception. */
static int lay_out_column(FrameLayout *self, uint32_t i, PyObject *entry, PyObject *dtype) {
    PyObject *name;
    const char *kind;
    unsigned int itemsize, counts_index;
    unsigned char shape;
    int optional;
    if (!PyArg_ParseTuple(entry, "UsIbIp", &name, &kind, &itemsize, &shape, &counts_index, &optional)) {
        return -1;
    }
    if (!PyArray_DescrCheck(dtype)) {
        PyErr_SetString(PyExc_TypeError, "takes a dtype for each column");
        return -1;
    }
    if (itemsize == 0 || itemsize != (unsigned int)PyDataType_ELSIZE((PyArray_Descr *)dtype) ||
        shape > COLUMN_FREE ||
        (shape == COLUMN_RAGGED &&
         (counts_index >= (unsigned int)i || self->columns[counts_index].itemsize != 4 ||
          self->columns[counts_index].kind != 'u' || self->columns[counts_index].shape == COLUMN_FREE))) {
        PyErr_Format(PyExc_ValueError, "column cannot be laid out: column=%U", name);
        return -1;
    }
    Py_INCREF(dtype);
    self->columns[i] = (struct column){
        (PyArray_Descr *)dtype,          itemsize, counts_index, shape, (uint8_t)optional, kind[0],
        kind[0] == 'V' ? kind + 1 : NULL};
    self->column_count = i + 1;
    PyObject *index = PyLong_FromUnsignedLong(i);
    int failed = index == NULL || PyDict_SetItem(self->indexes, name, index) < 0;
    Py_XDECREF(index);
    if (failed) {
        return -1;
    }
    Py_INCREF(name);
    PyTuple_SET_ITEM(self->names, (Py_ssize_t)i, name);
    return 0;
}

/* _lay_out(fingerprint, type, entries, dtypes) */
static PyObject *layout_lay_out(FrameLayout *self, PyObject *args) {
    unsigned long long fingerprint;
    unsigned char tag;
    PyObject *entries, *dtypes;
    if (!PyArg_ParseTuple(args, "KbO!O!", &fingerprint, &tag, &PyTuple_Type, &entries, &PyTuple_Type,
                          &dtypes)) {
        return NULL;
    }
    Py_ssize_t n = PyTuple_GET_SIZE(entries);
    if (n > (Py_ssize_t)SHR_COLUMNS_MAX || PyTuple_GET_SIZE(dtypes) != n) {
        PyErr_Format(PyExc_ValueError, "too many columns: columns=%zd, max=%d", n, SHR_COLUMNS_MAX);
        return NULL;
    }
    if (self->entries != NULL) {
        PyErr_SetString(PyExc_RuntimeError, "already laid out");
        return NULL;
    }
    Py_INCREF(entries);
    self->entries = entries;
    self->fingerprint = fingerprint;
    self->type = tag;
    self->names = PyTuple_New(n);
    self->indexes = PyDict_New();
    if (self->names == NULL || self->indexes == NULL) {
        layout_forget(self);
        return NULL;
    }
    for (Py_ssize_t i = 0; i < n; i++) {
        if (lay_out_column(self, (uint32_t)i, PyTuple_GET_ITEM(entries, i), PyTuple_GET_ITEM(dtypes, i)) <
            0) {
            layout_forget(self);
            return NULL;
        }
    }
    Py_RETURN_NONE;
}

static void layout_dealloc(FrameLayout *self) {
    layout_forget(self);
    Py_TYPE(self)->tp_free((PyObject *)self);
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

static uint64_t sum_u32(const uint8_t *at, uint64_t count) {
    uint64_t sum = 0;
    for (uint64_t i = 0; i < count; i++) {
        uint32_t value;
        memcpy(&value, at + i * 4, 4);
        sum += value;
    }
    return sum;
}

/* The number of items a column must have, or a message. `bytes` and `lengths` are those of all columns. */
static const char *check_length(const FrameLayout *layout, uint32_t i, uint32_t rows,
                                const void *const *bytes, const uint64_t *lengths) {
    const struct column *c = &layout->columns[i];
    if (bytes[i] == NULL) {
        return c->optional ? NULL : "column is missing";
    }
    if (lengths[i] % c->itemsize != 0) {
        return "column is cut inside an item";
    }
    uint64_t items = lengths[i] / c->itemsize;
    if (c->shape == COLUMN_FLAT && items != rows) {
        return "column does not have one item a row";
    }
    if (c->shape == COLUMN_RAGGED) {
        if (bytes[c->counts_index] == NULL) {
            return "column is there and its counts are not";
        }
        if (sum_u32(bytes[c->counts_index], lengths[c->counts_index] / 4) != items) {
            return "column does not have as many items as its counts say";
        }
    }
    return NULL;
}

/* Raise with the two numbers that do not agree. */
__attribute__((cold, noinline)) static void raise_length(const FrameLayout *layout, uint32_t i, uint32_t rows,
                                                         const void *const *bytes, const uint64_t *lengths,
                                                         const char *wrong) {
    const struct column *c = &layout->columns[i];
    unsigned long long items = lengths[i] / c->itemsize;
    PyObject *facts = NULL;
    if (bytes[i] != NULL && lengths[i] % c->itemsize == 0) {
        if (c->shape == COLUMN_FLAT) {
            facts = PyUnicode_FromFormat(", items=%llu, rows=%u", items, rows);
        } else if (bytes[c->counts_index] != NULL) {
            unsigned long long sum = sum_u32(bytes[c->counts_index], lengths[c->counts_index] / 4);
            facts = PyUnicode_FromFormat(", items=%llu, counts_sum=%llu", items, sum);
        }
    }
    if (!PyErr_Occurred()) {
        raise_column(layout, i, wrong, facts);
    }
}

/* 0, or -1 with an exception that names the first column whose length is wrong. */
static int check_lengths(const FrameLayout *layout, uint32_t rows, const void *const *bytes,
                         const uint64_t *lengths) {
    for (uint32_t i = 0; i < layout->column_count; i++) {
        const char *wrong = check_length(layout, i, rows, bytes, lengths);
        if (wrong != NULL) {
            raise_length(layout, i, rows, bytes, lengths, wrong);
            return -1;
        }
    }
    return 0;
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
        raise_column(layout, i, "column has another dtype than the schema", facts);
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
        raise_column(layout, i,
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

static PyObject *push_columns(ProducerCore *producer, FrameLayout *layout, PyObject *rows_given,
                              PyObject *const *columns, Py_ssize_t column_count, PyObject *publish_given,
                              PyObject *flags_given) {
    unsigned long rows = PyLong_AsUnsignedLong(rows_given);
    if (rows == (unsigned long)-1 && PyErr_Occurred()) {
        return NULL;
    }
    int publish = publish_given == NULL ? 1 : PyObject_IsTrue(publish_given);
    int flags = flags_given == NULL ? 0 : fast_byte(flags_given, "flags");
    if (publish < 0 || (flags < 0 && PyErr_Occurred())) {
        return NULL;
    }
    if (rows > UINT32_MAX || column_count != (Py_ssize_t)layout->column_count) {
        PyErr_Format(PyExc_ValueError,
                     "frame does not fit its schema: rows=%lu, columns=%zd, schema_columns=%u", rows,
                     column_count, layout->column_count);
        return NULL;
    }
    struct source sources[SHR_COLUMNS_MAX];
    const void *bytes[SHR_COLUMNS_MAX];
    uint64_t lengths[SHR_COLUMNS_MAX];
    uint32_t taken = 0;
    PyObject *result = NULL;
    while (taken < layout->column_count) {
        if (take_column(layout, taken, columns[taken], &sources[taken]) < 0) {
            goto done;
        }
        bytes[taken] = sources[taken].bytes;
        lengths[taken] = sources[taken].length;
        taken++;
    }
    if (check_lengths(layout, (uint32_t)rows, bytes, lengths) < 0) {
        goto done;
    }
    uint64_t total;
    int answer =
        write_frame(producer, layout, (uint32_t)rows, bytes, lengths, (uint8_t)flags, publish, &total);
    if (answer >= 0) {
        result = PyBool_FromLong(answer);
    } else {
        fast_raise(answer, producer->end.bad_position, producer->end.bad_value, total,
                   producer->end.capacity ? shr_payload_length_max(producer->end.capacity) : 0);
    }
done:
    for (uint32_t i = 0; i < taken; i++) {
        if (sources[i].view.obj != NULL) {
            PyBuffer_Release(&sources[i].view);
        }
    }
    return result;
}

PyObject *fast_push_frame(ProducerCore *self, PyObject *const *args, Py_ssize_t nargs) {
    if (nargs < 3 || nargs > 5 || !PyObject_TypeCheck(args[0], &FrameLayout_Type) ||
        !PyTuple_Check(args[2])) {
        PyErr_SetString(PyExc_TypeError,
                        "push_frame takes a FrameLayout, rows, a tuple of columns, publish, flags");
        return NULL;
    }
    return push_columns(self, (FrameLayout *)args[0], args[1], ((PyTupleObject *)args[2])->ob_item,
                        PyTuple_GET_SIZE(args[2]), nargs < 4 ? NULL : args[3], nargs < 5 ? NULL : args[4]);
}

/* What stands in for a producer in a test, or wraps one, has a push_frame of its own. */
static PyObject *push_elsewhere(FrameLayout *self, PyObject *const *args, Py_ssize_t nargs,
                                PyObject *const values[2]) {
    PyObject *columns = PyTuple_New(nargs - 2);
    if (columns == NULL) {
        return NULL;
    }
    for (Py_ssize_t i = 2; i < nargs; i++) {
        PyTuple_SET_ITEM(columns, i - 2, Py_NewRef(args[i]));
    }
    return PyObject_CallMethod(args[0], "push_frame", "OONOi", self, args[1], columns,
                               values[0] == NULL ? Py_True : values[0],
                               values[1] == NULL ? 0 : fast_byte(values[1], "flags"));
}

/* push(producer, rows, *columns, publish=True, flags=0) */
static PyObject *layout_push(FrameLayout *self, PyObject *const *args, Py_ssize_t nargs, PyObject *names) {
    static const char *const parameters[] = {"publish", "flags"};
    PyObject *values[2] = {NULL, NULL};
    if (nargs < 2) {
        PyErr_SetString(PyExc_TypeError, "push takes a producer, rows and the columns");
        return NULL;
    }
    if (names != NULL && fast_arguments("push", args + nargs, 0, names, parameters, 2, values) < 0) {
        return NULL;
    }
    if (!PyObject_TypeCheck(args[0], &ProducerCore_Type)) {
        return push_elsewhere(self, args, nargs, values);
    }
    return push_columns((ProducerCore *)args[0], self, args[1], args + 2, nargs - 2, values[0], values[1]);
}

static PyObject *raise_frame(const FrameLayout *layout, int wrong, uint64_t length) {
    static const char *const texts[] = {"",
                                        "frame is cut short",
                                        "frame has another version",
                                        "frame has another schema",
                                        "frame has another number of columns",
                                        "frame's directory does not add up"};
    PyObject *errors = PyImport_ImportModule("shmring.errors");
    PyObject *type = errors == NULL ? NULL : PyObject_GetAttrString(errors, "CorruptFrameError");
    if (type != NULL) {
        PyErr_Format(type, "%s: length=%llu, columns=%u", texts[wrong], (unsigned long long)length,
                     layout->column_count);
    }
    Py_XDECREF(errors);
    Py_XDECREF(type);
    return NULL;
}

/* The frame in `payload`, after every length was checked. Takes over the reference to `keep`. */
static PyObject *frame_over(FrameLayout *self, PyObject *keep, const uint8_t *payload, uint64_t length) {
    uint32_t rows = 0;
    struct shr_column_entry entries[SHR_COLUMNS_MAX];
    const void *bytes[SHR_COLUMNS_MAX];
    uint64_t lengths[SHR_COLUMNS_MAX];
    int wrong = length > UINT32_MAX ? SHR_FRAME_TOO_SHORT
                                    : shr_check_frame(payload, (uint32_t)length, self->fingerprint,
                                                      self->column_count, &rows, entries);
    if (wrong != 0) {
        Py_DECREF(keep);
        return raise_frame(self, wrong, length);
    }
    for (uint32_t i = 0; i < self->column_count; i++) {
        bytes[i] = entries[i].offset == 0 ? NULL : payload + entries[i].offset;
        lengths[i] = entries[i].length;
    }
    if (check_lengths(self, rows, bytes, lengths) < 0) {
        Py_DECREF(keep);
        return NULL;
    }
    Frame *frame = PyObject_NewVar(Frame, &Frame_Type, (Py_ssize_t)self->column_count);
    if (frame == NULL) {
        Py_DECREF(keep);
        return NULL;
    }
    Py_INCREF(self);
    frame->layout = self;
    frame->record = keep;
    frame->payload = payload;
    frame->rows = rows;
    for (uint32_t i = 0; i < self->column_count; i++) {
        frame->places[i] = (struct place){entries[i].offset, entries[i].length / self->columns[i].itemsize};
    }
    return (PyObject *)frame;
}

static PyObject *layout_read(FrameLayout *self, PyObject *record) {
    if (Py_TYPE(record) == &Record_Type) {
        const Record *r = (const Record *)record;
        if (fast_is_released(r)) {
            return fast_raise_released();
        }
        Py_INCREF(record);
        return frame_over(self, record, r->start, r->length);
    }
    PyObject *view = PyMemoryView_FromObject(record);
    if (view == NULL) {
        return NULL;
    }
    const Py_buffer *buffer = PyMemoryView_GET_BUFFER(view);
    if (!PyBuffer_IsContiguous(buffer, 'C')) {
        Py_DECREF(view);
        PyErr_SetString(PyExc_BufferError, "a frame is one block of memory");
        return NULL;
    }
    return frame_over(self, view, buffer->buf, (uint64_t)buffer->len);
}

static PyMethodDef layout_methods[] = {
    {"_lay_out", (PyCFunction)layout_lay_out, METH_VARARGS, NULL},
    {"push", (PyCFunction)(void (*)(void))layout_push, METH_FASTCALL | METH_KEYWORDS,
     "push(producer, rows, *columns, publish=True, flags=0) -> bool\n\nWrite one frame; False if there is no "
     "room now.\n\n`columns` in the schema's order: C-contiguous arrays of exactly the schema's dtypes, None "
     "for an absent optional one. One call, no copy but the one into the ring. `flags` is the record's, 0 to "
     "255. Raises ColumnError that names the column."},
    {"read", (PyCFunction)layout_read, METH_O,
     "read(record, /) -> Frame\n\nView a record as a frame, after every length in it was checked.\n\nRaises "
     "CorruptFrameError or ColumnError; nothing of a bad frame is handed out."},
    {NULL, NULL, 0, NULL},
};

PyTypeObject FrameLayout_Type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "shmring._fast.FrameLayout",
    .tp_basicsize = sizeof(FrameLayout),
    .tp_dealloc = (destructor)layout_dealloc,
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE,
    .tp_methods = layout_methods,
    .tp_new = PyType_GenericNew,
    .tp_doc = "What the columns of a frame must be.",
};

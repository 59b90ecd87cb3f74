/* FrameLayout: what the columns of a frame must be, checked on the way in and on the way out. */
#include <string.h>

#include "fast.h"

/* FrameLayout(fingerprint, type, ((name, kind, itemsize, shape, counts_index, optional), ...)) */
static PyObject *layout_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    unsigned long long fingerprint;
    unsigned char tag;
    PyObject *columns;
    if (kwargs != NULL && PyDict_Size(kwargs) != 0) {
        PyErr_SetString(PyExc_TypeError, "takes no keyword arguments");
        return NULL;
    }
    if (!PyArg_ParseTuple(args, "KbO!", &fingerprint, &tag, &PyTuple_Type, &columns)) {
        return NULL;
    }
    Py_ssize_t n = PyTuple_GET_SIZE(columns);
    if (n > (Py_ssize_t)SHR_COLUMNS_MAX) {
        PyErr_Format(PyExc_ValueError, "too many columns: columns=%zd, max=%d", n, SHR_COLUMNS_MAX);
        return NULL;
    }
    FrameLayout *self = (FrameLayout *)type->tp_alloc(type, 0);
    if (self == NULL) {
        return NULL;
    }
    self->fingerprint = fingerprint;
    self->type = tag;
    self->column_count = (uint32_t)n;
    Py_INCREF(columns);
    self->entries = columns;
    self->names = PyTuple_New(n);
    if (self->names == NULL) {
        Py_DECREF(self);
        return NULL;
    }
    for (Py_ssize_t i = 0; i < n; i++) {
        PyObject *name;
        const char *kind;
        unsigned int itemsize, counts_index;
        unsigned char shape;
        int optional;
        if (!PyArg_ParseTuple(PyTuple_GET_ITEM(columns, i), "UsIbIp", &name, &kind, &itemsize, &shape,
                              &counts_index, &optional)) {
            Py_DECREF(self);
            return NULL;
        }
        Py_INCREF(name);
        PyTuple_SET_ITEM(self->names, i, name);
        self->columns[i] = (struct column){itemsize,          counts_index, shape,
                                           (uint8_t)optional, kind[0],      kind[0] == 'V' ? kind + 1 : NULL};
        if (itemsize == 0 || shape > COLUMN_FREE ||
            (shape == COLUMN_RAGGED &&
             (counts_index >= (unsigned int)i || self->columns[counts_index].itemsize != 4 ||
              self->columns[counts_index].kind != 'u' || self->columns[counts_index].shape != COLUMN_FLAT))) {
            PyErr_Format(PyExc_ValueError, "column cannot be laid out: column=%U", name);
            Py_DECREF(self);
            return NULL;
        }
    }
    return (PyObject *)self;
}

static void layout_dealloc(FrameLayout *self) {
    Py_XDECREF(self->names);
    Py_XDECREF(self->entries);
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

/* Rows named by the first problem found, or NULL and no exception. */
static int check_lengths(const FrameLayout *layout, uint32_t rows, const void *const *bytes,
                         const uint64_t *lengths) {
    for (uint32_t i = 0; i < layout->column_count; i++) {
        const char *wrong = check_length(layout, i, rows, bytes, lengths);
        if (wrong != NULL) {
            fast_raise_column(layout, i, wrong);
            return -1;
        }
    }
    return 0;
}

static int take_column(const FrameLayout *layout, uint32_t i, PyObject *from, Py_buffer *view) {
    const struct column *c = &layout->columns[i];
    if (PyObject_GetBuffer(from, view, PyBUF_FORMAT | PyBUF_C_CONTIGUOUS) < 0) {
        PyErr_Clear();
        fast_raise_column(layout, i, "column is not one block of memory: pass a C-contiguous array");
        return -1;
    }
    char kind = kind_of(view->format);
    if (kind != c->kind || view->itemsize != (Py_ssize_t)c->itemsize ||
        (c->format != NULL && !same_format(view->format, c->format))) {
        fast_raise_column(layout, i, "column has another dtype than the schema");
        PyBuffer_Release(view);
        return -1;
    }
    return 0;
}

PyObject *fast_push_frame(ProducerCore *self, PyObject *const *args, Py_ssize_t nargs) {
    if (nargs < 3 || nargs > 5 || !PyObject_TypeCheck(args[0], &FrameLayout_Type) ||
        !PyTuple_Check(args[2])) {
        PyErr_SetString(PyExc_TypeError,
                        "push_frame takes a FrameLayout, rows, a tuple of columns, publish, flags");
        return NULL;
    }
    const FrameLayout *layout = (const FrameLayout *)args[0];
    unsigned long rows = PyLong_AsUnsignedLong(args[1]);
    if (rows == (unsigned long)-1 && PyErr_Occurred()) {
        return NULL;
    }
    int publish = nargs < 4 ? 1 : PyObject_IsTrue(args[3]);
    long flags = nargs < 5 ? 0 : PyLong_AsLong(args[4]);
    if (PyErr_Occurred()) {
        return NULL;
    }
    if (flags < 0 || flags > 255) {
        return PyErr_Format(PyExc_ValueError, "flags is one byte: flags=%ld, max=255", flags);
    }
    Py_ssize_t n = PyTuple_GET_SIZE(args[2]);
    if (rows > UINT32_MAX || n != (Py_ssize_t)layout->column_count) {
        PyErr_Format(PyExc_ValueError,
                     "frame does not fit its schema: rows=%lu, columns=%zd, schema_columns=%u", rows, n,
                     layout->column_count);
        return NULL;
    }
    Py_buffer views[SHR_COLUMNS_MAX];
    const void *bytes[SHR_COLUMNS_MAX];
    uint64_t lengths[SHR_COLUMNS_MAX];
    uint32_t taken = 0;
    PyObject *result = NULL;
    for (; taken < layout->column_count; taken++) {
        PyObject *from = PyTuple_GET_ITEM(args[2], taken);
        if (from == Py_None) {
            views[taken].obj = NULL;
            bytes[taken] = NULL;
            lengths[taken] = 0;
            continue;
        }
        if (take_column(layout, taken, from, &views[taken]) < 0) {
            goto done;
        }
        bytes[taken] = views[taken].buf == NULL ? (const void *)"" : views[taken].buf;
        lengths[taken] = (uint64_t)views[taken].len;
    }
    if (check_lengths(layout, (uint32_t)rows, bytes, lengths) < 0) {
        goto done;
    }
    int answer = shr_push_frame(&self->end, layout->type, (uint8_t)flags, layout->fingerprint, (uint32_t)rows,
                                layout->column_count, bytes, lengths, publish);
    if (answer >= 0) {
        result = PyBool_FromLong(answer);
    } else {
        uint64_t total = SHR_FRAME_HEADER_LENGTH + layout->column_count * SHR_COLUMN_ENTRY_LENGTH;
        for (uint32_t i = 0; i < layout->column_count; i++) {
            total += lengths[i];
        }
        fast_raise(answer, self->end.bad_position, self->end.bad_value, total,
                   self->end.capacity ? shr_payload_length_max(self->end.capacity) : 0);
    }
done:
    for (uint32_t i = 0; i < taken; i++) {
        if (views[i].obj != NULL) {
            PyBuffer_Release(&views[i]);
        }
    }
    return result;
}

/* parse(record) -> (rows, ((offset, items) | None, ...)) */
static PyObject *layout_parse(FrameLayout *self, PyObject *record) {
    Py_buffer view;
    if (PyObject_GetBuffer(record, &view, PyBUF_SIMPLE) < 0) {
        return NULL;
    }
    uint32_t rows = 0;
    struct shr_column_entry entries[SHR_COLUMNS_MAX];
    const void *bytes[SHR_COLUMNS_MAX];
    uint64_t lengths[SHR_COLUMNS_MAX];
    PyObject *result = NULL;
    int wrong = view.len > (Py_ssize_t)UINT32_MAX
                    ? SHR_FRAME_TOO_SHORT
                    : shr_check_frame(view.buf, (uint32_t)view.len, self->fingerprint, self->column_count,
                                      &rows, entries);
    if (wrong != 0) {
        static const char *const texts[] = {"",
                                            "frame is cut short",
                                            "frame has another version",
                                            "frame has another schema",
                                            "frame has another number of columns",
                                            "frame's directory does not add up"};
        PyObject *errors = PyImport_ImportModule("shmring.errors");
        PyObject *type = errors == NULL ? NULL : PyObject_GetAttrString(errors, "CorruptFrameError");
        if (type != NULL) {
            PyErr_Format(type, "%s: length=%zd, columns=%u", texts[wrong], view.len, self->column_count);
        }
        Py_XDECREF(errors);
        Py_XDECREF(type);
        goto done;
    }
    for (uint32_t i = 0; i < self->column_count; i++) {
        bytes[i] = entries[i].offset == 0 ? NULL : (const uint8_t *)view.buf + entries[i].offset;
        lengths[i] = entries[i].length;
    }
    if (check_lengths(self, rows, bytes, lengths) < 0) {
        goto done;
    }
    PyObject *places = PyTuple_New((Py_ssize_t)self->column_count);
    if (places == NULL) {
        goto done;
    }
    for (uint32_t i = 0; i < self->column_count; i++) {
        PyObject *place;
        if (bytes[i] == NULL) {
            Py_INCREF(Py_None);
            place = Py_None;
        } else {
            place = Py_BuildValue("II", entries[i].offset, entries[i].length / self->columns[i].itemsize);
        }
        if (place == NULL) {
            Py_DECREF(places);
            goto done;
        }
        PyTuple_SET_ITEM(places, (Py_ssize_t)i, place);
    }
    result = Py_BuildValue("IN", rows, places);
done:
    PyBuffer_Release(&view);
    return result;
}

static PyMethodDef layout_methods[] = {
    {"parse", (PyCFunction)layout_parse, METH_O,
     "parse(record, /) -> tuple[int, tuple[tuple[int, int] | None, ...]]\n\n"
     "Rows, and offset and item count of each column, after every length was checked."},
    {NULL, NULL, 0, NULL},
};

PyTypeObject FrameLayout_Type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "shmring._fast.FrameLayout",
    .tp_basicsize = sizeof(FrameLayout),
    .tp_dealloc = (destructor)layout_dealloc,
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_methods = layout_methods,
    .tp_new = layout_new,
    .tp_doc = "What the columns of a frame must be.",
};

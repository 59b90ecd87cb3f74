/* FrameLayout: what the columns of a frame must be, checked on the way in and on the way out. */
#include <string.h>

#include "frame_view.h"

int fast_layout_init(void) {
    import_array1(-1);
    return 0;
}

__attribute__((cold, noinline)) PyObject *fast_raise_column(const FrameLayout *layout, uint32_t column,
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
        fast_raise_column(layout, i, wrong, facts);
    }
}

int fast_check_lengths(const FrameLayout *layout, uint32_t rows, const void *const *bytes,
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
    if (fast_check_lengths(self, rows, bytes, lengths) < 0) {
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
    {"push", (PyCFunction)(void (*)(void))fast_layout_push, METH_FASTCALL | METH_KEYWORDS,
     "push(producer, rows, *columns, publish=True, flags=0, timeout_s=0) -> bool\n\nWrite one frame; False "
     "if "
     "there is no room, after waiting for it up to `timeout_s` (None: for ever).\n\n`columns` in the "
     "schema's order: C-contiguous arrays of exactly the schema's dtypes, None "
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

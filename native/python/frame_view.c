/* Frame: the columns of one record, as read-only arrays over its bytes. */
#include "frame_view.h"

int fast_view_init(void) {
    import_array1(-1);
    return 0;
}

static void frame_dealloc(Frame *self) {
    Py_DECREF(self->layout);
    Py_DECREF(self->record);
    PyObject_Free(self);
}

/* One column as a read-only array over the record's bytes; an absent one has no items. */
static PyObject *column_of(Frame *self, uint32_t i) {
    PyArray_Descr *descr = self->layout->columns[i].descr;
    npy_intp items = (npy_intp)self->places[i].items;
    Py_INCREF(descr);
    if (items == 0) {
        return PyArray_NewFromDescr(&PyArray_Type, descr, 1, &items, NULL, NULL, 0, NULL);
    }
    const uint8_t *bytes = self->payload + self->places[i].offset;
    int flags = NPY_ARRAY_C_CONTIGUOUS | (((uintptr_t)bytes & 7U) == 0 ? NPY_ARRAY_ALIGNED : 0);
    PyObject *array =
        PyArray_NewFromDescr(&PyArray_Type, descr, 1, &items, NULL, (void *)(uintptr_t)bytes, flags, NULL);
    if (array != NULL) {
        Py_INCREF(self->record);
        if (PyArray_SetBaseObject((PyArrayObject *)array, self->record) < 0) {
            Py_CLEAR(array);
        }
    }
    return array;
}

static int check_bytes(const Frame *self) {
    if (Py_TYPE(self->record) == &Record_Type && fast_is_released((const Record *)self->record)) {
        fast_raise_released();
        return -1;
    }
    return 0;
}

static PyObject *frame_column(Frame *self, PyObject *name) {
    PyObject *index = PyDict_GetItemWithError(self->layout->indexes, name);
    if (index == NULL) {
        if (!PyErr_Occurred()) {
            PyErr_SetObject(PyExc_KeyError, name);
        }
        return NULL;
    }
    uint32_t i = (uint32_t)PyLong_AsUnsignedLong(index);
    return check_bytes(self) < 0 ? NULL : column_of(self, i);
}

static int frame_contains(Frame *self, PyObject *name) {
    PyObject *index = PyDict_GetItemWithError(self->layout->indexes, name);
    if (index == NULL) {
        return PyErr_Occurred() ? -1 : 0;
    }
    return self->places[PyLong_AsUnsignedLong(index)].offset != 0;
}

static PyObject *frame_columns(Frame *self, PyObject *Py_UNUSED(ignored)) {
    if (check_bytes(self) < 0) {
        return NULL;
    }
    PyObject *columns = PyTuple_New((Py_ssize_t)self->layout->column_count);
    for (uint32_t i = 0; columns != NULL && i < self->layout->column_count; i++) {
        PyObject *column = column_of(self, i);
        if (column == NULL) {
            Py_CLEAR(columns);
        } else {
            PyTuple_SET_ITEM(columns, (Py_ssize_t)i, column);
        }
    }
    return columns;
}

static PyObject *frame_schema(Frame *self, void *Py_UNUSED(closure)) {
    return Py_NewRef((PyObject *)self->layout);
}

static PyObject *frame_rows(Frame *self, void *Py_UNUSED(closure)) {
    return PyLong_FromUnsignedLong(self->rows);
}

static PyMethodDef frame_methods[] = {
    {"columns", (PyCFunction)frame_columns, METH_NOARGS,
     "columns() -> tuple[ndarray, ...]\n\nAll columns in the schema's order; absent ones have no items."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef frame_getset[] = {
    {"schema", (getter)frame_schema, NULL, "The schema that it was read with.", NULL},
    {"rows", (getter)frame_rows, NULL, "Rows of every flat column.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMappingMethods frame_mapping = {.mp_subscript = (binaryfunc)frame_column};
static PySequenceMethods frame_sequence = {.sq_contains = (objobjproc)frame_contains};

PyTypeObject Frame_Type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "shmring._fast.Frame",
    .tp_basicsize = sizeof(Frame),
    .tp_itemsize = sizeof(struct place),
    .tp_dealloc = (destructor)frame_dealloc,
    .tp_as_mapping = &frame_mapping,
    .tp_as_sequence = &frame_sequence,
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_methods = frame_methods,
    .tp_getset = frame_getset,
    .tp_doc =
        "The columns of one record, as read-only numpy views of the ring.\n\nA view's memory stays mapped "
        "for as long as the view lives, but its bytes are the record's only until the consumer's "
        "release(): copy what is kept longer.",
};

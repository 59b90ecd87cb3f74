/* `shmring._fast`: the calls of a hot loop. They keep the GIL, take buffers by the buffer protocol
 * and cost one C call each; a cffi call would release and retake the GIL every time, and a busy
 * thread then makes the caller wait up to a switch interval for it. Nothing here blocks. */
#include "fast.h"

PyObject *fast_raise(int answer, uint64_t position, uint64_t value, uint64_t length, uint64_t length_max) {
    PyObject *errors = PyImport_ImportModule("shmring.errors");
    if (errors == NULL) {
        return NULL;
    }
    PyObject *error = PyObject_CallMethod(errors, "error_of", "iKKKK", answer, (unsigned long long)position,
                                          (unsigned long long)value, (unsigned long long)length,
                                          (unsigned long long)length_max);
    Py_DECREF(errors);
    if (error != NULL) {
        PyErr_SetObject((PyObject *)Py_TYPE(error), error);
        Py_DECREF(error);
    }
    return NULL;
}

PyObject *fast_raise_column(const FrameLayout *layout, uint32_t column, const char *what) {
    PyObject *name = PyTuple_GetItem(layout->names, (Py_ssize_t)column);
    if (name == NULL) {
        return NULL;
    }
    PyObject *errors = PyImport_ImportModule("shmring.errors");
    if (errors == NULL) {
        return NULL;
    }
    PyObject *type = PyObject_GetAttrString(errors, "ColumnError");
    Py_DECREF(errors);
    if (type != NULL) {
        PyObject *message = PyUnicode_FromFormat("%s: column=%U", what, name);
        PyObject *error = message == NULL ? NULL : PyObject_CallFunctionObjArgs(type, message, name, NULL);
        Py_XDECREF(message);
        if (error != NULL) {
            PyErr_SetObject(type, error);
            Py_DECREF(error);
        }
        Py_DECREF(type);
    }
    return NULL;
}

Window *fast_window(PyObject *keep, uint8_t *start, uint64_t length, int readonly) {
    Window *w = PyObject_New(Window, &Window_Type);
    if (w != NULL) {
        Py_INCREF(keep);
        w->keep = keep;
        w->start = start;
        w->length = (Py_ssize_t)length;
        w->readonly = readonly;
    }
    return w;
}

static void window_dealloc(Window *self) {
    Py_DECREF(self->keep);
    PyObject_Free(self);
}

static int window_getbuffer(Window *self, Py_buffer *view, int flags) {
    return PyBuffer_FillInfo(view, (PyObject *)self, self->start, self->length, self->readonly, flags);
}

static PyBufferProcs window_buffer = {(getbufferproc)window_getbuffer, NULL};

PyTypeObject Window_Type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "shmring._fast.Window",
    .tp_basicsize = sizeof(Window),
    .tp_dealloc = (destructor)window_dealloc,
    .tp_as_buffer = &window_buffer,
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_doc = "Bytes of a mapping, through the buffer protocol.",
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, .m_name = "shmring._fast",
                                    .m_doc = "The calls of a hot loop.", .m_size = -1};

PyMODINIT_FUNC PyInit__fast(void) {
    PyTypeObject *types[] = {&Window_Type, &Record_Type, &ProducerCore_Type, &ConsumerCore_Type,
                             &FrameLayout_Type};
    const char *names[] = {"Window", "Record", "ProducerCore", "ConsumerCore", "FrameLayout"};
    PyObject *m = PyModule_Create(&module);
    if (m == NULL) {
        return NULL;
    }
    for (size_t i = 0; i < sizeof types / sizeof *types; i++) {
        if (PyType_Ready(types[i]) < 0 || PyModule_AddObjectRef(m, names[i], (PyObject *)types[i]) < 0) {
            Py_DECREF(m);
            return NULL;
        }
    }
    return m;
}

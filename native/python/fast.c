/* `shmring._fast`: the calls of a hot loop. They keep the GIL, take buffers by the buffer protocol
 * and cost one C call each; a cffi call would release and retake the GIL every time, and a busy
 * thread then makes the caller wait up to a switch interval for it. Those that may wait try first, and
 * release the GIL only to sleep. */
#include <float.h>
#include <string.h>
#include <time.h>

#include "fast.h"
#include "shmring/park.h"

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

PyObject *fast_raise_producer(const ProducerCore *producer, int answer, uint64_t length) {
    const shr_producer *end = &producer->end;
    uint64_t value = answer == SHR_PEER_LOST ? end->header->consumer.pid : end->bad_value;
    return fast_raise(answer, end->bad_position, value, length,
                      end->capacity ? shr_payload_length_max(end->capacity) : 0);
}

PyObject *fast_raise_copying(void) {
    PyObject *errors = PyImport_ImportModule("shmring.errors");
    PyObject *type = errors == NULL ? NULL : PyObject_GetAttrString(errors, "ClaimError");
    if (type != NULL) {
        PyErr_SetString(type, "another thread is copying through this end: one thread at a time");
    }
    Py_XDECREF(errors);
    Py_XDECREF(type);
    return NULL;
}

PyObject *fast_raise_released(void) {
    PyErr_SetString(PyExc_ValueError, "the record was released: its bytes may be overwritten");
    return NULL;
}

void fast_copy(void *to, const void *from, uint64_t length, int *is_copying) {
    if (length < COPY_RELEASES_GIL) {
        memcpy(to, from, length);
        return;
    }
    *is_copying = 1;
    Py_BEGIN_ALLOW_THREADS;
    memcpy(to, from, length);
    Py_END_ALLOW_THREADS;
    *is_copying = 0;
}

static uint64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000U + (uint64_t)t.tv_nsec;
}

static uint64_t end_of(double seconds) {
    /* a century is for ever, and does not overflow */
    return seconds > 3e9 ? UINT64_MAX : seconds == 0 ? 0 : now_ns() + (uint64_t)(seconds * 1e9);
}

int fast_deadline(PyObject *timeout, uint64_t spin_ns, Deadline *out) {
    *out = (Deadline){UINT64_MAX, spin_ns};
    if (timeout == NULL || timeout == Py_None) {
        return 0;
    }
    if (PyFloat_CheckExact(timeout) || PyLong_CheckExact(timeout)) {
        double seconds = PyFloat_AsDouble(timeout);
        if (seconds >= 0 && seconds <= DBL_MAX) {
            out->until_ns = end_of(seconds);
            return 0;
        }
        PyErr_Clear(); /* the check says what is wrong */
    }
    PyObject *segment = PyImport_ImportModule("shmring.segment");
    PyObject *checked = segment == NULL ? NULL : PyObject_CallMethod(segment, "check_timeout", "O", timeout);
    Py_XDECREF(segment);
    if (checked == NULL) {
        return -1;
    }
    if (checked != Py_None) {
        out->until_ns = end_of(PyFloat_AsDouble(checked));
    }
    Py_DECREF(checked);
    return 0;
}

int fast_wait_slice(Deadline *deadline, shr_consumer *consumer, shr_producer *producer, uint64_t need) {
    uint64_t slice = SHR_CHECK_INTERVAL_NS;
    if (deadline->until_ns != UINT64_MAX) {
        uint64_t now = now_ns();
        if (now >= deadline->until_ns) {
            return 0;
        }
        slice = deadline->until_ns - now < slice ? deadline->until_ns - now : slice;
    }
    uint64_t spin_ns = deadline->spin_ns;
    deadline->spin_ns = 0;
    Py_BEGIN_ALLOW_THREADS;
    /* what it answers shows when the caller tries again: an end, a fault, a closed end too */
    (void)shr_wait(&consumer, consumer != NULL, &producer, &need, producer != NULL, NULL, spin_ns, slice);
    Py_END_ALLOW_THREADS;
    return PyErr_CheckSignals() < 0 ? -1 : 1;
}

int fast_arguments(const char *function, PyObject *const *args, Py_ssize_t nargs, PyObject *names,
                   const char *const *parameters, size_t parameter_count, PyObject **values) {
    if (nargs > (Py_ssize_t)parameter_count) {
        PyErr_Format(PyExc_TypeError, "%s takes at most %zu arguments: %zd given", function, parameter_count,
                     nargs);
        return -1;
    }
    for (size_t i = 0; i < parameter_count; i++) {
        values[i] = i < (size_t)nargs ? args[i] : NULL;
    }
    Py_ssize_t named = names == NULL ? 0 : PyTuple_GET_SIZE(names);
    for (Py_ssize_t n = 0; n < named; n++) {
        PyObject *name = PyTuple_GET_ITEM(names, n);
        size_t i = 0;
        while (i < parameter_count && PyUnicode_CompareWithASCIIString(name, parameters[i]) != 0) {
            i++;
        }
        if (i == parameter_count || values[i] != NULL) {
            PyErr_Format(PyExc_TypeError, "%s got an unexpected argument '%U'", function, name);
            return -1;
        }
        values[i] = args[nargs + n];
    }
    return 0;
}

int fast_byte(PyObject *value, const char *what) {
    long byte = PyLong_AsLong(value);
    if (byte == -1 && PyErr_Occurred()) {
        return -1;
    }
    if (byte < 0 || byte > 255) {
        PyErr_Format(PyExc_ValueError, "%s is one byte: %s=%ld, max=255", what, what, byte);
        return -1;
    }
    return (int)byte;
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
    PyTypeObject *types[] = {&Window_Type,       &Record_Type,      &ProducerCore_Type,
                             &ConsumerCore_Type, &FrameLayout_Type, &Frame_Type};
    const char *names[] = {"Window", "Record", "ProducerCore", "ConsumerCore", "FrameLayout", "Frame"};
    PyObject *m = PyModule_Create(&module);
    if (m == NULL) {
        return NULL;
    }
    if (fast_layout_init() < 0 || fast_push_init() < 0 || fast_view_init() < 0) {
        Py_DECREF(m);
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

/* ProducerCore: the private state of a producer, and its calls that never wait. */
#include "fast.h"

static PyObject *answer_of(ProducerCore *self, int answer, uint64_t length) {
    if (answer >= 0) {
        return PyBool_FromLong(answer);
    }
    uint64_t value = answer == SHR_PEER_LOST ? self->end.header->consumer.pid : self->end.bad_value;
    return fast_raise(answer, self->end.bad_position, value, length,
                      self->end.capacity ? shr_payload_length_max(self->end.capacity) : 0);
}

static PyObject *producer_open(ProducerCore *self, PyObject *args) {
    unsigned long long address, capacity;
    int lock_fd, takeover;
    unsigned int pid;
    PyObject *keep;
    if (!PyArg_ParseTuple(args, "KKiIpO", &address, &capacity, &lock_fd, &pid, &takeover, &keep)) {
        return NULL;
    }
    if (self->keep != NULL) {
        PyErr_SetString(PyExc_RuntimeError, "already open");
        return NULL;
    }
    int answer =
        shr_producer_init(&self->end, (struct shr_header *)(uintptr_t)address, capacity, lock_fd, pid);
    if (answer < 0) {
        return answer_of(self, answer, 0);
    }
    self->end.takeover = (uint32_t)takeover;
    Py_INCREF(keep);
    self->keep = keep;
    Py_RETURN_NONE;
}

/* (payload, type=0, flags=0) */
static int push_arguments(PyObject *const *args, Py_ssize_t nargs, Py_buffer *view, uint8_t tags[2]) {
    if (nargs < 1 || nargs > 3) {
        PyErr_Format(PyExc_TypeError, "takes payload, type and flags: %zd arguments given", nargs);
        return -1;
    }
    for (Py_ssize_t i = 1; i < nargs; i++) {
        long tag = PyLong_AsLong(args[i]);
        if (tag == -1 && PyErr_Occurred()) {
            return -1;
        }
        if (tag < 0 || tag > 255) {
            PyErr_Format(PyExc_ValueError, "%s is one byte: %s=%ld, max=255", i == 1 ? "type" : "flags",
                         i == 1 ? "type" : "flags", tag);
            return -1;
        }
        tags[i - 1] = (uint8_t)tag;
    }
    return PyObject_GetBuffer(args[0], view, PyBUF_SIMPLE);
}

static PyObject *push(ProducerCore *self, PyObject *const *args, Py_ssize_t nargs, int publish) {
    Py_buffer view;
    uint8_t tags[2] = {0, 0};
    if (push_arguments(args, nargs, &view, tags) < 0) {
        return NULL;
    }
    int answer = shr_push(&self->end, view.buf, (uint64_t)view.len, tags[0], tags[1], publish);
    uint64_t length = (uint64_t)view.len;
    PyBuffer_Release(&view);
    return answer_of(self, answer, length);
}

static PyObject *producer_try_push(ProducerCore *self, PyObject *const *args, Py_ssize_t nargs) {
    return push(self, args, nargs, 1);
}

static PyObject *producer_try_append(ProducerCore *self, PyObject *const *args, Py_ssize_t nargs) {
    return push(self, args, nargs, 0);
}

static PyObject *producer_publish(ProducerCore *self, PyObject *Py_UNUSED(ignored)) {
    return answer_of(self, shr_publish(&self->end), 0);
}

static PyObject *producer_claim(ProducerCore *self, PyObject *argument) {
    unsigned long long length = PyLong_AsUnsignedLongLong(argument);
    if (length == (unsigned long long)-1 && PyErr_Occurred()) {
        return NULL;
    }
    uint8_t *payload;
    int answer = shr_claim(&self->end, length, &payload);
    if (answer == SHR_NOT_NOW) {
        Py_RETURN_NONE;
    }
    if (answer < 0) {
        return answer_of(self, answer, length);
    }
    Window *w = fast_window(self->keep, payload, length, 0);
    if (w == NULL) {
        shr_abort(&self->end);
    }
    return (PyObject *)w;
}

static PyObject *producer_commit(ProducerCore *self, PyObject *const *args, Py_ssize_t nargs) {
    if (nargs != 3) {
        PyErr_SetString(PyExc_TypeError, "takes length, type and flags");
        return NULL;
    }
    unsigned long long length = PyLong_AsUnsignedLongLong(args[0]);
    long type = PyLong_AsLong(args[1]);
    long flags = PyLong_AsLong(args[2]);
    if (PyErr_Occurred()) {
        return NULL;
    }
    if (type < 0 || type > 255 || flags < 0 || flags > 255) {
        PyErr_Format(PyExc_ValueError, "type and flags are one byte each: type=%ld, flags=%ld", type, flags);
        return NULL;
    }
    return answer_of(self, shr_commit(&self->end, length, (uint8_t)type, (uint8_t)flags), length);
}

static PyObject *producer_abort(ProducerCore *self, PyObject *Py_UNUSED(ignored)) {
    return answer_of(self, shr_abort(&self->end), 0);
}

static PyObject *producer_discard(ProducerCore *self, PyObject *Py_UNUSED(ignored)) {
    shr_discard(&self->end);
    Py_RETURN_NONE;
}

static PyObject *producer_free_bytes(ProducerCore *self, PyObject *Py_UNUSED(ignored)) {
    uint64_t bytes;
    int answer = shr_free_bytes(&self->end, &bytes);
    return answer < 0 ? answer_of(self, answer, 0) : PyLong_FromUnsignedLongLong(bytes);
}

static PyObject *producer_close(ProducerCore *self, PyObject *Py_UNUSED(ignored)) {
    if (self->keep != NULL) {
        shr_producer_close(&self->end);
    }
    Py_RETURN_NONE;
}

static PyObject *producer_disable(ProducerCore *self, PyObject *Py_UNUSED(ignored)) {
    self->end.usable = 0;
    Py_RETURN_NONE;
}

static PyObject *producer_address(ProducerCore *self, void *Py_UNUSED(closure)) {
    return PyLong_FromVoidPtr(&self->end);
}

static PyObject *producer_usable(ProducerCore *self, void *Py_UNUSED(closure)) {
    return PyBool_FromLong((long)self->end.usable);
}

static PyObject *producer_position(ProducerCore *self, void *Py_UNUSED(closure)) {
    return PyLong_FromUnsignedLongLong(self->end.tail);
}

static PyObject *producer_unpublished(ProducerCore *self, void *Py_UNUSED(closure)) {
    return PyLong_FromUnsignedLongLong(self->end.pending - self->end.tail);
}

static void producer_dealloc(ProducerCore *self) {
    if (self->weakrefs != NULL) {
        PyObject_ClearWeakRefs((PyObject *)self);
    }
    Py_XDECREF(self->keep);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyMethodDef producer_methods[] = {
    {"_open", (PyCFunction)producer_open, METH_VARARGS, NULL},
    {"_claim", (PyCFunction)producer_claim, METH_O, NULL},
    {"_commit", (PyCFunction)(void (*)(void))producer_commit, METH_FASTCALL, NULL},
    {"_abort", (PyCFunction)producer_abort, METH_NOARGS, NULL},
    {"_close", (PyCFunction)producer_close, METH_NOARGS, NULL},
    {"_disable", (PyCFunction)producer_disable, METH_NOARGS, NULL},
    {"try_push", (PyCFunction)(void (*)(void))producer_try_push, METH_FASTCALL,
     "try_push(payload, type=0, flags=0, /) -> bool\n\nCopy one record in and publish it. False: no room "
     "now."},
    {"try_append", (PyCFunction)(void (*)(void))producer_try_append, METH_FASTCALL,
     "try_append(payload, type=0, flags=0, /) -> bool\n\nAs try_push, but seen only after publish()."},
    {"push_frame", (PyCFunction)(void (*)(void))fast_push_frame, METH_FASTCALL,
     "push_frame(layout, rows, columns, publish=True, flags=0, /) -> bool\n\nWrite one frame of columns. "
     "False: no "
     "room now."},
    {"publish", (PyCFunction)producer_publish, METH_NOARGS,
     "publish() -> bool\n\nMake everything appended visible at once. False: there was nothing."},
    {"discard", (PyCFunction)producer_discard, METH_NOARGS,
     "discard() -> None\n\nGive back what was appended or claimed and not published."},
    {"free_bytes", (PyCFunction)producer_free_bytes, METH_NOARGS,
     "free_bytes() -> int\n\nBytes that can be claimed now, record headers and padding included."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef producer_getset[] = {
    {"address", (getter)producer_address, NULL, "Where the private state lies, for the calls that wait.",
     NULL},
    {"is_open", (getter)producer_usable, NULL, "False once closed, or in a forked child.", NULL},
    {"position", (getter)producer_position, NULL, "Published position, in bytes; only grows.", NULL},
    {"unpublished_bytes", (getter)producer_unpublished, NULL,
     "Bytes appended and not published, record headers and padding included.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

PyTypeObject ProducerCore_Type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "shmring._fast.ProducerCore",
    .tp_basicsize = sizeof(ProducerCore),
    .tp_dealloc = (destructor)producer_dealloc,
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE,
    .tp_weaklistoffset = offsetof(ProducerCore, weakrefs),
    .tp_methods = producer_methods,
    .tp_getset = producer_getset,
    .tp_new = PyType_GenericNew,
    .tp_doc = "The private state of a producer, and its calls that never wait.",
};

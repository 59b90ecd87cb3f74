/* ConsumerCore: the private state of a consumer, and its calls that never wait. Record: one drained
 * record, a buffer that is refused once its bytes were released. */
#include "fast.h"

static PyObject *raise_of(ConsumerCore *self, int answer) {
    uint64_t value = answer == SHR_PEER_LOST ? self->end.header->producer.pid : self->end.bad_value;
    return fast_raise(answer, self->end.bad_position, value, 0, 0);
}

static PyObject *consumer_open(ConsumerCore *self, PyObject *args) {
    unsigned long long address, capacity;
    int lock_fd, takeover, poison;
    unsigned int pid;
    PyObject *keep;
    if (!PyArg_ParseTuple(args, "KKiIppO", &address, &capacity, &lock_fd, &pid, &takeover, &poison, &keep)) {
        return NULL;
    }
    if (self->keep != NULL) {
        PyErr_SetString(PyExc_RuntimeError, "already open");
        return NULL;
    }
    int answer =
        shr_consumer_init(&self->end, (struct shr_header *)(uintptr_t)address, capacity, lock_fd, pid);
    if (answer < 0) {
        return raise_of(self, answer);
    }
    self->end.takeover = (uint32_t)takeover;
    self->end.poison = (uint32_t)poison;
    Py_INCREF(keep);
    self->keep = keep;
    Py_RETURN_NONE;
}

static PyObject *consumer_try_pop(ConsumerCore *self, PyObject *Py_UNUSED(ignored)) {
    if (self->end.usable && self->end.read != self->end.head) {
        return raise_of(self, SHR_UNRELEASED);
    }
    shr_record record;
    int answer = shr_next(&self->end, &record);
    if (answer == SHR_NOT_NOW) {
        Py_RETURN_NONE;
    }
    if (answer < 0) {
        return raise_of(self, answer);
    }
    PyObject *copy = PyBytes_FromStringAndSize((const char *)record.payload, (Py_ssize_t)record.length);
    if (copy == NULL) {
        shr_rewind(&self->end);
        return NULL;
    }
    shr_release(&self->end);
    return copy;
}

static PyObject *consumer_drain(ConsumerCore *self, PyObject *argument) {
    long max = PyLong_AsLong(argument);
    if (max == -1 && PyErr_Occurred()) {
        return NULL;
    }
    if (max < 1 || PyBool_Check(argument)) {
        PyErr_Format(PyExc_ValueError, "drain takes a count of records: max_records=%R, min=1", argument);
        return NULL;
    }
    PyObject *list = PyList_New(0);
    if (list == NULL) {
        return NULL;
    }
    for (long i = 0; i < max; i++) {
        shr_record record;
        int answer = shr_next(&self->end, &record);
        /* what was found before an end or a fault is handed out first; the next call tells */
        if (answer == SHR_NOT_NOW || (answer < 0 && i > 0)) {
            break;
        }
        if (answer < 0) {
            Py_DECREF(list);
            return raise_of(self, answer);
        }
        Record *r = PyObject_New(Record, &Record_Type);
        if (r == NULL) {
            shr_rewind(&self->end);
            Py_DECREF(list);
            return NULL;
        }
        Py_INCREF(self);
        r->consumer = self;
        r->start = record.payload;
        r->length = record.length;
        r->type = record.type;
        r->flags = record.flags;
        r->releases = self->end.releases;
        int failed = PyList_Append(list, (PyObject *)r);
        Py_DECREF(r);
        if (failed) {
            shr_rewind(&self->end);
            Py_DECREF(list);
            return NULL;
        }
    }
    return list;
}

static PyObject *consumer_release(ConsumerCore *self, PyObject *Py_UNUSED(ignored)) {
    int answer = shr_release(&self->end);
    if (answer < 0) {
        return raise_of(self, answer);
    }
    Py_RETURN_NONE;
}

static PyObject *consumer_rewind(ConsumerCore *self, PyObject *Py_UNUSED(ignored)) {
    shr_rewind(&self->end);
    Py_RETURN_NONE;
}

static PyObject *consumer_has_records(ConsumerCore *self, PyObject *Py_UNUSED(ignored)) {
    /* the answers of a look: not now, something, or an error; the end counts as something to see */
    int answer = shr_readable(&self->end);
    if (answer == SHR_PEER_FINISHED) {
        Py_RETURN_TRUE;
    }
    return answer < 0 ? raise_of(self, answer) : PyBool_FromLong(answer);
}

static PyObject *consumer_backlog(ConsumerCore *self, PyObject *Py_UNUSED(ignored)) {
    uint64_t bytes;
    int answer = shr_backlog_bytes(&self->end, &bytes);
    return answer < 0 ? raise_of(self, answer) : PyLong_FromUnsignedLongLong(bytes);
}

static PyObject *consumer_close(ConsumerCore *self, PyObject *Py_UNUSED(ignored)) {
    if (self->keep != NULL) {
        shr_consumer_close(&self->end);
    }
    Py_RETURN_NONE;
}

static PyObject *consumer_disable(ConsumerCore *self, PyObject *Py_UNUSED(ignored)) {
    self->end.usable = 0;
    self->end.releases += 1;
    Py_RETURN_NONE;
}

static PyObject *consumer_address(ConsumerCore *self, void *Py_UNUSED(closure)) {
    return PyLong_FromVoidPtr(&self->end);
}

static PyObject *consumer_usable(ConsumerCore *self, void *Py_UNUSED(closure)) {
    return PyBool_FromLong((long)self->end.usable);
}

static PyObject *consumer_position(ConsumerCore *self, void *Py_UNUSED(closure)) {
    return PyLong_FromUnsignedLongLong(self->end.head);
}

static PyObject *consumer_tail_seen(ConsumerCore *self, PyObject *Py_UNUSED(ignored)) {
    uint64_t bytes;
    int answer = shr_backlog_bytes(&self->end, &bytes);
    return answer < 0 ? raise_of(self, answer) : PyLong_FromUnsignedLongLong(self->end.tail_seen);
}

static PyObject *consumer_read_position(ConsumerCore *self, void *Py_UNUSED(closure)) {
    return PyLong_FromUnsignedLongLong(self->end.read);
}

static void consumer_dealloc(ConsumerCore *self) {
    if (self->weakrefs != NULL) {
        PyObject_ClearWeakRefs((PyObject *)self);
    }
    Py_XDECREF(self->keep);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyMethodDef consumer_methods[] = {
    {"_open", (PyCFunction)consumer_open, METH_VARARGS, NULL},
    {"_close", (PyCFunction)consumer_close, METH_NOARGS, NULL},
    {"_disable", (PyCFunction)consumer_disable, METH_NOARGS, NULL},
    {"try_pop", (PyCFunction)consumer_try_pop, METH_NOARGS,
     "try_pop() -> bytes | None\n\nCopy one record out and release it. None: nothing there now."},
    {"drain", (PyCFunction)consumer_drain, METH_O,
     "drain(max_records, /) -> list[Record]\n\nHand out records in place; they stay until release()."},
    {"release", (PyCFunction)consumer_release, METH_NOARGS,
     "release() -> None\n\nFree everything drained so far; its records are refused from now on."},
    {"rewind", (PyCFunction)consumer_rewind, METH_NOARGS,
     "rewind() -> None\n\nThe next drain hands out again what was drained and not released."},
    {"is_readable", (PyCFunction)consumer_has_records, METH_NOARGS,
     "is_readable() -> bool\n\nIs there something that was not drained yet, or the end to be seen?"},
    {"backlog_bytes", (PyCFunction)consumer_backlog, METH_NOARGS,
     "backlog_bytes() -> int\n\nBytes published and not drained, record headers and padding included."},
    {"snapshot_tail", (PyCFunction)consumer_tail_seen, METH_NOARGS,
     "snapshot_tail() -> int\n\nThe published position as it stands now, in bytes."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef consumer_getset[] = {
    {"address", (getter)consumer_address, NULL, "Where the private state lies, for the calls that wait.",
     NULL},
    {"is_open", (getter)consumer_usable, NULL, "False once closed, or in a forked child.", NULL},
    {"position", (getter)consumer_position, NULL, "Released position, in bytes; only grows.", NULL},
    {"read_position", (getter)consumer_read_position, NULL, "Position behind the last record drained.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

PyTypeObject ConsumerCore_Type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "shmring._fast.ConsumerCore",
    .tp_basicsize = sizeof(ConsumerCore),
    .tp_dealloc = (destructor)consumer_dealloc,
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE,
    .tp_weaklistoffset = offsetof(ConsumerCore, weakrefs),
    .tp_methods = consumer_methods,
    .tp_getset = consumer_getset,
    .tp_new = PyType_GenericNew,
    .tp_doc = "The private state of a consumer, and its calls that never wait.",
};

static void record_dealloc(Record *self) {
    Py_DECREF(self->consumer);
    PyObject_Free(self);
}

static int record_getbuffer(Record *self, Py_buffer *view, int flags) {
    if (self->releases != self->consumer->end.releases) {
        view->obj = NULL;
        PyErr_SetString(PyExc_ValueError, "the record was released: its bytes may be overwritten");
        return -1;
    }
    return PyBuffer_FillInfo(view, (PyObject *)self, self->start, (Py_ssize_t)self->length, 1, flags);
}

static Py_ssize_t record_length(Record *self) { return (Py_ssize_t)self->length; }

static PyObject *record_payload(Record *self, void *Py_UNUSED(closure)) {
    return PyMemoryView_FromObject((PyObject *)self);
}

static PyObject *record_is_released(Record *self, void *Py_UNUSED(closure)) {
    return PyBool_FromLong(self->releases != self->consumer->end.releases);
}

static PyMemberDef record_members[] = {
    {"type", T_UBYTE, offsetof(Record, type), READONLY, "What the producer called it, 0 to 255."},
    {"flags", T_UBYTE, offsetof(Record, flags), READONLY, "The producer's own, 0 to 255."},
    {NULL, 0, 0, 0, NULL},
};

static PyGetSetDef record_getset[] = {
    {"payload", (getter)record_payload, NULL,
     "A read-only memoryview of the record in place. Its memory stays mapped; its bytes are the record's "
     "until release().",
     NULL},
    {"is_released", (getter)record_is_released, NULL, "True once its bytes may be overwritten.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyBufferProcs record_buffer = {(getbufferproc)record_getbuffer, NULL};
static PySequenceMethods record_sequence = {.sq_length = (lenfunc)record_length};

PyTypeObject Record_Type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "shmring._fast.Record",
    .tp_basicsize = sizeof(Record),
    .tp_dealloc = (destructor)record_dealloc,
    .tp_as_buffer = &record_buffer,
    .tp_as_sequence = &record_sequence,
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_members = record_members,
    .tp_getset = record_getset,
    .tp_doc = "One record in place: a read-only buffer until it is released.",
};

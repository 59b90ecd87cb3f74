/* ConsumerCore: the private state of a consumer, and its calls that never wait. Record: one drained
 * record, a buffer that is refused once its bytes were released. */
#include "fast.h"
#include "shmring/park.h"

static PyObject *raise_of(ConsumerCore *self, int answer) {
    uint64_t value = answer == SHR_PEER_LOST ? self->end.header->producer.pid : self->end.bad_value;
    return fast_raise(answer, self->end.bad_position, value, 0, 0);
}

static PyObject *consumer_open(ConsumerCore *self, PyObject *args) {
    unsigned long long address, capacity, spin_ns;
    int lock_fd, takeover, poison;
    unsigned int pid;
    PyObject *keep;
    if (!PyArg_ParseTuple(args, "KKiIppKO", &address, &capacity, &lock_fd, &pid, &takeover, &poison, &spin_ns,
                          &keep)) {
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
    self->spin_ns = spin_ns;
    Py_INCREF(keep);
    self->keep = keep;
    Py_RETURN_NONE;
}

/* A record's bytes in a new object; the record is handed out, not released. */
static inline PyObject *copy_out(ConsumerCore *self, const shr_record *record) {
    PyObject *copy;
    if (record->length < COPY_RELEASES_GIL) {
        copy = PyBytes_FromStringAndSize((const char *)record->payload, (Py_ssize_t)record->length);
    } else {
        copy = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)record->length);
        if (copy != NULL) {
            fast_copy(PyBytes_AS_STRING(copy), record->payload, record->length, &self->is_copying);
        }
    }
    if (copy == NULL) {
        shr_rewind(&self->end);
    }
    return copy;
}

/* What stands in the way of a call that gives back or hands out; 0, or -1 with an exception. */
static inline int check_pop(ConsumerCore *self) {
    if (self->is_copying) {
        fast_raise_copying();
        return -1;
    }
    if (self->end.usable && self->end.read != self->end.head) {
        raise_of(self, SHR_UNRELEASED);
        return -1;
    }
    return 0;
}

/* SHR_DONE and a copy, SHR_NOT_NOW, or -1 with an exception. */
static inline int pop(ConsumerCore *self, PyObject **copy) {
    shr_record record;
    int answer = shr_next(&self->end, &record);
    if (answer == SHR_DONE) {
        *copy = copy_out(self, &record);
        if (*copy == NULL) {
            return -1;
        }
        shr_release(&self->end);
    } else if (answer < 0) {
        raise_of(self, answer);
        return -1;
    }
    return answer;
}

static PyObject *consumer_try_pop(ConsumerCore *self, PyObject *Py_UNUSED(ignored)) {
    PyObject *copy;
    if (check_pop(self) < 0) {
        return NULL;
    }
    int answer = pop(self, &copy);
    if (answer == SHR_DONE) {
        return copy;
    }
    if (answer < 0) {
        return NULL;
    }
    Py_RETURN_NONE;
}

/* Is it in vain to wait for the peer? One system call. */
static int is_peer_lost(ConsumerCore *self) {
    return !self->end.takeover && shr_producer_state(&self->end) == SHR_PEER_LOST;
}

static PyObject *consumer_pop(ConsumerCore *self, PyObject *const *args, Py_ssize_t nargs, PyObject *names) {
    static const char *const parameters[] = {"timeout_s"};
    PyObject *timeout = nargs > 0 ? args[0] : NULL;
    if ((nargs > 1 || names != NULL) &&
        fast_arguments("pop", args, nargs, names, parameters, 1, &timeout) < 0) {
        return NULL;
    }
    Deadline deadline = {UINT64_MAX, self->spin_ns};
    if (timeout != NULL && fast_deadline(timeout, self->spin_ns, &deadline) < 0) {
        return NULL;
    }
    PyObject *copy;
    if (check_pop(self) < 0) {
        return NULL;
    }
    int answer = pop(self, &copy);
    if (answer != SHR_NOT_NOW) {
        return answer == SHR_DONE ? copy : NULL;
    }
    shr_consumer *end = &self->end;
    int slept = 1;
    while (answer == SHR_NOT_NOW && (slept = fast_wait_slice(&deadline, end, NULL, 0)) > 0) {
        /* tried after a silent slice too: the try asks whether the peer still lives */
        answer = check_pop(self) < 0 ? -1 : pop(self, &copy);
    }
    shr_wait_over(&end, 1, NULL, 0);
    if (answer == SHR_DONE) {
        return copy;
    }
    if (answer < 0 || slept < 0) {
        return NULL;
    }
    Py_RETURN_NONE;
}

/* Records that are taken from the ring before objects are made of them. */
#define CHUNK 64

/* The next records, at most CHUNK; -1 with an exception only if the first one is none. */
static int next_records(ConsumerCore *self, shr_record *records, long max, int is_first) {
    int count = 0;
    while (count < CHUNK && count < max) {
        int answer = shr_next(&self->end, &records[count]);
        if (answer == SHR_DONE) {
            count++;
            continue;
        }
        /* what was found before an end or a fault is handed out first; the next call tells */
        if (answer < 0 && count == 0 && is_first) {
            raise_of(self, answer);
            return -1;
        }
        break;
    }
    return count;
}

/* A count of records, at least 1; -1 with an exception. */
static long take_count(PyObject *argument, const char *function) {
    long max = PyLong_AsLong(argument);
    if (max == -1 && PyErr_Occurred()) {
        return -1;
    }
    if (max < 1 || PyBool_Check(argument)) {
        PyErr_Format(PyExc_ValueError, "%s takes a count of records: max_records=%R, min=1", function,
                     argument);
        return -1;
    }
    return max;
}

static PyObject *record_of(ConsumerCore *self, const shr_record *record);
static PyObject *bytes_of(ConsumerCore *self, const shr_record *record) {
    (void)self;
    return PyBytes_FromStringAndSize((const char *)record->payload, (Py_ssize_t)record->length);
}

/* A list of what `make` makes of the next records. On an error all are handed out again later. */
static PyObject *take_records(ConsumerCore *self, long max,
                              PyObject *(*make)(ConsumerCore *, const shr_record *)) {
    shr_record records[CHUNK];
    int count = next_records(self, records, max, 1);
    if (count < 0) {
        return NULL;
    }
    PyObject *list = PyList_New(count);
    for (int i = 0; list != NULL && i < count; i++) {
        PyObject *item = make(self, &records[i]);
        if (item == NULL) {
            Py_CLEAR(list);
        } else {
            PyList_SET_ITEM(list, i, item);
        }
    }
    long total = count;
    while (list != NULL && count == CHUNK && total < max) {
        count = next_records(self, records, max - total, 0);
        for (int i = 0; list != NULL && i < count; i++) {
            PyObject *item = make(self, &records[i]);
            if (item == NULL || PyList_Append(list, item) < 0) {
                Py_CLEAR(list);
            }
            Py_XDECREF(item);
        }
        total += count;
    }
    if (list == NULL) {
        shr_rewind(&self->end);
    }
    return list;
}

static PyObject *consumer_drain(ConsumerCore *self, PyObject *argument) {
    long max = take_count(argument, "drain");
    if (max < 0) {
        return NULL;
    }
    if (self->is_copying) {
        return fast_raise_copying();
    }
    return take_records(self, max, record_of);
}

static PyObject *consumer_pop_many(ConsumerCore *self, PyObject *argument) {
    long max = take_count(argument, "pop_many");
    if (max < 0 || check_pop(self) < 0) {
        return NULL;
    }
    PyObject *list = take_records(self, max, bytes_of);
    if (list != NULL && PyList_GET_SIZE(list) > 0) {
        shr_release(&self->end);
    }
    return list;
}

static PyObject *consumer_drain_wait(ConsumerCore *self, PyObject *const *args, Py_ssize_t nargs,
                                     PyObject *names) {
    static const char *const parameters[] = {"max_records", "timeout_s"};
    PyObject *values[2] = {nargs > 0 ? args[0] : NULL, NULL};
    if ((nargs != 1 || names != NULL) &&
        fast_arguments("drain_wait", args, nargs, names, parameters, 2, values) < 0) {
        return NULL;
    }
    if (values[0] == NULL) {
        PyErr_SetString(PyExc_TypeError, "drain_wait takes a count of records");
        return NULL;
    }
    Deadline deadline = {UINT64_MAX, self->spin_ns};
    if (values[1] != NULL && fast_deadline(values[1], self->spin_ns, &deadline) < 0) {
        return NULL;
    }
    PyObject *list = consumer_drain(self, values[0]);
    if (list == NULL || PyList_GET_SIZE(list) > 0) {
        return list;
    }
    shr_consumer *end = &self->end;
    int slept;
    while ((slept = fast_wait_slice(&deadline, end, NULL, 0)) > 0) {
        Py_SETREF(list, consumer_drain(self, values[0]));
        if (list == NULL || PyList_GET_SIZE(list) > 0) {
            break;
        }
    }
    shr_wait_over(&end, 1, NULL, 0);
    if (slept < 0) {
        Py_CLEAR(list);
    }
    return list;
}

/* As shr_readable, with the end as something to see; -1 with an exception. */
static int is_readable(ConsumerCore *self) {
    int answer = shr_readable(&self->end);
    if (answer < 0 && answer != SHR_PEER_FINISHED) {
        raise_of(self, answer);
        return -1;
    }
    return answer != SHR_NOT_NOW;
}

static PyObject *consumer_wait_until_readable(ConsumerCore *self, PyObject *const *args, Py_ssize_t nargs,
                                              PyObject *names) {
    static const char *const parameters[] = {"timeout_s"};
    PyObject *timeout;
    Deadline deadline;
    if (fast_arguments("wait_until_readable", args, nargs, names, parameters, 1, &timeout) < 0 ||
        fast_deadline(timeout, self->spin_ns, &deadline) < 0) {
        return NULL;
    }
    int found = is_readable(self);
    if (found != 0) {
        return found < 0 ? NULL : Py_NewRef(Py_True);
    }
    shr_consumer *end = &self->end;
    int slept;
    while (found == 0 && (slept = fast_wait_slice(&deadline, end, NULL, 0)) != 0) {
        found = slept < 0 ? -1 : is_readable(self);
        if (found == 0 && is_peer_lost(self)) {
            found = 1; /* the next drain says so */
        }
    }
    shr_wait_over(&end, 1, NULL, 0);
    return found < 0 ? NULL : PyBool_FromLong(found);
}

static PyObject *consumer_release(ConsumerCore *self, PyObject *Py_UNUSED(ignored)) {
    if (self->is_copying) {
        return fast_raise_copying();
    }
    int answer = shr_release(&self->end);
    if (answer < 0) {
        return raise_of(self, answer);
    }
    Py_RETURN_NONE;
}

static PyObject *consumer_beat(ConsumerCore *self, PyObject *Py_UNUSED(ignored)) {
    shr_consumer_beat(&self->end);
    Py_RETURN_NONE;
}

static PyObject *consumer_rewind(ConsumerCore *self, PyObject *Py_UNUSED(ignored)) {
    if (self->is_copying) {
        return fast_raise_copying();
    }
    shr_rewind(&self->end);
    Py_RETURN_NONE;
}

static PyObject *consumer_is_readable(ConsumerCore *self, PyObject *Py_UNUSED(ignored)) {
    int answer = is_readable(self);
    return answer < 0 ? NULL : PyBool_FromLong(answer);
}

static PyObject *consumer_backlog(ConsumerCore *self, PyObject *Py_UNUSED(ignored)) {
    uint64_t bytes;
    int answer = shr_backlog_bytes(&self->end, &bytes);
    return answer < 0 ? raise_of(self, answer) : PyLong_FromUnsignedLongLong(bytes);
}

static PyObject *consumer_close(ConsumerCore *self, PyObject *Py_UNUSED(ignored)) {
    if (self->is_copying && self->end.usable) {
        return fast_raise_copying();
    }
    if (self->keep != NULL) {
        shr_consumer_close(&self->end);
    }
    Py_RETURN_NONE;
}

static PyObject *consumer_disable(ConsumerCore *self, PyObject *Py_UNUSED(ignored)) {
    self->end.usable = 0;
    self->is_copying = 0; /* the thread that did is the parent's */
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
    {"pop", (PyCFunction)(void (*)(void))consumer_pop, METH_FASTCALL | METH_KEYWORDS,
     "pop(timeout_s=None) -> bytes | None\n\nCopy one record out and release it, waiting up to `timeout_s` "
     "(None: for ever).\n\nNone: nothing came. Raises EndOfRing if the producer finished and nothing is "
     "left, "
     "PeerLostError within a second if it died."},
    {"pop_many", (PyCFunction)consumer_pop_many, METH_O,
     "pop_many(max_records, /) -> list[bytes]\n\nCopy records out and release them, all in one call. Empty: "
     "nothing there now."},
    {"drain_wait", (PyCFunction)(void (*)(void))consumer_drain_wait, METH_FASTCALL | METH_KEYWORDS,
     "drain_wait(max_records, timeout_s=None) -> list[Record]\n\nAs drain, waiting up to `timeout_s` for the "
     "first record. Empty: nothing came."},
    {"wait_until_readable", (PyCFunction)(void (*)(void))consumer_wait_until_readable,
     METH_FASTCALL | METH_KEYWORDS,
     "wait_until_readable(timeout_s=None) -> bool\n\nWait until something can be drained, or the end can be "
     "seen. False: `timeout_s` has passed.\n\nThe producer's death is an end too: the next drain says so."},
    {"release", (PyCFunction)consumer_release, METH_NOARGS,
     "release() -> None\n\nFree everything drained so far; its records are refused from now on."},
    {"beat", (PyCFunction)consumer_beat, METH_NOARGS,
     "beat() -> None\n\nSay that this process is at work elsewhere; counted in the statistics."},
    {"rewind", (PyCFunction)consumer_rewind, METH_NOARGS,
     "rewind() -> None\n\nThe next drain hands out again what was drained and not released."},
    {"is_readable", (PyCFunction)consumer_is_readable, METH_NOARGS,
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

/* Records come and go with every drain: those of the last one are used again. */
#define SPARE_MAX 256
static Record *spare[SPARE_MAX];
static int spare_count;

static PyObject *record_of(ConsumerCore *self, const shr_record *record) {
    Record *r;
    if (spare_count > 0) {
        r = spare[--spare_count];
        PyObject_Init((PyObject *)r, &Record_Type);
    } else {
        r = PyObject_New(Record, &Record_Type);
        if (r == NULL) {
            return NULL;
        }
    }
    Py_INCREF(self);
    r->consumer = self;
    r->start = record->payload;
    r->length = record->length;
    r->type = record->type;
    r->flags = record->flags;
    r->releases = self->end.releases;
    return (PyObject *)r;
}

static void record_dealloc(Record *self) {
    Py_DECREF(self->consumer);
    if (spare_count < SPARE_MAX) {
        spare[spare_count++] = self;
    } else {
        PyObject_Free(self);
    }
}

static int record_getbuffer(Record *self, Py_buffer *view, int flags) {
    if (fast_is_released(self)) {
        view->obj = NULL;
        fast_raise_released();
        return -1;
    }
    return PyBuffer_FillInfo(view, (PyObject *)self, self->start, (Py_ssize_t)self->length, 1, flags);
}

static Py_ssize_t record_length(Record *self) { return (Py_ssize_t)self->length; }

static PyObject *record_subscript(Record *self, PyObject *key) {
    if (fast_is_released(self)) {
        return fast_raise_released();
    }
    if (PyLong_CheckExact(key)) {
        Py_ssize_t index = PyNumber_AsSsize_t(key, PyExc_IndexError);
        if (index == -1 && PyErr_Occurred()) {
            return NULL;
        }
        index += index < 0 ? (Py_ssize_t)self->length : 0;
        if (index < 0 || index >= (Py_ssize_t)self->length) {
            PyErr_Format(PyExc_IndexError, "byte is outside the record: index=%R, length=%u", key,
                         self->length);
            return NULL;
        }
        return PyLong_FromLong(self->start[index]);
    }
    PyObject *view = PyMemoryView_FromObject((PyObject *)self);
    PyObject *item = view == NULL ? NULL : PyObject_GetItem(view, key);
    Py_XDECREF(view);
    return item;
}

static PyObject *record_payload(Record *self, void *Py_UNUSED(closure)) {
    return PyMemoryView_FromObject((PyObject *)self);
}

static PyObject *record_is_released(Record *self, void *Py_UNUSED(closure)) {
    return PyBool_FromLong(fast_is_released(self));
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
static PyMappingMethods record_mapping = {(lenfunc)record_length, (binaryfunc)record_subscript, NULL};

PyTypeObject Record_Type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "shmring._fast.Record",
    .tp_basicsize = sizeof(Record),
    .tp_dealloc = (destructor)record_dealloc,
    .tp_as_buffer = &record_buffer,
    .tp_as_mapping = &record_mapping,
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_members = record_members,
    .tp_getset = record_getset,
    .tp_doc = "One record in place: a read-only buffer until it is released.",
};

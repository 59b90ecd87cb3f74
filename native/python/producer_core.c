/* ProducerCore: the private state of a producer, and its calls that never wait. */
#include "fast.h"
#include "shmring/park.h"

static PyObject *answer_of(ProducerCore *self, int answer, uint64_t length) {
    if (answer >= 0) {
        return PyBool_FromLong(answer);
    }
    return fast_raise_producer(self, answer, length);
}

static PyObject *producer_open(ProducerCore *self, PyObject *args) {
    unsigned long long address, capacity, spin_ns;
    int lock_fd, takeover;
    unsigned int pid;
    PyObject *keep;
    if (!PyArg_ParseTuple(args, "KKiIpKO", &address, &capacity, &lock_fd, &pid, &takeover, &spin_ns, &keep)) {
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
    self->spin_ns = spin_ns;
    Py_INCREF(keep);
    self->keep = keep;
    Py_RETURN_NONE;
}

/* The bytes of a payload. `view->obj` stays NULL where there is nothing to release. */
static inline int take_payload(PyObject *payload, Py_buffer *view) {
    if (PyBytes_CheckExact(payload)) {
        view->obj = NULL;
        view->buf = PyBytes_AS_STRING(payload);
        view->len = PyBytes_GET_SIZE(payload);
        return 0;
    }
    return PyObject_GetBuffer(payload, view, PyBUF_SIMPLE);
}

static inline void give_payload(Py_buffer *view) {
    if (view->obj != NULL) {
        PyBuffer_Release(view);
    }
}

/* The tags that were given, 0 for those that were not. */
static int take_tags(PyObject *type, PyObject *flags, uint8_t tags[2]) {
    int values[2] = {type == NULL ? 0 : fast_byte(type, "type"),
                     flags == NULL ? 0 : fast_byte(flags, "flags")};
    if ((values[0] < 0 || values[1] < 0) && PyErr_Occurred()) {
        return -1;
    }
    tags[0] = (uint8_t)values[0];
    tags[1] = (uint8_t)values[1];
    return 0;
}

/* A record, committed and not published. */
static inline int append(ProducerCore *self, const Py_buffer *view, const uint8_t tags[2]) {
    uint64_t length = (uint64_t)view->len;
    if (length < COPY_RELEASES_GIL) {
        return shr_push(&self->end, view->buf, length, tags[0], tags[1], 0);
    }
    uint8_t *to = NULL;
    /* the claim stays open during the copy: nobody else can write through this end */
    int answer = shr_claim(&self->end, length, &to);
    if (answer != SHR_DONE) {
        return answer;
    }
    fast_copy(to, view->buf, length, &self->is_copying);
    return shr_commit(&self->end, length, tags[0], tags[1]);
}

static PyObject *push(ProducerCore *self, PyObject *const *args, Py_ssize_t nargs, int publish) {
    Py_buffer view;
    uint8_t tags[2] = {0, 0};
    if (nargs < 1 || nargs > 3) {
        PyErr_Format(PyExc_TypeError, "takes payload, type and flags: %zd arguments given", nargs);
        return NULL;
    }
    if ((nargs > 1 && take_tags(args[1], nargs > 2 ? args[2] : NULL, tags) < 0) ||
        take_payload(args[0], &view) < 0) {
        return NULL;
    }
    int answer = append(self, &view, tags);
    if (answer == SHR_DONE && publish) {
        shr_publish(&self->end);
    }
    uint64_t length = (uint64_t)view.len;
    give_payload(&view);
    return answer_of(self, answer, length);
}

static PyObject *producer_try_push(ProducerCore *self, PyObject *const *args, Py_ssize_t nargs) {
    return push(self, args, nargs, 1);
}

static PyObject *producer_try_append(ProducerCore *self, PyObject *const *args, Py_ssize_t nargs) {
    return push(self, args, nargs, 0);
}

static PyObject *push_waiting(ProducerCore *self, const Py_buffer *view, const uint8_t tags[2],
                              Deadline *deadline) {
    if (deadline->until_ns == 0) {
        Py_RETURN_FALSE;
    }
    /* refused where what is unpublished leaves no room to wait for */
    PyObject *checked = PyObject_CallMethod((PyObject *)self, "_check_wait", "n", view->len);
    if (checked == NULL) {
        return NULL;
    }
    Py_DECREF(checked);
    int answer = SHR_NOT_NOW, slept;
    shr_producer *end = &self->end;
    while (answer == SHR_NOT_NOW && (slept = fast_wait_slice(deadline, NULL, end, (uint64_t)view->len)) > 0) {
        /* tried after a silent slice too: the try asks whether the peer still lives */
        answer = append(self, view, tags);
    }
    shr_wait_over(NULL, 0, &end, 1);
    if (PyErr_Occurred()) {
        return NULL;
    }
    if (answer == SHR_DONE) {
        shr_publish(end);
    }
    return answer_of(self, answer, (uint64_t)view->len);
}

static PyObject *producer_push(ProducerCore *self, PyObject *const *args, Py_ssize_t nargs, PyObject *names) {
    static const char *const parameters[] = {"payload", "timeout_s", "type", "flags"};
    PyObject *values[4] = {nargs > 0 ? args[0] : NULL, NULL, NULL, NULL};
    if ((nargs != 1 || names != NULL) &&
        fast_arguments("push", args, nargs, names, parameters, 4, values) < 0) {
        return NULL;
    }
    if (values[0] == NULL) {
        PyErr_SetString(PyExc_TypeError, "push takes a payload");
        return NULL;
    }
    Deadline deadline = {UINT64_MAX, self->spin_ns};
    if (values[1] != NULL && fast_deadline(values[1], self->spin_ns, &deadline) < 0) {
        return NULL;
    }
    Py_buffer view;
    uint8_t tags[2];
    if (take_tags(values[2], values[3], tags) < 0 || take_payload(values[0], &view) < 0) {
        return NULL;
    }
    int answer = append(self, &view, tags);
    PyObject *result;
    if (answer == SHR_DONE) {
        shr_publish(&self->end);
        result = Py_NewRef(Py_True);
    } else if (answer == SHR_NOT_NOW) {
        result = push_waiting(self, &view, tags, &deadline);
    } else {
        result = answer_of(self, answer, (uint64_t)view.len);
    }
    give_payload(&view);
    return result;
}

/* Append what fits of a sequence; the count, or -1 with an exception and nothing of it appended. */
static Py_ssize_t append_many(ProducerCore *self, PyObject *sequence, const uint8_t tags[2]) {
    shr_producer *end = &self->end;
    const uint64_t pending = end->pending, records = end->pending_records;
    Py_ssize_t count = 0;
    /* asked anew each time: taking a buffer may run code that changes a list */
    while (count < PySequence_Fast_GET_SIZE(sequence)) {
        Py_buffer view;
        PyObject *payload = PySequence_Fast_GET_ITEM(sequence, count);
        Py_INCREF(payload);
        int answer = take_payload(payload, &view);
        if (answer == 0) {
            uint64_t length = (uint64_t)view.len;
            /* the GIL is kept whatever the length: the records of one call belong together */
            answer = shr_push(end, view.buf, length, tags[0], tags[1], 0);
            give_payload(&view);
            if (answer < 0) {
                answer_of(self, answer, length);
            }
        }
        Py_DECREF(payload);
        if (answer == SHR_NOT_NOW) {
            break;
        }
        if (PyErr_Occurred()) {
            /* unless what ran while a buffer was taken has closed the end, or published */
            if (end->usable && pending - end->tail <= end->pending - end->tail) {
                end->pending = pending;
                end->pending_records = records;
            }
            return -1;
        }
        count++;
    }
    return count;
}

static PyObject *producer_push_many(ProducerCore *self, PyObject *const *args, Py_ssize_t nargs) {
    uint8_t tags[2] = {0, 0};
    if (nargs < 1 || nargs > 3) {
        PyErr_Format(PyExc_TypeError, "takes payloads, type and flags: %zd arguments given", nargs);
        return NULL;
    }
    if (nargs > 1 && take_tags(args[1], nargs > 2 ? args[2] : NULL, tags) < 0) {
        return NULL;
    }
    PyObject *sequence = PySequence_Fast(args[0], "push_many takes a list of payloads");
    if (sequence == NULL) {
        return NULL;
    }
    Py_ssize_t count = append_many(self, sequence, tags);
    Py_DECREF(sequence);
    if (count < 0) {
        return NULL;
    }
    if (count > 0) {
        shr_publish(&self->end);
    }
    return PyLong_FromSsize_t(count);
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

/* In one piece: a signal between a claim and its abort would leave it open. */
static PyObject *producer_has_room(ProducerCore *self, PyObject *argument) {
    unsigned long long length = PyLong_AsUnsignedLongLong(argument);
    if (length == (unsigned long long)-1 && PyErr_Occurred()) {
        return NULL;
    }
    uint8_t *payload;
    int answer = shr_claim(&self->end, length, &payload);
    if (answer == SHR_DONE) {
        shr_abort(&self->end);
    }
    return answer_of(self, answer, length);
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
    if (self->is_copying) {
        return fast_raise_copying();
    }
    return answer_of(self, shr_commit(&self->end, length, (uint8_t)type, (uint8_t)flags), length);
}

static PyObject *producer_abort(ProducerCore *self, PyObject *Py_UNUSED(ignored)) {
    return self->is_copying ? fast_raise_copying() : answer_of(self, shr_abort(&self->end), 0);
}

static PyObject *producer_discard(ProducerCore *self, PyObject *Py_UNUSED(ignored)) {
    if (self->is_copying) {
        return fast_raise_copying();
    }
    shr_discard(&self->end);
    Py_RETURN_NONE;
}

static PyObject *producer_free_bytes(ProducerCore *self, PyObject *Py_UNUSED(ignored)) {
    uint64_t bytes;
    int answer = shr_free_bytes(&self->end, &bytes);
    return answer < 0 ? answer_of(self, answer, 0) : PyLong_FromUnsignedLongLong(bytes);
}

static PyObject *producer_close(ProducerCore *self, PyObject *Py_UNUSED(ignored)) {
    if (self->is_copying && self->end.usable) {
        return fast_raise_copying();
    }
    if (self->keep != NULL) {
        shr_producer_close(&self->end);
    }
    Py_RETURN_NONE;
}

static PyObject *producer_disable(ProducerCore *self, PyObject *Py_UNUSED(ignored)) {
    self->end.usable = 0;
    self->is_copying = 0; /* the thread that did is the parent's */
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
    {"_has_room", (PyCFunction)producer_has_room, METH_O, NULL},
    {"_commit", (PyCFunction)(void (*)(void))producer_commit, METH_FASTCALL, NULL},
    {"_abort", (PyCFunction)producer_abort, METH_NOARGS, NULL},
    {"_close", (PyCFunction)producer_close, METH_NOARGS, NULL},
    {"_disable", (PyCFunction)producer_disable, METH_NOARGS, NULL},
    {"try_push", (PyCFunction)(void (*)(void))producer_try_push, METH_FASTCALL,
     "try_push(payload, type=0, flags=0, /) -> bool\n\nCopy one record in and publish it. False: no room "
     "now."},
    {"try_append", (PyCFunction)(void (*)(void))producer_try_append, METH_FASTCALL,
     "try_append(payload, type=0, flags=0, /) -> bool\n\nAs try_push, but seen only after publish()."},
    {"push", (PyCFunction)(void (*)(void))producer_push, METH_FASTCALL | METH_KEYWORDS,
     "push(payload, timeout_s=None, type=0, flags=0) -> bool\n\nCopy one record in and publish it, waiting "
     "for room up to `timeout_s` (None: for ever).\n\nFalse: still full. Raises EndOfRing if the consumer "
     "finished, PeerLostError within a second if it died, RecordTooLargeError if the record can never fit."},
    {"push_many", (PyCFunction)(void (*)(void))producer_push_many, METH_FASTCALL,
     "push_many(payloads, type=0, flags=0, /) -> int\n\nCopy in as many records as there is room for and "
     "publish them at once; how many those were.\n\nIf one cannot be a record, an error says so and none is "
     "sent."},
    {"push_frame", (PyCFunction)(void (*)(void))fast_push_frame, METH_FASTCALL,
     "push_frame(layout, rows, columns, publish=True, flags=0, timeout_s=0, /) -> bool\n\nWrite one frame of "
     "columns. False: no room, after waiting for it up to `timeout_s` (None: for ever)."},
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

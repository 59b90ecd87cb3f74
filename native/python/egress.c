/* `manager._egress`: a decode step into the rings of all shards with one call, the GIL kept. */
#include "egress.h"

#define NPY_NO_DEPRECATED_API NPY_1_7_API_VERSION
#include <numpy/arrayobject.h>

int egress_init_dealer(void) {
    import_array1(-1);
    return 0;
}

void *egress_grow(void *block, size_t count, size_t itemsize) {
    void *grown = PyMem_Realloc(block, count * itemsize);
    if (grown == NULL) {
        PyErr_NoMemory();
    }
    return grown;
}

PyObject *egress_left(const Dealer *dealer, uint32_t left) {
    if (left == 0) {
        Py_RETURN_NONE;
    }
    PyObject *list = PyList_New(0);
    for (uint32_t s = 0; list != NULL && s < dealer->shards; s++) {
        if (dealer->parts[s].answer != SHR_DONE) {
            PyObject *shard = PyLong_FromUnsignedLong(s);
            if (shard == NULL || PyList_Append(list, shard) < 0) {
                Py_CLEAR(list);
            }
            Py_XDECREF(shard);
        }
    }
    return list;
}

/* Dealer(producers, addresses, fingerprint, type, flags) */
static PyObject *dealer_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    PyObject *producers, *addresses;
    unsigned long long fingerprint;
    unsigned char tag, flags;
    if (kwargs != NULL && PyDict_Size(kwargs) != 0) {
        PyErr_SetString(PyExc_TypeError, "takes no keyword arguments");
        return NULL;
    }
    if (!PyArg_ParseTuple(args, "O!O!Kbb", &PyTuple_Type, &producers, &PyTuple_Type, &addresses, &fingerprint,
                          &tag, &flags)) {
        return NULL;
    }
    Py_ssize_t shards = PyTuple_GET_SIZE(producers);
    if (shards == 0 || shards != PyTuple_GET_SIZE(addresses)) {
        PyErr_SetString(PyExc_ValueError, "takes a producer and its address for each shard");
        return NULL;
    }
    Dealer *self = (Dealer *)type->tp_alloc(type, 0);
    if (self == NULL) {
        return NULL;
    }
    self->kind = (shr_batch_kind){fingerprint, tag, flags};
    self->producers = Py_NewRef(producers);
    self->shards = (uint32_t)shards;
    self->parts = PyMem_Calloc((size_t)shards, sizeof *self->parts);
    if (self->parts == NULL) {
        Py_DECREF(self);
        return PyErr_NoMemory();
    }
    for (Py_ssize_t s = 0; s < shards; s++) {
        self->parts[s].producer = PyLong_AsVoidPtr(PyTuple_GET_ITEM(addresses, s));
        if (self->parts[s].producer == NULL) {
            Py_DECREF(self);
            return PyErr_Occurred() ? NULL : PyErr_Format(PyExc_ValueError, "address is zero: shard=%zd", s);
        }
    }
    return (PyObject *)self;
}

static void dealer_dealloc(Dealer *self) {
    Py_XDECREF(self->producers);
    PyMem_Free(self->parts);
    PyMem_Free(self->shard_of);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

/* The items of a flat array of exactly this type; NULL with an exception if it is none. */
static const void *items_of(PyObject *from, int type, npy_intp *count) {
    static const char empty[8];
    PyArrayObject *array = (PyArrayObject *)from;
    if (!PyArray_Check(from) || PyArray_NDIM(array) != 1 || !PyArray_IS_C_CONTIGUOUS(array) ||
        !PyArray_EquivTypenums(PyArray_TYPE(array), type) || !PyArray_ISNOTSWAPPED(array)) {
        PyErr_SetString(PyExc_TypeError, "takes flat arrays of exactly the frame's types");
        return NULL;
    }
    *count = PyArray_DIM(array, 0);
    return *count == 0 ? empty : PyArray_DATA(array);
}

/* deal(ids, counts, tokens, codes | None, values | None) */
static PyObject *dealer_deal(Dealer *self, PyObject *const *args, Py_ssize_t nargs) {
    if (nargs != 5) {
        PyErr_SetString(PyExc_TypeError, "deal takes ids, counts, tokens, codes and values");
        return NULL;
    }
    npy_intp n, counts, tokens, codes, values;
    shr_step step;
    if ((step.ids = items_of(args[0], NPY_UINT64, &n)) == NULL ||
        (step.counts = items_of(args[1], NPY_UINT32, &counts)) == NULL ||
        (step.token_ids = items_of(args[2], NPY_INT32, &tokens)) == NULL) {
        return NULL;
    }
    step.codes = NULL;
    step.values = NULL;
    codes = values = n;
    if ((args[3] != Py_None && (step.codes = items_of(args[3], NPY_UINT8, &codes)) == NULL) ||
        (args[4] != Py_None && (step.values = items_of(args[4], NPY_INT64, &values)) == NULL)) {
        return NULL;
    }
    if (n > UINT32_MAX || counts != n || codes != n || values != n) {
        return PyErr_Format(PyExc_ValueError,
                            "columns differ in length: request_ids=%zd, token_counts=%zd, finish_codes=%zd, "
                            "finish_values=%zd",
                            n, counts, codes, values);
    }
    uint64_t sum = shr_sum_counts(step.counts, (uint64_t)n);
    if (sum != (uint64_t)tokens) {
        return PyErr_Format(PyExc_ValueError, "token_ids and token_counts disagree: token_ids=%zd, sum=%llu",
                            tokens, (unsigned long long)sum);
    }
    step.rows = (uint32_t)n;
    if (step.rows > self->shard_of_capacity) {
        uint32_t *grown = egress_grow(self->shard_of, step.rows, sizeof *grown);
        if (grown == NULL) {
            return NULL;
        }
        self->shard_of = grown;
        self->shard_of_capacity = step.rows;
    }
    return egress_left(self, shr_deal(&step, &self->kind, self->parts, self->shards, self->shard_of));
}

static PyMethodDef dealer_methods[] = {
    {"deal", (PyCFunction)(void (*)(void))dealer_deal, METH_FASTCALL,
     "deal(request_ids, token_counts, token_ids, finish_codes, finish_values, /) -> list[int] | "
     "None\n\nWrite "
     "each shard's rows into its ring. The shards that had no room, or could not: they got nothing."},
    {NULL, NULL, 0, NULL},
};

PyTypeObject Dealer_Type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "manager._egress.Dealer",
    .tp_basicsize = sizeof(Dealer),
    .tp_dealloc = (destructor)dealer_dealloc,
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_methods = dealer_methods,
    .tp_new = dealer_new,
    .tp_doc = "The egress rings of all shards.",
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, .m_name = "manager._egress",
                                    .m_doc = "A decode step into the rings of all shards.", .m_size = -1};

PyMODINIT_FUNC PyInit__egress(void) {
    if (egress_init_dealer() < 0 || egress_init_running() < 0 || PyType_Ready(&Dealer_Type) < 0 ||
        PyType_Ready(&RunningCore_Type) < 0) {
        return NULL;
    }
    PyObject *m = PyModule_Create(&module);
    if (m != NULL && (PyModule_AddObjectRef(m, "Dealer", (PyObject *)&Dealer_Type) < 0 ||
                      PyModule_AddObjectRef(m, "RunningCore", (PyObject *)&RunningCore_Type) < 0)) {
        Py_CLEAR(m);
    }
    return m;
}

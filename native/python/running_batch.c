/* RunningCore: the requests of a scheduler, kept from step to step as the columns that a step sends.
 *
 * A step copies each shard's ids as they lie and picks each row's token by its number. */
#include <string.h>

#include "egress.h"
#include "running_rows.h"

#define NPY_NO_DEPRECATED_API NPY_1_7_API_VERSION
#include <numpy/arrayobject.h>

typedef struct {
    PyObject_HEAD Dealer *dealer;
    PyObject *convert; /* makes an int32 array of token ids that are neither array nor list */
    RunningRows rows;
    int32_t *tokens; /* scratch: converted token ids */
    uint32_t tokens_capacity;
} RunningCore;

int egress_init_running(void) {
    import_array1(-1);
    return 0;
}

/* RunningCore(dealer, closes_up, convert) */
static PyObject *running_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    PyObject *dealer, *convert;
    int closes_up;
    if (kwargs != NULL && PyDict_Size(kwargs) != 0) {
        PyErr_SetString(PyExc_TypeError, "takes no keyword arguments");
        return NULL;
    }
    if (!PyArg_ParseTuple(args, "O!pO", &Dealer_Type, &dealer, &closes_up, &convert)) {
        return NULL;
    }
    RunningCore *self = (RunningCore *)type->tp_alloc(type, 0);
    if (self == NULL) {
        return NULL;
    }
    self->dealer = (Dealer *)Py_NewRef(dealer);
    self->convert = Py_NewRef(convert);
    if (running_rows_init(&self->rows, self->dealer->shards, closes_up) < 0) {
        Py_DECREF(self);
        return NULL;
    }
    return (PyObject *)self;
}

static void running_dealloc(RunningCore *self) {
    running_rows_free(&self->rows);
    PyMem_Free(self->tokens);
    Py_XDECREF(self->dealer);
    Py_XDECREF(self->convert);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

/* 0, or -1 with an exception. */
static int take_id(PyObject *argument, uint64_t *id) {
    unsigned long long value;
    PyObject *index = PyNumber_Index(argument); /* numpy's integers too */
    if (index == NULL) {
        return -1;
    }
    value = PyLong_AsUnsignedLongLong(index);
    Py_DECREF(index);
    if (value == (unsigned long long)-1 && PyErr_Occurred()) {
        if (PyErr_ExceptionMatches(PyExc_OverflowError) || PyErr_ExceptionMatches(PyExc_TypeError)) {
            PyErr_Format(PyExc_ValueError, "request id is a u64: request_id=%R", argument);
        }
        return -1;
    }
    *id = value;
    return 0;
}

/* A flat array of unsigned items of this size? Several of numpy's type numbers mean that. */
static int is_flat(PyObject *from, int itemsize) {
    PyArrayObject *array = (PyArrayObject *)from;
    return PyArray_Check(from) && PyArray_NDIM(array) == 1 && PyArray_IS_C_CONTIGUOUS(array) &&
           PyArray_ISNOTSWAPPED(array) && PyArray_DESCR(array)->kind == 'u' &&
           PyArray_ITEMSIZE(array) == itemsize;
}

static PyObject *running_add(RunningCore *self, PyObject *argument) {
    uint64_t id;
    if (take_id(argument, &id) < 0 || running_rows_add(&self->rows, id) < 0) {
        return NULL;
    }
    return PyLong_FromUnsignedLong(self->rows.rows - 1);
}

/* extend(ids): all of a flat uint64 array, or none and an exception */
static PyObject *running_extend(RunningCore *self, PyObject *argument) {
    PyArrayObject *array = (PyArrayObject *)argument;
    if (!is_flat(argument, 8)) {
        PyErr_SetString(PyExc_TypeError, "takes a flat array of uint64");
        return NULL;
    }
    const uint64_t *ids = PyArray_DATA(array);
    const uint32_t before = self->rows.rows;
    for (npy_intp i = 0; i < PyArray_DIM(array, 0); i++) {
        if (running_rows_add(&self->rows, ids[i]) < 0) {
            running_rows_cut(&self->rows, before);
            return NULL;
        }
    }
    Py_RETURN_NONE;
}

static PyObject *running_row_of(RunningCore *self, PyObject *argument) {
    uint64_t id;
    if (take_id(argument, &id) < 0) {
        return NULL;
    }
    int64_t row = running_rows_find(&self->rows, id);
    if (row < 0) {
        Py_RETURN_NONE;
    }
    return PyLong_FromLongLong(row);
}

static PyObject *running_remove(RunningCore *self, PyObject *argument) {
    PyObject *row = running_row_of(self, argument);
    if (row != NULL && row != Py_None) {
        uint32_t number = (uint32_t)PyLong_AsUnsignedLong(row);
        running_rows_remove(&self->rows, &number, 1);
    }
    return row;
}

static PyObject *running_clear(RunningCore *self, PyObject *Py_UNUSED(ignored)) {
    running_rows_cut(&self->rows, 0);
    Py_RETURN_NONE;
}

static PyObject *copy_of(const void *items, uint32_t count, int type) {
    npy_intp length = (npy_intp)count;
    PyObject *array = PyArray_SimpleNew(1, &length, type);
    if (array != NULL && count > 0) {
        memcpy(PyArray_DATA((PyArrayObject *)array), items,
               (size_t)count * (size_t)PyArray_ITEMSIZE((PyArrayObject *)array));
    }
    return array;
}

static PyObject *running_ids(RunningCore *self, PyObject *Py_UNUSED(ignored)) {
    return copy_of(self->rows.ids, self->rows.rows, NPY_UINT64);
}

static PyObject *running_rows_of(RunningCore *self, PyObject *argument) {
    unsigned long shard = PyLong_AsUnsignedLong(argument);
    if (shard == (unsigned long)-1 && PyErr_Occurred()) {
        return NULL;
    }
    if (shard >= self->dealer->shards) {
        return PyErr_Format(PyExc_IndexError, "no such shard: shard=%lu, shards=%u", shard,
                            self->dealer->shards);
    }
    return copy_of(self->rows.parts[shard].rows, self->rows.parts[shard].count, NPY_UINT32);
}

/* The token ids of a step, wherever they lie. */
typedef struct {
    const int32_t *items;
    uint64_t count;
    PyObject *keep;
} Tokens;

static int32_t *scratch(RunningCore *self, uint64_t count) {
    if (count > self->tokens_capacity) {
        if (count > RUNNING_ROWS_MAX) {
            PyErr_NoMemory();
            return NULL;
        }
        int32_t *grown = egress_grow(self->tokens, count, sizeof *grown);
        if (grown == NULL) {
            return NULL;
        }
        self->tokens = grown;
        self->tokens_capacity = (uint32_t)count;
    }
    return self->tokens;
}

static int raise_token(uint64_t index, PyObject *value) {
    PyErr_Format(PyExc_ValueError,
                 "column has a value that does not fit: column=token_ids, dtype=int32, "
                 "index=%llu, value=%R",
                 (unsigned long long)index, value);
    return -1;
}

static int take_list(RunningCore *self, PyObject *list, Tokens *out) {
    out->count = (uint64_t)PySequence_Fast_GET_SIZE(list);
    int32_t *items = scratch(self, out->count);
    if (items == NULL && out->count > 0) {
        return -1;
    }
    for (uint64_t i = 0; i < out->count; i++) {
        PyObject *item = PySequence_Fast_GET_ITEM(list, (Py_ssize_t)i);
        if (!PyLong_CheckExact(item)) {
            return 1; /* numpy's integers, or nothing that is a number: convert() knows */
        }
        int overflow;
        long value = PyLong_AsLongAndOverflow(item, &overflow);
        if (overflow != 0 || value != (int32_t)value) {
            return raise_token(i, item);
        }
        items[i] = (int32_t)value;
    }
    out->items = items;
    return 0;
}

static int take_wide(RunningCore *self, const int64_t *wide, uint64_t count, Tokens *out) {
    int32_t *items = scratch(self, count);
    if (items == NULL && count > 0) {
        return -1;
    }
    int64_t lost = 0;
    for (uint64_t i = 0; i < count; i++) {
        items[i] = (int32_t)wide[i];
        lost |= wide[i] ^ items[i];
    }
    for (uint64_t i = 0; lost != 0 && i < count; i++) {
        if (wide[i] != items[i]) {
            PyObject *value = PyLong_FromLongLong(wide[i]);
            raise_token(i, value == NULL ? Py_None : value);
            Py_XDECREF(value);
            return -1;
        }
    }
    out->items = items;
    out->count = count;
    return 0;
}

/* 0, -1 with an exception, or 1: none of the kinds that are taken as they are. */
static int take_array(RunningCore *self, PyObject *from, Tokens *out) {
    PyArrayObject *array = (PyArrayObject *)from;
    if (PyArray_NDIM(array) != 1 || !PyArray_IS_C_CONTIGUOUS(array) || !PyArray_ISNOTSWAPPED(array)) {
        return 1;
    }
    uint64_t count = (uint64_t)PyArray_DIM(array, 0);
    if (PyArray_DESCR(array)->kind != 'i') {
        return 1;
    }
    if (PyArray_ITEMSIZE(array) == 4) {
        out->items = PyArray_DATA(array);
        out->count = count;
        return 0;
    }
    return PyArray_ITEMSIZE(array) == 8 ? take_wide(self, PyArray_DATA(array), count, out) : 1;
}

static int take_tokens(RunningCore *self, PyObject *from, Tokens *out) {
    int answer = 1;
    out->keep = NULL;
    if (PyArray_Check(from)) {
        answer = take_array(self, from, out);
    } else if (PyList_CheckExact(from) || PyTuple_CheckExact(from)) {
        answer = take_list(self, from, out);
    }
    if (answer != 1) {
        return answer;
    }
    out->keep = PyObject_CallOneArg(self->convert, from);
    if (out->keep == NULL) {
        return -1;
    }
    answer = PyArray_Check(out->keep) ? take_array(self, out->keep, out) : 1;
    if (answer == 1) {
        PyErr_SetString(PyExc_TypeError, "convert made no array of token ids");
    }
    return answer == 0 ? 0 : -1;
}

/* The counts of a step, or NULL for one each; their offsets in the tokens are found on the way. */
static int take_counts(RunningCore *self, PyObject *from, const Tokens *tokens, const uint32_t **counts) {
    *counts = NULL;
    uint64_t sum = self->rows.rows;
    if (from != Py_None) {
        PyArrayObject *array = (PyArrayObject *)from;
        if (!is_flat(from, 4)) {
            PyErr_SetString(PyExc_TypeError, "takes a flat array of uint32");
            return -1;
        }
        if (PyArray_DIM(array, 0) != (npy_intp)self->rows.rows) {
            PyErr_Format(PyExc_ValueError, "columns differ in length: running=%u, token_counts=%zd",
                         self->rows.rows, (Py_ssize_t)PyArray_DIM(array, 0));
            return -1;
        }
        *counts = PyArray_DATA(array);
        sum = shr_sum_counts(*counts, self->rows.rows);
    }
    if (sum != tokens->count) {
        PyErr_Format(PyExc_ValueError,
                     from == Py_None
                         ? "a step has one token id for each running request: token_ids=%llu, running=%llu"
                         : "token_ids and token_counts disagree: token_ids=%llu, sum=%llu",
                     (unsigned long long)tokens->count, (unsigned long long)sum);
        return -1;
    }
    return 0;
}

/* One of `finished`: (row, code, value, ...) */
static int take_finished(const RunningCore *self, PyObject *entry, uint32_t *row, uint8_t *code,
                         int64_t *value) {
    /* ints only, whose value is had without running anybody's code: claims are open meanwhile */
    if (!PyTuple_Check(entry) || PyTuple_GET_SIZE(entry) < 3 || !PyLong_Check(PyTuple_GET_ITEM(entry, 0)) ||
        !PyLong_Check(PyTuple_GET_ITEM(entry, 1)) || !PyLong_Check(PyTuple_GET_ITEM(entry, 2))) {
        PyErr_SetString(PyExc_TypeError, "finished is a list of Finished(row, code, value, details)");
        return -1;
    }
    long given_row = PyLong_AsLong(PyTuple_GET_ITEM(entry, 0));
    long given_code = PyErr_Occurred() ? -1 : PyLong_AsLong(PyTuple_GET_ITEM(entry, 1));
    *value = PyErr_Occurred() ? -1 : PyLong_AsLongLong(PyTuple_GET_ITEM(entry, 2));
    if (PyErr_Occurred()) {
        return -1;
    }
    if (given_row < 0 || given_row >= (long)self->rows.rows || given_code < 1 || given_code > 255) {
        PyErr_Format(PyExc_ValueError, "finished names no row and code: row=%ld, running=%u, code=%ld",
                     given_row, self->rows.rows, given_code);
        return -1;
    }
    *row = (uint32_t)given_row;
    *code = (uint8_t)given_code;
    return 0;
}

/* Sizes of all parts; which of them have values. 0, or -1 with an exception. */
static int measure(RunningCore *self, const uint32_t *counts, PyObject *finished) {
    Dealer *dealer = self->dealer;
    for (uint32_t s = 0; s < dealer->shards; s++) {
        dealer->parts[s].rows = self->rows.parts[s].count;
        dealer->parts[s].tokens = self->rows.parts[s].count;
        dealer->parts[s].has_values = 0;
    }
    if (counts != NULL) {
        for (uint32_t s = 0; s < dealer->shards; s++) {
            uint64_t sum = 0;
            for (uint32_t i = 0; i < self->rows.parts[s].count; i++) {
                sum += counts[self->rows.parts[s].rows[i]];
            }
            dealer->parts[s].tokens = sum;
        }
    }
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(finished); i++) {
        uint32_t row;
        uint8_t code;
        int64_t value;
        if (take_finished(self, PyList_GET_ITEM(finished, i), &row, &code, &value) < 0) {
            return -1;
        }
        dealer->parts[running_shard_of(&self->rows, self->rows.ids[row])].has_values = 1;
    }
    return 0;
}

static void write_part(const RunningPart *from, shr_part *to, const int32_t *tokens, const uint32_t *counts,
                       const uint64_t *offsets) {
    memcpy(to->ids, from->ids, from->count * sizeof *from->ids);
    if (to->values != NULL) {
        memset(to->values, 0, from->count * sizeof *to->values);
    }
    if (counts == NULL) {
        for (uint32_t i = 0; i < from->count; i++) {
            to->counts[i] = 1;
        }
        for (uint32_t i = 0; i < from->count; i++) {
            to->token_ids[i] = tokens[from->rows[i]];
        }
        return;
    }
    int32_t *next = to->token_ids;
    for (uint32_t i = 0; i < from->count; i++) {
        uint32_t row = from->rows[i], count = counts[row];
        to->counts[i] = count;
        memcpy(next, tokens + offsets[row], (size_t)count * sizeof *next);
        next += count;
    }
}

/* step(token_ids, token_counts | None, finished) -> shards left, None if none */
static PyObject *running_step(RunningCore *self, PyObject *const *args, Py_ssize_t nargs) {
    if (nargs != 3 || !PyList_CheckExact(args[2])) {
        PyErr_SetString(PyExc_TypeError, "step takes token_ids, token_counts and a list of who finished");
        return NULL;
    }
    Dealer *dealer = self->dealer;
    Tokens tokens;
    const uint32_t *counts;
    uint64_t *offsets = NULL;
    PyObject *result = NULL;
    if (take_tokens(self, args[0], &tokens) < 0) {
        Py_XDECREF(tokens.keep);
        return NULL;
    }
    if (take_counts(self, args[1], &tokens, &counts) < 0 || measure(self, counts, args[2]) < 0) {
        goto done;
    }
    if (counts != NULL) {
        if ((offsets = egress_grow(NULL, (size_t)self->rows.rows + 1, sizeof *offsets)) == NULL) {
            goto done;
        }
        offsets[0] = 0;
        for (uint32_t row = 0; row < self->rows.rows; row++) {
            offsets[row + 1] = offsets[row] + counts[row];
        }
    }
    uint32_t left = 0;
    for (uint32_t s = 0; s < dealer->shards; s++) {
        shr_part *part = &dealer->parts[s];
        shr_part_claim(part, &dealer->kind);
        left += part->answer != SHR_DONE;
        if (part->ids != NULL) {
            write_part(&self->rows.parts[s], part, tokens.items, counts, offsets);
        }
    }
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(args[2]); i++) {
        uint32_t row;
        uint8_t code;
        int64_t value;
        /* it was a good one in measure(), and nothing has run since that could change it */
        if (take_finished(self, PyList_GET_ITEM(args[2], i), &row, &code, &value) == 0) {
            shr_part *part = &dealer->parts[running_shard_of(&self->rows, self->rows.ids[row])];
            if (part->ids != NULL) {
                part->codes[self->rows.place[row]] = code;
                part->values[self->rows.place[row]] = value;
            }
        }
    }
    for (uint32_t s = 0; s < dealer->shards; s++) {
        shr_part_publish(&dealer->parts[s], &dealer->kind);
    }
    result = egress_left(dealer, left);
done:
    PyMem_Free(offsets);
    Py_XDECREF(tokens.keep);
    return result;
}

/* remove_rows(rows): a flat array of uint32, sorted, each once */
static PyObject *running_remove_rows(RunningCore *self, PyObject *argument) {
    PyArrayObject *array = (PyArrayObject *)argument;
    if (!is_flat(argument, 4)) {
        PyErr_SetString(PyExc_TypeError, "takes a flat array of uint32");
        return NULL;
    }
    const uint32_t *rows = PyArray_DATA(array);
    npy_intp count = PyArray_DIM(array, 0);
    for (npy_intp i = 0; i < count; i++) {
        if (rows[i] >= self->rows.rows || (i > 0 && rows[i] <= rows[i - 1])) {
            return PyErr_Format(PyExc_ValueError, "rows are not sorted, or not running: row=%u, running=%u",
                                rows[i], self->rows.rows);
        }
    }
    if (count > 0) {
        running_rows_remove(&self->rows, rows, (uint32_t)count);
    }
    Py_RETURN_NONE;
}

static Py_ssize_t running_length(RunningCore *self) { return (Py_ssize_t)self->rows.rows; }

static PyMethodDef running_methods[] = {
    {"add", (PyCFunction)running_add, METH_O, "add(request_id, /) -> int"},
    {"extend", (PyCFunction)running_extend, METH_O, "extend(request_ids, /) -> None"},
    {"row_of", (PyCFunction)running_row_of, METH_O, "row_of(request_id, /) -> int | None"},
    {"remove", (PyCFunction)running_remove, METH_O, "remove(request_id, /) -> int | None"},
    {"remove_rows", (PyCFunction)running_remove_rows, METH_O, "remove_rows(rows, /) -> None"},
    {"clear", (PyCFunction)running_clear, METH_NOARGS, "clear() -> None"},
    {"request_ids", (PyCFunction)running_ids, METH_NOARGS, "request_ids() -> ndarray"},
    {"rows_of", (PyCFunction)running_rows_of, METH_O, "rows_of(shard, /) -> ndarray"},
    {"step", (PyCFunction)(void (*)(void))running_step, METH_FASTCALL,
     "step(token_ids, token_counts, finished, /) -> list[int] | None\n\nWrite each shard's rows into its "
     "ring. "
     "The shards that had no room, or could not: they got nothing."},
    {NULL, NULL, 0, NULL},
};

static PySequenceMethods running_sequence = {.sq_length = (lenfunc)running_length};

PyTypeObject RunningCore_Type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "manager._egress.RunningCore",
    .tp_basicsize = sizeof(RunningCore),
    .tp_dealloc = (destructor)running_dealloc,
    .tp_as_sequence = &running_sequence,
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_methods = running_methods,
    .tp_new = running_new,
    .tp_doc = "The requests of a scheduler, kept from step to step as columns.",
};

/* The type `Collectives`: one process's access to collectives. See native.pyi. */
#include "module.h"

typedef struct {
    PyObject_HEAD
    Py_buffer memory;
    PyObject *sync, *heap;
    struct collectives *collectives;
} Collectives;

static PyObject *bytes_for(PyObject *type, PyObject *n_ranks)
{
    long number = PyLong_AsLong(n_ranks);
    return number == -1 && PyErr_Occurred() ? NULL : PyLong_FromSize_t(collectives_bytes((int)number));
}

static void collectives_dealloc(Collectives *self)
{
    if (self->collectives != NULL)
        collectives_free(self->collectives);
    Py_XDECREF(self->sync);
    Py_XDECREF(self->heap);
    PyBuffer_Release(&self->memory);
    Py_TYPE(self)->tp_free(self);
}

static PyObject *collectives_new(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
    static char *names[] = {"memory", "sync", "heap", NULL};
    Py_buffer memory;
    PyObject *sync, *heap;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "w*O!O!", names, &memory, &SyncType, &sync, &HeapType, &heap))
        return NULL;
    struct sync *own = sync_of(sync);
    Collectives *self = NULL;
    if ((uintptr_t)memory.buf % 64 || (size_t)memory.len < collectives_bytes(own->n_ranks))
        PyErr_Format(PyExc_ValueError, "%zd bytes at %p are too few, or not aligned", memory.len, memory.buf);
    else
        self = (Collectives *)type->tp_alloc(type, 0);
    if (self == NULL) {
        PyBuffer_Release(&memory);
        return NULL;
    }
    self->memory = memory;
    Py_INCREF(sync);
    Py_INCREF(heap);
    self->sync = sync;
    self->heap = heap;
    self->collectives = collectives_create(memory.buf, own->n_ranks, own->rank);
    if (self->collectives == NULL) {
        Py_DECREF(self);
        return PyErr_NoMemory();
    }
    return (PyObject *)self;
}

/* Context of a running collective, which holds the GIL only while it calls Python. */
struct call {
    PyObject *sync, *check, *wait;
    struct heap *heap;
    PyThreadState *state;
};

static int barrier(void *context)
{
    struct call *call = context;
    struct sync *sync = sync_of(call->sync);
    int64_t step = sync_arrive(sync);
    if (call->wait == Py_None && sync_spin(sync, ARRIVED, step))
        return 0;
    PyEval_RestoreThread(call->state);
    int failed;
    if (call->wait == Py_None) {
        failed = sync_wait(call->sync, ARRIVED, step, call->check);
    } else {
        PyObject *waited = PyObject_CallFunction(call->wait, "L", (long long)step);
        failed = waited == NULL;
        Py_XDECREF(waited);
    }
    call->state = PyEval_SaveThread();
    return failed;
}

static int is_shared(void *context, const void *first, size_t n_bytes)
{
    const struct call *call = context;
    if (sync_of(call->sync)->n_ranks == 1)
        return 1;
    return call->heap != NULL && heap_offset(call->heap, first, n_bytes) >= 0;
}

/* The data of a C-contiguous array; NULL with an exception set. */
static char *data_of(PyObject *object, int is_written, size_t *length, size_t *itemsize)
{
    PyArrayObject *array = (PyArrayObject *)object;
    if (!PyArray_Check(object) || !PyArray_IS_C_CONTIGUOUS(array) || (is_written && !PyArray_ISWRITEABLE(array))) {
        PyErr_Format(PyExc_TypeError, "expected a C-contiguous array%s; got %R", is_written ? " to write to" : "",
                     object);
        return NULL;
    }
    *length = (size_t)PyArray_SIZE(array);
    *itemsize = (size_t)PyArray_ITEMSIZE(array);
    return PyArray_BYTES(array);
}

/* The numbers of elements of all ranks, in memory that the caller frees; NULL with an exception set. */
static size_t *parse_counts(PyObject *counts, int n_ranks)
{
    size_t *numbers = PyMem_Calloc((size_t)n_ranks, sizeof *numbers);
    PyObject *items = PySequence_Fast(counts, "expected the lengths of all ranks");
    if (numbers == NULL && items != NULL)
        PyErr_NoMemory();
    if (items != NULL && PySequence_Fast_GET_SIZE(items) != n_ranks)
        PyErr_Format(PyExc_ValueError, "got %zd lengths; expected %d, one for each rank",
                     PySequence_Fast_GET_SIZE(items), n_ranks);
    for (int rank = 0; !PyErr_Occurred() && rank < n_ranks; rank++)
        numbers[rank] = PyLong_AsSize_t(PySequence_Fast_GET_ITEM(items, rank));
    Py_XDECREF(items);
    if (!PyErr_Occurred())
        return numbers;
    PyMem_Free(numbers);
    return NULL;
}

/* Parse a tuple (array, out or None, Reduction or lengths); -1 with an exception set. */
static int parse_array(struct array *array, PyObject *item, int n_ranks, int rank)
{
    PyObject *send, *recv, *how;
    size_t length;
    if (!PyArg_ParseTuple(item, "OOO", &send, &recv, &how))
        return -1;
    array->send = data_of(send, 0, &array->length, &array->itemsize);
    if (array->send == NULL)
        return -1;
    array->recv_itemsize = array->itemsize;
    if (recv != Py_None) {
        array->recv = data_of(recv, 1, &length, &array->recv_itemsize);
        if (array->recv == NULL)
            return -1;
    }
    if (PyObject_TypeCheck(how, &ReductionType)) {
        PyArray_Descr *returned = recv == Py_None ? NULL : PyArray_DESCR((PyArrayObject *)recv);
        array->reduction = reduction_for(how, n_ranks, PyArray_DESCR((PyArrayObject *)send), returned);
        if (array->reduction == NULL)
            return -1;
        array->recv_itemsize = reduction_result_itemsize(array->reduction);
        if (recv == Py_None || length == array->length)
            return 0;
        PyErr_Format(PyExc_ValueError, "%zu elements, and %zu of the result", array->length, length);
        return -1;
    }
    size_t *counts = parse_counts(how, n_ranks), total = 0;
    array->counts = counts;
    for (int k = 0; counts != NULL && k < n_ranks; k++)
        total += counts[k];
    if (counts != NULL && (counts[rank] != array->length || (recv != Py_None && length != total)))
        PyErr_Format(PyExc_ValueError, "%zu elements here, %zu of all ranks, and %zu of the result", array->length,
                     total, recv == Py_None ? 0 : length);
    return PyErr_Occurred() ? -1 : 0;
}

static PyObject *run(Collectives *self, PyObject *args)
{
    PyObject *list, *check, *wait;
    long long signature;
    int skip_last_barrier;
    if (!PyArg_ParseTuple(args, "O!LOOp", &PyList_Type, &list, &signature, &check, &wait, &skip_last_barrier))
        return NULL;
    int n_ranks = sync_of(self->sync)->n_ranks, rank = sync_of(self->sync)->rank;
    Py_ssize_t n = PyList_GET_SIZE(list);
    struct array *arrays = PyMem_Calloc((size_t)n + 1, sizeof *arrays);
    if (arrays == NULL)
        return PyErr_NoMemory();
    enum outcome outcome = FAILED;
    int failed = 0;
    for (Py_ssize_t i = 0; !failed && i < n; i++)
        failed = parse_array(&arrays[i], PyList_GET_ITEM(list, i), n_ranks, rank);
    if (!failed) {
        struct call call = {self->sync, check, wait, heap_of(self->heap), PyEval_SaveThread()};
        struct callbacks callbacks = {barrier, is_shared, &call};
        outcome = collectives_run(self->collectives, arrays, (size_t)n, signature, skip_last_barrier, &callbacks);
        PyEval_RestoreThread(call.state);
    }
    for (Py_ssize_t i = 0; i < n; i++)
        PyMem_Free((void *)arrays[i].counts);
    PyMem_Free(arrays);
    if (outcome == FAILED)
        return NULL;
    if (outcome == MISMATCH)
        Py_RETURN_NONE;
    return PyBool_FromLong(outcome == DONE_DIRECT);
}

static PyObject *restart(Collectives *self, PyObject *nothing)
{
    collectives_restart(self->collectives);
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"bytes_for", bytes_for, METH_O | METH_STATIC, "bytes_for(n_ranks): size of the shared memory in bytes."},
    {"run", (PyCFunction)run, METH_VARARGS,
     "run(arrays, signature, check, wait, skip_last_barrier): run a collective."},
    {"restart", (PyCFunction)restart, METH_NOARGS, "restart(): reset the rounds at the start of a message."},
    {NULL, NULL, 0, NULL},
};

PyTypeObject CollectivesType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "synkhronos._native.native.Collectives",
    .tp_doc = "Collectives of the ranks of a session.",
    .tp_basicsize = sizeof(Collectives),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = collectives_new,
    .tp_dealloc = (destructor)collectives_dealloc,
    .tp_methods = methods,
};

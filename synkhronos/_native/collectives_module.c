/* The type `Collectives`, for one process of a session; see native.pyi. */
#include "module.h"

#include "collectives.h"

typedef struct {
    PyObject_HEAD
    Py_buffer memory;
    PyObject *sync, *heap;
    struct collectives *all;
} Collectives;

static PyObject *bytes_for(PyObject *type, PyObject *n_ranks)
{
    long number = PyLong_AsLong(n_ranks);
    return number == -1 && PyErr_Occurred() ? NULL : PyLong_FromSize_t(collectives_bytes((int)number));
}

static void collectives_dealloc(Collectives *self)
{
    if (self->all != NULL)
        collectives_free(self->all);
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
    self->all = collectives_create(memory.buf, own->n_ranks, own->rank);
    if (self->all == NULL) {
        Py_DECREF(self);
        return PyErr_NoMemory();
    }
    return (PyObject *)self;
}

/* Who carries out a collective, without the lock of the interpreter but where Python is asked. */
struct asking {
    PyObject *sync, *check, *wait;
    struct heap *heap;
    PyThreadState *state;
};

static int meet(void *context)
{
    struct asking *asking = context;
    struct sync *sync = sync_of(asking->sync);
    int64_t step = sync_arrive(sync);
    if (asking->wait == Py_None && sync_spin(sync, ARRIVED, step))
        return 0;
    PyEval_RestoreThread(asking->state);
    int failed;
    if (asking->wait == Py_None) {
        failed = sync_wait(asking->sync, ARRIVED, step, asking->check);
    } else {
        PyObject *waited = PyObject_CallFunction(asking->wait, "L", (long long)step);
        failed = waited == NULL;
        Py_XDECREF(waited);
    }
    asking->state = PyEval_SaveThread();
    return failed;
}

static int is_shared(void *context, const void *first, size_t n_bytes)
{
    const struct asking *asking = context;
    if (sync_of(asking->sync)->n_ranks == 1)
        return 1;
    return asking->heap != NULL && heap_offset(asking->heap, first, n_bytes) >= 0;
}

/* A flat view of an array: where it begins, or NULL with an exception set. */
static char *elements_of(PyObject *object, int is_written, size_t *length, size_t *item)
{
    PyArrayObject *array = (PyArrayObject *)object;
    if (!PyArray_Check(object) || !PyArray_IS_C_CONTIGUOUS(array) || (is_written && !PyArray_ISWRITEABLE(array))) {
        PyErr_Format(PyExc_TypeError, "expected a C-contiguous array%s; got %R", is_written ? " to write to" : "", object);
        return NULL;
    }
    *length = (size_t)PyArray_SIZE(array);
    *item = (size_t)PyArray_ITEMSIZE(array);
    return PyArray_BYTES(array);
}

/* The lengths of all ranks; new memory, or NULL with an exception set. */
static size_t *lengths_of(PyObject *lengths, int n_ranks)
{
    size_t *numbers = PyMem_Calloc((size_t)n_ranks, sizeof *numbers);
    PyObject *items = PySequence_Fast(lengths, "expected the lengths of all ranks");
    if (numbers == NULL && items != NULL)
        PyErr_NoMemory();
    if (items != NULL && PySequence_Fast_GET_SIZE(items) != n_ranks)
        PyErr_Format(PyExc_ValueError, "%zd lengths of %d ranks", PySequence_Fast_GET_SIZE(items), n_ranks);
    for (int rank = 0; !PyErr_Occurred() && rank < n_ranks; rank++)
        numbers[rank] = PyLong_AsSize_t(PySequence_Fast_GET_ITEM(items, rank));
    Py_XDECREF(items);
    if (!PyErr_Occurred())
        return numbers;
    PyMem_Free(numbers);
    return NULL;
}

/* Read (array, out or None, Reduction or lengths); -1 with an exception set. */
static int read_part(struct part *part, PyObject *item, int n_ranks, int rank)
{
    PyObject *from, *to, *how;
    size_t length;
    if (!PyArg_ParseTuple(item, "OOO", &from, &to, &how))
        return -1;
    part->from = elements_of(from, 0, &part->length, &part->item);
    if (part->from == NULL)
        return -1;
    part->item_of_result = part->item;
    if (to != Py_None) {
        part->to = elements_of(to, 1, &length, &part->item_of_result);
        if (part->to == NULL)
            return -1;
    }
    if (PyObject_TypeCheck(how, &ReductionType)) {
        PyArray_Descr *returned = to == Py_None ? NULL : PyArray_DESCR((PyArrayObject *)to);
        part->reduction = reduction_for(how, n_ranks, PyArray_DESCR((PyArrayObject *)from), returned);
        if (part->reduction == NULL)
            return -1;
        part->item_of_result = reduction_result_itemsize(part->reduction);
        if (to == Py_None || length == part->length)
            return 0;
        PyErr_Format(PyExc_ValueError, "%zu elements, and %zu of the result", part->length, length);
        return -1;
    }
    size_t *lengths = lengths_of(how, n_ranks), all = 0;
    part->lengths = lengths;
    for (int k = 0; lengths != NULL && k < n_ranks; k++)
        all += lengths[k];
    if (lengths != NULL && (lengths[rank] != part->length || (to != Py_None && length != all)))
        PyErr_Format(PyExc_ValueError, "%zu elements here, %zu of all ranks, and %zu of the result", part->length, all,
                     to == Py_None ? 0 : length);
    return PyErr_Occurred() ? -1 : 0;
}

static PyObject *run(Collectives *self, PyObject *args)
{
    PyObject *list, *check, *wait;
    long long signature;
    int is_open;
    if (!PyArg_ParseTuple(args, "O!LOOp", &PyList_Type, &list, &signature, &check, &wait, &is_open))
        return NULL;
    int n_ranks = sync_of(self->sync)->n_ranks, rank = sync_of(self->sync)->rank;
    Py_ssize_t n = PyList_GET_SIZE(list);
    struct part *parts = PyMem_Calloc((size_t)n + 1, sizeof *parts);
    if (parts == NULL)
        return PyErr_NoMemory();
    enum outcome outcome = FAILED;
    int failed = 0;
    for (Py_ssize_t i = 0; !failed && i < n; i++)
        failed = read_part(&parts[i], PyList_GET_ITEM(list, i), n_ranks, rank);
    if (!failed) {
        struct asking asking = {self->sync, check, wait, heap_of(self->heap), PyEval_SaveThread()};
        struct caller caller = {meet, is_shared, &asking};
        outcome = collectives_run(self->all, parts, (size_t)n, signature, is_open, &caller);
        PyEval_RestoreThread(asking.state);
    }
    for (Py_ssize_t i = 0; i < n; i++)
        PyMem_Free((void *)parts[i].lengths);
    PyMem_Free(parts);
    if (outcome == FAILED)
        return NULL;
    if (outcome == DIFFERENT)
        Py_RETURN_NONE;
    return PyBool_FromLong(outcome == DONE_DIRECTLY);
}

static PyObject *restart(Collectives *self, PyObject *nothing)
{
    collectives_restart(self->all);
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"bytes_for", bytes_for, METH_O | METH_STATIC, "bytes_for(n_ranks): of shared memory."},
    {"run", (PyCFunction)run, METH_VARARGS, "run(parts, signature, check, wait, is_open): carry out a collective."},
    {"restart", (PyCFunction)restart, METH_NOARGS, "restart(): begin with a message."},
    {NULL, NULL, 0, NULL},
};

static PyTypeObject CollectivesType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "synkhronos._native.native.Collectives",
    .tp_doc = "Reductions and gatherings over the ranks of a session.",
    .tp_basicsize = sizeof(Collectives),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = collectives_new,
    .tp_dealloc = (destructor)collectives_dealloc,
    .tp_methods = methods,
};

int synkhronos_add_collectives(PyObject *module)
{
    return PyModule_AddIntMacro(module, LANE_BYTES) || PyModule_AddType(module, &CollectivesType) ? -1 : 0;
}

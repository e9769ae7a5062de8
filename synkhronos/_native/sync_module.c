/* The type `Sync`: one process's view of the counters of a session. See sync.h and native.pyi. */
#include "module.h"

#include <structmember.h>

typedef struct {
    PyObject_HEAD
    Py_buffer memory;
    struct sync sync;
} Sync;

/* Bytes of shared memory that the counters of a session need. */
static PyObject *bytes_for(PyObject *type, PyObject *n_ranks)
{
    long number = PyLong_AsLong(n_ranks);
    return number == -1 && PyErr_Occurred() ? NULL : PyLong_FromSize_t(sync_bytes((int)number));
}

static PyObject *sync_new(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
    static char *names[] = {"memory", "n_ranks", "rank", "spin", NULL};
    Py_buffer memory;
    int n_ranks, rank;
    double spin;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "w*iid", names, &memory, &n_ranks, &rank, &spin))
        return NULL;
    Sync *self = NULL;
    if (n_ranks < 1 || rank < 0 || rank >= n_ranks)
        PyErr_Format(PyExc_ValueError, "rank %d of %d ranks", rank, n_ranks);
    else if ((uintptr_t)memory.buf % _Alignof(struct sync_shared) || (size_t)memory.len < sync_bytes(n_ranks))
        PyErr_Format(PyExc_ValueError, "%zd bytes at %p are too few, or not aligned, for the counters of %d ranks",
                     memory.len, memory.buf, n_ranks);
    else
        self = (Sync *)type->tp_alloc(type, 0);
    if (self == NULL) {
        PyBuffer_Release(&memory);
        return NULL;
    }
    self->memory = memory;
    self->sync = (struct sync){memory.buf, n_ranks, rank, rank, (int64_t)(spin * 1e9), 0};
    return (PyObject *)self;
}

static void sync_dealloc(Sync *self)
{
    PyBuffer_Release(&self->memory);
    Py_TYPE(self)->tp_free(self);
}

struct sync *sync_of(PyObject *object)
{
    return &((Sync *)object)->sync;
}

int sync_wait(PyObject *object, enum counter counter, int64_t value, PyObject *check)
{
    Sync *self = (Sync *)object;
    bool reached = sync_reached(&self->sync, counter, value), woken = true;
    while (!reached) {
        Py_BEGIN_ALLOW_THREADS
        reached = woken ? sync_spin(&self->sync, counter, value) : sync_reached(&self->sync, counter, value);
        Py_END_ALLOW_THREADS
        if (reached)
            break;
        PyObject *checked = PyErr_CheckSignals() ? NULL : PyObject_CallObject(check, NULL);
        if (checked == NULL)
            return -1;
        Py_DECREF(checked);
        Py_BEGIN_ALLOW_THREADS
        woken = sync_park(&self->sync, counter, value);
        Py_END_ALLOW_THREADS
    }
    return 0;
}

/* Check that there are `wanted` arguments, and parse the first two: an index below `limit`, and a number. Returns -1
 * with an exception set. */
static int parse_index_and_number(PyObject *const *args, Py_ssize_t given, Py_ssize_t wanted, int limit, int *index,
                                  int64_t *number)
{
    if (given != wanted) {
        PyErr_Format(PyExc_TypeError, "got %zd arguments, expected %zd", given, wanted);
        return -1;
    }
    long first = PyLong_AsLong(args[0]);
    *number = PyLong_AsLongLong(args[1]);
    if (PyErr_Occurred())
        return -1;
    if (first < 0 || first >= limit) {
        PyErr_Format(PyExc_IndexError, "index %ld is out of range: expected 0 to %d", first, limit - 1);
        return -1;
    }
    *index = (int)first;
    return 0;
}

static PyObject *post(Sync *self, PyObject *const *args, Py_ssize_t given)
{
    int counter;
    int64_t value;
    if (parse_index_and_number(args, given, 2, N_COUNTERS, &counter, &value))
        return NULL;
    sync_post(&self->sync, counter, value);
    Py_RETURN_NONE;
}

static PyObject *wait_(Sync *self, PyObject *const *args, Py_ssize_t given)
{
    int counter;
    int64_t value;
    if (parse_index_and_number(args, given, 3, N_COUNTERS, &counter, &value)
        || sync_wait((PyObject *)self, counter, value, args[2]))
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *park(Sync *self, PyObject *const *args, Py_ssize_t given)
{
    int counter;
    int64_t value;
    if (parse_index_and_number(args, given, 2, N_COUNTERS, &counter, &value))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    sync_park(&self->sync, counter, value);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyObject *set_answered(Sync *self, PyObject *const *args, Py_ssize_t given)
{
    int rank;
    int64_t number;
    if (parse_index_and_number(args, given, 2, self->sync.n_ranks, &rank, &number))
        return NULL;
    atomic_store(&self->sync.shared->slots[rank].counters[ANSWERED], number);
    Py_RETURN_NONE;
}

static PyObject *restart(Sync *self, PyObject *number)
{
    int64_t value = PyLong_AsLongLong(number);
    if (value == -1 && PyErr_Occurred())
        return NULL;
    sync_restart(&self->sync, value);
    Py_RETURN_NONE;
}

static PyObject *arrive(Sync *self, PyObject *ignored)
{
    return PyLong_FromLongLong(sync_arrive(&self->sync));
}

static PyObject *barrier(Sync *self, PyObject *check)
{
    if (sync_wait((PyObject *)self, ARRIVED, sync_arrive(&self->sync), check))
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *abort_(Sync *self, PyObject *ignored)
{
    sync_abort(&self->sync);
    Py_RETURN_NONE;
}

static PyObject *reset(Sync *self, PyObject *ignored)
{
    atomic_store(&self->sync.shared->aborted, 0);
    Py_RETURN_NONE;
}

static PyObject *get_sent(Sync *self, void *ignored)
{
    return PyLong_FromLongLong(atomic_load(&self->sync.shared->slots[self->sync.controller].counters[SENT]));
}

static PyObject *get_list(Sync *self, void *counter)
{
    PyObject *list = PyList_New(self->sync.n_ranks);
    for (int rank = 0; list != NULL && rank < self->sync.n_ranks; rank++) {
        int64_t value = atomic_load(&self->sync.shared->slots[rank].counters[(intptr_t)counter]);
        PyObject *number = PyLong_FromLongLong(value);
        if (number == NULL)
            Py_CLEAR(list);
        else
            PyList_SET_ITEM(list, rank, number);
    }
    return list;
}

static PyObject *get_aborted(Sync *self, void *ignored)
{
    return PyBool_FromLong(atomic_load(&self->sync.shared->aborted));
}

#define FAST(name, function) {name, (PyCFunction)(void (*)(void))function, METH_FASTCALL, NULL}

static PyMethodDef methods[] = {
    {"bytes_for", bytes_for, METH_O | METH_STATIC, NULL},
    FAST("post", post),
    FAST("wait", wait_),
    FAST("park", park),
    FAST("set_answered", set_answered),
    {"restart", (PyCFunction)restart, METH_O, NULL},
    {"arrive", (PyCFunction)arrive, METH_NOARGS, NULL},
    {"barrier", (PyCFunction)barrier, METH_O, NULL},
    {"abort", (PyCFunction)abort_, METH_NOARGS, NULL},
    {"reset", (PyCFunction)reset, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef attributes[] = {
    {"sent", (getter)get_sent, NULL, NULL, NULL},
    {"answered", (getter)get_list, NULL, NULL, (void *)ANSWERED},
    {"arrived", (getter)get_list, NULL, NULL, (void *)ARRIVED},
    {"aborted", (getter)get_aborted, NULL, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMemberDef members[] = {
    {"rank", T_INT, offsetof(Sync, sync.rank), 0, NULL},
    {"n_ranks", T_INT, offsetof(Sync, sync.n_ranks), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

PyTypeObject SyncType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "synkhronos._native.native.Sync",
    .tp_basicsize = sizeof(Sync),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE,
    .tp_new = sync_new,
    .tp_dealloc = (destructor)sync_dealloc,
    .tp_methods = methods,
    .tp_getset = attributes,
    .tp_members = members,
};

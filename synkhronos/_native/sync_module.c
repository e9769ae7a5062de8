/* The type `Words`: one process's view of the words in `words.h`. */
#include "sync_module.h"

#include <structmember.h>

typedef struct {
    PyObject_HEAD
    Py_buffer memory;
    struct words words;
} Words;

/* Bytes of shared memory that a session needs for its words. */
static PyObject *bytes_for(PyObject *type, PyObject *n_ranks)
{
    long number = PyLong_AsLong(n_ranks);
    return number == -1 && PyErr_Occurred() ? NULL : PyLong_FromSize_t(words_bytes((int)number));
}

static PyObject *words_new(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
    static char *names[] = {"memory", "n_ranks", "rank", "spin", NULL};
    Py_buffer memory;
    int n_ranks, rank;
    double spin;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "w*iid", names, &memory, &n_ranks, &rank, &spin))
        return NULL;
    Words *self = NULL;
    if (n_ranks < 1 || rank < 0 || rank >= n_ranks)
        PyErr_Format(PyExc_ValueError, "rank %d of %d ranks", rank, n_ranks);
    else if ((uintptr_t)memory.buf % _Alignof(struct hall) || (size_t)memory.len < words_bytes(n_ranks))
        PyErr_Format(PyExc_ValueError, "%zd bytes at %p hold no words of %d ranks", memory.len, memory.buf, n_ranks);
    else
        self = (Words *)type->tp_alloc(type, 0);
    if (self == NULL) {
        PyBuffer_Release(&memory);
        return NULL;
    }
    self->memory = memory;
    self->words = (struct words){memory.buf, n_ranks, rank, rank, (int64_t)(spin * 1e9), 0};
    return (PyObject *)self;
}

static void words_dealloc(Words *self)
{
    PyBuffer_Release(&self->memory);
    Py_TYPE(self)->tp_free(self);
}

struct words *words_of(PyObject *object)
{
    return &((Words *)object)->words;
}

int words_wait(PyObject *object, enum board board, int64_t value, PyObject *check)
{
    Words *self = (Words *)object;
    bool reached = words_reached(&self->words, board, value), come = true;
    while (!reached) {
        Py_BEGIN_ALLOW_THREADS
        reached = come ? words_watch(&self->words, board, value) : words_reached(&self->words, board, value);
        Py_END_ALLOW_THREADS
        if (reached)
            break;
        PyObject *checked = PyErr_CheckSignals() ? NULL : PyObject_CallObject(check, NULL);
        if (checked == NULL)
            return -1;
        Py_DECREF(checked);
        Py_BEGIN_ALLOW_THREADS
        come = words_park(&self->words, board, value);
        Py_END_ALLOW_THREADS
    }
    return 0;
}

/* Take an index below a limit, and a number, from as many arguments as are wanted; -1 with an exception set. */
static int take(PyObject *const *args, Py_ssize_t given, Py_ssize_t wanted, int limit, int *index, int64_t *number)
{
    if (given != wanted) {
        PyErr_Format(PyExc_TypeError, "%zd arguments were given, and %zd are taken", given, wanted);
        return -1;
    }
    long first = PyLong_AsLong(args[0]);
    *number = PyLong_AsLongLong(args[1]);
    if (PyErr_Occurred())
        return -1;
    if (first < 0 || first >= limit) {
        PyErr_Format(PyExc_IndexError, "%ld, where there are %d", first, limit);
        return -1;
    }
    *index = (int)first;
    return 0;
}

static PyObject *post(Words *self, PyObject *const *args, Py_ssize_t given)
{
    int board;
    int64_t value;
    if (take(args, given, 2, BOARDS, &board, &value))
        return NULL;
    words_post(&self->words, board, value);
    Py_RETURN_NONE;
}

static PyObject *wait_(Words *self, PyObject *const *args, Py_ssize_t given)
{
    int board;
    int64_t value;
    if (take(args, given, 3, BOARDS, &board, &value) || words_wait((PyObject *)self, board, value, args[2]))
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *park(Words *self, PyObject *const *args, Py_ssize_t given)
{
    int board;
    int64_t value;
    if (take(args, given, 2, BOARDS, &board, &value))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    words_park(&self->words, board, value);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyObject *set_answered(Words *self, PyObject *const *args, Py_ssize_t given)
{
    int rank;
    int64_t number;
    if (take(args, given, 2, self->words.n_ranks, &rank, &number))
        return NULL;
    atomic_store(&self->words.hall->seats[rank].words[ANSWERED], number);
    Py_RETURN_NONE;
}

static PyObject *restart(Words *self, PyObject *number)
{
    int64_t value = PyLong_AsLongLong(number);
    if (value == -1 && PyErr_Occurred())
        return NULL;
    words_restart(&self->words, value);
    Py_RETURN_NONE;
}

static PyObject *arrive(Words *self, PyObject *ignored)
{
    return PyLong_FromLongLong(words_arrive(&self->words));
}

static PyObject *meet(Words *self, PyObject *check)
{
    if (words_wait((PyObject *)self, ARRIVED, words_arrive(&self->words), check))
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *abort_(Words *self, PyObject *ignored)
{
    words_abort(&self->words);
    Py_RETURN_NONE;
}

static PyObject *reset(Words *self, PyObject *ignored)
{
    atomic_store(&self->words.hall->aborted, 0);
    Py_RETURN_NONE;
}

static PyObject *get_sent(Words *self, void *ignored)
{
    return PyLong_FromLongLong(atomic_load(&self->words.hall->seats[self->words.master].words[SENT]));
}

static PyObject *get_list(Words *self, void *board)
{
    PyObject *list = PyList_New(self->words.n_ranks);
    for (int rank = 0; list != NULL && rank < self->words.n_ranks; rank++) {
        PyObject *word = PyLong_FromLongLong(atomic_load(&self->words.hall->seats[rank].words[(intptr_t)board]));
        if (word == NULL)
            Py_CLEAR(list);
        else
            PyList_SET_ITEM(list, rank, word);
    }
    return list;
}

static PyObject *get_aborted(Words *self, void *ignored)
{
    return PyBool_FromLong(atomic_load(&self->words.hall->aborted));
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
    {"meet", (PyCFunction)meet, METH_O, NULL},
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
    {"rank", T_INT, offsetof(Words, words.rank), 0, NULL},
    {"n_ranks", T_INT, offsetof(Words, words.n_ranks), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

PyTypeObject WordsType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "synkhronos._native.native.Words",
    .tp_basicsize = sizeof(Words),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE,
    .tp_new = words_new,
    .tp_dealloc = (destructor)words_dealloc,
    .tp_methods = methods,
    .tp_getset = attributes,
    .tp_members = members,
};

int synkhronos_add_words(PyObject *module)
{
    PyObject *poll = PyFloat_FromDouble(POLL_NS / 1e9);
    if (poll == NULL || PyModule_AddObject(module, "POLL", poll)) {
        Py_XDECREF(poll);
        return -1;
    }
    if (PyModule_AddIntMacro(module, SENT) || PyModule_AddIntMacro(module, ANSWERED)
        || PyModule_AddIntMacro(module, ARRIVED))
        return -1;
    return PyModule_AddType(module, &WordsType);
}

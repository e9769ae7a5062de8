/* The types `Exchange` and `Piece`: exchange of arrays between node leaders. See exchange.h and native.pyi. */
#include "exchange.h"
#include "module.h"

typedef struct {
    PyObject_HEAD
    struct piece piece;
    struct message *messages; /* those of the piece, in one block */
    struct narrowing narrowing;
    PyObject *arguments; /* keeps the arrays alive */
} Piece;

static void piece_dealloc(Piece *self)
{
    PyMem_Free(self->messages);
    PyMem_Free(self->piece.operands);
    Py_XDECREF(self->arguments);
    Py_TYPE(self)->tp_free(self);
}

static PyObject *piece_fail(Piece *self, PyObject *nothing)
{
    self->piece.failed = 1;
    Py_RETURN_NONE;
}

static PyObject *piece_is_complete(Piece *self, void *nothing)
{
    return PyBool_FromLong(__atomic_load_n(&self->piece.state, __ATOMIC_ACQUIRE) == COMPLETE);
}

static PyObject *piece_has_failed(Piece *self, void *nothing)
{
    return PyBool_FromLong(self->piece.failed);
}

static PyObject *piece_times(Piece *self, void *nothing)
{
    return Py_BuildValue("LL", (long long)self->piece.begun, (long long)self->piece.ended);
}

static PyMethodDef piece_methods[] = {
    {"fail", (PyCFunction)piece_fail, METH_NOARGS, "fail(): send empty messages from now on; see native.pyi."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef piece_attributes[] = {
    {"is_complete", (getter)piece_is_complete, NULL, "Whether all messages have been sent and received.", NULL},
    {"has_failed", (getter)piece_has_failed, NULL, "Whether this leader or another has failed.", NULL},
    {"times", (getter)piece_times, NULL, "When it was begun, and when it was complete; see native.pyi.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

PyTypeObject PieceType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "synkhronos._native.native.Piece",
    .tp_doc = "Arrays that are exchanged together; see native.pyi.",
    .tp_basicsize = sizeof(Piece),
    .tp_flags = Py_TPFLAGS_DEFAULT, /* without `tp_new`: only `Exchange.begin` makes pieces */
    .tp_dealloc = (destructor)piece_dealloc,
    .tp_methods = piece_methods,
    .tp_getset = piece_attributes,
};

typedef struct {
    PyObject_HEAD
    struct exchange exchange;
    PyObject *pieces; /* list: keeps those of the queue alive */
} Exchange;

/* The data of a C-contiguous array; NULL with an exception set. */
static char *data_of(PyObject *object, int is_written, size_t *n_bytes)
{
    PyArrayObject *array = (PyArrayObject *)object;
    if (!PyArray_Check(object) || !PyArray_IS_C_CONTIGUOUS(array) || (is_written && !PyArray_ISWRITEABLE(array))) {
        PyErr_Format(PyExc_TypeError, "expected a C-contiguous array%s; got %R", is_written ? " to write to" : "",
                     object);
        return NULL;
    }
    *n_bytes = (size_t)PyArray_NBYTES(array);
    return PyArray_BYTES(array);
}

/* Parse a list of tuples (peer, array) into messages; empty arrays are left out. Returns -1 with an exception set. */
static int parse_messages(struct message **next, struct message **first, size_t *n, PyObject *list, int tag,
                          int is_received)
{
    *first = *next;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(list); i++) {
        PyObject *array;
        struct message *message = *next;
        if (!PyArg_ParseTuple(PyList_GET_ITEM(list, i), "iO", &message->peer, &array))
            return -1;
        message->data = data_of(array, is_received, &message->n_bytes);
        if (message->data == NULL)
            return -1;
        message->tag = tag;
        *next += message->n_bytes > 0;
    }
    *n = (size_t)(*next - *first);
    return 0;
}

/* Parse (Reduction, operands, out); -1 with an exception set. */
static int parse_reduction(struct piece *piece, PyObject *tuple)
{
    PyObject *reduction, *operands, *out;
    size_t n_bytes, n_bytes_of_out;
    if (!PyArg_ParseTuple(tuple, "O!O!O", &ReductionType, &reduction, &PyList_Type, &operands, &out))
        return -1;
    Py_ssize_t n = PyList_GET_SIZE(operands);
    piece->operands = PyMem_Calloc((size_t)n + 1, sizeof *piece->operands);
    if (piece->operands == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    piece->out = data_of(out, 1, &n_bytes_of_out);
    if (piece->out == NULL)
        return -1;
    piece->length = (size_t)PyArray_SIZE((PyArrayObject *)out);
    for (Py_ssize_t i = 0; i < n; i++) {
        PyObject *operand = PyList_GET_ITEM(operands, i);
        piece->operands[i] = data_of(operand, 0, &n_bytes);
        if (piece->operands[i] == NULL)
            return -1;
        if ((size_t)PyArray_SIZE((PyArrayObject *)operand) != piece->length) {
            PyErr_SetString(PyExc_ValueError, "expected operands of the size of the out");
            return -1;
        }
        piece->reduction = reduction_for(reduction, n, PyArray_DESCR((PyArrayObject *)operand),
                                         PyArray_DESCR((PyArrayObject *)out));
        if (piece->reduction == NULL)
            return -1;
    }
    return 0;
}

/* Parse (got, wide, sent, result, start, is_bfloat16); -1 with an exception set. */
static int parse_narrowing(struct narrowing *narrowing, size_t *start, PyObject *tuple)
{
    PyObject *got, *wide, *sent, *result;
    size_t sizes[4];
    Py_ssize_t first;
    if (!PyArg_ParseTuple(tuple, "OOOOnp", &got, &wide, &sent, &result, &first, &narrowing->is_bfloat16))
        return -1;
    narrowing->got = (const uint16_t *)data_of(got, 0, &sizes[0]);
    narrowing->wide = narrowing->got == NULL ? NULL : (float *)data_of(wide, 1, &sizes[1]);
    narrowing->sent = narrowing->wide == NULL ? NULL : (uint16_t *)data_of(sent, 1, &sizes[2]);
    narrowing->result = narrowing->sent == NULL ? NULL : (float *)data_of(result, 1, &sizes[3]);
    if (narrowing->result == NULL)
        return -1;
    if (2 * sizes[0] != sizes[1] || 2 * sizes[2] != sizes[3]) {
        PyErr_SetString(PyExc_ValueError, "expected arrays of 16 and of 32 bits, of the same size");
        return -1;
    }
    narrowing->n_got = sizes[0] / 2;
    narrowing->n_result = sizes[2] / 2;
    *start = (size_t)first;
    return 0;
}

/* Forget the pieces that are complete; -1 with an exception set. */
static int forget_complete(Exchange *self)
{
    for (Py_ssize_t i = PyList_GET_SIZE(self->pieces) - 1; i >= 0; i--) {
        const Piece *one = (Piece *)PyList_GET_ITEM(self->pieces, i);
        if (__atomic_load_n(&one->piece.state, __ATOMIC_ACQUIRE) == COMPLETE
            && PySequence_DelItem(self->pieces, i) < 0)
            return -1;
    }
    return 0;
}

static PyObject *exchange_begin(Exchange *self, PyObject *args)
{
    PyObject *sends[2], *receives[2], *reduction, *narrowing;
    int tag, has_failed;
    if (!PyArg_ParseTuple(args, "iO!O!O!O!OOp", &tag, &PyList_Type, &sends[0], &PyList_Type, &receives[0],
                          &PyList_Type, &sends[1], &PyList_Type, &receives[1], &reduction, &narrowing, &has_failed))
        return NULL;
    Piece *made = (Piece *)PieceType.tp_alloc(&PieceType, 0);
    if (made == NULL)
        return NULL;
    size_t n = 1;
    for (int step = 0; step < 2; step++)
        n += (size_t)(PyList_GET_SIZE(sends[step]) + PyList_GET_SIZE(receives[step]));
    made->messages = PyMem_Calloc(n, sizeof *made->messages);
    if (made->messages == NULL)
        PyErr_NoMemory();
    struct piece *piece = &made->piece;
    struct message *next = made->messages;
    int failed = next == NULL;
    for (int step = 0; !failed && step < 2; step++)
        failed = parse_messages(&next, &piece->sends[step], &piece->n_sends[step], sends[step], tag + step, 0)
                 || parse_messages(&next, &piece->receives[step], &piece->n_receives[step], receives[step],
                                   tag + step, 1);
    if (!failed && reduction != Py_None)
        failed = parse_reduction(piece, reduction);
    if (!failed && narrowing != Py_None) {
        failed = parse_narrowing(&made->narrowing, &piece->start, narrowing);
        piece->narrowing = &made->narrowing;
    }
    if (failed || forget_complete(self) < 0 || PyList_Append(self->pieces, (PyObject *)made) < 0) {
        Py_DECREF(made);
        return NULL;
    }
    Py_INCREF(args);
    made->arguments = args;
    piece->failed = has_failed;
    Py_BEGIN_ALLOW_THREADS
    exchange_add(&self->exchange, piece);
    Py_END_ALLOW_THREADS
    return (PyObject *)made;
}

static PyObject *exchange_advance_all(Exchange *self, PyObject *nothing)
{
    int error;
    Py_BEGIN_ALLOW_THREADS
    error = exchange_advance(&self->exchange);
    Py_END_ALLOW_THREADS
    if (error)
        return PyErr_Format(PyExc_RuntimeError, "MPI returned the error code %d", error);
    if (PyList_GET_SIZE(self->pieces) > 0 && forget_complete(self) < 0)
        return NULL;
    return PyBool_FromLong(PyList_GET_SIZE(self->pieces) == 0);
}

static PyObject *exchange_begin_polling(Exchange *self, PyObject *nothing)
{
    int error;
    Py_BEGIN_ALLOW_THREADS
    error = exchange_poll(&self->exchange);
    Py_END_ALLOW_THREADS
    if (error) {
        errno = error;
        return PyErr_SetFromErrno(PyExc_OSError);
    }
    Py_RETURN_NONE;
}

static PyObject *exchange_pause_polling(Exchange *self, PyObject *nothing)
{
    Py_BEGIN_ALLOW_THREADS
    exchange_pause(&self->exchange);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyObject *exchange_resume_polling(Exchange *self, PyObject *nothing)
{
    Py_BEGIN_ALLOW_THREADS
    exchange_resume(&self->exchange);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyObject *exchange_end_polling(Exchange *self, PyObject *nothing)
{
    Py_BEGIN_ALLOW_THREADS
    exchange_rest(&self->exchange);
    Py_END_ALLOW_THREADS
    if (forget_complete(self) < 0)
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *exchange_new(PyTypeObject *class, PyObject *args, PyObject *keywords)
{
    static char *names[] = {"handle_bytes", "communicator", "byte", "functions", NULL};
    unsigned long long communicator, byte, functions[4];
    Py_ssize_t handle_bytes;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "nKK(KKKK)", names, &handle_bytes, &communicator, &byte,
                                     &functions[0], &functions[1], &functions[2], &functions[3]))
        return NULL;
    if (handle_bytes != sizeof(int) && handle_bytes != sizeof(void *))
        return PyErr_Format(PyExc_ValueError, "MPI's handles have %zd bytes; expected 4 or 8", handle_bytes);
    Exchange *self = (Exchange *)class->tp_alloc(class, 0);
    if (self == NULL)
        return NULL;
    self->pieces = PyList_New(0);
    if (self->pieces == NULL)
        Py_CLEAR(self);
    else
        exchange_init(&self->exchange, &(struct mpi){
            (size_t)handle_bytes, (uintptr_t)communicator, (uintptr_t)byte, (void *)(uintptr_t)functions[0],
            (void *)(uintptr_t)functions[1], (void *)(uintptr_t)functions[2], (void *)(uintptr_t)functions[3]});
    return (PyObject *)self;
}

static void exchange_dealloc(Exchange *self)
{
    Py_BEGIN_ALLOW_THREADS
    exchange_rest(&self->exchange);
    Py_END_ALLOW_THREADS
    if (self->exchange.first == NULL) /* otherwise MPI may still write to the arrays */
        Py_XDECREF(self->pieces);
    Py_TYPE(self)->tp_free(self);
}

static PyMethodDef exchange_methods[] = {
    {"begin", (PyCFunction)exchange_begin, METH_VARARGS, "Begin to exchange a piece; see native.pyi."},
    {"advance", (PyCFunction)exchange_advance_all, METH_NOARGS, "Advance all pieces without waiting; see native.pyi."},
    {"poll", (PyCFunction)exchange_begin_polling, METH_NOARGS, "poll(): advance all pieces in a thread."},
    {"pause", (PyCFunction)exchange_pause_polling, METH_NOARGS, "pause(): have the thread wait, if there is one."},
    {"resume", (PyCFunction)exchange_resume_polling, METH_NOARGS, "resume(): have the thread go on after `pause`."},
    {"rest", (PyCFunction)exchange_end_polling, METH_NOARGS, "rest(): end the thread; see native.pyi."},
    {NULL, NULL, 0, NULL},
};

PyTypeObject ExchangeType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "synkhronos._native.native.Exchange",
    .tp_doc = "Exchange of arrays between node leaders by MPI; see native.pyi.",
    .tp_basicsize = sizeof(Exchange),
    .tp_dealloc = (destructor)exchange_dealloc,
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = exchange_new,
    .tp_methods = exchange_methods,
};

/* Regions for Python: NumPy allocates in the region of this rank while a command is executed. */
#include "heap_module.h"

typedef struct {
    PyObject_HEAD
    struct regions *all; /* NULL: there are none, and memory comes from wherever it would come from anyway */
    PyObject *capsule;
} Regions;

struct regions *regions_of(PyObject *object)
{
    return ((Regions *)object)->all;
}

static int regions_init(Regions *self, PyObject *arguments, PyObject *keywords)
{
    static char *names[] = {"fd", "n_ranks", "rank", "size", "keep", NULL};
    int fd, n_ranks, rank;
    Py_ssize_t size, keep;
    if (!PyArg_ParseTupleAndKeywords(arguments, keywords, "iiinn", names, &fd, &n_ranks, &rank, &size, &keep))
        return -1;
    if (self->all != NULL || n_ranks < 1 || rank < 0 || rank >= n_ranks || size < 0 || size % REGIONS_HUGE || keep < 0) {
        PyErr_SetString(PyExc_ValueError, "no such regions");
        return -1;
    }
    if (size == 0)
        return 0;
    self->all = regions_create(fd, n_ranks, rank, (size_t)size, (size_t)keep);
    if (self->all == NULL) {
        PyErr_SetFromErrno(PyExc_OSError);
        return -1;
    }
    self->capsule = regions_handler(self->all);
    if (self->capsule != NULL)
        return 0;
    regions_destroy(self->all);
    self->all = NULL;
    return -1;
}

static void regions_dealloc(Regions *self)
{
    Py_XDECREF(self->capsule);
    Py_TYPE(self)->tp_free(self);
}

static PyObject *regions_call(Regions *self, PyObject *const *arguments, Py_ssize_t n)
{
    if (n != 2) {
        PyErr_SetString(PyExc_TypeError, "expected a function and its argument");
        return NULL;
    }
    if (self->all == NULL)
        return PyObject_CallOneArg(arguments[0], arguments[1]);
    PyObject *before = PyDataMem_SetHandler(self->capsule);
    if (before == NULL)
        return NULL;
    regions_begin_command(self->all);
    PyObject *result = PyObject_CallOneArg(arguments[0], arguments[1]);
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    PyObject *own = PyDataMem_SetHandler(before);
    Py_DECREF(before);
    regions_end_command(self->all);
    if (own == NULL) {
        Py_XDECREF(type), Py_XDECREF(value), Py_XDECREF(traceback);
        Py_XDECREF(result);
        return NULL;
    }
    Py_DECREF(own);
    PyErr_Restore(type, value, traceback);
    return result;
}

static PyObject *regions_share(Regions *self, PyObject *const *arguments, Py_ssize_t n)
{
    if (n != 2) {
        PyErr_SetString(PyExc_TypeError, "expected a function and its argument");
        return NULL;
    }
    regions_fork_ranks(self->all);
    PyObject *result = PyObject_CallOneArg(arguments[0], arguments[1]);
    regions_fork_no_ranks();
    return result;
}

static PyObject *regions_take_rank(Regions *self, PyObject *argument)
{
    long rank = PyLong_AsLong(argument);
    if (rank == -1 && PyErr_Occurred())
        return NULL;
    if (self->all != NULL)
        regions_take(self->all, (int)rank);
    Py_RETURN_NONE;
}

static PyObject *regions_do_allow(Regions *self, PyObject *argument)
{
    Py_ssize_t n_bytes = PyLong_AsSsize_t(argument);
    if (n_bytes == -1 && PyErr_Occurred())
        return NULL;
    if (self->all != NULL)
        regions_allow(self->all, (size_t)n_bytes);
    Py_RETURN_NONE;
}

static PyObject *regions_do_trim(Regions *self, PyObject *nothing)
{
    if (self->all != NULL)
        regions_trim(self->all);
    Py_RETURN_NONE;
}

static PyObject *regions_do_close(Regions *self, PyObject *nothing)
{
    if (self->all != NULL)
        regions_close(self->all);
    Py_RETURN_NONE;
}

/* Where the lowest byte of an array lies, and how many bytes it spans. */
static char *span_of(PyArrayObject *array, size_t *n_bytes)
{
    char *first = PyArray_BYTES(array), *last = first + PyArray_ITEMSIZE(array);
    for (int axis = 0; axis < PyArray_NDIM(array); axis++) {
        npy_intp reach = (PyArray_DIM(array, axis) - 1) * PyArray_STRIDE(array, axis);
        if (PyArray_DIM(array, axis) == 0)
            reach = 0;
        *(reach < 0 ? &first : &last) += reach;
    }
    *n_bytes = (size_t)(last - first);
    return first;
}

static PyObject *regions_offset_of(Regions *self, PyObject *array)
{
    size_t n_bytes;
    if (!PyArray_Check(array)) {
        PyErr_Format(PyExc_TypeError, "expected an array; got %R", array);
        return NULL;
    }
    if (self->all == NULL)
        Py_RETURN_NONE;
    char *first = span_of((PyArrayObject *)array, &n_bytes);
    ptrdiff_t start = regions_offset(self->all, first, n_bytes);
    if (start < 0)
        Py_RETURN_NONE;
    return PyLong_FromSsize_t(start + (PyArray_BYTES((PyArrayObject *)array) - first));
}

static PyObject *regions_counts(Regions *self, PyObject *nothing)
{
    int n = self->all == NULL ? 0 : regions_n_ranks(self->all);
    PyObject *list = PyList_New(n);
    for (int rank = 0; list != NULL && rank < n; rank++) {
        struct regions_count one = regions_count(self->all, rank);
        PyObject *item = Py_BuildValue("(KKK)", (unsigned long long)one.in_use, (unsigned long long)one.kept,
                                       (unsigned long long)one.largest);
        if (item == NULL)
            Py_CLEAR(list);
        else
            PyList_SET_ITEM(list, rank, item);
    }
    return list;
}

static PyObject *regions_get_base(Regions *self, void *nothing)
{
    if (self->all == NULL || !regions_are_shared(self->all))
        Py_RETURN_NONE;
    return PyLong_FromVoidPtr(regions_base(self->all));
}

static PyObject *regions_get_short(Regions *self, void *nothing)
{
    return PyBool_FromLong(self->all != NULL && regions_short(self->all));
}

static PyMethodDef methods[] = {
    {"call", (PyCFunction)(void (*)(void))regions_call, METH_FASTCALL, "call(function, argument): execute a command."},
    {"share", (PyCFunction)(void (*)(void))regions_share, METH_FASTCALL, "share(function, argument): fork ranks."},
    {"take", (PyCFunction)regions_take_rank, METH_O, "take(rank): have the region of a rank, in its new process."},
    {"allow", (PyCFunction)regions_do_allow, METH_O, "allow(n_bytes): how much more may be taken."},
    {"trim", (PyCFunction)regions_do_trim, METH_NOARGS, "trim(): give back what is kept."},
    {"close", (PyCFunction)regions_do_close, METH_NOARGS, "close(): allocate nothing any more."},
    {"offset", (PyCFunction)regions_offset_of, METH_O, "offset(array): from the base on, or None."},
    {"counts", (PyCFunction)regions_counts, METH_NOARGS, "counts(): of each rank, bytes in use, kept, largest."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef attributes[] = {
    {"base", (getter)regions_get_base, NULL, "The address of the first region, or None.", NULL},
    {"short", (getter)regions_get_short, NULL, "Whether to look again how much may be taken.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

/* All regions together. */
static int regions_getbuffer(PyObject *object, Py_buffer *view, int flags)
{
    struct regions *all = regions_of(object);
    if (all == NULL || !regions_are_shared(all)) {
        PyErr_SetString(PyExc_BufferError, "there is no memory that ranks share");
        return -1;
    }
    return PyBuffer_FillInfo(view, object, regions_base(all), (Py_ssize_t)regions_n_bytes(all), 1, flags);
}

static PyBufferProcs as_buffer = {.bf_getbuffer = regions_getbuffer};

PyTypeObject RegionsType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "synkhronos._native.native.Regions",
    .tp_doc = "The regions of one session.",
    .tp_basicsize = sizeof(Regions),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = PyType_GenericNew,
    .tp_init = (initproc)regions_init,
    .tp_dealloc = (destructor)regions_dealloc,
    .tp_as_buffer = &as_buffer,
    .tp_methods = methods,
    .tp_getset = attributes,
};

static PyObject *before_fork(PyObject *module, PyObject *nothing)
{
    size_t refused = regions_before_fork();
    if (refused > 0 && PyErr_WarnFormat(PyExc_RuntimeWarning, 1,
                                        "memory is short: this child process gets no copy of the %zu bytes that "
                                        "functions have computed and programs still hold, shared variables among them, "
                                        "and ends by SIGSEGV if it touches them. Fork it before synkhronos.fork, or "
                                        "have multiprocessing spawn it", refused) < 0)
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *after_fork(PyObject *module, PyObject *nothing)
{
    regions_after_fork();
    Py_RETURN_NONE;
}

static PyMethodDef functions[] = {
    {"before_fork", before_fork, METH_NOARGS, "Copy what a child may read, in the process that forks it."},
    {"after_fork", after_fork, METH_NOARGS, "Forget the copies, in that process."},
    {NULL, NULL, 0, NULL},
};

int synkhronos_add_regions(PyObject *module)
{
    if (PyType_Ready(&RegionsType) < 0 || PyModule_AddFunctions(module, functions) < 0)
        return -1;
    if (PyModule_AddIntConstant(module, "SMALLEST_BLOCK", REGIONS_SMALLEST) < 0)
        return -1;
    Py_INCREF(&RegionsType);
    return PyModule_AddObject(module, "Regions", (PyObject *)&RegionsType);
}

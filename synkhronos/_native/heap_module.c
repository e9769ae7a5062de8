/* The type `Heap`: NumPy allocates in this rank's arena while a command runs. See heap.h and native.pyi. */
#include "module.h"

/* -- NumPy's memory handler (NEP 49) */

/* Every array keeps the capsule of the handler that allocated it, so the heap exists as long as any of its arrays. */
struct numpy_handler {
    PyDataMem_Handler handler;
    struct heap *heap;
};

static void destroy_handler(PyObject *capsule)
{
    struct numpy_handler *state = PyCapsule_GetPointer(capsule, "mem_handler");
    heap_destroy(state->heap);
    PyMem_RawFree(state);
}

static PyObject *make_handler(struct heap *heap)
{
    struct numpy_handler *state = PyMem_RawCalloc(1, sizeof *state);
    if (state == NULL)
        return PyErr_NoMemory();
    state->heap = heap;
    state->handler = (PyDataMem_Handler){
        .name = "synkhronos",
        .version = 1,
        .allocator = {heap, heap_malloc, heap_calloc, heap_realloc, heap_free},
    };
    PyObject *capsule = PyCapsule_New(state, "mem_handler", destroy_handler);
    if (capsule == NULL)
        PyMem_RawFree(state);
    return capsule;
}

/* -- The type `Heap` */

typedef struct {
    PyObject_HEAD
    struct heap *heap; /* NULL: no heap; NumPy's default handler allocates */
    PyObject *capsule;
} Heap;

struct heap *heap_of(PyObject *object)
{
    return ((Heap *)object)->heap;
}

static int init(Heap *self, PyObject *arguments, PyObject *keywords)
{
    static char *names[] = {"fd", "n_ranks", "rank", "size", "keep", NULL};
    int fd, n_ranks, rank;
    Py_ssize_t size, keep;
    if (!PyArg_ParseTupleAndKeywords(arguments, keywords, "iiinn", names, &fd, &n_ranks, &rank, &size, &keep))
        return -1;
    if (self->heap != NULL || n_ranks < 1 || rank < 0 || rank >= n_ranks || size < 0 || size % HEAP_HUGE_PAGE
        || keep < 0) {
        PyErr_SetString(PyExc_ValueError, "expected 0 <= rank < n_ranks, a size in multiples of 2 MiB, and keep >= 0");
        return -1;
    }
    if (size == 0)
        return 0;
    self->heap = heap_create(fd, n_ranks, rank, (size_t)size, (size_t)keep);
    if (self->heap == NULL) {
        PyErr_SetFromErrno(PyExc_OSError);
        return -1;
    }
    self->capsule = make_handler(self->heap);
    if (self->capsule != NULL)
        return 0;
    heap_destroy(self->heap);
    self->heap = NULL;
    return -1;
}

static void dealloc(Heap *self)
{
    Py_XDECREF(self->capsule);
    Py_TYPE(self)->tp_free(self);
}

static PyObject *call(Heap *self, PyObject *const *arguments, Py_ssize_t n)
{
    if (n != 2) {
        PyErr_SetString(PyExc_TypeError, "expected a function and its argument");
        return NULL;
    }
    if (self->heap == NULL)
        return PyObject_CallOneArg(arguments[0], arguments[1]);
    PyObject *previous = PyDataMem_SetHandler(self->capsule);
    if (previous == NULL)
        return NULL;
    heap_begin_command(self->heap);
    PyObject *result = PyObject_CallOneArg(arguments[0], arguments[1]);
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    PyObject *own = PyDataMem_SetHandler(previous);
    Py_DECREF(previous);
    heap_end_command(self->heap);
    if (own == NULL) {
        Py_XDECREF(type), Py_XDECREF(value), Py_XDECREF(traceback);
        Py_XDECREF(result);
        return NULL;
    }
    Py_DECREF(own);
    PyErr_Restore(type, value, traceback);
    return result;
}

static PyObject *share(Heap *self, PyObject *const *arguments, Py_ssize_t n)
{
    if (n != 2) {
        PyErr_SetString(PyExc_TypeError, "expected a function and its argument");
        return NULL;
    }
    heap_begin_forking_ranks(self->heap);
    PyObject *result = PyObject_CallOneArg(arguments[0], arguments[1]);
    heap_end_forking_ranks();
    return result;
}

static PyObject *take(Heap *self, PyObject *argument)
{
    long rank = PyLong_AsLong(argument);
    if (rank == -1 && PyErr_Occurred())
        return NULL;
    if (self->heap != NULL)
        heap_take_arena(self->heap, (int)rank);
    Py_RETURN_NONE;
}

static PyObject *allow(Heap *self, PyObject *argument)
{
    Py_ssize_t n_bytes = PyLong_AsSsize_t(argument);
    if (n_bytes == -1 && PyErr_Occurred())
        return NULL;
    if (self->heap != NULL)
        heap_set_budget(self->heap, (size_t)n_bytes);
    Py_RETURN_NONE;
}

static PyObject *trim(Heap *self, PyObject *nothing)
{
    if (self->heap != NULL)
        heap_trim(self->heap);
    Py_RETURN_NONE;
}

static PyObject *close_(Heap *self, PyObject *nothing)
{
    if (self->heap != NULL)
        heap_close(self->heap);
    Py_RETURN_NONE;
}

/* The address of an array's first byte in memory, and the number of bytes from there to its end. */
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

/* The offset of an array from the first arena, in bytes; -1 if it is not in memory that ranks share. */
static ptrdiff_t offset_of(const Heap *self, PyArrayObject *array)
{
    if (self->heap == NULL)
        return -1;
    size_t n_bytes;
    char *first = span_of(array, &n_bytes);
    ptrdiff_t start = heap_offset(self->heap, first, n_bytes);
    return start < 0 ? -1 : start + (PyArray_BYTES(array) - first);
}

static PyObject *offset(Heap *self, PyObject *array)
{
    if (!PyArray_Check(array)) {
        PyErr_Format(PyExc_TypeError, "expected an array; got %R", array);
        return NULL;
    }
    ptrdiff_t start = offset_of(self, (PyArrayObject *)array);
    if (start < 0)
        Py_RETURN_NONE;
    return PyLong_FromSsize_t(start);
}

static PyObject *private_(Heap *self, PyObject *values)
{
    if (!PyList_Check(values) && !PyTuple_Check(values)) { /* an array would give its rows */
        PyErr_Format(PyExc_TypeError, "expected a list or tuple of values; got %R", Py_TYPE(values));
        return NULL;
    }
    PyObject *found = PyList_New(PySequence_Fast_GET_SIZE(values));
    for (Py_ssize_t i = 0; found != NULL && i < PyList_GET_SIZE(found); i++) {
        PyObject *value = PySequence_Fast_GET_ITEM(values, i);
        if (PyArray_Check(value) && offset_of(self, (PyArrayObject *)value) >= 0)
            value = PyArray_NewCopy((PyArrayObject *)value, NPY_CORDER);
        else
            Py_INCREF(value);
        if (value == NULL)
            Py_CLEAR(found);
        else
            PyList_SET_ITEM(found, i, value);
    }
    return found;
}

static PyObject *counts(Heap *self, PyObject *nothing)
{
    int n = self->heap == NULL ? 0 : heap_n_ranks(self->heap);
    PyObject *list = PyList_New(n);
    for (int rank = 0; list != NULL && rank < n; rank++) {
        struct heap_usage usage = heap_usage(self->heap, rank);
        PyObject *item = Py_BuildValue("(KKK)", (unsigned long long)usage.in_use, (unsigned long long)usage.cached,
                                       (unsigned long long)usage.peak);
        if (item == NULL)
            Py_CLEAR(list);
        else
            PyList_SET_ITEM(list, rank, item);
    }
    return list;
}

/* The address of the first arena; NULL if there is no memory that ranks share. */
static char *shared_base(const Heap *self)
{
    return self->heap == NULL ? NULL : heap_shared_base(self->heap);
}

static PyObject *get_base(Heap *self, void *nothing)
{
    char *base = shared_base(self);
    if (base == NULL)
        Py_RETURN_NONE;
    return PyLong_FromVoidPtr(base);
}

static PyObject *get_short(Heap *self, void *nothing)
{
    return PyBool_FromLong(self->heap != NULL && heap_is_low(self->heap));
}

static PyMethodDef methods[] = {
    {"call", (PyCFunction)(void (*)(void))call, METH_FASTCALL,
     "call(function, argument): run a command, with NumPy allocating in the heap."},
    {"share", (PyCFunction)(void (*)(void))share, METH_FASTCALL,
     "share(function, argument): call a function whose forks are ranks."},
    {"take", (PyCFunction)take, METH_O, "take(rank): take the arena of a rank, in its new process."},
    {"allow", (PyCFunction)allow, METH_O, "allow(n_bytes): set how much more memory may be taken from the system."},
    {"trim", (PyCFunction)trim, METH_NOARGS, "trim(): release all cached blocks."},
    {"close", (PyCFunction)close_, METH_NOARGS, "close(): stop allocating in the heap."},
    {"offset", (PyCFunction)offset, METH_O, "offset(array): bytes from the base, or None."},
    {"private", (PyCFunction)private_, METH_O, "private(values): the values, with copies of arrays in the heap."},
    {"counts", (PyCFunction)counts, METH_NOARGS, "counts(): for each rank, bytes in use, cached, and the peak in use."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef attributes[] = {
    {"base", (getter)get_base, NULL, "Address of the first arena, or None.", NULL},
    {"short", (getter)get_short, NULL, "Whether to call `allow` again: most of the budget is used up.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

/* The buffer of a `Heap` is the memory of all arenas. */
static int get_buffer(PyObject *object, Py_buffer *view, int flags)
{
    char *base = shared_base((Heap *)object);
    if (base == NULL) {
        PyErr_SetString(PyExc_BufferError, "there is no memory that ranks share");
        return -1;
    }
    return PyBuffer_FillInfo(view, object, base, (Py_ssize_t)heap_n_bytes(heap_of(object)), 0, flags);
}

static PyBufferProcs as_buffer = {.bf_getbuffer = get_buffer};

PyTypeObject HeapType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "synkhronos._native.native.Heap",
    .tp_doc = "The shared heap of one session.",
    .tp_basicsize = sizeof(Heap),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = PyType_GenericNew,
    .tp_init = (initproc)init,
    .tp_dealloc = (destructor)dealloc,
    .tp_as_buffer = &as_buffer,
    .tp_methods = methods,
    .tp_getset = attributes,
};

static PyObject *before_fork(PyObject *module, PyObject *nothing)
{
    size_t refused = heap_before_fork();
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
    heap_after_fork();
    Py_RETURN_NONE;
}

PyMethodDef synkhronos_heap_functions[] = {
    {"before_fork", before_fork, METH_NOARGS, "Before a fork: copy the live blocks for the child."},
    {"after_fork", after_fork, METH_NOARGS, "After a fork, in the parent: free the copies."},
    {NULL, NULL, 0, NULL},
};

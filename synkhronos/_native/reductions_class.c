/* The class `Reduction`: a reduction of NumPy arrays. */
#include "reductions_arrays.h"

/* Blocks that take longer than giving the lock away and taking it back. */
#define LARGE_BYTES ((size_t)64 * 1024)

static const char *const operations[N_OPERATIONS] = {"sum", "prod", "max", "min", "avg"};

typedef struct {
    PyObject_HEAD
    reduction *plan;
    Py_ssize_t n;
    enum type type, returned;
} ReductionObject;

static PyObject *make(PyTypeObject *class, PyObject *args, PyObject *keywords)
{
    static char *names[] = {"op", "dtype", "returned", "weights", NULL};
    const char *name;
    PyArray_Descr *dtype = NULL, *returned = NULL;
    PyObject *sequence;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "sO&O&O", names, &name, PyArray_DescrConverter, &dtype,
                                     PyArray_DescrConverter, &returned, &sequence)) {
        Py_XDECREF(dtype);
        return NULL;
    }
    ReductionObject *self = NULL;
    int operation = 0;
    enum type type = type_of(dtype), out = type_of(returned);
    while (operation < N_OPERATIONS && strcmp(operations[operation], name))
        operation++;
    Py_ssize_t n = 0;
    double *weights = doubles_of(sequence, &n);
    if (weights != NULL && (operation == N_OPERATIONS || type == N_TYPES || out == N_TYPES || n == 0 ||
                            !reduction_exists(operation, type, out)))
        PyErr_Format(PyExc_TypeError, "there is no reduction \"%s\" of %zd arrays of %S to %S", name, n, dtype, returned);
    else if (weights != NULL)
        self = (ReductionObject *)class->tp_alloc(class, 0);
    if (self != NULL) {
        self->n = n;
        self->type = type;
        self->returned = out;
        self->plan = reduction_create(reduction_kernels(), operation, type, out, n, weights);
        if (self->plan == NULL) {
            Py_CLEAR(self);
            PyErr_NoMemory();
        }
    }
    PyMem_Free(weights);
    Py_DECREF(dtype);
    Py_DECREF(returned);
    return (PyObject *)self;
}

static void dispose(PyObject *self)
{
    reduction_free(((ReductionObject *)self)->plan);
    Py_TYPE(self)->tp_free(self);
}

const reduction *plan_for(PyObject *object, Py_ssize_t n, PyArray_Descr *dtype, PyArray_Descr *returned)
{
    ReductionObject *self = (ReductionObject *)object;
    if (n == self->n && type_of(dtype) == self->type && (returned == NULL || type_of(returned) == self->returned))
        return self->plan;
    PyErr_SetString(PyExc_ValueError, "the reduction is for other dtypes, or for other numbers of arrays");
    return NULL;
}

static PyObject *apply(PyObject *object, PyObject *args, PyObject *keywords)
{
    static char *names[] = {"operands", "outs", NULL};
    ReductionObject *self = (ReductionObject *)object;
    PyObject *given, *wanted, *result = NULL;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "OO", names, &given, &wanted))
        return NULL;
    /* as tuples they stay what they are while others run */
    PyObject *operands = PySequence_Tuple(given), *outs = operands == NULL ? NULL : PySequence_Tuple(wanted);
    Py_ssize_t n = self->n, n_outs = outs == NULL ? 0 : PyTuple_GET_SIZE(outs), size = -1;
    char **addresses = NULL;
    if (outs == NULL)
        goto done;
    if (PyTuple_GET_SIZE(operands) != n || n_outs == 0) {
        PyErr_Format(PyExc_ValueError, "expected %zd operands, and an out", n);
        goto done;
    }
    addresses = PyMem_Malloc((n + n_outs) * sizeof *addresses);
    if (addresses == NULL) {
        PyErr_NoMemory();
        goto done;
    }
    for (Py_ssize_t i = 0; i < n + n_outs; i++) {
        PyObject *array = i < n ? PyTuple_GET_ITEM(operands, i) : PyTuple_GET_ITEM(outs, i - n);
        addresses[i] = address_of(array, i < n ? self->type : self->returned, &size, i >= n);
        if (addresses[i] == NULL)
            goto done;
    }
    size_t read = size * size_of(self->type), written = size * size_of(self->returned);
    for (Py_ssize_t i = 0; i < n; i++)
        for (Py_ssize_t k = n; k < n + n_outs; k++) {
            int apart = addresses[i] + read <= addresses[k] || addresses[k] + written <= addresses[i];
            if (!apart && (addresses[i] != addresses[k] || self->type != self->returned)) {
                PyErr_SetString(PyExc_ValueError, "an out overlaps an operand");
                goto done;
            }
        }
    PyThreadState *state = (n + n_outs) * read < LARGE_BYTES ? NULL : PyEval_SaveThread();
    reduction_apply(self->plan, (const void *const *)addresses, (void *const *)(addresses + n), n_outs, size);
    if (state != NULL)
        PyEval_RestoreThread(state);
    Py_INCREF(Py_None);
    result = Py_None;
done:
    PyMem_Free(addresses);
    Py_XDECREF(operands);
    Py_XDECREF(outs);
    return result;
}

PyTypeObject Reduction = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "synkhronos._native.native.Reduction",
    .tp_doc = "A reduction of as many arrays as there are weights; see native.pyi.",
    .tp_basicsize = sizeof(ReductionObject),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = make,
    .tp_dealloc = dispose,
    .tp_call = apply,
};

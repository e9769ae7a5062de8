/* Reductions of NumPy arrays: the type `Reduction`, and running means. See reductions.h and native.pyi. */
#include "module.h"

#include <float.h>

/* Smaller reductions take less time than releasing and reacquiring the GIL. */
#define RELEASE_GIL_BYTES ((size_t)64 * 1024)

static const char *const operations[N_OPERATIONS] = {"sum", "prod", "max", "min", "avg"};

/* -- Arguments */

/* The type of the elements of a dtype; N_TYPES if arrays of this dtype cannot be reduced. */
static enum type type_of_dtype(PyArray_Descr *dtype)
{
    static const int numbers[N_TYPES] = {
        [BOOL] = NPY_BOOL, [I8] = NPY_INT8, [U8] = NPY_UINT8, [I16] = NPY_INT16, [U16] = NPY_UINT16,
        [I32] = NPY_INT32, [U32] = NPY_UINT32, [I64] = NPY_INT64, [U64] = NPY_UINT64, [F16] = NPY_FLOAT16,
        [F32] = NPY_FLOAT32, [F64] = NPY_FLOAT64, [C64] = NPY_COMPLEX64, [C128] = NPY_COMPLEX128,
    };
    int number = PyArray_ISNBO(dtype->byteorder) ? dtype->type_num : NPY_NOTYPE, type = 0;
    if (number == NPY_LONGLONG || number == NPY_ULONGLONG) /* of 64 bits, as NPY_LONG */
        number -= NPY_LONGLONG - NPY_LONG;
    while (type < N_TYPES && numbers[type] != number)
        type++;
    return type;
}

/* Parse the weights into memory that the caller frees; NULL with an exception set. */
static double *parse_weights(PyObject *sequence, Py_ssize_t *n)
{
    PyObject *items = PySequence_Fast(sequence, "weights must be a sequence of numbers");
    if (items == NULL)
        return NULL;
    *n = PySequence_Fast_GET_SIZE(items);
    double *numbers = PyMem_Malloc((*n ? *n : 1) * sizeof *numbers);
    if (numbers == NULL)
        PyErr_NoMemory();
    for (Py_ssize_t i = 0; numbers != NULL && i < *n; i++) {
        numbers[i] = PyFloat_AsDouble(PySequence_Fast_GET_ITEM(items, i));
        if (!PyErr_Occurred() && !(numbers[i] >= 0 && numbers[i] <= DBL_MAX))
            PyErr_Format(PyExc_ValueError, "weights must be finite and not negative; got %R",
                         PySequence_Fast_GET_ITEM(items, i));
        if (PyErr_Occurred()) {
            PyMem_Free(numbers);
            numbers = NULL;
        }
    }
    Py_DECREF(items);
    return numbers;
}

/* The data of an array, after checking its type and size; NULL with an exception set. A size of -1 is set to that of
 * the array. */
static char *array_data(PyObject *array, enum type type, Py_ssize_t *size, int written)
{
    if (type == N_TYPES || !PyArray_Check(array) || type_of_dtype(PyArray_DESCR((PyArrayObject *)array)) != type ||
        !PyArray_IS_C_CONTIGUOUS((PyArrayObject *)array) ||
        (written && !PyArray_ISWRITEABLE((PyArrayObject *)array))) {
        PyErr_SetString(PyExc_TypeError,
                        "expected C-contiguous arrays of the reduction's dtypes, writable ones as outs");
        return NULL;
    }
    if (*size < 0)
        *size = PyArray_SIZE((PyArrayObject *)array);
    if (*size != PyArray_SIZE((PyArrayObject *)array)) {
        PyErr_SetString(PyExc_ValueError, "expected arrays of the same size");
        return NULL;
    }
    return PyArray_BYTES((PyArrayObject *)array);
}

/* -- The type `Reduction` */

typedef struct {
    PyObject_HEAD
    reduction *plan;
    Py_ssize_t n;
    enum type type, returned;
} ReductionObject;

static PyObject *reduction_new(PyTypeObject *class, PyObject *args, PyObject *keywords)
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
    enum type type = type_of_dtype(dtype), out = type_of_dtype(returned);
    while (operation < N_OPERATIONS && strcmp(operations[operation], name))
        operation++;
    Py_ssize_t n = 0;
    double *weights = parse_weights(sequence, &n);
    if (weights != NULL && (operation == N_OPERATIONS || type == N_TYPES || out == N_TYPES || n == 0 ||
                            !reduction_exists(operation, type, out)))
        PyErr_Format(PyExc_TypeError, "there is no reduction \"%s\" of %zd arrays of %S to %S", name, n, dtype,
                     returned);
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

static void reduction_dealloc(PyObject *self)
{
    reduction_free(((ReductionObject *)self)->plan);
    Py_TYPE(self)->tp_free(self);
}

const reduction *reduction_for(PyObject *object, Py_ssize_t n, PyArray_Descr *dtype, PyArray_Descr *returned)
{
    ReductionObject *self = (ReductionObject *)object;
    if (n == self->n && type_of_dtype(dtype) == self->type
        && (returned == NULL || type_of_dtype(returned) == self->returned))
        return self->plan;
    PyErr_SetString(PyExc_ValueError, "the reduction is for other dtypes, or for other numbers of arrays");
    return NULL;
}

static PyObject *reduction_call(PyObject *object, PyObject *args, PyObject *keywords)
{
    static char *names[] = {"operands", "outs", NULL};
    ReductionObject *self = (ReductionObject *)object;
    PyObject *given, *wanted, *result = NULL;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "OO", names, &given, &wanted))
        return NULL;
    /* convert to tuples, because other threads may change lists while the GIL is released */
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
        addresses[i] = array_data(array, i < n ? self->type : self->returned, &size, i >= n);
        if (addresses[i] == NULL)
            goto done;
    }
    size_t read = size * type_sizes[self->type], written = size * type_sizes[self->returned];
    for (Py_ssize_t i = 0; i < n; i++)
        for (Py_ssize_t k = n; k < n + n_outs; k++) {
            int apart = addresses[i] + read <= addresses[k] || addresses[k] + written <= addresses[i];
            if (!apart && (addresses[i] != addresses[k] || self->type != self->returned)) {
                PyErr_SetString(PyExc_ValueError, "an out overlaps an operand");
                goto done;
            }
        }
    PyThreadState *state = (n + n_outs) * read < RELEASE_GIL_BYTES ? NULL : PyEval_SaveThread();
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

PyTypeObject ReductionType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "synkhronos._native.native.Reduction",
    .tp_doc = "A reduction of as many arrays as there are weights; see native.pyi.",
    .tp_basicsize = sizeof(ReductionObject),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = reduction_new,
    .tp_dealloc = reduction_dealloc,
    .tp_call = reduction_call,
};

/* -- Functions */

static PyObject *normalized(PyObject *module, PyObject *weights)
{
    Py_ssize_t n = 0;
    double *numbers = parse_weights(weights, &n);
    if (numbers == NULL)
        return NULL;
    PyObject *shares = PyList_New(n);
    normalize_weights(numbers, numbers, n);
    for (Py_ssize_t i = 0; shares != NULL && i < n; i++) {
        PyObject *share = PyFloat_FromDouble(numbers[i]);
        if (share == NULL)
            Py_CLEAR(shares);
        else
            PyList_SET_ITEM(shares, i, share);
    }
    PyMem_Free(numbers);
    return shares;
}

/* The type of the sums for values of a type, and the number of elements of the sums per value. */
static enum type type_of_sums(enum type type, Py_ssize_t *per_value)
{
    *per_value = type < F16 ? 2 : 1;
    return type < F16 ? I64 : type == F16 ? F32 : type;
}

static PyObject *add_values(PyObject *module, PyObject *args)
{
    PyObject *sums, *values;
    double weight;
    if (!PyArg_ParseTuple(args, "OOd", &sums, &values, &weight))
        return NULL;
    Py_ssize_t size = -1, per_value;
    enum type type = PyArray_Check(values) ? type_of_dtype(PyArray_DESCR((PyArrayObject *)values)) : N_TYPES;
    const char *from = array_data(values, type, &size, 0);
    if (from == NULL)
        return NULL;
    enum type sum_type = type_of_sums(type, &per_value);
    Py_ssize_t length = size * per_value;
    char *to = array_data(sums, sum_type, &length, 1);
    if (to == NULL)
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    add_to_sums(reduction_kernels(), to, type, from, (int64_t)weight, weight, size);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyObject *mean_of(PyObject *module, PyObject *args)
{
    PyObject *sums, *out;
    long long total;
    if (!PyArg_ParseTuple(args, "OLO", &sums, &total, &out))
        return NULL;
    Py_ssize_t size = -1;
    enum type returned = PyArray_Check(out) ? type_of_dtype(PyArray_DESCR((PyArrayObject *)out)) : N_TYPES;
    char *to = array_data(out, returned, &size, 1);
    Py_ssize_t length = 2 * size;
    const char *from = to == NULL ? NULL : array_data(sums, I64, &length, 0);
    if (from == NULL)
        return NULL;
    if (total <= 0 || (returned >= F16 && returned != F64)) {
        PyErr_SetString(PyExc_ValueError, "expected a total above 0, and an out of an integer dtype or float64");
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    mean_of_sums(to, returned, from, total, size);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

PyMethodDef synkhronos_reduction_functions[] = {
    {"normalized", normalized, METH_O, "Weights that sum to one; see native.pyi."},
    {"add_to_sums", add_values, METH_VARARGS, "Add values to the sums of a mean; see native.pyi."},
    {"mean_of_sums", mean_of, METH_VARARGS, "The mean of integers; see native.pyi."},
    {NULL, NULL, 0, NULL},
};

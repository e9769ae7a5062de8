/* What the module has of the reductions. */
#include "reductions_arrays.h"

static PyObject *normalized(PyObject *module, PyObject *weights)
{
    Py_ssize_t n = 0;
    double *numbers = doubles_of(weights, &n);
    if (numbers == NULL)
        return NULL;
    PyObject *shares = PyList_New(n);
    normalize(numbers, numbers, n);
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

/* The type of the sums of values of a type, and how many elements they have for each value. */
static enum type type_of_sums(enum type type, Py_ssize_t *times)
{
    *times = type < F16 ? 2 : 1;
    return type < F16 ? I64 : type == F16 ? F32 : type;
}

static PyObject *add_values(PyObject *module, PyObject *args)
{
    PyObject *sums, *values;
    double weight;
    if (!PyArg_ParseTuple(args, "OOd", &sums, &values, &weight))
        return NULL;
    Py_ssize_t size = -1, times;
    enum type type = PyArray_Check(values) ? type_of(PyArray_DESCR((PyArrayObject *)values)) : N_TYPES;
    const char *from = address_of(values, type, &size, 0);
    if (from == NULL)
        return NULL;
    enum type wider = type_of_sums(type, &times);
    Py_ssize_t length = size * times;
    char *to = address_of(sums, wider, &length, 1);
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
    enum type returned = PyArray_Check(out) ? type_of(PyArray_DESCR((PyArrayObject *)out)) : N_TYPES;
    char *to = address_of(out, returned, &size, 1);
    Py_ssize_t length = 2 * size;
    const char *from = to == NULL ? NULL : address_of(sums, I64, &length, 0);
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

static PyMethodDef functions[] = {
    {"normalized", normalized, METH_O, "Weights that sum to one; see native.pyi."},
    {"add_to_sums", add_values, METH_VARARGS, "Add values to the sums of a mean; see native.pyi."},
    {"mean_of_sums", mean_of, METH_VARARGS, "The mean of integers; see native.pyi."},
    {NULL, NULL, 0, NULL},
};

int synkhronos_add_reductions(PyObject *module)
{
    if (PyModule_AddFunctions(module, functions) < 0 || PyType_Ready(&Reduction) < 0)
        return -1;
    Py_INCREF(&Reduction);
    return PyModule_AddObject(module, "Reduction", (PyObject *)&Reduction);
}

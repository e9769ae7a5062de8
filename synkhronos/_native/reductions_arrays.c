/* NumPy arrays, as the reductions take them. */
#include "reductions_arrays.h"

#include <float.h>

enum type type_of(PyArray_Descr *dtype)
{
    switch (PyArray_ISNBO(dtype->byteorder) ? dtype->type_num : NPY_NOTYPE) {
    case NPY_BOOL: return BOOL;
    case NPY_BYTE: return I8;
    case NPY_UBYTE: return U8;
    case NPY_SHORT: return I16;
    case NPY_USHORT: return U16;
    case NPY_INT: return I32;
    case NPY_UINT: return U32;
    case NPY_LONG: return sizeof(long) == 8 ? I64 : I32;
    case NPY_ULONG: return sizeof(long) == 8 ? U64 : U32;
    case NPY_LONGLONG: return I64;
    case NPY_ULONGLONG: return U64;
    case NPY_HALF: return F16;
    case NPY_FLOAT: return F32;
    case NPY_DOUBLE: return F64;
    case NPY_CFLOAT: return C64;
    case NPY_CDOUBLE: return C128;
    default: return N_TYPES;
    }
}

double *doubles_of(PyObject *sequence, Py_ssize_t *n)
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

char *address_of(PyObject *array, enum type type, Py_ssize_t *size, int written)
{
    if (type == N_TYPES || !PyArray_Check(array) || type_of(PyArray_DESCR((PyArrayObject *)array)) != type ||
        !PyArray_IS_C_CONTIGUOUS((PyArrayObject *)array) ||
        (written && !PyArray_ISWRITEABLE((PyArrayObject *)array))) {
        PyErr_SetString(PyExc_TypeError, "expected C-contiguous arrays of the reduction's dtypes, writable ones as outs");
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

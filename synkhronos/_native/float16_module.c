/* Numbers of half the bytes: float32 as float16, or as bfloat16, which is its upper half; rounded to the nearest. */
#include "module.h"
#include "reductions_kernels.h"

/* Compiled for several instruction sets, of which the best one is taken when the module is loaded. */
#if defined(__x86_64__) && defined(__GLIBC__) && !defined(__clang__)
#define FOR_EACH_PROCESSOR __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define FOR_EACH_PROCESSOR
#endif

static inline uint16_t narrow_brain(float x)
{
    uint32_t bits = bits_of(x), rounded = bits + 0x7fff + ((bits >> 16) & 1);
    return (uint16_t)(select_bits((bits & 0x7fffffff) > 0x7f800000, bits | 0x400000, rounded) >> 16);
}

FOR_EACH_PROCESSOR
static void narrow_all(const float *restrict from, uint16_t *restrict to, npy_intp n, int is_brain)
{
    if (is_brain)
        for (npy_intp i = 0; i < n; i++)
            to[i] = narrow_brain(from[i]);
    else
        for (npy_intp i = 0; i < n; i++)
            to[i] = (uint16_t)float_to_half(from[i]);
}

FOR_EACH_PROCESSOR
static void widen_all(const uint16_t *restrict from, float *restrict to, npy_intp n, int is_brain)
{
    if (is_brain)
        for (npy_intp i = 0; i < n; i++)
            to[i] = float_of((uint32_t)from[i] << 16);
    else
        for (npy_intp i = 0; i < n; i++)
            to[i] = half_to_float(from[i]);
}

/* Read (from, to, is_brain), arrays of these types and of the same size; 0 with an exception set if they are not. */
static int read_arguments(PyObject *args, int type, int type_of_result, PyArrayObject **from, PyArrayObject **to,
                          int *is_brain)
{
    if (!PyArg_ParseTuple(args, "O!O!p", &PyArray_Type, from, &PyArray_Type, to, is_brain))
        return 0;
    if (PyArray_TYPE(*from) == type && PyArray_TYPE(*to) == type_of_result && PyArray_ISCARRAY_RO(*from)
        && PyArray_ISCARRAY(*to) && PyArray_SIZE(*from) == PyArray_SIZE(*to))
        return 1;
    PyErr_SetString(PyExc_TypeError, "expected C-contiguous arrays of float32 and uint16, of the same size");
    return 0;
}

static PyObject *narrow_array(PyObject *module, PyObject *args)
{
    PyArrayObject *from, *to;
    int is_brain;
    if (!read_arguments(args, NPY_FLOAT, NPY_USHORT, &from, &to, &is_brain))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    narrow_all(PyArray_DATA(from), PyArray_DATA(to), PyArray_SIZE(from), is_brain);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyObject *widen_array(PyObject *module, PyObject *args)
{
    PyArrayObject *from, *to;
    int is_brain;
    if (!read_arguments(args, NPY_USHORT, NPY_FLOAT, &from, &to, &is_brain))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    widen_all(PyArray_DATA(from), PyArray_DATA(to), PyArray_SIZE(from), is_brain);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyMethodDef functions[] = {
    {"narrow", narrow_array, METH_VARARGS, "narrow(values, out, is_brain): see native.pyi."},
    {"widen", widen_array, METH_VARARGS, "widen(halves, out, is_brain): see native.pyi."},
    {NULL, NULL, 0, NULL},
};

int synkhronos_add_halves(PyObject *module)
{
    return PyModule_AddFunctions(module, functions);
}

/* Conversion of float32 arrays from and to float16, or bfloat16, which is the upper half of a float32. Rounds to
 * nearest, ties to even. See native.pyi. */
#include "module.h"
#include "reductions_kernels.h"

/* Compiled for several instruction sets; the dynamic linker picks the best one. */
#if defined(__x86_64__) && defined(__GLIBC__) && !defined(__clang__)
#define MULTIVERSION __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define MULTIVERSION
#endif

static inline uint16_t float_to_bfloat16(float x)
{
    uint32_t bits = bits_of(x), rounded = bits + 0x7fff + ((bits >> 16) & 1);
    return (uint16_t)(select_bits((bits & 0x7fffffff) > 0x7f800000, bits | 0x400000, rounded) >> 16);
}

MULTIVERSION
static void narrow_all(const float *restrict from, uint16_t *restrict to, npy_intp n, int is_bfloat16)
{
    if (is_bfloat16)
        for (npy_intp i = 0; i < n; i++)
            to[i] = float_to_bfloat16(from[i]);
    else
        for (npy_intp i = 0; i < n; i++)
            to[i] = (uint16_t)float_to_half(from[i]);
}

MULTIVERSION
static void widen_all(const uint16_t *restrict from, float *restrict to, npy_intp n, int is_bfloat16)
{
    if (is_bfloat16)
        for (npy_intp i = 0; i < n; i++)
            to[i] = float_of((uint32_t)from[i] << 16);
    else
        for (npy_intp i = 0; i < n; i++)
            to[i] = half_to_float(from[i]);
}

/* Parse (from, to, is_bfloat16): arrays of these types and of equal size; 0 with an exception set. */
static int read_arguments(PyObject *args, int type, int type_of_result, PyArrayObject **from, PyArrayObject **to,
                          int *is_bfloat16)
{
    if (!PyArg_ParseTuple(args, "O!O!p", &PyArray_Type, from, &PyArray_Type, to, is_bfloat16))
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
    int is_bfloat16;
    if (!read_arguments(args, NPY_FLOAT, NPY_USHORT, &from, &to, &is_bfloat16))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    narrow_all(PyArray_DATA(from), PyArray_DATA(to), PyArray_SIZE(from), is_bfloat16);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyObject *widen_array(PyObject *module, PyObject *args)
{
    PyArrayObject *from, *to;
    int is_bfloat16;
    if (!read_arguments(args, NPY_USHORT, NPY_FLOAT, &from, &to, &is_bfloat16))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    widen_all(PyArray_DATA(from), PyArray_DATA(to), PyArray_SIZE(from), is_bfloat16);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyMethodDef functions[] = {
    {"narrow", narrow_array, METH_VARARGS, "narrow(values, out, is_bfloat16): see native.pyi."},
    {"widen", widen_array, METH_VARARGS, "widen(values, out, is_bfloat16): see native.pyi."},
    {NULL, NULL, 0, NULL},
};

int synkhronos_add_float16(PyObject *module)
{
    return PyModule_AddFunctions(module, functions);
}

/* The module `synkhronos._native.native`, and functions on plain memory: conversion of float32 to and from 16 bits, and
 * hashes. See native.pyi. Each *_module.c file adds its own functions and types. */
#define SYNKHRONOS_MODULE_MAIN
#include "module.h"
#include "reductions_kernels.h"

#include <string.h>

/* -- Conversion of float32 arrays to and from 16 bits */

static PyObject *convert(PyObject *args, int narrows)
{
    PyArrayObject *from, *to;
    int is_bfloat16, type = narrows ? NPY_FLOAT : NPY_USHORT, type_of_result = narrows ? NPY_USHORT : NPY_FLOAT;
    if (!PyArg_ParseTuple(args, "O!O!p", &PyArray_Type, &from, &PyArray_Type, &to, &is_bfloat16))
        return NULL;
    npy_intp n = PyArray_SIZE(from);
    if (PyArray_TYPE(from) != type || PyArray_TYPE(to) != type_of_result || !PyArray_ISCARRAY_RO(from)
        || !PyArray_ISCARRAY(to) || PyArray_SIZE(to) != n) {
        PyErr_SetString(PyExc_TypeError, "expected C-contiguous arrays of float32 and uint16, of the same size");
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    if (narrows)
        narrow_floats(PyArray_DATA(from), PyArray_DATA(to), (size_t)n, is_bfloat16);
    else
        widen_floats(PyArray_DATA(from), PyArray_DATA(to), (size_t)n, is_bfloat16);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyObject *narrow_array(PyObject *module, PyObject *args)
{
    return convert(args, 1);
}

static PyObject *widen_array(PyObject *module, PyObject *args)
{
    return convert(args, 0);
}

/* -- Hashes of blocks of memory, which detect changed blocks.
 *
 * The hash is NH with a Toeplitz extension, as in UMAC: J. Black, S. Halevi, H. Krawczyk, T. Krovetz, P. Rogaway,
 * "UMAC: Fast and Secure Message Authentication", CRYPTO 1999; here with 64-bit words and two passes. For a random
 * key, any two different blocks of the same length have equal hashes with a probability of at most 2^-128. */

enum { PASSES = 2 };
enum { PAIR = 16, HASH_BYTES = PASSES * 16, CACHE_LINE = 64, PREFETCH = 2048 }; /* in bytes */

static inline uint64_t load_word(const unsigned char *at)
{
    uint64_t value;
    memcpy(&value, at, sizeof value);
    return value;
}

/* Add a pair of words to the sums of both passes. The second pass uses the key shifted by two words. */
static inline void add(u128 *sums, const unsigned char *words, const unsigned char *key)
{
    uint64_t a = load_word(words), b = load_word(words + 8);
    sums[0] += (u128)(a + load_word(key)) * (b + load_word(key + 8));
    sums[1] += (u128)(a + load_word(key + 16)) * (b + load_word(key + 24));
}

static void hash_block(const unsigned char *block, size_t length, const unsigned char *key, unsigned char *out)
{
    u128 sums[PASSES] = {0, 0};
    size_t i = 0;
    for (; i + CACHE_LINE <= length; i += CACHE_LINE) {
        __builtin_prefetch(block + i + PREFETCH);
        for (int k = 0; k < CACHE_LINE; k += PAIR)
            add(sums, block + i + k, key + i + k);
    }
    for (; i + PAIR <= length; i += PAIR)
        add(sums, block + i, key + i);
    if (i < length) { /* zero padding is safe: only blocks of equal length are compared */
        unsigned char last[PAIR] = {0};
        memcpy(last, block + i, length - i);
        add(sums, last, key + i);
    }
    memcpy(out, sums, HASH_BYTES);
}

static PyObject *hash_blocks(PyObject *Py_UNUSED(module), PyObject *args)
{
    Py_buffer content, numbers, key, out;
    if (!PyArg_ParseTuple(args, "y*y*y*w*:hash_blocks", &content, &numbers, &key, &out))
        return NULL;
    Py_ssize_t block_size = key.len - PAIR, n = numbers.len / (Py_ssize_t)sizeof(int64_t), i = 0;
    const unsigned char *from = content.buf;
    const int64_t *number = numbers.buf;
    int fits = block_size > 0 && block_size % PAIR == 0 && out.len == n * HASH_BYTES;
    if (fits) {
        Py_ssize_t n_blocks = content.len / block_size + (content.len % block_size != 0);
        Py_BEGIN_ALLOW_THREADS
        for (; i < n && number[i] >= 0 && number[i] < n_blocks; i++) {
            Py_ssize_t start = number[i] * block_size, left = content.len - start;
            hash_block(from + start, left < block_size ? left : block_size, key.buf,
                       (unsigned char *)out.buf + i * HASH_BYTES);
        }
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&content);
    PyBuffer_Release(&numbers);
    PyBuffer_Release(&key);
    PyBuffer_Release(&out);
    if (!fits || i < n) {
        PyErr_SetString(PyExc_ValueError, fits ? "a block number is out of range"
                                              : "the sizes of key and out do not fit");
        return NULL;
    }
    Py_RETURN_NONE;
}

static PyMethodDef functions[] = {
    {"narrow", narrow_array, METH_VARARGS, "narrow(values, out, is_bfloat16): see native.pyi."},
    {"widen", widen_array, METH_VARARGS, "widen(values, out, is_bfloat16): see native.pyi."},
    {"hash_blocks", hash_blocks, METH_VARARGS, "Hash blocks of memory; see native.pyi."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "synkhronos._native.native",
    .m_doc = "The compiled core of synkhronos.",
    .m_size = -1,
    .m_methods = functions,
};

PyMODINIT_FUNC PyInit_native(void)
{
    static PyMethodDef *const others[] = {synkhronos_call_functions, synkhronos_heap_functions, synkhronos_process_functions,
                                          synkhronos_reduction_functions, synkhronos_thread_functions};
    static PyTypeObject *const types[] = {&CollectivesType, &DescriptorType, &ExchangeType, &FastCallType,
                                          &HeapType, &PieceType, &ReductionType, &SentValueType, &SyncType};
    import_array();
    PyObject *module = PyModule_Create(&definition);
    int failed = module == NULL || PyModule_AddIntMacro(module, SENT) || PyModule_AddIntMacro(module, ANSWERED)
                 || PyModule_AddIntMacro(module, ARRIVED) || PyModule_AddIntMacro(module, POLL_NS)
                 || PyModule_AddIntMacro(module, STAGING_BYTES)
                 || PyModule_AddIntConstant(module, "SMALLEST_BLOCK", HEAP_SMALLEST_BLOCK);
    for (size_t i = 0; !failed && i < sizeof others / sizeof others[0]; i++)
        failed = PyModule_AddFunctions(module, others[i]);
    PyObject *threads = failed ? NULL : PyCapsule_New((void *)&synkhronos_threads, SYNKHRONOS_THREADS_NAME, NULL);
    if (threads == NULL || PyModule_AddObject(module, "threads", threads) < 0) {
        failed = 1;
        Py_XDECREF(threads);
    }
    for (size_t i = 0; !failed && i < sizeof types / sizeof types[0]; i++)
        failed = PyModule_AddType(module, types[i]);
    if (failed)
        Py_CLEAR(module);
    return module;
}

/* Digests of blocks of memory, by which is seen whether they have changed.

NH with a Toeplitz extension, of UMAC: J. Black, S. Halevi, H. Krawczyk, T. Krovetz, P. Rogaway, "UMAC: Fast and Secure
Message Authentication", CRYPTO 1999; here with words of 64 bits and two passes. For a random key,
two different blocks of the same length have the same digest with a probability of at most 2^-128, whatever they hold. */
#include "module.h"

#include <string.h>

enum { PASSES = 2, PAIR = 16, DIGEST = PASSES * 16, LINE = 64, AHEAD = 2048 }; /* but for the first, bytes */

__extension__ typedef unsigned __int128 wide;

static inline uint64_t word(const unsigned char *at)
{
    uint64_t value;
    memcpy(&value, at, sizeof value);
    return value;
}

/* Add what some words of a block give to both passes; the second one has the key two words further on. */
static inline void add(wide *sums, const unsigned char *words, const unsigned char *key)
{
    uint64_t a = word(words), b = word(words + 8);
    sums[0] += (wide)(a + word(key)) * (b + word(key + 8));
    sums[1] += (wide)(a + word(key + 16)) * (b + word(key + 24));
}

static void digest(const unsigned char *block, size_t length, const unsigned char *key, unsigned char *out)
{
    wide sums[PASSES] = {0, 0};
    size_t i = 0;
    for (; i + LINE <= length; i += LINE) {
        __builtin_prefetch(block + i + AHEAD);
        for (int k = 0; k < LINE; k += PAIR)
            add(sums, block + i + k, key + i + k);
    }
    for (; i + PAIR <= length; i += PAIR)
        add(sums, block + i, key + i);
    if (i < length) { /* blocks are compared with others of their own length: zeros may stand for what is missing */
        unsigned char last[PAIR] = {0};
        memcpy(last, block + i, length - i);
        add(sums, last, key + i);
    }
    memcpy(out, sums, DIGEST);
}

static PyObject *digest_blocks(PyObject *Py_UNUSED(module), PyObject *args)
{
    Py_buffer content, numbers, key, out;
    if (!PyArg_ParseTuple(args, "y*y*y*w*:digest_blocks", &content, &numbers, &key, &out))
        return NULL;
    Py_ssize_t size = key.len - PAIR, n = numbers.len / (Py_ssize_t)sizeof(int64_t), i = 0;
    const unsigned char *from = content.buf;
    const int64_t *number = numbers.buf;
    int fits = size > 0 && size % PAIR == 0 && out.len == n * DIGEST;
    if (fits) {
        Py_ssize_t n_blocks = content.len / size + (content.len % size != 0);
        Py_BEGIN_ALLOW_THREADS
        for (; i < n && number[i] >= 0 && number[i] < n_blocks; i++) {
            Py_ssize_t start = number[i] * size, left = content.len - start;
            digest(from + start, left < size ? left : size, key.buf, (unsigned char *)out.buf + i * DIGEST);
        }
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&content);
    PyBuffer_Release(&numbers);
    PyBuffer_Release(&key);
    PyBuffer_Release(&out);
    if (!fits || i < n) {
        PyErr_SetString(PyExc_ValueError, fits ? "there is no such block" : "lengths of key and out do not fit");
        return NULL;
    }
    Py_RETURN_NONE;
}

static PyMethodDef functions[] = {
    {"digest_blocks", digest_blocks, METH_VARARGS, "Digests of blocks of memory; see native.pyi."},
    {NULL, NULL, 0, NULL},
};

int synkhronos_add_digests(PyObject *module)
{
    return PyModule_AddFunctions(module, functions);
}

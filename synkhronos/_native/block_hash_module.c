/* Hashes of blocks of memory, which detect blocks that have changed.
 *
 * The hash is NH with a Toeplitz extension, as in UMAC: J. Black, S. Halevi, H. Krawczyk, T. Krovetz, P. Rogaway,
 * "UMAC: Fast and Secure Message Authentication", CRYPTO 1999; here with 64-bit words and two passes. For a random
 * key, two different blocks of the same length have equal hashes with a probability of at most 2^-128, whatever they
 * hold. */
#include "module.h"

#include <string.h>

enum { PASSES = 2 };
enum { PAIR = 16, HASH_BYTES = PASSES * 16, CACHE_LINE = 64, PREFETCH = 2048 }; /* in bytes */

__extension__ typedef unsigned __int128 uint128;

static inline uint64_t load_word(const unsigned char *at)
{
    uint64_t value;
    memcpy(&value, at, sizeof value);
    return value;
}

/* Add a pair of words to the sums of both passes. The second pass uses the key from two words further on. */
static inline void add(uint128 *sums, const unsigned char *words, const unsigned char *key)
{
    uint64_t a = load_word(words), b = load_word(words + 8);
    sums[0] += (uint128)(a + load_word(key)) * (b + load_word(key + 8));
    sums[1] += (uint128)(a + load_word(key + 16)) * (b + load_word(key + 24));
}

static void hash_block(const unsigned char *block, size_t length, const unsigned char *key, unsigned char *out)
{
    uint128 sums[PASSES] = {0, 0};
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
        PyErr_SetString(PyExc_ValueError, fits ? "there is no such block" : "the sizes of key and out do not fit");
        return NULL;
    }
    Py_RETURN_NONE;
}

static PyMethodDef functions[] = {
    {"hash_blocks", hash_blocks, METH_VARARGS, "Hash blocks of memory; see native.pyi."},
    {NULL, NULL, 0, NULL},
};

int synkhronos_add_block_hash(PyObject *module)
{
    return PyModule_AddFunctions(module, functions);
}

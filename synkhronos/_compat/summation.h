// Sums over the first axes of an array, over the last ones, or both: of [before][kept][behind] over `before` and `behind`.
#ifndef SYNKHRONOS_SUMMATION
#define SYNKHRONOS_SUMMATION

namespace synkhronos {

// Sixteen sums side by side: one would have to wait for each addition.
template <typename T, typename Sum>
static inline Sum sum_of_run(const T *__restrict__ x, npy_intp n) {
    Sum sums[16] = {}, rest = 0;
    npy_intp i = 0;
    for (; i + 16 <= n; i += 16)
        for (int j = 0; j < 16; j++) sums[j] += x[i + j];
    for (; i < n; i++) rest += x[i];
    for (int half = 8; half; half /= 2)
        for (int j = 0; j < half; j++) sums[j] += sums[j + half];
    return sums[0] + rest;
}

// Makes `out` of the kept axes, in the place of what is there if that can be had; false with an exception without memory.
template <typename T, typename Sum, typename Out>
static bool sum_around(PyArrayObject *x, int first, int n_kept, PyArrayObject **out, int type) {
    const npy_intp *sizes = PyArray_DIMS(x);
    npy_intp before = 1, kept = 1, behind = 1;
    for (int i = 0; i < PyArray_NDIM(x); i++) (i < first ? before : i < first + n_kept ? kept : behind) *= sizes[i];
    if (!*out || PyArray_NDIM(*out) != n_kept || PyArray_TYPE(*out) != type || !PyArray_ISCARRAY(*out) ||
        !PyArray_CompareLists(PyArray_DIMS(*out), sizes + first, n_kept)) {
        Py_XDECREF(*out);
        *out = (PyArrayObject *)PyArray_SimpleNew(n_kept, const_cast<npy_intp *>(sizes) + first, type);
        if (!*out) return false;
    }
    Sum *sums = (Sum *)calloc(kept, sizeof(Sum));
    if (!sums) {
        PyErr_NoMemory();
        return false;
    }
    const T *from = (const T *)PyArray_DATA(x);
    for (npy_intp i = 0; i < before; i++, from += kept * behind)
        if (behind == 1)
            for (npy_intp j = 0; j < kept; j++) sums[j] += from[j];
        else
            for (npy_intp j = 0; j < kept; j++) sums[j] += sum_of_run<T, Sum>(from + j * behind, behind);
    Out *to = (Out *)PyArray_DATA(*out);
    for (npy_intp j = 0; j < kept; j++) to[j] = (Out)sums[j];
    free(sums);
    return true;
}
}  // namespace synkhronos
#endif

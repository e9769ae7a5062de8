// Pooling over adjacent windows of D x H x W elements, on the last three axes of n images.
//
// An output is computed from the elements of its window one after the other, row by row, as in Theano. So it is bitwise
// the same. Neighboring outputs are computed together, in loops that compilers vectorize.
#ifndef SYNKHRONOS_POOLING
#define SYNKHRONOS_POOLING

namespace synkhronos {

struct Images {
    npy_intp n, in[3], out[3];
};

// Calls `row(in, out, first, last, rows)` for each row of each window: the offsets of the input row and of the output
// row, whether the row is the first and the last one of the window, and the number of rows of the window.
template <int D, int H, class Row>
static void for_each_row(const Images &images, Row row) {
    const npy_intp *in = images.in, *out = images.out;
    for (npy_intp i = 0; i < images.n; i++)
        for (npy_intp d = 0; d < out[0]; d++)
            for (npy_intp h = 0; h < out[1]; h++) {
                npy_intp first_d = d * D, end_d = std::min(first_d + D, in[0]);
                npy_intp first_h = h * H, end_h = std::min(first_h + H, in[1]);
                for (npy_intp e = first_d; e < end_d; e++)
                    for (npy_intp g = first_h; g < end_h; g++)
                        row(((i * in[0] + e) * in[1] + g) * in[2], ((i * out[0] + d) * out[1] + h) * out[2],
                            e == first_d && g == first_h, e == end_d - 1 && g == end_h - 1,
                            (end_d - first_d) * (end_h - first_h));
            }
}

// For each window in a row, executes BEFORE, EACH for each element, and AFTER. The border may cut the last window.
#define SYNKHRONOS_WINDOWS(BEFORE, EACH, AFTER)                      \
    npy_intp whole = std::min(images.out[2], images.in[2] / W);      \
    for (npy_intp j = 0; j < whole; j++) {                           \
        BEFORE                                                       \
        for (int k = 0; k < W; k++) { EACH(j * W + k) }              \
        AFTER                                                        \
    }                                                                \
    for (npy_intp j = whole; j < images.out[2]; j++) {               \
        BEFORE                                                       \
        for (npy_intp k = j * W; k < images.in[2]; k++) { EACH(k) }  \
        AFTER                                                        \
    }

template <typename T, int D, int H, int W>
struct Pooling {
    static void max(const Images &images, const T *__restrict__ x, T *__restrict__ z) {
        for_each_row<D, H>(images, [&](npy_intp in, npy_intp out, bool first, bool, npy_intp) {
            const T *__restrict__ a = x + in;
            T *__restrict__ c = z + out;
#define EACH(e) largest = a[e] > largest ? a[e] : largest;
            SYNKHRONOS_WINDOWS(T largest = first ? a[j * W] : c[j];, EACH, c[j] = largest;)
#undef EACH
        });
    }

    static void sum(const Images &images, const T *__restrict__ x, T *__restrict__ z) {
        for_each_row<D, H>(images, [&](npy_intp in, npy_intp out, bool first, bool, npy_intp) {
            const T *__restrict__ a = x + in;
            T *__restrict__ c = z + out;
#define EACH(e) sum += a[e];
            SYNKHRONOS_WINDOWS(T sum = first ? T(0) : c[j];, EACH, c[j] = sum;)
#undef EACH
        });
    }

    static void average(const Images &images, const T *__restrict__ x, T *__restrict__ z) {
        sum(images, x, z);
        for_each_row<D, H>(images, [&](npy_intp, npy_intp out, bool, bool last, npy_intp rows) {
            if (!last) return;
            T *__restrict__ c = z + out;
            npy_intp whole = std::min(images.out[2], images.in[2] / W), size = rows * W;
            for (npy_intp j = 0; j < whole; j++) c[j] = c[j] / size;
            for (npy_intp j = whole; j < images.out[2]; j++) c[j] = c[j] / (rows * (images.in[2] - j * W));
        });
    }

    // All elements that equal the maximum get the gradient, as in Theano.
    static void max_grad(const Images &images, const T *__restrict__ x, const T *__restrict__ z,
                         const T *__restrict__ gz, T *__restrict__ gx) {
        for_each_row<D, H>(images, [&](npy_intp in, npy_intp out, bool, bool, npy_intp) {
            const T *__restrict__ a = x + in, *__restrict__ c = z + out, *__restrict__ g = gz + out;
            T *__restrict__ to = gx + in;
#define EACH(e) to[e] = a[e] == largest ? grad : T(0);
            SYNKHRONOS_WINDOWS(T largest = c[j]; T grad = T(0) + g[j];, EACH, )
#undef EACH
        });
    }

    static void sum_grad(const Images &images, const T *__restrict__ gz, T *__restrict__ gx) {
        for_each_row<D, H>(images, [&](npy_intp in, npy_intp out, bool, bool, npy_intp) {
            const T *__restrict__ g = gz + out;
            T *__restrict__ to = gx + in;
#define EACH(e) to[e] = grad;
            SYNKHRONOS_WINDOWS(T grad = T(0) + g[j];, EACH, )
#undef EACH
        });
    }

    static void average_grad(const Images &images, const T *__restrict__ gz, T *__restrict__ gx) {
        for_each_row<D, H>(images, [&](npy_intp in, npy_intp out, bool, bool, npy_intp rows) {
            const T *__restrict__ g = gz + out;
            T *__restrict__ to = gx + in;
#define EACH(e) to[e] = grad;
            SYNKHRONOS_WINDOWS(T part = g[j] / (rows * std::min((npy_intp)W, images.in[2] - j * W));
                               T grad = T(0) + part;, EACH, )
#undef EACH
        });
    }

    static void max_grad_grad(const Images &images, const T *__restrict__ x, const T *__restrict__ z,
                              const T *__restrict__ ggx, T *__restrict__ ggz) {
        for_each_row<D, H>(images, [&](npy_intp in, npy_intp out, bool first, bool, npy_intp) {
            const T *__restrict__ a = x + in, *__restrict__ c = z + out, *__restrict__ from = ggx + in;
            T *__restrict__ to = ggz + out;
#define EACH(e) sum = a[e] == largest ? T(sum + from[e]) : sum;
            SYNKHRONOS_WINDOWS(T largest = c[j]; T sum = first ? T(0) : to[j];, EACH, to[j] = sum;)
#undef EACH
        });
    }
};

// Computes the sizes of inputs and outputs, with windows on the last `nd` axes; returns false if an axis is empty.
static bool measure(PyArrayObject *x, int nd, const int *window, bool ignore_border, Images &images) {
    int others = PyArray_NDIM(x) - nd;
    images.n = 1;
    for (int i = 0; i < others; i++) images.n *= PyArray_DIM(x, i);
    for (int i = 0; i < 3; i++) {
        images.in[i] = i < 3 - nd ? 1 : PyArray_DIM(x, others + i - (3 - nd));
        images.out[i] = (images.in[i] + (ignore_border ? 0 : window[i] - 1)) / window[i];
        if (!images.out[i]) return false;
    }
    return images.n > 0;
}

// Returns whether an array has the sizes of the pooled images.
static bool is_pooled(PyArrayObject *z, PyArrayObject *x, int nd, const Images &images) {
    int others = PyArray_NDIM(x) - nd;
    if (PyArray_NDIM(z) != PyArray_NDIM(x) || PyArray_TYPE(z) != PyArray_TYPE(x)) return false;
    for (int i = 0; i < others; i++)
        if (PyArray_DIM(z, i) != PyArray_DIM(x, i)) return false;
    for (int i = 0; i < nd; i++)
        if (PyArray_DIM(z, others + i) != images.out[3 - nd + i]) return false;
    return true;
}

// Allocates an array for a result, with the type and the other axes of `x`, or reuses the existing array if it fits.
static bool make(PyArrayObject **result, PyArrayObject *x, int nd, const npy_intp *sizes) {
    npy_intp shape[NPY_MAXDIMS];
    int ndim = PyArray_NDIM(x);
    for (int i = 0; i < ndim; i++) shape[i] = i < ndim - nd ? PyArray_DIM(x, i) : sizes[i - (ndim - nd) + 3 - nd];
    if (*result && PyArray_NDIM(*result) == ndim && PyArray_TYPE(*result) == PyArray_TYPE(x) &&
        PyArray_ISCARRAY(*result) && PyArray_CompareLists(PyArray_DIMS(*result), shape, ndim))
        return true;
    Py_XDECREF(*result);
    *result = (PyArrayObject *)PyArray_EMPTY(ndim, shape, PyArray_TYPE(x), 0);
    return *result != NULL;
}

// Owns C-contiguous versions of the operands.
template <int N>
struct Operands {
    PyArrayObject *arrays[N];
    bool good = true;
    explicit Operands(PyArrayObject *const (&given)[N]) {
        for (int i = 0; i < N; i++) {
            arrays[i] = PyArray_GETCONTIGUOUS(given[i]);
            good = good && arrays[i];
        }
    }
    ~Operands() {
        for (int i = 0; i < N; i++) Py_XDECREF(arrays[i]);
    }
    template <typename T>
    const T *data(int i) const {
        return (const T *)PyArray_DATA(arrays[i]);
    }
};

// Fills the gradient with zeros if there are rows or columns after the last window, which get no gradient.
static void clear_border(const Images &images, const int *window, PyArrayObject *gx) {
    for (int i = 0; i < 3; i++)
        if (images.out[i] * window[i] < images.in[i]) PyArray_FILLWBYTE(gx, 0);
}

}  // namespace synkhronos
#endif

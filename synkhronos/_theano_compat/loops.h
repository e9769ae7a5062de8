// Loops over arrays: contiguous runs, and sums.
#ifndef SYNKHRONOS_LOOPS
#define SYNKHRONOS_LOOPS

namespace synkhronos {

// -- arrays whose last axes are contiguous runs

// Returns whether the elements along the axes from `first` on are contiguous.
static inline bool side_by_side(PyArrayObject *x, int first) {
    npy_intp stride = PyArray_ITEMSIZE(x);
    for (int i = PyArray_NDIM(x) - 1; i >= first; i--) {
        if (PyArray_DIM(x, i) != 1 && PyArray_STRIDE(x, i) != stride) return false;
        stride *= PyArray_DIM(x, i);
    }
    return true;
}

// Owns an array, or a copy of it if its runs are not contiguous. If memory is short, `array` is 0 and an exception set.
struct SideBySide {
    PyArrayObject *array;
    SideBySide(PyArrayObject *x, int first) : array(x) {
        if (side_by_side(x, first))
            Py_INCREF(x);
        else
            array = (PyArrayObject *)PyArray_NewCopy(x, NPY_CORDER);
    }
    ~SideBySide() { Py_XDECREF(array); }

   private:
    SideBySide(const SideBySide &);
    void operator=(const SideBySide &);
};

// -- sums over the first axes of an array, its last axes, or both: of an array [before][kept][behind] over `before` and
// `behind`.

// Computes sixteen interleaved sums, because in a single sum each addition waits for the one before.
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

// Accumulator for the elements of an array, which are added in order, some at a time.
template <typename T, typename Sum>
class Sums {
   public:
    Sums(const npy_intp *sizes, int n_axes, int first, int n_kept)
        : kept(1), behind(1), place(0), done(0), shape(sizes + first), n_kept(n_kept) {
        npy_intp before = 1;
        for (int i = 0; i < n_axes; i++) (i < first ? before : i < first + n_kept ? kept : behind) *= sizes[i];
        if (kept == 1) behind *= before;
        sums = (Sum *)calloc(kept ? kept : 1, sizeof(Sum));
    }
    ~Sums() { free(sums); }

    void add(const T *__restrict__ x, npy_intp n) {
        for (npy_intp some; n > 0; n -= some, x += some)
            if (behind == 1) {
                some = n < kept - place ? n : kept - place;
                Sum *__restrict__ to = sums + place;
                for (npy_intp j = 0; j < some; j++) to[j] += x[j];
                if ((place += some) == kept) place = 0;
            } else {
                some = n < behind - done ? n : behind - done;
                sums[place] += sum_of_run<T, Sum>(x, some);
                if ((done += some) == behind) {
                    done = 0;
                    if (++place == kept) place = 0;
                }
            }
    }

    // Allocates an array for the sums in `out`, or reuses the existing one if it fits. Returns false, with an exception
    // set, if memory is short.
    bool make(PyArrayObject **out, int type) const {
        if (sums && *out && PyArray_NDIM(*out) == n_kept && PyArray_TYPE(*out) == type && PyArray_ISCARRAY(*out) &&
            PyArray_CompareLists(PyArray_DIMS(*out), shape, n_kept))
            return true;
        Py_XDECREF(*out);
        *out = sums ? (PyArrayObject *)PyArray_SimpleNew(n_kept, const_cast<npy_intp *>(shape), type) : 0;
        if (!sums) PyErr_NoMemory();
        return *out != 0;
    }

    template <typename Out>
    void put(Out *to) const {
        for (npy_intp j = 0; j < kept; j++) to[j] = (Out)sums[j];
    }

   private:
    npy_intp kept, behind, place, done;  // `done` elements have been added to the sum at `place`
    const npy_intp *shape;
    int n_kept;
    Sum *sums;
    Sums(const Sums &);
    void operator=(const Sums &);
};
}  // namespace synkhronos
#endif

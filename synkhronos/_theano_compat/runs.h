// Arrays whose last axes are contiguous runs.
#ifndef SYNKHRONOS_RUNS
#define SYNKHRONOS_RUNS

namespace synkhronos {

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
}  // namespace synkhronos
#endif

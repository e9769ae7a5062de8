/* Threads of a process, as C++ code of other modules uses them. See threads.c. */
#ifndef SYNKHRONOS_THREADS
#define SYNKHRONOS_THREADS

#include <stddef.h>

/* A matrix product by the conventions of Fortran: trans_a, trans_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc. */
typedef void synkhronos_gemm_function(const char *, const char *, const int *, const int *, const int *, const void *,
                                      const void *, const int *, const void *, const int *, const void *, void *,
                                      const int *);

/* An OpenBLAS library, with its product for one dtype. */
struct synkhronos_blas {
    synkhronos_gemm_function *gemm;
    int (*get_num_threads)(void);
    void (*set_num_threads)(int);
    size_t item_bytes;
};

/* The capsule `threads` of the module holds a pointer to this. */
/* The number changes with each change of this file's structs, because modules that Theano has cached keep the old ones. */
#define SYNKHRONOS_THREADS_NAME "synkhronos._native.native.threads 1"
struct synkhronos_threads {
    /* Return the number of threads that may compute now, this one included. */
    int (*count)(void);
    /* Run `run(0, context)` to `run(n_parts - 1, context)`, at the same time if the threads are free. */
    void (*divide)(int n_parts, void (*run)(int part, void *context), void *context);
    /* Compute a product, which the threads divide by rows or columns of the result if it is large. */
    void (*gemm)(const struct synkhronos_blas *, const char *, const char *, const int *, const int *, const int *,
                 const void *, const void *, const int *, const void *, const int *, const void *, void *, const int *);
};
extern const struct synkhronos_threads synkhronos_threads;

#ifdef __cplusplus
#include <Python.h>

namespace synkhronos {

// Returns the threads of `synkhronos._native`; 0 if it is not loaded, or was not found by a thread with Python's lock.
static inline const struct synkhronos_threads *threads() {
    static const struct synkhronos_threads *found = 0;
    if (!found && PyGILState_Check()) {
        PyObject *module = PyDict_GetItemString(PyImport_GetModuleDict(), "synkhronos._native.native");
        PyObject *capsule = module ? PyObject_GetAttrString(module, "threads") : 0;
        if (capsule) found = (const struct synkhronos_threads *)PyCapsule_GetPointer(capsule, SYNKHRONOS_THREADS_NAME);
        Py_XDECREF(capsule);
        if (!found) PyErr_Clear();
    }
    return found;
}

// Part of a loop.
template <class Loop>
struct Parts {
    Loop &loop;
    ptrdiff_t size, step;
    static void run(int part, void *context) {
        Parts &of = *static_cast<Parts *>(context);
        ptrdiff_t start = part * of.step;
        of.loop(start, of.size - start < of.step ? of.size : start + of.step);
    }
};

// Runs `loop(start, end)` for parts of the numbers from 0 to `size`, each of at least `least` numbers, a multiple of 64.
template <class Loop>
void divide(ptrdiff_t size, ptrdiff_t least, Loop loop) {
    const struct synkhronos_threads *found = size >= 2 * least ? threads() : 0;
    ptrdiff_t n_parts = found ? found->count() : 1;
    if (n_parts > size / least) n_parts = size / least;
    if (n_parts < 2) {
        loop(0, size);
        return;
    }
    ptrdiff_t step = ((size - 1) / n_parts / 64 + 1) * 64;
    Parts<Loop> parts = {loop, size, step};
    found->divide((int)((size - 1) / step + 1), Parts<Loop>::run, &parts);
}
}  // namespace synkhronos
#endif

#endif

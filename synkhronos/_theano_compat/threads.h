// Use of the threads that compute parts of the controller's work.
#ifndef SYNKHRONOS_COMPAT_THREADS
#define SYNKHRONOS_COMPAT_THREADS

#include <Python.h>

namespace synkhronos {

// Returns the threads of `synkhronos._native`; 0 if it is not loaded. The caller holds Python's lock.
static inline const struct synkhronos_threads *threads() {
    static const struct synkhronos_threads *found = 0;
    if (!found) {
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

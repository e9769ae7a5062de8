/* Declarations shared by the *_module.c files of `synkhronos._native.native`. */
#ifndef SYNKHRONOS_MODULE_H
#define SYNKHRONOS_MODULE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

/* NumPy's headers, with the same settings in every file. */
#define NPY_NO_DEPRECATED_API NPY_1_22_API_VERSION
#define NPY_TARGET_VERSION NPY_1_22_API_VERSION
#define PY_ARRAY_UNIQUE_SYMBOL synkhronos_native_array_api
#ifndef SYNKHRONOS_MODULE_MAIN
#define NO_IMPORT_ARRAY
#endif
#include <numpy/arrayobject.h>

#include "collectives.h"
#include "heap.h"
#include "reductions.h"
#include "sync.h"
#include "threads.h"

/* Functions of the module that *_module.c files define, which PyInit_native adds. */
extern PyMethodDef synkhronos_call_functions[], synkhronos_heap_functions[], synkhronos_process_functions[],
    synkhronos_reduction_functions[], synkhronos_thread_functions[];

/* Types of the module; native.pyi describes them. */
extern PyTypeObject CollectivesType, DescriptorType, ExchangeType, FastCallType, HeapType, PieceType, ReductionType,
    SentValueType, SyncType;

/* -- sync_module.c */

struct sync *sync_of(PyObject *object);

/* Implements `Sync.wait`; -1 with an exception set if `check` or a signal handler raises. */
int sync_wait(PyObject *object, enum counter counter, int64_t value, PyObject *check);

/* -- heap_module.c */

/* The heap of a `Heap` object; NULL if it has no memory. */
struct heap *heap_of(PyObject *object);

/* -- reductions_module.c */

/* The reduction of a `Reduction` object; NULL with an exception set if it is not for `n` arrays of these dtypes.
 * `returned` may be NULL, which matches any dtype. */
const reduction *reduction_for(PyObject *object, Py_ssize_t n, PyArray_Descr *dtype, PyArray_Descr *returned);

#endif

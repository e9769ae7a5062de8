/* NumPy arrays, as the reductions take them. */
#ifndef SYNKHRONOS_REDUCTIONS_ARRAYS_H
#define SYNKHRONOS_REDUCTIONS_ARRAYS_H

#include "module.h"
#include "reductions.h"

/* The type of the elements; N_TYPES where it is none that can be reduced. */
enum type type_of(PyArray_Descr *dtype);
/* A double for each item of a sequence, to be freed; NULL with an exception. */
double *doubles_of(PyObject *sequence, Py_ssize_t *n);
/* The address of an array of a type and size; NULL with an exception. A size of -1 becomes the array's. */
char *address_of(PyObject *array, enum type type, Py_ssize_t *size, int written);

extern PyTypeObject Reduction;

/* What an object of that type has, if it is for so many arrays of these dtypes; NULL with an exception. */
const reduction *plan_for(PyObject *object, Py_ssize_t n, PyArray_Descr *dtype, PyArray_Descr *returned);

#endif

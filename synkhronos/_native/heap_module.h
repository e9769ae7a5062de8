/* What the files that know both regions and Python share. */
#ifndef SYNKHRONOS_REGIONS_MODULE_H
#define SYNKHRONOS_REGIONS_MODULE_H

#include "module.h"
#include "heap.h"

/* A handler of memory for NumPy, which has the regions: they are destroyed when it ends. */
PyObject *regions_handler(struct regions *all);

extern PyTypeObject RegionsType;

/* The regions of an object of that type; NULL if there are none. */
struct regions *regions_of(PyObject *regions);

#endif

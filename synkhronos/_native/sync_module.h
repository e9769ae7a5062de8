/* What other parts of the module use of the type `Words`. */
#ifndef SYNKHRONOS_WORDS_MODULE_H
#define SYNKHRONOS_WORDS_MODULE_H

#include "module.h"
#include "sync.h"

extern PyTypeObject WordsType;

struct words *words_of(PyObject *words);

/* Wait as `Words.wait` does; -1 with an exception set if the check, or a handler of a signal, raises. */
int words_wait(PyObject *words, enum board board, int64_t value, PyObject *check);

#endif

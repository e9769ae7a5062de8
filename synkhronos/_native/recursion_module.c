/* How much of Python's recursion limit is left. */
#include "module.h"

static long frames_left(void)
{
    PyThreadState *state = PyThreadState_Get();
#if PY_VERSION_HEX >= 0x030C0000
    return state->py_recursion_remaining;
#elif PY_VERSION_HEX >= 0x030B0000
    return state->recursion_remaining;
#else
    return Py_GetRecursionLimit() - state->recursion_depth;
#endif
}

static PyObject *need_frames(PyObject *Py_UNUSED(self), PyObject *argument)
{
    long wanted = PyLong_AsLong(argument);
    if (wanted == -1 && PyErr_Occurred())
        return NULL;
    if (frames_left() >= wanted)
        Py_RETURN_NONE;
    return PyErr_Format(PyExc_RecursionError, "maximum recursion depth exceeded: synkhronos needs %ld frames here", wanted);
}

static PyMethodDef functions[] = {
    {"need_frames", need_frames, METH_O,
     "need_frames(n)\n--\n\nRaise RecursionError if this thread may not call functions that deep from here."},
    {NULL, NULL, 0, NULL},
};

int synkhronos_add_recursion(PyObject *module)
{
    return PyModule_AddFunctions(module, functions);
}

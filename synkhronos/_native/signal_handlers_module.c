/* Python's handlers of signals, set all or put back all: no handler that raises meanwhile keeps one from its place. */
#include "module.h"

#include <signal.h>
#include <unistd.h>

enum { MOST_TRIES = 1000 }; /* of one signal; each time that a handler raises takes one */

/* Take the exception that is raised, as an object with its traceback. */
static PyObject *caught(void)
{
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    PyErr_NormalizeException(&type, &value, &trace);
    if (value != NULL && trace != NULL)
        PyException_SetTraceback(value, trace);
    Py_XDECREF(type);
    Py_XDECREF(trace);
    return value;
}

/* Set one handler, below one of C code that was put over Python's, as faulthandler's are; what is raised is appended. */
static int set_one(PyObject *set, PyObject *number, PyObject *handler, PyObject *raised)
{
    long which = PyLong_AsLong(number);
    struct sigaction action;
    if ((which == -1 && PyErr_Occurred()) || sigaction((int)which, NULL, &action))
        return PyErr_Occurred() ? -1 : (PyErr_SetFromErrno(PyExc_OSError), -1);
    for (int tries = 0; tries < MOST_TRIES; tries++) {
        PyObject *before = PyObject_CallFunctionObjArgs(set, number, handler, NULL); /* handles what is pending first */
        if (before != NULL) {
            Py_DECREF(before);
            break;
        }
        PyObject *error = caught();
        int failed = error == NULL || PyList_Append(raised, error);
        Py_XDECREF(error);
        if (failed)
            return -1;
    }
    sigaction((int)which, &action, NULL);
    return 0;
}

static PyObject *set_handlers(PyObject *Py_UNUSED(self), PyObject *args)
{
    PyObject *set, *handlers, *number, *handler, *raised;
    if (!PyArg_ParseTuple(args, "OO!:set_handlers", &set, &PyDict_Type, &handlers))
        return NULL;
    handlers = PyDict_Copy(handlers); /* handlers may set others */
    raised = PyList_New(0);
    Py_ssize_t position = 0;
    while (handlers != NULL && raised != NULL && PyDict_Next(handlers, &position, &number, &handler)) {
        if (set_one(set, number, handler, raised))
            Py_CLEAR(raised);
    }
    Py_XDECREF(handlers);
    return raised;
}

static void leave(int Py_UNUSED(number))
{
    _exit(0);
}

static PyObject *exit_on(PyObject *Py_UNUSED(self), PyObject *number)
{
    long which = PyLong_AsLong(number);
    struct sigaction action = {.sa_handler = leave};
    if ((which == -1 && PyErr_Occurred()) || sigaction((int)which, &action, NULL))
        return PyErr_Occurred() ? NULL : PyErr_SetFromErrno(PyExc_OSError);
    Py_RETURN_NONE;
}

static PyMethodDef functions[] = {
    {"exit_on", exit_on, METH_O, "exit_on(number)\n--\n\nHave a signal end this process with code 0, in C code, too."},
    {"set_handlers", set_handlers, METH_VARARGS,
     "set_handlers(set, handlers)\n--\n\nSet the handlers of signals by ``set(number, handler)``; list what is raised meanwhile."},
    {NULL, NULL, 0, NULL},
};

int synkhronos_add_handlers(PyObject *module)
{
    return PyModule_AddFunctions(module, functions);
}

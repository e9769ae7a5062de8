/* Functions on the state of this process: end with another process, set signal handlers, check the stack frames left,
 * own file descriptors. See native.pyi. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "module.h"
#include "posix.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <time.h>

/* -- End with another process: a thread that runs no Python code waits for the end of that process. The other process
 * needs no open descriptor for this, so closing descriptors there cannot end this process. */

#ifndef SYS_pidfd_open
#define SYS_pidfd_open 434 /* Linux 5.3 */
#endif

static const struct timespec PERIOD = {0, 100000000}; /* between two checks without a pidfd */

struct watched {
    pid_t pid;
    int is_parent;
    int pidfd; /* -1: the kernel or a sandbox refuses it */
};

static int has_ended(const struct watched *one)
{
    return one->is_parent ? getppid() != one->pid : kill(one->pid, 0) != 0 && errno == ESRCH;
}

static void *watch(void *argument)
{
    struct watched one = *(struct watched *)argument;
    PyMem_RawFree(argument);
    prctl(PR_SET_NAME, "synk-lifeline");
    if (one.pidfd >= 0) {
        struct pollfd ended = {one.pidfd, POLLIN, 0};
        while (poll(&ended, 1, -1) < 0 && errno == EINTR)
            ;
        /* The program may have replaced the descriptor by another file: if this process was stopped, the kernel looks
         * up the descriptor again. So for a parent, confirm by getppid. For another process, only the pidfd is
         * reliable, because the process may remain as a zombie. */
        if (ended.revents == POLLIN && !one.is_parent)
            kill(getpid(), SIGKILL);
    }
    while (!has_ended(&one))
        nanosleep(&PERIOD, NULL);
    kill(getpid(), SIGKILL);
    return NULL;
}

static int open_pid(pid_t pid)
{
    int fd = (int)syscall(SYS_pidfd_open, pid, 0);
    if (fd < 0 || fd > STDERR_FILENO)
        return fd;
    int moved = fcntl(fd, F_DUPFD_CLOEXEC, STDERR_FILENO + 1); /* lower numbers belong to the standard streams */
    close(fd);
    return moved;
}

static PyObject *die_with(PyObject *Py_UNUSED(self), PyObject *args)
{
    int pid, by_main_thread;
    if (!PyArg_ParseTuple(args, "ip:die_with", &pid, &by_main_thread))
        return NULL;
    if (by_main_thread)
        prctl(PR_SET_PDEATHSIG, SIGKILL);
    struct watched *one = PyMem_RawMalloc(sizeof *one);
    if (one == NULL)
        return PyErr_NoMemory();
    *one = (struct watched){pid, getppid() == pid, open_pid(pid)};
    if (!start_thread(watch, one)) {
        if (one->pidfd >= 0)
            close(one->pidfd);
        PyMem_RawFree(one);
        Py_RETURN_FALSE;
    }
    Py_RETURN_TRUE;
}

/* -- Signal handlers */

enum { MAX_TRIES = 1000 }; /* per signal; each exception that a handler raises costs one */

/* Clear the current exception, and return it as an object with its traceback. */
static PyObject *fetch_exception(void)
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

/* Set one Python handler. Keep the C-level handler, which may have replaced Python's own, as faulthandler's do. Append
 * exceptions that pending handlers raise to `raised`. */
static int set_one(PyObject *set, PyObject *number, PyObject *handler, PyObject *raised)
{
    long which = PyLong_AsLong(number);
    struct sigaction action;
    if ((which == -1 && PyErr_Occurred()) || sigaction((int)which, NULL, &action))
        return PyErr_Occurred() ? -1 : (PyErr_SetFromErrno(PyExc_OSError), -1);
    for (int tries = 0; tries < MAX_TRIES; tries++) {
        PyObject *before = PyObject_CallFunctionObjArgs(set, number, handler, NULL); /* runs pending handlers first */
        if (before != NULL) {
            Py_DECREF(before);
            break;
        }
        PyObject *error = fetch_exception();
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
    handlers = PyDict_Copy(handlers); /* a handler may change the dict */
    raised = PyList_New(0);
    Py_ssize_t position = 0;
    while (handlers != NULL && raised != NULL && PyDict_Next(handlers, &position, &number, &handler)) {
        if (set_one(set, number, handler, raised))
            Py_CLEAR(raised);
    }
    Py_XDECREF(handlers);
    return raised;
}

/* Return the handlers that are callable, by number; in place of `note`, those in `known`. */
static PyObject *get_handlers(PyObject *Py_UNUSED(self), PyObject *args)
{
    PyObject *get, *numbers, *note, *known;
    if (!PyArg_ParseTuple(args, "OO!OO!:get_handlers", &get, &PyTuple_Type, &numbers, &note, &PyDict_Type, &known))
        return NULL;
    PyObject *found = PyDict_New();
    for (Py_ssize_t i = 0; found != NULL && i < PyTuple_GET_SIZE(numbers); i++) {
        PyObject *number = PyTuple_GET_ITEM(numbers, i);
        PyObject *handler = PyObject_CallFunctionObjArgs(get, number, NULL);
        if (handler == note) {
            Py_SETREF(handler, PyDict_GetItemWithError(known, number));
            Py_XINCREF(handler);
        }
        if (handler == NULL ? PyErr_Occurred() != NULL
                            : PyCallable_Check(handler) && PyDict_SetItem(found, number, handler))
            Py_CLEAR(found);
        Py_XDECREF(handler);
    }
    return found;
}

static void exit_at_once(int Py_UNUSED(number))
{
    _exit(0);
}

static PyObject *exit_on_signal(PyObject *Py_UNUSED(self), PyObject *number)
{
    long which = PyLong_AsLong(number);
    struct sigaction action = {.sa_handler = exit_at_once};
    if ((which == -1 && PyErr_Occurred()) || sigaction((int)which, &action, NULL))
        return PyErr_Occurred() ? NULL : PyErr_SetFromErrno(PyExc_OSError);
    Py_RETURN_NONE;
}

/* -- Number of stack frames left within Python's recursion limit */

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

static PyObject *require_frames(PyObject *Py_UNUSED(self), PyObject *argument)
{
    long needed = PyLong_AsLong(argument);
    if (needed == -1 && PyErr_Occurred())
        return NULL;
    if (frames_left() >= needed)
        Py_RETURN_NONE;
    return PyErr_Format(PyExc_RecursionError, "maximum recursion depth exceeded: synkhronos needs %ld frames here",
                        needed);
}

/* -- The type `Descriptor` */

typedef struct {
    PyObject_HEAD
    struct descriptor own;
} Descriptor;

static PyObject *descriptor_new(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
    static char *names[] = {"fd", NULL};
    int fd;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "i", names, &fd))
        return NULL;
    Descriptor *self = (Descriptor *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    self->own.fd = -1;
    if (descriptor_own(&self->own, fd))
        return (PyObject *)self;
    PyErr_SetFromErrno(PyExc_OSError);
    Py_DECREF(self);
    return NULL;
}

static void descriptor_dealloc(Descriptor *self)
{
    descriptor_close(&self->own);
    Py_TYPE(self)->tp_free(self);
}

static PyObject *descriptor_find(Descriptor *self, PyObject *nothing)
{
    if (self->own.fd < 0) {
        PyErr_SetString(PyExc_ValueError, "the descriptor was closed by its owner");
        return NULL;
    }
    return PyLong_FromLong(descriptor_number(&self->own));
}

static PyObject *descriptor_close_(Descriptor *self, PyObject *nothing)
{
    descriptor_close(&self->own);
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"find", (PyCFunction)descriptor_find, METH_NOARGS,
     "find(): the descriptor, or -1 if its number belongs to another file, or none."},
    {"close", (PyCFunction)descriptor_close_, METH_NOARGS,
     "close(): close the descriptor, unless its number belongs to another file."},
    {NULL, NULL, 0, NULL},
};

PyTypeObject DescriptorType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "synkhronos._native.native.Descriptor",
    .tp_doc = "A file descriptor with the identity of its file.",
    .tp_basicsize = sizeof(Descriptor),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE,
    .tp_new = descriptor_new,
    .tp_methods = methods,
    .tp_dealloc = (destructor)descriptor_dealloc,
};

PyMethodDef synkhronos_process_functions[] = {
    {"die_with", die_with, METH_VARARGS,
     "die_with(pid, by_main_thread)\n--\n\nHave this process killed when another one ends; return whether it works."},
    {"exit_on_signal", exit_on_signal, METH_O,
     "exit_on_signal(number)\n--\n\nHave a signal end this process with exit code 0, even in C code."},
    {"set_handlers", set_handlers, METH_VARARGS,
     "set_handlers(set, handlers)\n--\n\nSet all handlers by ``set(number, handler)``; return the exceptions raised."},
    {"get_handlers", get_handlers, METH_VARARGS,
     "get_handlers(get, numbers, note, known)\n--\n\n"
     "Return the callable handlers that ``get(number)`` returns, by number; in place of `note`, those in `known`."},
    {"require_frames", require_frames, METH_O,
     "require_frames(n)\n--\n\nRaise RecursionError if fewer than n frames are left within the recursion limit."},
    {NULL, NULL, 0, NULL},
};

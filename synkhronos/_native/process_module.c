/* A process that ends with another one: a thread waits for that, and needs neither Python nor a look at anything.

The other process keeps no descriptor for it, so that nothing that it closes ends this one. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "module.h"
#include "threads.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#ifndef SYS_pidfd_open
#define SYS_pidfd_open 434 /* Linux 5.3 */
#endif

static const struct timespec PERIOD = {0, 100000000}; /* of looking, where the kernel does not tell */

struct watched {
    pid_t pid;
    int is_parent;
    int pidfd; /* -1: the kernel, or a sandbox, does not offer it */
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
        /* code that runs here may have put another file in the place of the descriptor, which a stopped process looks up
        again when it goes on; of a process that is no parent and was not waited for, only the descriptor tells */
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
    int other = fcntl(fd, F_DUPFD_CLOEXEC, STDERR_FILENO + 1); /* those of standard streams are written to */
    close(fd);
    return other;
}

static PyObject *end_with(PyObject *Py_UNUSED(self), PyObject *args)
{
    int pid, by_main_thread;
    if (!PyArg_ParseTuple(args, "ip:end_with", &pid, &by_main_thread))
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

static PyMethodDef functions[] = {
    {"end_with", end_with, METH_VARARGS,
     "end_with(pid, by_main_thread)\n--\n\nBe killed when another process ends; returns whether that can be had."},
    {NULL, NULL, 0, NULL},
};

int synkhronos_add_lifeline(PyObject *module)
{
    return PyModule_AddFunctions(module, functions);
}

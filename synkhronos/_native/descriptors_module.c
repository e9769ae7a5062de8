/* The type `Descriptor`: a file descriptor that the library owns; see descriptors.h and native.pyi. */
#include "module.h"

#include "descriptors.h"

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

static PyObject *descriptor_do_close(Descriptor *self, PyObject *nothing)
{
    descriptor_close(&self->own);
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"find", (PyCFunction)descriptor_find, METH_NOARGS,
     "find(): the descriptor, or -1 if another file, or none, has its number."},
    {"close", (PyCFunction)descriptor_do_close, METH_NOARGS, "close(): close it, unless another file has its number."},
    {NULL, NULL, 0, NULL},
};

static PyTypeObject DescriptorType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "synkhronos._native.native.Descriptor",
    .tp_doc = "A file descriptor with the identity of its file.",
    .tp_basicsize = sizeof(Descriptor),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE,
    .tp_new = descriptor_new,
    .tp_methods = methods,
    .tp_dealloc = (destructor)descriptor_dealloc,
};

int synkhronos_add_descriptors(PyObject *module)
{
    return PyModule_AddType(module, &DescriptorType);
}

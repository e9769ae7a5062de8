/* The type `Runner`: calls a compiled function that has its arguments in cells; see native.pyi. */
#include "module.h"

/* What an argument must be like to be taken as it is. */
struct argument {
    PyObject *cell;
    PyArray_Descr *dtype;
    int ndim;
    uint64_t fixed; /* axes of length 1, as bits */
};

typedef struct {
    PyObject_HEAD
    PyObject *function, *emptied;
    Py_ssize_t n_inputs, n_outputs;
    struct argument *inputs;
} Runner;

static void runner_dealloc(Runner *self)
{
    for (Py_ssize_t i = 0; i < self->n_inputs; i++) {
        Py_XDECREF(self->inputs[i].cell);
        Py_XDECREF(self->inputs[i].dtype);
    }
    PyMem_Free(self->inputs);
    Py_XDECREF(self->function);
    Py_XDECREF(self->emptied);
    Py_TYPE(self)->tp_free(self);
}

/* Whether all items of a tuple are lists of one item and more. */
static int are_cells(PyObject *cells)
{
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(cells); i++)
        if (!PyList_Check(PyTuple_GET_ITEM(cells, i)) || PyList_GET_SIZE(PyTuple_GET_ITEM(cells, i)) < 1)
            return 0;
    return 1;
}

/* Read (cell, dtype, whether each axis has length 1); -1 with an exception set. */
static int read_input(struct argument *input, PyObject *item)
{
    PyObject *axes;
    if (!PyArg_ParseTuple(item, "O!O&O!", &PyList_Type, &input->cell, PyArray_DescrConverter, &input->dtype,
                          &PyTuple_Type, &axes))
        return -1;
    Py_INCREF(input->cell);
    input->ndim = (int)PyTuple_GET_SIZE(axes);
    for (int axis = 0; axis < input->ndim; axis++)
        input->fixed |= (uint64_t)(PyTuple_GET_ITEM(axes, axis) == Py_True) << axis;
    return 0;
}

static PyObject *runner_new(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
    static char *names[] = {"function", "inputs", "n_outputs", "emptied", NULL};
    PyObject *function, *inputs, *emptied;
    Py_ssize_t n_outputs;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "OO!nO!", names, &function, &PyTuple_Type, &inputs, &n_outputs,
                                     &PyTuple_Type, &emptied))
        return NULL;
    if (!are_cells(emptied)) {
        PyErr_SetString(PyExc_TypeError, "expected a tuple of lists");
        return NULL;
    }
    Runner *self = (Runner *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    Py_INCREF(function);
    Py_INCREF(emptied);
    self->function = function;
    self->emptied = emptied;
    self->n_outputs = n_outputs;
    self->inputs = PyMem_Calloc((size_t)PyTuple_GET_SIZE(inputs) + 1, sizeof *self->inputs);
    int failed = self->inputs == NULL;
    for (Py_ssize_t i = 0; !failed && i < PyTuple_GET_SIZE(inputs); i++) {
        self->n_inputs++;
        failed = read_input(&self->inputs[i], PyTuple_GET_ITEM(inputs, i));
    }
    if (!failed)
        return (PyObject *)self;
    if (!PyErr_Occurred())
        PyErr_NoMemory();
    Py_DECREF(self);
    return NULL;
}

/* Whether a value may be put into a cell as it is. */
static int fits(const struct argument *input, PyObject *value)
{
    if (!PyArray_CheckExact(value))
        return 0;
    PyArrayObject *array = (PyArrayObject *)value;
    if (PyArray_NDIM(array) != input->ndim || !PyArray_ISALIGNED(array))
        return 0;
    for (int axis = 0; axis < input->ndim; axis++)
        if ((input->fixed >> axis & 1) && PyArray_DIM(array, axis) != 1)
            return 0;
    return PyArray_DESCR(array) == input->dtype || PyArray_EquivTypes(PyArray_DESCR(array), input->dtype);
}

static void put(PyObject *cell, PyObject *value)
{
    PyObject *before = PyList_GET_ITEM(cell, 0);
    Py_INCREF(value);
    PyList_SET_ITEM(cell, 0, value);
    Py_XDECREF(before);
}

static PyObject *runner_call(Runner *self, PyObject *args, PyObject *keywords)
{
    PyObject *values;
    if (!PyArg_ParseTuple(args, "O!", &PyList_Type, &values))
        return NULL;
    if (PyList_GET_SIZE(values) != self->n_inputs)
        Py_RETURN_NONE;
    for (Py_ssize_t i = 0; i < self->n_inputs; i++)
        if (!fits(&self->inputs[i], PyList_GET_ITEM(values, i)))
            Py_RETURN_NONE;
    for (Py_ssize_t i = 0; i < self->n_inputs; i++)
        put(self->inputs[i].cell, PyList_GET_ITEM(values, i));
    PyObject *results = PyObject_CallNoArgs(self->function);
    if (results == NULL)
        return NULL;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(self->emptied); i++)
        put(PyTuple_GET_ITEM(self->emptied, i), Py_None);
    PyObject *wanted = PySequence_GetSlice(results, 0, self->n_outputs);
    Py_DECREF(results);
    return wanted;
}

static PyTypeObject RunnerType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "synkhronos._native.native.Runner",
    .tp_doc = "Calls a compiled function.",
    .tp_basicsize = sizeof(Runner),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = runner_new,
    .tp_call = (ternaryfunc)runner_call,
    .tp_dealloc = (destructor)runner_dealloc,
};

int synkhronos_add_runner(PyObject *module)
{
    return PyModule_AddType(module, &RunnerType);
}

/* Calls of a compiled function that takes its arguments from cells (lists of one item), and records of the values of the
 * variables that it uses. A function may have hundreds of variables, so loops over them in Python would take longer than
 * many calls. See native.pyi. */
#include "module.h"

#include <stddef.h>
#include <structmember.h>

/* -- The type `FastCall` */

/* An argument of the function: its cell, and the arrays that it accepts without conversion. */
struct argument {
    PyObject *cell;
    PyArray_Descr *dtype;
    int ndim;
    uint64_t unit_axes; /* bit mask of axes that must have length 1 */
};

typedef struct {
    PyObject_HEAD
    PyObject *function, *cleared, *updated;
    Py_ssize_t n_inputs, n_outputs;
    struct argument *inputs;
} FastCall;

static int are_records(PyObject *records);
static void follow(PyObject *records);

static void fast_call_dealloc(FastCall *self)
{
    for (Py_ssize_t i = 0; i < self->n_inputs; i++) {
        Py_XDECREF(self->inputs[i].cell);
        Py_XDECREF(self->inputs[i].dtype);
    }
    PyMem_Free(self->inputs);
    Py_XDECREF(self->function);
    Py_XDECREF(self->cleared);
    Py_XDECREF(self->updated);
    Py_TYPE(self)->tp_free(self);
}

/* Whether all items of a tuple are lists of at least one item. */
static int are_cells(PyObject *cells)
{
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(cells); i++)
        if (!PyList_Check(PyTuple_GET_ITEM(cells, i)) || PyList_GET_SIZE(PyTuple_GET_ITEM(cells, i)) < 1)
            return 0;
    return 1;
}

/* Parse a tuple (cell, dtype, whether each axis must have length 1); -1 with an exception set. */
static int read_input(struct argument *input, PyObject *item)
{
    PyObject *cell, *axes;
    if (!PyArg_ParseTuple(item, "O!O&O!", &PyList_Type, &cell, PyArray_DescrConverter, &input->dtype, &PyTuple_Type,
                          &axes))
        return -1;
    if (PyList_GET_SIZE(cell) < 1 || PyTuple_GET_SIZE(axes) > 64) {
        PyErr_SetString(PyExc_TypeError, "expected a list of at least one item, a dtype, and at most 64 axes");
        return -1;
    }
    Py_INCREF(cell);
    input->cell = cell;
    input->ndim = (int)PyTuple_GET_SIZE(axes);
    for (int axis = 0; axis < input->ndim; axis++)
        input->unit_axes |= (uint64_t)(PyTuple_GET_ITEM(axes, axis) == Py_True) << axis;
    return 0;
}

static PyObject *fast_call_new(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
    static char *names[] = {"function", "inputs", "n_outputs", "cleared", "updated", NULL};
    PyObject *function, *inputs, *cleared, *updated;
    Py_ssize_t n_outputs;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "OO!nO!O", names, &function, &PyTuple_Type, &inputs, &n_outputs,
                                     &PyTuple_Type, &cleared, &updated) ||
        !are_records(updated))
        return NULL;
    if (!are_cells(cleared)) {
        PyErr_SetString(PyExc_TypeError, "expected a tuple of lists");
        return NULL;
    }
    FastCall *self = (FastCall *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    Py_INCREF(function);
    Py_INCREF(cleared);
    Py_INCREF(updated);
    self->function = function;
    self->cleared = cleared;
    self->updated = updated;
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

/* Whether a value can be stored in the argument's cell without conversion. */
static int is_accepted(const struct argument *input, PyObject *value)
{
    if (!PyArray_CheckExact(value))
        return 0;
    PyArrayObject *array = (PyArrayObject *)value;
    if (PyArray_NDIM(array) != input->ndim || !PyArray_ISALIGNED(array))
        return 0;
    for (int axis = 0; axis < input->ndim; axis++)
        if ((input->unit_axes >> axis & 1) && PyArray_DIM(array, axis) != 1)
            return 0;
    return PyArray_DESCR(array) == input->dtype || PyArray_EquivTypes(PyArray_DESCR(array), input->dtype);
}

/* Whether a value is an array of a kind, a tuple (shape, dtype); an exception may be set otherwise. */
static int is_of_kind(PyObject *value, PyObject *kind)
{
    if (!PyTuple_Check(kind) || PyTuple_GET_SIZE(kind) != 2 || !PyTuple_Check(PyTuple_GET_ITEM(kind, 0))) {
        PyErr_SetString(PyExc_TypeError, "expected tuples of a shape and a dtype");
        return 0;
    }
    PyObject *shape = PyTuple_GET_ITEM(kind, 0), *dtype = PyTuple_GET_ITEM(kind, 1);
    if (!PyArray_CheckExact(value) || (PyObject *)PyArray_DESCR((PyArrayObject *)value) != dtype)
        return 0;
    PyArrayObject *array = (PyArrayObject *)value;
    int same = PyTuple_GET_SIZE(shape) == PyArray_NDIM(array);
    for (int axis = 0; same && axis < PyArray_NDIM(array); axis++)
        same = PyLong_AsSsize_t(PyTuple_GET_ITEM(shape, axis)) == PyArray_DIM(array, axis);
    return same;
}

static PyObject *are_of_kinds(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *values, *kinds;
    if (!PyArg_ParseTuple(args, "O!O!", &PyTuple_Type, &values, &PyTuple_Type, &kinds))
        return NULL;
    int are = PyTuple_GET_SIZE(values) == PyTuple_GET_SIZE(kinds);
    for (Py_ssize_t i = 0; are && i < PyTuple_GET_SIZE(kinds); i++)
        are = is_of_kind(PyTuple_GET_ITEM(values, i), PyTuple_GET_ITEM(kinds, i));
    return PyErr_Occurred() ? NULL : PyBool_FromLong(are);
}

/* Set a member; its former value may run any code when it is freed. */
static void set_member(PyObject **member, PyObject *value)
{
    PyObject *before = *member;
    Py_INCREF(value);
    *member = value;
    Py_XDECREF(before);
}

static void set_cell(PyObject *cell, PyObject *value)
{
    set_member(&((PyListObject *)cell)->ob_item[0], value);
}

static PyObject *fast_call(FastCall *self, PyObject *args, PyObject *keywords)
{
    PyObject *values;
    if (!PyArg_ParseTuple(args, "O!", &PyList_Type, &values))
        return NULL;
    if (PyList_GET_SIZE(values) != self->n_inputs)
        Py_RETURN_NONE;
    for (Py_ssize_t i = 0; i < self->n_inputs; i++)
        if (!is_accepted(&self->inputs[i], PyList_GET_ITEM(values, i)))
            Py_RETURN_NONE;
    for (Py_ssize_t i = 0; i < self->n_inputs; i++)
        set_cell(self->inputs[i].cell, PyList_GET_ITEM(values, i));
    PyObject *results = PyObject_CallNoArgs(self->function);
    if (results == NULL)
        return NULL;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(self->cleared); i++)
        set_cell(PyTuple_GET_ITEM(self->cleared, i), Py_None);
    follow(self->updated);
    PyObject *wanted = PySequence_GetSlice(results, 0, self->n_outputs);
    Py_DECREF(results);
    return wanted;
}

PyTypeObject FastCallType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "synkhronos._native.native.FastCall",
    .tp_doc = "Calls a compiled function without the engine's checks of arguments.",
    .tp_basicsize = sizeof(FastCall),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = fast_call_new,
    .tp_call = (ternaryfunc)fast_call,
    .tp_dealloc = (destructor)fast_call_dealloc,
};

/* -- The type `SentValue`, and functions on tuples of its objects */

typedef struct {
    PyObject_HEAD
    PyObject *storage, *sent, *stale, *viewed, *references;
} SentValue;

static PyObject *sent_value_new(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
    static char *names[] = {"storage", NULL};
    PyObject *storage;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "O!", names, &PyList_Type, &storage))
        return NULL;
    SentValue *self = (SentValue *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    Py_INCREF(storage);
    Py_INCREF(Py_None);
    Py_INCREF(Py_None);
    Py_INCREF(Py_None);
    self->storage = storage;
    self->sent = self->stale = self->viewed = Py_None;
    return (PyObject *)self;
}

static int sent_value_traverse(SentValue *self, visitproc visit, void *arg)
{
    Py_VISIT(self->storage);
    Py_VISIT(self->sent);
    Py_VISIT(self->stale);
    Py_VISIT(self->viewed);
    return 0;
}

static int sent_value_clear(SentValue *self)
{
    Py_CLEAR(self->sent);
    Py_CLEAR(self->stale);
    Py_CLEAR(self->viewed);
    return 0;
}

static void sent_value_dealloc(SentValue *self)
{
    PyObject_GC_UnTrack(self);
    if (self->references != NULL)
        PyObject_ClearWeakRefs((PyObject *)self);
    sent_value_clear(self);
    Py_XDECREF(self->storage);
    Py_TYPE(self)->tp_free(self);
}

static PyMemberDef sent_value_members[] = {
    {"storage", T_OBJECT, offsetof(SentValue, storage), READONLY, NULL},
    {"sent", T_OBJECT, offsetof(SentValue, sent), 0, NULL},
    {"stale", T_OBJECT, offsetof(SentValue, stale), 0, NULL},
    {"viewed", T_OBJECT, offsetof(SentValue, viewed), 0, NULL},
    {NULL, 0, 0, 0, NULL},
};

PyTypeObject SentValueType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "synkhronos._native.native.SentValue",
    .tp_doc = "Record of the value that the other ranks have of one shared variable.",
    .tp_basicsize = sizeof(SentValue),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_new = sent_value_new,
    .tp_traverse = (traverseproc)sent_value_traverse,
    .tp_clear = (inquiry)sent_value_clear,
    .tp_dealloc = (destructor)sent_value_dealloc,
    .tp_members = sent_value_members,
    .tp_weaklistoffset = offsetof(SentValue, references),
};

/* Whether an object is a tuple of records whose storages have a value; an exception is set otherwise. */
static int are_records(PyObject *records)
{
    int are = PyTuple_Check(records);
    for (Py_ssize_t i = 0; are && i < PyTuple_GET_SIZE(records); i++) {
        PyObject *one = PyTuple_GET_ITEM(records, i);
        are = Py_IS_TYPE(one, &SentValueType) && PyList_GET_SIZE(((SentValue *)one)->storage) > 0;
    }
    if (!are)
        PyErr_SetString(PyExc_TypeError, "expected a tuple of records of variables that have a value");
    return are;
}

#define VALUE_OF(record) PyList_GET_ITEM((record)->storage, 0)

static PyObject *first_set(PyObject *Py_UNUSED(module), PyObject *records)
{
    Py_ssize_t i = 0;
    if (!are_records(records))
        return NULL;
    for (; i < PyTuple_GET_SIZE(records); i++) {
        SentValue *one = (SentValue *)PyTuple_GET_ITEM(records, i);
        if (one->sent != VALUE_OF(one))
            return PyLong_FromSsize_t(i);
    }
    return PyLong_FromLong(-1);
}

/* Record that all ranks have set the variables of valid records. */
static void follow(PyObject *records)
{
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(records); i++) {
        SentValue *one = (SentValue *)PyTuple_GET_ITEM(records, i);
        if (one->sent != Py_None && one->sent != VALUE_OF(one))
            set_member(&one->sent, VALUE_OF(one));
    }
}

static PyObject *follow_values(PyObject *Py_UNUSED(module), PyObject *records)
{
    if (!are_records(records))
        return NULL;
    follow(records);
    Py_RETURN_NONE;
}

static PyObject *set_stale(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *records, *value;
    if (!PyArg_ParseTuple(args, "OO", &records, &value) || !are_records(records))
        return NULL;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(records); i++)
        set_member(&((SentValue *)PyTuple_GET_ITEM(records, i))->stale, value);
    Py_RETURN_NONE;
}

static PyObject *note_values(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *records;
    int are_stale;
    if (!PyArg_ParseTuple(args, "Op", &records, &are_stale) || !are_records(records))
        return NULL;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(records); i++) {
        SentValue *one = (SentValue *)PyTuple_GET_ITEM(records, i);
        set_member(&one->sent, VALUE_OF(one));
        set_member(&one->stale, are_stale ? VALUE_OF(one) : Py_None);
    }
    Py_RETURN_NONE;
}

PyMethodDef synkhronos_call_functions[] = {
    {"are_of_kinds", are_of_kinds, METH_VARARGS, "are_of_kinds(values, kinds, /): see native.pyi."},
    {"first_set", first_set, METH_O, "first_set(records, /): see native.pyi."},
    {"follow_values", follow_values, METH_O, "follow_values(records, /): see native.pyi."},
    {"set_stale", set_stale, METH_VARARGS, "set_stale(records, value, /): see native.pyi."},
    {"note_values", note_values, METH_VARARGS, "note_values(records, are_stale, /): see native.pyi."},
    {NULL, NULL, 0, NULL},
};

/* `Combiner`: collects the points of several chains, which are threads of a sampler, so that one call evaluates them.
 *
 * A sampler in compiled code calls `evaluate` for each point, without Python's lock. The call waits until one thread of
 * Python, the evaluator, has exchanged the point for its results. The evaluator waits in `exchange` for points, without
 * Python's lock, too. So no other thread needs that lock for an evaluation.
 *
 * Invariants
 * - `lock` protects all fields. Each call occupies a slot from its start to its end; only this call frees the slot.
 * - A waiting call is woken by the evaluator with its results, or by `close`. If the evaluator fails, it must call
 *   `close`; then all calls return `FAILED`, later ones too.
 * - The evaluator is woken by the first point, by a point that completes the number that it waits for, and by `close`.
 * - The memory outlives all calls: the sampler must hold a reference to the `Combiner` while it may call `evaluate`.
 *
 * The evaluator waits for as many points as there are threads that had a point in one of the last two exchanges, for at
 * most a tenth of the time that the last evaluation took. So a chain that has ended delays two evaluations at most.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <math.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>
#include <time.h>

/* What `evaluate` returns. A sampler takes positive codes for a divergence, and ends at a negative one. */
enum { VALID = 0, GRADIENT_NOT_FINITE = 3, VALUE_NOT_FINITE = 4, FAILED = -1 };

enum state { FREE, WAITING, IN_WORK, DONE };

struct slot {
    enum state state;
    const double *point;
    double *gradient, *value;
    int64_t code;
    uint64_t order; /* of arrival */
    pthread_cond_t done;
};

/* A thread that had a point, and the number of the exchange that took its last one. */
struct chain {
    pthread_t thread;
    uint64_t exchange;
};

typedef struct {
    PyObject_HEAD
    size_t n_slots, n_dimensions;
    struct slot *slots;
    struct chain *chains; /* as many as slots; those that are not in use have exchange 0 */
    size_t *in_work;      /* the slots of the last exchange, in the order of the points */
    size_t n_in_work, n_waiting;
    uint64_t n_arrived, n_exchanges;
    int64_t taken_at; /* nanoseconds; when the last exchange ended */
    bool is_closed, is_initialized;
    pthread_mutex_t lock;
    pthread_cond_t arrived, freed;
} Combiner;

static int64_t now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * INT64_C(1000000000) + time.tv_nsec;
}

/* -- calls of the sampler */

static struct slot *free_slot(Combiner *self)
{
    for (size_t i = 0; i < self->n_slots; i++)
        if (self->slots[i].state == FREE)
            return &self->slots[i];
    return NULL;
}

/* Return the record of a thread: its own, or else the one that was not used for longest. */
static struct chain *chain_of(Combiner *self, pthread_t thread)
{
    struct chain *oldest = self->chains;
    for (size_t i = 0; i < self->n_slots; i++) {
        struct chain *one = &self->chains[i];
        if (one->exchange && pthread_equal(one->thread, thread))
            return one;
        if (one->exchange < oldest->exchange)
            oldest = one;
    }
    oldest->thread = thread;
    return oldest;
}

/* Number of points for which the evaluator waits. */
static size_t n_expected(const Combiner *self)
{
    size_t n = 0;
    for (size_t i = 0; i < self->n_slots; i++)
        n += self->chains[i].exchange && self->chains[i].exchange + 2 > self->n_exchanges;
    return n ? n : 1;
}

static int64_t evaluate(uint64_t n_dimensions, const double *point, double *gradient, double *value, void *combiner)
{
    Combiner *self = combiner;
    struct slot *slot = NULL;
    if (n_dimensions != self->n_dimensions)
        return FAILED;
    pthread_mutex_lock(&self->lock);
    while (!self->is_closed && !(slot = free_slot(self)))
        pthread_cond_wait(&self->freed, &self->lock);
    if (self->is_closed) {
        pthread_mutex_unlock(&self->lock);
        return FAILED;
    }
    slot->state = WAITING;
    slot->point = point;
    slot->gradient = gradient;
    slot->value = value;
    slot->order = self->n_arrived++;
    chain_of(self, pthread_self())->exchange = self->n_exchanges + 1;
    self->n_waiting++;
    if (self->n_waiting == 1 || self->n_waiting >= n_expected(self))
        pthread_cond_signal(&self->arrived);
    while (slot->state != DONE)
        pthread_cond_wait(&slot->done, &self->lock);
    int64_t code = slot->code;
    slot->state = FREE;
    pthread_cond_signal(&self->freed);
    pthread_mutex_unlock(&self->lock);
    return code;
}

/* -- the evaluator */

static int64_t code_of(double value, const double *gradient, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (!isfinite(gradient[i]))
            return GRADIENT_NOT_FINITE;
    return isfinite(value) ? VALID : VALUE_NOT_FINITE;
}

static void finish(struct slot *slot, int64_t code)
{
    slot->code = code;
    slot->state = DONE;
    pthread_cond_signal(&slot->done);
}

static void give_results(Combiner *self, const double *values, const double *gradients)
{
    for (size_t i = 0; i < self->n_in_work; i++) {
        struct slot *slot = &self->slots[self->in_work[i]];
        if (slot->state != IN_WORK) /* `close` has finished it */
            continue;
        const double *gradient = gradients + i * self->n_dimensions;
        memcpy(slot->gradient, gradient, self->n_dimensions * sizeof(double));
        *slot->value = values[i];
        finish(slot, code_of(values[i], gradient, self->n_dimensions));
    }
    self->n_in_work = 0;
}

static void wait_for_points(Combiner *self)
{
    int64_t patience = self->taken_at ? (now() - self->taken_at) / 10 : 0;
    while (!self->is_closed && self->n_waiting == 0)
        pthread_cond_wait(&self->arrived, &self->lock);
    int64_t deadline = now() + patience;
    struct timespec until = {.tv_sec = deadline / 1000000000, .tv_nsec = deadline % 1000000000};
    while (!self->is_closed && self->n_waiting < n_expected(self))
        if (pthread_cond_timedwait(&self->arrived, &self->lock, &until))
            break;
}

/* Copy the waiting points in the order of arrival; return their number. */
static size_t take_points(Combiner *self, double *points)
{
    size_t n = 0;
    for (size_t i = 0; i < self->n_slots; i++) {
        if (self->slots[i].state != WAITING)
            continue;
        size_t place = n++;
        for (; place > 0 && self->slots[self->in_work[place - 1]].order > self->slots[i].order; place--)
            self->in_work[place] = self->in_work[place - 1];
        self->in_work[place] = i;
    }
    for (size_t i = 0; i < n; i++) {
        struct slot *slot = &self->slots[self->in_work[i]];
        memcpy(points + i * self->n_dimensions, slot->point, self->n_dimensions * sizeof(double));
        slot->state = IN_WORK;
    }
    self->n_in_work = n;
    self->n_waiting = 0;
    self->n_exchanges++;
    return n;
}

/* -- the type of Python */

static bool is_array(const Py_buffer *buffer, size_t n)
{
    return buffer->itemsize == sizeof(double) && buffer->format && !strcmp(buffer->format, "d")
           && (size_t)buffer->len >= n * sizeof(double);
}

static PyObject *combiner_exchange(PyObject *object, PyObject *args)
{
    Combiner *self = (Combiner *)object;
    Py_buffer values, gradients, points;
    PyObject *given[3], *found = NULL;
    if (!PyArg_ParseTuple(args, "OOO", &given[0], &given[1], &given[2]))
        return NULL;
    if (PyObject_GetBuffer(given[0], &values, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT) < 0)
        return NULL;
    if (PyObject_GetBuffer(given[1], &gradients, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT) < 0)
        goto without_gradients;
    if (PyObject_GetBuffer(given[2], &points, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT | PyBUF_WRITABLE) < 0)
        goto without_points;
    if (!is_array(&values, self->n_in_work) || !is_array(&gradients, self->n_in_work * self->n_dimensions)
        || !is_array(&points, self->n_slots * self->n_dimensions)) {
        PyErr_SetString(PyExc_ValueError, "exchange: expected arrays of float64 with an entry or row for each point");
        goto with_all;
    }
    size_t n;
    Py_BEGIN_ALLOW_THREADS
    pthread_mutex_lock(&self->lock);
    if (!self->is_closed)
        give_results(self, values.buf, gradients.buf);
    wait_for_points(self);
    n = self->is_closed ? 0 : take_points(self, points.buf);
    self->taken_at = now();
    pthread_mutex_unlock(&self->lock);
    Py_END_ALLOW_THREADS
    found = PyLong_FromSize_t(n);
with_all:
    PyBuffer_Release(&points);
without_points:
    PyBuffer_Release(&gradients);
without_gradients:
    PyBuffer_Release(&values);
    return found;
}

static PyObject *combiner_close(PyObject *object, PyObject *ignored)
{
    Combiner *self = (Combiner *)object;
    Py_BEGIN_ALLOW_THREADS
    pthread_mutex_lock(&self->lock);
    self->is_closed = true;
    for (size_t i = 0; i < self->n_slots; i++)
        if (self->slots[i].state == WAITING || self->slots[i].state == IN_WORK)
            finish(&self->slots[i], FAILED);
    self->n_waiting = 0;
    pthread_cond_broadcast(&self->arrived);
    pthread_cond_broadcast(&self->freed);
    pthread_mutex_unlock(&self->lock);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyObject *combiner_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    Py_ssize_t n_slots, n_dimensions;
    if (!PyArg_ParseTuple(args, "nn", &n_slots, &n_dimensions))
        return NULL;
    if (n_slots < 1 || n_dimensions < 0) {
        PyErr_SetString(PyExc_ValueError, "Combiner: expected at least one thread, and no negative number");
        return NULL;
    }
    Combiner *self = (Combiner *)type->tp_alloc(type, 0);
    if (!self)
        return NULL;
    self->n_slots = (size_t)n_slots;
    self->n_dimensions = (size_t)n_dimensions;
    self->slots = PyMem_Calloc(self->n_slots, sizeof *self->slots);
    self->chains = PyMem_Calloc(self->n_slots, sizeof *self->chains);
    self->in_work = PyMem_Calloc(self->n_slots, sizeof *self->in_work);
    if (!self->slots || !self->chains || !self->in_work) {
        Py_DECREF(self);
        return PyErr_NoMemory();
    }
    pthread_condattr_t clock;
    pthread_condattr_init(&clock);
    pthread_condattr_setclock(&clock, CLOCK_MONOTONIC);
    pthread_mutex_init(&self->lock, NULL);
    pthread_cond_init(&self->arrived, &clock);
    pthread_condattr_destroy(&clock);
    pthread_cond_init(&self->freed, NULL);
    for (size_t i = 0; i < self->n_slots; i++)
        pthread_cond_init(&self->slots[i].done, NULL);
    self->is_initialized = true;
    return (PyObject *)self;
}

static void combiner_dealloc(PyObject *object)
{
    Combiner *self = (Combiner *)object;
    if (self->is_initialized) {
        for (size_t i = 0; i < self->n_slots; i++)
            pthread_cond_destroy(&self->slots[i].done);
        pthread_cond_destroy(&self->freed);
        pthread_cond_destroy(&self->arrived);
        pthread_mutex_destroy(&self->lock);
    }
    PyMem_Free(self->in_work);
    PyMem_Free(self->chains);
    PyMem_Free(self->slots);
    Py_TYPE(self)->tp_free(object);
}

static PyObject *get_function(PyObject *object, void *closure)
{
    return PyLong_FromVoidPtr((void *)(uintptr_t)evaluate);
}

static PyObject *get_argument(PyObject *object, void *closure)
{
    return PyLong_FromVoidPtr(object);
}

static PyMethodDef methods[] = {
    {"exchange", combiner_exchange, METH_VARARGS,
     "exchange(values, gradients, points)\n--\n\nGive the results of the last points, wait for points, and copy them "
     "to `points`; return their number, 0 if the combiner is closed."},
    {"close", combiner_close, METH_NOARGS, "close()\n--\n\nEnd all calls, now and later, with an error."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef attributes[] = {
    {"function", get_function, NULL, "Address of the function that samplers call.", NULL},
    {"argument", get_argument, NULL, "Last argument of that function.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyTypeObject CombinerType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "synkhronos.extensions.pymc._combiner.Combiner",
    .tp_doc = "Combiner(n_threads, n_dimensions)\n--\n\nCollects the points of a sampler's threads; see combiner.c.",
    .tp_basicsize = sizeof(Combiner),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = combiner_new,
    .tp_dealloc = combiner_dealloc,
    .tp_methods = methods,
    .tp_getset = attributes,
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT,
    .m_name = "_combiner",
    .m_doc = "Evaluate the points of several chains in one call.",
    .m_size = -1,
};

PyMODINIT_FUNC PyInit__combiner(void)
{
    if (PyType_Ready(&CombinerType) < 0)
        return NULL;
    PyObject *found = PyModule_Create(&module);
    if (found && PyModule_AddType(found, &CombinerType) < 0)
        Py_CLEAR(found);
    return found;
}

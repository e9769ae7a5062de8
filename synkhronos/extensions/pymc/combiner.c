/* `Combiner`: collects the points of several chains, which are threads of a sampler, so that one call evaluates them.
 *
 * A sampler in compiled code calls `evaluate` for each point, without Python's lock. The thread that completes the
 * expected number of points takes all that wait, calls a Python function for them, and gives the others their
 * results. It then goes on with its own chain, without having slept.
 *
 * As many points are expected as there are threads that had a point in one of the last two calls. The thread that has
 * waited longest waits for them a tenth of the time that the last call took, but 0.1 to 50 ms. So a chain that has ended
 * delays two calls.
 *
 * Invariants
 * - `lock` protects all fields. Each call of `evaluate` occupies a slot from its start to its end.
 * - A waiting thread is woken by the thread that evaluates its point, with the results, or by `close`. While no thread
 *   evaluates, the thread that has waited longest wakes by itself at the deadline; it was woken for that when the last
 *   evaluation ended.
 * - If the Python function fails, the combiner is closed: all calls return `FAILED`, later ones too.
 * - The memory outlives all calls: the sampler must hold a reference to the `Combiner` while it may call `evaluate`.
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

/* Shortest and longest time to wait for more points, in nanoseconds. On a virtual machine with busy cores, a thread that
 * was woken needs the shortest time until it has its next point. */
enum { SHORTEST = 100000, LONGEST = 50000000 };

enum state { FREE, WAITING, IN_WORK, DONE };

struct slot {
    enum state state;
    const double *point;
    double *gradient, *value;
    int64_t code;
    uint64_t order; /* of arrival */
    pthread_cond_t changed;
};

/* A thread that had a point, and the number of the call that evaluates its last one. */
struct chain {
    pthread_t thread;
    uint64_t call;
};

typedef struct {
    PyObject_HEAD
    PyObject *function;
    Py_buffer arrays[3]; /* points, values, gradients */
    double *points, *values, *gradients;
    size_t n_slots, n_dimensions;
    struct slot *slots;
    struct chain *chains; /* as many as slots; those that are not in use have call 0 */
    size_t *in_work;      /* the slots whose points are evaluated, in the order of the points */
    size_t n_in_work, n_waiting;
    uint64_t n_arrived, n_calls;
    int64_t deadline, duration; /* nanoseconds: of waiting for more points; of the last call */
    bool is_busy, is_closed, is_initialized;
    pthread_mutex_t lock;
    pthread_cond_t freed;
} Combiner;

static int64_t now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * INT64_C(1000000000) + time.tv_nsec;
}

/* Deadline for further points, counted from now. */
static int64_t next_deadline(const Combiner *self)
{
    int64_t delay = self->duration / 10;
    return now() + (delay < SHORTEST ? SHORTEST : delay > LONGEST ? LONGEST : delay);
}

static struct slot *free_slot(Combiner *self)
{
    for (size_t i = 0; i < self->n_slots; i++)
        if (self->slots[i].state == FREE)
            return &self->slots[i];
    return NULL;
}

/* The slot that has waited longest; NULL if none waits. */
static struct slot *oldest_slot(Combiner *self)
{
    struct slot *oldest = NULL;
    for (size_t i = 0; i < self->n_slots; i++) {
        struct slot *one = &self->slots[i];
        if (one->state == WAITING && (!oldest || one->order < oldest->order))
            oldest = one;
    }
    return oldest;
}

/* Return the record of a thread: its own, or else the one that was not used for longest. */
static struct chain *chain_of(Combiner *self, pthread_t thread)
{
    struct chain *oldest = self->chains;
    for (size_t i = 0; i < self->n_slots; i++) {
        struct chain *one = &self->chains[i];
        if (one->call && pthread_equal(one->thread, thread))
            return one;
        if (one->call < oldest->call)
            oldest = one;
    }
    oldest->thread = thread;
    return oldest;
}

/* Number of points for which threads wait. */
static size_t n_expected(const Combiner *self)
{
    size_t n = 0;
    for (size_t i = 0; i < self->n_slots; i++)
        n += self->chains[i].call && self->chains[i].call + 2 > self->n_calls;
    return n;
}

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
    pthread_cond_signal(&slot->changed);
}

/* End all calls that wait, now and later. */
static void fail(Combiner *self)
{
    self->is_closed = true;
    for (size_t i = 0; i < self->n_slots; i++)
        if (self->slots[i].state == WAITING)
            finish(&self->slots[i], FAILED);
    self->n_waiting = 0;
    pthread_cond_broadcast(&self->freed);
}

/* Copy the waiting points in the order of arrival. */
static void take_points(Combiner *self)
{
    size_t n = 0;
    for (struct slot *slot; (slot = oldest_slot(self)); n++) {
        memcpy(self->points + n * self->n_dimensions, slot->point, self->n_dimensions * sizeof(double));
        slot->state = IN_WORK;
        self->in_work[n] = (size_t)(slot - self->slots);
    }
    self->n_in_work = n;
    self->n_waiting = 0;
    self->n_calls++;
}

static void give_results(Combiner *self)
{
    for (size_t i = 0; i < self->n_in_work; i++) {
        struct slot *slot = &self->slots[self->in_work[i]];
        const double *gradient = self->gradients + i * self->n_dimensions;
        if (self->is_closed) {
            finish(slot, FAILED);
            continue;
        }
        memcpy(slot->gradient, gradient, self->n_dimensions * sizeof(double));
        *slot->value = self->values[i];
        finish(slot, code_of(self->values[i], gradient, self->n_dimensions));
    }
}

/* Call the Python function for `n` points; return whether it returned a true value. */
static bool call_python(Combiner *self, size_t n)
{
    PyGILState_STATE state = PyGILState_Ensure();
    PyObject *result = PyObject_CallFunction(self->function, "n", (Py_ssize_t)n);
    bool succeeded = result && PyObject_IsTrue(result) == 1;
    Py_XDECREF(result);
    PyErr_Clear();
    PyGILState_Release(state);
    return succeeded;
}

/* Evaluate all points that wait. The caller holds the lock, which is released meanwhile. */
static void evaluate_points(Combiner *self)
{
    self->is_busy = true;
    take_points(self);
    pthread_mutex_unlock(&self->lock);
    int64_t start = now();
    bool succeeded = call_python(self, self->n_in_work);
    pthread_mutex_lock(&self->lock);
    self->is_busy = false;
    self->duration = now() - start;
    if (!succeeded)
        fail(self);
    give_results(self);
    struct slot *oldest = oldest_slot(self);
    if (oldest) {
        self->deadline = next_deadline(self);
        pthread_cond_signal(&oldest->changed);
    }
}

/* Wait until something changes, or until the deadline if no other thread does. */
static void wait_for_change(Combiner *self, struct slot *slot)
{
    if (self->is_busy || slot != oldest_slot(self)) {
        pthread_cond_wait(&slot->changed, &self->lock);
        return;
    }
    struct timespec until = {.tv_sec = self->deadline / 1000000000, .tv_nsec = self->deadline % 1000000000};
    pthread_cond_timedwait(&slot->changed, &self->lock, &until);
}

/* The function that samplers call. */
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
    if (self->n_waiting++ == 0)
        self->deadline = next_deadline(self);
    chain_of(self, pthread_self())->call = self->n_calls + 1;
    while (slot->state != DONE) {
        if (!self->is_busy && (self->n_waiting >= n_expected(self) || now() >= self->deadline))
            evaluate_points(self);
        else
            wait_for_change(self, slot);
    }
    int64_t code = slot->code;
    slot->state = FREE;
    pthread_cond_signal(&self->freed);
    pthread_mutex_unlock(&self->lock);
    return code;
}

/* -- the Python type */

/* Get a writable array of float64; NULL with an exception set for another object. */
static double *doubles_of(PyObject *object, Py_buffer *buffer, int ndim)
{
    if (PyObject_GetBuffer(object, buffer, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT | PyBUF_WRITABLE) < 0)
        return NULL;
    if (buffer->ndim == ndim && buffer->format && !strcmp(buffer->format, "d"))
        return buffer->buf;
    PyErr_Format(PyExc_ValueError, "Combiner: expected an array of float64 with %d dimensions", ndim);
    return NULL;
}

static PyObject *combiner_close(PyObject *object, PyObject *ignored)
{
    Combiner *self = (Combiner *)object;
    Py_BEGIN_ALLOW_THREADS
    pthread_mutex_lock(&self->lock);
    fail(self);
    pthread_mutex_unlock(&self->lock);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

/* Set up the locks. Slots wait by the monotonic clock. */
static void initialize(Combiner *self)
{
    pthread_condattr_t clock;
    pthread_condattr_init(&clock);
    pthread_condattr_setclock(&clock, CLOCK_MONOTONIC);
    for (size_t i = 0; i < self->n_slots; i++)
        pthread_cond_init(&self->slots[i].changed, &clock);
    pthread_condattr_destroy(&clock);
    pthread_cond_init(&self->freed, NULL);
    pthread_mutex_init(&self->lock, NULL);
    self->is_initialized = true;
}

static PyObject *combiner_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    PyObject *function, *points, *values, *gradients;
    if (!PyArg_ParseTuple(args, "OOOO", &function, &points, &values, &gradients))
        return NULL;
    Combiner *self = (Combiner *)type->tp_alloc(type, 0);
    if (!self)
        return NULL;
    Py_INCREF(function);
    self->function = function;
    if (!(self->points = doubles_of(points, &self->arrays[0], 2))
        || !(self->values = doubles_of(values, &self->arrays[1], 1))
        || !(self->gradients = doubles_of(gradients, &self->arrays[2], 2)))
        goto failed;
    const Py_ssize_t *shape = self->arrays[0].shape;
    if (shape[0] < 1 || self->arrays[1].shape[0] != shape[0] || self->arrays[2].shape[0] != shape[0]
        || self->arrays[2].shape[1] != shape[1]) {
        PyErr_SetString(PyExc_ValueError, "Combiner: expected points and gradients of one shape, and as many values");
        goto failed;
    }
    self->n_slots = (size_t)shape[0];
    self->n_dimensions = (size_t)shape[1];
    self->slots = PyMem_Calloc(self->n_slots, sizeof *self->slots);
    self->chains = PyMem_Calloc(self->n_slots, sizeof *self->chains);
    self->in_work = PyMem_Calloc(self->n_slots, sizeof *self->in_work);
    if (!self->slots || !self->chains || !self->in_work) {
        PyErr_NoMemory();
        goto failed;
    }
    initialize(self);
    return (PyObject *)self;
failed:
    Py_DECREF(self);
    return NULL;
}

/* The function may refer to an exception whose traceback refers to this object. */
static int combiner_traverse(PyObject *object, visitproc visit, void *arg)
{
    Py_VISIT(((Combiner *)object)->function);
    return 0;
}

static void combiner_dealloc(PyObject *object)
{
    Combiner *self = (Combiner *)object;
    PyObject_GC_UnTrack(object);
    if (self->is_initialized) {
        for (size_t i = 0; i < self->n_slots; i++)
            pthread_cond_destroy(&self->slots[i].changed);
        pthread_cond_destroy(&self->freed);
        pthread_mutex_destroy(&self->lock);
    }
    PyMem_Free(self->in_work);
    PyMem_Free(self->chains);
    PyMem_Free(self->slots);
    for (int i = 0; i < 3; i++)
        PyBuffer_Release(&self->arrays[i]);
    Py_CLEAR(self->function);
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
    {"close", combiner_close, METH_NOARGS, "close()\n--\n\nEnd all calls that wait, now and later, with an error."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef attributes[] = {
    {"function", get_function, NULL, "Address of the function that samplers call.", NULL},
    {"argument", get_argument, NULL, "Last argument of that function.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyTypeObject CombinerType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "synkhronos.extensions.pymc._combiner.Combiner",
    .tp_doc = "Combiner(function, points, values, gradients)\n--\n\nCollects the points of a sampler's threads.",
    .tp_basicsize = sizeof(Combiner),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_traverse = combiner_traverse,
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

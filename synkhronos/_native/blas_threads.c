/* Threads for OpenBLAS that spin only while the controller computes alone. See native.pyi.
 *
 * OpenBLAS's own idle threads spin for some 30 to 100 ms after a product, on a core that another rank then needs. Since
 * version 0.3.27, OpenBLAS lets a program run the jobs of its products (`openblas_set_threads_callback_function`). The
 * jobs of one product wait for each other, so each of them has a thread of its own. The thread that computes the
 * product runs job 0. */
#define _GNU_SOURCE
#include "module.h"
#include "posix.h"

#include <stdatomic.h>
#include <sys/prctl.h>

enum { MAX_THREADS = 1024, /* more than OpenBLAS can be built for */
       CACHE_LINE = 64, STACK_BYTES = 8 << 20, READS_PER_CLOCK = 64 };
enum { SPIN_NS = 1000000, SLEEP_NS = 900000000 }; /* how long a thread without a job spins, and sleeps at a time */

typedef void (*job_function)(int number, void *job, int buffer);
typedef void (*callback)(int is_waiting, job_function run, int n_jobs, size_t job_bytes, void *jobs, int buffer);
typedef void (*callback_setter)(callback);

/* A worker waits for `turn` to change, and then runs its job. */
struct worker {
    _Alignas(CACHE_LINE) _Atomic uint32_t turn;
    _Atomic int is_asleep;
    pthread_t thread;
};

static struct worker workers[MAX_THREADS];
static int n_workers;                    /* started */
static _Atomic int is_resting, is_ending; /* no worker spins; all workers end */
static callback_setter setters[8];        /* of the libraries that use these threads */
static int n_setters;

/* The present product. `left` counts its unfinished jobs; a thread sleeps on it while `waits_asleep`. */
static pthread_mutex_t one_product = PTHREAD_MUTEX_INITIALIZER;
static struct {
    job_function run;
    char *jobs;
    size_t job_bytes;
    int buffer;
} product;
static _Alignas(CACHE_LINE) _Atomic uint32_t left;
static _Atomic int waits_asleep;

/* Wait until a word no longer has this value: spin, and then sleep. */
static void wait_for_change(_Atomic uint32_t *word, uint32_t value, _Atomic int *is_asleep)
{
    int64_t deadline = now() + SPIN_NS;
    do {
        for (int read = 0; read < READS_PER_CLOCK; read++) {
            if (atomic_load_explicit(word, memory_order_acquire) != value)
                return;
            cpu_relax();
        }
    } while (!atomic_load_explicit(&is_resting, memory_order_relaxed) && now() < deadline);
    atomic_store(is_asleep, 1);
    while (atomic_load(word) == value)
        futex(word, FUTEX_WAIT_PRIVATE, value, SLEEP_NS);
    atomic_store(is_asleep, 0);
}

static void run_job(int number)
{
    product.run(number, product.jobs + (size_t)number * product.job_bytes, product.buffer);
}

static void *work(void *argument)
{
    int number = (int)(intptr_t)argument;
    struct worker *self = &workers[number - 1];
    prctl(PR_SET_NAME, "synk-blas");
    for (uint32_t turn = 0;; turn++) {
        wait_for_change(&self->turn, turn, &self->is_asleep);
        if (atomic_load(&is_ending))
            return NULL;
        run_job(number);
        if (atomic_fetch_sub(&left, 1) == 1 && atomic_load(&waits_asleep))
            futex(&left, FUTEX_WAKE_PRIVATE, 1, 0);
    }
}

static void next_turn(struct worker *one)
{
    atomic_fetch_add(&one->turn, 1);
    if (atomic_load(&one->is_asleep))
        futex(&one->turn, FUTEX_WAKE_PRIVATE, 1, 0);
}

/* Start workers until there are `n`; return how many there are. */
static int start_workers(int n)
{
    sigset_t every, before;
    pthread_attr_t attributes;
    sigfillset(&every);
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, STACK_BYTES);
    pthread_sigmask(SIG_SETMASK, &every, &before);
    for (; n_workers < n; n_workers++) {
        struct worker *one = &workers[n_workers];
        atomic_store(&one->turn, 0);
        atomic_store(&one->is_asleep, 0);
        if (pthread_create(&one->thread, &attributes, work, (void *)(intptr_t)(n_workers + 1)))
            break;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&attributes);
    return n_workers;
}

/* Start a worker for each job but one. The jobs cannot run one after the other, so this waits until the system allows
 * the threads, as it must for OpenBLAS's own. */
static void start_all(int n)
{
    static const struct timespec PAUSE = {0, 10000000};
    int has_reported = 0;
    while (start_workers(n) < n) {
        if (!has_reported)
            fprintf(stderr, "synkhronos: BLAS needs %d threads, and the system refuses one; trying again\n", n);
        has_reported = 1;
        nanosleep(&PAUSE, NULL);
    }
}

/* Called by OpenBLAS, also with more jobs than before if the program has raised its number of threads. */
static void run_jobs(int is_waiting, job_function run, int n_jobs, size_t job_bytes, void *jobs, int buffer)
{
    pthread_mutex_lock(&one_product);
    product.run = run;
    product.jobs = jobs;
    product.job_bytes = job_bytes;
    product.buffer = buffer;
    atomic_store(&left, (uint32_t)(n_jobs - 1));
    start_all(n_jobs - 1);
    for (int i = 0; i < n_jobs - 1; i++)
        next_turn(&workers[i]);
    run_job(0);
    for (uint32_t others = atomic_load(&left); others != 0; others = atomic_load(&left))
        wait_for_change(&left, others, &waits_asleep);
    pthread_mutex_unlock(&one_product);
}

/* In a child process, which has none of the threads, OpenBLAS uses its own again. */
static void forget(void)
{
    for (int i = 0; i < n_setters; i++)
        setters[i](NULL);
    n_setters = n_workers = 0;
    atomic_store(&is_ending, 0);
    atomic_store(&waits_asleep, 0);
    pthread_mutex_init(&one_product, NULL);
}

static PyObject *serve_blas(PyObject *Py_UNUSED(self), PyObject *args)
{
    static int is_registered;
    unsigned long long address;
    int n_threads;
    if (!PyArg_ParseTuple(args, "Ki:serve_blas", &address, &n_threads))
        return NULL;
    if (!is_registered)
        is_registered = pthread_atfork(NULL, NULL, forget) == 0;
    int has_room = n_setters < (int)(sizeof setters / sizeof setters[0]) && n_threads - 1 <= MAX_THREADS;
    pthread_mutex_lock(&one_product); /* a product of another thread starts workers, too */
    int is_possible = is_registered && has_room && start_workers(n_threads - 1) >= n_threads - 1;
    pthread_mutex_unlock(&one_product);
    if (!is_possible)
        Py_RETURN_FALSE;
    callback_setter set = (callback_setter)(uintptr_t)address;
    setters[n_setters++] = set;
    set(run_jobs);
    Py_RETURN_TRUE;
}

static PyObject *rest_blas(PyObject *Py_UNUSED(self), PyObject *rests)
{
    atomic_store(&is_resting, PyObject_IsTrue(rests) == 1);
    Py_RETURN_NONE;
}

static PyObject *end_blas(PyObject *Py_UNUSED(self), PyObject *Py_UNUSED(nothing))
{
    for (int i = 0; i < n_setters; i++)
        setters[i](NULL);
    n_setters = 0;
    Py_BEGIN_ALLOW_THREADS
    pthread_mutex_lock(&one_product); /* wait for the last product */
    atomic_store(&is_ending, 1);
    for (int i = 0; i < n_workers; i++)
        next_turn(&workers[i]);
    for (int i = 0; i < n_workers; i++)
        pthread_join(workers[i].thread, NULL);
    n_workers = 0;
    atomic_store(&is_ending, 0);
    pthread_mutex_unlock(&one_product);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

PyMethodDef synkhronos_blas_functions[] = {
    {"serve_blas", serve_blas, METH_VARARGS,
     "serve_blas(address, n_threads)\n--\n\nRun the threads of an OpenBLAS; return whether that is possible."},
    {"rest_blas", rest_blas, METH_O, "rest_blas(rests)\n--\n\nLet idle threads spin no more, or spin again."},
    {"end_blas", end_blas, METH_NOARGS, "end_blas()\n--\n\nEnd the threads; OpenBLAS then uses its own again."},
    {NULL, NULL, 0, NULL},
};

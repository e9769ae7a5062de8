/* Threads that compute parts of matrix products and of updates while the controller computes alone. See native.pyi.
 *
 * OpenBLAS's own idle threads spin for some 30 to 100 ms after a product, on a core that another rank then needs. Since
 * version 0.3.27, OpenBLAS lets a program run the jobs of its products (`openblas_set_threads_callback_function`). The
 * jobs of one product wait for each other, so each of them has a thread of its own. The thread that computes the
 * product runs job 0.
 *
 * OpenBLAS divides a product with few terms, such as the gradient of a layer's weights for few rows, so that its threads
 * wait for each other most of the time. `gemm` therefore divides the result itself. Each part is a product of its own,
 * which OpenBLAS computes on one thread. Where all sides are longer, OpenBLAS is faster, because its threads share the
 * operands that they rearrange. */
#define _GNU_SOURCE
#include "module.h"
#include "posix.h"

#include <stdatomic.h>
#include <sys/prctl.h>

enum { MAX_THREADS = 1024, /* more than OpenBLAS can be built for */
       CACHE_LINE = 64, STACK_BYTES = 8 << 20, READS_PER_CLOCK = 64 };
enum { LEAST_PRODUCT = 1 << 18, /* multiplications of a product that `gemm` divides */
       SHORT_SIDE = 200,         /* its shortest side is at most this long */
       WIDTH = 16 };             /* rows and columns that OpenBLAS's kernels compute at once */
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
static int n_workers;             /* started */
static _Atomic int n_threads = 1; /* that may compute now; if it is 1, no worker spins */
static _Atomic int is_alone;      /* whether the controller computes alone, so that `count` and `gemm` divide */
static _Atomic int is_ending;     /* all workers end */
static callback_setter setters[8]; /* of the libraries that use these threads */
static int n_setters;

/* The present work. `left` counts its unfinished jobs; a thread sleeps on it while `waits_asleep`. */
static pthread_mutex_t one_work = PTHREAD_MUTEX_INITIALIZER;
static struct {
    job_function run;
    char *jobs;
    size_t job_bytes;
    int buffer;
} work;
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
    } while (atomic_load_explicit(&n_threads, memory_order_relaxed) > 1 && now() < deadline);
    atomic_store(is_asleep, 1);
    while (atomic_load(word) == value)
        futex(word, FUTEX_WAIT_PRIVATE, value, SLEEP_NS);
    atomic_store(is_asleep, 0);
}

static void run_job(int number)
{
    work.run(number, work.jobs + (size_t)number * work.job_bytes, work.buffer);
}

static void *serve(void *argument)
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
        if (pthread_create(&one->thread, &attributes, serve, (void *)(intptr_t)(n_workers + 1)))
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

/* Run jobs, each in a thread of its own. The caller holds `one_work`. */
static void run_all(job_function run, int n_jobs, size_t job_bytes, void *jobs, int buffer)
{
    work.run = run;
    work.jobs = jobs;
    work.job_bytes = job_bytes;
    work.buffer = buffer;
    atomic_store(&left, (uint32_t)(n_jobs - 1));
    start_all(n_jobs - 1);
    for (int i = 0; i < n_jobs - 1; i++)
        next_turn(&workers[i]);
    run_job(0);
    for (uint32_t others = atomic_load(&left); others != 0; others = atomic_load(&left))
        wait_for_change(&left, others, &waits_asleep);
}

/* Called by OpenBLAS, also with more jobs than before if the program has raised its number of threads. */
static void run_jobs(int is_waiting, job_function run, int n_jobs, size_t job_bytes, void *jobs, int buffer)
{
    pthread_mutex_lock(&one_work);
    run_all(run, n_jobs, job_bytes, jobs, buffer);
    pthread_mutex_unlock(&one_work);
}

static int count(void)
{
    int is_possible = atomic_load_explicit(&is_alone, memory_order_relaxed);
    return is_possible ? atomic_load_explicit(&n_threads, memory_order_relaxed) : 1;
}

struct part {
    void (*run)(int part, void *context);
    void *context;
};

static void run_part(int number, void *job, int buffer)
{
    struct part *one = job;
    one->run(number, one->context);
}

static void divide(int n_parts, void (*run)(int part, void *context), void *context)
{
    struct part one = {run, context};
    if (n_parts < 2 || pthread_mutex_trylock(&one_work) != 0) {
        for (int i = 0; i < n_parts; i++)
            run(i, context);
        return;
    }
    run_all(run_part, n_parts, 0, &one, 0);
    pthread_mutex_unlock(&one_work);
}

/* -- products */

struct product {
    synkhronos_gemm_function *gemm;
    const char *trans_a, *trans_b, *a, *b;
    char *c;
    const void *alpha, *beta;
    const int *m, *n, *k, *lda, *ldb, *ldc;
    int by_rows, length, step; /* of the rows or columns of the result; `step` of them are a part */
    ptrdiff_t a_step, b_step, c_step; /* bytes from one row or column to the next */
};

static void multiply(int part, void *context)
{
    struct product *of = context;
    int start = part * of->step, here = of->length - start < of->step ? of->length - start : of->step;
    of->gemm(of->trans_a, of->trans_b, of->by_rows ? &here : of->m, of->by_rows ? of->n : &here, of->k, of->alpha,
             of->a + start * of->a_step, of->lda, of->b + start * of->b_step, of->ldb, of->beta,
             of->c + start * of->c_step, of->ldc);
}

static int is_transposed(const char *letter)
{
    return *letter != 'N' && *letter != 'n';
}

/* Columns of the result lie side by side; a part of its rows does not. So rows are divided only if they are many. */
static void gemm(const struct synkhronos_blas *blas, const char *trans_a, const char *trans_b, const int *m,
                 const int *n, const int *k, const void *alpha, const void *a, const int *lda, const void *b,
                 const int *ldb, const void *beta, void *c, const int *ldc)
{
    int own = count(), of_blas = own > 1 ? blas->get_num_threads() : 1, most = own < of_blas ? own : of_blas;
    int by_rows = *m / 2 > *n, length = by_rows ? *m : *n;
    int step = most > 1 ? ((length - 1) / most / WIDTH + 1) * WIDTH : length;
    int side = *m < *n ? *m : *n, shortest = side < *k ? side : *k;
    int is_divided = step < length && shortest <= SHORT_SIDE && (double)*m * *n * *k > LEAST_PRODUCT;
    if (!is_divided || pthread_mutex_trylock(&one_work) != 0) {
        blas->gemm(trans_a, trans_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
        return;
    }
    ptrdiff_t item = (ptrdiff_t)blas->item_bytes;
    struct product product = {blas->gemm, trans_a, trans_b, a, b, c, alpha, beta, m, n, k, lda, ldb, ldc, by_rows,
                              length, step};
    if (by_rows)
        product.a_step = item * (is_transposed(trans_a) ? *lda : 1);
    else
        product.b_step = item * (is_transposed(trans_b) ? 1 : *ldb);
    product.c_step = item * (by_rows ? 1 : *ldc);
    struct part one = {multiply, &product};
    blas->set_num_threads(1);
    run_all(run_part, (length - 1) / step + 1, 0, &one, 0);
    if (count() > 1) /* else `use_threads` has limited the library meanwhile */
        blas->set_num_threads(of_blas);
    pthread_mutex_unlock(&one_work);
}

const struct synkhronos_threads synkhronos_threads = {count, divide, gemm};

/* In a child process, which has none of the threads, OpenBLAS uses its own again. */
static void forget(void)
{
    for (int i = 0; i < n_setters; i++)
        setters[i](NULL);
    n_setters = n_workers = 0;
    atomic_store(&n_threads, 1);
    atomic_store(&is_ending, 0);
    atomic_store(&waits_asleep, 0);
    pthread_mutex_init(&one_work, NULL);
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
    pthread_mutex_lock(&one_work); /* a product of another thread starts workers, too */
    int is_possible = is_registered && has_room && start_workers(n_threads - 1) >= n_threads - 1;
    pthread_mutex_unlock(&one_work);
    if (!is_possible)
        Py_RETURN_FALSE;
    callback_setter set = (callback_setter)(uintptr_t)address;
    setters[n_setters++] = set;
    set(run_jobs);
    Py_RETURN_TRUE;
}

static PyObject *use_threads(PyObject *Py_UNUSED(self), PyObject *args)
{
    int found, alone;
    if (!PyArg_ParseTuple(args, "ip:use_threads", &found, &alone))
        return NULL;
    pthread_mutex_lock(&one_work);
    atomic_store(&n_threads, found < 1 ? 1 : found > n_workers ? n_workers + 1 : found);
    atomic_store(&is_alone, alone);
    pthread_mutex_unlock(&one_work);
    Py_RETURN_NONE;
}

static PyObject *end_blas(PyObject *Py_UNUSED(self), PyObject *Py_UNUSED(nothing))
{
    for (int i = 0; i < n_setters; i++)
        setters[i](NULL);
    n_setters = 0;
    atomic_store(&n_threads, 1);
    Py_BEGIN_ALLOW_THREADS
    pthread_mutex_lock(&one_work); /* wait for the last product */
    atomic_store(&is_ending, 1);
    for (int i = 0; i < n_workers; i++)
        next_turn(&workers[i]);
    for (int i = 0; i < n_workers; i++)
        pthread_join(workers[i].thread, NULL);
    n_workers = 0;
    atomic_store(&is_ending, 0);
    pthread_mutex_unlock(&one_work);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

PyMethodDef synkhronos_thread_functions[] = {
    {"serve_blas", serve_blas, METH_VARARGS,
     "serve_blas(address, n_threads)\n--\n\nRun the threads of an OpenBLAS; return whether that is possible."},
    {"use_threads", use_threads, METH_VARARGS, "use_threads(n, is_alone)\n--\n\nSet how many threads may compute."},
    {"end_blas", end_blas, METH_NOARGS, "end_blas()\n--\n\nEnd the threads; OpenBLAS then uses its own again."},
    {NULL, NULL, 0, NULL},
};

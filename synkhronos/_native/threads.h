/* Threads of a process, as C and C++ code of other modules uses them. See threads.c. */
#ifndef SYNKHRONOS_THREADS
#define SYNKHRONOS_THREADS

#include <stddef.h>

/* A matrix product by the conventions of Fortran: trans_a, trans_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc. */
typedef void synkhronos_gemm_function(const char *, const char *, const int *, const int *, const int *, const void *,
                                      const void *, const int *, const void *, const int *, const void *, void *,
                                      const int *);

/* An OpenBLAS library, with its product for one dtype. */
struct synkhronos_blas {
    synkhronos_gemm_function *gemm;
    int (*get_num_threads)(void);
    void (*set_num_threads)(int);
    size_t item_bytes;
};

/* The capsule `synkhronos._native.native.threads` holds a pointer to this. */
#define SYNKHRONOS_THREADS_NAME "synkhronos._native.native.threads"
struct synkhronos_threads {
    /* Return the number of threads that may compute now, this one included. */
    int (*count)(void);
    /* Run `run(0, context)` to `run(n_parts - 1, context)`, at the same time if the threads are free. */
    void (*divide)(int n_parts, void (*run)(int part, void *context), void *context);
    /* Compute a product, which the threads divide by rows or columns of the result if it is large. */
    void (*gemm)(const struct synkhronos_blas *, const char *, const char *, const int *, const int *, const int *,
                 const void *, const void *, const int *, const void *, const int *, const void *, void *, const int *);
};
extern const struct synkhronos_threads synkhronos_threads;

#endif

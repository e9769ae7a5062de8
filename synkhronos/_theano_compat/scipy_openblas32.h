// Maps the standard names of BLAS routines to those of scipy-openblas32, whose symbols have a prefix.
// The flags of `find_blas` include this header in every C++ module of Theano that is linked to it. The pragma renames
// the symbols of functions with C linkage that are declared later in the module. Products of real matrices are divided
// among the threads of synkhronos, if these compute.
#pragma once

#define SYNKHRONOS_PRAGMA(...) _Pragma(#__VA_ARGS__)
#define SYNKHRONOS_RENAME(name) SYNKHRONOS_PRAGMA(redefine_extname name scipy_##name)
#define REAL(name) SYNKHRONOS_RENAME(s##name##_) SYNKHRONOS_RENAME(d##name##_)
#define COMPLEX(name) SYNKHRONOS_RENAME(c##name##_) SYNKHRONOS_RENAME(z##name##_)
#define EVERY(name) REAL(name) COMPLEX(name)

// level 1: vectors
REAL(rot) REAL(rotm) REAL(rotmg) REAL(dot) REAL(nrm2) REAL(asum)
COMPLEX(dotu) COMPLEX(dotc)
EVERY(rotg) EVERY(swap) EVERY(scal) EVERY(copy) EVERY(axpy)
SYNKHRONOS_RENAME(sdsdot_) SYNKHRONOS_RENAME(dsdot_)
SYNKHRONOS_RENAME(csrot_) SYNKHRONOS_RENAME(zdrot_) SYNKHRONOS_RENAME(csscal_) SYNKHRONOS_RENAME(zdscal_)
SYNKHRONOS_RENAME(scnrm2_) SYNKHRONOS_RENAME(dznrm2_) SYNKHRONOS_RENAME(scasum_) SYNKHRONOS_RENAME(dzasum_)
SYNKHRONOS_RENAME(isamax_) SYNKHRONOS_RENAME(idamax_) SYNKHRONOS_RENAME(icamax_) SYNKHRONOS_RENAME(izamax_)

// level 2: matrices and vectors
EVERY(gemv) EVERY(gbmv) EVERY(trmv) EVERY(tbmv) EVERY(tpmv) EVERY(trsv) EVERY(tbsv) EVERY(tpsv)
REAL(symv) REAL(sbmv) REAL(spmv) REAL(ger) REAL(syr) REAL(spr) REAL(syr2) REAL(spr2)
COMPLEX(hemv) COMPLEX(hbmv) COMPLEX(hpmv) COMPLEX(geru) COMPLEX(gerc) COMPLEX(her) COMPLEX(hpr) COMPLEX(her2)
COMPLEX(hpr2)

// level 3: matrices
COMPLEX(gemm) EVERY(symm) EVERY(syrk) EVERY(syr2k) EVERY(trmm) EVERY(trsm)
COMPLEX(hemm) COMPLEX(herk) COMPLEX(her2k)

// threads
SYNKHRONOS_RENAME(openblas_set_num_threads)
SYNKHRONOS_RENAME(openblas_get_num_threads)

#if __has_include(<Python.h>)
#include "../_native/threads.h"

#define PARAMETERS                                                                                                    \
    const char *ta, const char *tb, const int *m, const int *n, const int *k, const void *alpha, const void *a,       \
        const int *lda, const void *b, const int *ldb, const void *beta, void *c, const int *ldc
#define GEMM(letter, type)                                                                                            \
    SYNKHRONOS_PRAGMA(redefine_extname letter##gemm_ synkhronos_##letter##gemm)                                       \
    extern "C" synkhronos_gemm_function scipy_##letter##gemm_;                                                        \
    __attribute__((used)) static void synkhronos_##letter##gemm_(PARAMETERS) __asm__("synkhronos_" #letter "gemm");   \
    static void synkhronos_##letter##gemm_(PARAMETERS) {                                                              \
        static const struct synkhronos_blas blas = {scipy_##letter##gemm_, scipy_openblas_get_num_threads,            \
                                                    scipy_openblas_set_num_threads, sizeof(type)};                    \
        const struct synkhronos_threads *threads = synkhronos::threads();                                             \
        if (threads)                                                                                                  \
            threads->gemm(&blas, ta, tb, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);                               \
        else                                                                                                          \
            scipy_##letter##gemm_(ta, tb, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);                              \
    }

extern "C" int scipy_openblas_get_num_threads(void);
extern "C" void scipy_openblas_set_num_threads(int);
GEMM(s, float)
GEMM(d, double)

#undef GEMM
#undef PARAMETERS
#else  // a program that Theano compiles to try the library
REAL(gemm)
#endif

#undef EVERY
#undef COMPLEX
#undef REAL

/* The kernels for x86-64 processors with AVX-512 F, BW, DQ and VL (Skylake-X and later). */
#include "reductions_kernels.h"

#ifdef SYNKHRONOS_X86
#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl"))), \
                             apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl")
#endif
#define KERNELS reductions_avx512
#define NARROWER &reductions_avx2
#include "reductions_loops.h"
#ifdef __clang__
#pragma clang attribute pop
#endif
#endif

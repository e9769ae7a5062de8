/* The kernels for x86-64 processors with AVX2. */
#include "reductions_kernels.h"

#ifdef SYNKHRONOS_X86
#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx2"))), apply_to = function)
#else
#pragma GCC target("avx2")
#endif
#define KERNELS reductions_avx2
#include "reductions_loops.h"
#ifdef __clang__
#pragma clang attribute pop
#endif
#endif

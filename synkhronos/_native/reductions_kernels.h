/* The loops over the elements of a block, compiled for several instruction sets. */
#ifndef SYNKHRONOS_REDUCTIONS_KERNELS_H
#define SYNKHRONOS_REDUCTIONS_KERNELS_H

#include "reductions.h"

/* Elements in memory of any kind, at any address. */
#define IN_MEMORY __attribute__((may_alias, aligned(1)))
typedef int8_t i8 IN_MEMORY;
typedef uint8_t u8 IN_MEMORY;
typedef int16_t i16 IN_MEMORY;
typedef uint16_t u16 IN_MEMORY;
typedef int32_t i32 IN_MEMORY;
typedef uint32_t u32 IN_MEMORY;
typedef int64_t i64 IN_MEMORY;
typedef uint64_t u64 IN_MEMORY;
typedef float f32 IN_MEMORY;
typedef double f64 IN_MEMORY;
__extension__ typedef __int128 i128 IN_MEMORY;
__extension__ typedef unsigned __int128 u128;

typedef void convert_function(void *to, const void *from, size_t n);
/* out = a (op) b; out may be a or b. */
typedef void step_function(void *out, const void *a, const void *b, size_t n);
/* out = a * weight_a + b * weight_b. */
typedef void weigh_function(void *out, const void *a, double weight_a, const void *b, double weight_b, size_t n);
/* The same, times `by`, or divided by it; returns whether anything is not finite. */
typedef int finish_function(void *out, const void *a, double weight_a, const void *b, double weight_b, double by,
                            size_t n);
/* sums += x * share. What overflows, though both terms are finite, only did by rounding: it becomes the largest. */
typedef void bound_function(void *sums, const void *x, double share, size_t n);
/* means that are not finite become others. */
typedef void mend_function(void *means, const void *others, size_t n);

struct floats {
    weigh_function *weigh;
    finish_function *multiply, *divide;
    bound_function *add_bounded;
    mend_function *mend;
};

struct kernels {
    step_function *steps[AVG][N_TYPES];             /* NULL where another type or table does it */
    convert_function *conversions[N_TYPES][N_TYPES]; /* by from, to; averages of integers come from F64 */
    struct floats floats[2];                        /* of F32 and of F64 */
    const struct kernels *narrower;                 /* the table for what this one has not */
};

extern const struct kernels reductions_plain;
#if defined(__x86_64__) && defined(__GNUC__)
#define SYNKHRONOS_X86
extern const struct kernels reductions_avx2, reductions_avx512;
#endif

#endif

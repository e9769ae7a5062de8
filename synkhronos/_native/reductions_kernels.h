/* Kernels: loops over the elements of a block of an array, compiled for several instruction sets. */
#ifndef SYNKHRONOS_REDUCTIONS_KERNELS_H
#define SYNKHRONOS_REDUCTIONS_KERNELS_H

#include "reductions.h"
#include <string.h>

/* Types of elements that may lie at any address (unaligned), in memory of any declared type (aliasing). */
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
/* out = a (op) b; out may be a or b */
typedef void step_function(void *out, const void *a, const void *b, size_t n);
/* out = a * weight_a + b * weight_b */
typedef void weighted_sum_function(void *out, const void *a, double weight_a, const void *b, double weight_b, size_t n);
/* out = (a * weight_a + b * weight_b) * scale, or / scale; returns whether any result is not finite */
typedef int finish_function(void *out, const void *a, double weight_a, const void *b, double weight_b, double scale,
                            size_t n);
/* sums += x * share. If the sum of two finite terms overflows, rounding is the cause; then it becomes the largest
 * finite number, with its sign. */
typedef void add_bounded_function(void *sums, const void *x, double share, size_t n);
/* Replace means that are not finite by the elements of `others`. */
typedef void fix_function(void *means, const void *others, size_t n);

struct floats {
    weighted_sum_function *weighted_sum;
    finish_function *multiply, *divide;
    add_bounded_function *add_bounded;
    fix_function *fix_nonfinite;
};

struct kernels {
    step_function *steps[AVG][N_TYPES];             /* NULL: reduced in another type, or the kernel is in `narrower` */
    convert_function *conversions[N_TYPES][N_TYPES]; /* [from][to]; averages of integers are converted from F64 */
    struct floats floats[2];                        /* for F32 and for F64 */
    const struct kernels *narrower;                 /* table of a narrower instruction set, for missing kernels */
};

extern const struct kernels reductions_plain;
#if defined(__x86_64__) && defined(__GNUC__)
#define SYNKHRONOS_X86
extern const struct kernels reductions_avx2, reductions_avx512;
#endif

/* -- Half precision (float16): 5 bits of exponent (bias 15) and 10 of fraction; float32 has 8 (bias 127) and 23. The
 * conversions have no branches, so that loops over them are vectorized. */

static inline float float_of(uint32_t bits)
{
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static inline uint32_t bits_of(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

static inline uint32_t select_bits(int first, uint32_t a, uint32_t b)
{
    uint32_t mask = -(uint32_t)first;
    return (a & mask) | (b & ~mask);
}

static inline float half_to_float(uint32_t half)
{
    uint32_t sign = (half & 0x8000) << 16, rest = half & 0x7fff;
    uint32_t normal = (rest << 13) + ((127 - 15) << 23);
    uint32_t special = normal + ((127 - 15) << 23);
    uint32_t tiny = bits_of((float)(int32_t)rest * 0x1p-24f);
    uint32_t bits = select_bits(rest < 0x400, tiny, normal);
    return float_of(select_bits(rest >= 0x7c00, special, bits) | sign);
}

/* Round to nearest, ties to even. For a subnormal result, adding 0.5 rounds to the bits that float16 keeps. */
static inline uint32_t float_to_half(float x)
{
    uint32_t bits = bits_of(x), sign = (bits >> 16) & 0x8000, rest = bits & 0x7fffffff;
    uint32_t normal = (rest + 0xfff + ((rest >> 13) & 1) - ((127 - 15) << 23)) >> 13;
    uint32_t tiny = bits_of(float_of(rest) + 0.5f) - bits_of(0.5f);
    uint32_t nan = 0x7e00 | ((rest >> 13) & 0x3ff);
    uint32_t half = select_bits(rest < 0x38800000, tiny, normal);
    half = select_bits(rest >= 0x477ff000, 0x7c00, half);
    return select_bits(rest > 0x7f800000, nan, half) | sign;
}

#endif

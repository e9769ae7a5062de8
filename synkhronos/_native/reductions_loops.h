/* The kernels, in plain C that compilers vectorize. Included once for each instruction set; KERNELS is the name of the
 * table. Multiplications must not be fused with additions, because then results would depend on the processor. */
#include <float.h>
#include <math.h>
#include <string.h>

#include "reductions_kernels.h"

/* An output is an operand or does not overlap any, so iterations are independent. */
#ifdef __clang__
#define INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#define INDEPENDENT _Pragma("GCC ivdep")
#endif

#define STEP(name, T, Work, value)                                     \
    static void name(void *to, const void *x, const void *y, size_t n) \
    {                                                                  \
        T *out = to;                                                   \
        const T *as = x, *bs = y;                                      \
        INDEPENDENT                                                    \
        for (size_t i = 0; i < n; i++) {                               \
            Work a = as[i], b = bs[i];                                 \
            out[i] = (T)(value);                                       \
        }                                                              \
    }

/* Maximum and minimum: of two NaNs or two equal elements, the first is the result. */
#define LARGER(T, Work) STEP(larger_##T, T, Work, ((a >= b) | (a != a)) ? a : b)
#define SMALLER(T, Work) STEP(smaller_##T, T, Work, ((a <= b) | (a != a)) ? a : b)

/* Sums and products of signed integers use unsigned arithmetic: its overflow is defined, and the bits are the same. */
#define INTEGERS(U, UnsignedWork, S, SignedWork) \
    STEP(sum_##U, U, UnsignedWork, a + b)        \
    STEP(prod_##U, U, UnsignedWork, a * b)       \
    LARGER(U, UnsignedWork)                      \
    SMALLER(U, UnsignedWork)                     \
    LARGER(S, SignedWork)                        \
    SMALLER(S, SignedWork)

INTEGERS(u8, uint32_t, i8, int32_t)
INTEGERS(u16, uint32_t, i16, int32_t)
INTEGERS(u32, uint32_t, i32, int32_t)
INTEGERS(u64, uint64_t, i64, int64_t)
STEP(or, u8, int, (a != 0) | (b != 0))
STEP(and, u8, int, (a != 0) & (b != 0))

#define COMPLEX_STEP(name, T, Real, real_part, imaginary_part)         \
    static void name(void *to, const void *x, const void *y, size_t n) \
    {                                                                  \
        T *out = to;                                                   \
        const T *as = x, *bs = y;                                      \
        INDEPENDENT                                                    \
        for (size_t i = 0; i < n; i++) {                               \
            Real a = as[2 * i], a_i = as[2 * i + 1];                   \
            Real b = bs[2 * i], b_i = bs[2 * i + 1];                   \
            out[2 * i] = real_part;                                    \
            out[2 * i + 1] = imaginary_part;                           \
        }                                                              \
    }

/* Complex numbers are ordered by real part, then imaginary part, as in NumPy. A number with a NaN in either part counts
 * as NaN. KEPT is whether the first operand is the result. */
#define KEPT(order) \
    ((a != a) | (a_i != a_i) | ((a order b) & (b_i == b_i)) | ((a == b) & ((a_i order b_i) | (a_i == b_i))))

/* The operations of a floating-point type, and of complex numbers made of it. */
#define FLOATS(T, Real, Mask, LARGEST, magnitude, with_sign)                                                          \
    STEP(sum_##T, T, Real, a + b)                                                                                     \
    STEP(prod_##T, T, Real, a * b)                                                                                    \
    LARGER(T, Real)                                                                                                   \
    SMALLER(T, Real)                                                                                                  \
    COMPLEX_STEP(larger_complex_##T, T, Real, KEPT(>) ? a : b, KEPT(>) ? a_i : b_i)                                   \
    COMPLEX_STEP(smaller_complex_##T, T, Real, KEPT(<) ? a : b, KEPT(<) ? a_i : b_i)                                  \
                                                                                                                      \
    static void weighted_sum_##T(void *to, const void *x, double weight_x, const void *y, double weight_y,            \
                                 size_t n)                                                                            \
    {                                                                                                                 \
        T *out = to;                                                                                                  \
        const T *as = x, *bs = y;                                                                                     \
        const Real weight_a = (Real)weight_x, weight_b = (Real)weight_y;                                              \
        INDEPENDENT                                                                                                   \
        for (size_t i = 0; i < n; i++)                                                                                \
            out[i] = as[i] * weight_a + bs[i] * weight_b;                                                             \
    }                                                                                                                 \
                                                                                                                      \
    FINISH(multiply_##T, T, Real, Mask, *)                                                                            \
    FINISH(divide_##T, T, Real, Mask, /)                                                                              \
                                                                                                                      \
    static void add_bounded_##T(void *to, const void *x, double share, size_t n)                                      \
    {                                                                                                                 \
        T *sums = to;                                                                                                 \
        const T *xs = x;                                                                                              \
        const Real weight = (Real)share;                                                                              \
        INDEPENDENT                                                                                                   \
        for (size_t i = 0; i < n; i++) {                                                                              \
            Real sum = sums[i], term = xs[i] * weight, result = sum + term;                                           \
            int rounded = (magnitude(result) > LARGEST) & (magnitude(sum) <= LARGEST) & (magnitude(term) <= LARGEST); \
            sums[i] = rounded ? with_sign(LARGEST, result) : result;                                                  \
        }                                                                                                             \
    }                                                                                                                 \
                                                                                                                      \
    static void fix_##T(void *to, const void *from, size_t n)                                                         \
    {                                                                                                                 \
        T *means = to;                                                                                                \
        const T *others = from;                                                                                       \
        INDEPENDENT                                                                                                   \
        for (size_t i = 0; i < n; i++) {                                                                              \
            Real mean = means[i], other = others[i];                                                                  \
            means[i] = magnitude(mean) <= LARGEST ? mean : other;                                                     \
        }                                                                                                             \
    }

#define FINISH(name, T, Real, Mask, operator)                                                               \
    static int name(void *to, const void *x, double weight_x, const void *y, double weight_y, double scale, \
                    size_t n)                                                                               \
    {                                                                                                       \
        T *out = to;                                                                                        \
        const T *as = x, *bs = y;                                                                           \
        const Real weight_a = (Real)weight_x, weight_b = (Real)weight_y, number = (Real)scale;              \
        Mask any_nonfinite = 0;                                                                             \
        INDEPENDENT                                                                                         \
        for (size_t i = 0; i < n; i++) {                                                                    \
            Real mean = (as[i] * weight_a + bs[i] * weight_b) operator number;                              \
            any_nonfinite |= (Mask)(mean - mean != 0);                                                      \
            out[i] = mean;                                                                                  \
        }                                                                                                   \
        return any_nonfinite != 0;                                                                          \
    }

FLOATS(f32, float, int32_t, FLT_MAX, fabsf, copysignf)
FLOATS(f64, double, int64_t, DBL_MAX, fabs, copysign)

#ifdef NARROWER /* for AVX-512, GCC 12 fuses multiplications and additions here despite -ffp-contract=off */
#define COMPLEX_PRODUCTS
#else
#define NARROWER NULL
COMPLEX_STEP(prod_complex_f32, f32, float, a * b - a_i * b_i, a * b_i + a_i * b)
COMPLEX_STEP(prod_complex_f64, f64, double, a * b - a_i * b_i, a * b_i + a_i * b)
#define COMPLEX_PRODUCTS [C64] = prod_complex_f32, [C128] = prod_complex_f64
#endif

#define CONVERSION(name, From, To, value)                  \
    static void name(void *to, const void *from, size_t n) \
    {                                                      \
        To *out = to;                                      \
        const From *in = from;                             \
        INDEPENDENT                                        \
        for (size_t i = 0; i < n; i++)                     \
            out[i] = (To)(value);                          \
    }
#define WIDER(T)                          \
    CONVERSION(T##_to_f64, T, f64, in[i]) \
    CONVERSION(T##_to_i64, T, i64, in[i])

WIDER(i8)
WIDER(u8)
WIDER(i16)
WIDER(u16)
WIDER(i32)
WIDER(u32)
CONVERSION(bool_to_f64, u8, f64, in[i] != 0)
CONVERSION(bool_to_i64, u8, i64, in[i] != 0)
CONVERSION(f32_to_f64, f32, f64, in[i])
CONVERSION(f64_to_f32, f64, f32, in[i])

/* Round a number below 2^51 to the nearest integer, ties to even: the low bits of its sum with 1.5 * 2^52. */
static inline uint64_t nearest(double x)
{
    double sum = x + 0x1.8p52;
    uint64_t bits;
    memcpy(&bits, &sum, sizeof bits);
    return bits;
}

CONVERSION(f64_to_u8, f64, u8, nearest(in[i]))
CONVERSION(f64_to_u16, f64, u16, nearest(in[i]))
CONVERSION(f64_to_u32, f64, u32, nearest(in[i]))

CONVERSION(f16_to_f32, u16, f32, half_to_float(in[i]))
CONVERSION(f32_to_f16, f32, u16, float_to_half(in[i]))

#define INTEGER_STEPS(which)                                                                             \
    [I8] = which##_u8, [U8] = which##_u8, [I16] = which##_u16, [U16] = which##_u16, [I32] = which##_u32, \
    [U32] = which##_u32, [I64] = which##_u64, [U64] = which##_u64, [F32] = which##_f32, [F64] = which##_f64
#define ORDER_STEPS(which)                                                                                   \
    [I8] = which##_i8, [U8] = which##_u8, [I16] = which##_i16, [U16] = which##_u16, [I32] = which##_i32,     \
    [U32] = which##_u32, [I64] = which##_i64, [U64] = which##_u64, [F32] = which##_f32, [F64] = which##_f64, \
    [C64] = which##_complex_f32, [C128] = which##_complex_f64
#define FLOAT_LOOPS(T) {weighted_sum_##T, multiply_##T, divide_##T, add_bounded_##T, fix_##T}

const struct kernels KERNELS = {
    .steps = {
        [SUM] = {[BOOL] = or, INTEGER_STEPS(sum)},
        [PROD] = {[BOOL] = and, INTEGER_STEPS(prod), COMPLEX_PRODUCTS},
        [MAX] = {[BOOL] = or, ORDER_STEPS(larger)},
        [MIN] = {[BOOL] = and, ORDER_STEPS(smaller)},
    },
    .conversions = {
        [BOOL] = {[F64] = bool_to_f64, [I64] = bool_to_i64},
        [I8] = {[F64] = i8_to_f64, [I64] = i8_to_i64},
        [U8] = {[F64] = u8_to_f64, [I64] = u8_to_i64, [U64] = u8_to_i64},
        [I16] = {[F64] = i16_to_f64, [I64] = i16_to_i64},
        [U16] = {[F64] = u16_to_f64, [I64] = u16_to_i64, [U64] = u16_to_i64},
        [I32] = {[F64] = i32_to_f64, [I64] = i32_to_i64},
        [U32] = {[F64] = u32_to_f64, [I64] = u32_to_i64, [U64] = u32_to_i64},
        [F16] = {[F32] = f16_to_f32},
        [F32] = {[F64] = f32_to_f64, [F16] = f32_to_f16},
        [F64] = {[BOOL] = f64_to_u8, [I8] = f64_to_u8, [U8] = f64_to_u8, [I16] = f64_to_u16, [U16] = f64_to_u16,
                 [I32] = f64_to_u32, [U32] = f64_to_u32, [F32] = f64_to_f32},
    },
    .floats = {FLOAT_LOOPS(f32), FLOAT_LOOPS(f64)},
    .narrower = NARROWER,
};

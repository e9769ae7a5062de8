// The hyperbolic tangent as e / (e + 2) with e = exp(2 |x|) - 1, without branches, so that compilers vectorize loops.
//
// e = 2^n (exp(r) - 1) + (2^n - 1) with 2 |x| = n ln 2 + r and |r| <= ln(2) / 2; exp(r) - 1 is computed by its Taylor
// series. The C library's function is used if the compiler may reorder sums, which would remove the rounding step, and
// in code for GPUs, which also includes this text.
#ifndef SYNKHRONOS_TANH
#define SYNKHRONOS_TANH

#if !defined(Py_PYTHON_H) || defined(__FAST_MATH__) || defined(SYNKHRONOS_REORDERS)
#define synkhronos_tanh(x) tanh(x)
#else
#include <cmath>
#include <cstring>

template <int DEGREE>
static inline double synkhronos_tanh_by_exp(double x) {
    const double round_off = 6755399441055744.0;  // 1.5 * 2^52: adding it rounds to an integer, in the last bits
    const npy_int64 infinity = 0x7ff0000000000000, forty = 0x4044000000000000;  // as the bits of doubles
    double y = 2 * std::fabs(x);
    npy_int64 bits, of_x;
    std::memcpy(&bits, &y, sizeof bits);
    npy_int64 if_nan = -(npy_int64)(bits > infinity);
    bits = bits > forty ? forty : bits;  // compare as integers, because comparisons of doubles may trap and branch
    std::memcpy(&y, &bits, sizeof bits);
    double shifted = y * 1.4426950408889634 + round_off, n = shifted - round_off;
    double r = y - n * 0.693147180369123816490 - n * 1.90821492927058770002e-10;
    double factorial[DEGREE + 1] = {1};
    for (int k = 1; k <= DEGREE; k++) factorial[k] = factorial[k - 1] * k;
    double series = 1 / factorial[DEGREE];
    for (int k = DEGREE - 1; k >= 2; k--) series = series * r + 1 / factorial[k];
    double part = r * r * series + r, power;
    npy_uint64 exponent;
    std::memcpy(&exponent, &shifted, sizeof exponent);
    exponent = (exponent + 1023) << 52;
    std::memcpy(&power, &exponent, sizeof exponent);
    double e = power * part + (power - 1), result = std::copysign(e / (e + 2), x);
    std::memcpy(&bits, &result, sizeof bits);
    std::memcpy(&of_x, &x, sizeof of_x);
    bits = (bits & ~if_nan) | (of_x & if_nan);
    std::memcpy(&result, &bits, sizeof bits);
    return result;
}

static inline npy_float synkhronos_tanh(npy_float x) { return (npy_float)synkhronos_tanh_by_exp<9>(x); }
static inline npy_double synkhronos_tanh(npy_double x) { return synkhronos_tanh_by_exp<14>(x); }
#endif
#endif

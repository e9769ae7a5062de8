// The hyperbolic tangent as e / (e + 2) with e = exp(2 |x|) - 1, without branches, so that loops become vector code.
//
// e = 2^n (exp(r) - 1) + (2^n - 1) with 2 |x| = n ln 2 + r and |r| <= ln(2) / 2; exp(r) - 1 is its Taylor series.

#include <cmath>
#include <cstring>

namespace synkhronos {

template <int DEGREE>
static inline double tanh_by_exp(double x) {
    const double round_off = 6755399441055744.0;  // 1.5 * 2^52: what is added to it is rounded, and lies in its last bits
    double y = 2 * std::fabs(x);
    y = y > 40 ? 40 : y;
    double shifted = y * 1.4426950408889634 + round_off, n = shifted - round_off;
    double r = y - n * 0.693147180369123816490 - n * 1.90821492927058770002e-10;
    double factorial[DEGREE + 1] = {1};
    for (int k = 1; k <= DEGREE; k++) factorial[k] = factorial[k - 1] * k;
    double series = 1 / factorial[DEGREE];
    for (int k = DEGREE - 1; k >= 2; k--) series = series * r + 1 / factorial[k];
    double part = r * r * series + r, power;
    npy_uint64 bits;
    std::memcpy(&bits, &shifted, sizeof bits);
    bits = (bits + 1023) << 52;
    std::memcpy(&power, &bits, sizeof bits);
    double e = power * part + (power - 1);
    return std::copysign(e / (e + 2), x);
}

static inline npy_float tanh_of(npy_float x) { return (npy_float)tanh_by_exp<9>(x); }
static inline npy_double tanh_of(npy_double x) { return tanh_by_exp<14>(x); }
}  // namespace synkhronos

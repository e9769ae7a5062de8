/* Half precision: 5 bits of exponent (bias 15) and 10 of fraction, where single precision has 8 (127) and 23. Without
   branches, so that loops become vector code. */
#ifndef SYNKHRONOS_REDUCTIONS_HALF_H
#define SYNKHRONOS_REDUCTIONS_HALF_H

#include <stdint.h>
#include <string.h>

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

static inline uint32_t either(int first, uint32_t a, uint32_t b)
{
    uint32_t mask = -(uint32_t)first;
    return (a & mask) | (b & ~mask);
}

static inline float wide(uint32_t half)
{
    uint32_t sign = (half & 0x8000) << 16, rest = half & 0x7fff;
    uint32_t normal = (rest << 13) + ((127 - 15) << 23);
    uint32_t special = normal + ((127 - 15) << 23);
    uint32_t tiny = bits_of((float)(int32_t)rest * 0x1p-24f);
    uint32_t bits = either(rest < 0x400, tiny, normal);
    return float_of(either(rest >= 0x7c00, special, bits) | sign);
}

/* To the nearest, of two to the even one. A tiny number added to 0.5 has the bits that it keeps. */
static inline uint32_t narrow(float x)
{
    uint32_t bits = bits_of(x), sign = (bits >> 16) & 0x8000, rest = bits & 0x7fffffff;
    uint32_t normal = (rest + 0xfff + ((rest >> 13) & 1) - ((127 - 15) << 23)) >> 13;
    uint32_t tiny = bits_of(float_of(rest) + 0.5f) - bits_of(0.5f);
    uint32_t nan = 0x7e00 | ((rest >> 13) & 0x3ff);
    uint32_t half = either(rest < 0x38800000, tiny, normal);
    half = either(rest >= 0x477ff000, 0x7c00, half);
    return either(rest > 0x7f800000, nan, half) | sign;
}

#endif

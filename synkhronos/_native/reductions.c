/* Reductions: plan the kernels for an operation, dtypes and weights, and apply them block by block. See reductions.h.
 *
 * Each block of the result is computed in a buffer that stays in the first-level cache, and then copied to the outs. So
 * an operand that is also an out is read before it is written. */
#include <float.h>
#include <limits.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "reductions_kernels.h"

enum { BLOCK_BYTES = 4096 };

/* Lower bound of the factors of float16 elements, because smaller ones underflow in float32. A product with this factor
 * is below the resolution of float16; only its sign, or an infinity or NaN, has an effect. */
#define SMALLEST_HALF_FACTOR 0x1p-60
/* Upper bound of the sum of integer weights, so that sums of products with 64-bit integers fit in 127 bits. */
#define MAX_TOTAL ((uint64_t)1 << 62)
#define SMALLEST_SHARE 0x1p-1074 /* the smallest subnormal double */
#define EXACT_IN_DOUBLE ((int64_t)1 << 53)
#define INT128_PER_BLOCK (BLOCK_BYTES / sizeof(i128))
/* A fixed-point share has two parts of this many bits. */
#define SHARE_BITS 52

/* An operand with a weight above 0. */
struct term {
    size_t rank;
    double share;           /* the shares of all terms sum to one */
    double factor;          /* the mean is the sum of operands times factors, multiplied or divided by `scale` */
    uint64_t multiplicity;  /* for integers: the weight as an integer, ... */
    uint64_t high, low;     /* ... or the share in units of 2^-52, and its remainder in units of 2^-104 */
};

struct reduction {
    /* Compute `n` elements of the result, from `start` on, and write them to the outs. */
    void (*apply)(const reduction *, const void *const *, void *const *, size_t, size_t, size_t);
    const struct kernels *kernels;
    enum type type, work, returned;
    size_t n_reals;          /* 2 if the parts of complex numbers are reduced separately, otherwise 1 */
    convert_function *load;  /* from `type` to `work`; NULL if they are equal */
    convert_function *store; /* from `work` to `returned`; NULL if they are equal */
    step_function *step;
    finish_function *finish;
    double scale;
    uint64_t total;          /* sum of all multiplicities; 0 if fixed-point shares are used instead */
    size_t n;
    struct term terms[];
};

const size_t type_sizes[N_TYPES] = {
    [BOOL] = 1, [I8] = 1, [U8] = 1, [I16] = 2, [U16] = 2, [I32] = 4, [U32] = 4,
    [I64] = 8, [U64] = 8, [F16] = 2, [F32] = 4, [F64] = 8, [C64] = 8, [C128] = 16,
};

size_t reduction_result_itemsize(const reduction *self)
{
    return type_sizes[self->returned] * self->n_reals;
}

const struct kernels *reduction_kernels(void)
{
#ifdef SYNKHRONOS_X86
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
        return &reductions_avx512;
    if (__builtin_cpu_supports("avx2"))
        return &reductions_avx2;
#endif
    return &reductions_plain;
}

/* -- Application: sums, products, maxima, minima and means by kernels */

/* The elements of the operand of term `k` in the type `work`: in place, or converted into `spare`. */
static const void *load_operand(const reduction *self, const void *const *operands, size_t k, size_t start, size_t n,
                                void *spare)
{
    const char *from = (const char *)operands[self->terms[k].rank] + start * type_sizes[self->type];
    if (self->load == NULL)
        return from;
    self->load(spare, from, n);
    return spare;
}

/* Copy a result to the outs, except where it already is. */
static void store_result(const reduction *self, const void *result, void *const *outs, size_t n_outs, size_t start,
                         size_t n)
{
    size_t size = type_sizes[self->returned];
    for (size_t i = 0; i < n_outs; i++) {
        char *out = (char *)outs[i] + start * size;
        if (out != result)
            memcpy(out, result, n * size);
    }
}

/* Compute sums, products, maxima, minima and copies, operand by operand. */
static void apply_steps(const reduction *self, const void *const *operands, void *const *outs, size_t n_outs,
                        size_t start, size_t n)
{
    char block[BLOCK_BYTES], spare[BLOCK_BYTES], stored[BLOCK_BYTES];
    const void *result = load_operand(self, operands, 0, start, n, block);
    for (size_t k = 1; k < self->n; k++) {
        int last = k == self->n - 1;
        void *out = last && self->store == NULL ? (char *)outs[0] + start * type_sizes[self->returned] : block;
        self->step(out, result, load_operand(self, operands, k, start, n, spare), n);
        result = out;
    }
    if (self->store != NULL) {
        self->store(stored, result, n);
        result = stored;
    }
    store_result(self, result, outs, n_outs, start, n);
}

/* Recompute means that are not finite: multiply each operand by its share first. These sums overflow only if the mean
 * does. */
static void fix_nonfinite(const reduction *self, void *means, const void *const *operands, size_t start, size_t n)
{
    char sums[BLOCK_BYTES];
    const struct floats *floats = &self->kernels->floats[self->work == F64];
    for (size_t i = 0; i < n; i++)
        if (self->work == F64)
            ((f64 *)sums)[i] = -0.0; /* the neutral element of addition, because -0.0 + -0.0 is -0.0 */
        else
            ((f32 *)sums)[i] = -0.0f;
    for (size_t k = 0; k < self->n; k++)
        floats->add_bounded(sums, load_operand(self, operands, k, start, n, NULL), self->terms[k].share, n);
    floats->fix_nonfinite(means, sums, n);
}

/* Compute means in floating point. */
static void apply_weights(const reduction *self, const void *const *operands, void *const *outs, size_t n_outs,
                          size_t start, size_t n)
{
    char block[BLOCK_BYTES], spare[BLOCK_BYTES];
    const struct floats *floats = &self->kernels->floats[self->work == F64];
    const struct term *terms = self->terms;
    const void *sum = load_operand(self, operands, 0, start, n, block);
    double factor = terms[0].factor;
    size_t last = self->n - 1;
    for (size_t k = 1; k < last; k++) {
        floats->weighted_sum(block, sum, factor, load_operand(self, operands, k, start, n, spare), terms[k].factor, n);
        sum = block;
        factor = 1;
    }
    const void *other = load_operand(self, operands, last, start, n, spare);
    int any_nonfinite = self->finish(block, sum, factor, other, terms[last].factor, self->scale, n);
    if (any_nonfinite && self->load == NULL) /* after a conversion to a wider type, no sum overflows */
        fix_nonfinite(self, block, operands, start, n);
    if (self->store != NULL)
        self->store(spare, block, n);
    store_result(self, self->store != NULL ? spare : block, outs, n_outs, start, n);
}

/* -- Application: exact means of integers */

static void add_multiple(i128 *sums, enum type type, const void *values, uint64_t multiplicity, size_t n)
{
    if (type == U64)
        for (size_t i = 0; i < n; i++)
            sums[i] += (i128)((const u64 *)values)[i] * multiplicity;
    else
        for (size_t i = 0; i < n; i++)
            sums[i] += (i128)((const i64 *)values)[i] * multiplicity;
}

/* Store quotient + rest / total: rounded to the nearest integer, ties to even, or as a floating-point number. */
static void store_mean(void *out, enum type returned, size_t i, i128 quotient, u128 rest, u128 total)
{
    int up = 2 * rest > total || (2 * rest == total && quotient % 2 != 0);
    i128 nearest = quotient + up;
    uint64_t whole = (uint64_t)nearest;
    if (returned == F64) /* add a remainder of at most 1/2 to the nearest integer, to lose no digits */
        ((f64 *)out)[i] = (double)nearest + (up ? -(double)(total - rest) : (double)rest) / (double)total;
    else if (type_sizes[returned] == 8)
        ((u64 *)out)[i] = whole;
    else if (type_sizes[returned] == 4)
        ((u32 *)out)[i] = (uint32_t)whole;
    else if (type_sizes[returned] == 2)
        ((u16 *)out)[i] = (uint16_t)whole;
    else
        ((u8 *)out)[i] = (uint8_t)whole;
}

void mean_of_sums(void *out, enum type returned, const void *sums, int64_t total, size_t length)
{
    for (size_t i = 0; i < length; i++) {
        i128 sum = ((const i128 *)sums)[i], quotient, rest;
        if (returned == F64 && sum <= EXACT_IN_DOUBLE && sum >= -EXACT_IN_DOUBLE) { /* exact in double precision, so
                                                                                     * rounded only once */
            ((f64 *)out)[i] = (double)(int64_t)sum / (double)total;
            continue;
        }
        if (sum == (int64_t)sum) { /* 64-bit division takes a tenth of the time of 128-bit division */
            quotient = (int64_t)sum / total;
            rest = (int64_t)sum % total;
        } else {
            quotient = sum / total;
            rest = sum % total;
        }
        if (rest < 0) {
            rest += total;
            quotient -= 1;
        }
        store_mean(out, returned, i, quotient, (u128)rest, (u128)total);
    }
}

static void mean_of_fixed_point(void *out, enum type returned, const i128 *high, const i128 *low, size_t n)
{
    const u128 mask = ((u128)1 << SHARE_BITS) - 1;
    for (size_t i = 0; i < n; i++) {
        i128 sum = high[i] + (low[i] >> SHARE_BITS);
        u128 rest = ((u128)sum & mask) << SHARE_BITS | ((u128)low[i] & mask);
        store_mean(out, returned, i, sum >> SHARE_BITS, rest, (u128)1 << 2 * SHARE_BITS);
    }
}

/* Compute exact means of integers: sums by integer weights, in 128 bits, divided by the sum of the weights. If the
 * weights are too large for this, use fixed-point shares of 104 bits, whose upper and lower halves are summed
 * separately. */
static void apply_integer_mean(const reduction *self, const void *const *operands, void *const *outs, size_t n_outs,
                               size_t start, size_t n)
{
    i128 sums[INT128_PER_BLOCK], low[INT128_PER_BLOCK];
    char spare[BLOCK_BYTES];
    for (size_t from = 0; from < n; from += INT128_PER_BLOCK) {
        size_t few = n - from < INT128_PER_BLOCK ? n - from : INT128_PER_BLOCK;
        memset(sums, 0, sizeof sums);
        memset(low, 0, sizeof low);
        for (size_t k = 0; k < self->n; k++) {
            const struct term *term = &self->terms[k];
            const void *values = load_operand(self, operands, k, start + from, few, spare);
            add_multiple(sums, self->type, values, self->total ? term->multiplicity : term->high, few);
            if (!self->total)
                add_multiple(low, self->type, values, term->low, few);
        }
        if (self->total)
            mean_of_sums(spare, self->returned, sums, (int64_t)self->total, few);
        else
            mean_of_fixed_point(spare, self->returned, sums, low, few);
        store_result(self, spare, outs, n_outs, start + from, few);
    }
}

void add_to_sums(const struct kernels *kernels, void *sums, enum type type, const void *values, int64_t multiplicity,
                 double share, size_t length)
{
    char spare[BLOCK_BYTES];
    enum type work = type == F16 ? F32 : type == C64 ? F32 : type == C128 ? F64 : type;
    int real = work == F32 || work == F64;
    size_t block = BLOCK_BYTES / sizeof(int64_t), size = type == F16 ? 2 : type_sizes[work];
    convert_function *load = real ? NULL : kernels->conversions[type][I64];
    if (type == F16)
        load = kernels->conversions[F16][F32];
    length *= type == C64 || type == C128 ? 2 : 1;
    for (size_t start = 0; start < length; start += block) {
        size_t n = length - start < block ? length - start : block;
        const void *from = (const char *)values + start * size;
        if (load != NULL) {
            load(spare, from, n);
            from = spare;
        }
        if (real)
            kernels->floats[work == F64].add_bounded((char *)sums + start * type_sizes[work], from, share, n);
        else
            add_multiple((i128 *)sums + start, type, from, (uint64_t)multiplicity, n);
    }
}

void reduction_apply(const reduction *self, const void *const *operands, void *const *outs, size_t n_outs,
                     size_t length)
{
    size_t work = type_sizes[self->work], returned = type_sizes[self->returned];
    size_t block = BLOCK_BYTES / (work > returned ? work : returned);
    length *= self->n_reals;
    for (size_t start = 0; start < length; start += block)
        self->apply(self, operands, outs, n_outs, start, length - start < block ? length - start : block);
}

/* -- Weights */

void normalize_weights(const double *weights, double *shares, size_t n)
{
    double largest = 0, total = 0, lost = 0;
    for (size_t i = 0; i < n; i++)
        largest = weights[i] > largest ? weights[i] : largest;
    for (size_t i = 0; i < n; i++) {
        double relative = largest > 0 ? weights[i] / largest : 1;
        shares[i] = relative == 0 && weights[i] > 0 ? SMALLEST_SHARE : relative;
        double sum = total + shares[i], added = sum - total;
        lost += (total - (sum - added)) + (shares[i] - added); /* the rounding error of the sum (Knuth's TwoSum) */
        total = sum;
    }
    total += lost;
    for (size_t i = 0; i < n; i++) {
        double share = shares[i] / total;
        shares[i] = share == 0 && shares[i] > 0 ? SMALLEST_SHARE : share;
    }
}

/* Split a number into an odd integer below 2^53 (or 0), and the exponent of a power of two. */
static uint64_t odd_integer(double weight, int *exponent)
{
    uint64_t whole = (uint64_t)(frexp(weight, exponent) * 0x1p53);
    *exponent -= 53;
    for (; whole && whole % 2 == 0; whole /= 2)
        *exponent += 1;
    return whole;
}

static uint64_t gcd(uint64_t a, uint64_t b)
{
    while (b) {
        uint64_t rest = a % b;
        a = b;
        b = rest;
    }
    return a;
}

/* Express the weights as integers without a common divisor. Returns their sum, or 0 if it is too large. */
static uint64_t integer_weights(struct term *terms, const double *weights, size_t n)
{
    int least = INT_MAX, exponent;
    uint64_t total = 0, common = 0;
    for (size_t k = 0; k < n; k++) {
        odd_integer(weights[terms[k].rank], &exponent);
        least = exponent < least ? exponent : least;
    }
    for (size_t k = 0; k < n; k++) {
        uint64_t whole = odd_integer(weights[terms[k].rank], &exponent);
        int shift = exponent - least;
        if (shift > 61 || whole >= MAX_TOTAL >> shift)
            return 0;
        terms[k].multiplicity = whole << shift;
        common = gcd(terms[k].multiplicity, common);
    }
    for (size_t k = 0; k < n; k++) {
        terms[k].multiplicity /= common;
        total += terms[k].multiplicity;
        if (total >= MAX_TOTAL)
            return 0;
    }
    return total;
}

/* A weight in units of 2^-113 of the power of two with the exponent `greatest`. */
static u128 fixed_point_weight(double weight, int greatest)
{
    int exponent;
    double fraction = frexp(weight, &exponent);
    return greatest - exponent > 113 ? 0 : (u128)(fraction * 0x1p53) << 60 >> (greatest - exponent);
}

/* Compute the shares as fixed-point numbers of 104 bits, by long division. */
static void fixed_point_shares(struct term *terms, const double *weights, size_t n)
{
    int greatest = INT_MIN, exponent;
    u128 total = 0;
    for (size_t k = 0; k < n; k++) {
        frexp(weights[terms[k].rank], &exponent);
        greatest = exponent > greatest ? exponent : greatest;
    }
    for (size_t k = 0; k < n; k++)
        total += fixed_point_weight(weights[terms[k].rank], greatest);
    for (size_t k = 0; k < n; k++) {
        u128 share = 0, rest = fixed_point_weight(weights[terms[k].rank], greatest);
        for (int bit = 0; bit < 2 * SHARE_BITS; bit++) {
            int more = 2 * rest >= total;
            rest = 2 * rest - (more ? total : 0);
            share = 2 * share + more;
        }
        terms[k].high = (uint64_t)(share >> SHARE_BITS);
        terms[k].low = (uint64_t)share & (((uint64_t)1 << SHARE_BITS) - 1);
    }
}

/* Set the shares of the terms and, for integers, their multiplicities. Returns 0 if memory is short. */
static int init_terms(reduction *self, const double *weights, size_t n)
{
    double *shares = malloc(2 * n * sizeof *shares), *counted = shares + n;
    if (shares == NULL)
        return 0;
    normalize_weights(weights, shares, n);
    int any = 0;
    for (size_t i = 0; i < n; i++)
        any |= weights[i] > 0;
    for (size_t i = 0; i < n; i++) {
        counted[i] = any ? weights[i] : 1;
        if (shares[i] > 0) {
            self->terms[self->n].rank = i;
            self->terms[self->n++].share = shares[i];
        }
    }
    self->total = integer_weights(self->terms, counted, self->n);
    if (self->total == 0)
        fixed_point_shares(self->terms, counted, self->n);
    free(shares);
    return 1;
}

/* -- Planning */

static int is_integer(enum type type)
{
    return type < F16;
}

int reduction_exists(enum operation operation, enum type type, enum type returned)
{
    if (type == returned)
        return 1;
    if (!is_integer(type) || operation == MAX || operation == MIN)
        return 0;
    if (operation == AVG)
        return returned == F64;
    return type_sizes[type] < 8 && returned == (type == U8 || type == U16 || type == U32 ? U64 : I64);
}

void reduction_free(reduction *self)
{
    free(self);
}

static void plan_steps(reduction *self, enum operation operation)
{
    self->apply = apply_steps;
    self->work = self->type == F16 ? F32 : self->returned;
    if (operation == SUM && (self->type == C64 || self->type == C128)) {
        self->type = self->work = self->returned = self->type == C64 ? F32 : F64;
        self->n_reals = 2;
    }
    for (const struct kernels *kernels = self->kernels; kernels && !self->step; kernels = kernels->narrower)
        self->step = kernels->steps[operation][self->work];
}

/* If all weights are equal, the mean is the sum times a number. If integer weights have a small total, the mean is the
 * weighted sum divided by this total. Otherwise it is a weighted sum, with weights scaled so that the largest is 1,
 * times a number. */
static void plan_floats(reduction *self)
{
    double largest = 0, least = DBL_MAX;
    if (self->type == C64 || self->type == C128) {
        self->type = self->returned = self->type == C64 ? F32 : F64;
        self->n_reals = 2;
    }
    for (size_t k = 0; k < self->n; k++) {
        double share = self->terms[k].share;
        largest = share > largest ? share : largest;
        least = share < least ? share : least;
    }
    self->apply = apply_weights;
    self->work = self->type == F16 ? F32 : self->type;
    if (self->type == F32 && least / largest < FLT_MIN)
        self->work = F64;
    const struct floats *floats = &self->kernels->floats[self->work == F64];
    int whole = self->total && self->total <= (self->work == F64 ? (uint64_t)1 << 52 : 1 << 23);
    for (size_t k = 0; k < self->n; k++) {
        struct term *term = &self->terms[k];
        term->factor = least == largest ? 1 : whole ? (double)term->multiplicity : term->share / largest;
        if (self->type == F16 && term->factor < SMALLEST_HALF_FACTOR)
            term->factor = SMALLEST_HALF_FACTOR;
    }
    self->finish = whole && least < largest ? floats->divide : floats->multiply;
    self->scale = whole && least < largest ? (double)self->total : largest;
}

/* Integers of at most 32 bits with small integer weights have weighted sums below 2^52. Division in double precision is
 * then accurate enough to round the mean correctly. */
static void plan_integers(reduction *self)
{
    size_t size = type_sizes[self->type];
    if (size <= 4 && self->total && self->total <= (uint64_t)1 << (52 - 8 * size)) {
        self->apply = apply_weights;
        self->work = F64;
        self->finish = self->kernels->floats[1].divide;
        self->scale = (double)self->total;
        for (size_t k = 0; k < self->n; k++)
            self->terms[k].factor = (double)self->terms[k].multiplicity;
        if (self->n == 1)
            self->apply = apply_steps;
        return;
    }
    self->apply = apply_integer_mean;
    self->work = self->type == U64 ? U64 : I64;
}

reduction *reduction_create(const struct kernels *kernels, enum operation operation, enum type type,
                            enum type returned, size_t n, const double *weights)
{
    if (n == 0 || !reduction_exists(operation, type, returned))
        return NULL;
    reduction *self = calloc(1, sizeof *self + n * sizeof self->terms[0]);
    if (self == NULL)
        return NULL;
    self->kernels = kernels;
    self->type = self->work = type;
    self->returned = returned;
    self->n_reals = 1;
    if (operation != AVG) {
        int any = 0;
        for (size_t k = 0; weights != NULL && k < n; k++)
            any |= weights[k] > 0;
        for (size_t k = 0; k < n; k++)
            if (!any || weights[k] > 0)
                self->terms[self->n++].rank = k;
        plan_steps(self, operation);
    } else {
        if (!init_terms(self, weights, n)) {
            free(self);
            return NULL;
        }
        if (self->n == 1 && type == returned)
            self->apply = apply_steps; /* a copy */
        else if (is_integer(type))
            plan_integers(self);
        else
            plan_floats(self);
    }
    if (self->type != self->work)
        self->load = kernels->conversions[self->type][self->work];
    if (self->work != self->returned && self->apply != apply_integer_mean)
        self->store = kernels->conversions[self->work][self->returned];
    return self;
}

/* -- The kernels for the baseline of the architecture, which on aarch64 includes vector instructions */

#define KERNELS reductions_plain
#include "reductions_loops.h"

/* -- Conversion of float32 arrays to and from float16 or bfloat16, rounding to nearest, ties to even. A bfloat16 number
 * is the upper half of a float32 number. */

/* Compiled for several instruction sets; the dynamic linker picks the best one. */
#if defined(__x86_64__) && defined(__GLIBC__) && !defined(__clang__)
#define MULTIVERSION __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define MULTIVERSION
#endif

static inline uint16_t float_to_bfloat16(float x)
{
    uint32_t bits = bits_of(x), rounded = bits + 0x7fff + ((bits >> 16) & 1);
    return (uint16_t)(select_bits((bits & 0x7fffffff) > 0x7f800000, bits | 0x400000, rounded) >> 16);
}

MULTIVERSION
void narrow_floats(const float *restrict from, uint16_t *restrict to, size_t n, int is_bfloat16)
{
    if (is_bfloat16)
        for (size_t i = 0; i < n; i++)
            to[i] = float_to_bfloat16(from[i]);
    else
        for (size_t i = 0; i < n; i++)
            to[i] = (uint16_t)float_to_half(from[i]);
}

MULTIVERSION
void widen_floats(const uint16_t *restrict from, float *restrict to, size_t n, int is_bfloat16)
{
    if (is_bfloat16)
        for (size_t i = 0; i < n; i++)
            to[i] = float_of((uint32_t)from[i] << 16);
    else
        for (size_t i = 0; i < n; i++)
            to[i] = half_to_float(from[i]);
}

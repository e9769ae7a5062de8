/* Means of integers, exact: the sum by whole weights, in 128 bits, over the sum of the weights. Weights that are too
   long for that become shares of 104 bits, of which the upper and the lower half are summed apart. */
#include <string.h>

#include "reductions_plan.h"

#define EXACT ((int64_t)1 << 53)
#define WHOLE_BLOCK (BLOCK_BYTES / sizeof(i128))

static void add_times(i128 *sums, enum type type, const void *values, uint64_t times, size_t n)
{
    if (type == U64)
        for (size_t i = 0; i < n; i++)
            sums[i] += (i128)((const u64 *)values)[i] * times;
    else
        for (size_t i = 0; i < n; i++)
            sums[i] += (i128)((const i64 *)values)[i] * times;
}

/* The nearest integer to quotient + rest / total, of two the even one; or a floating-point number. */
static void put(void *out, enum type returned, size_t i, i128 quotient, u128 rest, u128 total)
{
    int up = 2 * rest > total || (2 * rest == total && quotient % 2 != 0);
    i128 nearest = quotient + up;
    uint64_t whole = (uint64_t)nearest;
    if (returned == F64) /* what is left is half at most: where nearly all cancels out, no digits are lost */
        ((f64 *)out)[i] = (double)nearest + (up ? -(double)(total - rest) : (double)rest) / (double)total;
    else if (size_of(returned) == 8)
        ((u64 *)out)[i] = whole;
    else if (size_of(returned) == 4)
        ((u32 *)out)[i] = (uint32_t)whole;
    else if (size_of(returned) == 2)
        ((u16 *)out)[i] = (uint16_t)whole;
    else
        ((u8 *)out)[i] = (uint8_t)whole;
}

void mean_of_sums(void *out, enum type returned, const void *sums, int64_t total, size_t length)
{
    for (size_t i = 0; i < length; i++) {
        i128 sum = ((const i128 *)sums)[i], quotient, rest;
        if (returned == F64 && sum <= EXACT && sum >= -EXACT) { /* rounded once */
            ((f64 *)out)[i] = (double)(int64_t)sum / (double)total;
            continue;
        }
        if (sum == (int64_t)sum) { /* which is divided in a tenth of the time */
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
        put(out, returned, i, quotient, (u128)rest, (u128)total);
    }
}

static void mean_of_shares(void *out, enum type returned, const i128 *high, const i128 *low, size_t n)
{
    const u128 mask = ((u128)1 << SHARE_BITS) - 1;
    for (size_t i = 0; i < n; i++) {
        i128 sum = high[i] + (low[i] >> SHARE_BITS);
        u128 rest = ((u128)sum & mask) << SHARE_BITS | ((u128)low[i] & mask);
        put(out, returned, i, sum >> SHARE_BITS, rest, (u128)1 << 2 * SHARE_BITS);
    }
}

void by_whole_weights(const reduction *one, const void *const *operands, void *const *outs, size_t n_outs,
                      size_t start, size_t n)
{
    i128 sums[WHOLE_BLOCK], low[WHOLE_BLOCK];
    char spare[BLOCK_BYTES];
    for (size_t from = 0; from < n; from += WHOLE_BLOCK) {
        size_t few = n - from < WHOLE_BLOCK ? n - from : WHOLE_BLOCK;
        memset(sums, 0, sizeof sums);
        memset(low, 0, sizeof low);
        for (size_t k = 0; k < one->n; k++) {
            const struct term *term = &one->terms[k];
            const void *values = operand(one, operands, k, start + from, few, spare);
            add_times(sums, one->type, values, one->total ? term->times : term->high, few);
            if (!one->total)
                add_times(low, one->type, values, term->low, few);
        }
        if (one->total)
            mean_of_sums(spare, one->returned, sums, (int64_t)one->total, few);
        else
            mean_of_shares(spare, one->returned, sums, low, few);
        give(one, spare, outs, n_outs, start + from, few);
    }
}

void add_to_sums(const struct kernels *kernels, void *sums, enum type type, const void *values, int64_t times,
                 double share, size_t length)
{
    char spare[BLOCK_BYTES];
    enum type work = type == F16 ? F32 : type == C64 ? F32 : type == C128 ? F64 : type;
    int real = work == F32 || work == F64;
    size_t block = BLOCK_BYTES / sizeof(int64_t), size = type == F16 ? 2 : size_of(work);
    convert_function *load = type == F16 ? kernels->conversions[F16][F32] : real ? NULL : kernels->conversions[type][I64];
    length *= type == C64 || type == C128 ? 2 : 1;
    for (size_t start = 0; start < length; start += block) {
        size_t n = length - start < block ? length - start : block;
        const void *from = (const char *)values + start * size;
        if (load != NULL) {
            load(spare, from, n);
            from = spare;
        }
        if (real)
            kernels->floats[work == F64].add_bounded((char *)sums + start * size_of(work), from, share, n);
        else
            add_times((i128 *)sums + start, type, from, (uint64_t)times, n);
    }
}

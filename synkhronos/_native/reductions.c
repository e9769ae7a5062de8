/* Reductions of blocks: results come about in a block that stays in the first cache, and go from there to the outs. So
   an operand that is an output, too, has been read before it is written. */
#include <string.h>

#include "reductions_plan.h"

static const size_t sizes[N_TYPES] = {
    [BOOL] = 1, [I8] = 1, [U8] = 1, [I16] = 2, [U16] = 2, [I32] = 4, [U32] = 4,
    [I64] = 8, [U64] = 8, [F16] = 2, [F32] = 4, [F64] = 8, [C64] = 8, [C128] = 16,
};

size_t size_of(enum type type)
{
    return sizes[type];
}

size_t reduction_item_of_result(const reduction *one)
{
    return sizes[one->returned] * one->parts;
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

void reduction_apply(const reduction *one, const void *const *operands, void *const *outs, size_t n_outs,
                     size_t length)
{
    size_t size = sizes[one->work] > sizes[one->returned] ? sizes[one->work] : sizes[one->returned];
    size_t block = BLOCK_BYTES / size;
    length *= one->parts;
    for (size_t start = 0; start < length; start += block)
        one->way(one, operands, outs, n_outs, start, length - start < block ? length - start : block);
}

const void *operand(const reduction *one, const void *const *operands, size_t k, size_t start, size_t n, void *spare)
{
    const char *from = (const char *)operands[one->terms[k].rank] + start * sizes[one->type];
    if (one->load == NULL)
        return from;
    one->load(spare, from, n);
    return spare;
}

void give(const reduction *one, const void *result, void *const *outs, size_t n_outs, size_t start, size_t n)
{
    size_t size = sizes[one->returned];
    for (size_t i = 0; i < n_outs; i++) {
        char *out = (char *)outs[i] + start * size;
        if (out != result)
            memcpy(out, result, n * size);
    }
}

void by_steps(const reduction *one, const void *const *operands, void *const *outs, size_t n_outs, size_t start,
              size_t n)
{
    char block[BLOCK_BYTES], spare[BLOCK_BYTES], stored[BLOCK_BYTES];
    const void *result = operand(one, operands, 0, start, n, block);
    for (size_t k = 1; k < one->n; k++) {
        int last = k == one->n - 1;
        void *out = last && one->store == NULL ? (char *)outs[0] + start * sizes[one->returned] : block;
        one->step(out, result, operand(one, operands, k, start, n, spare), n);
        result = out;
    }
    if (one->store != NULL) {
        one->store(stored, result, n);
        result = stored;
    }
    give(one, result, outs, n_outs, start, n);
}

/* The mean of what is not finite, once more: the sum of shares never overflows where the mean does not. */
static void mend(const reduction *one, void *means, const void *const *operands, size_t start, size_t n)
{
    char sums[BLOCK_BYTES];
    const struct floats *floats = &one->kernels->floats[one->work == F64];
    for (size_t i = 0; i < n; i++)
        if (one->work == F64)
            ((f64 *)sums)[i] = -0.0; /* which any number can be added to */
        else
            ((f32 *)sums)[i] = -0.0f;
    for (size_t k = 0; k < one->n; k++)
        floats->add_bounded(sums, operand(one, operands, k, start, n, NULL), one->terms[k].share, n);
    floats->mend(means, sums, n);
}

void by_weights(const reduction *one, const void *const *operands, void *const *outs, size_t n_outs, size_t start,
                size_t n)
{
    char block[BLOCK_BYTES], spare[BLOCK_BYTES];
    const struct floats *floats = &one->kernels->floats[one->work == F64];
    const struct term *terms = one->terms;
    const void *sum = operand(one, operands, 0, start, n, block);
    double factor = terms[0].factor;
    size_t last = one->n - 1;
    for (size_t k = 1; k < last; k++) {
        floats->weigh(block, sum, factor, operand(one, operands, k, start, n, spare), terms[k].factor, n);
        sum = block;
        factor = 1;
    }
    const void *other = operand(one, operands, last, start, n, spare);
    int mends = one->finish(block, sum, factor, other, terms[last].factor, one->by, n);
    if (mends && one->load == NULL) /* in a wider type no sum overflows */
        mend(one, block, operands, start, n);
    if (one->store != NULL)
        one->store(spare, block, n);
    give(one, one->store != NULL ? spare : block, outs, n_outs, start, n);
}

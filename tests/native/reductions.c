/* Compares the results of reductions bit by bit on all instruction sets that this processor has, while the sanitizers
 * check for accesses out of bounds. Elements are random bits: numbers of every magnitude, infinities and NaNs. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "reductions_kernels.h"

enum { MOST = 5, SETS = 3 };

static const size_t lengths[] = {0, 1, 7, 255, 4099};
static const size_t counts[] = {1, 2, 3, MOST};
static const double weights[][MOST] = {
    {1, 1, 1, 1, 1}, {3, 1, 2, 0, 7}, {0.1, 0.7, 0.3, 1e-3, 1}, {1e-300, 1, 1e300, 5e-324, 1}, {0, 0, 0, 0, 0},
    {1099511627777, 3, 2e12, 1, 5}, {0, 4, 0, 0, 0},
};
static uint64_t state = 88172645463325252u;

static uint64_t draw(void)
{
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return state;
}

static int is_nan(const unsigned char *bytes, enum type type)
{
    float f32;
    double f64;
    uint16_t f16;
    if (type == F16) {
        memcpy(&f16, bytes, 2);
        return (f16 & 0x7fff) > 0x7c00;
    }
    if (type == F32 || type == C64) {
        memcpy(&f32, bytes, 4);
        return f32 != f32;
    }
    memcpy(&f64, bytes, 8);
    return (type == F64 || type == C128) && f64 != f64;
}

/* Any two NaNs count as equal, because their payloads depend on how a compiler orders the operands of a sum. */
static int same(const unsigned char *a, const unsigned char *b, enum type type, size_t length)
{
    size_t size = type == C64 ? 4 : type == C128 ? 8 : type_sizes[type], n = length * type_sizes[type] / size;
    for (size_t i = 0; i < n; i++)
        if (memcmp(a + i * size, b + i * size, size) && !(is_nan(a + i * size, type) && is_nan(b + i * size, type)))
            return 0;
    return 1;
}

/* Returns memory that holds a copy of `n` bytes and ends with it; the copy is at an odd address if `apart` is odd. */
static unsigned char *copy_of(const unsigned char *bytes, size_t n, size_t apart)
{
    unsigned char *copy = malloc(n + apart + (n + apart == 0));
    memcpy(copy + apart, bytes, n);
    return copy;
}

/* Reduces copies of the values to new memory, or in place to all operands, and copies the first output to `result`. */
static void reduce(const struct kernels *kernels, enum operation operation, enum type type, enum type returned,
                   size_t n, const double *by, unsigned char **values, size_t length, int in_place, size_t apart,
                   unsigned char *result)
{
    unsigned char *made[MOST], *out = malloc(length * type_sizes[returned] + apart + 1);
    const void *operands[MOST];
    void *outs[MOST] = {out + apart};
    for (size_t k = 0; k < n; k++) {
        made[k] = copy_of(values[k], length * type_sizes[type], apart);
        operands[k] = made[k] + apart;
        if (in_place)
            outs[k] = made[k] + apart;
    }
    reduction *self = reduction_create(kernels, operation, type, returned, n, by);
    reduction_apply(self, operands, outs, in_place ? n : 1, length);
    reduction_free(self);
    memcpy(result, outs[0], length * type_sizes[returned]);
    for (size_t k = 0; k < n; k++) {
        if (in_place && memcmp(result, outs[k], length * type_sizes[returned]))
            abort();
        free(made[k]);
    }
    free(out);
}

static int check(const struct kernels **sets, size_t n_sets, enum operation operation, enum type type,
                 enum type returned, size_t n, const double *by, size_t length)
{
    unsigned char *values[MOST], *results[SETS];
    int failed = 0;
    for (size_t k = 0; k < n; k++) {
        values[k] = malloc(length * type_sizes[type] + 1);
        for (size_t i = 0; i < length * type_sizes[type]; i++)
            values[k][i] = type == BOOL ? draw() % 2 : draw();
    }
    for (size_t s = 0; s < n_sets; s++)
        results[s] = malloc(length * type_sizes[returned] + 1);
    for (int in_place = 0; in_place <= (type == returned); in_place++)
        for (size_t apart = 0; apart < 2; apart++)
            for (size_t s = 0; s < n_sets; s++) {
                reduce(sets[s], operation, type, returned, n, by, values, length, in_place, apart, results[s]);
                failed |= !same(results[0], results[s], returned, length);
            }
    if (failed)
        printf("operation %d, types %d and %d, %zu operands of length %zu: results differ\n", operation, type,
               returned, n, length);
    for (size_t k = 0; k < n; k++)
        free(values[k]);
    for (size_t s = 0; s < n_sets; s++)
        free(results[s]);
    return failed;
}

/* Compares running means on all instruction sets. */
static int check_sums(const struct kernels **sets, size_t n_sets, enum type type, size_t length)
{
    size_t size = type < F16 ? 16 : type == F16 ? 4 : type_sizes[type];
    unsigned char *values = malloc(length * type_sizes[type] + 1), *sums[SETS];
    int failed = 0;
    for (size_t s = 0; s < n_sets; s++)
        sums[s] = calloc(length * size + 1, 1);
    for (int round = 0; round < 3; round++) {
        for (size_t i = 0; i < length * type_sizes[type]; i++)
            values[i] = type == BOOL ? draw() % 2 : draw();
        for (size_t s = 0; s < n_sets; s++)
            add_to_sums(sets[s], sums[s], type, values, round + 1, (round + 1) / 6.0, length);
    }
    for (size_t s = 0; s < n_sets; s++) {
        enum type returned = type < F16 ? type : type == F16 ? F32 : type;
        if (type < F16) {
            unsigned char *mean = malloc(length * type_sizes[type] + 1);
            mean_of_sums(mean, type, sums[s], 6, length);
            memcpy(sums[s], mean, length * type_sizes[type]);
            free(mean);
        }
        failed |= !same(sums[0], sums[s], returned, length);
    }
    if (failed)
        printf("sums of type %d and length %zu differ\n", type, length);
    for (size_t s = 0; s < n_sets; s++)
        free(sums[s]);
    free(values);
    return failed;
}

int main(void)
{
    const struct kernels *best = reduction_kernels(), *sets[SETS] = {&reductions_plain};
    size_t n_sets = 1;
    int failed = 0;
#ifdef SYNKHRONOS_X86
    if (best != &reductions_plain)
        sets[n_sets++] = &reductions_avx2;
    if (best == &reductions_avx512)
        sets[n_sets++] = &reductions_avx512;
#endif
    size_t done = 0;
    for (int operation = 0; operation < N_OPERATIONS; operation++)
        for (int type = 0; type < N_TYPES; type++)
            for (int returned = 0; returned < N_TYPES; returned++)
                for (size_t n = 0; n < sizeof counts / sizeof *counts; n++)
                    for (size_t l = 0; l < sizeof lengths / sizeof *lengths; l++)
                        for (size_t w = 0; w < (operation == AVG ? sizeof weights / sizeof *weights : 1); w++)
                            if (reduction_exists(operation, type, returned)) {
                                failed |= check(sets, n_sets, operation, type, returned, counts[n], weights[w],
                                                lengths[l]);
                                done++;
                            }
    for (int type = 0; type < N_TYPES; type++)
        for (size_t l = 0; l < sizeof lengths / sizeof *lengths; l++)
            failed |= check_sums(sets, n_sets, type, lengths[l]);
    printf("%zu reductions on %zu instruction sets\n", done, n_sets);
    return failed;
}

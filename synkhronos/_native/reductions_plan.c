/* Making reductions: what is worked in, and what factors come of the weights. */
#include <float.h>
#include <stdlib.h>

#include "reductions_plan.h"

/* By this or less, nothing is left of a number of half precision but its sign, infinity or NaN. */
#define LEAST_HALF 0x1p-60

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
    return size_of(type) < 8 && returned == (type == U8 || type == U16 || type == U32 ? U64 : I64);
}

void reduction_free(reduction *one)
{
    free(one);
}

static void plan_steps(reduction *one, enum operation operation)
{
    one->way = by_steps;
    one->work = one->type == F16 ? F32 : one->returned;
    if (operation == SUM && (one->type == C64 || one->type == C128)) {
        one->type = one->work = one->returned = one->type == C64 ? F32 : F64;
        one->parts = 2;
    }
    for (const struct kernels *kernels = one->kernels; kernels && !one->step; kernels = kernels->narrower)
        one->step = kernels->steps[operation][one->work];
}

/* The mean is the sum times a number where all weights are equal; the sum by whole weights over their total, where it
   is exact; or the sum by weights of which the largest is 1, times a number. */
static void plan_floats(reduction *one)
{
    double largest = 0, least = DBL_MAX;
    if (one->type == C64 || one->type == C128) {
        one->type = one->returned = one->type == C64 ? F32 : F64;
        one->parts = 2;
    }
    for (size_t k = 0; k < one->n; k++) {
        double share = one->terms[k].share;
        largest = share > largest ? share : largest;
        least = share < least ? share : least;
    }
    one->way = by_weights;
    one->work = one->type == F16 ? F32 : one->type;
    if (one->type == F32 && least / largest < FLT_MIN)
        one->work = F64;
    const struct floats *floats = &one->kernels->floats[one->work == F64];
    int whole = one->total && one->total <= (one->work == F64 ? (uint64_t)1 << 52 : 1 << 23);
    for (size_t k = 0; k < one->n; k++) {
        struct term *term = &one->terms[k];
        term->factor = least == largest ? 1 : whole ? (double)term->times : term->share / largest;
        if (one->type == F16 && term->factor < LEAST_HALF)
            term->factor = LEAST_HALF;
    }
    one->finish = whole && least < largest ? floats->divide : floats->multiply;
    one->by = whole && least < largest ? (double)one->total : largest;
}

/* Short integers by small weights make sums below 2^52, which double precision divides exactly enough to be rounded. */
static void plan_integers(reduction *one)
{
    if (size_of(one->type) <= 4 && one->total && one->total <= (uint64_t)1 << (52 - 8 * size_of(one->type))) {
        one->way = by_weights;
        one->work = F64;
        one->finish = one->kernels->floats[1].divide;
        one->by = (double)one->total;
        for (size_t k = 0; k < one->n; k++)
            one->terms[k].factor = (double)one->terms[k].times;
        if (one->n == 1)
            one->way = by_steps;
        return;
    }
    one->way = by_whole_weights;
    one->work = one->type == U64 ? U64 : I64;
}

reduction *reduction_create(const struct kernels *kernels, enum operation operation, enum type type,
                            enum type returned, size_t n, const double *weights)
{
    if (n == 0 || !reduction_exists(operation, type, returned))
        return NULL;
    reduction *one = calloc(1, sizeof *one + n * sizeof one->terms[0]);
    if (one == NULL)
        return NULL;
    one->kernels = kernels;
    one->type = one->work = type;
    one->returned = returned;
    one->parts = 1;
    if (operation != AVG) {
        int any = 0;
        for (size_t k = 0; weights != NULL && k < n; k++)
            any |= weights[k] > 0;
        for (size_t k = 0; k < n; k++)
            if (!any || weights[k] > 0)
                one->terms[one->n++].rank = k;
        plan_steps(one, operation);
    } else {
        if (!weigh_terms(one, weights, n)) {
            free(one);
            return NULL;
        }
        if (one->n == 1 && type == returned)
            one->way = by_steps; /* a copy */
        else if (is_integer(type))
            plan_integers(one);
        else
            plan_floats(one);
    }
    if (one->type != one->work)
        one->load = kernels->conversions[one->type][one->work];
    if (one->work != one->returned && one->way != by_whole_weights)
        one->store = kernels->conversions[one->work][one->returned];
    return one;
}

/* Weights of averages, as shares, and as whole numbers. */
#include <limits.h>
#include <math.h>
#include <stdlib.h>

#include "reductions_plan.h"

/* Sums and products of whole weights with integers of 64 bits have less than 127. */
#define MOST ((uint64_t)1 << 62)
#define LEAST 0x1p-1074

void normalize(const double *weights, double *shares, size_t n)
{
    double largest = 0, total = 0, lost = 0;
    for (size_t i = 0; i < n; i++)
        largest = weights[i] > largest ? weights[i] : largest;
    for (size_t i = 0; i < n; i++) {
        double relative = largest > 0 ? weights[i] / largest : 1;
        shares[i] = relative == 0 && weights[i] > 0 ? LEAST : relative;
        double sum = total + shares[i], added = sum - total;
        lost += (total - (sum - added)) + (shares[i] - added); /* what rounding took */
        total = sum;
    }
    total += lost;
    for (size_t i = 0; i < n; i++) {
        double share = shares[i] / total;
        shares[i] = share == 0 && shares[i] > 0 ? LEAST : share;
    }
}

/* A number as an odd integer below 2^53, or 0, and the power of two that it is to be multiplied by. */
static uint64_t whole_part(double weight, int *exponent)
{
    uint64_t whole = (uint64_t)(frexp(weight, exponent) * 0x1p53);
    *exponent -= 53;
    for (; whole && whole % 2 == 0; whole /= 2)
        *exponent += 1;
    return whole;
}

static uint64_t divisor(uint64_t a, uint64_t b)
{
    while (b) {
        uint64_t rest = a % b;
        a = b;
        b = rest;
    }
    return a;
}

/* The weights as whole numbers without a common divisor; returns their sum, or 0 if that is too large. */
static uint64_t whole_weights(struct term *terms, const double *weights, size_t n)
{
    int least = INT_MAX, exponent;
    uint64_t total = 0, common = 0;
    for (size_t k = 0; k < n; k++) {
        whole_part(weights[terms[k].rank], &exponent);
        least = exponent < least ? exponent : least;
    }
    for (size_t k = 0; k < n; k++) {
        uint64_t whole = whole_part(weights[terms[k].rank], &exponent);
        int shift = exponent - least;
        if (shift > 61 || whole >= MOST >> shift)
            return 0;
        terms[k].times = whole << shift;
        common = divisor(terms[k].times, common);
    }
    for (size_t k = 0; k < n; k++) {
        terms[k].times /= common;
        total += terms[k].times;
        if (total >= MOST)
            return 0;
    }
    return total;
}

/* A weight in units of 2^-113 of those that have the greatest exponent. */
static u128 long_weight(double weight, int greatest)
{
    int exponent;
    double fraction = frexp(weight, &exponent);
    return greatest - exponent > 113 ? 0 : (u128)(fraction * 0x1p53) << 60 >> (greatest - exponent);
}

/* Shares of 104 bits, by long division. */
static void long_shares(struct term *terms, const double *weights, size_t n)
{
    int greatest = INT_MIN, exponent;
    u128 total = 0;
    for (size_t k = 0; k < n; k++) {
        frexp(weights[terms[k].rank], &exponent);
        greatest = exponent > greatest ? exponent : greatest;
    }
    for (size_t k = 0; k < n; k++)
        total += long_weight(weights[terms[k].rank], greatest);
    for (size_t k = 0; k < n; k++) {
        u128 share = 0, rest = long_weight(weights[terms[k].rank], greatest);
        for (int bit = 0; bit < 2 * SHARE_BITS; bit++) {
            int more = 2 * rest >= total;
            rest = 2 * rest - (more ? total : 0);
            share = 2 * share + more;
        }
        terms[k].high = (uint64_t)(share >> SHARE_BITS);
        terms[k].low = (uint64_t)share & (((uint64_t)1 << SHARE_BITS) - 1);
    }
}

int weigh_terms(reduction *one, const double *weights, size_t n)
{
    double *shares = malloc(2 * n * sizeof *shares), *counted = shares + n;
    if (shares == NULL)
        return 0;
    normalize(weights, shares, n);
    int any = 0;
    for (size_t i = 0; i < n; i++)
        any |= weights[i] > 0;
    for (size_t i = 0; i < n; i++) {
        counted[i] = any ? weights[i] : 1;
        if (shares[i] > 0) {
            one->terms[one->n].rank = i;
            one->terms[one->n++].share = shares[i];
        }
    }
    one->total = whole_weights(one->terms, counted, one->n);
    if (one->total == 0)
        long_shares(one->terms, counted, one->n);
    free(shares);
    return 1;
}

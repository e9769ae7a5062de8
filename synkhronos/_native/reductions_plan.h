/* What a reduction is made of: `reductions_plan.c` makes it, `reductions.c` applies it. */
#ifndef SYNKHRONOS_REDUCTIONS_PLAN_H
#define SYNKHRONOS_REDUCTIONS_PLAN_H

#include "reductions_kernels.h"

/* Half the bits of a long share. */
#define SHARE_BITS 52

/* An operand that counts. */
struct term {
    size_t rank;
    double share;           /* all of them sum to one */
    double factor;          /* the mean is the sum of the operands by these, over or times a number */
    uint64_t times;         /* for integers: the weight as a whole number, ... */
    uint64_t high, low;     /* ... or the share in units of 2^-52, and what is left of it in units of 2^-104 */
};

struct reduction {
    /* Writes the result of some elements, from `start` on, to the outs. */
    void (*way)(const reduction *, const void *const *, void *const *, size_t, size_t, size_t);
    const struct kernels *kernels;
    enum type type, work, returned;
    size_t parts;            /* real numbers in an element, where they are reduced one by one */
    convert_function *load;  /* from type to work; NULL if they are the same */
    convert_function *store; /* from work to returned */
    step_function *step;
    finish_function *finish;
    double by;
    uint64_t total;          /* of the times; 0 if shares take their place */
    size_t n;
    struct term terms[];
};

enum { BLOCK_BYTES = 4096 };

void by_steps(const reduction *, const void *const *, void *const *, size_t, size_t, size_t);
void by_weights(const reduction *, const void *const *, void *const *, size_t, size_t, size_t);
void by_whole_weights(const reduction *, const void *const *, void *const *, size_t, size_t, size_t);

/* The elements of operand k from `start` on, in the type that is worked in: where they are, or converted to `spare`. */
const void *operand(const reduction *one, const void *const *operands, size_t k, size_t start, size_t n, void *spare);
/* Copy a result to the outs; the first may be where it lies. */
void give(const reduction *one, const void *result, void *const *outs, size_t n_outs, size_t start, size_t n);

/* The shares of the terms, and, for integers, their whole numbers. */
int weigh_terms(reduction *one, const double *weights, size_t n);

#endif

/* Reductions of the arrays of several ranks: element by element, in the order of the ranks.

   A reduction is made once, for an operation, a dtype and weights, and then applied to blocks of any length, by any
   thread. It needs no memory but a few blocks on the stack. Its results are the same to the bit on all processors. */
#ifndef SYNKHRONOS_REDUCTIONS_H
#define SYNKHRONOS_REDUCTIONS_H

#include <stddef.h>
#include <stdint.h>

enum operation { SUM, PROD, MAX, MIN, AVG, N_OPERATIONS };
enum type { BOOL, I8, U8, I16, U16, I32, U32, I64, U64, F16, F32, F64, C64, C128, N_TYPES };

typedef struct reduction reduction;
struct kernels;

/* NULL where memory is short, or where there is no such reduction: see `reduction_exists`.

   kernels: what computes; `reduction_kernels()` are the best that this processor has.
   type, returned: of the operands, and of what is written. The same, but for sums and products of integers and
   booleans, which may be I64 or U64, and their averages, which may be F64.
   n: the number of operands.
   weights: n of them, finite and not negative. An operand of weight 0 is left out; how large a weight is counts for AVG
   alone. If all are 0 they count as equal, and, but for AVG, if there are none (NULL). */
reduction *reduction_create(const struct kernels *kernels, enum operation operation, enum type type,
                            enum type returned, size_t n, const double *weights);
int reduction_exists(enum operation operation, enum type type, enum type returned);
void reduction_free(reduction *one);
/* Bytes of an element of the outs. */
size_t reduction_item_of_result(const reduction *one);

/* Reduce n operands of as many elements, and write the result to each of the outs, at least one. These may be operands, but must not
   overlap them otherwise. Addresses need not be aligned. */
void reduction_apply(const reduction *one, const void *const *operands, void *const *outs, size_t n_outs,
                     size_t length);

const struct kernels *reduction_kernels(void);
size_t size_of(enum type type);

/* Weights that sum to one; equal ones if all are 0. None but those of 0 become 0. */
void normalize(const double *weights, double *shares, size_t n);

/* Means of arrays that come one after the other. The sums: 16 bytes for each integer; else of the type of the values,
   F32 for F16, and minus zeros at the beginning. A weight is a number of times for integers (of which all together are
   less than 2^62, and make the `total`), a share of 1 for others. `mean_of_sums` is for integers. */
void add_to_sums(const struct kernels *kernels, void *sums, enum type type, const void *values, int64_t times,
                 double share, size_t length);
void mean_of_sums(void *out, enum type returned, const void *sums, int64_t total, size_t length);

#endif

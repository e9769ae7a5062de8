/* Element-wise reductions of the arrays of several ranks, in rank order. Independent of Python.
 *
 * A reduction is created once for an operation, a dtype and weights, and then applied to arrays of any length, by any
 * thread. Apart from a few blocks on the stack, it needs no memory. Results are bitwise the same on all processors.
 */
#ifndef SYNKHRONOS_REDUCTIONS_H
#define SYNKHRONOS_REDUCTIONS_H

#include <stddef.h>
#include <stdint.h>

enum operation { SUM, PROD, MAX, MIN, AVG, N_OPERATIONS };
enum type { BOOL, I8, U8, I16, U16, I32, U32, I64, U64, F16, F32, F64, C64, C128, N_TYPES };

typedef struct reduction reduction;
struct kernels;

/* Create a reduction of `n` operands.
 *
 * kernels: the compute kernels; `reduction_kernels()` returns the fastest ones that this processor supports.
 * type, returned: the types of operands and outs. They are equal, except that sums and products of integers and
 *   booleans may return I64 or U64, and their averages may return F64.
 * weights: `n` weights, finite and not negative. An operand of weight 0 is left out. Otherwise weights matter only for
 *   AVG. If all weights are 0, they count as equal. NULL means equal weights, and is not allowed for AVG.
 *
 * Returns NULL if memory is short or there is no such reduction; see `reduction_exists`. */
reduction *reduction_create(const struct kernels *kernels, enum operation operation, enum type type,
                            enum type returned, size_t n, const double *weights);
int reduction_exists(enum operation operation, enum type type, enum type returned);
void reduction_free(reduction *self);
/* Number of bytes of an element of the outs. */
size_t reduction_result_itemsize(const reduction *self);

/* Reduce the operands, of `length` elements each, and write the result to each of the outs (at least one). An out may
 * be an operand, but must not overlap one otherwise. Addresses need not be aligned. */
void reduction_apply(const reduction *self, const void *const *operands, void *const *outs, size_t n_outs,
                     size_t length);

const struct kernels *reduction_kernels(void);
extern const size_t type_sizes[N_TYPES]; /* bytes of an element */

/* Scale weights to shares that sum to one. If all weights are 0, the shares are equal; otherwise only a weight of 0
 * gets a share of 0. */
void normalize_weights(const double *weights, double *shares, size_t n);

/* Running means of arrays that arrive one after the other.
 *
 * For integers, `sums` has 16 bytes per element, initially 0. An array counts `multiplicity` times, and the sum of all
 * multiplicities is `total` < 2^62. `mean_of_sums` divides the sums by `total`.
 *
 * For other types, `sums` has the type of the values (F32 for F16), initially -0.0. An array is multiplied by `share`,
 * and all shares sum to 1. */
void add_to_sums(const struct kernels *kernels, void *sums, enum type type, const void *values, int64_t multiplicity,
                 double share, size_t length);
void mean_of_sums(void *out, enum type returned, const void *sums, int64_t total, size_t length);

/* Convert float32 numbers to float16 or bfloat16 numbers, rounding to nearest, ties to even; and back. */
void narrow_floats(const float *from, uint16_t *to, size_t n, int is_bfloat16);
void widen_floats(const uint16_t *from, float *to, size_t n, int is_bfloat16);

#endif

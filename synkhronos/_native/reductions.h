/* Reductions of the arrays of several ranks: element by element, in the order of the ranks. Independent of Python.
 *
 * A reduction is created once for an operation, a dtype and weights, and then applied to arrays of any length, by any
 * thread. It needs no memory but a few blocks on the stack. Its results are bitwise the same on all processors.
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
 * kernels: the compute kernels; `reduction_kernels()` returns the best that this processor supports.
 * type, returned: the types of operands and outs. They are equal, except that sums and products of integers and
 *   booleans may return I64 or U64, and their averages F64.
 * weights: `n` of them, finite and not negative. An operand of weight 0 is left out. The size of a weight matters
 *   only for AVG. If all are 0 they count as equal; so they do, except for AVG, if `weights` is NULL.
 *
 * Returns NULL if memory is short or there is no such reduction; see `reduction_exists`. */
reduction *reduction_create(const struct kernels *kernels, enum operation operation, enum type type,
                            enum type returned, size_t n, const double *weights);
int reduction_exists(enum operation operation, enum type type, enum type returned);
void reduction_free(reduction *self);
/* Bytes of an element of the outs. */
size_t reduction_result_itemsize(const reduction *self);

/* Reduce the operands, of `length` elements each, and write the result to each of the outs, of which there is at least
 * one. Outs may be operands, but must not overlap them otherwise. Addresses need not be aligned. */
void reduction_apply(const reduction *self, const void *const *operands, void *const *outs, size_t n_outs,
                     size_t length);

const struct kernels *reduction_kernels(void);
size_t type_size(enum type type);

/* Scale weights so that they sum to one; equal shares if all weights are 0. Only a weight of 0 gets a share of 0. */
void normalize_weights(const double *weights, double *shares, size_t n);

/* Running means of arrays that arrive one after the other.
 *
 * `sums` has 16 bytes per element for integers; otherwise it has the type of the values (F32 for F16), initially
 * -0.0. An array counts `multiplicity` times for integers, where all multiplicities sum to `total` < 2^62, and with
 * a `share` of 1 for other types. `mean_of_sums` is for integers. */
void add_to_sums(const struct kernels *kernels, void *sums, enum type type, const void *values, int64_t multiplicity,
                 double share, size_t length);
void mean_of_sums(void *out, enum type returned, const void *sums, int64_t total, size_t length);

#endif

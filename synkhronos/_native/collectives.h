/* Collectives of the ranks: reduce or gather the arrays of all ranks, for the ranks that want the result. Independent
 * of Python.
 *
 * A collective consists of rounds. In each round a rank writes data that all others may read, and then passes a
 * barrier. Rounds alternate between two sets of buffers, so that no rank overwrites data that others still read: a rank
 * that begins round t + 2 has passed the barrier of round t + 1, at which the others arrive only after round t. In the
 * first round each rank writes a header with the addresses of its arrays.
 *
 * - Direct: if all ranks can access an array of every rank, it is used in place. To reduce it, each rank reduces its
 *   part of the elements, and writes them to the results of all ranks. After a last barrier, no rank accesses another
 *   rank's array. The caller may skip this barrier if a later one serves the same purpose.
 * - Staged: all other arrays are copied through staging buffers. Each rank copies as much as fits in its own buffer,
 *   passes the barrier, and reads the buffers of all ranks.
 *
 * All ranks make the same decisions, because these depend only on the headers and on lengths. If lengths differ between
 * ranks, so do the signatures in the headers.
 */
#ifndef SYNKHRONOS_COLLECTIVES_H
#define SYNKHRONOS_COLLECTIVES_H

#include "reductions.h"
#include <stddef.h>
#include <stdint.h>

#define STAGING_BYTES ((size_t)256 << 10) /* per rank, in each of the two sets; a core's cache holds a few of these */
#define MAX_ARRAYS 256                    /* per header */
#define SMALL_BYTES ((size_t)16 << 10)    /* smaller arrays are always staged */

/* One array of a collective. */
struct array {
    const char *send;           /* this rank's elements */
    char *recv;                 /* where to write the result; NULL: this rank does not want it */
    size_t length;              /* number of elements of `send`; the same on all ranks if they are reduced */
    size_t itemsize;            /* bytes of an element of `send` */
    size_t recv_itemsize;       /* bytes of an element of `recv` */
    const reduction *reduction; /* NULL: the array is gathered */
    const size_t *counts;       /* if gathered: the number of elements of each rank */
};

enum outcome { DONE_DIRECT, DONE, MISMATCH, FAILED = -1 };

struct collectives;

/* Bytes of shared memory needed, aligned to 64, initially all zero. */
size_t collectives_bytes(int n_ranks);

/* Returns NULL if memory is short. */
struct collectives *collectives_create(char *memory, int n_ranks, int rank);
void collectives_free(struct collectives *self);

/* Reset the rounds at the start of a message. All ranks call this. */
void collectives_restart(struct collectives *self);

struct callbacks {
    int (*barrier)(void *context);                                      /* wait for all ranks; nonzero on failure */
    int (*is_shared)(void *context, const void *first, size_t n_bytes); /* whether all ranks map this memory */
    void *context;
};

/* Run a collective.
 *
 * signature: must be the same on all ranks. Otherwise all ranks return MISMATCH, and no result is written.
 * skip_last_barrier: return as soon as this rank has done its own part. The results are complete, and other ranks no
 *   longer access this rank's arrays, when the next collective has passed a barrier.
 *
 * Returns DONE_DIRECT if any array was reduced or gathered directly, DONE if none was, and FAILED if a barrier
 * failed. After a failure the results are undefined. */
enum outcome collectives_run(struct collectives *self, const struct array *arrays, size_t n, int64_t signature,
                             int skip_last_barrier, const struct callbacks *callbacks);

#endif

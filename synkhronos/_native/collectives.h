/* Collectives of the ranks: arrays of all ranks are reduced or gathered, for those ranks that want the result.
 * Independent of Python.
 *
 * A collective proceeds in rounds. In a round each rank publishes data for all others to read, and then passes a
 * barrier. There are two sets of buffers, which rounds use alternately: a rank that reaches round t + 2 has passed the
 * barrier of round t + 1, which the others reach only when they are done with round t. The first round publishes a
 * header, which says where the arrays lie.
 *
 * - Direct: if all ranks can access an array of every rank, it is read where it lies. To reduce it, each rank reduces
 *   its share of the elements and writes them to every result. A last barrier follows, after which no rank accesses
 *   another rank's array any more; the caller may skip it if a later barrier serves as well.
 * - Staged: everything else is copied through staging buffers. Each rank copies as much as fits in its own buffer,
 *   passes the barrier, and reads the buffers of all ranks.
 *
 * All ranks take the same decisions, because these depend only on the headers and on lengths. Lengths are the same on
 * all ranks, or else the signatures in the headers differ.
 */
#ifndef SYNKHRONOS_COLLECTIVES_H
#define SYNKHRONOS_COLLECTIVES_H

#include "reductions.h"
#include <stddef.h>
#include <stdint.h>

#define STAGING_BYTES ((size_t)256 << 10) /* of a rank, in each of the two sets; a core's cache holds a few */
#define MAX_ARRAYS 256                    /* that one header describes */
#define SMALL_BYTES ((size_t)16 << 10)    /* smaller arrays are always staged */

/* One array of a collective. */
struct array {
    const char *send;           /* this rank's elements */
    char *recv;                 /* where to write the result; NULL: this rank does not want it */
    size_t length;              /* elements of `send`; the same on all ranks if they are reduced */
    size_t itemsize;            /* bytes of an element of `send` */
    size_t recv_itemsize;       /* bytes of an element of `recv` */
    const reduction *reduction; /* NULL: the array is gathered */
    const size_t *counts;       /* if gathered: the elements of each rank */
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
    int (*barrier)(void *context);                                      /* wait for all ranks; not 0 on failure */
    int (*is_shared)(void *context, const void *first, size_t n_bytes); /* whether all ranks map this memory */
    void *context;
};

/* Run a collective.
 *
 * signature: must be the same on all ranks. Otherwise all ranks return MISMATCH, and no result is written.
 * skip_last_barrier: return when this rank's own share is done. Results are complete, and arrays no longer accessed
 *   by other ranks, when the next collective has passed a barrier.
 *
 * Returns DONE_DIRECT if any array was reduced or gathered directly, DONE if none was, and FAILED if a barrier
 * failed, in which case the results are undefined. */
enum outcome collectives_run(struct collectives *self, const struct array *arrays, size_t n, int64_t signature,
                             int skip_last_barrier, const struct callbacks *callbacks);

#endif

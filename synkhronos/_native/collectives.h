/* Collectives of the ranks: what each of them has of some arrays, reduced or gathered, for those that want the result.
 * Knows nothing of Python.
 *
 * A collective goes by turns. In a turn each rank publishes something for all to read, and meets the others. There are
 * two places to publish in, which turns use alternately: who is at turn t + 2 has met at turn t + 1 those that are done
 * with turn t. The first turn publishes a note: where the arrays lie.
 *
 * - What all ranks have in memory that all map, is reduced where it lies: each rank does its part of the elements, and
 *   writes it to every result. In the end all meet once more, for then nobody reads or writes what is another's; what
 *   comes next may see to that.
 * - Everything else goes through lanes: a rank copies as much as its lane holds, meets the others, and reads all lanes.
 *
 * All ranks come to the same decisions, because these depend on nothing but the notes, and on lengths, which are the same
 * on all ranks or the notes differ.
 */
#ifndef SYNKHRONOS_COLLECTIVES_H
#define SYNKHRONOS_COLLECTIVES_H

#include "reductions.h"
#include <stddef.h>
#include <stdint.h>

#define LANE_BYTES ((size_t)256 << 10) /* of a rank, in each of the two places; a core's own cache holds some lanes */
#define MOST_PARTS 256                 /* arrays that one note tells of */
#define SMALL_BYTES ((size_t)16 << 10) /* arrays of fewer bytes go through lanes, wherever they lie */

/* One array of a collective. */
struct part {
    const char *from;           /* what this rank has */
    char *to;                   /* where it wants the result; NULL: nowhere */
    size_t length;              /* elements: of all ranks the same, if they are reduced; of this one, if gathered */
    size_t item;                /* bytes of an element */
    size_t item_of_result;
    const reduction *reduction; /* NULL: to be gathered */
    const size_t *lengths;      /* to be gathered: the elements of each rank */
};

enum outcome { DONE_DIRECTLY, DONE, DIFFERENT, FAILED = -1 };

struct collectives;

/* Bytes of shared memory, at a multiple of 64, at first all zero. */
size_t collectives_bytes(int n_ranks);

/* NULL if memory is short. */
struct collectives *collectives_create(char *memory, int n_ranks, int rank);
void collectives_free(struct collectives *self);

/* All ranks call this when they begin with a message. */
void collectives_restart(struct collectives *self);

/* What a collective asks of its caller. */
struct caller {
    int (*meet)(void *context);                                         /* arrive and wait for all; not 0 if that fails */
    int (*is_shared)(void *context, const void *first, size_t n_bytes); /* whether all ranks map this */
    void *context;
};

/* Carry out a collective. `signature` tells what must be the same on all ranks: if it is not, nothing is changed
 * (DIFFERENT, on all ranks). DONE_DIRECTLY: arrays that all map were reduced, or gathered, where they lie. FAILED: the
 * ranks could not meet, and results hold anything. `is_open`: the ranks do not meet in the end, so that each goes on when
 * its own part is done; results are complete, and arrays nobody else's, when the next collective has met. */
enum outcome collectives_run(struct collectives *self, const struct part *parts, size_t n, int64_t signature, int is_open,
                             const struct caller *caller);

#endif

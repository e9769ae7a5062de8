/* What the files of the collectives share. */
#ifndef SYNKHRONOS_COLLECTIVES_INSIDE_H
#define SYNKHRONOS_COLLECTIVES_INSIDE_H

#include "collectives.h"

#define LINE 64

/* Where the arrays of a rank lie; 0: not in memory that all map. The addresses are the same in all ranks. */
struct note {
    int64_t signature;
    uintptr_t from[MOST_PARTS], to[MOST_PARTS];
};

#define NOWHERE ((uintptr_t)1) /* no result is wanted, or there are no elements */

/* Elements of a part that are published in a lane. */
struct piece {
    size_t part, start, stop, place;
};

struct collectives {
    struct note *notes; /* of each rank, in each of the two places */
    char *lanes;
    int n_ranks, rank;
    unsigned turn;
    struct piece pieces[MOST_PARTS];
    size_t n_pieces;
    const void **operands;
    void **outs;
};

/* Which piece comes next. */
struct cursor {
    size_t part, start;
};

static inline size_t aligned(size_t n_bytes)
{
    return (n_bytes + LINE - 1) / LINE * LINE;
}

/* The most elements that any rank has of a part. */
size_t longest(const struct collectives *self, const struct part *part);

/* Publish pieces of the parts that are `through` lanes, from the cursor on, until the lane is full. */
void publish(struct collectives *self, const struct part *parts, const char *through, size_t n, struct cursor *cursor);

/* Make the results of what all have published in lanes at a turn. */
void combine(struct collectives *self, unsigned turn, const struct part *parts);

/* Copy what each rank has, from element `start` to `stop` of it at most, to its place among all. The operands point to
 * element `start`. */
void gather(const struct collectives *self, const struct part *part, size_t start, size_t stop);

#endif

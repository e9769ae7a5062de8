/* Rounds of a collective, direct reductions, and staging. See collectives.h. */
#include "collectives.h"

#include <stdlib.h>
#include <string.h>

#define CACHE_LINE 64

/* The header of a rank: the addresses of its arrays, which are the same in all ranks. 0: other ranks cannot access the
 * array. */
struct header {
    int64_t signature;
    uintptr_t send[MAX_ARRAYS], recv[MAX_ARRAYS];
};

#define NONE ((uintptr_t)1) /* the rank wants no result, or the array has no elements */

/* A range of elements of an array that is staged in one round; `offset` is in bytes from the start of the buffer. */
struct chunk {
    size_t array, start, stop, offset;
};

struct collectives {
    struct header *headers; /* for each rank, in each of the two sets */
    char *staging;
    int n_ranks, rank;
    unsigned round;
    struct chunk chunks[MAX_ARRAYS];
    size_t n_chunks;
    const void **operands;
    void **outs;
};

/* The position of the next chunk. */
struct cursor {
    size_t array, start;
};

static inline size_t align(size_t n_bytes)
{
    return (n_bytes + CACHE_LINE - 1) / CACHE_LINE * CACHE_LINE;
}

/* The largest number of elements that any rank has of an array. */
static size_t max_length(const struct collectives *self, const struct array *array)
{
    size_t most = array->length;
    for (int rank = 0; array->reduction == NULL && rank < self->n_ranks; rank++)
        if (array->counts[rank] > most)
            most = array->counts[rank];
    return most;
}

size_t collectives_bytes(int n_ranks)
{
    return 2 * (size_t)n_ranks * (align(sizeof(struct header)) + STAGING_BYTES);
}

struct collectives *collectives_create(char *memory, int n_ranks, int rank)
{
    struct collectives *self = calloc(1, sizeof *self);
    if (self == NULL)
        return NULL;
    self->headers = (struct header *)memory;
    self->staging = memory + 2 * (size_t)n_ranks * align(sizeof(struct header));
    self->n_ranks = n_ranks;
    self->rank = rank;
    self->operands = calloc((size_t)n_ranks, sizeof *self->operands);
    self->outs = calloc((size_t)n_ranks, sizeof *self->outs);
    if (self->operands != NULL && self->outs != NULL)
        return self;
    collectives_free(self);
    return NULL;
}

void collectives_free(struct collectives *self)
{
    free(self->operands);
    free(self->outs);
    free(self);
}

void collectives_restart(struct collectives *self)
{
    self->round = 0;
}

static struct header *header_of(const struct collectives *self, unsigned round, int rank)
{
    char *first = (char *)self->headers;
    size_t index = (round & 1) * (size_t)self->n_ranks + (size_t)rank;
    return (struct header *)(first + index * align(sizeof(struct header)));
}

static int is_small(const struct collectives *self, const struct array *array)
{
    return max_length(self, array) * array->itemsize < SMALL_BYTES;
}

static void write_header(struct collectives *self, const struct array *arrays, size_t n, int64_t signature,
                         const struct callbacks *callbacks)
{
    struct header *header = header_of(self, self->round, self->rank);
    header->signature = signature;
    for (size_t i = 0; i < n; i++) {
        const struct array *array = &arrays[i];
        size_t n_bytes = array->length * array->itemsize, n_recv = array->length * array->recv_itemsize;
        header->send[i] = header->recv[i] = 0;
        if (is_small(self, array))
            continue;
        if (n_bytes == 0)
            header->send[i] = NONE;
        else if (callbacks->is_shared(callbacks->context, array->send, n_bytes))
            header->send[i] = (uintptr_t)array->send;
        if (array->recv == NULL || array->reduction == NULL)
            header->recv[i] = NONE;
        else if (callbacks->is_shared(callbacks->context, array->recv, n_recv))
            header->recv[i] = (uintptr_t)array->recv;
    }
}

/* Whether all ranks can read all operands of an array and write all its results. */
static int is_direct(const struct collectives *self, unsigned round, size_t i)
{
    for (int rank = 0; rank < self->n_ranks; rank++)
        if (header_of(self, round, rank)->send[i] == 0 || header_of(self, round, rank)->recv[i] == 0)
            return 0;
    return 1;
}

static int is_mismatch(const struct collectives *self, unsigned round)
{
    for (int rank = 1; rank < self->n_ranks; rank++)
        if (header_of(self, round, rank)->signature != header_of(self, round, 0)->signature)
            return 1;
    return 0;
}

/* -- Staging: arrays that other ranks cannot access are copied, chunk by chunk, to memory that they can access */

static char *staging_of(const struct collectives *self, unsigned round, int rank)
{
    return self->staging + ((round & 1) * (size_t)self->n_ranks + (size_t)rank) * STAGING_BYTES;
}

/* Copy the next chunks of the staged arrays, from the cursor on, to this rank's buffer until it is full. */
static void stage_next(struct collectives *self, const struct array *arrays, const char *is_staged, size_t n,
                       struct cursor *cursor)
{
    char *buffer = staging_of(self, self->round, self->rank);
    size_t used = 0;
    self->n_chunks = 0;
    for (; cursor->array < n; cursor->array++, cursor->start = 0) {
        const struct array *array = &arrays[cursor->array];
        size_t length = max_length(self, array);
        while (is_staged[cursor->array] && cursor->start < length) {
            size_t room = (STAGING_BYTES - used) / array->itemsize, stop = length;
            if (room == 0 || self->n_chunks == MAX_ARRAYS)
                return;
            if (stop - cursor->start > room)
                stop = cursor->start + room;
            size_t own = array->length < stop ? array->length : stop;
            if (own > cursor->start)
                memcpy(buffer + used, array->send + cursor->start * array->itemsize,
                       (own - cursor->start) * array->itemsize);
            self->chunks[self->n_chunks++] = (struct chunk){cursor->array, cursor->start, stop, used};
            used += align((stop - cursor->start) * array->itemsize);
            if (used > STAGING_BYTES)
                used = STAGING_BYTES;
            cursor->start = stop;
        }
    }
}

/* Copy the elements from `start` to `stop` (exclusive) of each rank to the result. The operands point to element
 * `start`. */
static void gather(const struct collectives *self, const struct array *array, size_t start, size_t stop)
{
    size_t first = 0;
    for (int rank = 0; rank < self->n_ranks; rank++) {
        size_t last = array->counts[rank] < stop ? array->counts[rank] : stop;
        if (last > start)
            memcpy(array->recv + (first + start) * array->itemsize, self->operands[rank],
                   (last - start) * array->itemsize);
        first += array->counts[rank];
    }
}

/* Reduce or gather the chunks that all ranks have staged in a round. */
static void combine(struct collectives *self, unsigned round, const struct array *arrays)
{
    for (size_t k = 0; k < self->n_chunks; k++) {
        const struct chunk *chunk = &self->chunks[k];
        const struct array *array = &arrays[chunk->array];
        if (array->recv == NULL)
            continue;
        for (int rank = 0; rank < self->n_ranks; rank++)
            self->operands[rank] = staging_of(self, round, rank) + chunk->offset;
        if (array->reduction == NULL) {
            gather(self, array, chunk->start, chunk->stop);
        } else {
            void *out = array->recv + chunk->start * array->recv_itemsize;
            reduction_apply(array->reduction, self->operands, &out, 1, chunk->stop - chunk->start);
        }
    }
}

/* -- Rounds */

/* Repeat rounds until all staged arrays are done. */
static int run_staged(struct collectives *self, const struct array *arrays, const char *is_staged, size_t n,
                      struct cursor *cursor, const struct callbacks *callbacks)
{
    for (;;) {
        stage_next(self, arrays, is_staged, n, cursor);
        if (self->n_chunks == 0)
            return 0;
        if (callbacks->barrier(callbacks->context))
            return -1;
        combine(self, self->round++, arrays);
    }
}

/* Reduce this rank's part of the elements into the results of all ranks. Parts consist of full cache lines, so that no
 * two ranks write to the same line of an aligned array. */
static void reduce_direct(struct collectives *self, unsigned round, const struct array *array, size_t i)
{
    size_t unit = CACHE_LINE / array->itemsize, n_ranks = (size_t)self->n_ranks;
    size_t share = (array->length + n_ranks * unit - 1) / (n_ranks * unit) * unit;
    size_t start = share * (size_t)self->rank, stop = start + share < array->length ? start + share : array->length;
    size_t n_outs = 0;
    for (int rank = 0; rank < self->n_ranks; rank++) {
        const struct header *header = header_of(self, round, rank);
        self->operands[rank] = (const char *)header->send[i] + start * array->itemsize;
        if (header->recv[i] != NONE)
            self->outs[n_outs++] = (char *)header->recv[i] + start * array->recv_itemsize;
    }
    if (start < stop && n_outs > 0)
        reduction_apply(array->reduction, self->operands, self->outs, n_outs, stop - start);
}

static enum outcome run(struct collectives *self, const struct array *arrays, size_t n, int64_t signature,
                        int skip_last_barrier, const struct callbacks *callbacks)
{
    char is_staged[MAX_ARRAYS];
    struct cursor small = {0, 0}, rest = {0, 0};
    unsigned first = self->round;
    int any_direct = 0;
    for (size_t i = 0; i < n; i++)
        is_staged[i] = (char)is_small(self, &arrays[i]);
    write_header(self, arrays, n, signature, callbacks);
    stage_next(self, arrays, is_staged, n, &small);
    if (callbacks->barrier(callbacks->context))
        return FAILED;
    if (is_mismatch(self, first)) {
        self->round++;
        return MISMATCH;
    }
    /* Read the headers before the barrier of the next round, because a rank may overwrite them after it. */
    char direct[MAX_ARRAYS];
    for (size_t i = 0; i < n; i++) {
        direct[i] = (char)(!is_staged[i] && is_direct(self, first, i));
        any_direct |= direct[i];
    }
    combine(self, self->round, arrays);
    for (size_t i = 0; i < n; i++) {
        if (direct[i] && arrays[i].reduction != NULL) {
            reduce_direct(self, first, &arrays[i], i);
        } else if (direct[i] && arrays[i].recv != NULL) {
            for (int rank = 0; rank < self->n_ranks; rank++)
                self->operands[rank] = (const void *)header_of(self, first, rank)->send[i];
            gather(self, &arrays[i], 0, max_length(self, &arrays[i]));
        }
    }
    self->round++;
    if (run_staged(self, arrays, is_staged, n, &small, callbacks))
        return FAILED;
    for (size_t i = 0; i < n; i++)
        is_staged[i] = !is_staged[i] && !direct[i];
    if (run_staged(self, arrays, is_staged, n, &rest, callbacks))
        return FAILED;
    if (any_direct && !skip_last_barrier && callbacks->barrier(callbacks->context))
        return FAILED;
    return any_direct ? DONE_DIRECT : DONE;
}

enum outcome collectives_run(struct collectives *self, const struct array *arrays, size_t n, int64_t signature,
                             int skip_last_barrier, const struct callbacks *callbacks)
{
    enum outcome outcome = DONE;
    for (size_t start = 0; start == 0 || start < n; start += MAX_ARRAYS) {
        size_t batch = n - start < MAX_ARRAYS ? n - start : MAX_ARRAYS;
        enum outcome one = run(self, arrays + start, batch, signature, skip_last_barrier, callbacks);
        if (one == FAILED || one == MISMATCH)
            return one;
        if (one == DONE_DIRECT)
            outcome = one;
    }
    return outcome;
}

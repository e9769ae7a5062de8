/* The turns of a collective, and what is reduced where it lies. */
#include "collectives_internal.h"

#include <stdlib.h>

size_t collectives_bytes(int n_ranks)
{
    return 2 * (size_t)n_ranks * (aligned(sizeof(struct note)) + LANE_BYTES);
}

struct collectives *collectives_create(char *memory, int n_ranks, int rank)
{
    struct collectives *self = calloc(1, sizeof *self);
    if (self == NULL)
        return NULL;
    self->notes = (struct note *)memory;
    self->lanes = memory + 2 * (size_t)n_ranks * aligned(sizeof(struct note));
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
    self->turn = 0;
}

static struct note *note_of(const struct collectives *self, unsigned turn, int rank)
{
    char *first = (char *)self->notes;
    return (struct note *)(first + ((turn & 1) * (size_t)self->n_ranks + (size_t)rank) * aligned(sizeof(struct note)));
}

static int is_small(const struct collectives *self, const struct part *part)
{
    return longest(self, part) * part->item < SMALL_BYTES;
}

static void write_note(struct collectives *self, const struct part *parts, size_t n, int64_t signature,
                       const struct caller *caller)
{
    struct note *note = note_of(self, self->turn, self->rank);
    note->signature = signature;
    for (size_t i = 0; i < n; i++) {
        const struct part *part = &parts[i];
        size_t n_bytes = part->length * part->item, n_result = part->length * part->item_of_result;
        note->from[i] = note->to[i] = 0;
        if (is_small(self, part))
            continue;
        if (n_bytes == 0)
            note->from[i] = NOWHERE;
        else if (caller->is_shared(caller->context, part->from, n_bytes))
            note->from[i] = (uintptr_t)part->from;
        if (part->to == NULL || part->reduction == NULL)
            note->to[i] = NOWHERE;
        else if (caller->is_shared(caller->context, part->to, n_result))
            note->to[i] = (uintptr_t)part->to;
    }
}

/* Whether all ranks see all of a part, and may write its results. */
static int is_direct(const struct collectives *self, unsigned turn, size_t i)
{
    for (int rank = 0; rank < self->n_ranks; rank++)
        if (note_of(self, turn, rank)->from[i] == 0 || note_of(self, turn, rank)->to[i] == 0)
            return 0;
    return 1;
}

static int is_different(const struct collectives *self, unsigned turn)
{
    for (int rank = 1; rank < self->n_ranks; rank++)
        if (note_of(self, turn, rank)->signature != note_of(self, turn, 0)->signature)
            return 1;
    return 0;
}

static int through_lanes(struct collectives *self, const struct part *parts, const char *through, size_t n,
                         struct cursor *cursor, const struct caller *caller)
{
    for (;;) {
        publish(self, parts, through, n, cursor);
        if (self->n_pieces == 0)
            return 0;
        if (caller->meet(caller->context))
            return -1;
        combine(self, self->turn++, parts);
    }
}

/* This rank's part of the elements, in whole lines, to the results of all ranks. */
static void reduce_directly(struct collectives *self, unsigned turn, const struct part *part, size_t i)
{
    size_t unit = LINE / part->item, n_ranks = (size_t)self->n_ranks;
    size_t share = (part->length + n_ranks * unit - 1) / (n_ranks * unit) * unit;
    size_t start = share * (size_t)self->rank, stop = start + share < part->length ? start + share : part->length;
    size_t n_outs = 0;
    for (int rank = 0; rank < self->n_ranks; rank++) {
        const struct note *note = note_of(self, turn, rank);
        self->operands[rank] = (const char *)note->from[i] + start * part->item;
        if (note->to[i] != NOWHERE)
            self->outs[n_outs++] = (char *)note->to[i] + start * part->item_of_result;
    }
    if (start < stop && n_outs > 0)
        reduction_apply(part->reduction, self->operands, self->outs, n_outs, stop - start);
}

static enum outcome run(struct collectives *self, const struct part *parts, size_t n, int64_t signature, int is_open,
                        const struct caller *caller)
{
    char through[MOST_PARTS];
    struct cursor small = {0, 0}, rest = {0, 0};
    unsigned first = self->turn;
    int any_direct = 0;
    for (size_t i = 0; i < n; i++)
        through[i] = (char)is_small(self, &parts[i]);
    write_note(self, parts, n, signature, caller);
    publish(self, parts, through, n, &small);
    if (caller->meet(caller->context))
        return FAILED;
    if (is_different(self, first)) {
        self->turn++;
        return DIFFERENT;
    }
    /* the notes are read before the next turn, after which another may come in their place */
    char direct[MOST_PARTS];
    for (size_t i = 0; i < n; i++) {
        direct[i] = (char)(!through[i] && is_direct(self, first, i));
        any_direct |= direct[i];
    }
    combine(self, self->turn, parts);
    for (size_t i = 0; i < n; i++) {
        if (direct[i] && parts[i].reduction != NULL) {
            reduce_directly(self, first, &parts[i], i);
        } else if (direct[i] && parts[i].to != NULL) {
            for (int rank = 0; rank < self->n_ranks; rank++)
                self->operands[rank] = (const void *)note_of(self, first, rank)->from[i];
            gather(self, &parts[i], 0, longest(self, &parts[i]));
        }
    }
    self->turn++;
    if (through_lanes(self, parts, through, n, &small, caller))
        return FAILED;
    for (size_t i = 0; i < n; i++)
        through[i] = !through[i] && !direct[i];
    if (through_lanes(self, parts, through, n, &rest, caller))
        return FAILED;
    if (any_direct && !is_open && caller->meet(caller->context))
        return FAILED;
    return any_direct ? DONE_DIRECTLY : DONE;
}

enum outcome collectives_run(struct collectives *self, const struct part *parts, size_t n, int64_t signature, int is_open,
                             const struct caller *caller)
{
    enum outcome outcome = DONE;
    for (size_t start = 0; start == 0 || start < n; start += MOST_PARTS) {
        size_t some = n - start < MOST_PARTS ? n - start : MOST_PARTS;
        enum outcome one = run(self, parts + start, some, signature, is_open, caller);
        if (one == FAILED || one == DIFFERENT)
            return one;
        if (one == DONE_DIRECTLY)
            outcome = one;
    }
    return outcome;
}

/* Lanes: what ranks cannot see of each other is copied to where they can, piece by piece. */
#include "collectives_internal.h"

#include <string.h>

size_t longest(const struct collectives *self, const struct part *part)
{
    size_t most = part->length;
    for (int rank = 0; part->reduction == NULL && rank < self->n_ranks; rank++)
        if (part->lengths[rank] > most)
            most = part->lengths[rank];
    return most;
}

static char *lane_of(const struct collectives *self, unsigned turn, int rank)
{
    return self->lanes + ((turn & 1) * (size_t)self->n_ranks + (size_t)rank) * LANE_BYTES;
}

void publish(struct collectives *self, const struct part *parts, const char *through, size_t n, struct cursor *cursor)
{
    char *lane = lane_of(self, self->turn, self->rank);
    size_t used = 0;
    self->n_pieces = 0;
    for (; cursor->part < n; cursor->part++, cursor->start = 0) {
        const struct part *part = &parts[cursor->part];
        size_t length = longest(self, part);
        while (through[cursor->part] && cursor->start < length) {
            size_t room = (LANE_BYTES - used) / part->item, stop = length;
            if (room == 0 || self->n_pieces == MOST_PARTS)
                return;
            if (stop - cursor->start > room)
                stop = cursor->start + room;
            size_t own = part->length < stop ? part->length : stop;
            if (own > cursor->start)
                memcpy(lane + used, part->from + cursor->start * part->item, (own - cursor->start) * part->item);
            self->pieces[self->n_pieces++] = (struct piece){cursor->part, cursor->start, stop, used};
            used += aligned((stop - cursor->start) * part->item);
            if (used > LANE_BYTES)
                used = LANE_BYTES;
            cursor->start = stop;
        }
    }
}

void gather(const struct collectives *self, const struct part *part, size_t start, size_t stop)
{
    size_t first = 0;
    for (int rank = 0; rank < self->n_ranks; rank++) {
        size_t last = part->lengths[rank] < stop ? part->lengths[rank] : stop;
        if (last > start)
            memcpy(part->to + (first + start) * part->item, self->operands[rank], (last - start) * part->item);
        first += part->lengths[rank];
    }
}

void combine(struct collectives *self, unsigned turn, const struct part *parts)
{
    for (size_t k = 0; k < self->n_pieces; k++) {
        const struct piece *piece = &self->pieces[k];
        const struct part *part = &parts[piece->part];
        if (part->to == NULL)
            continue;
        for (int rank = 0; rank < self->n_ranks; rank++)
            self->operands[rank] = lane_of(self, turn, rank) + piece->place;
        if (part->reduction == NULL) {
            gather(self, part, piece->start, piece->stop);
        } else {
            void *out = part->to + piece->start * part->item_of_result;
            reduction_apply(part->reduction, self->operands, &out, 1, piece->stop - piece->start);
        }
    }
}

/* Addresses of a region that have no memory: found by the first that fits, joined with their neighbours again. */
#include "heap_internal.h"
#include <stdlib.h>
#include <string.h>

void extents_give(struct extents *all, size_t start, size_t n_pages)
{
    size_t low = 0, high = all->n;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (all->list[middle].start < start)
            low = middle + 1;
        else
            high = middle;
    }
    struct extent *before = low > 0 ? &all->list[low - 1] : NULL;
    struct extent *after = low < all->n ? &all->list[low] : NULL;
    int joins_before = before != NULL && before->start + before->n_pages == start;
    int joins_after = after != NULL && start + n_pages == after->start;
    if (joins_before && joins_after) {
        before->n_pages += n_pages + after->n_pages;
        all->n--;
        memmove(after, after + 1, (all->n - low) * sizeof *after);
    } else if (joins_before) {
        before->n_pages += n_pages;
    } else if (joins_after) {
        after->start = start;
        after->n_pages += n_pages;
    } else {
        if (all->n == all->room) {
            size_t room = all->room ? 2 * all->room : 64;
            struct extent *list = realloc(all->list, room * sizeof *list);
            if (list == NULL)
                return; /* these addresses are lost; they hold no memory */
            all->list = list;
            all->room = room;
        }
        memmove(&all->list[low + 1], &all->list[low], (all->n - low) * sizeof *all->list);
        all->list[low] = (struct extent){start, n_pages};
        all->n++;
    }
}

/* Where a block of so many pages can lie, at a multiple of `alignment`; 0 if nowhere. Low addresses first, so that what is
used stays together. */
int extents_take(struct extents *all, size_t n_pages, size_t alignment, size_t *start)
{
    for (size_t i = 0; i < all->n; i++) {
        struct extent found = all->list[i];
        *start = (found.start + alignment - 1) / alignment * alignment;
        size_t lead = *start - found.start;
        if (found.n_pages < lead + n_pages)
            continue;
        size_t rest = found.n_pages - lead - n_pages;
        if (lead > 0 && rest > 0) {
            all->list[i].n_pages = lead;
            extents_give(all, *start + n_pages, rest);
        } else if (lead > 0) {
            all->list[i].n_pages = lead;
        } else if (rest > 0) {
            all->list[i] = (struct extent){*start + n_pages, rest};
        } else {
            all->n--;
            memmove(&all->list[i], &all->list[i + 1], (all->n - i) * sizeof found);
        }
        return 1;
    }
    return 0;
}

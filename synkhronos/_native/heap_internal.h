/* What the files of the regions share. */
#ifndef SYNKHRONOS_REGIONS_INSIDE_H
#define SYNKHRONOS_REGIONS_INSIDE_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "descriptors.h"
#include "heap.h"
#include <pthread.h>
#include <stdatomic.h>
#include <sys/types.h>

/* Addresses without memory: sorted, no two of them neighbours; counted in pages from the start of the region. */
struct extent {
    size_t start, n_pages;
};
struct extents {
    struct extent *list;
    size_t n, room;
};

int extents_take(struct extents *all, size_t n_pages, size_t alignment, size_t *start);
void extents_give(struct extents *all, size_t start, size_t n_pages);

/* Freed blocks of one size, with their pages; the one that was freed last is used first. */
struct cache {
    size_t *starts;
    size_t n, room;
    size_t idle; /* the fewest that there were since blocks were last given back: none of these was needed */
};


/* Sizes are quarters between powers of two, 4, 5, 6, 7, 8, 10, 12, … pages, so that at most a fifth of a block is
waste. */
#define N_SIZES 160

struct own_count {
    _Alignas(64) _Atomic uint64_t in_use, kept, largest;
};

/* A copy of live blocks that lie side by side. */
struct copied {
    char *place, *copy;
    size_t n_bytes;
};

struct regions {
    char *base; /* the first region; before it, in the same file, a page of counts */
    _Atomic size_t size; /* of each; 0 once they are unmapped */
    int n_ranks, rank;
    struct descriptor file; /* none: pages are private */
    int is_shared;
    int is_closed;
    int *is_mine; /* 1 in the process that has taken the region `rank`; the kernel makes it 0 in what that forks */
    struct own_count *counts;

    pthread_mutex_t lock; /* of what follows */
    struct extents empty;
    struct cache caches[N_SIZES];
    uint8_t *sizes; /* for each page of the own region: 0, or 1 + the size of the live block that begins there */
    size_t top;     /* pages that were ever used */
    size_t keep;    /* most bytes that are kept */
    size_t granted, allowed;
    unsigned commands;
    int is_busy;             /* with a command */
    uint64_t n_begun, n_seen; /* commands; those that the thread of regions_idle.c knows of */

    struct copied *copies; /* between regions_before_fork and regions_after_fork */
    size_t n_copies;
    struct regions *next; /* of all that this process has */
};

size_t pages_of(unsigned number); /* in pages */
unsigned number_of(size_t n_bytes);
int regions_reserve(const struct regions *all, char *first, size_t n_bytes);
int regions_punch(const struct regions *all, size_t start, size_t n_bytes);
void regions_unmap(struct regions *all);
void forks_know(struct regions *all);
void forks_forget(struct regions *all);
struct regions *forks_lock(void); /* all regions, which nobody unmaps meanwhile */
void forks_unlock(void);
void regions_shed_all(struct regions *all);
void idle_begin(void);
void idle_forked(void);

static inline char *own_base(const struct regions *all)
{
    return all->base + all->size * (size_t)all->rank;
}

static inline int is_within(const struct regions *all, const void *block)
{
    uintptr_t base = (uintptr_t)all->base, at = (uintptr_t)block;
    return at >= base && at - base < all->size * (size_t)all->n_ranks;
}

static inline int is_mine(const struct regions *all)
{
    return *all->is_mine;
}

#endif

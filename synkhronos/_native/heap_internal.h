/* Declarations shared by heap.c (allocation) and heap_mapping.c (mapping and forks). */
#ifndef SYNKHRONOS_HEAP_INTERNAL_H
#define SYNKHRONOS_HEAP_INTERNAL_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "posix.h"
#include "heap.h"
#include <pthread.h>
#include <stdatomic.h>
#include <sys/types.h>

/* Unused address ranges of an arena, without memory. Sorted, never adjacent, in pages from the arena's start. */
struct extent {
    size_t start, n_pages;
};
struct extents {
    struct extent *list;
    size_t n, capacity;
};

/* Freed blocks of one size class, which keep their pages. The block freed last is reused first. */
struct free_list {
    size_t *starts;
    size_t n, capacity;
    size_t n_idle; /* smallest `n` since blocks were last released: this many blocks were not needed */
};

/* Size classes lie at quarters between powers of two (4, 5, 6, 7, 8, 10, 12, … pages), so that rounding up wastes at
 * most a fifth of a block. */
#define N_CLASSES 160

struct arena_usage {
    _Alignas(64) _Atomic uint64_t in_use, cached, peak;
};

/* Private copy of a run of adjacent live blocks, for a child process. */
struct block_copy {
    char *original, *copy;
    size_t n_bytes;
};

struct heap {
    char *base; /* the first arena; `usage`, the counters of all ranks, lies before it in the same file */
    _Atomic size_t arena_size; /* 0 once the arenas are unmapped */
    int n_ranks, rank, first_rank; /* `first_rank`: of the process that created the heap, whose arena workers read */
    struct descriptor file; /* closed if memory is private */
    int is_shared;
    int is_closed;
    int *owner_flag; /* 1 in the process that took the arena of `rank`; the kernel clears it in forked children */
    struct arena_usage *usage;

    pthread_mutex_t lock; /* protects the members below */
    struct extents unused;
    struct free_list free_lists[N_CLASSES];
    uint8_t *classes; /* for each page of the own arena: 1 + the class of the live block that begins there, or 0 */
    size_t top;       /* number of pages, from the arena's start, up to the last one ever used */
    size_t cache_limit;
    size_t budget, remaining; /* bytes: as last set, and what is left of them */
    unsigned commands;        /* number of commands since idle blocks were last released */
    int is_busy;              /* whether a command is running */
    uint64_t n_begun, n_seen; /* number of commands begun: now, and when the idle thread last ran */

    struct block_copy *copies; /* between heap_before_fork and heap_after_fork */
    size_t n_copies;
    struct heap *next; /* list of all heaps of this process */
};

size_t class_pages(unsigned class);
int heap_reserve_pages(const struct heap *heap, char *first, size_t n_bytes);
void extents_free(struct extents *extents, size_t start, size_t n_pages);
void idle_thread_reset(void); /* call this in a forked child, which does not have the thread */

void heap_unmap(struct heap *heap);
struct heap *heaps_lock(void); /* the list of all heaps; none is unmapped until heaps_unlock */
void heaps_unlock(void);

static inline char *arena_base(const struct heap *heap)
{
    return heap->base + heap->arena_size * (size_t)heap->rank;
}

static inline int is_in_heap(const struct heap *heap, const void *block)
{
    uintptr_t base = (uintptr_t)heap->base, at = (uintptr_t)block;
    return at >= base && at - base < heap->arena_size * (size_t)heap->n_ranks;
}

static inline int is_owner(const struct heap *heap)
{
    return *heap->owner_flag;
}

#endif

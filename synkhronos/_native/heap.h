/* Shared heap: memory for computed arrays, mapped by all ranks, with one arena per rank. Independent of Python.
 *
 * A block has the same address in every rank, so collectives can read and write arrays of other ranks in place.
 *
 * Invariants
 * - All pages of a block are reserved before the block is returned. So a shortage of memory is a refused allocation,
 *   never a SIGBUS.
 * - A rank allocates only in its own arena, and only in the process that has taken the arena. In any other process,
 *   such as a child that the user forks, allocations use malloc, and freeing a block does not affect other processes.
 * - All bookkeeping is in private memory, never inside a block.
 * - If the arena cannot serve a request, malloc does. Such blocks are recognised by their addresses.
 */
#ifndef SYNKHRONOS_HEAP_H
#define SYNKHRONOS_HEAP_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif

#include "posix.h"
#include <pthread.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#define HEAP_PAGE ((size_t)4096)
#define HEAP_SMALLEST_BLOCK (4 * HEAP_PAGE) /* smaller allocations go to malloc */
#define HEAP_HUGE_PAGE ((size_t)2 << 20)    /* arena sizes are multiples of a huge page */

struct heap;

/* Bytes of one rank: in live blocks, in freed blocks that are cached for reuse, and the peak in live blocks. */
struct heap_usage {
    uint64_t in_use, cached, peak;
};

/* Map `n_ranks` arenas of `arena_size` bytes each, and take the arena of `rank`.
 *
 * fd: the file to map, which the heap owns if this succeeds; -1 for private memory.
 * cache_limit: most bytes of freed blocks that this rank caches.
 *
 * Returns NULL, with errno set, if the kernel refuses. */
struct heap *heap_create(int fd, int n_ranks, int rank, size_t arena_size, size_t cache_limit);
/* Take the arena of `rank`, in a worker that was just forked. The arena is empty afterwards. */
void heap_take_arena(struct heap *heap, int rank);
/* Release the memory of all other ranks, which must have ended. From now on nothing is allocated in the heap, and freed
 * blocks are released at once. Freeing the last block unmaps the heap. */
void heap_close(struct heap *heap);
/* Unmap the heap and free it. */
void heap_destroy(struct heap *heap);

/* NumPy's allocator calls these with a `struct heap *` as its context. `heap_free` ignores the size. */
void *heap_malloc(void *heap, size_t n_bytes);
void *heap_calloc(void *heap, size_t n, size_t n_bytes);
void *heap_realloc(void *heap, void *block, size_t n_bytes);
void heap_free(void *heap, void *block, size_t n_bytes);

/* Mark the start of a command. */
void heap_begin_command(struct heap *heap);
/* Mark the end of a command, and regularly release cached blocks that the last commands did not need. A background
 * thread releases the others if no command runs for some seconds. */
void heap_end_command(struct heap *heap);
/* Release all cached blocks. */
void heap_trim(struct heap *heap);
/* Set how many more bytes this rank may take from the system, in addition to its cached blocks. */
void heap_set_budget(struct heap *heap, size_t n_bytes);
/* Whether more than half of the budget is used, so that it should be set again. */
int heap_is_low(struct heap *heap);

/* Offset of a memory range from the start of the first arena, which is the same in every rank; -1 if the range is
 * not in memory that ranks share. */
ptrdiff_t heap_offset(const struct heap *heap, const void *first, size_t n_bytes);
char *heap_shared_base(const struct heap *heap); /* the first arena; NULL if memory is private */
size_t heap_n_bytes(const struct heap *heap);
int heap_n_ranks(const struct heap *heap);
struct heap_usage heap_usage(const struct heap *heap, int rank);

/* Processes that this thread forks from now on are ranks, which share this heap (NULL: no heap). */
void heap_begin_forking_ranks(struct heap *heap);
void heap_end_forking_ranks(void);
/* Before any other fork: copy the live blocks, so that the child has their present values. Returns the bytes that
 * could not be copied for lack of memory. If the child accesses these blocks, it ends by SIGSEGV. */
size_t heap_before_fork(void);
/* After that fork, in the parent: free the copies. */
void heap_after_fork(void);

/* -- declarations shared by heap.c (allocation) and heap_mapping.c (mapping and forks) */

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

/* Shared heap: memory for computed arrays, which all ranks map, with one arena per rank. Independent of Python.
 *
 * Every rank sees every block at the same address, so that collectives can read and write arrays of other ranks in
 * place.
 *
 * Invariants
 * - A block has all its pages before the caller gets it: a shortage of memory is a refused allocation, never a SIGBUS.
 * - A rank allocates only in its own arena, and only in the process that has taken that arena. In any other process,
 *   such as a child that the user forks, allocations go to malloc, and freeing a block does not affect other processes.
 * - All bookkeeping lies in private memory, never inside a block.
 * - Blocks that came from malloc, because the arena could not serve them, are recognised by their addresses.
 */
#ifndef SYNKHRONOS_HEAP_H
#define SYNKHRONOS_HEAP_H

#include <stddef.h>
#include <stdint.h>

#define HEAP_PAGE ((size_t)4096)
#define HEAP_SMALLEST_BLOCK (4 * HEAP_PAGE) /* smaller allocations go to malloc */
#define HEAP_HUGE_PAGE ((size_t)2 << 20)    /* arena sizes are multiples of a huge page */

struct heap;

/* Bytes of one rank: in live blocks, in freed blocks that are cached for reuse, and the peak of the former. */
struct heap_usage {
    uint64_t in_use, cached, peak;
};

/* Map `n_ranks` arenas of `arena_size` bytes each, and take the arena of `rank`.
 *
 * fd: the file to map, which the heap owns from now on; -1 for private memory.
 * cache_limit: most bytes of freed blocks that this rank caches.
 *
 * Returns NULL, with errno set, if the kernel refuses. */
struct heap *heap_create(int fd, int n_ranks, int rank, size_t arena_size, size_t cache_limit);
/* Take the arena of `rank`, in a worker that was just forked. The arena is empty afterwards. */
void heap_take_arena(struct heap *heap, int rank);
/* Release the memory of all other ranks, which have ended. From now on nothing is allocated in the heap, and freed
 * blocks are released at once; the last one unmaps the heap. */
void heap_close(struct heap *heap);
/* Unmap the heap and free it. */
void heap_destroy(struct heap *heap);

void *heap_malloc(struct heap *heap, size_t n_bytes);
void *heap_calloc(struct heap *heap, size_t n, size_t n_bytes);
void *heap_realloc(struct heap *heap, void *block, size_t n_bytes);
void heap_free(struct heap *heap, void *block);

/* Mark the start of a command. */
void heap_begin_command(struct heap *heap);
/* Mark its end, and release cached blocks that none of the last commands has needed. A background thread releases the
 * others if no command runs for some seconds. */
void heap_end_command(struct heap *heap);
/* Release all cached blocks. */
void heap_trim(struct heap *heap);
/* Set how many bytes this rank may still take from the system, in addition to those that are cached. */
void heap_set_budget(struct heap *heap, size_t n_bytes);
/* Whether more than half of the budget is used up, so that it should be set again. */
int heap_is_low(struct heap *heap);

/* Offset of a memory range from the start of the first arena, which is the same in every rank; -1 if the range is
 * not in memory that ranks share. */
ptrdiff_t heap_offset(const struct heap *heap, const void *first, size_t n_bytes);
char *heap_base(const struct heap *heap);
size_t heap_n_bytes(const struct heap *heap);
int heap_n_ranks(const struct heap *heap);
int heap_is_shared(const struct heap *heap);
struct heap_usage heap_usage(const struct heap *heap, int rank);

/* Processes that this thread forks from now on are ranks, which share this heap (NULL: none). */
void heap_begin_forking_ranks(struct heap *heap);
void heap_end_forking_ranks(void);
/* Before any other fork: copy the live blocks, so that the child sees their present values. Returns the bytes that
 * could not be copied for lack of memory; a child that touches those blocks ends by SIGSEGV. */
size_t heap_before_fork(void);
/* After that fork, in the parent: free the copies. */
void heap_after_fork(void);

#endif

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

#include <stddef.h>
#include <stdint.h>

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

#endif

/* Mapping of the heap, and its state in forked processes. See heap.h.
 *
 * A forked rank shares the heap. Any other child process gets private copies of the live blocks at the same addresses,
 * and nothing else of the heap. So neither process sees later writes of the other. The copies are made before the fork,
 * if Python forks (`os.fork`, multiprocessing, `preexec_fn`). If C code forks in order to execute a program, the child
 * gets no copies, and would end by SIGSEGV if it accessed a block. A child of a worker can also read the arena of the
 * process that created the heap, because values of shared variables may be there; it sees later writes. */
#include "heap.h"
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

/* -- All heaps of this process, and the forks of their ranks */

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* protects the variables below */
static struct heap *heaps;
static struct heap *rank_heap; /* shared with the ranks that are being forked; may be NULL */
static pthread_t forking_thread;
static int is_forking;

static int is_forking_rank(void)
{
    return is_forking && pthread_equal(forking_thread, pthread_self());
}

static void lock_before_fork(void)
{
    pthread_mutex_lock(&lock);
    for (struct heap *heap = heaps; heap != NULL; heap = heap->next)
        pthread_mutex_lock(&heap->lock); /* so that the lists are consistent in a forked rank */
}

static void unlock_in_parent(void)
{
    for (struct heap *heap = heaps; heap != NULL; heap = heap->next)
        pthread_mutex_unlock(&heap->lock);
    pthread_mutex_unlock(&lock);
}

static size_t mapped_bytes(const struct heap *heap)
{
    return HEAP_HUGE_PAGE + heap->arena_size * (size_t)heap->n_ranks;
}

/* In a child that is not a rank: unmap the heap, and move the copies of live blocks to the blocks' addresses. */
static void replace_with_copies(struct heap *heap)
{
    mmap(heap->usage, mapped_bytes(heap), PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    for (size_t i = 0; i < heap->n_copies; i++) {
        struct block_copy *one = &heap->copies[i];
        mremap(one->copy, one->n_bytes, one->n_bytes, MREMAP_MAYMOVE | MREMAP_FIXED, one->original);
    }
    heap->n_copies = 0;
    if (heap->rank != heap->first_rank) {
        size_t offset = heap->arena_size * (size_t)heap->first_rank;
        mmap(heap->base + offset, heap->arena_size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_NORESERVE | MAP_FIXED,
             descriptor_number(&heap->file), (off_t)(HEAP_HUGE_PAGE + offset));
    }
    descriptor_close(&heap->file); /* otherwise the child would keep the memory of all ranks allocated */
    heap->is_shared = 0;
}

static void reset_in_child(void)
{
    int is_rank = is_forking_rank();
    for (struct heap *heap = heaps; heap != NULL; heap = heap->next) {
        pthread_mutex_init(&heap->lock, NULL);
        if (!heap->is_shared || (is_rank && heap == rank_heap))
            continue;
        if (is_rank) /* the heap of an earlier session, which this rank may only read */
            mprotect(heap->usage, mapped_bytes(heap), PROT_READ);
        else
            replace_with_copies(heap);
    }
    pthread_mutex_init(&lock, NULL);
    is_forking = 0;
    idle_thread_reset();
}

static void register_fork_handlers(void)
{
    pthread_atfork(lock_before_fork, unlock_in_parent, reset_in_child);
}

static void register_heap(struct heap *heap)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, register_fork_handlers);
    pthread_mutex_lock(&lock);
    heap->next = heaps;
    heaps = heap;
    pthread_mutex_unlock(&lock);
}

static void unregister_heap(struct heap *heap)
{
    pthread_mutex_lock(&lock);
    struct heap **one = &heaps;
    while (*one != NULL && *one != heap)
        one = &(*one)->next;
    if (*one == heap)
        *one = heap->next;
    pthread_mutex_unlock(&lock);
}

struct heap *heaps_lock(void)
{
    pthread_mutex_lock(&lock);
    return heaps;
}

void heaps_unlock(void)
{
    pthread_mutex_unlock(&lock);
}

void heap_begin_forking_ranks(struct heap *heap)
{
    pthread_mutex_lock(&lock);
    forking_thread = pthread_self();
    rank_heap = heap;
    is_forking = 1;
    pthread_mutex_unlock(&lock);
}

void heap_end_forking_ranks(void)
{
    pthread_mutex_lock(&lock);
    is_forking = 0;
    pthread_mutex_unlock(&lock);
}

/* Find the next run of adjacent live blocks, from page `start` on. Returns 0 if there is none. */
static int next_run(const struct heap *heap, size_t *start, size_t *stop)
{
    while (*start < heap->top && heap->classes[*start] == 0)
        ++*start;
    *stop = *start;
    while (*stop < heap->top && heap->classes[*stop] != 0)
        *stop += class_pages(heap->classes[*stop] - 1U);
    return *stop > *start;
}

static void free_copies(struct heap *heap)
{
    for (size_t i = 0; i < heap->n_copies; i++)
        munmap(heap->copies[i].copy, heap->copies[i].n_bytes);
    free(heap->copies);
    heap->copies = NULL;
    heap->n_copies = 0;
}

static int copy_live_blocks(struct heap *heap)
{
    size_t start = 0, stop, capacity = 0;
    for (; next_run(heap, &start, &stop); start = stop) {
        if (heap->n_copies == capacity) {
            capacity = capacity ? 2 * capacity : 64;
            struct block_copy *copies = realloc(heap->copies, capacity * sizeof *copies);
            if (copies == NULL)
                return 0;
            heap->copies = copies;
        }
        struct block_copy one = {arena_base(heap) + start * HEAP_PAGE, NULL, (stop - start) * HEAP_PAGE};
        one.copy = mmap(NULL, one.n_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (one.copy == MAP_FAILED)
            return 0;
        memcpy(one.copy, one.original, one.n_bytes);
        heap->copies[heap->n_copies++] = one;
    }
    return 1;
}

size_t heap_before_fork(void)
{
    size_t refused = 0;
    if (is_forking_rank())
        return 0;
    pthread_mutex_lock(&lock);
    for (struct heap *heap = heaps; heap != NULL; heap = heap->next) {
        if (!heap->is_shared || !is_owner(heap))
            continue;
        size_t live = heap_usage(heap, heap->rank).in_use;
        pthread_mutex_lock(&heap->lock);
        free_copies(heap);
        if ((live > heap->remaining && !heap->is_closed) || !copy_live_blocks(heap)) {
            free_copies(heap);
            refused += live;
        }
        pthread_mutex_unlock(&heap->lock);
    }
    pthread_mutex_unlock(&lock);
    return refused;
}

void heap_after_fork(void)
{
    pthread_mutex_lock(&lock);
    for (struct heap *heap = heaps; heap != NULL; heap = heap->next)
        if (is_owner(heap))
            free_copies(heap);
    pthread_mutex_unlock(&lock);
}

/* -- Mapping */

/* Map the usage counters, which occupy the addresses of one huge page, and the arenas after them. */
static char *map_aligned(int fd, size_t n_bytes)
{
    char *found = mmap(NULL, n_bytes + HEAP_HUGE_PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (found == MAP_FAILED)
        return NULL;
    size_t lead = (HEAP_HUGE_PAGE - (uintptr_t)found % HEAP_HUGE_PAGE) % HEAP_HUGE_PAGE;
    char *start = found + lead;
    int flags = MAP_FIXED | MAP_NORESERVE | (fd >= 0 ? MAP_SHARED : MAP_PRIVATE | MAP_ANONYMOUS);
    if (mmap(start, n_bytes, PROT_READ | PROT_WRITE, flags, fd, 0) == MAP_FAILED) {
        int error = errno;
        munmap(found, n_bytes + HEAP_HUGE_PAGE);
        errno = error;
        return NULL;
    }
    if (lead > 0)
        munmap(found, lead);
    if (lead < HEAP_HUGE_PAGE)
        munmap(start + n_bytes, HEAP_HUGE_PAGE - lead);
    madvise(start + HEAP_HUGE_PAGE, n_bytes - HEAP_HUGE_PAGE, MADV_HUGEPAGE);
    madvise(start, n_bytes, MADV_DONTDUMP); /* otherwise a core file would contain the memory of all ranks */
    return start;
}

static int init_arena(struct heap *heap, int rank)
{
    heap->rank = rank;
    *heap->owner_flag = 1;
    heap->top = heap->commands = 0;
    heap->is_busy = 0;
    heap->budget = heap->remaining = 0;
    extents_free(&heap->unused, 0, heap->arena_size / HEAP_PAGE);
    return pthread_mutex_init(&heap->lock, NULL) == 0 && heap->unused.n == 1;
}

struct heap *heap_create(int fd, int n_ranks, int rank, size_t arena_size, size_t cache_limit)
{
    struct heap *heap = calloc(1, sizeof *heap);
    if (heap == NULL)
        return NULL;
    heap->arena_size = arena_size;
    heap->n_ranks = n_ranks;
    heap->first_rank = rank;
    heap->file.fd = -1;
    heap->is_shared = fd >= 0;
    heap->cache_limit = cache_limit;
    if (fd >= 0 && (!descriptor_own(&heap->file, fd) || ftruncate(fd, (off_t)mapped_bytes(heap)) != 0))
        goto failed;
    /* The owner flag gets a page of its own, which the kernel clears in forked processes. */
    size_t n_pages = arena_size / HEAP_PAGE, n_bytes = HEAP_PAGE + n_pages;
    char *bookkeeping = mmap(NULL, n_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (bookkeeping == MAP_FAILED)
        goto failed;
    heap->owner_flag = (int *)bookkeeping;
    heap->classes = (uint8_t *)bookkeeping + HEAP_PAGE;
    char *start = madvise(bookkeeping, HEAP_PAGE, MADV_WIPEONFORK) == 0 ? map_aligned(fd, mapped_bytes(heap)) : NULL;
    if (start == NULL) {
        munmap(bookkeeping, n_bytes);
        goto failed;
    }
    heap->usage = (struct arena_usage *)start;
    heap->base = start + HEAP_HUGE_PAGE;
    size_t usage_bytes = ((size_t)n_ranks * sizeof *heap->usage + HEAP_PAGE - 1) / HEAP_PAGE * HEAP_PAGE;
    if (!init_arena(heap, rank) || !heap_reserve_pages(heap, start, usage_bytes) ||
        madvise(heap->base, HEAP_PAGE, fd >= 0 ? MADV_REMOVE : MADV_DONTNEED) != 0) {
        munmap(start, mapped_bytes(heap));
        munmap(bookkeeping, n_bytes);
        goto failed;
    }
    register_heap(heap);
    return heap;
failed:
    free(heap->unused.list);
    free(heap);
    return NULL;
}

static void free_bookkeeping(struct heap *heap)
{
    for (unsigned class = 0; class < N_CLASSES; class++)
        free(heap->free_lists[class].starts);
    memset(heap->free_lists, 0, sizeof heap->free_lists);
    free(heap->unused.list);
    memset(&heap->unused, 0, sizeof heap->unused);
}

void heap_take_arena(struct heap *heap, int rank)
{
    struct arena_usage *usage = &heap->usage[rank];
    free_bookkeeping(heap);
    madvise(heap->classes, heap->arena_size / HEAP_PAGE, MADV_DONTNEED);
    init_arena(heap, rank);
    madvise(arena_base(heap), heap->arena_size, MADV_REMOVE); /* pages left by a worker that has ended */
    atomic_store(&usage->in_use, 0);
    atomic_store(&usage->cached, 0);
    atomic_store(&usage->peak, 0);
}

void heap_close(struct heap *heap)
{
    if (heap->arena_size == 0) /* it was closed before, and the arenas are unmapped */
        return;
    pthread_mutex_lock(&heap->lock);
    heap->is_closed = 1;
    heap->cache_limit = 0;
    pthread_mutex_unlock(&heap->lock);
    heap_trim(heap);
    for (int rank = 0; heap->is_shared && rank < heap->n_ranks; rank++)
        if (rank != heap->rank)
            madvise(heap->base + heap->arena_size * (size_t)rank, heap->arena_size, MADV_REMOVE);
    descriptor_close(&heap->file);
    if (heap->usage[heap->rank].in_use == 0)
        heap_unmap(heap);
}

/* Call this only when no live blocks are left, because their addresses become invalid. */
void heap_unmap(struct heap *heap)
{
    size_t n_bytes = mapped_bytes(heap), n_pages = heap->arena_size / HEAP_PAGE;
    if (n_pages == 0)
        return;
    unregister_heap(heap);
    heap->arena_size = 0;
    munmap(heap->classes, n_pages);
    munmap(heap->usage, n_bytes);
}

void heap_destroy(struct heap *heap)
{
    descriptor_close(&heap->file);
    heap_unmap(heap);
    munmap(heap->owner_flag, HEAP_PAGE);
    free_bookkeeping(heap);
    pthread_mutex_destroy(&heap->lock);
    free(heap);
}

void heap_set_budget(struct heap *heap, size_t n_bytes)
{
    pthread_mutex_lock(&heap->lock);
    heap->budget = heap->remaining = n_bytes;
    pthread_mutex_unlock(&heap->lock);
}

int heap_is_low(struct heap *heap)
{
    pthread_mutex_lock(&heap->lock);
    int is_low = heap->budget == 0 || heap->remaining < heap->budget / 2;
    pthread_mutex_unlock(&heap->lock);
    return is_low;
}

ptrdiff_t heap_offset(const struct heap *heap, const void *first, size_t n_bytes)
{
    if (!heap->is_shared || !is_in_heap(heap, first))
        return -1;
    ptrdiff_t offset = (const char *)first - heap->base;
    return n_bytes <= heap->arena_size * (size_t)heap->n_ranks - (size_t)offset ? offset : -1;
}

char *heap_shared_base(const struct heap *heap)
{
    return heap->is_shared ? heap->base : NULL;
}

size_t heap_n_bytes(const struct heap *heap)
{
    return heap->arena_size * (size_t)heap->n_ranks;
}

int heap_n_ranks(const struct heap *heap)
{
    return heap->n_ranks;
}

struct heap_usage heap_usage(const struct heap *heap, int rank)
{
    if (heap->arena_size == 0 || (heap->n_ranks > 1 && !heap->is_shared)) /* unmapped, or in a child process */
        return (struct heap_usage){0};
    struct arena_usage *one = &heap->usage[rank];
    return (struct heap_usage){
        .in_use = atomic_load_explicit(&one->in_use, memory_order_relaxed),
        .cached = atomic_load_explicit(&one->cached, memory_order_relaxed),
        .peak = atomic_load_explicit(&one->peak, memory_order_relaxed),
    };
}

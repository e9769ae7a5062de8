/* Allocation in an arena: size classes, cached blocks, unused addresses, and reservation of pages. See heap.h. */
#include "heap.h"
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23 /* Linux 5.14 */
#endif
#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25 /* Linux 6.1 */
#endif
#define CHUNK ((size_t)2 << 20)  /* bytes per reservation, which the kernel starts over after a signal */
#define RELEASE_PERIOD 64        /* number of commands after which idle blocks are released */
#ifndef HEAP_IDLE_NS
#define HEAP_IDLE_NS 2000000000L /* tests set a shorter time */
#endif

/* -- Pages of the heap's file */

/* Request huge pages, which are faster to fault in and to access. For files in memory, MADV_COLLAPSE creates them
 * regardless of the system-wide setting, but only where a page exists already. */
static void request_huge_pages(const struct heap *heap, int fd, char *first, size_t n_bytes)
{
    size_t n_huge = n_bytes / HEAP_HUGE_PAGE;
    if ((uintptr_t)first % HEAP_HUGE_PAGE != 0 || n_huge == 0)
        return;
    for (size_t i = 0; i < n_huge; i++)
        if (fallocate(fd, 0, first - (char *)heap->usage + (off_t)(i * HEAP_HUGE_PAGE), HEAP_PAGE) != 0)
            return;
    madvise(first, n_huge * HEAP_HUGE_PAGE, MADV_COLLAPSE);
}

/* Allocate the pages of a range. fallocate on the file works on every Linux. If a sandbox refuses it, or the program
 * has closed the file, fall back to MADV_POPULATE_WRITE (Linux 5.14), which needs no file but is slower. */
int heap_reserve_pages(const struct heap *heap, char *first, size_t n_bytes)
{
    if (!heap->is_shared)
        return 1;
    int fd = descriptor_number(&heap->file);
    request_huge_pages(heap, fd, first, n_bytes);
    while (n_bytes > 0) {
        size_t chunk = n_bytes < CHUNK ? n_bytes : CHUNK;
        if (fallocate(fd, 0, first - (char *)heap->usage, (off_t)chunk) == 0) {
            first += chunk;
            n_bytes -= chunk;
        } else if (errno == ENOSPC || errno == ENOMEM) {
            return 0;
        } else if (errno != EINTR) {
            return madvise(first, n_bytes, MADV_POPULATE_WRITE) == 0;
        }
    }
    return 1;
}

/* Release pages to the system; they read as zeros when they are used again. */
static int release_pages(const struct heap *heap, size_t start, size_t n_bytes)
{
    return madvise(arena_base(heap) + start, n_bytes, heap->is_shared ? MADV_REMOVE : MADV_DONTNEED) == 0;
}

/* -- Unused addresses: first fit; freed ranges are merged with their neighbours */

void extents_free(struct extents *extents, size_t start, size_t n_pages)
{
    size_t low = 0, high = extents->n;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (extents->list[middle].start < start)
            low = middle + 1;
        else
            high = middle;
    }
    struct extent *before = low > 0 ? &extents->list[low - 1] : NULL;
    struct extent *after = low < extents->n ? &extents->list[low] : NULL;
    int joins_before = before != NULL && before->start + before->n_pages == start;
    int joins_after = after != NULL && start + n_pages == after->start;
    if (joins_before && joins_after) {
        before->n_pages += n_pages + after->n_pages;
        extents->n--;
        memmove(after, after + 1, (extents->n - low) * sizeof *after);
    } else if (joins_before) {
        before->n_pages += n_pages;
    } else if (joins_after) {
        after->start = start;
        after->n_pages += n_pages;
    } else {
        if (extents->n == extents->capacity) {
            size_t capacity = extents->capacity ? 2 * extents->capacity : 64;
            struct extent *list = realloc(extents->list, capacity * sizeof *list);
            if (list == NULL)
                return; /* these addresses are never used again, but they have no pages */
            extents->list = list;
            extents->capacity = capacity;
        }
        memmove(&extents->list[low + 1], &extents->list[low], (extents->n - low) * sizeof *extents->list);
        extents->list[low] = (struct extent){start, n_pages};
        extents->n++;
    }
}

/* Allocate addresses for `n_pages` pages, at a multiple of `alignment` pages. Returns 0 if there are none. The lowest
 * addresses that fit are used, which keeps used pages together. */
static int extents_allocate(struct extents *extents, size_t n_pages, size_t alignment, size_t *start)
{
    for (size_t i = 0; i < extents->n; i++) {
        struct extent found = extents->list[i];
        *start = (found.start + alignment - 1) / alignment * alignment;
        size_t lead = *start - found.start;
        if (found.n_pages < lead + n_pages)
            continue;
        size_t rest = found.n_pages - lead - n_pages;
        extents->n--;
        memmove(&extents->list[i], &extents->list[i + 1], (extents->n - i) * sizeof found);
        if (lead > 0)
            extents_free(extents, found.start, lead);
        if (rest > 0)
            extents_free(extents, *start + n_pages, rest);
        return 1;
    }
    return 0;
}

/* -- Blocks */

/* Number of pages of a block of a size class. */
size_t class_pages(unsigned class)
{
    return (size_t)(4 + (class & 3)) << (class >> 2);
}

/* The smallest size class that holds `n_bytes`. */
static unsigned class_of(size_t n_bytes)
{
    size_t pages = (n_bytes + HEAP_PAGE - 1) / HEAP_PAGE;
    unsigned shift = 0;
    while (pages > (size_t)8 << shift)
        shift++;
    size_t n_quarters = (pages + ((size_t)1 << shift) - 1) >> shift;
    return 4 * shift + (unsigned)(n_quarters > 4 ? n_quarters - 4 : 0);
}

static int is_in_own_arena(const struct heap *heap, const void *block)
{
    uintptr_t base = (uintptr_t)arena_base(heap), at = (uintptr_t)block;
    return at >= base && at - base < heap->arena_size;
}

/* Add to a counter. Only the owner writes it, under the lock, so no atomic read-modify-write is needed. */
static void add_to(_Atomic uint64_t *total, uint64_t change)
{
    atomic_store_explicit(total, atomic_load_explicit(total, memory_order_relaxed) + change, memory_order_relaxed);
}

static void release_block(struct heap *heap, size_t start, size_t n_pages)
{
    if (release_pages(heap, start * HEAP_PAGE, n_pages * HEAP_PAGE)) {
        heap->remaining += n_pages * HEAP_PAGE;
        extents_free(&heap->unused, start, n_pages);
    }
}

/* Release the `n` blocks of a size class that were cached first. The caller holds the lock. */
static void release_cached(struct heap *heap, unsigned class, size_t n)
{
    struct free_list *list = &heap->free_lists[class];
    for (size_t i = 0; i < n; i++)
        release_block(heap, list->starts[i], class_pages(class));
    add_to(&heap->usage[heap->rank].cached, -(uint64_t)(n * class_pages(class) * HEAP_PAGE));
    list->n -= n;
    memmove(list->starts, list->starts + n, list->n * sizeof *list->starts);
}

/* Release all cached blocks. The caller holds the lock. */
static void release_all_cached(struct heap *heap)
{
    for (unsigned class = 0; class < N_CLASSES; class++) {
        if (heap->free_lists[class].n)
            release_cached(heap, class, heap->free_lists[class].n);
        heap->free_lists[class].n_idle = 0;
    }
}

/* Get a block of zeros from the system. If memory is short, release all cached blocks and try again. */
static int new_block(struct heap *heap, unsigned class, size_t *start)
{
    size_t n_pages = class_pages(class), n_bytes = n_pages * HEAP_PAGE;
    size_t alignment = n_bytes < HEAP_HUGE_PAGE ? 1 : HEAP_HUGE_PAGE / HEAP_PAGE;
    for (int attempt = 0; attempt < 2; attempt++) {
        if (n_bytes <= heap->remaining && extents_allocate(&heap->unused, n_pages, alignment, start)) {
            if (heap_reserve_pages(heap, arena_base(heap) + *start * HEAP_PAGE, n_bytes)) {
                heap->remaining -= n_bytes;
                if (*start + n_pages > heap->top)
                    heap->top = *start + n_pages;
                return 1;
            }
            if (release_pages(heap, *start * HEAP_PAGE, n_bytes))
                extents_free(&heap->unused, *start, n_pages);
        }
        if (heap->remaining + heap->usage[heap->rank].cached < n_bytes)
            return 0;
        release_all_cached(heap);
    }
    return 0;
}

/* Allocate a block in the arena. Returns NULL if malloc has to serve the request. */
static void *allocate(struct heap *heap, size_t n_bytes, int *is_zero)
{
    if (n_bytes < HEAP_SMALLEST_BLOCK || n_bytes > heap->arena_size || heap->is_closed || !is_owner(heap))
        return NULL;
    unsigned class = class_of(n_bytes);
    size_t size = class_pages(class) * HEAP_PAGE, start;
    struct free_list *list = &heap->free_lists[class];
    struct arena_usage *usage = &heap->usage[heap->rank];
    pthread_mutex_lock(&heap->lock);
    *is_zero = list->n == 0;
    if (!*is_zero) {
        start = list->starts[--list->n];
        if (list->n < list->n_idle)
            list->n_idle = list->n;
        add_to(&usage->cached, -(uint64_t)size);
    } else if (!new_block(heap, class, &start)) {
        pthread_mutex_unlock(&heap->lock);
        return NULL;
    }
    heap->classes[start] = (uint8_t)(class + 1);
    add_to(&usage->in_use, size);
    uint64_t in_use = atomic_load_explicit(&usage->in_use, memory_order_relaxed);
    if (in_use > atomic_load_explicit(&usage->peak, memory_order_relaxed))
        atomic_store_explicit(&usage->peak, in_use, memory_order_relaxed);
    pthread_mutex_unlock(&heap->lock);
    return arena_base(heap) + start * HEAP_PAGE;
}

void *heap_malloc(void *heap, size_t n_bytes)
{
    int is_zero;
    void *block = allocate(heap, n_bytes, &is_zero);
    return block != NULL ? block : malloc(n_bytes ? n_bytes : 1);
}

void *heap_calloc(void *heap, size_t n, size_t n_bytes)
{
    int is_zero;
    void *block = n_bytes && n > SIZE_MAX / n_bytes ? NULL : allocate(heap, n * n_bytes, &is_zero);
    if (block == NULL)
        return n && n_bytes ? calloc(n, n_bytes) : calloc(1, 1);
    return is_zero ? block : memset(block, 0, n * n_bytes);
}

/* Copy a block that was inherited from the process that forked this one. Its size is not known here, so the bytes after
 * it are copied, too. They are read from the file: reading through the mapping could allocate pages. */
static void *copy_inherited(struct heap *heap, const char *block, size_t n_bytes)
{
    size_t offset = (size_t)(block - (const char *)heap->usage), in_arenas = (size_t)(block - heap->base);
    size_t left = heap->arena_size - in_arenas % heap->arena_size, n = n_bytes < left ? n_bytes : left;
    char *copy = heap_malloc(heap, n_bytes);
    if (copy == NULL || !heap->is_shared)
        return copy == NULL ? NULL : memcpy(copy, block, n);
    for (size_t done = 0; done < n;) {
        ssize_t n_read = pread(descriptor_number(&heap->file), copy + done, n - done, (off_t)(offset + done));
        if (n_read > 0) {
            done += (size_t)n_read;
        } else if (n_read == 0 || errno != EINTR) {
            heap_free(heap, copy, n_bytes);
            return NULL;
        }
    }
    return copy;
}

void *heap_realloc(void *context, void *block, size_t n_bytes)
{
    struct heap *heap = context;
    if (block == NULL)
        return heap_malloc(heap, n_bytes);
    if (!is_in_heap(heap, block))
        return realloc(block, n_bytes ? n_bytes : 1);
    if (!is_in_own_arena(heap, block))
        return copy_inherited(heap, block, n_bytes);
    size_t start = (size_t)((char *)block - arena_base(heap)) / HEAP_PAGE;
    unsigned class = heap->classes[start] - 1U;
    size_t size = class_pages(class) * HEAP_PAGE;
    if (n_bytes >= HEAP_SMALLEST_BLOCK && class_of(n_bytes) == class)
        return block;
    void *moved = heap_malloc(heap, n_bytes);
    if (moved == NULL)
        return n_bytes <= size ? block : NULL;
    memcpy(moved, block, n_bytes < size ? n_bytes : size);
    heap_free(heap, block, size);
    return moved;
}

void heap_free(void *context, void *block, size_t n_bytes)
{
    struct heap *heap = context;
    if (block == NULL || !is_in_heap(heap, block)) {
        free(block);
        return;
    }
    if (!is_in_own_arena(heap, block)) /* a worker inherited it from the process that forked it */
        return;
    size_t start = (size_t)((char *)block - arena_base(heap)) / HEAP_PAGE;
    if (!is_owner(heap)) { /* a child that is not a rank: free the pages of its private copy */
        madvise(block, class_pages(heap->classes[start] - 1U) * HEAP_PAGE, MADV_DONTNEED);
        return;
    }
    pthread_mutex_lock(&heap->lock);
    unsigned class = heap->classes[start] - 1U;
    size_t size = class_pages(class) * HEAP_PAGE;
    struct free_list *list = &heap->free_lists[class];
    struct arena_usage *usage = &heap->usage[heap->rank];
    heap->classes[start] = 0;
    add_to(&usage->in_use, -(uint64_t)size);
    int is_cached = atomic_load_explicit(&usage->cached, memory_order_relaxed) + size <= heap->cache_limit;
    if (is_cached && list->n == list->capacity) {
        size_t capacity = list->capacity ? 2 * list->capacity : 16;
        size_t *starts = realloc(list->starts, capacity * sizeof *starts);
        if (starts == NULL) {
            is_cached = 0;
        } else {
            list->starts = starts;
            list->capacity = capacity;
        }
    }
    if (is_cached) {
        list->starts[list->n++] = start;
        add_to(&usage->cached, size);
    } else {
        release_block(heap, start, class_pages(class));
    }
    int is_last = heap->is_closed && atomic_load_explicit(&usage->in_use, memory_order_relaxed) == 0;
    pthread_mutex_unlock(&heap->lock);
    if (is_last)
        heap_unmap(heap);
}

/* -- Release of cached blocks while no command runs */

/* The thread exists only while this process caches blocks: the end of a command starts it, and it ends when no cached
 * block is left. It handles no signals. Forked processes do not have it. */
static _Atomic int is_thread_running;

/* Release cached blocks if no command ran since the last call. Returns whether any blocks are still cached. */
static int release_if_idle(struct heap *heap)
{
    if (!is_owner(heap))
        return 0;
    pthread_mutex_lock(&heap->lock);
    if (!heap->is_busy && heap->n_begun == heap->n_seen)
        release_all_cached(heap);
    heap->n_seen = heap->n_begun;
    int has_cached = atomic_load_explicit(&heap->usage[heap->rank].cached, memory_order_relaxed) > 0;
    pthread_mutex_unlock(&heap->lock);
    return has_cached;
}

static int release_idle_heaps(void)
{
    int has_cached = 0;
    for (struct heap *heap = heaps_lock(); heap != NULL; heap = heap->next)
        has_cached |= release_if_idle(heap);
    heaps_unlock();
    return has_cached;
}

static void *idle_thread(void *nothing)
{
    prctl(PR_SET_NAME, "synk-idle");
    const struct timespec period = {HEAP_IDLE_NS / 1000000000, HEAP_IDLE_NS % 1000000000};
    for (;;) {
        nanosleep(&period, NULL);
        if (release_idle_heaps())
            continue;
        atomic_store(&is_thread_running, 0);
        if (!release_idle_heaps() || atomic_exchange(&is_thread_running, 1)) /* the second means: a new thread runs */
            return nothing;
    }
}

static void idle_thread_start(void)
{
    if (atomic_load_explicit(&is_thread_running, memory_order_relaxed) || atomic_exchange(&is_thread_running, 1))
        return;
    if (!start_thread(idle_thread, NULL))
        atomic_store(&is_thread_running, 0); /* no thread available: the end of the next command tries again */
}

void idle_thread_reset(void)
{
    atomic_store(&is_thread_running, 0);
}

/* -- Commands */

void heap_begin_command(struct heap *heap)
{
    pthread_mutex_lock(&heap->lock);
    heap->is_busy = 1;
    heap->n_begun++;
    pthread_mutex_unlock(&heap->lock);
}

void heap_end_command(struct heap *heap)
{
    if (!is_owner(heap)) /* in a child process that was forked during the command */
        return;
    pthread_mutex_lock(&heap->lock);
    heap->is_busy = 0;
    if (++heap->commands == RELEASE_PERIOD) {
        heap->commands = 0;
        for (unsigned class = 0; class < N_CLASSES; class++) {
            struct free_list *list = &heap->free_lists[class];
            if (list->n_idle)
                release_cached(heap, class, list->n_idle);
            list->n_idle = list->n;
        }
    }
    int is_unmapped = heap->arena_size == 0; /* the command closed the heap, and freed the last block */
    int has_cached =
        !is_unmapped && atomic_load_explicit(&heap->usage[heap->rank].cached, memory_order_relaxed) > 0;
    pthread_mutex_unlock(&heap->lock);
    if (has_cached)
        idle_thread_start();
}

void heap_trim(struct heap *heap)
{
    pthread_mutex_lock(&heap->lock);
    release_all_cached(heap);
    pthread_mutex_unlock(&heap->lock);
}

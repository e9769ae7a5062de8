/* Blocks of a region: of the sizes that there are, freed ones used again, what nobody needs given back. */
#include "heap_internal.h"
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define PERIOD 64 /* commands, after which what none of them has needed is given back */


size_t pages_of(unsigned number)
{
    return (size_t)(4 + (number & 3)) << (number >> 2);
}

unsigned number_of(size_t n_bytes)
{
    size_t pages = (n_bytes + REGIONS_PAGE - 1) / REGIONS_PAGE;
    unsigned power = 0;
    while (pages > (size_t)8 << power)
        power++;
    size_t quarters = (pages + ((size_t)1 << power) - 1) >> power;
    return 4 * power + (unsigned)(quarters > 4 ? quarters - 4 : 0);
}

static int is_own(const struct regions *all, const void *block)
{
    uintptr_t base = (uintptr_t)own_base(all), at = (uintptr_t)block;
    return at >= base && at - base < all->size;
}

static void count(_Atomic uint64_t *one, uint64_t change)
{
    atomic_store_explicit(one, atomic_load_explicit(one, memory_order_relaxed) + change, memory_order_relaxed);
}

static void vacate(struct regions *all, size_t start, size_t n_pages)
{
    if (regions_punch(all, start * REGIONS_PAGE, n_pages * REGIONS_PAGE)) {
        all->allowed += n_pages * REGIONS_PAGE;
        extents_give(&all->empty, start, n_pages);
    }
}

/* Give back the `n` blocks of a cache that have been there for longest. */
static void shed(struct regions *all, unsigned number, size_t n)
{
    struct cache *cache = &all->caches[number];
    for (size_t i = 0; i < n; i++)
        vacate(all, cache->starts[i], pages_of(number));
    count(&all->counts[all->rank].kept, -(uint64_t)(n * pages_of(number) * REGIONS_PAGE));
    cache->n -= n;
    memmove(cache->starts, cache->starts + n, cache->n * sizeof *cache->starts);
}

/* Give back all that is kept; called while the lock is held. */
void regions_shed_all(struct regions *all)
{
    for (unsigned number = 0; number < N_SIZES; number++) {
        if (all->caches[number].n)
            shed(all, number, all->caches[number].n);
        all->caches[number].idle = 0;
    }
}

/* A new block, of zeros. */
static int carve(struct regions *all, unsigned number, size_t *start)
{
    size_t n_pages = pages_of(number), n_bytes = n_pages * REGIONS_PAGE;
    size_t alignment = n_bytes < REGIONS_HUGE ? 1 : REGIONS_HUGE / REGIONS_PAGE;
    for (int again = 0; again < 2; again++) {
        if (n_bytes <= all->allowed && extents_take(&all->empty, n_pages, alignment, start)) {
            if (regions_reserve(all, own_base(all) + *start * REGIONS_PAGE, n_bytes)) {
                all->allowed -= n_bytes;
                if (*start + n_pages > all->top)
                    all->top = *start + n_pages;
                return 1;
            }
            if (regions_punch(all, *start * REGIONS_PAGE, n_bytes))
                extents_give(&all->empty, *start, n_pages);
        }
        if (all->allowed + all->counts[all->rank].kept < n_bytes)
            return 0;
        regions_shed_all(all);
    }
    return 0;
}

static void *take(struct regions *all, size_t n_bytes, int *is_zero)
{
    if (n_bytes < REGIONS_SMALLEST || n_bytes > all->size || all->is_closed || !is_mine(all))
        return NULL;
    unsigned number = number_of(n_bytes);
    size_t size = pages_of(number) * REGIONS_PAGE, start;
    struct cache *cache = &all->caches[number];
    struct own_count *counts = &all->counts[all->rank];
    pthread_mutex_lock(&all->lock);
    *is_zero = cache->n == 0;
    if (!*is_zero) {
        start = cache->starts[--cache->n];
        if (cache->n < cache->idle)
            cache->idle = cache->n;
        count(&counts->kept, -(uint64_t)size);
    } else if (!carve(all, number, &start)) {
        pthread_mutex_unlock(&all->lock);
        return NULL;
    }
    all->sizes[start] = (uint8_t)(number + 1);
    count(&counts->in_use, size);
    uint64_t in_use = atomic_load_explicit(&counts->in_use, memory_order_relaxed);
    if (in_use > atomic_load_explicit(&counts->largest, memory_order_relaxed))
        atomic_store_explicit(&counts->largest, in_use, memory_order_relaxed);
    pthread_mutex_unlock(&all->lock);
    return own_base(all) + start * REGIONS_PAGE;
}

void *regions_malloc(struct regions *all, size_t n_bytes)
{
    int is_zero;
    void *block = take(all, n_bytes, &is_zero);
    return block != NULL ? block : malloc(n_bytes ? n_bytes : 1);
}

void *regions_calloc(struct regions *all, size_t n, size_t n_bytes)
{
    int is_zero;
    void *block = n_bytes && n > SIZE_MAX / n_bytes ? NULL : take(all, n * n_bytes, &is_zero);
    if (block == NULL)
        return n && n_bytes ? calloc(n, n_bytes) : calloc(1, 1);
    return is_zero ? block : memset(block, 0, n * n_bytes);
}

void *regions_realloc(struct regions *all, void *block, size_t n_bytes)
{
    if (block == NULL || !is_own(all, block))
        return block == NULL ? regions_malloc(all, n_bytes) : realloc(block, n_bytes ? n_bytes : 1);
    size_t start = (size_t)((char *)block - own_base(all)) / REGIONS_PAGE;
    unsigned number = all->sizes[start] - 1U;
    size_t size = pages_of(number) * REGIONS_PAGE;
    if (n_bytes >= REGIONS_SMALLEST && number_of(n_bytes) == number)
        return block;
    void *other = regions_malloc(all, n_bytes);
    if (other == NULL)
        return n_bytes <= size ? block : NULL;
    memcpy(other, block, n_bytes < size ? n_bytes : size);
    regions_free(all, block);
    return other;
}

void regions_free(struct regions *all, void *block)
{
    if (block == NULL || !is_within(all, block)) {
        free(block);
        return;
    }
    if (!is_own(all, block)) /* a worker lets go of what it inherited */
        return;
    size_t start = (size_t)((char *)block - own_base(all)) / REGIONS_PAGE;
    if (!is_mine(all)) { /* the pages of this process's own copy, if it has one */
        madvise(block, pages_of(all->sizes[start] - 1U) * REGIONS_PAGE, MADV_DONTNEED);
        return;
    }
    pthread_mutex_lock(&all->lock);
    unsigned number = all->sizes[start] - 1U;
    size_t size = pages_of(number) * REGIONS_PAGE;
    struct cache *cache = &all->caches[number];
    struct own_count *counts = &all->counts[all->rank];
    all->sizes[start] = 0;
    count(&counts->in_use, -(uint64_t)size);
    int is_kept = atomic_load_explicit(&counts->kept, memory_order_relaxed) + size <= all->keep;
    if (is_kept && cache->n == cache->room) {
        size_t room = cache->room ? 2 * cache->room : 16;
        size_t *starts = realloc(cache->starts, room * sizeof *starts);
        if (starts == NULL) {
            is_kept = 0;
        } else {
            cache->starts = starts;
            cache->room = room;
        }
    }
    if (is_kept) {
        cache->starts[cache->n++] = start;
        count(&counts->kept, size);
    } else {
        vacate(all, start, pages_of(number));
    }
    int is_over = all->is_closed && atomic_load_explicit(&counts->in_use, memory_order_relaxed) == 0;
    pthread_mutex_unlock(&all->lock);
    if (is_over)
        regions_unmap(all);
}

void regions_begin_command(struct regions *all)
{
    pthread_mutex_lock(&all->lock);
    all->is_busy = 1;
    all->n_begun++;
    pthread_mutex_unlock(&all->lock);
}

void regions_end_command(struct regions *all)
{
    if (!is_mine(all)) /* a child that was forked within the command */
        return;
    pthread_mutex_lock(&all->lock);
    all->is_busy = 0;
    if (++all->commands == PERIOD) {
        all->commands = 0;
        for (unsigned number = 0; number < N_SIZES; number++) {
            struct cache *cache = &all->caches[number];
            if (cache->idle)
                shed(all, number, cache->idle);
            cache->idle = cache->n;
        }
    }
    int keeps = atomic_load_explicit(&all->counts[all->rank].kept, memory_order_relaxed) > 0;
    pthread_mutex_unlock(&all->lock);
    if (keeps)
        idle_begin();
}

void regions_trim(struct regions *all)
{
    pthread_mutex_lock(&all->lock);
    regions_shed_all(all);
    pthread_mutex_unlock(&all->lock);
}

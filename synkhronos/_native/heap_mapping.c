/* Regions are mapped, taken and unmapped. */
#include "heap_internal.h"
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

/* Addresses for the page of counts, which has a huge page of addresses to itself, and for the regions after it. */
static char *map(int fd, size_t n_bytes)
{
    char *found = mmap(NULL, n_bytes + REGIONS_HUGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (found == MAP_FAILED)
        return NULL;
    size_t lead = (REGIONS_HUGE - (uintptr_t)found % REGIONS_HUGE) % REGIONS_HUGE;
    char *start = found + lead;
    int flags = MAP_FIXED | MAP_NORESERVE | (fd >= 0 ? MAP_SHARED : MAP_PRIVATE | MAP_ANONYMOUS);
    if (mmap(start, n_bytes, PROT_READ | PROT_WRITE, flags, fd, 0) == MAP_FAILED) {
        int error = errno;
        munmap(found, n_bytes + REGIONS_HUGE);
        errno = error;
        return NULL;
    }
    if (lead > 0)
        munmap(found, lead);
    if (lead < REGIONS_HUGE)
        munmap(start + n_bytes, REGIONS_HUGE - lead);
    madvise(start + REGIONS_HUGE, n_bytes - REGIONS_HUGE, MADV_HUGEPAGE);
    madvise(start, n_bytes, MADV_DONTDUMP); /* nobody waits for a core file of all this machine's memory */
    return start;
}

static size_t mapped(const struct regions *all)
{
    return REGIONS_HUGE + all->size * (size_t)all->n_ranks;
}

static int begin_own(struct regions *all, int rank)
{
    all->rank = rank;
    *all->is_mine = 1;
    all->top = all->commands = 0;
    all->is_busy = 0;
    all->granted = all->allowed = 0;
    extents_give(&all->empty, 0, all->size / REGIONS_PAGE);
    return pthread_mutex_init(&all->lock, NULL) == 0 && all->empty.n == 1;
}

struct regions *regions_create(int fd, int n_ranks, int rank, size_t size, size_t keep)
{
    struct regions *all = calloc(1, sizeof *all);
    if (all == NULL)
        return NULL;
    all->size = size;
    all->n_ranks = n_ranks;
    all->file.fd = -1;
    all->is_shared = fd >= 0;
    all->keep = keep;
    if (fd >= 0 && (!descriptor_own(&all->file, fd) || ftruncate(fd, (off_t)mapped(all)) != 0))
        goto failed;
    /* in front of the sizes, a page that the kernel clears in what is forked */
    size_t n_pages = size / REGIONS_PAGE, n_bytes = REGIONS_PAGE + n_pages;
    char *book = mmap(NULL, n_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (book == MAP_FAILED)
        goto failed;
    all->is_mine = (int *)book;
    all->sizes = (uint8_t *)book + REGIONS_PAGE;
    char *start = madvise(book, REGIONS_PAGE, MADV_WIPEONFORK) == 0 ? map(fd, mapped(all)) : NULL;
    if (start == NULL) {
        munmap(book, n_bytes);
        goto failed;
    }
    all->counts = (struct own_count *)start;
    all->base = start + REGIONS_HUGE;
    size_t counts = ((size_t)n_ranks * sizeof *all->counts + REGIONS_PAGE - 1) / REGIONS_PAGE * REGIONS_PAGE;
    if (!begin_own(all, rank) || !regions_reserve(all, start, counts) ||
        madvise(all->base, REGIONS_PAGE, fd >= 0 ? MADV_REMOVE : MADV_DONTNEED) != 0) {
        munmap(start, mapped(all));
        munmap(book, n_bytes);
        goto failed;
    }
    forks_know(all);
    return all;
failed:
    free(all);
    return NULL;
}

static void forget_blocks(struct regions *all)
{
    for (unsigned number = 0; number < N_SIZES; number++)
        free(all->caches[number].starts);
    memset(all->caches, 0, sizeof all->caches);
    free(all->empty.list);
    memset(&all->empty, 0, sizeof all->empty);
}

void regions_take(struct regions *all, int rank)
{
    struct own_count *counts = &all->counts[rank];
    forget_blocks(all);
    madvise(all->sizes, all->size / REGIONS_PAGE, MADV_DONTNEED);
    begin_own(all, rank);
    madvise(own_base(all), all->size, MADV_REMOVE); /* what a worker had that is no more */
    atomic_store(&counts->in_use, 0);
    atomic_store(&counts->kept, 0);
    atomic_store(&counts->largest, 0);
}

void regions_close(struct regions *all)
{
    pthread_mutex_lock(&all->lock);
    all->is_closed = 1;
    all->keep = 0;
    pthread_mutex_unlock(&all->lock);
    regions_trim(all);
    for (int rank = 0; all->is_shared && rank < all->n_ranks; rank++)
        if (rank != all->rank)
            madvise(all->base + all->size * (size_t)rank, all->size, MADV_REMOVE);
    descriptor_close(&all->file);
    if (all->counts[all->rank].in_use == 0)
        regions_unmap(all);
}

/* Nobody has a block: addresses in the regions mean nothing any more. */
void regions_unmap(struct regions *all)
{
    size_t n_bytes = mapped(all), n_pages = all->size / REGIONS_PAGE;
    if (n_pages == 0)
        return;
    forks_forget(all);
    all->size = 0;
    munmap(all->sizes, n_pages);
    munmap((char *)all->counts, n_bytes);
}

void regions_destroy(struct regions *all)
{
    descriptor_close(&all->file);
    regions_unmap(all);
    munmap(all->is_mine, REGIONS_PAGE);
    forget_blocks(all);
    pthread_mutex_destroy(&all->lock);
    free(all);
}

void regions_allow(struct regions *all, size_t n_bytes)
{
    pthread_mutex_lock(&all->lock);
    all->granted = all->allowed = n_bytes;
    pthread_mutex_unlock(&all->lock);
}

int regions_short(struct regions *all)
{
    pthread_mutex_lock(&all->lock);
    int is_short = all->granted == 0 || all->allowed < all->granted / 2;
    pthread_mutex_unlock(&all->lock);
    return is_short;
}

ptrdiff_t regions_offset(const struct regions *all, const void *first, size_t n_bytes)
{
    if (!all->is_shared || !is_within(all, first))
        return -1;
    ptrdiff_t offset = (const char *)first - all->base;
    return n_bytes <= all->size * (size_t)all->n_ranks - (size_t)offset ? offset : -1;
}

char *regions_base(const struct regions *all)
{
    return all->base;
}

size_t regions_n_bytes(const struct regions *all)
{
    return all->size * (size_t)all->n_ranks;
}

int regions_n_ranks(const struct regions *all)
{
    return all->n_ranks;
}

int regions_are_shared(const struct regions *all)
{
    return all->is_shared;
}

struct regions_count regions_count(const struct regions *all, int rank)
{
    if (all->size == 0 || (all->n_ranks > 1 && !all->is_shared)) /* unmapped, or in a child */
        return (struct regions_count){0};
    struct own_count *one = &all->counts[rank];
    return (struct regions_count){
        .in_use = atomic_load_explicit(&one->in_use, memory_order_relaxed),
        .kept = atomic_load_explicit(&one->kept, memory_order_relaxed),
        .largest = atomic_load_explicit(&one->largest, memory_order_relaxed),
    };
}

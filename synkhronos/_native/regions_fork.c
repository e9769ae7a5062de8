/* What becomes of regions in a process that is forked.

A rank shares them. Any other child gets copies of the live blocks, made before the fork, at their own addresses, and
nothing else of the regions: it cannot see what ranks write later, and they cannot see what it writes. Copies are made
where Python forks (`os.fork`, multiprocessing, `preexec_fn`). Where C code forks, in order to execute a program, the
child gets no copies; touching a block would end it by SIGSEGV.
*/
#include "heap_internal.h"
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* of the list */
static struct regions *list;
static struct regions *shared_with_ranks; /* may be NULL */
static pthread_t forking;                 /* the thread that forks ranks */
static int is_forking;

static int forks_ranks(void)
{
    return is_forking && pthread_equal(forking, pthread_self());
}

static void before(void)
{
    pthread_mutex_lock(&lock);
    for (struct regions *all = list; all != NULL; all = all->next)
        pthread_mutex_lock(&all->lock); /* a rank that is forked finds its lists whole */
}

static void after_in_parent(void)
{
    for (struct regions *all = list; all != NULL; all = all->next)
        pthread_mutex_unlock(&all->lock);
    pthread_mutex_unlock(&lock);
}

static void seal(struct regions *all)
{
    char *start = (char *)all->counts;
    size_t n_bytes = REGIONS_HUGE + all->size * (size_t)all->n_ranks;
    mmap(start, n_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    for (size_t i = 0; i < all->n_copies; i++) {
        struct copied *one = &all->copies[i];
        mremap(one->copy, one->n_bytes, one->n_bytes, MREMAP_MAYMOVE | MREMAP_FIXED, one->place);
    }
    all->n_copies = 0;
    descriptor_close(&all->file); /* or the child would keep the memory of all ranks */
    all->is_shared = 0;
}

static void after_in_child(void)
{
    int is_rank = forks_ranks();
    for (struct regions *all = list; all != NULL; all = all->next) {
        pthread_mutex_init(&all->lock, NULL);
        if (!all->is_shared || (is_rank && all == shared_with_ranks))
            continue;
        if (is_rank) /* of a session that is over: read, if at all, and closed */
            mprotect((char *)all->counts, REGIONS_HUGE + all->size * (size_t)all->n_ranks, PROT_READ);
        else
            seal(all);
    }
    pthread_mutex_init(&lock, NULL);
    is_forking = 0;
    idle_forked();
}

static void begin(void)
{
    pthread_atfork(before, after_in_parent, after_in_child);
}

void forks_know(struct regions *all)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, begin);
    pthread_mutex_lock(&lock);
    all->next = list;
    list = all;
    pthread_mutex_unlock(&lock);
}

void forks_forget(struct regions *all)
{
    pthread_mutex_lock(&lock);
    for (struct regions **one = &list; *one != NULL; one = &(*one)->next)
        if (*one == all) {
            *one = all->next;
            break;
        }
    pthread_mutex_unlock(&lock);
}

struct regions *forks_lock(void)
{
    pthread_mutex_lock(&lock);
    return list;
}

void forks_unlock(void)
{
    pthread_mutex_unlock(&lock);
}

void regions_fork_ranks(struct regions *all)
{
    pthread_mutex_lock(&lock);
    forking = pthread_self();
    shared_with_ranks = all;
    is_forking = 1;
    pthread_mutex_unlock(&lock);
}

void regions_fork_no_ranks(void)
{
    pthread_mutex_lock(&lock);
    is_forking = 0;
    pthread_mutex_unlock(&lock);
}

/* Live blocks that lie side by side, from page `start` on; returns whether there are any, and where they end. */
static int next_run(const struct regions *all, size_t *start, size_t *stop)
{
    while (*start < all->top && all->sizes[*start] == 0)
        ++*start;
    *stop = *start;
    while (*stop < all->top && all->sizes[*stop] != 0)
        *stop += pages_of(all->sizes[*stop] - 1U);
    return *stop > *start;
}

static void forget_copies(struct regions *all)
{
    for (size_t i = 0; i < all->n_copies; i++)
        munmap(all->copies[i].copy, all->copies[i].n_bytes);
    free(all->copies);
    all->copies = NULL;
    all->n_copies = 0;
}

static int copy_live(struct regions *all)
{
    size_t start = 0, stop, room = 0;
    for (; next_run(all, &start, &stop); start = stop) {
        if (all->n_copies == room) {
            room = room ? 2 * room : 64;
            struct copied *copies = realloc(all->copies, room * sizeof *copies);
            if (copies == NULL)
                return 0;
            all->copies = copies;
        }
        struct copied one = {own_base(all) + start * REGIONS_PAGE, NULL, (stop - start) * REGIONS_PAGE};
        one.copy = mmap(NULL, one.n_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (one.copy == MAP_FAILED)
            return 0;
        memcpy(one.copy, one.place, one.n_bytes);
        all->copies[all->n_copies++] = one;
    }
    return 1;
}

size_t regions_before_fork(void)
{
    size_t refused = 0;
    if (forks_ranks())
        return 0;
    pthread_mutex_lock(&lock);
    for (struct regions *all = list; all != NULL; all = all->next) {
        if (!all->is_shared || !is_mine(all))
            continue;
        size_t live = regions_count(all, all->rank).in_use;
        pthread_mutex_lock(&all->lock);
        forget_copies(all);
        if ((live > all->allowed && !all->is_closed) || !copy_live(all)) {
            forget_copies(all);
            refused += live;
        }
        pthread_mutex_unlock(&all->lock);
    }
    pthread_mutex_unlock(&lock);
    return refused;
}

void regions_after_fork(void)
{
    pthread_mutex_lock(&lock);
    for (struct regions *all = list; all != NULL; all = all->next)
        if (is_mine(all))
            forget_copies(all);
    pthread_mutex_unlock(&lock);
}

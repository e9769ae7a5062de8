/* What becomes of kept blocks while nothing is executed: a thread gives them back after some seconds.

It exists only while this process keeps something: the end of a command starts it, and it ends when nothing is left. No
signal is handled in it, and what is forked does not have it. */
#include "heap_internal.h"
#include "threads.h"
#include <sys/prctl.h>
#include <time.h>

#ifndef REGIONS_IDLE_NS
#define REGIONS_IDLE_NS 2000000000L /* tests have less patience */
#endif

static _Atomic int is_running;

/* Give back what is kept where no command was executed since this was last called; returns whether anything is still
kept. */
static int look_at(struct regions *all)
{
    if (!is_mine(all))
        return 0;
    pthread_mutex_lock(&all->lock);
    if (!all->is_busy && all->n_begun == all->n_seen)
        regions_shed_all(all);
    all->n_seen = all->n_begun;
    int keeps = atomic_load_explicit(&all->counts[all->rank].kept, memory_order_relaxed) > 0;
    pthread_mutex_unlock(&all->lock);
    return keeps;
}

static int look_at_all(void)
{
    int keeps = 0;
    for (struct regions *all = forks_lock(); all != NULL; all = all->next)
        keeps |= look_at(all);
    forks_unlock();
    return keeps;
}

static void *work(void *nothing)
{
    prctl(PR_SET_NAME, "synk-idle");
    const struct timespec period = {REGIONS_IDLE_NS / 1000000000, REGIONS_IDLE_NS % 1000000000};
    for (;;) {
        nanosleep(&period, NULL);
        if (look_at_all())
            continue;
        atomic_store(&is_running, 0);
        if (!look_at_all() || atomic_exchange(&is_running, 1)) /* a command may have ended just before */
            return nothing;
    }
}

void idle_begin(void)
{
    if (atomic_load_explicit(&is_running, memory_order_relaxed) || atomic_exchange(&is_running, 1))
        return;
    if (!start_thread(work, NULL))
        atomic_store(&is_running, 0); /* too many: the next command tries again */
}

void idle_forked(void)
{
    atomic_store(&is_running, 0);
}

/* Synchronization of ranks: spin briefly, then park on a futex. See sync.h. */
#define _GNU_SOURCE
#include "sync.h"
#include "posix.h"

#include <sched.h>

enum {
    READS_PER_CLOCK = 16, /* reads of the counters between two reads of the clock */
    PREEMPTED_NS = 50000, /* a longer gap between two reads of the clock means that another thread had the core */
    IDLE_FACTOR = 5,      /* a worker spins this many times longer for a message: its core has nothing else to do */
    STEPS_BITS = 24       /* low bits of an `ARRIVED` counter; the high bits hold the number of the message */
};

size_t sync_bytes(int n_ranks)
{
    return sizeof(struct sync_shared) + (size_t)n_ranks * sizeof(struct sync_slot);
}

/* Whether other ranks wait for the counter of `rank`. */
static bool matters(const struct sync *sync, enum counter counter, int rank)
{
    return counter == ARRIVED || (counter == SENT) == (rank == sync->controller);
}

static bool is_behind(const struct sync *sync, enum counter counter, int rank, int64_t value)
{
    return matters(sync, counter, rank) && atomic_load(&sync->shared->slots[rank].counters[counter]) < value;
}

bool sync_reached(const struct sync *sync, enum counter counter, int64_t value)
{
    for (int rank = 0; rank < sync->n_ranks; rank++)
        if (is_behind(sync, counter, rank, value))
            return false;
    return true;
}

static void wake(struct sync_slot *slot)
{
    if (atomic_load(&slot->parked)) {
        atomic_fetch_add(&slot->wakes, 1);
        futex(&slot->wakes, FUTEX_WAKE, 1, 0);
    }
}

void sync_post(struct sync *sync, enum counter counter, int64_t value)
{
    struct sync_slot *own = &sync->shared->slots[sync->rank];
    if (sync->spin > 0)
        atomic_store_explicit(&own->core, sched_getcpu(), memory_order_relaxed);
    atomic_store(&own->counters[counter], value);
    if (!sync_reached(sync, counter, value))
        return;
    for (int rank = 0; rank < sync->n_ranks; rank++)
        if (rank != sync->rank && (counter != ANSWERED || rank == sync->controller))
            wake(&sync->shared->slots[rank]);
}

void sync_restart(struct sync *sync, int64_t number)
{
    sync->step = number << STEPS_BITS;
}

int64_t sync_arrive(struct sync *sync)
{
    sync_post(sync, ARRIVED, ++sync->step);
    return sync->step;
}

/* Whether an awaited rank may be waiting for this rank's core. */
static bool shares_core(const struct sync *sync, enum counter counter, int64_t value)
{
    int core = sched_getcpu();
    for (int rank = 0; rank < sync->n_ranks; rank++)
        if (is_behind(sync, counter, rank, value)
            && atomic_load_explicit(&sync->shared->slots[rank].core, memory_order_relaxed) == core)
            return true;
    return false;
}

/* Only barriers are aborted: messages and answers still arrive. */
static bool is_aborted(const struct sync *sync, enum counter counter)
{
    return counter == ARRIVED && atomic_load(&sync->shared->aborted);
}

bool sync_spin(const struct sync *sync, enum counter counter, int64_t value)
{
    if (sync->spin == 0 || shares_core(sync, counter, value))
        return sync_reached(sync, counter, value);
    int64_t time = now(), deadline = time + sync->spin * (counter == SENT ? IDLE_FACTOR : 1), before;
    do {
        for (int read = 0; read < READS_PER_CLOCK; read++) {
            if (sync_reached(sync, counter, value))
                return true;
            cpu_relax();
        }
        before = time;
        sched_yield();
        time = now();
    } while (!is_aborted(sync, counter) && time < deadline && time - before < PREEMPTED_NS);
    return false;
}

bool sync_park(struct sync *sync, enum counter counter, int64_t value)
{
    struct sync_slot *own = &sync->shared->slots[sync->rank];
    uint32_t wakes = atomic_load(&own->wakes);
    atomic_store(&own->parked, 1);
    bool woken = sync_reached(sync, counter, value) || is_aborted(sync, counter)
                 || futex(&own->wakes, FUTEX_WAIT, wakes, POLL_NS) == 0 || atomic_load(&own->wakes) != wakes;
    atomic_store(&own->parked, 0);
    return woken;
}

void sync_abort(struct sync *sync)
{
    atomic_store(&sync->shared->aborted, 1);
    for (int rank = 0; rank < sync->n_ranks; rank++)
        if (rank != sync->rank)
            wake(&sync->shared->slots[rank]);
}

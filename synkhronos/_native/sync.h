/* Synchronization of the ranks of a session through counters in shared memory and futexes. Independent of Python.
 *
 * Each rank owns one counter of each kind (`enum counter`). It alone writes that counter, and only ever raises it, so a
 * late reader loses nothing. A waiting rank first spins, if every rank can have a core of its own and no rank that it
 * waits for last ran on this rank's core. While it spins it yields the core in every round, and stops as soon as
 * another thread has taken it, because the awaited rank may need that core. Then it parks: it announces that it will
 * sleep, and waits on a futex.
 *
 * Invariants
 * - No wake-up is lost. A posting rank writes its counter and then reads which ranks are parked; a parking rank sets
 *   its `parked` flag and then reads the counters. All four accesses are sequentially consistent, so at least one of
 *   the two ranks sees the other's write. To wake a parked rank, the posting rank first raises that rank's `wakes`, so
 *   that the kernel does not put to sleep a rank that was woken in the meantime.
 * - Data is visible before the counter that announces it: writing a counter releases, reading it acquires.
 * - No wait is endless: a rank parks for at most `POLL_NS`. Before each `sync_park`, callers check whether the awaited
 *   ranks are alive and whether the abort flag is set.
 * - Spurious wake-ups are harmless: a woken rank reads the counters again and parks again.
 *
 * `tests/model/sync.pml` models this protocol in Promela.
 */
#ifndef SYNKHRONOS_SYNC_H
#define SYNKHRONOS_SYNC_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

_Static_assert(ATOMIC_INT_LOCK_FREE == 2 && ATOMIC_LLONG_LOCK_FREE == 2,
               "processes cannot share a lock inside an atomic");

/* Longest time between two checks whether the other ranks are alive. */
#ifndef POLL_NS
#define POLL_NS 50000000
#endif

enum counter {
    SENT,     /* number of the last message; only the master's counter matters */
    ANSWERED, /* number of the last message that each worker has answered; the master's counter is ignored */
    ARRIVED,  /* last barrier step at which each rank has arrived */
    N_COUNTERS
};

/* The state that one rank writes. It fills one cache line, because a rank that reads the counter usually reads
 * `parked` next. The monitor, which runs in other processes (`python -m synkhronos top`), depends on this layout. */
struct sync_slot {
    _Alignas(64) _Atomic int64_t counters[N_COUNTERS];
    _Atomic int32_t core;    /* where this rank last posted */
    _Atomic uint32_t parked; /* whether it sleeps or is about to */
    _Atomic uint32_t wakes;  /* how often other ranks have woken it; it sleeps only while this is unchanged */
};

/* Shared memory, initially all zero. */
struct sync_shared {
    _Alignas(64) _Atomic uint32_t aborted;
    struct sync_slot slots[];
};

/* One process's view. */
struct sync {
    struct sync_shared *shared;
    int n_ranks, rank, master;
    int64_t spin; /* nanoseconds to spin before parking; 0 where ranks share cores */
    int64_t step; /* the last barrier step at which this rank arrived */
};

/* Bytes of shared memory needed, aligned to 64. */
size_t sync_bytes(int n_ranks);

/* Whether all counters of a kind are at least `value`. */
bool sync_reached(const struct sync *sync, enum counter counter, int64_t value);

/* Set this rank's counter. If all counters have now reached `value`, wake the parked ranks that may wait for it. */
void sync_post(struct sync *sync, enum counter counter, int64_t value);

/* Reset the barrier steps at the start of a message. All ranks call this, so that they agree on later steps. */
void sync_restart(struct sync *sync, int64_t number);

/* Arrive at the next step of the barrier, without waiting. Returns the step. */
int64_t sync_arrive(struct sync *sync);

/* Spin until all counters reach `value`, as long as spinning is useful. Returns whether they have. */
bool sync_spin(const struct sync *sync, enum counter counter, int64_t value);

/* Park until all counters reach `value`, for at most `POLL_NS`. Returns false if nothing happened in that time. */
bool sync_park(struct sync *sync, enum counter counter, int64_t value);

/* Set the abort flag: every rank that waits at the barrier stops waiting while it is set. */
void sync_abort(struct sync *sync);

#endif

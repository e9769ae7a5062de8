/* Synchronization of the ranks of a session by counters in shared memory, and futexes. Independent of Python.
 *
 * Each rank owns one counter of each kind (`enum counter`). Only the owner writes a counter, and it only increases it,
 * so a rank that reads late misses nothing.
 *
 * A waiting rank first spins. It skips this if ranks share cores, or if an awaited rank last ran on this rank's core.
 * While it spins, it yields the core in each round. It stops spinning as soon as another thread has used the core,
 * because the awaited rank may need this core. Then the rank parks: it sets its `parked` flag and waits on a futex.
 *
 * Invariants
 * - No wake-up is lost. A posting rank writes its counter, and then reads which ranks are parked. A parking rank sets
 *   its `parked` flag, and then reads the counters. All four accesses are sequentially consistent, so at least one of
 *   the two ranks sees the other's write. Before the posting rank wakes a parked rank, it increments that rank's
 *   `wakes`. So the kernel does not put a rank to sleep that was woken just before.
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

/* Longest time between two checks that the other ranks are alive. */
#ifndef POLL_NS
#define POLL_NS 50000000
#endif

enum counter {
    SENT,     /* number of the last message sent; only the controller's counter is used */
    ANSWERED, /* number of the last message that each worker has answered; the controller's counter is not used */
    ARRIVED,  /* last barrier step at which each rank has arrived */
    N_COUNTERS
};

/* The state of one rank. It fills one cache line, because a rank that reads the counter usually reads `parked` next.
 * The monitor (`python -m synkhronos top`), which is another process, depends on this layout. */
struct sync_slot {
    _Alignas(64) _Atomic int64_t counters[N_COUNTERS];
    _Atomic int32_t core;    /* the core on which this rank last posted */
    _Atomic uint32_t parked; /* whether this rank sleeps or is about to */
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
    int n_ranks, rank, controller;
    int64_t spin; /* nanoseconds to spin before parking; 0 where ranks share cores */
    int64_t step; /* the last barrier step at which this rank arrived */
};

/* Bytes of shared memory needed, aligned to 64. */
size_t sync_bytes(int n_ranks);

/* Whether all counters of a kind are at least `value`. */
bool sync_reached(const struct sync *sync, enum counter counter, int64_t value);

/* Set this rank's counter. If all counters of that kind are at least `value` now, wake ranks that may wait for it. */
void sync_post(struct sync *sync, enum counter counter, int64_t value);

/* Reset the barrier steps at the start of a message. All ranks call this, so that they agree on later steps. */
void sync_restart(struct sync *sync, int64_t number);

/* Arrive at the next step of the barrier, without waiting. Returns the step. */
int64_t sync_arrive(struct sync *sync);

/* Spin until all counters reach `value`, or spinning is no longer useful. Returns whether they have reached it. */
bool sync_spin(const struct sync *sync, enum counter counter, int64_t value);

/* Park until all counters reach `value`, for at most `POLL_NS`. Returns false after a time-out or a signal. */
bool sync_park(struct sync *sync, enum counter counter, int64_t value);

/* Set the abort flag: every rank that waits at the barrier stops waiting while it is set. */
void sync_abort(struct sync *sync);

#endif

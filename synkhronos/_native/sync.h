/* How the ranks of a session tell each other how far they are, and wait for each other. Knows nothing of Python.
 *
 * What ranks wait for are words in shared memory, in boards: each word has one writer and only ever grows, so nothing is
 * lost, whatever a rank missed or however long it slept. A rank that waits looks at the words for a while, if every rank
 * can have a core of its own, and none that it waits for was last seen on this one's core. It offers the core to others
 * all the while, and looks no longer when one has taken it: what it waits for may need that one. Then it parks in a
 * futex, after it has said so.
 *
 * Invariants
 * - No wake-up is lost. Who posts writes its word, and then looks who is parked; who parks says so, and then looks at the
 *   words. All four are sequentially consistent, so at least one sees the other. Who sees that a rank is parked raises
 *   the number of its calls before it wakes it: the kernel puts nobody to sleep who has been called meanwhile.
 * - Nothing is seen before what it announces: to write a word releases what was written before, to read it acquires that.
 * - No wait without a way out: a rank parks for `POLL_NS` at most. Whoever calls `words_park` looks before each time
 *   whether the peers that could end the wait are alive, and whether the abort flag is up.
 * - To be woken in vain does no harm: who was parked looks again, and parks again.
 *
 * `tests/model/sync.pml` is this protocol in Promela.
 */
#ifndef SYNKHRONOS_WORDS_H
#define SYNKHRONOS_WORDS_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

_Static_assert(ATOMIC_INT_LOCK_FREE == 2 && ATOMIC_LLONG_LOCK_FREE == 2, "processes cannot share a lock inside an atomic");

/* Longest time between two looks at whether the peers are alive. */
#ifndef POLL_NS
#define POLL_NS 50000000
#endif

enum board {
    SENT,     /* the number of the last message: only the master's word counts */
    ANSWERED, /* the number of the last message that each worker has answered: the master's does not count */
    ARRIVED,  /* for each rank, the last step at which it arrived at a barrier */
    BOARDS
};

/* What a rank writes, all of it in one cache line: who waits for its word needs to know next whether it is parked. */
struct seat {
    _Alignas(64) _Atomic int64_t words[BOARDS];
    _Atomic int32_t core;    /* on which it last posted */
    _Atomic uint32_t parked; /* whether it is, or is about to be */
    _Atomic uint32_t calls;  /* how often others have woken it; it sleeps as long as that stays the same */
};

/* In shared memory, at first all zero. */
struct hall {
    _Alignas(64) _Atomic uint32_t aborted;
    struct seat seats[];
};

/* One process's view. */
struct words {
    struct hall *hall;
    int n_ranks, rank, master;
    int64_t spin; /* nanoseconds to look before parking; 0 where ranks have to share cores */
    int64_t step; /* the last one at which this rank arrived */
};

/* Bytes of shared memory, at a multiple of 64. */
size_t words_bytes(int n_ranks);

/* Whether all words of a board are at least `value`. */
bool words_reached(const struct words *words, enum board board, int64_t value);

/* Write this rank's word; if now all words of the board are as high, wake whoever is parked and may wait for that. */
void words_post(struct words *words, enum board board, int64_t value);

/* All ranks call this when they begin with a message, so that all agree on the steps that come. */
void words_restart(struct words *words, int64_t number);

/* Tell the others that this rank has got to its next step at the barrier; returns the step. */
int64_t words_arrive(struct words *words);

/* Look for a while; returns whether all words are at least `value`, at once if it makes no sense to look on. */
bool words_watch(const struct words *words, enum board board, int64_t value);

/* Park until all words are at least `value`, for `POLL_NS` at most; returns whether anything has come. */
bool words_park(struct words *words, enum board board, int64_t value);

/* Have every rank that waits at the barrier give up, as long as the flag is up. */
void words_abort(struct words *words);

#endif

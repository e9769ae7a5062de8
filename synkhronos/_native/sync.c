#define _GNU_SOURCE
#include "sync.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum {
    LOOKS = 16,       /* at the words, for each at the clock */
    TAKEN_NS = 50000, /* between two looks: somebody else has had the core */
    IDLE_SPINS = 5,   /* how much longer a worker looks for the next message: its core has nothing else to do */
    STEPS_BITS = 24   /* of a word of `ARRIVED`; the rest is the number of the message */
};

/* Not private to a process. Where a sandbox refuses futexes, nothing sleeps, and waiting is slow but right; more is not
 * done for that, because glibc ends the process when one of its own locks is refused a futex. */
static long futex(_Atomic uint32_t *word, int operation, uint32_t value, long nanoseconds)
{
    struct { long seconds, nanoseconds; } limit = {0, nanoseconds};
    return syscall(SYS_futex, word, operation, value, &limit, NULL, 0);
}

static int64_t now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (int64_t)time.tv_sec * 1000000000 + time.tv_nsec;
}

/* Tell the processor that this is a loop that waits. */
static void pause_briefly(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("isb");
#endif
}

size_t words_bytes(int n_ranks)
{
    return sizeof(struct hall) + (size_t)n_ranks * sizeof(struct seat);
}

/* Whether a rank's word is what others wait for. */
static bool counts(const struct words *words, enum board board, int rank)
{
    return board == ARRIVED || (board == SENT) == (rank == words->master);
}

static bool is_behind(const struct words *words, enum board board, int rank, int64_t value)
{
    return counts(words, board, rank) && atomic_load(&words->hall->seats[rank].words[board]) < value;
}

bool words_reached(const struct words *words, enum board board, int64_t value)
{
    for (int rank = 0; rank < words->n_ranks; rank++)
        if (is_behind(words, board, rank, value))
            return false;
    return true;
}

static void wake(struct seat *seat)
{
    if (atomic_load(&seat->parked)) {
        atomic_fetch_add(&seat->calls, 1);
        futex(&seat->calls, FUTEX_WAKE, 1, 0);
    }
}

void words_post(struct words *words, enum board board, int64_t value)
{
    struct seat *own = &words->hall->seats[words->rank];
    if (words->spin > 0)
        atomic_store_explicit(&own->core, sched_getcpu(), memory_order_relaxed);
    atomic_store(&own->words[board], value);
    if (!words_reached(words, board, value))
        return;
    for (int rank = 0; rank < words->n_ranks; rank++)
        if (rank != words->rank && (board != ANSWERED || rank == words->master))
            wake(&words->hall->seats[rank]);
}

void words_restart(struct words *words, int64_t number)
{
    words->step = number << STEPS_BITS;
}

int64_t words_arrive(struct words *words)
{
    words_post(words, ARRIVED, ++words->step);
    return words->step;
}

/* Whether one that this rank waits for may have to wait until this rank leaves the core. */
static bool shares_core(const struct words *words, enum board board, int64_t value)
{
    int core = sched_getcpu();
    for (int rank = 0; rank < words->n_ranks; rank++)
        if (is_behind(words, board, rank, value)
            && atomic_load_explicit(&words->hall->seats[rank].core, memory_order_relaxed) == core)
            return true;
    return false;
}

/* An abort concerns the barrier alone: messages and answers still come. */
static bool is_aborted(const struct words *words, enum board board)
{
    return board == ARRIVED && atomic_load(&words->hall->aborted);
}

bool words_watch(const struct words *words, enum board board, int64_t value)
{
    if (words->spin == 0 || shares_core(words, board, value))
        return words_reached(words, board, value);
    int64_t time = now(), deadline = time + words->spin * (board == SENT ? IDLE_SPINS : 1), before;
    do {
        for (int look = 0; look < LOOKS; look++) {
            if (words_reached(words, board, value))
                return true;
            pause_briefly();
        }
        before = time;
        sched_yield();
        time = now();
    } while (!is_aborted(words, board) && time < deadline && time - before < TAKEN_NS);
    return false;
}

bool words_park(struct words *words, enum board board, int64_t value)
{
    struct seat *own = &words->hall->seats[words->rank];
    uint32_t calls = atomic_load(&own->calls);
    atomic_store(&own->parked, 1);
    bool come = words_reached(words, board, value) || is_aborted(words, board)
                || futex(&own->calls, FUTEX_WAIT, calls, POLL_NS) == 0 || atomic_load(&own->calls) != calls;
    atomic_store(&own->parked, 0);
    return come;
}

void words_abort(struct words *words)
{
    atomic_store(&words->hall->aborted, 1);
    for (int rank = 0; rank < words->n_ranks; rank++)
        if (rank != words->rank)
            wake(&words->hall->seats[rank]);
}

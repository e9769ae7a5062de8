/* The ranks of synkhronos/_native/sync.c as threads of one process, so that the sanitizers see everything that they
 * share.
 *
 *     sync_threads RANKS MESSAGES SEED
 *
 * Sends messages, waits at barriers and collects answers, with random pauses; some ranks abort between barriers. Data
 * that one rank writes for the others lies in plain memory; only the counters order the accesses. Exits with status 1
 * if a rank reads wrong data, or if so many waits end by the timeout that wake-ups must have been lost. */
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

static _Thread_local unsigned int random_state;

static unsigned int draw(unsigned int limit)
{
    return (unsigned int)rand_r(&random_state) % limit;
}

static void pause_at_random(void)
{
    unsigned int kind = draw(256);
    if (kind < 2)
        nanosleep(&(struct timespec){0, draw(200000)}, NULL);
    else if (kind < 16)
        sched_yield();
}

/* Pause at random before each atomic operation and system call of the protocol. */
#undef atomic_load
#undef atomic_store
#define atomic_load(word) (pause_at_random(), atomic_load_explicit(word, memory_order_seq_cst))
#define atomic_store(word, value) (pause_at_random(), atomic_store_explicit(word, value, memory_order_seq_cst))
#define syscall(...) (pause_at_random(), syscall(__VA_ARGS__))
#include "sync.c"

enum { MOST_RANKS = 8, STEPS = 4 };

static struct sync_shared *shared;
static int n_ranks;
static int64_t n_messages;
static unsigned int seed;

static int64_t message, payload[MOST_RANKS], answer[MOST_RANKS]; /* not atomic: ordered by the counters */
static atomic_long time_outs, aborts;

static void expect(bool right, const char *what, int rank, int64_t number)
{
    if (!right) {
        fprintf(stderr, "rank %d, message %lld: %s\n", rank, (long long)number, what);
        exit(1);
    }
}

static bool wait_for(struct sync *sync, enum counter counter, int64_t value)
{
    bool woken = true;
    while (!(woken ? sync_spin(sync, counter, value) : sync_reached(sync, counter, value))) {
        if (counter == ARRIVED && atomic_load(&shared->aborted))
            return false;
        woken = sync_park(sync, counter, value);
        if (!woken)
            expect(++time_outs < 5, "wake-ups are lost", sync->rank, value);
    }
    return true;
}

static void execute(struct sync *sync, int64_t number)
{
    sync_restart(sync, number);
    for (int step = 0; step < STEPS; step++) {
        pause_at_random();
        if (draw(4 * n_ranks * STEPS) == 0) {
            aborts++;
            sync_abort(sync);
            return;
        }
        payload[sync->rank] = STEPS * number + step;
        int64_t arrived = sync_arrive(sync);
        pause_at_random();
        if (!wait_for(sync, ARRIVED, arrived))
            return;
        for (int rank = 0; rank < n_ranks; rank++)
            expect(payload[rank] == STEPS * number + step, "another payload", sync->rank, number);
        if (!wait_for(sync, ARRIVED, sync_arrive(sync)))
            return;
    }
}

static void command(struct sync *sync)
{
    for (int64_t number = 1; number <= n_messages; number++) {
        message = 7 * number;
        sync_post(sync, SENT, number);
        execute(sync, number);
        wait_for(sync, ANSWERED, number);
        for (int rank = 1; rank < n_ranks; rank++)
            expect(answer[rank] == 9 * number, "another answer", rank, number);
        atomic_store(&shared->aborted, 0);
        pause_at_random();
    }
}

static void serve(struct sync *sync)
{
    for (int64_t number = 1; number <= n_messages; number++) {
        wait_for(sync, SENT, number);
        expect(message == 7 * number, "another message", sync->rank, number);
        execute(sync, number);
        pause_at_random();
        answer[sync->rank] = 9 * number;
        sync_post(sync, ANSWERED, number);
    }
}

static void *live(void *place)
{
    int rank = (int)(intptr_t)place;
    random_state = seed * MOST_RANKS + rank;
    struct sync sync = {shared, n_ranks, rank, 0, draw(2) * 20000, 0};
    (rank == 0 ? command : serve)(&sync);
    return NULL;
}

int main(int argc, char **argv)
{
    if (argc != 4 || (n_ranks = atoi(argv[1])) < 1 || n_ranks > MOST_RANKS)
        return 2;
    n_messages = atoll(argv[2]);
    seed = atoi(argv[3]);
    shared = aligned_alloc(_Alignof(struct sync_shared), sync_bytes(n_ranks));
    memset(shared, 0, sync_bytes(n_ranks));
    pthread_t threads[MOST_RANKS];
    for (int rank = 0; rank < n_ranks; rank++)
        pthread_create(&threads[rank], NULL, live, (void *)(intptr_t)rank);
    for (int rank = 0; rank < n_ranks; rank++)
        pthread_join(threads[rank], NULL);
    printf("%ld aborts, %ld time-outs\n", (long)aborts, (long)time_outs);
    free(shared);
    return 0;
}

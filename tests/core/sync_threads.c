/* The ranks of synkhronos/_native/sync.c as threads of one process, so that the sanitizers see all that they share.
 *
 *     sync_threads RANKS MESSAGES SEED
 *
 * Messages, two kinds of barriers, and answers, with pauses at random; some ranks fail in the middle. What one rank writes
 * for the others lies in plain memory, and the words alone say when it may be read. Ends with status 1 if a rank reads
 * what it should not, or has to be saved from its sleep by the time-out so often that wake-ups must be lost.
 */
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

/* Pauses between any two steps of the protocol. */
#undef atomic_load
#undef atomic_store
#define atomic_load(word) (pause_at_random(), atomic_load_explicit(word, memory_order_seq_cst))
#define atomic_store(word, value) (pause_at_random(), atomic_store_explicit(word, value, memory_order_seq_cst))
#define syscall(...) (pause_at_random(), syscall(__VA_ARGS__))
#include "sync.c"

enum { MOST_RANKS = 8, STEPS = 4 };

static struct hall *hall;
static int n_ranks;
static int64_t n_messages;
static unsigned int seed;

static int64_t message, payload[MOST_RANKS], answer[MOST_RANKS]; /* plain */
static atomic_long time_outs, aborts;

static void expect(bool right, const char *what, int rank, int64_t number)
{
    if (!right) {
        fprintf(stderr, "rank %d, message %lld: %s\n", rank, (long long)number, what);
        exit(1);
    }
}

static bool wait_for(struct words *words, enum board board, int64_t value)
{
    bool come = true;
    while (!(come ? words_watch(words, board, value) : words_reached(words, board, value))) {
        if (board == ARRIVED && atomic_load(&hall->aborted))
            return false;
        come = words_park(words, board, value);
        if (!come)
            expect(++time_outs < 5, "wake-ups are lost", words->rank, value);
    }
    return true;
}

static void execute(struct words *words, int64_t number)
{
    words_restart(words, number);
    for (int step = 0; step < STEPS; step++) {
        pause_at_random();
        if (draw(4 * n_ranks * STEPS) == 0) {
            aborts++;
            words_abort(words);
            return;
        }
        payload[words->rank] = STEPS * number + step;
        int64_t arrived = words_arrive(words);
        pause_at_random();
        if (!wait_for(words, ARRIVED, arrived))
            return;
        for (int rank = 0; rank < n_ranks; rank++)
            expect(payload[rank] == STEPS * number + step, "another payload", words->rank, number);
        if (!wait_for(words, ARRIVED, words_arrive(words)))
            return;
    }
}

static void command(struct words *words)
{
    for (int64_t number = 1; number <= n_messages; number++) {
        message = 7 * number;
        words_post(words, SENT, number);
        execute(words, number);
        wait_for(words, ANSWERED, number);
        for (int rank = 1; rank < n_ranks; rank++)
            expect(answer[rank] == 9 * number, "another answer", rank, number);
        atomic_store(&hall->aborted, 0);
        pause_at_random();
    }
}

static void serve(struct words *words)
{
    for (int64_t number = 1; number <= n_messages; number++) {
        wait_for(words, SENT, number);
        expect(message == 7 * number, "another message", words->rank, number);
        execute(words, number);
        pause_at_random();
        answer[words->rank] = 9 * number;
        words_post(words, ANSWERED, number);
    }
}

static void *live(void *place)
{
    int rank = (int)(intptr_t)place;
    random_state = seed * MOST_RANKS + rank;
    struct words words = {hall, n_ranks, rank, 0, draw(2) * 20000, 0};
    (rank == 0 ? command : serve)(&words);
    return NULL;
}

int main(int argc, char **argv)
{
    if (argc != 4 || (n_ranks = atoi(argv[1])) < 1 || n_ranks > MOST_RANKS)
        return 2;
    n_messages = atoll(argv[2]);
    seed = atoi(argv[3]);
    hall = aligned_alloc(_Alignof(struct hall), words_bytes(n_ranks));
    memset(hall, 0, words_bytes(n_ranks));
    pthread_t threads[MOST_RANKS];
    for (int rank = 0; rank < n_ranks; rank++)
        pthread_create(&threads[rank], NULL, live, (void *)(intptr_t)rank);
    for (int rank = 0; rank < n_ranks; rank++)
        pthread_join(threads[rank], NULL);
    printf("%ld aborts, %ld time-outs\n", (long)aborts, (long)time_outs);
    free(hall);
    return 0;
}

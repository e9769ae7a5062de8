/* The ranks of synkhronos/_native/collectives.c as threads of one process, so that the sanitizers see everything that
 * they share.
 *
 *     collectives_threads RANKS COMMANDS SEED
 *
 * Runs all-reduces, reduces and gathers of up to 300 arrays of all sizes, some of which are treated as shared memory.
 * In some collectives, one rank has a different signature. Exits with status 1 if a result is wrong. */
#define _GNU_SOURCE
#include "collectives.h"
#include "sync.h"

#include <pthread.h>
#include <sched.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { MOST_RANKS = 8, MOST = 300, LARGEST = 200000 };

static int n_ranks;
static int64_t n_commands;
static unsigned int seed;
static struct sync_shared *shared;
static char *memory;
static const reduction *sum;

struct rank {
    struct sync sync;
    int32_t *send[MOST], *recv[MOST];
    bool is_shared[MOST];
};

static unsigned int draw(unsigned int *state, unsigned int limit)
{
    return (unsigned int)rand_r(state) % limit;
}

static void expect(bool right, const char *what, int rank, int64_t number)
{
    if (!right) {
        fprintf(stderr, "rank %d, command %lld: %s\n", rank, (long long)number, what);
        exit(1);
    }
}

static int barrier(void *context)
{
    struct rank *rank = context;
    int64_t step = sync_arrive(&rank->sync);
    while (!sync_spin(&rank->sync, ARRIVED, step))
        sync_park(&rank->sync, ARRIVED, step);
    return 0;
}

static int is_shared(void *context, const void *first, size_t n_bytes)
{
    const struct rank *rank = context;
    for (int i = 0; i < MOST; i++)
        if (rank->is_shared[i] && (first == rank->send[i] || first == rank->recv[i]))
            return 1;
    return 0;
}

static size_t size_at_random(unsigned int *state)
{
    switch (draw(state, 8)) {
    case 0:
        return draw(state, LARGEST);
    case 1:
    case 2:
        return draw(state, 9000);
    default:
        return draw(state, 40);
    }
}

static int32_t value_of(int64_t number, int i, int rank, size_t element)
{
    return (int32_t)(number + 3 * i + 5 * rank + (int64_t)element);
}

/* Random choices are drawn from `alike` if all ranks must make the same choice, and from `own` otherwise. */
static void command(struct rank *rank, struct collectives *collectives, int64_t number, unsigned int *alike,
                    unsigned int *own)
{
    enum { ALL, ONE, GATHER } kind = draw(alike, 3);
    size_t counts[MOST][MOST_RANKS];
    struct array arrays[MOST];
    int me = rank->sync.rank, n = draw(alike, 10) ? (int)draw(alike, 5) : MOST - (int)draw(alike, 40);
    int root = (int)draw(alike, (unsigned)n_ranks);
    bool differs = draw(alike, 8) == 0, skip_last_barrier = draw(alike, 2);
    struct callbacks callbacks = {barrier, is_shared, rank};
    memset(arrays, 0, sizeof arrays);
    for (int i = 0; i < n; i++) {
        size_t total = 0, size = size_at_random(alike);
        for (int k = 0; k < n_ranks; k++)
            total += counts[i][k] = kind == GATHER && draw(alike, 2) ? draw(alike, (unsigned)size + 1) : size;
        bool wanted = kind != ONE || me == root;
        rank->send[i] = malloc((counts[i][me] + 1) * 4);
        rank->recv[i] = kind == ALL ? rank->send[i] : wanted ? malloc((total + 1) * 4) : NULL;
        rank->is_shared[i] = draw(own, 8) != 0;
        for (size_t k = 0; k < counts[i][me]; k++)
            rank->send[i][k] = value_of(number, i, me, k);
        arrays[i] = (struct array){(char *)rank->send[i], (char *)rank->recv[i], counts[i][me], 4, 4,
                                   kind == GATHER ? NULL : sum, kind == GATHER ? counts[i] : NULL};
    }
    sync_restart(&rank->sync, number);
    collectives_restart(collectives);
    if (draw(own, 4) == 0)
        sched_yield();
    enum outcome outcome =
        collectives_run(collectives, arrays, (size_t)n, differs && me == root, skip_last_barrier, &callbacks);
    expect((outcome == MISMATCH) == (differs && n_ranks > 1), "another outcome", me, number);
    if (skip_last_barrier)
        expect(collectives_run(collectives, NULL, 0, 0, draw(alike, 2), &callbacks) == DONE, "no meeting", me, number);
    for (int i = 0; i < n; i++) {
        size_t at = 0;
        for (int k = 0; rank->recv[i] != NULL && outcome != MISMATCH && k < (kind == GATHER ? n_ranks : 1); k++)
            for (size_t element = 0; element < counts[i][k]; element++) {
                int32_t right = value_of(number, i, k, element);
                for (int other = 1; kind != GATHER && other < n_ranks; other++)
                    right += value_of(number, i, other, element);
                expect(rank->recv[i][at++] == right, "another result", me, number);
            }
        if (rank->recv[i] != rank->send[i])
            for (size_t k = 0; k < counts[i][me]; k++)
                expect(rank->send[i][k] == value_of(number, i, me, k), "an operand was changed", me, number);
    }
    barrier(rank); /* takes the place of the answers, for which the controller waits before the next message */
    for (int i = 0; i < n; i++) {
        if (rank->recv[i] != rank->send[i])
            free(rank->recv[i]);
        free(rank->send[i]);
        rank->is_shared[i] = false;
    }
}

static void *run(void *argument)
{
    int me = (int)(intptr_t)argument;
    struct rank *rank = calloc(1, sizeof *rank);
    rank->sync = (struct sync){shared, n_ranks, me, 0, me % 2 ? 20000 : 0, 0};
    struct collectives *collectives = collectives_create(memory, n_ranks, me);
    unsigned int alike = seed, own = seed + 77 * (unsigned)me;
    for (int64_t number = 1; number <= n_commands; number++)
        command(rank, collectives, number, &alike, &own);
    collectives_free(collectives);
    free(rank);
    return NULL;
}

int main(int argc, char **argv)
{
    if (argc != 4)
        return 2;
    n_ranks = atoi(argv[1]);
    n_commands = atoll(argv[2]);
    seed = (unsigned)atoi(argv[3]);
    size_t n_bytes = collectives_bytes(n_ranks);
    shared = aligned_alloc(64, (sync_bytes(n_ranks) + 63) / 64 * 64);
    memory = aligned_alloc(64, (n_bytes + 63) / 64 * 64);
    memset(shared, 0, sync_bytes(n_ranks));
    memset(memory, 0, n_bytes);
    reduction *made = reduction_create(reduction_kernels(), SUM, I32, I32, (size_t)n_ranks, NULL);
    sum = made;
    pthread_t threads[MOST_RANKS];
    for (int me = 0; me < n_ranks; me++)
        pthread_create(&threads[me], NULL, run, (void *)(intptr_t)me);
    for (int me = 0; me < n_ranks; me++)
        pthread_join(threads[me], NULL);
    reduction_free(made);
    free(shared);
    free(memory);
    return 0;
}

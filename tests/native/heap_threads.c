/* Threads that allocate, free each other's blocks and fork, checked by the sanitizers. */
#define _GNU_SOURCE
#include "heap.h"
#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#define N_THREADS 4
#define N_SLOTS 24
#define N_ROUNDS 600
#define N_FORKS 6
#define ARENA ((size_t)96 << 20)

#define CHECK(truth)                                                                                                   \
    do {                                                                                                               \
        if (!(truth)) {                                                                                                \
            fprintf(stderr, "%s:%d: not %s\n", __FILE__, __LINE__, #truth);                                            \
            _exit(1);                                                                                                  \
        }                                                                                                              \
    } while (0)

static struct heap *heap;

/* Blocks that any thread may use next. */
static struct slot {
    pthread_mutex_t lock;
    unsigned char *block, mark;
    size_t n_bytes;
} slots[N_SLOTS];

static void stamp(struct slot *slot, unsigned char mark)
{
    slot->mark = mark;
    memset(slot->block, mark, slot->n_bytes);
}

static void check(const struct slot *slot, size_t n_bytes)
{
    for (size_t i = 0; i < n_bytes; i += i < 64 ? 1 : 509)
        CHECK(slot->block[i] == slot->mark);
    if (n_bytes > 0)
        CHECK(slot->block[n_bytes - 1] == slot->mark);
}

static size_t some_size(unsigned *seed)
{
    unsigned power = (unsigned)rand_r(seed) % 8;
    return ((size_t)rand_r(seed) % ((size_t)16384 << power)) + 1;
}

static void work_on(struct slot *slot, unsigned *seed)
{
    size_t n_bytes = some_size(seed);
    if (slot->block == NULL && rand_r(seed) % 2) {
        slot->block = heap_calloc(heap, n_bytes, 1);
        CHECK(slot->block != NULL);
        for (size_t i = 0; i < n_bytes; i++)
            CHECK(slot->block[i] == 0);
    } else if (slot->block == NULL) {
        slot->block = heap_malloc(heap, n_bytes);
    } else if (rand_r(seed) % 4 == 0) {
        size_t kept = n_bytes < slot->n_bytes ? n_bytes : slot->n_bytes;
        check(slot, slot->n_bytes);
        slot->block = heap_realloc(heap, slot->block, n_bytes);
        check(slot, kept);
    } else {
        check(slot, slot->n_bytes);
        heap_free(heap, slot->block, 0);
        slot->block = NULL;
        return;
    }
    ptrdiff_t offset = heap_offset(heap, slot->block, n_bytes);
    CHECK(offset < 0 || offset % 4096 == 0);
    CHECK(offset < 0 || heap_shared_base(heap) + offset == (char *)slot->block);
    slot->n_bytes = n_bytes;
    stamp(slot, (unsigned char)rand_r(seed));
}

static void *work(void *argument)
{
    unsigned seed = (unsigned)(uintptr_t)argument;
    for (int round = 0; round < N_ROUNDS; round++) {
        struct slot *slot = &slots[(unsigned)rand_r(&seed) % N_SLOTS];
        pthread_mutex_lock(&slot->lock);
        work_on(slot, &seed);
        pthread_mutex_unlock(&slot->lock);
        if (round % 7 == 0)
            heap_end_command(heap);
        if (round % 501 == 0)
            heap_trim(heap);
        if (heap_is_low(heap))
            heap_set_budget(heap, 2 * ARENA);
    }
    return NULL;
}

/* Does not call the sanitizers' malloc, because other threads may have held its locks at the fork. */
static void live_in_child(struct slot *held, int has_copies)
{
    if (has_copies) {
        check(held, held->n_bytes);
        stamp(held, 99);
    }
    heap_free(heap, held->block, 0);
    heap_end_command(heap);
    _exit(0);
}

static void fork_child(struct slot *held, int copies)
{
    for (int i = 0; copies && i < N_SLOTS; i++) /* in Python, the GIL keeps other threads from writing */
        pthread_mutex_lock(&slots[i].lock);
    if (copies)
        CHECK(heap_before_fork() == 0);
    for (int i = 0; copies && i < N_SLOTS; i++)
        pthread_mutex_unlock(&slots[i].lock);
    pid_t pid = fork();
    if (pid == 0)
        live_in_child(held, copies);
    CHECK(pid > 0);
    if (copies)
        heap_after_fork();
    stamp(held, (unsigned char)(held->mark + 1));
    int status;
    CHECK(waitpid(pid, &status, 0) == pid && WIFEXITED(status) && WEXITSTATUS(status) == 0);
    check(held, held->n_bytes);
}

/* Cached blocks are released when no command has run for some time, and not before. */
static void be_idle(int rank)
{
    heap_begin_command(heap);
    heap_free(heap, heap_malloc(heap, 500000), 0);
    usleep(200000);
    CHECK(heap_usage(heap, rank).cached > 0);
    heap_end_command(heap);
    for (int i = 0; heap_usage(heap, rank).cached > 0; i++) {
        CHECK(i < 1000);
        usleep(10000);
    }
}

int main(int n, char **arguments)
{
    int fd = memfd_create("harness", MFD_CLOEXEC), is_private = n > 1 && strcmp(arguments[1], "private") == 0;
    heap = heap_create(is_private ? -1 : fd, is_private ? 1 : 3, is_private ? 0 : 1, ARENA, ARENA / 4);
    CHECK(heap != NULL);
    heap_set_budget(heap, 2 * ARENA);
    for (int i = 0; i < N_SLOTS; i++)
        pthread_mutex_init(&slots[i].lock, NULL);
    struct slot held = {.block = heap_malloc(heap, 300000), .n_bytes = 300000};
    stamp(&held, 5);
    pthread_t threads[N_THREADS];
    for (uintptr_t i = 0; i < N_THREADS; i++)
        CHECK(pthread_create(&threads[i], NULL, work, (void *)(i + 1)) == 0);
    for (int i = 0; i < N_FORKS; i++)
        fork_child(&held, i % 2);
    for (int i = 0; i < N_THREADS; i++)
        pthread_join(threads[i], NULL);
    for (int i = 0; i < N_SLOTS / 2; i++)
        heap_free(heap, slots[i].block, 0);
    be_idle(is_private ? 0 : 1);
    heap_close(heap);
    CHECK(heap_usage(heap, is_private ? 0 : 1).cached == 0);
    void *late = heap_malloc(heap, 100000);
    for (int i = N_SLOTS / 2; i < N_SLOTS; i++)
        heap_free(heap, slots[i].block, 0);
    check(&held, held.n_bytes);
    heap_free(heap, held.block, 0);
    CHECK(heap_offset(heap, held.block, 1) < 0);
    heap_free(heap, late, 0);
    heap_destroy(heap);
    if (is_private)
        close(fd);
    puts("fine");
    return 0;
}

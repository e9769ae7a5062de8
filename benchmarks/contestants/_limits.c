/* Speed limits of the machine: copy and add arrays, and pass a flag back and forth between two processes. */
#include <sched.h>
#include <stdatomic.h>
#include <stddef.h>

void copy(float *restrict to, const float *restrict from, size_t n) {
    for (size_t i = 0; i < n; i++) to[i] = from[i];
}

void add(float *restrict to, const float *restrict a, const float *restrict b, size_t n) {
    for (size_t i = 0; i < n; i++) to[i] = a[i] + b[i];
}

/* Passes the flag `turns` times as process `own` (0 or 1). Returns -1 if the other process does not answer, else 0. */
int pass_flag(_Atomic unsigned *flag, unsigned own, unsigned turns) {
    unsigned first = atomic_load(flag) & ~1u;
    for (unsigned turn = 0; turn < turns; turn++) {
        unsigned awaited = first + 2 * turn + own;
        for (size_t looks = 0; atomic_load_explicit(flag, memory_order_acquire) != awaited; looks++)
            if (looks > 1000000000) return -1;
        atomic_store_explicit(flag, awaited + 1, memory_order_release);
    }
    return 0;
}

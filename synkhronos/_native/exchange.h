/* Exchange of arrays between node leaders in pieces, by non-blocking MPI messages. Independent of Python.
 *
 * A piece is exchanged in two steps. In the first, each leader receives its share of the elements from all others. It
 * then reduces the share, and in the second step sends the result to all others. A gathered piece has no first step.
 *
 * A leader that has failed sends empty messages in place of those that it still owes. A leader that receives a shorter
 * message than it expects marks the piece as failed, and also sends empty messages in it. So all leaders complete each
 * piece, and none of them takes a wrong result for a right one. A piece in which every share is empty transfers nothing.
 *
 * Large messages are sent in chunks. The bytes in flight are limited to what the link transfers in a fraction of a second
 * at its measured rate, so that a failed leader has soon sent all that it owes. That MPI has completed a send does not
 * show that its bytes have left this machine, because sockets have large buffers. The receiver therefore acknowledges
 * chunks: at intervals, it sends back how many it has received. An acknowledgement waits behind all that MPI has to send to
 * that leader, so MPI gets few chunks at a time. Otherwise the window of one leader, filled with its data, would delay the
 * acknowledgements to another, whose window would shrink and stay small.
 *
 * Any number of pieces may wait in the queue. Only the first ones are advanced: a look at many pieces takes time, and
 * the tags of those in transfer must differ. All leaders begin pieces in the same order, so the oldest one that is not
 * complete anywhere is among the first ones of each leader that has begun it. */
#ifndef SYNKHRONOS_EXCHANGE_H
#define SYNKHRONOS_EXCHANGE_H

#include "reductions.h"
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>

#define CHUNK_BYTES ((size_t)128 << 10)
#define CHUNKS_AHEAD 64 /* of one message, in flight at a time */
#define PIECES_AHEAD 8  /* of the queue, in transfer at a time */

/* Functions and handles of MPI. MPICH's and Intel's handles are ints, and Open MPI's are pointers. */
struct mpi {
    size_t handle_bytes; /* of a communicator, a datatype or a request */
    uintptr_t communicator, byte;
    void *isend, *irecv, *test, *get_count; /* addresses of the functions with these names */
};

union handle {
    int number;
    void *pointer;
};

/* Message of any size to or from another leader. */
struct message {
    char *data;
    size_t n_bytes;
    int peer, tag;
    /* Numbers of chunks: those that were begun, that MPI has completed, that are no longer in flight, and, according to
     * the last acknowledgement, that the receiver has. */
    size_t n_begun, n_done, n_passed, n_acknowledged;
    union handle requests[CHUNKS_AHEAD];
    size_t sizes[CHUNKS_AHEAD]; /* bytes of the chunks in flight that are sent; 0: an empty message */
    union handle acknowledgement; /* request of the one in flight */
    int is_acknowledging;         /* whether there is one */
    uint64_t number;              /* its content */
    int64_t time;                 /* nanoseconds: when the last one was sent */
};

/* float32 numbers that are sent as 16 bits. */
struct narrowing {
    const uint16_t *got; /* received in the first step */
    float *wide;         /* where to write them as float32, before the reduction */
    size_t n_got;
    uint16_t *sent; /* the result of all leaders, received in the second step */
    float *result;  /* where to write it as float32 */
    size_t n_result;
    int is_bfloat16;
};

enum state { FIRST_STEP, SECOND_STEP, COMPLETE };

struct piece {
    struct message *sends[2], *receives[2]; /* for each step */
    size_t n_sends[2], n_receives[2];
    const reduction *reduction; /* between the steps; NULL: none */
    const void **operands;      /* this leader's share of each contribution */
    void *out;                  /* this leader's share of the result */
    size_t length, start;       /* elements of this share, and its first element in the result */
    const struct narrowing *narrowing; /* NULL: none */
    enum state state; /* set to COMPLETE last, with release ordering, by any thread */
    int failed;
    int64_t begun, ended; /* nanoseconds of CLOCK_MONOTONIC; `ended` is set before COMPLETE */
    struct piece *next;   /* in the queue */
};

struct exchange {
    struct mpi mpi;
    pthread_mutex_t lock;
    struct piece *first;           /* queue of the pieces that are not complete */
    int error;                     /* error code of MPI; nothing is advanced after an error */
    size_t in_flight, window;      /* bytes */
    size_t window_before;          /* the last rest; 0: the rate has been measured since */
    size_t pending;                /* bytes that MPI has not completed */
    size_t counted;                /* bytes that were acknowledged since `since` */
    int64_t since, rested;         /* nanoseconds; `rested`: when the last byte in flight was acknowledged */
    _Alignas(16) char status[128]; /* an MPI_Status */
    pthread_t thread;
    pthread_cond_t changed; /* one of the following, or `first` */
    int has_thread, is_paused, must_end;
    pid_t owner; /* the process that has the thread; a fork of it has none */
};

void exchange_init(struct exchange *self, const struct mpi *mpi);

/* Append a piece to the queue. It must stay in place until it is complete. */
void exchange_add(struct exchange *self, struct piece *piece);

/* Advance the first pieces of the queue as far as possible without waiting. Returns `error`. */
int exchange_advance(struct exchange *self);

/* Advance the pieces in a thread; returns a nonzero error number if there can be no thread. Other threads call MPI only
 * between `exchange_pause` and `exchange_resume`. The thread ends in `exchange_rest`. */
int exchange_poll(struct exchange *self);
void exchange_pause(struct exchange *self);
void exchange_resume(struct exchange *self);
void exchange_rest(struct exchange *self);

#endif

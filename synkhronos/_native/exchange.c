/* See exchange.h. */
#include "exchange.h"

#include <signal.h>
#include <time.h>
#include <unistd.h>

#define LEAST_WINDOW (2 * CHUNK_BYTES)
#define FIRST_WINDOW ((size_t)512 << 10) /* after a rest, in which the rate of the link may have changed */
#define LARGEST_WINDOW ((size_t)1 << 30)
#define MOST_PENDING ((size_t)1 << 20) /* bytes that MPI has not completed; others, and acknowledgements, wait behind them */
#define REST_NS 3000000            /* least duration of a rest */
#define WINDOW_NS 150000000        /* time in which the link transfers the bytes in flight */
#define MUCH_LOWER 6               /* times; after a rest, the window then grows slowly, as at first */
#define UNACKNOWLEDGED 2           /* chunks at the end of a larger message */
#define ACKNOWLEDGEMENT_NS 2000000 /* time between two acknowledgements of a message */
#define ACKNOWLEDGEMENT_TAG 2      /* more than the tag of the message */
#define NAP_NS 300000              /* of the thread, whose core computes meanwhile */

typedef int isend_numbers(const void *, int, int, int, int, int, int *);
typedef int isend_pointers(const void *, int, void *, int, int, void *, void **);
typedef int irecv_numbers(void *, int, int, int, int, int, int *);
typedef int irecv_pointers(void *, int, void *, int, int, void *, void **);
typedef int test_function(void *request, int *flag, void *status);
typedef int get_count_number(const void *status, int type, int *count);
typedef int get_count_pointer(const void *status, void *type, int *count);

void exchange_init(struct exchange *self, const struct mpi *mpi)
{
    *self = (struct exchange){.mpi = *mpi, .window = LEAST_WINDOW};
    pthread_mutex_init(&self->lock, NULL);
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(&self->changed, &attributes);
}

static int64_t now_ns(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * INT64_C(1000000000) + time.tv_nsec;
}

static size_t n_chunks(const struct message *message)
{
    return (message->n_bytes + CHUNK_BYTES - 1) / CHUNK_BYTES;
}

static size_t chunk_bytes(const struct message *message, size_t chunk)
{
    size_t left = message->n_bytes - chunk * CHUNK_BYTES;
    return left < CHUNK_BYTES ? left : CHUNK_BYTES;
}

/* Number of chunks to acknowledge: not the last ones of a large message, so that no leader waits for the last
 * acknowledgement. Small messages are acknowledged completely, because many of them may be in flight. */
static size_t n_to_acknowledge(const struct message *message)
{
    size_t n = n_chunks(message);
    return n > 2 * UNACKNOWLEDGED ? n - UNACKNOWLEDGED : n;
}

static int begin_send(const struct mpi *mpi, const struct message *to, int tag, const void *data, size_t n_bytes,
                      union handle *request)
{
    if (mpi->handle_bytes == sizeof(int))
        return ((isend_numbers *)mpi->isend)(data, (int)n_bytes, (int)mpi->byte, to->peer, tag,
                                             (int)mpi->communicator, &request->number);
    return ((isend_pointers *)mpi->isend)(data, (int)n_bytes, (void *)mpi->byte, to->peer, tag,
                                          (void *)mpi->communicator, &request->pointer);
}

static int begin_receive(const struct mpi *mpi, const struct message *from, int tag, void *data, size_t n_bytes,
                         union handle *request)
{
    if (mpi->handle_bytes == sizeof(int))
        return ((irecv_numbers *)mpi->irecv)(data, (int)n_bytes, (int)mpi->byte, from->peer, tag,
                                             (int)mpi->communicator, &request->number);
    return ((irecv_pointers *)mpi->irecv)(data, (int)n_bytes, (void *)mpi->byte, from->peer, tag,
                                          (void *)mpi->communicator, &request->pointer);
}

static int test(struct exchange *self, union handle *request, int *is_done)
{
    return ((test_function *)self->mpi.test)(request, is_done, self->status);
}

/* Whether the oldest chunk that is with MPI has completed. */
static int test_oldest(struct exchange *self, struct message *message, int *is_done)
{
    *is_done = 0;
    if (message->n_done == message->n_begun)
        return 0;
    return test(self, &message->requests[message->n_done % CHUNKS_AHEAD], is_done);
}

/* Number of bytes that a completed receive has got. */
static int received_bytes(struct exchange *self, int *n_bytes)
{
    const struct mpi *mpi = &self->mpi;
    if (mpi->handle_bytes == sizeof(int))
        return ((get_count_number *)mpi->get_count)(self->status, (int)mpi->byte, n_bytes);
    return ((get_count_pointer *)mpi->get_count)(self->status, (void *)mpi->byte, n_bytes);
}

/* Send an acknowledgement, if one is due. */
static int acknowledge(struct exchange *self, struct message *from)
{
    size_t due = n_to_acknowledge(from), number = from->n_done < due ? from->n_done : due;
    int is_done = 1, error = from->is_acknowledging ? test(self, &from->acknowledgement, &is_done) : 0;
    if (error || !is_done)
        return error;
    from->is_acknowledging = 0;
    if (number == from->n_acknowledged)
        return 0;
    int64_t now = now_ns();
    if (number < due && now - from->time < ACKNOWLEDGEMENT_NS)
        return 0;
    from->n_acknowledged = from->number = number;
    from->time = now;
    from->is_acknowledging = 1;
    return begin_send(&self->mpi, from, from->tag + ACKNOWLEDGEMENT_TAG, &from->number, sizeof from->number,
                      &from->acknowledgement);
}

/* Advance a message that is received. */
static int receive(struct exchange *self, struct piece *piece, struct message *from)
{
    size_t n = n_chunks(from);
    for (;;) {
        while (from->n_begun < n && from->n_begun - from->n_done < CHUNKS_AHEAD) {
            size_t chunk = from->n_begun++;
            int error = begin_receive(&self->mpi, from, from->tag, from->data + chunk * CHUNK_BYTES,
                                      chunk_bytes(from, chunk), &from->requests[chunk % CHUNKS_AHEAD]);
            if (error)
                return error;
        }
        int is_done, n_bytes, error = test_oldest(self, from, &is_done);
        if (error)
            return error;
        if (!is_done)
            return acknowledge(self, from);
        error = received_bytes(self, &n_bytes);
        if (error)
            return error;
        if ((size_t)n_bytes != chunk_bytes(from, from->n_done))
            piece->failed = 1;
        from->n_done++;
    }
}

/* Adapt the window to the rate at which bytes are acknowledged. It grows slowly, because limiters of a link's rate let the
 * first bytes pass at full speed. After a rest, it grows at once to what fits the rate, but not beyond its former size,
 * unless the rate is much lower. */
static void measure(struct exchange *self, size_t n_bytes)
{
    self->counted += n_bytes;
    if (self->counted < self->window)
        return;
    int64_t now = now_ns(), elapsed = now - self->since;
    double fitting = (double)self->counted / (double)(elapsed > 0 ? elapsed : 1) * WINDOW_NS;
    double most = 2.0 * (double)(self->window < LARGEST_WINDOW / 2 ? self->window : LARGEST_WINDOW / 2);
    if (most < (double)self->window_before && fitting * MUCH_LOWER > (double)self->window_before)
        most = (double)self->window_before;
    self->window_before = 0;
    self->window = fitting < LEAST_WINDOW ? LEAST_WINDOW : (size_t)(fitting < most ? fitting : most);
    self->counted = 0;
    self->since = now;
}

/* Receive acknowledgements of a message that is sent. */
static int receive_acknowledgements(struct exchange *self, struct message *to)
{
    while (to->n_acknowledged < n_to_acknowledge(to)) {
        int is_done = 0, error;
        if (to->is_acknowledging)
            error = test(self, &to->acknowledgement, &is_done);
        else
            error = begin_receive(&self->mpi, to, to->tag + ACKNOWLEDGEMENT_TAG, &to->number, sizeof to->number,
                                  &to->acknowledgement);
        if (error || (to->is_acknowledging && !is_done))
            return error;
        to->is_acknowledging = !is_done;
        if (is_done)
            to->n_acknowledged = to->number;
    }
    return 0;
}

/* Advance a message that is sent. */
static int send(struct exchange *self, struct piece *piece, struct message *to)
{
    size_t n = n_chunks(to), due = n_to_acknowledge(to);
    int is_done = 1, error = receive_acknowledgements(self, to);
    while (!error && is_done) {
        error = test_oldest(self, to, &is_done);
        if (!error && is_done)
            self->pending -= to->sizes[to->n_done++ % CHUNKS_AHEAD];
    }
    if (error)
        return error;
    for (; to->n_passed < to->n_done && (to->n_passed >= due || to->n_passed < to->n_acknowledged); to->n_passed++) {
        size_t n_bytes = to->sizes[to->n_passed % CHUNKS_AHEAD];
        self->in_flight -= n_bytes;
        if (n_bytes && !self->in_flight)
            self->rested = now_ns();
        if (to->n_passed < due)
            measure(self, n_bytes);
    }
    while (!error && to->n_begun < n && to->n_begun - to->n_passed < CHUNKS_AHEAD) {
        size_t chunk = to->n_begun, n_bytes = piece->failed ? 0 : chunk_bytes(to, chunk);
        /* One chunk of each message of the oldest piece may always be sent: a leader that has failed may wait for it,
         * and not yet have begun the later pieces that fill the window. */
        int is_oldest = piece == self->first && to->n_begun == to->n_passed;
        int is_full = self->pending >= MOST_PENDING || (self->in_flight && self->in_flight + n_bytes > self->window);
        if (n_bytes && is_full && !is_oldest)
            return 0;
        if (n_bytes && !self->in_flight) {
            self->counted = 0;
            self->since = now_ns();
            if (self->since - self->rested > REST_NS && self->window > FIRST_WINDOW) {
                self->window_before = self->window;
                self->window = FIRST_WINDOW;
            }
        }
        self->in_flight += n_bytes;
        self->pending += n_bytes;
        to->sizes[chunk % CHUNKS_AHEAD] = n_bytes;
        to->n_begun++;
        error = begin_send(&self->mpi, to, to->tag, to->data + chunk * CHUNK_BYTES, n_bytes,
                           &to->requests[chunk % CHUNKS_AHEAD]);
    }
    return error;
}

/* Whether all chunks of messages have been sent or received. */
static int have_passed(const struct message *messages, size_t n)
{
    size_t i = 0;
    while (i < n && messages[i].n_done == n_chunks(&messages[i]))
        i++;
    return i == n;
}

/* Whether the acknowledgements of messages have been sent or received, too. */
static int are_acknowledged(const struct message *messages, size_t n)
{
    size_t i = 0;
    while (i < n && messages[i].n_acknowledged == n_to_acknowledge(&messages[i]) && !messages[i].is_acknowledging)
        i++;
    return i == n;
}

static void combine(const struct piece *piece)
{
    const struct narrowing *narrowing = piece->narrowing;
    if (narrowing != NULL)
        widen_floats(narrowing->got, narrowing->wide, narrowing->n_got, narrowing->is_bfloat16);
    reduction_apply(piece->reduction, piece->operands, (void *[]){piece->out}, 1, piece->length);
    if (narrowing != NULL)
        narrow_floats(narrowing->result + piece->start, narrowing->sent + piece->start, piece->length,
                      narrowing->is_bfloat16);
}

/* Advance a piece; sets whether it is complete. */
static int advance(struct exchange *self, struct piece *piece, int *is_done)
{
    int error = 0;
    for (size_t i = 0; !error && i < piece->n_receives[0]; i++)
        error = receive(self, piece, &piece->receives[0][i]);
    for (size_t i = 0; !error && i < piece->n_sends[0]; i++)
        error = send(self, piece, &piece->sends[0][i]);
    if (error)
        return error;
    int is_sent = have_passed(piece->sends[0], piece->n_sends[0]); /* so that its memory may be overwritten */
    for (size_t i = 0; is_sent && i < piece->n_receives[1]; i++)
        if ((error = receive(self, piece, &piece->receives[1][i])))
            return error;
    if (piece->state == FIRST_STEP && have_passed(piece->receives[0], piece->n_receives[0])) {
        if (piece->reduction != NULL && !piece->failed)
            combine(piece);
        piece->state = SECOND_STEP;
    }
    if (piece->state == FIRST_STEP)
        return 0;
    for (size_t i = 0; i < piece->n_sends[1]; i++)
        if ((error = send(self, piece, &piece->sends[1][i])))
            return error;
    *is_done = is_sent && have_passed(piece->sends[1], piece->n_sends[1])
               && have_passed(piece->receives[1], piece->n_receives[1]);
    for (int step = 0; step < 2; step++)
        *is_done = *is_done && are_acknowledged(piece->sends[step], piece->n_sends[step])
                   && are_acknowledged(piece->receives[step], piece->n_receives[step]);
    const struct narrowing *narrowing = piece->narrowing;
    if (*is_done && narrowing != NULL && !piece->failed)
        widen_floats(narrowing->sent, narrowing->result, narrowing->n_result, narrowing->is_bfloat16);
    return 0;
}

void exchange_add(struct exchange *self, struct piece *piece)
{
    piece->begun = now_ns();
    pthread_mutex_lock(&self->lock);
    struct piece **end = &self->first;
    while (*end != NULL)
        end = &(*end)->next;
    *end = piece;
    pthread_cond_signal(&self->changed);
    pthread_mutex_unlock(&self->lock);
}

static void advance_all(struct exchange *self)
{
    struct piece **place = &self->first;
    for (int n = 0; n < PIECES_AHEAD && !self->error && *place != NULL;) {
        struct piece *piece = *place;
        int is_done = 0;
        self->error = advance(self, piece, &is_done);
        if (is_done) {
            *place = piece->next;
            piece->ended = now_ns();
            __atomic_store_n(&piece->state, COMPLETE, __ATOMIC_RELEASE);
        } else {
            place = &piece->next;
            n++;
        }
    }
}

int exchange_advance(struct exchange *self)
{
    pthread_mutex_lock(&self->lock);
    advance_all(self);
    int error = self->error;
    pthread_mutex_unlock(&self->lock);
    return error;
}

static void *poll(void *argument)
{
    struct exchange *self = argument;
    pthread_mutex_lock(&self->lock);
    while (!self->must_end) {
        if (self->is_paused || self->first == NULL || self->error) {
            pthread_cond_wait(&self->changed, &self->lock);
            continue;
        }
        advance_all(self);
        int64_t end = now_ns() + NAP_NS;
        pthread_cond_timedwait(&self->changed, &self->lock,
                               &(struct timespec){end / INT64_C(1000000000), end % INT64_C(1000000000)});
    }
    pthread_mutex_unlock(&self->lock);
    return NULL;
}

/* Set a value that the thread reads, and wake it. */
static void set(struct exchange *self, int *place, int value)
{
    pthread_mutex_lock(&self->lock);
    *place = value;
    pthread_cond_signal(&self->changed);
    pthread_mutex_unlock(&self->lock);
}

static int has_thread(const struct exchange *self)
{
    return self->has_thread && self->owner == getpid();
}

int exchange_poll(struct exchange *self)
{
    if (has_thread(self))
        return 0;
    sigset_t every, before;
    sigfillset(&every);
    self->is_paused = self->must_end = 0;
    pthread_sigmask(SIG_SETMASK, &every, &before);
    int failed = pthread_create(&self->thread, NULL, poll, self);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    self->has_thread = !failed;
    self->owner = getpid();
    return failed;
}

void exchange_pause(struct exchange *self)
{
    if (has_thread(self))
        set(self, &self->is_paused, 1);
}

void exchange_resume(struct exchange *self)
{
    if (has_thread(self))
        set(self, &self->is_paused, 0);
}

void exchange_rest(struct exchange *self)
{
    if (has_thread(self)) {
        set(self, &self->must_end, 1);
        pthread_join(self->thread, NULL);
        self->has_thread = 0;
    }
}

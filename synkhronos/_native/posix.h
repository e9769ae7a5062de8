/* POSIX helpers: file descriptors with a checked identity, background threads and waiting. Independent of Python. */
#ifndef SYNKHRONOS_POSIX_H
#define SYNKHRONOS_POSIX_H

#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

/* A file descriptor with the identity of its file.
 *
 * A program may close descriptors that it did not open (`os.closerange`, as daemons do), or replace their files
 * (`dup2`). So the device and inode are stored, and compared before each use. Memory files, sockets, pipes and files
 * on disk each have an inode. All anonymous files (`eventfd`, `epoll`, and `pidfd` before Linux 6.9) share one inode,
 * so they cannot be distinguished in this way. If another thread replaces the file between the comparison and the use,
 * this is not detected. */
struct descriptor {
    int fd; /* -1: closed */
    dev_t device;
    ino_t inode;
};

/* Take ownership of a descriptor. Returns 0, with errno set, if it is not open. */
static inline int descriptor_own(struct descriptor *self, int fd)
{
    struct stat file;
    if (fstat(fd, &file) != 0)
        return 0;
    *self = (struct descriptor){fd, file.st_dev, file.st_ino};
    return 1;
}

/* The descriptor; -1 if it is closed, or if its number belongs to another file now. */
static inline int descriptor_number(const struct descriptor *self)
{
    struct stat file;
    int is_own = self->fd >= 0 && fstat(self->fd, &file) == 0
                 && file.st_dev == self->device && file.st_ino == self->inode;
    return is_own ? self->fd : -1;
}

/* Close the descriptor, unless its number belongs to another file now. */
static inline void descriptor_close(struct descriptor *self)
{
    int fd = descriptor_number(self);
    self->fd = -1;
    if (fd >= 0)
        close(fd);
}

/* -- Threads */

/* Start a detached thread with a small stack and all signals blocked. Returns 0 if the system refuses. */
static inline int start_thread(void *(*work)(void *), void *argument)
{
    pthread_t thread;
    pthread_attr_t attributes;
    sigset_t every, before;
    sigfillset(&every);
    pthread_attr_init(&attributes);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    pthread_attr_setstacksize(&attributes, 4 * (size_t)PTHREAD_STACK_MIN);
    pthread_sigmask(SIG_SETMASK, &every, &before);
    int failed = pthread_create(&thread, &attributes, work, argument);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&attributes);
    return !failed;
}

/* -- Waiting */

/* Futex system call. If a sandbox refuses futexes, nobody sleeps: waiting takes CPU time but is correct. There is no
 * better fallback, because glibc itself aborts if a futex of its locks is refused. */
static inline long futex(_Atomic uint32_t *word, int operation, uint32_t value, long nanoseconds)
{
    struct { long seconds, nanoseconds; } limit = {0, nanoseconds};
    return syscall(SYS_futex, word, operation, value, &limit, NULL, 0);
}

/* The monotonic clock, in nanoseconds. */
static inline int64_t now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (int64_t)time.tv_sec * 1000000000 + time.tv_nsec;
}

/* Hint to the processor that this is a spin loop. */
static inline void cpu_relax(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("isb");
#endif
}

#endif

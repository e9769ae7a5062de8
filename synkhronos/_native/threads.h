/* Threads of the core: detached, with a small stack, and handling no signal. */
#ifndef SYNKHRONOS_THREADS_H
#define SYNKHRONOS_THREADS_H

#include <limits.h>
#include <pthread.h>
#include <signal.h>

/* Start one; returns whether the kernel allows it. */
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

#endif

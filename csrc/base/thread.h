/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Starts a thread of the library. Signals are for the threads of the application; only those that
 * an instruction raises belong to the thread that executes it.
 */
#ifndef BL_THREAD_H
#define BL_THREAD_H

#include <pthread.h>
#include <signal.h>

/* Start the thread: 0 or -errno. */
static inline int bl_thread_start(pthread_t *thread, void *(*run)(void *), void *context)
{
    sigset_t all, before;
    sigfillset(&all);
    sigdelset(&all, SIGBUS), sigdelset(&all, SIGSEGV), sigdelset(&all, SIGFPE);
    sigdelset(&all, SIGILL), sigdelset(&all, SIGTRAP);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int error = pthread_create(thread, NULL, run, context);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return -error;
}

#endif

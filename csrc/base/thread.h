/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Starts a thread of the library. All signals are blocked in it, so the application's threads
 * handle them; only signals that an instruction of the thread raises are not.
 */
#ifndef BL_THREAD_H
#define BL_THREAD_H

#include <pthread.h>
#include <signal.h>

/* Start the thread. Returns 0 or -errno. */
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

/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * A mutex between the threads of one process. In the simulator, where a process of the world stands
 * for a thread, it passes on what its last holder had fenced, and nothing more.
 */
#ifndef BL_MUTEX_H
#define BL_MUTEX_H

#include "coherence/coherence.h"

#ifdef BL_SIM

#define bl_mutex_init(mutex) ((void)(*(mutex) = (bl_mutex){0, 0}))
#define bl_mutex_destroy(mutex) ((void)(mutex))
#define bl_lock(memory, mutex) bl_sim_mutex_lock(memory, mutex)
#define bl_unlock(memory, mutex) bl_sim_mutex_unlock(memory, mutex)

static inline int bl_lock_for(const bl_memory *memory, bl_mutex *mutex, uint64_t timeout_ns)
{
    (void)timeout_ns;
    bl_lock(memory, mutex);
    return 1;
}

#else

#include <pthread.h>

typedef pthread_mutex_t bl_mutex;

#define bl_mutex_init(mutex) ((void)pthread_mutex_init(mutex, NULL))
#define bl_mutex_destroy(mutex) ((void)pthread_mutex_destroy(mutex))
#define bl_lock(memory, mutex) ((void)(memory), (void)pthread_mutex_lock(mutex))
#define bl_unlock(memory, mutex) ((void)(memory), (void)pthread_mutex_unlock(mutex))

/* Returns 0 if the mutex was not free within this time, at most a century. */
static inline int bl_lock_for(const bl_memory *memory, bl_mutex *mutex, uint64_t timeout_ns)
{
    struct timespec until;
    (void)memory;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += (time_t)(timeout_ns / 1000000000);
    until.tv_nsec += (long)(timeout_ns % 1000000000);
    until.tv_sec += until.tv_nsec / 1000000000;
    until.tv_nsec %= 1000000000;
    return pthread_mutex_timedlock(mutex, &until) == 0;
}

#endif

#endif

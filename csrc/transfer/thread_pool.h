/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * A few threads of this process that help one who copies. They are made when they are first asked
 * for, parked between jobs, and take no signals. One job at a time: who comes while the thread pool
 * is at work does his alone, so nobody waits for another's copy. A forked child has no thread pool;
 * it makes its own. In the simulator, where who runs when is the world's to say, the caller does
 * everything.
 */
#ifndef BL_THREAD_POOL_H
#define BL_THREAD_POOL_H

#include <stdint.h>

enum {
    BL_THREAD_POOL_MAX = 63,    /* threads besides the caller's */
    BL_THREAD_POOL_WORKERS = BL_THREAD_POOL_MAX + 1 /* the caller is 0 */
};

/* 0, or a negative error: then no further item is begun. Draws its own guarded region. A hand is
 * one thread's number in this job, less than BL_THREAD_POOL_WORKERS: no two have the same at a
 * time. */
typedef int (*bl_thread_pool_work)(void *context, uint32_t item, uint32_t worker);

/* Do items 0 .. count - 1, begun in this order, by at most threads threads, the caller's among
 * them: 0, or an error that an item had. What the others streamed is in memory by then, ahead of
 * whatever this thread streams next; a fault that one of them met is told by bl_guard_offset(). */
int bl_thread_pool_run(uint32_t threads, uint32_t count, bl_thread_pool_work work, void *context);

#endif

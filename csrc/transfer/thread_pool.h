/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * The thread pool: a few threads of this process that help a copying thread. They are started at
 * their first use, wait between jobs, and handle no signals. The pool has one job at a time: if it
 * is busy, the caller executes its job alone, so no caller waits for another one's copy. A forked
 * child starts its own thread pool. In the simulator the caller does everything, because the
 * simulator schedules all threads.
 */
#ifndef BL_THREAD_POOL_H
#define BL_THREAD_POOL_H

#include <stdint.h>

enum {
    BL_THREAD_POOL_MAX = 63,    /* threads in addition to the caller's */
    BL_THREAD_POOL_WORKERS = BL_THREAD_POOL_MAX + 1 /* the caller is 0 */
};

/* Execute one item, in its own guarded region. Returns 0 or a negative error, after which no
 * further item is started. worker is the number of the worker in this job, below
 * BL_THREAD_POOL_WORKERS, and unique among the active workers. */
typedef int (*bl_thread_pool_work)(void *context, uint32_t item, uint32_t worker);

/* Execute the items 0 .. count - 1, started in this order, on at most threads threads, including
 * the caller's. Returns 0, or the error of an item. On return, what the other threads streamed is
 * in memory, ahead of what this thread streams next. bl_guard_offset() also covers faults of these
 * threads. */
int bl_thread_pool_run(uint32_t threads, uint32_t count, bl_thread_pool_work work, void *context);

#endif

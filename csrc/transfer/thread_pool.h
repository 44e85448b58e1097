/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Declares the thread pool: a few threads of this process that help a thread that copies. They are
 * started when they are first needed, wait between jobs, and take no signals. The pool has one job
 * at a time: if it is busy, a caller does its job alone, so no caller waits for another's copy. A
 * forked child starts a thread pool of its own. In the simulator the caller does everything,
 * because the simulator schedules all threads.
 */
#ifndef BL_THREAD_POOL_H
#define BL_THREAD_POOL_H

#include <stdint.h>

enum {
    BL_THREAD_POOL_MAX = 63,    /* threads besides the caller's */
    BL_THREAD_POOL_WORKERS = BL_THREAD_POOL_MAX + 1 /* the caller is 0 */
};

/* Do one item. Returns 0, or a negative error, and then no further item is begun. The function has
 * its own guarded region. number is the number of the worker in this job, less than
 * BL_THREAD_POOL_WORKERS; two workers never have the same number at a time. */
typedef int (*bl_thread_pool_work)(void *context, uint32_t item, uint32_t worker);

/* Do items 0 .. count - 1, begun in this order, by at most threads threads, the caller's included.
 * Returns 0, or an error that an item had. On return, what the others streamed is in memory, ahead
 * of whatever this thread streams next. bl_guard_offset() also covers a fault in one of them. */
int bl_thread_pool_run(uint32_t threads, uint32_t count, bl_thread_pool_work work, void *context);

#endif

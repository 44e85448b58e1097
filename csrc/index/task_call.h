/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Handles the calls of task queues in the pool.
 */
#ifndef BL_INDEX_TASK_CALL_H
#define BL_INDEX_TASK_CALL_H

#include "index/state.h"

/* Return the most tasks that a server of this pool accepts. */
uint32_t bl_tasks_max(const bl_pool *pool);

/* Append the task of a committed, retained block to its queue. Returns 0, or
 * -BL_ERROR_QUEUE_FULL: too many queues. */
int bl_task_enqueue(bl_index *index, uint32_t number);

/* Drop some tasks that were not claimed for BL_TASK_AGE_NS. */
void bl_tasks_age(bl_index *index);
int bl_handle_task_claim(void *index, bl_call *call);
int bl_handle_task_extend(void *index, bl_call *call);
int bl_handle_task_count(void *index, bl_call *call);

#endif

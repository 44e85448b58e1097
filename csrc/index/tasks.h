/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Task queues: which tasks wait, and which lane has claimed which task until when. They use no pool
 * and no clock.
 *
 *   free --take--> TAKEN --add--> WAITING --claim--> CLAIMED --remove--> free
 *                                    ^---- time out, lane gone ---'
 *
 * A queue is a number. Its tasks wait in the order of their generations, whatever claims they have
 * had. Their number is bounded (D12): so many tasks, in at most BL_QUEUES_MAX queues.
 */
#ifndef BL_TASKS_H
#define BL_TASKS_H

#include <stdint.h>

enum { BL_TASKS_MAX = 4096, BL_QUEUES_MAX = 64 };

typedef struct bl_tasks bl_tasks;

/* Create queues for at most count_max tasks: 0 or -ENOMEM. */
int bl_tasks_create(bl_tasks **out, uint32_t count_max);
void bl_tasks_destroy(bl_tasks *tasks);

/* Are all slots taken? */
int bl_tasks_full(const bl_tasks *tasks);

/* Take a slot for a task that is being written: the slot, or -ENOSPC. */
int64_t bl_tasks_take(bl_tasks *tasks, uint32_t block);

/* Let a task wait from now on: 0, or -ENOSPC: too many queues. */
int bl_tasks_add(bl_tasks *tasks, uint32_t place, uint64_t queue, uint64_t generation,
                 uint64_t now_ns);

/* Does a task wait, so that no lane has a claim on it? */
int bl_tasks_waits(const bl_tasks *tasks, uint32_t place, uint64_t now_ns);

/* Remove a task in any state. */
void bl_tasks_remove(bl_tasks *tasks, uint32_t place);

/* Claim a queue's oldest waiting task: return its slot, or -1. */
int64_t bl_tasks_claim(bl_tasks *tasks, uint64_t queue, uint32_t lane, uint64_t now_ns,
                       uint64_t until_ns);

/* Extend a claim to a later time: 0, or -ENOENT if this lane does not have it any more. If that
 * time is now, the task waits again. */
int bl_tasks_extend(bl_tasks *tasks, uint32_t place, uint32_t lane, uint64_t now_ns,
                    uint64_t until_ns);

/* End all claims of a lane: their tasks wait again. */
void bl_tasks_lane_gone(bl_tasks *tasks, uint32_t lane);

/* Find a task that has waited since before that time: return its slot, or -1. */
int64_t bl_tasks_older(const bl_tasks *tasks, uint64_t then_ns);

uint32_t bl_tasks_block(const bl_tasks *tasks, uint32_t place);
uint32_t bl_tasks_deliveries(const bl_tasks *tasks, uint32_t place);
void bl_tasks_count(bl_tasks *tasks, uint64_t queue, uint64_t now_ns, uint32_t *waiting,
                    uint32_t *claimed);

#endif

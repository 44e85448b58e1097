/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Task queues: waiting tasks, and claims with their lanes and expiry times. They use no pool and no
 * clock.
 *
 *   free --take--> TAKEN --add--> WAITING --claim--> CLAIMED --remove--> free
 *                                    ^---- time out, lane gone ---'
 *
 * A queue is identified by a number. Its tasks wait in the order of their generations, even after a
 * claim. The number of tasks is bounded (D12), and they are in at most BL_QUEUES_MAX queues.
 */
#ifndef BL_TASKS_H
#define BL_TASKS_H

#include <stdint.h>

enum { BL_TASKS_MAX = 4096, BL_QUEUES_MAX = 64 };

typedef struct bl_tasks bl_tasks;

/* Create queues for at most count_max tasks. Returns 0 or -ENOMEM. */
int bl_tasks_create(bl_tasks **out, uint32_t count_max);
void bl_tasks_destroy(bl_tasks *tasks);

/* Return 1 if all slots are in use. */
int bl_tasks_full(const bl_tasks *tasks);

/* Allocate a slot for a task that is being written. Returns the slot, or -ENOSPC. */
int64_t bl_tasks_take(bl_tasks *tasks, uint32_t block);

/* Append a task to its queue. Returns 0, or -ENOSPC: too many queues. */
int bl_tasks_add(bl_tasks *tasks, uint32_t place, uint64_t queue, uint64_t generation,
                 uint64_t now_ns);

/* Return 1 if a task waits: no lane has a claim on it. */
int bl_tasks_waits(const bl_tasks *tasks, uint32_t place, uint64_t now_ns);

/* Remove a task in any state. */
void bl_tasks_remove(bl_tasks *tasks, uint32_t place);

/* Claim a queue's oldest waiting task. Returns its slot, or -1. */
int64_t bl_tasks_claim(bl_tasks *tasks, uint64_t queue, uint32_t lane, uint64_t now_ns,
                       uint64_t until_ns);

/* Extend a claim to a later time; if that is now, the task waits again. Returns 0, or -ENOENT if
 * this lane no longer has the claim. */
int bl_tasks_extend(bl_tasks *tasks, uint32_t place, uint32_t lane, uint64_t now_ns,
                    uint64_t until_ns);

/* End all claims of a lane: their tasks wait again. */
void bl_tasks_lane_gone(bl_tasks *tasks, uint32_t lane);

/* Find a task that has waited since before then_ns. Returns its slot, or -1. */
int64_t bl_tasks_older(const bl_tasks *tasks, uint64_t then_ns);

uint32_t bl_tasks_block(const bl_tasks *tasks, uint32_t place);
uint32_t bl_tasks_deliveries(const bl_tasks *tasks, uint32_t place);
void bl_tasks_count(bl_tasks *tasks, uint64_t queue, uint64_t now_ns, uint32_t *waiting,
                    uint32_t *claimed);

#endif

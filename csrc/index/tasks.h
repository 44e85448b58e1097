/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Tasks in queues: which of them wait, and who has claimed which until when. Pure: no pool, no
 * clock.
 *
 *   free --take--> TAKEN --add--> WAITING --claim--> CLAIMED --remove--> free
 *                                    ^---- time out, lane gone ---'
 *
 * A queue is a number. Its tasks wait in the order of their generations, whatever they have been
 * through. Bounded (D12): so many tasks, in at most BL_QUEUES_MAX queues.
 */
#ifndef BL_TASKS_H
#define BL_TASKS_H

#include <stdint.h>

enum { BL_TASKS_MAX = 4096, BL_QUEUES_MAX = 64 };

typedef struct bl_tasks bl_tasks;

/* For at most count_max tasks: 0 or -ENOMEM. */
int bl_tasks_create(bl_tasks **out, uint32_t count_max);
void bl_tasks_destroy(bl_tasks *tasks);

/* A place for a task that is being written, or -ENOSPC. */
int64_t bl_tasks_take(bl_tasks *tasks, uint32_t block);

/* It waits from now on: 0, or -ENOSPC: too many queues. */
int bl_tasks_add(bl_tasks *tasks, uint32_t place, uint64_t queue, uint64_t generation,
                 uint64_t now_ns);

/* Gone, whatever it was. */
void bl_tasks_remove(bl_tasks *tasks, uint32_t place);

/* Claim a queue's oldest task that waits: its place, or -1. */
int64_t bl_tasks_claim(bl_tasks *tasks, uint64_t queue, uint32_t lane, uint64_t now_ns,
                       uint64_t until_ns);

/* Claimed until then, if this lane has it still, else -ENOENT; if then is now, it waits again. */
int bl_tasks_extend(bl_tasks *tasks, uint32_t place, uint32_t lane, uint64_t now_ns,
                    uint64_t until_ns);

/* All that a lane has claimed waits again. */
void bl_tasks_lane_gone(bl_tasks *tasks, uint32_t lane);

/* A task that has waited since before then: its place, or -1. */
int64_t bl_tasks_older(const bl_tasks *tasks, uint64_t then_ns);

uint32_t bl_tasks_block(const bl_tasks *tasks, uint32_t place);
uint32_t bl_tasks_deliveries(const bl_tasks *tasks, uint32_t place);
void bl_tasks_count(bl_tasks *tasks, uint64_t queue, uint64_t now_ns, uint32_t *waiting,
                    uint32_t *claimed);

#endif

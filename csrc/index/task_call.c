/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Handles the calls of task queues in the pool. A task is a committed block that is kept
 * (BL_ENTRY_KEPT in its entry): it is never evicted, and a successor recovers it like any other
 * block. So no task is lost when a worker or a server dies.
 *
 *   enqueue: reserve with BL_RESERVE_KEPT, write, commit      the queue's number is the fingerprint
 *   dequeue: BL_METHOD_TASK_CLAIM, then read as any block
 *   done:    remove
 *
 * Claims exist in DRAM only: after a takeover all tasks wait again. So delivery is at least once: a
 * takeover or an expired claim may deliver a task twice. A commit of a task is answered only after
 * a check that this server was not deposed, because a successor may have read the table before the
 * entry was written.
 *
 * Retained blocks have at most an eighth of the space (index/retained.c). A task that was not
 * claimed for BL_TASK_AGE_NS is dropped.
 */
#include "index/task_call.h"

#include "index/call.h"
#include "index/reclaim.h"

enum {
    BL_KEPT_BLOCKS_PART = 4,    /* tasks use at most 1 of this many lines of the table */
    BL_TASK_DROPS = 16          /* expired tasks to drop in one call */
};

#define BL_TASK_AGE_NS (600 * 1000000000ull)

uint32_t bl_tasks_max(const bl_pool *pool)
{
    uint32_t most = pool->geometry.block_count_max / BL_KEPT_BLOCKS_PART;
    return most < BL_TASKS_MAX ? most : BL_TASKS_MAX;
}

int bl_task_enqueue(bl_index *index, uint32_t number)
{
    const bl_block *block = &index->blocks[number];
    int status = bl_tasks_add(index->tasks, block->task - 1, block->fingerprint, block->generation,
                              bl_now_ns(&index->pool->memory));
    return status < 0 ? -BL_ERROR_QUEUE_FULL : 0;
}

void bl_tasks_age(bl_index *index)
{
    uint64_t now_ns = bl_now_ns(&index->pool->memory);
    for (int drops = 0; now_ns > BL_TASK_AGE_NS && drops < BL_TASK_DROPS; drops++) {
        int64_t place = bl_tasks_older(index->tasks, now_ns - BL_TASK_AGE_NS);
        if (place < 0)
            return;
        bl_block_drop(index, bl_tasks_block(index->tasks, (uint32_t)place), BL_REMOVED_CLIENT);
    }
}

/* Read and check a request for tasks. Returns 0 or an error. */
static int bl_task_request_of(const bl_call *call, bl_task_request *request)
{
    if (call->request_size != sizeof *request || sizeof(bl_task) > call->reply_capacity)
        return -BL_ERROR_BAD_REQUEST;
    memcpy(request, call->request, sizeof *request);
    return request->visible_ms > BL_TASK_VISIBLE_MAX_MS ? -BL_ERROR_BAD_REQUEST : 0;
}

static uint64_t bl_task_until_ns(uint64_t now_ns, const bl_task_request *request)
{
    return now_ns + request->visible_ms * 1000000ull;
}

int bl_handle_task_claim(void *context, bl_call *call)
{
    bl_index *index = context;
    bl_task_request request;
    bl_task task = {0};
    int status = bl_task_request_of(call, &request);
    if (status < 0)
        return status;
    bl_tasks_age(index);
    uint64_t now_ns = bl_now_ns(&index->pool->memory);
    int64_t place = bl_tasks_claim(index->tasks, request.queue, call->lane, now_ns,
                                   bl_task_until_ns(now_ns, &request));
    if (place >= 0) {
        const bl_block *block = &index->blocks[bl_tasks_block(index->tasks, (uint32_t)place)];
        task = (bl_task){
            .key = {block->key[0], block->key[1]},
            .generation = block->generation,
            .block = (uint32_t)(block - index->blocks),
            .length = block->length,
            .deliveries = bl_tasks_deliveries(index->tasks, (uint32_t)place),
        };
    }
    memcpy(call->reply, &task, sizeof task);
    call->reply_size = sizeof task;
    return 0;
}

int bl_handle_task_extend(void *context, bl_call *call)
{
    bl_index *index = context;
    bl_task_request request;
    int status = bl_task_request_of(call, &request);
    if (status < 0)
        return status;
    if (request.block >= index->pool->geometry.block_count_max)
        return -BL_ERROR_BAD_REQUEST;
    const bl_block *block = &index->blocks[request.block];
    uint64_t now_ns = bl_now_ns(&index->pool->memory);
    if (block->task == 0 || block->generation != request.generation ||
        bl_tasks_extend(index->tasks, block->task - 1, call->lane, now_ns,
                        bl_task_until_ns(now_ns, &request)) < 0)
        return -BL_ERROR_NO_GRANT;
    return 0;
}

int bl_handle_task_count(void *context, bl_call *call)
{
    bl_index *index = context;
    bl_task_request request;
    bl_task_counts counts;
    int status = bl_task_request_of(call, &request);
    if (status < 0)
        return status;
    bl_tasks_age(index);
    bl_tasks_count(index->tasks, request.queue, bl_now_ns(&index->pool->memory), &counts.waiting,
                   &counts.claimed);
    memcpy(call->reply, &counts, sizeof counts);
    call->reply_size = sizeof counts;
    return 0;
}

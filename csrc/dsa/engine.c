/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * The DSA engine, which submits groups of descriptors (dsa/group.h) to a queue. Only bl_dsa_wait
 * waits; bl_dsa_poll handles what is complete and returns. Submission to a full queue is retried
 * with exponential backoff; after the last retry the CPU executes the descriptors.
 */
#include "dsa/group.h"

#ifndef BL_SIM

#include <errno.h>
#include <stdlib.h>
#include <unistd.h>

#include "coherence/coherence.h"
#include "transfer/device_range.h"
#include "dsa/execute.h"
#include "coherence/guard.h"
#include "pool/pool.h"
#include "transfer/plan.h"
#include "coherence/wait.h"

int bl_dsa_engine_open(const bl_pool *pool, bl_dsa_queue *queue, const bl_dsa_limits *limits,
                       const bl_dsa_rules *rules, bl_dsa_engine **out)
{
    uint32_t width = limits->batch_max < BL_DSA_WIDTH ? limits->batch_max : BL_DSA_WIDTH;
    uint32_t count_max = width > 1 ? BL_DSA_GROUPS_BATCHED : BL_DSA_GROUPS_SINGLE;
    bl_dsa_engine *engine = calloc(1, sizeof *engine);
    if (engine == NULL)
        return -ENOMEM;
    engine->memory = &pool->memory;
    engine->queue = queue;
    engine->limits = *limits;
    engine->rules = *rules;
    engine->width = width > 1 ? width : 1;
    engine->group_count = limits->depth < count_max ? limits->depth : count_max;
    engine->process = getpid();
    size_t size = engine->group_count * sizeof *engine->groups;
    engine->groups = aligned_alloc(_Alignof(bl_dsa_group), size);
    if (engine->groups == NULL) {
        free(engine);
        return -ENOMEM;
    }
    memset(engine->groups, 0, size); /* touches its pages before the device accesses them */
    *out = engine;
    return 0;
}

static int bl_dsa_forked(const bl_dsa_engine *engine) { return engine->process != getpid(); }

int bl_dsa_start(bl_dsa_engine *engine, const bl_plan *plan, uint32_t is_read,
                 bl_dsa_transfer **out)
{
    if (bl_dsa_forked(engine))
        return -BL_ERROR_FORKED;
    if ((plan->sparse && !is_read) || !bl_plan_valid(engine->memory, plan))
        return -EINVAL;
    bl_dsa_transfer *transfer = calloc(1, sizeof *transfer);
    if (transfer == NULL)
        return -ENOMEM;
    transfer->plan = *plan;
    transfer->is_read = is_read;
    transfer->by_chunk = plan->checksums != NULL;
    transfer->count = transfer->by_chunk ? plan->chunk_count : plan->piece_count;
    *out = transfer;
    if (transfer->count == 0)
        return 0;
    if (engine->first == NULL)
        engine->first = transfer;
    else
        engine->last->next = transfer;
    engine->last = transfer;
    bl_dsa_poll(engine);
    return 0;
}

int bl_dsa_ended(const bl_dsa_transfer *transfer)
{
    return transfer->abandoned || (transfer->begun == transfer->count && transfer->open == 0);
}

int bl_dsa_status(const bl_dsa_transfer *transfer) { return transfer->status; }

void bl_dsa_free(bl_dsa_transfer *transfer) { free(transfer); }

void bl_dsa_engine_stat(const bl_dsa_engine *engine, bl_dsa_stat *out) { *out = engine->stat; }

/* The transfer keeps the first error; its remaining works are not started. */
static void bl_dsa_fail(bl_dsa_transfer *transfer, int status)
{
    if (transfer->status == 0)
        transfer->status = status;
    transfer->begun = transfer->count;
}

/* Return the transfer whose works are next; remove transfers without remaining works from the
 * list. */
static bl_dsa_transfer *bl_dsa_next_transfer(bl_dsa_engine *engine)
{
    while (engine->first != NULL && engine->first->begun == engine->first->count)
        engine->first = engine->first->next;
    return engine->first;
}

/* Add works until the group is full. Returns 1 if the group has any works. */
static int bl_dsa_group_fill(bl_dsa_engine *engine, bl_dsa_group *group)
{
    int any = 0;
    for (uint32_t i = 0; i < engine->width; i++) {
        bl_dsa_work *work = &group->works[i];
        bl_dsa_transfer *transfer = bl_dsa_next_transfer(engine);
        if (work->transfer == NULL && transfer != NULL &&
            engine->bounced < BL_DSA_BOUNCE_MAX) {
            int status = bl_dsa_work_begin(engine, transfer, work);
            if (status < 0) {
                bl_dsa_work_drop(engine, work);
                bl_dsa_fail(transfer, status);
            }
        }
        any |= work->transfer != NULL;
    }
    return any;
}

/* Free the entry of a work that has failed or is done. */
static void bl_dsa_settle(bl_dsa_engine *engine, bl_dsa_work *work, int status)
{
    bl_dsa_transfer *transfer = work->transfer;
    if (status < 0 || transfer->status < 0)
        bl_dsa_work_drop(engine, work);
    else
        status = bl_dsa_work_end(engine, work);
    if (status < 0)
        bl_dsa_fail(transfer, status);
    if (bl_dsa_ended(transfer)) /* the caller may also poll for the end */
        bl_device_ordered(engine->memory); /* ordered before what this thread streams next */
}

/* Fill in the next descriptors of the group's works. Returns how many. */
static uint32_t bl_dsa_group_prepare(bl_dsa_engine *engine, bl_dsa_group *group)
{
    group->count = 0;
    for (uint32_t i = 0; i < engine->width; i++) {
        bl_dsa_work *work = &group->works[i];
        if (work->transfer == NULL)
            continue;
        uint32_t place = group->count;
        if (work->transfer->status < 0 || !bl_dsa_work_next(engine, work, &group->list[place])) {
            bl_dsa_settle(engine, work, 0);
            continue;
        }
        group->list[place].record = (uintptr_t)&group->records[place];
        group->records[place] = (bl_dsa_record){0};
        group->owners[place] = (uint8_t)i;
        group->count++;
    }
    if (group->count > 1) {
        group->whole = (bl_dsa_record){0};
        group->batch = (bl_dsa_descriptor){
            .flags_opcode = BL_DSA_CRAV | BL_DSA_RCR | (uint32_t)BL_DSA_BATCH << 24,
            .record = (uintptr_t)&group->whole,
            .list = (uintptr_t)group->list,
            .count = group->count};
    }
    group->full_count = 0;
    group->retry_ns = 0;
    return group->count;
}

/* Pass each descriptor's result to its work. */
static void bl_dsa_group_complete(bl_dsa_engine *engine, bl_dsa_group *group)
{
    for (uint32_t i = 0; i < group->count; i++) {
        bl_dsa_work *work = &group->works[group->owners[i]];
        bl_dsa_record record = bl_dsa_record_look(&group->records[i]);
        int status = bl_dsa_work_handle(engine, work, &group->list[i], &record);
        if (status < 0)
            bl_dsa_settle(engine, work, status);
    }
    group->state = BL_DSA_IDLE;
}

/* The queue never accepts the descriptors: complete them with a hardware error, so that the CPU
 * executes them. */
static void bl_dsa_group_cancel(bl_dsa_engine *engine, bl_dsa_group *group)
{
    for (uint32_t i = 0; i < group->count; i++)
        group->records[i].status = BL_DSA_HW_ERR1;
    bl_dsa_group_complete(engine, group);
}

/* Submit the group. Returns 1 if the queue has accepted it or it was cancelled, and 0 to retry
 * later. */
static int bl_dsa_group_submit(bl_dsa_engine *engine, bl_dsa_group *group)
{
    if (engine->broken < 0) {
        bl_dsa_group_cancel(engine, group);
        return 1;
    }
    if (group->retry_ns > 0 && bl_now_ns(engine->memory) < group->retry_ns)
        return 0;
    int batched = group->count > 1;
    int status = bl_dsa_submit(engine->queue, batched ? &group->batch : group->list);
    if (status == 0) {
        engine->stat.descriptors += group->count;
        engine->stat.batches += (uint64_t)batched;
        group->state = BL_DSA_SUBMITTED;
        return 1;
    }
    if (status != -EAGAIN) {
        engine->broken = status;
        return 1;
    }
    engine->stat.full++;
    if (group->full_count++ == BL_DSA_FULL_MAX) {
        bl_dsa_group_cancel(engine, group);
        return 1;
    }
    uint64_t pause = (uint64_t)BL_DSA_BACKOFF_NS << (group->full_count - 1);
    pause = pause < BL_DSA_BACKOFF_MAX_NS ? pause : BL_DSA_BACKOFF_MAX_NS;
    group->retry_ns = bl_now_ns(engine->memory) + pause;
    return 0;
}

static const bl_dsa_record *bl_dsa_awaited(const bl_dsa_group *group)
{
    return group->count > 1 ? &group->whole : group->records;
}

static int bl_dsa_group_done(bl_dsa_engine *engine, bl_dsa_group *group)
{
    if (bl_dsa_record_look(bl_dsa_awaited(group)).status == BL_DSA_NONE)
        return 0;
    bl_dsa_queue_ended(engine->queue);
    return 1;
}

int bl_dsa_poll(bl_dsa_engine *engine)
{
    int moved = 0;
    if (bl_dsa_forked(engine))
        return 0;
    for (uint32_t i = 0; i < engine->group_count; i++) {
        bl_dsa_group *group = &engine->groups[i];
        if (group->state == BL_DSA_SUBMITTED && bl_dsa_group_done(engine, group)) {
            bl_dsa_group_complete(engine, group);
            moved = 1;
        }
        while (group->state == BL_DSA_IDLE && bl_dsa_group_fill(engine, group))
            if (bl_dsa_group_prepare(engine, group) > 0)
                group->state = BL_DSA_PREPARED;
        if (group->state == BL_DSA_PREPARED)
            moved |= bl_dsa_group_submit(engine, group);
    }
    bl_dsa_next_transfer(engine); /* a transfer whose works have all started may be freed soon */
    return moved;
}

/* Sleep until a record is written, or yield. Returns 0 after the deadline. */
static int bl_dsa_rest(bl_dsa_engine *engine, bl_wait *wait)
{
    for (uint32_t i = 0; engine->queue->is_device && i < engine->group_count; i++)
        if (engine->groups[i].state == BL_DSA_SUBMITTED &&
            (bl_cpu_features() & BL_CPU_WAITPKG) != 0) {
            const bl_dsa_record *record = bl_dsa_awaited(&engine->groups[i]);
            bl_monitor((const uint64_t *)record, 0, BL_DSA_MONITOR_CYCLES);
            return bl_wait_left_ns(engine->memory, wait) > 0;
        }
    return bl_wait_turn(engine->memory, wait);
}

int bl_dsa_wait(bl_dsa_engine *engine, const bl_dsa_transfer *transfer, uint64_t timeout_ns)
{
    bl_wait wait = bl_wait_make(engine->memory, timeout_ns);
    int in_time = 1;
    if (bl_dsa_forked(engine))
        return -BL_ERROR_FORKED;
    while (!bl_dsa_ended(transfer)) {
        if (!in_time)
            return -BL_ERROR_TIMEOUT;
        if (bl_dsa_poll(engine))
            wait.waited_ns = 0, wait.start_ns = bl_now_ns(engine->memory);
        in_time = bl_dsa_ended(transfer) || bl_dsa_rest(engine, &wait);
    }
    return 0;
}

static void bl_dsa_abandon(bl_dsa_transfer *transfer)
{
    transfer->abandoned = 1;
    if (transfer->status == 0)
        transfer->status = -ECANCELED;
}

/* Wait for the groups in flight on a device. Returns 1 if all are complete. */
static int bl_dsa_drain(bl_dsa_engine *engine)
{
    bl_wait wait = bl_wait_make(engine->memory, BL_DSA_CLOSE_S * 1000000000ull);
    for (uint32_t i = 0; engine->queue->is_device && i < engine->group_count; i++)
        while (engine->groups[i].state == BL_DSA_SUBMITTED &&
               !bl_dsa_group_done(engine, &engine->groups[i]))
            if (!bl_wait_turn(engine->memory, &wait))
                return 0;
    return 1;
}

/* Remove all works from a group. Their bounce buffers are freed only with is_drained: otherwise the
 * device may still write to them. */
static void bl_dsa_group_clear(bl_dsa_engine *engine, bl_dsa_group *group, int is_drained)
{
    for (uint32_t i = 0; i < engine->width; i++) {
        bl_dsa_work *work = &group->works[i];
        if (work->transfer == NULL)
            continue;
        bl_dsa_abandon(work->transfer);
        if (is_drained)
            bl_dsa_work_drop(engine, work);
    }
}

void bl_dsa_engine_close(bl_dsa_engine *engine)
{
    int is_drained = 1;
    if (!bl_dsa_forked(engine)) {
        is_drained = bl_dsa_drain(engine);
        bl_dsa_queue_close(engine->queue);
    }
    for (uint32_t i = 0; i < engine->group_count; i++)
        bl_dsa_group_clear(engine, &engine->groups[i], is_drained);
    for (bl_dsa_transfer *left; (left = bl_dsa_next_transfer(engine)) != NULL;) {
        engine->first = left->next;
        bl_dsa_abandon(left);
    }
    if (is_drained)
        free(engine->groups);
    free(engine);
}

static int bl_dsa_move_one(bl_dsa_engine *engine, uint64_t offset, void *buffer, uint64_t size,
                           uint32_t is_read)
{
    bl_piece piece = {(uintptr_t)buffer, offset, (uint32_t)size, 0};
    bl_chunk chunk = {offset, (uint32_t)size, 0};
    bl_plan plan = {.pieces = &piece, .chunks = &chunk, .piece_count = 1, .chunk_count = 1};
    bl_dsa_transfer *transfer;
    int status = bl_dsa_start(engine, &plan, is_read, &transfer);
    if (status < 0)
        return status;
    while (bl_dsa_wait(engine, transfer, UINT32_MAX) < 0)
        continue;
    status = bl_dsa_status(transfer);
    bl_dsa_free(transfer);
    return status;
}

int bl_dsa_write_one(bl_dsa_engine *engine, uint64_t offset, void *buffer, uint64_t size)
{
    return bl_dsa_move_one(engine, offset, buffer, size, 0);
}

int bl_dsa_read_one(bl_dsa_engine *engine, uint64_t offset, void *buffer, uint64_t size)
{
    return bl_dsa_move_one(engine, offset, buffer, size, 1);
}

#endif

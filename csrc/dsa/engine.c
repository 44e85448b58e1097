/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * The DSA engine, which sends flights of descriptors (dsa/flight.h) through a queue. Only
 * bl_dsa_wait waits; bl_dsa_poll does the work that is ready and returns. Submission to a full
 * queue is retried with exponential backoff; after the last retry the CPU executes the descriptors.
 */
#include "dsa/flight.h"

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
    uint32_t count_max = width > 1 ? BL_DSA_FLIGHTS_BATCHED : BL_DSA_FLIGHTS_SINGLE;
    bl_dsa_engine *engine = calloc(1, sizeof *engine);
    if (engine == NULL)
        return -ENOMEM;
    engine->memory = &pool->memory;
    engine->queue = queue;
    engine->limits = *limits;
    engine->rules = *rules;
    engine->width = width > 1 ? width : 1;
    engine->flight_count = limits->depth < count_max ? limits->depth : count_max;
    engine->process = getpid();
    size_t size = engine->flight_count * sizeof *engine->flights;
    engine->flights = aligned_alloc(_Alignof(bl_dsa_flight), size);
    if (engine->flights == NULL) {
        free(engine);
        return -ENOMEM;
    }
    memset(engine->flights, 0, size); /* touches its pages before the device accesses them */
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

/* Add works until the flight is full. Returns 1 if it has any. */
static int bl_dsa_board(bl_dsa_engine *engine, bl_dsa_flight *flight)
{
    int any = 0;
    for (uint32_t i = 0; i < engine->width; i++) {
        bl_dsa_work *work = &flight->works[i];
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
    if (bl_dsa_ended(transfer)) /* its caller may also learn it by polling */
        bl_device_ordered(engine->memory); /* what this thread streams now comes after */
}

/* Make the next descriptors of all works of the flight. Returns how many. */
static uint32_t bl_dsa_prepare(bl_dsa_engine *engine, bl_dsa_flight *flight)
{
    flight->count = 0;
    for (uint32_t i = 0; i < engine->width; i++) {
        bl_dsa_work *work = &flight->works[i];
        if (work->transfer == NULL)
            continue;
        uint32_t place = flight->count;
        if (work->transfer->status < 0 || !bl_dsa_work_ask(engine, work, &flight->list[place])) {
            bl_dsa_settle(engine, work, 0);
            continue;
        }
        flight->list[place].record = (uintptr_t)&flight->records[place];
        flight->records[place] = (bl_dsa_record){0};
        flight->owners[place] = (uint8_t)i;
        flight->count++;
    }
    if (flight->count > 1) {
        flight->whole = (bl_dsa_record){0};
        flight->batch = (bl_dsa_descriptor){
            .flags_opcode = BL_DSA_CRAV | BL_DSA_RCR | (uint32_t)BL_DSA_BATCH << 24,
            .record = (uintptr_t)&flight->whole,
            .list = (uintptr_t)flight->list,
            .count = flight->count};
    }
    flight->full_count = 0;
    flight->retry_ns = 0;
    return flight->count;
}

/* The flight has landed: pass each descriptor's result to its work. */
static void bl_dsa_land(bl_dsa_engine *engine, bl_dsa_flight *flight)
{
    for (uint32_t i = 0; i < flight->count; i++) {
        bl_dsa_work *work = &flight->works[flight->owners[i]];
        bl_dsa_record record = bl_dsa_record_look(&flight->records[i]);
        int status = bl_dsa_work_hear(engine, work, &flight->list[i], &record);
        if (status < 0)
            bl_dsa_settle(engine, work, status);
    }
    flight->state = BL_DSA_GROUNDED;
}

/* The queue never accepts the descriptors: complete them with a hardware error, so that the CPU
 * executes them. */
static void bl_dsa_cancel(bl_dsa_engine *engine, bl_dsa_flight *flight)
{
    for (uint32_t i = 0; i < flight->count; i++)
        flight->records[i].status = BL_DSA_HW_ERR1;
    bl_dsa_land(engine, flight);
}

/* Submit the flight. Returns 1 if the queue has accepted it or it was cancelled, and 0 to retry
 * later. */
static int bl_dsa_leave(bl_dsa_engine *engine, bl_dsa_flight *flight)
{
    if (engine->broken < 0) {
        bl_dsa_cancel(engine, flight);
        return 1;
    }
    if (flight->retry_ns > 0 && bl_now_ns(engine->memory) < flight->retry_ns)
        return 0;
    int batched = flight->count > 1;
    int status = bl_dsa_submit(engine->queue, batched ? &flight->batch : flight->list);
    if (status == 0) {
        engine->stat.descriptors += flight->count;
        engine->stat.batches += (uint64_t)batched;
        flight->state = BL_DSA_FLYING;
        return 1;
    }
    if (status != -EAGAIN) {
        engine->broken = status;
        return 1;
    }
    engine->stat.full++;
    if (flight->full_count++ == BL_DSA_FULL_MAX) {
        bl_dsa_cancel(engine, flight);
        return 1;
    }
    uint64_t pause = (uint64_t)BL_DSA_BACKOFF_NS << (flight->full_count - 1);
    pause = pause < BL_DSA_BACKOFF_MAX_NS ? pause : BL_DSA_BACKOFF_MAX_NS;
    flight->retry_ns = bl_now_ns(engine->memory) + pause;
    return 0;
}

static const bl_dsa_record *bl_dsa_awaited(const bl_dsa_flight *flight)
{
    return flight->count > 1 ? &flight->whole : flight->records;
}

static int bl_dsa_has_landed(bl_dsa_engine *engine, bl_dsa_flight *flight)
{
    if (bl_dsa_record_look(bl_dsa_awaited(flight)).status == BL_DSA_NONE)
        return 0;
    bl_dsa_queue_ended(engine->queue);
    return 1;
}

int bl_dsa_poll(bl_dsa_engine *engine)
{
    int moved = 0;
    if (bl_dsa_forked(engine))
        return 0;
    for (uint32_t i = 0; i < engine->flight_count; i++) {
        bl_dsa_flight *flight = &engine->flights[i];
        if (flight->state == BL_DSA_FLYING && bl_dsa_has_landed(engine, flight)) {
            bl_dsa_land(engine, flight);
            moved = 1;
        }
        while (flight->state == BL_DSA_GROUNDED && bl_dsa_board(engine, flight))
            if (bl_dsa_prepare(engine, flight) > 0)
                flight->state = BL_DSA_LEAVING;
        if (flight->state == BL_DSA_LEAVING)
            moved |= bl_dsa_leave(engine, flight);
    }
    bl_dsa_next_transfer(engine); /* a transfer whose works have all begun may be freed soon */
    return moved;
}

/* Sleep until a record is written, or yield. Returns 0 after the deadline. */
static int bl_dsa_rest(bl_dsa_engine *engine, bl_wait *wait)
{
    for (uint32_t i = 0; engine->queue->is_device && i < engine->flight_count; i++)
        if (engine->flights[i].state == BL_DSA_FLYING &&
            (bl_cpu_features() & BL_CPU_WAITPKG) != 0) {
            const bl_dsa_record *record = bl_dsa_awaited(&engine->flights[i]);
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

/* Wait for the flights that a device executes. Returns 1 if all have landed. */
static int bl_dsa_quiet(bl_dsa_engine *engine)
{
    bl_wait wait = bl_wait_make(engine->memory, BL_DSA_CLOSE_S * 1000000000ull);
    for (uint32_t i = 0; engine->queue->is_device && i < engine->flight_count; i++)
        while (engine->flights[i].state == BL_DSA_FLYING &&
               !bl_dsa_has_landed(engine, &engine->flights[i]))
            if (!bl_wait_turn(engine->memory, &wait))
                return 0;
    return 1;
}

/* Remove all works from a flight; with is_quiet their bounce buffers are freed, too. */
static void bl_dsa_evacuate(bl_dsa_engine *engine, bl_dsa_flight *flight, int is_quiet)
{
    for (uint32_t i = 0; i < engine->width; i++) {
        bl_dsa_work *work = &flight->works[i];
        if (work->transfer == NULL)
            continue;
        bl_dsa_abandon(work->transfer);
        if (is_quiet)
            bl_dsa_work_drop(engine, work);
    }
}

void bl_dsa_engine_close(bl_dsa_engine *engine)
{
    int is_quiet = 1;
    if (!bl_dsa_forked(engine)) {
        is_quiet = bl_dsa_quiet(engine);
        bl_dsa_queue_close(engine->queue);
    }
    for (uint32_t i = 0; i < engine->flight_count; i++)
        bl_dsa_evacuate(engine, &engine->flights[i], is_quiet);
    for (bl_dsa_transfer *left; (left = bl_dsa_next_transfer(engine)) != NULL;) {
        engine->first = left->next;
        bl_dsa_abandon(left);
    }
    if (is_quiet)
        free(engine->flights);
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

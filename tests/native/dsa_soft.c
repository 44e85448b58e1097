/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Serves a queue of a DSA in software: see dsa_soft.h. A record becomes visible by its first 8
 * bytes, which are written last, after all other stores of the descriptor. The same seed and the
 * same order of submissions give the same faults.
 */
#include "native/dsa_soft.h"

#include <errno.h>
#include <stdlib.h>
#include <time.h>

#include "base/thread.h"
#include "coherence/coherence.h"
#include "dsa/queue.h"

enum { BL_DSA_LATE_MAX = 32, BL_DSA_LATE_NS = 20 * 1000, BL_DSA_LIST_MAX = 1024 };

/* A record that is written later than others. */
typedef struct bl_dsa_late {
    uint64_t address;
    bl_dsa_record record;
} bl_dsa_late;

typedef struct bl_dsa_soft {
    bl_dsa_queue queue;
    bl_dsa_executor executor;
    bl_dsa_limits limits;
    bl_dsa_faults faults;
    uint64_t dice_submit;       /* under the lock */
    uint64_t dice_work;         /* for the thread */
    uint32_t full_left;         /* submissions still to be refused */
    uint32_t late_count;
    bl_dsa_late late[BL_DSA_LATE_MAX];
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t wake;
    uint32_t stop;
    uint32_t count;
    bl_dsa_descriptor ring[];   /* oldest first; limits.depth of them */
} bl_dsa_soft;

/* Sleep in real time: bl_nap() would advance the simulator's clock. */
static void bl_dsa_sleep(uint64_t ns)
{
    struct timespec time = {(time_t)(ns / 1000000000u), (long)(ns % 1000000000u)};
    nanosleep(&time, NULL);
}

static uint32_t bl_dsa_dice(uint64_t *state, uint32_t sides)
{
    *state ^= *state << 13, *state ^= *state >> 7, *state ^= *state << 17;
    return (uint32_t)((*state >> 32) % sides);
}

static int bl_dsa_befalls(uint64_t *state, uint32_t chance)
{
    return chance > 0 && bl_dsa_dice(state, 1 << 16) < chance;
}

static int bl_dsa_soft_submit(bl_dsa_queue *queue, const bl_dsa_descriptor *descriptor)
{
    bl_dsa_soft *soft = (bl_dsa_soft *)queue;
    int status = -EAGAIN;
    pthread_mutex_lock(&soft->lock);
    if (soft->full_left > 0)
        soft->full_left--;
    else if (bl_dsa_befalls(&soft->dice_submit, soft->faults.full))
        soft->full_left = bl_dsa_dice(&soft->dice_submit, soft->faults.full_run + 1);
    else if (soft->count < soft->limits.depth) {
        soft->ring[soft->count++] = *descriptor;
        status = 0;
        pthread_cond_signal(&soft->wake);
    }
    pthread_mutex_unlock(&soft->lock);
    return status;
}

static void bl_dsa_soft_ended(bl_dsa_queue *queue) { (void)queue; /* the ring counts */ }

static void bl_dsa_show(uint64_t address, const bl_dsa_record *record)
{
    uint64_t head, *target = (uint64_t *)address;
    memcpy(&head, record, sizeof head);
    memcpy(target + 1, (const uint8_t *)record + sizeof head, sizeof *record - sizeof head);
    bl_store_fence_now(); /* for streamed bytes, too */
    bl_shared_store(target, head);
}

static void bl_dsa_show_late(bl_dsa_soft *soft)
{
    while (soft->late_count > 0) {
        uint32_t which = bl_dsa_dice(&soft->dice_work, soft->late_count);
        bl_dsa_show(soft->late[which].address, &soft->late[which].record);
        soft->late[which] = soft->late[--soft->late_count];
    }
}

/* Write a record to the descriptor's record address, unless that is invalid. */
static void bl_dsa_deliver(bl_dsa_soft *soft, const bl_dsa_descriptor *descriptor,
                           const bl_dsa_record *record, int may_be_late)
{
    uint32_t flags = bl_dsa_flags(descriptor);
    if (!(flags & BL_DSA_CRAV) || descriptor->record == 0 ||
        descriptor->record % sizeof *record > 0)
        return; /* the device reports this to its driver (SWERROR register), not to its user */
    if (!(flags & BL_DSA_RCR) && record->status == BL_DSA_SUCCESS)
        return;
    if (may_be_late && soft->late_count < BL_DSA_LATE_MAX &&
        bl_dsa_befalls(&soft->dice_work, soft->faults.late))
        soft->late[soft->late_count++] = (bl_dsa_late){descriptor->record, *record};
    else
        bl_dsa_show(descriptor->record, record);
}

static uint32_t bl_dsa_run_one(bl_dsa_soft *soft, const bl_dsa_descriptor *descriptor,
                               uint32_t in_batch)
{
    bl_dsa_setting setting = {&soft->limits, soft->executor.pool, in_batch};
    bl_dsa_injected injected = {BL_DSA_INJECT_NONE, 0, 0};
    bl_dsa_record record;
    int waits = bl_dsa_flags(descriptor) & BL_DSA_BOF;
    if (descriptor->size > 0 && !waits &&
        bl_dsa_befalls(&soft->dice_work, soft->faults.fault)) {
        injected.kind = BL_DSA_INJECT_FAULT;
        injected.at = bl_dsa_dice(&soft->dice_work, descriptor->size);
        injected.is_write = bl_dsa_dice(&soft->dice_work, 2);
    } else if (bl_dsa_befalls(&soft->dice_work, soft->faults.error)) {
        injected.kind = BL_DSA_INJECT_ERROR;
    }
    soft->executor.execute(&setting, descriptor, &injected, &record);
    bl_dsa_deliver(soft, descriptor, &record, !in_batch);
    return record.status;
}

/* Shuffle the order in which [start, end) of a list are executed. */
static void bl_dsa_shuffle(bl_dsa_soft *soft, uint16_t *order, uint32_t start, uint32_t end)
{
    for (uint32_t i = end; i > start + 1; i--) {
        uint32_t other = start + bl_dsa_dice(&soft->dice_work, i - start);
        uint16_t moved = order[i - 1];
        order[i - 1] = order[other];
        order[other] = moved;
    }
}

/* Execute a list: descriptors between two fences in any order, and none beyond a fence after a
 * failure. */
static uint32_t bl_dsa_run_list(bl_dsa_soft *soft, const bl_dsa_descriptor *list, uint32_t count,
                                uint32_t *failed)
{
    uint16_t order[BL_DSA_LIST_MAX];
    uint32_t done = 0;
    for (uint32_t start = 0, end; start < count; start = end) {
        if (*failed && (bl_dsa_flags(&list[start]) & BL_DSA_FENCE))
            break;
        for (end = start; end == start || (end < count &&
                                           !(bl_dsa_flags(&list[end]) & BL_DSA_FENCE)); end++)
            order[end] = (uint16_t)end;
        if (bl_dsa_befalls(&soft->dice_work, soft->faults.reorder))
            bl_dsa_shuffle(soft, order, start, end);
        for (uint32_t i = start; i < end; i++, done++)
            *failed |= bl_dsa_run_one(soft, &list[order[i]], 1) != BL_DSA_SUCCESS;
    }
    return done;
}

static void bl_dsa_run_batch(bl_dsa_soft *soft, const bl_dsa_descriptor *batch)
{
    bl_dsa_setting setting = {&soft->limits, soft->executor.pool, 0};
    bl_dsa_record record = {0};
    record.status = (uint8_t)soft->executor.refusal(&setting, batch, &record);
    if (record.status == BL_DSA_NONE) {
        const bl_dsa_descriptor *list = (const bl_dsa_descriptor *)batch->list;
        uint32_t count = batch->count, failed = 0;
        int stops = bl_dsa_befalls(&soft->dice_work, soft->faults.list_fault);
        if (stops)
            count = bl_dsa_dice(&soft->dice_work, count);
        record.completed = bl_dsa_run_list(soft, list, count, &failed);
        record.status = failed ? BL_DSA_BATCH_FAIL : BL_DSA_SUCCESS;
        if (stops) {
            record.status = BL_DSA_BATCH_PAGE_FAULT;
            record.fault_address = (uintptr_t)&list[record.completed];
        }
    }
    bl_dsa_deliver(soft, batch, &record, 1);
}

/* Take the next descriptor: the oldest, or any that may overtake it. The caller has the lock. */
static bl_dsa_descriptor bl_dsa_take(bl_dsa_soft *soft)
{
    uint32_t free_count = 0, which = 0;
    while (free_count < soft->count && bl_dsa_opcode(&soft->ring[free_count]) != BL_DSA_DRAIN)
        free_count++;
    if (free_count > 1 && bl_dsa_befalls(&soft->dice_work, soft->faults.reorder))
        which = bl_dsa_dice(&soft->dice_work, free_count);
    bl_dsa_descriptor taken = soft->ring[which];
    soft->count--;
    memmove(&soft->ring[which], &soft->ring[which + 1],
            (soft->count - which) * sizeof *soft->ring);
    return taken;
}

static void bl_dsa_serve(bl_dsa_soft *soft, const bl_dsa_descriptor *descriptor, uint32_t delay_us)
{
    uint32_t opcode = bl_dsa_opcode(descriptor);
    if (delay_us > 0)
        bl_dsa_sleep(delay_us * 1000ull);
    if (opcode == BL_DSA_DRAIN)
        bl_dsa_show_late(soft); /* a fence ends after all before it */
    if (opcode == BL_DSA_BATCH)
        bl_dsa_run_batch(soft, descriptor);
    else
        bl_dsa_run_one(soft, descriptor, 0);
}

static void *bl_dsa_serve_all(void *argument)
{
    bl_dsa_soft *soft = argument;
    pthread_mutex_lock(&soft->lock);
    for (;;) {
        if (soft->count > 0) {
            bl_dsa_descriptor descriptor = bl_dsa_take(soft);
            uint32_t delay_us = soft->stop ? 0 : soft->faults.delay_us;
            pthread_mutex_unlock(&soft->lock);
            bl_dsa_serve(soft, &descriptor, delay_us);
            pthread_mutex_lock(&soft->lock);
        } else if (soft->late_count > 0) {
            pthread_mutex_unlock(&soft->lock);
            bl_dsa_sleep(BL_DSA_LATE_NS);
            bl_dsa_show_late(soft);
            pthread_mutex_lock(&soft->lock);
        } else if (soft->stop) {
            break;
        } else {
            pthread_cond_wait(&soft->wake, &soft->lock);
        }
    }
    pthread_mutex_unlock(&soft->lock);
    return NULL;
}

static void bl_dsa_soft_close(bl_dsa_queue *queue)
{
    bl_dsa_soft *soft = (bl_dsa_soft *)queue;
    pthread_mutex_lock(&soft->lock);
    soft->stop = 1;
    pthread_cond_signal(&soft->wake);
    pthread_mutex_unlock(&soft->lock);
    pthread_join(soft->thread, NULL);
    pthread_mutex_destroy(&soft->lock);
    pthread_cond_destroy(&soft->wake);
    free(soft);
}

static const bl_dsa_queue_verbs bl_dsa_soft_verbs = {bl_dsa_soft_submit, bl_dsa_soft_ended,
                                                     bl_dsa_soft_close};

int bl_dsa_soft_open(const bl_dsa_executor *executor, const bl_dsa_limits *limits,
                     const bl_dsa_faults *faults, bl_dsa_queue **out)
{
    if (limits->depth == 0 || limits->size_max == 0 || limits->batch_max > BL_DSA_LIST_MAX)
        return -EINVAL;
    bl_dsa_soft *soft = calloc(1, sizeof *soft + limits->depth * sizeof *soft->ring);
    if (soft == NULL)
        return -ENOMEM;
    soft->queue = (bl_dsa_queue){&bl_dsa_soft_verbs, 0};
    soft->executor = *executor;
    soft->limits = *limits;
    soft->faults = *faults;
    soft->dice_submit = soft->faults.seed * 2 + 1;
    soft->dice_work = soft->faults.seed * 0x9e3779b97f4a7c15ull | 1;
    pthread_mutex_init(&soft->lock, NULL);
    pthread_cond_init(&soft->wake, NULL);
    int status = bl_thread_start(&soft->thread, bl_dsa_serve_all, soft);
    if (status < 0) {
        pthread_mutex_destroy(&soft->lock);
        pthread_cond_destroy(&soft->wake);
        free(soft);
        return status;
    }
    *out = &soft->queue;
    return 0;
}

/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Puts and gets by DMA, with the protocol of kv.c: the steps that an engine with a device takes,
 * while servers die.
 *
 *   put:  reserve --> device writes --> bl_device_written --> commit
 *   get:  lookup, pinned --> look at the entries --> bl_device_reads --> device reads --> look
 *         again --> release
 */
#include <errno.h>

#include "device_range.h"
#include "session.h"
#include "sim_device.h"
#include "sim_paths.h"

enum {
    BL_ENGINE_SHAPE = 2,        /* of bl_kv_shapes: whole lines, no checksums to hide behind */
    BL_ENGINE_KV_ROUNDS = 10
};

static void bl_engine_kv_prepare(const bl_kv *kv, bl_kv_buffers *buffers)
{
    do
        bl_kv_prepare(kv, buffers);
    while (buffers->batch.layout != 1 + BL_ENGINE_SHAPE);
    buffers->batch.verify = 0;
}

static int bl_engine_put(bl_kv *kv, bl_session *session, bl_kv_buffers *buffers, bl_kv_work *work)
{
    const bl_memory *memory = &session->pool->memory;
    const bl_kv_batch *batch = &buffers->batch;
    bl_block_request what = {batch->layout, batch->length, 0, 0, 0};
    uint64_t tickets[BL_KV_BATCH];
    uint32_t granted = 0;
    int status = bl_reserve(session, batch->keys, batch->count, &what, work->records,
                            batch->timeout_ns);
    for (uint32_t i = 0; status == 0 && i < batch->count; i++) {
        const bl_block_record *record = &work->records[i];
        if (record->state != BL_BLOCK_GRANTED)
            continue;
        bl_kv_fill(buffers->payloads[i], batch->keys[2 * i], bl_sim_random(kv->path.world),
                   batch->length);
        tickets[granted] = bl_sim_device_write(memory, record->offset, buffers->payloads[i],
                                               batch->length, BL_SIM_TARGET_ANY);
        work->index[granted] = i;
        work->commits[granted++] = (bl_commit){
            .key = {batch->keys[2 * i], batch->keys[2 * i + 1]},
            .generation = record->generation,
            .block = record->block,
        };
    }
    for (uint32_t k = 0; k < granted; k++) {
        bl_sim_device_wait(memory, tickets[k]);
        bl_device_written(memory, work->records[work->index[k]].offset, batch->length);
    }
    if (granted > 0)
        status = bl_commit_blocks(session, work->commits, granted, work->statuses,
                                  batch->timeout_ns);
    return status;
}

/* Check the bytes of a block that was read and confirmed. */
static int bl_engine_judge(bl_kv *kv, const bl_kv_buffers *buffers, uint32_t i)
{
    uint64_t right[BL_KV_LENGTH_MAX / sizeof(uint64_t)];
    bl_kv_fill(right, buffers->keys[2 * i], buffers->payloads[i][0], buffers->batch.length);
    kv->path.world->stat.results++;
    return memcmp(right, buffers->payloads[i], buffers->batch.length) ? -EBADMSG : 0;
}

static int bl_engine_get(bl_kv *kv, bl_session *session, bl_kv_buffers *buffers, bl_kv_work *work)
{
    const bl_memory *memory = &session->pool->memory;
    const bl_kv_batch *batch = &buffers->batch;
    uint32_t state, half;
    int64_t hits = bl_lookup(session, batch->keys, batch->count, BL_LOOKUP_PIN, work->records,
                             &state, batch->timeout_ns);
    if (hits <= 0)
        return (int)hits;
    half = session->half;
    bl_entry_look(session, work, half, 0, (uint32_t)hits, work->entries);
    for (uint32_t i = 0; i < hits; i++) {
        const bl_entry *entry = &work->entries[i];
        buffers->states[i] = (uint8_t)bl_entry_agrees(session, batch, i, work, entry);
        if (!buffers->states[i])
            continue;
        bl_device_reads(memory, entry->offset, batch->length);
        bl_sim_device_wait(memory, bl_sim_device_read(memory, entry->offset, buffers->payloads[i],
                                                      batch->length));
    }
    bl_entry_look(session, work, half, 0, (uint32_t)hits, work->entries);
    int stands = bl_epoch_stands(session), status = 0;
    for (uint32_t i = 0; i < hits && status == 0; i++) {
        work->commits[i] = (bl_commit){.generation = work->records[i].generation,
                                       .block = work->records[i].block};
        if (!stands || !buffers->states[i] ||
            !bl_entry_agrees(session, batch, i, work, &work->entries[i]))
            continue;
        bl_kv_confirm(session, batch, i, work);
        status = bl_engine_judge(kv, buffers, i);
    }
    if (status < 0)
        return status;
    hits = bl_release_blocks(session, work->commits, (uint32_t)hits, batch->timeout_ns);
    return hits < 0 ? (int)hits : 0;
}

static int bl_engine_work_on(bl_pool *pool, void *argument)
{
    bl_kv *kv = argument;
    bl_session *session;
    int status = bl_path_attach(&kv->path, pool, &session);
    if (status < 0)
        return status;
    for (uint32_t i = 0; i < BL_ENGINE_KV_ROUNDS && status == 0; i++) {
        bl_kv_buffers buffers;
        bl_kv_work work;
        bl_engine_kv_prepare(kv, &buffers);
        status = bl_kv_begin(&buffers.batch, 0, &work);
        if (status < 0)
            break;
        status = bl_sim_below(kv->path.world, 2) ? bl_engine_put(kv, session, &buffers, &work)
                                                 : bl_engine_get(kv, session, &buffers, &work);
        status = bl_path_bear(&kv->path, status);
        bl_kv_end(&work);
    }
    bl_session_close(session);
    return status;
}

static int bl_engine_kv(bl_sim_world *world)
{
    bl_kv kv = {.path = {.world = world, .serve = bl_blocks_serve, .server_host_count = 1,
                         .server_deaths = 1, .server_verbs = BL_KV_SERVER_VERBS},
                .shape_keys = BL_KV_SHAPE_KEYS};
    for (uint32_t host = 0; host < 3; host++)
        bl_path_client(&kv.path, host, bl_engine_work_on);
    return bl_path_run(&kv.path);
}

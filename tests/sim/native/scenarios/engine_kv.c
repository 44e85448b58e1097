/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Scenarios of puts and gets by DMA, between the two halves of kvcache/batch.h: the steps of an
 * engine with a device, while servers die, and a writer dies whose device may continue to write for
 * a while. Some puts fail after their devices have written.
 *
 *   put:  begin --> device writes --> bl_device_written --> end
 *                                 --> end, failed
 *   get:  begin --> bl_device_reads --> device reads --> end
 */
#include <errno.h>

#include "transfer/device_range.h"
#include "rpc/session_state.h"
#include "sim/native/device.h"
#include "sim/native/scenarios/blocks.h"
#include "sim/native/scenarios/kv.h"
#include "sim/native/scenarios/paths.h"
#include "sim/native/scenarios/scenarios.h"

enum {
    BL_ENGINE_SHAPE = 2,        /* index in bl_kv_shapes: whole lines without checksums, which
                                 * would hide errors */
    BL_ENGINE_KV_ROUNDS = 10,
    BL_ENGINE_KV_HEIRS = 30,    /* rounds before and after a writer's death */
    BL_ENGINE_KV_VERBS = 60,    /* a writer dies within this many verbs after its device's start */
    BL_ENGINE_KV_NAP_NS = 3 * 1000 * 1000
};

static void bl_engine_kv_prepare(const bl_kv *kv, bl_kv_buffers *buffers)
{
    do
        bl_kv_prepare(kv, buffers);
    while (buffers->batch.fingerprint != 1 + BL_ENGINE_SHAPE);
    buffers->batch.check_checksums = 0;
}

/* Kill a writer whose device has started, and perhaps its server, too. */
static void bl_engine_doom(const bl_kv *kv)
{
    bl_sim_world *world = kv->path.world;
    uint32_t self = bl_sim_self(world);
    if (!kv->rounds || kv->leaves || self != kv->path.client[0] || bl_sim_below(world, 8) != 0)
        return;
    bl_sim_kill_after(world, self, 1 + bl_sim_below(world, BL_ENGINE_KV_VERBS));
    if (bl_sim_below(world, 2))
        bl_sim_kill(world, kv->path.server_process);
}

/* Return 1 in the put in which a client is interrupted and does not wait for its device. */
static int bl_engine_leaves(bl_kv *kv, const bl_kv_buffers *buffers)
{
    uint32_t self = 1u << bl_sim_self(kv->path.world);
    if (!kv->leaves || kv->left & self || buffers->states[0] != BL_BLOCK_GRANTED)
        return 0;
    kv->left |= self;
    return 1;
}

/* Check that a put whose copies failed returned that error, and has refused no block. */
static int bl_engine_failed(const bl_kv_buffers *buffers, int status)
{
    for (uint32_t i = 0; i < buffers->batch.count; i++)
        if (buffers->states[i] == BL_BLOCK_REFUSED && buffers->statuses[i] == status)
            return -EBADMSG;
    return status == -ECANCELED ? 0 : -EBADMSG;
}

static int bl_engine_put(bl_kv *kv, bl_session *session, bl_kv_buffers *buffers)
{
    const bl_memory *memory = &session->pool->memory;
    const bl_kv_batch *batch = &buffers->batch;
    uint64_t tickets[BL_KV_BATCH], offsets[BL_KV_BATCH];
    bl_kv_pending *pending;
    int fails = bl_sim_below(kv->path.world, 4) == 0;
    int status = bl_kv_put_begin(session, batch, buffers->states, buffers->statuses, offsets,
                                 &pending);
    if (status < 0)
        return status;
    for (uint32_t i = 0; i < batch->count; i++) {
        if (buffers->states[i] != BL_BLOCK_GRANTED)
            continue;
        bl_kv_fill(buffers->payloads[i], batch->keys[2 * i], bl_sim_random(kv->path.world),
                   batch->length);
        tickets[i] = bl_sim_device_write(memory, offsets[i], buffers->payloads[i], batch->length,
                                         BL_SIM_TARGET_ANY);
        bl_engine_doom(kv);
    }
    if (bl_engine_leaves(kv, buffers)) {
        status = bl_kv_put_end(pending, NULL, -EINPROGRESS, buffers->states,
                               buffers->statuses);
        return status == -EINPROGRESS ? 0 : -EBADMSG;
    }
    for (uint32_t i = 0; i < batch->count; i++) {
        if (buffers->states[i] != BL_BLOCK_GRANTED)
            continue;
        bl_sim_device_wait(memory, tickets[i]);
        if (!fails)
            bl_device_written(memory, offsets[i], batch->length);
    }
    status = bl_kv_put_end(pending, NULL, fails ? -ECANCELED : 0, buffers->states,
                           buffers->statuses);
    return fails ? bl_engine_failed(buffers, status) : status;
}

/* Check the bytes of a confirmed block. */
static int bl_engine_judge(bl_kv *kv, const bl_kv_buffers *buffers, uint32_t i)
{
    uint64_t right[BL_KV_LENGTH_MAX / sizeof(uint64_t)];
    bl_kv_fill(right, buffers->keys[2 * i], buffers->payloads[i][0], buffers->batch.length);
    kv->path.world->stat.results++;
    return memcmp(right, buffers->payloads[i], buffers->batch.length) ? -EBADMSG : 0;
}

static int bl_engine_get(bl_kv *kv, bl_session *session, bl_kv_buffers *buffers)
{
    const bl_memory *memory = &session->pool->memory;
    const bl_kv_batch *batch = &buffers->batch;
    uint64_t offsets[BL_KV_BATCH], mismatch_count = 0;
    bl_kv_pending *pending;
    int64_t hits = bl_kv_get_begin(session, batch, buffers->states, offsets, NULL, &pending);
    if (hits < 0)
        return (int)hits;
    for (uint32_t i = 0; i < hits; i++) {
        if (buffers->states[i] != BL_BLOCK_HIT)
            continue;
        bl_device_reads(memory, offsets[i], batch->length);
        bl_sim_device_wait(memory, bl_sim_device_read(memory, offsets[i], buffers->payloads[i],
                                                      batch->length));
    }
    hits = bl_kv_get_end(pending, 0, buffers->states, &mismatch_count);
    kv->path.world->stat.torn_lines += mismatch_count;
    int status = hits < 0 ? (int)hits : 0;
    for (uint32_t i = 0; i < hits && status == 0; i++)
        status = bl_engine_judge(kv, buffers, i);
    return status;
}

static int bl_engine_work_on(bl_pool *pool, void *argument)
{
    bl_kv *kv = argument;
    bl_session *session;
    int status = bl_path_attach(&kv->path, pool, &session);
    if (status < 0)
        return status;
    uint32_t rounds = kv->rounds ? kv->rounds : BL_ENGINE_KV_ROUNDS;
    for (uint32_t i = 0; i < rounds && status == 0; i++) {
        if (kv->rounds)
            bl_nap(&pool->memory, bl_sim_below(kv->path.world, BL_ENGINE_KV_NAP_NS));
        bl_kv_buffers buffers;
        bl_engine_kv_prepare(kv, &buffers);
        status = bl_sim_below(kv->path.world, 2) ? bl_engine_put(kv, session, &buffers)
                                                 : bl_engine_get(kv, session, &buffers);
        status = bl_path_bear(&kv->path, status);
    }
    bl_session_close(session);
    return status;
}

int bl_engine_kv(bl_sim_world *world)
{
    bl_kv kv = {.path = {.world = world, .serve = bl_blocks_serve, .server_host_count = 1,
                         .server_deaths = 1, .server_verbs = BL_KV_SERVER_VERBS},
                .shape_keys = BL_KV_SHAPE_KEYS};
    for (uint32_t host = 0; host < 3; host++)
        bl_path_client(&kv.path, host, bl_engine_work_on);
    return bl_path_run(&kv.path);
}

/* ---- device_kv_death: a writer is killed, and perhaps its server. Its device continues after the
 * writer's lock was released, and what the device wrote may be dirty in the cache: a get of the
 * space's next block must return the bytes of its put, or miss. There are more keys than lines in
 * the table, so that space soon has another owner. */

int bl_engine_kv_death(bl_sim_world *world)
{
    bl_kv kv = {.path = {.world = world, .serve = bl_blocks_serve, .server_host_count = 1,
                         .server_deaths = (uint32_t)bl_sim_below(world, 2),
                         .server_verbs = BL_KV_SERVER_VERBS},
                .shape_keys = BL_KV_STOPS_KEYS, .rounds = BL_ENGINE_KV_HEIRS};
    for (uint32_t i = 0; i < 4; i++)
        bl_path_client(&kv.path, i % 3, bl_engine_work_on);
    return bl_path_run(&kv.path);
}

/* ---- device_kv_left: clients are interrupted and continue under another nonce, while their
 * devices still write to space granted to the former nonce: that space must not be granted
 * again. */

int bl_engine_kv_left(bl_sim_world *world)
{
    bl_kv kv = {.path = {.world = world, .serve = bl_blocks_serve, .server_host_count = 1,
                         .server_deaths = (uint32_t)bl_sim_below(world, 2),
                         .server_verbs = BL_KV_SERVER_VERBS},
                .shape_keys = BL_KV_STOPS_KEYS, .rounds = BL_ENGINE_KV_HEIRS, .leaves = 1};
    for (uint32_t i = 0; i < 3; i++)
        bl_path_client(&kv.path, i, bl_engine_work_on);
    return bl_path_run(&kv.path);
}

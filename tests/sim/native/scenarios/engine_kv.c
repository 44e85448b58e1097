/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Scenarios of puts and gets by an engine with a device, while servers die, and a writer dies whose
 * device may continue to write for a while. Some puts fail after their devices have written.
 *
 *   put:  start: device writes                   wait --> bl_device_written, or an error
 *   get:  start: bl_device_reads, device reads   wait
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
    for (uint32_t i = 0; i < buffers->batch.count; i++)
        buffers->fragments[i] = (bl_fragment){(uintptr_t)buffers->payloads[i],
                                              buffers->batch.length};
    buffers->batch.fragment_count = 1;
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

/* A copy by the device: a job for each piece. */
typedef struct bl_engine_copy {
    bl_kv *kv;
    const bl_kv_buffers *buffers;
    const bl_memory *memory;
    bl_plan plan;               /* without pieces: not started */
    uint64_t tickets[BL_KV_BATCH];
    int write;
    int fails;
    int left;                   /* 1: interrupted, while the device writes */
} bl_engine_copy;

static int bl_engine_copy_start(void *context, const bl_plan *plan, int write, void **out)
{
    bl_engine_copy *copy = context;
    copy->plan = *plan;
    copy->write = write;
    for (uint32_t i = 0; i < plan->piece_count; i++) {
        const bl_piece *piece = &plan->pieces[i];
        void *payload = (void *)(uintptr_t)piece->address;
        if (write) {
            copy->tickets[i] = bl_sim_device_write(copy->memory, piece->offset, payload,
                                                   piece->length, BL_SIM_TARGET_ANY);
            bl_engine_doom(copy->kv);
        } else {
            bl_device_reads(copy->memory, piece->offset, piece->length);
            copy->tickets[i] = bl_sim_device_read(copy->memory, piece->offset, payload,
                                                  piece->length);
        }
    }
    *out = copy;
    return 0;
}

static int bl_engine_copy_wait(void *context, void *out)
{
    bl_engine_copy *copy = context;
    (void)out;
    copy->left = copy->write && bl_engine_leaves(copy->kv, copy->buffers);
    if (copy->left)
        return -EINPROGRESS;
    for (uint32_t i = 0; i < copy->plan.piece_count; i++) {
        const bl_piece *piece = &copy->plan.pieces[i];
        bl_sim_device_wait(copy->memory, copy->tickets[i]);
        if (copy->write && !copy->fails)
            bl_device_written(copy->memory, piece->offset, piece->length);
    }
    return copy->write && copy->fails ? -ECANCELED : 0;
}

static int bl_engine_put(bl_kv *kv, bl_session *session, bl_kv_buffers *buffers)
{
    bl_engine_copy copy = {.kv = kv, .buffers = buffers, .memory = &session->pool->memory,
                           .fails = bl_sim_below(kv->path.world, 4) == 0};
    bl_engine engine = {&copy, bl_engine_copy_start, bl_engine_copy_wait, {0}};
    for (uint32_t i = 0; i < buffers->batch.count; i++)
        bl_kv_fill(buffers->payloads[i], buffers->keys[2 * i], bl_sim_random(kv->path.world),
                   buffers->batch.length);
    buffers->batch.engine = &engine;
    int status = bl_kv_put(session, &buffers->batch, buffers->states, buffers->statuses);
    if (copy.left)
        return status == -EINPROGRESS ? 0 : -EBADMSG;
    return copy.plan.piece_count > 0 && copy.fails ? bl_engine_failed(buffers, status) : status;
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
    bl_engine_copy copy = {.kv = kv, .buffers = buffers, .memory = &session->pool->memory};
    bl_engine engine = {&copy, bl_engine_copy_start, bl_engine_copy_wait, {0}};
    uint64_t mismatch_count = 0;
    buffers->batch.engine = &engine;
    int64_t hits = bl_kv_get(session, &buffers->batch, buffers->states, &mismatch_count);
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

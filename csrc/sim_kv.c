/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * The path of L6 in the simulator: batches are put and got on three hosts, more of them than the
 * table has lines, some without checksums, while servers die.
 *
 * A payload names its key and a version of its own, and its other bytes follow from both: what is
 * read is one version of the right key, whole, or a miss.
 */
#include <errno.h>

#include "session.h"
#include "sim_paths.h"
#include "transfer.h"

enum {
    BL_KV_ROUNDS = 24,
    BL_KV_KEY_COUNT = 24,
    BL_KV_BATCH = 3,
    BL_KV_FRAGMENTS = 2,
    BL_KV_LENGTH = 360,         /* ends in the middle of a line */
    BL_KV_CUT = 136,            /* between the fragments */
    BL_KV_CHUNK = 128,
    BL_KV_SERVER_VERBS = 12000
};

/* One batch of a client: as the engine's buffers are. */
typedef struct bl_kv_buffers {
    uint64_t keys[2 * BL_KV_BATCH];
    bl_fragment fragments[BL_KV_BATCH * BL_KV_FRAGMENTS];
    uint64_t payloads[BL_KV_BATCH][BL_KV_LENGTH / sizeof(uint64_t)];
    uint8_t states[BL_KV_BATCH];
    int32_t statuses[BL_KV_BATCH];
    bl_kv_batch batch;
} bl_kv_buffers;

static void bl_kv_fill(uint64_t *payload, uint64_t key, uint64_t version)
{
    uint64_t word = key * 0x9e3779b97f4a7c15u ^ version * 0xbf58476d1ce4e5b9u;
    payload[0] = version;
    for (uint32_t i = 1; i < BL_KV_LENGTH / sizeof word; i++)
        payload[i] = word = word * 0xda942042e4dd58b5u + i;
}

static void bl_kv_prepare(bl_sim_world *world, bl_kv_buffers *buffers)
{
    uint32_t count = 1 + (uint32_t)bl_sim_below(world, BL_KV_BATCH);
    uint64_t first = bl_sim_below(world, BL_KV_KEY_COUNT - count + 1);
    for (uint32_t i = 0; i < count; i++) {
        uint64_t address = (uintptr_t)buffers->payloads[i];
        buffers->keys[2 * i] = buffers->keys[2 * i + 1] = first + i;
        buffers->fragments[2 * i] = (bl_fragment){address, BL_KV_CUT};
        buffers->fragments[2 * i + 1] = (bl_fragment){address + BL_KV_CUT,
                                                      BL_KV_LENGTH - BL_KV_CUT};
    }
    buffers->batch = (bl_kv_batch){
        .keys = buffers->keys,
        .fragments = buffers->fragments,
        .layout = 1,
        .timeout_ns = BL_PATH_TIMEOUT_NS,
        .count = count,
        .fragment_count = BL_KV_FRAGMENTS,
        .length = BL_KV_LENGTH,
        .chunk_size = BL_KV_CHUNK,
        .verify = (uint32_t)bl_sim_below(world, 2),
    };
}

static int bl_kv_try_put(bl_sim_world *world, bl_session *session, bl_kv_buffers *buffers)
{
    for (uint32_t i = 0; i < buffers->batch.count; i++)
        bl_kv_fill(buffers->payloads[i], buffers->keys[2 * i], bl_sim_random(world));
    return bl_path_bear(
        bl_kv_put(session, &buffers->batch, buffers->states, buffers->statuses));
}

static int bl_kv_try_get(bl_sim_world *world, bl_session *session, bl_kv_buffers *buffers)
{
    uint64_t right[BL_KV_LENGTH / sizeof(uint64_t)], mismatch_count = 0;
    int64_t hits = bl_kv_get(session, &buffers->batch, buffers->states, &mismatch_count);
    for (int64_t i = 0; i < hits; i++) {
        bl_kv_fill(right, buffers->keys[2 * i], buffers->payloads[i][0]);
        if (memcmp(right, buffers->payloads[i], BL_KV_LENGTH) != 0)
            return -EBADMSG;
        world->stat.results++;
    }
    world->stat.torn_lines += mismatch_count;
    return bl_path_bear(hits < 0 ? (int)hits : 0);
}

static int bl_kv_work_on(bl_pool *pool, void *argument)
{
    bl_path *path = argument;
    bl_session *session;
    int status = bl_path_attach(path, pool, &session);
    if (status < 0)
        return status;
    for (uint32_t i = 0; i < BL_KV_ROUNDS && status == 0; i++) {
        bl_kv_buffers buffers;
        bl_kv_prepare(path->world, &buffers);
        if (bl_sim_below(path->world, 2))
            status = bl_kv_try_put(path->world, session, &buffers);
        else
            status = bl_kv_try_get(path->world, session, &buffers);
    }
    bl_session_close(session);
    return status;
}

static int bl_path_kv(bl_sim_world *world)
{
    bl_path path = {.world = world, .serve = bl_blocks_serve, .server_host_count = 1,
                    .server_deaths = 2, .server_verbs = BL_KV_SERVER_VERBS};
    for (uint32_t host = 0; host < 3; host++)
        bl_path_client(&path, host, bl_kv_work_on);
    return bl_path_run(&path);
}

/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Scenarios of what a session holds if its server dies in the middle of a batch: a call that
 * succeeds returned only grants and pins that the session still holds; otherwise it fails.
 *
 *   reserves  a batch of several messages: the grants of the first are lost with the session
 *   held      a put or get, with another call during its copy that loses the session
 */
#include <errno.h>

#include "index/state.h"
#include "rpc/session_state.h"
#include "sim/native/scenarios/blocks.h"
#include "sim/native/scenarios/kv.h"
#include "sim/native/scenarios/paths.h"
#include "sim/native/scenarios/scenarios.h"

enum {
    BL_HELD_DEATHS = 6,
    BL_HELD_VERBS = 500,        /* the server dies within this many verbs: about one call */
    BL_HELD_ROUNDS = 24,
    BL_HELD_SHAPE = 1,          /* index in bl_kv_shapes: whole lines, followed by checksums */
    BL_RESERVES_ENDS = 2,       /* granted keys at each end of a batch */
    BL_RESERVES_KEYS = BL_PAGE_SIZE / sizeof(bl_block_record) + BL_RESERVES_ENDS
};

/* Sometimes make the server die soon. */
static void bl_held_doom(bl_path *path)
{
    if (!path->server || bl_sim_below(path->world, 3) != 0 || path->sudden_deaths == 0)
        return;
    path->sudden_deaths--;
    bl_sim_kill_after(path->world, path->server_process,
                      1 + bl_sim_below(path->world, BL_HELD_VERBS));
}

/* ---- reserves: a batch has new keys at both ends, and in between, repeatedly, one of the keys
 * that were just granted. */

/* Write and commit the granted blocks: a server that still has the session must accept them. */
static int bl_reserves_write(bl_blocks_client *client, const uint64_t *keys,
                             const bl_block_record *records)
{
    const bl_memory *memory = &client->pool->memory;
    bl_commit commits[2 * BL_RESERVES_ENDS];
    int32_t committed[2 * BL_RESERVES_ENDS];
    uint8_t payload[BL_BLOCKS_LINES_MAX * BL_LINE_SIZE];
    uint64_t nonce = client->session->nonce;
    uint32_t count = 0;
    for (uint32_t i = 0; i < BL_RESERVES_KEYS; i++) {
        if (records[i].state != BL_BLOCK_GRANTED)
            continue;
        if (count == 2 * BL_RESERVES_ENDS || bl_blocks_claim(client, &records[i]) < 0)
            return -EBADMSG;
        bl_blocks_fill(payload, keys[2 * i], records[i].generation);
        bl_stream(memory, records[i].offset, payload, BL_LINE_SIZE);
        *bl_blocks_writer(client, &records[i]) = 0;
        commits[count++] = (bl_commit){.key = {keys[2 * i], keys[2 * i + 1]},
                                       .generation = records[i].generation,
                                       .block = records[i].block};
    }
    bl_fence_store(memory); /* the payload is in memory before the server gets the call */
    int status = count ? bl_commit_blocks(client->session, commits, count, committed,
                                          BL_PATH_TIMEOUT_NS)
                       : 0;
    if (status < 0)
        return bl_path_bear(&client->blocks->path, status);
    client->blocks->path.world->stat.results += count;
    for (uint32_t i = 0; i < count && client->session->nonce == nonce; i++)
        if (committed[i] < 0)
            return -EBADMSG;
    return 0;
}

/* Reserve again: after a failed batch a client holds nothing of it, so its last key must be granted
 * at once. */
static int bl_reserves_again(bl_blocks_client *client, const uint64_t *key)
{
    bl_block_request what = {.fingerprint = BL_BLOCKS_FINGERPRINT, .length = BL_LINE_SIZE};
    bl_block_record record;
    int status = bl_reserve(client->session, key, 1, &what, &record, BL_PATH_TIMEOUT_NS);
    if (status < 0)
        return bl_path_bear(&client->blocks->path, status);
    if (record.state == BL_BLOCK_PENDING)
        return -EBADMSG;
    bl_commit commit = {.key = {key[0], key[1]}, .generation = record.generation,
                        .block = record.block};
    int64_t count = record.state == BL_BLOCK_GRANTED
                        ? bl_abort_blocks(client->session, &commit, 1, BL_PATH_TIMEOUT_NS)
                        : 0;
    return count < 0 ? bl_path_bear(&client->blocks->path, (int)count) : 0;
}

static int bl_reserves_round(bl_blocks_client *client)
{
    bl_sim_world *world = client->blocks->path.world;
    uint64_t keys[2 * BL_RESERVES_KEYS], first = bl_sim_random(world) | 1;
    bl_block_record records[BL_RESERVES_KEYS];
    bl_block_request what = {.fingerprint = BL_BLOCKS_FINGERPRINT, .length = BL_LINE_SIZE};
    for (uint32_t i = 0; i < BL_RESERVES_KEYS; i++) {
        int end = i < BL_RESERVES_ENDS || i >= BL_RESERVES_KEYS - BL_RESERVES_ENDS;
        keys[2 * i] = keys[2 * i + 1] = end ? first + i : first;
    }
    bl_held_doom(&client->blocks->path);
    uint64_t nonce = client->session->nonce;
    int status = bl_reserve(client->session, keys, BL_RESERVES_KEYS, &what, records,
                            BL_PATH_TIMEOUT_NS);
    if (status == -BL_ERROR_SESSION_LOST && client->session->nonce == nonce)
        return -ENODATA; /* nothing was lost */
    if (status == -BL_ERROR_SESSION_LOST)
        return bl_reserves_again(client, keys + 2 * (BL_RESERVES_KEYS - 1));
    if (status < 0)
        return bl_path_bear(&client->blocks->path, status);
    return bl_reserves_write(client, keys, records);
}

static int bl_reserves_work(bl_pool *pool, void *argument)
{
    bl_blocks *blocks = argument;
    bl_blocks_client client = {.blocks = blocks, .pool = pool,
                               .self = (uint8_t)(bl_sim_self(blocks->path.world) + 1)};
    int status = bl_path_attach(&blocks->path, pool, &client.session);
    if (status < 0)
        return status;
    for (uint32_t i = 0; status == 0 && i < BL_HELD_ROUNDS; i++)
        status = bl_reserves_round(&client);
    bl_session_close(client.session);
    return status;
}

int bl_path_reserves(bl_sim_world *world)
{
    bl_blocks blocks = {.path = {.world = world, .serve = bl_blocks_serve, .server_host_count = 1,
                                 .sudden_deaths = BL_HELD_DEATHS}};
    for (uint32_t host = 1; host < 3; host++)
        bl_path_client(&blocks.path, host, bl_reserves_work);
    return bl_path_run(&blocks.path);
}

/* ---- held */

/* The copy of a batch, during which its session is used as by another thread. */
typedef struct bl_held_copy {
    bl_kv *kv;
    bl_session *session;
    uint64_t nonce;             /* of the session when it began */
    int status;                 /* of the copy */
    int lost;                   /* 1: the session has lost what it held; a put delays that until
                                 * its thread seems to hang */
} bl_held_copy;

static int bl_held_start(void *context, const bl_plan *plan, int write, void **out)
{
    bl_held_copy *copy = context;
    const bl_memory *memory = &copy->session->pool->memory;
    copy->nonce = copy->session->nonce;
    copy->status = 0;
    for (uint32_t i = 0; i < plan->piece_count; i++) { /* one for each chunk */
        const bl_piece *piece = &plan->pieces[i];
        void *payload = (void *)(uintptr_t)piece->address;
        if (write) {
            plan->checksums[i] = bl_crc32c(0, payload, piece->length);
            bl_stream(memory, piece->offset, payload, piece->length);
        } else {
            bl_refetch(memory, piece->offset, piece->length);
            bl_fetch(memory, piece->offset, payload, piece->length);
            if (bl_crc32c(0, payload, piece->length) != plan->checksums[i])
                copy->status = -EBADMSG;
        }
    }
    *out = copy;
    return 0;
}

static int bl_held_wait(void *context, void *out)
{
    bl_held_copy *copy = context;
    bl_index_stat stat;
    (void)out;
    if (bl_sim_below(copy->kv->path.world, 4)) {
        bl_held_doom(&copy->kv->path);
        bl_index_get_stat(copy->session, &stat, bl_path_timeout_ns(&copy->kv->path));
    }
    copy->lost = !copy->session->attached || copy->session->nonce != copy->nonce;
    return copy->status;
}

static int bl_held_put(bl_kv *kv, bl_session *session, bl_kv_buffers *buffers)
{
    const bl_kv_batch *batch = &buffers->batch;
    bl_held_copy copy = {.kv = kv, .session = session};
    bl_engine engine = {&copy, bl_held_start, bl_held_wait, {0}};
    for (uint32_t i = 0; i < batch->count; i++)
        bl_kv_fill(buffers->payloads[i], batch->keys[2 * i], bl_sim_random(kv->path.world),
                   batch->length);
    buffers->batch.engine = &engine;
    int status = bl_kv_put(session, batch, buffers->states, buffers->statuses);
    for (uint32_t i = 0; status >= 0 && copy.lost && i < batch->count; i++)
        if (buffers->states[i] == BL_BLOCK_GRANTED)
            return -EBADMSG;
    return bl_path_bear(&kv->path, status);
}

static int bl_held_get(bl_kv *kv, bl_session *session, bl_kv_buffers *buffers)
{
    const bl_kv_batch *batch = &buffers->batch;
    bl_held_copy copy = {.kv = kv, .session = session};
    bl_engine engine = {&copy, bl_held_start, bl_held_wait, {0}};
    uint64_t mismatches = 0;
    buffers->batch.engine = &engine;
    int64_t hits = bl_kv_get(session, batch, buffers->states, &mismatches);
    for (int64_t i = 0; i < hits; i++) {
        uint64_t right[BL_KV_LENGTH_MAX / sizeof(uint64_t)];
        bl_kv_fill(right, buffers->keys[2 * i], buffers->payloads[i][0], batch->length);
        if (memcmp(right, buffers->payloads[i], batch->length) != 0)
            return -EBADMSG;
        kv->path.world->stat.results++;
    }
    return hits < 0 ? bl_path_bear(&kv->path, (int)hits) : 0;
}

static int bl_held_work(bl_pool *pool, void *argument)
{
    bl_kv *kv = argument;
    bl_session *session;
    int status = bl_path_attach(&kv->path, pool, &session);
    if (status < 0)
        return status;
    for (uint32_t i = 0; i < BL_HELD_ROUNDS && status == 0; i++) {
        bl_kv_buffers buffers;
        do
            bl_kv_prepare(kv, &buffers);
        while (buffers.batch.fingerprint != 1 + BL_HELD_SHAPE);
        for (uint32_t k = 0; k < buffers.batch.count; k++)
            buffers.fragments[k] = (bl_fragment){(uintptr_t)buffers.payloads[k],
                                                 buffers.batch.length};
        buffers.batch.fragment_count = 1;
        buffers.batch.check_checksums = 1; /* else the whole payload is one chunk */
        status = bl_sim_below(kv->path.world, 2) ? bl_held_put(kv, session, &buffers)
                                                 : bl_held_get(kv, session, &buffers);
    }
    bl_session_close(session);
    return status;
}

int bl_path_held(bl_sim_world *world)
{
    bl_kv kv = {.path = {.world = world, .serve = bl_blocks_serve, .server_host_count = 1,
                         .sudden_deaths = BL_HELD_DEATHS},
                .shape_keys = BL_KV_SHAPE_KEYS};
    for (uint32_t host = 1; host < 3; host++)
        bl_path_client(&kv.path, host, bl_held_work);
    return bl_path_run(&kv.path);
}

/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Scenarios of task queues: clients on three hosts enqueue, claim, read, extend, return and
 * complete tasks, next to blocks that fill the table, while servers die or depose each other.
 *
 * The scenarios check that a task whose commit was answered is found until a client has requested
 * its removal; that the bytes of a claimed task are its own; that only enqueued tasks are claimed;
 * and that one server does not give out a task twice while a claim holds.
 */
#include <errno.h>

#include "api/error.h"
#include "api/index.h"
#include "api/pool.h"
#include "api/rpc.h"
#include "rpc/session_state.h"
#include "sim/native/scenarios/blocks.h"
#include "sim/native/scenarios/paths.h"
#include "sim/native/scenarios/rivals.h"
#include "sim/native/scenarios/scenarios.h"

enum {
    BL_TASK_IDS = 14,           /* keys below this are tasks, once each; others are ordinary
                                 * blocks */
    BL_TASK_ROUNDS = 40,
    BL_TASK_DRAINS = 800,       /* attempts to claim a task that must exist */
    BL_TASK_SHORT_MS = 1,
    BL_TASK_LONG_MS = 600000,
    BL_TASK_SERVER_VERBS = 8000
};

typedef struct bl_task_fate {
    uint32_t begun;             /* 1: its enqueueing began */
    uint32_t queued;            /* 1: its commit was answered */
    uint32_t ended;             /* 1: its removal began */
    uint64_t epoch;             /* epoch of a claim that holds, or 0 */
    uint32_t deliveries;        /* deliveries of that claim */
    uint32_t process;           /* 1 + the process that has claimed it */
} bl_task_fate;

typedef struct bl_task_play {
    bl_rivals rivals;           /* first: argument of the servers, the keeper, bl_blocks_put() */
    bl_task_fate fate[BL_TASK_IDS];
    uint32_t begun;             /* tasks with numbers below this were begun */
    uint32_t brief;             /* 1 + a process that makes no long claims: it may die on another
                                 * host than the server's, which returns them only after seconds */
} bl_task_play;

static bl_task_play *bl_task_play_of(const bl_blocks_client *client)
{
    return (bl_task_play *)client->blocks;
}

static uint64_t bl_task_epoch(const bl_blocks_client *client)
{
    bl_session_stat stat;
    bl_session_describe(client->session, &stat);
    return stat.epoch;
}

static int bl_task_begin(bl_blocks_client *client)
{
    bl_task_play *play = bl_task_play_of(client);
    if (play->begun == BL_TASK_IDS)
        return 0;
    uint64_t key = play->begun++;
    bl_task_fate *fate = &play->fate[key];
    const uint64_t keys[2] = {key, key};
    uint8_t payload[BL_BLOCKS_LINES_MAX * BL_LINE_SIZE];
    bl_block_request what = {.fingerprint = BL_BLOCKS_FINGERPRINT, .length = bl_blocks_length(key),
                             .flags = BL_RESERVE_KEPT};
    bl_block_record record;
    int32_t committed = 0;
    fate->begun = 1;
    int status = bl_reserve(client->session, keys, 1, &what, &record, BL_PATH_TIMEOUT_NS);
    if (status < 0 || record.state != BL_BLOCK_GRANTED)
        return bl_path_bear(&play->rivals.blocks.path, status);
    status = bl_blocks_claim(client, &record);
    if (status < 0)
        return status;
    bl_blocks_fill(payload, key, record.generation);
    bl_blocks_dawdle(client);
    bl_stream(&client->pool->memory, record.offset, payload, what.length);
    bl_fence_store(&client->pool->memory); /* the payload is in memory before the commit */
    *bl_blocks_writer(client, &record) = 0;
    bl_commit commit = {.key = {key, key}, .generation = record.generation,
                        .block = record.block};
    status = bl_commit_blocks(client->session, &commit, 1, &committed, BL_PATH_TIMEOUT_NS);
    fate->queued = status == 0 && committed == 0;
    return bl_path_bear(&play->rivals.blocks.path, status);
}

/* Read the task's bytes, if it still exists. */
static int bl_task_read(bl_blocks_client *client, uint64_t key)
{
    const uint64_t keys[2] = {key, key};
    bl_block_record record;
    uint32_t state;
    int64_t hits = bl_lookup(client->session, keys, 1, 0, &record, &state, BL_PATH_TIMEOUT_NS);
    if (hits < 0)
        return bl_path_bear(&client->blocks->path, (int)hits);
    int read = hits ? bl_blocks_read(client, key, &record) : 0;
    return read < 0 ? read : 0;
}

static int bl_task_end(bl_blocks_client *client, uint64_t key)
{
    const uint64_t keys[2] = {key, key};
    bl_task_fate *fate = &bl_task_play_of(client)->fate[key];
    fate->ended = 1;
    int64_t count = bl_remove_blocks(client->session, keys, 1, BL_PATH_TIMEOUT_NS);
    return count < 0 ? bl_path_bear(&client->blocks->path, (int)count) : 0;
}

/* Check that the server of epoch was allowed to give out this task. */
static int bl_task_judge(bl_blocks_client *client, const bl_task *task, uint64_t epoch)
{
    const bl_task_play *play = bl_task_play_of(client);
    const bl_task_fate *fate = &play->fate[task->key[0]];
    if (task->key[0] >= BL_TASK_IDS || task->key[1] != task->key[0] || !fate->begun)
        return -EBADMSG;
    int held = fate->epoch && fate->epoch == epoch && task->deliveries >= fate->deliveries &&
               !bl_sim_gone(client->blocks->path.world->process[fate->process - 1]);
    return held ? -EBADMSG : 0;
}

/* Claim a task, if there is one, and use it in a random way; with end, only complete it. */
static int bl_task_work(bl_blocks_client *client, int end)
{
    bl_sim_world *world = client->blocks->path.world;
    int holds = !end && bl_sim_below(world, 2); /* no other client may have it meanwhile */
    if (client->self == bl_task_play_of(client)->brief)
        holds = 0;
    uint64_t epoch = bl_task_epoch(client);
    bl_task task;
    int status = bl_task_claim(client->session, BL_BLOCKS_FINGERPRINT,
                               holds ? BL_TASK_LONG_MS : BL_TASK_SHORT_MS, &task,
                               BL_PATH_TIMEOUT_NS);
    if (status < 0 || task.deliveries == 0)
        return bl_path_bear(&client->blocks->path, status);
    if (epoch != bl_task_epoch(client))
        epoch = 0; /* the server that answered is not known */
    status = bl_task_judge(client, &task, epoch);
    if (status < 0)
        return status;
    bl_task_fate *fate = &bl_task_play_of(client)->fate[task.key[0]];
    if (holds && epoch) {
        fate->epoch = epoch;
        fate->deliveries = task.deliveries;
        fate->process = client->self;
    }
    status = bl_task_read(client, task.key[0]);
    if (status == 0 && bl_sim_below(world, 4) == 0) {
        status = bl_task_extend(client->session, &task,
                                holds ? BL_TASK_LONG_MS : BL_TASK_SHORT_MS, BL_PATH_TIMEOUT_NS);
        status = status == -BL_ERROR_NO_GRANT ? 0 : bl_path_bear(&client->blocks->path, status);
    }
    bl_blocks_dawdle(client);
    fate->epoch = 0;
    if (status == 0 && (end || bl_sim_below(world, 2)))
        return bl_task_end(client, task.key[0]);
    if (status < 0 || !holds)
        return status;
    status = bl_task_extend(client->session, &task, 0, BL_PATH_TIMEOUT_NS);
    return status == -BL_ERROR_NO_GRANT ? 0 : bl_path_bear(&client->blocks->path, status);
}

/* Return the key of a task that must be in the queue, or -1. */
static int64_t bl_task_due(const bl_task_play *play)
{
    for (uint32_t key = 0; key < BL_TASK_IDS; key++)
        if (play->fate[key].queued && !play->fate[key].ended)
            return key;
    return -1;
}

static int bl_task_client(bl_pool *pool, void *argument)
{
    bl_task_play *play = argument;
    bl_path *path = &play->rivals.blocks.path;
    bl_sim_world *world = path->world;
    bl_blocks_client client = {.blocks = &play->rivals.blocks, .pool = pool,
                               .self = bl_sim_self(world) + 1};
    int status = bl_path_attach(path, pool, &client.session);
    if (status < 0)
        return status;
    for (uint32_t i = 0; status == 0 && i < BL_TASK_ROUNDS; i++) {
        uint64_t what = bl_sim_below(world, 8);
        if (what < 2)
            status = bl_task_begin(&client);
        else if (what < 5)
            status = bl_task_work(&client, 0);
        else {
            uint64_t other = bl_sim_below(world, BL_BLOCKS_KEY_COUNT_MAX - BL_TASK_IDS);
            status = bl_blocks_put(&client, BL_TASK_IDS + other);
        }
    }
    for (uint32_t i = 0; status == 0 && bl_task_due(play) >= 0; i++) {
        status = i < BL_TASK_DRAINS ? bl_task_work(&client, 1) : -ENODATA;
        bl_nap(&pool->memory, BL_PATH_NAP_NS);
    }
    bl_session_close(client.session);
    return status;
}

/* ---- tasks: servers die at any verb, and sometimes a client does. */

int bl_tasks_deaths(bl_sim_world *world)
{
    bl_task_play play = {.rivals.blocks = {
        .path = {.world = world, .serve = bl_blocks_serve,
                 .server_host_count = 1 + (uint32_t)bl_sim_below(world, 2), .server_deaths = 3,
                 .server_verbs = BL_TASK_SERVER_VERBS},
        .key_count = BL_BLOCKS_KEY_COUNT_MAX, .loses = 1}};
    for (uint32_t host = 0; host < 3; host++)
        bl_path_client(&play.rivals.blocks.path, host, bl_task_client);
    if (bl_sim_below(world, 2)) {
        uint32_t victim = play.rivals.blocks.path.client[0];
        bl_sim_kill_after(world, victim, 1 + bl_sim_below(world, BL_TASK_SERVER_VERBS));
        play.brief = play.rivals.blocks.path.server_host_count > 1 ? victim + 1 : 0;
    }
    return bl_path_run(&play.rivals.blocks.path);
}

/* ---- tasks_rivals: servers depose each other while they live. */

int bl_tasks_rivals(bl_sim_world *world)
{
    bl_task_play play = {.rivals = {
        .blocks = {.path = {.world = world, .server_verbs = 1},
                   .key_count = BL_BLOCKS_KEY_COUNT_MAX, .loses = 1},
        .contests = BL_RIVAL_CONTESTS,
        .deaths = (uint32_t)bl_sim_below(world, 3),
        .late_ns = bl_sim_below(world, 2) ? BL_LATE_NS : 0,
    }};
    bl_path_spawn(&play.rivals.blocks.path, 0, bl_rivals_keep);
    for (uint32_t host = 0; host < 3; host++)
        bl_path_client(&play.rivals.blocks.path, host, bl_task_client);
    return bl_sim_world_run(world);
}

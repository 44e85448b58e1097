/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Scenarios of damaged memory: a process flips single bits in recently used lines, while clients
 * make calls, puts and gets with checksums, and servers die and recover the rest. Operations may
 * fail, lose blocks or take long; only a read of wrong bytes is a failure.
 *
 * The server lines are not damaged, because nothing else identifies the current server.
 */
#include <errno.h>

#include "pool/message.h"
#include "rpc/session_state.h"
#include "sim/native/scenarios/blocks.h"
#include "sim/native/scenarios/kv.h"
#include "sim/native/scenarios/paths.h"
#include "sim/native/scenarios/scenarios.h"

enum {
    BL_DAMAGE_ROUNDS = 24,
    BL_DAMAGE_NAP_NS = 20 * 1000,
    BL_DAMAGE_MESSAGE_SIZE_MAX = 600,
    BL_DAMAGE_SERVER_VERBS = 12000,
    BL_TORN_CLIENTS = 5,        /* two clients of one host, where one completes the other's
                                 * request */
    BL_TORN_VERBS = 4000
};

#define BL_DAMAGE_TIMEOUT_NS 3000000ull

static int bl_damage_ray(bl_pool *pool, void *argument)
{
    bl_path *path = argument;
    bl_sim_world *world = path->world;
    while (bl_path_clients_alive(path)) {
        uint32_t line = world->recent[bl_sim_below(world, BL_SIM_RECENT_COUNT)];
        uint64_t bit = bl_sim_below(world, 8 * BL_LINE_SIZE);
        uint64_t offset = (uint64_t)line * BL_LINE_SIZE + bit / 8;
        if (offset >= BL_LOBBY_OFFSET)
            world->memory[offset] ^= (uint8_t)(1u << bit % 8);
        bl_nap(&pool->memory, bl_sim_below(world, BL_DAMAGE_NAP_NS));
    }
    return 0;
}

static int bl_damage_work(bl_pool *pool, void *argument)
{
    bl_kv *kv = argument;
    bl_sim_world *world = kv->path.world;
    bl_session *session = NULL;
    for (uint32_t i = 0; i < BL_DAMAGE_ROUNDS; i++) {
        bl_kv_buffers buffers;
        int status = 0;
        if (session == NULL) {
            status = bl_session_open(pool, "", pool->memory.host, BL_DAMAGE_TIMEOUT_NS, &session);
            if (status < 0)
                session = NULL, bl_nap(&pool->memory, BL_DAMAGE_NAP_NS);
            continue;
        }
        bl_kv_prepare(kv, &buffers);
        uint64_t what = bl_sim_below(world, 4);
        if (kv->named && what == 3)
            status = bl_kv_try_names(kv, pool, session);
        else if (what == 0)
            status = bl_path_call(&kv->path, session,
                                  (uint32_t)bl_sim_below(world, BL_DAMAGE_MESSAGE_SIZE_MAX));
        else if (what == 1)
            status = bl_kv_try_put(kv, session, &buffers);
        else
            status = bl_kv_try_get(kv, session, &buffers);
        if (status == -EBADMSG)
            return status;
    }
    if (session)
        bl_session_close(session);
    return 0;
}

/* Run a server; if it fails, another one starts. */
static int bl_damage_serve(bl_pool *pool, void *argument)
{
    bl_blocks_serve(pool, argument);
    return 0;
}

/* ---- damage */

static int bl_damage_play(bl_sim_world *world, uint32_t named)
{
    bl_kv kv = {.path = {.world = world, .serve = bl_damage_serve, .server_host_count = 1,
                         .server_deaths = 2, .server_verbs = BL_DAMAGE_SERVER_VERBS,
                         .timeout_ns = BL_DAMAGE_TIMEOUT_NS},
                .shape_keys = BL_KV_SHAPE_KEYS, .summed = 1, .named = named};
    world->lawless = 1; /* a damaged session line frees the lane for another session */
    for (uint32_t host = 0; host < 3; host++)
        bl_path_client(&kv.path, host, bl_damage_work);
    bl_path_spawn(&kv.path, 3, bl_damage_ray);
    return bl_path_run(&kv.path);
}

int bl_path_damage(bl_sim_world *world) { return bl_damage_play(world, 0); }

/* ---- damage_names: the same with names; no damaged name may be read. */

int bl_path_damage_names(bl_sim_world *world) { return bl_damage_play(world, 1); }

/* ---- torn_sessions: after a server's death, every line of a session is FREE, every line of a free
 * lane is LIVE, and all are torn, as if the server had died in the middle of each of them. No space
 * or lane that a session may write to may be reassigned, and lanes without a session must become
 * free, including those of a dead client. On each host a process also died while it was writing a
 * detach request for another session: nothing may be released because of that. */

static void bl_torn_sessions(const bl_path *path, const bl_pool *pool)
{
    for (uint32_t i = 0; i < BL_HALF_COUNT * pool->geometry.lane_count; i++) {
        uint64_t offset = bl_session_offset(&pool->geometry, 0, 0) + (uint64_t)i * BL_LINE_SIZE;
        bl_session_line *line = (bl_session_line *)(path->world->memory + offset);
        if (bl_table_whole(line, i % pool->geometry.lane_count))
            line->state = line->state == BL_SESSION_FREE ? BL_SESSION_LIVE : BL_SESSION_FREE;
    }
    for (uint32_t host = 0; host < BL_HOST_COUNT; host++) {
        uint8_t *memory = path->world->memory;
        bl_lobby_request *request = (bl_lobby_request *)(memory + bl_lobby_request_offset(host));
        uint64_t reply_offset = bl_lobby_reply_offset(host, request->epoch % BL_HALF_COUNT);
        const bl_lobby_reply *reply = (bl_lobby_reply *)(memory + reply_offset);
        if (request->operation == BL_LOBBY_ATTACH && reply->sequence == request->sequence &&
            request->check == bl_message_check(request, 0)) /* and its client no longer waits */
            request->sequence = ++request->sequence_end, request->operation = BL_LOBBY_DETACH;
    }
}

/* Return 1 while there are clients besides the process that damages lines. */
static int bl_torn_work_left(const bl_path *path)
{
    for (uint32_t i = 0; i + 1 < path->client_count; i++)
        if (bl_sim_alive(path->world, path->client[i]))
            return 1;
    return 0;
}

static int bl_torn_ray(bl_pool *pool, void *argument)
{
    bl_path *path = argument;
    uint32_t torn = UINT32_MAX; /* process of the server whose session lines were torn */
    while (bl_torn_work_left(path)) {
        if (path->server_process != torn &&
            bl_sim_gone(path->world->process[path->server_process])) {
            torn = path->server_process;
            bl_torn_sessions(path, pool);
        }
        bl_nap(&pool->memory, BL_DAMAGE_NAP_NS / 4);
    }
    path->server_deaths = path->doomed = 0;
    for (uint32_t looks = 0; looks < BL_FAREWELL_LOOKS; looks++) {
        if (bl_farewell_free(path))
            return 0;
        bl_nap(&pool->memory, BL_FAREWELL_LOOK_NS);
    }
    return -EBUSY; /* waits for a lane that no session has */
}

/* ---- torn_sessions */

int bl_path_torn_sessions(bl_sim_world *world)
{
    bl_blocks blocks = {.path = {.world = world, .serve = bl_blocks_serve, .server_host_count = 1,
                                 .server_deaths = 4, .server_verbs = BL_BLOCKS_SERVER_VERBS},
                        .key_count = BL_BLOCKS_KEY_COUNT_MAX, .loses = 1};
    for (uint32_t i = 0; i < BL_TORN_CLIENTS; i++)
        bl_path_client(&blocks.path, i % 3, bl_blocks_work);
    bl_sim_kill_after(world, blocks.path.client[0], 1 + bl_sim_below(world, BL_TORN_VERBS));
    bl_path_client(&blocks.path, 3, bl_torn_ray);
    return bl_path_run(&blocks.path);
}

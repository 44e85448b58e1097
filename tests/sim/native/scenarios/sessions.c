/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Scenarios of how sessions end.
 *
 *   farewell  clients on hosts without a server attach and detach, with or without a running
 *             server, and their attempts to attach time out: in the end, no lane is suspect
 *   given_up  the server repeatedly declares living clients dead: each one gets an error, loses no
 *             reply, calls again, and no call is executed twice
 */
#include <errno.h>

#include "index/state.h"
#include "rpc/session_state.h"
#include "sim/native/scenarios/blocks.h"
#include "sim/native/scenarios/paths.h"
#include "sim/native/scenarios/scenarios.h"

enum {
    BL_FAREWELL_LIVES = 2,      /* attachments of a client */
    BL_FAREWELL_ROUNDS = 3,     /* rounds of each, at most */
    BL_FAREWELL_CLIENTS = 5,    /* one more than lanes */
    BL_FAREWELL_DEATHS = 4,
    BL_FAREWELL_VERBS = 5000,
    BL_FAREWELL_TIMEOUT_NS = 3 * 1000 * 1000,
    BL_FAREWELL_STOP_NS = 1000 * 1000, /* sometimes, the lifetime of a server */
    BL_FAREWELL_HASTE_NS = 300 * 1000, /* about the duration of a call */
    BL_FAREWELL_NAP_NS = 40 * 1000 * 1000,
    BL_FAREWELL_ABSENT_NS = 250 * 1000 * 1000, /* longer than a detaching session waits */
    BL_GIVEN_UP_CLIENTS = 3,
    BL_GIVEN_UP_CALLS = 30,
    BL_GIVEN_UP_TIMES = 12,
    BL_GIVEN_UP_NAP_NS = 10 * 1000 * 1000,
    BL_GIVEN_UP_STOP_NS = 50 * 1000 * 1000,
    BL_GIVEN_UP_TIMEOUT_NS = 400 * 1000 * 1000
};

#define BL_GIVEN_UP_LEAP_NS 10000000000ull

/* ---- farewell */

/* Attach with timeouts that are too short; retry while there is no server or no lane. */
static int bl_farewell_attach(bl_blocks_client *client)
{
    const bl_pool *pool = client->pool;
    bl_sim_world *world = client->blocks->path.world;
    for (;;) {
        uint64_t timeout_ns = bl_sim_below(world, 2) ? BL_FAREWELL_TIMEOUT_NS
                                                     : bl_sim_below(world, BL_FAREWELL_HASTE_NS);
        int status = bl_session_open(pool, "", pool->memory.host, timeout_ns, &client->session);
        if (status != -BL_ERROR_NO_LANE && status != -BL_ERROR_NO_SERVER &&
            status != -BL_ERROR_TIMEOUT && status != -BL_ERROR_LOBBY_BUSY)
            return status;
        bl_nap(&pool->memory, bl_sim_below(world, BL_FAREWELL_NAP_NS));
    }
}

/* Begin to write, and then only close the session. */
static int bl_farewell_begin(bl_blocks_client *client)
{
    bl_blocks *blocks = client->blocks;
    uint64_t key = bl_sim_below(blocks->path.world, blocks->key_count);
    const uint64_t keys[2] = {key, key};
    uint8_t payload[BL_BLOCKS_LINES_MAX * BL_LINE_SIZE];
    bl_block_request what = {.fingerprint = BL_BLOCKS_FINGERPRINT, .length = bl_blocks_length(key)};
    bl_block_record record;
    int status = bl_reserve(client->session, keys, 1, &what, &record, BL_PATH_TIMEOUT_NS);
    if (status < 0)
        return bl_path_bear(&blocks->path, status);
    if (record.state != BL_BLOCK_GRANTED)
        return 0;
    status = bl_blocks_claim(client, &record);
    if (status < 0)
        return status;
    bl_blocks_fill(payload, key, record.generation);
    bl_stream(&client->pool->memory, record.offset, payload, bl_blocks_length(key));
    *bl_blocks_writer(client, &record) = 0;
    return 0;
}

static int bl_farewell_work(bl_pool *pool, void *argument)
{
    bl_blocks *blocks = argument;
    bl_sim_world *world = blocks->path.world;
    bl_blocks_client client = {.blocks = blocks, .pool = pool,
                               .self = (uint8_t)(bl_sim_self(world) + 1)};
    int status = 0;
    for (uint32_t life = 0; life < BL_FAREWELL_LIVES && status == 0; life++) {
        status = bl_farewell_attach(&client);
        if (status < 0)
            return status;
        for (uint64_t i = bl_sim_below(world, BL_FAREWELL_ROUNDS); i > 0 && status == 0; i--)
            status = bl_blocks_round(&client);
        if (status == 0 && bl_sim_below(world, 2))
            status = bl_farewell_begin(&client);
        if (bl_sim_below(world, 2))
            bl_nap(&pool->memory, bl_sim_below(world, BL_FAREWELL_NAP_NS));
        bl_session_close(client.session);
        world->stat.results++;
    }
    return status;
}

/* Start a server after a while without one. */
static void bl_farewell_serve(bl_pool *pool, bl_path *path, uint64_t absent_ns)
{
    if (!bl_sim_gone(path->world->process[path->server_process]))
        return;
    bl_nap(&pool->memory, bl_sim_below(path->world, absent_ns));
    bl_path_start_server(path, 0);
}

int bl_farewell_free(const bl_path *path)
{
    const bl_server *server = path->server;
    uint32_t taken = !server || server->state != BL_SERVER_SERVING;
    for (uint32_t i = 0; !taken && i < server->pool->geometry.lane_count; i++)
        taken = server->lanes[i].state != BL_SESSION_FREE;
    return !taken;
}

static int bl_farewell_keep(bl_pool *pool, void *argument)
{
    bl_path *path = argument;
    bl_sim_world *world = path->world;
    while (bl_path_clients_alive(path)) {
        bl_farewell_serve(pool, path, bl_sim_below(world, 2) ? BL_FAREWELL_ABSENT_NS
                                                             : BL_FAREWELL_TIMEOUT_NS);
        if (path->server && path->server_deaths && bl_sim_below(world, 200) == 0)
            bl_server_stop(path->server); /* a clean stop, but before its clients */
        else if (path->server && bl_sim_below(world, 4) == 0)
            world->process[path->server_process]->wake_ns =
                world->now_ns + bl_sim_below(world, BL_FAREWELL_STOP_NS);
        bl_nap(&pool->memory, bl_sim_below(world, BL_FAREWELL_TIMEOUT_NS));
    }
    path->server_deaths = path->doomed = 0;
    uint32_t looks = 0;
    for (; looks < BL_FAREWELL_LOOKS && !bl_farewell_free(path); looks++) {
        bl_farewell_serve(pool, path, BL_PATH_NAP_NS);
        bl_nap(&pool->memory, BL_FAREWELL_LOOK_NS);
    }
    if (looks == BL_FAREWELL_LOOKS)
        return -EBUSY; /* waits for a client that detached cleanly */
    while (bl_sim_alive(world, path->server_process)) {
        if (path->server)
            bl_server_stop(path->server);
        bl_nap(&pool->memory, BL_PATH_NAP_NS);
    }
    return 0;
}

int bl_path_farewell(bl_sim_world *world)
{
    bl_blocks blocks = {.path = {.world = world, .serve = bl_blocks_serve, .server_host_count = 1,
                                 .server_deaths = BL_FAREWELL_DEATHS, .bears_timeouts = 1,
                                 .server_verbs = BL_FAREWELL_VERBS},
                        .key_count = BL_BLOCKS_KEY_COUNT_MAX, .loses = 1};
    bl_path_start_server(&blocks.path, 0);
    bl_path_spawn(&blocks.path, 0, bl_farewell_keep);
    for (uint32_t i = 0; i < BL_FAREWELL_CLIENTS; i++)
        bl_path_client(&blocks.path, 1 + i % 2, bl_farewell_work);
    return bl_sim_world_run(world);
}

/* ---- given_up */

typedef struct bl_given_up {
    bl_path path;
    uint32_t count;             /* clients, counted as they begin */
    uint32_t doubts;            /* sessions that the server has ended */
    uint32_t dropped;           /* sessions that clients found ended */
    uint8_t done[BL_GIVEN_UP_CLIENTS][BL_GIVEN_UP_CALLS];
} bl_given_up;

typedef struct bl_given_up_call {
    uint32_t client;
    uint32_t number;
} bl_given_up_call;

static int bl_given_up_handle(void *context, bl_call *call)
{
    bl_given_up *play = context;
    bl_given_up_call request;
    if (call->request_size != sizeof request)
        return -BL_ERROR_BAD_REQUEST;
    memcpy(&request, call->request, sizeof request);
    return ++play->done[request.client][request.number];
}

static void bl_given_up_ended(void *context, uint32_t lane, enum bl_end end)
{
    bl_given_up *play = context;
    (void)lane;
    play->doubts += end == BL_END_SUSPECT;
}

static int bl_given_up_serve(bl_pool *pool, void *argument)
{
    bl_given_up *play = argument;
    const bl_server_hooks hooks = {play, bl_nothing_recover, bl_given_up_ended, bl_nothing_more,
                                   bl_nothing_more};
    bl_server *server;
    int status = bl_server_create(pool, "", pool->memory.host, &server);
    if (status < 0)
        return status;
    bl_server_handle_method(server, BL_PATH_METHOD, bl_given_up_handle, play);
    status = bl_server_take(server, &hooks);
    play->path.server = server;
    if (status == 0)
        status = bl_path_served(server, bl_server_run(server));
    play->path.server = NULL;
    bl_server_destroy(server);
    return status;
}

static int bl_given_up_work(bl_pool *pool, void *argument)
{
    bl_given_up *play = argument;
    bl_sim_world *world = play->path.world;
    bl_session *session;
    bl_given_up_call request = {.client = play->count++};
    uint32_t reply, size;
    const bl_message message = {.method = BL_PATH_METHOD, .request = (const uint8_t *)&request,
                                .request_size = sizeof request, .reply = (uint8_t *)&reply,
                                .reply_capacity = sizeof reply, .reply_size = &size};
    int status = bl_path_attach(&play->path, pool, &session);
    if (status < 0)
        return status;
    for (; status >= 0 && request.number < BL_GIVEN_UP_CALLS; request.number++) {
        status = bl_session_call(session, &message, BL_GIVEN_UP_TIMEOUT_NS);
        if (status > 1)
            return -EEXIST; /* the request was executed before */
        world->stat.results++;
        bl_nap(&pool->memory, bl_sim_below(world, BL_GIVEN_UP_NAP_NS));
    }
    play->dropped += session->stat.reattach_count;
    bl_session_close(session);
    return status;
}

/* Let the server's clock jump, often while a client is paused at a random verb. */
static int bl_given_up_keep(bl_pool *pool, void *argument)
{
    bl_given_up *play = argument;
    bl_path *path = &play->path;
    bl_sim_world *world = path->world;
    uint32_t times = 0;
    while (bl_path_clients_alive(path)) {
        bl_sim_process *client = world->process[path->client[bl_sim_below(world, 2)]];
        if (times++ < BL_GIVEN_UP_TIMES) {
            bl_sim_clock_jump(world, 0, BL_GIVEN_UP_LEAP_NS);
            if (client->state == BL_SIM_READY)
                client->wake_ns = world->now_ns + bl_sim_below(world, BL_GIVEN_UP_STOP_NS);
        }
        bl_nap(&pool->memory, bl_sim_below(world, BL_GIVEN_UP_STOP_NS));
    }
    while (bl_sim_alive(world, path->server_process)) {
        if (path->server)
            bl_server_stop(path->server);
        bl_nap(&pool->memory, BL_PATH_NAP_NS);
    }
    return play->dropped > play->doubts ? -ENODATA : 0; /* dropped without reason */
}

int bl_path_given_up(bl_sim_world *world)
{
    bl_given_up play = {.path = {.world = world, .serve = bl_given_up_serve,
                                 .server_host_count = 1}};
    bl_path_start_server(&play.path, 0);
    bl_path_spawn(&play.path, 0, bl_given_up_keep);
    for (uint32_t i = 0; i < BL_GIVEN_UP_CLIENTS; i++)
        bl_path_client(&play.path, 1 + i % 2, bl_given_up_work);
    return bl_sim_world_run(world);
}

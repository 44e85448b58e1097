/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Scenarios of heartbeats: a process whose heartbeat advances counts as alive. While a server's
 * heartbeat advances, a rival on another host never takes over; while a client's heartbeat
 * advances, the client keeps its session, even if the server's clock jumps past the timeout. A
 * heartbeat line is damaged once, which does no harm: the next heartbeat repairs it.
 */
#include <errno.h>

#include "liveness/heartbeat.h"
#include "rpc/session_state.h"
#include "sim/native/scenarios/paths.h"
#include "sim/native/scenarios/scenarios.h"

enum {
    BL_HEARTBEATS = 8,
    BL_HEARTBEATS_DAMAGED = 3,  /* the heartbeat after which a line is damaged */
    BL_HEARTBEATS_NAP_NS = 100 * 1000 * 1000 /* long enough for a check by the server */
};

#define BL_HEARTBEATS_LEAP_NS 2000000000ull

typedef struct bl_heartbeats {
    bl_path path;
    uint32_t over;
} bl_heartbeats;

static int bl_heartbeats_serve(bl_pool *pool, void *argument)
{
    bl_heartbeats *heartbeats = argument;
    bl_server *server;
    int status = bl_server_create(pool, "", pool->memory.host, &server);
    if (status < 0)
        return status;
    bl_server_handle_method(server, BL_PATH_METHOD, bl_path_handle, heartbeats);
    status = bl_server_serve_lanes(server);
    heartbeats->path.server = server;
    if (status == 0 && !heartbeats->over)
        status = bl_path_served(server, bl_server_run(server));
    heartbeats->path.server = NULL;
    bl_server_destroy(server);
    return status;
}

/* Run a rival that would take over if the server were silent. */
static int bl_heartbeats_rival(bl_pool *pool, void *argument)
{
    bl_heartbeats *heartbeats = argument;
    while (!heartbeats->over) {
        bl_server *server;
        bl_nap(&pool->memory, BL_HEARTBEATS_NAP_NS);
        if (!heartbeats->path.server)
            continue;
        int status = bl_server_create(pool, "", pool->memory.host, &server);
        if (status < 0)
            return status;
        status = bl_server_serve_lanes(server);
        bl_server_destroy(server);
        if (status != -BL_ERROR_SERVER_ALIVE && !heartbeats->over)
            return status < 0 ? status : -EEXIST;
    }
    return 0;
}

/* Damage the line so that a reader without its check would read a count far ahead. */
static void bl_heartbeats_damage(bl_sim_world *world, uint64_t offset)
{
    world->memory[offset + offsetof(bl_heartbeat_line, count) + 6] ^= 1;
}

static int bl_heartbeats_client(bl_pool *pool, void *argument)
{
    bl_heartbeats *heartbeats = argument;
    bl_sim_world *world = heartbeats->path.world;
    bl_session *session;
    bl_session_stat before, after;
    int status = bl_path_attach(&heartbeats->path, pool, &session);
    if (status < 0)
        return status;
    bl_session_describe(session, &before);
    for (uint32_t i = 0; i < BL_HEARTBEATS; i++) {
        bl_heartbeat_once(&session->heartbeat);
        bl_nap(&pool->memory, BL_HEARTBEATS_NAP_NS);
        if (i == BL_HEARTBEATS_DAMAGED) {
            bl_heartbeats_damage(world, session->heartbeat.offset);
            bl_nap(&pool->memory, BL_HEARTBEATS_NAP_NS);
        }
        world->host[0].clock_ahead_ns += BL_HEARTBEATS_LEAP_NS;
        world->stat.results++;
    }
    status = bl_path_call(&heartbeats->path, session, 8);
    bl_session_describe(session, &after);
    if (status == 0 && (after.lane != before.lane || after.epoch != before.epoch ||
                        (heartbeats->path.server && heartbeats->path.server->stat.end_count > 0)))
        status = -ENODATA; /* the session was considered dead */
    bl_session_close(session);
    return status;
}

/* Stop the server when the client has finished. */
static int bl_heartbeats_keep(bl_pool *pool, void *argument)
{
    bl_heartbeats *heartbeats = argument;
    bl_path *path = &heartbeats->path;
    while (bl_path_clients_alive(path))
        bl_nap(&pool->memory, BL_HEARTBEAT_PERIOD_NS / 4);
    heartbeats->over = 1;
    while (path->server) {
        bl_server_stop(path->server);
        bl_nap(&pool->memory, BL_PATH_NAP_NS);
    }
    return 0;
}

/* ---- heartbeats */

int bl_path_heartbeats(bl_sim_world *world)
{
    bl_heartbeats heartbeats = {.path = {.world = world}};
    bl_path_spawn(&heartbeats.path, 0, bl_heartbeats_serve);
    bl_path_spawn(&heartbeats.path, 0, bl_heartbeats_keep);
    bl_path_spawn(&heartbeats.path, 1, bl_heartbeats_rival);
    bl_path_client(&heartbeats.path, 2, bl_heartbeats_client);
    return bl_sim_world_run(world);
}

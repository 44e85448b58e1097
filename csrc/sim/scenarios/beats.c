/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Beats in the simulator: who beats is taken for alive. A server beats, and a rival on another host
 * never takes its place; a client beats, and keeps its session while the server's clock leaps over
 * the time in which it would have been given up. A beat line is damaged once, and nobody minds: the
 * next beat mends it.
 */
#include <errno.h>

#include "liveness/beat.h"
#include "rpc/session_state.h"
#include "sim/scenarios/paths.h"
#include "sim/scenarios/scenarios.h"

enum {
    BL_BEATS = 8,
    BL_BEATS_DAMAGED = 3,               /* the beat after which a line is damaged */
    BL_BEATS_NAP_NS = 100 * 1000 * 1000 /* in which the server looks at beats at least once */
};

#define BL_BEATS_LEAP_NS 2000000000ull

typedef struct bl_beats {
    bl_path path;
    uint32_t over;
} bl_beats;

static int bl_beats_serve(bl_pool *pool, void *argument)
{
    bl_beats *beats = argument;
    bl_server *server;
    int status = bl_server_create(pool, "", pool->memory.host, &server);
    if (status < 0)
        return status;
    bl_server_handle_method(server, BL_PATH_METHOD, bl_path_handle, beats);
    status = bl_server_serve_lanes(server);
    beats->path.server = server;
    if (status == 0 && !beats->over)
        status = bl_path_served(server, bl_server_run(server));
    beats->path.server = NULL;
    bl_server_destroy(server);
    return status;
}

/* Would be server, if the other were silent. */
static int bl_beats_rival(bl_pool *pool, void *argument)
{
    bl_beats *beats = argument;
    while (!beats->over) {
        bl_server *server;
        bl_nap(&pool->memory, BL_BEATS_NAP_NS);
        if (!beats->path.server)
            continue;
        int status = bl_server_create(pool, "", pool->memory.host, &server);
        if (status < 0)
            return status;
        status = bl_server_serve_lanes(server);
        bl_server_destroy(server);
        if (status != -BL_ERROR_SERVER_ALIVE && !beats->over)
            return status < 0 ? status : -EEXIST;
    }
    return 0;
}

/* The count is far ahead, for whoever does not ask for the check. */
static void bl_beats_damage(bl_sim_world *world, uint64_t offset)
{
    world->memory[offset + offsetof(bl_beat_line, count) + 6] ^= 1;
}

static int bl_beats_client(bl_pool *pool, void *argument)
{
    bl_beats *beats = argument;
    bl_sim_world *world = beats->path.world;
    bl_session *session;
    bl_session_stat before, after;
    int status = bl_path_attach(&beats->path, pool, &session);
    if (status < 0)
        return status;
    bl_session_describe(session, &before);
    for (uint32_t i = 0; i < BL_BEATS; i++) {
        bl_beat_once(&session->beat);
        bl_nap(&pool->memory, BL_BEATS_NAP_NS);
        if (i == BL_BEATS_DAMAGED) {
            bl_beats_damage(world, session->beat.offset);
            bl_nap(&pool->memory, BL_BEATS_NAP_NS);
        }
        world->host[0].clock_ahead_ns += BL_BEATS_LEAP_NS;
        world->stat.results++;
    }
    status = bl_path_call(&beats->path, session, 8);
    bl_session_describe(session, &after);
    if (status == 0 && (after.lane != before.lane || after.epoch != before.epoch ||
                        (beats->path.server && beats->path.server->stat.end_count > 0)))
        status = -ENODATA; /* it was taken for dead */
    bl_session_close(session);
    return status;
}

/* Stops the server when the client is through. */
static int bl_beats_keep(bl_pool *pool, void *argument)
{
    bl_beats *beats = argument;
    bl_path *path = &beats->path;
    while (bl_path_clients_alive(path))
        bl_nap(&pool->memory, BL_BEAT_PERIOD_NS / 4);
    beats->over = 1;
    while (path->server) {
        bl_server_stop(path->server);
        bl_nap(&pool->memory, BL_PATH_NAP_NS);
    }
    return 0;
}

/* ---- beats */

int bl_path_beats(bl_sim_world *world)
{
    bl_beats beats = {.path = {.world = world}};
    bl_path_spawn(&beats.path, 0, bl_beats_serve);
    bl_path_spawn(&beats.path, 0, bl_beats_keep);
    bl_path_spawn(&beats.path, 1, bl_beats_rival);
    bl_path_client(&beats.path, 2, bl_beats_client);
    return bl_sim_world_run(world);
}

/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * A scenario of a server that sleeps whenever it has no work, until a process of its host rings.
 * Clients call, attach and detach while it falls asleep; clients and servers die at any verb. A
 * lost ring makes a call time out, which fails the scenario.
 */
#include <errno.h>

#include "rpc/session_state.h"
#include "sim/native/scenarios/paths.h"
#include "sim/native/scenarios/scenarios.h"

enum {
    BL_ASLEEP_CALLERS = 2,
    BL_ASLEEP_CALLS = 10,
    BL_ASLEEP_DEATHS = 2,       /* of servers */
    BL_ASLEEP_VERBS = 6000,
    BL_ASLEEP_DROWSY_NS = 6 * 1000 * 1000, /* an idle server sleeps after less than this */
    BL_ASLEEP_QUIET_NS = 100 * 1000,
    BL_ASLEEP_NAP_NS = 60 * 1000
};

#define BL_ASLEEP_TIMEOUT_NS 2000000000ull

/* Make the server's clock show a pause, then wait about as long as the server needs to fall
 * asleep. */
static void bl_asleep_quiet(const bl_path *path, const bl_pool *pool)
{
    if (bl_sim_below(path->world, 4))
        bl_sim_clock_jump(path->world, pool->memory.host, BL_ASLEEP_DROWSY_NS);
    bl_nap(&pool->memory, bl_sim_below(path->world, BL_ASLEEP_NAP_NS));
}

static int bl_asleep_call(bl_pool *pool, void *argument)
{
    bl_path *path = argument;
    bl_session *session;
    int status = bl_path_attach(path, pool, &session);
    if (status < 0)
        return status;
    for (uint32_t i = 0; i < BL_ASLEEP_CALLS && status == 0; i++) {
        bl_asleep_quiet(path, pool);
        status = bl_path_call(path, session, (uint32_t)bl_sim_below(path->world, 200));
        status = bl_path_bear(path, status);
    }
    bl_session_close(session);
    return status;
}

/* Attach and detach: a request in the lobby wakes the server, too. */
static int bl_asleep_visit(bl_pool *pool, void *argument)
{
    bl_path *path = argument;
    int status = 0;
    for (uint32_t i = 0; i < BL_ASLEEP_CALLS / 2 && status == 0; i++) {
        bl_session *session;
        bl_asleep_quiet(path, pool);
        status = bl_path_attach(path, pool, &session);
        if (status < 0)
            return status;
        bl_asleep_quiet(path, pool);
        bl_session_close(session);
        path->world->stat.results++;
    }
    return status;
}

int bl_path_asleep(bl_sim_world *world)
{
    bl_path path = {
        .world = world,
        .serve = bl_path_serve,
        .server_host_count = 1,
        .timeout_ns = BL_ASLEEP_TIMEOUT_NS,
        .server_deaths = (uint32_t)bl_sim_below(world, BL_ASLEEP_DEATHS + 1),
        .server_verbs = BL_ASLEEP_VERBS,
    };
    world->wakes = 1;
    world->quiet_ns = BL_ASLEEP_QUIET_NS;
    for (uint32_t i = 0; i < BL_ASLEEP_CALLERS; i++)
        bl_path_client(&path, 0, bl_asleep_call);
    bl_path_client(&path, 0, bl_asleep_visit);
    if (bl_sim_below(world, 2)) /* the client may die between its request and its ring */
        bl_sim_kill_after(world, path.client[0], 1 + bl_sim_below(world, 3000));
    return bl_path_run(&path);
}

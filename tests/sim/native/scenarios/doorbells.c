/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * A scenario of lanes that become quiet while their clients are about to call, on a host with one
 * client and on a host with two, which write the same doorbell. The clocks of server and clients
 * differ. A lost ring makes a call time out, which fails the scenario.
 */
#include <errno.h>

#include "rpc/session_state.h"
#include "sim/native/scenarios/paths.h"
#include "sim/native/scenarios/scenarios.h"

enum {
    BL_DOORBELLS_CALLS = 20,
    BL_DOORBELLS_DEATHS = 2,    /* of servers */
    BL_DOORBELLS_VERBS = 6000,
    BL_DOORBELLS_QUIET_NS = 40 * 1000,
    BL_DOORBELLS_NAP_NS = 60 * 1000
};

#define BL_DOORBELLS_TIMEOUT_NS 2000000000ull

static int bl_doorbells_call(bl_pool *pool, void *argument)
{
    bl_path *path = argument;
    bl_session *session;
    int status = bl_path_attach(path, pool, &session);
    if (status < 0)
        return status;
    for (uint32_t i = 0; i < BL_DOORBELLS_CALLS && status == 0; i++) {
        uint64_t random = bl_sim_random(path->world);
        if (random % 4 == 0) /* for the server, more time passes than for its clients */
            bl_sim_clock_jump(path->world, 0, BL_DOORBELLS_QUIET_NS);
        if ((random >> 8) % 4 != 0)
            bl_nap(&pool->memory, bl_sim_below(path->world, BL_DOORBELLS_NAP_NS));
        status = (random >> 16) % 8 == 0
                     ? bl_path_pump(path, session)
                     : bl_path_call(path, session, (uint32_t)bl_sim_below(path->world, 200));
        status = bl_path_bear(path, status);
    }
    bl_session_close(session);
    return status;
}

int bl_path_doorbells(bl_sim_world *world)
{
    bl_path path = {
        .world = world,
        .serve = bl_path_serve,
        .server_host_count = 1,
        .timeout_ns = BL_DOORBELLS_TIMEOUT_NS,
        .server_deaths = (uint32_t)bl_sim_below(world, BL_DOORBELLS_DEATHS + 1),
        .server_verbs = BL_DOORBELLS_VERBS,
    };
    world->quiet_ns = BL_DOORBELLS_QUIET_NS;
    bl_path_client(&path, 1, bl_doorbells_call);
    bl_path_client(&path, 1, bl_doorbells_call);
    bl_path_client(&path, 2, bl_doorbells_call);
    if (bl_sim_below(world, 4) == 0)
        bl_sim_kill_after(world, path.client[0], 1 + bl_sim_below(world, 3000));
    return bl_path_run(&path);
}

/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * A scenario of the whole system. Servers on two hosts take over from each other when the other one
 * dies, or when its heartbeat merely stops: so two servers may run at once, the deposed one until
 * it reads the epoch. Four clients attach and detach, with single blocks and with batches, in a
 * pool too small for their keys. An operator pauses and kills processes, and moves clocks.
 *
 * Besides the checks of the clients, the scenario checks that the run terminates; that no space is
 * granted twice; and at the end, by check/check.c on a host with old lines in its cache, that the
 * table is consistent, including checksums, and has the blocks that the last server counted.
 */
#include <errno.h>

#include "api/check.h"
#include "index/state.h"
#include "rpc/session_state.h"
#include "sim/native/scenarios/blocks.h"
#include "sim/native/scenarios/kv.h"
#include "sim/native/scenarios/paths.h"
#include "sim/native/scenarios/scenarios.h"

enum {
    BL_SYSTEM_SERVER_COUNT = 2,
    BL_SYSTEM_CLIENT_COUNT = 4,
    BL_SYSTEM_LIVES = 2,        /* attachments of a client */
    BL_SYSTEM_ROUNDS = 14,      /* rounds of each attachment */
    BL_SYSTEM_DEATHS = 2,       /* deaths of servers */
    BL_SYSTEM_DEATH_VERBS = 20000,
    BL_SYSTEM_NAP_NS = 200 * 1000,
    BL_SYSTEM_STOP_NS = 8 * 1000 * 1000,
    BL_SYSTEM_FINDINGS = 8
};

#define BL_SYSTEM_JUMP_NS 8000000000ull

typedef struct bl_system {
    bl_blocks blocks;           /* its path is that of the system */
    bl_kv kv;
    bl_server *server[BL_SYSTEM_SERVER_COUNT];
    uint32_t process[BL_SYSTEM_SERVER_COUNT];
    uint32_t deaths;            /* deaths of servers still to come */
    uint32_t over;              /* 1: no client is left */
    uint64_t epoch;             /* epoch of the last server that stopped cleanly, */
    uint64_t block_count;       /* and its counts of blocks and extents */
    uint64_t extent_count;
} bl_system;

/* ---- Servers: one takes over when the other is silent. */

/* Serve until deposed or stopped. */
static int bl_system_run(bl_system *system, bl_server *server, uint32_t self)
{
    int status = 0;
    system->server[self] = server;
    if (!system->over)
        status = bl_path_served(server, bl_server_run(server));
    system->server[self] = NULL;
    return status;
}

static int bl_system_serve_once(bl_pool *pool, bl_system *system, uint32_t self)
{
    bl_server *server;
    bl_index *index;
    int status = bl_server_create(pool, "", pool->memory.host, &server);
    if (status < 0)
        return status;
    status = bl_index_create(server, BL_EVICT_LRU, &index);
    if (status == 0) {
        status = bl_index_serve(index);
        system->blocks.path.world->stat.takeovers += status == 0;
        if (status == 0)
            status = bl_system_run(system, server, self);
        if (status == 0 && server->epoch > system->epoch) {
            system->epoch = server->epoch;
            system->block_count = index->stat.block_count;
            system->extent_count = bl_extents_count(index->extents);
        }
        bl_index_destroy(index);
    }
    bl_server_destroy(server);
    return status == -BL_ERROR_SERVER_ALIVE || status == -BL_ERROR_DEPOSED ? 0 : status;
}

static int bl_system_serve(bl_pool *pool, void *argument)
{
    bl_system *system = argument;
    uint32_t self = pool->memory.host;
    int status = 0;
    while (status == 0 && !system->over) {
        status = bl_system_serve_once(pool, system, self);
        bl_nap(&pool->memory, bl_sim_below(system->blocks.path.world, BL_SYSTEM_NAP_NS));
    }
    return status;
}

static void bl_system_start(bl_system *system, uint32_t self)
{
    bl_sim_world *world = system->blocks.path.world;
    int process = bl_sim_spawn(world, self, bl_system_serve, system);
    if (process >= 0)
        system->process[self] = (uint32_t)process;
    if (process >= 0 && system->deaths > 0 && bl_sim_below(world, 2)) {
        system->deaths--;
        bl_sim_kill_after(world, system->process[self],
                          1 + bl_sim_below(world, BL_SYSTEM_DEATH_VERBS));
    }
}

/* ---- Clients. */

static int bl_system_round(bl_system *system, bl_blocks_client *client, int batches)
{
    if (!batches)
        return bl_blocks_round(client);
    bl_kv_buffers buffers;
    bl_kv_prepare(&system->kv, &buffers);
    return bl_sim_below(system->blocks.path.world, 2)
               ? bl_kv_try_put(&system->kv, client->session, &buffers)
               : bl_kv_try_get(&system->kv, client->session, &buffers);
}

static int bl_system_work(bl_pool *pool, void *argument)
{
    bl_system *system = argument;
    bl_path *path = &system->blocks.path;
    uint32_t self = bl_sim_self(path->world);
    int status = 0;
    for (uint32_t life = 0; life < BL_SYSTEM_LIVES && status == 0; life++) {
        bl_blocks_client client = {.blocks = &system->blocks, .pool = pool,
                                   .self = (uint8_t)(self + 1)};
        status = bl_path_attach(path, pool, &client.session);
        if (status < 0)
            return status;
        for (uint32_t i = 0; i < BL_SYSTEM_ROUNDS && status == 0; i++)
            status = bl_system_round(system, &client, pool->memory.host & 1);
        bl_session_close(client.session);
    }
    return status;
}

/* ---- The operator, which observes processes from outside. */

static void bl_system_meddle(bl_system *system)
{
    bl_sim_world *world = system->blocks.path.world;
    uint32_t victim = (uint32_t)bl_sim_below(world, world->process_count);
    bl_sim_process *process = world->process[victim];
    switch (bl_sim_below(world, 8)) {
    case 0: /* pause at a random verb, then resume */
        if (process != world->current)
            process->wake_ns = world->now_ns + bl_sim_below(world, BL_SYSTEM_STOP_NS);
        break;
    case 1:
        world->host[process->pool.memory.host].clock_ahead_ns +=
            bl_sim_below(world, BL_SYSTEM_JUMP_NS);
        break;
    case 2:
        for (uint32_t i = 0; i < BL_SYSTEM_SERVER_COUNT; i++)
            world->process[system->process[i]]->faint = bl_sim_below(world, 2) != 0;
        break;
    default:
        break;
    }
}

/* Return 1 if this is the lobby line of a client that was killed while writing it: a torn line,
 * which is legal there, since every reader rejects it. */
static int bl_system_torn(const bl_system *system, const bl_finding *finding)
{
    const bl_path *path = &system->blocks.path;
    const bl_sim_process *client = path->world->process[path->client[0]];
    return finding->kind == BL_FINDING_LOBBY_REQUEST_DAMAGED &&
           finding->place == client->pool.memory.host && client->state == BL_SIM_KILLED;
}

/* Check the pool after all processes have ended. */
static int bl_system_judge(bl_system *system, bl_pool *pool)
{
    bl_finding findings[BL_SYSTEM_FINDINGS];
    bl_check_report report;
    int status = bl_check_pool(pool, 1, findings, BL_SYSTEM_FINDINGS, &report, NULL, 0);
    if (status < 0)
        return status;
    if (report.finding_count > 1 ||
        (report.finding_count == 1 && !bl_system_torn(system, &findings[0])))
        return -EUCLEAN;
    if (report.epoch != system->epoch)
        return 0; /* the last one died */
    return report.block_count == system->block_count && report.extent_count == system->extent_count
               ? 0
               : -EUCLEAN;
}

static int bl_system_operate(bl_pool *pool, void *argument)
{
    bl_system *system = argument;
    bl_path *path = &system->blocks.path;
    bl_sim_world *world = path->world;
    while (bl_path_clients_alive(path)) {
        for (uint32_t i = 0; i < BL_SYSTEM_SERVER_COUNT; i++) {
            if (bl_sim_gone(world->process[system->process[i]]) && bl_sim_below(world, 4) == 0)
                bl_system_start(system, i);
        }
        bl_system_meddle(system);
        bl_nap(&pool->memory, bl_sim_below(world, BL_SYSTEM_NAP_NS));
    }
    system->over = 1;
    for (uint32_t i = 0; i < BL_SYSTEM_SERVER_COUNT; i++)
        while (bl_sim_alive(world, system->process[i])) {
            if (system->server[i])
                bl_server_stop(system->server[i]);
            bl_nap(&pool->memory, BL_PATH_NAP_NS);
        }
    return bl_system_judge(system, pool);
}

int bl_path_system(bl_sim_world *world)
{
    bl_system system = {
        .blocks = {.path = {.world = world, .server_verbs = BL_SYSTEM_DEATH_VERBS,
                            .bears_timeouts = 1},
                   .key_count = BL_BLOCKS_KEY_COUNT_MAX, .loses = 1},
        .kv = {.path = {.world = world, .bears_timeouts = 1}, .shape_keys = BL_KV_SHAPE_KEYS},
        .deaths = BL_SYSTEM_DEATHS,
    };
    bl_path *path = &system.blocks.path;
    for (uint32_t i = 0; i < BL_SYSTEM_SERVER_COUNT; i++)
        bl_system_start(&system, i);
    for (uint32_t host = 0; host < BL_SYSTEM_CLIENT_COUNT; host++)
        bl_path_client(path, host, bl_system_work);
    bl_sim_kill_after(world, path->client[0], 1 + bl_sim_below(world, BL_SYSTEM_DEATH_VERBS));
    bl_path_spawn(path, 3, bl_system_operate);
    return bl_sim_world_run(world);
}

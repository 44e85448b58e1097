/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Scenarios of one host number with several boots: two machines with the same number by mistake
 * (machines), and one that crashes and reboots (reboots). The only difference is that the heartbeat
 * of an earlier boot does not advance. In a third scenario an operator declares processes gone on
 * unreachable hosts (declared).
 *
 * A host of the simulator is a machine: it has its own cache, locks and boot id. The scenario
 * chooses which number its processes use.
 */
#include <errno.h>

#include "index/state.h"
#include "rpc/session_state.h"
#include "sim/native/scenarios/blocks.h"
#include "sim/native/scenarios/paths.h"
#include "sim/native/scenarios/scenarios.h"

enum {
    BL_MACHINE_COUNT = 2,       /* machines that have number 0 */
    BL_MACHINE_ROUNDS = 8,
    BL_MACHINE_SPAWNS = 30,     /* processes in all */
    BL_MACHINE_DEATHS = 3,      /* deaths of servers */
    BL_MACHINE_NAP_NS = 100 * 1000 * 1000,
    BL_MACHINE_WRITE_NS = 800 * 1000 * 1000, /* longer than a heartbeat is observed */
    BL_REBOOT_COUNT = 4,
    BL_REBOOT_ROUNDS = 6,
    BL_REBOOT_CLIENTS = 2       /* clients of each boot of host 0 */
};

typedef struct bl_machines {
    bl_blocks blocks;           /* first: its clients' argument */
    bl_server *server[BL_MACHINE_COUNT]; /* the server that serves, by machine */
    uint32_t process[BL_MACHINE_COUNT];
    uint32_t started[BL_MACHINE_COUNT];
    uint32_t deaths;            /* deaths still to come */
    uint32_t over;
} bl_machines;

/* ---- Slow clients, which hold grants for longer than servers live. */

static int bl_machine_put(bl_blocks_client *client, uint64_t key)
{
    const uint64_t keys[2] = {key, key};
    bl_sim_world *world = client->blocks->path.world;
    bl_block_request what = {.fingerprint = BL_BLOCKS_FINGERPRINT, .length = bl_blocks_length(key)};
    uint8_t payload[BL_BLOCKS_LINES_MAX * BL_LINE_SIZE];
    bl_block_record record;
    int32_t committed;
    int status = bl_reserve(client->session, keys, 1, &what, &record, BL_PATH_TIMEOUT_NS);
    if (status < 0)
        return bl_path_bear(&client->blocks->path, status);
    if (record.state != BL_BLOCK_GRANTED)
        return 0;
    status = bl_blocks_claim(client, &record);
    if (status < 0)
        return status;
    bl_commit commit = {.key = {key, key}, .generation = record.generation, .block = record.block};
    bl_blocks_fill(payload, key, record.generation);
    if (bl_sim_below(world, 3) == 0)
        bl_nap(&client->pool->memory, bl_sim_below(world, BL_MACHINE_WRITE_NS));
    bl_stream(&client->pool->memory, record.offset, payload, bl_blocks_length(key));
    bl_fence_store(&client->pool->memory);
    *bl_blocks_writer(client, &record) = 0;
    status = bl_commit_blocks(client->session, &commit, 1, &committed, BL_PATH_TIMEOUT_NS);
    return bl_path_bear(&client->blocks->path, status);
}

static int bl_machine_round(bl_blocks_client *client)
{
    const bl_blocks *blocks = client->blocks;
    uint64_t key = bl_sim_below(blocks->path.world, blocks->key_count);
    if (bl_sim_below(blocks->path.world, 3) == 0)
        return bl_blocks_get(client, key, 1, 0);
    return bl_machine_put(client, key);
}

static int bl_machine_work(bl_pool *pool, void *argument)
{
    bl_blocks *blocks = argument;
    bl_sim_world *world = blocks->path.world;
    bl_blocks_client client = {.blocks = blocks, .pool = pool, .self = bl_sim_self(world) + 1};
    int status = bl_path_attach(&blocks->path, pool, &client.session);
    if (status < 0)
        return status;
    for (uint32_t i = 0; status == 0 && i < BL_MACHINE_ROUNDS; i++) {
        status = bl_machine_round(&client);
        bl_nap(&pool->memory, bl_sim_below(world, BL_MACHINE_NAP_NS));
    }
    bl_session_close(client.session);
    return status;
}

/* ---- machines: each has a server to start; while one serves, the other is refused. */

static int bl_machine_take(bl_machines *machines, bl_server *server, bl_index *index, uint32_t self)
{
    int status = bl_index_serve(index);
    if (status == -BL_ERROR_HOST_CLASH)
        machines->blocks.path.world->stat.results++;
    if (status < 0)
        return status == -BL_ERROR_HOST_CLASH || status == -BL_ERROR_SERVER_ALIVE ? 0 : status;
    if (machines->server[1 - self])
        return -EEXIST;
    machines->server[self] = server;
    status = machines->over ? 0 : bl_path_served(server, bl_server_run(server));
    machines->server[self] = NULL;
    return status;
}

static int bl_machine_serve(bl_pool *pool, void *argument)
{
    bl_machines *machines = argument;
    bl_server *server;
    bl_index *index;
    int status = bl_server_create(pool, "", 0, &server);
    if (status < 0)
        return status;
    status = bl_index_create(server, BL_EVICT_LRU, &index);
    if (status == 0) {
        status = bl_machine_take(machines, server, index, pool->memory.host);
        bl_index_destroy(index);
    }
    bl_server_destroy(server);
    return status;
}

static int bl_machine_alive(const bl_machines *machines, uint32_t self)
{
    return machines->started[self] &&
           !bl_sim_gone(machines->blocks.path.world->process[machines->process[self]]);
}

/* Start a machine's server and wait until it serves or is refused: two servers that are elected at
 * the same time under one number could not be distinguished. */
static void bl_machine_start(bl_machines *machines, const bl_pool *pool, uint32_t self)
{
    machines->process[self] = bl_path_spawn(&machines->blocks.path, self, bl_machine_serve);
    machines->started[self] = 1;
    while (!machines->server[self] && bl_machine_alive(machines, self))
        bl_nap(&pool->memory, BL_PATH_NAP_NS);
}

static int bl_machines_operate(bl_pool *pool, void *argument)
{
    bl_machines *machines = argument;
    bl_path *path = &machines->blocks.path;
    while (bl_path_clients_alive(path)) {
        uint32_t self = (uint32_t)bl_sim_below(path->world, BL_MACHINE_COUNT);
        if (!bl_machine_alive(machines, self) && path->world->process_count < BL_MACHINE_SPAWNS) {
            bl_machine_start(machines, pool, self);
        } else if (machines->deaths && machines->server[self] && bl_sim_below(path->world, 2)) {
            machines->deaths--;
            bl_sim_kill(path->world, machines->process[self]);
            machines->server[self] = NULL;
        }
        bl_nap(&pool->memory, bl_sim_below(path->world, BL_MACHINE_NAP_NS));
    }
    machines->over = 1;
    for (uint32_t self = 0; self < BL_MACHINE_COUNT; self++)
        while (bl_machine_alive(machines, self)) {
            if (machines->server[self])
                bl_server_stop(machines->server[self]);
            bl_nap(&pool->memory, BL_PATH_NAP_NS);
        }
    return 0;
}

/* ---- machines */

int bl_path_machines(bl_sim_world *world)
{
    bl_machines machines = {
        .blocks = {.path = {.world = world, .server_verbs = 1, .bears_clashes = 1,
                            .bears_timeouts = 1},
                   .key_count = BL_BLOCKS_KEY_COUNT_MAX, .loses = 1},
        .deaths = BL_MACHINE_DEATHS,
    };
    world->lawless = 1; /* both machines write the lines of one host, one after the other */
    bl_path_client(&machines.blocks.path, 0, bl_machine_work);
    bl_path_client(&machines.blocks.path, BL_MACHINE_COUNT, bl_machine_work);
    bl_path_spawn(&machines.blocks.path, BL_MACHINE_COUNT, bl_machines_operate);
    return bl_sim_world_run(world);
}

/* ---- reboots: hosts crash and reboot; clients of earlier boots must lose their lanes, and no
 * other client may. */

static int bl_reboot_work(bl_pool *pool, void *argument)
{
    bl_blocks *blocks = argument;
    bl_sim_world *world = blocks->path.world;
    bl_blocks_client client = {.blocks = blocks, .pool = pool, .self = bl_sim_self(world) + 1};
    int status = bl_path_attach(&blocks->path, pool, &client.session);
    for (uint32_t i = 0; status == 0 && i < BL_REBOOT_ROUNDS; i++)
        status = bl_blocks_round(&client);
    if (status == 0)
        bl_session_close(client.session);
    return status;
}

static void bl_reboot_start(bl_path *path, uint32_t host)
{
    uint32_t count = host == 0 ? BL_REBOOT_CLIENTS : 1;
    if (!bl_sim_alive(path->world, path->server_process))
        bl_path_start_server(path, 0);
    path->client_count = 0; /* only the clients of the last boot are waited for */
    for (uint32_t i = 0; i < count; i++)
        bl_path_client(path, host, bl_reboot_work);
}

static int bl_reboots_operate(bl_pool *pool, void *argument)
{
    bl_path *path = argument;
    bl_sim_world *world = path->world;
    for (uint32_t i = 0; i < BL_REBOOT_COUNT; i++) {
        uint32_t host = bl_sim_below(world, 3) == 0 ? 1 : 0;
        bl_reboot_start(path, host);
        bl_nap(&pool->memory, bl_sim_below(world, BL_MACHINE_WRITE_NS));
        if (bl_sim_below(world, 2))
            while (bl_path_clients_alive(path))
                bl_nap(&pool->memory, BL_PATH_NAP_NS);
        path->server = host == 0 ? NULL : path->server;
        bl_sim_crash_host(world, host);
        world->stat.results++;
    }
    bl_reboot_start(path, 0);
    bl_path_client(path, 1, bl_reboot_work);
    while (bl_path_clients_alive(path))
        bl_nap(&pool->memory, BL_PATH_NAP_NS);
    while (bl_sim_alive(world, path->server_process)) {
        if (path->server)
            bl_server_stop(path->server);
        bl_nap(&pool->memory, BL_PATH_NAP_NS);
    }
    return 0;
}

/* ---- reboots */

int bl_path_reboots(bl_sim_world *world)
{
    bl_blocks blocks = {.path = {.world = world, .serve = bl_blocks_serve, .server_host_count = 1,
                                 .server_verbs = 1, .bears_timeouts = 1, .bears_clashes = 1,
                                 .timeout_ns = 1000 * 1000 * 1000,
                                 .heartbeat_lost_ns = 300 * 1000 * 1000},
                        .key_count = BL_BLOCKS_KEY_COUNT_MAX, .loses = 1};
    bl_path_start_server(&blocks.path, 0);
    bl_path_spawn(&blocks.path, 3, bl_reboots_operate);
    return bl_sim_world_run(world);
}

/* ---- declared: an operator declares to a server on another host that all others are gone. While a
 * client's heartbeat advances, the declaration is refused; after all are dead, perhaps including
 * two servers, no lane and no grant remains. */

static int bl_declared_work(bl_pool *pool, void *argument)
{
    bl_blocks *blocks = argument;
    bl_blocks_client client = {.blocks = blocks, .pool = pool,
                               .self = bl_sim_self(blocks->path.world) + 1};
    /* others may check before there is a session */
    bl_nap(&pool->memory, 2 * BL_HEARTBEAT_WATCH_NS);
    int status = bl_path_attach(&blocks->path, pool, &client.session);
    if (status < 0)
        return status;
    blocks->path.world->stat.results++;
    while (status == 0) { /* until it is killed */
        status = bl_blocks_round(&client);
        bl_nap(&pool->memory, BL_PATH_NAP_NS);
    }
    return status;
}

/* Declare all others gone, and take over if that is accepted. Returns 0 or the error. */
static int bl_declared_try(bl_pool *pool)
{
    bl_server *server;
    bl_index *index;
    int status = bl_server_create(pool, "", pool->memory.host, &server);
    if (status < 0)
        return status;
    status = bl_index_create(server, BL_EVICT_LRU, &index);
    if (status == 0) {
        status = bl_server_declare_gone(server);
        if (status == 0)
            status = bl_index_serve(index);
        if (status == 0)
            status = bl_housekeeping_keep(server, bl_now_ns(&pool->memory));
        if (status == 0 && server->inherited_count > 0)
            status = -EEXIST;
        bl_index_destroy(index);
    }
    bl_server_destroy(server);
    return status;
}

static void bl_declared_kill(bl_path *path, const bl_pool *pool, uint32_t process)
{
    bl_sim_kill(path->world, process);
    while (!bl_sim_gone(path->world->process[process]))
        bl_nap(&pool->memory, BL_PATH_NAP_NS);
}

static int bl_declared_operate(bl_pool *pool, void *argument)
{
    bl_path *path = argument;
    bl_sim_world *world = path->world;
    while (!path->server)
        bl_nap(&pool->memory, BL_PATH_NAP_NS);
    if (bl_sim_below(world, 2)) {
        bl_declared_kill(path, pool, path->server_process);
        path->server = NULL;
        bl_path_start_server(path, 1); /* its successor also requires the end of the first server */
    }
    while (!path->server)
        bl_nap(&pool->memory, BL_PATH_NAP_NS);
    if (bl_declared_try(pool) != -BL_ERROR_SERVER_ALIVE) /* which leaves old lines in its cache */
        return -EEXIST;
    while (world->stat.results < path->client_count)
        bl_nap(&pool->memory, BL_PATH_NAP_NS);
    int status = bl_declared_try(pool); /* the client's heartbeat must advance first */
    if (status != -BL_ERROR_SERVER_ALIVE && status != -BL_ERROR_SESSION_ALIVE)
        return -EEXIST;
    bl_declared_kill(path, pool, path->server_process);
    path->server = NULL;
    for (uint32_t i = 0; i < path->client_count; i++) {
        if (bl_declared_try(pool) != -BL_ERROR_SESSION_ALIVE)
            return -EEXIST;
        bl_declared_kill(path, pool, path->client[i]);
    }
    return bl_declared_try(pool);
}

/* ---- declared */

int bl_path_declared(bl_sim_world *world)
{
    bl_blocks blocks = {.path = {.world = world, .serve = bl_blocks_serve, .server_verbs = 1},
                        .key_count = BL_BLOCKS_KEY_COUNT_MAX, .loses = 1};
    world->lawless = 1; /* the successor has no proof but the declaration */
    bl_path_start_server(&blocks.path, 0);
    for (uint32_t host = 1; host < 3; host++)
        bl_path_client(&blocks.path, host, bl_declared_work);
    bl_path_spawn(&blocks.path, 3, bl_declared_operate);
    return bl_sim_world_run(world);
}

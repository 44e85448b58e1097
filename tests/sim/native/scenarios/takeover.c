/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Scenarios of servers that take over from each other, and of writers that were declared dead.
 *
 * Heartbeats do not advance by themselves here, so a standby finds every server silent, and takes
 * over from a living one: the worst effect of wrong timing. The scenarios check the same as
 * scenarios/blocks.c, and that an epoch has one server.
 */
#include <errno.h>

#include "index/state.h"
#include "liveness/heartbeat.h"
#include "liveness/lock.h"
#include "rpc/session_state.h"
#include "sim/native/scenarios/blocks.h"
#include "sim/native/scenarios/paths.h"
#include "sim/native/scenarios/rivals.h"
#include "sim/native/scenarios/scenarios.h"

enum {
    BL_LATE_CONTESTS = 30,
    BL_RIVAL_SILENT_NS = 4 * 1000 * 1000,
    BL_RIVAL_LOOK_NS = 1000 * 1000,
    BL_RIVAL_VERBS = 6000,
    BL_ELECTION_COUNT = 3,
    BL_ELECTOR_COUNT = 4,
    BL_SWEEP_NAP_NS = 100 * 1000 * 1000, /* long enough for the server's housekeeping */
    BL_VIGIL_HEARTBEAT_NS = 1000 * 1000,
    BL_VIGIL_SILENT_NS = 40 * 1000 * 1000,
    BL_VIGIL_NS = 400 * 1000 * 1000,
    BL_VIGIL_EVEN = 10,         /* heartbeats before the server becomes slower, */
    BL_VIGIL_SLOW = 14,         /* and before it becomes slower than a standby's first timeout */
    BL_ZOMBIE_LOST_NS = 8 * 1000 * 1000,
    BL_ZOMBIE_SLEEP_NS = 30 * 1000 * 1000,
    BL_ZOMBIE_TIMEOUT_NS = 20 * 1000 * 1000,
    BL_TAKEOVER_DEATHS = 6,
    BL_TAKEOVER_VERBS = 2500    /* verbs: about as many as a takeover of the small pool has */
};

#define BL_SWEEP_LEAP_NS 11000000000ull /* longer than between two sweeps */

/* ---- elect: candidates on three hosts compete for the same epochs, and some die; no epoch has two
 * owners. */

typedef struct bl_election {
    bl_sim_world *world;
    uint64_t owner[BL_ELECTION_COUNT + 1]; /* the owner that candidates have read, or 0 */
} bl_election;

static int bl_candidate_elect(bl_election *election, bl_server *server, uint64_t epoch)
{
    bl_candidate_line owner;
    int status = bl_elect(server, epoch, &owner);
    if (status < 0)
        return status == -ESTALE || status == -EAGAIN ? 0 : status;
    if (election->owner[epoch] && election->owner[epoch] != owner.nonce)
        return -EBADMSG;
    election->owner[epoch] = owner.nonce;
    election->world->stat.results++;
    return 0;
}

static int bl_candidate_run(bl_pool *pool, void *argument)
{
    bl_election *election = argument;
    const bl_memory *memory = &pool->memory;
    bl_server *server;
    int lock, status = bl_server_create(pool, "", memory->host, &server);
    if (status < 0)
        return status;
    server->nonce = bl_new_nonce(memory);
    for (uint64_t epoch = 1; status == 0 && epoch <= BL_ELECTION_COUNT; epoch++) {
        while ((lock = bl_host_lock(memory, "", "candidate")) == -EAGAIN)
            bl_nap(memory, bl_sim_below(election->world, BL_PATH_NAP_NS));
        status = bl_candidate_elect(election, server, epoch);
        bl_host_unlock(memory, lock);
    }
    bl_server_destroy(server);
    return status;
}

int bl_takeover_elect(bl_sim_world *world)
{
    bl_election election = {.world = world};
    for (uint32_t i = 0; i < BL_ELECTOR_COUNT; i++) {
        int process = bl_sim_spawn(world, i % BL_RIVAL_COUNT, bl_candidate_run, &election);
        if (process < 0)
            return process;
        if (bl_sim_below(world, 4) == 0)
            bl_sim_kill_after(world, (uint32_t)process, 1 + bl_sim_below(world, 1500));
    }
    return bl_sim_world_run(world);
}

/* ---- sweep: a candidate dies after its election and before it has published its epoch line. The
 * current server removes the liveness locks of dead processes, but must keep this one: its
 * successor needs it. */

static int bl_sweep_candidate(bl_pool *pool, void *argument)
{
    bl_path *path = argument;
    const bl_memory *memory = &pool->memory;
    bl_candidate_line owner;
    bl_server *server;
    while (!path->server)
        bl_nap(memory, BL_PATH_NAP_NS);
    int status = bl_server_create(pool, "", memory->host, &server);
    if (status < 0)
        return status;
    server->nonce = bl_new_nonce(memory);
    server->liveness_lock = bl_liveness_hold(memory, "", server->nonce);
    status = bl_host_lock(memory, "", "candidate");
    if (status < 0)
        return status;
    return bl_elect(server, path->server->epoch + 1, &owner); /* nothing is released */
}

static int bl_sweep_keep(bl_pool *pool, void *argument)
{
    bl_path *path = argument;
    bl_sim_world *world = path->world;
    while (!path->server || bl_path_clients_alive(path))
        bl_nap(&pool->memory, BL_PATH_NAP_NS);
    bl_sim_clock_jump(world, 0, BL_SWEEP_LEAP_NS);
    bl_nap(&pool->memory, BL_SWEEP_NAP_NS);
    bl_sim_kill(world, path->server_process);
    while (!bl_sim_gone(world->process[path->server_process]))
        bl_nap(&pool->memory, BL_PATH_NAP_NS);
    path->server = NULL;
    bl_path_start_server(path, 0);
    while (!path->server)
        bl_nap(&pool->memory, BL_PATH_NAP_NS);
    world->stat.results++;
    bl_server_stop(path->server);
    return 0;
}

int bl_takeover_sweep(bl_sim_world *world)
{
    bl_path path = {.world = world, .serve = bl_path_serve, .server_host_count = 1};
    bl_path_start_server(&path, 0);
    bl_path_client(&path, 0, bl_sweep_candidate);
    bl_path_spawn(&path, 3, bl_sweep_keep);
    return bl_sim_world_run(world);
}

/* ---- watch: a standby on another host does not take over while a server's heartbeat advances,
 * even if the heartbeat gradually becomes slower, as on an overloaded machine. */

typedef struct bl_vigil {
    bl_sim_world *world;
    uint32_t over;
} bl_vigil;

static int bl_vigil_serve(bl_pool *pool, void *argument)
{
    bl_vigil *vigil = argument;
    bl_server *server;
    int status = bl_server_create(pool, "", pool->memory.host, &server);
    if (status < 0)
        return status;
    status = bl_server_serve_lanes(server);
    for (uint64_t beat = 0; status == 0 && !vigil->over; beat++) {
        bl_heartbeat_once(&server->heartbeat);
        bl_nap(&pool->memory, beat < BL_VIGIL_EVEN || beat % 2 ? BL_VIGIL_HEARTBEAT_NS
                              : beat < BL_VIGIL_SLOW           ? BL_VIGIL_SILENT_NS / 2
                                                               : BL_VIGIL_SILENT_NS * 3 / 2);
    }
    bl_server_destroy(server);
    return status;
}

static int bl_vigil_watch(bl_pool *pool, void *argument)
{
    bl_vigil *vigil = argument;
    bl_server *server;
    bl_epoch_line line;
    int status = bl_server_create(pool, "", pool->memory.host, &server);
    if (status < 0)
        return status;
    while (bl_epoch_read(pool, &line) == 0 && !bl_epoch_serving(&line))
        bl_nap(&pool->memory, BL_VIGIL_HEARTBEAT_NS);
    status = bl_server_watch(server, BL_VIGIL_SILENT_NS, BL_VIGIL_NS);
    vigil->world->stat.results += status == 0;
    vigil->over = 1;
    bl_server_destroy(server);
    return status == 1 ? -EBADMSG : status;
}

int bl_takeover_watch(bl_sim_world *world)
{
    bl_vigil vigil = {.world = world};
    int status = bl_sim_spawn(world, 0, bl_vigil_serve, &vigil);
    if (status >= 0)
        status = bl_sim_spawn(world, 1, bl_vigil_watch, &vigil);
    return status < 0 ? status : bl_sim_world_run(world);
}

/* ---- rivals: servers on three hosts depose each other while they are alive, and some die. */

/* Stand by until this server serves. Returns 1; 0: the scenario is over; or an error. */
static int bl_rival_take(bl_rivals *rivals, bl_server *server, bl_index *index)
{
    const bl_memory *memory = &server->pool->memory;
    while (!rivals->over) {
        uint64_t silent_ns = rivals->contests ? BL_RIVAL_SILENT_NS : UINT64_MAX;
        int status = bl_server_watch(server, silent_ns, BL_RIVAL_LOOK_NS);
        if (status <= 0) {
            if (status < 0)
                return status;
            continue;
        }
        status = bl_index_serve(index);
        if (status == 0)
            return 1;
        if (status != -BL_ERROR_SERVER_ALIVE)
            return status;
        bl_nap(memory, BL_RIVAL_LOOK_NS);
    }
    return 0;
}

/* Serve until deposed or stopped. Returns 0 or an error. */
static int bl_rival_serve(bl_rivals *rivals, bl_server *server)
{
    bl_sim_world *world = rivals->blocks.path.world;
    uint32_t self = bl_sim_self(world), host = server->host;
    if (server->epoch >= BL_RIVAL_EPOCHS || rivals->owner[server->epoch])
        return -EBADMSG;
    rivals->owner[server->epoch] = self + 1;
    rivals->contests -= rivals->contests > 0 && server->epoch > 1;
    rivals->server[host] = server;
    world->process[self]->late_ns = rivals->late_ns;
    int status = rivals->over ? 0 : bl_path_served(server, bl_server_run(server));
    world->process[self]->late_ns = 0;
    rivals->server[host] = NULL;
    return status == -BL_ERROR_DEPOSED ? 0 : status;
}

static int bl_rival_run(bl_pool *pool, void *argument)
{
    bl_rivals *rivals = argument;
    int status = 0;
    while (status == 0 && !rivals->over) {
        bl_server *server;
        bl_index *index;
        status = bl_server_create(pool, "", pool->memory.host, &server);
        if (status < 0)
            return status;
        status = bl_index_create(server, BL_EVICT_LRU, &index);
        if (status == 0) {
            status = bl_rival_take(rivals, server, index);
            if (status == 1)
                status = bl_rival_serve(rivals, server);
            bl_index_destroy(index);
        }
        bl_server_destroy(server);
    }
    return status;
}

int bl_rivals_keep(bl_pool *pool, void *argument)
{
    bl_rivals *rivals = argument;
    bl_path *path = &rivals->blocks.path;
    uint32_t process[BL_RIVAL_COUNT];
    for (uint32_t host = 0; host < BL_RIVAL_COUNT; host++)
        process[host] = bl_path_spawn(path, host, bl_rival_run);
    while (bl_path_clients_alive(path)) {
        uint32_t host = (uint32_t)bl_sim_below(path->world, BL_RIVAL_COUNT);
        bl_sim_process *rival = path->world->process[process[host]];
        if (bl_sim_gone(rival)) {
            rivals->server[host] = NULL;
            process[host] = bl_path_spawn(path, host, bl_rival_run);
        } else if (rivals->deaths && bl_sim_below(path->world, 40) == 0) {
            rivals->deaths--;
            bl_sim_kill_after(path->world, process[host],
                              1 + bl_sim_below(path->world, BL_RIVAL_VERBS));
        }
        bl_nap(&pool->memory, BL_PATH_NAP_NS);
    }
    rivals->over = 1;
    for (uint32_t host = 0; host < BL_RIVAL_COUNT; host++)
        while (bl_sim_alive(path->world, process[host])) {
            if (rivals->server[host])
                bl_server_stop(rivals->server[host]);
            bl_nap(&pool->memory, BL_PATH_NAP_NS);
        }
    return 0;
}

static int bl_rivals_play(bl_sim_world *world, uint64_t late_ns)
{
    bl_rivals rivals = {
        .blocks = {.path = {.world = world, .server_verbs = 1},
                   .key_count = BL_BLOCKS_KEY_COUNT_MAX, .loses = 1, .wide = late_ns > 0},
        .contests = late_ns ? BL_LATE_CONTESTS : BL_RIVAL_CONTESTS,
        .deaths = (uint32_t)bl_sim_below(world, 3),
        .late_ns = late_ns,
    };
    bl_path_spawn(&rivals.blocks.path, 0, bl_rivals_keep);
    for (uint32_t host = 0; host < 3; host++)
        bl_path_client(&rivals.blocks.path, host, bl_blocks_work);
    return bl_sim_world_run(world);
}

int bl_takeover_rivals(bl_sim_world *world) { return bl_rivals_play(world, 0); }

/* ---- late: the same, but servers are deposed between their read of the epoch and the action that
 * depends on it; nearly every grant and lane is given in that state. */

int bl_takeover_late(bl_sim_world *world) { return bl_rivals_play(world, BL_LATE_NS); }

/* ---- takeover: several servers in a row die before they serve; no committed block is lost. */

int bl_takeover_deaths(bl_sim_world *world)
{
    bl_blocks blocks = {.path = {.world = world, .serve = bl_blocks_serve,
                                 .server_host_count = 1 + (uint32_t)bl_sim_below(world, 2),
                                 .server_deaths = BL_TAKEOVER_DEATHS,
                                 .server_verbs = BL_TAKEOVER_VERBS},
                        .key_count = 8};
    for (uint32_t host = 0; host < 2; host++)
        bl_path_client(&blocks.path, host, bl_blocks_work);
    return bl_path_run(&blocks.path);
}

/* ---- zombies: clients sleep beyond their timeout, and then still write; meanwhile servers die,
 * and others take over. */

/* Write a granted block, perhaps long after the server has ended this session. */
static int bl_zombie_write(bl_blocks_client *client, uint64_t key, const bl_block_record *record)
{
    bl_sim_world *world = client->blocks->path.world;
    uint8_t payload[BL_BLOCKS_LINES_MAX * BL_LINE_SIZE];
    bl_commit commit = {.key = {key, key}, .generation = record->generation,
                        .block = record->block};
    int32_t committed;
    int status = bl_blocks_claim(client, record);
    if (status < 0)
        return status;
    bl_blocks_fill(payload, key, record->generation);
    if (bl_sim_below(world, 4) == 0)
        bl_nap(&client->pool->memory, BL_ZOMBIE_SLEEP_NS);
    bl_stream(&client->pool->memory, record->offset, payload, bl_blocks_length(key));
    bl_fence_store(&client->pool->memory);
    *bl_blocks_writer(client, record) = 0;
    return bl_path_bear(&client->blocks->path,
                        bl_commit_blocks(client->session, &commit, 1, &committed,
                                         BL_ZOMBIE_TIMEOUT_NS));
}

static int bl_zombie_act(bl_blocks_client *client, uint64_t key)
{
    const uint64_t keys[2] = {key, key};
    bl_block_request what = {.fingerprint = BL_BLOCKS_FINGERPRINT, .length = bl_blocks_length(key)};
    bl_block_record record;
    uint32_t state;
    if (bl_sim_below(client->blocks->path.world, 2)) {
        int64_t hits = bl_lookup(client->session, keys, 1, 0, &record, &state,
                                 BL_ZOMBIE_TIMEOUT_NS);
        int read = hits > 0 ? bl_blocks_read(client, key, &record)
                            : bl_path_bear(&client->blocks->path, (int)hits);
        return read < 0 ? read : 0;
    }
    int status = bl_reserve(client->session, keys, 1, &what, &record, BL_ZOMBIE_TIMEOUT_NS);
    if (status < 0)
        return bl_path_bear(&client->blocks->path, status);
    return record.state == BL_BLOCK_GRANTED ? bl_zombie_write(client, key, &record) : 0;
}

static int bl_zombie_work(bl_pool *pool, void *argument)
{
    bl_blocks *blocks = argument;
    bl_blocks_client client = {.blocks = blocks, .pool = pool,
                               .self = bl_sim_self(blocks->path.world) + 1};
    int status = bl_path_attach(&blocks->path, pool, &client.session);
    if (status < 0)
        return status;
    for (uint32_t i = 0; status == 0 && i < BL_BLOCKS_ROUNDS; i++) {
        if (client.session->attached)
            bl_heartbeat_once(&client.session->heartbeat);
        status = bl_zombie_act(&client, bl_sim_below(blocks->path.world, blocks->key_count));
    }
    bl_session_close(client.session);
    return status;
}

int bl_takeover_zombies(bl_sim_world *world)
{
    bl_blocks blocks = {.path = {.world = world, .serve = bl_blocks_serve,
                                 .server_host_count = 1, .bears_timeouts = 1,
                                 .server_deaths = (uint32_t)bl_sim_below(world, 4),
                                 .server_verbs = BL_BLOCKS_SERVER_VERBS,
                                 .heartbeat_lost_ns = BL_ZOMBIE_LOST_NS},
                        .key_count = BL_BLOCKS_KEY_COUNT_MAX, .loses = 1};
    for (uint32_t host = 1; host < 4; host++)
        bl_path_client(&blocks.path, host, bl_zombie_work);
    return bl_path_run(&blocks.path);
}

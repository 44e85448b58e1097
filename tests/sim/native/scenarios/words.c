/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Scenarios of a server's first and last epoch line: a process that observes memory from outside
 * kills or pauses the server exactly when its line becomes SERVING, or when one copy of it becomes
 * STOPPED.
 */
#include <errno.h>

#include "pool/message.h"
#include "sim/native/scenarios/blocks.h"
#include "sim/native/scenarios/paths.h"
#include "sim/native/scenarios/scenarios.h"

enum {
    BL_WORDS_KILLS = 6,
    BL_WORDS_KEYS = 8,
    BL_WORDS_LOOK_NS = 1000,
    BL_WORDS_STOP_NS = 2000 * 1000 * 1000
};

typedef struct bl_words {
    bl_blocks blocks;           /* first: its clients' argument */
    uint32_t crashes;           /* crashes of the server's host; 0: only the server is killed */
} bl_words;

/* Return a copy of the epoch line of a half in memory. */
static const bl_epoch_line *bl_words_line(const bl_sim_world *world, uint32_t half, uint32_t copy)
{
    return (const bl_epoch_line *)(world->memory + bl_epoch_offset(half) +
                                   (uint64_t)copy * BL_LINE_SIZE);
}

/* Return the newest epoch in memory with a whole line in this state. */
static uint64_t bl_words_newest(const bl_sim_world *world, uint32_t state)
{
    uint64_t epoch = 0;
    for (uint32_t half = 0; half < BL_HALF_COUNT; half++) {
        for (uint32_t copy = 0; copy < 2; copy++) {
            const bl_epoch_line *line = bl_words_line(world, half, copy);
            if (line->state == state && line->epoch > epoch && bl_table_whole(line, half))
                epoch = line->epoch;
        }
    }
    return epoch;
}

/* ---- first_word: a server dies as soon as its line in memory is SERVING. Its half must be whole:
 * its successor finds every committed block. ---- first_crash: its host crashes, too, and loses
 * everything that was not in memory yet. */

static void bl_words_end(bl_words *words)
{
    bl_path *path = &words->blocks.path;
    if (words->crashes)
        bl_sim_crash_host(path->world, 0);
    else
        bl_sim_kill(path->world, path->server_process);
}

static int bl_words_kill(bl_pool *pool, void *argument)
{
    bl_words *words = argument;
    bl_path *path = &words->blocks.path;
    bl_sim_world *world = path->world;
    while (bl_path_clients_alive(path) && world->stat.results < BL_WORDS_KEYS)
        bl_nap(&pool->memory, BL_PATH_NAP_NS);
    bl_sim_kill(world, path->server_process); /* the first server has nothing to recover */
    uint64_t killed = 1;
    uint32_t most = words->crashes ? words->crashes : BL_WORDS_KILLS;
    for (uint32_t kills = 0; kills < most && bl_path_clients_alive(path);) {
        int taking = bl_words_newest(world, BL_SERVER_TAKING) > killed;
        bl_nap(&pool->memory, taking ? 0 : bl_sim_below(world, BL_WORDS_LOOK_NS));
        uint64_t epoch = bl_words_newest(world, BL_SERVER_SERVING);
        if (epoch <= killed)
            continue;
        bl_words_end(words);
        killed = epoch;
        kills++;
    }
    return 0;
}

static int bl_words_play(bl_sim_world *world, uint32_t crashes)
{
    bl_words words = {.blocks = {.path = {.world = world, .serve = bl_blocks_serve,
                                          .server_host_count = 1, .server_verbs = 1},
                                 .key_count = BL_WORDS_KEYS},
                      .crashes = crashes};
    bl_path *path = &words.blocks.path;
    for (uint32_t i = 0; i < 2; i++)
        bl_path_client(path, crashes + i, bl_blocks_work);
    bl_path_spawn(path, 3, bl_words_kill);
    bl_path_start_server(path, 0);
    bl_path_spawn(path, crashes ? 3 : 0, bl_path_keep);
    return bl_sim_world_run(world);
}

int bl_path_first_word(bl_sim_world *world) { return bl_words_play(world, 0); }

int bl_path_first_crash(bl_sim_world *world) { return bl_words_play(world, 1); }

/* ---- last_word: a server is paused between the two copies of its last epoch line. Until it has
 * written the second copy it may write, so no other server may take its half. */

static int bl_words_serve(bl_pool *pool, void *argument)
{
    bl_path *path = argument;
    bl_server *server;
    int status = bl_server_create(pool, "", pool->memory.host, &server);
    if (status < 0)
        return status;
    status = bl_server_serve_lanes(server);
    path->server = server;
    if (status == 0)
        status = bl_path_served(server, bl_server_run(server));
    path->server = NULL;
    bl_server_destroy(server);
    return status == -BL_ERROR_SERVER_ALIVE ? 0 : status;
}

/* Start a server and wait until it serves, or has ended. */
static uint32_t bl_words_start(bl_pool *pool, bl_path *path, uint32_t host)
{
    uint32_t process = bl_path_spawn(path, host, bl_words_serve);
    while (!path->server && bl_sim_alive(path->world, process))
        bl_nap(&pool->memory, BL_PATH_NAP_NS);
    return process;
}

static int bl_words_try(bl_pool *pool, void *argument)
{
    bl_path *path = argument;
    bl_sim_world *world = path->world;
    uint32_t first = bl_words_start(pool, path, 0);
    uint64_t other = (bl_epoch_offset(1) + BL_LINE_SIZE) / BL_LINE_SIZE;
    bl_sim_process *mute = world->process[first];
    mute->line = 0;
    bl_server_stop(path->server);
    while (mute->state == BL_SIM_READY && mute->line != other)
        bl_nap(&pool->memory, bl_sim_below(world, 40));
    mute->wake_ns = world->now_ns + BL_WORDS_STOP_NS;
    while (bl_sim_drains(world, mute))
        bl_nap(&pool->memory, BL_PATH_NAP_NS);
    int late = bl_words_line(world, 1, 1)->state == BL_SERVER_STOPPED; /* stopped too late */
    uint32_t second = bl_words_start(pool, path, 1);
    bl_sim_kill(world, second);
    while (!bl_sim_gone(world->process[second]))
        bl_nap(&pool->memory, BL_PATH_NAP_NS);
    path->server = NULL;
    uint32_t third = bl_words_start(pool, path, 1);
    int early = mute->state == BL_SIM_READY && mute->wake_ns > world->now_ns;
    world->stat.results++;
    if (path->server && early && !late)
        return -EEXIST;
    while (bl_sim_alive(world, third)) {
        if (path->server)
            bl_server_stop(path->server);
        bl_nap(&pool->memory, BL_PATH_NAP_NS);
    }
    return 0;
}

int bl_path_last_word(bl_sim_world *world)
{
    bl_path path = {.world = world};
    bl_path_spawn(&path, 3, bl_words_try);
    return bl_sim_world_run(world);
}

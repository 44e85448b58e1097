/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * A scenario of the journal of names: clients put, get and remove named blocks, some of which are
 * evicted, while a reader in the server's process takes the changes. In some runs the journal is
 * small and loses changes.
 *
 * The scenario checks that the changes lead from one state of the name table to the next, whenever
 * the reader reads both, and that no change is lost if there is room.
 */
#include <errno.h>

#include "api/index.h"
#include "rpc/session_state.h"
#include "sim/native/scenarios/blocks.h"
#include "sim/native/scenarios/kv.h"
#include "sim/native/scenarios/paths.h"
#include "sim/native/scenarios/scenarios.h"

enum {
    BL_FOLLOW_ROUNDS = 24,
    BL_FOLLOW_LINES = BL_KV_NAMES_MAX,
    BL_FOLLOW_ROOM = 4,         /* changes, where some are lost */
    BL_FOLLOW_ROOM_MAX = 1024,  /* where none is */
    BL_FOLLOW_PART = 3,         /* changes that are taken together */
    BL_FOLLOW_NAP_NS = 20 * 1000
};

typedef struct bl_follow {
    bl_kv kv;                   /* its path is that of the scenario */
    bl_index *index;
    uint32_t room;
} bl_follow;

/* The reader's state of each line: the change that stored it, or zeros. */
typedef struct bl_follow_table {
    bl_change lines[BL_FOLLOW_LINES];
    uint64_t lost;              /* changes when the reader began */
    uint32_t valid;
} bl_follow_table;

static int bl_follow_attach(bl_path *path, bl_index *index)
{
    bl_follow *follow = (bl_follow *)path;
    follow->index = index;
    return bl_journal_attach(index, follow->room);
}

/* Apply a change, unless the line is newer. */
static void bl_follow_apply(bl_follow_table *table, const bl_change *change)
{
    bl_change *line = &table->lines[change->block];
    if (change->kind == BL_CHANGE_STORED && change->generation >= line->generation)
        *line = *change;
    else if (change->kind == BL_CHANGE_REMOVED && change->generation == line->generation)
        *line = (bl_change){.generation = 0};
}

/* Take some changes, and apply them to two tables. Returns their number, or -EBADMSG. */
static int64_t bl_follow_take(const bl_follow *follow, bl_follow_table *one, bl_follow_table *other)
{
    bl_change changes[BL_FOLLOW_PART];
    uint32_t most = 1 + (uint32_t)bl_sim_below(follow->kv.path.world, BL_FOLLOW_PART);
    uint64_t lost;
    int64_t count = bl_journal_take(follow->index, changes, most, &lost);
    for (int64_t i = 0; i < count; i++) {
        if (changes[i].block >= BL_FOLLOW_LINES || changes[i].generation == 0)
            return -EBADMSG;
        bl_follow_apply(one, &changes[i]);
        bl_follow_apply(other, &changes[i]);
    }
    one->valid &= lost == one->lost;
    other->valid &= lost == other->lost;
    if (follow->room == BL_FOLLOW_ROOM_MAX && lost > 0)
        return -EBADMSG;
    return count;
}

/* Read the name table like a reader at its start. Returns 0 or an error. */
static int bl_follow_read(bl_follow *follow, bl_session *session, bl_follow_table *table)
{
    bl_change names[BL_FOLLOW_LINES];
    uint32_t first = 0;
    bl_journal_take(follow->index, names, 0, &table->lost);
    table->valid = 1;
    int status = bl_path_call(&follow->kv.path, session, 1);
    if (status < 0)
        return status;
    int64_t count = bl_names_read(session->pool, session->half, &first, BL_FOLLOW_LINES, names);
    for (int64_t i = 0; i < count; i++)
        table->lines[names[i].block] = names[i];
    return count < 0 ? (int)count : 0;
}

/* Compare the accumulated changes with the table, and continue with the table. */
static int bl_follow_compare(bl_follow *follow, bl_session *session, bl_follow_table *followed)
{
    bl_follow_table table = {.valid = 0};
    int64_t count;
    do
        count = bl_follow_take(follow, followed, followed);
    while (count > 0);
    int status = count < 0 ? (int)count : bl_follow_read(follow, session, &table);
    if (status == 0) /* changes in the table are in the journal before the reply */
        status = bl_path_call(&follow->kv.path, session, 1);
    if (status < 0)
        return status;
    do
        count = bl_follow_take(follow, followed, &table);
    while (count > 0);
    if (count < 0)
        return (int)count;
    for (uint32_t i = 0; followed->valid && i < BL_FOLLOW_LINES; i++)
        if (memcmp(&followed->lines[i], &table.lines[i], sizeof table.lines[i]) != 0)
            return -EBADMSG;
    follow->kv.path.world->stat.results += followed->valid;
    *followed = table;
    return 0;
}

/* Return 1 if only the reader, the last of the clients, remains. */
static int bl_follow_over(const bl_path *path)
{
    for (uint32_t i = 0; i + 1 < path->client_count; i++)
        if (bl_sim_alive(path->world, path->client[i]))
            return 0;
    return 1;
}

static int bl_follow_follow(bl_pool *pool, void *argument)
{
    bl_follow *follow = argument;
    bl_path *path = &follow->kv.path;
    bl_follow_table followed = {.valid = 0};
    bl_session *session;
    int status = bl_path_attach(path, pool, &session);
    if (status < 0)
        return status;
    while (status == 0 && !bl_follow_over(path)) {
        if (bl_sim_below(path->world, 8) == 0)
            status = bl_follow_compare(follow, session, &followed);
        else if (bl_follow_take(follow, &followed, &followed) < 0)
            status = -EBADMSG;
        bl_nap(&pool->memory, bl_sim_below(path->world, BL_FOLLOW_NAP_NS));
    }
    for (int look = 0; look < 2 && status == 0; look++)
        status = bl_follow_compare(follow, session, &followed);
    if (status == 0 && !followed.valid)
        status = -EBADMSG; /* there are no more changes */
    bl_session_close(session);
    return status;
}

static int bl_follow_work(bl_pool *pool, void *argument)
{
    bl_follow *follow = argument;
    bl_kv *kv = &follow->kv;
    bl_session *session;
    int status = bl_path_attach(&kv->path, pool, &session);
    if (status < 0)
        return status;
    for (uint32_t i = 0; i < BL_FOLLOW_ROUNDS && status == 0; i++) {
        bl_kv_buffers buffers;
        bl_kv_prepare(kv, &buffers);
        uint64_t what = bl_sim_below(kv->path.world, 8);
        if (what < 5)
            status = bl_kv_try_put(kv, session, &buffers);
        else if (what < 6)
            status = bl_kv_try_get(kv, session, &buffers);
        else if (bl_remove_blocks(session, buffers.keys, buffers.batch.count,
                                  BL_PATH_TIMEOUT_NS) < 0)
            status = -EBADMSG; /* no server dies here */
    }
    bl_session_close(session);
    return status;
}

/* ---- followed */

int bl_path_followed(bl_sim_world *world)
{
    bl_follow follow = {
        .kv = {.path = {.world = world, .serve = bl_blocks_serve, .prepare = bl_follow_attach,
                        .server_host_count = 1},
               .shape_keys = BL_KV_SHAPE_KEYS, .named = 1},
        .room = bl_sim_below(world, 2) ? BL_FOLLOW_ROOM : BL_FOLLOW_ROOM_MAX,
    };
    for (uint32_t host = 1; host < 4; host++)
        bl_path_client(&follow.kv.path, host, bl_follow_work);
    bl_path_client(&follow.kv.path, 0, bl_follow_follow);
    return bl_path_run(&follow.kv.path);
}

/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Scenarios of puts and gets: batches on three hosts, in several shapes, some read without
 * checksums.
 *
 * A payload has its key and a unique version, which determine its other bytes: a read must return
 * one whole version of the right key, or a miss. In kv, servers die and there are more keys than
 * lines in the table, so a miss is always legal. In kv_calm, nothing dies and nothing is evicted:
 * every put has room, and every block is found at the first look; a second look would mean that the
 * reader accepted something before it was published. kv_full is the same with blocks that fill
 * their space to the last line, so that a write past the end of one damages another. In kv_names,
 * blocks have names: a name must never be found with another block, and if nothing is evicted, no
 * name is lost when servers die.
 */
#include <errno.h>

#include "api/index.h"
#include "rpc/session_state.h"
#include "sim/native/scenarios/blocks.h"
#include "sim/native/scenarios/kv.h"
#include "sim/native/scenarios/paths.h"
#include "sim/native/scenarios/scenarios.h"
#include "transfer/block.h"

typedef struct bl_kv_shape {
    uint32_t length;
    uint32_t cut;               /* between the fragments */
    uint32_t chunk_size;
} bl_kv_shape;

static const bl_kv_shape bl_kv_shapes[BL_KV_SHAPE_COUNT] = {
    {360, 136, 128},            /* ends in the middle of a line */
    {1024, 512, 256},           /* streamed directly */
    {832, 320, 0},              /* streamed directly, without checksums */
    {200, 64, 256},             /* one chunk: its checksum is in the entry */
};

/* With its checksums, each shape fills a page, the smallest allocation. The last line is streamed
 * directly, with or without a checksum; or staged; or it is that of the checksums. */
static const bl_kv_shape bl_kv_full_shapes[BL_KV_SHAPE_COUNT] = {
    {BL_PAGE_SIZE, 1000, 0},
    {BL_PAGE_SIZE, 1000, BL_PAGE_SIZE},
    {BL_PAGE_SIZE, 4000, BL_PAGE_SIZE},
    {BL_PAGE_SIZE - BL_LINE_SIZE, 1000, 256},
};

void bl_kv_fill(uint64_t *payload, uint64_t key, uint64_t version, uint32_t length)
{
    uint64_t word = key * 0x9e3779b97f4a7c15u ^ version * 0xbf58476d1ce4e5b9u;
    payload[0] = version;
    for (uint32_t i = 1; i < length / sizeof word; i++)
        payload[i] = word = word * 0xda942042e4dd58b5u + i;
}

/* Return the name of a key's block; some have none. */
static bl_name bl_kv_name(uint64_t key)
{
    return (bl_name){
        .block_hash = key * 0x9e3779b97f4a7c15u,
        .parent_hash = key * 0xda942042e4dd58b5u,
        .tokens_hash = ~key,
        .space = key ^ 0x5555,
        .block_tokens = key % BL_KV_NAMELESS ? 16 : 0,
        .rank = (uint16_t)key,
        .rank_count = UINT16_MAX,
        .flags = key & BL_NAME_PARENT,
    };
}

void bl_kv_prepare(const bl_kv *kv, bl_kv_buffers *buffers)
{
    bl_sim_world *world = kv->path.world;
    const bl_kv_shape *shapes = kv->shapes ? kv->shapes : bl_kv_shapes;
    uint32_t shape_index;
    do
        shape_index = (uint32_t)bl_sim_below(world, BL_KV_SHAPE_COUNT);
    while ((kv->summed && !shapes[shape_index].chunk_size) ||
           (kv->bare && shapes[shape_index].chunk_size));
    const bl_kv_shape *shape = &shapes[shape_index];
    uint32_t count = 1 + (uint32_t)bl_sim_below(world, BL_KV_BATCH);
    uint64_t first = shape_index * BL_KV_SHAPE_KEYS +
                     bl_sim_below(world, kv->shape_keys - count + 1);
    for (uint32_t i = 0; i < count; i++) {
        uint64_t address = (uintptr_t)buffers->payloads[i];
        buffers->keys[2 * i] = first + i;
        buffers->keys[2 * i + 1] = ~(first + i); /* unlike those of bl_blocks */
        buffers->names[i] = bl_kv_name(first + i);
        buffers->fragments[2 * i] = (bl_fragment){address, shape->cut};
        buffers->fragments[2 * i + 1] = (bl_fragment){address + shape->cut,
                                                      shape->length - shape->cut};
    }
    buffers->batch = (bl_kv_batch){
        .keys = buffers->keys,
        .fragments = buffers->fragments,
        .names = kv->named ? buffers->names : NULL,
        .fingerprint = 1 + shape_index,
        .timeout_ns = bl_path_timeout_ns(&kv->path),
        .count = count,
        .fragment_count = BL_KV_FRAGMENTS,
        .length = shape->length,
        .chunk_size = shape->chunk_size,
        .check_checksums = kv->summed || bl_sim_below(world, 2),
    };
}

int bl_kv_try_put(bl_kv *kv, bl_session *session, bl_kv_buffers *buffers)
{
    const bl_kv_batch *batch = &buffers->batch;
    for (uint32_t i = 0; i < batch->count; i++)
        bl_kv_fill(buffers->payloads[i], buffers->keys[2 * i], bl_sim_random(kv->path.world),
                   batch->length);
    int status = bl_kv_put(session, batch, buffers->states, buffers->statuses);
    if (status < 0)
        return kv->calm ? status : bl_path_bear(&kv->path, status);
    for (uint32_t i = 0; i < batch->count; i++) {
        if (kv->calm && buffers->states[i] == BL_BLOCK_REFUSED)
            return -ENOSPC;
        kv->there[buffers->keys[2 * i]] |= buffers->states[i] == BL_BLOCK_GRANTED ||
                                           buffers->states[i] == BL_BLOCK_HIT;
        if (kv->named && buffers->states[i] == BL_BLOCK_GRANTED)
            kv->named_there[buffers->keys[2 * i]] = buffers->names[i].block_tokens != 0;
    }
    return 0;
}

/* Return how many leading keys must be found. */
static uint32_t bl_kv_due(const bl_kv *kv, const bl_kv_buffers *buffers)
{
    uint32_t count = 0;
    while (kv->calm && count < buffers->batch.count && kv->there[buffers->keys[2 * count]])
        count++;
    return count;
}

int bl_kv_try_get(bl_kv *kv, bl_session *session, bl_kv_buffers *buffers)
{
    uint64_t right[BL_KV_LENGTH_MAX / sizeof(uint64_t)], mismatch_count = 0;
    uint32_t due = bl_kv_due(kv, buffers), length = buffers->batch.length;
    int64_t hits = bl_kv_get(session, &buffers->batch, buffers->states, &mismatch_count);
    for (int64_t i = 0; i < hits; i++) {
        bl_kv_fill(right, buffers->keys[2 * i], buffers->payloads[i][0], length);
        if (memcmp(right, buffers->payloads[i], length) != 0)
            return -EBADMSG;
        kv->path.world->stat.results++;
    }
    kv->path.world->stat.torn_lines += mismatch_count;
    if (hits < 0)
        return bl_path_bear(&kv->path, (int)hits);
    return hits < due || (kv->calm && mismatch_count > 0) ? -ENODATA : 0;
}

/* Return 1 if a found name belongs to the block of the entry on the same line. */
static int bl_kv_name_right(const bl_pool *pool, uint32_t half, const bl_change *found,
                            uint64_t *key)
{
    uint64_t offset = bl_entry_offset(&pool->geometry, found->block, half);
    bl_entry entry;
    bl_refetch(&pool->memory, offset, BL_LINE_SIZE);
    bl_load_line(&pool->memory, offset, &entry);
    *key = UINT64_MAX;
    if (!bl_table_whole(&entry, found->block) || entry.generation != found->generation ||
        entry.state != BL_ENTRY_COMMITTED)
        return 1; /* the block was removed meanwhile */
    bl_name name = bl_kv_name(entry.key[0]);
    *key = entry.key[0];
    return name.block_tokens != 0 && memcmp(&name, &found->name, sizeof name) == 0;
}

int bl_kv_try_names(bl_kv *kv, const bl_pool *pool, const bl_session *session)
{
    uint8_t due[sizeof kv->named_there], found[sizeof kv->named_there] = {0};
    bl_change names[BL_KV_NAMES_MAX];
    uint32_t first = 0, half = session->half;
    uint64_t epoch = session->epoch, key;
    bl_epoch_line now;
    memcpy(due, kv->named_there, sizeof due);
    int64_t count = bl_names_read(pool, half, &first, BL_KV_NAMES_MAX, names);
    if (count < 0)
        return (int)count;
    bl_epoch_read(pool, &now);
    if (now.epoch != epoch)
        return 0; /* another server has taken over */
    for (int64_t i = 0; i < count; i++) {
        if (!bl_kv_name_right(pool, half, &names[i], &key)) {
            bl_epoch_read(pool, &now);
            return now.epoch == epoch ? -EBADMSG : 0;
        }
        if (key < sizeof found)
            found[key] = 1;
    }
    for (uint32_t i = 0; kv->shape_keys == BL_KV_CALM_KEYS && i < sizeof due; i++)
        if (due[i] && !found[i])
            return -ENODATA;
    kv->path.world->stat.results++;
    return 0;
}

static int bl_kv_work_on(bl_pool *pool, void *argument)
{
    bl_kv *kv = argument;
    bl_session *session;
    int status = bl_path_attach(&kv->path, pool, &session);
    if (status < 0)
        return status;
    uint32_t rounds = kv->rounds ? kv->rounds : BL_KV_ROUNDS;
    for (uint32_t i = 0; i < rounds && status == 0; i++) {
        bl_kv_buffers buffers;
        bl_kv_prepare(kv, &buffers);
        if (kv->named && bl_sim_below(kv->path.world, 3) == 0)
            status = bl_kv_try_names(kv, pool, session);
        else if (bl_sim_below(kv->path.world, 2) && !(kv->bare && pool->memory.host == 0))
            status = bl_kv_try_put(kv, session, &buffers);
        else
            status = bl_kv_try_get(kv, session, &buffers);
    }
    bl_session_close(session);
    return status;
}

static int bl_kv_run(bl_kv *kv)
{
    for (uint32_t host = 0; host < 3; host++)
        bl_path_client(&kv->path, host, bl_kv_work_on);
    return bl_path_run(&kv->path);
}

int bl_path_kv(bl_sim_world *world)
{
    bl_kv kv = {.path = {.world = world, .serve = bl_blocks_serve, .server_host_count = 1,
                         .server_deaths = 2, .server_verbs = BL_KV_SERVER_VERBS},
                .shape_keys = BL_KV_SHAPE_KEYS};
    return bl_kv_run(&kv);
}

int bl_path_kv_names(bl_sim_world *world)
{
    bl_kv kv = {.path = {.world = world, .serve = bl_blocks_serve, .server_host_count = 1,
                         .server_deaths = 2, .server_verbs = BL_KV_SERVER_VERBS},
                .named = 1};
    kv.shape_keys = bl_sim_below(world, 2) ? BL_KV_CALM_KEYS : BL_KV_SHAPE_KEYS;
    return bl_kv_run(&kv);
}

int bl_path_kv_calm(bl_sim_world *world)
{
    bl_kv kv = {.path = {.world = world, .serve = bl_blocks_serve, .server_host_count = 1},
                .shape_keys = BL_KV_CALM_KEYS, .calm = 1};
    return bl_kv_run(&kv);
}

/* ---- kv_threads: the threads of a process share its session. A call of one attaches it anew while
 * another copies: its grants must not end before. */

typedef struct bl_kv_team {
    bl_kv *kv;
    bl_session *session;
} bl_kv_team;

static int bl_kv_rounds(bl_kv_team *team)
{
    int status = 0;
    for (uint32_t i = 0; i < BL_KV_THREAD_ROUNDS && status == 0; i++) {
        bl_kv_buffers buffers;
        bl_kv_prepare(team->kv, &buffers);
        status = bl_sim_below(team->kv->path.world, 2)
                     ? bl_kv_try_put(team->kv, team->session, &buffers)
                     : bl_kv_try_get(team->kv, team->session, &buffers);
    }
    return status;
}

static int bl_kv_thread(bl_pool *pool, void *argument)
{
    (void)pool;
    return bl_kv_rounds(argument);
}

static int bl_kv_share(bl_pool *pool, void *argument)
{
    bl_kv_team team = {.kv = argument};
    bl_sim_world *world = team.kv->path.world;
    int thread[BL_KV_THREADS];
    int status = bl_path_attach(&team.kv->path, pool, &team.session);
    if (status < 0)
        return status;
    for (uint32_t i = 0; i < BL_KV_THREADS; i++)
        if ((thread[i] = bl_sim_thread(world, bl_kv_thread, &team)) < 0)
            return thread[i];
    status = bl_kv_rounds(&team);
    for (uint32_t i = 0; i < BL_KV_THREADS; i++)
        while (bl_sim_alive(world, (uint32_t)thread[i]))
            bl_nap(&pool->memory, BL_KV_THREAD_NAP_NS);
    bl_session_close(team.session);
    return status;
}

int bl_path_kv_threads(bl_sim_world *world)
{
    bl_kv kv = {.path = {.world = world, .serve = bl_blocks_serve, .server_host_count = 1,
                         .server_deaths = BL_KV_THREADS_DEATHS,
                         .server_verbs = BL_KV_THREADS_VERBS},
                .shapes = bl_kv_full_shapes, .shape_keys = BL_KV_SHAPE_KEYS};
    for (uint32_t host = 0; host < 3; host++)
        bl_path_client(&kv.path, host, bl_kv_share);
    if (bl_sim_below(world, 2))
        bl_sim_kill_after(world, kv.path.client[0], 1 + bl_sim_below(world, BL_KV_SERVER_VERBS));
    return bl_path_run(&kv.path);
}

/* ---- kv_full: the same with blocks that fill their space. */

int bl_path_kv_full(bl_sim_world *world)
{
    bl_kv kv = {.path = {.world = world, .serve = bl_blocks_serve, .server_host_count = 1},
                .shapes = bl_kv_full_shapes, .shape_keys = BL_KV_CALM_KEYS, .calm = 1,
                .rounds = BL_KV_FULL_ROUNDS};
    return bl_kv_run(&kv);
}

/* After a while, return 1 if this reader is in the middle of a block. */
static int bl_kv_reads(const bl_kv *kv, const bl_pool *pool, const bl_sim_process *reader)
{
    bl_nap(&pool->memory, bl_sim_below(kv->path.world, 400));
    return reader->state == BL_SIM_READY &&
           reader->line >= pool->geometry.data_offset / BL_LINE_SIZE;
}

/* Pause the reader in the middle of a block, and kill the server of its lookup. */
static int bl_kv_stop(bl_pool *pool, void *argument)
{
    bl_kv *kv = argument;
    bl_sim_world *world = kv->path.world;
    bl_sim_process *reader = world->process[kv->path.client[0]];
    for (uint32_t stops = 0; stops < BL_KV_STOPS && bl_path_clients_alive(&kv->path);) {
        if (!bl_kv_reads(kv, pool, reader))
            continue;
        reader->wake_ns = world->now_ns + BL_KV_STOP_NS;
        bl_sim_kill(world, kv->path.server_process);
        bl_nap(&pool->memory, BL_KV_STOPS_NAP_NS);
        stops++;
    }
    return 0;
}

/* ---- kv_stops: a reader is paused with a block half copied, while another server reassigns the
 * block's space: only the epoch reveals that, because there are no checksums. */

int bl_path_kv_stops(bl_sim_world *world)
{
    bl_kv kv = {.path = {.world = world, .serve = bl_blocks_serve, .server_host_count = 1},
                .shape_keys = BL_KV_STOPS_KEYS, .bare = 1, .rounds = BL_KV_STOPS_ROUNDS};
    bl_path_spawn(&kv.path, 3, bl_kv_stop);
    return bl_kv_run(&kv);
}

/* Return 1 if a session of this host has this state. */
static int bl_kv_has(const bl_server *server, uint32_t host, uint32_t state)
{
    for (uint32_t i = 0; server && i < server->pool->geometry.lane_count; i++)
        if (server->lanes[i].host == host && server->lanes[i].state == state)
            return 1;
    return 0;
}

/* Pause the reader in the middle of a block, with its heartbeat thread. The heartbeat of the reader
 * on the server's host is paused, too. */
static int bl_kv_silence(bl_pool *pool, void *argument)
{
    bl_kv *kv = argument;
    bl_sim_world *world = kv->path.world;
    bl_sim_process *reader = world->process[kv->path.client[1]];
    world->process[kv->path.client[0]]->faint = 1;
    uint32_t stops = 0, noticed = 0;
    while (stops < BL_KV_SILENCES && bl_path_clients_alive(&kv->path)) {
        if (bl_kv_has(kv->path.server, 0, BL_SESSION_SUSPECT))
            return -EEXIST; /* its liveness lock proves that it is alive */
        if (!bl_kv_reads(kv, pool, reader))
            continue;
        stops++;
        reader->faint = 1;
        reader->wake_ns = world->now_ns + BL_KV_SILENCE_NS;
        bl_nap(&pool->memory, BL_KV_SILENCE_NS - BL_KV_LOST_NS);
        noticed += !bl_kv_has(kv->path.server, 1, BL_SESSION_LIVE);
        bl_nap(&pool->memory, BL_KV_LOST_NS);
        reader->faint = 0;
    }
    return stops == BL_KV_SILENCES && !noticed ? -ENODATA : 0;
}

/* ---- kv_silent: a reader that was considered dead, and lost its pins, continues with a block
 * whose number and space were reassigned: only its second look at the entry reveals that. A reader
 * on the server's host is silent, too, but is not considered dead. */

int bl_path_kv_silent(bl_sim_world *world)
{
    bl_kv kv = {.path = {.world = world, .serve = bl_blocks_serve, .server_host_count = 1,
                         .timeout_ns = BL_KV_STOPS_NAP_NS, .bears_timeouts = 1,
                         .heartbeat_lost_ns = BL_KV_LOST_NS},
                .shape_keys = BL_KV_STOPS_KEYS, .bare = 1, .rounds = BL_KV_STOPS_ROUNDS};
    bl_path_spawn(&kv.path, 3, bl_kv_silence);
    return bl_kv_run(&kv);
}

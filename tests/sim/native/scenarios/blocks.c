/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Scenarios of the block index: blocks are reserved, written, committed, looked up, read on other
 * hosts, evicted and removed, while servers die and others take over.
 *
 * The scenarios check that a read returns the bytes of its key and generation, or is a miss; that a
 * block whose commit was answered is found again, unless it may be evicted; that a block whose
 * removal was answered is never found again, by any server, and that a removal takes one call and
 * ends no grant; and that no space is granted while a process may still write to it.
 */
#include <errno.h>

#include "format/payload.h"
#include "index/state.h"
#include "pool/message.h"
#include "rpc/session_state.h"
#include "sim/native/scenarios/blocks.h"
#include "sim/native/scenarios/paths.h"
#include "sim/native/scenarios/scenarios.h"

uint32_t bl_blocks_length(uint64_t key)
{
    return (1 + key % BL_BLOCKS_LINES_MAX) * BL_LINE_SIZE;
}

/* Return the size to reserve: a wide block has unused space after its payload. */
static uint32_t bl_blocks_room(const bl_blocks *blocks, uint64_t key)
{
    return blocks->wide ? (1 + key % 2) * BL_STRIPE_SIZE : bl_blocks_length(key);
}

void bl_blocks_fill(uint8_t *payload, uint64_t key, uint64_t generation)
{
    uint64_t word = key * 0x9e3779b97f4a7c15u ^ generation * 0xbf58476d1ce4e5b9u;
    for (uint32_t i = 0; i < bl_blocks_length(key); i += sizeof word) {
        word = word * 0xda942042e4dd58b5u + i;
        memcpy(payload + i, &word, sizeof word);
    }
}

void bl_blocks_dawdle(bl_blocks_client *client)
{
    bl_sim_world *world = client->blocks->path.world;
    if (bl_sim_below(world, 4) == 0)
        bl_nap(&client->pool->memory, bl_sim_below(world, BL_BLOCKS_DAWDLE_NS));
}

/* ---- Writers. */

uint8_t *bl_blocks_writer(bl_blocks_client *client, const bl_block_record *record)
{
    uint64_t start = client->pool->geometry.data_offset;
    return &client->blocks->writer[(record->offset - start) / BL_PAGE_SIZE];
}

int bl_blocks_claim(bl_blocks_client *client, const bl_block_record *record)
{
    bl_sim_world *world = client->blocks->path.world;
    uint8_t *writer = bl_blocks_writer(client, record);
    if (*writer && !bl_sim_gone(world->process[*writer - 1]))
        return -EBADMSG;
    if (bl_sim_underway(world, record->offset, BL_PAGE_SIZE))
        return -EBADMSG;
    *writer = client->self;
    return 0;
}

/* Write a granted block, and commit or abort it. */
static int bl_blocks_write(bl_blocks_client *client, uint64_t key, const bl_block_record *record)
{
    bl_blocks *blocks = client->blocks;
    uint8_t payload[BL_BLOCKS_LINES_MAX * BL_LINE_SIZE];
    bl_commit commit = {.key = {key, key}, .generation = record->generation,
                        .block = record->block};
    int32_t committed = 0;
    uint32_t removals = blocks->removals[key] - blocks->removing[key];
    uint64_t nonce = client->session->nonce;
    int status = bl_blocks_claim(client, record);
    if (status < 0)
        return status;
    bl_blocks_fill(payload, key, record->generation);
    bl_blocks_dawdle(client);
    bl_stream(&client->pool->memory, record->offset, payload, bl_blocks_length(key));
    bl_fence_store(&client->pool->memory); /* the payload is in memory before the commit */
    *bl_blocks_writer(client, record) = 0;
    if (bl_sim_below(blocks->path.world, 8) == 0) {
        int64_t count = bl_abort_blocks(client->session, &commit, 1, BL_PATH_TIMEOUT_NS);
        return count < 0 ? bl_path_bear(&blocks->path, (int)count) : 0;
    }
    status = bl_commit_blocks(client->session, &commit, 1, &committed, BL_PATH_TIMEOUT_NS);
    if (status < 0)
        return bl_path_bear(&blocks->path, status);
    if (committed < 0) /* only the end of its session ends a grant, not a removal */
        return committed == -BL_ERROR_NO_GRANT && client->session->nonce != nonce ? 0 : -EBADMSG;
    if (removals == blocks->removals[key]) /* no removal began meanwhile */
        blocks->committed[key] = record->generation;
    return 0;
}

int bl_blocks_put(bl_blocks_client *client, uint64_t key)
{
    const uint64_t keys[2] = {key, key};
    bl_block_request what = {.fingerprint = BL_BLOCKS_FINGERPRINT,
                             .length = bl_blocks_room(client->blocks, key)};
    bl_block_record record;
    int status = bl_reserve(client->session, keys, 1, &what, &record, BL_PATH_TIMEOUT_NS);
    if (status < 0)
        return bl_path_bear(&client->blocks->path, status);
    return record.state == BL_BLOCK_GRANTED ? bl_blocks_write(client, key, &record) : 0;
}

/* ---- Readers. */

/* Return 1 if the copied block's entry still matches the lookup. The epoch is checked last: while
 * it is unchanged, its half of the table is valid. */
static int bl_blocks_same(bl_blocks_client *client, uint64_t key, const bl_block_record *record,
                          uint64_t epoch)
{
    const bl_memory *memory = &client->pool->memory;
    uint32_t half = epoch % BL_HALF_COUNT;
    uint64_t offset = bl_entry_offset(&client->pool->geometry, record->block, half);
    bl_entry entry;
    bl_epoch_line now;
    bl_refetch(memory, offset, BL_LINE_SIZE);
    bl_load_line(memory, offset, &entry); /* SYNC entry */
    bl_epoch_read(client->pool, &now);
    return bl_verify(memory, now.epoch == epoch && bl_table_whole(&entry, record->block) &&
                                 entry.state == BL_ENTRY_COMMITTED && entry.key[0] == key &&
                                 entry.generation == record->generation);
}

int bl_blocks_copy(bl_blocks_client *client, uint64_t key, const bl_block_record *record,
                   void *payload)
{
    const bl_memory *memory = &client->pool->memory;
    uint32_t length = bl_blocks_length(key);
    bl_session_stat stat;
    bl_session_describe(client->session, &stat);
    bl_blocks_dawdle(client);
    bl_refetch(memory, record->offset, length);
    bl_fetch(memory, record->offset, payload, length);
    if (!bl_blocks_same(client, key, record, stat.epoch))
        return 0;
    bl_confirm(memory, bl_entry_offset(&client->pool->geometry, record->block,
                                       stat.epoch % BL_HALF_COUNT),
               record->offset, length);
    bl_epoch_confirm(client->pool, record->offset, length);
    return 1;
}

int bl_blocks_read(bl_blocks_client *client, uint64_t key, const bl_block_record *record)
{
    uint8_t payload[BL_BLOCKS_LINES_MAX * BL_LINE_SIZE], right[sizeof payload];
    if (record->length != bl_blocks_room(client->blocks, key))
        return -EBADMSG;
    if (!bl_blocks_copy(client, key, record, payload))
        return 0;
    bl_blocks_fill(right, key, record->generation);
    if (memcmp(payload, right, bl_blocks_length(key)) != 0)
        return -EBADMSG;
    client->blocks->path.world->stat.results++;
    return 1;
}

/* Return the generation that a lookup of the key must find, or 0. */
static uint64_t bl_blocks_due(const bl_blocks *blocks, uint64_t key)
{
    return blocks->loses || blocks->removing[key] ? 0 : blocks->committed[key];
}

int bl_blocks_get(bl_blocks_client *client, uint64_t first, uint32_t count, uint32_t flags)
{
    bl_blocks *blocks = client->blocks;
    uint64_t keys[2 * BL_BLOCKS_CHAIN] = {0};
    bl_block_record records[BL_BLOCKS_CHAIN];
    uint64_t due[BL_BLOCKS_CHAIN], removed[BL_BLOCKS_CHAIN], removed_in[BL_BLOCKS_CHAIN];
    uint8_t buried[BL_BLOCKS_CHAIN];
    bl_session_stat stat;
    uint32_t state;
    for (uint32_t i = 0; i < count; i++) {
        keys[2 * i] = keys[2 * i + 1] = first + i;
        due[i] = bl_blocks_due(blocks, first + i);
        removed[i] = blocks->removed[first + i];
        removed_in[i] = blocks->removed_in[first + i];
        buried[i] = blocks->buried[first + i];
    }
    int64_t hits = bl_lookup(client->session, keys, count, flags, records, &state,
                             BL_PATH_TIMEOUT_NS);
    if (hits < 0)
        return bl_path_bear(&blocks->path, (int)hits);
    if (hits < count && due[hits] && due[hits] == bl_blocks_due(blocks, first + hits))
        return -ENODATA;
    if (hits < count && state == BL_BLOCK_BELOW && buried[hits])
        return -EBADMSG; /* the tier may still have the removed block */
    int status = 0;
    bl_session_describe(client->session, &stat);
    for (uint32_t i = 0; i < hits && status >= 0; i++) {
        /* A deposed server that did not detect it may still return it; then the read is a miss. */
        int gone = removed[i] && records[i].generation == removed[i];
        if (gone && stat.epoch >= removed_in[i])
            return -EBADMSG;
        status = bl_blocks_read(client, first + i, &records[i]);
        if (gone && status > 0)
            return -EBADMSG;
    }
    if (status >= 0 && hits > 0 && flags & BL_LOOKUP_PIN) {
        hits = bl_release_blocks(client->session, records, (uint32_t)hits, BL_PATH_TIMEOUT_NS);
        status = hits < 0 ? bl_path_bear(&blocks->path, (int)hits) : 0;
    }
    return status < 0 ? status : 0;
}

static int bl_blocks_remove(bl_blocks_client *client, uint64_t key)
{
    const uint64_t keys[2] = {key, key};
    bl_blocks *blocks = client->blocks;
    uint64_t generation = blocks->committed[key];
    bl_session_stat before, after;
    blocks->removals[key]++;
    blocks->removing[key]++;
    blocks->committed[key] = 0;
    bl_session_describe(client->session, &before);
    int64_t count = bl_remove_blocks(client->session, keys, 1, BL_PATH_TIMEOUT_NS);
    bl_session_describe(client->session, &after);
    blocks->removing[key]--;
    if (count < 0)
        return bl_path_bear(&blocks->path, (int)count);
    if (after.nonce == before.nonce && after.call_count != before.call_count + 1)
        return -EBADMSG; /* there is no disk to wait for */
    blocks->buried[key] = 1;
    if (generation) {
        blocks->removed[key] = generation;
        blocks->removed_in[key] = after.epoch;
    }
    return 0;
}

/* ---- Processes. */

/* Return 1 while servers are still to die. */
static int bl_blocks_busy(const bl_blocks *blocks, uint32_t round)
{
    int deaths = blocks->path.server_deaths > 0 || blocks->path.doomed;
    return round < (deaths ? BL_BLOCKS_ROUNDS_MAX : BL_BLOCKS_ROUNDS);
}

int bl_blocks_round(bl_blocks_client *client)
{
    const bl_blocks *blocks = client->blocks;
    bl_sim_world *world = blocks->path.world;
    uint64_t key = bl_sim_below(world, blocks->key_count);
    uint32_t count = 1 + (uint32_t)bl_sim_below(world, BL_BLOCKS_CHAIN);
    if (count > blocks->key_count - key)
        count = blocks->key_count - (uint32_t)key;
    uint64_t what = bl_sim_below(world, 16);
    if (what <= 1)
        return bl_blocks_remove(client, key);
    if (what < 8)
        return bl_blocks_put(client, key);
    return bl_blocks_get(client, key, count, what & BL_LOOKUP_PIN);
}

int bl_blocks_work(bl_pool *pool, void *argument)
{
    bl_blocks *blocks = argument;
    bl_sim_world *world = blocks->path.world;
    bl_blocks_client client = {.blocks = blocks, .pool = pool, .self = bl_sim_self(world) + 1};
    int status = bl_path_attach(&blocks->path, pool, &client.session);
    if (status < 0)
        return status;
    for (uint32_t i = 0; status == 0 && bl_blocks_busy(blocks, i); i++)
        status = bl_blocks_round(&client);
    bl_session_close(client.session);
    return status;
}

/* Check the counts of a server that stops cleanly: every grant is counted once, and all space is
 * used by a block, held, or free. Returns 0 or -EBADMSG. */
static int bl_blocks_sums(const bl_index *index)
{
    bl_index_stat stat;
    uint64_t grants = 0, used = 0, held = 0;
    bl_index_describe(index, &stat);
    for (uint32_t i = 0; i < index->pool->geometry.block_count_max; i++) {
        const bl_block *block = &index->blocks[i];
        uint64_t size = bl_block_size(bl_stored_size(block->length, block->chunk_size));
        if (i >= index->fresh_number || block->state == BL_NUMBER_FREE ||
            block->state == BL_NUMBER_REMOVED || block->state == BL_NUMBER_TIER)
            continue;
        grants += block->state == BL_NUMBER_GRANTED;
        held += block->state == BL_NUMBER_HELD ? size : 0;
        used += block->state == BL_NUMBER_HELD ? 0 : size;
    }
    if (index->server->inherited_count > 0) /* space is held for these sessions, too */
        held = stat.held_bytes;
    int same = stat.grant_count == grants && stat.used_bytes == used && stat.held_bytes == held;
    return same ? 0 : -EBADMSG;
}

/* Attach a remote store that may have any key and never executes a removal. */
static int bl_blocks_below(bl_path *path, bl_index *index)
{
    (void)path;
    static const uint64_t id[8] = {0, 1};
    int status = bl_lower_attach(index, 0, 0, 1u << 1, 1);
    bl_lower_name_tiers(index, id);
    return status;
}

int bl_blocks_serve(bl_pool *pool, void *argument)
{
    bl_path *path = argument;
    bl_server *server;
    bl_index *index;
    int status = bl_server_create(pool, "", pool->memory.host, &server);
    if (status < 0)
        return status;
    bl_server_heartbeat_lost(server, path->heartbeat_lost_ns);
    status = bl_index_create(server, BL_EVICT_LRU, &index);
    if (status == 0 && path->prepare)
        status = path->prepare(path, index);
    if (status == 0) {
        status = bl_index_serve(index);
        path->world->stat.takeovers += status == 0;
        bl_server_handle_method(server, BL_PATH_METHOD, bl_path_handle, path);
        path->server = server;
        bl_path_doom(path);
        if (status == 0)
            status = bl_path_served(server, bl_server_run(server));
        if (status == 0)
            status = bl_blocks_sums(index);
        if (status == -BL_ERROR_SERVER_ALIVE)
            status = 0; /* not proven gone on this host: the keeper tries the other one */
        path->server = NULL;
        bl_index_destroy(index);
    }
    bl_server_destroy(server);
    return status;
}

/* ---- index: more keys than lines in the table, on three hosts. */

int bl_path_index(bl_sim_world *world)
{
    bl_blocks blocks = {.path = {.world = world, .serve = bl_blocks_serve,
                                 .server_host_count = 1},
                        .key_count = BL_BLOCKS_KEY_COUNT_MAX, .loses = 1};
    for (uint32_t host = 0; host < 3; host++)
        bl_path_client(&blocks.path, host, bl_blocks_work);
    return bl_path_run(&blocks.path);
}

/* ---- recovery: servers die at any verb, and one client does. */

int bl_path_recovery(bl_sim_world *world)
{
    int loses = (int)bl_sim_below(world, 2);
    bl_blocks blocks = {.path = {.world = world, .serve = bl_blocks_serve,
                                 .server_host_count = 1 + (uint32_t)bl_sim_below(world, 2),
                                 .server_deaths = 3, .server_verbs = BL_BLOCKS_SERVER_VERBS},
                        .key_count = loses ? BL_BLOCKS_KEY_COUNT_MAX : 8, .loses = loses};
    for (uint32_t host = 0; host < 3; host++)
        bl_path_client(&blocks.path, host, bl_blocks_work);
    bl_sim_kill_after(world, blocks.path.client[0], 1 + bl_sim_below(world, 8000));
    return bl_path_run(&blocks.path);
}

/* ---- removal: servers with a remote store die at any verb; their successors must have the
 * removals. */

int bl_path_removal(bl_sim_world *world)
{
    bl_blocks blocks = {.path = {.world = world, .serve = bl_blocks_serve,
                                 .prepare = bl_blocks_below, .server_host_count = 2,
                                 .server_deaths = 3,
                                 .server_verbs = BL_BLOCKS_SERVER_VERBS},
                        .key_count = 4};
    for (uint32_t host = 0; host < 3; host++)
        bl_path_client(&blocks.path, host, bl_blocks_work);
    return bl_path_run(&blocks.path);
}

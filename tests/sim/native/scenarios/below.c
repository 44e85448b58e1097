/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * A scenario of removals with a disk and a remote store. Clients put, get and remove a few keys;
 * servers die, and a server may lack a tier, or have the tiers under other numbers. The tiers'
 * service, which is a client here, saves blocks, onboards them, and executes removals, many of
 * which fail at first; it reports late, and sometimes it loses its session and thus the work that
 * it has taken.
 *
 * Each put has its own version, which is encoded in its bytes. The scenario checks that after a
 * removal was answered, no new get returns a version stored before the removal began, in whatever
 * tier that version still is; that a removal is answered only after the disk has tried it; that a
 * save in place of the removed block ends the removal; that the server's tombstones are consistent;
 * and that in the end the tiers have executed all removals.
 */
#include <errno.h>

#include "api/index.h"
#include "index/state.h"
#include "rpc/session_state.h"
#include "sim/native/scenarios/blocks.h"
#include "sim/native/scenarios/kv.h"
#include "sim/native/scenarios/paths.h"
#include "sim/native/scenarios/scenarios.h"

enum {
    BL_BELOW_KEYS = 3,           /* their tombstones for two tiers use a quarter of the table */
    BL_BELOW_ROUNDS = 12,
    BL_BELOW_VERSIONS = 1024,
    BL_BELOW_LOOKS = 3,         /* retries for a key that a tier may have */
    BL_BELOW_TAKEN = 6,         /* pieces of work that the service takes at a time */
    BL_BELOW_DEATHS = 2,
    BL_BELOW_CLIENTS = 2,
    BL_BELOW_REPORT = BL_LOWER_KINDS, /* a kind of work: report the result of a removal */
    BL_BELOW_NAP_NS = 40 * 1000,
    BL_BELOW_LOOKS_MAX = 4000,  /* polls at the end, until all removals are executed */
    BL_BELOW_STEPS = 20000000   /* clients poll while they wait for tiers */
};

#define BL_BELOW_PATIENCE_NS 900000000ull /* shorter than a removal waits for a disk */

enum bl_below_tier { BL_BELOW_DISK, BL_BELOW_REMOTE, BL_BELOW_COUNT };

enum bl_below_version { BL_VERSION_BEGUN, BL_VERSION_STORED, BL_VERSION_DEAD };

/* A piece of work of the service. */
typedef struct bl_below_work {
    bl_lower_record record;
    bl_lower_note note;         /* the contents of a report */
    uint32_t kind;              /* bl_lower_kind, or BL_BELOW_REPORT */
} bl_below_work;

typedef struct bl_below {
    bl_blocks blocks;           /* its path is that of the scenario */
    uint32_t version_count;
    uint32_t key_of[BL_BELOW_VERSIONS];
    uint8_t state[BL_BELOW_VERSIONS]; /* bl_below_version */
    uint32_t since[BL_BELOW_VERSIONS]; /* removals of its key before the put; UINT32_MAX: one was
                                        * in progress */
    uint32_t there[BL_BELOW_COUNT][BL_BELOW_KEYS]; /* the version in each tier, or 0 */
    uint32_t tries[BL_BELOW_KEYS]; /* attempts of the disk to remove or replace a key */
    uint32_t removals[BL_BELOW_KEYS]; /* removals begun */
    uint32_t removing[BL_BELOW_KEYS]; /* removals not answered yet */
    uint32_t calm;              /* 1: no removal fails */
    /* the last started server: */
    bl_index *index;
    uint64_t token;
    uint32_t number[BL_BELOW_COUNT]; /* number of each tier in the server; 0: none */
} bl_below;

typedef struct bl_below_service {
    bl_blocks_client client;
    uint64_t token;
    uint32_t number[BL_BELOW_COUNT];
    bl_below_work taken[BL_BELOW_TAKEN];
    uint32_t taken_count;
    uint32_t fresh;             /* how many of them the last step has taken */
} bl_below_service;

static bl_below *bl_below_of(const bl_blocks_client *client)
{
    return (bl_below *)client->blocks;
}

/* ---- Servers. */

/* Attach a disk, a store, both or none, under random numbers. */
static int bl_below_attach(bl_path *path, bl_index *index)
{
    bl_below *tiers = (bl_below *)path;
    uint64_t id[8] = {0}, random = bl_sim_random(path->world);
    uint32_t disk = 1 + (random & 1), remote = 3 - disk;
    if (!tiers->calm && (random >> 8) % 4 == 0) {
        disk *= random >> 16 & 1;
        remote *= disk == 0 && random >> 24 & 1;
    }
    tiers->number[BL_BELOW_DISK] = disk, tiers->number[BL_BELOW_REMOTE] = remote;
    for (uint32_t tier = 0; tier < BL_BELOW_COUNT; tier++)
        if (tiers->number[tier] != 0)
            id[tiers->number[tier]] = 1 + tier;
    uint8_t unknown = remote ? (uint8_t)(1u << remote) : 0;
    int status = bl_lower_attach(index, BL_BELOW_KEYS, 0, unknown, ++tiers->token);
    bl_lower_name_tiers(index, id);
    tiers->index = index;
    return status;
}

/* Return 1 if the tombstones match their count, with at most one for each key and tier, and have
 * keys of the scenario. This must be true at every verb of the server. */
static int bl_below_sane(const bl_index *index)
{
    uint32_t count = 0;
    for (uint32_t i = 0; index != NULL && i < index->pool->geometry.block_count_max; i++) {
        const bl_block *tombstone = &index->blocks[i];
        if (tombstone->state != BL_NUMBER_REMOVED)
            continue;
        count++;
        if (tombstone->key[0] != tombstone->key[1])
            return 0; /* the line was torn */
        for (uint32_t k = 0; k < i; k++)
            if (index->blocks[k].state == BL_NUMBER_REMOVED && tombstone->lane != 0 &&
                index->blocks[k].lane == tombstone->lane &&
                index->blocks[k].key[0] == tombstone->key[0])
                return 0;
    }
    return index == NULL ||
           (count == bl_tombstones_count(index) && count <= bl_tombstones_max(index));
}

/* ---- Blocks and their versions. */

/* Write a granted block and commit it. Returns the commit's status, or an error. */
static int bl_below_write(bl_blocks_client *client, uint64_t key, const bl_block_record *record,
                          uint32_t version)
{
    uint64_t payload[BL_BLOCKS_LINES_MAX * BL_LINE_SIZE / sizeof(uint64_t)];
    bl_commit commit = {.key = {key, key}, .generation = record->generation,
                        .block = record->block};
    int32_t committed = 0;
    int status = bl_blocks_claim(client, record);
    if (status < 0)
        return status;
    bl_kv_fill(payload, key, version, bl_blocks_length(key));
    bl_blocks_dawdle(client);
    bl_stream(&client->pool->memory, record->offset, payload, bl_blocks_length(key));
    bl_fence_store(&client->pool->memory); /* the payload is in memory before the commit */
    *bl_blocks_writer(client, record) = 0;
    status = bl_commit_blocks(client->session, &commit, 1, &committed, BL_PATH_TIMEOUT_NS);
    return status < 0 ? status : committed;
}

/* Read a block. Returns its version; 0 if it was removed meanwhile; or -EBADMSG. */
static int bl_below_read(bl_blocks_client *client, uint64_t key, const bl_block_record *record)
{
    uint64_t right[BL_BLOCKS_LINES_MAX * BL_LINE_SIZE / sizeof(uint64_t)], payload[64];
    const bl_below *tiers = bl_below_of(client);
    uint32_t length = bl_blocks_length(key);
    if (record->length != length)
        return -EBADMSG;
    if (!bl_blocks_copy(client, key, record, payload))
        return 0;
    if (payload[0] == 0 || payload[0] > tiers->version_count)
        return -EBADMSG;
    bl_kv_fill(right, key, payload[0], length);
    if (memcmp(right, payload, length) != 0 || tiers->key_of[payload[0]] != key)
        return -EBADMSG;
    return (int)payload[0];
}

/* Reserve a key and write it. */
static int bl_below_store(bl_blocks_client *client, uint64_t key, uint32_t flags, uint32_t version)
{
    const uint64_t keys[2] = {key, key};
    bl_block_request what = {.fingerprint = BL_BLOCKS_FINGERPRINT,
                             .length = bl_blocks_length(key), .flags = flags};
    bl_block_record record;
    int status = bl_reserve(client->session, keys, 1, &what, &record, BL_PATH_TIMEOUT_NS);
    if (status < 0)
        return status;
    return record.state == BL_BLOCK_GRANTED ? bl_below_write(client, key, &record, version)
                                            : (int)record.state;
}

/* ---- Clients. */

static int bl_below_put(bl_blocks_client *client, uint64_t key)
{
    bl_below *tiers = bl_below_of(client);
    uint32_t version = ++tiers->version_count;
    uint64_t nonce = client->session->nonce;
    if (version >= BL_BELOW_VERSIONS)
        return -ENOSPC;
    tiers->key_of[version] = (uint32_t)key;
    tiers->since[version] = tiers->removing[key] ? UINT32_MAX : tiers->removals[key];
    int status = bl_below_store(client, key, 0, version);
    tiers->state[version] = BL_VERSION_STORED;
    if (status == -BL_ERROR_NO_GRANT) /* a removal must not end a client's grant */
        return client->session->nonce != nonce ? 0 : -EBADMSG;
    return status < 0 ? bl_path_bear(&tiers->blocks.path, status) : 0;
}

static int bl_below_get(bl_blocks_client *client, uint64_t key)
{
    const bl_below *tiers = bl_below_of(client);
    const uint64_t keys[2] = {key, key};
    const bl_path *path = &tiers->blocks.path;
    for (uint32_t looks = 0; looks < BL_BELOW_LOOKS; looks++) {
        uint8_t state[sizeof tiers->state];
        bl_block_record record;
        uint32_t found;
        memcpy(state, tiers->state, sizeof state);
        int64_t hits = bl_lookup(client->session, keys, 1, 0, &record, &found, BL_PATH_TIMEOUT_NS);
        if (hits < 0)
            return bl_path_bear(path, (int)hits);
        if (hits == 1) {
            int version = bl_below_read(client, key, &record);
            path->world->stat.results += version > 0;
            return version > 0 && state[version] == BL_VERSION_DEAD ? -EBADMSG
                                                                    : (version < 0 ? version : 0);
        }
        if (found == BL_BLOCK_MISS)
            return 0;
        uint32_t kind = bl_sim_below(path->world, 2) ? BL_LOWER_ONBOARD : BL_LOWER_PREFETCH;
        hits = bl_onboard(client->session, keys, 1, kind, BL_PATH_TIMEOUT_NS);
        if (hits < 0)
            return bl_path_bear(path, (int)hits);
        bl_nap(&client->pool->memory, bl_sim_below(path->world, 8 * BL_BELOW_NAP_NS));
    }
    return 0;
}

static int bl_below_remove(bl_blocks_client *client, uint64_t key)
{
    bl_below *tiers = bl_below_of(client);
    const bl_path *path = &tiers->blocks.path;
    const uint64_t keys[2] = {key, key};
    uint8_t before[sizeof tiers->state];
    uint32_t tries = tiers->tries[key], disk = tiers->number[BL_BELOW_DISK];
    uint64_t nonce = client->session->nonce, begun_ns = path->world->now_ns, token = tiers->token;
    memcpy(before, tiers->state, sizeof before);
    tiers->removals[key]++, tiers->removing[key]++;
    int64_t count = bl_remove_blocks(client->session, keys, 1, BL_PATH_TIMEOUT_NS);
    tiers->removing[key]--;
    if (count < 0)
        return bl_path_bear(path, (int)count);
    for (uint32_t version = 1; version <= tiers->version_count; version++)
        if (tiers->key_of[version] == key && before[version] == BL_VERSION_STORED)
            tiers->state[version] = BL_VERSION_DEAD;
    int waited = tiers->tries[key] != tries ||
                 path->world->now_ns - begun_ns >= BL_BELOW_PATIENCE_NS;
    if (disk && !waited && client->session->nonce == nonce && tiers->token == token)
        return -EBADMSG;
    return 0;
}

static int bl_below_work_on(bl_pool *pool, void *argument)
{
    bl_below *tiers = argument;
    bl_sim_world *world = tiers->blocks.path.world;
    bl_blocks_client client = {.blocks = &tiers->blocks, .pool = pool,
                               .self = (uint8_t)(bl_sim_self(world) + 1)};
    int status = bl_path_attach(&tiers->blocks.path, pool, &client.session);
    if (status < 0)
        return status;
    for (uint32_t i = 0; status == 0 && i < BL_BELOW_ROUNDS; i++) {
        uint64_t key = bl_sim_below(world, BL_BELOW_KEYS), what = bl_sim_below(world, 8);
        if (what < 4)
            status = bl_below_put(&client, key);
        if (status == 0 && what % 4 == 1) /* perhaps the block of the last put */
            status = bl_below_remove(&client, key);
        if (status == 0 && what != 0)
            status = bl_below_get(&client, key);
        if (status == 0 && !bl_below_sane(tiers->index))
            status = -EBADMSG;
    }
    bl_session_close(client.session);
    return status;
}

/* ---- The service. */

/* Return the tier for a bit of the service's server. */
static uint32_t bl_below_at(const bl_below_service *service, uint8_t bits)
{
    uint32_t tier = 0;
    while (tier < BL_BELOW_COUNT &&
           (service->number[tier] == 0 || !(bits >> service->number[tier] & 1)))
        tier++;
    return tier;
}

static int bl_below_report(const bl_below_service *service, bl_lower_note note)
{
    int64_t status = bl_lower_report(service->client.session, service->token, &note, 1,
                                     BL_PATH_TIMEOUT_NS);
    return status < 0 ? (int)status : 0;
}

static bl_lower_note bl_below_note(uint64_t key)
{
    return (bl_lower_note){.key = {key, key}, .block = BL_LOWER_NO_BLOCK};
}

/* Start with the current server, and drop work that was taken from another one. */
static int bl_below_begin(bl_below_service *service, bl_pool *pool)
{
    bl_below *tiers = bl_below_of(&service->client);
    service->taken_count = 0;
    int status = bl_path_attach(&tiers->blocks.path, pool, &service->client.session);
    bl_index *index = tiers->index;
    service->token = tiers->token;
    memcpy(service->number, tiers->number, sizeof service->number);
    for (uint64_t key = 0; status == 0 && key < BL_BELOW_KEYS; key++) {
        bl_lower_note note = bl_below_note(key);
        note.stored = (uint8_t)(1u << service->number[BL_BELOW_DISK]);
        if (service->number[BL_BELOW_DISK] != 0 && tiers->there[BL_BELOW_DISK][key] != 0)
            status = bl_below_report(service, note);
    }
    if (status == 0 && service->token == tiers->token)
        bl_lower_reported(index);
    return status;
}

/* Save a block in some tiers, in place of a removed one, and report it. */
static int bl_below_save(bl_below_service *service, const bl_lower_record *record)
{
    bl_below *tiers = bl_below_of(&service->client);
    uint64_t key = record->key[0];
    bl_block_record block = {.offset = record->offset, .generation = record->generation,
                             .block = record->block, .length = record->length};
    bl_lower_note note = bl_below_note(key);
    int version = bl_below_read(&service->client, key, &block);
    if (version < 0)
        return version;
    for (uint32_t tier = 0; version > 0 && tier < BL_BELOW_COUNT; tier++)
        if (service->number[tier] != 0 && bl_sim_below(tiers->blocks.path.world, 3)) {
            note.stored |= (uint8_t)(1u << service->number[tier]);
            tiers->there[tier][key] = (uint32_t)version;
            tiers->tries[key] += tier == BL_BELOW_DISK;
        }
    uint8_t replaced = note.stored & record->stale;
    note.generation = record->generation;
    note.block = record->block;
    int status = bl_below_report(service, note);
    if (status < 0 || replaced == 0)
        return status;
    note.block = BL_LOWER_NO_BLOCK;
    note.stored = replaced;
    note.removal = BL_REMOVAL_REPLACED;
    status = bl_below_report(service, note);
    const uint64_t keys[2] = {key, key};
    uint8_t left = 0;
    if (status == 0)
        status = bl_removing(service->client.session, keys, 1, &left, BL_PATH_TIMEOUT_NS);
    int newer = tiers->since[version] == tiers->removals[key] && service->token == tiers->token;
    return status == 0 && left & replaced && newer ? -EBADMSG : status;
}

/* Execute a removal, or fail; the report is queued as separate work. */
static int bl_below_execute(bl_below_service *service, const bl_lower_record *record)
{
    bl_below *tiers = bl_below_of(&service->client);
    bl_below_work *report = &service->taken[service->taken_count++];
    uint64_t key = record->key[0];
    uint32_t tier = bl_below_at(service, record->tiers);
    bl_lower_note note = bl_below_note(key);
    if (tier == BL_BELOW_COUNT)
        return -EBADMSG; /* the server does not have this tier */
    note.generation = record->generation;
    note.block = record->block;
    note.removal = BL_REMOVAL_FAILED;
    if (tiers->calm || bl_sim_below(tiers->blocks.path.world, 3) == 0) {
        tiers->there[tier][key] = 0;
        note.removal = BL_REMOVAL_DONE;
    }
    tiers->tries[key] += tier == BL_BELOW_DISK;
    *report = (bl_below_work){.note = note, .kind = BL_BELOW_REPORT};
    return 0;
}

/* Onboard a key from the first tier that has it, unless that block was removed. */
static int bl_below_bring(bl_below_service *service, const bl_lower_record *record)
{
    const bl_below *tiers = bl_below_of(&service->client);
    uint64_t key = record->key[0];
    bl_lower_note note = bl_below_note(key);
    note.ended = 1;
    for (uint32_t tier = 0; tier < BL_BELOW_COUNT && note.stored == 0; tier++) {
        uint8_t bit = service->number[tier] ? (uint8_t)(1u << service->number[tier]) : 0;
        if (tiers->there[tier][key] == 0 || (bit & ~record->stale) == 0)
            continue;
        note.stored = bit;
        int status = bl_below_store(&service->client, key, BL_RESERVE_BROUGHT,
                                    tiers->there[tier][key]);
        if (status < 0 && status != -BL_ERROR_NO_GRANT)
            return status;
    }
    return bl_below_report(service, note);
}

/* Do one piece of the taken work. */
static int bl_below_do(bl_below_service *service)
{
    const bl_below *tiers = bl_below_of(&service->client);
    uint32_t place = (uint32_t)bl_sim_below(tiers->blocks.path.world, service->taken_count);
    bl_below_work work = service->taken[place];
    service->taken[place] = service->taken[--service->taken_count];
    if (work.kind == BL_LOWER_OFFLOAD)
        return bl_below_save(service, &work.record);
    if (work.kind == BL_LOWER_REMOVE || work.kind == BL_LOWER_RETRY)
        return bl_below_execute(service, &work.record);
    if (work.kind == BL_BELOW_REPORT)
        return bl_below_report(service, work.note);
    return bl_below_bring(service, &work.record);
}

/* Take a piece of work, or do one. */
static int bl_below_step(bl_below_service *service)
{
    bl_sim_world *world = bl_below_of(&service->client)->blocks.path.world;
    bl_below_work *work = &service->taken[service->taken_count];
    if (service->taken_count == BL_BELOW_TAKEN ||
        (service->taken_count > 0 && bl_sim_below(world, 2)))
        return bl_below_do(service);
    work->kind = (uint32_t)bl_sim_below(world, BL_LOWER_KINDS);
    uint32_t tier = work->kind == BL_LOWER_RETRY ? 1 + (uint32_t)bl_sim_below(world, 2) : 0;
    int64_t count = bl_lower_take(service->client.session, service->token, work->kind, tier,
                                  &work->record, 1, BL_PATH_TIMEOUT_NS);
    service->taken_count += service->fresh = count > 0;
    if (count > 0 && tier != 0 && work->record.tiers != 1u << tier)
        return -EBADMSG;
    return count < 0 ? (int)count : 0;
}

/* Return 1 if all clients but the service, which is the last, have ended. */
static int bl_below_over(const bl_path *path)
{
    for (uint32_t i = 0; i + 1 < path->client_count; i++)
        if (bl_sim_alive(path->world, path->client[i]))
            return 0;
    return 1;
}

/* Return 1 if all removals are executed, after checking that no removed block is left; 0; or an
 * error. */
static int bl_below_clean(bl_below_service *service)
{
    const bl_below *tiers = bl_below_of(&service->client);
    uint64_t keys[2 * BL_BELOW_KEYS];
    uint8_t left[BL_BELOW_KEYS];
    for (uint64_t key = 0; key < BL_BELOW_KEYS; key++)
        keys[2 * key] = keys[2 * key + 1] = key;
    int status = bl_removing(service->client.session, keys, BL_BELOW_KEYS, left,
                             BL_PATH_TIMEOUT_NS);
    if (status < 0 || service->taken_count > 0 || service->token != tiers->token)
        return status;
    for (uint32_t tier = 0; tier < BL_BELOW_COUNT; tier++)
        for (uint32_t key = 0; key < BL_BELOW_KEYS; key++) {
            uint32_t version = tiers->there[tier][key];
            if (service->number[tier] == 0 || left[key] >> service->number[tier] & 1)
                return 0;
            if (version && tiers->state[version] == BL_VERSION_DEAD)
                return -EBADMSG;
        }
    return 1;
}

/* Accept the errors that any client's call may return; and the refusal of a server with which the
 * service has not started. */
static int bl_below_bear(const bl_below *tiers, const bl_below_service *service, int status)
{
    if (status == -BL_ERROR_BAD_REQUEST && service->token != tiers->token)
        return 0;
    return bl_path_bear(&tiers->blocks.path, status);
}

/* The session is new. The server hands the former one's work to another; but the call that attached
 * may have taken some for the new session. */
static void bl_below_lose(bl_below_service *service)
{
    if (service->fresh)
        service->taken[0] = service->taken[service->taken_count - 1];
    service->taken_count = service->fresh;
}

static int bl_below_serve(bl_pool *pool, void *argument)
{
    bl_below *tiers = argument;
    bl_path *path = &tiers->blocks.path;
    bl_below_service service = {.client = {.blocks = &tiers->blocks, .pool = pool,
                                           .self = (uint8_t)(bl_sim_self(path->world) + 1)}};
    bl_session **session = &service.client.session;
    int status = 0;
    for (uint32_t looks = 0; status == 0 && looks < BL_BELOW_LOOKS_MAX;) {
        uint64_t nonce = *session ? (*session)->nonce : 0;
        int leaves = !tiers->calm && bl_sim_below(path->world, 64) == 0;
        service.fresh = 0;
        if (*session && (leaves || service.token != tiers->token))
            bl_session_close(*session), *session = NULL;
        status = *session ? bl_below_step(&service) : bl_below_begin(&service, pool);
        if (*session && nonce && (*session)->nonce != nonce)
            bl_below_lose(&service);
        if (status < 0)
            status = bl_below_bear(tiers, &service, status);
        bl_nap(&pool->memory, bl_sim_below(path->world, BL_BELOW_NAP_NS));
        if (status < 0 || !bl_below_over(path))
            continue;
        tiers->calm = 1; /* also makes the next server have both tiers */
        path->server_deaths = path->doomed = 0;
        if (*session && service.token == tiers->token &&
            (service.number[BL_BELOW_DISK] == 0 || service.number[BL_BELOW_REMOTE] == 0))
            bl_sim_kill(path->world, path->server_process);
        looks++;
        int clean = *session ? bl_below_clean(&service) : 0;
        if (clean == 1)
            looks = BL_BELOW_LOOKS_MAX + 1;
        else
            status = clean < 0 ? bl_below_bear(tiers, &service, clean) : 0;
        if (looks == BL_BELOW_LOOKS_MAX)
            status = -EBUSY; /* a removal is never executed */
    }
    if (*session)
        bl_session_close(*session);
    return status;
}

/* ---- below */

int bl_path_below(bl_sim_world *world)
{
    bl_below tiers = {.blocks = {.path = {.world = world, .serve = bl_blocks_serve,
                                          .prepare = bl_below_attach, .server_host_count = 2,
                                          .server_deaths = BL_BELOW_DEATHS,
                                          .server_verbs = BL_BLOCKS_SERVER_VERBS}}};
    world->config.step_limit = BL_BELOW_STEPS;
    for (uint32_t host = 0; host < BL_BELOW_CLIENTS; host++)
        bl_path_client(&tiers.blocks.path, host, bl_below_work_on);
    bl_path_client(&tiers.blocks.path, 3, bl_below_serve);
    return bl_path_run(&tiers.blocks.path);
}

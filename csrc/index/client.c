/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * The client's calls of the block index. A batch of keys is cut into messages that fit into the
 * lane's bulk area. Replies are foreign input, too (D13).
 */
#include <errno.h>

#include "api/index.h"
#include "base/minmax.h"
#include "format/payload.h"
#include "index/client.h"
#include "rpc/session_state.h"

static const uint64_t BL_REMOVAL_WAIT_NS = 1000000000;  /* timeout for a disk to execute removals */
static const uint64_t BL_REMOVAL_NAP_NS = 50000, BL_REMOVAL_NAP_MAX_NS = 4000000;

/* Return how many items of this size, and as many records, fit into one message. */
static uint32_t bl_index_fit(const bl_session *session, size_t item_size)
{
    size_t fit = (session->pool->geometry.bulk_size - sizeof(bl_block_request)) / item_size;
    return (uint32_t)bl_min(fit, BL_CALL_KEYS_MAX);
}

/* Return the same for items no larger than a record. */
static uint32_t bl_index_batch(const bl_session *session)
{
    return bl_index_fit(session, sizeof(bl_block_record));
}

typedef struct bl_index_query {
    uint32_t method;
    uint32_t item_size;
    const void *items;
    bl_block_request head;      /* count: the items of this message */
    uint32_t record_size;       /* bytes of a record of the reply */
} bl_index_query;

/* Send one message. The reply's head goes to *reply, and its records to records; *under, if not
 * NULL, is who answered. Returns 0 or an error. */
static int bl_index_call_locked(bl_session *session, const bl_index_query *query,
                                bl_block_reply *reply, void *records, bl_attachment *under,
                                uint64_t timeout_ns)
{
    uint32_t items_size = query->head.count * query->item_size, size = 0;
    uint8_t *request = session->scratch;
    uint8_t *answer = session->scratch + session->pool->geometry.bulk_size;
    memcpy(request, &query->head, sizeof query->head);
    memcpy(request + sizeof query->head, query->items, items_size);
    bl_message message = {
        .method = query->method,
        .request = request,
        .request_size = (uint32_t)sizeof query->head + items_size,
        .reply = answer,
        .reply_capacity = session->pool->geometry.bulk_size,
        .reply_size = &size,
    };
    int status = bl_session_call_locked(session, &message, timeout_ns);
    if (status < 0)
        return status;
    if (under != NULL)
        *under = bl_session_attachment(session);
    if (size < sizeof *reply)
        return -BL_ERROR_BAD_REPLY;
    memcpy(reply, answer, sizeof *reply);
    if (reply->count > query->head.count)
        return -BL_ERROR_BAD_REPLY;
    if (size != sizeof *reply + reply->count * query->record_size)
        return -BL_ERROR_BAD_REPLY;
    if (query->record_size > 0)
        memcpy(records, answer + sizeof *reply, reply->count * query->record_size);
    return 0;
}

static int bl_index_call(bl_session *session, const bl_index_query *query, bl_block_reply *reply,
                         void *records, bl_attachment *under, uint64_t timeout_ns)
{
    int status = bl_session_lock(session);
    if (status < 0)
        return status;
    status = bl_index_call_locked(session, query, reply, records, under, timeout_ns);
    bl_session_unlock(session);
    return status;
}

/* Return 1 if a record is possible in this pool. A caller that reads the block also checks its
 * chunks, with bl_block_within(). */
static int bl_record_sane(const bl_geometry *g, const bl_block_record *record)
{
    return record->block < g->block_count_max &&
           bl_block_within(g, record->offset, record->length, 0);
}

/* Return 1 if a record is a valid reply to a reserve: HIT, PENDING, GRANTED, or REFUSED with a
 * reason. */
static int bl_reserved_sane(const bl_geometry *g, const bl_block_request *what,
                            const bl_block_record *record)
{
    switch (record->state) {
    case BL_BLOCK_HIT: return bl_record_sane(g, record);
    case BL_BLOCK_PENDING: /* length 0: no client waits for this block of a lower tier any more */
        return record->length == 0 || bl_record_sane(g, record);
    case BL_BLOCK_GRANTED:
        return record->length == what->length && bl_record_sane(g, record) &&
               bl_block_within(g, record->offset, what->length, what->chunk_size);
    case BL_BLOCK_REFUSED: return record->status < 0;
    default: return 0;
    }
}

int64_t bl_lookup_under(bl_session *session, const uint64_t *keys, uint32_t count, uint32_t flags,
                        bl_block_record *records, uint32_t *state, bl_attachment *under,
                        uint64_t timeout_ns)
{
    uint32_t hits = 0, batch = bl_index_batch(session);
    *state = BL_BLOCK_HIT;
    while (hits < count && *state == BL_BLOCK_HIT) {
        uint32_t part = (uint32_t)bl_min(count - hits, batch);
        bl_index_query query = {BL_METHOD_LOOKUP, 2 * sizeof *keys, keys + 2 * (size_t)hits,
                               {.count = part, .flags = flags}, sizeof *records};
        bl_block_reply reply;
        int status = bl_index_call(session, &query, &reply, records + hits, under, timeout_ns);
        if ((status == -BL_ERROR_PIN_LIMIT || status == -BL_ERROR_QUOTA) && hits > 0) {
            *state = BL_BLOCK_MISS;
            return hits;
        }
        if (status < 0)
            return status;
        for (uint32_t i = 0; i < reply.count; i++)
            if (records[hits + i].state != BL_BLOCK_HIT ||
                !bl_record_sane(&session->pool->geometry, &records[hits + i]))
                return -BL_ERROR_BAD_REPLY;
        if (reply.count < part && reply.state != BL_BLOCK_MISS &&
            reply.state != BL_BLOCK_PENDING && reply.state != BL_BLOCK_BELOW)
            return -BL_ERROR_BAD_REPLY; /* with HIT the client would repeat the call forever */
        hits += reply.count;
        *state = reply.count == part ? (uint32_t)BL_BLOCK_HIT : reply.state;
    }
    return hits;
}

int64_t bl_lookup(bl_session *session, const uint64_t *keys, uint32_t count, uint32_t flags,
                  bl_block_record *records, uint32_t *state, uint64_t timeout_ns)
{
    return bl_lookup_under(session, keys, count, flags, records, state, NULL, timeout_ns);
}

/* Abort the grants of the first messages of a batch that failed half way. */
static void bl_reserve_undo(bl_session *session, const uint64_t *keys,
                            const bl_block_record *records, uint32_t count, uint64_t timeout_ns)
{
    for (uint32_t i = 0; i < count; i++) {
        bl_commit commit = {
            .key = {keys[2 * (size_t)i], keys[2 * (size_t)i + 1]},
            .generation = records[i].generation,
            .block = records[i].block,
        };
        if (records[i].state == BL_BLOCK_GRANTED &&
            bl_abort_blocks(session, &commit, 1, timeout_ns) < 0)
            return; /* the grants end with the session */
    }
}

int bl_reserve_under(bl_session *session, const uint64_t *keys, uint32_t count,
                     const bl_block_request *what, bl_block_record *records, uint64_t *nonce,
                     uint64_t timeout_ns)
{
    uint32_t batch = bl_index_batch(session), first = 0; /* the session with the grants */
    *nonce = 0;
    for (uint32_t done = 0; done < count;) {
        uint32_t part = (uint32_t)bl_min(count - done, batch), got = done;
        bl_index_query query = {BL_METHOD_RESERVE, 2 * sizeof *keys, keys + 2 * (size_t)done, *what,
                               sizeof *records};
        bl_block_reply reply;
        bl_attachment under;
        query.head.count = part;
        int status = bl_index_call(session, &query, &reply, records + done, &under, timeout_ns);
        if (status == 0 && reply.count != part)
            status = -BL_ERROR_BAD_REPLY;
        if (status == 0) {
            got = done + part;
            if (done > 0 && under.nonce != *nonce) /* the earlier messages' grants are lost */
                status = -BL_ERROR_SESSION_LOST, first = done;
            *nonce = under.nonce;
        }
        for (uint32_t i = done; i < got; i++)
            if (!bl_reserved_sane(&session->pool->geometry, what, &records[i]))
                status = -BL_ERROR_BAD_REPLY;
        if (status < 0) {
            if (bl_session_holds(session, *nonce))
                bl_reserve_undo(session, keys + 2 * (size_t)first, records + first, got - first,
                                timeout_ns);
            return status;
        }
        done = got;
    }
    return 0;
}

int bl_reserve(bl_session *session, const uint64_t *keys, uint32_t count,
               const bl_block_request *what, bl_block_record *records, uint64_t timeout_ns)
{
    uint64_t nonce;
    return bl_reserve_under(session, keys, count, what, records, &nonce, timeout_ns);
}

/* Send commits, with or without names according to query; its head has no count yet. */
static int bl_commit_all(bl_session *session, bl_index_query query, uint32_t count,
                         int32_t *statuses, uint64_t timeout_ns)
{
    const uint8_t *items = query.items;
    uint32_t batch = bl_index_fit(session, query.item_size);
    for (uint32_t done = 0; done < count;) {
        uint32_t part = (uint32_t)bl_min(count - done, batch);
        bl_block_reply reply;
        bl_block_record records[BL_CALL_KEYS_MAX];
        query.items = items + (size_t)done * query.item_size;
        query.head.count = part;
        int status = bl_index_call(session, &query, &reply, records, NULL, timeout_ns);
        if (status == 0 && reply.count != part)
            status = -BL_ERROR_BAD_REPLY;
        if (status < 0)
            return status;
        for (uint32_t i = 0; i < part; i++)
            statuses[done + i] = records[i].status;
        done += part;
    }
    return 0;
}

int bl_commit_blocks(bl_session *session, const bl_commit *commits, uint32_t count,
                     int32_t *statuses, uint64_t timeout_ns)
{
    bl_index_query query = {BL_METHOD_COMMIT, sizeof *commits, commits, {.flags = 0},
                           sizeof(bl_block_record)};
    return bl_commit_all(session, query, count, statuses, timeout_ns);
}

int bl_commit_named(bl_session *session, const bl_named_commit *commits, uint32_t count,
                    int32_t *statuses, uint64_t timeout_ns)
{
    bl_index_query query = {BL_METHOD_COMMIT, sizeof *commits, commits, {.flags = BL_COMMIT_NAMED},
                           sizeof(bl_block_record)};
    return bl_commit_all(session, query, count, statuses, timeout_ns);
}

/* Make calls that return a number each. Returns the sum, or an error. */
static int64_t bl_index_sum(bl_session *session, bl_index_query query, uint32_t count,
                            uint64_t timeout_ns)
{
    uint32_t batch = bl_index_batch(session);
    int64_t sum = 0;
    for (uint32_t done = 0; done < count; done += query.head.count) {
        bl_block_reply reply;
        query.head.count = (uint32_t)bl_min(count - done, batch);
        int status = bl_index_call(session, &query, &reply, NULL, NULL, timeout_ns);
        if (status < 0)
            return status;
        query.items = (const uint8_t *)query.items + (size_t)query.head.count * query.item_size;
        sum += reply.count;
    }
    return sum;
}

int64_t bl_abort_blocks(bl_session *session, const bl_commit *commits, uint32_t count,
                        uint64_t timeout_ns)
{
    bl_index_query query = {BL_METHOD_ABORT, sizeof *commits, commits, {0}, 0};
    return bl_index_sum(session, query, count, timeout_ns);
}

int64_t bl_release_blocks(bl_session *session, const bl_block_record *records, uint32_t count,
                          uint64_t timeout_ns)
{
    bl_commit commits[BL_CALL_KEYS_MAX];
    int64_t released = 0;
    for (uint32_t done = 0, part; done < count; done += part) {
        part = (uint32_t)bl_min(count - done, BL_CALL_KEYS_MAX);
        for (uint32_t i = 0; i < part; i++)
            commits[i] = (bl_commit){.generation = records[done + i].generation,
                                     .block = records[done + i].block};
        bl_index_query query = {BL_METHOD_RELEASE, sizeof *commits, commits, {0}, 0};
        int64_t now = bl_index_sum(session, query, part, timeout_ns);
        if (now < 0)
            return now;
        released += now;
    }
    return released;
}

/* ---- Removals. */

/* Query which tiers may have the removed blocks of one message's keys. Returns 1 if a disk has not
 * tried one of the removals yet, 0, or an error. */
static int bl_removing_part(bl_session *session, const uint64_t *keys, uint32_t count,
                            uint8_t *tiers, uint64_t timeout_ns)
{
    bl_index_query query = {BL_METHOD_REMOVING, 2 * sizeof *keys, keys, {.count = count}, 1};
    bl_block_reply reply;
    uint8_t bits[BL_CALL_KEYS_MAX];
    int status = bl_index_call(session, &query, &reply, bits, NULL, timeout_ns);
    if (status == 0 && reply.count != count)
        status = -BL_ERROR_BAD_REPLY;
    if (status < 0)
        return status;
    if (tiers != NULL)
        memcpy(tiers, bits, count);
    return reply.state != 0;
}

int bl_removing(bl_session *session, const uint64_t *keys, uint32_t count, uint8_t *tiers,
                uint64_t timeout_ns)
{
    uint32_t batch = bl_index_batch(session), part;
    for (uint32_t done = 0; done < count; done += part) {
        part = (uint32_t)bl_min(count - done, batch);
        int status = bl_removing_part(session, keys + 2 * (size_t)done, part, tiers + done,
                                      timeout_ns);
        if (status < 0)
            return status;
    }
    return 0;
}

/* The naps of a removal; each is longer than the one before. */
typedef struct bl_removal_wait {
    const bl_memory *memory;
    uint64_t until_ns;
    uint64_t nap_ns;
} bl_removal_wait;

static bl_removal_wait bl_removal_waits(const bl_session *session, uint64_t limit_ns)
{
    const bl_memory *memory = &session->pool->memory;
    return (bl_removal_wait){memory, bl_now_ns(memory) + limit_ns, BL_REMOVAL_NAP_NS};
}

/* Returns 0, without a nap, if the time is over. */
static int bl_removal_nap(bl_removal_wait *wait)
{
    if (bl_now_ns(wait->memory) >= wait->until_ns)
        return 0;
    bl_nap(wait->memory, wait->nap_ns);
    wait->nap_ns = bl_min(2 * wait->nap_ns, BL_REMOVAL_NAP_MAX_NS);
    return 1;
}

/* Remove the keys of one message, or its first keys. Returns their number, or an error; *removed
 * grows by the blocks that existed. While tiers have earlier removals to execute, there may be no
 * room for all. */
static int64_t bl_remove_part(bl_session *session, const uint64_t *keys, uint32_t count,
                              int64_t *removed, uint32_t *awaited, uint64_t timeout_ns)
{
    bl_removal_wait wait = bl_removal_waits(session, timeout_ns);
    bl_index_query query = {BL_METHOD_REMOVE, 2 * sizeof *keys, keys, {.count = count}, 0};
    bl_block_reply reply;
    int status = bl_index_call(session, &query, &reply, NULL, NULL, timeout_ns);
    while (status == -BL_ERROR_REMOVALS_FULL && bl_removal_nap(&wait))
        status = bl_index_call(session, &query, &reply, NULL, NULL, timeout_ns);
    if (status < 0)
        return status;
    if (reply.state >> 1 >= count)
        return -BL_ERROR_BAD_REPLY;
    *removed += reply.count;
    *awaited |= reply.state & 1;
    return count - (reply.state >> 1);
}

/* The pool records the removals, but a new pool over the same disk would not have them. So this
 * waits a moment for the disk to execute them. */
int64_t bl_remove_blocks(bl_session *session, const uint64_t *keys, uint32_t count,
                         uint64_t timeout_ns)
{
    uint32_t batch = bl_index_batch(session), awaited = 0;
    int64_t removed = 0, part;
    for (uint32_t done = 0; done < count; done += (uint32_t)part) {
        part = (uint32_t)bl_min(count - done, batch);
        part = bl_remove_part(session, keys + 2 * (size_t)done, (uint32_t)part, &removed, &awaited,
                              timeout_ns);
        if (part < 0)
            return part;
    }
    bl_removal_wait wait = bl_removal_waits(session, BL_REMOVAL_WAIT_NS);
    for (uint32_t done = 0; awaited && done < count; done += (uint32_t)part) {
        part = (uint32_t)bl_min(count - done, batch);
        int status = bl_removing_part(session, keys + 2 * (size_t)done, (uint32_t)part, NULL,
                                      timeout_ns);
        if (status < 0)
            return status;
        if (status == 0)
            continue;
        if (!bl_removal_nap(&wait))
            break;
        part = 0;
    }
    return removed;
}

int64_t bl_task_withdraw(bl_session *session, const uint64_t *key, uint64_t timeout_ns)
{
    bl_index_query query = {BL_METHOD_REMOVE, 2 * sizeof *key, key, {.flags = BL_REMOVE_UNCLAIMED},
                           0};
    return bl_index_sum(session, query, 1, timeout_ns);
}

int64_t bl_hint_blocks(bl_session *session, const uint64_t *keys, uint32_t count, uint32_t level,
                       uint32_t ttl_ms, uint32_t *refused, uint64_t timeout_ns)
{
    uint32_t batch = bl_index_fit(session, 2 * sizeof *keys), found = 0;
    int favors = level == BL_LEVEL_HIGH || level == BL_LEVEL_PINNED;
    *refused = 0;
    for (uint32_t left = count; left > 0;) { /* favored: the first keys use the budget; else last
                                              * first */
        uint32_t part = (uint32_t)bl_min(left, batch);
        uint32_t first = favors ? count - left : left - part;
        bl_index_query query = {BL_METHOD_HINT, 2 * sizeof *keys, keys + 2 * (size_t)first,
                               {.count = part, .flags = level, .length = ttl_ms}, 0};
        bl_block_reply reply;
        int status = bl_index_call(session, &query, &reply, NULL, NULL, timeout_ns);
        if (status < 0)
            return status;
        if (reply.state > part - reply.count)
            return -BL_ERROR_BAD_REPLY;
        found += reply.count + reply.state;
        *refused += reply.state;
        left -= part;
    }
    return found;
}

int bl_index_get_stat(bl_session *session, bl_index_stat *out, uint64_t timeout_ns)
{
    uint32_t size = 0;
    bl_message message = {
        .method = BL_METHOD_STAT,
        .reply = (uint8_t *)out,
        .reply_capacity = sizeof *out,
        .reply_size = &size,
    };
    int status = bl_session_call(session, &message, timeout_ns);
    if (status < 0)
        return status;
    return size == sizeof *out ? 0 : -BL_ERROR_BAD_REPLY;
}

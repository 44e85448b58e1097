/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * The calls about lower tiers, by clients and by the tiers' service. Replies are foreign input
 * (D13).
 */
#include "api/index.h"
#include "base/minmax.h"
#include "format/payload.h"
#include "rpc/session_state.h"

/* One message: a head and items. Its reply: a head and records. */
typedef struct bl_lower_query {
    uint32_t method;
    uint32_t head_size;
    uint32_t items_size;
    uint32_t record_size;       /* bytes of a record of the reply */
    const void *head;
    const void *items;
} bl_lower_query;

/* Make one call. Returns the number of records, or an error. */
static int64_t bl_lower_call_locked(bl_session *session, const bl_lower_query *query,
                                    uint32_t count_max, void *records, uint64_t timeout_ns)
{
    uint32_t size = 0;
    uint8_t *request = session->scratch;
    uint8_t *answer = session->scratch + session->pool->geometry.bulk_size;
    bl_block_reply reply;
    memcpy(request, query->head, query->head_size);
    if (query->items_size > 0)
        memcpy(request + query->head_size, query->items, query->items_size);
    bl_message message = {
        .method = query->method,
        .request = request,
        .request_size = query->head_size + query->items_size,
        .reply = answer,
        .reply_capacity = session->pool->geometry.bulk_size,
        .reply_size = &size,
    };
    int status = bl_session_call_locked(session, &message, timeout_ns);
    if (status < 0)
        return status;
    if (size < sizeof reply)
        return -BL_ERROR_BAD_REPLY;
    memcpy(&reply, answer, sizeof reply);
    if (reply.count > count_max || size != sizeof reply + reply.count * query->record_size)
        return -BL_ERROR_BAD_REPLY;
    if (query->record_size > 0)
        memcpy(records, answer + sizeof reply, reply.count * query->record_size);
    return reply.count;
}

static int64_t bl_lower_call(bl_session *session, const bl_lower_query *query, uint32_t count_max,
                             void *records, uint64_t timeout_ns)
{
    int64_t status = bl_session_lock(session);
    if (status < 0)
        return status;
    status = bl_lower_call_locked(session, query, count_max, records, timeout_ns);
    bl_session_unlock(session);
    return status;
}

/* Return how many items of this size fit into one message. */
static uint32_t bl_lower_batch(const bl_session *session, size_t item_size)
{
    size_t fit = (session->pool->geometry.bulk_size - sizeof(bl_block_request)) / item_size;
    return (uint32_t)bl_min(fit, BL_CALL_KEYS_MAX);
}

int64_t bl_onboard(bl_session *session, const uint64_t *keys, uint32_t count, uint32_t kind,
                   uint64_t timeout_ns)
{
    uint32_t batch = bl_lower_batch(session, 2 * sizeof *keys), done = 0;
    while (done < count) {
        uint32_t part = (uint32_t)bl_min(count - done, batch);
        bl_block_request head = {.count = part, .flags = kind | (done ? BL_ONBOARD_MORE : 0u)};
        bl_lower_query query = {BL_METHOD_ONBOARD, sizeof head, part * 2 * (uint32_t)sizeof *keys,
                                0, &head, keys + 2 * (size_t)done};
        int64_t got = bl_lower_call(session, &query, part, NULL, timeout_ns);
        if (got < 0)
            return got;
        done += (uint32_t)got;
        if (got < part)
            break;
    }
    return done;
}

int bl_tiers(bl_session *session, const uint64_t *keys, uint32_t count, uint8_t *tiers,
             uint64_t timeout_ns)
{
    uint32_t batch = bl_lower_batch(session, 2 * sizeof *keys);
    for (uint32_t done = 0; done < count;) {
        uint32_t part = (uint32_t)bl_min(count - done, batch);
        bl_block_request head = {.count = part};
        bl_lower_query query = {BL_METHOD_TIERS, sizeof head, part * 2 * (uint32_t)sizeof *keys, 1,
                                &head, keys + 2 * (size_t)done};
        int64_t got = bl_lower_call(session, &query, part, tiers + done, timeout_ns);
        if (got >= 0 && got != part)
            return -BL_ERROR_BAD_REPLY;
        if (got < 0)
            return (int)got;
        done += part;
    }
    return 0;
}

int64_t bl_lower_take(bl_session *session, uint64_t token, uint32_t kind, uint32_t tier,
                      bl_lower_record *records, uint32_t count, uint64_t timeout_ns)
{
    const bl_geometry *g = &session->pool->geometry;
    uint32_t part = (uint32_t)bl_min(count, bl_lower_batch(session, sizeof *records));
    bl_lower_request head = {
        .token = token, .count = part, .kind = (uint8_t)kind, .tier = (uint8_t)tier};
    bl_lower_query query = {BL_METHOD_LOWER_TAKE, sizeof head, 0, sizeof *records, &head, NULL};
    int64_t got = bl_lower_call(session, &query, part, records, timeout_ns);
    for (int64_t i = 0; i < got && kind == BL_LOWER_OFFLOAD; i++)
        if (records[i].block >= g->block_count_max ||
            !bl_block_within(g, records[i].offset, records[i].length, records[i].chunk_size))
            return -BL_ERROR_BAD_REPLY;
    return got;
}

int64_t bl_lower_report(bl_session *session, uint64_t token, const bl_lower_note *notes,
                      uint32_t count, uint64_t timeout_ns)
{
    uint32_t batch = bl_lower_batch(session, sizeof *notes);
    for (uint32_t left = count; left > 0;) { /* last first, as the server does */
        uint32_t part = (uint32_t)bl_min(left, batch);
        bl_lower_request head = {.token = token, .count = part};
        bl_lower_query query = {BL_METHOD_LOWER_TELL, sizeof head, part * (uint32_t)sizeof *notes,
                                0, &head, notes + (left - part)};
        int64_t got = bl_lower_call(session, &query, part, NULL, timeout_ns);
        if (got < 0)
            return got;
        left -= part;
    }
    return count;
}

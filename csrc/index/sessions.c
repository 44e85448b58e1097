/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Lists sessions for display: their lanes, what each one holds, and quarantined space. No decision
 * depends on it.
 */
#include "index/sessions.h"

#include <unistd.h>

#include "index/call.h"

static uint64_t bl_ago_ns(uint64_t now_ns, uint64_t then_ns)
{
    return now_ns > then_ns ? now_ns - then_ns : 0;
}

static bl_session_view bl_session_show(const bl_index *index, uint32_t number, uint64_t now_ns)
{
    const bl_lane *lane = &index->server->lanes[number];
    const bl_hold *hold = &index->holds[number];
    return (bl_session_view){
        .nonce = lane->nonce,
        .epoch = lane->epoch,
        .since_ns = bl_ago_ns(now_ns, lane->since_ns),
        .heartbeat_ns = bl_ago_ns(now_ns, lane->heartbeat_seen_ns),
        .call_count = lane->call_count,
        .bytes = hold->bytes,
        .held_bytes = hold->held_bytes,
        .lane = number,
        .host = lane->host,
        .pid = lane->pid,
        .kind = lane->kind,
        .state = lane->state,
        .trust = lane->broken ? BL_SESSION_BROKEN
                 : lane->liveness_lock >= 0 ? BL_SESSION_WATCHED
                                            : BL_SESSION_HEARTBEAT,
        .grant_count = hold->grant_count,
        .pin_count = bl_pins_count(index->pins[number]),
    };
}

uint32_t bl_index_sessions(const bl_index *index, uint32_t first, bl_session_view *out,
                          uint32_t count)
{
    uint64_t now_ns = bl_now_ns(&index->pool->memory);
    uint32_t found = 0;
    for (uint32_t i = first; i < index->pool->geometry.lane_count && found < count; i++)
        if (index->server->lanes[i].state != BL_SESSION_FREE)
            out[found++] = bl_session_show(index, i, now_ns);
    return found;
}

int bl_handle_sessions(void *context, bl_call *call)
{
    const bl_index *index = context;
    bl_session_view view;
    uint32_t first, room;
    bl_sessions_reply reply = {
        .draining = index->server->stat.draining,
        .pid = (uint32_t)getpid(),
    };
    if (call->request_size != sizeof first || call->reply_capacity < sizeof reply + sizeof view)
        return -BL_ERROR_BAD_REQUEST;
    memcpy(&first, call->request, sizeof first);
    room = (uint32_t)((call->reply_capacity - sizeof reply) / sizeof view);
    for (; reply.count < room && bl_index_sessions(index, first, &view, 1); first = view.lane + 1) {
        memcpy(call->reply + sizeof reply + reply.count * sizeof view, &view, sizeof view);
        reply.count++;
    }
    reply.more = reply.count == room;
    reply.quota = index->server->quota;
    memcpy(call->reply, &reply, sizeof reply);
    call->reply_size = (uint32_t)(sizeof reply + reply.count * sizeof view);
    return 0;
}

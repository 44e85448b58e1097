/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * The client's side of a lane: it sends requests and takes replies, in order.
 *
 * Request n stands in slot n % slot_count and carries n; so does its reply. A slot is free again
 * when its reply has been taken, so at most slot_count requests are out. Requests of a batch share
 * one fence, and so do the polls of its replies: a fence and a cache miss cost more than a line.
 *
 * A caller spins before it yields its core, and so does the server. If they share a core, both spin
 * in vain. So a caller whose last reply arrived while it yielded yields first.
 *
 * The reply window is how many reply lines are invalidated together. It doubles while all of them
 * had arrived; otherwise it becomes the number that had.
 */
#include <errno.h>

#include "coherence/crash_point.h"
#include "rpc/doorbell.h"

enum {
    BL_SEND_BATCH = 32,
    BL_EPOCH_LOOK_NS = 2 * 1000 * 1000  /* after this wait: check whether the server still serves */
};

/* A batch is sent in three passes: a wide load of data that was just stored in narrow pieces waits
 * until the pieces have left the store buffer, so other lines are handled in between. */
void bl_lane_send(bl_session *session, uint32_t method, uint32_t flags, const void *payloads,
                  uint32_t size, uint32_t count)
{
    const uint8_t *next = payloads;
    bl_request lines[BL_SEND_BATCH];
    uint64_t key = bl_message_key(session->nonce, session->epoch);
    while (count > 0) {
        uint32_t batch = count < BL_SEND_BATCH ? count : BL_SEND_BATCH;
        for (uint32_t i = 0; i < batch; i++) {
            lines[i] = (bl_request){
                .method = (uint16_t)method,
                .flags = (uint8_t)flags,
                .size = (uint8_t)size,
                .epoch = (uint32_t)session->epoch,
            };
            if (size == 0)
                continue;
            memcpy(lines[i].payload, next, size);
            next += size;
        }
        for (uint32_t i = 0; i < batch; i++)
            bl_message_seal(&lines[i], session->sent + 1 + i, key);
        bl_crash_line("call.line", &session->pool->memory,
                      bl_request_offset(&session->pool->geometry, session->lane,
                                        bl_slot_of(session, session->sent + 1)),
                      &lines[0]);
        /* SYNC lane.request: pairs with bl_lane_gather() */
        for (uint32_t i = 0; i < batch; i++)
            bl_stream_line(&session->pool->memory,
                           bl_request_offset(&session->pool->geometry, session->lane,
                                             bl_slot_of(session, session->sent + 1 + i)),
                           &lines[i]);
        bl_crash_point("call.streamed");
        session->sent += batch;
        count -= batch;
    }
}

/* Take the replies that have arrived, oldest first. Returns their number, at most count. */
static uint32_t bl_lane_take(bl_session *session, bl_reply *replies, uint32_t count)
{
    const bl_memory *memory = &session->pool->memory;
    uint64_t first = bl_reply_offset(&session->pool->geometry, session->lane, session->half, 0);
    uint64_t key = bl_message_key(session->nonce, session->epoch);
    uint32_t waiting = session->sent - session->answered, taken = 0;
    uint32_t window = session->window < waiting ? session->window : waiting;
    window = window < count ? window : count;
    for (uint32_t i = 1; i <= window; i++)
        bl_invalidate(memory,
                      first + (uint64_t)bl_slot_of(session, session->answered + i) * BL_POLL_STRIDE,
                      BL_LINE_SIZE);
    bl_fence_full(memory); /* the loads below must not be older than the invalidations */
    for (uint32_t i = 1; i <= window; i++)
        bl_prefetch_line(memory, first + (uint64_t)bl_slot_of(session, session->answered + i) *
                                             BL_POLL_STRIDE);
    for (; taken < window; taken++) {
        uint32_t sequence = session->answered + 1;
        bl_reply *reply = &replies[taken];
        /* SYNC lane.reply: pairs with bl_lane_answer() */
        bl_load_line(memory, first + (uint64_t)bl_slot_of(session, sequence) * BL_POLL_STRIDE,
                     reply);
        if (reply->sequence != sequence ||
            !bl_verify(memory, bl_reply_whole(reply, key)))
            break;
        bl_believe(memory, first + (uint64_t)bl_slot_of(session, sequence) * BL_POLL_STRIDE);
        session->answered = sequence;
    }
    if (taken == window)
        session->window = window * 2 < BL_WINDOW_MAX ? window * 2 : BL_WINDOW_MAX;
    else
        session->window = taken + 1;
    return taken;
}

/* Return 1 if another server has taken over, or this session's server has stopped; else 0. */
static int bl_session_stale(const bl_session *session)
{
    bl_epoch_line epoch;
    return bl_epoch_read(session->pool, &epoch) == 0 &&
           (epoch.epoch != session->epoch || !bl_epoch_serving(&epoch));
}

/* Return 1 if the server has ended this session; else 0. The server writes the session's line
 * before it announces the lane, and does not change it until it ends the session. */
static int bl_session_given_up(const bl_session *session)
{
    const bl_memory *memory = &session->pool->memory;
    uint64_t offset = bl_session_offset(&session->pool->geometry, session->lane, session->half);
    bl_session_line line;
    bl_refetch(memory, offset, BL_LINE_SIZE);
    bl_load_line(memory, offset, &line); /* SYNC session.line: pairs with bl_housekeeping_write() */
    return !bl_verify(memory, line.nonce == session->nonce && line.state == BL_SESSION_LIVE);
}

/* Return 1 if the lane may be quiet, so that this call must ring. */
static int bl_lane_quiet(bl_session *session, const bl_wait *wait, uint64_t ring_ns)
{
    uint64_t silent_ns = wait->start_ns - session->called_ns;
    session->called_ns = wait->start_ns;
    return silent_ns > ring_ns;
}

int bl_lane_wait(bl_session *session, bl_reply *replies, uint32_t count, bl_wait *wait)
{
    const bl_memory *memory = &session->pool->memory;
    uint64_t looked = 0, ring_ns = bl_quiet_ns(memory) / BL_QUIET_RING_PART;
    int rung = bl_lane_quiet(session, wait, ring_ns), woken = 0;
    wait->core = session->core;
    if (rung)
        bl_doorbell_ring(session);
    for (;;) {
        uint32_t taken = bl_lane_take(session, replies, count);
        if (taken > 0) {
            session->core = wait->core;
            return (int)taken;
        }
        int asleep = !woken && bl_waker_asleep(&session->waker); /* bl_lane_take() has fenced */
        if (!rung && (asleep || wait->waited_ns > ring_ns)) {
            bl_doorbell_ring(session); /* the lane may have become quiet */
            bl_crash_point("call.rung");
            rung = 1;
            continue; /* a fence: the doorbell is written before the server wakes */
        }
        if (asleep) {
            bl_wake(memory, session->directory, &session->waker);
            bl_crash_point("call.woken");
            woken = 1;
        }
        if (!bl_wait_turn(memory, wait))
            return -BL_ERROR_TIMEOUT;
        if (wait->waited_ns - looked > BL_EPOCH_LOOK_NS) {
            looked = wait->waited_ns;
            if (bl_session_stale(session))
                return 0;
            if (bl_session_given_up(session)) /* the replies before that are valid */
                return (int)bl_lane_take(session, replies, count);
        }
    }
}

int bl_bulk_send(bl_session *session, const void *request, uint32_t size, bl_bulk *bulk)
{
    const bl_memory *memory = &session->pool->memory;
    const bl_geometry *g = &session->pool->geometry;
    if (size > g->bulk_size)
        return -EMSGSIZE;
    uint64_t offset = bl_bulk_in_offset(g, session->lane);
    uint32_t whole = size & ~(uint32_t)(BL_LINE_SIZE - 1);
    uint8_t tail[BL_LINE_SIZE] = {0};
    if (whole > 0)
        bl_stream(memory, offset, request, whole);
    if (size > whole) {
        memcpy(tail, (const uint8_t *)request + whole, size - whole);
        bl_stream_line(memory, offset + whole, tail);
    }
    bl_crash_point("call.bulk_streamed");
    bl_fence_store(memory); /* SYNC lane.bulk_in: in memory before the line that describes these
                             * bytes */
    bl_crash_point("call.bulk_fenced");
    *bulk = (bl_bulk){size, bl_crc32c(0, request, size)};
    return 0;
}

/* Copy a reply's bytes to the caller. Returns its status, or an error. */
static int bl_reply_decode(bl_session *session, const bl_reply *reply, void *target,
                           uint32_t capacity, uint32_t *size)
{
    const bl_memory *memory = &session->pool->memory;
    const bl_geometry *g = &session->pool->geometry;
    if (reply->size > BL_MESSAGE_INLINE_SIZE)
        return -BL_ERROR_BAD_REPLY;
    if (!(reply->flags & BL_MESSAGE_BULK)) {
        if (reply->size > capacity)
            return -BL_ERROR_BAD_REPLY;
        memcpy(target, reply->payload, reply->size);
        *size = reply->size;
        return reply->status;
    }
    bl_bulk bulk;
    memcpy(&bulk, reply->payload, sizeof bulk);
    if (bulk.size > g->bulk_size)
        return -BL_ERROR_BAD_REPLY;
    if (bulk.size > capacity)
        return -BL_ERROR_BAD_REPLY;
    uint64_t offset = bl_bulk_out_offset(g, session->lane, session->half);
    bl_refetch(memory, offset, bulk.size); /* after reading the line, before the copy */
    /* SYNC lane.bulk_out: pairs with bl_bulk_answer() */
    bl_fetch(memory, offset, target, bulk.size);
    bl_crash_point("call.bulk_fetched");
    if (!bl_verify(memory, bl_crc32c(0, target, bulk.size) == bulk.check))
        return -BL_ERROR_BAD_REPLY;
    bl_rely(memory, offset, bulk.size);
    *size = bulk.size;
    return reply->status;
}

int bl_lane_call(bl_session *session, const bl_message *message, bl_wait *wait)
{
    uint32_t sequence;
    if (message->request_size <= BL_MESSAGE_INLINE_SIZE) {
        bl_lane_send(session, message->method, 0, message->request, message->request_size, 1);
    } else {
        bl_bulk bulk;
        int status = bl_bulk_send(session, message->request, message->request_size, &bulk);
        if (status < 0)
            return status;
        bl_lane_send(session, message->method, BL_MESSAGE_BULK, &bulk, sizeof bulk, 1);
    }
    bl_fence_store(&session->pool->memory); /* in memory now, because the server waits for it */
    bl_crash_point("call.sent");
    sequence = session->sent;
    while (session->answered != sequence) {
        bl_reply reply;
        int taken = bl_lane_wait(session, &reply, 1, wait);
        if (taken <= 0)
            return taken == 0 ? -BL_ERROR_SESSION_LOST : taken;
        bl_crash_point("call.answered");
        if (session->answered == sequence)
            return bl_reply_decode(session, &reply, message->reply, message->reply_capacity,
                                   message->reply_size);
    }
    return -BL_ERROR_BAD_REPLY;
}

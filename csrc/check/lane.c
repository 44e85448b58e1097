/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Checks the lanes of live sessions: see check/line.h.
 *
 * A slot with a line of a former session counts as empty: the nonce in its check is lost, and its
 * writer may have died while writing it. But slots are filled in order, so the greatest number that
 * this session has sent determines the slots of its last lines: there, a torn line, or one with the
 * right number and a wrong check, is damaged.
 */
#include <errno.h>
#include <stdlib.h>

#include "check/line.h"

/* One of the two rings of a lane. */
typedef struct bl_check_ring {
    uint64_t offset;
    uint32_t lane;
    uint32_t last;              /* the greatest sequence of a whole line */
    int replies;
} bl_check_ring;

/* Both kinds of line begin with the sequence, and end with check and sequence_end. */
static uint32_t bl_slot_sequence(const uint64_t word[8]) { return (uint32_t)word[0]; }

static int bl_slot_torn(const uint64_t word[8])
{
    return (uint32_t)word[0] != (uint32_t)(word[7] >> 32);
}

static int bl_slot_whole(const uint64_t word[8], uint64_t key)
{
    return !bl_slot_torn(word) && (uint32_t)word[7] == bl_message_check(word, key);
}

/* Check the fields of a whole line that this session, or the server, has sent. */
static uint32_t bl_slot_nonsense(const bl_check_ring *ring, const uint64_t word[8])
{
    bl_request request;
    bl_reply reply;
    memcpy(&request, word, sizeof request);
    memcpy(&reply, word, sizeof reply);
    if (ring->replies ? reply.reserved != 0 : request.reserved != 0)
        return BL_FINDING_RESERVED;
    uint32_t flags = ring->replies ? reply.flags : request.flags;
    uint32_t size = ring->replies ? reply.size : request.size;
    if (flags & ~(uint32_t)BL_MESSAGE_BULK || size > BL_MESSAGE_INLINE_SIZE ||
        (flags && size != sizeof(bl_bulk)))
        return ring->replies ? BL_FINDING_REPLY_NONSENSE : BL_FINDING_REQUEST_NONSENSE;
    return 0;
}

static uint64_t bl_check_key(const bl_check *check, uint32_t lane)
{
    return bl_message_key(check->sessions[lane].nonce, check->sessions[lane].epoch);
}

/* Return 1 if this session has used the slot. Its sequence numbers begin with 1. */
static int bl_slot_filled(const bl_check_ring *ring, uint32_t slots, uint32_t slot)
{
    uint32_t back = (ring->last % slots + slots - slot) % slots;
    return ring->last > back;
}

static uint32_t bl_slot_judge(const bl_check *check, const bl_check_ring *ring,
                              const bl_check_line *line)
{
    uint32_t slots = check->pool->geometry.slot_count;
    uint32_t sequence = bl_slot_sequence(line->word);
    uint32_t damaged = ring->replies ? BL_FINDING_REPLY_DAMAGED : BL_FINDING_REQUEST_DAMAGED;
    if (!bl_check_used(line))
        return 0;
    if (bl_slot_torn(line->word))
        return bl_slot_filled(ring, slots, (uint32_t)(line->number % slots)) ? damaged : 0;
    if (bl_slot_whole(line->word, bl_check_key(check, ring->lane))) {
        if (sequence % slots != line->number % slots)
            return ring->replies ? BL_FINDING_REPLY_NONSENSE : BL_FINDING_REQUEST_NONSENSE;
        return bl_slot_nonsense(ring, line->word);
    }
    return sequence % slots == line->number % slots && ring->last - sequence < slots &&
                   sequence != 0
               ? damaged
               : 0;
}

/* Check a slot against its session, until neither changes. */
static void bl_check_slot(bl_check *check, const bl_check_ring *ring, uint32_t slot)
{
    uint32_t same = 1;
    const bl_geometry *g = &check->pool->geometry;
    bl_check_line lines[2] = {
        {.offset = ring->offset + (uint64_t)slot * BL_POLL_STRIDE,
         .number = (uint64_t)ring->lane * g->slot_count + slot},
        {.offset = bl_session_offset(g, ring->lane, check->half)},
    };
    bl_check_look(check, &lines[0]);
    memcpy(lines[1].word, &check->sessions[ring->lane], BL_LINE_SIZE);
    for (uint32_t tries = 0; tries < BL_CHECK_TRIES && !check->moved; tries++) {
        uint32_t kind = bl_slot_judge(check, ring, &lines[0]);
        if (kind == 0 || memcmp(lines[1].word, &check->sessions[ring->lane], BL_LINE_SIZE) != 0)
            return; /* correct, or the lane belongs to another session now */
        if (same == BL_CHECK_LOOKS) {
            bl_found(check, kind, lines[0].number, lines[0].offset);
            return;
        }
        same = bl_check_stands(check, lines, 2) ? same + 1 : 1;
    }
}

static void bl_check_ring_of(bl_check *check, uint32_t lane, int replies)
{
    const bl_geometry *g = &check->pool->geometry;
    bl_check_ring ring = {.lane = lane, .replies = replies};
    ring.offset = replies ? bl_reply_offset(g, lane, check->half, 0)
                          : bl_request_offset(g, lane, 0);
    bl_check_refetch(check, ring.offset, (uint64_t)g->slot_count * BL_POLL_STRIDE);
    int any = 0;
    for (uint32_t slot = 0; slot < g->slot_count; slot++) {
        bl_check_line line = {.offset = ring.offset + (uint64_t)slot * BL_POLL_STRIDE};
        bl_check_look(check, &line);
        if (!bl_slot_whole(line.word, bl_check_key(check, lane)))
            continue;
        uint32_t sequence = bl_slot_sequence(line.word);
        if (!any || (int32_t)(sequence - ring.last) > 0)
            ring.last = sequence;
        any = 1;
    }
    for (uint32_t slot = 0; any && slot < g->slot_count && !check->moved; slot++)
        bl_check_slot(check, &ring, slot);
}

/* Check the client's heartbeat. The line of another session is legal: the current session has not
 * written one yet. */
static uint32_t bl_judge_lane_heartbeat(bl_check *check, const bl_check_line *line)
{
    bl_heartbeat_line heartbeat;
    memcpy(&heartbeat, line->word, sizeof heartbeat);
    if (heartbeat.nonce != check->sessions[line->number].nonce)
        return 0;
    if (!bl_table_whole(&heartbeat, heartbeat.nonce))
        return BL_FINDING_LANE_HEARTBEAT_DAMAGED;
    return bl_check_zero(heartbeat.reserved, sizeof heartbeat.reserved) && heartbeat.reserved_tail
           == 0
               ? 0
               : BL_FINDING_RESERVED;
}

void bl_check_lanes(bl_check *check)
{
    const bl_geometry *g = &check->pool->geometry;
    for (uint32_t lane = 0; lane < g->lane_count && !check->moved; lane++) {
        uint64_t start = bl_lane_offset(g, lane);
        bl_check_stray(check, start + BL_LINE_SIZE, start + BL_PAGE_SIZE);
        if (check->sessions[lane].state != BL_SESSION_LIVE)
            continue;
        bl_check_line heartbeat = {.offset = start, .number = lane};
        bl_check_refetch(check, start, BL_LINE_SIZE);
        bl_check_look(check, &heartbeat);
        bl_check_judged(check, &heartbeat, bl_judge_lane_heartbeat);
        bl_check_ring_of(check, lane, 0);
        bl_check_ring_of(check, lane, 1);
    }
}

/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Checks the lines of servers, sessions and the lobby: see check/line.h.
 */
#include <errno.h>
#include <stdlib.h>

#include "check/line.h"

/* Return 1 if an epoch does not fit into the high bits of a generation. */
static int bl_epoch_impossible(uint64_t epoch)
{
    return epoch >> (64 - BL_GENERATION_SHIFT) != 0;
}

static uint32_t bl_judge_epoch(bl_check *check, const bl_check_line *line)
{
    bl_epoch_line epoch;
    (void)check;
    memcpy(&epoch, line->word, sizeof epoch);
    if (!bl_check_used(line))
        return 0;
    if (!bl_table_whole(&epoch, line->number))
        return BL_FINDING_EPOCH_DAMAGED;
    if (epoch.epoch == 0 || epoch.epoch % BL_HALF_COUNT != line->number)
        return BL_FINDING_EPOCH_HALF;
    if (bl_epoch_impossible(epoch.epoch))
        return BL_FINDING_EPOCH_FUTURE;
    if (epoch.state < BL_SERVER_TAKING || epoch.state > BL_SERVER_FAILED)
        return BL_FINDING_EPOCH_STATE;
    if (epoch.host >= BL_HOST_COUNT || epoch.nonce == 0)
        return BL_FINDING_EPOCH_NONSENSE;
    if (!bl_check_zero(epoch.reserved, sizeof epoch.reserved) || epoch.reserved_tail != 0)
        return BL_FINDING_RESERVED;
    return 0;
}

/* Check the server's heartbeat in the current half. It is written before the epoch is published. */
static uint32_t bl_judge_server_heartbeat(bl_check *check, const bl_check_line *line)
{
    bl_heartbeat_line heartbeat;
    memcpy(&heartbeat, line->word, sizeof heartbeat);
    if (heartbeat.nonce == check->epoch.nonce && bl_table_whole(&heartbeat, heartbeat.nonce))
        return bl_check_zero(heartbeat.reserved, sizeof heartbeat.reserved) &&
               heartbeat.reserved_tail == 0
                   ? 0
                   : BL_FINDING_RESERVED;
    return bl_table_whole(&heartbeat, heartbeat.nonce) ? BL_FINDING_HEARTBEAT_STRANGE
           : BL_FINDING_HEARTBEAT_DAMAGED;
}

/* Check a host's candidate line: a host uses only ballots that equal its number modulo
 * BL_HOST_COUNT. */
static uint32_t bl_judge_candidate(bl_check *check, const bl_check_line *line)
{
    bl_candidate_line candidate;
    (void)check;
    memcpy(&candidate, line->word, sizeof candidate);
    if (!bl_check_used(line))
        return 0;
    if (!bl_table_whole(&candidate, line->number))
        return BL_FINDING_CANDIDATE_DAMAGED;
    if (candidate.reserved != 0 || candidate.reserved_tail != 0)
        return BL_FINDING_RESERVED;
    if (candidate.epoch == 0 || candidate.ballot % BL_HOST_COUNT != line->number ||
        candidate.accepted > candidate.ballot ||
        (candidate.accepted != 0 && (candidate.nonce == 0 || candidate.host >= BL_HOST_COUNT)))
        return BL_FINDING_CANDIDATE_NONSENSE;
    return bl_epoch_impossible(candidate.epoch) ? BL_FINDING_CANDIDATE_FUTURE : 0;
}

/* Check both copies of a replicated line. They may differ if the writer died between them. */
static void bl_check_register(bl_check *check, uint64_t offset, uint64_t number,
                              bl_check_judge judge)
{
    for (uint64_t copy = 0; copy < BL_REGISTER_SIZE && !check->moved; copy += BL_LINE_SIZE) {
        bl_check_line line = {.offset = offset + copy, .number = number};
        bl_check_look(check, &line);
        bl_check_judged(check, &line, judge);
    }
}

void bl_check_server_lines(bl_check *check)
{
    const uint64_t candidates_end = BL_CANDIDATE_OFFSET + BL_HOST_COUNT * BL_POLL_STRIDE;
    bl_check_refetch(check, 0, candidates_end);
    for (uint32_t half = 0; half < BL_HALF_COUNT; half++) {
        bl_check_register(check, bl_epoch_offset(half), half, bl_judge_epoch);
        bl_check_stray(check, bl_server_heartbeat_offset(half) + BL_LINE_SIZE,
                       bl_epoch_offset(half + 1));
    }
    bl_check_stray(check, bl_epoch_offset(BL_HALF_COUNT), BL_CANDIDATE_OFFSET);
    for (uint32_t host = 0; host < BL_HOST_COUNT; host++)
        bl_check_register(check, BL_CANDIDATE_OFFSET + (uint64_t)host * BL_POLL_STRIDE, host,
                          bl_judge_candidate);
    bl_check_stray(check, candidates_end, BL_LOBBY_OFFSET);
    if (!bl_epoch_served(&check->epoch))
        return;
    bl_check_line line = {.offset = bl_server_heartbeat_offset(check->half), .number = check->half};
    bl_check_look(check, &line);
    bl_check_judged(check, &line, bl_judge_server_heartbeat);
}

static uint32_t bl_judge_session(bl_check *check, const bl_check_line *line)
{
    bl_session_line session;
    memcpy(&session, line->word, sizeof session);
    if (!bl_check_used(line))
        return 0;
    if (!bl_table_whole(&session, line->number))
        return BL_FINDING_SESSION_DAMAGED;
    if (!bl_check_zero(session.reserved, sizeof session.reserved))
        return BL_FINDING_RESERVED;
    if (session.state > BL_SESSION_SUSPECT)
        return BL_FINDING_SESSION_STATE;
    if (session.epoch > check->epoch.epoch)
        return BL_FINDING_SESSION_FUTURE;
    if (session.host >= BL_HOST_COUNT)
        return BL_FINDING_SESSION_HOST;
    if (session.state != BL_SESSION_FREE && (session.nonce == 0 || session.epoch == 0))
        return BL_FINDING_SESSION_NONSENSE;
    return 0;
}

static bl_check_line bl_check_session(const bl_check *check, uint32_t lane)
{
    return (bl_check_line){
        .offset = bl_session_offset(&check->pool->geometry, lane, check->half), .number = lane};
}

/* Report a session that has two lanes. */
static void bl_check_session_twice(bl_check *check, uint32_t lane)
{
    const bl_session_line *session = &check->sessions[lane];
    for (uint32_t other = 0; other < lane; other++) {
        if (check->sessions[other].nonce != session->nonce)
            continue;
        bl_check_line lines[2] = {bl_check_session(check, other), bl_check_session(check, lane)};
        memcpy(lines[0].word, &check->sessions[other], BL_LINE_SIZE);
        memcpy(lines[1].word, session, BL_LINE_SIZE);
        if (bl_check_stands(check, lines, 2) && bl_check_stands(check, lines, 2))
            bl_found(check, BL_FINDING_SESSION_TWICE, lane, other);
        return;
    }
}

void bl_check_sessions(bl_check *check)
{
    const bl_geometry *g = &check->pool->geometry;
    bl_check_refetch(check, bl_session_offset(g, 0, check->half),
                     (uint64_t)g->lane_count * BL_LINE_SIZE);
    for (uint32_t lane = 0; lane < g->lane_count && !check->moved; lane++) {
        bl_check_line line = bl_check_session(check, lane);
        bl_check_look(check, &line);
        if (bl_check_judged(check, &line, bl_judge_session))
            continue;
        bl_session_line session;
        memcpy(&session, line.word, sizeof session);
        if (session.state == BL_SESSION_FREE)
            continue;
        check->sessions[lane] = session;
        check->report->session_count++;
        bl_check_session_twice(check, lane);
    }
    bl_check_stray(check, bl_session_offset(g, 0, BL_HALF_COUNT), g->lane_offset);
}

static uint32_t bl_judge_lobby_request(bl_check *check, const bl_check_line *line)
{
    bl_lobby_request request;
    memcpy(&request, line->word, sizeof request);
    if (!bl_check_used(line))
        return 0;
    if (request.sequence != request.sequence_end ||
        request.check != bl_message_check(&request, 0))
        return BL_FINDING_LOBBY_REQUEST_DAMAGED;
    if (request.epoch > check->epoch.epoch)
        return BL_FINDING_LOBBY_REQUEST_FUTURE;
    if ((request.operation != BL_LOBBY_ATTACH && request.operation != BL_LOBBY_DETACH) ||
        request.nonce == 0)
        return BL_FINDING_LOBBY_REQUEST_NONSENSE;
    return request.host == line->number ? 0 : BL_FINDING_LOBBY_REQUEST_HOST;
}

static uint32_t bl_judge_lobby_reply(bl_check *check, const bl_check_line *line)
{
    bl_lobby_reply reply;
    memcpy(&reply, line->word, sizeof reply);
    if (!bl_check_used(line))
        return 0;
    if (reply.sequence != reply.sequence_end || reply.check != bl_message_check(&reply, 0))
        return BL_FINDING_LOBBY_REPLY_DAMAGED;
    if (!bl_check_zero(reply.reserved, sizeof reply.reserved))
        return BL_FINDING_RESERVED;
    if (reply.epoch > check->epoch.epoch)
        return BL_FINDING_LOBBY_REPLY_FUTURE;
    if (reply.status > 0 || reply.lane >= check->pool->geometry.lane_count ||
        reply.live_count > check->pool->geometry.lane_count)
        return BL_FINDING_LOBBY_REPLY_NONSENSE;
    return 0;
}

void bl_check_lobby(bl_check *check)
{
    bl_check_refetch(check, BL_LOBBY_OFFSET, BL_LOBBY_END - BL_LOBBY_OFFSET);
    for (uint32_t host = 0; host < BL_HOST_COUNT && !check->moved; host++) {
        uint64_t start = bl_lobby_request_offset(host);
        bl_check_line request = {.offset = start, .number = host};
        bl_check_line reply = {.offset = bl_lobby_reply_offset(host, check->half), .number = host};
        bl_check_look(check, &request);
        bl_check_judged(check, &request, bl_judge_lobby_request);
        bl_check_look(check, &reply);
        bl_check_judged(check, &reply, bl_judge_lobby_reply);
        /* Any value of a doorbell is valid. */
        for (uint64_t at = start; at <= bl_doorbell_offset(host); at += BL_POLL_STRIDE)
            bl_check_stray(check, at + BL_LINE_SIZE, at + BL_POLL_STRIDE);
        bl_check_stray(check, bl_doorbell_offset(host) + BL_POLL_STRIDE, start + BL_LOBBY_STRIDE);
    }
}

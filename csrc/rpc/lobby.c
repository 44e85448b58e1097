/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * The client's side of the lobby, where a process without a lane gets one (D4).
 *
 * Each host number has one request line and two reply lines (one per half). The processes of a host
 * take turns under a lock of their own kernel, so each line has one writer. A request is new when
 * its sequence is; the reply names the sequence and the nonce. A host that finds another machine's
 * boot id alive under its number does not write at all.
 *
 * A detachment stays valid forever, so any server may act on it, whichever was requested. An
 * attempt to attach that ran out of time ends with a detachment, because a server may have given
 * its nonce a lane, or may still do so. The line then retains the nonce: the next process in turn
 * does not overwrite it before a server has replied. So at most one attempt of a host is undecided
 * at any time.
 */
#include <errno.h>
#include <stdio.h>

#include "coherence/crash_point.h"
#include "coherence/guard.h"
#include "rpc/session_state.h"

/* Read the reply line of this session's host in the half of the current server. Returns 1 if it is
 * whole. */
static int bl_lobby_reply_read(const bl_session *session, uint32_t half, bl_lobby_reply *out)
{
    const bl_memory *memory = &session->pool->memory;
    uint64_t offset = bl_lobby_reply_offset(session->host, half);
    bl_refetch(memory, offset, BL_LINE_SIZE); /* SYNC lobby.reply */
    bl_load_line(memory, offset, out);
    return bl_verify(memory, out->sequence == out->sequence_end &&
                                 out->check == bl_message_check(out, 0));
}

/* Return this host's request line. */
static bl_lobby_request bl_lobby_line(const bl_session *session)
{
    const bl_memory *memory = &session->pool->memory;
    bl_lobby_request line;
    uint64_t offset = bl_lobby_request_offset(session->host);
    bl_refetch(memory, offset, BL_LINE_SIZE); /* another process may have streamed it */
    bl_load_line(memory, offset, &line);
    bl_rely(memory, offset, BL_LINE_SIZE); /* its former writer held the lock that this process
                                            * holds now */
    return line;
}

/* Write a request of this nonce. Returns the request's sequence number. */
static uint32_t bl_lobby_send(const bl_session *session, uint32_t operation, uint64_t nonce,
                              uint64_t epoch)
{
    uint32_t sequence = bl_lobby_line(session).sequence + 1;
    bl_lobby_request line = {
        .operation = operation,
        .nonce = nonce,
        .old_nonce = session->old_nonce,
        .boot_id = {session->boot_id[0], session->boot_id[1]},
        .host = session->host,
        .epoch = epoch,
        .sequence = sequence,
        .sequence_end = sequence,
    };
    line.check = bl_message_check(&line, 0);
    uint64_t offset = bl_lobby_request_offset(session->host);
    bl_crash_line("request.line", &session->pool->memory, offset, &line);
    /* SYNC lobby.request: pairs with bl_lobby_look() */
    bl_publish_line(&session->pool->memory, offset, &line);
    bl_crash_point("request.out");
    return sequence;
}

/* Return 1 if another machine uses this host number; else 0. */
static int bl_lobby_clash(const bl_session *session, const bl_epoch_line *epoch)
{
    bl_lobby_reply reply;
    return bl_lobby_reply_read(session, epoch->epoch % BL_HALF_COUNT, &reply) &&
           reply.epoch == epoch->epoch && reply.live_count > 0 &&
           (reply.boot_id[0] != session->boot_id[0] || reply.boot_id[1] != session->boot_id[1]);
}

/* A request and its result. */
typedef struct bl_lobby_turn {
    bl_session *session;
    bl_wait *wait;
    bl_lobby_reply reply;
    uint64_t nonce;
    uint32_t operation;
    uint32_t open;              /* requests without a reply that a server may have granted */
    uint32_t rung;              /* 1: the server of the last request was woken */
} bl_lobby_turn;

/* Write a request and wait for the current server's reply; the caller holds the host's lock. */
static int bl_lobby_exchange(bl_lobby_turn *turn)
{
    bl_session *session = turn->session;
    const bl_memory *memory = &session->pool->memory;
    bl_lobby_reply *reply = &turn->reply;
    uint64_t target = 0; /* epoch of the server that the request was sent to */
    uint32_t sequence = 0;
    for (;;) {
        bl_epoch_line epoch;
        int status = bl_epoch_read(session->pool, &epoch);
        int serving = status == 0 && bl_epoch_serving(&epoch);
        int nobody = epoch.epoch == 0 || epoch.state == BL_SERVER_STOPPED;
        if (status == 0 && nobody && !session->old_nonce)
            return -BL_ERROR_NO_SERVER;
        if (serving && bl_epoch_second_host(session->pool, &epoch, session->host,
                                            session->boot_id)) {
            if (epoch.host == session->host && bl_wait_turn(memory, turn->wait))
                continue; /* perhaps of an earlier boot of this host; a successor will follow */
            return -BL_ERROR_SECOND_HOST;
        }
        if (serving && epoch.epoch != target) {
            if (bl_runtime_elsewhere(session->pool, session->directory, session->boot_id, &epoch))
                return -BL_ERROR_RUNTIME_DIR;
            if (bl_lobby_clash(session, &epoch)) {
                if (!bl_wait_turn(memory, turn->wait))
                    return -BL_ERROR_HOST_CLASH;
                continue;
            }
            bl_waker_open(memory, session->directory, epoch.nonce, &session->waker);
            turn->rung = 0;
            if (turn->operation == BL_LOBBY_ATTACH)
                bl_pidfds_show(memory, session->directory, epoch.nonce, turn->nonce);
            bl_crash_point("request.shown");
            sequence = bl_lobby_send(session, turn->operation, turn->nonce, epoch.epoch);
            target = epoch.epoch;
            turn->open++;
        }
        if (serving && bl_lobby_reply_read(session, target % BL_HALF_COUNT, reply) &&
            bl_verify(memory, reply->sequence == sequence && reply->nonce == turn->nonce &&
                                  reply->epoch == target)) {
            bl_believe(memory, bl_lobby_reply_offset(session->host, target % BL_HALF_COUNT));
            turn->open--;
            bl_crash_point("request.answered");
            return reply->status;
        }
        if (serving && !turn->rung && bl_waker_asleep(&session->waker)) {
            bl_wake(memory, session->directory, &session->waker); /* the reply's poll has fenced */
            turn->rung = 1;
        }
        if (!bl_wait_turn(memory, turn->wait))
            return status < 0 ? status : serving ? -BL_ERROR_TIMEOUT : -BL_ERROR_NO_SERVER;
    }
}

/* Settle an attempt of this host that timed out and is still in its line, before the line is
 * overwritten. Returns 0, or an error if no server can be reached now. */
static int bl_lobby_settle(const bl_lobby_turn *turn)
{
    const bl_session *session = turn->session;
    bl_lobby_request line = bl_lobby_line(session);
    bl_lobby_reply reply;
    bl_epoch_line epoch;
    if (line.operation != BL_LOBBY_DETACH ||
        !bl_verify(&session->pool->memory, line.sequence == line.sequence_end &&
                                               line.check == bl_message_check(&line, 0)))
        return 0;
    if (bl_epoch_read(session->pool, &epoch) == 0 &&
        bl_lobby_reply_read(session, epoch.epoch % BL_HALF_COUNT, &reply) &&
        reply.epoch == epoch.epoch && reply.sequence == line.sequence)
        return 0; /* the current server has read it */
    bl_lobby_turn again = {turn->session, turn->wait, .nonce = line.nonce,
                           .operation = BL_LOBBY_DETACH};
    return bl_lobby_exchange(&again);
}

static int bl_lobby_guarded(void *context)
{
    bl_lobby_turn *turn = context;
    int status = bl_lobby_settle(turn);
    return status < 0 ? status : bl_lobby_exchange(turn);
}

/* As bl_lobby_settle() and bl_lobby_exchange(); if a device fails, the caller keeps the host's
 * lock. */
static int bl_lobby_visit(bl_lobby_turn *turn)
{
    return bl_guarded(&turn->session->pool->memory, bl_lobby_guarded, turn);
}

/* Withdraw the request: no server that reads it may assign a lane to this nonce any more. */
static int bl_lobby_withdraw(void *context)
{
    const bl_session *session = context;
    bl_lobby_send(session, BL_LOBBY_DETACH, session->nonce, 0);
    bl_crash_point("request.withdrawn");
    return 0;
}

/* Take the lock that serializes this host's processes. Returns a descriptor or a negative error. */
static int bl_lobby_lock(const bl_session *session, bl_wait *wait)
{
    char name[32];
    snprintf(name, sizeof name, "lobby-%u", session->host);
    for (;;) {
        int lock = bl_host_lock(&session->pool->memory, session->directory, name);
        if (lock != -EAGAIN) {
            bl_crash_point("request.locked");
            return lock;
        }
        if (!bl_wait_turn(&session->pool->memory, wait))
            return -BL_ERROR_LOBBY_BUSY;
    }
}

int bl_lobby_attach(bl_session *session, uint64_t timeout_ns)
{
    const bl_memory *memory = &session->pool->memory;
    bl_wait wait = bl_wait_make(memory, timeout_ns);
    session->nonce = bl_new_nonce(memory);
    bl_crash_point("attach.named");
    session->liveness_lock = bl_liveness_hold(memory, session->directory, session->nonce);
    if (session->liveness_lock < 0)
        return session->liveness_lock;
    bl_crash_point("attach.liveness_held");
    int marked = session->devices ? bl_liveness_devices(memory, session->liveness_lock, 1) : 0;
    if (marked < 0) {
        bl_liveness_end(memory, session->directory, session->nonce, session->liveness_lock, 1);
        session->liveness_lock = -1;
        return marked;
    }
    bl_lobby_turn turn = {session, &wait, .nonce = session->nonce, .operation = BL_LOBBY_ATTACH};
    int lock = bl_lobby_lock(session, &wait);
    int status = lock < 0 ? lock : bl_lobby_visit(&turn);
    int refused = status < 0 && turn.open == 0;
    if (status == 0 && turn.reply.lane >= session->pool->geometry.lane_count)
        status = -BL_ERROR_BAD_REPLY;
    if (status == 0) {
        session->epoch = turn.reply.epoch;
        session->half = turn.reply.epoch % BL_HALF_COUNT;
        session->lane = turn.reply.lane;
        session->sent = session->answered = 0;
        session->window = 1;
        status = bl_heartbeat_start(&session->heartbeat, memory,
                                    bl_lane_offset(&session->pool->geometry, session->lane),
                                    session->nonce);
        bl_crash_point("attach.beating");
    }
    if (status < 0 && !refused)
        bl_guarded(memory, bl_lobby_withdraw, session);
    if (lock >= 0)
        bl_host_unlock(memory, lock);
    bl_crash_point("attach.unlocked");
    session->attached = status == 0;
    if (session->attached)
        session->old_nonce = 0;
    if (!session->attached) { /* a lane assigned too late is found to have no owner */
        bl_session_rest(session);
        bl_liveness_end(memory, session->directory, session->nonce, session->liveness_lock,
                        refused);
        session->liveness_lock = -1;
    }
    return status;
}

int bl_lobby_detach(bl_session *session, uint64_t timeout_ns)
{
    const bl_memory *memory = &session->pool->memory;
    bl_wait wait = bl_wait_make(memory, timeout_ns);
    bl_heartbeat_end(&session->heartbeat); /* before the lane can have another writer */
    bl_crash_point("detach.silent");
    bl_lobby_turn turn = {session, &wait, .nonce = session->nonce, .operation = BL_LOBBY_DETACH};
    int lock = bl_lobby_lock(session, &wait);
    int status = lock < 0 ? lock : bl_lobby_visit(&turn);
    if (lock >= 0)
        bl_host_unlock(memory, lock);
    bl_crash_point("detach.answered");
    bl_session_rest(session);
    bl_liveness_end(memory, session->directory, session->nonce, session->liveness_lock, status
                    == 0);
    session->liveness_lock = -1;
    bl_crash_point("detach.liveness_ended");
    session->attached = 0;
    return status;
}

void bl_session_rest(const bl_session *session)
{
    if (session->devices)
        bl_liveness_devices(&session->pool->memory, session->liveness_lock, 0);
}

/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * The lobby, client side: how a process without a lane gets one (D4).
 *
 * One request line and two reply lines (one per half) for each host number. The processes of a host
 * take turns under a lock of their own kernel, so each line has one writer. A request is new when
 * its sequence is; the reply names the sequence and the nonce. A host that finds another machine's
 * boot id alive under its number does not write at all.
 */
#include <errno.h>
#include <stdio.h>

#include "crash_point.h"
#include "guard.h"
#include "session.h"

/* The reply line of this session's host in the half that serves now: 1 if it is whole. */
static int bl_lobby_reply_read(const bl_session *session, uint32_t half, bl_lobby_reply *out)
{
    const bl_memory *memory = &session->pool->memory;
    uint64_t offset = bl_lobby_reply_offset(session->host, half);
    bl_refetch(memory, offset, BL_LINE_SIZE); /* SYNC lobby.reply */
    bl_load_line(memory, offset, out);
    return bl_verify(memory, out->sequence == out->sequence_end &&
                                 out->check == bl_message_check(out, 0));
}

/* The sequence after the one that stands in this host's request line. */
static uint32_t bl_lobby_next_sequence(const bl_session *session)
{
    const bl_memory *memory = &session->pool->memory;
    bl_lobby_request line;
    uint64_t offset = bl_lobby_request_offset(session->host);
    bl_refetch(memory, offset, BL_LINE_SIZE); /* another process may have streamed it */
    bl_load_line(memory, offset, &line);
    bl_rely(memory, offset, BL_LINE_SIZE); /* its former writer had the lock that we have */
    return line.sequence + 1;
}

static void bl_lobby_ask(bl_session *session, uint32_t operation, uint32_t sequence,
                         uint64_t epoch)
{
    bl_lobby_request line = {
        .operation = operation,
        .nonce = session->nonce,
        .old_nonce = session->old_nonce,
        .boot_id = {session->boot_id[0], session->boot_id[1]},
        .host = session->host,
        .epoch = epoch,
        .sequence = sequence,
        .sequence_end = sequence,
    };
    line.check = bl_message_check(&line, 0);
    /* SYNC lobby.request: pairs with the server's look into the lobby */
    bl_publish_line(&session->pool->memory, bl_lobby_request_offset(session->host), &line);
    bl_crash_point("ask.out");
}

/* Does another machine use this host number? */
static int bl_lobby_clash(const bl_session *session, const bl_epoch_line *epoch)
{
    bl_lobby_reply reply;
    return bl_lobby_reply_read(session, epoch->epoch % BL_HALF_COUNT, &reply) &&
           reply.epoch == epoch->epoch && reply.live_count > 0 &&
           (reply.boot_id[0] != session->boot_id[0] || reply.boot_id[1] != session->boot_id[1]);
}

/* Ask and wait for the answer of whichever server serves; the caller holds the host's lock.
 * open: requests that a server may have granted without our knowing. */
static int bl_lobby_exchange(bl_session *session, uint32_t operation, bl_wait *wait,
                             bl_lobby_reply *reply, uint32_t *open)
{
    const bl_memory *memory = &session->pool->memory;
    uint64_t asked = 0; /* epoch that the request was made to */
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
            if (epoch.host == session->host && bl_wait_turn(memory, wait))
                continue; /* perhaps of an earlier boot of this host; its successor is to come */
            return -BL_ERROR_SECOND_HOST;
        }
        if (serving && epoch.epoch != asked) {
            if (bl_lobby_clash(session, &epoch)) {
                if (!bl_wait_turn(memory, wait))
                    return -BL_ERROR_HOST_CLASH;
                continue;
            }
            bl_life_show(memory, session->directory, epoch.nonce, session->nonce);
            bl_crash_point("ask.shown");
            sequence = bl_lobby_next_sequence(session);
            bl_lobby_ask(session, operation, sequence, epoch.epoch);
            asked = epoch.epoch;
            ++*open;
        }
        if (serving && bl_lobby_reply_read(session, asked % BL_HALF_COUNT, reply) &&
            bl_verify(memory, reply->sequence == sequence && reply->nonce == session->nonce &&
                                  reply->epoch == asked)) {
            bl_believe(memory, bl_lobby_reply_offset(session->host, asked % BL_HALF_COUNT));
            --*open;
            bl_crash_point("ask.answered");
            return reply->status;
        }
        if (!bl_wait_turn(memory, wait))
            return status < 0 ? status : serving ? -BL_ERROR_TIMEOUT : -BL_ERROR_NO_SERVER;
    }
}

typedef struct bl_lobby_turn {
    bl_session *session;
    bl_wait *wait;
    bl_lobby_reply *reply;
    uint32_t *open;
    uint32_t operation;
} bl_lobby_turn;

static int bl_lobby_guarded(void *context)
{
    const bl_lobby_turn *turn = context;
    return bl_lobby_exchange(turn->session, turn->operation, turn->wait, turn->reply, turn->open);
}

/* The same, and a device that fails leaves the host's lock with the caller. */
static int bl_lobby_visit(bl_session *session, uint32_t operation, bl_wait *wait,
                          bl_lobby_reply *reply, uint32_t *open)
{
    bl_lobby_turn turn = {session, wait, reply, open, operation};
    return bl_guarded(&session->pool->memory, bl_lobby_guarded, &turn);
}

/* The lock under which this host's processes take turns: a descriptor or a negative error. */
static int bl_lobby_lock(const bl_session *session, bl_wait *wait)
{
    char name[32];
    snprintf(name, sizeof name, "lobby-%u", session->host);
    for (;;) {
        int lock = bl_host_lock(&session->pool->memory, session->directory, name);
        if (lock != -EAGAIN) {
            bl_crash_point("ask.locked");
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
    session->proof = bl_proof_hold(memory, session->directory, session->nonce);
    if (session->proof < 0)
        return session->proof;
    bl_crash_point("attach.proof_held");
    int marked = session->devices ? bl_proof_devices(memory, session->proof, 1) : 0;
    if (marked < 0) {
        bl_proof_end(memory, session->directory, session->nonce, session->proof, 1);
        return marked;
    }
    bl_lobby_reply reply;
    uint32_t open = 0;
    int lock = bl_lobby_lock(session, &wait);
    int status = lock < 0 ? lock
                          : bl_lobby_visit(session, BL_LOBBY_ATTACH, &wait, &reply, &open);
    int refused = status < 0 && open == 0;
    if (status == 0 && reply.lane >= session->pool->geometry.lane_count)
        status = -BL_ERROR_BAD_REPLY;
    if (status == 0) {
        session->epoch = reply.epoch;
        session->half = reply.epoch % BL_HALF_COUNT;
        session->lane = reply.lane;
        session->sent = session->answered = 0;
        session->window = 1;
        status = bl_beat_start(&session->beat, memory,
                               bl_lane_offset(&session->pool->geometry, session->lane),
                               session->nonce);
        bl_crash_point("attach.beating");
    }
    if (lock >= 0)
        bl_host_unlock(memory, lock);
    bl_crash_point("attach.unlocked");
    session->attached = status == 0;
    if (session->attached)
        session->old_nonce = 0;
    if (!session->attached) { /* a lane given too late is found ownerless by this very proof */
        bl_session_rest(session);
        bl_proof_end(memory, session->directory, session->nonce, session->proof, refused);
    }
    return status;
}

int bl_lobby_detach(bl_session *session, uint64_t timeout_ns)
{
    const bl_memory *memory = &session->pool->memory;
    bl_wait wait = bl_wait_make(memory, timeout_ns);
    bl_beat_stop(&session->beat); /* before the lane can have another writer */
    bl_crash_point("detach.silent");
    bl_lobby_reply reply;
    uint32_t open = 0;
    int lock = bl_lobby_lock(session, &wait);
    int status = lock < 0 ? lock
                          : bl_lobby_visit(session, BL_LOBBY_DETACH, &wait, &reply, &open);
    if (lock >= 0)
        bl_host_unlock(memory, lock);
    bl_crash_point("detach.answered");
    bl_session_rest(session);
    bl_proof_end(memory, session->directory, session->nonce, session->proof, status == 0);
    bl_crash_point("detach.proof_ended");
    session->attached = 0;
    return status;
}

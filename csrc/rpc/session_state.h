/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * The client's state of a session. A session belongs to one process and is used by one thread at a
 * time; after a fork every call of the child's copy fails.
 *
 *   attach (rpc/lobby.c) --> calls (rpc/lane.c) --> detach (rpc/lobby.c)
 *                          |  server replaced, session abandoned, or a call timed out
 *                          +--> attached again under a new nonce; the old one is abandoned
 *
 * When a client abandons a nonce, nothing is written under it any more: its grants end.
 */
#ifndef BL_SESSION_H
#define BL_SESSION_H

#include "api/pool.h"
#include "api/rpc.h"
#include "liveness/heartbeat.h"
#include "pool/epoch.h"
#include "liveness/pidfds.h"
#include "liveness/wake.h"
#include "liveness/lock.h"
#include "liveness/runtime.h"
#include "coherence/wait.h"

struct bl_session {
    const bl_pool *pool;
    char directory[BL_PATH_SIZE];   /* the pool's runtime directory on this host */
    uint64_t boot_id[2];
    uint64_t nonce;
    uint64_t old_nonce;             /* has ended, perhaps unknown to the server; or 0 */
    uint64_t epoch;
    uint32_t half;                  /* half of the server that assigned the lane */
    uint32_t host;
    uint32_t lane;
    uint32_t sent;                  /* sequence of the last request */
    uint32_t answered;              /* sequence of the last reply taken */
    uint32_t window;                /* reply lines polled together */
    bl_core core;                   /* the core of the last calls */
    uint64_t ring_count;            /* of the doorbell */
    uint64_t called_ns;             /* when the last wait for a reply began */
    uint32_t attached;
    uint32_t devices;               /* 1: a device may write what is granted to it */
    int liveness_lock;              /* its descriptor */
    uint8_t *scratch;               /* bulk_size for a request, bulk_size for a reply */
    uint32_t *parent;               /* 1 here; a forked child reads 0 */
    bl_waker waker;                 /* of the server that got the last request */
    bl_heartbeat heartbeat;
    bl_session_stat stat;
};

/* Request a lane in the lobby. Returns 0 or a negative error. The session has a directory, host and
 * boot_id. */
int bl_lobby_attach(bl_session *session, uint64_t timeout_ns);

/* Give back the lane. Returns 0, or an error if no server has confirmed it: a server will find the
 * liveness lock free. */
int bl_lobby_detach(bl_session *session, uint64_t timeout_ns);

/* Announce that from now on a device may write to this session's grants: only a pidfd then proves
 * that its process is dead, and its grants are flushed at that time (D15). Call it before
 * requesting the grants. Returns 0 or -errno. */
int bl_session_devices(bl_session *session);

/* Announce that this session's devices no longer write to its grants, and that what they wrote is
 * in memory: from now on its lock alone shows whether it is gone. Call it before a live session
 * returns its grants. */
void bl_session_rest(const bl_session *session);

/* Abandon the nonce, with its grants, until this process is proven gone: something may still be
 * written under it. The server is not notified; the next call attaches under a new nonce. */
void bl_session_leave(bl_session *session);

/* Return the slot of a sequence number's message in the lane. */
static inline uint32_t bl_slot_of(const bl_session *session, uint32_t sequence)
{
    return sequence & (session->pool->geometry.slot_count - 1);
}

/* ---- The parts of a call on a lane (rpc/lane.c). */
enum { BL_WINDOW_MAX = 128 };

/* Stream count requests of one method, each of size bytes: at most BL_MESSAGE_INLINE_SIZE. There is
 * no fence; the caller has ensured that count slots are free. */
void bl_lane_send(bl_session *session, uint32_t method, uint32_t flags, const void *payloads,
                  uint32_t size, uint32_t count);

/* Wait for at least one reply. Returns their number (at most count), 0 if the server was replaced
 * or has ended the session, or -BL_ERROR_TIMEOUT. */
int bl_lane_wait(bl_session *session, bl_reply *replies, uint32_t count, bl_wait *wait);

/* Make one call on the current lane. Returns its status; -BL_ERROR_SESSION_LOST if the server was
 * replaced or has ended the session, and will not reply. */
int bl_lane_call(bl_session *session, const bl_message *message, bl_wait *wait);

/* Stream a long request's bytes into the lane's bulk area and describe them in bulk. */
int bl_bulk_send(bl_session *session, const void *request, uint32_t size, bl_bulk *bulk);

#endif

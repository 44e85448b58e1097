/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * The client's state of a session. A session belongs to one process, whose threads may share it;
 * after a fork every call of the child's copy fails.
 *
 * A lock serializes the calls. Copies run without it, so any call may attach the session anew while
 * another thread copies. A copy out of the pool checks its entries under the attachment of its
 * lookup. A copy into granted space delays the end of the nonce (bl_session_write), because the
 * grants end with it.
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
#include "coherence/mutex.h"
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
    uint32_t closed;                /* 1: no more calls */
    uint64_t users;                 /* threads in a put or get; atomic */
    uint32_t writers;               /* threads that copy into space granted to the nonce */
    bl_mutex writers_lock;          /* guards writers */
    bl_mutex lock;                  /* guards the rest, but not users */
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

/* The server that answered a call, and the nonce that made it. */
typedef struct bl_attachment {
    uint64_t nonce;
    uint64_t epoch;
    uint32_t half;
} bl_attachment;

/* Lock the session for calls by bl_session_call_locked(), whose messages may be in the scratch.
 * Returns 0, -BL_ERROR_FORKED or -BL_ERROR_CLOSED; then it is not locked. */
int bl_session_lock(bl_session *session);
void bl_session_unlock(bl_session *session);
int bl_session_call_locked(bl_session *session, const bl_message *message, uint64_t timeout_ns);

/* Return the attachment of the last call. The session is locked. */
static inline bl_attachment bl_session_attachment(const bl_session *session)
{
    return (bl_attachment){session->nonce, session->epoch, session->half};
}

/* Begin a put or get: until bl_session_unuse() the session is not closed. Returns 0, or an
 * error as above; *now, if not NULL, is the attachment. */
int bl_session_use(bl_session *session, bl_attachment *now);
void bl_session_unuse(bl_session *session);

/* Begin to copy into space that was granted to this nonce. Returns 0, or -BL_ERROR_SESSION_LOST:
 * the grants have ended. No call of another thread ends the nonce before bl_session_written(),
 * which follows a fence. The thread makes no call in between. */
int bl_session_write(bl_session *session, uint64_t nonce);
void bl_session_written(bl_session *session);

/* Return 1 if the session still has this nonce, with its grants and pins. */
int bl_session_holds(bl_session *session, uint64_t nonce);

/* Announce that from now on a device may write to this session's grants: only a pidfd then proves
 * that its process is dead, and its grants are flushed at that time (D15). Call it before
 * requesting the grants. Returns 0 or -errno. */
int bl_session_devices(bl_session *session);

/* Announce that this session's devices no longer write to its grants, and that what they wrote is
 * in memory: from now on its lock alone shows whether it is gone. Call it before a live session
 * returns its grants. */
void bl_session_rest(const bl_session *session);

/* Abandon this nonce, with its grants, until the process is proven gone: something may still be
 * written under it. The server is not notified; the next call attaches under a new nonce. */
void bl_session_leave(bl_session *session, uint64_t nonce);

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

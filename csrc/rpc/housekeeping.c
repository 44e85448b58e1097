/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * The server's housekeeping: it assigns lanes in the lobby, detects sessions that ended, and checks
 * that it is still the pool's server.
 *
 * A session ends GONE when its process reported it (detach, a new attachment that abandons the old
 * nonce, or the final value of its heartbeat), when its pidfd (liveness/pidfds.h) or its lock
 * (liveness/lock.h) proves that the process ended, or when its host number returns under another
 * boot and its heartbeat stands still (a heartbeat that moves is another machine's). It ends
 * SUSPECT when the only evidence is a heartbeat that stands still, or failed memory of its lane;
 * the lane is not reassigned until GONE follows (D7).
 */
#include "rpc/server_state.h"

#include <errno.h>

#include "coherence/crash_point.h"
#include "pool/boot.h"
#include "rpc/doorbell.h"
#include "rpc/jobs.h"

enum {
    BL_HOUSEKEEPING_PERIOD_NS = 100 * 1000,
    BL_HOUSEKEEPING_ASLEEP_NS = 100 * 1000 * 1000, /* while the server sleeps */
    BL_LIVENESS_PERIOD_NS = 20 * 1000 * 1000,
    BL_SWEEP_MAX = 64           /* liveness locks without a session removed together */
};

/* In nanoseconds, these exceed the range of int. */
#define BL_SWEEP_PERIOD_NS 10000000000ull
#define BL_HEARTBEAT_LOST_NS 5000000000ull

static uint64_t bl_heartbeat_lost_ns(const bl_server *server)
{
    return server->heartbeat_lost_ns ? server->heartbeat_lost_ns : BL_HEARTBEAT_LOST_NS;
}

void bl_server_heartbeat_lost(bl_server *server, uint64_t ns) { server->heartbeat_lost_ns = ns; }

int bl_server_still(const bl_server *server)
{
    bl_epoch_line line;
    int status = bl_epoch_read(server->pool, &line);
    bl_epoch_ordered(server->pool, BL_ALL_WRITES);
    if (!bl_verify(&server->pool->memory, line.epoch <= server->epoch))
        return -BL_ERROR_DEPOSED;
    if (line.epoch == server->epoch && line.nonce != server->nonce)
        return bl_server_clash(server); /* another machine was elected under this host number */
    return status;
}

/* Write a lane's session line. The line of a free lane has no nonce: see bl_session_over(). */
void bl_housekeeping_write(bl_server *server, uint32_t number)
{
    const bl_lane *lane = &server->lanes[number];
    bl_session_line line = {
        .nonce = lane->state == BL_SESSION_FREE ? 0 : lane->nonce,
        .boot_id = {lane->boot_id[0], lane->boot_id[1]},
        .host = lane->host,
        .state = lane->state,
        .epoch = lane->epoch,
    };
    bl_table_seal(&line, number);
    uint64_t offset = bl_session_offset(&server->pool->geometry, number, server->half);
    bl_crash_line("session.line", &server->pool->memory, offset, &line);
    /* SYNC session.line: pairs with bl_takeover_inherit() */
    bl_publish_line(&server->pool->memory, offset, &line);
}

static void bl_live_remove(bl_server *server, uint32_t number)
{
    uint32_t kept = 0, busy = server->busy_count;
    /* the order of the others stays: rpc/quantum.h */
    for (uint32_t i = 0; i < server->live_count; i++)
        if (server->live[i] != number)
            server->live[kept++] = server->live[i];
        else if (i < busy)
            server->busy_count--;
    server->live_count = kept;
}

/* Publish a host's current lobby reply. */
static void bl_lobby_publish(bl_server *server, uint32_t host)
{
    bl_lobby_reply *reply = &server->lobby[host];
    reply->live_count = 0;
    for (uint32_t i = 0; i < server->live_count; i++) {
        const bl_lane *lane = &server->lanes[server->live[i]];
        if (lane->host != host)
            continue;
        reply->live_count++;
        reply->boot_id[0] = lane->boot_id[0], reply->boot_id[1] = lane->boot_id[1];
    }
    reply->sequence_end = reply->sequence;
    reply->epoch = server->epoch;
    reply->check = bl_message_check(reply, 0);
    uint64_t offset = bl_lobby_reply_offset(host, server->half);
    bl_crash_line("lobby.line", &server->pool->memory, offset, reply);
    /* SYNC lobby.reply: pairs with bl_lobby_reply_read() */
    bl_publish_line(&server->pool->memory, offset, reply);
}

static int bl_lane_here(const bl_server *server, const bl_lane *lane)
{
    return bl_boot_same(lane->boot_id, server->boot_id);
}

int bl_lane_has_devices(const bl_server *server, uint32_t number)
{
    const bl_lane *lane = &server->lanes[number];
    return bl_lane_here(server, lane) &&
           (lane->liveness_lock < 0 ||
            bl_liveness_has_devices(&server->pool->memory, lane->liveness_lock));
}

/* End a lane's session in this server's state and in that of the layers above it. */
static void bl_lane_over(bl_server *server, uint32_t number, enum bl_end end)
{
    bl_lane *lane = &server->lanes[number];
    int inherited = lane->epoch != server->epoch;
    if (lane->state == BL_SESSION_LIVE)
        bl_live_remove(server, number);
    bl_job_end(server, lane); /* no client waits for it: its place is free for another call */
    bl_jobs_session_ended(server, number);
    if (!inherited)
        server->hooks.ended(server->hooks.context, number, end);
    else if (end == BL_END_GONE && bl_lane_has_devices(server, number))
        server->inherited_devices = 1;
    lane->state = end == BL_END_GONE ? BL_SESSION_FREE : BL_SESSION_SUSPECT;
    lane->since_ns = server->housekeeping_ns; /* the time of this housekeeping is close enough */
    server->stat.end_count++;
    if (end == BL_END_GONE && inherited && --server->inherited_count == 0)
        server->hooks.settled(server->hooks.context);
}

/* The liveness lock is removed after the session line is written, and only while this server is the
 * pool's current server: a successor that has read the earlier line needs the lock. */
int bl_housekeeping_end(bl_server *server, uint32_t number, enum bl_end end)
{
    const bl_memory *memory = &server->pool->memory;
    bl_lane *lane = &server->lanes[number];
    int status = 0;
    bl_lane_over(server, number, end);
    bl_crash_point("end.over");
    bl_housekeeping_write(server, number);
    bl_crash_point("end.written");
    if (end == BL_END_GONE) {
        status = bl_server_still(server); /* SYNC session.line: written before this check */
        bl_liveness_end(memory, server->directory, lane->nonce, lane->liveness_lock, status == 0);
        lane->liveness_lock = -1;
        if (server->pidfds)
            bl_pidfds_forget(server->pidfds, lane->nonce);
        bl_crash_point("end.liveness_removed");
    }
    bl_lobby_publish(server, lane->host);
    bl_crash_point("end.published");
    return status;
}

static int64_t bl_lane_of(const bl_server *server, uint64_t nonce)
{
    for (uint32_t i = 0; i < server->pool->geometry.lane_count; i++)
        if (server->lanes[i].state != BL_SESSION_FREE && server->lanes[i].nonce == nonce)
            return i;
    return -1;
}

/* Check a session whose host number is used under another boot. Returns 0 if it was of an earlier
 * boot and has ended; -BL_ERROR_HOST_CLASH if it is alive, so it runs on another machine; -EAGAIN
 * if its heartbeat has not been watched for long enough. */
static int bl_lane_rebooted(const bl_server *server, const bl_lane *lane, uint64_t now_ns)
{
    const bl_memory *memory = &server->pool->memory;
    uint64_t still_ns = now_ns - lane->heartbeat_seen_ns;
    if (lane->liveness_lock >= 0)
        return bl_liveness_gone(memory, lane->liveness_lock) ? 0 : -BL_ERROR_HOST_CLASH;
    if (bl_error_passes(-lane->liveness_lock))
        return -EAGAIN;
    if (lane->state == BL_SESSION_LIVE)
        return still_ns < bl_heartbeat_lost_ns(server) ? -BL_ERROR_HOST_CLASH : 0;
    if (still_ns > BL_HEARTBEAT_WATCH_NS)
        return 0;
    return lane->moved ? -BL_ERROR_HOST_CLASH : -EAGAIN;
}

/* Check for another boot under this host number: either another machine, or an earlier boot whose
 * sessions have ended. Returns 0, -BL_ERROR_HOST_CLASH, -EAGAIN as above, or -BL_ERROR_DEPOSED. */
static int bl_lobby_clash_check(bl_server *server, const bl_lobby_request *request, uint64_t now_ns)
{
    for (uint32_t i = 0; i < server->pool->geometry.lane_count; i++) {
        const bl_lane *lane = &server->lanes[i];
        if (lane->state == BL_SESSION_FREE || lane->broken || lane->host != request->host ||
            bl_boot_same(lane->boot_id, request->boot_id))
            continue;
        int status = bl_lane_rebooted(server, lane, now_ns);
        if (status == 0)
            status = bl_housekeeping_end(server, i, BL_END_GONE);
        if (status < 0)
            return status;
    }
    return 0;
}

static int bl_lane_watched(const bl_lane *lane)
{
    return lane->state != BL_SESSION_FREE && !lane->broken;
}

/* Record whether a session's heartbeat advances. The first reading proves nothing. */
static void bl_lane_watch(bl_lane *lane, uint64_t count, uint64_t now_ns)
{
    if (count <= lane->heartbeat_count)
        return;
    if (lane->heartbeat_count != 0)
        lane->heartbeat_seen_ns = now_ns, lane->moved = 1;
    lane->heartbeat_count = count;
}

/* Return 1 if a session of an earlier epoch has ended, because an operator declared it gone, or
 * because this server has its host number under another boot and no heartbeat shows another
 * machine; else 0. */
static int bl_lane_of_old(const bl_server *server, const bl_lane *lane, uint64_t now_ns)
{
    if (lane->epoch == server->epoch)
        return 0;
    return bl_declared(server, lane->nonce) ||
           (lane->host == server->host && !bl_lane_here(server, lane) &&
            bl_lane_rebooted(server, lane, now_ns) == 0);
}

/* Check all sessions: end those that detached or are proven gone, and mark those whose heartbeat
 * has stopped as suspect. The caller checks afterward whether this server is still the pool's
 * current server. */
static void bl_housekeeping_watch(bl_server *server, uint64_t now_ns)
{
    const bl_memory *memory = &server->pool->memory;
    const bl_geometry *g = &server->pool->geometry;
    for (uint32_t i = 0; i < g->lane_count; i++)
        if (bl_lane_watched(&server->lanes[i]))
            bl_invalidate(memory, bl_lane_offset(g, i), BL_LINE_SIZE);
    bl_fence_full(memory);
    for (uint32_t i = 0; i < g->lane_count; i++) {
        bl_lane *lane = &server->lanes[i];
        if (lane->state == BL_SESSION_FREE)
            continue;
        if (bl_error_passes(-lane->liveness_lock)) /* D16: this proves nothing */
            lane->liveness_lock = bl_liveness_watch(memory, server->directory, lane->nonce);
        uint64_t count = bl_lane_watched(lane)
                             ? bl_heartbeat_read(memory, bl_lane_offset(g, i), lane->nonce)
                             : 0;
        /* SYNC heartbeat.last: pairs with bl_heartbeat_end() */
        int left = count == BL_HEARTBEAT_LAST;
        if (left)
            bl_believe(memory, bl_lane_offset(g, i));
        if (left || (lane->liveness_lock >= 0 && bl_liveness_gone(memory, lane->liveness_lock))) {
            bl_housekeeping_end(server, i, BL_END_GONE);
            continue;
        }
        bl_operate_name(server, lane);
        bl_lane_watch(lane, count, now_ns);
        if (lane->liveness_lock >= 0 || !bl_lane_watched(lane))
            continue;
        if (bl_lane_of_old(server, lane, now_ns))
            bl_housekeeping_end(server, i, BL_END_GONE);
        else if (lane->state == BL_SESSION_LIVE &&
                 now_ns - lane->heartbeat_seen_ns > bl_heartbeat_lost_ns(server))
            bl_housekeeping_end(server, i, BL_END_SUSPECT);
    }
}

/* Return a free lane, or -BL_ERROR_NO_LANE. */
static int64_t bl_lane_free(const bl_server *server)
{
    for (uint32_t i = 0; i < server->pool->geometry.lane_count; i++)
        if (server->lanes[i].state == BL_SESSION_FREE && !server->lanes[i].broken)
            return i;
    return -BL_ERROR_NO_LANE;
}

/* Assign a lane to a nonce. Returns its number, or an error; -EAGAIN: retry. A second request gets
 * the same lane. */
static int64_t bl_lobby_give(bl_server *server, const bl_lobby_request *request, uint64_t now_ns)
{
    const bl_memory *memory = &server->pool->memory;
    int here = bl_boot_same(request->boot_id, server->boot_id);
    if (server->pool->one_host && !(here && request->host == server->host))
        return -BL_ERROR_SECOND_HOST;
    int64_t old = request->old_nonce ? bl_lane_of(server, request->old_nonce) : -1;
    int status = old >= 0 ? bl_housekeeping_end(server, (uint32_t)old, BL_END_GONE) : 0;
    if (status < 0)
        return status;
    int64_t known = bl_lane_of(server, request->nonce);
    if (known >= 0 && server->lanes[known].state == BL_SESSION_LIVE)
        return known;
    if (known >= 0) { /* an earlier server assigned a lane and died before it replied */
        bl_lane_over(server, (uint32_t)known, BL_END_GONE);
        bl_housekeeping_write(server, (uint32_t)known); /* a nonce has one lane */
        bl_liveness_end(memory, server->directory, request->nonce,
                        server->lanes[known].liveness_lock, 0);
        server->lanes[known].liveness_lock = -1;
    }
    status = bl_lobby_clash_check(server, request, now_ns);
    if (status < 0)
        return status;
    if (bl_lane_free(server) < 0)
        bl_housekeeping_watch(server, now_ns); /* a session may have ended in the meantime */
    int64_t found = bl_lane_free(server);
    if (found < 0)
        return found;
    uint32_t number = (uint32_t)found;
    server->lanes[number] = (bl_lane){
        .nonce = request->nonce,
        .boot_id = {request->boot_id[0], request->boot_id[1]},
        .epoch = server->epoch,
        .heartbeat_seen_ns = now_ns,
        .host = request->host,
        .state = BL_SESSION_LIVE,
        .next = 1,
        .window = 1,
        .since_ns = now_ns,
        .busy_ns = now_ns,
        .answered = server->done,
        .allowance = {.tokens = server->quota.calls_per_s * BL_TOKEN, .filled_ns = now_ns},
        .liveness_lock = here ? bl_liveness_watch(memory, server->directory, request->nonce)
            : -ENOENT,
    };
    bl_operate_name(server, &server->lanes[number]);
    bl_doorbell_add(server, number);
    server->stat.attach_count++;
    bl_crash_point("give.taken");
    bl_housekeeping_write(server, number); /* in memory before the client gets the lane */
    bl_crash_point("give.written");
    status = bl_server_still(server); /* SYNC session.line: written before this check */
    return status < 0 ? status : found;
}

/* Serve one request in the lobby. Returns 1, or 0 if it cannot be answered yet. */
static int bl_lobby_serve(bl_server *server, const bl_lobby_request *request, uint64_t now_ns)
{
    int64_t lane = -BL_ERROR_BAD_REQUEST;
    bl_crash_point("lobby.request_seen");
    if (request->operation == BL_LOBBY_ATTACH && request->nonce != 0) {
        lane = bl_lobby_give(server, request, now_ns);
    } else if (request->operation == BL_LOBBY_DETACH) {
        lane = bl_lane_of(server, request->nonce);
        lane = lane >= 0 ? bl_housekeeping_end(server, (uint32_t)lane, BL_END_GONE) : 0;
    }
    if (lane == -EAGAIN)
        return 0;
    if (lane == -BL_ERROR_DEPOSED)
        return 1; /* a successor has seen the lane and will answer */
    if (lane < 0 && server->pidfds)
        bl_pidfds_forget(server->pidfds, request->nonce);
    bl_lobby_reply *reply = &server->lobby[request->host];
    *reply = (bl_lobby_reply){
        .sequence = request->sequence,
        .status = lane < 0 ? (int32_t)lane : 0,
        .nonce = request->nonce,
        .lane = lane < 0 ? 0 : (uint32_t)lane,
    };
    bl_crash_point("lobby.served");
    bl_lobby_publish(server, request->host);
    bl_crash_point("lobby.replied");
    return 1;
}

/* Serve the requests in the lobby. Returns the number of requests that cannot be answered yet. */
static uint32_t bl_lobby_look(bl_server *server, uint64_t now_ns)
{
    const bl_memory *memory = &server->pool->memory;
    uint32_t waiting = 0;
    for (uint32_t host = 0; host < BL_HOST_COUNT; host++)
        bl_invalidate(memory, bl_lobby_request_offset(host), BL_LINE_SIZE);
    bl_fence_full(memory);
    for (uint32_t host = 0; host < BL_HOST_COUNT; host++) {
        bl_lobby_request request;
        /* SYNC lobby.request: pairs with bl_lobby_send() */
        bl_load_line(memory, bl_lobby_request_offset(host), &request);
        if (request.sequence == server->lobby_seen[host] ||
            !bl_verify(memory, request.sequence == request.sequence_end &&
                                   request.check == bl_message_check(&request, 0)) ||
            request.host != host)
            continue;
        bl_believe(memory, bl_lobby_request_offset(host));
        /* The request may be to another server; but a detachment is valid for all servers. */
        int mine = bl_verify(memory, request.epoch == server->epoch ||
                                         request.operation == BL_LOBBY_DETACH);
        if (!mine || bl_lobby_serve(server, &request, now_ns))
            server->lobby_seen[host] = request.sequence;
        else
            waiting++;
    }
    return waiting;
}

/* Return 1 if the liveness lock of this nonce is still needed: for a lane, a takeover or an
 * election; else 0. */
static int bl_liveness_needed(const bl_server *server, uint64_t nonce)
{
    const bl_memory *memory = &server->pool->memory;
    for (uint32_t half = 0; half < BL_HALF_COUNT; half++) {
        bl_epoch_line line;
        if (bl_epoch_line_read(server->pool, half, &line) < 0 || line.nonce == nonce)
            return 1;
    }
    for (uint32_t host = 0; host < BL_HOST_COUNT; host++) {
        bl_candidate_line line;
        uint64_t offset = BL_CANDIDATE_OFFSET + (uint64_t)host * BL_POLL_STRIDE;
        if (bl_register_read(memory, offset, host, &line) < 0 || line.nonce == nonce)
            return 1;
    }
    return bl_lane_of(server, nonce) >= 0;
}

/* Remove the liveness locks of processes that died without a lane. The order matters: the processes
 * are dead; all their requests are known; and no successor has assigned them a lane, because this
 * server still serves. */
static int bl_housekeeping_sweep(bl_server *server, uint64_t now_ns)
{
    const bl_memory *memory = &server->pool->memory;
    uint64_t nonces[BL_SWEEP_MAX];
    int count = bl_liveness_left(memory, server->directory, nonces, BL_SWEEP_MAX);
    if (count <= 0)
        return 0;
    if (bl_lobby_look(server, now_ns) > 0)
        return 0; /* one of these processes may still get a lane */
    int status = bl_server_still(server);
    for (int i = 0; i < count && status == 0; i++)
        if (!bl_liveness_needed(server, nonces[i]))
            bl_liveness_end(memory, server->directory, nonces[i], -1, 1);
    return status;
}

/* End the sessions whose processes the pidfd watch reports as ended. */
static void bl_housekeeping_reap(bl_server *server)
{
    for (uint64_t nonce; server->pidfds && (nonce = bl_pidfds_look(server->pidfds)) != 0;) {
        int64_t lane = bl_lane_of(server, nonce);
        if (lane >= 0)
            bl_housekeeping_end(server, (uint32_t)lane, BL_END_GONE);
    }
}

int bl_housekeeping_keep(bl_server *server, uint64_t now_ns)
{
    if (now_ns - server->housekeeping_ns <
        (bl_server_asleep(server) ? BL_HOUSEKEEPING_ASLEEP_NS : BL_HOUSEKEEPING_PERIOD_NS))
        return 0;
    server->housekeeping_ns = now_ns;
    server->stat.housekeeping_count++;
    bl_operate_apply(server);
    bl_doorbell_quieten(server, now_ns);
    bl_housekeeping_reap(server);
    bl_lobby_look(server, now_ns);
    if (now_ns - server->liveness_ns < BL_LIVENESS_PERIOD_NS)
        return 0;
    server->liveness_ns = now_ns;
    bl_trace_mark(&server->trace);
    bl_housekeeping_watch(server, now_ns);
    if (now_ns - server->sweep_ns > BL_SWEEP_PERIOD_NS) {
        server->sweep_ns = now_ns;
        int status = bl_housekeeping_sweep(server, now_ns);
        if (status < 0)
            return status;
    }
    return bl_server_still(server);
}

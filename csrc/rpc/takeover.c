/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Takeover: becoming the server (D5), in one pass that reads after it writes.
 *
 * Epoch N writes half N mod 2 only. So the server of N-2 must be proven gone before N writes at
 * all. The server of N-1 may still run: it may continue to write its own half, which no process
 * relies on once epoch N is published.
 *
 *   1  prove N-2 gone; find N-1 silent (or refuse: it lives)
 *   2  be the one owner of epoch N (rpc/elect.c)
 *   3  publish epoch N, TAKING; full fence                            SYNC epoch.line
 *   4  read the predecessor's half once and write its own: sessions with lanes, committed
 *      blocks, and what is open (hooks.recover)
 *   5  store fence; publish SERVING: from now on its own half is authoritative
 *
 * N-1, before it grants from a new extent: writes its open mark, full fence, reads the epoch.
 * Before it grants the space of a committed block: clears its entry, full fence, reads the epoch.
 * Before it replies on a lane: writes its session line, full fence, reads the epoch. Each of the
 * two servers writes before it reads: either N-1 sees epoch N and does none of these, or N
 * sees the mark, the cleared entry, the session.
 *
 * A server that dies before SERVING has changed only its own half. Its successor takes N+2,
 * into the same half once N is proven gone, and reads the half that N read.
 */
#include "rpc/jobs.h"

#include <errno.h>
#include <unistd.h>

#include "coherence/crash_point.h"
#include "coherence/guard.h"
#include "pool/boot.h"

/* The epoch to take, and the epoch lines involved. */
typedef struct bl_takeover {
    uint64_t epoch;
    bl_epoch_line before;       /* the last writer of this server's half: proven gone */
    bl_epoch_line source;       /* the server whose half has the current state; epoch 0: none
                                 * ever served */
    bl_epoch_line newest;       /* the server that is taken over from, or that tried to take over */
    int maybe_elected;          /* an election may have chosen this server, even if it failed */
} bl_takeover;

/* Return 1 if the heartbeat of a server of this epoch advances; else 0. */
static int bl_server_heartbeats(const bl_server *server, uint64_t epoch, uint64_t nonce)
{
    const bl_memory *memory = &server->pool->memory;
    uint64_t offset = bl_server_heartbeat_offset(epoch % BL_HALF_COUNT);
    bl_wait wait = bl_wait_make(memory, BL_HEARTBEAT_WATCH_NS);
    bl_refetch(memory, offset, BL_LINE_SIZE);
    uint64_t first = bl_heartbeat_read(memory, offset, nonce);
    while (bl_wait_turn(memory, &wait)) {
        bl_refetch(memory, offset, BL_LINE_SIZE);
        if (bl_heartbeat_read(memory, offset, nonce) != first)
            return 1;
    }
    return 0;
}

/* Return 1 if this server, or owner of an epoch, is proven unable to write, 0 if not, or an error:
 * it belongs to another machine with this host number. Another boot was an earlier one only if its
 * heartbeat has stopped. One process of a host calls this at a time. */
static int bl_server_gone(const bl_server *server, uint64_t epoch, uint32_t host,
                          const uint64_t boot_id[2], uint64_t nonce)
{
    const bl_memory *memory = &server->pool->memory;
    if (bl_declared(server, nonce))
        return 1;
    if (!bl_boot_same(boot_id, server->boot_id)) {
        if (host != server->host)
            return 0;
        return bl_server_heartbeats(server, epoch, nonce) ? bl_server_clash(server) : 1;
    }
    int liveness_lock = bl_liveness_watch(memory, server->directory, nonce);
    int gone = liveness_lock >= 0 && bl_liveness_gone(memory, liveness_lock);
    bl_liveness_end(memory, server->directory, nonce, liveness_lock, 0); /* N + 1 will check
                                                                          * again */
    return gone;
}

/* Return 1 if the server of an epoch line is gone, also by its own last line; else 0. */
static int bl_epoch_gone(const bl_server *server, const bl_epoch_line *line)
{
    uint64_t offset = bl_epoch_offset(line->epoch % BL_HALF_COUNT);
    if (line->epoch == 0 ||
        (bl_epoch_last_word(line) && bl_register_settled(&server->pool->memory, offset, line)))
        return 1;
    return bl_server_gone(server, line->epoch, line->host, line->boot_id, line->nonce);
}

/* Check that a takeover from the server of the newest epoch is allowed. It must be gone or silent;
 * and in a pool with hardware coherence, only its own host may take over. Returns 0 or an error. */
static int bl_takeover_follow(const bl_server *server, const bl_epoch_line *line)
{
    int gone = bl_epoch_gone(server, line);
    if (gone != 0)
        return gone < 0 ? gone : 0;
    if (bl_epoch_second_host(server->pool, line, server->host, server->boot_id) &&
        !bl_epoch_last_word(line))
        return -BL_ERROR_SECOND_HOST;
    if (line->nonce != server->silence.nonce &&
        bl_server_heartbeats(server, line->epoch, line->nonce))
        return -BL_ERROR_SERVER_ALIVE;
    return 0;
}

/* Determine the epoch that this server may request. Returns 0, -BL_ERROR_SERVER_ALIVE, _HOST_CLASH,
 * _SECOND_HOST, _RUNTIME_DIR or _EPOCH_DAMAGED. */
static int bl_takeover_plan(const bl_server *server, bl_takeover *plan)
{
    bl_epoch_line line[BL_HALF_COUNT];
    for (uint32_t half = 0; half < BL_HALF_COUNT; half++) {
        int status = bl_epoch_line_read(server->pool, half, &line[half]);
        if (status < 0)
            return status;
    }
    uint32_t newest = line[1].epoch > line[0].epoch;
    plan->newest = line[newest];
    int served = line[newest].epoch == 0 || bl_epoch_served(&line[newest]);
    plan->source = line[served ? newest : 1 - newest];
    plan->before = line[served ? 1 - newest : newest];
    plan->epoch = line[newest].epoch + (served ? 1 : 2);
    for (uint32_t half = 0; half < BL_HALF_COUNT; half++) /* its locks are in another directory */
        if (!bl_declared(server, line[half].nonce) &&
            bl_runtime_elsewhere(server->pool, server->directory, server->boot_id, &line[half]))
            return -BL_ERROR_RUNTIME_DIR;
    int status = bl_takeover_follow(server, &line[newest]);
    int gone = status < 0 ? status : bl_epoch_gone(server, &plan->before);
    return gone == 0 ? -BL_ERROR_SERVER_ALIVE : gone < 0 ? gone : 0;
}

/* Become the only owner of an epoch. Returns 0 and the plan, or an error. */
static int bl_takeover_claim(const bl_server *server, bl_takeover *plan)
{
    uint64_t next = 0; /* the owner of an epoch before it never took over */
    for (;;) {
        bl_candidate_line owner;
        int status = bl_takeover_plan(server, plan);
        if (status < 0)
            return status;
        if (next > plan->epoch && (next - plan->epoch) % BL_HALF_COUNT == 0)
            plan->epoch = next;
        plan->maybe_elected = 1;
        status = bl_elect(server, plan->epoch, &owner);
        if (status == 0 && owner.nonce == server->nonce)
            return 0;
        switch (status) {
        case 0: /* not yet published, or died before it was */
            status = bl_server_gone(server, plan->epoch, owner.host, owner.boot_id, owner.nonce);
            if (status <= 0)
                return status < 0 ? status : -BL_ERROR_SERVER_ALIVE;
            next = plan->epoch + BL_HALF_COUNT;
            break;
        case -ESTALE:
            if (owner.epoch <= next)
                return -BL_ERROR_SERVER_ALIVE; /* checked twice: a server is about to begin */
            next = owner.epoch;
            break;
        case -EAGAIN: /* undecided: owner is not valid */
            return -BL_ERROR_SERVER_ALIVE;
        default:
            return status;
        }
    }
}

/* Return 1 if a session line shows a free lane; else 0. The line of a free lane has no nonce, and
 * clearing the nonce is one store: a line whose writer died in the middle has the nonce of the
 * session that may use the lane, which is the one before or the one after, or no nonce. */
static int bl_session_over(const bl_server *server, const bl_session_line *line, uint32_t lane)
{
    const bl_memory *memory = &server->pool->memory;
    return line->nonce == 0 ||
           (bl_verify(memory, bl_table_whole(line, lane)) && line->state == BL_SESSION_FREE);
}

/* Inherit the sessions of earlier epochs: they may still write until they are proven gone. This
 * server's half then has them, or free lanes. */
static void bl_takeover_inherit(bl_server *server, int inherits)
{
    const bl_memory *memory = &server->pool->memory;
    const bl_geometry *g = &server->pool->geometry;
    uint32_t half = 1 - server->half;
    bl_invalidate(memory, bl_session_offset(g, 0, half), (uint64_t)g->lane_count * BL_LINE_SIZE);
    bl_fence_full(memory);
    for (uint32_t i = 0; i < g->lane_count; i++) {
        bl_lane *lane = &server->lanes[i];
        bl_session_line line;
        *lane = (bl_lane){.state = BL_SESSION_FREE, .liveness_lock = -1};
        /* SYNC session.line: pairs with bl_housekeeping_write() */
        bl_load_line(memory, bl_session_offset(g, i, half), &line);
        bl_ordered(memory, bl_session_offset(g, i, half), bl_epoch_offset(server->half));
        if (inherits) /* also for a free lane */
            bl_believe(memory, bl_session_offset(g, i, half));
        if (inherits && !bl_session_over(server, &line, i)) {
            int earlier = line.epoch != 0 && line.epoch < server->epoch; /* no, if damaged */
            *lane = (bl_lane){
                .nonce = line.nonce,
                .boot_id = {line.boot_id[0], line.boot_id[1]},
                .epoch = earlier ? line.epoch : server->epoch - 1,
                .heartbeat_seen_ns = bl_now_ns(memory),
                .host = line.host % BL_HOST_COUNT,
                .state = BL_SESSION_SUSPECT,
                .liveness_lock = bl_liveness_watch(memory, server->directory, line.nonce),
            };
            lane->since_ns = lane->heartbeat_seen_ns;
            server->inherited_count++;
            bl_crash_point("take.session_found");
        }
        bl_housekeeping_write(server, i);
    }
}

static void bl_takeover_publish(bl_server *server, uint32_t state)
{
    bl_epoch_line line = {
        .epoch = server->epoch,
        .boot_id = {server->boot_id[0], server->boot_id[1]},
        .nonce = server->nonce,
        .host = server->host,
        .state = state,
    };
    bl_table_seal(&line, server->half);
    bl_crash_line("take.line", &server->pool->memory, bl_epoch_offset(server->half), &line);
    /* SYNC epoch.line: pairs with bl_epoch_line_read() */
    bl_register_write(&server->pool->memory, bl_epoch_offset(server->half), &line);
    bl_fence_full(&server->pool->memory); /* published before the predecessor's half is read */
    server->state = state;
}

/* Recover from the predecessor's half, with all steps before and after it. Returns 0 or what a hook
 * returned. */
static int bl_takeover_pass(bl_server *server, const bl_takeover *plan)
{
    const bl_memory *memory = &server->pool->memory;
    int status = bl_heartbeat_start(&server->heartbeat, memory,
                                    bl_server_heartbeat_offset(server->half), server->nonce);
    if (status < 0)
        return status;
    bl_crash_point("take.beating");
    if (plan->before.epoch != 0)
        bl_register_mend(memory, bl_epoch_offset(server->half), &plan->before);
    bl_takeover_publish(server, BL_SERVER_TAKING);
    bl_crash_point("take.published");
    bl_liveness_end(memory, server->directory, plan->before.nonce, -1, 1); /* its line is
                                                                            * overwritten */
    bl_crash_point("take.liveness_removed");
    bl_takeover_inherit(server, plan->source.epoch != 0);
    bl_crash_point("take.inherited");
    status = server->hooks.recover(server->hooks.context, plan->source.epoch,
                                   server->inherited_count > 0);
    if (status < 0)
        return status;
    bl_crash_point("take.recovered");
    bl_fence_store(memory); /* this server's half is complete before the epoch line shows SERVING */
    bl_crash_point("take.fenced");
    bl_takeover_publish(server, BL_SERVER_SERVING);
    bl_crash_point("take.serving");
    return 0;
}

/* Take this host's server lock, unless a silent server holds it, and a liveness lock. Returns 0 or
 * an error. */
static int bl_takeover_enter(bl_server *server)
{
    const bl_memory *memory = &server->pool->memory;
    server->lock = bl_host_lock(memory, server->directory, "server");
    if (server->lock == -EAGAIN && server->silence.nonce == 0)
        return -BL_ERROR_SERVER_ALIVE;
    if (server->lock < 0 && server->lock != -EAGAIN)
        return server->lock;
    bl_crash_point("take.locked");
    server->nonce = bl_new_nonce(memory);
    server->liveness_lock = bl_liveness_hold(memory, server->directory, server->nonce);
    bl_crash_point("take.liveness_held");
    if (server->liveness_lock < 0)
        return server->liveness_lock;
    int status = bl_pidfds_open(memory, server->directory, server->nonce,
                                2 * server->pool->geometry.lane_count, &server->pidfds);
    return status < 0 ? status
                      : bl_sleeper_open(memory, server->directory, server->nonce,
                                        &server->sleeper);
}

static void bl_takeover_leave(bl_server *server, int forget)
{
    const bl_memory *memory = &server->pool->memory;
    if (server->pidfds)
        bl_pidfds_close(server->pidfds);
    server->pidfds = NULL;
    if (server->sleeper)
        bl_sleeper_close(server->sleeper);
    server->sleeper = NULL;
    if (server->liveness_lock >= 0)
        bl_liveness_end(memory, server->directory, server->nonce, server->liveness_lock, forget);
    if (server->lock >= 0)
        bl_host_unlock(memory, server->lock);
    server->lock = server->liveness_lock = -1;
}

typedef struct bl_take {
    bl_server *server;
    const bl_server_hooks *hooks;
} bl_take;

/* If a device fails, bl_server_destroy() or the end of the process releases what this holds. */
static int bl_take_guarded(void *context)
{
    const bl_take *take = context;
    bl_server *server = take->server;
    const bl_server_hooks *hooks = take->hooks;
    const bl_memory *memory = &server->pool->memory;
    bl_takeover plan = {0};
    server->hooks = *hooks;
    int turn = bl_host_lock(memory, server->directory, "candidate");
    if (turn < 0)
        return turn == -EAGAIN ? -BL_ERROR_SERVER_ALIVE : turn;
    int status = bl_takeover_enter(server);
    if (status == 0)
        status = bl_declared_check(server);
    if (status == 0)
        status = bl_takeover_claim(server, &plan);
    bl_host_unlock(memory, turn);
    if (status < 0) {
        bl_takeover_leave(server, !plan.maybe_elected);
        return status;
    }
    bl_crash_point("take.elected");
    server->epoch = plan.epoch;
    server->half = plan.epoch % BL_HALF_COUNT;
    bl_reason_note(server, &plan.newest);
    server->stat.trace_status = bl_trace_open(&server->trace, server->directory, plan.epoch,
                                              &server->stat.takeover);
    return bl_takeover_pass(server, &plan);
}

int bl_server_take(bl_server *server, const bl_server_hooks *hooks)
{
    bl_take take = {server, hooks};
    if (server->epoch != 0) /* its liveness lock and its host lock are in use */
        return -BL_ERROR_SERVER_ALIVE;
    int status = bl_guarded(&server->pool->memory, bl_take_guarded, &take);
    if (status < 0 && server->epoch != 0)
        bl_heartbeat_stop(&server->heartbeat); /* it does not serve: clients must not wait for it */
    return status;
}

int bl_nothing_recover(void *context, uint64_t old_epoch, int suspect)
{
    (void)context, (void)old_epoch, (void)suspect;
    return 0;
}

static void bl_nothing_ended(void *context, uint32_t lane, enum bl_end end)
{
    (void)context, (void)lane, (void)end;
}

void bl_nothing_more(void *context) { (void)context; }

int bl_server_serve_lanes(bl_server *server)
{
    static const bl_server_hooks nothing = {NULL, bl_nothing_recover, bl_nothing_ended,
                                            bl_nothing_more, bl_nothing_more};
    return bl_server_take(server, &nothing);
}

int bl_server_create(const bl_pool *pool, const char *directory, uint32_t host, bl_server **out)
{
    uint32_t lane_count = pool->geometry.lane_count;
    if (host >= BL_HOST_COUNT || strlen(directory) >= BL_PATH_SIZE)
        return -EINVAL;
    bl_server *server = calloc(1, sizeof *server);
    if (server == NULL)
        return -ENOMEM;
    server->pool = pool;
    server->host = host;
    server->lock = server->liveness_lock = server->watch.liveness_lock = -1;
    strcpy(server->directory, directory);
    server->lanes = calloc(lane_count, sizeof *server->lanes);
    server->live = calloc(lane_count, sizeof *server->live);
    server->served = calloc(lane_count, sizeof *server->served);
    server->requests = calloc(BL_QUANTUM_REQUESTS, sizeof *server->requests);
    server->replies = calloc(BL_QUANTUM_REQUESTS, sizeof *server->replies);
    server->bulk_in = malloc(pool->geometry.bulk_size);
    server->bulk_out = malloc(pool->geometry.bulk_size);
    int status = bl_boot_id(&pool->memory, server->boot_id);
    if (!server->lanes || !server->live || !server->served || !server->requests ||
        !server->replies || !server->bulk_in || !server->bulk_out)
        status = -ENOMEM;
    if (status < 0) {
        bl_server_destroy(server);
        return status;
    }
    *out = server;
    return 0;
}

void bl_server_forked(bl_server *server)
{
    /* the child's copies would keep the parent's liveness locks alive */
    const int held[] = {server->lock, server->liveness_lock, server->watch.liveness_lock};
    for (size_t i = 0; i < sizeof held / sizeof held[0]; i++)
        if (held[i] >= 0)
            close(held[i]);
    if (server->pidfds)
        bl_pidfds_close(server->pidfds);
    if (server->sleeper)
        bl_sleeper_close(server->sleeper);
    bl_jobs_forked(server);
}

/* Write as the server's last line that it writes nothing more. The line is still its own, although
 * a successor may have taken over. Returns 1, or 0 if it cannot be written. */
static int bl_takeover_farewell(void *context)
{
    bl_server *server = context;
    bl_epoch_line line;
    int status = bl_epoch_line_read(server->pool, server->half, &line);
    if (status >= 0 && line.epoch <= server->epoch)
        bl_takeover_publish(server, server->state == BL_SERVER_SERVING ? BL_SERVER_STOPPED
                                                                       : BL_SERVER_FAILED);
    return status >= 0;
}

void bl_server_destroy(bl_server *server)
{
    const bl_memory *memory = &server->pool->memory;
    bl_heartbeat_stop(&server->heartbeat);
    bl_crash_point("stop.silent");
    bl_watch_end(server);
    if (server->epoch != 0) {
        int is_written = bl_guarded(memory, bl_takeover_farewell, server) == 1;
        bl_crash_point("stop.written");
        for (uint32_t i = 0; i < server->pool->geometry.lane_count; i++)
            bl_liveness_end(memory, server->directory, server->lanes[i].nonce,
                            server->lanes[i].liveness_lock, 0);
        bl_takeover_leave(server, is_written);
        bl_crash_point("stop.liveness_ended");
    }
    bl_trace_close(&server->trace);
    bl_jobs_free(server);
    free(server->declared);
    free(server->lanes);
    free(server->live);
    free(server->served);
    free(server->requests);
    free(server->replies);
    free(server->bulk_in);
    free(server->bulk_out);
    free(server);
}

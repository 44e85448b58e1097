/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * A standby: a server that does not serve yet and watches the one that does, so that it can take
 * over at once.
 *
 * This file decides only when to try; rpc/takeover.c decides whether a standby may, and two that
 * try at once do no harm. A standby tries when the pool has no server, when the server announced
 * that it stops, when it is proven gone (its own host detects that at the next check), or when its
 * heartbeat has stood still for the time that the caller set.
 *
 * A heartbeat also stands still where the cores are overloaded, and it costs more to depose a live
 * server than to wait for it. So three kinds of silence count less:
 *   - that of a process of this host that is proven alive: it may be stopped or stuck, and is
 *     succeeded after BL_STANDBY_ALIVE times as long;
 *   - silence while this standby did not run: a check counts BL_STANDBY_LATE_NS at most;
 *   - silence after which other servers of this pool continued: another host's server is
 *     succeeded after BL_STANDBY_GAPS times the longest one that was measured lately, and no later
 *     than a process that is proven alive.
 *
 * A stopped process of this host still holds this host's server lock: a standby that finds it
 * silent continues without that lock.
 */
#include "base/minmax.h"
#include "coherence/guard.h"
#include "pool/boot.h"
#include "rpc/server_state.h"

enum {
    BL_STANDBY_LOOK_NS = 10 * 1000 * 1000,
    BL_STANDBY_LOOK_LEAST_NS = 2 * 1000 * 1000,
    BL_STANDBY_LOOKS = 20,      /* in the time for which a server may be silent, at least */
    BL_STANDBY_LATE_NS = 20 * 1000 * 1000,
    BL_STANDBY_ALIVE = 15,      /* 30 s, where the limit for another host's server is 2 s */
    BL_STANDBY_GAPS = 4,
    BL_STANDBY_FADE = 16384     /* a gap's weight halves in ten minutes of heartbeats */
};

void bl_watch_end(bl_server *server)
{
    bl_watch *watch = &server->watch;
    bl_liveness_end(&server->pool->memory, server->directory, watch->nonce, watch->liveness_lock,
                    0);
    *watch = (bl_watch){.gap_ns = watch->gap_ns, .liveness_lock = -1};
}

/* Start watching a server that was not there at the last check. */
static void bl_watch_begin(bl_server *server, const bl_epoch_line *line, uint64_t now_ns)
{
    bl_watch_end(server);
    server->watch.nonce = line->nonce;
    server->watch.looked_ns = now_ns;
    if (bl_boot_same(line->boot_id, server->boot_id))
        server->watch.liveness_lock = bl_liveness_watch(&server->pool->memory, server->directory,
                                                        line->nonce);
}

/* Return how long the heartbeat of the watched server may be unchanged. */
static uint64_t bl_watch_bound_ns(const bl_watch *watch, uint64_t lost_ns)
{
    uint64_t most_ns = bl_min(lost_ns, UINT64_MAX / BL_STANDBY_ALIVE) * BL_STANDBY_ALIVE;
    if (watch->liveness_lock >= 0) /* alive: an ended process was detected before */
        return most_ns;
    return bl_min(bl_max(lost_ns, watch->gap_ns * BL_STANDBY_GAPS), most_ns);
}

/* Return 1 if a server's heartbeat has been unchanged for too long, 0 if not, or an error: the
 * heartbeat advances and belongs to another machine that uses this host number. */
static int bl_watch_silent(bl_server *server, const bl_epoch_line *line, uint64_t lost_ns,
                           uint64_t now_ns)
{
    const bl_memory *memory = &server->pool->memory;
    bl_watch *watch = &server->watch;
    uint64_t offset = bl_server_heartbeat_offset(line->epoch % BL_HALF_COUNT);
    bl_invalidate(memory, offset, BL_LINE_SIZE); /* no fence: a stale heartbeat is read again */
    uint64_t count = bl_heartbeat_read(memory, offset, line->nonce);
    uint64_t passed_ns = now_ns - watch->looked_ns;
    watch->looked_ns = now_ns;
    if (count == watch->count) {
        watch->silent_ns += bl_min(passed_ns, BL_STANDBY_LATE_NS);
        return watch->silent_ns > bl_watch_bound_ns(watch, lost_ns);
    }
    if (watch->count != 0 && count > watch->count && line->host == server->host &&
        !bl_boot_same(line->boot_id, server->boot_id))
        return bl_server_clash(server);
    watch->gap_ns = bl_max(watch->silent_ns, watch->gap_ns - watch->gap_ns / BL_STANDBY_FADE);
    watch->count = count;
    watch->silent_ns = 0;
    return 0;
}

typedef struct bl_watch_look {
    bl_server *server;
    uint64_t lost_ns;
} bl_watch_look;

/* Check once whether to try a takeover. Descriptors that this opens are stored in the server at
 * once. */
static int bl_watch_look_guarded(void *context)
{
    const bl_watch_look *look = context;
    bl_server *server = look->server;
    uint64_t lost_ns = look->lost_ns;
    const bl_memory *memory = &server->pool->memory;
    bl_epoch_line line;
    int status = bl_epoch_read(server->pool, &line);
    if (status < 0)
        return status;
    if (line.epoch == 0 || bl_epoch_last_word(&line))
        return 1;
    if (!bl_declared(server, line.nonce) &&
        bl_runtime_elsewhere(server->pool, server->directory, server->boot_id, &line))
        return -BL_ERROR_RUNTIME_DIR;
    uint64_t now_ns = bl_now_ns(memory);
    if (line.nonce != server->watch.nonce)
        bl_watch_begin(server, &line, now_ns);
    else if (bl_error_passes(-server->watch.liveness_lock))
        server->watch.liveness_lock = bl_liveness_watch(memory, server->directory, line.nonce);
    if (server->watch.liveness_lock >= 0 && bl_liveness_gone(memory, server->watch.liveness_lock))
        return 1;
    status = bl_watch_silent(server, &line, lost_ns, now_ns);
    server->silence = (bl_silence){
        .nonce = status == 1 ? line.nonce : 0,
        .ns = server->watch.silent_ns,
        .alive = server->watch.liveness_lock >= 0,
    };
    return status;
}

int bl_server_watch(bl_server *server, uint64_t lost_ns, uint64_t timeout_ns)
{
    const bl_memory *memory = &server->pool->memory;
    bl_watch_look look = {server, lost_ns};
    bl_wait wait = bl_wait_make(memory, timeout_ns);
    uint64_t nap_ns = bl_max(bl_min(lost_ns / BL_STANDBY_LOOKS, BL_STANDBY_LOOK_NS),
                             BL_STANDBY_LOOK_LEAST_NS);
    int status;
    while ((status = bl_guarded(memory, bl_watch_look_guarded, &look)) == 0 &&
           !bl_shared_load(&server->stop) && bl_wait_left_ns(memory, &wait) > 0)
        bl_nap(memory, nap_ns);
    if (status != 0)
        bl_watch_end(server); /* a watch that has the liveness lock prevents others from taking
                               * it */
    return status;
}

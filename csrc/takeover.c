/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Becoming the server (D5).
 *
 * Epoch N writes half N mod 2 only. So the server of N-2 must be proven gone before N writes at
 * all; the server of N-1 may be undead: it goes on writing its own half, which nobody reads once
 * epoch N is published.
 *
 *   1  prove N-2 gone; find N-1 silent (or refuse: it lives)
 *   2  copy what N-1 committed into the own half                      (hooks.adopt)
 *   3  publish epoch N; full fence                                    SYNC epoch.line
 *   4  read whom N-1 gave a lane meanwhile, what an undead one has cleared, and what it has
 *      opened: its clients may write there                            (hooks.reckon)
 *
 * N-1, before it grants from a new extent: writes its open mark, full fence, reads the epoch.
 * Before it grants the space of a committed block: clears its entry, full fence, reads the epoch.
 * Of the two servers each writes before it reads: either N-1 sees epoch N and grants nothing, or N
 * sees the mark, or the cleared entry.
 */
#include "server.h"

#include <errno.h>
#include <stdlib.h>
#include <unistd.h>

enum { BL_BEAT_WATCH_NS = 10 * BL_BEAT_PERIOD_NS };

/* Is the writer of this epoch line proven unable to write? The caller has this host's server
 * lock. */
static int bl_server_gone(const bl_server *server, const bl_epoch_line *line)
{
    const bl_memory *memory = &server->pool->memory;
    if (line->epoch == 0 || line->state == BL_SERVER_STOPPED)
        return 1;
    if (line->boot_id[0] != server->boot_id[0] || line->boot_id[1] != server->boot_id[1])
        return line->host == server->host; /* an earlier boot of this host */
    int proof = bl_proof_watch(memory, server->directory, line->nonce);
    int gone = proof >= 0 && bl_proof_gone(memory, proof);
    bl_proof_end(memory, server->directory, line->nonce, proof, 0); /* N + 1 will ask again */
    return gone;
}

/* Does a server's beat move? */
static int bl_server_beats(const bl_server *server, const bl_epoch_line *line)
{
    const bl_memory *memory = &server->pool->memory;
    uint64_t offset = bl_server_beat_offset(line->epoch % BL_HALF_COUNT);
    bl_wait wait = bl_wait_make(memory, BL_BEAT_WATCH_NS);
    bl_refetch(memory, offset, BL_LINE_SIZE);
    uint64_t first = bl_beat_read(memory, offset, line->nonce);
    while (bl_wait_turn(memory, &wait)) {
        bl_refetch(memory, offset, BL_LINE_SIZE);
        if (bl_beat_read(memory, offset, line->nonce) != first)
            return 1;
    }
    return 0;
}

/* Which epoch may this server take? Its number, or an error. old: the line of its predecessor;
 * before: of N-2, whose half the new server will write. undead: nothing proves the predecessor
 * gone. */
static int64_t bl_takeover_epoch(const bl_server *server, int declared_gone, bl_epoch_line *old,
                                 bl_epoch_line *before, int *undead)
{
    bl_epoch_read(server->pool, old);
    *undead = !declared_gone && !bl_server_gone(server, old);
    if (*undead && bl_server_beats(server, old))
        return -BL_ERROR_SERVER_ALIVE;
    if (!bl_epoch_line_read(server->pool, (old->epoch + 1) % BL_HALF_COUNT, before))
        memset(before, 0, sizeof *before);
    if (!declared_gone && !bl_server_gone(server, before))
        return -BL_ERROR_SERVER_ALIVE;
    return (int64_t)old->epoch + 1;
}

/* Is a session of an earlier epoch over without further proof? */
static int bl_session_over(const bl_server *server, const bl_session_line *line)
{
    int here = line->boot_id[0] == server->boot_id[0] && line->boot_id[1] == server->boot_id[1];
    return line->state == BL_SESSION_FREE || (line->host == server->host && !here);
}

/* The sessions of earlier epochs: nobody knows what they still write, until they are proven gone.
 * Looked at twice, before the epoch is out and after it: a predecessor that only seemed silent may
 * have given a lane away in between. It writes the line and then reads the epoch; we write the
 * epoch and then read the lines: one sees the other. */
static void bl_takeover_inherit(bl_server *server, uint64_t old_epoch)
{
    const bl_memory *memory = &server->pool->memory;
    const bl_geometry *g = &server->pool->geometry;
    uint32_t half = old_epoch % BL_HALF_COUNT;
    bl_refetch(memory, bl_session_offset(g, 0, half), (uint64_t)g->lane_count * BL_LINE_SIZE);
    for (uint32_t i = 0; i < g->lane_count; i++) {
        bl_lane *lane = &server->lanes[i];
        bl_session_line line;
        /* SYNC session.line: pairs with bl_house_write() */
        bl_load_line(memory, bl_session_offset(g, i, half), &line);
        if (!bl_verify(memory, bl_table_whole(&line, i)) || bl_session_over(server, &line) ||
            (lane->state != BL_SESSION_FREE && lane->nonce == line.nonce))
            continue;
        bl_proof_end(memory, server->directory, lane->nonce, lane->proof, 0);
        server->inherited_count += lane->state == BL_SESSION_FREE;
        *lane = (bl_lane){
            .nonce = line.nonce,
            .boot_id = {line.boot_id[0], line.boot_id[1]},
            .epoch = line.epoch,
            .host = line.host % BL_HOST_COUNT,
            .state = BL_SESSION_DOUBTFUL,
            .proof = bl_proof_watch(memory, server->directory, line.nonce),
        };
        bl_house_write(server, i);
    }
}

/* Before the first look: nobody has a lane, and the own half says so. */
static void bl_takeover_clear(bl_server *server)
{
    for (uint32_t i = 0; i < server->pool->geometry.lane_count; i++) {
        server->lanes[i] = (bl_lane){.state = BL_SESSION_FREE, .proof = -1};
        bl_house_write(server, i);
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
    /* SYNC epoch.line: pairs with bl_epoch_line_read() */
    bl_publish_line(&server->pool->memory, bl_epoch_offset(server->half), &line);
    bl_fence_full(&server->pool->memory); /* published before the predecessor's marks are read */
}

int bl_server_take(bl_server *server, const bl_server_hooks *hooks, int declared_gone)
{
    const bl_memory *memory = &server->pool->memory;
    bl_epoch_line old, before;
    server->hooks = *hooks;
    server->lock = bl_host_lock(memory, server->directory, "server");
    if (server->lock < 0)
        return server->lock == -EAGAIN ? -BL_ERROR_SERVER_ALIVE : server->lock;
    int undead;
    int64_t epoch = bl_takeover_epoch(server, declared_gone, &old, &before, &undead);
    int status = epoch < 0 ? (int)epoch : 0;
    if (status == 0) {
        server->nonce = bl_new_nonce(memory);
        server->proof = bl_proof_hold(memory, server->directory, server->nonce);
        status = server->proof < 0 ? server->proof : 0;
    }
    if (status < 0) {
        bl_host_unlock(memory, server->lock);
        server->lock = -1;
        return status;
    }
    server->epoch = (uint64_t)epoch;
    server->half = server->epoch % BL_HALF_COUNT;
    bl_takeover_clear(server);
    int inherits = old.epoch != 0 && !declared_gone;
    if (inherits)
        bl_takeover_inherit(server, old.epoch);
    status = hooks->adopt(hooks->context, old.epoch);
    if (status < 0)
        return status;
    status = bl_beat_start(&server->beat, memory, bl_server_beat_offset(server->half),
                           server->nonce);
    if (status < 0)
        return status;
    bl_lobby_look(server, 0, 0); /* what is asked before the epoch is out was asked of another */
    bl_takeover_publish(server, BL_SERVER_SERVING);
    if (inherits)
        bl_takeover_inherit(server, old.epoch);
    bl_proof_end(memory, server->directory, before.nonce, -1, 1); /* its line is no more */
    if (undead) /* SYNC entry.reuse: what it has cleared meanwhile, it may have granted */
        status = hooks->adopt(hooks->context, old.epoch);
    if (status < 0)
        return status;
    return hooks->reckon(hooks->context, old.epoch, server->inherited_count > 0);
}

static int bl_nothing_adopt(void *context, uint64_t old_epoch)
{
    (void)context, (void)old_epoch;
    return 0;
}

static int bl_nothing_reckon(void *context, uint64_t old_epoch, int doubtful)
{
    (void)context, (void)old_epoch, (void)doubtful;
    return 0;
}

static void bl_nothing_ended(void *context, uint32_t lane, enum bl_end end)
{
    (void)context, (void)lane, (void)end;
}

static void bl_nothing_settled(void *context) { (void)context; }

int bl_server_serve_lanes(bl_server *server, int declared_gone)
{
    static const bl_server_hooks nothing = {NULL, bl_nothing_adopt, bl_nothing_reckon,
                                            bl_nothing_ended, bl_nothing_settled};
    return bl_server_take(server, &nothing, declared_gone);
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
    server->lock = server->proof = -1;
    strcpy(server->directory, directory);
    server->lanes = calloc(lane_count, sizeof *server->lanes);
    server->live = calloc(lane_count, sizeof *server->live);
    server->requests = calloc(BL_QUANTUM, sizeof *server->requests);
    server->replies = calloc(BL_QUANTUM, sizeof *server->replies);
    server->bulk_in = malloc(pool->geometry.bulk_size);
    server->bulk_out = malloc(pool->geometry.bulk_size);
    int status = bl_boot_id(&pool->memory, server->boot_id);
    if (!server->lanes || !server->live || !server->requests || !server->replies ||
        !server->bulk_in || !server->bulk_out)
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
    if (server->lock < 0)
        return;
    close(server->lock); /* the child's copies would keep the parent's proofs alive */
    close(server->proof);
}

void bl_server_destroy(bl_server *server)
{
    const bl_memory *memory = &server->pool->memory;
    bl_beat_stop(&server->beat);
    if (server->lock >= 0 && server->epoch != 0) {
        bl_epoch_line line; /* still its own, though a successor may have taken over */
        if (bl_epoch_line_read(server->pool, server->half, &line) && line.epoch == server->epoch)
            bl_takeover_publish(server, BL_SERVER_STOPPED); /* its word: nothing more is written */
        for (uint32_t i = 0; i < server->pool->geometry.lane_count; i++)
            bl_proof_end(memory, server->directory, server->lanes[i].nonce,
                         server->lanes[i].proof, 0);
        bl_proof_end(memory, server->directory, server->nonce, server->proof, 1);
    }
    if (server->lock >= 0)
        bl_host_unlock(memory, server->lock);
    free(server->lanes);
    free(server->live);
    free(server->requests);
    free(server->replies);
    free(server->bulk_in);
    free(server->bulk_out);
    free(server);
}

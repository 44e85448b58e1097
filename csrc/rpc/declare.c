/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * An operator's declaration that all other processes of the pool are gone. It is stored as the
 * nonces of the servers, owners of epochs and sessions that the pool listed at that time. So it
 * holds for them, however late this server takes over, and for no process that comes later.
 *
 * A heartbeat that moves proves the declaration wrong, when it is given and again when it is used.
 * A process of this host whose state can be proven is left out: the declaration is not needed for
 * it.
 */
#include "rpc/server_state.h"

#include <errno.h>
#include <stdlib.h>

#include "coherence/guard.h"

typedef struct bl_declared_one {
    uint64_t nonce;
    uint64_t heartbeat_offset;
    uint64_t heartbeat_count;   /* the heartbeat count at the time of the declaration */
    uint32_t is_server;
} bl_declared_one;

struct bl_declared {
    uint32_t count;
    bl_declared_one who[];
};

static uint64_t bl_declared_heartbeat(const bl_memory *memory, uint64_t offset, uint64_t nonce)
{
    bl_refetch(memory, offset, BL_LINE_SIZE);
    return bl_heartbeat_read(memory, offset, nonce);
}

static void bl_declare_one(bl_server *server, uint64_t nonce, uint64_t heartbeat_offset,
                           int is_server)
{
    const bl_memory *memory = &server->pool->memory;
    struct bl_declared *declared = server->declared;
    if (nonce == 0 || bl_declared(server, nonce))
        return;
    int liveness_lock = bl_liveness_watch(memory, server->directory, nonce);
    bl_liveness_end(memory, server->directory, nonce, liveness_lock, 0);
    if (liveness_lock >= 0 || bl_error_passes(-liveness_lock))
        return;
    declared->who[declared->count++] = (bl_declared_one){
        .nonce = nonce,
        .heartbeat_offset = heartbeat_offset,
        .heartbeat_count = bl_declared_heartbeat(memory, heartbeat_offset, nonce),
        .is_server = (uint32_t)is_server,
    };
}

/* Collect all nonces in the pool, in both halves; some may be of processes that ended long ago. */
static int bl_declare_all(void *context)
{
    bl_server *server = context;
    const bl_pool *pool = server->pool;
    const bl_geometry *g = &pool->geometry;
    for (uint32_t half = 0; half < BL_HALF_COUNT; half++) {
        bl_epoch_line line;
        if (bl_epoch_line_read(pool, half, &line) == 1)
            bl_declare_one(server, line.nonce, bl_server_heartbeat_offset(half), 1);
    }
    for (uint32_t host = 0; host < BL_HOST_COUNT; host++) {
        bl_candidate_line line;
        uint64_t offset = BL_CANDIDATE_OFFSET + (uint64_t)host * BL_POLL_STRIDE;
        if (bl_register_read(&pool->memory, offset, host, &line) == 1)
            bl_declare_one(server, line.nonce,
                           bl_server_heartbeat_offset(line.epoch % BL_HALF_COUNT),
                           1);
    }
    for (uint32_t half = 0; half < BL_HALF_COUNT; half++) {
        bl_refetch(&pool->memory, bl_session_offset(g, 0, half),
                   (uint64_t)g->lane_count * BL_LINE_SIZE);
        for (uint32_t lane = 0; lane < g->lane_count; lane++) {
            bl_session_line line;
            bl_load_line(&pool->memory, bl_session_offset(g, lane, half), &line);
            bl_declare_one(server, line.nonce, bl_lane_offset(g, lane), 0);
        }
    }
    return 0;
}

static int bl_declared_look(void *context)
{
    const bl_server *server = context;
    for (uint32_t i = 0; server->declared && i < server->declared->count; i++) {
        const bl_declared_one *one = &server->declared->who[i];
        uint64_t count = bl_declared_heartbeat(&server->pool->memory, one->heartbeat_offset,
                                               one->nonce);
        if (count > one->heartbeat_count && count != BL_HEARTBEAT_LAST)
            return one->is_server ? -BL_ERROR_SERVER_ALIVE : -BL_ERROR_SESSION_ALIVE;
    }
    return 0;
}

int bl_declared_check(bl_server *server)
{
    return bl_guarded(&server->pool->memory, bl_declared_look, server);
}

int bl_declared(const bl_server *server, uint64_t nonce)
{
    for (uint32_t i = 0; server->declared && i < server->declared->count; i++)
        if (server->declared->who[i].nonce == nonce)
            return 1;
    return 0;
}

int bl_server_declare_gone(bl_server *server)
{
    const bl_memory *memory = &server->pool->memory;
    uint64_t most = 2ull * server->pool->geometry.lane_count + BL_HALF_COUNT + BL_HOST_COUNT;
    if (server->declared != NULL)
        return -EALREADY;
    server->declared = calloc(1, sizeof *server->declared + most * sizeof(bl_declared_one));
    if (server->declared == NULL)
        return -ENOMEM;
    int status = bl_guarded(memory, bl_declare_all, server);
    if (status < 0 || server->declared->count == 0)
        return status;
    bl_wait wait = bl_wait_make(memory, BL_HEARTBEAT_WATCH_NS);
    while (status == 0 && bl_wait_left_ns(memory, &wait) > 0) {
        bl_nap(memory, BL_HEARTBEAT_PERIOD_NS / 2);
        status = bl_declared_check(server);
    }
    return status;
}


/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * What an operator changes while the server serves: quotas, and whether it drains. Any thread may
 * request a change. The poll loop applies it between two rounds, so no value changes while a
 * handler runs. Once a change is applied, no earlier grant is still being made.
 */
#include "base/host_atomic.h"
#include "rpc/server_state.h"

/* Make the poll loop apply the request. */
static void bl_operate_request(bl_server *server)
{
    bl_host_add(&server->requested.serial, 1);
    if (server->epoch == 0)
        bl_operate_apply(server); /* no loop runs yet */
    else
        bl_server_wake(server);
}

/* Two concurrent requests may be mixed for a moment: then the serial changes once more, and the
 * loop reads the words again. */
void bl_server_limit(bl_server *server, const bl_quota *quota)
{
    bl_host_store(&server->requested.bytes, quota->bytes);
    bl_host_store(&server->requested.grant_count, quota->grant_count);
    bl_host_store(&server->requested.pin_count, quota->pin_count);
    bl_host_store(&server->requested.calls_per_s, quota->calls_per_s);
    bl_operate_request(server);
}

void bl_server_drain(bl_server *server, int draining)
{
    bl_host_store(&server->requested.draining, draining != 0);
    bl_operate_request(server);
}

/* Fill the buckets of all sessions: they are not filled while calls are not limited. */
static void bl_operate_fill(bl_server *server)
{
    const bl_allowance full = {
        .tokens = server->quota.calls_per_s * BL_TOKEN,
        .filled_ns = bl_now_ns(&server->pool->memory),
    };
    for (uint32_t i = 0; i < server->live_count; i++)
        server->lanes[server->live[i]].allowance = full;
}

void bl_operate_apply(bl_server *server)
{
    uint64_t serial = bl_host_load(&server->requested.serial);
    if (serial == server->applied)
        return;
    int limited = server->quota.calls_per_s != 0;
    server->quota = (bl_quota){
        .bytes = bl_host_load(&server->requested.bytes),
        .grant_count = (uint32_t)bl_host_load(&server->requested.grant_count),
        .pin_count = (uint32_t)bl_host_load(&server->requested.pin_count),
        .calls_per_s = (uint32_t)bl_host_load(&server->requested.calls_per_s),
    };
    server->stat.draining = (uint32_t)bl_host_load(&server->requested.draining);
    server->applied = serial;
    if (!limited)
        bl_operate_fill(server);
}

void bl_operate_name(const bl_server *server, bl_lane *lane)
{
    if (lane->pid == 0 && server->pidfds)
        lane->pid = bl_pidfds_pid(server->pidfds, lane->nonce);
}

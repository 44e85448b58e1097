/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * The server's side of the doorbells: see rpc/doorbell.h. server->live lists the lanes of sessions:
 * first the busy ones, in the order of rpc/quantum.h, then the quiet ones.
 */
#include "rpc/doorbell.h"

static uint64_t bl_host_bit(uint32_t host) { return (uint64_t)1 << host; }

void bl_doorbell_add(bl_server *server, uint32_t lane)
{
    server->live[server->live_count++] = server->live[server->busy_count];
    server->live[server->busy_count++] = lane;
}

void bl_doorbell_quieten(bl_server *server, uint64_t now_ns)
{
    uint64_t quiet_ns = bl_quiet_ns(&server->pool->memory);
    uint32_t kept = 0, quiet = 0;
    for (uint32_t i = 0; i < server->busy_count; i++) {
        uint32_t number = server->live[i];
        bl_lane *lane = &server->lanes[number];
        if (lane->next != lane->busy_next || lane->job) {
            lane->busy_next = lane->next;
            lane->busy_ns = now_ns;
        }
        if (now_ns - lane->busy_ns > quiet_ns) {
            server->served[quiet++] = number;
            server->quiet_hosts |= bl_host_bit(lane->host);
        } else {
            server->live[kept++] = number;
        }
    }
    memcpy(server->live + kept, server->served, quiet * sizeof *server->live);
    server->busy_count = kept;
}

uint64_t bl_doorbell_due(bl_server *server)
{
    if (server->quiet_hosts == 0)
        return 0;
    if (++server->doorbell_rounds < BL_DOORBELL_ROUNDS &&
        server->done.requests - server->doorbell_done.requests < BL_DOORBELL_REQUESTS &&
        server->done.keys - server->doorbell_done.keys < BL_DOORBELL_KEYS)
        return 0;
    server->doorbell_rounds = 0;
    server->doorbell_done = server->done;
    return server->quiet_hosts;
}

/* Make the quiet lanes of these hosts busy. They come first: their requests may be the oldest. */
static int bl_doorbell_rouse(bl_server *server, uint64_t hosts)
{
    uint32_t roused = 0, kept = server->live_count;
    for (uint32_t i = server->live_count; i-- > server->busy_count;) {
        uint32_t number = server->live[i];
        if (hosts & bl_host_bit(server->lanes[number].host))
            server->served[roused++] = number;
        else
            server->live[--kept] = number;
    }
    memmove(server->live + roused, server->live, server->busy_count * sizeof *server->live);
    memcpy(server->live, server->served, roused * sizeof *server->live);
    server->busy_count += roused;
    server->quiet_hosts &= ~hosts;
    return roused > 0;
}

int bl_doorbell_look(bl_server *server, uint64_t hosts)
{
    uint64_t rung = 0;
    for (; hosts != 0; hosts &= hosts - 1) {
        uint32_t host = (uint32_t)__builtin_ctzll(hosts);
        /* SYNC lane.doorbell: pairs with bl_doorbell_ring() */
        uint64_t ring = bl_load64(&server->pool->memory, bl_doorbell_offset(host));
        if (ring != server->doorbell[host])
            rung |= bl_host_bit(host);
        server->doorbell[host] = ring; /* recorded before the lanes are loaded */
    }
    return rung != 0 && bl_doorbell_rouse(server, rung);
}

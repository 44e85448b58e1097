/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * A pool in this process: its mapped devices and its geometry. A superblock's fields are used only
 * after bl_superblock_fault has accepted it. Python (beluga/pool) opens files and checks sysfs and
 * permissions.
 */
#ifndef BL_POOL_H
#define BL_POOL_H

#include "api/pool.h"
#include "coherence/memory.h"

struct bl_pool {
    bl_memory memory;           /* first member, so that the verbs accept a pool's address */
    bl_geometry geometry;
    uint8_t pool_id[16];
    bl_backing backing[BL_DEVICE_COUNT_MAX];
    int one_host;               /* 1: a device with data is one host's own memory, and no other host
                                 * may use it */
};

/* The offsets of the lines that the protocol uses. Half is epoch mod 2. */
static inline uint64_t bl_epoch_offset(uint32_t half) { return (uint64_t)half * BL_SERVER_STRIDE; }

static inline uint64_t bl_server_heartbeat_offset(uint32_t half)
{
    return bl_epoch_offset(half) + BL_POLL_STRIDE;
}

static inline uint64_t bl_lobby_request_offset(uint32_t host)
{
    return BL_LOBBY_OFFSET + (uint64_t)host * BL_LOBBY_STRIDE;
}

static inline uint64_t bl_lobby_reply_offset(uint32_t host, uint32_t half)
{
    return bl_lobby_request_offset(host) + (1 + half) * BL_POLL_STRIDE;
}

static inline uint64_t bl_doorbell_offset(uint32_t host)
{
    return bl_lobby_reply_offset(host, BL_HALF_COUNT);
}

static inline uint64_t bl_session_offset(const bl_geometry *g, uint32_t lane, uint32_t half)
{
    return g->session_offset + ((uint64_t)half * g->lane_count + lane) * BL_LINE_SIZE;
}

/* A lane is a page whose first line is the client's heartbeat; then come request lines; reply lines
 * of half 0 and of half 1; bulk in; bulk out of half 0 and of half 1. */
static inline uint64_t bl_lane_offset(const bl_geometry *g, uint32_t lane)
{
    return g->lane_offset + (uint64_t)lane * g->lane_stride;
}

static inline uint64_t bl_request_offset(const bl_geometry *g, uint32_t lane, uint32_t slot)
{
    return bl_lane_offset(g, lane) + BL_PAGE_SIZE + (uint64_t)slot * BL_POLL_STRIDE;
}

static inline uint64_t bl_reply_offset(const bl_geometry *g, uint32_t lane, uint32_t half,
                                       uint32_t slot)
{
    return bl_request_offset(g, lane, slot) + (uint64_t)(1 + half) * g->slot_count * BL_POLL_STRIDE;
}

static inline uint64_t bl_bulk_in_offset(const bl_geometry *g, uint32_t lane)
{
    return bl_lane_offset(g, lane) + BL_PAGE_SIZE + 3ull * g->slot_count * BL_POLL_STRIDE;
}

static inline uint64_t bl_bulk_out_offset(const bl_geometry *g, uint32_t lane, uint32_t half)
{
    return bl_bulk_in_offset(g, lane) + (uint64_t)(1 + half) * g->bulk_size;
}

static inline uint64_t bl_entry_offset(const bl_geometry *g, uint32_t block, uint32_t half)
{
    return g->table_offset + ((uint64_t)half * g->block_count_max + block) * BL_LINE_SIZE;
}

static inline uint64_t bl_name_offset(const bl_geometry *g, uint32_t block, uint32_t half)
{
    return g->name_offset + ((uint64_t)half * g->block_count_max + block) * BL_LINE_SIZE;
}

static inline uint64_t bl_extent_line_offset(const bl_geometry *g, uint64_t stripe, uint32_t half)
{
    return g->extent_offset + ((uint64_t)half * g->stripe_count + stripe) * BL_LINE_SIZE;
}

#endif

/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Repairs a pool that is not in use, one finding of check/check.c at a time. A damaged line is
 * reset to its initial state. Payload is never written.
 *
 * Epoch lines are restored instead, because the greater one determines the valid half. If neither
 * copy of a line is whole, its epoch is recovered from the marks and sessions of its half, and the
 * line is rewritten as that of a stopped server. The caller has proven that no server and no
 * session is alive.
 */
#include <errno.h>

#include "check/line.h"
#include "coherence/guard.h"

static void bl_repair_line(const bl_pool *pool, uint64_t offset, const void *line)
{
    bl_stream_line(&pool->memory, offset, line);
    bl_fence_store(&pool->memory);
}

/* Return the epoch of the last server that wrote a half, according to its marks and sessions; 0:
 * the half was never written. */
static uint64_t bl_repair_evidence(const bl_pool *pool, uint32_t half)
{
    const bl_memory *memory = &pool->memory;
    const bl_geometry *g = &pool->geometry;
    uint64_t epoch = 0;
    bl_refetch(memory, bl_extent_line_offset(g, 0, half), g->stripe_count * BL_LINE_SIZE);
    for (uint64_t stripe = 0; stripe < g->stripe_count; stripe++) {
        bl_extent_line mark;
        bl_load_line(memory, bl_extent_line_offset(g, stripe, half), &mark);
        if (bl_table_whole(&mark, stripe) && mark.epoch > epoch)
            epoch = mark.epoch;
    }
    bl_refetch(memory, bl_session_offset(g, 0, half), (uint64_t)g->lane_count * BL_LINE_SIZE);
    for (uint32_t lane = 0; lane < g->lane_count; lane++) {
        bl_session_line session;
        bl_load_line(memory, bl_session_offset(g, lane, half), &session);
        if (bl_table_whole(&session, lane) && session.epoch > epoch)
            epoch = session.epoch;
    }
    return epoch % BL_HALF_COUNT == half ? epoch : 0;
}

static int bl_repair_epoch_right(const bl_epoch_line *line, uint32_t half)
{
    return bl_table_whole(line, half) && line->epoch != 0 && line->epoch % BL_HALF_COUNT == half &&
           line->epoch >> (64 - BL_GENERATION_SHIFT) == 0 && line->nonce != 0 &&
           line->state >= BL_SERVER_TAKING && line->state <= BL_SERVER_FAILED &&
           line->host < BL_HOST_COUNT && line->reserved_tail == 0 &&
           bl_check_zero(line->reserved, sizeof line->reserved);
}

static void bl_repair_epoch(const bl_pool *pool, uint32_t half)
{
    bl_epoch_line line = {0};
    uint64_t offset = bl_epoch_offset(half);
    bl_refetch(&pool->memory, offset, BL_REGISTER_SIZE);
    for (uint64_t copy = 0; copy < BL_REGISTER_SIZE && line.epoch == 0; copy += BL_LINE_SIZE) {
        bl_load_line(&pool->memory, offset + copy, &line);
        if (!bl_repair_epoch_right(&line, half))
            line = (bl_epoch_line){0};
    }
    if (line.epoch == 0)
        line.epoch = bl_repair_evidence(pool, half);
    if (line.epoch != 0 && line.nonce == 0) {
        line.nonce = bl_new_nonce(&pool->memory);
        line.state = BL_SERVER_STOPPED;
        bl_table_seal(&line, half);
    }
    for (uint64_t copy = 0; copy < BL_REGISTER_SIZE; copy += BL_LINE_SIZE)
        bl_repair_line(pool, offset + copy, &line);
}

/* Write a heartbeat of the last server. */
static void bl_repair_heartbeat(const bl_pool *pool, const bl_epoch_line *epoch)
{
    bl_heartbeat_line line = {.count = 1, .nonce = epoch->nonce};
    bl_table_seal(&line, line.nonce);
    bl_repair_line(pool, bl_server_heartbeat_offset(epoch->epoch % BL_HALF_COUNT), &line);
}

/* Make a free line of the entries or marks, which is sealed: a zero line may end the table. Other
 * free lines are zero. */
static void bl_repair_free(const bl_geometry *g, uint64_t offset, uint64_t line[8])
{
    uint64_t entry = (offset - g->table_offset) / BL_LINE_SIZE;
    uint64_t mark = (offset - g->extent_offset) / BL_LINE_SIZE;
    memset(line, 0, BL_LINE_SIZE);
    if (offset >= g->table_offset && offset < g->name_offset) {
        bl_entry free = {.state = BL_ENTRY_FREE};
        bl_table_seal(&free, entry % g->block_count_max);
        memcpy(line, &free, sizeof free);
    } else if (offset >= g->extent_offset && mark < BL_HALF_COUNT * g->stripe_count) {
        bl_extent_line free = {.first_stripe = (uint32_t)(mark % g->stripe_count)};
        bl_table_seal(&free, free.first_stripe);
        memcpy(line, &free, sizeof free);
    }
}

typedef struct bl_repair {
    const bl_pool *pool;
    const bl_finding *finding;
} bl_repair;

static int bl_repair_guarded(void *context)
{
    const bl_repair *repair = context;
    const bl_pool *pool = repair->pool;
    const bl_finding *finding = repair->finding;
    uint64_t free[8];
    const bl_geometry *g = &pool->geometry;
    uint32_t kind = finding->kind;
    bl_epoch_line epoch;
    bl_epoch_read(pool, &epoch);
    uint32_t half = bl_check_half(&epoch);
    uint64_t offset = finding->detail;
    if (kind >= BL_FINDING_RESERVED && offset < bl_epoch_offset(BL_HALF_COUNT) &&
        offset % BL_SERVER_STRIDE < BL_REGISTER_SIZE) {
        bl_repair_epoch(pool, (uint32_t)(offset / BL_SERVER_STRIDE));
        return 0;
    }
    if (kind <= BL_FINDING_EPOCH_FUTURE) {
        if (finding->place >= BL_HALF_COUNT)
            return -EINVAL;
        bl_repair_epoch(pool, (uint32_t)finding->place);
        return 0;
    }
    if (kind <= BL_FINDING_HEARTBEAT_STRANGE || offset == bl_server_heartbeat_offset(half)) {
        bl_repair_heartbeat(pool, &epoch);
        return 0;
    }
    if (kind >= BL_FINDING_ENTRY_DAMAGED && kind <= BL_FINDING_PAYLOAD_DAMAGED)
        offset = bl_entry_offset(g, (uint32_t)finding->place, half);
    else if (kind >= BL_FINDING_EXTENT_DAMAGED && kind <= BL_FINDING_EXTENT_FUTURE)
        offset = bl_extent_line_offset(g, finding->place, half);
    else if (kind >= BL_FINDING_SESSION_DAMAGED && kind <= BL_FINDING_SESSION_TWICE)
        offset = bl_session_offset(g, (uint32_t)finding->place, half);
    if (offset % BL_LINE_SIZE != 0 || offset >= g->data_offset)
        return -EINVAL;
    bl_repair_free(g, offset, free);
    bl_repair_line(pool, offset, free);
    return 0;
}

int bl_repair_finding(const bl_pool *pool, const bl_finding *finding)
{
    bl_repair repair = {pool, finding};
    return bl_guarded(&pool->memory, bl_repair_guarded, &repair);
}

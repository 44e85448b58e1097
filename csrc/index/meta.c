/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Creates the block index, starts it as the pool's server, and dispatches the server's calls and
 * ended sessions.
 */
#include "index/blocks.h"

#include <errno.h>
#include <stdlib.h>

#include "base/lazy.h"
#include "index/hints.h"
#include "index/shares.h"
#include "index/tombs.h"

/* Flush all space that a session was granted, as bl_device_written() does. The session and its
 * devices are gone, but lines that they wrote may still be dirty in this host's cache. These must
 * be written back before the space is granted again; later they would overwrite the next owner's
 * bytes. */
static void bl_meta_flush(const bl_meta *meta, uint32_t lane)
{
    const bl_memory *memory = &meta->pool->memory;
    bl_fence_full(memory); /* no flush before the proof of death */
    for (uint32_t n = meta->lane_blocks[lane]; n != BL_NO_NUMBER;
         n = meta->blocks[n].links[BL_LIST_LANE].next)
        bl_invalidate(memory, meta->blocks[n].offset,
                      bl_checksums_offset(0, meta->blocks[n].length));
    bl_fence_full(memory); /* the flushes are done before the space is granted */
}

/* Flush all held space for a session of an earlier epoch, whose grants are unknown to this
 * server. */
static void bl_meta_flush_held(const bl_meta *meta)
{
    const bl_memory *memory = &meta->pool->memory;
    uint64_t offset = meta->pool->geometry.data_offset;
    uint32_t size;
    bl_fence_full(memory); /* no flush before the proof of death */
    for (; bl_pages_next_held(meta->pages, &offset, &size) == 0; offset += size)
        bl_invalidate(memory, offset, size);
    bl_fence_full(memory); /* the flushes are done before the space is granted */
}

/* A session has ended: release its pins, grants, hints and claims. */
static void bl_meta_ended(void *context, uint32_t lane, enum bl_end end)
{
    bl_meta *meta = context;
    uint32_t count;
    if (end == BL_END_GONE && bl_lane_has_devices(meta->server, lane))
        bl_meta_flush(meta, lane);
    bl_tasks_lane_gone(meta->tasks, lane);
    bl_lower_lane_gone(meta, lane);
    if (meta->hints)
        bl_hints_lane_gone(meta, lane);
    for (int64_t n = bl_pins_pop(meta->pins[lane], &count); n >= 0;
         n = bl_pins_pop(meta->pins[lane], &count)) {
        meta->holds[lane].bytes -= meta->blocks[n].length;
        bl_unpin(meta, (uint32_t)n, count); /* a live reader checks again after its copy */
    }
    uint32_t number = meta->lane_blocks[lane];
    while (number != BL_NO_NUMBER) {
        uint32_t next = meta->blocks[number].links[BL_LIST_LANE].next;
        bl_grant_end(meta, number, end);
        number = next;
    }
}

/* Free the space held for sessions of earlier epochs, all of which are proven gone. */
static void bl_meta_settled(void *context)
{
    bl_meta *meta = context;
    if (meta->server->inherited_devices)
        bl_meta_flush_held(meta);
    bl_pages_unhold_all(meta->pages);
    for (uint32_t lane = 0; lane < meta->pool->geometry.lane_count; lane++)
        for (uint32_t n = meta->lane_blocks[lane]; n != BL_NO_NUMBER;
             n = meta->blocks[n].links[BL_LIST_LANE].next)
            if (meta->blocks[n].state == BL_NUMBER_HELD) { /* held by a session of this epoch */
                const bl_block *block = &meta->blocks[n];
                bl_pages_take(meta->pages, block->offset, bl_space_size(block));
                bl_pages_hold(meta->pages, block->offset, bl_space_size(block));
            }
    bl_extents_return_all(meta);
}

int bl_meta_serve(bl_meta *meta)
{
    static const struct {
        uint32_t method;
        bl_handler handler;
    } calls[] = {
        {BL_METHOD_PING, bl_echo_handler},     {BL_METHOD_LOOKUP, bl_handle_lookup},
        {BL_METHOD_RESERVE, bl_handle_reserve}, {BL_METHOD_COMMIT, bl_handle_commit},
        {BL_METHOD_ABORT, bl_handle_abort},    {BL_METHOD_RELEASE, bl_handle_release},
        {BL_METHOD_REMOVE, bl_handle_remove},  {BL_METHOD_STAT, bl_handle_stat},
        {BL_METHOD_RETIRE, bl_handle_retire},  {BL_METHOD_TASK_CLAIM, bl_handle_task_claim},
        {BL_METHOD_TASK_EXTEND, bl_handle_task_extend},
        {BL_METHOD_TASK_COUNT, bl_handle_task_count}, {BL_METHOD_ONBOARD, bl_handle_onboard},
        {BL_METHOD_TIERS, bl_handle_tiers}, {BL_METHOD_LOWER_TAKE, bl_handle_lower_take},
        {BL_METHOD_LOWER_TELL, bl_handle_lower_report}, {BL_METHOD_SESSIONS, bl_handle_sessions},
        {BL_METHOD_REMOVAL_REASONS, bl_handle_removal_reasons},
        {BL_METHOD_REMOVING, bl_handle_removing},
        {BL_METHOD_HINT, bl_handle_hint},
    };
    for (size_t i = 0; i < sizeof calls / sizeof calls[0]; i++)
        bl_server_handle_method(meta->server, calls[i].method, calls[i].handler, meta);
    bl_server_hooks hooks = {meta, bl_recover, bl_meta_ended, bl_meta_settled, bl_lookup_deferred};
    return bl_server_take(meta->server, &hooks);
}

int bl_meta_create(bl_server *server, uint32_t eviction, bl_meta **out)
{
    const bl_geometry *g = &server->pool->geometry;
    bl_meta *meta = calloc(1, sizeof *meta);
    if (meta == NULL)
        return -ENOMEM;
    meta->server = server;
    meta->pool = server->pool;
    meta->eviction = eviction;
    meta->free_number = BL_NO_NUMBER;
    meta->entry_limit = meta->mark_limit = 1;
    bl_shares_begin(meta);
    meta->blocks = bl_lazy_map_dense(g->block_count_max * sizeof *meta->blocks);
    meta->pins = calloc(g->lane_count, sizeof *meta->pins);
    meta->holds = calloc(g->lane_count, sizeof *meta->holds);
    meta->lane_blocks = malloc(g->lane_count * sizeof *meta->lane_blocks);
    meta->stripe_blocks = bl_lazy_map_dense(g->stripe_count * sizeof *meta->stripe_blocks);
    meta->kept = bl_lazy_map_dense(g->stripe_count * sizeof *meta->kept);
    int status = -ENOMEM;
    if (meta->blocks && meta->pins && meta->holds && meta->lane_blocks && meta->stripe_blocks &&
        meta->kept)
        status = bl_index_create(&meta->index, g->block_count_max);
    if (status == 0)
        status = bl_evict_create(&meta->orders[0], g->block_count_max, eviction);
    if (status == 0)
        status = bl_removal_log_create(meta);
    if (status == 0)
        status = bl_tombs_create(meta);
    if (status == 0)
        status = bl_tasks_create(&meta->tasks, bl_tasks_max(meta->pool));
    if (status == 0)
        status = bl_pages_create(&meta->pages, g->data_offset, g->stripe_count);
    if (status == 0)
        status = bl_extents_create(&meta->extents, g->stripe_count);
    if (status == 0)
        status = bl_victims_create(&meta->victims, g->block_count_max);
    for (uint32_t lane = 0; status == 0 && lane < g->lane_count; lane++)
        status = bl_pins_create(&meta->pins[lane], BL_PINS_PER_SESSION);
    if (status < 0) {
        bl_meta_destroy(meta);
        return status;
    }
    for (uint32_t lane = 0; lane < g->lane_count; lane++)
        meta->lane_blocks[lane] = BL_NO_NUMBER;
    for (uint64_t stripe = 0; stripe < g->stripe_count; stripe++)
        meta->stripe_blocks[stripe] = BL_NO_NUMBER;
    *out = meta;
    return 0;
}

void bl_meta_destroy(bl_meta *meta)
{
    for (uint32_t lane = 0; meta->pins && lane < meta->pool->geometry.lane_count; lane++)
        if (meta->pins[lane])
            bl_pins_destroy(meta->pins[lane]);
    if (meta->index)
        bl_index_destroy(meta->index);
    for (uint32_t order = 0; order < BL_ORDER_COUNT; order++)
        bl_evict_destroy(meta->orders[order]);
    bl_hints_destroy(meta);
    bl_pages_destroy(meta->pages);
    bl_extents_destroy(meta->extents);
    bl_victims_destroy(meta->victims);
    bl_lazy_unmap(meta->blocks, meta->pool->geometry.block_count_max * sizeof *meta->blocks);
    free(meta->pins);
    free(meta->holds);
    free(meta->lane_blocks);
    bl_tasks_destroy(meta->tasks);
    bl_lower_destroy(meta);
    bl_tombs_destroy(meta);
    bl_journal_destroy(meta);
    bl_lazy_unmap(meta->kept, meta->pool->geometry.stripe_count * sizeof *meta->kept);
    bl_removal_log_destroy(meta);
    bl_lazy_unmap(meta->stripe_blocks,
                  meta->pool->geometry.stripe_count * sizeof *meta->stripe_blocks);
    free(meta);
}

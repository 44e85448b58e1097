/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Creates the block index, starts it as the pool's server, and dispatches the server's calls and
 * ended sessions.
 */
#include <errno.h>
#include <stdlib.h>

#include "base/lazy.h"
#include "index/grant.h"
#include "index/hints.h"
#include "index/journal.h"
#include "index/lookup.h"
#include "index/lower.h"
#include "index/reclaim.h"
#include "index/recover.h"
#include "index/removal_log.h"
#include "index/retire.h"
#include "index/sessions.h"
#include "index/shares.h"
#include "index/stat.h"
#include "index/state.h"
#include "index/task_call.h"
#include "index/tombstones.h"

/* Flush all space that a session was granted, as bl_device_written() does. The session and its
 * devices are gone, but lines that they wrote may still be dirty in this host's cache. These must
 * be written back before the space is granted again; later they would overwrite the next owner's
 * bytes. */
static void bl_index_flush(const bl_index *index, uint32_t lane)
{
    const bl_memory *memory = &index->pool->memory;
    bl_fence_full(memory); /* no flush before the proof of death */
    for (uint32_t n = index->lane_blocks[lane]; n != BL_NO_NUMBER;
         n = index->blocks[n].links[BL_LIST_LANE].next)
        bl_invalidate(memory, index->blocks[n].offset,
                      bl_checksums_offset(0, index->blocks[n].length));
    bl_fence_full(memory); /* the flushes are done before the space is granted */
}

/* Flush all held space for a session of an earlier epoch, whose grants are unknown to this
 * server. */
static void bl_index_flush_held(const bl_index *index)
{
    const bl_memory *memory = &index->pool->memory;
    uint64_t offset = index->pool->geometry.data_offset;
    uint32_t size;
    bl_fence_full(memory); /* no flush before the proof of death */
    for (; bl_pages_next_held(index->pages, &offset, &size) == 0; offset += size)
        bl_invalidate(memory, offset, size);
    bl_fence_full(memory); /* the flushes are done before the space is granted */
}

/* A session has ended: release its pins, grants, hints and claims. */
static void bl_index_ended(void *context, uint32_t lane, enum bl_end end)
{
    bl_index *index = context;
    uint32_t count;
    if (end == BL_END_GONE && bl_lane_has_devices(index->server, lane))
        bl_index_flush(index, lane);
    bl_tasks_lane_gone(index->tasks, lane);
    bl_tombstones_lane_gone(index, lane);
    bl_lower_lane_gone(index, lane);
    if (index->hints)
        bl_hints_lane_gone(index, lane);
    for (int64_t n = bl_pins_pop(index->pins[lane], &count); n >= 0;
         n = bl_pins_pop(index->pins[lane], &count)) {
        index->holds[lane].bytes -= index->blocks[n].length;
        bl_unpin(index, (uint32_t)n, count); /* a live reader checks again after its copy */
    }
    uint32_t number = index->lane_blocks[lane];
    while (number != BL_NO_NUMBER) {
        uint32_t next = index->blocks[number].links[BL_LIST_LANE].next;
        bl_grant_end(index, number, end);
        number = next;
    }
}

/* Free the space held for sessions of earlier epochs, all of which are proven gone. */
static void bl_index_settled(void *context)
{
    bl_index *index = context;
    if (index->server->inherited_devices)
        bl_index_flush_held(index);
    bl_pages_unhold_all(index->pages);
    for (uint32_t lane = 0; lane < index->pool->geometry.lane_count; lane++)
        for (uint32_t n = index->lane_blocks[lane]; n != BL_NO_NUMBER;
             n = index->blocks[n].links[BL_LIST_LANE].next)
            if (index->blocks[n].state == BL_NUMBER_HELD) { /* held by a session of this epoch */
                const bl_block *block = &index->blocks[n];
                bl_pages_take(index->pages, block->offset, bl_space_size(block));
                bl_pages_hold(index->pages, block->offset, bl_space_size(block));
            }
    bl_extents_return_all(index);
}

int bl_index_serve(bl_index *index)
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
        bl_server_handle_method(index->server, calls[i].method, calls[i].handler, index);
    bl_server_hooks hooks = {index, bl_recover, bl_index_ended, bl_index_settled,
                             bl_lookup_deferred};
    return bl_server_take(index->server, &hooks);
}

int bl_index_create(bl_server *server, uint32_t eviction, bl_index **out)
{
    const bl_geometry *g = &server->pool->geometry;
    bl_index *index = calloc(1, sizeof *index);
    if (index == NULL)
        return -ENOMEM;
    index->server = server;
    index->pool = server->pool;
    index->eviction = eviction;
    index->free_number = BL_NO_NUMBER;
    index->entry_limit = index->mark_limit = 1;
    bl_shares_begin(index);
    index->blocks = bl_lazy_map_dense(g->block_count_max * sizeof *index->blocks);
    index->pins = calloc(g->lane_count, sizeof *index->pins);
    index->holds = calloc(g->lane_count, sizeof *index->holds);
    index->lane_blocks = malloc(g->lane_count * sizeof *index->lane_blocks);
    index->stripe_blocks = bl_lazy_map_dense(g->stripe_count * sizeof *index->stripe_blocks);
    index->retained = bl_lazy_map_dense(g->stripe_count * sizeof *index->retained);
    int status = -ENOMEM;
    if (index->blocks && index->pins && index->holds && index->lane_blocks &&
        index->stripe_blocks && index->retained)
        status = bl_hash_create(&index->hash, g->block_count_max);
    if (status == 0)
        status = bl_evict_create(&index->orders[0], g->block_count_max, eviction);
    if (status == 0)
        status = bl_removal_log_create(index);
    if (status == 0)
        status = bl_tombstones_create(index);
    if (status == 0)
        status = bl_tasks_create(&index->tasks, bl_tasks_max(index->pool));
    if (status == 0)
        status = bl_pages_create(&index->pages, g->data_offset, g->stripe_count);
    if (status == 0)
        status = bl_extents_create(&index->extents, g->stripe_count);
    if (status == 0)
        status = bl_victims_create(&index->victims, g->block_count_max);
    for (uint32_t lane = 0; status == 0 && lane < g->lane_count; lane++)
        status = bl_pins_create(&index->pins[lane], BL_PINS_PER_SESSION);
    if (status < 0) {
        bl_index_destroy(index);
        return status;
    }
    for (uint32_t lane = 0; lane < g->lane_count; lane++)
        index->lane_blocks[lane] = BL_NO_NUMBER;
    for (uint64_t stripe = 0; stripe < g->stripe_count; stripe++)
        index->stripe_blocks[stripe] = BL_NO_NUMBER;
    *out = index;
    return 0;
}

void bl_index_destroy(bl_index *index)
{
    for (uint32_t lane = 0; index->pins && lane < index->pool->geometry.lane_count; lane++)
        if (index->pins[lane])
            bl_pins_destroy(index->pins[lane]);
    if (index->hash)
        bl_hash_destroy(index->hash);
    for (uint32_t order = 0; order < BL_ORDER_COUNT; order++)
        bl_evict_destroy(index->orders[order]);
    bl_hints_destroy(index);
    bl_pages_destroy(index->pages);
    bl_extents_destroy(index->extents);
    bl_victims_destroy(index->victims);
    bl_lazy_unmap(index->blocks, index->pool->geometry.block_count_max * sizeof *index->blocks);
    free(index->pins);
    free(index->holds);
    free(index->lane_blocks);
    bl_tasks_destroy(index->tasks);
    bl_lower_destroy(index);
    bl_tombstones_destroy(index);
    bl_journal_destroy(index);
    bl_lazy_unmap(index->retained, index->pool->geometry.stripe_count * sizeof *index->retained);
    bl_removal_log_destroy(index);
    bl_lazy_unmap(index->stripe_blocks,
                  index->pool->geometry.stripe_count * sizeof *index->stripe_blocks);
    free(index);
}

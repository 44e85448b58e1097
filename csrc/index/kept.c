/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Keeps blocks from eviction. The extents of kept blocks, counted whole, are at most an eighth of
 * the stripes, so that room for other blocks can always be made in the rest.
 */
#include "index/blocks.h"

enum { BL_KEPT_STRIPES_PART = 8 };

/* Count the stripes of an extent whose block becomes kept, or no longer is. */
static void bl_kept_count(bl_meta *meta, uint64_t offset, int step)
{
    bl_extent_view view;
    if (bl_extents_at(meta->extents, offset, &view) < 0)
        return;
    uint32_t *kept = &meta->kept[view.first_stripe];
    if (step > 0 ? (*kept)++ == 0 : --*kept == 0)
        meta->kept_stripes += step > 0 ? view.stripe_count : 0ull - view.stripe_count;
}

int bl_block_keep(bl_meta *meta, uint32_t number)
{
    bl_block *block = &meta->blocks[number];
    int64_t place = bl_tasks_take(meta->tasks, number);
    if (place < 0)
        return -BL_ERROR_QUEUE_FULL;
    bl_kept_count(meta, block->offset, 1);
    block->task = (uint32_t)place + 1;
    uint64_t most = meta->pool->geometry.stripe_count / BL_KEPT_STRIPES_PART;
    if (meta->kept_stripes <= (most ? most : 1))
        return 0;
    bl_block_unkeep(meta, number);
    return -BL_ERROR_QUEUE_FULL;
}

void bl_block_unkeep(bl_meta *meta, uint32_t number)
{
    bl_block *block = &meta->blocks[number];
    if (block->task == 0)
        return;
    bl_tasks_remove(meta->tasks, block->task - 1);
    bl_kept_count(meta, block->offset, -1);
    block->task = 0;
}

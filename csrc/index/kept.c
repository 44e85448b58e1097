/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Kept blocks (tasks), which are exempt from eviction. They have at most an eighth of the space, so
 * that other blocks can be evicted for room in the rest.
 */
#include "index/blocks.h"

enum { BL_KEPT_PART = 8 };

int bl_keep_full(const bl_meta *meta, uint64_t stored)
{
    uint64_t most = meta->pool->geometry.stripe_count * BL_STRIPE_SIZE / BL_KEPT_PART;
    return meta->kept_bytes + bl_block_size(stored) > most || bl_tasks_full(meta->tasks);
}

/* Count a block that becomes kept (step 1), or no longer is (-1). */
static void bl_kept_count(bl_meta *meta, const bl_block *block, int step)
{
    uint32_t size = bl_space_size(block);
    uint64_t last = bl_stripe_of(meta, block->offset + size - 1);
    for (uint64_t stripe = bl_stripe_of(meta, block->offset); stripe <= last; stripe++)
        meta->kept[stripe] += (uint32_t)step;
    meta->kept_bytes += step > 0 ? size : 0ull - size;
}

int bl_block_keep(bl_meta *meta, uint32_t number)
{
    bl_block *block = &meta->blocks[number];
    if (bl_keep_full(meta, bl_stored_size(block->length, block->chunk_size)))
        return -BL_ERROR_QUEUE_FULL;
    bl_kept_count(meta, block, 1);
    block->task = (uint32_t)bl_tasks_take(meta->tasks, number) + 1;
    return 0;
}

void bl_block_unkeep(bl_meta *meta, uint32_t number)
{
    bl_block *block = &meta->blocks[number];
    if (block->task == 0)
        return;
    bl_tasks_remove(meta->tasks, block->task - 1);
    bl_kept_count(meta, block, -1);
    block->task = 0;
}

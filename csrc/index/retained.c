/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Retained blocks (tasks), which are exempt from eviction. They have at most an eighth of the
 * space, so that other blocks can be evicted for room in the rest.
 */
#include "index/retained.h"

enum { BL_RETAINED_PART = 8 };

int bl_retained_full(const bl_index *index, uint64_t stored)
{
    uint64_t most = index->pool->geometry.stripe_count * BL_STRIPE_SIZE / BL_RETAINED_PART;
    return index->retained_bytes + bl_block_size(stored) > most || bl_tasks_full(index->tasks);
}

/* Count a block that becomes retained (step 1), or no longer is (-1). */
static void bl_retained_count(bl_index *index, const bl_block *block, int step)
{
    uint32_t size = bl_space_size(block);
    uint64_t last = bl_stripe_of(index, block->offset + size - 1);
    for (uint64_t stripe = bl_stripe_of(index, block->offset); stripe <= last; stripe++)
        index->retained[stripe] += (uint32_t)step;
    index->retained_bytes += step > 0 ? size : 0ull - size;
}

int bl_block_retain(bl_index *index, uint32_t number)
{
    bl_block *block = &index->blocks[number];
    if (bl_retained_full(index, bl_stored_size(block->length, block->chunk_size)))
        return -BL_ERROR_QUEUE_FULL;
    bl_retained_count(index, block, 1);
    block->task = (uint32_t)bl_tasks_take(index->tasks, number) + 1;
    return 0;
}

void bl_block_unretain(bl_index *index, uint32_t number)
{
    bl_block *block = &index->blocks[number];
    if (block->task == 0)
        return;
    bl_tasks_remove(index->tasks, block->task - 1);
    bl_retained_count(index, block, -1);
    block->task = 0;
}

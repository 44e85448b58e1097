/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Makes room for a block (D8, D11): a free block of the class; else a new extent; else the coldest
 * blocks are evicted.
 *
 * If the coldest block is of the same class, it is evicted and its space is taken. If it is of
 * another class, its whole extent is emptied, because only stripes can change class. At most
 * BL_EMPTY_STRIPES_MAX stripes are emptied for one block; after that, an extent that wastes more
 * than it should is better than none.
 */
#include "index/blocks.h"

#include <errno.h>

#include "coherence/crash_point.h"

enum {
    BL_EMPTY_STRIPES_MAX = 2 * BL_EXTENT_STRIPES_MAX,
    BL_COLD_LOOK_MAX = 1024     /* blocks looked at for an extent that can be emptied */
};

int64_t bl_number_take(bl_meta *meta)
{
    int64_t number = bl_number_unused(meta), coldest;
    if (number >= 0)
        return number;
    coldest = bl_evict_coldest(meta->order);
    if (coldest < 0)
        return number;
    bl_block_leave(meta, (uint32_t)coldest, BL_LEFT_ENTRY);
    meta->stat.table_evict_count++;
    return bl_number_unused(meta);
}

uint32_t *bl_extent_list(bl_meta *meta, uint64_t offset)
{
    int64_t first = bl_extents_first_at(meta->extents, offset);
    return first < 0 ? NULL : &meta->extent_blocks[first];
}

void bl_extent_return(bl_meta *meta, uint64_t offset)
{
    bl_extent_view view;
    if (bl_extents_at(meta->extents, offset, &view) == 0 &&
        bl_extents_close(meta->extents, view.first_stripe) == 0) {
        bl_crash_point("extent.closed");
        bl_extent_write(meta, &view, BL_EXTENT_FREE);
        bl_crash_point("extent.returned");
    }
}

void bl_extents_return_all(bl_meta *meta)
{
    bl_extent_view view;
    for (uint64_t stripe = 0; bl_extents_next_empty(meta->extents, stripe, &view) == 0;
         stripe = (uint64_t)view.first_stripe + view.stripe_count)
        if (bl_extents_close(meta->extents, view.first_stripe) == 0)
            bl_extent_write(meta, &view, BL_EXTENT_FREE);
}

void bl_space_give(bl_meta *meta, uint32_t number)
{
    uint64_t offset = meta->blocks[number].offset;
    bl_list_remove(meta, bl_extent_list(meta, offset), BL_LIST_EXTENT, number);
    bl_extents_give(meta->extents, offset);
    meta->reused = 1;
    bl_crash_point("space.given");
    bl_extent_return(meta, offset);
}

void bl_block_leave(bl_meta *meta, uint32_t number, enum bl_left why)
{
    bl_block *block = &meta->blocks[number];
    bl_entry_clear(meta, number);
    bl_crash_point("evict.cleared");
    bl_fence_store(&meta->pool->memory); /* void for readers before the space is reused */
    bl_crash_point("evict.fenced");
    bl_index_remove(meta->index, block->key);
    bl_evict_forget(meta->order, number);
    bl_lower_forget(meta, number);
    bl_journal_removed(meta, number);
    bl_block_unkeep(meta, number);
    bl_space_give(meta, number);
    bl_stat_left(meta, number, why);
    bl_number_rest(meta, number);
}

/* May all blocks of an extent be evicted? */
static int bl_extent_may_go(const bl_meta *meta, const bl_extent_view *view)
{
    uint32_t n = meta->extent_blocks[view->first_stripe];
    for (; n != BL_NO_NUMBER; n = meta->blocks[n].links[BL_LIST_EXTENT].next)
        if (!bl_evict_has(meta->order, n))
            return 0; /* pinned, kept, or being written */
    return view->held_count == 0 && !view->retired;
}

/* Evict all blocks of an extent, which frees it: return its stripes, or 0 if one of the blocks must
 * stay. */
static uint32_t bl_extent_empty(bl_meta *meta, const bl_extent_view *view)
{
    uint32_t *list = &meta->extent_blocks[view->first_stripe];
    if (!bl_extent_may_go(meta, view))
        return 0;
    while (*list != BL_NO_NUMBER)
        bl_block_leave(meta, *list, BL_LEFT_SPACE);
    return view->stripe_count;
}

/* Find the next extent that reaches into a cell, at or after from; 0 at the end. */
static int bl_cell_next(const bl_meta *meta, uint32_t first, uint32_t count, uint64_t from,
                        bl_extent_view *view)
{
    if (from + BL_EXTENT_STRIPES_MAX <= first)
        from = first + 1 - BL_EXTENT_STRIPES_MAX;
    while (bl_extents_next(meta->extents, from, view) == 0 && view->first_stripe < first + count) {
        if (view->first_stripe + view->stripe_count > first)
            return 1;
        from = view->first_stripe + 1;
    }
    return 0;
}

/* Empty all extents that reach into the class's cell at the coldest extent, so that an extent of
 * this class fits there; only the coldest one, if something else in the cell must stay. Return the
 * stripes emptied. */
static uint32_t bl_cell_empty(bl_meta *meta, uint32_t block_size, const bl_extent_view *coldest)
{
    uint64_t offset = meta->pool->geometry.data_offset +
                      (uint64_t)coldest->first_stripe * BL_STRIPE_SIZE;
    uint32_t first, count, emptied = bl_extent_empty(meta, coldest);
    bl_extent_view view;
    if (!emptied || bl_extents_cell(meta->extents, block_size, offset, &first, &count) < 0)
        return emptied;
    for (uint64_t at = 0; bl_cell_next(meta, first, count, at, &view); at = view.first_stripe + 1)
        if (view.block_size == block_size || !bl_extent_may_go(meta, &view))
            return emptied;
    for (uint64_t at = 0; bl_cell_next(meta, first, count, at, &view); at = view.first_stripe + 1)
        emptied += bl_extent_empty(meta, &view);
    return emptied;
}

/* Open an extent, and publish it before anything is granted from it: 0, or what bl_extents_open()
 * said, or -BL_ERROR_DEPOSED. */
static int bl_space_open(bl_meta *meta, uint32_t block_size, enum bl_fit fit)
{
    bl_extent_view view;
    int status = bl_extents_open(meta->extents, block_size, fit, bl_generation_new(meta), &view);
    if (status < 0)
        return status;
    bl_crash_point("extent.opened");
    bl_extent_write(meta, &view, BL_EXTENT_OPEN);
    bl_crash_point("extent.marked");
    status = bl_server_still(meta->server); /* SYNC extent.open: marked before this look */
    bl_crash_point("extent.confirmed");
    if (status < 0)
        bl_extents_close(meta->extents, view.first_stripe);
    return status;
}

/* Empty the coldest extent of another class, or evict the coldest block of this one: 1; 0 if
 * nothing can be evicted. emptied counts the stripes emptied so far for this block. */
static int bl_space_evict(bl_meta *meta, uint32_t block_size, uint32_t *emptied)
{
    int64_t number = bl_evict_coldest(meta->order);
    for (int looks = 0; number >= 0 && looks < BL_COLD_LOOK_MAX; looks++) {
        bl_extent_view view;
        if (bl_extents_at(meta->extents, meta->blocks[number].offset, &view) < 0)
            return 0;
        int own = view.block_size == block_size;
        if (own || *emptied >= BL_EMPTY_STRIPES_MAX) {
            if (bl_space_open(meta, block_size, BL_FIT_ANY) == 0)
                return 1;
            if (own) {
                bl_block_leave(meta, (uint32_t)number, BL_LEFT_SPACE);
                return 1;
            }
        }
        uint32_t stripes = bl_cell_empty(meta, block_size, &view);
        *emptied += stripes;
        if (stripes)
            return 1;
        number = bl_evict_warmer(meta->order, (uint32_t)number);
    }
    return bl_space_open(meta, block_size, BL_FIT_ANY) == 0;
}

int bl_space_take(bl_meta *meta, uint64_t stored, uint64_t *offset)
{
    uint32_t block_size = bl_block_size(stored), emptied = 0;
    if (block_size == 0)
        return -BL_ERROR_BAD_REQUEST;
    for (;;) {
        if (bl_extents_take(meta->extents, block_size, offset) == 0)
            return 0;
        int status = bl_space_open(meta, block_size, BL_FIT_GOOD);
        if (status == 0)
            continue;
        if (status == -BL_ERROR_DEPOSED)
            return status;
        if (!bl_space_evict(meta, block_size, &emptied))
            return status == -E2BIG ? -BL_ERROR_CLASS_LIMIT : -BL_ERROR_NO_SPACE;
    }
}

void bl_block_drop(bl_meta *meta, uint32_t number, enum bl_left why)
{
    bl_block *block = &meta->blocks[number];
    if (block->pin_count == 0) {
        bl_block_leave(meta, number, why);
        return;
    }
    bl_entry_clear(meta, number);
    bl_crash_point("remove.cleared");
    bl_index_remove(meta->index, block->key);
    bl_evict_forget(meta->order, number);
    bl_lower_forget(meta, number);
    bl_journal_removed(meta, number);
    bl_block_unkeep(meta, number);
    block->state = BL_NUMBER_DOOMED;
    bl_crash_point("remove.doomed");
    bl_stat_left(meta, number, why);
}

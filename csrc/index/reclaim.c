/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Makes room for a block (D8, D11): the lowest free run of pages that is long enough, or else the
 * space of the coldest blocks that make such a run. Nothing is evicted before all victims are
 * chosen (space/victims.h).
 */
#include "index/blocks.h"
#include "index/hints.h"
#include "index/shares.h"

#include <errno.h>

#include "coherence/crash_point.h"

/* Prefetch what the next two evictions read if they are by age: the later block itself, and for the
 * next one, whose key is cached by now, the slots of its key. */
static void bl_evict_ahead(const bl_meta *meta, uint32_t number)
{
    const bl_evict *order = bl_order_of(meta, number);
    int64_t next = bl_evict_warmer(order, number);
    if (next < 0)
        return;
    bl_index_prefetch(meta->index, meta->blocks[next].key);
    bl_removal_log_prefetch(meta, meta->blocks[next].key);
    bl_pages_prefetch(meta->pages, meta->blocks[next].offset);
    int64_t later = bl_evict_warmer(order, (uint32_t)next);
    if (later < 0)
        return;
    bl_block_prefetch(meta, (uint32_t)later);
    bl_evict_prefetch(order, (uint32_t)later);
}

int64_t bl_number_take(bl_meta *meta)
{
    int64_t number = bl_number_unused(meta), coldest;
    if (number >= 0)
        return number;
    coldest = bl_eviction_first(meta);
    if (coldest < 0)
        return number;
    bl_evict_ahead(meta, (uint32_t)coldest);
    bl_block_leave(meta, (uint32_t)coldest, BL_REMOVED_ENTRY);
    meta->stat.table_evict_count++;
    return bl_number_unused(meta);
}

/* ---- The blocks, for a search for victims */

static int64_t bl_resident_coldest(void *context)
{
    const bl_meta *meta = context;
    return bl_evict_coldest(meta->orders[0]);
}

static int64_t bl_resident_warmer(void *context, uint32_t number)
{
    const bl_meta *meta = context;
    return bl_evict_warmer(meta->orders[0], number);
}

static int64_t bl_resident_first(void *context, uint64_t stripe)
{
    const bl_meta *meta = context;
    uint32_t number = meta->stripe_blocks[stripe];
    return number == BL_NO_NUMBER ? -1 : (int64_t)number;
}

static int64_t bl_resident_next(void *context, uint32_t number)
{
    const bl_meta *meta = context;
    uint32_t next = meta->blocks[number].links[BL_LIST_STRIPE].next;
    return next == BL_NO_NUMBER ? -1 : (int64_t)next;
}

/* A block that is not in the order is pinned, kept, being written, or not offered yet. */
static bl_resident bl_resident_look(void *context, uint32_t number)
{
    const bl_meta *meta = context;
    const bl_block *block = &meta->blocks[number];
    return (bl_resident){block->offset, bl_space_size(block),
                         (uint32_t)bl_evict_has(meta->orders[0], number)};
}

bl_residents bl_meta_residents(bl_meta *meta)
{
    return (bl_residents){
        .owner = meta,
        .data_offset = meta->pool->geometry.data_offset,
        .coldest = bl_resident_coldest,
        .warmer = bl_resident_warmer,
        .first = bl_resident_first,
        .next = bl_resident_next,
        .look = bl_resident_look,
    };
}

/* ---- The same for several shares */

static int64_t bl_resident_eviction_coldest(void *context) { return bl_eviction_coldest(context); }

static int64_t bl_resident_turn_warmer(void *context, uint32_t number)
{
    return bl_eviction_warmer(context, number);
}

static bl_resident bl_resident_turn_look(void *context, uint32_t number)
{
    const bl_meta *meta = context;
    const bl_block *block = &meta->blocks[number];
    return (bl_resident){block->offset, bl_space_size(block),
                         (uint32_t)bl_eviction_has(meta, number)};
}

/* ---- Space */

void bl_block_place(bl_meta *meta, uint32_t number)
{
    uint64_t stripe = bl_stripe_of(meta, meta->blocks[number].offset);
    bl_list_add(meta, &meta->stripe_blocks[stripe], BL_LIST_STRIPE, number);
    if (meta->share_count > 1)
        bl_share_use(meta, number, 1);
}

/* Close an extent if nothing is used or held there. Its mark is cleared last. */
static void bl_extent_return(bl_meta *meta, const bl_extent_view *view)
{
    if (!bl_pages_idle(meta->pages, view->first_stripe, view->stripe_count) ||
        bl_extents_close(meta->extents, view->first_stripe) < 0)
        return;
    bl_crash_point("extent.closed");
    bl_extent_write(meta, view, BL_EXTENT_FREE);
    bl_crash_point("extent.returned");
}

void bl_extents_return(bl_meta *meta, uint64_t offset, uint32_t size)
{
    bl_extent_view view;
    uint64_t last = bl_stripe_of(meta, offset + size - 1);
    for (uint64_t stripe = bl_stripe_of(meta, offset);
         stripe <= last && bl_extents_at(meta->extents, stripe, &view) == 0;
         stripe = (uint64_t)view.first_stripe + view.stripe_count)
        bl_extent_return(meta, &view);
}

void bl_extents_return_all(bl_meta *meta)
{
    bl_extent_view view;
    for (uint64_t stripe = 0; bl_extents_next(meta->extents, stripe, &view) == 0;
         stripe = (uint64_t)view.first_stripe + view.stripe_count)
        bl_extent_return(meta, &view);
}

void bl_space_give(bl_meta *meta, uint32_t number)
{
    const bl_block *block = &meta->blocks[number];
    uint32_t size = bl_space_size(block);
    bl_block_unplace(meta, number);
    bl_pages_give(meta->pages, block->offset, size);
    meta->reused = 1;
    bl_crash_point("space.given");
    bl_extents_return(meta, block->offset, size);
}

void bl_block_leave(bl_meta *meta, uint32_t number, enum bl_removal_reason why)
{
    bl_block *block = &meta->blocks[number];
    bl_entry_clear(meta, number); /* cleared for readers before the reply that grants its space */
    bl_crash_point("evict.cleared");
    bl_index_remove(meta->index, block->key);
    if (meta->hints)
        bl_hint_forget(meta, number);
    bl_evict_forget(bl_order_of(meta, number), number);
    bl_lower_forget(meta, number);
    bl_journal_removed(meta, number);
    bl_block_unkeep(meta, number);
    bl_space_give(meta, number);
    bl_stat_removed(meta, number, why);
    bl_number_rest(meta, number);
}

/* Close again what was opened in a run since a generation: it was not published, so it must not
 * count as open. */
static void bl_space_unopen(bl_meta *meta, uint64_t offset, uint32_t size, uint64_t since)
{
    bl_extent_view view = {0};
    for (uint64_t stripe = bl_stripe_of(meta, offset);
         stripe <= bl_stripe_of(meta, offset + size - 1); stripe++)
        if (bl_extents_at(meta->extents, stripe, &view) == 0 && view.generation > since)
            bl_extents_close(meta->extents, view.first_stripe);
}

/* Open the closed stripes of a run, and publish the marks before anything is granted there. Returns
 * 0 or -BL_ERROR_DEPOSED. */
static int bl_space_open(bl_meta *meta, uint64_t offset, uint32_t size)
{
    uint64_t first = bl_stripe_of(meta, offset), last = bl_stripe_of(meta, offset + size - 1);
    int64_t stripe = bl_extents_closed(meta->extents, first, last - first + 1);
    if (stripe < 0)
        return 0;
    uint64_t since = bl_generation_new(meta);
    for (; stripe >= 0; stripe = bl_extents_closed(meta->extents, first, last - first + 1)) {
        bl_extent_view view;
        bl_extents_open(meta->extents, (uint64_t)stripe, bl_generation_new(meta), &view);
        bl_crash_point("extent.opened");
        bl_marks_reach(meta, view.first_stripe);
        bl_extent_write(meta, &view, BL_EXTENT_OPEN);
        bl_crash_point("extent.marked");
    }
    int status = bl_server_still(meta->server); /* SYNC extent.open: marked before this read */
    bl_crash_point("extent.confirmed");
    if (status < 0)
        bl_space_unopen(meta, offset, size, since);
    return status;
}

/* Choose the victims for size bytes among several shares. Returns how many, or 0. */
static uint32_t bl_space_turn(bl_meta *meta, bl_residents *residents, uint32_t size,
                              const uint32_t **numbers, uint64_t *offset)
{
    uint32_t count;
    residents->coldest = bl_resident_eviction_coldest;
    residents->warmer = bl_resident_turn_warmer;
    residents->look = bl_resident_turn_look;
    bl_eviction_begin(meta, size);
    do
        count = bl_victims_choose(meta->victims, meta->pages, residents, size, numbers, offset);
    while (count == 0 && bl_eviction_widen(meta));
    return count;
}

/* Evict blocks so that size bytes at *offset are free. Returns 1; or 0, with nothing evicted. */
static int bl_space_evict(bl_meta *meta, uint32_t size, uint64_t *offset)
{
    bl_residents residents = bl_meta_residents(meta);
    const uint32_t *numbers;
    uint32_t count =
        bl_eviction_plain(meta)
            ? bl_victims_choose(meta->victims, meta->pages, &residents, size, &numbers, offset)
            : bl_space_turn(meta, &residents, size, &numbers, offset);
    for (uint32_t i = 0; i < count; i++) {
        bl_evict_ahead(meta, numbers[i]);
        bl_block_leave(meta, numbers[i], BL_REMOVED_SPACE);
    }
    return count > 0;
}

int bl_space_take(bl_meta *meta, uint64_t stored, uint64_t *offset)
{
    uint32_t size = bl_block_size(stored);
    if (size == 0 || size > meta->pool->geometry.stripe_count * BL_STRIPE_SIZE)
        return -BL_ERROR_TOO_LARGE;
    if (bl_pages_find(meta->pages, size, offset) < 0 && !bl_space_evict(meta, size, offset))
        return -BL_ERROR_NO_SPACE;
    int status = bl_space_open(meta, *offset, size);
    if (status == 0)
        bl_pages_take(meta->pages, *offset, size);
    return status;
}

void bl_block_drop(bl_meta *meta, uint32_t number, enum bl_removal_reason why)
{
    bl_block *block = &meta->blocks[number];
    if (block->pin_count == 0) {
        bl_block_leave(meta, number, why);
        return;
    }
    bl_entry_clear(meta, number);
    bl_crash_point("remove.cleared");
    bl_index_remove(meta->index, block->key);
    if (meta->hints)
        bl_hint_forget(meta, number);
    bl_evict_forget(bl_order_of(meta, number), number);
    bl_lower_forget(meta, number);
    bl_journal_removed(meta, number);
    bl_block_unkeep(meta, number);
    block->state = BL_NUMBER_DOOMED;
    bl_crash_point("remove.doomed");
    bl_stat_removed(meta, number, why);
}

/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Makes room for a block (D8, D11): the lowest free run of pages that is long enough, or else the
 * space of the coldest blocks that make such a run. Nothing is evicted before all victims are
 * chosen (space/victims.h).
 */
#include "index/reclaim.h"

#include <errno.h>

#include "coherence/crash_point.h"
#include "index/hints.h"
#include "index/journal.h"
#include "index/retained.h"
#include "index/lower.h"
#include "index/numbers.h"
#include "index/order.h"
#include "index/removal_log.h"
#include "index/shares.h"
#include "index/table.h"
#include "index/tenants.h"

/* Prefetch what the next two evictions read if they are by age: the later block itself, and for the
 * next one, whose key is cached by now, the slots of its key. */
static void bl_evict_ahead(const bl_index *index, uint32_t number)
{
    const bl_evict *order = bl_order_of(index, number);
    int64_t next = bl_evict_warmer(order, number);
    if (next < 0)
        return;
    bl_hash_prefetch(index->hash, index->blocks[next].key);
    bl_removal_log_prefetch(index, index->blocks[next].key);
    bl_pages_prefetch(index->pages, index->blocks[next].offset);
    int64_t later = bl_evict_warmer(order, (uint32_t)next);
    if (later < 0)
        return;
    bl_block_prefetch(index, (uint32_t)later);
    bl_evict_prefetch(order, (uint32_t)later);
}

int64_t bl_number_take(bl_index *index)
{
    int64_t number = bl_number_unused(index), coldest;
    if (number >= 0)
        return number;
    coldest = bl_eviction_first(index);
    if (coldest < 0)
        return number;
    bl_evict_ahead(index, (uint32_t)coldest);
    bl_block_leave(index, (uint32_t)coldest, BL_REMOVED_ENTRY);
    index->stat.table_evict_count++;
    return bl_number_unused(index);
}

/* ---- The blocks, for a search for victims */

static int64_t bl_resident_coldest(void *context)
{
    const bl_index *index = context;
    return bl_evict_coldest(index->orders[0]);
}

static int64_t bl_resident_warmer(void *context, uint32_t number)
{
    const bl_index *index = context;
    return bl_evict_warmer(index->orders[0], number);
}

static int64_t bl_resident_first(void *context, uint64_t stripe)
{
    const bl_index *index = context;
    uint32_t number = index->stripe_blocks[stripe];
    return number == BL_NO_NUMBER ? -1 : (int64_t)number;
}

static int64_t bl_resident_next(void *context, uint32_t number)
{
    const bl_index *index = context;
    uint32_t next = index->blocks[number].links[BL_LIST_STRIPE].next;
    return next == BL_NO_NUMBER ? -1 : (int64_t)next;
}

/* A block that is not in the order is pinned, kept, being written, or not offered yet. */
static bl_resident bl_resident_look(void *context, uint32_t number)
{
    const bl_index *index = context;
    const bl_block *block = &index->blocks[number];
    return (bl_resident){block->offset, bl_space_size(block),
                         (uint32_t)bl_evict_has(index->orders[0], number)};
}

bl_residents bl_index_residents(bl_index *index)
{
    return (bl_residents){
        .owner = index,
        .data_offset = index->pool->geometry.data_offset,
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
    const bl_index *index = context;
    const bl_block *block = &index->blocks[number];
    return (bl_resident){block->offset, bl_space_size(block),
                         (uint32_t)bl_eviction_has(index, number)};
}

/* ---- Space */

void bl_block_place(bl_index *index, uint32_t number)
{
    uint64_t stripe = bl_stripe_of(index, index->blocks[number].offset);
    bl_list_add(index, &index->stripe_blocks[stripe], BL_LIST_STRIPE, number);
    if (index->share_count > 1)
        bl_share_use(index, number, 1);
}

/* Close an extent if nothing is used or held there. Its mark is cleared last. */
static void bl_extent_return(bl_index *index, const bl_extent_view *view)
{
    if (!bl_pages_idle(index->pages, view->first_stripe, view->stripe_count) ||
        bl_extents_close(index->extents, view->first_stripe) < 0)
        return;
    bl_crash_point("extent.closed");
    bl_extent_write(index, view, BL_EXTENT_FREE);
    bl_crash_point("extent.returned");
}

void bl_extents_return(bl_index *index, uint64_t offset, uint32_t size)
{
    bl_extent_view view;
    uint64_t last = bl_stripe_of(index, offset + size - 1);
    for (uint64_t stripe = bl_stripe_of(index, offset);
         stripe <= last && bl_extents_at(index->extents, stripe, &view) == 0;
         stripe = (uint64_t)view.first_stripe + view.stripe_count)
        bl_extent_return(index, &view);
}

void bl_extents_return_all(bl_index *index)
{
    bl_extent_view view;
    for (uint64_t stripe = 0; bl_extents_next(index->extents, stripe, &view) == 0;
         stripe = (uint64_t)view.first_stripe + view.stripe_count)
        bl_extent_return(index, &view);
}

void bl_space_give(bl_index *index, uint32_t number)
{
    const bl_block *block = &index->blocks[number];
    uint32_t size = bl_space_size(block);
    bl_block_unplace(index, number);
    bl_pages_give(index->pages, block->offset, size);
    index->reused = 1;
    bl_crash_point("space.given");
    bl_extents_return(index, block->offset, size);
}

void bl_block_leave(bl_index *index, uint32_t number, enum bl_removal_reason why)
{
    bl_block *block = &index->blocks[number];
    bl_entry_clear(index, number); /* cleared for readers before the reply that grants its space */
    bl_crash_point("evict.cleared");
    bl_hash_remove(index->hash, block->key);
    if (index->hints)
        bl_hint_forget(index, number);
    bl_evict_forget(bl_order_of(index, number), number);
    bl_lower_forget(index, number);
    bl_journal_removed(index, number);
    bl_block_unretain(index, number);
    bl_space_give(index, number);
    bl_stat_removed(index, number, why);
    bl_number_rest(index, number);
}

/* Close again what was opened in a run since a generation: it was not published, so it must not
 * count as open. */
static void bl_space_unopen(bl_index *index, uint64_t offset, uint32_t size, uint64_t since)
{
    bl_extent_view view = {0};
    for (uint64_t stripe = bl_stripe_of(index, offset);
         stripe <= bl_stripe_of(index, offset + size - 1); stripe++)
        if (bl_extents_at(index->extents, stripe, &view) == 0 && view.generation > since)
            bl_extents_close(index->extents, view.first_stripe);
}

/* Open the closed stripes of a run, and publish the marks before anything is granted there. Returns
 * 0 or -BL_ERROR_DEPOSED. */
static int bl_space_open(bl_index *index, uint64_t offset, uint32_t size)
{
    uint64_t first = bl_stripe_of(index, offset), last = bl_stripe_of(index, offset + size - 1);
    int64_t stripe = bl_extents_closed(index->extents, first, last - first + 1);
    if (stripe < 0)
        return 0;
    uint64_t since = bl_generation_new(index);
    for (; stripe >= 0; stripe = bl_extents_closed(index->extents, first, last - first + 1)) {
        bl_extent_view view;
        bl_extents_open(index->extents, (uint64_t)stripe, bl_generation_new(index), &view);
        bl_crash_point("extent.opened");
        bl_marks_reach(index, view.first_stripe);
        bl_extent_write(index, &view, BL_EXTENT_OPEN);
        bl_crash_point("extent.marked");
    }
    int status = bl_server_still(index->server); /* SYNC extent.open: marked before this read */
    bl_crash_point("extent.confirmed");
    if (status < 0)
        bl_space_unopen(index, offset, size, since);
    return status;
}

/* Choose the victims for size bytes among several shares. Returns how many, or 0. */
static uint32_t bl_space_turn(bl_index *index, bl_residents *residents, uint32_t size,
                              const uint32_t **numbers, uint64_t *offset)
{
    uint32_t count;
    residents->coldest = bl_resident_eviction_coldest;
    residents->warmer = bl_resident_turn_warmer;
    residents->look = bl_resident_turn_look;
    bl_eviction_begin(index, size);
    do
        count = bl_victims_choose(index->victims, index->pages, residents, size, numbers, offset);
    while (count == 0 && bl_eviction_widen(index));
    return count;
}

/* Evict blocks so that size bytes at *offset are free. Returns 1; or 0, with nothing evicted. */
static int bl_space_evict(bl_index *index, uint32_t size, uint64_t *offset)
{
    bl_residents residents = bl_index_residents(index);
    const uint32_t *numbers;
    uint32_t count =
        bl_eviction_plain(index)
            ? bl_victims_choose(index->victims, index->pages, &residents, size, &numbers, offset)
            : bl_space_turn(index, &residents, size, &numbers, offset);
    for (uint32_t i = 0; i < count; i++) {
        bl_evict_ahead(index, numbers[i]);
        bl_block_leave(index, numbers[i], BL_REMOVED_SPACE);
    }
    return count > 0;
}

int bl_space_take(bl_index *index, uint64_t stored, uint64_t *offset)
{
    uint32_t size = bl_block_size(stored);
    if (size == 0 || size > index->pool->geometry.stripe_count * BL_STRIPE_SIZE)
        return -BL_ERROR_TOO_LARGE;
    if (bl_pages_find(index->pages, size, offset) < 0 && !bl_space_evict(index, size, offset))
        return -BL_ERROR_NO_SPACE;
    int status = bl_space_open(index, *offset, size);
    if (status == 0)
        bl_pages_take(index->pages, *offset, size);
    return status;
}

void bl_block_drop(bl_index *index, uint32_t number, enum bl_removal_reason why)
{
    bl_block *block = &index->blocks[number];
    if (block->pin_count == 0) {
        bl_block_leave(index, number, why);
        return;
    }
    bl_entry_clear(index, number);
    bl_crash_point("remove.cleared");
    bl_hash_remove(index->hash, block->key);
    if (index->hints)
        bl_hint_forget(index, number);
    bl_evict_forget(bl_order_of(index, number), number);
    bl_lower_forget(index, number);
    bl_journal_removed(index, number);
    bl_block_unretain(index, number);
    block->state = BL_NUMBER_DOOMED;
    bl_crash_point("remove.doomed");
    bl_stat_removed(index, number, why);
}

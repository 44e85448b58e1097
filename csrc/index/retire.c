/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Retires memory that failed under a copy: it is never granted again. A client reports the offset
 * of a fault (coherence/guard.h); the server reads that page itself, so that a false report retires
 * nothing. If it faults here, too, the extent loses its free pages, the blocks that reach into it
 * are removed, and its mark becomes RETIRED for every successor.
 *
 * A writer whose grant ends here may still write. Within the extent that is harmless, since the
 * space has no next owner; if the grant reaches beyond it, its space is held until its session is
 * proven gone. A stripe outside of extents is not retired: the next session that writes there
 * reports the fault.
 */
#include "index/retire.h"

#include "coherence/guard.h"
#include "index/call.h"
#include "index/grant.h"
#include "index/reclaim.h"
#include "index/table.h"

typedef struct bl_page {
    const bl_memory *memory;
    uint64_t offset;
} bl_page;

/* Read every line of the page from memory: the fault's address may be that of the page only. */
static int bl_page_touch(void *context)
{
    const bl_page *page = context;
    uint8_t bytes[BL_PAGE_SIZE];
    bl_refetch(page->memory, page->offset, sizeof bytes);
    bl_fetch(page->memory, page->offset, bytes, sizeof bytes);
    return 0;
}

/* Remove a block that reaches into a retired extent. */
static void bl_block_retire(bl_index *index, const bl_extent_view *view, uint32_t number)
{
    const bl_block *block = &index->blocks[number];
    uint64_t first = bl_stripe_of(index, block->offset);
    uint64_t last = bl_stripe_of(index, block->offset + bl_space_size(block) - 1);
    int inside = first >= view->first_stripe &&
                 last < (uint64_t)view->first_stripe + view->stripe_count;
    if (block->state == BL_NUMBER_COMMITTED)
        bl_block_drop(index, number, BL_REMOVED_RETIRED);
    else if (block->state != BL_NUMBER_DOOMED && inside)
        bl_grant_end(index, number, BL_END_GONE);
    else if (block->state == BL_NUMBER_GRANTED)
        bl_grant_end(index, number, BL_END_SUSPECT);
}

/* Retire an extent. Its mark is written last. */
static void bl_extent_retire(bl_index *index, const bl_extent_view *view)
{
    uint64_t first = view->first_stripe, end = first + view->stripe_count;
    bl_residents residents = bl_index_residents(index);
    int64_t across = bl_resident_across(&residents, residents.data_offset + first * BL_STRIPE_SIZE);
    bl_extents_retire(index->extents, first);
    bl_pages_lose(index->pages, first, view->stripe_count);
    if (across >= 0)
        bl_block_retire(index, view, (uint32_t)across);
    for (uint64_t stripe = first; stripe < end; stripe++) {
        uint32_t next, number = index->stripe_blocks[stripe];
        for (; number != BL_NO_NUMBER; number = next) {
            next = index->blocks[number].links[BL_LIST_STRIPE].next;
            bl_block_retire(index, view, number);
        }
    }
    bl_fence_store(&index->pool->memory);
    bl_extent_write(index, view, BL_EXTENT_RETIRED);
}

int bl_handle_retire(void *context, bl_call *call)
{
    bl_index *index = context;
    const bl_geometry *g = &index->pool->geometry;
    bl_retire_request request;
    bl_extent_view view;
    uint32_t count = 0;
    if (call->request_size != sizeof request)
        return -BL_ERROR_BAD_REQUEST;
    memcpy(&request, call->request, sizeof request);
    uint64_t end = g->data_offset + g->stripe_count * BL_STRIPE_SIZE;
    if (request.offset < g->data_offset || request.offset >= end)
        return -BL_ERROR_BAD_REQUEST;
    bl_page page = {&index->pool->memory, request.offset / BL_PAGE_SIZE * BL_PAGE_SIZE};
    uint64_t stripe = bl_stripe_of(index, page.offset);
    if (bl_extents_at(index->extents, stripe, &view) == 0 && !view.retired &&
        bl_guarded(page.memory, bl_page_touch, &page) == -BL_ERROR_DEVICE_FAULT) {
        bl_extent_retire(index, &view);
        count = view.stripe_count;
    }
    bl_index_reply(call, count, 0, 0);
    return 0;
}

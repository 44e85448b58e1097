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
#include "coherence/guard.h"
#include "index/call.h"

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
static void bl_block_retire(bl_meta *meta, const bl_extent_view *view, uint32_t number)
{
    const bl_block *block = &meta->blocks[number];
    uint64_t first = bl_stripe_of(meta, block->offset);
    uint64_t last = bl_stripe_of(meta, block->offset + bl_space_size(block) - 1);
    int inside = first >= view->first_stripe &&
                 last < (uint64_t)view->first_stripe + view->stripe_count;
    if (block->state == BL_NUMBER_COMMITTED)
        bl_block_drop(meta, number, BL_REMOVED_RETIRED);
    else if (block->state != BL_NUMBER_DOOMED && inside)
        bl_grant_end(meta, number, BL_END_GONE);
    else if (block->state == BL_NUMBER_GRANTED)
        bl_grant_end(meta, number, BL_END_SUSPECT);
}

/* Retire an extent. Its mark is written last. */
static void bl_extent_retire(bl_meta *meta, const bl_extent_view *view)
{
    uint64_t first = view->first_stripe, end = first + view->stripe_count;
    bl_residents residents = bl_meta_residents(meta);
    int64_t across = bl_resident_across(&residents, residents.data_offset + first * BL_STRIPE_SIZE);
    bl_extents_retire(meta->extents, first);
    bl_pages_lose(meta->pages, first, view->stripe_count);
    if (across >= 0)
        bl_block_retire(meta, view, (uint32_t)across);
    for (uint64_t stripe = first; stripe < end; stripe++) {
        uint32_t next, number = meta->stripe_blocks[stripe];
        for (; number != BL_NO_NUMBER; number = next) {
            next = meta->blocks[number].links[BL_LIST_STRIPE].next;
            bl_block_retire(meta, view, number);
        }
    }
    bl_fence_store(&meta->pool->memory);
    bl_extent_write(meta, view, BL_EXTENT_RETIRED);
}

int bl_handle_retire(void *context, bl_call *call)
{
    bl_meta *meta = context;
    const bl_geometry *g = &meta->pool->geometry;
    bl_retire_request request;
    bl_extent_view view;
    uint32_t count = 0;
    if (call->request_size != sizeof request)
        return -BL_ERROR_BAD_REQUEST;
    memcpy(&request, call->request, sizeof request);
    uint64_t end = g->data_offset + g->stripe_count * BL_STRIPE_SIZE;
    if (request.offset < g->data_offset || request.offset >= end)
        return -BL_ERROR_BAD_REQUEST;
    bl_page page = {&meta->pool->memory, request.offset / BL_PAGE_SIZE * BL_PAGE_SIZE};
    uint64_t stripe = bl_stripe_of(meta, page.offset);
    if (bl_extents_at(meta->extents, stripe, &view) == 0 && !view.retired &&
        bl_guarded(page.memory, bl_page_touch, &page) == -BL_ERROR_DEVICE_FAULT) {
        bl_extent_retire(meta, &view);
        count = view.stripe_count;
    }
    bl_meta_reply(call, count, 0, 0);
    return 0;
}

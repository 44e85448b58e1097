/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Retires memory that failed under a copy: it is never granted again. A client that met a fault
 * (coherence/guard.h) says where; the server touches that page itself before it believes the
 * client, so that false reports retire nothing. Then the extent there gives no more blocks, its
 * blocks leave the index, and its mark tells every successor. A fault that this host does not see
 * retires nothing.
 *
 * A writer whose grant ends here may still write, which does no harm: the space has no next owner.
 * A stripe of no extent is left alone: the next session that is granted it meets the fault and
 * reports it.
 */
#include "coherence/guard.h"
#include "index/call.h"

typedef struct bl_page {
    const bl_memory *memory;
    uint64_t offset;
} bl_page;

/* Touch every line of the page in memory: a fault may name only the page. */
static int bl_page_touch(void *context)
{
    const bl_page *page = context;
    uint8_t bytes[BL_PAGE_SIZE];
    bl_refetch(page->memory, page->offset, sizeof bytes);
    bl_fetch(page->memory, page->offset, bytes, sizeof bytes);
    return 0;
}

/* Nothing is granted or found there from now on; the mark comes last. */
static void bl_extent_retire(bl_meta *meta, const bl_extent_view *view)
{
    uint32_t next, number = meta->extent_blocks[view->first_stripe];
    bl_extents_retire(meta->extents, view->first_stripe);
    for (; number != BL_NO_NUMBER; number = next) {
        uint32_t state = meta->blocks[number].state;
        next = meta->blocks[number].links[BL_LIST_EXTENT].next;
        if (state == BL_NUMBER_COMMITTED)
            bl_block_drop(meta, number, BL_LEFT_RETIRED);
        else if (state != BL_NUMBER_DOOMED)
            bl_grant_end(meta, number, BL_END_GONE);
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
    if (request.offset < g->data_offset || request.offset >= g->size)
        return -BL_ERROR_BAD_REQUEST;
    bl_page page = {&meta->pool->memory, request.offset / BL_PAGE_SIZE * BL_PAGE_SIZE};
    if (bl_extents_at(meta->extents, page.offset, &view) == 0 && !view.retired &&
        bl_guarded(page.memory, bl_page_touch, &page) == -BL_ERROR_DEVICE_FAULT) {
        bl_extent_retire(meta, &view);
        count = view.stripe_count;
    }
    bl_meta_reply(call, count, 0, 0);
    return 0;
}

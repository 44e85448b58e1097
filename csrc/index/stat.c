/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Statistics of the block index, for callers in the process and for the call of clients.
 */
#include "index/stat.h"

void bl_index_describe(const bl_index *index, bl_index_stat *out)
{
    bl_pages_stat space;
    bl_pages_count(index->pages, &space);
    *out = index->stat;
    out->block_count_max = index->pool->geometry.block_count_max;
    out->stripe_count = space.stripe_count;
    out->free_stripe_count = space.free_stripe_count;
    out->extent_count = bl_extents_count(index->extents);
    out->used_bytes = space.used_bytes;
    out->held_bytes = space.held_bytes;
    out->data_bytes = space.stripe_count * BL_STRIPE_SIZE;
    out->free_run_bytes = space.free_run_bytes;
    out->retired_stripe_count = space.lost_stripe_count;
    out->retired_bytes = space.lost_stripe_count * BL_STRIPE_SIZE;
    uint64_t taken = out->used_bytes + out->held_bytes + out->retired_bytes;
    out->free_bytes = out->data_bytes > taken ? out->data_bytes - taken : 0;
}

int bl_handle_stat(void *context, bl_call *call)
{
    bl_index_stat stat;
    bl_index_describe(context, &stat);
    memcpy(call->reply, &stat, sizeof stat);
    call->reply_size = sizeof stat;
    return 0;
}

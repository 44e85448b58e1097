/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Statistics of the block index, for callers in the process and for the call of clients.
 */
#include "index/blocks.h"

void bl_meta_describe(const bl_meta *meta, bl_meta_stat *out)
{
    bl_extents_stat space;
    bl_extents_count(meta->extents, &space);
    *out = meta->stat;
    out->block_count_max = meta->pool->geometry.block_count_max;
    out->stripe_count = space.stripe_count;
    out->free_stripe_count = space.free_stripe_count;
    out->extent_count = space.extent_count;
    out->class_count = space.class_count;
    out->used_bytes = space.used_bytes;
    out->held_bytes = space.held_bytes;
    out->data_bytes = space.stripe_count * BL_STRIPE_SIZE;
    out->retired_stripe_count = space.retired_stripe_count;
}

int bl_handle_stat(void *context, bl_call *call)
{
    bl_meta_stat stat;
    bl_meta_describe(context, &stat);
    memcpy(call->reply, &stat, sizeof stat);
    call->reply_size = sizeof stat;
    return 0;
}

/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * The removal log: why keys were removed from the index, for display (`beluga explain`). No
 * decision depends on it.
 *
 * A direct-mapped table in the server's DRAM: a removal costs one store, and overwrites the record
 * of another key in the same slot. The lines of the block table cannot serve as the log: when the
 * table is full, the line of an evicted block is reused at once.
 */
#include "index/removal_log.h"

#include <errno.h>

#include "base/lazy.h"
#include "index/call.h"

enum {
    BL_REMOVAL_LOG_TABLES = 16,     /* slots, as a multiple of the block table's lines */
    BL_REMOVAL_LOG_MAX = 1 << 18    /* slots at most: 4 MiB */
};

static bl_removal_record *bl_removal_log_slot(const bl_index *index, const uint64_t key[2])
{
    return &index->removal_log[(key[0] ^ key[1]) & index->removal_mask];
}

int bl_removal_log_create(bl_index *index)
{
    uint32_t lines = index->pool->geometry.block_count_max;
    uint64_t count = 1, enough = (uint64_t)BL_REMOVAL_LOG_TABLES * lines;
    while (count < enough && count < BL_REMOVAL_LOG_MAX)
        count *= 2;
    index->removal_log = bl_lazy_map(count * sizeof *index->removal_log);
    index->removal_mask = count - 1;
    return index->removal_log ? 0 : -ENOMEM;
}

void bl_removal_log_destroy(bl_index *index)
{
    bl_lazy_unmap(index->removal_log, (index->removal_mask + 1) * sizeof *index->removal_log);
}

void bl_removal_log_prefetch(const bl_index *index, const uint64_t key[2])
{
    bl_prefetch(bl_removal_log_slot(index, key));
}

void bl_removal_log_add(bl_index *index, const uint64_t key[2], enum bl_removal_reason why)
{
    *bl_removal_log_slot(index, key) = (bl_removal_record){key[0], (uint32_t)key[1], why};
}

int bl_handle_removal_reasons(void *context, bl_call *call)
{
    const bl_index *index = context;
    bl_block_request head;
    const uint8_t *keys = bl_index_items(call, 2 * sizeof(uint64_t), &head);
    if (keys == NULL || sizeof(bl_block_reply) + head.count > call->reply_capacity)
        return -BL_ERROR_BAD_REQUEST;
    uint8_t *out = call->reply + sizeof(bl_block_reply);
    for (uint32_t i = 0; i < head.count; i++) {
        uint64_t key[2];
        memcpy(key, keys + i * sizeof key, sizeof key);
        const bl_removal_record *record = bl_removal_log_slot(index, key);
        int same = record->first == key[0] && record->second == (uint32_t)key[1];
        out[i] = (uint8_t)(same ? record->why : BL_REMOVED_UNKNOWN);
    }
    bl_index_reply(call, head.count, 0, 0);
    call->reply_size += head.count;
    return 0;
}

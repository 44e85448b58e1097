/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Remembers why keys left the index, for people who ask what became of a block. Nothing is decided
 * by it.
 *
 * A key has one place in a table in the server's DRAM, and the key that came last is there. So a
 * departure costs one store, and a key is forgotten when another key with its place leaves. The
 * block table cannot serve: when it is full, the line of an evicted block is used again at once.
 */
#include <errno.h>

#include "base/lazy.h"
#include "index/call.h"

enum {
    BL_LEFT_TABLES = 16,        /* as many keys as this many full block tables have */
    BL_LEFT_MAX = 1 << 18       /* and not more: 4 MiB */
};

static bl_departure *bl_left_at(const bl_meta *meta, const uint64_t key[2])
{
    return &meta->left[(key[0] ^ key[1]) & meta->left_mask];
}

int bl_left_create(bl_meta *meta)
{
    uint64_t count = 1, wanted = (uint64_t)BL_LEFT_TABLES * meta->pool->geometry.block_count_max;
    while (count < wanted && count < BL_LEFT_MAX)
        count *= 2;
    meta->left = bl_lazy_map(count * sizeof *meta->left);
    meta->left_mask = count - 1;
    return meta->left ? 0 : -ENOMEM;
}

void bl_left_destroy(bl_meta *meta)
{
    bl_lazy_unmap(meta->left, (meta->left_mask + 1) * sizeof *meta->left);
}

void bl_left_prefetch(const bl_meta *meta, const uint64_t key[2])
{
    bl_prefetch(bl_left_at(meta, key));
}

void bl_left_note(bl_meta *meta, const uint64_t key[2], enum bl_left why)
{
    *bl_left_at(meta, key) = (bl_departure){key[0], (uint32_t)key[1], why};
}

int bl_handle_left(void *context, bl_call *call)
{
    const bl_meta *meta = context;
    bl_block_request head;
    const uint8_t *keys = bl_meta_items(call, 2 * sizeof(uint64_t), &head);
    if (keys == NULL || sizeof(bl_block_reply) + head.count > call->reply_capacity)
        return -BL_ERROR_BAD_REQUEST;
    uint8_t *out = call->reply + sizeof(bl_block_reply);
    for (uint32_t i = 0; i < head.count; i++) {
        uint64_t key[2];
        memcpy(key, keys + i * sizeof key, sizeof key);
        const bl_departure *left = bl_left_at(meta, key);
        int same = left->first == key[0] && left->second == (uint32_t)key[1];
        out[i] = (uint8_t)(same ? left->why : BL_LEFT_UNKNOWN);
    }
    bl_meta_reply(call, head.count, 0, 0);
    call->reply_size += head.count;
    return 0;
}

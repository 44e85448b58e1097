/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Decodes block calls and encodes their replies. Every field is foreign input: a value out of range
 * returns an error to the sender and has no other effect (D13).
 */
#ifndef BL_META_CALL_H
#define BL_META_CALL_H

#include "api/index.h"
#include "base/minmax.h"
#include "index/state.h"

enum { BL_GROUP_KEYS = 16 };    /* about as many cache misses as a core has in flight */

/* Validate the request's head and item count against its size. Returns the items, or NULL. */
static inline const uint8_t *bl_index_items(const bl_call *call, uint32_t item_size,
                                           bl_block_request *head)
{
    if (call->request_size < sizeof *head)
        return NULL;
    memcpy(head, call->request, sizeof *head);
    uint64_t size = sizeof *head + (uint64_t)head->count * item_size;
    return head->count > 0 && head->count <= BL_CALL_KEYS_MAX && size == call->request_size
               ? call->request + sizeof *head
               : NULL;
}

/* Copy a key of a request; keys have any alignment. */
static inline void bl_key_at(const uint8_t *keys, uint32_t index, uint64_t key[2])
{
    memcpy(key, keys + index * 2 * sizeof *key, 2 * sizeof *key);
}

/* Prefetch the hash buckets of a group of keys that begins at first. */
static inline void bl_index_prefetch(const bl_index *index, const uint8_t *keys, uint32_t first,
                                    uint32_t count)
{
    uint64_t key[2], end = bl_min(first + BL_GROUP_KEYS, count);
    for (uint32_t i = first; i < end; i++) {
        bl_key_at(keys, i, key);
        bl_hash_prefetch(index->hash, key);
    }
}

/* Return 1 if the reply has room for count records. */
static inline int bl_index_fits(const bl_call *call, uint32_t count)
{
    return sizeof(bl_block_reply) + (uint64_t)count * sizeof(bl_block_record) <=
           call->reply_capacity;
}

static inline void bl_index_reply(bl_call *call, uint32_t count, uint32_t state,
                                 uint32_t record_count)
{
    bl_block_reply head = {count, state};
    memcpy(call->reply, &head, sizeof head);
    call->reply_size = (uint32_t)(sizeof head + record_count * sizeof(bl_block_record));
}

static inline void bl_index_record(bl_call *call, uint32_t index, const bl_block_record *record)
{
    memcpy(call->reply + sizeof(bl_block_reply) + index * sizeof *record, record, sizeof *record);
}

/* Handle abort or release: last item first, so that a parent becomes newer than its child. */
static inline int bl_handle_give_up(bl_index *index, bl_call *call,
                                    int (*one)(bl_index *, uint32_t, const bl_commit *))
{
    bl_block_request head;
    uint32_t done = 0;
    const uint8_t *items = bl_index_items(call, sizeof(bl_commit), &head);
    if (items == NULL)
        return -BL_ERROR_BAD_REQUEST;
    for (uint32_t i = head.count; i-- > 0;) {
        bl_commit commit;
        memcpy(&commit, items + i * sizeof commit, sizeof commit);
        done += one(index, call->lane, &commit) == 0;
    }
    bl_index_reply(call, done, 0, 0);
    return 0;
}

#endif

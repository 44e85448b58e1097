/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * The eviction order (D11), which decides what is evicted, by one of three policies. It takes and
 * returns numbers, without a pool or a clock. The scheduling simulator and the disk tier call the
 * same code.
 *
 * A hit needs a leading prefix, so a chain should be evicted from its tail. No policy knows
 * parents: a lookup touches the deepest hit first, and each policy evicts what was touched earlier
 * before what is worth as much and was touched later.
 *
 * Blocks that may not be evicted (granted, pinned) are not in the order; they are added when that
 * ends. Example of a block's life:
 *
 *   assign        the id has a new block, which is being written
 *   touch         it is committed: from now on it may be evicted
 *   touch         it was a hit
 *   remove        it is pinned; the policy remembers what it knows of the block
 *   touch         it is not pinned any more, which also counts the hit
 *   forget        it is evicted
 */
#ifndef BL_EVICT_H
#define BL_EVICT_H

#include <stdint.h>

#include "index/evict_policy.h"

typedef struct bl_evict bl_evict;

/* Create an order for ids below id_count: 0, -ENOMEM, or -EINVAL: unknown policy
 * (bl_evict_policy). */
int bl_evict_create(bl_evict **out, uint32_t id_count, uint32_t policy);
void bl_evict_destroy(bl_evict *order);

/* Give an id that is not in the order to a new block. hash is 64 well-mixed bits of its key,
 * position counts the tokens before it in its chain, as far as known, and size its bytes. LRU needs
 * none of it, and may be used without this call. */
void bl_evict_assign(bl_evict *order, uint32_t id, uint64_t hash, uint32_t position,
                     uint32_t size);

/* Make the memory of the ids below id_count, which enter the order soon. */
void bl_evict_expect(bl_evict *order, uint32_t id_count);

/* Return whether the policy needs bl_evict_assign. */
int bl_evict_assigns(const bl_evict *order);

/* Prefetch what a touch or a removal of an id reads: its own node, and later that node's neighbors,
 * whose numbers it has. */
void bl_evict_prefetch(const bl_evict *order, uint32_t id);
void bl_evict_prefetch_neighbors(const bl_evict *order, uint32_t id);

/* Count a use of an id, and add it to the order if it is not there. The first touch of a new block
 * only adds it. LRU: it becomes the newest of all. */
void bl_evict_touch(bl_evict *order, uint32_t id);

/* Touch ids that are not in the order, one after the other. */
void bl_evict_enter(bl_evict *order, const uint32_t *ids, uint32_t count);

/* Make an id the coldest, whether it was in the order or not: the next to be evicted, except that
 * S3-FIFO may prefer a block of the small queue. */
void bl_evict_cool(bl_evict *order, uint32_t id);

/* Remove an id from the order for a while; if it is not there, nothing happens. */
void bl_evict_remove(bl_evict *order, uint32_t id);

/* Remove an id from the order, and note that its block was evicted. */
void bl_evict_forget(bl_evict *order, uint32_t id);

int bl_evict_has(const bl_evict *order, uint32_t id);

/* Return the id to evict next, or -1. */
int64_t bl_evict_coldest(bl_evict *order);

/* Return the next id to consider after one that is in the order, or -1. A walk from the coldest
 * meets each id once. LRU walks by age; the others walk roughly from cold to warm. */
int64_t bl_evict_warmer(const bl_evict *order, uint32_t id);

#endif

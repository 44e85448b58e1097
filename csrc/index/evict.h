/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * The eviction order (D11), with one of two policies. It takes and returns ids, and uses no pool
 * and no clock. The scheduling simulator and the disk tier use the same code.
 *
 * A hit needs a leading prefix, so a chain should be evicted from its tail. The policies have no
 * parents: a lookup touches the deepest hit first, and of two blocks of equal worth each policy
 * evicts the one touched earlier.
 *
 * Granted and pinned blocks are not in the order. Example of a block's life:
 *
 *   assign        the id gets a new block, which is being written
 *   touch         it is committed: from now on it may be evicted
 *   touch         a hit
 *   remove        it is pinned; the policy keeps its history
 *   touch         it is unpinned, which also counts the hit
 *   forget        it is evicted
 */
#ifndef BL_EVICT_H
#define BL_EVICT_H

#include <stdint.h>

#include "index/evict_policy.h"

typedef struct bl_evict bl_evict;

/* Create an order for ids below id_count. policy is a bl_evict_policy. Returns 0, -ENOMEM, or
 * -EINVAL: unknown policy. */
int bl_evict_create(bl_evict **out, uint32_t id_count, uint32_t policy);
void bl_evict_destroy(bl_evict *order);

/* Assign an id that is not in the order to a new block. hash: 64 well-mixed bits of its key. LRU
 * does not need this call. */
void bl_evict_assign(bl_evict *order, uint32_t id, uint64_t hash);

/* Allocate the memory of the ids below id_count before they enter the order. */
void bl_evict_expect(bl_evict *order, uint32_t id_count);

/* Return 1 if the policy needs bl_evict_assign. */
int bl_evict_assigns(const bl_evict *order);

/* Prefetch what a touch or a removal of an id reads: its node, and in a later call the neighbors of
 * the node. */
void bl_evict_prefetch(const bl_evict *order, uint32_t id);
void bl_evict_prefetch_neighbors(const bl_evict *order, uint32_t id);

/* Count a use of an id, and add it to the order if it is not there. The first touch of a new block
 * only adds it. LRU: it becomes the newest of all. */
void bl_evict_touch(bl_evict *order, uint32_t id);

/* Touch ids that are not in the order, in this sequence. */
void bl_evict_enter(bl_evict *order, const uint32_t *ids, uint32_t count);

/* Make an id the coldest, and add it to the order if it is not there. It is evicted next, except
 * that S3-FIFO may prefer a block of the small queue. */
void bl_evict_cool(bl_evict *order, uint32_t id);

/* Remove an id from the order, if it is there, and keep its history. */
void bl_evict_remove(bl_evict *order, uint32_t id);

/* Remove an id from the order: its block is evicted. */
void bl_evict_forget(bl_evict *order, uint32_t id);

int bl_evict_has(const bl_evict *order, uint32_t id);

/* Return the id to evict next, or -1. */
int64_t bl_evict_coldest(bl_evict *order);

/* Return the next candidate after an id in the order, or -1. A walk from the coldest visits each id
 * once. LRU walks by age, S3-FIFO roughly from cold to warm. */
int64_t bl_evict_warmer(const bl_evict *order, uint32_t id);

#endif

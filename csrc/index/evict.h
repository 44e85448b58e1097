/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * The eviction order (D11), which decides what is evicted: the block that was asked for least
 * recently. It takes and returns numbers, without a pool or a clock. The scheduling simulator calls
 * the same code.
 *
 * A lookup touches the deepest hit first, so a parent is always newer than its child and a chain is
 * evicted from its tail, without parent pointers. Blocks that may not be evicted (granted, pinned)
 * are not in the order; they are added when that ends.
 */
#ifndef BL_EVICT_H
#define BL_EVICT_H

#include <stdint.h>

typedef struct bl_evict bl_evict;

enum bl_evict_policy {
    BL_EVICT_LRU        /* evict the block that was asked for least recently */
};

/* Create an order for ids below id_count: 0, -ENOMEM, or -EINVAL: unknown policy
 * (bl_evict_policy). */
int bl_evict_create(bl_evict **out, uint32_t id_count, uint32_t policy);
void bl_evict_destroy(bl_evict *order);

/* Make an id the newest of all, whether it was in the order or not. */
void bl_evict_touch(bl_evict *order, uint32_t id);

/* Make an id the coldest of all, whether it was in the order or not. */
void bl_evict_cool(bl_evict *order, uint32_t id);

/* Remove an id from the order; if it is not there, nothing happens. */
void bl_evict_remove(bl_evict *order, uint32_t id);

int bl_evict_has(const bl_evict *order, uint32_t id);

/* Return the coldest id, or -1. */
int64_t bl_evict_coldest(const bl_evict *order);

/* Return the next warmer id after one that is in the order, or -1. */
int64_t bl_evict_warmer(const bl_evict *order, uint32_t id);

#endif

/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Eviction order (D11): which block has not been asked for longest. Pure: numbers in, a number
 * out; no pool, no clock. The scheduling simulator calls the same code.
 *
 * A lookup touches the deepest hit first, so a parent is always newer than its child and a chain is
 * eaten from its tail, without parent pointers. Blocks that may not be evicted (granted, pinned)
 * are not in the order; they are added when that ends.
 */
#ifndef BL_EVICT_H
#define BL_EVICT_H

#include <stdint.h>

typedef struct bl_evict bl_evict;

/* For ids below id_count: 0 or -ENOMEM. */
int bl_evict_create(bl_evict **out, uint32_t id_count);
void bl_evict_destroy(bl_evict *order);

/* Newest of all, whether it was in the order or not. */
void bl_evict_touch(bl_evict *order, uint32_t id);

/* Coldest of all, whether it was in the order or not. */
void bl_evict_cool(bl_evict *order, uint32_t id);

/* Out of the order; nothing happens if it is not in it. */
void bl_evict_remove(bl_evict *order, uint32_t id);

int bl_evict_has(const bl_evict *order, uint32_t id);

/* The coldest id, or -1. */
int64_t bl_evict_coldest(const bl_evict *order);

/* The next warmer id after one that is in the order, or -1. */
int64_t bl_evict_warmer(const bl_evict *order, uint32_t id);

#endif

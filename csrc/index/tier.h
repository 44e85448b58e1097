/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * A tier: which of a trace's blocks some memory of bounded size holds, evicted by index/evict.h.
 * Pure, for the scheduling simulator (beluga/simulate). A call has all of a request's blocks, in
 * order. As in the pool's index, blocks are touched deepest first, so a parent is newer than its
 * child.
 *
 * A block is absent, in the order (it may be evicted), or held by requests that use it. Slots may
 * be reserved, too: for what has no number, or has not been computed yet.
 */
#ifndef BL_TIER_H
#define BL_TIER_H

#include <stdint.h>

typedef struct bl_tier bl_tier;

typedef struct bl_tier_stat {
    uint32_t present;   /* blocks that are here */
    uint32_t held;      /* those of them that are in use */
    uint32_t reserved;  /* slots */
    uint32_t evicted;   /* blocks, so far */
} bl_tier_stat;

enum bl_tier_order {
    BL_TIER_LRU,        /* evict what was not asked for longest, as the pool does */
    BL_TIER_FIFO        /* evict what was put longest ago: a touch does nothing */
};

/* For ids below id_count. 0 or -ENOMEM. */
int bl_tier_create(bl_tier **out, uint32_t id_count, uint32_t capacity, uint32_t order);
void bl_tier_destroy(bl_tier *tier);

/* How many of the first ids are here without a gap; several tiers at once. */
void bl_tier_lead(bl_tier *const *tier, uint32_t tier_count, const uint32_t *id, uint32_t count,
                  uint32_t *lead);

/* A hit of all ids that are here. */
void bl_tier_touch(bl_tier *tier, const uint32_t *id, uint32_t count);

/* Have them all here, as far as there is room; those that were are touched. How many are new. */
uint32_t bl_tier_put(bl_tier *tier, const uint32_t *id, uint32_t count);

/* Use them: they are here and stay, whatever the capacity, until dropped as often. */
void bl_tier_hold(bl_tier *tier, const uint32_t *id, uint32_t count);
void bl_tier_drop(bl_tier *tier, const uint32_t *id, uint32_t count);

/* Take count slots from what may be evicted. 0, or -ENOSPC with nothing done. */
int bl_tier_reserve(bl_tier *tier, uint32_t count);
void bl_tier_release(bl_tier *tier, uint32_t count);

/* What it holds as of now; valid as long as the tier. */
const bl_tier_stat *bl_tier_look(const bl_tier *tier);

#endif

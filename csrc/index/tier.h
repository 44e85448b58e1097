/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * A tier of the scheduling simulator (beluga/simulate): the set of a trace's blocks in a memory of
 * bounded size, with the eviction policies of index/evict.h. A call has all blocks of a request, in
 * order. As in the pool's index, blocks are touched deepest first, so a parent is newer than its
 * child.
 *
 * A block is absent, evictable, or held by the requests that use it. Slots can also be reserved,
 * for blocks that have no id or were not computed yet.
 */
#ifndef BL_TIER_H
#define BL_TIER_H

#include <stdint.h>

typedef struct bl_tier bl_tier;

typedef struct bl_tier_stat {
    uint32_t present;   /* blocks in the tier */
    uint32_t held;      /* of these, blocks in use */
    uint32_t reserved;  /* reserved slots */
    uint32_t evicted;   /* blocks evicted so far */
    uint32_t favored;   /* blocks that hints favor or pin */
} bl_tier_stat;

enum bl_tier_order {
    BL_TIER_LRU,        /* bl_evict_policy; LRU is the pool's default */
    BL_TIER_S3FIFO,
    BL_TIER_FIFO        /* first in, first out: a touch does nothing */
};

/* Create a tier for ids below id_count. Returns 0 or -ENOMEM. */
int bl_tier_create(bl_tier **out, uint32_t id_count, uint32_t capacity, uint32_t order);
void bl_tier_destroy(bl_tier *tier);

/* Return how many of the first ids are present without a gap, for several tiers at once. */
void bl_tier_lead(bl_tier *const *tier, uint32_t tier_count, const uint32_t *id, uint32_t count,
                  uint32_t *lead);

/* Touch all ids that are present, as a hit does. */
void bl_tier_touch(bl_tier *tier, const uint32_t *id, uint32_t count);

/* Add the ids that are absent, as far as there is room, and touch the others. Returns how many are
 * new. */
uint32_t bl_tier_put(bl_tier *tier, const uint32_t *id, uint32_t count);

/* Hold ids: they are present, beyond the capacity if necessary, until they are dropped as often. */
void bl_tier_hold(bl_tier *tier, const uint32_t *id, uint32_t count);
void bl_tier_drop(bl_tier *tier, const uint32_t *id, uint32_t count);

/* Set a hint, a bl_level, of the ids that are present, as the pool's index does (index/hints.h). At
 * most budget blocks are favored. Sets given[i] to 1 if id i got it. Returns their
 * number, or -ENOMEM. */
int64_t bl_tier_hint(bl_tier *tier, const uint32_t *id, uint32_t count, uint32_t level,
                     uint32_t budget, uint8_t *given);

/* End the hints of ids, whose time is over: they are the coldest, the last one first of all. */
void bl_tier_cool(bl_tier *tier, const uint32_t *id, uint32_t count);

/* Reserve count slots, and evict for them. Returns 0, or -ENOSPC with nothing done. */
int bl_tier_reserve(bl_tier *tier, uint32_t count);
void bl_tier_release(bl_tier *tier, uint32_t count);

/* Return the current counts; the pointer is valid as long as the tier. */
const bl_tier_stat *bl_tier_look(const bl_tier *tier);

#endif

/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * The tier of index/tier.h over index/evict.h: an eviction order for each level of hints has the
 * blocks that no request holds, and users counts the requests that hold a block. Before the first
 * hint there is one order, and no memory for levels.
 */
#include "index/tier.h"

#include <errno.h>
#include <stdlib.h>

#include "api/index.h"
#include "base/lazy.h"
#include "index/evict.h"

/* The levels in the order in which their blocks go. */
static const uint8_t bl_tier_levels[BL_LEVEL_COUNT] = {BL_LEVEL_LOW, BL_LEVEL_NORMAL,
                                                       BL_LEVEL_HIGH, BL_LEVEL_PINNED};

struct bl_tier {
    bl_evict *order;        /* of blocks without a hint */
    bl_evict *hinted[BL_LEVEL_COUNT];   /* by level; that of BL_LEVEL_NORMAL is order */
    uint8_t *level;         /* by id, or NULL */
    uint32_t *users;        /* by id */
    uint32_t id_count;
    uint32_t capacity;
    uint32_t policy;
    bl_tier_stat stat;
};

int bl_tier_create(bl_tier **out, uint32_t id_count, uint32_t capacity, uint32_t order)
{
    uint32_t policy = order == BL_TIER_FIFO ? BL_EVICT_LRU : order;
    bl_tier *tier = calloc(1, sizeof *tier);
    if (!tier)
        return -ENOMEM;
    *tier = (bl_tier){.id_count = id_count, .capacity = capacity, .policy = order};
    tier->users = bl_lazy_map((size_t)(id_count + 1) * sizeof *tier->users);
    if (!tier->users || bl_evict_create(&tier->order, id_count, policy)) {
        bl_tier_destroy(tier);
        return -ENOMEM;
    }
    *out = tier;
    return 0;
}

void bl_tier_destroy(bl_tier *tier)
{
    if (!tier)
        return;
    bl_evict_destroy(tier->order);
    for (uint32_t level = BL_LEVEL_NORMAL + 1; level < BL_LEVEL_COUNT; level++)
        bl_evict_destroy(tier->hinted[level]);
    free(tier->level);
    if (tier->users)
        bl_lazy_unmap(tier->users, (size_t)(tier->id_count + 1) * sizeof *tier->users);
    free(tier);
}

static bl_evict *bl_tier_order_of(const bl_tier *tier, uint32_t id)
{
    return tier->level ? tier->hinted[tier->level[id]] : tier->order;
}

static int bl_tier_has(const bl_tier *tier, uint32_t id)
{
    return tier->users[id] || bl_evict_has(bl_tier_order_of(tier, id), id);
}

void bl_tier_lead(bl_tier *const *tier, uint32_t tier_count, const uint32_t *id, uint32_t count,
                  uint32_t *lead)
{
    for (uint32_t t = 0; t < tier_count; t++) {
        uint32_t i = 0;
        while (i < count && bl_tier_has(tier[t], id[i]))
            i++;
        lead[t] = i;
    }
}

void bl_tier_touch(bl_tier *tier, const uint32_t *id, uint32_t count)
{
    if (tier->policy == BL_TIER_FIFO)
        return;
    while (count--)
        if (bl_evict_has(bl_tier_order_of(tier, id[count]), id[count]))
            bl_evict_touch(bl_tier_order_of(tier, id[count]), id[count]);
}

static int bl_tier_favors(uint32_t level)
{
    return level == BL_LEVEL_HIGH || level == BL_LEVEL_PINNED;
}

/* Move a block to the order of a level, as the newest or the coldest there. */
static void bl_tier_move(bl_tier *tier, uint32_t id, uint32_t level, int cool)
{
    int is_there = bl_evict_has(bl_tier_order_of(tier, id), id);
    bl_evict_remove(bl_tier_order_of(tier, id), id);
    tier->stat.favored += bl_tier_favors(level) - bl_tier_favors(tier->level[id]);
    tier->level[id] = (uint8_t)level;
    if (is_there && cool)
        bl_evict_cool(bl_tier_order_of(tier, id), id);
    else if (is_there)
        bl_evict_touch(bl_tier_order_of(tier, id), id);
}

/* Return the block that is evicted next, or -1. */
static int64_t bl_tier_coldest(const bl_tier *tier)
{
    int64_t coldest = -1;
    if (!tier->level)
        return bl_evict_coldest(tier->order);
    for (uint32_t i = 0; coldest < 0 && i < BL_LEVEL_COUNT; i++)
        coldest = bl_evict_coldest(tier->hinted[bl_tier_levels[i]]);
    return coldest;
}

/* Evict until extra slots are free. Returns 0 if held blocks prevent that. */
static int bl_tier_make_room(bl_tier *tier, uint32_t extra)
{
    bl_tier_stat *stat = &tier->stat;
    while ((uint64_t)stat->present + stat->reserved + extra > tier->capacity) {
        int64_t coldest = bl_tier_coldest(tier);
        if (coldest < 0)
            return 0;
        if (tier->level && tier->level[coldest])
            bl_tier_move(tier, (uint32_t)coldest, BL_LEVEL_NORMAL, 0);
        bl_evict_forget(tier->order, (uint32_t)coldest);
        stat->present--;
        stat->evicted++;
    }
    return 1;
}

/* Pass a block that becomes present to the policy. */
static void bl_tier_assign(bl_tier *tier, uint32_t id)
{
    uint64_t hash = (id + 1) * 0x9e3779b97f4a7c15ull;
    bl_evict_assign(tier->order, id, hash ^ hash >> 29);
}

uint32_t bl_tier_put(bl_tier *tier, const uint32_t *id, uint32_t count)
{
    uint32_t added = 0;
    bl_tier_touch(tier, id, count);     /* so that no block is evicted for its own children */
    while (count--) {
        if (bl_tier_has(tier, id[count])) {
            bl_tier_touch(tier, &id[count], 1);
        } else if (bl_tier_make_room(tier, 1)) {
            bl_tier_assign(tier, id[count]);
            bl_evict_touch(tier->order, id[count]);
            tier->stat.present++;
            added++;
        }
    }
    return added;
}

void bl_tier_hold(bl_tier *tier, const uint32_t *id, uint32_t count)
{
    while (count--) {
        if (!bl_tier_has(tier, id[count])) {
            bl_tier_assign(tier, id[count]);
            tier->stat.present++;
        }
        if (!tier->users[id[count]]++) {
            bl_evict_remove(bl_tier_order_of(tier, id[count]), id[count]);
            tier->stat.held++;
        }
    }
}

void bl_tier_drop(bl_tier *tier, const uint32_t *id, uint32_t count)
{
    while (count--)
        if (!--tier->users[id[count]]) {
            bl_evict_touch(bl_tier_order_of(tier, id[count]), id[count]);
            tier->stat.held--;
        }
    bl_tier_make_room(tier, 0);
}

/* Create the orders of levels. Returns 0 or -ENOMEM. */
static int bl_tier_level(bl_tier *tier)
{
    for (uint32_t level = BL_LEVEL_NORMAL + 1; level < BL_LEVEL_COUNT; level++)
        if (!tier->hinted[level] &&
            bl_evict_create(&tier->hinted[level], tier->id_count, BL_EVICT_LRU))
            return -ENOMEM;
    tier->hinted[BL_LEVEL_NORMAL] = tier->order;
    tier->level = calloc((size_t)tier->id_count + 1, sizeof *tier->level);
    return tier->level ? 0 : -ENOMEM;
}

int64_t bl_tier_hint(bl_tier *tier, const uint32_t *id, uint32_t count, uint32_t level,
                     uint32_t budget, uint8_t *given)
{
    if (!tier->level && bl_tier_level(tier))
        return -ENOMEM;
    uint32_t favored = 0, given_count = 0;
    for (uint32_t i = 0; i < count; i++) {  /* the first ids use the budget */
        int is_new = bl_tier_has(tier, id[i]) && bl_tier_favors(level) &&
                     !bl_tier_favors(tier->level[id[i]]);
        favored += is_new;
        given[i] = bl_tier_has(tier, id[i]) &&
                   !(is_new && tier->stat.favored + favored > budget);
        favored -= is_new && !given[i];
        given_count += given[i];
    }
    for (uint32_t i = count; i-- > 0;)      /* last first: a parent is newer than its child */
        if (given[i] && level != tier->level[id[i]])
            bl_tier_move(tier, id[i], level, 0);
    return given_count;
}

void bl_tier_cool(bl_tier *tier, const uint32_t *id, uint32_t count)
{
    for (uint32_t i = 0; tier->level && i < count; i++)
        if (bl_tier_has(tier, id[i]))
            bl_tier_move(tier, id[i], BL_LEVEL_NORMAL, 1);
}

int bl_tier_reserve(bl_tier *tier, uint32_t count)
{
    if ((uint64_t)tier->stat.held + tier->stat.reserved + count > tier->capacity)
        return -ENOSPC;
    bl_tier_make_room(tier, count);
    tier->stat.reserved += count;
    return 0;
}

void bl_tier_release(bl_tier *tier, uint32_t count) { tier->stat.reserved -= count; }

const bl_tier_stat *bl_tier_look(const bl_tier *tier) { return &tier->stat; }

/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Decides whose blocks go when room is needed. Each share has an eviction order of its own
 * (index/evict.h); a search for room goes through the orders of some of them, one after the other:
 *
 *   1. of the shares that exceed their parts, with the block that wants room: what exceeds most
 *      goes first;
 *   2. also of the share that wants room;
 *   3. of all.
 *
 * In each share blocks of level LOW are evicted first, and those of level HIGH last. Blocks of
 * level PINNED are in no set: they are evicted only if all others together make no room.
 *
 * A search begins with the first set and goes on to the next one only if it found no room. So a
 * tenant within its part loses no block to another one while the others' blocks can make room. The
 * shares are sorted once for each search, and each set is the first of them.
 */
#include "index/shares.h"

/* The levels of a share in the order in which they go, and, as it is its own inverse, the place of
 * each level there. */
static const uint8_t bl_turn_levels[BL_LEVEL_PINNED] = {BL_LEVEL_LOW, BL_LEVEL_NORMAL,
                                                        BL_LEVEL_HIGH};

/* Return how much a share would exceed its part with what room is needed for. */
static int64_t bl_turn_excess(const bl_meta *meta, uint32_t share, uint32_t asks, uint64_t size)
{
    return size ? bl_share_excess(meta, share, share == asks ? size : 0)
                : bl_share_lines_excess(meta, share, share == asks);
}

/* Does a share go before another one: one that exceeds its part more, or that asks itself? */
static int bl_turn_before(int64_t excess, int asks, int64_t other, int other_asks)
{
    if (excess <= 0 && other <= 0 && asks != other_asks)
        return asks;
    return excess > other;
}

void bl_turn_begin(bl_meta *meta, uint64_t size)
{
    bl_turn *turn = &meta->turn;
    uint32_t share = turn->asks;
    int64_t excess[BL_SHARE_COUNT];
    turn->count = turn->pinned = 0;
    for (uint32_t one = 0; one < meta->share_count; one++) { /* they are few: insert each */
        int64_t own = bl_turn_excess(meta, one, share, size);
        uint32_t place = one;
        for (; place > 0 && bl_turn_before(own, one == share, excess[place - 1],
                                           turn->shares[place - 1] == share);
             place--) {
            excess[place] = excess[place - 1];
            turn->shares[place] = turn->shares[place - 1];
        }
        excess[place] = own;
        turn->shares[place] = (uint8_t)one;
        turn->count += own > 0;
    }
    for (uint32_t place = 0; place < meta->share_count; place++)
        turn->place[turn->shares[place]] = (uint8_t)place;
    if (turn->count == 0)
        bl_turn_widen(meta);
}

int bl_turn_widen(bl_meta *meta)
{
    bl_turn *turn = &meta->turn;
    if (turn->count == meta->share_count) {
        int more = meta->hints != NULL && !turn->pinned;
        turn->pinned = 1;
        return more;
    }
    turn->count = turn->place[turn->asks] == turn->count ? turn->count + 1 : meta->share_count;
    return 1;
}

/* Return the place of a block's share. */
static uint32_t bl_turn_place(const bl_meta *meta, uint32_t number)
{
    return meta->turn.place[bl_block_share(&meta->blocks[number])];
}

/* Return the order at a step of the walk, or NULL. Of each share the levels go one after the other;
 * pinned blocks of all shares come last. */
static bl_evict *bl_turn_order(const bl_meta *meta, uint32_t step)
{
    const bl_turn *turn = &meta->turn;
    uint32_t steps = BL_LEVEL_PINNED * turn->count; /* those of unpinned blocks */
    if (step >= steps)
        return meta->orders[bl_order_number(turn->shares[step - steps], BL_LEVEL_PINNED)];
    return meta->orders[bl_order_number(turn->shares[step / BL_LEVEL_PINNED],
                                        bl_turn_levels[step % BL_LEVEL_PINNED])];
}

/* Return the step of the walk that a block's order has. */
static uint32_t bl_turn_step(const bl_meta *meta, uint32_t number)
{
    uint32_t level = bl_block_level(&meta->blocks[number]), place = bl_turn_place(meta, number);
    return level == BL_LEVEL_PINNED ? BL_LEVEL_PINNED * meta->turn.count + place
                                    : BL_LEVEL_PINNED * place + bl_turn_levels[level];
}

/* Return the coldest block of the orders from a step on, or -1. */
static int64_t bl_turn_from(const bl_meta *meta, uint32_t step)
{
    uint32_t steps = (BL_LEVEL_PINNED + meta->turn.pinned) * meta->turn.count;
    int64_t number = -1;
    for (; number < 0 && step < steps; step++) {
        bl_evict *order = bl_turn_order(meta, step);
        if (order)
            number = bl_evict_coldest(order);
    }
    return number;
}

int64_t bl_turn_coldest(const bl_meta *meta) { return bl_turn_from(meta, 0); }

int64_t bl_turn_warmer(const bl_meta *meta, uint32_t number)
{
    int64_t next = bl_evict_warmer(bl_order_of(meta, number), number);
    return next >= 0 ? next : bl_turn_from(meta, bl_turn_step(meta, number) + 1);
}

int64_t bl_turn_first(bl_meta *meta)
{
    int64_t number;
    bl_turn_begin(meta, 0);
    do
        number = bl_turn_coldest(meta);
    while (number < 0 && bl_turn_widen(meta));
    return number;
}

int bl_turn_has(const bl_meta *meta, uint32_t number)
{
    return bl_turn_place(meta, number) < meta->turn.count &&
           bl_block_level(&meta->blocks[number]) < BL_LEVEL_PINNED + meta->turn.pinned &&
           bl_evict_has(bl_order_of(meta, number), number);
}

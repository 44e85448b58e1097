/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Decides which share's blocks are evicted for room. Each share has its own eviction orders
 * (index/evict.h); a search for room walks through the orders of a set of shares, one after the
 * other:
 *
 *   1. the shares that exceed their parts, counting the new block: the one that exceeds most first;
 *   2. also the share that needs room;
 *   3. all shares.
 *
 * In each share, blocks of level LOW are evicted first and those of level HIGH last. Blocks of
 * level PINNED are not in these sets: they are evicted only if all other blocks make no room.
 *
 * A search begins with the first set and continues with the next one only if it found no room. So a
 * tenant within its part loses no block to another tenant while other blocks can make room. The
 * shares are sorted once per search, and each set is a prefix of that list.
 */
#include "index/order.h"

#include "index/shares.h"

/* The levels of a share in the order of eviction. The table is its own inverse: it also has the
 * position of each level. */
static const uint8_t bl_eviction_levels[BL_LEVEL_PINNED] = {BL_LEVEL_LOW, BL_LEVEL_NORMAL,
                                                        BL_LEVEL_HIGH};

/* Return by how much the share would exceed its part with the new block. */
static int64_t bl_eviction_excess(const bl_index *index, uint32_t share, uint32_t requester,
                                  uint64_t size)
{
    return size ? bl_share_excess(index, share, share == requester ? size : 0)
                : bl_share_lines_excess(index, share, share == requester);
}

/* Return 1 if a share comes before another one: it exceeds its part by more; or, if both are within
 * their parts, it is the one that needs the room. */
static int bl_eviction_before(int64_t excess, int requests, int64_t other, int other_requests)
{
    if (excess <= 0 && other <= 0 && requests != other_requests)
        return requests;
    return excess > other;
}

void bl_eviction_begin(bl_index *index, uint64_t size)
{
    bl_eviction *turn = &index->turn;
    uint32_t share = turn->requester;
    int64_t excess[BL_SHARE_COUNT];
    turn->count = turn->pinned = 0;
    for (uint32_t one = 0; one < index->share_count; one++) { /* insertion sort */
        int64_t own = bl_eviction_excess(index, one, share, size);
        uint32_t place = one;
        for (; place > 0 && bl_eviction_before(own, one == share, excess[place - 1],
                                           turn->shares[place - 1] == share);
             place--) {
            excess[place] = excess[place - 1];
            turn->shares[place] = turn->shares[place - 1];
        }
        excess[place] = own;
        turn->shares[place] = (uint8_t)one;
        turn->count += own > 0;
    }
    for (uint32_t place = 0; place < index->share_count; place++)
        turn->place[turn->shares[place]] = (uint8_t)place;
    if (turn->count == 0)
        bl_eviction_widen(index);
}

int bl_eviction_widen(bl_index *index)
{
    bl_eviction *turn = &index->turn;
    if (turn->count == index->share_count) {
        int more = index->hints != NULL && !turn->pinned;
        turn->pinned = 1;
        return more;
    }
    turn->count = turn->place[turn->requester] == turn->count ? turn->count + 1
                                                              : index->share_count;
    return 1;
}

/* Return the position of the block's share in the search. */
static uint32_t bl_eviction_place(const bl_index *index, uint32_t number)
{
    return index->turn.place[bl_block_share(&index->blocks[number])];
}

/* Return the eviction order at a step of the walk, or NULL. Each share's levels follow one another;
 * the PINNED levels of all shares come last. */
static bl_evict *bl_eviction_order(const bl_index *index, uint32_t step)
{
    const bl_eviction *turn = &index->turn;
    uint32_t steps = BL_LEVEL_PINNED * turn->count; /* the steps without PINNED */
    if (step >= steps)
        return index->orders[bl_order_number(turn->shares[step - steps], BL_LEVEL_PINNED)];
    return index->orders[bl_order_number(turn->shares[step / BL_LEVEL_PINNED],
                                        bl_eviction_levels[step % BL_LEVEL_PINNED])];
}

/* Return the step of the walk for a block's order. */
static uint32_t bl_eviction_step(const bl_index *index, uint32_t number)
{
    uint32_t level = bl_block_level(&index->blocks[number]);
    uint32_t place = bl_eviction_place(index, number);
    return level == BL_LEVEL_PINNED ? BL_LEVEL_PINNED * index->turn.count + place
                                    : BL_LEVEL_PINNED * place + bl_eviction_levels[level];
}

/* Return the coldest block of the orders from a step on, or -1. */
static int64_t bl_eviction_from(const bl_index *index, uint32_t step)
{
    uint32_t steps = (BL_LEVEL_PINNED + index->turn.pinned) * index->turn.count;
    int64_t number = -1;
    for (; number < 0 && step < steps; step++) {
        bl_evict *order = bl_eviction_order(index, step);
        if (order)
            number = bl_evict_coldest(order);
    }
    return number;
}

int64_t bl_eviction_coldest(const bl_index *index) { return bl_eviction_from(index, 0); }

int64_t bl_eviction_warmer(const bl_index *index, uint32_t number)
{
    int64_t next = bl_evict_warmer(bl_order_of(index, number), number);
    return next >= 0 ? next : bl_eviction_from(index, bl_eviction_step(index, number) + 1);
}

int64_t bl_eviction_first(bl_index *index)
{
    int64_t number;
    bl_eviction_begin(index, 0);
    do
        number = bl_eviction_coldest(index);
    while (number < 0 && bl_eviction_widen(index));
    return number;
}

int bl_eviction_has(const bl_index *index, uint32_t number)
{
    return bl_eviction_place(index, number) < index->turn.count &&
           bl_block_level(&index->blocks[number]) < BL_LEVEL_PINNED + index->turn.pinned &&
           bl_evict_has(bl_order_of(index, number), number);
}

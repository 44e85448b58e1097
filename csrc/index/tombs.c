/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Tombstones. A removal is answered when the pool has a line of the block table (a tombstone) for
 * each lower tier. The line is cleared after the tier has durably removed the key. Until then the
 * key is not read from that tier, even if the tier or the server restarts: a successor recovers
 * tombstones like the entries of blocks.
 *
 *   WAITING --take--> TAKEN --done--> (cleared)     FAILED --take--> TAKEN
 *                     TAKEN --failed--> FAILED      any --removed again--> WAITING
 *
 * Before it serves, a server writes a line for each of its tiers, so the pool lists every tier that
 * may have its blocks. A removal applies to all of them. The tombstone of a tier that this server
 * does not have is parked, for a successor that has the tier. Tombstones use at most half of the
 * table; beyond that, removals are refused. No tombstone is ever dropped, unless an operator
 * abandons its tier.
 */
#include <errno.h>
#include <stdlib.h>

#include "coherence/crash_point.h"
#include "index/hash.h"
#include "index/tombs.h"
#include "index/work_list.h"

enum { BL_TOMBS_PART = 2 };     /* at most one tombstone per this many lines of the block table */

struct bl_tombs {
    bl_hash *hash;            /* key -> number of its first tombstone */
    uint32_t count_max;
    uint32_t count[BL_TOMB_STATES];
    uint64_t id[BL_TOMB_STORES]; /* ids of the tiers; 0: there is no such tier */
    uint32_t line[BL_TOMB_STORES]; /* numbers of the tiers' lines, or BL_NO_NUMBER */
    uint64_t given_up[BL_TOMB_STORES]; /* ids */
    uint32_t given_up_count;
    bl_work_list lists[BL_TOMB_STATES][BL_TOMB_STORES];
};

/* A tombstone uses these fields of a bl_block: key and generation; fingerprint: the id of its tier;
 * lane: the number of its tier; offload: its state; the link BL_LIST_LOWER: in the list of its tier
 * and state; next of BL_LIST_LANE: the next tombstone of the key. The line of a tier has a
 * generation and a fingerprint. */

int bl_tombs_create(bl_index *index)
{
    uint32_t most = index->pool->geometry.block_count_max / BL_TOMBS_PART;
    bl_tombs *tombs = calloc(1, sizeof *tombs);
    if (tombs == NULL)
        return -ENOMEM;
    index->tombs = tombs;
    tombs->count_max = most ? most : 1;
    for (uint32_t state = 0; state < BL_TOMB_STATES; state++)
        for (uint32_t tier = 0; tier < BL_TOMB_STORES; tier++)
            bl_work_clear(&tombs->lists[state][tier]);
    for (uint32_t tier = 0; tier < BL_TOMB_STORES; tier++)
        tombs->line[tier] = BL_NO_NUMBER;
    return bl_hash_create(&tombs->hash, tombs->count_max);
}

void bl_tombs_destroy(bl_index *index)
{
    if (index->tombs == NULL)
        return;
    bl_hash_destroy(index->tombs->hash);
    free(index->tombs);
}

void bl_tombs_attach(bl_index *index, const uint64_t id[BL_TOMB_TIERS])
{
    for (uint32_t tier = 1; tier < BL_TOMB_TIERS; tier++)
        index->tombs->id[tier] = id[tier];
}

int bl_tombs_give_up(bl_index *index, uint64_t id)
{
    bl_tombs *tombs = index->tombs;
    if (tombs->given_up_count == BL_TOMB_STORES)
        return -ENOSPC;
    tombs->given_up[tombs->given_up_count++] = id;
    return 0;
}

/* ---- Tiers. */

/* Return the number of the tier with this id, which is assigned if it has none; 0 if the tier was
 * abandoned, or there are too many. */
static uint32_t bl_tomb_tier(bl_tombs *tombs, uint64_t id)
{
    for (uint32_t tier = 1; tier < BL_TOMB_STORES; tier++)
        if (tombs->id[tier] == id)
            return tier;
    for (uint32_t i = 0; i < tombs->given_up_count; i++)
        if (tombs->given_up[i] == id)
            return 0;
    for (uint32_t tier = BL_TOMB_TIERS; tier < BL_TOMB_STORES; tier++)
        if (tombs->id[tier] == 0) {
            tombs->id[tier] = id;
            return tier;
        }
    return 0;
}

int bl_tombs_recover_tier(bl_index *index, uint32_t number)
{
    uint32_t tier = bl_tomb_tier(index->tombs, index->blocks[number].fingerprint);
    if (tier == 0 || index->tombs->line[tier] != BL_NO_NUMBER)
        return 0;
    index->blocks[number].state = BL_NUMBER_TIER;
    index->tombs->line[tier] = number;
    return 1;
}

uint32_t bl_tombs_unmarked(const bl_index *index)
{
    for (uint32_t tier = 1; tier < BL_TOMB_TIERS; tier++)
        if (index->tombs->id[tier] != 0 && index->tombs->line[tier] == BL_NO_NUMBER)
            return tier;
    return 0;
}

/* Every tier that the pool lists has a number in every server, even in a server with 7 other
 * tiers. */
int bl_tombs_mark(bl_index *index, uint32_t tier, uint32_t number)
{
    if (bl_tombs_tier_count(index) >= BL_TOMB_STORES - BL_TOMB_TIERS)
        return -BL_ERROR_REMOVALS_FULL;
    index->blocks[number] = (bl_block){
        .generation = bl_generation_new(index),
        .fingerprint = index->tombs->id[tier],
        .state = BL_NUMBER_TIER,
    };
    index->tombs->line[tier] = number;
    bl_tomb_write(index, number);
    bl_crash_point("tomb.tier_written");
    return 0;
}

uint32_t bl_tombs_tier_count(const bl_index *index)
{
    uint32_t count = 0;
    for (uint32_t tier = 1; tier < BL_TOMB_STORES; tier++)
        count += index->tombs->line[tier] != BL_NO_NUMBER;
    return count;
}

/* ---- The tombstones of a key. */

static uint32_t bl_tomb_first(const bl_index *index, const uint64_t key[2])
{
    int64_t number = bl_hash_find(index->tombs->hash, key);
    return number < 0 ? (uint32_t)BL_NO_NUMBER : (uint32_t)number;
}

static uint32_t bl_tomb_next(const bl_index *index, uint32_t number)
{
    return index->blocks[number].links[BL_LIST_LANE].next;
}

/* Return the tombstone of a key and a tier, or BL_NO_NUMBER. */
static uint32_t bl_tomb_of(const bl_index *index, const uint64_t key[2], uint32_t tier)
{
    uint32_t number = bl_tomb_first(index, key);
    while (number != BL_NO_NUMBER && index->blocks[number].lane != tier)
        number = bl_tomb_next(index, number);
    return number;
}

/* Add a number to the tombstones of its key: 0, or -ENOSPC. */
static int bl_tomb_link(bl_index *index, uint32_t number)
{
    bl_block *tomb = &index->blocks[number];
    uint32_t first = bl_tomb_first(index, tomb->key);
    if (first == BL_NO_NUMBER) {
        tomb->links[BL_LIST_LANE].next = BL_NO_NUMBER;
        return bl_hash_add(index->tombs->hash, tomb->key, number);
    }
    tomb->links[BL_LIST_LANE].next = bl_tomb_next(index, first);
    index->blocks[first].links[BL_LIST_LANE].next = number;
    return 0;
}

static void bl_tomb_unlink(bl_index *index, uint32_t number)
{
    const bl_block *tomb = &index->blocks[number];
    uint32_t first = bl_tomb_first(index, tomb->key), next = bl_tomb_next(index, number);
    if (first != number) {
        while (bl_tomb_next(index, first) != number)
            first = bl_tomb_next(index, first);
        index->blocks[first].links[BL_LIST_LANE].next = next;
        return;
    }
    bl_hash_remove(index->tombs->hash, tomb->key);
    if (next != BL_NO_NUMBER)
        bl_hash_add(index->tombs->hash, tomb->key, next);
}

/* ---- States. */

/* Return the initial state of a tombstone: PARKED if this server does not have the tier. */
static enum bl_tomb_state bl_tomb_begins(uint32_t tier)
{
    return tier < BL_TOMB_TIERS ? BL_TOMB_WAITING : BL_TOMB_PARKED;
}

static void bl_tomb_enter(bl_index *index, uint32_t number, enum bl_tomb_state state)
{
    bl_block *tomb = &index->blocks[number];
    tomb->offload = (uint8_t)state;
    index->tombs->count[state]++;
    bl_work_append(index, &index->tombs->lists[state][tomb->lane], bl_work_block_link, number);
}

static void bl_tomb_leave(bl_index *index, uint32_t number)
{
    const bl_block *tomb = &index->blocks[number];
    index->tombs->count[tomb->offload]--;
    bl_work_unlink(index, &index->tombs->lists[tomb->offload][tomb->lane], bl_work_block_link,
                   number);
}

static void bl_tomb_move(bl_index *index, uint32_t number, enum bl_tomb_state state)
{
    bl_tomb_leave(index, number);
    bl_tomb_enter(index, number, state);
}

/* Clear the tombstone of a removal that its tier has executed. */
static void bl_tomb_end(bl_index *index, uint32_t number)
{
    bl_block *tomb = &index->blocks[number];
    bl_tomb_leave(index, number);
    bl_tomb_unlink(index, number);
    bl_crash_point("tomb.done");
    *tomb = (bl_block){.generation = tomb->generation};
    bl_entry_clear(index, number);
    bl_number_rest(index, number);
    bl_crash_point("tomb.cleared");
}

int bl_tombs_needed(const bl_index *index, const uint64_t key[2])
{
    int needed = 0;
    for (uint32_t tier = 1; tier < BL_TOMB_STORES; tier++)
        needed += index->tombs->id[tier] != 0 && bl_tomb_of(index, key, tier) == BL_NO_NUMBER;
    return bl_tombs_count(index) + (uint32_t)needed <= index->tombs->count_max
               ? needed
               : -BL_ERROR_REMOVALS_FULL;
}

void bl_tombs_add(bl_index *index, const uint64_t key[2], const uint32_t *numbers)
{
    for (uint32_t tier = 1; tier < BL_TOMB_STORES; tier++) {
        if (index->tombs->id[tier] == 0)
            continue;
        uint32_t number = bl_tomb_of(index, key, tier);
        if (number != BL_NO_NUMBER) {
            /* Results of earlier attempts no longer match. The line in the pool is not rewritten: a
             * torn write would lose an answered removal. */
            index->blocks[number].generation = bl_generation_new(index);
            bl_tomb_move(index, number, bl_tomb_begins(tier));
            continue;
        }
        number = *numbers++;
        index->blocks[number] = (bl_block){
            .key = {key[0], key[1]},
            .generation = bl_generation_new(index),
            .fingerprint = index->tombs->id[tier],
            .state = BL_NUMBER_REMOVED,
            .lane = tier,
        };
        bl_tomb_link(index, number);
        bl_tomb_enter(index, number, bl_tomb_begins(tier));
        bl_tomb_write(index, number);
        bl_crash_point("tomb.written");
    }
}

int bl_tombs_recover(bl_index *index, uint32_t number)
{
    bl_tombs *tombs = index->tombs;
    bl_block *tomb = &index->blocks[number];
    uint32_t tier = tomb->lane = bl_tomb_tier(tombs, tomb->fingerprint);
    if (tier == 0 || bl_tomb_of(index, tomb->key, tier) != BL_NO_NUMBER ||
        bl_tombs_count(index) >= tombs->count_max || bl_tomb_link(index, number) < 0)
        return 0;
    tomb->state = BL_NUMBER_REMOVED;
    bl_tomb_enter(index, number, bl_tomb_begins(tier));
    return 1;
}

/* ---- Queries. */

uint8_t bl_tombs_of(const bl_index *index, const uint64_t key[2])
{
    uint32_t tiers = 0;
    if (bl_tombs_count(index) == 0)
        return 0;
    for (uint32_t n = bl_tomb_first(index, key); n != BL_NO_NUMBER; n = bl_tomb_next(index, n))
        if (index->blocks[n].lane < BL_TOMB_TIERS)
            tiers |= 1u << index->blocks[n].lane;
    return (uint8_t)tiers;
}

uint8_t bl_tombs_untried(const bl_index *index, const uint64_t key[2])
{
    uint32_t tiers = 0;
    for (uint32_t n = bl_tomb_first(index, key); n != BL_NO_NUMBER; n = bl_tomb_next(index, n))
        if (index->blocks[n].offload == BL_TOMB_WAITING ||
            index->blocks[n].offload == BL_TOMB_TAKEN)
            tiers |= 1u << index->blocks[n].lane;
    return (uint8_t)tiers;
}

int bl_tombs_has(const bl_index *index, enum bl_tomb_state state)
{
    return index->tombs->count[state] > 0;
}

uint32_t bl_tombs_count_in(const bl_index *index, enum bl_tomb_state state)
{
    return index->tombs->count[state];
}

uint32_t bl_tombs_count(const bl_index *index)
{
    uint32_t count = 0;
    for (uint32_t state = 0; state < BL_TOMB_STATES; state++)
        count += index->tombs->count[state];
    return count;
}

uint32_t bl_tombs_max(const bl_index *index) { return index->tombs->count_max; }

/* ---- The service. */

int bl_tombs_take(bl_index *index, enum bl_tomb_state state, uint32_t tier, bl_lower_record *out)
{
    bl_tombs *tombs = index->tombs;
    uint32_t first = tier ? tier : 1, end = tier ? tier + 1 : (uint32_t)BL_TOMB_TIERS;
    for (; first < end; first++) {
        uint32_t number = tombs->lists[state][first].first;
        if (number == BL_NO_NUMBER)
            continue;
        const bl_block *tomb = &index->blocks[number];
        bl_tomb_move(index, number, BL_TOMB_TAKEN);
        *out = (bl_lower_record){
            .key = {tomb->key[0], tomb->key[1]},
            .generation = tomb->generation,
            .block = number,
            .tiers = (uint8_t)(1u << tomb->lane),
        };
        return 1;
    }
    return 0;
}

uint8_t bl_tombs_tried(bl_index *index, const bl_lower_note *note)
{
    if (note->block >= index->pool->geometry.block_count_max)
        return 0;
    const bl_block *tomb = &index->blocks[note->block];
    if (tomb->state != BL_NUMBER_REMOVED || tomb->generation != note->generation ||
        tomb->offload != BL_TOMB_TAKEN)
        return 0; /* the block was replaced meanwhile, or the key removed again */
    uint8_t tier = (uint8_t)(1u << tomb->lane);
    if (note->removal == BL_REMOVAL_DONE)
        bl_tomb_end(index, note->block);
    else
        bl_tomb_move(index, note->block, BL_TOMB_FAILED);
    return tier;
}

void bl_tombs_replaced(bl_index *index, const uint64_t key[2], uint8_t tiers, uint64_t generation)
{
    for (uint32_t tier = 1; tier < BL_TOMB_TIERS; tier++) {
        uint32_t number = tiers >> tier & 1 ? bl_tomb_of(index, key, tier) : (uint32_t)BL_NO_NUMBER;
        if (number != BL_NO_NUMBER && index->blocks[number].generation < generation)
            bl_tomb_end(index, number);
    }
}

void bl_tombs_untake(bl_index *index)
{
    for (uint32_t tier = 1; tier < BL_TOMB_TIERS; tier++) {
        const bl_work_list *list = &index->tombs->lists[BL_TOMB_TAKEN][tier];
        while (list->first != BL_NO_NUMBER)
            bl_tomb_move(index, list->first, BL_TOMB_WAITING);
    }
}

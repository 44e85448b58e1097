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
 *
 * A session that has as many tombstones as are still free gets no more, so none takes the room of
 * all others. Which keys a store has is not known, so the share is the same for all keys. It counts
 * the removals of living sessions: others have ended, or had another server. The service takes one
 * waiting tombstone of each session in turn.
 */
#include "index/tombstones.h"

#include <errno.h>
#include <stdlib.h>

#include "coherence/crash_point.h"
#include "index/hash.h"
#include "index/numbers.h"
#include "index/table.h"
#include "index/work_list.h"

enum { BL_TOMBSTONES_PART = 2 }; /* at most one tombstone per this many lines of the block table */

typedef struct bl_tombstone_share {
    uint32_t session;           /* how many sessions of this lane have ended */
    uint32_t count;             /* tombstones of its session */
    bl_work_list waiting;       /* those of all of its sessions, for all tiers */
} bl_tombstone_share;

struct bl_tombstones {
    bl_hash *hash;            /* key -> number of its first tombstone */
    uint32_t count_max;
    uint32_t count[BL_TOMBSTONE_STATES];
    bl_tombstone_share *shares; /* by lane plus 1; the first is of sessions of former servers */
    uint32_t turn;              /* index of the next one that the service takes from */
    uint64_t id[BL_TOMBSTONE_STORES]; /* ids of the tiers; 0: there is no such tier */
    uint32_t line[BL_TOMBSTONE_STORES]; /* numbers of the tiers' lines, or BL_NO_NUMBER */
    uint64_t given_up[BL_TOMBSTONE_STORES]; /* ids */
    uint32_t given_up_count;
    bl_work_list lists[BL_TOMBSTONE_STATES][BL_TOMBSTONE_STORES]; /* without those that wait */
};

/* A tombstone uses these fields of a bl_block: key and generation; fingerprint: the id of its tier;
 * lane: the number of its tier; offload: its state; the link BL_LIST_LOWER: in the list of its tier
 * and state; next of BL_LIST_LANE: the next tombstone of the key; chunk_size: index in
 * shares; length: bl_tombstone_share.session. The line of a tier has a generation and a
 * fingerprint. */

int bl_tombstones_create(bl_index *index)
{
    uint32_t most = index->pool->geometry.block_count_max / BL_TOMBSTONES_PART;
    bl_tombstones *tombstones = calloc(1, sizeof *tombstones);
    if (tombstones == NULL)
        return -ENOMEM;
    index->tombstones = tombstones;
    tombstones->count_max = most ? most : 1;
    for (uint32_t state = 0; state < BL_TOMBSTONE_STATES; state++)
        for (uint32_t tier = 0; tier < BL_TOMBSTONE_STORES; tier++)
            bl_work_clear(&tombstones->lists[state][tier]);
    for (uint32_t tier = 0; tier < BL_TOMBSTONE_STORES; tier++)
        tombstones->line[tier] = BL_NO_NUMBER;
    uint32_t share_count = index->pool->geometry.lane_count + 1;
    tombstones->shares = calloc(share_count, sizeof *tombstones->shares);
    if (tombstones->shares == NULL)
        return -ENOMEM;
    for (uint32_t share = 0; share < share_count; share++)
        bl_work_clear(&tombstones->shares[share].waiting);
    return bl_hash_create(&tombstones->hash, tombstones->count_max);
}

void bl_tombstones_destroy(bl_index *index)
{
    if (index->tombstones == NULL)
        return;
    bl_hash_destroy(index->tombstones->hash);
    free(index->tombstones->shares);
    free(index->tombstones);
}

void bl_tombstones_lane_gone(bl_index *index, uint32_t lane)
{
    bl_tombstone_share *share = &index->tombstones->shares[1 + lane];
    share->session++;
    share->count = 0;
}

void bl_tombstones_attach(bl_index *index, const uint64_t id[BL_TOMBSTONE_TIERS])
{
    for (uint32_t tier = 1; tier < BL_TOMBSTONE_TIERS; tier++)
        index->tombstones->id[tier] = id[tier];
}

int bl_tombstones_give_up(bl_index *index, uint64_t id)
{
    bl_tombstones *tombstones = index->tombstones;
    if (tombstones->given_up_count == BL_TOMBSTONE_STORES)
        return -ENOSPC;
    tombstones->given_up[tombstones->given_up_count++] = id;
    return 0;
}

/* ---- Tiers. */

/* Return the number of the tier with this id, which is assigned if it has none; 0 if the tier was
 * abandoned, or there are too many. */
static uint32_t bl_tombstone_tier(bl_tombstones *tombstones, uint64_t id)
{
    for (uint32_t tier = 1; tier < BL_TOMBSTONE_STORES; tier++)
        if (tombstones->id[tier] == id)
            return tier;
    for (uint32_t i = 0; i < tombstones->given_up_count; i++)
        if (tombstones->given_up[i] == id)
            return 0;
    for (uint32_t tier = BL_TOMBSTONE_TIERS; tier < BL_TOMBSTONE_STORES; tier++)
        if (tombstones->id[tier] == 0) {
            tombstones->id[tier] = id;
            return tier;
        }
    return 0;
}

int bl_tombstones_recover_tier(bl_index *index, uint32_t number)
{
    uint32_t tier = bl_tombstone_tier(index->tombstones, index->blocks[number].fingerprint);
    if (tier == 0 || index->tombstones->line[tier] != BL_NO_NUMBER)
        return 0;
    index->blocks[number].state = BL_NUMBER_TIER;
    index->tombstones->line[tier] = number;
    return 1;
}

uint32_t bl_tombstones_unmarked(const bl_index *index)
{
    for (uint32_t tier = 1; tier < BL_TOMBSTONE_TIERS; tier++)
        if (index->tombstones->id[tier] != 0 && index->tombstones->line[tier] == BL_NO_NUMBER)
            return tier;
    return 0;
}

/* Every tier that the pool lists has a number in every server, even in a server with 7 other
 * tiers. */
int bl_tombstones_mark(bl_index *index, uint32_t tier, uint32_t number)
{
    if (bl_tombstones_tier_count(index) >= BL_TOMBSTONE_STORES - BL_TOMBSTONE_TIERS)
        return -BL_ERROR_REMOVALS_FULL;
    index->blocks[number] = (bl_block){
        .generation = bl_generation_new(index),
        .fingerprint = index->tombstones->id[tier],
        .state = BL_NUMBER_TIER,
    };
    index->tombstones->line[tier] = number;
    bl_tombstone_write(index, number);
    bl_crash_point("tombstone.tier_written");
    return 0;
}

uint32_t bl_tombstones_tier_count(const bl_index *index)
{
    uint32_t count = 0;
    for (uint32_t tier = 1; tier < BL_TOMBSTONE_STORES; tier++)
        count += index->tombstones->line[tier] != BL_NO_NUMBER;
    return count;
}

/* ---- The tombstones of a key. */

static uint32_t bl_tombstone_first(const bl_index *index, const uint64_t key[2])
{
    int64_t number = bl_hash_find(index->tombstones->hash, key);
    return number < 0 ? (uint32_t)BL_NO_NUMBER : (uint32_t)number;
}

static uint32_t bl_tombstone_next(const bl_index *index, uint32_t number)
{
    return index->blocks[number].links[BL_LIST_LANE].next;
}

/* Return the tombstone of a key and a tier, or BL_NO_NUMBER. */
static uint32_t bl_tombstone_of(const bl_index *index, const uint64_t key[2], uint32_t tier)
{
    uint32_t number = bl_tombstone_first(index, key);
    while (number != BL_NO_NUMBER && index->blocks[number].lane != tier)
        number = bl_tombstone_next(index, number);
    return number;
}

/* Add a number to the tombstones of its key: 0, or -ENOSPC. */
static int bl_tombstone_link(bl_index *index, uint32_t number)
{
    bl_block *tombstone = &index->blocks[number];
    uint32_t first = bl_tombstone_first(index, tombstone->key);
    if (first == BL_NO_NUMBER) {
        tombstone->links[BL_LIST_LANE].next = BL_NO_NUMBER;
        return bl_hash_add(index->tombstones->hash, tombstone->key, number);
    }
    tombstone->links[BL_LIST_LANE].next = bl_tombstone_next(index, first);
    index->blocks[first].links[BL_LIST_LANE].next = number;
    return 0;
}

static void bl_tombstone_unlink(bl_index *index, uint32_t number)
{
    const bl_block *tombstone = &index->blocks[number];
    uint32_t first = bl_tombstone_first(index, tombstone->key);
    uint32_t next = bl_tombstone_next(index, number);
    if (first != number) {
        while (bl_tombstone_next(index, first) != number)
            first = bl_tombstone_next(index, first);
        index->blocks[first].links[BL_LIST_LANE].next = next;
        return;
    }
    bl_hash_remove(index->tombstones->hash, tombstone->key);
    if (next != BL_NO_NUMBER)
        bl_hash_add(index->tombstones->hash, tombstone->key, next);
}

/* ---- States. */

/* Return the initial state of a tombstone: PARKED if this server does not have the tier. */
static enum bl_tombstone_state bl_tombstone_begins(uint32_t tier)
{
    return tier < BL_TOMBSTONE_TIERS ? BL_TOMBSTONE_WAITING : BL_TOMBSTONE_PARKED;
}

static bl_work_list *bl_tombstone_list(const bl_index *index, const bl_block *tombstone)
{
    bl_tombstones *tombstones = index->tombstones;
    return tombstone->offload == BL_TOMBSTONE_WAITING
               ? &tombstones->shares[tombstone->chunk_size].waiting
               : &tombstones->lists[tombstone->offload][tombstone->lane];
}

static void bl_tombstone_enter(bl_index *index, uint32_t number, enum bl_tombstone_state state)
{
    bl_block *tombstone = &index->blocks[number];
    tombstone->offload = (uint8_t)state;
    index->tombstones->count[state]++;
    bl_work_append(index, bl_tombstone_list(index, tombstone), bl_work_block_link, number);
}

static void bl_tombstone_leave(bl_index *index, uint32_t number)
{
    const bl_block *tombstone = &index->blocks[number];
    index->tombstones->count[tombstone->offload]--;
    bl_work_unlink(index, bl_tombstone_list(index, tombstone), bl_work_block_link, number);
}

static void bl_tombstone_move(bl_index *index, uint32_t number, enum bl_tombstone_state state)
{
    bl_tombstone_leave(index, number);
    bl_tombstone_enter(index, number, state);
}

/* Clear the tombstone of a removal that its tier has executed. */
static void bl_tombstone_end(bl_index *index, uint32_t number)
{
    bl_block *tombstone = &index->blocks[number];
    bl_tombstone_leave(index, number);
    bl_tombstone_unlink(index, number);
    bl_tombstone_share *share = &index->tombstones->shares[tombstone->chunk_size];
    share->count -= share->session == tombstone->length; /* else that session has ended */
    bl_crash_point("tombstone.done");
    *tombstone = (bl_block){.generation = tombstone->generation};
    bl_entry_clear(index, number);
    bl_number_rest(index, number);
    bl_crash_point("tombstone.cleared");
}

int bl_tombstones_needed(const bl_index *index, const uint64_t key[2], uint32_t lane)
{
    uint32_t used = bl_tombstones_count(index) + index->tombstones->shares[1 + lane].count;
    int needed = 0;
    for (uint32_t tier = 1; tier < BL_TOMBSTONE_STORES; tier++)
        needed += index->tombstones->id[tier] != 0 &&
                  bl_tombstone_of(index, key, tier) == BL_NO_NUMBER;
    return needed == 0 || used + (uint32_t)needed <= index->tombstones->count_max
               ? needed
               : -BL_ERROR_REMOVALS_FULL;
}

void bl_tombstones_add(bl_index *index, const uint64_t key[2], uint32_t lane,
                       const uint32_t *numbers)
{
    bl_tombstone_share *share = &index->tombstones->shares[1 + lane];
    for (uint32_t tier = 1; tier < BL_TOMBSTONE_STORES; tier++) {
        if (index->tombstones->id[tier] == 0)
            continue;
        uint32_t number = bl_tombstone_of(index, key, tier);
        if (number != BL_NO_NUMBER) {
            /* Results of earlier attempts no longer match. The line in the pool is not rewritten: a
             * torn write would lose an answered removal. */
            index->blocks[number].generation = bl_generation_new(index);
            bl_tombstone_move(index, number, bl_tombstone_begins(tier));
            continue;
        }
        number = *numbers++;
        index->blocks[number] = (bl_block){
            .key = {key[0], key[1]},
            .generation = bl_generation_new(index),
            .fingerprint = index->tombstones->id[tier],
            .state = BL_NUMBER_REMOVED,
            .lane = tier,
            .chunk_size = 1 + lane,
            .length = share->session,
        };
        share->count++;
        bl_tombstone_link(index, number);
        bl_tombstone_enter(index, number, bl_tombstone_begins(tier));
        bl_tombstone_write(index, number);
        bl_crash_point("tombstone.written");
    }
}

int bl_tombstones_recover(bl_index *index, uint32_t number)
{
    bl_tombstones *tombstones = index->tombstones;
    bl_block *tombstone = &index->blocks[number];
    uint32_t tier = tombstone->lane = bl_tombstone_tier(tombstones, tombstone->fingerprint);
    if (tier == 0 || bl_tombstone_of(index, tombstone->key, tier) != BL_NO_NUMBER ||
        bl_tombstones_count(index) >= tombstones->count_max || bl_tombstone_link(index, number) < 0)
        return 0;
    tombstone->state = BL_NUMBER_REMOVED;
    tombstones->shares[0].count++;
    bl_tombstone_enter(index, number, bl_tombstone_begins(tier));
    return 1;
}

/* ---- Queries. */

uint8_t bl_tombstones_of(const bl_index *index, const uint64_t key[2])
{
    uint32_t tiers = 0;
    if (bl_tombstones_count(index) == 0)
        return 0;
    for (uint32_t n = bl_tombstone_first(index, key); n != BL_NO_NUMBER;
         n = bl_tombstone_next(index, n))
        if (index->blocks[n].lane < BL_TOMBSTONE_TIERS)
            tiers |= 1u << index->blocks[n].lane;
    return (uint8_t)tiers;
}

uint8_t bl_tombstones_untried(const bl_index *index, const uint64_t key[2])
{
    uint32_t tiers = 0;
    for (uint32_t n = bl_tombstone_first(index, key); n != BL_NO_NUMBER;
         n = bl_tombstone_next(index, n))
        if (index->blocks[n].offload == BL_TOMBSTONE_WAITING ||
            index->blocks[n].offload == BL_TOMBSTONE_TAKEN)
            tiers |= 1u << index->blocks[n].lane;
    return (uint8_t)tiers;
}

int bl_tombstones_has(const bl_index *index, enum bl_tombstone_state state)
{
    return index->tombstones->count[state] > 0;
}

uint32_t bl_tombstones_count_in(const bl_index *index, enum bl_tombstone_state state)
{
    return index->tombstones->count[state];
}

uint32_t bl_tombstones_count(const bl_index *index)
{
    uint32_t count = 0;
    for (uint32_t state = 0; state < BL_TOMBSTONE_STATES; state++)
        count += index->tombstones->count[state];
    return count;
}

uint32_t bl_tombstones_max(const bl_index *index) { return index->tombstones->count_max; }

/* ---- The service. */

/* Return the oldest waiting tombstone of the session whose turn it is. There must be one. */
static uint32_t bl_tombstone_turn(bl_tombstones *tombstones, uint32_t share_count)
{
    uint32_t number;
    do
        number = tombstones->shares[tombstones->turn++ % share_count].waiting.first;
    while (number == BL_NO_NUMBER);
    return number;
}

int bl_tombstones_take(bl_index *index, uint32_t tier, bl_lower_record *out)
{
    bl_tombstones *tombstones = index->tombstones;
    uint32_t number = tombstones->lists[BL_TOMBSTONE_FAILED][tier].first;
    if (tier == 0 && tombstones->count[BL_TOMBSTONE_WAITING] > 0)
        number = bl_tombstone_turn(tombstones, index->pool->geometry.lane_count + 1);
    if (number == BL_NO_NUMBER)
        return 0;
    const bl_block *tombstone = &index->blocks[number];
    bl_tombstone_move(index, number, BL_TOMBSTONE_TAKEN);
    *out = (bl_lower_record){
        .key = {tombstone->key[0], tombstone->key[1]},
        .generation = tombstone->generation,
        .block = number,
        .tiers = (uint8_t)(1u << tombstone->lane),
    };
    return 1;
}

uint8_t bl_tombstones_tried(bl_index *index, const bl_lower_note *note)
{
    if (note->block >= index->pool->geometry.block_count_max)
        return 0;
    const bl_block *tombstone = &index->blocks[note->block];
    if (tombstone->state != BL_NUMBER_REMOVED || tombstone->generation != note->generation ||
        tombstone->offload != BL_TOMBSTONE_TAKEN)
        return 0; /* the block was replaced meanwhile, or the key removed again */
    uint8_t tier = (uint8_t)(1u << tombstone->lane);
    if (note->removal == BL_REMOVAL_DONE)
        bl_tombstone_end(index, note->block);
    else
        bl_tombstone_move(index, note->block, BL_TOMBSTONE_FAILED);
    return tier;
}

void bl_tombstones_replaced(bl_index *index, const uint64_t key[2], uint8_t tiers,
                            uint64_t generation)
{
    for (uint32_t tier = 1; tier < BL_TOMBSTONE_TIERS; tier++) {
        uint32_t number = tiers >> tier & 1 ? bl_tombstone_of(index, key, tier)
                                            : (uint32_t)BL_NO_NUMBER;
        if (number != BL_NO_NUMBER && index->blocks[number].generation < generation)
            bl_tombstone_end(index, number);
    }
}

void bl_tombstones_untake(bl_index *index)
{
    for (uint32_t tier = 1; tier < BL_TOMBSTONE_TIERS; tier++) {
        const bl_work_list *list = &index->tombstones->lists[BL_TOMBSTONE_TAKEN][tier];
        while (list->first != BL_NO_NUMBER)
            bl_tombstone_move(index, list->first, BL_TOMBSTONE_WAITING);
    }
}

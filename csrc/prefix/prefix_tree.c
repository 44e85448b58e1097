/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Adds, removes and evicts the blocks and names of prefix/prefix_tree.h.
 */
#include "prefix/prefix_tree.h"

#include <errno.h>

/* ---- Tables. */

void bl_prefix_table_add(bl_prefix_table *table, uint32_t tag, uint32_t number)
{
    uint64_t at = tag;
    while (table->slot[at & table->mask])
        at++;
    table->slot[at & table->mask] = (uint64_t)tag << 32 | number;
}

/* Later entries of the probe sequence move up, so that a search still ends at an empty slot. */
void bl_prefix_table_remove(bl_prefix_table *table, uint32_t tag, uint32_t number)
{
    uint64_t hole = tag, mask = table->mask;
    while ((uint32_t)table->slot[hole & mask] != number)
        hole++;
    hole &= mask;
    for (uint64_t at = hole + 1; table->slot[at & mask]; at++) {
        uint64_t home = table->slot[at & mask] >> 32;
        if (((at - home) & mask) < ((at - hole) & mask))
            continue;
        table->slot[hole] = table->slot[at & mask];
        hole = at & mask;
    }
    table->slot[hole] = 0;
}

/* ---- Item arrays: free items are linked through a block's parent or a name's next. */

static uint32_t *bl_prefix_free_link(const bl_prefix *prefix, const bl_prefix_room *room,
                                     uint32_t number)
{
    return room == &prefix->blocks ? &bl_prefix_block_at(prefix, number)->parent
                                   : &bl_prefix_name_at(prefix, number)->next;
}

/* Allocate an item; the caller has made room. */
static uint32_t bl_prefix_room_take(bl_prefix *prefix, bl_prefix_room *room)
{
    uint32_t number = room->free;
    if (number)
        room->free = *bl_prefix_free_link(prefix, room, number);
    else
        number = room->top++;
    room->count++;
    return number;
}

static void bl_prefix_room_give(bl_prefix *prefix, bl_prefix_room *room, uint32_t number)
{
    *bl_prefix_free_link(prefix, room, number) = room->free;
    room->free = number;
    room->count--;
}

/* ---- Blocks. */

uint32_t bl_prefix_child(const bl_prefix *prefix, uint32_t parent, uint64_t local)
{
    uint64_t path = bl_prefix_path(prefix, bl_prefix_block_at(prefix, parent)->path, local);
    uint32_t tag = bl_prefix_block_tag(path), number;
    uint64_t at = tag;
    while ((number = bl_prefix_next(&prefix->block_table, tag, &at))) {
        const bl_prefix_block *block = bl_prefix_block_at(prefix, number);
        if (block->parent == parent && block->local == local)
            break;
    }
    return number;
}

uint32_t bl_prefix_grow(bl_prefix *prefix, uint32_t parent, uint64_t local)
{
    prefix->keep = parent;
    if (bl_prefix_make_room(prefix, &prefix->blocks) < 0)
        return 0;
    uint32_t number = bl_prefix_room_take(prefix, &prefix->blocks);
    bl_prefix_block *before = bl_prefix_block_at(prefix, parent);
    bl_prefix_block *block = bl_prefix_block_at(prefix, number);
    memset(block, 0, prefix->blocks.stride);
    block->local = local;
    block->path = bl_prefix_path(prefix, before->path, local);
    block->parent = parent;
    block->depth = before->depth + 1;
    if (!before->child_count++)
        bl_evict_remove(prefix->leaves, parent);
    bl_evict_touch(prefix->leaves, number);
    bl_prefix_table_add(&prefix->block_table, bl_prefix_block_tag(block->path), number);
    prefix->keep = number;
    return number;
}

void bl_prefix_settle(bl_prefix *prefix, uint32_t number)
{
    while (number && number != prefix->keep) {
        bl_prefix_block *block = bl_prefix_block_at(prefix, number);
        if (block->name_count || block->child_count)
            return;
        uint32_t parent = block->parent;
        bl_prefix_table_remove(&prefix->block_table, bl_prefix_block_tag(block->path), number);
        bl_evict_remove(prefix->leaves, number);
        block->depth = 0;
        bl_prefix_room_give(prefix, &prefix->blocks, number);
        if (!--bl_prefix_block_at(prefix, parent)->child_count && parent)
            bl_evict_cool(prefix->leaves, parent);
        number = parent;
    }
}

/* ---- Names. */

uint32_t bl_prefix_name_of(const bl_prefix *prefix, uint32_t rank, uint64_t hash)
{
    uint32_t tag = bl_prefix_name_tag(prefix, hash), number;
    uint64_t at = tag;
    while ((number = bl_prefix_next(&prefix->name_table, tag, &at))) {
        const bl_prefix_name *name = bl_prefix_name_at(prefix, number);
        if (name->hash == hash && bl_prefix_tiers(name->held, prefix->words, rank))
            break;
    }
    return number;
}

/* Return this block's name with this hash, of any rank; or 0. */
static uint32_t bl_prefix_name_for(const bl_prefix *prefix, uint64_t hash, uint32_t block)
{
    uint32_t tag = bl_prefix_name_tag(prefix, hash), number;
    uint64_t at = tag;
    while ((number = bl_prefix_next(&prefix->name_table, tag, &at))) {
        const bl_prefix_name *name = bl_prefix_name_at(prefix, number);
        if (name->hash == hash && name->block == block)
            break;
    }
    return number;
}

static void bl_prefix_count(bl_prefix *prefix, uint32_t rank, uint32_t tier, int64_t more)
{
    uint64_t *held = &prefix->held[rank * BL_PREFIX_TIERS], all = 0;
    held[tier] += (uint64_t)more;
    for (uint32_t i = 0; i < BL_PREFIX_TIERS; i++)
        all += held[i];
    uint64_t bit = 1ull << (rank % 64);
    if (all)
        prefix->active[rank / 64] |= bit;
    else
        prefix->active[rank / 64] &= ~bit;
}

/* Remove a name that no rank has any more. */
static void bl_prefix_forget(bl_prefix *prefix, uint32_t number)
{
    bl_prefix_name *name = bl_prefix_name_at(prefix, number);
    bl_prefix_block *block = bl_prefix_block_at(prefix, name->block);
    uint32_t *link = &block->first_name;
    while (*link != number)
        link = &bl_prefix_name_at(prefix, *link)->next;
    *link = name->next;
    block->name_count--;
    bl_prefix_table_remove(&prefix->name_table, bl_prefix_name_tag(prefix, name->hash), number);
    name->block = 0;
    bl_prefix_room_give(prefix, &prefix->names, number);
}

/* Return 1 if a rank holds a block in a tier by any name. */
static int bl_prefix_named(const bl_prefix *prefix, const bl_prefix_block *block, uint32_t rank,
                           uint32_t tier)
{
    for (uint32_t number = block->first_name; number;) {
        const bl_prefix_name *name = bl_prefix_name_at(prefix, number);
        if (bl_prefix_bit(name->held, prefix->words, rank, tier))
            return 1;
        number = name->next;
    }
    return 0;
}

uint32_t bl_prefix_drop(bl_prefix *prefix, uint32_t number, uint32_t rank, uint32_t tiers)
{
    bl_prefix_name *name = bl_prefix_name_at(prefix, number);
    uint32_t at = name->block, dropped = 0;
    bl_prefix_block *block = bl_prefix_block_at(prefix, at);
    tiers &= bl_prefix_tiers(name->held, prefix->words, rank);
    for (uint32_t tier = 0; tier < BL_PREFIX_TIERS; tier++) {
        if (!(tiers >> tier & 1))
            continue;
        uint32_t word = tier * prefix->words + rank / 64;
        name->held[word] &= ~(1ull << (rank % 64));
        if (!bl_prefix_named(prefix, block, rank, tier))
            block->held[word] &= ~(1ull << (rank % 64));
        bl_prefix_count(prefix, rank, tier, -1);
        dropped++;
    }
    uint64_t others = 0;
    for (uint32_t word = 0; word < BL_PREFIX_TIERS * prefix->words; word++)
        others |= name->held[word];
    if (!others) {
        bl_prefix_forget(prefix, number);
        bl_prefix_settle(prefix, at);
    }
    return dropped;
}

/* Evict a leaf with its names, for all ranks. */
static void bl_prefix_evict(bl_prefix *prefix, uint32_t leaf)
{
    bl_prefix_block *block = bl_prefix_block_at(prefix, leaf);
    uint32_t number;
    while (block->depth && (number = block->first_name)) {
        const bl_prefix_name *name = bl_prefix_name_at(prefix, number);
        uint32_t word = 0;
        while (!name->held[word])
            word++;
        uint32_t bit = (uint32_t)__builtin_ctzll(name->held[word]);
        bl_prefix_drop(prefix, number, word % prefix->words * 64 + bit, UINT32_MAX);
    }
    prefix->evicted++;
}

int bl_prefix_make_room(bl_prefix *prefix, bl_prefix_room *room)
{
    while (room->count == room->max) {
        int64_t leaf = bl_evict_coldest(prefix->leaves);
        if (leaf >= 0 && leaf == prefix->keep)
            leaf = bl_evict_warmer(prefix->leaves, prefix->keep);
        if (leaf < 0)
            return -ENOSPC;
        bl_prefix_evict(prefix, (uint32_t)leaf);
    }
    return 0;
}

/* Add a name without holders; the caller has made room. */
static uint32_t bl_prefix_name_add(bl_prefix *prefix, uint64_t hash, uint32_t at)
{
    uint32_t number = bl_prefix_room_take(prefix, &prefix->names);
    bl_prefix_name *name = bl_prefix_name_at(prefix, number);
    bl_prefix_block *block = bl_prefix_block_at(prefix, at);
    memset(name, 0, prefix->names.stride);
    name->hash = hash;
    name->block = at;
    name->next = block->first_name;
    block->first_name = number;
    block->name_count++;
    bl_prefix_table_add(&prefix->name_table, bl_prefix_name_tag(prefix, hash), number);
    return number;
}

int bl_prefix_take(bl_prefix *prefix, uint32_t rank, uint32_t tier, uint64_t hash, uint32_t at,
                   bl_prefix_outcome *outcome)
{
    bl_prefix_block *block = bl_prefix_block_at(prefix, at);
    prefix->keep = at;
    uint32_t number = bl_prefix_name_for(prefix, hash, at);
    if (!number) {
        /* One name for each rank, and some spare ones for contents that only the engine
         * distinguishes. */
        if (block->name_count >= prefix->rank_max + 64)
            return -ENOSPC;
        if (bl_prefix_make_room(prefix, &prefix->names) < 0)
            return -ENOSPC;
    }
    uint32_t old = bl_prefix_name_of(prefix, rank, hash);
    if (!number)
        number = bl_prefix_name_add(prefix, hash, at);
    if (old && old != number) {
        outcome->moved++;
        bl_prefix_drop(prefix, old, rank, UINT32_MAX);
    }
    bl_prefix_name *name = bl_prefix_name_at(prefix, number);
    uint32_t word = tier * prefix->words + rank / 64;
    uint64_t bit = 1ull << (rank % 64);
    if (!block->child_count)
        bl_evict_touch(prefix->leaves, at);
    if (name->held[word] & bit)
        return 0;
    name->held[word] |= bit;
    block->held[word] |= bit;
    bl_prefix_count(prefix, rank, tier, 1);
    return 1;
}

/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * The data structures of the prefix tree (api/prefix.h): blocks, their names, and a hash table for
 * each. A block's slot in its table depends on the contents of its whole path, so a walk can
 * compute all slots in advance, and their cache misses overlap; the block in a slot is then
 * compared by parent and contents, so colliding paths are not confused. Numbers begin at 1; 0 is
 * the root, or none.
 *
 * Invariants outside a call: a block has a name or a child; a name has a holder; a block's held
 * bits are those of its names; exactly the leaves are in the eviction order.
 */
#ifndef BL_PREFIX_TREE_H
#define BL_PREFIX_TREE_H

#include <pthread.h>

#include "coherence/coherence.h"
#include "index/evict.h"
#include "api/prefix.h"

/* A block is followed by its held bits: a word per 64 ranks, tier after tier. */
typedef struct bl_prefix_block {
    uint64_t local;
    uint64_t path;              /* hash of all locals from the root on */
    uint32_t parent;            /* of a free block: the next free one */
    uint32_t first_name;
    uint32_t name_count;
    uint32_t child_count;
    uint32_t depth;             /* 0: free, or the root */
    uint32_t reserved;
    uint64_t held[];
} bl_prefix_block;

typedef struct bl_prefix_name {
    uint64_t hash;              /* the engine's hash */
    uint32_t block;             /* 0: free */
    uint32_t next;              /* the block's next name; of a free name: the next free one */
    uint64_t held[];
} bl_prefix_name;

/* An open-addressing table. A slot has the tag of its item in the high half and the item's number
 * in the low half; 0 is empty. */
typedef struct bl_prefix_table {
    uint64_t *slot;
    uint64_t mask;              /* slots - 1 */
} bl_prefix_table;

/* Items of one size, numbered from 1. */
typedef struct bl_prefix_room {
    uint8_t *item;
    size_t stride;
    uint32_t max;
    uint32_t top;               /* items from here on were never used */
    uint32_t free;
    uint32_t count;
} bl_prefix_room;

struct bl_prefix {
    pthread_rwlock_t lock;
    bl_prefix_room blocks, names;
    bl_prefix_table block_table, name_table;
    bl_evict *leaves;           /* coldest: stored longest ago */
    uint64_t seed[2];
    uint64_t evicted;
    uint32_t rank_max;
    uint32_t words;             /* words of 64 ranks */
    uint32_t keep;              /* a block that must not be evicted during this call */
    uint64_t *active;           /* ranks that hold anything, a bit each */
    uint64_t *held;             /* [rank][tier]: names */
};

static inline bl_prefix_block *bl_prefix_block_at(const bl_prefix *prefix, uint32_t number)
{
    return (bl_prefix_block *)(prefix->blocks.item + number * prefix->blocks.stride);
}

static inline bl_prefix_name *bl_prefix_name_at(const bl_prefix *prefix, uint32_t number)
{
    return (bl_prefix_name *)(prefix->names.item + number * prefix->names.stride);
}

static inline uint64_t bl_prefix_mix(uint64_t a, uint64_t b)
{
    __extension__ typedef unsigned __int128 wide;
    wide product = (wide)a * b;
    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

static inline uint64_t bl_prefix_path(const bl_prefix *prefix, uint64_t path, uint64_t local)
{
    return bl_prefix_mix(path ^ prefix->seed[0], local ^ prefix->seed[1]);
}

static inline uint32_t bl_prefix_block_tag(uint64_t path) { return (uint32_t)(path >> 32); }

static inline uint32_t bl_prefix_name_tag(const bl_prefix *prefix, uint64_t hash)
{
    return (uint32_t)(bl_prefix_mix(hash ^ prefix->seed[0], prefix->seed[1] | 1) >> 32);
}

static inline const uint64_t *bl_prefix_slot(const bl_prefix_table *table, uint32_t tag)
{
    return &table->slot[tag & table->mask];
}

/* Return the next number with a tag, or 0. *at starts at the tag and moves past the result. */
static inline uint32_t bl_prefix_next(const bl_prefix_table *table, uint32_t tag, uint64_t *at)
{
    for (;; ++*at) {
        uint64_t slot = table->slot[*at & table->mask];
        if (!slot)
            return 0;
        if (slot >> 32 == tag) {
            ++*at;
            return (uint32_t)slot;
        }
    }
}

static inline int bl_prefix_bit(const uint64_t *held, uint32_t words, uint32_t rank, uint32_t tier)
{
    return held[tier * words + rank / 64] >> (rank % 64) & 1;
}

/* Return the tiers in which a rank holds the block, as bits. */
static inline uint32_t bl_prefix_tiers(const uint64_t *held, uint32_t words, uint32_t rank)
{
    uint32_t tiers = 0;
    for (uint32_t tier = 0; tier < BL_PREFIX_TIERS; tier++)
        tiers |= (uint32_t)bl_prefix_bit(held, words, rank, tier) << tier;
    return tiers;
}

/* ---- prefix/prefix_tree.c; the caller holds the lock */

/* Add an item that is not in the table, which has a free slot; remove an item that is in it. */
void bl_prefix_table_add(bl_prefix_table *table, uint32_t tag, uint32_t number);
void bl_prefix_table_remove(bl_prefix_table *table, uint32_t tag, uint32_t number);

/* Return the child with these contents, or 0. */
uint32_t bl_prefix_child(const bl_prefix *prefix, uint32_t parent, uint64_t local);

/* Create a child, which is not evicted during this call. Returns 0 if there is no room. */
uint32_t bl_prefix_grow(bl_prefix *prefix, uint32_t parent, uint64_t local);

/* Remove a block if it has neither names nor children, then its parent, and so on. */
void bl_prefix_settle(bl_prefix *prefix, uint32_t number);

/* Return the rank's name with this hash, or 0. */
uint32_t bl_prefix_name_of(const bl_prefix *prefix, uint32_t rank, uint64_t hash);

/* Make room for one more item by evicting cold leaves, except prefix->keep. */
int bl_prefix_make_room(bl_prefix *prefix, bl_prefix_room *room);

/* Record that a rank holds a block by this name. Returns 1, 0 if it held it already, or -ENOSPC. */
int bl_prefix_take(bl_prefix *prefix, uint32_t rank, uint32_t tier, uint64_t hash, uint32_t block,
                   bl_prefix_outcome *outcome);

/* Record that a rank no longer holds a name in these tiers (a bit each). This may remove the name
 * and the block. Returns in how many of the tiers it was held. */
uint32_t bl_prefix_drop(bl_prefix *prefix, uint32_t number, uint32_t rank, uint32_t tiers);

#endif

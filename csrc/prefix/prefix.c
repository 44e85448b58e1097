/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Creates a prefix tree and applies KV events to it (api/prefix.h).
 */
#include "api/prefix.h"

#include <errno.h>
#include <stdlib.h>

#include "index/hash.h"
#include "base/lazy.h"
#include "base/seed.h"
#include "prefix/prefix_tree.h"

/* ---- Creation and destruction. */

static uint64_t bl_prefix_table_size(const bl_prefix_table *table)
{
    return (table->mask + 1) * sizeof *table->slot;
}

/* At most two thirds of the slots are ever used. */
static int bl_prefix_make(bl_prefix_room *room, bl_prefix_table *table, size_t size, uint32_t max)
{
    uint64_t slots = 4;
    while (slots * 2 < (uint64_t)max * 3)
        slots *= 2;
    room->stride = size;
    room->max = max;
    room->top = 1;
    table->mask = slots - 1;
    room->item = bl_lazy_map_dense(((size_t)max + 1) * size);
    table->slot = bl_lazy_map_dense(bl_prefix_table_size(table));
    return room->item && table->slot ? 0 : -ENOMEM;
}

static void bl_prefix_unmake(bl_prefix_room *room, bl_prefix_table *table)
{
    if (room->item)
        bl_lazy_unmap(room->item, ((size_t)room->max + 1) * room->stride);
    if (table->slot)
        bl_lazy_unmap(table->slot, bl_prefix_table_size(table));
}

static int bl_prefix_fill(bl_prefix *prefix, uint32_t block_max, uint32_t name_max)
{
    size_t bits = BL_PREFIX_TIERS * prefix->words * sizeof(uint64_t);
    size_t ranks = prefix->words * 64ull;
    int rc = bl_hash_seed(prefix->seed);
    if (!rc)
        rc = bl_prefix_make(&prefix->blocks, &prefix->block_table, sizeof(bl_prefix_block) + bits,
                            block_max);
    if (!rc)
        rc = bl_prefix_make(&prefix->names, &prefix->name_table, sizeof(bl_prefix_name) + bits,
                            name_max);
    if (!rc)
        rc = bl_evict_create(&prefix->leaves, block_max + 1, BL_EVICT_LRU);
    prefix->active = calloc(prefix->words, sizeof *prefix->active);
    prefix->held = calloc(ranks * BL_PREFIX_TIERS, sizeof *prefix->held);
    return rc ? rc : prefix->active && prefix->held ? 0 : -ENOMEM;
}

int bl_prefix_create(bl_prefix **out, uint32_t rank_max, uint32_t block_max, uint32_t name_max)
{
    if (rank_max < 1 || rank_max >= BL_PREFIX_RANKS_MAX || block_max < 1 || name_max < 1 ||
        block_max > BL_PREFIX_BLOCKS_MAX || name_max > BL_PREFIX_BLOCKS_MAX)
        return -EINVAL;
    bl_prefix *prefix = calloc(1, sizeof *prefix);
    if (!prefix)
        return -ENOMEM;
    prefix->rank_max = rank_max;
    prefix->words = rank_max / 64 + 1;
    pthread_rwlockattr_t attributes;
    pthread_rwlockattr_init(&attributes);
    /* Prefer writers: a steady stream of lookups must not delay events. */
    pthread_rwlockattr_setkind_np(&attributes, PTHREAD_RWLOCK_PREFER_WRITER_NONRECURSIVE_NP);
    pthread_rwlock_init(&prefix->lock, &attributes);
    pthread_rwlockattr_destroy(&attributes);
    int rc = bl_prefix_fill(prefix, block_max, name_max);
    if (rc)
        bl_prefix_destroy(prefix);
    else
        *out = prefix;
    return rc;
}

void bl_prefix_destroy(bl_prefix *prefix)
{
    if (!prefix)
        return;
    bl_prefix_unmake(&prefix->blocks, &prefix->block_table);
    bl_prefix_unmake(&prefix->names, &prefix->name_table);
    bl_evict_destroy(prefix->leaves);
    free(prefix->active);
    free(prefix->held);
    pthread_rwlock_destroy(&prefix->lock);
    free(prefix);
}

/* ---- Events. */

static int bl_prefix_valid(const bl_prefix *prefix, uint32_t rank, uint32_t tier,
                           uint32_t publisher)
{
    return rank <= prefix->rank_max && tier < BL_PREFIX_TIERS && publisher <= prefix->rank_max &&
           (rank != BL_PREFIX_SHARED || tier == BL_PREFIX_DEVICE);
}

/* Return the block with this name of rank, or else of publisher; or 0. */
static uint32_t bl_prefix_named_block(const bl_prefix *prefix, uint32_t rank, uint32_t publisher,
                                      uint64_t hash)
{
    uint32_t number = bl_prefix_name_of(prefix, rank, hash);
    if (!number && publisher != rank)
        number = bl_prefix_name_of(prefix, publisher, hash);
    return number ? bl_prefix_name_at(prefix, number)->block : 0;
}

/* Record that a rank holds one block by this name. */
static int bl_prefix_add(bl_prefix *prefix, uint32_t rank, uint32_t tier, uint64_t name,
                         uint32_t block, bl_prefix_outcome *outcome)
{
    int rc = bl_prefix_take(prefix, rank, tier, name, block, outcome);
    prefix->keep = 0;
    if (rc < 0)
        bl_prefix_settle(prefix, block);
    else if (rc)
        outcome->stored++;
    else
        outcome->repeated++;
    return rc < 0 ? rc : 0;
}

/* Blocks to prefetch ahead in a run: the slots of blocks and names are scattered over tables of
 * many MiB. */
enum { BL_PREFIX_STORE_AHEAD = 8 };

/* Prefetch the slots of a block with this path, and of its name. */
static void bl_prefix_prefetch(const bl_prefix *prefix, uint64_t path, uint64_t name)
{
    bl_prefetch(bl_prefix_slot(&prefix->block_table, bl_prefix_block_tag(path)));
    bl_prefetch(bl_prefix_slot(&prefix->name_table, bl_prefix_name_tag(prefix, name)));
}

static int bl_prefix_store_locked(bl_prefix *prefix, uint32_t rank, uint32_t tier,
                                  uint32_t publisher, const uint64_t *parent,
                                  const uint64_t *names, const uint64_t *locals, uint32_t count,
                                  bl_prefix_outcome *outcome)
{
    uint32_t at = 0;
    if (parent && !(at = bl_prefix_named_block(prefix, rank, publisher, *parent)))
        return -ENOENT;
    uint64_t path = bl_prefix_block_at(prefix, at)->path;
    uint32_t ahead = 0;
    for (uint32_t i = 0; i < count; i++) {
        for (; ahead < count && ahead <= i + BL_PREFIX_STORE_AHEAD; ahead++) {
            path = bl_prefix_path(prefix, path, locals[ahead]);
            bl_prefix_prefetch(prefix, path, names[ahead]);
        }
        uint32_t child = bl_prefix_child(prefix, at, locals[i]);
        if (!child)
            child = bl_prefix_grow(prefix, at, locals[i]);
        if (!child || bl_prefix_add(prefix, rank, tier, names[i], child, outcome) < 0) {
            prefix->keep = 0;
            outcome->refused += count - i;
            return -ENOSPC;
        }
        at = child;
    }
    return 0;
}

int bl_prefix_store(bl_prefix *prefix, uint32_t rank, uint32_t tier, uint32_t publisher,
                    const uint64_t *parent, const uint64_t *names, const uint64_t *locals,
                    uint32_t count, bl_prefix_outcome *outcome)
{
    if (!bl_prefix_valid(prefix, rank, tier, publisher))
        return -EINVAL;
    for (uint32_t i = 0; parent && i < count; i++)
        if (names[i] == *parent)
            return -EINVAL;
    pthread_rwlock_wrlock(&prefix->lock);
    uint64_t before = prefix->evicted;
    int rc = bl_prefix_store_locked(prefix, rank, tier, publisher, parent, names, locals, count,
                                    outcome);
    outcome->evicted += prefix->evicted - before;
    pthread_rwlock_unlock(&prefix->lock);
    return rc;
}

int bl_prefix_hold(bl_prefix *prefix, uint32_t rank, uint32_t tier, uint32_t publisher,
                   const uint64_t *names, uint32_t count, bl_prefix_outcome *outcome)
{
    if (!bl_prefix_valid(prefix, rank, tier, publisher))
        return -EINVAL;
    int rc = 0;
    pthread_rwlock_wrlock(&prefix->lock);
    uint64_t before = prefix->evicted;
    for (uint32_t i = 0; i < count; i++) {
        uint32_t block = bl_prefix_named_block(prefix, rank, publisher, names[i]);
        if (!block) {
            outcome->unknown++;
        } else if (bl_prefix_add(prefix, rank, tier, names[i], block, outcome) < 0) {
            outcome->refused++;
            rc = -ENOSPC;
        }
    }
    outcome->evicted += prefix->evicted - before;
    pthread_rwlock_unlock(&prefix->lock);
    return rc;
}

int bl_prefix_remove(bl_prefix *prefix, uint32_t rank, uint32_t tier, const uint64_t *names,
                     uint32_t count, bl_prefix_outcome *outcome)
{
    if (!bl_prefix_valid(prefix, rank, tier, rank))
        return -EINVAL;
    pthread_rwlock_wrlock(&prefix->lock);
    for (uint32_t i = 0; i < count; i++) {
        uint32_t number = bl_prefix_name_of(prefix, rank, names[i]);
        uint32_t dropped = number ? bl_prefix_drop(prefix, number, rank, 1u << tier) : 0;
        outcome->removed += dropped;
        outcome->unknown += !dropped;
    }
    pthread_rwlock_unlock(&prefix->lock);
    return 0;
}

int bl_prefix_clear(bl_prefix *prefix, uint32_t rank, bl_prefix_outcome *outcome)
{
    if (!bl_prefix_valid(prefix, rank, BL_PREFIX_DEVICE, rank))
        return -EINVAL;
    pthread_rwlock_wrlock(&prefix->lock);
    const uint64_t *active = &prefix->active[rank / 64];
    for (uint32_t number = 1; number < prefix->names.top; number++) {
        if (!(*active >> (rank % 64) & 1))
            break;
        if (bl_prefix_name_at(prefix, number)->block)
            outcome->removed += bl_prefix_drop(prefix, number, rank, UINT32_MAX);
    }
    pthread_rwlock_unlock(&prefix->lock);
    return 0;
}

/* ---- Queries. */

uint64_t bl_prefix_held(bl_prefix *prefix, uint32_t rank, uint32_t tier)
{
    if (!bl_prefix_valid(prefix, rank, tier, rank))
        return 0;
    pthread_rwlock_rdlock(&prefix->lock);
    uint64_t held = prefix->held[rank * BL_PREFIX_TIERS + tier];
    pthread_rwlock_unlock(&prefix->lock);
    return held;
}

void bl_prefix_stat_read(bl_prefix *prefix, bl_prefix_stat *stat)
{
    pthread_rwlock_rdlock(&prefix->lock);
    *stat = (bl_prefix_stat){prefix->blocks.count, prefix->names.count, prefix->blocks.max,
                             prefix->names.max, prefix->evicted};
    pthread_rwlock_unlock(&prefix->lock);
}

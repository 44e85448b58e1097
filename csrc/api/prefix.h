/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Which worker holds which blocks, according to KV events. Pure: numbers in, numbers out; no pool,
 * no clock. Thread-safe: lookups run in parallel, changes one at a time.
 *
 * A tree of blocks. A block is its content's hash (local) after its parent; an engine names it by
 * its own hash, which is opaque and may differ between ranks. A rank (one data-parallel rank of one
 * engine) holds a block in a tier while one of its names for it does. A block counts for a rank
 * only if all blocks before it do: a block behind a gap stays in the tree, and counts again once
 * the gap is filled, as in the engine.
 *
 * Memory is bounded: beyond block_max or name_max the blocks that were stored longest ago are
 * evicted, deepest first. A hostile event costs its sender as much as it costs the router.
 */
#ifndef BL_PREFIX_H
#define BL_PREFIX_H

#include <stdint.h>

enum bl_prefix_constant {
    BL_PREFIX_DEVICE = 0,       /* tiers, nearest first */
    BL_PREFIX_HOST = 1,
    BL_PREFIX_DISK = 2,
    BL_PREFIX_TIERS = 3,
    BL_PREFIX_SHARED = 0,       /* the rank that is the pool; its only tier is the first */
    BL_PREFIX_RANKS_MAX = 1024,
    BL_PREFIX_BLOCKS_MAX = 1073741824
};

typedef struct bl_prefix bl_prefix;

/* The outcome of a call, in blocks; each call adds to the counts. */
typedef struct bl_prefix_outcome {
    uint64_t stored;            /* newly held */
    uint64_t repeated;          /* held already */
    uint64_t moved;             /* the name was another block's, which is removed */
    uint64_t removed;
    uint64_t unknown;           /* names that the rank does not have, or not in that tier */
    uint64_t evicted;           /* evicted to make room */
    uint64_t refused;           /* no room, even after evicting; or too many names for one block */
} bl_prefix_outcome;

/* Where the runs of a rank's leading blocks end, counted from the first block: each begins where
 * the one before it ended. */
typedef struct bl_prefix_match {
    uint32_t rank;
    uint32_t device;
    uint32_t host;
    uint32_t disk;
    uint32_t shared;
} bl_prefix_match;

/* A block that a rank holds, as a store event would report it. */
typedef struct bl_prefix_row {
    uint64_t name;
    uint64_t parent;            /* the rank's name for the block before, if it has one */
    uint64_t local;
    uint32_t block;             /* numbers of the block and the one before; 0: the root */
    uint32_t before;
    uint32_t depth;             /* 1 for a first block */
    uint32_t tier;
} bl_prefix_row;

typedef struct bl_prefix_stat {
    uint64_t blocks;
    uint64_t names;
    uint64_t block_max;
    uint64_t name_max;
    uint64_t evicted;
} bl_prefix_stat;

/* Create a tree for ranks 0 (shared) to rank_max. -EINVAL, -ENOMEM. */
int bl_prefix_create(bl_prefix **out, uint32_t rank_max, uint32_t block_max, uint32_t name_max);
void bl_prefix_destroy(bl_prefix *prefix);

/* Store a run of blocks after the one that rank, or else speaker, names *parent; NULL: from the
 * root. Returns -EINVAL, with nothing done, if the parent is one of them or a number is too large;
 * -ENOENT if the parent is unknown; -ENOSPC if the rest was refused. */
int bl_prefix_store(bl_prefix *prefix, uint32_t rank, uint32_t tier, uint32_t speaker,
                    const uint64_t *parent, const uint64_t *names, const uint64_t *locals,
                    uint32_t count, bl_prefix_outcome *outcome);

/* Hold blocks of unknown content: those that rank, or else speaker, has names for. */
int bl_prefix_hold(bl_prefix *prefix, uint32_t rank, uint32_t tier, uint32_t speaker,
                   const uint64_t *names, uint32_t count, bl_prefix_outcome *outcome);

int bl_prefix_remove(bl_prefix *prefix, uint32_t rank, uint32_t tier, const uint64_t *names,
                     uint32_t count, bl_prefix_outcome *outcome);

/* Remove all blocks of a rank, in all tiers. */
int bl_prefix_clear(bl_prefix *prefix, uint32_t rank, bl_prefix_outcome *outcome);

/* Return how many names a rank has in a tier. */
uint64_t bl_prefix_held(bl_prefix *prefix, uint32_t rank, uint32_t tier);

/* Find the ranks that hold the first of these blocks in some tier, in order of rank; matches has
 * room for rank_max. Returns how many ranks, and the leading blocks that the pool has. early_exit:
 * stop when only one rank remains; all ends are then lower bounds. */
int bl_prefix_find(bl_prefix *prefix, const uint64_t *locals, uint32_t count, int early_exit,
                   bl_prefix_match *matches, uint32_t *shared);

/* List all blocks of a rank. Returns the number of rows; up to room rows are written, in no
 * order. */
int64_t bl_prefix_dump(bl_prefix *prefix, uint32_t rank, bl_prefix_row *rows, uint64_t room);

/* Make names for blocks whose engine has none: a hash of each block's whole path. They differ
 * between trees. */
void bl_prefix_paths(const bl_prefix *prefix, const uint64_t *locals, uint32_t count,
                     uint64_t *paths);

void bl_prefix_stat_read(bl_prefix *prefix, bl_prefix_stat *stat);

#endif

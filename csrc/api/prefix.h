/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * The prefix tree: which worker holds which blocks, according to KV events. It uses no pool and no
 * clock. Thread-safe: lookups run in parallel, changes one at a time. The Python half is
 * beluga/router/indexer.py.
 *
 * A block is identified by its parent and the hash of its content (local). An engine names it by
 * its own hash, which is opaque and may differ between ranks. A rank (one data-parallel rank of one
 * engine) holds a block in a tier while it holds one of its names there. A block counts for a rank
 * only if the rank holds all blocks before it: a block behind a gap stays in the tree, and counts
 * again once the gap is filled, as in the engine.
 *
 * Memory is bounded: beyond block_max or name_max the blocks that were stored longest ago are
 * evicted, deepest first. Processing a hostile event costs no more than sending it.
 */
#ifndef BL_PREFIX_H
#define BL_PREFIX_H

#include <stdint.h>

enum bl_prefix_constant {
    BL_PREFIX_DEVICE = 0,       /* tiers, nearest first */
    BL_PREFIX_HOST = 1,
    BL_PREFIX_DISK = 2,
    BL_PREFIX_TIERS = 3,
    BL_PREFIX_SHARED = 0,       /* the rank of the shared pool; it has only the first tier */
    BL_PREFIX_RANKS_MAX = 1024,
    BL_PREFIX_BLOCKS_MAX = 1073741824
};

typedef struct bl_prefix bl_prefix;

/* The outcome of a call, in blocks; each call adds to the counts. */
typedef struct bl_prefix_outcome {
    uint64_t stored;            /* newly held */
    uint64_t repeated;          /* held already */
    uint64_t moved;             /* the name belonged to another block, and was taken from it */
    uint64_t removed;
    uint64_t unknown;           /* names that the rank does not have, or not in that tier */
    uint64_t evicted;           /* evicted to make room */
    uint64_t refused;           /* no room, even after evicting; or too many names for one block */
} bl_prefix_outcome;

/* The leading blocks of a rank, as one run for each tier: where each run ends, counted from the
 * first block. A run begins where the one before it ends. */
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
    uint64_t parent;            /* the rank's name for the parent, if it has one */
    uint64_t local;
    uint32_t block;             /* numbers of the block and its parent; 0: the root */
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

/* Create a tree for ranks 0 (the pool) to rank_max. Returns 0, -EINVAL or -ENOMEM. */
int bl_prefix_create(bl_prefix **out, uint32_t rank_max, uint32_t block_max, uint32_t name_max);
void bl_prefix_destroy(bl_prefix *prefix);

/* Store a run of blocks after the block that rank, or else publisher, names *parent; NULL: from the
 * root. Returns 0; -EINVAL, with nothing stored, if the parent is one of the blocks or a number is
 * too large; -ENOENT if the parent is unknown; -ENOSPC if there was no room for all. */
int bl_prefix_store(bl_prefix *prefix, uint32_t rank, uint32_t tier, uint32_t publisher,
                    const uint64_t *parent, const uint64_t *names, const uint64_t *locals,
                    uint32_t count, bl_prefix_outcome *outcome);

/* Add blocks by name only, for an event without contents: those that rank, or else publisher, has
 * names for. */
int bl_prefix_hold(bl_prefix *prefix, uint32_t rank, uint32_t tier, uint32_t publisher,
                   const uint64_t *names, uint32_t count, bl_prefix_outcome *outcome);

int bl_prefix_remove(bl_prefix *prefix, uint32_t rank, uint32_t tier, const uint64_t *names,
                     uint32_t count, bl_prefix_outcome *outcome);

/* Remove all blocks of a rank, in all tiers. */
int bl_prefix_clear(bl_prefix *prefix, uint32_t rank, bl_prefix_outcome *outcome);

/* Return how many names a rank has in a tier. */
uint64_t bl_prefix_held(bl_prefix *prefix, uint32_t rank, uint32_t tier);

/* Find the ranks that hold the first of these blocks in some tier, in order of rank; matches has
 * room for rank_max. Returns the number of ranks; *shared is the number of leading blocks in the
 * pool. With early_exit the search stops when only one rank remains, and all ends are lower
 * bounds. */
int bl_prefix_find(bl_prefix *prefix, const uint64_t *locals, uint32_t count, int early_exit,
                   bl_prefix_match *matches, uint32_t *shared);

/* List all blocks of a rank. Returns the number of rows; up to room rows are written, in no
 * order. */
int64_t bl_prefix_dump(bl_prefix *prefix, uint32_t rank, bl_prefix_row *rows, uint64_t room);

/* Make names for blocks of an engine without hashes of its own: a hash of each block's whole path.
 * They differ between trees. */
void bl_prefix_paths(const bl_prefix *prefix, const uint64_t *locals, uint32_t count,
                     uint64_t *paths);

void bl_prefix_stat_read(bl_prefix *prefix, bl_prefix_stat *stat);

#endif

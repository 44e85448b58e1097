/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Chooses which blocks to evict so that a run of pages becomes free (D8). It changes nothing; the
 * caller evicts only a complete choice, so no eviction is wasted.
 *
 * Blocks are treated as evicted, the coldest first, until there is room; no other choice has an
 * older youngest victim. The place is the start of the resulting run, so that gaps join to its
 * right, and small cold blocks between large ones are evicted with one of them. During a series of
 * requests of one size, the place is on a grid of that size: so a pool that changes to another
 * model becomes full again, in whatever order the old blocks are evicted.
 *
 * The walk is bounded, since the caller's poll loop waits. At the bound, the window with the most
 * bytes of visited blocks is chosen, including its other blocks, if all of these may be evicted.
 */
#ifndef BL_VICTIMS_H
#define BL_VICTIMS_H

#include "space/pages.h"

/* A block, for the search. */
typedef struct bl_resident {
    uint64_t offset;
    uint32_t size;              /* whole pages */
    uint32_t may_go;            /* 1: it may be evicted now */
} bl_resident;

/* Callbacks of the owner of the blocks. They return a block, or -1. */
typedef struct bl_residents {
    void *owner;                /* the first argument of each */
    uint64_t data_offset;
    int64_t (*coldest)(void *owner);
    int64_t (*warmer)(void *owner, uint32_t block);
    int64_t (*first)(void *owner, uint64_t stripe); /* a block that begins in this stripe */
    int64_t (*next)(void *owner, uint32_t block);   /* another one that begins in the same stripe */
    bl_resident (*look)(void *owner, uint32_t block);
} bl_residents;

/* Return the block that begins before offset and ends after it, or -1. */
int64_t bl_resident_across(const bl_residents *residents, uint64_t offset);

typedef struct bl_victims bl_victims;

/* Create the search for up to block_count blocks. Returns 0 or -ENOMEM. */
int bl_victims_create(bl_victims **out, uint32_t block_count);
void bl_victims_destroy(bl_victims *victims);

/* Choose blocks whose eviction frees size bytes at *place; there must be no free run of this size.
 * Returns how many, with *blocks valid until the next call; 0: it is impossible. */
uint32_t bl_victims_choose(bl_victims *victims, const bl_pages *pages,
                           const bl_residents *residents, uint32_t size, const uint32_t **blocks,
                           uint64_t *place);

#endif

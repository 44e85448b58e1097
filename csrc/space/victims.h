/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Chooses which blocks must go so that a run of pages becomes free (D8), and changes nothing: the
 * caller evicts what was chosen, and only then. So nothing is evicted in vain.
 *
 * Blocks are imagined gone, the coldest first, until there is room: no other choice has an older
 * youngest member. The place is the start of the run that appeared, so that gaps join to its right,
 * and small cold blocks between large ones go with one of them. While one size is asked for again
 * and again, the place is on a grid of that size: a pool that goes over to another model is full
 * again, whatever order the old blocks leave in.
 *
 * The walk is bounded, since the caller's poll loop waits. At the bound, the window that has most
 * of the blocks seen so far is taken with its neighbors, if all of these may go.
 */
#ifndef BL_VICTIMS_H
#define BL_VICTIMS_H

#include "space/pages.h"

/* A block as the search sees it. */
typedef struct bl_resident {
    uint64_t offset;
    uint32_t size;              /* whole pages */
    uint32_t may_go;            /* 1: it may be evicted now */
} bl_resident;

/* The blocks that share the pages, and whoever has them. Functions return a block, or -1. */
typedef struct bl_residents {
    void *owner;                /* the first argument of each */
    uint64_t data_offset;
    int64_t (*coldest)(void *owner);
    int64_t (*warmer)(void *owner, uint32_t block);
    int64_t (*first)(void *owner, uint64_t stripe); /* one that begins in this stripe */
    int64_t (*next)(void *owner, uint32_t block);   /* another that begins in the same one */
    bl_resident (*look)(void *owner, uint32_t block);
} bl_residents;

/* Return the block that begins before offset and ends behind it, or -1. */
int64_t bl_resident_across(const bl_residents *residents, uint64_t offset);

typedef struct bl_victims bl_victims;

/* Create the search for up to block_count blocks: 0 or -ENOMEM. */
int bl_victims_create(bl_victims **out, uint32_t block_count);
void bl_victims_destroy(bl_victims *victims);

/* Choose blocks without which size bytes are free at *place, where there is no such run: return how
 * many, with *blocks valid until the next call; or 0: it cannot be done. */
uint32_t bl_victims_choose(bl_victims *victims, const bl_pages *pages,
                           const bl_residents *residents, uint32_t size, const uint32_t **blocks,
                           uint64_t *place);

#endif

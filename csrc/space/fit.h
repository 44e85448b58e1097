/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Computes which stripes an extent should have, in pages, from the set of free stripes.
 *
 * A class has its own grid over the pool: cells of the ideal number of stripes, and a last one with
 * the rest. An extent that fills a cell leaves no gap beside it, so a class fills the stripes that
 * others give back as well as an empty pool, whatever order they come back in.
 */
#ifndef BL_EXTENT_FIT_H
#define BL_EXTENT_FIT_H

#include "base/bitset.h"
#include "format/pool_format.h"

enum {
    BL_STRIPE_PAGES = BL_STRIPE_SIZE / BL_PAGE_SIZE,
    BL_EXTENT_PAGES_MAX = BL_EXTENT_STRIPES_MAX * BL_STRIPE_PAGES,
    /* Blocks of one page fill a stripe with no waste, so their extents have one stripe; an extent
     * of more stripes has fewer blocks: it grows only until it wastes less than one of them. */
    BL_EXTENT_BLOCKS_MAX = BL_STRIPE_PAGES,
    BL_WASTE_IDEAL = 100        /* an ideal extent wastes at most 1 in so many pages */
};

/* So many stripes as an extent for blocks of one class. */
typedef struct bl_fit_part {
    uint32_t stripe_count;
    uint32_t block_count;
    uint32_t waste;             /* pages that no block uses */
} bl_fit_part;

static inline bl_fit_part bl_fit_of(uint32_t block_pages, uint32_t stripe_count)
{
    uint32_t pages = stripe_count * BL_STRIPE_PAGES, blocks = pages / block_pages;
    if (blocks > BL_EXTENT_BLOCKS_MAX)
        blocks = BL_EXTENT_BLOCKS_MAX;
    return (bl_fit_part){stripe_count, blocks, pages - blocks * block_pages};
}

/* Does a waste a smaller share than b? */
static inline int bl_fit_better(bl_fit_part a, bl_fit_part b)
{
    return (uint64_t)a.waste * b.stripe_count < (uint64_t)b.waste * a.stripe_count;
}

/* Find the fewest stripes that waste at most 1 in BL_WASTE_IDEAL, else those that waste least. */
static inline bl_fit_part bl_fit_ideal(uint32_t block_pages)
{
    bl_fit_part best = bl_fit_of(block_pages, BL_EXTENT_STRIPES_MAX);
    for (uint32_t stripes = 1; stripes <= BL_EXTENT_STRIPES_MAX; stripes++) {
        bl_fit_part part = bl_fit_of(block_pages, stripes);
        if (part.waste * BL_WASTE_IDEAL <= stripes * BL_STRIPE_PAGES)
            return part;
        if (bl_fit_better(part, best))
            best = part;
    }
    return best;
}

/* Stripes found for an extent; no blocks: nothing found. */
typedef struct bl_run {
    uint64_t first;
    bl_fit_part part;
} bl_run;

/* Cut a run to the stripes that blocks touch: an extent need not have those behind them. */
static inline bl_run bl_run_make(uint32_t block_pages, uint64_t first, uint64_t end)
{
    uint32_t pages = bl_fit_of(block_pages, (uint32_t)(end - first)).block_count * block_pages;
    uint32_t stripes = (pages + BL_STRIPE_PAGES - 1) / BL_STRIPE_PAGES;
    return (bl_run){first, bl_fit_of(block_pages, stripes)};
}

/* Find the lowest cell at or after from that is free and holds a block. */
static inline bl_run bl_run_cell(const bl_bitset *free, uint64_t stripe_count, uint32_t block_pages,
                                 uint64_t from)
{
    uint64_t size = bl_fit_ideal(block_pages).stripe_count;
    while ((from = bl_bitset_next(free, from)) != BL_BITSET_NONE) {
        uint64_t first = (from + size - 1) / size * size;
        uint64_t end = first + size < stripe_count ? first + size : stripe_count;
        if (first >= end)
            break;
        from = bl_bitset_row_end(free, first, end);
        if (from == end)
            return bl_run_make(block_pages, first, end);
    }
    return (bl_run){0, {0, 0, 0}};
}

/* Find the free run that blocks fill best, wherever it lies. Longer runs are looked at in
 * pieces. */
static inline bl_run bl_run_any(const bl_bitset *free, uint64_t stripe_count, uint32_t block_pages)
{
    bl_run best = {0, {0, 0, 0}};
    uint64_t first, end = 0;
    while ((first = bl_bitset_next(free, end)) != BL_BITSET_NONE) {
        end = first + BL_EXTENT_STRIPES_MAX;
        end = bl_bitset_row_end(free, first, end < stripe_count ? end : stripe_count);
        bl_fit_part part = bl_fit_of(block_pages, (uint32_t)(end - first));
        if (part.block_count && (!best.part.block_count || bl_fit_better(part, best.part)))
            best = (bl_run){first, part};
    }
    if (!best.part.block_count)
        return best;
    return bl_run_make(block_pages, best.first, best.first + best.part.stripe_count);
}

#endif

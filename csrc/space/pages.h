/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Allocates space in pages (D8). It uses DRAM only, and has no pool access, clock or eviction.
 *
 * A block is a run of pages of any length at any place: it may cross stripes and extents. A page is
 * free, used, or held: a held page may still be written by a process that is not proven gone, so it
 * is not allocated (quarantine). A lost stripe never has free pages again. The caller tracks the
 * owners of runs; a call with a page in the wrong state changes nothing.
 *
 * A tree over the stripes finds the lowest free run that is long enough: each node has its longest
 * free run, and the free runs at its two ends.
 *
 * Offsets and sizes are in bytes and whole pages. Offsets are those of the pool or file: the first
 * stripe begins at data_offset.
 */
#ifndef BL_PAGES_H
#define BL_PAGES_H

#include "format/block_limit.h"
#include "format/pool_format.h"

typedef struct bl_pages bl_pages;

enum { BL_STRIPE_PAGES = BL_STRIPE_SIZE / BL_PAGE_SIZE };

typedef struct bl_pages_stat {
    uint64_t stripe_count;
    uint64_t free_stripe_count; /* entirely free stripes */
    uint64_t lost_stripe_count;
    uint64_t used_bytes;
    uint64_t held_bytes;
    uint64_t free_run_bytes;    /* the longest free run, at most BL_BLOCK_SIZE_MAX */
} bl_pages_stat;

/* Return the size of the run for a block of this many bytes; 0 if bytes is 0 or too large. */
uint32_t bl_block_size(uint64_t bytes);

/* Create the allocator, with every page free. Returns 0, -ENOMEM, or -EINVAL: the number of stripes
 * exceeds 32 bits. */
int bl_pages_create(bl_pages **out, uint64_t data_offset, uint64_t stripe_count);
void bl_pages_destroy(bl_pages *pages);

/* Find the lowest free run of size bytes. Returns 0 or -EAGAIN. */
int bl_pages_find(bl_pages *pages, uint32_t size, uint64_t *offset);

/* Turn free pages into used ones. Returns 0, -EEXIST (one of them is not free) or -EINVAL (outside
 * the stripes). */
int bl_pages_take(bl_pages *pages, uint64_t offset, uint32_t size);

/* Turn used pages into free ones, used into held ones, or held into free ones. Returns 0 or
 * -EINVAL. */
int bl_pages_give(bl_pages *pages, uint64_t offset, uint32_t size);
int bl_pages_hold(bl_pages *pages, uint64_t offset, uint32_t size);
int bl_pages_unhold(bl_pages *pages, uint64_t offset, uint32_t size);

/* Brackets around many changes: the tree is updated in bl_pages_settle(), or when a search needs
 * it. Until then only bl_pages_count() may return old values. */
void bl_pages_defer(bl_pages *pages);
void bl_pages_settle(bl_pages *pages);

/* Prefetch what bl_pages_take needs. */
void bl_pages_prefetch(const bl_pages *pages, uint64_t offset);

/* Remove these stripes' free pages permanently. */
void bl_pages_lose(bl_pages *pages, uint64_t first_stripe, uint64_t stripe_count);

/* Turn every free page of these stripes into a held one (after a takeover, when unknown writers may
 * still be active), or every held page of all stripes into a free one (after all those writers are
 * proven gone). */
void bl_pages_hold_free(bl_pages *pages, uint64_t first_stripe, uint64_t stripe_count);
void bl_pages_unhold_all(bl_pages *pages);

/* Find the first held page from *offset on. Returns 0, with the run of held pages that begins
 * there, cut at the end of its stripe; or -ENOENT. */
int bl_pages_next_held(const bl_pages *pages, uint64_t *offset, uint32_t *size);

/* Return the bytes of the free run that ends at offset, or that begins there. */
uint64_t bl_pages_free_before(const bl_pages *pages, uint64_t offset);
uint64_t bl_pages_free_after(const bl_pages *pages, uint64_t offset);

/* Return the free bytes in a range. */
uint64_t bl_pages_free_within(const bl_pages *pages, uint64_t offset, uint64_t size);

/* Return 1 if all pages of these stripes are free or lost. */
int bl_pages_idle(const bl_pages *pages, uint64_t first_stripe, uint64_t stripe_count);

/* Return the used and the held bytes of a stripe. Any thread may call this. */
void bl_pages_of_stripe(const bl_pages *pages, uint64_t stripe, uint32_t *used, uint32_t *held);

void bl_pages_count(const bl_pages *pages, bl_pages_stat *out);

#endif

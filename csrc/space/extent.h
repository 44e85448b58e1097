/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Allocates space: data stripes -> extents -> equal blocks (D8). It uses the server's DRAM only; it
 * has no pool access, no clock and no eviction: index/meta.c decides when to open, empty and close.
 *
 * A class is a block size, a multiple of a page, made on first use. An extent is a run of stripes
 * carved into blocks of one class. A block is free, used, or held: held space may still be written
 * by a process that is not proven gone, and is given to nobody (quarantine).
 *
 * Invariants: extents do not overlap; free + used + held blocks of an extent = block_count; stripes
 * in no extent are free; a class's lowest free block is given first; an extent that is retired
 * keeps its stripes and gives nothing.
 */
#ifndef BL_EXTENT_H
#define BL_EXTENT_H

#include "format/pool_format.h"

typedef struct bl_extents bl_extents;

/* An extent as callers see it. */
typedef struct bl_extent_view {
    uint64_t generation;        /* chosen by the caller, kept for it */
    uint32_t first_stripe;
    uint32_t stripe_count;
    uint32_t block_size;
    uint32_t block_count;
    uint32_t free_count;
    uint32_t held_count;
    uint32_t retired;           /* 1: it gives no blocks any more */
} bl_extent_view;

typedef struct bl_extents_stat {
    uint64_t stripe_count;
    uint64_t free_stripe_count;
    uint64_t extent_count;
    uint64_t class_count;
    uint64_t used_bytes;        /* block_size of every used block */
    uint64_t held_bytes;
    uint64_t retired_stripe_count;
} bl_extents_stat;

/* How choosy bl_extents_open is. A class has a grid of its own over the stripes: cells of the
 * fewest stripes that waste at most 1 % of them (or that waste least, if no number up to
 * BL_EXTENT_STRIPES_MAX does); the last cell is what is left. GOOD: the lowest cell that is free.
 * So extents leave no gaps between them, and a class that gets every stripe fills the pool equally
 * well whatever order they come in. ANY: else the free run that blocks fill best, anywhere. */
enum bl_fit { BL_FIT_GOOD = 1, BL_FIT_ANY = 2 };

/* Return the page-rounded size of the class that blocks of bytes belong to; 0 if bytes is 0 or too
 * large (an extent has at most BL_EXTENT_STRIPES_MAX stripes). */
uint32_t bl_block_size(uint64_t bytes);

/* Create the allocator: 0, -ENOMEM, or -EINVAL: more stripes than 32 bits count. data_offset is
 * that of stripe 0. */
int bl_extents_create(bl_extents **out, uint64_t data_offset, uint64_t stripe_count);
void bl_extents_destroy(bl_extents *extents);

/* Take a free block of the class, lowest offset first: 0; -EAGAIN: open an extent or empty one
 * first. The block is used until bl_extents_give or bl_extents_hold. */
int bl_extents_take(bl_extents *extents, uint32_t block_size, uint64_t *offset);

/* Make an extent of free stripes: 0; -EAGAIN: no run fits; -E2BIG: BL_CLASS_COUNT_MAX classes are
 * in use (a class with no extents left is not in use); -EINVAL: not a block size. */
int bl_extents_open(bl_extents *extents, uint32_t block_size, enum bl_fit fit, uint64_t generation,
                    bl_extent_view *out);

/* Find the class's cell that has this offset, free or not: once the extents that reach into it are
 * closed, GOOD finds room there. 0, or -EINVAL. */
int bl_extents_cell(const bl_extents *extents, uint32_t block_size, uint64_t offset,
                    uint32_t *first_stripe, uint32_t *stripe_count);

/* Make a used block free again: 0, or -EINVAL: no used block starts there. */
int bl_extents_give(bl_extents *extents, uint64_t offset);

/* Make a used block held: 0 or -EINVAL. */
int bl_extents_hold(bl_extents *extents, uint64_t offset);

/* Make a held block free: 0 or -EINVAL. */
int bl_extents_unhold(bl_extents *extents, uint64_t offset);

/* Make every free block of every extent held (after a takeover, when nobody knows who still writes
 * where), or every held block free (when all those writers are proven gone). */
void bl_extents_hold_free(bl_extents *extents);
void bl_extents_unhold_all(bl_extents *extents);

/* Find the first held block that starts at or behind *offset of the data stripes: 0, with its place
 * and size; or -ENOENT. */
int bl_extents_next_held(const bl_extents *extents, uint64_t *offset, uint32_t *size);

/* Free the stripes of an extent without used or held blocks: 0, -EBUSY (one that is retired always
 * is), -EINVAL. */
int bl_extents_close(bl_extents *extents, uint32_t first_stripe);

/* Retire an extent, which gives no block any more and is never closed: 0 or -EINVAL. */
int bl_extents_retire(bl_extents *extents, uint32_t first_stripe);

/* Find the extent that has this offset: 0 or -ENOENT; or only its first stripe or -ENOENT. */
int bl_extents_at(const bl_extents *extents, uint64_t offset, bl_extent_view *out);
int64_t bl_extents_first_at(const bl_extents *extents, uint64_t offset);

/* Find the first extent with first_stripe >= stripe, to walk over all: 0 or -ENOENT. */
int bl_extents_next(const bl_extents *extents, uint64_t stripe, bl_extent_view *out);

/* Find the first extent with first_stripe >= stripe that has no used and no held block: 0 or
 * -ENOENT. Only extents with a free block are searched. */
int bl_extents_next_empty(const bl_extents *extents, uint64_t stripe, bl_extent_view *out);

/* Recovery: take over an extent as it was, with all blocks free; the view's free and held counts
 * are ignored. 0, -EINVAL (contradictory), -EEXIST (overlap), -E2BIG (classes). */
int bl_extents_adopt(bl_extents *extents, const bl_extent_view *view);

/* Recovery: mark the free block of this class that starts at offset as used: 0, -EINVAL (no block
 * of that class starts there, or it is retired), -EEXIST (used or held already). */
int bl_extents_claim(bl_extents *extents, uint64_t offset, uint32_t block_size);

/* Recovery: mark a block as used whose extent is there, or is adopted now: 0, -EINVAL, -EEXIST or
 * -E2BIG, as those say. */
int bl_extents_restore(bl_extents *extents, uint32_t first_stripe, uint32_t stripe_count,
                       uint32_t block_size, uint32_t block_index);

/* Prefetch the bookkeeping of the block at this offset, which is claimed soon. */
void bl_extents_prefetch(const bl_extents *extents, uint64_t offset);

void bl_extents_count(const bl_extents *extents, bl_extents_stat *out);

#endif

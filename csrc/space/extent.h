/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Space: data stripes -> extents -> equal blocks (D8). The server's DRAM only; no pool access, no
 * clock, no eviction: index/meta.c decides when to open, empty and close.
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

/* What an extent looks like from outside. */
typedef struct bl_extent_view {
    uint64_t generation;        /* given by the caller, kept for it */
    uint32_t first_stripe;
    uint32_t stripe_count;
    uint32_t block_size;
    uint32_t block_count;
    uint32_t free_count;
    uint32_t held_count;
    uint32_t retired;           /* 1: gives no blocks any more */
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

/* The page-rounded size of the class that blocks of bytes belong to; 0 if too large (an extent has
 * at most BL_EXTENT_STRIPES_MAX stripes) or bytes is 0. */
uint32_t bl_block_size(uint64_t bytes);

/* 0, -ENOMEM, or -EINVAL: more stripes than 32 bits count. data_offset: of stripe 0. */
int bl_extents_create(bl_extents **out, uint64_t data_offset, uint64_t stripe_count);
void bl_extents_destroy(bl_extents *extents);

/* A free block of the class, lowest offset first: 0; -EAGAIN: open an extent or empty one first.
 * It is used until bl_extents_give or bl_extents_hold. */
int bl_extents_take(bl_extents *extents, uint32_t block_size, uint64_t *offset);

/* Make an extent of free stripes: 0; -EAGAIN: no run fits; -E2BIG: BL_CLASS_COUNT_MAX classes are
 * in use (a class with no extents left is not in use); -EINVAL: not a block size. */
int bl_extents_open(bl_extents *extents, uint32_t block_size, enum bl_fit fit, uint64_t generation,
                    bl_extent_view *out);

/* The class's cell that has this offset, free or not: once the extents that reach into it are
 * closed, GOOD finds room there. 0, or -EINVAL. */
int bl_extents_cell(const bl_extents *extents, uint32_t block_size, uint64_t offset,
                    uint32_t *first_stripe, uint32_t *stripe_count);

/* A used block is free again. 0, or -EINVAL: no used block starts there. */
int bl_extents_give(bl_extents *extents, uint64_t offset);

/* A used block becomes held: 0 or -EINVAL. */
int bl_extents_hold(bl_extents *extents, uint64_t offset);

/* A held block becomes free: 0 or -EINVAL. */
int bl_extents_unhold(bl_extents *extents, uint64_t offset);

/* Every free block of every extent becomes held / every held block becomes free (after a takeover,
 * when nobody knows who still writes where / when all of them are proven gone). */
void bl_extents_hold_free(bl_extents *extents);
void bl_extents_unhold_all(bl_extents *extents);

/* The first held block that starts at *offset of the data stripes or behind it: 0, where, and its
 * size; or -ENOENT. */
int bl_extents_next_held(const bl_extents *extents, uint64_t *offset, uint32_t *size);

/* The stripes of an extent without used or held blocks are free again: 0, -EBUSY (one that is
 * retired always is), -EINVAL. */
int bl_extents_close(bl_extents *extents, uint32_t first_stripe);

/* An extent gives no block any more and is never closed: 0 or -EINVAL. */
int bl_extents_retire(bl_extents *extents, uint32_t first_stripe);

/* The extent that has this offset: 0 or -ENOENT; its first stripe or -ENOENT. */
int bl_extents_at(const bl_extents *extents, uint64_t offset, bl_extent_view *out);
int64_t bl_extents_first_at(const bl_extents *extents, uint64_t offset);

/* The first extent with first_stripe >= stripe: 0 or -ENOENT. To walk over all. */
int bl_extents_next(const bl_extents *extents, uint64_t stripe, bl_extent_view *out);

/* The first extent with first_stripe >= stripe that nothing is used or held in: 0 or -ENOENT. It
 * looks at those with a free block alone. */
int bl_extents_next_empty(const bl_extents *extents, uint64_t stripe, bl_extent_view *out);

/* Recovery: an extent as it was, all blocks free; the view's free and held counts are not looked
 * at. 0, -EINVAL (nonsense), -EEXIST (overlap), -E2BIG (classes). */
int bl_extents_adopt(bl_extents *extents, const bl_extent_view *view);

/* Recovery: the free block that starts at offset, of this class, is used: 0, -EINVAL (no block of
 * that class starts there, or it is retired), -EEXIST (used or held already). */
int bl_extents_claim(bl_extents *extents, uint64_t offset, uint32_t block_size);

/* Ask for the memory of what has this offset, which is claimed soon. */
void bl_extents_prefetch(const bl_extents *extents, uint64_t offset);

void bl_extents_count(const bl_extents *extents, bl_extents_stat *out);

#endif

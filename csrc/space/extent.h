/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Which stripes are open (D5, D8). Blocks lie anywhere in open stripes. Stripes are opened before
 * space in them is granted: the pool has a mark for every extent, and a successor assumes that all
 * open space may have been written. An extent is thus not a unit of allocation, but the stripes
 * that one mark opens.
 *
 * New extents are aligned groups of a few stripes. Extents adopted from a predecessor may be any
 * run: servers of earlier releases had extents for each size of blocks.
 *
 * Invariants: extents do not overlap; stripes in no extent are closed; a retired extent is never
 * closed.
 */
#ifndef BL_EXTENT_H
#define BL_EXTENT_H

#include "format/pool_format.h"

typedef struct bl_extents bl_extents;

/* A copy of an extent for callers. */
typedef struct bl_extent_view {
    uint64_t generation;        /* set by the caller, not used here */
    uint32_t first_stripe;
    uint32_t stripe_count;
    uint32_t retired;           /* 1: its memory failed */
} bl_extent_view;

/* Create the extents, with every stripe closed. Returns 0, -ENOMEM, or -EINVAL: the number of
 * stripes exceeds 32 bits. */
int bl_extents_create(bl_extents **out, uint64_t stripe_count);
void bl_extents_destroy(bl_extents *extents);

/* Open the run of closed stripes around one within its group. Returns 0, -EEXIST (it is open) or
 * -EINVAL. */
int bl_extents_open(bl_extents *extents, uint64_t stripe, uint64_t generation, bl_extent_view *out);

/* Close an extent. Returns 0, -EBUSY (retired) or -EINVAL (no extent begins there). */
int bl_extents_close(bl_extents *extents, uint64_t first_stripe);

/* Retire an extent, whose memory failed. Returns 0 or -EINVAL. */
int bl_extents_retire(bl_extents *extents, uint64_t first_stripe);

/* Recovery: add a predecessor's extent. Returns 0, -EINVAL (no such stripes) or -EEXIST
 * (overlap). */
int bl_extents_adopt(bl_extents *extents, const bl_extent_view *view);

/* Find the extent that has this stripe. Returns 0 or -ENOENT. */
int bl_extents_at(const bl_extents *extents, uint64_t stripe, bl_extent_view *out);

/* Find the first extent with first_stripe >= stripe, to iterate over all. Returns 0 or -ENOENT. */
int bl_extents_next(const bl_extents *extents, uint64_t stripe, bl_extent_view *out);

/* Find the first closed stripe in a range. Returns the stripe, or -ENOENT. */
int64_t bl_extents_closed(const bl_extents *extents, uint64_t first_stripe, uint64_t stripe_count);

/* Return 1 if all of these stripes are in extents that are not retired. */
int bl_extents_cover(const bl_extents *extents, uint64_t first_stripe, uint64_t stripe_count);

uint64_t bl_extents_count(const bl_extents *extents);

#endif

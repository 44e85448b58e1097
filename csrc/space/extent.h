/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Which stripes are open (D5, D8). Blocks lie anywhere in open stripes, and space is opened before
 * it is granted: the pool has a mark for every extent, and a successor takes for written whatever
 * the marks call open. So an extent is no unit of allocation: it says how much one mark opens.
 *
 * An extent that is opened here is an aligned group of a few stripes. Extents that are adopted from
 * a predecessor may be any run: a server of an earlier release had one for each size of blocks.
 *
 * Invariants: extents do not overlap; stripes in no extent are closed; an extent that is retired
 * stays for ever.
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
    uint32_t retired;           /* 1: its memory failed */
} bl_extent_view;

/* Create the extents, with every stripe closed: 0, -ENOMEM, or -EINVAL: more stripes than 32 bits
 * count. */
int bl_extents_create(bl_extents **out, uint64_t stripe_count);
void bl_extents_destroy(bl_extents *extents);

/* Open the closed stripes around one: as much of its group as is closed. 0, -EEXIST (it is open),
 * -EINVAL. */
int bl_extents_open(bl_extents *extents, uint64_t stripe, uint64_t generation, bl_extent_view *out);

/* Close an extent: 0, -EBUSY (retired), -EINVAL (no extent begins there). */
int bl_extents_close(bl_extents *extents, uint64_t first_stripe);

/* Note that an extent's memory failed: 0 or -EINVAL. */
int bl_extents_retire(bl_extents *extents, uint64_t first_stripe);

/* Recovery: take over an extent as it was: 0, -EINVAL (no such stripes), -EEXIST (overlap). */
int bl_extents_adopt(bl_extents *extents, const bl_extent_view *view);

/* Find the extent that has this stripe: 0 or -ENOENT. */
int bl_extents_at(const bl_extents *extents, uint64_t stripe, bl_extent_view *out);

/* Find the first extent with first_stripe >= stripe, to walk over all: 0 or -ENOENT. */
int bl_extents_next(const bl_extents *extents, uint64_t stripe, bl_extent_view *out);

/* Find the first closed stripe of these: the stripe, or -ENOENT. */
int64_t bl_extents_closed(const bl_extents *extents, uint64_t first_stripe, uint64_t stripe_count);

/* Are all of these stripes in extents that are not retired? */
int bl_extents_cover(const bl_extents *extents, uint64_t first_stripe, uint64_t stripe_count);

uint64_t bl_extents_count(const bl_extents *extents);

#endif

/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * What space/extent.c and space/extent_block.c share: arrays with one element per stripe, of which
 * only what is in use costs memory, and sets of stripes for the questions that are asked often.
 */
#ifndef BL_EXTENT_TABLE_H
#define BL_EXTENT_TABLE_H

#include "base/bitset.h"
#include "space/extent.h"
#include "space/fit.h"

enum { BL_EXTENT_WORDS = BL_EXTENT_BLOCKS_MAX / 64 };

typedef struct bl_extent {
    uint64_t generation;
    uint32_t block_size;
    uint16_t block_count;
    uint16_t free_count;
    uint16_t held_count;
    uint8_t stripe_count;
    uint8_t class_index;
    uint8_t retired;
} bl_extent;

typedef struct bl_class {
    uint32_t block_size;        /* 0: never used */
    uint32_t extent_count;      /* 0: another class may have this place */
    uint64_t barren;            /* no free cell begins below this stripe */
    bl_bitset roomy;            /* first stripes of extents with a free block to give */
} bl_class;

struct bl_extents {
    uint64_t data_offset;
    uint64_t stripe_count;
    bl_extent *extent;          /* by first stripe */
    uint64_t *free_bits;        /* a bit per block of an extent, see bl_extent_word() */
    uint64_t *held_bits;        /* likewise; in neither: used */
    uint8_t *back;              /* by stripe: 0: free, else 1 + its place in its extent */
    bl_bitset free;             /* stripes in no extent */
    bl_bitset first;            /* first stripes of extents */
    bl_class class[BL_CLASS_COUNT_MAX];
    void *table;
    size_t table_size;
    uint64_t free_stripe_count;
    uint64_t extent_count;
    uint64_t used_bytes;
    uint64_t held_bytes;
    uint64_t retired_stripe_count;
};

/* The first stripe of the extent that has the stripe of offset, or BL_BITSET_NONE. */
static inline uint64_t bl_extents_first(const bl_extents *extents, uint64_t offset)
{
    uint64_t stripe = (offset - extents->data_offset) / BL_STRIPE_SIZE;
    if (offset < extents->data_offset || stripe >= extents->stripe_count || !extents->back[stripe])
        return BL_BITSET_NONE;
    return stripe + 1 - extents->back[stripe];
}

/* A word of an extent's bits in free_bits or held_bits. The first words of all extents lie
 * together, then the second ones: extents of large blocks have no other, and memory that nobody
 * touches costs nothing. */
static inline uint64_t *bl_extent_word(const bl_extents *extents, uint64_t *bits, uint64_t first,
                                       uint32_t word)
{
    return &bits[word * extents->stripe_count + first];
}

static inline bl_class *bl_class_find(bl_extents *extents, uint32_t block_size)
{
    for (uint32_t class = 0; class < BL_CLASS_COUNT_MAX; class++)
        if (extents->class[class].block_size == block_size)
            return &extents->class[class];
    return NULL;
}

#endif

/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * The blocks of extents: who has which. Every change of a block's state goes through one function,
 * so that the counts and the set of roomy extents agree with the bits.
 */
#include "space/extent.h"

#include <errno.h>

#include "coherence/coherence.h"
#include "space/table.h"

enum bl_space_state { BL_SPACE_NONE, BL_SPACE_FREE, BL_SPACE_USED, BL_SPACE_HELD };

typedef struct bl_space {
    bl_extent *extent;
    uint32_t index;
    enum bl_space_state state;  /* NONE: no block of an extent starts there */
} bl_space;

static bl_space bl_space_at(bl_extents *extents, uint64_t offset)
{
    bl_space none = {NULL, 0, BL_SPACE_NONE};
    uint64_t first = bl_extents_first(extents, offset);
    if (first == BL_BITSET_NONE)
        return none;
    bl_extent *extent = &extents->extent[first];
    uint64_t inside = offset - extents->data_offset - first * BL_STRIPE_SIZE;
    uint32_t index = (uint32_t)(inside / extent->block_size);
    if (inside % extent->block_size || index >= extent->block_count)
        return none;
    uint64_t bit = 1ull << (index % 64);
    if (*bl_extent_word(extents, extents->free_bits, first, index / 64) & bit)
        return (bl_space){extent, index, BL_SPACE_FREE};
    int held = (*bl_extent_word(extents, extents->held_bits, first, index / 64) & bit) != 0;
    return (bl_space){extent, index, held ? BL_SPACE_HELD : BL_SPACE_USED};
}

/* All that changes when a block changes its state. */
static void bl_space_become(bl_extents *extents, bl_space space, enum bl_space_state state)
{
    bl_extent *extent = space.extent;
    bl_class *class = &extents->class[extent->class_index];
    uint64_t first = (uint64_t)(extent - extents->extent);
    uint64_t *free = bl_extent_word(extents, extents->free_bits, first, space.index / 64);
    uint64_t *held = bl_extent_word(extents, extents->held_bits, first, space.index / 64);
    uint64_t bit = 1ull << (space.index % 64);
    *free &= ~bit;
    if (*held) /* a word that was never written stays without memory */
        *held &= ~bit;
    extent->free_count -= space.state == BL_SPACE_FREE;
    extent->held_count -= space.state == BL_SPACE_HELD;
    extents->held_bytes -= space.state == BL_SPACE_HELD ? extent->block_size : 0;
    extents->used_bytes -= space.state == BL_SPACE_USED ? extent->block_size : 0;
    if (state == BL_SPACE_FREE) {
        *free |= bit;
        extent->free_count++;
        if (!extent->retired)
            bl_bitset_add(&class->roomy, first);
    } else if (extent->free_count == 0) {
        bl_bitset_remove(&class->roomy, first);
    }
    if (state == BL_SPACE_HELD) {
        *held |= bit;
        extent->held_count++;
        extents->held_bytes += extent->block_size;
    }
    extents->used_bytes += state == BL_SPACE_USED ? extent->block_size : 0;
}

static int bl_space_turn(bl_extents *extents, uint64_t offset, enum bl_space_state from,
                         enum bl_space_state to)
{
    bl_space space = bl_space_at(extents, offset);
    if (space.state != from)
        return -EINVAL;
    bl_space_become(extents, space, to);
    return 0;
}

int bl_extents_take(bl_extents *extents, uint32_t block_size, uint64_t *offset)
{
    bl_class *class = block_size ? bl_class_find(extents, block_size) : NULL;
    uint64_t first = class ? bl_bitset_next(&class->roomy, 0) : BL_BITSET_NONE;
    if (first == BL_BITSET_NONE)
        return -EAGAIN;
    bl_extent *extent = &extents->extent[first];
    uint32_t word = 0;
    while (!*bl_extent_word(extents, extents->free_bits, first, word))
        word++;
    uint32_t index = word * 64 + (uint32_t)__builtin_ctzll(*bl_extent_word(
                                     extents, extents->free_bits, first, word));
    bl_space_become(extents, (bl_space){extent, index, BL_SPACE_FREE}, BL_SPACE_USED);
    *offset = extents->data_offset + first * BL_STRIPE_SIZE + (uint64_t)index * block_size;
    return 0;
}

int bl_extents_give(bl_extents *extents, uint64_t offset)
{
    return bl_space_turn(extents, offset, BL_SPACE_USED, BL_SPACE_FREE);
}

int bl_extents_hold(bl_extents *extents, uint64_t offset)
{
    return bl_space_turn(extents, offset, BL_SPACE_USED, BL_SPACE_HELD);
}

int bl_extents_unhold(bl_extents *extents, uint64_t offset)
{
    return bl_space_turn(extents, offset, BL_SPACE_HELD, BL_SPACE_FREE);
}

int bl_extents_claim(bl_extents *extents, uint64_t offset, uint32_t block_size)
{
    bl_space space = bl_space_at(extents, offset);
    if (space.state == BL_SPACE_NONE || space.extent->block_size != block_size ||
        space.extent->retired)
        return -EINVAL;
    if (space.state != BL_SPACE_FREE)
        return -EEXIST;
    bl_space_become(extents, space, BL_SPACE_USED);
    return 0;
}

void bl_extents_prefetch(const bl_extents *extents, uint64_t offset)
{
    uint64_t first = bl_extents_first(extents, offset);
    if (first == BL_BITSET_NONE)
        return;
    bl_prefetch(&extents->extent[first]);
    bl_prefetch(bl_extent_word(extents, extents->free_bits, first, 0));
}

/* Every block of one state takes another. */
static void bl_extents_turn_all(bl_extents *extents, enum bl_space_state from,
                                enum bl_space_state to)
{
    for (uint64_t first = bl_bitset_next(&extents->first, 0); first != BL_BITSET_NONE;
         first = bl_bitset_next(&extents->first, first + 1)) {
        bl_extent *extent = &extents->extent[first];
        uint64_t *bits = from == BL_SPACE_FREE ? extents->free_bits : extents->held_bits;
        for (uint32_t word = 0; word * 64 < extent->block_count; word++) {
            const uint64_t *set = bl_extent_word(extents, bits, first, word);
            while (*set) {
                uint32_t index = word * 64 + (uint32_t)__builtin_ctzll(*set);
                bl_space_become(extents, (bl_space){extent, index, from}, to);
            }
        }
    }
}

void bl_extents_hold_free(bl_extents *extents)
{
    bl_extents_turn_all(extents, BL_SPACE_FREE, BL_SPACE_HELD);
}

int bl_extents_next_held(const bl_extents *extents, uint64_t *offset, uint32_t *size)
{
    bl_extent_view view;
    uint64_t from = *offset - extents->data_offset;
    int64_t at = bl_extents_first_at(extents, *offset);
    for (uint64_t stripe = at < 0 ? from / BL_STRIPE_SIZE : (uint64_t)at;
         bl_extents_next(extents, stripe, &view) == 0;
         stripe = (uint64_t)view.first_stripe + view.stripe_count) {
        uint64_t first = view.first_stripe, start = first * BL_STRIPE_SIZE;
        uint64_t index = from > start ? (from - start + view.block_size - 1) / view.block_size : 0;
        for (; view.held_count > 0 && index < view.block_count; index++)
            if (*bl_extent_word(extents, extents->held_bits, first, (uint32_t)(index / 64)) >>
                    (index % 64) & 1) {
                *offset = extents->data_offset + start + index * view.block_size;
                *size = view.block_size;
                return 0;
            }
    }
    return -ENOENT;
}

void bl_extents_unhold_all(bl_extents *extents)
{
    bl_extents_turn_all(extents, BL_SPACE_HELD, BL_SPACE_FREE);
}

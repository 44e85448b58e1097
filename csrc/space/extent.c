/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * The allocator of space: size classes, their extents of stripes, and the blocks inside.
 *
 * Arrays have one element per stripe, and only elements in use cost memory; sets of stripes answer
 * the frequent questions. A class remembers a stripe below which none of its cells is free, and
 * stripes that come back lower that bound, so that opening an extent does not search the whole pool
 * each time.
 */
#include "space/extent.h"

#include <errno.h>
#include <stdlib.h>

#include "base/bitset.h"
#include "base/lazy.h"
#include "coherence/instructions.h"
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
    uint32_t extent_count;      /* 0: another class may have this slot */
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

/* Return the first stripe of the extent that has the stripe of offset, or BL_BITSET_NONE. */
static inline uint64_t bl_extents_first(const bl_extents *extents, uint64_t offset)
{
    uint64_t stripe = (offset - extents->data_offset) / BL_STRIPE_SIZE;
    if (offset < extents->data_offset || stripe >= extents->stripe_count || !extents->back[stripe])
        return BL_BITSET_NONE;
    return stripe + 1 - extents->back[stripe];
}

/* Return a word of an extent's bits in free_bits or held_bits. The first words of all extents lie
 * together, then the second ones: extents of large blocks have only the first, and memory that
 * nobody touches costs nothing. */
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

/* ---- Classes and extents. */

uint32_t bl_block_size(uint64_t bytes)
{
    uint64_t size = (bytes + BL_PAGE_SIZE - 1) / BL_PAGE_SIZE * BL_PAGE_SIZE;
    return bytes <= (uint64_t)BL_EXTENT_PAGES_MAX * BL_PAGE_SIZE ? (uint32_t)size : 0;
}

int bl_extents_create(bl_extents **out, uint64_t data_offset, uint64_t stripe_count)
{
    if (stripe_count > UINT32_MAX)
        return -EINVAL;
    size_t words = bl_bitset_words(stripe_count), sets = 2 + BL_CLASS_COUNT_MAX;
    bl_extents *extents = calloc(1, sizeof *extents);
    if (!extents)
        return -ENOMEM;
    size_t bits = 2 * BL_EXTENT_WORDS * stripe_count;
    extents->table_size = (sets * words + bits) * sizeof(uint64_t) + BL_PAGE_SIZE +
                          stripe_count * (sizeof(bl_extent) + sizeof *extents->back);
    extents->table = bl_lazy_map_dense(extents->table_size);
    if (!extents->table) {
        free(extents);
        return -ENOMEM;
    }
    uint64_t *memory = extents->table;
    bl_bitset_make(&extents->free, memory, stripe_count);
    bl_bitset_make(&extents->first, memory += words, stripe_count);
    for (uint32_t class = 0; class < BL_CLASS_COUNT_MAX; class++)
        bl_bitset_make(&extents->class[class].roomy, memory += words, stripe_count);
    extents->free_bits = memory + words;
    extents->held_bits = extents->free_bits + bits / 2;
    extents->extent = (bl_extent *)(extents->held_bits + bits / 2);
    extents->back = (uint8_t *)(extents->extent + stripe_count);
    extents->data_offset = data_offset;
    extents->stripe_count = extents->free_stripe_count = stripe_count;
    bl_bitset_fill(&extents->free, stripe_count);
    *out = extents;
    return 0;
}

void bl_extents_destroy(bl_extents *extents)
{
    if (!extents)
        return;
    bl_lazy_unmap(extents->table, extents->table_size);
    free(extents);
}

/* ---- Extents */

/* Return the class, or a free slot for it, or NULL. */
static bl_class *bl_class_make(bl_extents *extents, uint32_t block_size)
{
    bl_class *class = bl_class_find(extents, block_size);
    for (uint32_t place = 0; !class && place < BL_CLASS_COUNT_MAX; place++)
        if (!extents->class[place].extent_count) {
            class = &extents->class[place];
            class->block_size = block_size;
            class->barren = 0;
        }
    return class;
}

static int bl_block_size_is_wrong(uint32_t block_size)
{
    return block_size == 0 || bl_block_size(block_size) != block_size;
}

static void bl_extent_view_of(const bl_extents *extents, uint64_t first, bl_extent_view *out)
{
    const bl_extent *extent = &extents->extent[first];
    *out = (bl_extent_view){
        .generation = extent->generation,
        .first_stripe = (uint32_t)first,
        .stripe_count = extent->stripe_count,
        .block_size = extent->block_size,
        .block_count = extent->block_count,
        .free_count = extent->free_count,
        .held_count = extent->held_count,
        .retired = extent->retired,
    };
}

static void bl_extent_make(bl_extents *extents, bl_class *class, bl_run run, uint64_t generation)
{
    bl_extent *extent = &extents->extent[run.first];
    *extent = (bl_extent){
        .generation = generation,
        .block_size = class->block_size,
        .block_count = (uint16_t)run.part.block_count,
        .free_count = (uint16_t)run.part.block_count,
        .stripe_count = (uint8_t)run.part.stripe_count,
        .class_index = (uint8_t)(class - extents->class),
    };
    for (uint32_t block = 0; block < run.part.block_count; block += 64) {
        uint32_t rest = run.part.block_count - block;
        *bl_extent_word(extents, extents->free_bits, run.first, block / 64) =
            rest < 64 ? (1ull << rest) - 1 : UINT64_MAX;
    }
    for (uint32_t place = 0; place < run.part.stripe_count; place++) {
        extents->back[run.first + place] = (uint8_t)(1 + place);
        bl_bitset_remove(&extents->free, run.first + place);
    }
    bl_bitset_add(&extents->first, run.first);
    bl_bitset_add(&class->roomy, run.first);
    class->extent_count++;
    extents->extent_count++;
    extents->free_stripe_count -= run.part.stripe_count;
}

int bl_extents_open(bl_extents *extents, uint32_t block_size, enum bl_fit fit, uint64_t generation,
                    bl_extent_view *out)
{
    if (bl_block_size_is_wrong(block_size))
        return -EINVAL;
    bl_class *class = bl_class_make(extents, block_size);
    if (!class)
        return -E2BIG;
    uint32_t pages = block_size / BL_PAGE_SIZE;
    bl_run run = bl_run_cell(&extents->free, extents->stripe_count, pages, class->barren);
    class->barren = run.part.block_count ? run.first : extents->stripe_count;
    if (!run.part.block_count && fit == BL_FIT_ANY)
        run = bl_run_any(&extents->free, extents->stripe_count, pages);
    if (!run.part.block_count)
        return -EAGAIN;
    bl_extent_make(extents, class, run, generation);
    bl_extent_view_of(extents, run.first, out);
    return 0;
}

int bl_extents_cell(const bl_extents *extents, uint32_t block_size, uint64_t offset,
                    uint32_t *first_stripe, uint32_t *stripe_count)
{
    uint64_t stripe = (offset - extents->data_offset) / BL_STRIPE_SIZE;
    if (bl_block_size_is_wrong(block_size) || offset < extents->data_offset ||
        stripe >= extents->stripe_count)
        return -EINVAL;
    uint32_t size = bl_fit_ideal(block_size / BL_PAGE_SIZE).stripe_count;
    uint64_t first = stripe / size * size, rest = extents->stripe_count - first;
    *first_stripe = (uint32_t)first;
    *stripe_count = rest < size ? (uint32_t)rest : size;
    return 0;
}

int bl_extents_adopt(bl_extents *extents, const bl_extent_view *view)
{
    uint64_t first = view->first_stripe, end = first + view->stripe_count;
    if (bl_block_size_is_wrong(view->block_size) || view->stripe_count == 0 ||
        view->stripe_count > BL_EXTENT_STRIPES_MAX || end > extents->stripe_count)
        return -EINVAL;
    bl_fit_part part = bl_fit_of(view->block_size / BL_PAGE_SIZE, view->stripe_count);
    if (part.block_count == 0 || part.block_count != view->block_count)
        return -EINVAL;
    if (bl_bitset_row_end(&extents->free, first, end) != end)
        return -EEXIST;
    bl_class *class = bl_class_make(extents, view->block_size);
    if (!class)
        return -E2BIG;
    bl_extent_make(extents, class, (bl_run){first, part}, view->generation);
    return view->retired ? bl_extents_retire(extents, view->first_stripe) : 0;
}

/* Note that stripes from first on came back: cells that hold them begin less than an extent
 * before. */
static void bl_extents_freed(bl_extents *extents, uint64_t first)
{
    uint64_t lowest = first < BL_EXTENT_STRIPES_MAX ? 0 : first - BL_EXTENT_STRIPES_MAX;
    for (uint32_t class = 0; class < BL_CLASS_COUNT_MAX; class++)
        if (extents->class[class].barren > lowest)
            extents->class[class].barren = lowest;
}

int bl_extents_close(bl_extents *extents, uint32_t first_stripe)
{
    if (first_stripe >= extents->stripe_count || extents->back[first_stripe] != 1)
        return -EINVAL;
    bl_extent *extent = &extents->extent[first_stripe];
    if (extent->free_count != extent->block_count || extent->retired)
        return -EBUSY;
    bl_class *class = &extents->class[extent->class_index];
    for (uint32_t place = 0; place < extent->stripe_count; place++) {
        extents->back[first_stripe + place] = 0;
        bl_bitset_add(&extents->free, first_stripe + place);
    }
    bl_bitset_remove(&extents->first, first_stripe);
    bl_bitset_remove(&class->roomy, first_stripe);
    class->extent_count--;
    extents->extent_count--;
    extents->free_stripe_count += extent->stripe_count;
    bl_extents_freed(extents, first_stripe);
    return 0;
}

int bl_extents_retire(bl_extents *extents, uint32_t first_stripe)
{
    if (first_stripe >= extents->stripe_count || extents->back[first_stripe] != 1)
        return -EINVAL;
    bl_extent *extent = &extents->extent[first_stripe];
    extents->retired_stripe_count += extent->retired ? 0 : extent->stripe_count;
    extent->retired = 1;
    bl_bitset_remove(&extents->class[extent->class_index].roomy, first_stripe);
    return 0;
}

int bl_extents_at(const bl_extents *extents, uint64_t offset, bl_extent_view *out)
{
    uint64_t first = bl_extents_first(extents, offset);
    if (first == BL_BITSET_NONE)
        return -ENOENT;
    bl_extent_view_of(extents, first, out);
    return 0;
}

int64_t bl_extents_first_at(const bl_extents *extents, uint64_t offset)
{
    uint64_t first = bl_extents_first(extents, offset);
    return first == BL_BITSET_NONE ? -ENOENT : (int64_t)first;
}

int bl_extents_next(const bl_extents *extents, uint64_t stripe, bl_extent_view *out)
{
    uint64_t first = bl_bitset_next(&extents->first, stripe);
    if (first == BL_BITSET_NONE)
        return -ENOENT;
    bl_extent_view_of(extents, first, out);
    return 0;
}

int bl_extents_next_empty(const bl_extents *extents, uint64_t stripe, bl_extent_view *out)
{
    uint64_t found = BL_BITSET_NONE;
    for (uint32_t place = 0; place < BL_CLASS_COUNT_MAX; place++) {
        const bl_class *class = &extents->class[place];
        if (!class->extent_count)
            continue;
        uint64_t first = bl_bitset_next(&class->roomy, stripe);
        while (first < found &&
               extents->extent[first].free_count != extents->extent[first].block_count)
            first = bl_bitset_next(&class->roomy, first + 1);
        if (first < found)
            found = first;
    }
    if (found == BL_BITSET_NONE)
        return -ENOENT;
    bl_extent_view_of(extents, found, out);
    return 0;
}

void bl_extents_count(const bl_extents *extents, bl_extents_stat *out)
{
    *out = (bl_extents_stat){
        .stripe_count = extents->stripe_count,
        .free_stripe_count = extents->free_stripe_count,
        .extent_count = extents->extent_count,
        .used_bytes = extents->used_bytes,
        .held_bytes = extents->held_bytes,
        .retired_stripe_count = extents->retired_stripe_count,
    };
    for (uint32_t class = 0; class < BL_CLASS_COUNT_MAX; class++)
        out->class_count += extents->class[class].extent_count > 0;
}

/* ---- The blocks of extents: every change of a block's state goes through one function, so that
 * the counts and the set of roomy extents agree with the bits. */

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

/* Change a block's state, with everything that depends on it. */
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
    uint64_t bits = *bl_extent_word(extents, extents->free_bits, first, word);
    uint32_t index = word * 64 + (uint32_t)__builtin_ctzll(bits);
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

/* Adopt the extent that has this block. Inlined, it would slow down all who find their extent. */
__attribute__((noinline)) static int
bl_extent_restore(bl_extents *extents, uint32_t first_stripe, uint32_t stripe_count,
                  uint32_t block_size, uint32_t block_index)
{
    bl_extent_view view = {
        .first_stripe = first_stripe,
        .stripe_count = stripe_count,
        .block_size = block_size,
        .block_count = bl_fit_of(block_size / BL_PAGE_SIZE, stripe_count).block_count,
    };
    return block_index < view.block_count ? bl_extents_adopt(extents, &view) : -EINVAL;
}

int bl_extents_restore(bl_extents *extents, uint32_t first_stripe, uint32_t stripe_count,
                       uint32_t block_size, uint32_t block_index)
{
    if (first_stripe >= extents->stripe_count)
        return -EINVAL;
    bl_extent *extent = &extents->extent[first_stripe];
    if (!extents->back[first_stripe]) {
        int rc = bl_extent_restore(extents, first_stripe, stripe_count, block_size, block_index);
        if (rc < 0)
            return rc;
    }
    if (extents->back[first_stripe] != 1 || extent->block_size != block_size ||
        block_index >= extent->block_count || extent->retired)
        return -EINVAL;
    uint64_t *free = bl_extent_word(extents, extents->free_bits, first_stripe, block_index / 64);
    uint64_t bit = 1ull << (block_index % 64);
    if (!(*free & bit))
        return -EEXIST;
    *free &= ~bit;              /* as bl_space_become does, in fewer steps: there may be millions */
    extents->used_bytes += block_size;
    if (--extent->free_count == 0)
        bl_bitset_remove(&extents->class[extent->class_index].roomy, first_stripe);
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

/* Give every block of one state another state. */
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

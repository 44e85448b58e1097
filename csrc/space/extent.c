/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * The extents of space/extent.h, in lazily allocated arrays with one element per stripe.
 */
#include "space/extent.h"

#include <errno.h>
#include <stdlib.h>

#include "base/bitset.h"
#include "base/lazy.h"

enum {
    BL_GROUP_STRIPES = 8,       /* 16 MiB: 256 blocks of 64 KiB for one mark */
    BL_GROUPS_WANTED = 16       /* the fewest groups: small pools have smaller groups */
};

typedef struct bl_extent {
    uint64_t generation;
    uint32_t stripe_count;
    uint32_t retired;
} bl_extent;

struct bl_extents {
    uint64_t stripe_count;
    uint64_t group;             /* stripes of a group: a power of two */
    bl_extent *extent;          /* indexed by first stripe */
    uint8_t *back;              /* by stripe: 0: closed; else 1 + its index in its extent */
    bl_bitset first;            /* first stripes of extents */
    void *table;
    size_t table_size;
    uint64_t count;
};

int bl_extents_create(bl_extents **out, uint64_t stripe_count)
{
    if (stripe_count > UINT32_MAX)
        return -EINVAL;
    bl_extents *extents = calloc(1, sizeof *extents);
    if (!extents)
        return -ENOMEM;
    size_t words = bl_bitset_words(stripe_count);
    extents->stripe_count = stripe_count;
    extents->group = BL_GROUP_STRIPES;
    while (extents->group > 1 && stripe_count < extents->group * BL_GROUPS_WANTED)
        extents->group /= 2;
    extents->table_size = words * sizeof(uint64_t) + BL_PAGE_SIZE +
                          stripe_count * (sizeof(bl_extent) + sizeof *extents->back);
    extents->table = bl_lazy_map_dense(extents->table_size);
    if (!extents->table) {
        free(extents);
        return -ENOMEM;
    }
    bl_bitset_make(&extents->first, extents->table, stripe_count);
    extents->extent = (bl_extent *)((uint64_t *)extents->table + words);
    extents->back = (uint8_t *)(extents->extent + stripe_count);
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

static void bl_extent_view_of(const bl_extents *extents, uint64_t first, bl_extent_view *out)
{
    const bl_extent *extent = &extents->extent[first];
    *out = (bl_extent_view){
        .generation = extent->generation,
        .first_stripe = (uint32_t)first,
        .stripe_count = extent->stripe_count,
        .retired = extent->retired,
    };
}

static void bl_extent_make(bl_extents *extents, uint64_t first, uint32_t stripe_count,
                           uint64_t generation)
{
    extents->extent[first] = (bl_extent){generation, stripe_count, 0};
    for (uint32_t place = 0; place < stripe_count; place++)
        extents->back[first + place] = (uint8_t)(place + 1);
    bl_bitset_add(&extents->first, first);
    extents->count++;
}

int bl_extents_open(bl_extents *extents, uint64_t stripe, uint64_t generation, bl_extent_view *out)
{
    if (stripe >= extents->stripe_count)
        return -EINVAL;
    if (extents->back[stripe])
        return -EEXIST;
    uint64_t start = stripe / extents->group * extents->group, limit = start + extents->group;
    if (limit > extents->stripe_count)
        limit = extents->stripe_count;
    uint64_t first = stripe, end = stripe + 1;
    while (first > start && !extents->back[first - 1])
        first--;
    while (end < limit && !extents->back[end])
        end++;
    bl_extent_make(extents, first, (uint32_t)(end - first), generation);
    bl_extent_view_of(extents, first, out);
    return 0;
}

int bl_extents_adopt(bl_extents *extents, const bl_extent_view *view)
{
    uint64_t first = view->first_stripe, end = first + view->stripe_count;
    if (view->stripe_count == 0 || view->stripe_count > BL_EXTENT_STRIPES_MAX ||
        end > extents->stripe_count)
        return -EINVAL;
    for (uint64_t stripe = first; stripe < end; stripe++)
        if (extents->back[stripe])
            return -EEXIST;
    bl_extent_make(extents, first, view->stripe_count, view->generation);
    return view->retired ? bl_extents_retire(extents, first) : 0;
}

static int bl_extent_begins(const bl_extents *extents, uint64_t stripe)
{
    return stripe < extents->stripe_count && extents->back[stripe] == 1;
}

int bl_extents_close(bl_extents *extents, uint64_t first_stripe)
{
    if (!bl_extent_begins(extents, first_stripe))
        return -EINVAL;
    const bl_extent *extent = &extents->extent[first_stripe];
    if (extent->retired)
        return -EBUSY;
    for (uint32_t place = 0; place < extent->stripe_count; place++)
        extents->back[first_stripe + place] = 0;
    bl_bitset_remove(&extents->first, first_stripe);
    extents->count--;
    return 0;
}

int bl_extents_retire(bl_extents *extents, uint64_t first_stripe)
{
    if (!bl_extent_begins(extents, first_stripe))
        return -EINVAL;
    extents->extent[first_stripe].retired = 1;
    return 0;
}

int bl_extents_at(const bl_extents *extents, uint64_t stripe, bl_extent_view *out)
{
    if (stripe >= extents->stripe_count || !extents->back[stripe])
        return -ENOENT;
    bl_extent_view_of(extents, stripe + 1 - extents->back[stripe], out);
    return 0;
}

int bl_extents_next(const bl_extents *extents, uint64_t stripe, bl_extent_view *out)
{
    uint64_t first = bl_bitset_next(&extents->first, stripe);
    if (first == BL_BITSET_NONE)
        return -ENOENT;
    bl_extent_view_of(extents, first, out);
    return 0;
}

int64_t bl_extents_closed(const bl_extents *extents, uint64_t first_stripe, uint64_t stripe_count)
{
    for (uint64_t stripe = first_stripe; stripe < first_stripe + stripe_count; stripe++)
        if (!extents->back[stripe])
            return (int64_t)stripe;
    return -ENOENT;
}

int bl_extents_cover(const bl_extents *extents, uint64_t first_stripe, uint64_t stripe_count)
{
    for (uint64_t stripe = first_stripe; stripe < first_stripe + stripe_count; stripe++)
        if (stripe >= extents->stripe_count || !extents->back[stripe] ||
            extents->extent[stripe + 1 - extents->back[stripe]].retired)
            return 0;
    return 1;
}

uint64_t bl_extents_count(const bl_extents *extents) { return extents->count; }

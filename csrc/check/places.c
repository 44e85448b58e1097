/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * The space of the entries: a bit per page detects an overlap, and a list of blocks per stripe
 * identifies the other block.
 */
#include "check/places.h"

#include <errno.h>
#include <stdlib.h>

#include "base/lazy.h"
#include "space/victims.h"

typedef struct bl_claim {
    uint64_t offset;
    uint32_t size;
    uint32_t next;              /* in the list of its stripe, as number + 1; 0: none */
} bl_claim;

struct bl_places {
    bl_pages *pages;
    bl_claim *claim;            /* by block number */
    uint32_t *first;            /* by stripe: number + 1 of a block that begins in it */
    uint64_t data_offset;
    uint64_t stripe_count;
    uint32_t block_count;
};

int bl_places_create(bl_places **out, const bl_geometry *g)
{
    bl_places *places = calloc(1, sizeof *places);
    if (!places)
        return -ENOMEM;
    places->data_offset = g->data_offset;
    places->stripe_count = g->stripe_count;
    places->block_count = g->block_count_max;
    places->claim = bl_lazy_map(places->block_count * sizeof *places->claim);
    places->first = bl_lazy_map(places->stripe_count * sizeof *places->first);
    if (places->claim && places->first &&
        bl_pages_create(&places->pages, g->data_offset, g->stripe_count) == 0) {
        bl_pages_defer(places->pages); /* for good: this set never searches for free pages */
        *out = places;
        return 0;
    }
    bl_places_destroy(places);
    return -ENOMEM;
}

void bl_places_destroy(bl_places *places)
{
    if (!places)
        return;
    bl_pages_destroy(places->pages);
    bl_lazy_unmap(places->claim, places->block_count * sizeof *places->claim);
    bl_lazy_unmap(places->first, places->stripe_count * sizeof *places->first);
    free(places);
}

static int64_t bl_claim_first(void *context, uint64_t stripe)
{
    const bl_places *places = context;
    return (int64_t)places->first[stripe] - 1;
}

static int64_t bl_claim_next(void *context, uint32_t number)
{
    const bl_places *places = context;
    return (int64_t)places->claim[number].next - 1;
}

static bl_resident bl_claim_look(void *context, uint32_t number)
{
    const bl_places *places = context;
    return (bl_resident){places->claim[number].offset, places->claim[number].size, 0};
}

static uint32_t *bl_places_list(bl_places *places, uint64_t offset)
{
    return &places->first[(offset - places->data_offset) / BL_STRIPE_SIZE];
}

/* Return a block that overlaps this space. */
static uint32_t bl_places_at(bl_places *places, uint64_t offset, uint32_t size)
{
    bl_residents residents = {.owner = places, .data_offset = places->data_offset,
                              .first = bl_claim_first, .next = bl_claim_next,
                              .look = bl_claim_look};
    int64_t number = bl_resident_across(&residents, offset);
    const uint32_t *list = bl_places_list(places, offset);
    for (; number < 0 && list <= bl_places_list(places, offset + size - 1); list++) {
        number = (int64_t)*list - 1;
        while (number >= 0 && (places->claim[number].offset < offset ||
                               places->claim[number].offset >= offset + size))
            number = bl_claim_next(places, (uint32_t)number);
    }
    return (uint32_t)number;
}

int bl_places_add(bl_places *places, uint32_t number, uint64_t offset, uint32_t size,
                  uint32_t *other)
{
    if (bl_pages_take(places->pages, offset, size) < 0) {
        *other = bl_places_at(places, offset, size);
        return -EEXIST;
    }
    uint32_t *list = bl_places_list(places, offset);
    places->claim[number] = (bl_claim){offset, size, *list};
    *list = number + 1;
    return 0;
}

void bl_places_remove(bl_places *places, uint32_t number)
{
    bl_claim *claim = &places->claim[number];
    uint32_t *list = bl_places_list(places, claim->offset);
    while (*list != number + 1)
        list = &places->claim[*list - 1].next;
    *list = claim->next;
    bl_pages_give(places->pages, claim->offset, claim->size);
}

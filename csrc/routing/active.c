/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * The blocks of the running requests (api/routing.h): an open-addressing table with a count for
 * each block. It doubles when two thirds are used.
 */
#include "api/routing.h"

#include <errno.h>
#include <stdlib.h>

#include "base/seed.h"
#include "prefix/prefix_tree.h"

typedef struct bl_active_slot {
    uint64_t block;
    uint32_t holders;           /* 0: empty */
    uint32_t reserved;
} bl_active_slot;

struct bl_active {
    bl_active_slot *slot;
    uint64_t mask;              /* slots - 1 */
    uint64_t seed[2];           /* clients choose the hashes, so slots depend on a seed */
    uint32_t count;
};

enum { BL_ACTIVE_FIRST = 64 };

int bl_active_create(bl_active **out)
{
    bl_active *active = calloc(1, sizeof *active);
    if (!active)
        return -ENOMEM;
    active->mask = BL_ACTIVE_FIRST - 1;
    active->slot = calloc(BL_ACTIVE_FIRST, sizeof *active->slot);
    int rc = active->slot ? bl_hash_seed(active->seed) : -ENOMEM;
    if (rc)
        bl_active_destroy(active);
    else
        *out = active;
    return rc;
}

void bl_active_destroy(bl_active *active)
{
    if (!active)
        return;
    free(active->slot);
    free(active);
}

uint32_t bl_active_count(const bl_active *active) { return active->count; }

static inline uint64_t bl_active_home(const bl_active *active, uint64_t block)
{
    return bl_prefix_mix(block ^ active->seed[0], active->seed[1] | 1) & active->mask;
}

/* Return the slot of a block, or the empty slot where it belongs. */
static inline bl_active_slot *bl_active_at(const bl_active *active, uint64_t block)
{
    uint64_t at = bl_active_home(active, block);
    while (active->slot[at].holders && active->slot[at].block != block)
        at = (at + 1) & active->mask;
    return &active->slot[at];
}

uint32_t bl_active_holders(const bl_active *active, uint64_t block)
{
    return bl_active_at(active, block)->holders;
}

static int bl_active_grow(bl_active *active, uint64_t needed)
{
    uint64_t slots = active->mask + 1, old = slots;
    while (slots * 2 < needed * 3)
        slots *= 2;
    if (slots == old)
        return 0;
    bl_active_slot *before = active->slot, *after = calloc(slots, sizeof *after);
    if (!after)
        return -ENOMEM;
    active->slot = after;
    active->mask = slots - 1;
    for (uint64_t i = 0; i < old; i++)
        if (before[i].holders)
            *bl_active_at(active, before[i].block) = before[i];
    free(before);
    return 0;
}

int bl_active_add(bl_active *active, const uint64_t *blocks, uint32_t count)
{
    int rc = bl_active_grow(active, (uint64_t)active->count + count);
    for (uint32_t i = 0; !rc && i < count; i++) {
        bl_active_slot *slot = bl_active_at(active, blocks[i]);
        active->count += !slot->holders;
        slot->block = blocks[i];
        slot->holders++;
    }
    return rc;
}

/* Later entries of the probe sequence move up, so that a search still ends at an empty slot. */
static void bl_active_close(bl_active *active, uint64_t hole)
{
    for (uint64_t at = (hole + 1) & active->mask; active->slot[at].holders;
         at = (at + 1) & active->mask) {
        uint64_t home = bl_active_home(active, active->slot[at].block);
        if (((at - home) & active->mask) < ((at - hole) & active->mask))
            continue;
        active->slot[hole] = active->slot[at];
        hole = at;
    }
    active->slot[hole].holders = 0;
}

void bl_active_remove(bl_active *active, const uint64_t *blocks, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++) {
        bl_active_slot *slot = bl_active_at(active, blocks[i]);
        if (!slot->holders || --slot->holders)
            continue;
        active->count--;
        bl_active_close(active, (uint64_t)(slot - active->slot));
    }
}

/* Return how many leading blocks have more than this many holders. A worker holds only the
 * beginning of most requests, so this is a galloping search from the start. */
static uint32_t bl_active_lead(const bl_active *active, const uint64_t *blocks, uint32_t count,
                               uint32_t holders)
{
    uint64_t low = 0, high = 0, step = 1;
    while (high < count && bl_active_holders(active, blocks[high]) > holders) {
        low = high + 1;
        high += step;
        step *= 2;
    }
    if (high > count)
        high = count;
    while (low < high) {
        uint64_t middle = low + (high - low) / 2;
        if (bl_active_holders(active, blocks[middle]) > holders)
            low = middle + 1;
        else
            high = middle;
    }
    return (uint32_t)low;
}

/* Return how many of the first end blocks, all of them held now, the request would hold alone. */
static double bl_active_alone(const bl_active *active, const uint64_t *blocks, uint32_t end,
                              const double *alone, uint32_t alone_count)
{
    double sum = 0;
    uint32_t holders;
    while (end && (holders = bl_active_holders(active, blocks[end - 1])) < alone_count) {
        uint32_t start = bl_active_lead(active, blocks, end - 1, holders);
        sum += (end - start) * alone[holders];
        end = start;
    }
    return sum;
}

void bl_candidates_fill(const bl_load *const *loads, bl_active *const *active,
                        uint32_t worker_count, const uint64_t *blocks, uint32_t count,
                        const double *alone, uint32_t alone_count, bl_candidate *rows)
{
    /* Prefetch the slots in all workers' tables before the first is read. Most requests share their
     * first block with others, so prefetch the second one, too. */
    for (uint32_t i = 0; active && i < worker_count; i++)
        for (uint32_t block = 0; block < 2 && block < count; block++)
            bl_prefetch(&active[i]->slot[bl_active_home(active[i], blocks[block])]);
    for (uint32_t i = 0; i < worker_count; i++) {
        uint32_t held = active ? bl_active_lead(active[i], blocks, count, 0) : 0;
        rows[i] = (bl_candidate){.load = *loads[i], .new_blocks = count - held};
        if (held)
            rows[i].held_alone = bl_active_alone(active[i], blocks, held, alone, alone_count);
    }
}

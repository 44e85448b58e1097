/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * The search for victims. Hypothetically free runs are stored as a hash table of their ends: a run
 * that joins a neighbor only needs the neighbor's other end. Ends inside a joined run stay in the
 * table but are never looked up, because the block there is already chosen.
 */
#include "space/victims.h"

#include <errno.h>
#include <stdlib.h>

#include "base/lazy.h"
#include "base/minmax.h"

enum {
    BL_WALK = 4096,             /* blocks of the first walk */
    BL_WALK_FAR = 65536,        /* blocks of the second walk, if the first failed */
    BL_GUESSES = 64,            /* windows to examine after a walk */
    BL_STREAK = 4               /* requests of one size after which places are on a grid */
};

typedef struct bl_victim {
    uint64_t offset;
    uint64_t before;            /* after sorting: bytes of the victims with lower offsets */
    uint64_t score[2];          /* victims' bytes in the window that begins (0) or ends (1) at
                                 * this one */
    uint32_t size;
    uint32_t block;
} bl_victim;

/* An end of a hypothetically free run. */
typedef struct bl_run_end {
    uint64_t place;
    uint64_t other;             /* the run's other end */
    uint64_t round;             /* the walk that stored it; of another walk: the slot is free */
} bl_run_end;

typedef struct bl_window {
    uint64_t start, end;
} bl_window;

struct bl_victims {
    bl_victim *seen;            /* in the order of the walk, then by offset */
    bl_run_end *ends;
    uint32_t *chosen;
    uint32_t seen_count;
    uint32_t chosen_count;
    uint32_t bound;             /* blocks of the longest walk */
    uint32_t block_count;
    uint32_t complete;          /* 1: the walk visited all blocks */
    uint32_t grid;              /* 1: places are on a grid of the requested size */
    uint32_t size;              /* the last requested size, */
    uint32_t streak;            /* and how often in a row */
    uint64_t mask;              /* slots of this walk's table - 1 */
    uint64_t round;
};

static uint64_t bl_ends_size(uint32_t bound)
{
    uint64_t slots = 4;
    while (slots < 4ull * bound) /* two ends of each block: half full */
        slots *= 2;
    return slots;
}

int bl_victims_create(bl_victims **out, uint32_t block_count)
{
    bl_victims *victims = calloc(1, sizeof *victims);
    if (!victims)
        return -ENOMEM;
    victims->block_count = block_count;
    victims->bound = (uint32_t)bl_min(block_count, BL_WALK_FAR);
    victims->seen = bl_lazy_map((victims->bound + 1ull) * sizeof *victims->seen);
    victims->ends = bl_lazy_map(bl_ends_size(victims->bound) * sizeof *victims->ends);
    victims->chosen = bl_lazy_map((block_count + 1ull) * sizeof *victims->chosen);
    *out = victims;
    if (victims->seen && victims->ends && victims->chosen)
        return 0;
    bl_victims_destroy(victims);
    return -ENOMEM;
}

void bl_victims_destroy(bl_victims *victims)
{
    if (!victims)
        return;
    bl_lazy_unmap(victims->seen, (victims->bound + 1ull) * sizeof *victims->seen);
    bl_lazy_unmap(victims->ends, bl_ends_size(victims->bound) * sizeof *victims->ends);
    bl_lazy_unmap(victims->chosen, (victims->block_count + 1ull) * sizeof *victims->chosen);
    free(victims);
}

int64_t bl_resident_across(const bl_residents *residents, uint64_t offset)
{
    uint64_t stripe = (offset - residents->data_offset) / BL_STRIPE_SIZE;
    uint64_t last = stripe < BL_BLOCK_SIZE_MAX / BL_STRIPE_SIZE
                        ? 0
                        : stripe - BL_BLOCK_SIZE_MAX / BL_STRIPE_SIZE;
    int64_t found = -1;
    bl_resident nearest = {0};
    for (;; stripe--) {
        for (int64_t block = residents->first(residents->owner, stripe); block >= 0;
             block = residents->next(residents->owner, (uint32_t)block)) {
            bl_resident resident = residents->look(residents->owner, (uint32_t)block);
            if (resident.offset >= offset || (found >= 0 && resident.offset < nearest.offset))
                continue;
            found = block;
            nearest = resident;
        }
        if (found >= 0 || stripe == last)
            break;
    }
    return found >= 0 && nearest.offset + nearest.size > offset ? found : -1;
}

/* ---- The walk */

/* Return the slot of an end in the table, or the free slot where it belongs. */
static bl_run_end *bl_end_slot(const bl_victims *victims, uint64_t place)
{
    uint64_t slot = place / BL_PAGE_SIZE * 0x9e3779b97f4a7c15ull >> 32;
    for (;; slot++) {
        bl_run_end *end = &victims->ends[slot & victims->mask];
        if (end->round != victims->round || end->place == place)
            return end;
    }
}

/* Return the other end of the hypothetically free run that ends at place, or place if there is
 * none. */
static uint64_t bl_end_other(const bl_victims *victims, uint64_t place)
{
    const bl_run_end *end = bl_end_slot(victims, place);
    return end->round == victims->round ? end->other : place;
}

static void bl_end_put(bl_victims *victims, uint64_t place, uint64_t other)
{
    *bl_end_slot(victims, place) = (bl_run_end){place, other, victims->round};
}

/* Treat a block as evicted. Returns the run of free and hypothetically free space around it. The
 * first block of a walk has no hypothetical neighbors. */
static bl_window bl_victims_imagine(const bl_victims *victims, const bl_pages *pages,
                                    const bl_resident *resident)
{
    uint64_t start = resident->offset, end = start + resident->size;
    bl_window run = {start, end};
    if (victims->seen_count > 1)
        run = (bl_window){bl_end_other(victims, start), bl_end_other(victims, end)};
    if (run.start == start)
        run.start -= bl_pages_free_before(pages, start);
    if (run.end == end)
        run.end += bl_pages_free_after(pages, end);
    return run;
}

/* Return the first multiple of size from place on. */
static uint64_t bl_grid_place(const bl_residents *residents, uint64_t place, uint32_t size)
{
    uint64_t inside = place - residents->data_offset;
    return residents->data_offset + (inside + size - 1) / size * size;
}

/* Return 1, with the place, if the run around this victim has room. If the victim has the requested
 * size and is not on the grid, the new block may take exactly its place. */
static int bl_run_serves(const bl_victims *victims, const bl_residents *residents, bl_window run,
                         const bl_resident *resident, uint32_t size, uint64_t *place)
{
    *place = run.start;
    if (run.end - run.start < size)
        return 0;
    if (!victims->grid)
        return 1;
    uint64_t cell = bl_grid_place(residents, run.start, size);
    if (cell <= run.end - size)
        *place = cell;
    return *place == cell || resident->size == size;
}

/* Treat up to bound blocks as evicted, the coldest first, until there is room. Returns 1 or 0. */
static int bl_victims_walk(bl_victims *victims, const bl_pages *pages,
                           const bl_residents *residents, uint32_t size, uint32_t bound,
                           uint64_t *place)
{
    uint32_t looks = 0;
    int64_t block = residents->coldest(residents->owner);
    victims->seen_count = 0;
    victims->round++;
    victims->mask = bl_ends_size(bound) - 1;
    for (; block >= 0 && looks < bound;
         block = residents->warmer(residents->owner, (uint32_t)block), looks++) {
        bl_resident resident = residents->look(residents->owner, (uint32_t)block);
        if (!resident.may_go)
            continue;
        victims->seen[victims->seen_count++] = (bl_victim){
            .offset = resident.offset, .size = resident.size, .block = (uint32_t)block};
        bl_window run = bl_victims_imagine(victims, pages, &resident);
        if (bl_run_serves(victims, residents, run, &resident, size, place))
            return 1;
        bl_end_put(victims, run.start, run.end);
        bl_end_put(victims, run.end, run.start);
    }
    victims->complete = block < 0;
    return 0;
}

/* Choose the visited blocks that overlap a window. */
static void bl_victims_take(bl_victims *victims, bl_window window)
{
    for (uint32_t i = 0; i < victims->seen_count; i++) {
        const bl_victim *victim = &victims->seen[i];
        if (victim->offset < window.end && victim->offset + victim->size > window.start)
            victims->chosen[victims->chosen_count++] = victim->block;
    }
}

/* ---- Windows with blocks that the walk did not visit */

static int bl_victim_compare(const void *a, const void *b)
{
    const bl_victim *one = a, *other = b;
    return one->offset < other->offset ? -1 : one->offset > other->offset;
}

/* Sort the visited blocks by offset. */
static void bl_victims_sort(bl_victims *victims)
{
    uint64_t before = 0;
    qsort(victims->seen, victims->seen_count, sizeof *victims->seen, bl_victim_compare);
    for (uint32_t i = 0; i < victims->seen_count; i++) {
        victims->seen[i].before = before;
        before += victims->seen[i].size;
    }
    victims->seen[victims->seen_count] = (bl_victim){.offset = UINT64_MAX, .before = before};
}

/* Return the index of the first visited block that begins at or after place. */
static uint32_t bl_victims_from(const bl_victims *victims, uint64_t place)
{
    uint32_t low = 0, high = victims->seen_count;
    while (low < high) {
        uint32_t middle = low + (high - low) / 2;
        if (victims->seen[middle].offset < place)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

/* Return the bytes of visited blocks in a window. */
static uint64_t bl_victims_inside(const bl_victims *victims, bl_window window)
{
    uint32_t first = bl_victims_from(victims, window.start);
    if (first > 0 &&
        victims->seen[first - 1].offset + victims->seen[first - 1].size > window.start)
        first--;
    return victims->seen[bl_victims_from(victims, window.end)].before -
           victims->seen[first].before;
}

/* Choose a block of a window. Returns its bytes in the window, or 0 if it may not be evicted. */
static uint64_t bl_window_choose(bl_victims *victims, const bl_residents *residents,
                                 bl_window window, uint32_t block)
{
    bl_resident resident = residents->look(residents->owner, block);
    if (!resident.may_go)
        return 0;
    uint64_t start = resident.offset > window.start ? resident.offset : window.start;
    victims->chosen[victims->chosen_count++] = block;
    return bl_min(resident.offset + resident.size, window.end) - start;
}

/* Choose all blocks of a window. Returns 0 if one of them may not be evicted, or if some space is
 * not free otherwise. */
static int bl_window_clear(bl_victims *victims, const bl_pages *pages,
                           const bl_residents *residents, bl_window window)
{
    uint64_t size = window.end - window.start, data = residents->data_offset;
    uint64_t bytes = bl_pages_free_within(pages, window.start, size), own = 0;
    int64_t block = bl_resident_across(residents, window.start);
    victims->chosen_count = 0;
    if (block >= 0) {
        bytes += own = bl_window_choose(victims, residents, window, (uint32_t)block);
        if (!own)
            return 0;
    }
    for (uint64_t stripe = (window.start - data) / BL_STRIPE_SIZE;
         stripe <= (window.end - 1 - data) / BL_STRIPE_SIZE; stripe++)
        for (block = residents->first(residents->owner, stripe); block >= 0;
             block = residents->next(residents->owner, (uint32_t)block)) {
            uint64_t offset = residents->look(residents->owner, (uint32_t)block).offset;
            if (offset < window.start || offset >= window.end)
                continue;
            bytes += own = bl_window_choose(victims, residents, window, (uint32_t)block);
            if (!own)
                return 0;
        }
    return bytes == size; /* otherwise some of it is held, lost, or in no block */
}

/* Return one of two windows of size bytes at a visited block: the one that begins with the free
 * space before the block, or the one that ends with the free space after it. On a grid: the two
 * cells that contain the block's ends. */
static bl_window bl_window_at(const bl_victims *victims, const bl_pages *pages,
                              const bl_residents *residents, const bl_victim *victim,
                              uint32_t size, int ends)
{
    uint64_t place = victim->offset + (ends ? victim->size : 0);
    if (victims->grid)
        place = bl_grid_place(residents, place + !ends, size) - size;
    else if (ends)
        place += bl_pages_free_after(pages, place) - size;
    else
        place -= bl_pages_free_before(pages, place);
    return (bl_window){place, place + size};
}

/* Choose the window with the most bytes of visited blocks that can be cleared. Returns 1 or 0. */
static int bl_victims_guess(bl_victims *victims, const bl_pages *pages,
                            const bl_residents *residents, uint32_t size, uint64_t *place)
{
    bl_pages_stat space;
    bl_pages_count(pages, &space);
    uint64_t data = residents->data_offset, end = data + space.stripe_count * BL_STRIPE_SIZE;
    bl_victims_sort(victims);
    for (uint32_t i = 0; i < 2 * victims->seen_count; i++) {
        bl_victim *victim = &victims->seen[i / 2];
        bl_window window = bl_window_at(victims, pages, residents, victim, size, i % 2);
        int is_inside = window.start >= data && window.start < end && window.end <= end;
        victim->score[i % 2] = is_inside ? bl_victims_inside(victims, window) : 0;
    }
    for (int guess = 0; guess < BL_GUESSES; guess++) {
        uint32_t best = 0;
        for (uint32_t i = 1; i < 2 * victims->seen_count; i++)
            if (victims->seen[i / 2].score[i % 2] > victims->seen[best / 2].score[best % 2])
                best = i;
        bl_victim *victim = &victims->seen[best / 2];
        if (victim->score[best % 2] == 0)
            return 0;
        victim->score[best % 2] = 0;
        bl_window window = bl_window_at(victims, pages, residents, victim, size, best % 2);
        *place = window.start;
        if (bl_window_clear(victims, pages, residents, window))
            return 1;
    }
    return 0;
}

/* Choose blocks, with the place on the grid or anywhere. Returns how many, or 0. */
static uint32_t bl_victims_search(bl_victims *victims, const bl_pages *pages,
                                  const bl_residents *residents, uint32_t size, uint32_t grid,
                                  uint64_t *place)
{
    static const uint32_t bounds[] = {BL_WALK, BL_WALK_FAR};
    victims->grid = grid;
    victims->complete = 0;
    for (int walk = 0; walk < 2 && !victims->complete; walk++) {
        uint32_t bound = (uint32_t)bl_min(bounds[walk], victims->bound);
        victims->chosen_count = 0;
        if (bl_victims_walk(victims, pages, residents, size, bound, place)) {
            bl_victims_take(victims, (bl_window){*place, *place + size});
            return victims->chosen_count;
        }
        if (!victims->complete && bl_victims_guess(victims, pages, residents, size, place))
            return victims->chosen_count;
    }
    return 0;
}

uint32_t bl_victims_choose(bl_victims *victims, const bl_pages *pages,
                           const bl_residents *residents, uint32_t size, const uint32_t **blocks,
                           uint64_t *place)
{
    uint32_t count = 0;
    *blocks = victims->chosen;
    victims->streak = victims->size == size ? victims->streak + 1 : 0;
    victims->size = size;
    if (victims->streak >= BL_STREAK)
        count = bl_victims_search(victims, pages, residents, size, 1, place);
    return count ? count : bl_victims_search(victims, pages, residents, size, 0, place);
}

/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * The allocator of pages: two bits per page, and the tree of free runs over the stripes.
 *
 * The bits of a stripe are one cache line. A node of the tree has eight children, so a request
 * touches few lines, and an update stops at the first ancestor that does not change. A node stores
 * its runs as differences from an entirely free node, so zeroed memory is a tree of free space, and
 * untouched parts cost nothing.
 */
#include "space/pages.h"

#include <errno.h>
#include <stdlib.h>

#include "base/bitset.h"
#include "base/lazy.h"
#include "base/minmax.h"
#include "coherence/instructions.h"

enum {
    BL_STRIPE_WORDS = BL_STRIPE_PAGES / 64,
    BL_FAN = 8,                 /* children of a node */
    BL_LEVELS = 12,             /* 8^11 > 2^32 stripes */
    BL_RUN_MAX = BL_BLOCK_SIZE_MAX / BL_PAGE_SIZE   /* longer runs are clipped to this */
};

static const uint64_t BL_NO_PAGE = UINT64_MAX;

/* The free runs of a node, in pages. In the tree they are stored as the difference from an entirely
 * free node. */
typedef struct bl_runs {
    uint32_t first;             /* the run at its start */
    uint32_t last;              /* the run at its end */
    uint32_t most;              /* the longest */
} bl_runs;

struct bl_pages {
    uint64_t data_offset;
    uint64_t stripe_count;
    uint64_t *taken;            /* a bit per page that is not free */
    uint64_t *held;             /* a bit per held page */
    bl_bitset lost;             /* stripes */
    bl_bitset stale;            /* stripes changed since the last update of the tree */
    bl_runs *level[BL_LEVELS];  /* level 0: the stripes */
    uint64_t span[BL_LEVELS];   /* pages of a node */
    uint32_t top;               /* the level with one node */
    uint32_t deferred;          /* bl_pages_defer: changed stripes become stale */
    uint64_t low_page;          /* no run of low_need pages begins before this page, or after it */
    uint64_t low_rest;          /* and before this page; the pages before both are not free */
    uint64_t low_need;
    void *table;
    size_t table_size;
    uint64_t free_stripe_count;
    uint64_t lost_stripe_count;
    uint64_t used_bytes;
    uint64_t held_bytes;
};

uint32_t bl_block_size(uint64_t bytes)
{
    uint64_t size = (bytes + BL_PAGE_SIZE - 1) / BL_PAGE_SIZE * BL_PAGE_SIZE;
    return bytes <= BL_BLOCK_SIZE_MAX ? (uint32_t)size : 0;
}

/* ---- The tree */

static inline uint32_t bl_runs_whole(const bl_pages *pages, uint32_t level)
{
    return (uint32_t)bl_min(pages->span[level], BL_RUN_MAX);
}

static inline bl_runs bl_runs_get(const bl_pages *pages, uint32_t level, uint64_t node)
{
    bl_runs less = pages->level[level][node];
    uint32_t whole = bl_runs_whole(pages, level);
    return (bl_runs){whole - less.first, whole - less.last, whole - less.most};
}

/* Set a node. Returns 1 if it changed. */
static inline int bl_runs_set(bl_pages *pages, uint32_t level, uint64_t node, bl_runs runs)
{
    uint32_t whole = bl_runs_whole(pages, level);
    bl_runs *at = &pages->level[level][node];
    bl_runs less = {whole - runs.first, whole - runs.last, whole - runs.most};
    if (at->first == less.first && at->last == less.last && at->most == less.most)
        return 0;
    *at = less;
    return 1;
}

/* Return the first page of a stripe, at or after from, that is free (state 0) or taken (1), or
 * BL_STRIPE_PAGES. */
static inline uint32_t bl_stripe_next(const uint64_t *taken, uint32_t from, int state)
{
    uint64_t flip = state ? 0 : UINT64_MAX;
    for (uint32_t word = from / 64; word < BL_STRIPE_WORDS; word++, from = 0) {
        uint64_t bits = (taken[word] ^ flip) & (UINT64_MAX << (from % 64));
        if (bits)
            return word * 64 + (uint32_t)__builtin_ctzll(bits);
    }
    return BL_STRIPE_PAGES;
}

static inline int bl_stripe_lost(const bl_pages *pages, uint64_t stripe)
{
    return pages->lost.level[0][stripe / 64] >> (stripe % 64) & 1;
}

static bl_runs bl_stripe_runs(const bl_pages *pages, uint64_t stripe)
{
    const uint64_t *taken = &pages->taken[stripe * BL_STRIPE_WORDS];
    bl_runs runs = {0, 0, 0};
    uint32_t start = bl_stripe_lost(pages, stripe) ? BL_STRIPE_PAGES : bl_stripe_next(taken, 0, 0);
    while (start < BL_STRIPE_PAGES) {
        uint32_t end = bl_stripe_next(taken, start, 1), run = end - start;
        if (start == 0)
            runs.first = run;
        if (end == BL_STRIPE_PAGES)
            runs.last = run;
        if (run > runs.most)
            runs.most = run;
        start = bl_stripe_next(taken, end, 0);
    }
    return runs;
}

/* The state of a walk over neighbors of one level that joins their runs. */
typedef struct bl_join {
    bl_runs runs;               /* runs of all nodes so far */
    uint64_t run;               /* the free run at the end of the last node */
    int whole;                  /* everything so far is free */
} bl_join;

static inline void bl_join_add(bl_join *join, bl_runs next, uint64_t span)
{
    int whole = next.first == span; /* false where runs are clipped to BL_RUN_MAX */
    if (join->whole)
        join->runs.first = (uint32_t)bl_min(join->runs.first + next.first, BL_RUN_MAX);
    join->whole &= whole;
    uint64_t most = bl_min(join->run + next.first, BL_RUN_MAX);
    most = most > next.most ? most : next.most;
    join->runs.most = most > join->runs.most ? (uint32_t)most : join->runs.most;
    join->run = whole ? join->run + span : next.last;
}

static bl_runs bl_node_runs(const bl_pages *pages, uint32_t level, uint64_t node)
{
    bl_join join = {.whole = 1};
    for (uint64_t child = node * BL_FAN; child < (node + 1) * BL_FAN; child++)
        bl_join_add(&join, bl_runs_get(pages, level - 1, child), pages->span[level - 1]);
    join.runs.last = (uint32_t)bl_min(join.run, BL_RUN_MAX);
    return join.runs;
}

/* Recompute the nodes of these stripes, up to last, and their ancestors. */
static void bl_pages_refresh(bl_pages *pages, uint64_t first, uint64_t last)
{
    int changed = 0;
    for (uint64_t stripe = first; stripe <= last; stripe++) {
        int was_free = pages->level[0][stripe].most == 0;
        bl_runs runs = bl_stripe_runs(pages, stripe);
        if (!bl_runs_set(pages, 0, stripe, runs))
            continue;
        changed = 1;
        pages->free_stripe_count -= (uint64_t)was_free;
        pages->free_stripe_count += runs.most == BL_STRIPE_PAGES;
    }
    for (uint32_t level = 1; level <= pages->top && changed; level++) {
        changed = 0;
        first /= BL_FAN;
        last /= BL_FAN;
        for (uint64_t node = first; node <= last; node++)
            changed |= bl_runs_set(pages, level, node, bl_node_runs(pages, level, node));
    }
}

/* Update the tree for changed stripes, up to last, or mark them stale while updates are
 * deferred. */
static void bl_pages_touch(bl_pages *pages, uint64_t first, uint64_t last)
{
    if (!pages->deferred) {
        bl_pages_refresh(pages, first, last);
        return;
    }
    for (uint64_t stripe = first; stripe <= last; stripe++)
        bl_bitset_add(&pages->stale, stripe);
}

/* Recompute all stale stripes, neighbors together, because they share ancestors. */
static void bl_pages_catch_up(bl_pages *pages)
{
    uint64_t first = bl_bitset_next(&pages->stale, 0), next;
    for (uint64_t last = first; first != BL_BITSET_NONE; first = last = next) {
        bl_bitset_remove(&pages->stale, first);
        while ((next = bl_bitset_next(&pages->stale, last + 1)) == last + 1)
            bl_bitset_remove(&pages->stale, last = next);
        bl_pages_refresh(pages, first, last);
    }
}

void bl_pages_defer(bl_pages *pages) { pages->deferred = 1; }

void bl_pages_settle(bl_pages *pages)
{
    bl_pages_catch_up(pages);
    pages->deferred = 0;
}

/* ---- Creation and destruction */

/* Return the number of nodes of a level, including those that only pad the last parent. */
static uint64_t bl_level_size(uint64_t node_count)
{
    return node_count == 1 ? 1 : (node_count + BL_FAN - 1) / BL_FAN * BL_FAN;
}

/* Allocate the levels, and set nodes after the last stripe to no free pages. */
static void bl_pages_grow(bl_pages *pages, bl_runs *memory)
{
    uint64_t nodes = pages->stripe_count, span = BL_STRIPE_PAGES;
    for (uint32_t level = 0; level <= pages->top; level++, span *= BL_FAN) {
        pages->level[level] = memory;
        pages->span[level] = span;
        memory += bl_level_size(nodes);
        for (uint64_t node = nodes; node < bl_level_size(nodes); node++)
            bl_runs_set(pages, level, node, (bl_runs){0, 0, 0});
        if (level > 0)
            bl_runs_set(pages, level, nodes - 1, bl_node_runs(pages, level, nodes - 1));
        nodes = (nodes + BL_FAN - 1) / BL_FAN;
    }
}

int bl_pages_create(bl_pages **out, uint64_t data_offset, uint64_t stripe_count)
{
    if (stripe_count > UINT32_MAX)
        return -EINVAL;
    bl_pages *pages = calloc(1, sizeof *pages);
    if (!pages)
        return -ENOMEM;
    pages->data_offset = data_offset;
    pages->stripe_count = pages->free_stripe_count = stripe_count;
    uint64_t nodes = stripe_count ? stripe_count : 1, node_count = bl_level_size(nodes);
    for (; nodes > 1; node_count += bl_level_size(nodes), pages->top++)
        nodes = (nodes + BL_FAN - 1) / BL_FAN;
    size_t bits = stripe_count * BL_STRIPE_WORDS, sets = bl_bitset_words(stripe_count);
    pages->table_size = 2 * (bits + sets) * sizeof(uint64_t) + node_count * sizeof(bl_runs) +
                        BL_PAGE_SIZE;
    pages->table = bl_lazy_map_dense(pages->table_size);
    if (!pages->table) {
        free(pages);
        return -ENOMEM;
    }
    uint64_t *memory = pages->table;
    pages->taken = memory;
    pages->held = memory += bits;
    bl_bitset_make(&pages->lost, memory += bits, stripe_count);
    bl_bitset_make(&pages->stale, memory += sets, stripe_count);
    if (stripe_count) {
        bl_pages_grow(pages, (bl_runs *)(memory + sets));
    } else { /* a single node without pages */
        pages->level[0] = (bl_runs *)(memory + sets);
        pages->span[0] = 0;
    }
    *out = pages;
    return 0;
}

void bl_pages_destroy(bl_pages *pages)
{
    if (!pages)
        return;
    bl_lazy_unmap(pages->table, pages->table_size);
    free(pages);
}

/* ---- Runs of pages, a word of bits at a time */

/* A run of pages, counted from the first stripe. */
typedef struct bl_run {
    uint64_t first, end;
} bl_run;

/* Convert a byte range to pages. Returns 0 if it is not within the stripes. */
static int bl_run_of(const bl_pages *pages, uint64_t offset, uint64_t size, bl_run *run)
{
    uint64_t inside = offset - pages->data_offset, end = pages->stripe_count * BL_STRIPE_PAGES;
    *run = (bl_run){inside / BL_PAGE_SIZE, inside / BL_PAGE_SIZE + size / BL_PAGE_SIZE};
    return offset >= pages->data_offset && inside % BL_PAGE_SIZE == 0 && size > 0 &&
           size % BL_PAGE_SIZE == 0 && run->first < end && size / BL_PAGE_SIZE <= end - run->first;
}

/* Return the mask of a run in one of its words. */
static inline uint64_t bl_run_mask(bl_run run, uint64_t word)
{
    uint64_t mask = UINT64_MAX;
    if (word == run.first / 64)
        mask &= UINT64_MAX << (run.first % 64);
    if (word == (run.end - 1) / 64)
        mask &= UINT64_MAX >> (63 - (run.end - 1) % 64);
    return mask;
}

static int bl_run_is_free(const bl_pages *pages, bl_run run)
{
    uint64_t taken = 0;
    for (uint64_t word = run.first / 64; word <= (run.end - 1) / 64; word++)
        taken |= pages->taken[word] & bl_run_mask(run, word);
    uint64_t first = run.first / BL_STRIPE_PAGES, last = (run.end - 1) / BL_STRIPE_PAGES;
    return !taken && (!pages->lost_stripe_count || bl_bitset_next(&pages->lost, first) > last);
}

/* ---- Search */

/* Return the first page of the lowest free run of need pages, from the tree, or BL_NO_PAGE. */
static uint64_t bl_tree_find(const bl_pages *pages, uint32_t need)
{
    uint32_t level = pages->top;
    uint64_t node = 0;
    if (bl_runs_get(pages, level, 0).most < need)
        return BL_NO_PAGE;
    for (; level > 0; level--) {
        uint64_t run = 0, span = pages->span[level - 1];
        for (node *= BL_FAN;; node++) { /* one child, or two neighbors together, have it */
            bl_runs runs = bl_runs_get(pages, level - 1, node);
            if (run + runs.first >= need)
                return node * span - run;
            if (runs.most >= need)
                break;
            run = runs.first == span ? run + span : runs.last;
        }
    }
    const uint64_t *taken = &pages->taken[node * BL_STRIPE_WORDS];
    uint32_t start = bl_stripe_next(taken, 0, 0), end = bl_stripe_next(taken, start, 1);
    while (end - start < need) {
        start = bl_stripe_next(taken, end, 0);
        end = bl_stripe_next(taken, start, 1);
    }
    return node * BL_STRIPE_PAGES + start;
}

/* Return 1 if need pages from this one on are free. */
static int bl_page_serves(const bl_pages *pages, uint64_t page, uint64_t need)
{
    return need <= pages->stripe_count * BL_STRIPE_PAGES - page &&
           (need == 0 || bl_run_is_free(pages, (bl_run){page, page + need}));
}

int bl_pages_find(bl_pages *pages, uint32_t size, uint64_t *offset)
{
    uint32_t need = size / BL_PAGE_SIZE;
    uint64_t end = pages->stripe_count * BL_STRIPE_PAGES;
    if (need == 0)
        return -EAGAIN;
    if (need < pages->low_need || !bl_page_serves(pages, pages->low_page, need)) {
        uint64_t page = need < pages->low_need ? 0 : pages->low_rest;
        if (page < end && (page == pages->low_page || !bl_page_serves(pages, page, need))) {
            bl_pages_catch_up(pages);
            page = bl_tree_find(pages, need);
        }
        pages->low_page = pages->low_rest = page < end ? page : end;
        pages->low_need = need;
    }
    *offset = pages->data_offset + pages->low_page * BL_PAGE_SIZE;
    return pages->low_page < end ? 0 : -EAGAIN;
}

uint64_t bl_pages_free_before(const bl_pages *pages, uint64_t offset)
{
    uint64_t end = (offset - pages->data_offset) / BL_PAGE_SIZE, page = end;
    while (page > 0 && !bl_stripe_lost(pages, (page - 1) / BL_STRIPE_PAGES)) {
        uint64_t word = (page - 1) / 64, below = page - word * 64; /* bits of the word, 1 to 64 */
        uint64_t bits = pages->taken[word] << (64 - below);
        if (bits) {
            page -= (uint64_t)__builtin_clzll(bits);
            break;
        }
        page = word * 64;
    }
    return (end - page) * BL_PAGE_SIZE;
}

uint64_t bl_pages_free_after(const bl_pages *pages, uint64_t offset)
{
    uint64_t first = (offset - pages->data_offset) / BL_PAGE_SIZE, page = first;
    uint64_t end = pages->stripe_count * BL_STRIPE_PAGES;
    while (page < end && !bl_stripe_lost(pages, page / BL_STRIPE_PAGES)) {
        uint64_t bits = pages->taken[page / 64] >> (page % 64);
        if (bits) {
            page += (uint64_t)__builtin_ctzll(bits);
            break;
        }
        page = (page / 64 + 1) * 64;
    }
    return (page - first) * BL_PAGE_SIZE;
}

/* ---- Changes */

/* Return 1 if all of these pages are taken, and all (held 1) or none (held 0) of them held. */
static int bl_run_is_taken(const bl_pages *pages, bl_run run, int held)
{
    uint64_t other = 0;
    for (uint64_t word = run.first / 64; word <= (run.end - 1) / 64; word++) {
        uint64_t mask = bl_run_mask(run, word);
        other |= ~pages->taken[word] & mask;
        other |= (held ? ~pages->held[word] : pages->held[word]) & mask;
    }
    return !other;
}

static void bl_run_mark(uint64_t *bits, bl_run run, int on)
{
    for (uint64_t word = run.first / 64; word <= (run.end - 1) / 64; word++) {
        if (on)
            bits[word] |= bl_run_mask(run, word);
        else
            bits[word] &= ~bl_run_mask(run, word);
    }
}

/* Turn a free run into a used one. The rest of the run at low_page follows it. */
static void bl_run_take(bl_pages *pages, bl_run run)
{
    bl_run_mark(pages->taken, run, 1);
    if (run.first == pages->low_page)
        pages->low_page = run.end;
    else if (run.first > pages->low_page)
        pages->low_rest = pages->low_page;
    pages->low_rest = bl_max(pages->low_rest, pages->low_page);
    bl_pages_touch(pages, run.first / BL_STRIPE_PAGES, (run.end - 1) / BL_STRIPE_PAGES);
}

/* Turn a used run into a free one. It may join the run at low_rest, which then begins earlier. Lost
 * stripes stay taken, so the free part may begin after the run's first page. */
static void bl_run_give(bl_pages *pages, bl_run run)
{
    int serves = bl_page_serves(pages, pages->low_page, pages->low_need);
    bl_run_mark(pages->taken, run, 0);
    if (run.first < pages->low_rest) {
        uint64_t before = pages->data_offset + run.first * BL_PAGE_SIZE;
        uint64_t start = run.first - bl_pages_free_before(pages, before) / BL_PAGE_SIZE;
        pages->low_page = serves ? bl_min(start, pages->low_page) : start;
        if (serves || run.end == pages->low_rest || pages->lost_stripe_count)
            pages->low_rest = pages->low_page;
    }
    bl_pages_touch(pages, run.first / BL_STRIPE_PAGES, (run.end - 1) / BL_STRIPE_PAGES);
}

void bl_pages_prefetch(const bl_pages *pages, uint64_t offset)
{
    uint64_t stripe = (offset - pages->data_offset) / BL_STRIPE_SIZE;
    if (stripe < pages->stripe_count)
        bl_prefetch(&pages->taken[stripe * BL_STRIPE_WORDS]);
}

int bl_pages_take(bl_pages *pages, uint64_t offset, uint32_t size)
{
    bl_run run;
    if (!bl_run_of(pages, offset, size, &run))
        return -EINVAL;
    if (!bl_run_is_free(pages, run))
        return -EEXIST;
    bl_run_take(pages, run);
    pages->used_bytes += size;
    return 0;
}

int bl_pages_give(bl_pages *pages, uint64_t offset, uint32_t size)
{
    bl_run run;
    if (!bl_run_of(pages, offset, size, &run) || !bl_run_is_taken(pages, run, 0))
        return -EINVAL;
    bl_run_give(pages, run);
    pages->used_bytes -= size;
    return 0;
}

int bl_pages_hold(bl_pages *pages, uint64_t offset, uint32_t size)
{
    bl_run run;
    if (!bl_run_of(pages, offset, size, &run) || !bl_run_is_taken(pages, run, 0))
        return -EINVAL;
    bl_run_mark(pages->held, run, 1);
    pages->used_bytes -= size;
    pages->held_bytes += size;
    return 0;
}

int bl_pages_unhold(bl_pages *pages, uint64_t offset, uint32_t size)
{
    bl_run run;
    if (!bl_run_of(pages, offset, size, &run) || !bl_run_is_taken(pages, run, 1))
        return -EINVAL;
    bl_run_mark(pages->held, run, 0);
    bl_run_give(pages, run);
    pages->held_bytes -= size;
    return 0;
}

/* ---- Whole stripes */

void bl_pages_lose(bl_pages *pages, uint64_t first_stripe, uint64_t stripe_count)
{
    pages->low_rest = pages->low_page;
    for (uint64_t stripe = first_stripe; stripe < first_stripe + stripe_count; stripe++) {
        pages->lost_stripe_count += !bl_stripe_lost(pages, stripe);
        bl_bitset_add(&pages->lost, stripe);
        bl_pages_touch(pages, stripe, stripe);
    }
}

void bl_pages_hold_free(bl_pages *pages, uint64_t first_stripe, uint64_t stripe_count)
{
    pages->low_rest = pages->low_page;
    for (uint64_t stripe = first_stripe; stripe < first_stripe + stripe_count; stripe++) {
        uint64_t held_bytes = pages->held_bytes;
        if (bl_stripe_lost(pages, stripe))
            continue;
        for (uint64_t word = stripe * BL_STRIPE_WORDS; word < (stripe + 1) * BL_STRIPE_WORDS;
             word++) {
            uint64_t free = ~pages->taken[word];
            if (!free)
                continue; /* do not touch memory of a full pool without need */
            pages->held[word] |= free;
            pages->taken[word] = UINT64_MAX;
            pages->held_bytes += (uint64_t)__builtin_popcountll(free) * BL_PAGE_SIZE;
        }
        if (pages->held_bytes != held_bytes)
            bl_pages_touch(pages, stripe, stripe);
    }
}

void bl_pages_unhold_all(bl_pages *pages)
{
    uint64_t offset = pages->data_offset;
    uint32_t size;
    for (; bl_pages_next_held(pages, &offset, &size) == 0; offset += size)
        bl_pages_unhold(pages, offset, size);
}

int bl_pages_next_held(const bl_pages *pages, uint64_t *offset, uint32_t *size)
{
    uint64_t page = (*offset - pages->data_offset) / BL_PAGE_SIZE, left = pages->held_bytes;
    for (uint64_t stripe = page / BL_STRIPE_PAGES; left && stripe < pages->stripe_count;
         stripe++, page = stripe * BL_STRIPE_PAGES) {
        const uint64_t *held = &pages->held[stripe * BL_STRIPE_WORDS];
        uint32_t first = bl_stripe_next(held, (uint32_t)(page % BL_STRIPE_PAGES), 1);
        if (first == BL_STRIPE_PAGES)
            continue;
        *offset = pages->data_offset + (stripe * BL_STRIPE_PAGES + first) * BL_PAGE_SIZE;
        *size = (bl_stripe_next(held, first, 0) - first) * BL_PAGE_SIZE;
        return 0;
    }
    return -ENOENT;
}

uint64_t bl_pages_free_within(const bl_pages *pages, uint64_t offset, uint64_t size)
{
    bl_run run;
    uint64_t free = 0;
    if (!bl_run_of(pages, offset, size, &run))
        return 0;
    for (uint64_t word = run.first / 64; word <= (run.end - 1) / 64; word++)
        if (!bl_stripe_lost(pages, word / BL_STRIPE_WORDS))
            free += (uint64_t)__builtin_popcountll(~pages->taken[word] & bl_run_mask(run, word));
    return free * BL_PAGE_SIZE;
}

int bl_pages_idle(const bl_pages *pages, uint64_t first_stripe, uint64_t stripe_count)
{
    uint64_t taken = 0;
    for (uint64_t word = first_stripe * BL_STRIPE_WORDS;
         word < (first_stripe + stripe_count) * BL_STRIPE_WORDS && !taken; word++)
        taken |= pages->taken[word];
    return !taken;
}

void bl_pages_of_stripe(const bl_pages *pages, uint64_t stripe, uint32_t *used, uint32_t *held)
{
    uint32_t taken_count = 0, held_count = 0;
    for (uint64_t word = stripe * BL_STRIPE_WORDS; word < (stripe + 1) * BL_STRIPE_WORDS; word++) {
        uint64_t bits = pages->held[word];
        taken_count += (uint32_t)__builtin_popcountll(pages->taken[word] | bits);
        held_count += (uint32_t)__builtin_popcountll(bits);
    }
    *used = (taken_count - held_count) * BL_PAGE_SIZE;
    *held = held_count * BL_PAGE_SIZE;
}

void bl_pages_count(const bl_pages *pages, bl_pages_stat *out)
{
    *out = (bl_pages_stat){
        .stripe_count = pages->stripe_count,
        .free_stripe_count = pages->free_stripe_count,
        .lost_stripe_count = pages->lost_stripe_count,
        .used_bytes = pages->used_bytes,
        .held_bytes = pages->held_bytes,
        .free_run_bytes = (uint64_t)bl_runs_get(pages, pages->top, 0).most * BL_PAGE_SIZE,
    };
}

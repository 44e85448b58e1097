/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * The hints of index/hints.h. Hints with a lifetime are in a heap, by expiry. A hit only records
 * its time; a hint that reaches the top of the heap is moved if it was used since.
 */
#include "index/hints.h"

#include <stdlib.h>

#include "base/lazy.h"
#include "index/call.h"

enum {
    BL_HINTS_PER_SESSION = 16384,
    BL_HINTS_EXPIRED = 256      /* hints that expire in one call; the others wait for the next
                                 * call */
};
static const uint64_t BL_NS_PER_MS = 1000000;

typedef struct bl_hint {
    uint64_t ttl_ns;            /* lifetime after the last use; 0: no limit */
    uint64_t used_ns;           /* time of the block's last use, or of the hint */
    uint64_t due_ns;            /* heap key: no later than its expiry */
    uint32_t owner;             /* 1 + lane of the session; 0: no hint */
    uint32_t place;             /* 1 + index in the heap; 0: not in it */
    bl_link link;               /* in the list of the owner's hints */
} bl_hint;

struct bl_hints {
    bl_hint *of;                /* by block number */
    uint32_t *heap;
    uint32_t heap_count;
    uint32_t *first;            /* per lane */
    uint32_t *count;            /* per lane */
    uint64_t favored_bytes[BL_SHARE_COUNT]; /* space of HIGH and PINNED blocks */
    bl_hint_stat stat;
};

/* ---- The heap */

static void bl_hint_put(bl_hints *hints, uint32_t place, uint32_t number)
{
    hints->heap[place] = number;
    hints->of[number].place = place + 1;
}

static uint64_t bl_hint_due(const bl_hints *hints, uint32_t place)
{
    return hints->of[hints->heap[place]].due_ns;
}

static void bl_hint_swap(bl_hints *hints, uint32_t one, uint32_t other)
{
    uint32_t number = hints->heap[one];
    bl_hint_put(hints, one, hints->heap[other]);
    bl_hint_put(hints, other, number);
}

/* Restore the heap order for a hint whose time has changed. */
static void bl_hint_settle(bl_hints *hints, uint32_t place)
{
    for (; place > 0 && bl_hint_due(hints, place) < bl_hint_due(hints, (place - 1) / 2);
         place = (place - 1) / 2)
        bl_hint_swap(hints, place, (place - 1) / 2);
    for (uint32_t child; (child = 2 * place + 1) < hints->heap_count; place = child) {
        if (child + 1 < hints->heap_count &&
            bl_hint_due(hints, child + 1) < bl_hint_due(hints, child))
            child++;
        if (bl_hint_due(hints, place) <= bl_hint_due(hints, child))
            return;
        bl_hint_swap(hints, place, child);
    }
}

static void bl_hint_time(bl_hints *hints, uint32_t number)
{
    bl_hint *hint = &hints->of[number];
    hint->due_ns = hint->used_ns + hint->ttl_ns;
    if (hint->place == 0)
        bl_hint_put(hints, hints->heap_count++, number);
    bl_hint_settle(hints, hint->place - 1);
}

static void bl_hint_untime(bl_hints *hints, uint32_t number)
{
    uint32_t place = hints->of[number].place;
    if (place == 0)
        return;
    uint32_t last = hints->heap[--hints->heap_count];
    hints->of[number].place = 0;
    if (last != number) {
        bl_hint_put(hints, place - 1, last);
        bl_hint_settle(hints, place - 1);
    }
}

/* ---- One hint */

static int bl_level_favors(uint32_t level)
{
    return level == BL_LEVEL_HIGH || level == BL_LEVEL_PINNED;
}

/* Move a block to the eviction order of a level, as the newest or, with cool, the coldest. */
static void bl_hint_move(bl_index *index, uint32_t number, uint32_t level, int cool)
{
    bl_block *block = &index->blocks[number];
    uint32_t share = bl_block_share(block), size = bl_space_size(block);
    int is_there = bl_evict_has(bl_order_of(index, number), number);
    bl_evict_remove(bl_order_of(index, number), number);
    if (bl_level_favors(bl_block_level(block)))
        index->hints->favored_bytes[share] -= size;
    if (bl_level_favors(level))
        index->hints->favored_bytes[share] += size;
    block->order = (uint8_t)bl_order_number(share, level);
    if (is_there && cool)
        bl_evict_cool(bl_order_of(index, number), number);
    else if (is_there)
        bl_evict_touch(bl_order_of(index, number), number);
}

static bl_hint *bl_hint_of(const bl_index *index, uint32_t number)
{
    bl_hint *hint = &index->hints->of[number];
    return hint->owner ? hint : NULL;
}

/* Remove a hint from its session's list and from the heap. */
static void bl_hint_disown(bl_index *index, uint32_t number)
{
    bl_hints *hints = index->hints;
    bl_hint *hint = &hints->of[number];
    uint32_t lane = hint->owner - 1;
    bl_hint_untime(hints, number);
    if (hint->link.next != BL_NO_NUMBER)
        hints->of[hint->link.next].link.previous = hint->link.previous;
    if (hint->link.previous != BL_NO_NUMBER)
        hints->of[hint->link.previous].link.next = hint->link.next;
    else
        hints->first[lane] = hint->link.next;
    hints->count[lane]--;
    hints->stat.hint_count--;
    hint->owner = 0;
}

static void bl_hint_own(bl_index *index, uint32_t number, uint32_t lane)
{
    bl_hints *hints = index->hints;
    uint32_t next = hints->first[lane];
    hints->of[number].owner = lane + 1;
    hints->of[number].link = (bl_link){next, BL_NO_NUMBER};
    if (next != BL_NO_NUMBER)
        hints->of[next].link.previous = number;
    hints->first[lane] = number;
    hints->count[lane]++;
    hints->stat.hint_count++;
}

void bl_hint_forget(bl_index *index, uint32_t number)
{
    if (bl_hint_of(index, number) == NULL)
        return;
    bl_hint_disown(index, number);
    bl_hint_move(index, number, BL_LEVEL_NORMAL, 0);
}

void bl_hint_used(bl_index *index, uint32_t number, uint64_t now_ns)
{
    bl_hint *hint = bl_hint_of(index, number);
    if (hint)
        hint->used_ns = now_ns;
}

void bl_hints_expire(bl_index *index)
{
    bl_hints *hints = index->hints;
    if (hints->heap_count == 0)
        return;
    uint64_t now_ns = bl_now_ns(&index->pool->memory);
    for (int ended = 0; ended < BL_HINTS_EXPIRED && hints->heap_count > 0; ended++) {
        uint32_t number = hints->heap[0];
        const bl_hint *hint = &hints->of[number];
        if (hint->due_ns > now_ns)
            return;
        if (hint->used_ns + hint->ttl_ns > now_ns) {
            bl_hint_time(hints, number);
            continue;
        }
        bl_hint_disown(index, number);
        bl_hint_move(index, number, BL_LEVEL_NORMAL, 1);
        hints->stat.expire_count++;
    }
}

void bl_hints_lane_gone(bl_index *index, uint32_t lane)
{
    while (index->hints->first[lane] != BL_NO_NUMBER) {
        uint32_t number = index->hints->first[lane];
        int is_low = bl_block_level(&index->blocks[number]) == BL_LEVEL_LOW;
        bl_hint_disown(index, number);
        bl_hint_move(index, number, BL_LEVEL_NORMAL, is_low);
    }
}

/* ---- The call */

/* Allocate the memory for hints. Returns 0 or -ENOMEM. */
static int bl_hints_create(bl_index *index)
{
    const bl_geometry *g = &index->pool->geometry;
    bl_hints *hints = calloc(1, sizeof *hints);
    if (hints == NULL)
        return -ENOMEM;
    index->hints = hints;
    hints->of = bl_lazy_map(g->block_count_max * sizeof *hints->of);
    hints->heap = bl_lazy_map(g->block_count_max * sizeof *hints->heap);
    hints->first = malloc(g->lane_count * sizeof *hints->first);
    hints->count = calloc(g->lane_count, sizeof *hints->count);
    if (!hints->of || !hints->heap || !hints->first || !hints->count) {
        bl_hints_destroy(index);
        return -ENOMEM;
    }
    for (uint32_t lane = 0; lane < g->lane_count; lane++)
        hints->first[lane] = BL_NO_NUMBER;
    return 0;
}

void bl_hints_destroy(bl_index *index)
{
    bl_hints *hints = index->hints;
    uint64_t count = index->pool->geometry.block_count_max;
    if (hints == NULL)
        return;
    bl_lazy_unmap(hints->of, count * sizeof *hints->of);
    bl_lazy_unmap(hints->heap, count * sizeof *hints->heap);
    free(hints->first);
    free(hints->count);
    free(hints);
    index->hints = NULL;
}

/* Return how many bytes of a share hints may favor. */
static uint64_t bl_hint_budget(const bl_index *index, uint32_t share)
{
    return bl_part_of(index->shares[share].bytes, index->hint_part);
}

/* Return 1 if the block at this level, together with pending bytes that are favored next, would
 * exceed the budget of its share; otherwise add its bytes to them. */
static int bl_hint_exceeds(const bl_index *index, const bl_block *block, uint32_t level,
                           uint64_t *pending)
{
    uint32_t share = bl_block_share(block), size = bl_space_size(block);
    if (!bl_level_favors(level) || bl_level_favors(bl_block_level(block)))
        return 0;
    if (index->hints->favored_bytes[share] + pending[share] + size > bl_hint_budget(index, share))
        return 1;
    pending[share] += size;
    return 0;
}

/* Set a block's hint that its budget allows, in place of an earlier one. Returns 0 if it is
 * refused. */
static int bl_hint_give(bl_index *index, uint32_t lane, uint32_t number, uint32_t level,
                        uint64_t ttl_ns)
{
    const bl_block *block = &index->blocks[number];
    uint32_t order = bl_order_number(bl_block_share(block), level);
    int is_hint = level != BL_LEVEL_NORMAL || ttl_ns != 0;
    const bl_hint *before = bl_hint_of(index, number);
    int is_own = before && before->owner == lane + 1;
    if (is_hint && !is_own && index->hints->count[lane] >= BL_HINTS_PER_SESSION)
        return 0;
    if (index->orders[order] == NULL &&
        bl_evict_create(&index->orders[order], index->pool->geometry.block_count_max, BL_EVICT_LRU))
        return 0;
    if (before)
        bl_hint_disown(index, number);
    if (level != bl_block_level(block))
        bl_hint_move(index, number, level, 0);
    if (!is_hint)
        return 1;
    bl_hint_own(index, number, lane);
    index->hints->of[number].ttl_ns = ttl_ns;
    index->hints->of[number].used_ns = bl_now_ns(&index->pool->memory);
    if (ttl_ns != 0)
        bl_hint_time(index->hints, number);
    return 1;
}

/* Return the number of the block that a call has a hint for, or -1. */
static int64_t bl_hint_target(const bl_index *index, const uint8_t *keys, uint32_t place)
{
    uint64_t key[2];
    memcpy(key, keys + place * sizeof key, sizeof key);
    int64_t number = bl_hash_find(index->hash, key);
    return number >= 0 && index->blocks[number].state == BL_NUMBER_COMMITTED &&
           index->blocks[number].task == 0
        ? number : -1;
}

int bl_handle_hint(void *context, bl_call *call)
{
    bl_index *index = context;
    bl_block_request head;
    uint32_t given = 0, refused = 0;
    uint8_t exceeds[BL_CALL_KEYS_MAX];
    uint64_t pending[BL_SHARE_COUNT] = {0};
    const uint8_t *keys = bl_index_items(call, 2 * sizeof(uint64_t), &head);
    if (keys == NULL || head.flags >= BL_LEVEL_COUNT)
        return -BL_ERROR_BAD_REQUEST;
    if (index->hints == NULL && bl_hints_create(index) < 0)
        return -ENOMEM;
    bl_hints_expire(index);
    for (uint32_t i = 0; i < head.count; i++) { /* in order: parents before children */
        int64_t number = bl_hint_target(index, keys, i);
        exceeds[i] = number >= 0 && bl_hint_exceeds(index, &index->blocks[number], head.flags,
                                                     pending);
    }
    for (uint32_t i = head.count; i-- > 0;) { /* last first: a parent is newer than its child */
        int64_t number = bl_hint_target(index, keys, i);
        if (number < 0)
            continue;
        int done = !exceeds[i] && bl_hint_give(index, call->lane, (uint32_t)number, head.flags,
                                               head.length * BL_NS_PER_MS);
        given += done;
        refused += !done;
    }
    index->hints->stat.given_count += given;
    index->hints->stat.refuse_count += refused;
    index->hints->stat.absent_count += head.count - given - refused;
    bl_index_reply(call, given, refused, 0);
    return 0;
}

void bl_index_hints(const bl_index *index, bl_hint_stat *out)
{
    *out = index->hints ? index->hints->stat : (bl_hint_stat){0};
    for (uint32_t share = 0; index->hints && share < BL_SHARE_COUNT; share++)
        out->favored_bytes += index->hints->favored_bytes[share];
}

void bl_hints_view(const bl_index *index, uint32_t share, bl_share_view *out)
{
    out->hint_bytes = bl_hint_budget(index, share);
    out->hinted_bytes = index->hints ? index->hints->favored_bytes[share] : 0;
}

int bl_index_hint_part(bl_index *index, uint32_t part)
{
    if (part > BL_SHARE_WHOLE)
        return -EINVAL;
    index->hint_part = part;
    return 0;
}

/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * The blocks that were recently sent to workers (api/routing.h). All entries have the same
 * lifetime, so a rank's list in the order of sending is also in the order of expiry. A request's
 * last block comes first in it, so an early removal shortens the prefix from its end.
 */
#include "api/routing.h"

#include <errno.h>
#include <stdlib.h>

#include "base/lazy.h"
#include "prefix/prefix_tree.h"

typedef struct bl_sent_entry {
    uint64_t name;              /* hash of the block's whole path */
    double until;
    uint32_t rank;
    uint32_t older;             /* in the rank's list; numbers begin at 1 */
    uint32_t newer;             /* of a free entry: the next free one */
    uint32_t reserved;
} bl_sent_entry;

typedef struct bl_sent_list {
    uint32_t oldest;
    uint32_t newest;
} bl_sent_list;

struct bl_sent {
    bl_prefix *tree;
    bl_sent_entry *entry;
    bl_prefix_table table;      /* by name and rank */
    bl_sent_list *list;         /* by rank */
    uint64_t *names;            /* of the request that is added */
    uint32_t rank_max, block_max;
    uint32_t top, free, count;
    double ttl_s;
};

enum { BL_SENT_AHEAD = 8 };     /* blocks to prefetch ahead: slots are scattered over many MiB */

/* A request has at most block_max blocks, and they are added before others are removed. */
static size_t bl_sent_room(const bl_sent *sent)
{
    return 2 * (size_t)sent->block_max + 1;
}

int bl_sent_create(bl_sent **out, bl_prefix *tree, uint32_t rank_max, uint32_t block_max,
                   double ttl_s)
{
    if (rank_max < 1 || rank_max >= BL_PREFIX_RANKS_MAX || block_max < 1 ||
        block_max > BL_PREFIX_BLOCKS_MAX / 2)
        return -EINVAL;
    bl_sent *sent = calloc(1, sizeof *sent);
    if (!sent)
        return -ENOMEM;
    *sent = (bl_sent){.tree = tree, .rank_max = rank_max, .block_max = block_max, .top = 1,
                      .ttl_s = ttl_s};
    uint64_t slots = 4;
    while (slots * 2 < bl_sent_room(sent) * 3)
        slots *= 2;
    sent->table.mask = slots - 1;
    sent->table.slot = bl_lazy_map_dense(slots * sizeof *sent->table.slot);
    sent->entry = bl_lazy_map_dense(bl_sent_room(sent) * sizeof *sent->entry);
    sent->list = calloc(rank_max + 1, sizeof *sent->list);
    sent->names = bl_lazy_map(block_max * sizeof *sent->names);
    if (!sent->table.slot || !sent->entry || !sent->list || !sent->names) {
        bl_sent_destroy(sent);
        return -ENOMEM;
    }
    *out = sent;
    return 0;
}

void bl_sent_destroy(bl_sent *sent)
{
    if (!sent)
        return;
    bl_lazy_unmap(sent->table.slot, (sent->table.mask + 1) * sizeof *sent->table.slot);
    bl_lazy_unmap(sent->entry, bl_sent_room(sent) * sizeof *sent->entry);
    bl_lazy_unmap(sent->names, sent->block_max * sizeof *sent->names);
    free(sent->list);
    free(sent);
}

static uint32_t bl_sent_tag(const bl_sent *sent, uint32_t rank, uint64_t name)
{
    return (uint32_t)(bl_prefix_mix(name ^ sent->tree->seed[0],
                                    (sent->tree->seed[1] ^ rank) | 1) >> 32);
}

static uint32_t bl_sent_find(const bl_sent *sent, uint32_t rank, uint64_t name)
{
    uint32_t tag = bl_sent_tag(sent, rank, name), number;
    uint64_t at = tag;
    while ((number = bl_prefix_next(&sent->table, tag, &at)))
        if (sent->entry[number].name == name && sent->entry[number].rank == rank)
            break;
    return number;
}

static void bl_sent_unlink(bl_sent *sent, uint32_t number)
{
    const bl_sent_entry *entry = &sent->entry[number];
    bl_sent_list *list = &sent->list[entry->rank];
    *(entry->older ? &sent->entry[entry->older].newer : &list->oldest) = entry->newer;
    *(entry->newer ? &sent->entry[entry->newer].older : &list->newest) = entry->older;
}

static void bl_sent_append(bl_sent *sent, uint32_t number)
{
    bl_sent_entry *entry = &sent->entry[number];
    bl_sent_list *list = &sent->list[entry->rank];
    entry->older = list->newest;
    entry->newer = 0;
    *(list->newest ? &sent->entry[list->newest].newer : &list->oldest) = number;
    list->newest = number;
}

/* Remove an entry here; the tree still has the block. */
static void bl_sent_drop(bl_sent *sent, uint32_t number)
{
    bl_sent_entry *entry = &sent->entry[number];
    bl_sent_unlink(sent, number);
    bl_prefix_table_remove(&sent->table, bl_sent_tag(sent, entry->rank, entry->name), number);
    entry->newer = sent->free;
    sent->free = number;
    sent->count--;
}

static void bl_sent_forget(bl_sent *sent, uint32_t number)
{
    bl_prefix_outcome outcome = {0};
    const bl_sent_entry *entry = &sent->entry[number];
    bl_prefix_remove(sent->tree, entry->rank, BL_PREFIX_DEVICE, &entry->name, 1, &outcome);
    bl_sent_drop(sent, number);
}

void bl_sent_expire(bl_sent *sent, double now)
{
    for (uint32_t rank = 1; sent->count && rank <= sent->rank_max; rank++) {
        uint32_t number;
        while ((number = sent->list[rank].oldest) && sent->entry[number].until <= now)
            bl_sent_forget(sent, number);
    }
}

/* Remove the entries that would expire first, of any rank, until this many remain. */
static void bl_sent_prune(bl_sent *sent, uint32_t left)
{
    while (sent->count > left) {
        uint32_t first = 0;
        for (uint32_t rank = 1; rank <= sent->rank_max; rank++) {
            uint32_t number = sent->list[rank].oldest;
            if (number && (!first || sent->entry[number].until < sent->entry[first].until))
                first = number;
        }
        double until = sent->entry[first].until;
        const bl_sent_list *list = &sent->list[sent->entry[first].rank];
        for (uint32_t number = first; number && sent->count > left; number = list->oldest) {
            if (sent->entry[number].until > until)
                break;
            bl_sent_forget(sent, number);
        }
    }
}

void bl_sent_add(bl_sent *sent, uint32_t rank, const uint64_t *locals, uint32_t count, double now)
{
    if (rank < 1 || rank > sent->rank_max)
        return;
    if (count > sent->block_max)
        count = sent->block_max;
    bl_sent_expire(sent, now);
    bl_prefix_paths(sent->tree, locals, count, sent->names);
    for (uint32_t i = count; i-- > 0;) {
        uint64_t name = sent->names[i];
        if (i >= BL_SENT_AHEAD)
            bl_prefetch(bl_prefix_slot(
                &sent->table, bl_sent_tag(sent, rank, sent->names[i - BL_SENT_AHEAD])));
        uint32_t number = bl_sent_find(sent, rank, name);
        if (number) {
            bl_sent_unlink(sent, number);
        } else {
            number = sent->free ? sent->free : sent->top++;
            if (number == sent->free)
                sent->free = sent->entry[number].newer;
            sent->entry[number] = (bl_sent_entry){.name = name, .rank = rank};
            bl_prefix_table_add(&sent->table, bl_sent_tag(sent, rank, name), number);
            sent->count++;
        }
        sent->entry[number].until = now + sent->ttl_s;
        bl_sent_append(sent, number);
    }
    if (sent->count > sent->block_max)
        bl_sent_prune(sent, (uint32_t)((uint64_t)sent->block_max * 4 / 5));
    /* If the request itself was pruned, from its end, the tree gets the rest: no entry would remove
     * the other blocks from it. */
    while (count > 0 && !bl_sent_find(sent, rank, sent->names[count - 1]))
        count--;
    bl_prefix_outcome outcome = {0};
    bl_prefix_store(sent->tree, rank, BL_PREFIX_DEVICE, rank, NULL, sent->names, locals, count,
                    &outcome);
}

void bl_sent_clear(bl_sent *sent, uint32_t rank)
{
    if (rank < 1 || rank > sent->rank_max)
        return;
    while (sent->list[rank].oldest)
        bl_sent_drop(sent, sent->list[rank].oldest);
    bl_prefix_outcome outcome = {0};
    bl_prefix_clear(sent->tree, rank, &outcome);
}

uint32_t bl_sent_count(const bl_sent *sent) { return sent->count; }

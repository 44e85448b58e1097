/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * What a takeover reads and writes (D5), once, after its epoch is out and before it serves: the
 * predecessor's entries, then its open marks (a block's mark is older than its entry, so each entry
 * that was seen has its extent's). It may die anywhere: the predecessor's half is not touched.
 *
 * Afterwards the own half says the same as DRAM: every committed block has an entry, every extent a
 * mark, and nothing of two epochs ago is left. Space that is open and not committed is held while a
 * session of an earlier epoch may still write there. The eviction order starts by generation.
 */
#include <errno.h>
#include <stdlib.h>

#include "crash_point.h"
#include "meta.h"

enum { BL_SCAN_LINES = 4096 };  /* invalidated together: 256 KiB */

typedef struct bl_recovered {
    uint64_t generation;
    uint32_t number;
} bl_recovered;

const char *bl_entry_invalid(const bl_geometry *g, const bl_entry *entry)
{
    uint64_t end = g->data_offset + g->stripe_count * BL_STRIPE_SIZE;
    if (entry->length == 0)
        return "no bytes";
    if (entry->chunk_size != 0 && entry->chunk_size < BL_LINE_SIZE)
        return "chunks smaller than a line";
    if (entry->offset < g->data_offset || entry->offset % BL_PAGE_SIZE != 0)
        return "not in the data stripes";
    if (bl_stored_size(entry->length, entry->chunk_size) > end - entry->offset)
        return "beyond the end of the pool";
    return NULL;
}

/* Invalidate a batch of table lines: one fence for many. */
static void bl_scan_refetch(const bl_memory *memory, uint64_t offset, uint64_t line,
                            uint64_t line_count)
{
    if (line % BL_SCAN_LINES != 0)
        return;
    uint64_t lines = line_count - line < BL_SCAN_LINES ? line_count - line : BL_SCAN_LINES;
    bl_refetch(memory, offset, lines * BL_LINE_SIZE);
}

/* Copy the open marks into the own half and rebuild the extents. */
static void bl_recover_extents(bl_meta *meta)
{
    const bl_memory *memory = &meta->pool->memory;
    const bl_geometry *g = &meta->pool->geometry;
    uint32_t half = meta->server->half, old_half = 1 - half;
    for (uint64_t stripe = 0; stripe < g->stripe_count; stripe++) {
        uint64_t old_offset = bl_extent_line_offset(g, stripe, old_half);
        uint64_t own_offset = bl_extent_line_offset(g, stripe, half);
        bl_extent_line line, own;
        bl_scan_refetch(memory, old_offset, stripe, g->stripe_count);
        bl_scan_refetch(memory, own_offset, stripe, g->stripe_count);
        /* SYNC extent.open: pairs with bl_extent_write() */
        bl_load_line(memory, old_offset, &line);
        bl_load_line(memory, own_offset, &own);
        bl_ordered(memory, old_offset, bl_epoch_offset(half));
        bl_extent_view view = bl_extent_of(&line);
        if (bl_verify(memory, bl_table_whole(&line, stripe)) && line.state == BL_EXTENT_OPEN &&
            line.first_stripe == stripe && bl_extents_adopt(meta->extents, &view) == 0) {
            bl_believe(memory, old_offset);
            bl_extent_write(meta, &view, BL_EXTENT_OPEN);
            bl_crash_point("recover.extent_copied");
        } else if (bl_line_used((uint64_t *)&own)) {
            view = (bl_extent_view){.first_stripe = (uint32_t)stripe};
            bl_extent_write(meta, &view, BL_EXTENT_FREE);
        }
    }
}

/* Copy the committed blocks' entries into the own half and remember the blocks. */
static void bl_recover_entries(bl_meta *meta)
{
    const bl_memory *memory = &meta->pool->memory;
    const bl_geometry *g = &meta->pool->geometry;
    uint32_t half = meta->server->half, old_half = 1 - half;
    for (uint32_t number = 0; number < g->block_count_max; number++) {
        bl_entry entry, own;
        bl_block *block = &meta->blocks[number];
        bl_scan_refetch(memory, bl_entry_offset(g, number, old_half), number, g->block_count_max);
        bl_scan_refetch(memory, bl_entry_offset(g, number, half), number, g->block_count_max);
        bl_load_line(memory, bl_entry_offset(g, number, old_half), &entry); /* SYNC entry */
        /* SYNC entry.reuse: what was cleared before the epoch was out is seen cleared */
        bl_load_line(memory, bl_entry_offset(g, number, half), &own);
        bl_ordered(memory, bl_entry_offset(g, number, old_half), bl_epoch_offset(half));
        int whole = bl_verify(memory, bl_table_whole(&entry, number));
        if (whole && entry.state == BL_ENTRY_COMMITTED && !bl_entry_invalid(g, &entry)) {
            bl_believe(memory, bl_entry_offset(g, number, old_half));
            *block = (bl_block){
                .key = {entry.key[0], entry.key[1]},
                .generation = entry.generation,
                .offset = entry.offset,
                .layout = entry.layout,
                .length = entry.length,
                .chunk_size = entry.chunk_size,
                .state = BL_NUMBER_COMMITTED,
            };
            bl_stream_line(memory, bl_entry_offset(g, number, half), &entry);
            bl_crash_point("recover.entry_copied");
            continue;
        }
        meta->stat.damaged_count += bl_line_used((uint64_t *)&entry) &&
                                    (!whole || entry.state == BL_ENTRY_COMMITTED);
        block->state = BL_NUMBER_FREE;
        if (bl_line_used((uint64_t *)&own))
            bl_entry_clear(meta, number); /* of two epochs ago */
    }
}

static int bl_recovered_compare(const void *a, const void *b)
{
    const bl_recovered *left = a, *right = b;
    return (left->generation > right->generation) - (left->generation < right->generation);
}

/* Give a recovered block its space, its key and its place in the order, or drop it. */
static void bl_recover_block(bl_meta *meta, uint32_t number)
{
    bl_block *block = &meta->blocks[number];
    uint32_t block_size = bl_block_size(bl_stored_size(block->length, block->chunk_size));
    int claimed = bl_extents_claim(meta->extents, block->offset, block_size) == 0;
    if (!claimed || bl_index_add(meta->index, block->key, number) < 0) {
        if (claimed)
            bl_extents_give(meta->extents, block->offset);
        bl_entry_clear(meta, number);
        block->state = BL_NUMBER_FREE;
        meta->stat.damaged_count++;
        return;
    }
    bl_list_add(meta, bl_extent_list(meta, block->offset), BL_LIST_EXTENT, number);
    bl_evict_touch(meta->order, number);
    meta->stat.block_count++;
    meta->stat.block_bytes += block->length;
}

int bl_recover(void *context, uint64_t old_epoch, int doubtful)
{
    bl_meta *meta = context;
    uint32_t count_max = meta->pool->geometry.block_count_max, count = 0;
    if (old_epoch == 0)
        return 0;
    bl_recovered *recovered = malloc((size_t)count_max * sizeof *recovered);
    if (recovered == NULL)
        return -ENOMEM;
    bl_recover_entries(meta);
    bl_crash_point("recover.entries_done");
    bl_recover_extents(meta);
    bl_crash_point("recover.extents_done");
    for (uint32_t number = 0; number < count_max; number++)
        if (meta->blocks[number].state == BL_NUMBER_COMMITTED)
            recovered[count++] = (bl_recovered){meta->blocks[number].generation, number};
    qsort(recovered, count, sizeof *recovered, bl_recovered_compare);
    for (uint32_t i = count; i-- > 0;) /* newest first: of two entries of a key it stays */
        bl_recover_block(meta, recovered[i].number);
    for (uint32_t i = 0; i < count; i++) /* but the order goes from cold to warm */
        if (meta->blocks[recovered[i].number].state == BL_NUMBER_COMMITTED)
            bl_evict_touch(meta->order, recovered[i].number);
    free(recovered);
    meta->fresh_number = count_max;
    for (uint32_t number = count_max; number-- > 0;)
        if (meta->blocks[number].state == BL_NUMBER_FREE)
            bl_number_give(meta, number);
    bl_crash_point("recover.numbers_done");
    if (doubtful)
        bl_extents_hold_free(meta->extents);
    else
        bl_extents_return_all(meta);
    return 0;
}

/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Recovers the block index in a takeover (D5), once, after the epoch is published and before the
 * server serves. It reads the predecessor's entries first and then its open marks: a mark is
 * written before the entries in its extent, so no entry is read without its mark. The process may
 * die anywhere: the predecessor's half is not touched.
 *
 * Afterwards the server's own half agrees with DRAM: every committed block has an entry, every
 * extent has a mark, and no line of two epochs ago remains. Only the used part of a table is read
 * and overwritten (bl_table_ends). Space that is open and not committed is held while a session of
 * an earlier epoch may still write there. The eviction order starts sorted by generation.
 */
#include "index/recover.h"

#include <errno.h>

#include "base/lazy.h"
#include "base/minmax.h"
#include "coherence/crash_point.h"
#include "format/payload.h"
#include "index/retained.h"
#include "index/lower.h"
#include "index/numbers.h"
#include "index/reclaim.h"
#include "index/recover_sort.h"
#include "index/shares.h"
#include "index/table.h"
#include "index/task_call.h"
#include "index/tenants.h"
#include "index/tombstones.h"

enum {
    BL_SCAN_LINES = 4096,       /* lines to invalidate at a time: 256 KiB */
    BL_AHEAD = 16               /* blocks to prefetch ahead */
};

const char *bl_entry_invalid(const bl_geometry *g, const bl_entry *entry)
{
    uint64_t end = g->data_offset + g->stripe_count * BL_STRIPE_SIZE;
    if (entry->length == 0)
        return "no bytes";
    if (entry->chunk_size != 0 && entry->chunk_size < BL_LINE_SIZE)
        return "chunks smaller than a line";
    if (entry->flags & ~(uint32_t)(BL_ENTRY_KEPT | BL_ENTRY_NAMED))
        return "unknown flags";
    if (entry->offset < g->data_offset || entry->offset % BL_PAGE_SIZE != 0)
        return "not in the data stripes";
    if (entry->offset >= end ||
        bl_stored_size(entry->length, entry->chunk_size) > end - entry->offset)
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

/* At each milestone prefault both halves up to the next one: they are accessed completely. */
static void bl_recover_prefault(const bl_index *index, uint64_t offset, uint64_t line,
                                uint64_t count)
{
    if (!bl_table_milestone(line))
        return;
    uint64_t lines = bl_min(line, count - line);
    for (uint64_t half = 0; half < BL_HALF_COUNT; half++)
        bl_pool_prefault(index->pool, offset + (half * count + line) * BL_LINE_SIZE,
                         lines * BL_LINE_SIZE);
}

/* Read a stripe's mark. Returns its state (bl_extent_state) if its extent was adopted, else 0. */
static uint32_t bl_recover_mark(bl_index *index, uint64_t offset, uint64_t stripe,
                                bl_extent_view *view)
{
    const bl_memory *memory = &index->pool->memory;
    bl_extent_line line;
    /* SYNC extent.open: pairs with bl_extent_write() */
    bl_load_line(memory, offset, &line);
    bl_ordered(memory, offset, bl_epoch_offset(index->server->half));
    *view = bl_extent_of(&line);
    int whole = bl_verify(memory, bl_table_whole(&line, stripe));
    if (whole) /* even if the mark is FREE: then no process writes there any more */
        bl_believe(memory, offset);
    int held = whole && (line.state == BL_EXTENT_OPEN || line.state == BL_EXTENT_RETIRED) &&
               line.first_stripe == stripe && bl_extents_adopt(index->extents, view) == 0;
    if (held && view->retired)
        bl_pages_lose(index->pages, stripe, view->stripe_count);
    return held ? line.state : 0;
}

/* Copy the open marks into this server's half, and rebuild the extents. All used lines of the half
 * are overwritten: they are of an earlier epoch, and reading them first would cost as much. */
static void bl_recover_extents(bl_index *index)
{
    const bl_memory *memory = &index->pool->memory;
    const bl_geometry *g = &index->pool->geometry;
    uint32_t half = index->server->half, old_half = 1 - half;
    uint64_t taken = 0; /* stripes below it belong to the last adopted extent */
    for (uint64_t stripe = 0; stripe < g->stripe_count; stripe++) {
        uint64_t offset = bl_extent_line_offset(g, stripe, old_half);
        bl_extent_view view;
        bl_scan_refetch(memory, offset, stripe, g->stripe_count);
        if (bl_table_ends(memory, offset, bl_extent_line_offset(g, stripe, half), stripe))
            break;
        bl_recover_prefault(index, g->extent_offset, stripe, g->stripe_count);
        bl_marks_reach(index, stripe);
        uint32_t state = stripe < taken ? 0 : bl_recover_mark(index, offset, stripe, &view);
        if (state != 0) {
            taken = stripe + view.stripe_count;
            bl_extent_write(index, &view, state);
            bl_crash_point("recover.extent_copied");
        } else {
            view = (bl_extent_view){.first_stripe = (uint32_t)stripe};
            bl_extent_write(index, &view, BL_EXTENT_FREE);
        }
    }
}

/* Copy a named block's name into this server's half. If the line is damaged or belongs to
 * another block, write a line without a name: its line in this half may have been left torn by
 * the server of two epochs ago. The name lines of a batch of entries are invalidated together. */
static void bl_recover_name(bl_index *index, uint32_t number, uint64_t generation,
                            uint32_t *fetched)
{
    const bl_memory *memory = &index->pool->memory;
    const bl_geometry *g = &index->pool->geometry;
    uint32_t half = index->server->half, first = number / BL_SCAN_LINES * BL_SCAN_LINES;
    bl_name_line line;
    if (*fetched <= first) {
        bl_scan_refetch(memory, bl_name_offset(g, first, 1 - half), first, g->block_count_max);
        *fetched = first + BL_SCAN_LINES;
    }
    uint64_t offset = bl_name_offset(g, number, 1 - half);
    bl_load_line(memory, offset, &line); /* SYNC name */
    bl_ordered(memory, offset, bl_epoch_offset(half));
    if (bl_verify(memory, bl_table_whole(&line, number)) && line.generation == generation) {
        bl_believe(memory, offset);
    } else {
        line = (bl_name_line){.generation = 0};
        bl_table_seal(&line, number);
    }
    bl_crash_line("recover.name_line", memory, bl_name_offset(g, number, half), &line);
    bl_stream_line(memory, bl_name_offset(g, number, half), &line);
    bl_crash_point("recover.name_copied");
}

/* Copy a tombstone, or the line of a tier, into this server's half, and add it to the
 * tombstones. Returns 0 if there are too many. */
static int bl_recover_tombstone(bl_index *index, uint32_t number, const bl_entry *entry)
{
    index->blocks[number] = (bl_block){
        .key = {entry->key[0], entry->key[1]},
        .generation = entry->generation,
        .fingerprint = entry->fingerprint,
    };
    int known = entry->state == BL_ENTRY_TIER ? bl_tombstones_recover_tier(index, number)
                                              : bl_tombstones_recover(index, number);
    if (!known)
        return 0;
    bl_tombstone_write(index, number);
    bl_crash_point("recover.tomb_copied");
    return 1;
}

/* Copy the committed blocks' entries into this server's half, whose used lines are all overwritten,
 * and list the blocks. Returns their number. Numbers after the last one in use count as fresh,
 * so their memory is not touched: a pool of 1 TiB has 400 MiB of it. */
static uint32_t bl_recover_entries(bl_index *index, bl_recovered *recovered)
{
    const bl_memory *memory = &index->pool->memory;
    const bl_geometry *g = &index->pool->geometry;
    uint32_t half = index->server->half, old_half = 1 - half, count = 0, names = 0;
    for (uint32_t number = 0; number < g->block_count_max; number++) {
        uint64_t offset = bl_entry_offset(g, number, old_half);
        bl_entry entry;
        bl_scan_refetch(memory, offset, number, g->block_count_max);
        if (bl_table_ends(memory, offset, bl_entry_offset(g, number, half), number))
            break;
        bl_recover_prefault(index, g->table_offset, number, g->block_count_max);
        bl_entries_reach(index, number);
        /* SYNC entry.reuse: entries cleared before the epoch was published are read as cleared */
        /* SYNC task.commit: and tasks whose commits were answered before that are read */
        bl_load_line(memory, offset, &entry); /* SYNC entry */
        bl_ordered(memory, offset, bl_epoch_offset(half));
        int whole = bl_verify(memory, bl_table_whole(&entry, number));
        if (whole)
            bl_believe(memory, offset);
        if (whole && entry.state == BL_ENTRY_COMMITTED && !bl_entry_invalid(g, &entry)) {
            index->blocks[number] = (bl_block){
                .key = {entry.key[0], entry.key[1]},
                .generation = entry.generation,
                .offset = entry.offset,
                .fingerprint = entry.fingerprint,
                .length = entry.length,
                .chunk_size = entry.chunk_size,
                .state = BL_NUMBER_COMMITTED,
                .order = (uint8_t)bl_share_of(index, entry.fingerprint),
                .task = entry.flags & BL_ENTRY_KEPT, /* replaced by the task's slot below */
                .named = (entry.flags & BL_ENTRY_NAMED) != 0,
            };
            index->fresh_number = number + 1;
            if (index->blocks[number].named)
                bl_recover_name(index, number, entry.generation, &names);
            recovered[count++] = (bl_recovered){entry.generation, number};
            bl_crash_line("recover.entry_line", memory, bl_entry_offset(g, number, half), &entry);
            bl_stream_line(memory, bl_entry_offset(g, number, half), &entry);
            bl_crash_point("recover.entry_copied");
            continue;
        }
        int below = entry.state == BL_ENTRY_REMOVED || entry.state == BL_ENTRY_TIER;
        if (whole && below && bl_recover_tombstone(index, number, &entry)) {
            index->fresh_number = number + 1;
            continue;
        }
        index->stat.damaged_count += bl_line_used((uint64_t *)&entry) &&
                                    (!whole || entry.state == BL_ENTRY_COMMITTED);
        bl_entry_clear(index, number); /* from two epochs ago */
    }
    return count;
}

/* Add a recovered block to the pages, the index and the eviction order, or drop it. */
static void bl_recover_block(bl_index *index, uint32_t number)
{
    bl_block *block = &index->blocks[number];
    uint32_t size = bl_space_size(block), retained = block->task;
    uint64_t first = bl_stripe_of(index, block->offset);
    block->task = 0;
    int claimed = size != 0 && /* it was checked to lie in the pool */
                  bl_extents_cover(index->extents, first,
                                   bl_stripe_of(index, block->offset + size - 1) - first + 1) &&
                  bl_pages_take(index->pages, block->offset, size) == 0;
    if (!claimed || bl_hash_add(index->hash, block->key, number) < 0) {
        if (claimed)
            bl_pages_give(index->pages, block->offset, size);
        bl_entry_clear(index, number);
        block->state = BL_NUMBER_FREE;
        index->stat.damaged_count++;
        return;
    }
    bl_block_place(index, number);
    bl_block_assign(index, number);
    int stays = retained && bl_block_retain(index, number) == 0;
    if (stays && bl_task_enqueue(index, number) < 0) {
        bl_block_unretain(index, number);
        stays = 0;
    }
    if (!stays) {
        bl_lower_recovered(index, number);
        if (bl_lower_frees(index, block))
            bl_evict_cool(bl_order_of(index, number), number);
    }
    bl_stat_committed(index, number);
}

/* Recover the newest block first, so that of two entries of a key the newer one wins; each block is
 * colder than those before it. Prefetches overlap the cache misses of several blocks. */
static void bl_recover_blocks(bl_index *index, const bl_recovered *recovered, uint32_t count)
{
    bl_pages_defer(index->pages);
    for (uint32_t i = count; i-- > 0;) {
        if (i >= 2 * BL_AHEAD)
            bl_block_prefetch(index, recovered[i - 2 * BL_AHEAD].number);
        if (i >= BL_AHEAD) {
            const bl_block *next = &index->blocks[recovered[i - BL_AHEAD].number];
            bl_hash_prefetch(index->hash, next->key);
            bl_pages_prefetch(index->pages, next->offset);
        }
        bl_recover_block(index, recovered[i].number);
    }
    bl_pages_settle(index->pages);
}

/* Hold space that is open and not committed: a session of an earlier epoch may still write
 * there. */
static void bl_recover_hold(bl_index *index)
{
    bl_extent_view view;
    for (uint64_t stripe = 0; bl_extents_next(index->extents, stripe, &view) == 0;
         stripe = (uint64_t)view.first_stripe + view.stripe_count)
        bl_pages_hold_free(index->pages, view.first_stripe, view.stripe_count);
}

/* Write the lines of the tiers that no predecessor had. This precedes serving, and thus the first
 * block in such a tier, so every successor finds the line. Returns 0 or an error. */
static int bl_recover_tiers(bl_index *index)
{
    int status = 0;
    for (uint32_t tier; status == 0 && (tier = bl_tombstones_unmarked(index)) != 0;) {
        int64_t number = bl_number_take(index);
        status = number < 0 ? (int)number : bl_tombstones_mark(index, tier, (uint32_t)number);
    }
    return status;
}

int bl_recover(void *context, uint64_t old_epoch, int suspect)
{
    bl_index *index = context;
    uint32_t count_max = index->pool->geometry.block_count_max;
    if (old_epoch == 0)
        return bl_recover_tiers(index);
    size_t size = 2 * (size_t)count_max * sizeof(bl_recovered);
    bl_recovered *recovered = bl_lazy_map_dense(size);
    if (recovered == NULL)
        return -ENOMEM;
    uint32_t count = bl_recover_entries(index, recovered);
    bl_lower_removed(index);
    bl_crash_point("recover.entries_done");
    bl_recover_extents(index);
    bl_crash_point("recover.extents_done");
    bl_recover_blocks(index, bl_recovered_sort(recovered, recovered + count_max, count), count);
    bl_lazy_unmap(recovered, size);
    for (uint32_t number = index->fresh_number; number-- > 0;)
        if (index->blocks[number].state == BL_NUMBER_FREE)
            bl_number_give(index, number);
    bl_crash_point("recover.numbers_done");
    if (suspect)
        bl_recover_hold(index);
    else
        bl_extents_return_all(index);
    return bl_recover_tiers(index);
}

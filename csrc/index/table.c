/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Writes the block table and the extent table in the pool. Only the server writes their lines, into
 * its own half. A line's check is keyed with its number. Clients read entries (kvcache/get.c), a
 * successor reads both (index/recover.c).
 */
#include "index/table.h"

#include "coherence/crash_point.h"

/* Lines 1, 2, 4, 8, ... of a table are its milestones: each is written before the first grant of a
 * line after it, and is in memory when that grant's reply is sent. So the first milestone that was
 * never written ends the used part, and recovery in a large pool does not read the rest. The half
 * of two epochs ago is no longer than its successor's, which was copied from it, unless its server
 * wrote on after it was deposed. Its milestone is a second look: such lines are overwritten, too,
 * and if the memory of one milestone has lost its bytes, nothing after it is lost. */
int bl_table_ends(const bl_memory *memory, uint64_t offset, uint64_t own, uint64_t number)
{
    uint64_t line[8], before[8];
    if (!bl_table_milestone(number))
        return 0;
    bl_load_line(memory, offset, line); /* SYNC milestone */
    bl_load_line(memory, own, before);
    return !bl_line_used(line) && !bl_line_used(before);
}

void bl_entries_reach(bl_index *index, uint64_t number)
{
    for (; index->entry_limit <= number; index->entry_limit *= 2)
        bl_entry_clear(index, (uint32_t)index->entry_limit); /* SYNC milestone */
}

void bl_marks_reach(bl_index *index, uint64_t stripe)
{
    for (; index->mark_limit <= stripe; index->mark_limit *= 2) {
        const bl_extent_view closed = {.first_stripe = (uint32_t)index->mark_limit};
        bl_extent_write(index, &closed, BL_EXTENT_FREE); /* SYNC milestone */
    }
}

void bl_entry_write(bl_index *index, uint32_t number, uint32_t checksums_crc)
{
    const bl_block *block = &index->blocks[number];
    bl_entry entry = {
        .key = {block->key[0], block->key[1]},
        .generation = block->generation,
        .offset = block->offset,
        .fingerprint = block->fingerprint,
        .length = block->length,
        .chunk_size = block->chunk_size,
        .checksums_crc = checksums_crc,
        .state = BL_ENTRY_COMMITTED,
        .flags = (block->task ? BL_ENTRY_KEPT : 0u) | (block->named ? BL_ENTRY_NAMED : 0u),
    };
    bl_table_seal(&entry, number);
    uint64_t offset = bl_entry_offset(&index->pool->geometry, number, index->server->half);
    bl_crash_line("entry.line", &index->pool->memory, offset, &entry);
    bl_stream_line(&index->pool->memory, offset,
                   &entry); /* SYNC entry: pairs with bl_entry_look() and bl_recover_entries() */
}

/* The entry may reach memory before the name. A successor that reads only the entry treats the
 * block as nameless, because the name line has another generation. */
void bl_name_write(bl_index *index, uint32_t number, const bl_name *name)
{
    bl_name_line line = {.generation = index->blocks[number].generation, .name = *name};
    line.name.flags &= BL_NAME_PARENT;
    line.name.reserved = 0;
    bl_table_seal(&line, number);
    uint64_t offset = bl_name_offset(&index->pool->geometry, number, index->server->half);
    bl_crash_line("name.line", &index->pool->memory, offset, &line);
    bl_stream_line(&index->pool->memory, offset,
                   &line); /* SYNC name: pairs with bl_names_read() and bl_recover_name() */
}

/* A free entry keeps the key of its former block as a trace (bl_entries_read). The protocol never
 * reads the key of a free entry. */
void bl_entry_clear(bl_index *index, uint32_t number)
{
    const bl_block *block = &index->blocks[number];
    bl_entry entry = {
        .key = {block->key[0], block->key[1]},
        .generation = block->generation,
        .fingerprint = block->fingerprint,
        .length = block->length,
        .state = BL_ENTRY_FREE,
    };
    bl_table_seal(&entry, number);
    uint64_t offset = bl_entry_offset(&index->pool->geometry, number, index->server->half);
    bl_crash_line("entry.clear_line", &index->pool->memory, offset, &entry);
    bl_stream_line(&index->pool->memory, offset,
                   &entry); /* SYNC entry: a reader's second read then rejects its copy */
}

void bl_tombstone_write(bl_index *index, uint32_t number)
{
    const bl_block *block = &index->blocks[number];
    bl_entry entry = {
        .key = {block->key[0], block->key[1]},
        .generation = block->generation,
        .fingerprint = block->fingerprint,
        .state = block->state == BL_NUMBER_TIER ? BL_ENTRY_TIER : BL_ENTRY_REMOVED,
    };
    bl_table_seal(&entry, number);
    uint64_t offset = bl_entry_offset(&index->pool->geometry, number, index->server->half);
    bl_crash_line("entry.tomb_line", &index->pool->memory, offset, &entry);
    bl_stream_line(&index->pool->memory, offset, &entry); /* SYNC entry */
}

void bl_extent_write(bl_index *index, const bl_extent_view *view, uint32_t state)
{
    bl_extent_line line = {
        .epoch = index->server->epoch,
        .generation = view->generation,
        .first_stripe = view->first_stripe,
        .stripe_count = view->stripe_count,
        .block_size = BL_PAGE_SIZE,
        .block_count = bl_mark_blocks(BL_PAGE_SIZE, view->stripe_count),
        .state = state,
    };
    bl_table_seal(&line, view->first_stripe);
    uint64_t offset =
        bl_extent_line_offset(&index->pool->geometry, view->first_stripe, index->server->half);
    bl_crash_line("extent.line", &index->pool->memory, offset, &line);
    bl_stream_line(&index->pool->memory, offset,
                   &line); /* SYNC extent.open: pairs with bl_recover_mark() */
}

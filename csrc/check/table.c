/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Checks extent marks and entries: each by itself, then against each other. See check/line.h.
 *
 * Marks are read first, then entries. On a live pool an entry may lie in an extent that was opened
 * in between, so an entry is homeless only if its extent is also not in the marks when they are
 * read again. Two conflicting entries are a finding if both remain for a while. The older of the
 * two is in error, because recovery keeps the newer one.
 */
#include <errno.h>
#include <stdlib.h>

#include "check/line.h"

enum { BL_CHECK_BATCH = 1024 };     /* lines invalidated together */

static int bl_generation_future(const bl_check *check, uint64_t generation)
{
    return generation >> BL_GENERATION_SHIFT > check->epoch.epoch;
}

/* Before the first line of each batch is read, invalidate the whole batch. */
static void bl_check_batch(const bl_check *check, uint64_t offset, uint64_t number, uint64_t count)
{
    uint64_t lines = count - number < BL_CHECK_BATCH ? count - number : BL_CHECK_BATCH;
    if (number % BL_CHECK_BATCH == 0)
        bl_check_refetch(check, offset, lines * BL_LINE_SIZE);
}

/* ---- Extents */

static uint32_t bl_judge_mark(bl_check *check, const bl_check_line *line)
{
    bl_extent_line mark;
    memcpy(&mark, line->word, sizeof mark);
    if (!bl_check_used(line))
        return 0;
    if (!bl_table_whole(&mark, line->number))
        return BL_FINDING_EXTENT_DAMAGED;
    if (!bl_check_zero(mark.reserved, sizeof mark.reserved))
        return BL_FINDING_RESERVED;
    if (mark.first_stripe != line->number)
        return BL_FINDING_EXTENT_PLACE;
    if (mark.epoch > check->epoch.epoch || bl_generation_future(check, mark.generation))
        return BL_FINDING_EXTENT_FUTURE;
    if (mark.state == BL_EXTENT_FREE)
        return 0;
    if (mark.state != BL_EXTENT_OPEN && mark.state != BL_EXTENT_RETIRED)
        return BL_FINDING_EXTENT_STATE;
    if (mark.stripe_count == 0 || mark.stripe_count > BL_EXTENT_STRIPES_MAX ||
        mark.block_size == 0 || mark.block_size % BL_PAGE_SIZE != 0)
        return BL_FINDING_EXTENT_SIZE;
    if (line->number + mark.stripe_count > check->pool->geometry.stripe_count)
        return BL_FINDING_EXTENT_BEYOND;
    uint32_t blocks = bl_mark_blocks(mark.block_size, mark.stripe_count);
    return blocks == 0 || blocks != mark.block_count ? BL_FINDING_EXTENT_FIT : 0;
}

static bl_check_line bl_check_mark_line(const bl_check *check, uint64_t stripe)
{
    return (bl_check_line){
        .offset = bl_extent_line_offset(&check->pool->geometry, stripe, check->half),
        .number = stripe};
}

/* Report that a valid mark overlaps an earlier extent, if that extent still exists. */
static void bl_check_overlap(bl_check *check, bl_check_line *line, const bl_extent_view *view)
{
    for (uint64_t stripe = view->first_stripe; stripe < view->first_stripe + view->stripe_count;
         stripe++) {
        bl_extent_view other;
        if (bl_extents_at(check->extents, stripe, &other) < 0)
            continue;
        bl_extent_line mark;
        bl_check_line lines[2] = {*line, bl_check_mark_line(check, other.first_stripe)};
        bl_check_refetch(check, lines[1].offset, BL_LINE_SIZE);
        bl_check_look(check, &lines[1]);
        memcpy(&mark, lines[1].word, sizeof mark);
        if (mark.state != BL_EXTENT_FREE && mark.generation == other.generation &&
            bl_check_stands(check, lines, 2) && bl_check_stands(check, lines, 2)) {
            bl_found(check, BL_FINDING_EXTENT_OVERLAP, line->number, other.first_stripe);
            return;
        }
        bl_extents_close(check->extents, other.first_stripe); /* the extent was closed meanwhile */
    }
    bl_extents_adopt(check->extents, view);
}

void bl_check_extents(bl_check *check)
{
    const bl_geometry *g = &check->pool->geometry;
    for (uint64_t stripe = 0; stripe < g->stripe_count && !check->moved; stripe++) {
        bl_check_line line = bl_check_mark_line(check, stripe);
        bl_extent_line mark;
        bl_check_batch(check, line.offset, stripe, g->stripe_count);
        bl_check_look(check, &line);
        if (!bl_check_used(&line) || bl_check_judged(check, &line, bl_judge_mark))
            continue;
        memcpy(&mark, line.word, sizeof mark);
        if (mark.state == BL_EXTENT_FREE)
            continue;
        bl_extent_view view = bl_extent_of(&mark);
        check->report->extent_count++;
        if (bl_extents_adopt(check->extents, &view) == -EEXIST)
            bl_check_overlap(check, &line, &view);
    }
    bl_check_stray(check, bl_extent_line_offset(g, 0, BL_HALF_COUNT), g->data_offset);
}

/* ---- Entries */

static uint32_t bl_judge_entry(bl_check *check, const bl_check_line *line)
{
    const bl_geometry *g = &check->pool->geometry;
    uint64_t end = g->data_offset + g->stripe_count * BL_STRIPE_SIZE;
    bl_entry entry;
    memcpy(&entry, line->word, sizeof entry);
    if (!bl_check_used(line))
        return 0;
    if (!bl_table_whole(&entry, line->number))
        return BL_FINDING_ENTRY_DAMAGED;
    if (entry.flags & ~(uint32_t)(BL_ENTRY_KEPT | BL_ENTRY_NAMED))
        return BL_FINDING_RESERVED;
    if (bl_generation_future(check, entry.generation))
        return BL_FINDING_ENTRY_FUTURE;
    if (entry.state == BL_ENTRY_FREE || entry.state == BL_ENTRY_REMOVED ||
        entry.state == BL_ENTRY_TIER)
        return 0;
    if (entry.state != BL_ENTRY_COMMITTED)
        return BL_FINDING_ENTRY_STATE;
    if (entry.length == 0 || bl_block_size(bl_stored_size(entry.length, entry.chunk_size)) == 0)
        return BL_FINDING_ENTRY_LENGTH;
    if (entry.chunk_size != 0 && entry.chunk_size < BL_LINE_SIZE)
        return BL_FINDING_ENTRY_CHUNK;
    if (entry.offset % BL_PAGE_SIZE != 0)
        return BL_FINDING_ENTRY_UNALIGNED;
    if (entry.offset < g->data_offset || entry.offset >= end ||
        bl_stored_size(entry.length, entry.chunk_size) > end - entry.offset)
        return BL_FINDING_ENTRY_BEYOND;
    return 0;
}

static bl_check_line bl_check_entry_line(const bl_check *check, uint64_t number)
{
    return (bl_check_line){.offset = bl_entry_offset(&check->pool->geometry, (uint32_t)number,
                                                     check->half),
                           .number = number};
}

static uint32_t bl_check_size(const bl_entry *entry)
{
    return bl_block_size(bl_stored_size(entry->length, entry->chunk_size));
}

/* Return 1 if, by the current marks, this stripe is in an extent that is not retired. */
static int bl_check_open(bl_check *check, uint64_t stripe)
{
    for (uint64_t back = 0; back < BL_EXTENT_STRIPES_MAX && back <= stripe; back++) {
        bl_check_line line = bl_check_mark_line(check, stripe - back);
        bl_extent_line mark;
        bl_check_refetch(check, line.offset, BL_LINE_SIZE);
        bl_check_look(check, &line);
        memcpy(&mark, line.word, sizeof mark);
        if (bl_check_used(&line) && !bl_judge_mark(check, &line) &&
            mark.state == BL_EXTENT_OPEN && back < mark.stripe_count)
            return 1;
    }
    return 0;
}

/* Return 1 if extents cover the whole block, by the earlier marks or by the current ones. */
static int bl_check_contained(bl_check *check, const bl_entry *entry)
{
    uint64_t inside = entry->offset - check->pool->geometry.data_offset;
    uint64_t last = (inside + bl_check_size(entry) - 1) / BL_STRIPE_SIZE;
    for (uint64_t stripe = inside / BL_STRIPE_SIZE; stripe <= last; stripe++)
        if (!bl_extents_cover(check->extents, stripe, 1) && !bl_check_open(check, stripe))
            return 0;
    return 1;
}

static uint32_t bl_judge_home(bl_check *check, const bl_check_line *line)
{
    bl_entry entry;
    memcpy(&entry, line->word, sizeof entry);
    if (bl_judge_entry(check, line) || entry.state != BL_ENTRY_COMMITTED)
        return 0;
    return bl_check_contained(check, &entry) ? 0 : BL_FINDING_ENTRY_HOMELESS;
}

/* Return 1 if two entries conflict in this kind of finding. */
static int bl_check_clash(const bl_entry *own, const bl_entry *other, uint32_t kind)
{
    if (kind == BL_FINDING_ENTRY_TWICE)
        return other->key[0] == own->key[0] && other->key[1] == own->key[1];
    if (kind == BL_FINDING_ENTRY_OVERLAP)
        return other->offset < own->offset + bl_check_size(own) &&
               own->offset < other->offset + bl_check_size(other);
    return other->generation == own->generation;
}

/* Resolve a conflict of an entry with an earlier one by reading both again. Returns 1 if this entry
 * is valid; 0 if it is in error or was removed, or if another server has taken over. */
static int bl_check_prevails(bl_check *check, const bl_check_line *line, uint64_t number,
                             uint32_t kind)
{
    bl_check_line lines[2] = {*line, bl_check_entry_line(check, number)};
    bl_entry own, other;
    bl_check_refetch(check, lines[1].offset, BL_LINE_SIZE);
    bl_check_look(check, &lines[1]);
    memcpy(&own, lines[0].word, sizeof own);
    memcpy(&other, lines[1].word, sizeof other);
    int same = other.state == BL_ENTRY_COMMITTED && bl_table_whole(&other, number) &&
               bl_check_clash(&own, &other, kind);
    if (same && bl_check_stands(check, lines, 2) && bl_check_stands(check, lines, 2)) {
        int older = own.generation <= other.generation;
        bl_found(check, kind, lines[older ? 0 : 1].number, lines[older ? 1 : 0].number);
        if (older)
            return 0;
    }
    return !check->moved && memcmp(lines[0].word, line->word, BL_LINE_SIZE) == 0;
}

/* Add an entry to a set by one of its properties. Returns 1, or 0 if the entry is in error. */
static int bl_check_alone(bl_check *check, bl_hash *set, const uint64_t property[2],
                          const bl_check_line *line, uint32_t kind)
{
    while (bl_hash_add(set, property, (uint32_t)line->number) == -EEXIST) {
        if (!bl_check_prevails(check, line, (uint64_t)bl_hash_find(set, property), kind))
            return 0;
        bl_hash_remove(set, property);
    }
    return 1;
}

/* Add an entry's space. Returns 1, or 0 if the entry is in error. */
static int bl_check_placed(bl_check *check, const bl_entry *entry, const bl_check_line *line)
{
    uint32_t other;
    while (bl_places_add(check->places, (uint32_t)line->number, entry->offset,
                         bl_check_size(entry), &other) == -EEXIST) {
        if (!bl_check_prevails(check, line, other, BL_FINDING_ENTRY_OVERLAP))
            return 0;
        bl_places_remove(check->places, other);
    }
    return 1;
}

/* Return the size of the longest chunk of a block. */
static uint32_t bl_check_chunk(const bl_entry *entry)
{
    return entry->chunk_size < entry->length ? entry->chunk_size : entry->length;
}

/* Check the bytes of a block. If they belong to another block by now, the entry has changed,
 * too. */
static uint32_t bl_judge_payload(bl_check *check, const bl_check_line *line)
{
    bl_entry entry;
    memcpy(&entry, line->word, sizeof entry);
    if (bl_judge_entry(check, line) || entry.state != BL_ENTRY_COMMITTED || !entry.chunk_size)
        return 0;
    return bl_check_chunk(&entry) <= check->chunk_size ? bl_check_bytes(check, &entry) : 0;
}

/* Allocate a buffer for a chunk. Returns 0 or -ENOMEM. */
static int bl_check_room(bl_check *check, const bl_entry *entry)
{
    uint32_t size = bl_check_chunk(entry);
    if (!check->payload || size <= check->chunk_size)
        return 0;
    uint8_t *larger = realloc(check->chunk, size);
    if (larger == NULL)
        return -ENOMEM;
    check->chunk = larger;
    check->chunk_size = size;
    return 0;
}

/* Check an entry that is valid by itself against all others. */
static int bl_check_entry(bl_check *check, bl_check_line *line)
{
    bl_entry entry;
    memcpy(&entry, line->word, sizeof entry);
    const uint64_t generation[2] = {entry.generation, ~entry.generation};
    bl_believe(&check->pool->memory, line->offset);
    if (entry.state != BL_ENTRY_COMMITTED || bl_check_judged(check, line, bl_judge_home) ||
        !bl_check_alone(check, check->keys, entry.key, line, BL_FINDING_ENTRY_TWICE) ||
        !bl_check_placed(check, &entry, line) ||
        !bl_check_alone(check, check->generations, generation, line,
                        BL_FINDING_ENTRY_GENERATION))
        return 0;
    check->report->block_count++;
    check->report->block_bytes += entry.length;
    int status = bl_check_room(check, &entry);
    if (status == 0 && check->payload)
        bl_check_judged(check, line, bl_judge_payload);
    return status;
}

int bl_check_entries(bl_check *check)
{
    const bl_geometry *g = &check->pool->geometry;
    int status = 0;
    for (uint32_t number = 0; number < g->block_count_max && !check->moved && status == 0;
         number++) {
        bl_check_line line = bl_check_entry_line(check, number);
        bl_check_batch(check, line.offset, number, g->block_count_max);
        bl_check_look(check, &line);
        if (bl_check_used(&line) && !bl_check_judged(check, &line, bl_judge_entry))
            status = bl_check_entry(check, &line);
    }
    bl_check_stray(check, bl_entry_offset(g, 0, BL_HALF_COUNT), g->name_offset);
    return status;
}

/* ---- Names */

/* Return 1 if this block has a name. The name line of a block without one is never read, because a
 * server that died may have left it torn. */
static int bl_check_named(const bl_check *check, uint32_t number)
{
    bl_check_line line = bl_check_entry_line(check, number);
    bl_entry entry;
    bl_check_look(check, &line);
    memcpy(&entry, line.word, sizeof entry);
    return entry.state == BL_ENTRY_COMMITTED && (entry.flags & BL_ENTRY_NAMED) != 0;
}

/* The line of an earlier block is obsolete, so only damage is a finding. */
static uint32_t bl_judge_name(bl_check *check, const bl_check_line *line)
{
    bl_name_line name;
    memcpy(&name, line->word, sizeof name);
    if (!bl_check_used(line))
        return 0;
    if (!bl_table_whole(&name, line->number))
        return BL_FINDING_NAME_DAMAGED;
    if (name.reserved || name.name.reserved || (name.name.flags & ~(uint32_t)BL_NAME_PARENT))
        return BL_FINDING_RESERVED;
    return bl_generation_future(check, name.generation) ? BL_FINDING_NAME_FUTURE : 0;
}

void bl_check_names(bl_check *check)
{
    const bl_geometry *g = &check->pool->geometry;
    for (uint32_t number = 0; number < g->block_count_max && !check->moved; number++) {
        bl_check_line line = {.offset = bl_name_offset(g, number, check->half), .number = number};
        bl_check_batch(check, line.offset, number, g->block_count_max);
        bl_check_look(check, &line);
        if (bl_check_named(check, number))
            bl_check_judged(check, &line, bl_judge_name);
    }
    bl_check_stray(check, bl_name_offset(g, 0, BL_HALF_COUNT), g->extent_offset);
}

/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Turns changes of the block index into events for routers. Each rank of an engine stores its part
 * of a block under its own key: the block is stored when the last part is, and removed when the
 * first part is. This is in C to keep up with the server. It uses no pool; one thread at a time
 * uses it.
 *
 * Invariants between two changes: a line of the block table has the part of one rank of one block;
 * parts counts the lines with the same part; a block exists while any line has a part of it.
 */
#include <errno.h>
#include <stdlib.h>

#include "base/lazy.h"
#include "index/state.h"

typedef struct bl_event_line {
    uint64_t generation;
    uint32_t place;             /* index of the block; 0: this line has no name */
    uint32_t rank;
} bl_event_line;

typedef struct bl_event_block {
    bl_name name;               /* name of the first part */
    uint32_t ranks;             /* ranks whose parts are stored; 0: this slot is free */
    uint32_t next;              /* the next free slot; 0: none */
} bl_event_block;

struct bl_events {
    uint32_t line_count;
    uint32_t block_count;
    bl_event_line *lines;
    bl_event_block *blocks;     /* indices begin at 1 */
    uint32_t fresh;             /* slots from here on were never used */
    uint32_t free;              /* first of the freed slots; 0: none */
    bl_hash *names;            /* space, block hash -> block */
    bl_hash *parts;            /* block, rank -> number of lines */
};

/* The output of one call; rows may be NULL. */
typedef struct bl_event_rows {
    bl_event *rows;
    uint32_t count;
} bl_event_rows;

static size_t bl_events_lines_size(uint32_t count) { return count * sizeof(bl_event_line); }

static size_t bl_events_blocks_size(uint32_t count)
{
    return ((size_t)count + 1) * sizeof(bl_event_block);
}

int bl_events_create(bl_events **out, uint32_t line_count)
{
    if (line_count == 0)
        return -EINVAL;
    bl_events *events = calloc(1, sizeof *events);
    if (events == NULL)
        return -ENOMEM;
    *events = (bl_events){.line_count = line_count, .fresh = 1};
    events->lines = bl_lazy_map(bl_events_lines_size(line_count));
    events->blocks = bl_lazy_map(bl_events_blocks_size(line_count));
    int status = events->lines != NULL && events->blocks != NULL ? 0 : -ENOMEM;
    if (status == 0)
        status = bl_hash_create(&events->names, line_count);
    if (status == 0)
        status = bl_hash_create(&events->parts, line_count);
    if (status < 0)
        bl_events_destroy(events);
    else
        *out = events;
    return status;
}

void bl_events_destroy(bl_events *events)
{
    if (events == NULL)
        return;
    bl_lazy_unmap(events->lines, bl_events_lines_size(events->line_count));
    bl_lazy_unmap(events->blocks, bl_events_blocks_size(events->line_count));
    bl_hash_destroy(events->names);
    bl_hash_destroy(events->parts);
    free(events);
}

static int bl_event_whole(const bl_event_block *block)
{
    return block->ranks > 0 && block->ranks == block->name.rank_count;
}

/* Add an event. It joins the event before it if the two can be merged: stored, if it is a child of
 * that block; removed, if it is of the same space. */
static void bl_event_add(bl_event_rows *out, uint32_t kind, const bl_name *name)
{
    if (out->rows == NULL)
        return;
    const bl_event *last = out->count > 0 ? &out->rows[out->count - 1] : NULL;
    int joins = last != NULL && last->kind == kind && last->name.space == name->space;
    if (joins && kind == BL_CHANGE_STORED)
        joins = last->name.block_tokens == name->block_tokens && (name->flags & BL_NAME_PARENT) &&
                name->parent_hash == last->name.block_hash;
    out->rows[out->count++] = (bl_event){.name = *name, .kind = kind, .joins = (uint32_t)joins};
}

/* Return the index of the block with this name, which is created if it does not exist. */
static uint32_t bl_event_place(bl_events *events, const bl_name *name)
{
    const uint64_t key[2] = {name->space, name->block_hash};
    int64_t found = bl_hash_find(events->names, key);
    if (found != BL_NO_BLOCK)
        return (uint32_t)found;
    uint32_t place = events->free;
    if (place > 0)
        events->free = events->blocks[place].next;
    else
        place = events->fresh++;
    events->blocks[place] = (bl_event_block){.name = *name};
    bl_hash_add(events->names, key, place); /* never full: there are no more blocks than lines */
    events->block_count++;
    return place;
}

static void bl_event_store(bl_events *events, bl_event_line *line, const bl_change *change,
                           bl_event_rows *out)
{
    if (change->name.rank >= change->name.rank_count)
        return;
    uint32_t place = bl_event_place(events, &change->name);
    bl_event_block *block = &events->blocks[place];
    const uint64_t part[2] = {place, change->name.rank};
    int whole = bl_event_whole(block);
    *line = (bl_event_line){change->generation, place, change->name.rank};
    if (bl_hash_add(events->parts, part, 1) == 0) {
        block->ranks++;
    } else { /* another line has the same part */
        int64_t lines = bl_hash_find(events->parts, part);
        bl_hash_remove(events->parts, part);
        bl_hash_add(events->parts, part, (uint32_t)lines + 1);
    }
    if (whole != bl_event_whole(block)) /* no longer complete: its ranks disagree */
        bl_event_add(out, whole ? BL_CHANGE_REMOVED : BL_CHANGE_STORED, &block->name);
}

static void bl_event_remove(bl_events *events, bl_event_line *line, bl_event_rows *out)
{
    uint32_t place = line->place;
    bl_event_block *block = &events->blocks[place];
    const uint64_t part[2] = {place, line->rank};
    int64_t lines = bl_hash_find(events->parts, part);
    int whole = bl_event_whole(block);
    line->place = 0;
    bl_hash_remove(events->parts, part);
    if (lines > 1)
        bl_hash_add(events->parts, part, (uint32_t)lines - 1);
    else
        block->ranks--;
    if (whole != bl_event_whole(block))
        bl_event_add(out, whole ? BL_CHANGE_REMOVED : BL_CHANGE_STORED, &block->name);
    if (block->ranks > 0)
        return;
    const uint64_t key[2] = {block->name.space, block->name.block_hash};
    bl_hash_remove(events->names, key);
    block->next = events->free;
    events->free = place;
    events->block_count--;
}

uint32_t bl_events_apply(bl_events *events, const bl_change *changes, uint32_t count,
                         bl_event *rows)
{
    bl_event_rows out = {rows, 0};
    for (uint32_t i = 0; i < count; i++) {
        const bl_change *change = &changes[i];
        if (change->block >= events->line_count)
            continue;
        bl_event_line *line = &events->lines[change->block];
        int held = line->place != 0;
        if (change->kind != BL_CHANGE_STORED) {
            if (held && line->generation == change->generation)
                bl_event_remove(events, line, &out);
        } else if (!held || line->generation < change->generation) {
            if (held) /* the block's removal was not published yet */
                bl_event_remove(events, line, &out);
            bl_event_store(events, line, change, &out);
        }
    }
    return out.count;
}

uint32_t bl_events_count(const bl_events *events) { return events->block_count; }

/* Link each complete block to its parent's list of children, or to the root's. */
static void bl_events_link(const bl_events *events, uint32_t *child, uint32_t *sibling)
{
    for (uint32_t place = events->fresh - 1; place > 0; place--) {
        const bl_event_block *block = &events->blocks[place];
        if (!bl_event_whole(block))
            continue;
        const uint64_t key[2] = {block->name.space, block->name.parent_hash};
        int64_t found = block->name.flags & BL_NAME_PARENT ? bl_hash_find(events->names, key)
                                                           : BL_NO_BLOCK;
        uint32_t parent = found != BL_NO_BLOCK && bl_event_whole(&events->blocks[found])
                              ? (uint32_t)found : 0;
        sibling[place] = child[parent];
        child[parent] = place;
    }
}

int64_t bl_events_all(const bl_events *events, bl_event *rows)
{
    bl_event_rows out = {rows, 0};
    uint32_t *child = calloc(events->fresh, sizeof *child);
    uint32_t *sibling = calloc(events->fresh, sizeof *sibling);
    if (child != NULL && sibling != NULL) {
        bl_events_link(events, child, sibling);
        for (uint32_t place = child[0]; place > 0;) {
            bl_event_add(&out, BL_CHANGE_STORED, &events->blocks[place].name);
            uint32_t next = sibling[place], last = child[place];
            if (last > 0) { /* children before siblings */
                while (sibling[last] > 0)
                    last = sibling[last];
                sibling[last] = next;
                next = child[place];
            }
            place = next;
        }
    }
    int64_t found = child != NULL && sibling != NULL ? (int64_t)out.count : -ENOMEM;
    free(child);
    free(sibling);
    return found;
}

/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Writes the block table and the extent table in the pool. These functions do not fence: the
 * server's loop does, before it sends a reply.
 */
#ifndef BL_INDEX_TABLE_H
#define BL_INDEX_TABLE_H

#include "index/state.h"

/* Return 1 for lines 1, 2, 4, 8, ... of a table (index/table.c). */
static inline int bl_table_milestone(uint64_t number)
{
    return number != 0 && (number & (number - 1)) == 0;
}

/* Return 1 if no line of a table was used from this one on. offset is its offset in the
 * predecessor's half, which the caller has invalidated; own that in this server's half. */
int bl_table_ends(const bl_memory *memory, uint64_t offset, uint64_t own, uint64_t number);

/* Write the milestones up to this line, which is about to be used. */
void bl_entries_reach(bl_index *index, uint64_t number);
void bl_marks_reach(bl_index *index, uint64_t stripe);
void bl_entry_write(bl_index *index, uint32_t number, uint32_t checksums_crc);
void bl_entry_clear(bl_index *index, uint32_t number);
void bl_tombstone_write(bl_index *index, uint32_t number);
void bl_name_write(bl_index *index, uint32_t number, const bl_name *name);
void bl_extent_write(bl_index *index, const bl_extent_view *view, uint32_t state);

#endif

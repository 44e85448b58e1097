/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Reads the block table for display: the blocks of the pool, and why a key is a miss. No decision
 * depends on it, because a line may change as soon as it was read.
 */
#include "api/check.h"
#include "base/minmax.h"
#include "coherence/coherence.h"
#include "coherence/guard.h"
#include "format/line.h"
#include "pool/pool.h"

enum { BL_ENTRIES_BATCH = 1024 };   /* lines that are invalidated together */

typedef struct bl_entries {
    const bl_pool *pool;
    uint32_t half;
    uint32_t first, end;
    bl_entry *entries;
} bl_entries;

static int bl_entries_guarded(void *context)
{
    bl_entries *all = context;
    const bl_memory *memory = &all->pool->memory;
    const bl_geometry *g = &all->pool->geometry;
    for (uint32_t number = all->first; number < all->end; number++) {
        bl_entry *entry = &all->entries[number - all->first];
        uint64_t offset = bl_entry_offset(g, number, all->half);
        if ((number - all->first) % BL_ENTRIES_BATCH == 0)
            bl_refetch(memory, offset,
                       bl_min(all->end - number, BL_ENTRIES_BATCH) * BL_LINE_SIZE);
        bl_load_line(memory, offset, entry); /* SYNC entry */
        if (!bl_verify(memory, bl_table_whole(entry, number)))
            *entry = (bl_entry){.state = BL_ENTRY_TORN};
    }
    return 0;
}

int64_t bl_entries_read(const bl_pool *pool, uint32_t half, uint32_t first, uint32_t count,
                        bl_entry *entries)
{
    uint32_t max = pool->geometry.block_count_max, from = (uint32_t)bl_min(first, max);
    bl_entries all = {pool, half % BL_HALF_COUNT, from,
                      from + (uint32_t)bl_min(count, max - from), entries};
    int status = bl_guarded(&pool->memory, bl_entries_guarded, &all);
    return status < 0 ? status : (int64_t)(all.end - from);
}

/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * A ring in DRAM that reports stored and removed named blocks to another thread of the server's
 * process. The server's thread never waits: if the ring is full, it only counts the change, and the
 * reader then reads the whole name table from the pool.
 *
 * To start or restart, a reader saves the count of lost changes, empties the ring, makes one call
 * to the server, and then reads the table. The server fences what it streamed before it replies to
 * that call, so the table has every change that the reader took before. A change that the reader
 * takes later may be in the table already: the reader compares generations.
 */
#include "index/journal.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/host_atomic.h"
#include "base/lazy.h"
#include "base/minmax.h"
#include "coherence/guard.h"

enum {
    BL_NAMES_BATCH = 1024,      /* lines to invalidate at a time */
    BL_JOURNAL_AHEAD = 32       /* slots to prefetch for writing */
};

/* The fields of the server's thread and those of the reader are on separate cache lines. */
struct bl_journal {
    bl_change *ring;            /* a change is one cache line */
    uint32_t room;
    uint32_t at;                /* slot of the next change */
    uint64_t added;             /* written by the server's thread, as the fields around it */
    uint64_t lost;
    uint64_t seen;              /* copy of taken, updated when the ring seems full */
    uint8_t apart[BL_LINE_SIZE];
    uint64_t taken;             /* written by the reader */
    uint32_t take_at;           /* slot of the next change to take */
};

_Static_assert(sizeof(bl_change) == BL_LINE_SIZE, "a change is written and read as a line");

/* Return the slot of the next change, or count a loss and return NULL. The slot was last read by
 * another core, so its line is prefetched well before it is written. */
static inline bl_change *bl_journal_place(bl_journal *journal)
{
    if (journal->added - journal->seen >= journal->room) {
        journal->seen = bl_host_load(&journal->taken);
        if (journal->added - journal->seen >= journal->room) {
            bl_host_store(&journal->lost, journal->lost + 1);
            return NULL;
        }
    }
    uint32_t at = journal->at, ahead = at + BL_JOURNAL_AHEAD;
    bl_prefetch_write(&journal->ring[ahead < journal->room ? ahead : 0]);
    journal->at = at + 1 < journal->room ? at + 1 : 0;
    return &journal->ring[at];
}

void bl_journal_stored(bl_index *index, uint32_t number, const bl_name *name)
{
    bl_journal *journal = index->journal;
    bl_change *change = journal != NULL ? bl_journal_place(journal) : NULL;
    if (change == NULL)
        return;
    change->generation = index->blocks[number].generation;
    change->block = number;
    change->kind = BL_CHANGE_STORED;
    change->name = *name;
    bl_host_store(&journal->added, journal->added + 1);
}

void bl_journal_removed(bl_index *index, uint32_t number)
{
    bl_journal *journal = index->journal;
    const bl_block *block = &index->blocks[number];
    bl_change *change = journal != NULL && block->named ? bl_journal_place(journal) : NULL;
    if (change == NULL)
        return;
    change->generation = block->generation;
    change->block = number;
    change->kind = BL_CHANGE_REMOVED;
    bl_host_store(&journal->added, journal->added + 1);
}

static uint64_t bl_journal_size(uint32_t room) { return (uint64_t)room * sizeof(bl_change); }

int bl_journal_attach(bl_index *index, uint32_t room)
{
    if (index->journal != NULL)
        return -EEXIST;
    if (room == 0)
        return -EINVAL;
    bl_journal *journal = calloc(1, sizeof *journal);
    bl_change *ring = bl_lazy_map_dense(bl_journal_size(room));
    if (journal == NULL || ring == NULL) {
        free(journal);
        bl_lazy_unmap(ring, bl_journal_size(room));
        return -ENOMEM;
    }
    memset(ring, 0, bl_journal_size(room)); /* page faults here, not in the server's loop */
    *journal = (bl_journal){.ring = ring, .room = room};
    index->journal = journal;
    return 0;
}

int64_t bl_journal_take(bl_index *index, bl_change *changes, uint32_t count, uint64_t *lost)
{
    bl_journal *journal = index->journal;
    *lost = 0;
    if (journal == NULL)
        return 0;
    uint64_t ready = bl_host_load(&journal->added) - journal->taken;
    uint32_t part = (uint32_t)bl_min(ready, count);
    uint32_t first = (uint32_t)bl_min(part, journal->room - journal->take_at);
    memcpy(changes, &journal->ring[journal->take_at], first * sizeof *changes);
    memcpy(changes + first, journal->ring, (part - first) * sizeof *changes);
    journal->take_at = first < part ? part - first : (journal->take_at + part) % journal->room;
    bl_host_store(&journal->taken, journal->taken + part);
    *lost = bl_host_load(&journal->lost);
    return part;
}

void bl_journal_destroy(bl_index *index)
{
    if (index->journal != NULL)
        bl_lazy_unmap(index->journal->ring, bl_journal_size(index->journal->room));
    free(index->journal);
    index->journal = NULL;
}

/* ---- The name table, which a reader reads at its start. */

typedef struct bl_names {
    const bl_pool *pool;
    uint32_t half;
    uint32_t first, end;
    bl_change *names;
    int64_t found;
} bl_names;

/* Read one block's entry and name after their invalidation. Returns 1 if both are whole and of the
 * same block. */
static int bl_names_look(const bl_names *names, uint32_t number, bl_change *out)
{
    const bl_memory *memory = &names->pool->memory;
    const bl_geometry *g = &names->pool->geometry;
    bl_entry entry;
    bl_name_line line;
    bl_load_line(memory, bl_entry_offset(g, number, names->half), &entry); /* SYNC entry */
    if (entry.state != BL_ENTRY_COMMITTED || !(entry.flags & BL_ENTRY_NAMED))
        return 0;
    bl_load_line(memory, bl_name_offset(g, number, names->half), &line); /* SYNC name */
    if (!bl_verify(memory, bl_table_whole(&entry, number) && bl_table_whole(&line, number)) ||
        line.generation != entry.generation)
        return 0;
    *out = (bl_change){line.generation, number, BL_CHANGE_STORED, line.name};
    return 1;
}

static int bl_names_guarded(void *context)
{
    bl_names *names = context;
    const bl_memory *memory = &names->pool->memory;
    const bl_geometry *g = &names->pool->geometry;
    for (uint32_t number = names->first; number < names->end; number++) {
        if ((number - names->first) % BL_NAMES_BATCH == 0) {
            uint64_t lines = bl_min(names->end - number, BL_NAMES_BATCH);
            bl_fence_full(memory);
            bl_invalidate(memory, bl_entry_offset(g, number, names->half), lines * BL_LINE_SIZE);
            bl_invalidate(memory, bl_name_offset(g, number, names->half), lines * BL_LINE_SIZE);
            bl_fence_full(memory);
        }
        names->found += bl_names_look(names, number, &names->names[names->found]);
    }
    return 0;
}

int64_t bl_names_read(const bl_pool *pool, uint32_t half, uint32_t *first, uint32_t count,
                      bl_change *names)
{
    uint32_t max = pool->geometry.block_count_max, from = (uint32_t)bl_min(*first, max);
    bl_names all = {pool, half % BL_HALF_COUNT, from,
                    from + (uint32_t)bl_min(count, max - from), names, 0};
    int status = bl_guarded(&pool->memory, bl_names_guarded, &all);
    *first = all.end;
    return status < 0 ? status : all.found;
}

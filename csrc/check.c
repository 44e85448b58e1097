/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Looking a pool over, live or dead, without writing a byte: does what the serving half says hang
 * together? The same structures that a takeover fills say what contradicts what. On a live pool a
 * line that changes while it is judged is judged again, and its finding dropped if it went away.
 */
#include <errno.h>
#include <stdlib.h>

#include "meta.h"

typedef struct bl_check {
    const bl_pool *pool;
    bl_index *index;
    bl_extents *extents;
    bl_finding *findings;
    uint32_t count_max;
    uint32_t half;
    bl_check_report *report;
} bl_check;

static void bl_found(bl_check *check, uint32_t kind, uint64_t place, uint64_t detail)
{
    if (check->report->finding_count < check->count_max)
        check->findings[check->report->finding_count] = (bl_finding){kind, 0, place, detail};
    check->report->finding_count++;
}

/* A line as it is in memory now. */
static void bl_check_line(const bl_check *check, uint64_t offset, void *line)
{
    bl_refetch(&check->pool->memory, offset, BL_LINE_SIZE);
    bl_load_line(&check->pool->memory, offset, line);
}

/* Both copies of both lines. One that seems torn may be being written: it is looked at again. */
static void bl_check_epochs(bl_check *check)
{
    for (uint32_t copy = 0; copy < 2 * BL_HALF_COUNT; copy++) {
        uint32_t half = copy / 2;
        uint64_t offset = bl_epoch_offset(half) + copy % 2 * BL_LINE_SIZE;
        bl_epoch_line line;
        int tries = 0;
        do
            bl_check_line(check, offset, &line);
        while (!bl_table_whole(&line, half) && bl_line_used((uint64_t *)&line) && ++tries < 64);
        if (tries == 64)
            bl_found(check, BL_FINDING_EPOCH_DAMAGED, half, 0);
    }
}

static void bl_check_extents(bl_check *check)
{
    const bl_geometry *g = &check->pool->geometry;
    for (uint64_t stripe = 0; stripe < g->stripe_count; stripe++) {
        bl_extent_line line;
        bl_check_line(check, bl_extent_line_offset(g, stripe, check->half), &line);
        if (!bl_line_used((uint64_t *)&line))
            continue;
        if (!bl_table_whole(&line, stripe)) {
            bl_found(check, BL_FINDING_EXTENT_DAMAGED, stripe, 0);
            continue;
        }
        bl_extent_view view = bl_extent_of(&line);
        if (line.state == BL_EXTENT_FREE)
            continue;
        check->report->extent_count++;
        int status = line.first_stripe == stripe && line.state == BL_EXTENT_OPEN
                         ? bl_extents_adopt(check->extents, &view)
                         : -EINVAL;
        if (status < 0)
            bl_found(check,
                     status == -EEXIST ? BL_FINDING_EXTENT_OVERLAP : BL_FINDING_EXTENT_NONSENSE,
                     stripe, line.stripe_count);
    }
}

/* Are the bytes of a block those that were committed? */
static int bl_check_payload(const bl_check *check, const bl_entry *entry, uint8_t *chunk)
{
    const bl_memory *memory = &check->pool->memory;
    uint64_t vector_offset = bl_vector_offset(entry->offset, entry->length);
    uint32_t count = (entry->length + entry->chunk_size - 1) / entry->chunk_size, check_of_all = 0;
    for (uint32_t i = 0; i < count; i++) {
        uint32_t done = i * entry->chunk_size, stored;
        uint32_t size = entry->length - done < entry->chunk_size ? entry->length - done
                                                                 : entry->chunk_size;
        bl_refetch(memory, entry->offset + done, size);
        bl_fetch(memory, entry->offset + done, chunk, size);
        uint32_t sum = bl_crc32c(0, chunk, size);
        if (count == 1)
            return sum == entry->vector_check;
        bl_refetch(memory, vector_offset + i * sizeof stored, sizeof stored);
        bl_fetch(memory, vector_offset + i * sizeof stored, &stored, sizeof stored);
        if (stored != sum)
            return 0;
        check_of_all = bl_crc32c(check_of_all, &stored, sizeof stored);
    }
    return check_of_all == entry->vector_check;
}

/* What is wrong with an entry: 0 or a bl_finding_kind. */
static uint32_t bl_check_entry(bl_check *check, uint32_t number, const bl_entry *entry,
                               uint64_t epoch, uint8_t *chunk)
{
    if (!bl_table_whole(entry, number))
        return BL_FINDING_ENTRY_DAMAGED;
    if (entry->state == BL_ENTRY_FREE)
        return 0;
    if (entry->state != BL_ENTRY_COMMITTED || bl_entry_invalid(&check->pool->geometry, entry))
        return BL_FINDING_ENTRY_NONSENSE;
    if (entry->generation >> BL_GENERATION_SHIFT > epoch)
        return BL_FINDING_ENTRY_FUTURE;
    uint32_t block_size = bl_block_size(bl_stored_size(entry->length, entry->chunk_size));
    bl_believe(&check->pool->memory, bl_entry_offset(&check->pool->geometry, number, check->half));
    int status = bl_extents_claim(check->extents, entry->offset, block_size);
    if (status < 0)
        return status == -EEXIST ? BL_FINDING_ENTRY_OVERLAP : BL_FINDING_ENTRY_HOMELESS;
    if (bl_index_add(check->index, entry->key, number) < 0) {
        bl_extents_give(check->extents, entry->offset);
        return BL_FINDING_ENTRY_TWICE;
    }
    check->report->block_count++;
    check->report->block_bytes += entry->length;
    if (chunk && entry->chunk_size && !bl_check_payload(check, entry, chunk))
        return BL_FINDING_PAYLOAD_DAMAGED;
    return 0;
}

static int bl_check_entries(bl_check *check, uint64_t epoch, int payload)
{
    const bl_geometry *g = &check->pool->geometry;
    uint8_t *chunk = NULL;
    for (uint32_t number = 0; number < g->block_count_max; number++) {
        bl_entry entry, again;
        bl_check_line(check, bl_entry_offset(g, number, check->half), &entry);
        if (!bl_line_used((uint64_t *)&entry))
            continue;
        if (payload && bl_table_whole(&entry, number) && entry.chunk_size) {
            uint8_t *larger = realloc(chunk, entry.chunk_size);
            if (larger == NULL) {
                free(chunk);
                return -ENOMEM;
            }
            chunk = larger;
        }
        uint32_t kind = bl_check_entry(check, number, &entry, epoch, chunk);
        if (kind == 0)
            continue;
        bl_check_line(check, bl_entry_offset(g, number, check->half), &again);
        if (memcmp(&again, &entry, sizeof entry) == 0)
            bl_found(check, kind, number, entry.offset);
    }
    free(chunk);
    return 0;
}

int bl_check_pool(const bl_pool *pool, int payload, bl_finding *findings, uint32_t count_max,
                  bl_check_report *report)
{
    bl_check check = {
        .pool = pool, .findings = findings, .count_max = count_max, .report = report};
    bl_epoch_line epoch;
    *report = (bl_check_report){0};
    bl_epoch_read(pool, &epoch);
    report->epoch = epoch.epoch;
    report->serving = bl_epoch_serving(&epoch);
    check.half = (epoch.epoch + !bl_epoch_served(&epoch)) % BL_HALF_COUNT;
    bl_check_epochs(&check);
    int status = bl_index_create(&check.index, pool->geometry.block_count_max);
    if (status == 0) {
        status = bl_extents_create(&check.extents, pool->geometry.data_offset,
                                   pool->geometry.stripe_count);
        if (status == 0) {
            bl_check_extents(&check);
            status = bl_check_entries(&check, epoch.epoch, payload);
            bl_extents_destroy(check.extents);
        }
        bl_index_destroy(check.index);
    }
    return status;
}

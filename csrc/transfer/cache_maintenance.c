/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Applies the rules of transfer/device_range.h to whole plans. Adjacent chunks and rows are merged
 * into one range, so a block costs two fences instead of two for each chunk.
 * beluga/transfer/policy.py decides whether a device needs this on this machine.
 */
#include <errno.h>

#include "api/transfer.h"
#include "base/minmax.h"
#include "transfer/device_range.h"
#include "transfer/thread_pool.h"
#include "coherence/guard.h"
#include "pool/pool.h"

typedef struct bl_maintenance_range {
    uint64_t offset;
    uint64_t end;
} bl_maintenance_range;

typedef struct bl_maintenance_job {
    const bl_memory *memory;
    const bl_plan *plan;
    uint32_t maintenance;
    uint32_t count;             /* of the plan's ranges */
    uint64_t start, end;        /* of this job in the bytes of all ranges: whole lines */
} bl_maintenance_job;

enum { BL_MAINTENANCE_PART = 512 << 10 }; /* bytes per thread: a wake-up takes as long as 100 KiB */

static void bl_maintenance_take(const bl_memory *memory, bl_maintenance_range range,
                                uint32_t maintenance)
{
    if (maintenance == BL_MAINTENANCE_INVALIDATE)
        bl_device_reads(memory, range.offset, range.end - range.offset);
    else if (maintenance == BL_MAINTENANCE_FLUSH)
        bl_device_written(memory, range.offset, range.end - range.offset);
    else
        bl_device_ordered(memory);
}

/* Returns the whole lines of the plan's range i. Ranges are pieces if a sparse read needs no more,
 * and chunks otherwise. */
static bl_maintenance_range bl_maintenance_of(const bl_plan *plan, uint32_t i)
{
    int rows = plan->sparse && !plan->checksums;
    uint64_t offset = rows ? plan->pieces[i].offset : plan->chunks[i].offset;
    uint64_t size = rows ? plan->pieces[i].length : plan->chunks[i].length;
    uint64_t line = BL_LINE_SIZE - 1;
    return (bl_maintenance_range){offset & ~line, (offset + size + line) & ~line};
}

static uint32_t bl_maintenance_count(const bl_plan *plan)
{
    return plan->sparse && !plan->checksums ? plan->piece_count : plan->chunk_count;
}

/* Returns the part of a range that lies in the job. The range begins at byte at of all ranges. */
static bl_maintenance_range bl_maintenance_clip(const bl_maintenance_job *job,
                                                bl_maintenance_range range, uint64_t at)
{
    uint64_t size = range.end - range.offset;
    uint64_t before = job->start > at ? bl_min(job->start - at, size) : 0;
    uint64_t until = job->end > at ? bl_min(job->end - at, size) : 0;
    return (bl_maintenance_range){range.offset + before,
                                  range.offset + (until > before ? until : before)};
}

static int bl_maintenance_run(void *context)
{
    const bl_maintenance_job *job = context;
    bl_maintenance_range range = {0, 0};
    uint64_t at = 0;
    for (uint32_t i = 0; i < job->count && at < job->end; i++) {
        bl_maintenance_range whole = bl_maintenance_of(job->plan, i);
        bl_maintenance_range next = bl_maintenance_clip(job, whole, at);
        at += whole.end - whole.offset;
        if (next.offset == next.end)
            continue;
        if (next.offset >= range.offset && next.offset <= range.end) {
            range.end = next.end > range.end ? next.end : range.end;
            continue;
        }
        if (range.end > 0)
            bl_maintenance_take(job->memory, range, job->maintenance);
        range = next;
    }
    bl_maintenance_take(job->memory, range, job->maintenance);
    return 0;
}

typedef struct bl_maintenance_split {
    const bl_maintenance_job *job;
    uint32_t part_count;
} bl_maintenance_split;

/* Maintain the lines of one part, on any thread: a flush reaches the caches of all cores. */
static int bl_maintenance_part(void *context, uint32_t number, uint32_t worker)
{
    (void)worker;
    const bl_maintenance_split *split = context;
    bl_maintenance_job part = *split->job;
    uint64_t lines = part.end / BL_LINE_SIZE;
    part.start = lines * number / split->part_count * BL_LINE_SIZE;
    part.end = lines * (number + 1) / split->part_count * BL_LINE_SIZE;
    return bl_guarded(part.memory, bl_maintenance_run, &part);
}

int bl_plan_maintenance(const bl_pool *pool, const bl_plan *plan, uint32_t maintenance,
                        uint32_t threads)
{
    uint64_t size = 0;
    uint32_t count = bl_maintenance_count(plan);
    for (uint32_t i = 0; i < count; i++) {
        bl_maintenance_range range = bl_maintenance_of(plan, i);
        if (range.end < range.offset || range.end > pool->memory.size)
            return -EINVAL;
        size += range.end - range.offset;
    }
    if (maintenance == BL_MAINTENANCE_FENCE)
        size = 0;               /* the fence alone */
    bl_maintenance_job job = {&pool->memory, plan, maintenance, count, 0, size};
    uint64_t parts = bl_min(size / BL_MAINTENANCE_PART, threads);
    if (parts < 2)
        return bl_guarded(&pool->memory, bl_maintenance_run, &job);
    bl_maintenance_split split = {&job, (uint32_t)parts};
    return bl_thread_pool_run((uint32_t)parts, (uint32_t)parts, bl_maintenance_part, &split);
}

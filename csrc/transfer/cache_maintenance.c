/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Applies the rules of transfer/device_range.h to whole plans. Adjacent chunks and rows are merged
 * into one range, so a block costs two fences instead of two for each chunk.
 * beluga/transfer/engines/policy.py decides whether a device needs this on this machine.
 */
#include <errno.h>

#include "api/transfer.h"
#include "transfer/device_range.h"
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
} bl_maintenance_job;

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

static int bl_maintenance_run(void *context)
{
    const bl_maintenance_job *job = context;
    const bl_plan *plan = job->plan;
    uint32_t count = plan->sparse && !plan->checksums ? plan->piece_count : plan->chunk_count;
    bl_maintenance_range range = {0, 0};
    for (uint32_t i = 0; i < count; i++) {
        bl_maintenance_range next = bl_maintenance_of(plan, i);
        if (next.end < next.offset || next.end > job->memory->size)
            return -EINVAL;
    }
    for (uint32_t i = 0; i < count && job->maintenance != BL_MAINTENANCE_FENCE; i++) {
        bl_maintenance_range next = bl_maintenance_of(plan, i);
        if (i > 0 && next.offset >= range.offset && next.offset <= range.end) {
            range.end = next.end > range.end ? next.end : range.end;
            continue;
        }
        if (i > 0)
            bl_maintenance_take(job->memory, range, job->maintenance);
        range = next;
    }
    bl_maintenance_take(job->memory, range, job->maintenance);
    return 0;
}

int bl_plan_maintenance(const bl_pool *pool, const bl_plan *plan, uint32_t maintenance)
{
    bl_maintenance_job job = {&pool->memory, plan, maintenance};
    return bl_guarded(&pool->memory, bl_maintenance_run, &job);
}

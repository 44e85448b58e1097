/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Makes the plan of one block, and executes it on the CPU (transfer/block.h).
 */
#include "transfer/block.h"

#include <errno.h>
#include <stdlib.h>

#include "coherence/coherence.h"
#include "pool/pool.h"
#include "transfer/plan.h"

static int bl_transfer_valid(const bl_memory *memory, uint64_t offset, const bl_fragment *fragments,
                             uint32_t count, uint64_t length)
{
    if (offset % BL_LINE_SIZE > 0 || offset > memory->size || length > memory->size - offset)
        return 0;
    for (uint32_t i = 0; i < count; i++) {
        if (fragments[i].size > length)
            return 0;
        length -= fragments[i].size;
    }
    return length == 0;
}

static int bl_transfer(const bl_memory *memory, uint64_t offset, const bl_fragment *fragments,
                       uint32_t count, uint64_t length, uint32_t chunk_size, uint32_t *checksums,
                       const bl_copy_settings *settings, bl_throttle *throttle, int write)
{
    if (!bl_transfer_valid(memory, offset, fragments, count, length))
        return -EINVAL;
    if (length == 0)
        return 0;
    uint64_t stripes = ((length - 1) >> BL_STRIPE_SHIFT) + 2;
    uint64_t summed = checksums ? chunk_size : 0;
    uint64_t chunk_count = summed ? (length + summed - 1) / summed : stripes;
    uint64_t room = count + chunk_count + stripes;
    if (room > UINT32_MAX)
        return -EINVAL;
    bl_piece *pieces = malloc(room * sizeof *pieces);
    bl_chunk *chunks = malloc(chunk_count * sizeof *chunks);
    int status = -ENOMEM;
    if (pieces && chunks) {
        bl_plan plan = {pieces, chunks, summed ? checksums : NULL, 0, 0, 0, 0, 0, 0};
        bl_plan_source source = {offset, length, summed, &fragments->address, &fragments->size,
                                 sizeof *fragments / sizeof fragments->address};
        bl_plan_add(&plan, pieces, chunks, &source);
        status = bl_plan_execute(memory, &plan, settings, write, throttle);
    }
    free(pieces);
    free(chunks);
    return status;
}

int bl_gather_write(const bl_memory *memory, uint64_t offset, const bl_fragment *fragments,
                    uint32_t count, uint64_t length, uint32_t chunk_size, uint32_t *checksums,
                    const bl_copy_settings *settings, bl_throttle *throttle)
{
    return bl_transfer(memory, offset, fragments, count, length, chunk_size, checksums, settings,
                       throttle, 1);
}

int bl_scatter_read(const bl_memory *memory, uint64_t offset, const bl_fragment *fragments,
                    uint32_t count, uint64_t length, uint32_t chunk_size, const uint32_t *checksums,
                    const bl_copy_settings *settings, bl_throttle *throttle)
{
    return bl_transfer(memory, offset, fragments, count, length, chunk_size, (uint32_t *)checksums,
                       settings, throttle, 0);
}

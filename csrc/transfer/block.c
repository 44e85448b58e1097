/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Makes the plan of one block by cutting its fragments into pieces (transfer/block.h).
 */
#include "transfer/block.h"
#include "base/minmax.h"

#include <errno.h>
#include <stdlib.h>

#include "coherence/coherence.h"
#include "pool/pool.h"

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

/* Cut the block at the ends of fragments, chunks and stripes. Without checksums, a chunk is the
 * part of the block in one stripe. */
static bl_plan bl_block_cut(uint64_t offset, const bl_fragment *fragments, uint64_t length,
                            uint64_t chunk_size, bl_piece *pieces, bl_chunk *chunks)
{
    bl_plan plan = {.pieces = pieces, .chunks = chunks};
    uint64_t used = 0, chunk_end = offset, end = offset + length;
    for (uint64_t run, at = offset; at < end; at += run, used += run) {
        while (used == fragments->size)
            fragments++, used = 0;
        if (at == chunk_end) {
            chunk_end += bl_least(end - at, chunk_size ? chunk_size : bl_stripe_rest(at));
            chunks[plan.chunk_count++] =
                (bl_chunk){at, (uint32_t)(chunk_end - at), plan.piece_count};
        }
        run = bl_least(bl_least(fragments->size - used, bl_stripe_rest(at)), chunk_end - at);
        pieces[plan.piece_count++] = (bl_piece){fragments->address + used, at, (uint32_t)run,
                                                plan.chunk_count - 1};
    }
    return plan;
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
        bl_plan plan = bl_block_cut(offset, fragments, length, summed, pieces, chunks);
        plan.checksums = summed ? checksums : NULL;
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

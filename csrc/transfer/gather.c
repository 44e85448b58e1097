/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Runs of private memory put end to end into one range of the pool (transfer/block.h). A payload
 * byte is read once: it is summed on its way.
 */
#include "transfer/block.h"

#include <string.h>

#include "coherence/coherence.h"

static void bl_gather_begin(bl_gather *gather, const bl_memory *memory, uint64_t offset,
                            uint32_t direct)
{
    gather->memory = memory, gather->offset = offset;
    gather->direct = direct, gather->staged = 0;
}

static void bl_gather_flush(bl_gather *gather)
{
    if (gather->staged > 0)
        bl_stream(gather->memory, gather->offset, gather->stage, gather->staged);
    gather->offset += gather->staged;
    gather->staged = 0;
}

/* crc: of the bytes before in their chunk, and then of these too; or NULL. */
static void bl_gather_direct(bl_gather *gather, const void *source, uint64_t size, uint32_t *crc)
{
    bl_gather_flush(gather);
    if (crc != NULL)
        *crc = bl_stream_crc(gather->memory, gather->offset, source, size, *crc);
    else
        bl_stream(gather->memory, gather->offset, source, size);
    gather->offset += size;
}

static void bl_gather_stage(bl_gather *gather, const void *source, uint32_t size, uint32_t *crc)
{
    uint8_t *target = gather->stage + gather->staged;
    if (crc != NULL)
        *crc = bl_copy_crc(*crc, target, source, size);
    else
        memcpy(target, source, size);
    gather->staged += size;
    if (gather->staged == BL_STAGE_SIZE)
        bl_gather_flush(gather);
}

/* A long run goes out from where it lies, as soon as the stage ends with a whole line. */
static void bl_gather_put(bl_gather *gather, const uint8_t *next, uint64_t size, uint32_t *crc)
{
    for (uint64_t piece; size > 0; next += piece, size -= piece) {
        uint32_t ragged = gather->staged % BL_LINE_SIZE;
        if (size >= gather->direct && ragged == 0) {
            piece = size & ~(uint64_t)(BL_LINE_SIZE - 1);
            bl_gather_direct(gather, next, piece, crc);
        } else {
            uint32_t room = ragged > 0 ? BL_LINE_SIZE - ragged : BL_STAGE_SIZE - gather->staged;
            piece = bl_least(size, room);
            bl_gather_stage(gather, next, (uint32_t)piece, crc);
        }
    }
}

/* Fill the last line up with zeros, and let it go. */
static void bl_gather_end(bl_gather *gather)
{
    uint32_t blank = -gather->staged % BL_LINE_SIZE;
    memset(gather->stage + gather->staged, 0, blank);
    gather->staged += blank;
    bl_gather_flush(gather);
}

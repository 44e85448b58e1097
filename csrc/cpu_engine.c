/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * The copy engine of the CPU (transfer.h). A payload byte is read once: it is summed on its way.
 */
#include "transfer.h"

#include <errno.h>
#include <string.h>

#include "coherence.h"
#include "crash_point.h"
#include "guard.h"
#include "pool.h"

enum bl_cpu_engine_constant {
    BL_STAGE_SIZE = 4 << 10,    /* of small fragments put together before they are streamed */
    BL_DIRECT_SIZE = 256        /* a run this long is streamed from where it lies */
};

/* A place in the fragments, and in the checksums over them. */
typedef struct bl_cursor {
    const bl_fragment *fragment;
    uint64_t used;              /* bytes of the fragment that are done */
    uint64_t left;              /* bytes of payload that are not */
    uint32_t chunk_size;        /* 0: there are no checksums */
    uint32_t chunk_left;        /* bytes of this chunk that are not done */
    uint32_t crc;               /* of those that are */
} bl_cursor;

typedef struct bl_gather {
    const bl_memory *memory;
    uint64_t offset;            /* where the stage goes */
    uint32_t staged;
    _Alignas(BL_LINE_SIZE) uint8_t stage[BL_STAGE_SIZE];
} bl_gather;

static inline uint64_t bl_least(uint64_t a, uint64_t b) { return a < b ? a : b; }

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

static bl_cursor bl_cursor_make(const bl_fragment *fragments, uint64_t length, uint32_t chunk_size)
{
    return (bl_cursor){.fragment = fragments, .left = length, .chunk_size = chunk_size,
                       .chunk_left = (uint32_t)bl_least(length, chunk_size)};
}

/* The next bytes that lie in one run and in one chunk. */
static bl_fragment bl_cursor_take(bl_cursor *cursor)
{
    while (cursor->used == cursor->fragment->size)
        cursor->fragment++, cursor->used = 0;
    bl_fragment run = {cursor->fragment->address + cursor->used,
                       cursor->fragment->size - cursor->used};
    if (cursor->chunk_size > 0) {
        run.size = bl_least(run.size, cursor->chunk_left);
        cursor->chunk_left -= (uint32_t)run.size;
    }
    cursor->used += run.size, cursor->left -= run.size;
    return run;
}

static int bl_cursor_ends_chunk(const bl_cursor *cursor)
{
    return cursor->chunk_size > 0 && cursor->chunk_left == 0;
}

static void bl_cursor_next_chunk(bl_cursor *cursor)
{
    cursor->chunk_left = (uint32_t)bl_least(cursor->left, cursor->chunk_size);
    cursor->crc = 0;
}

static void bl_gather_flush(bl_gather *gather)
{
    if (gather->staged > 0)
        bl_stream(gather->memory, gather->offset, gather->stage, gather->staged);
    gather->offset += gather->staged;
    gather->staged = 0;
}

static void bl_gather_direct(bl_gather *gather, bl_cursor *cursor, const void *source,
                             uint64_t size)
{
    bl_gather_flush(gather);
    if (cursor->chunk_size > 0)
        cursor->crc = bl_stream_crc(gather->memory, gather->offset, source, size, cursor->crc);
    else
        bl_stream(gather->memory, gather->offset, source, size);
    gather->offset += size;
}

static void bl_gather_stage(bl_gather *gather, bl_cursor *cursor, const void *source, uint32_t size)
{
    uint8_t *target = gather->stage + gather->staged;
    if (cursor->chunk_size > 0)
        cursor->crc = bl_copy_crc(cursor->crc, target, source, size);
    else
        memcpy(target, source, size);
    gather->staged += size;
    if (gather->staged == BL_STAGE_SIZE)
        bl_gather_flush(gather);
}

/* A long run goes out from where it lies, as soon as the stage ends with a whole line. */
static void bl_gather_put(bl_gather *gather, bl_cursor *cursor, bl_fragment run)
{
    const uint8_t *next = (const uint8_t *)run.address;
    for (uint64_t piece; run.size > 0; next += piece, run.size -= piece) {
        uint32_t ragged = gather->staged % BL_LINE_SIZE;
        if (run.size >= BL_DIRECT_SIZE && ragged == 0) {
            piece = run.size & ~(uint64_t)(BL_LINE_SIZE - 1);
            bl_gather_direct(gather, cursor, next, piece);
        } else {
            uint32_t room = ragged > 0 ? BL_LINE_SIZE - ragged : BL_STAGE_SIZE - gather->staged;
            piece = bl_least(run.size, room);
            bl_gather_stage(gather, cursor, next, (uint32_t)piece);
        }
    }
}

int bl_gather_write(const bl_memory *memory, uint64_t offset, const bl_fragment *fragments,
                    uint32_t count, uint64_t length, uint32_t chunk_size, uint32_t *vector)
{
    if (!bl_transfer_valid(memory, offset, fragments, count, length))
        return -EINVAL;
    bl_cursor cursor = bl_cursor_make(fragments, length, vector ? chunk_size : 0);
    bl_gather gather;
    gather.memory = memory, gather.offset = offset, gather.staged = 0;
    while (cursor.left > 0) {
        bl_gather_put(&gather, &cursor, bl_cursor_take(&cursor));
        if (bl_cursor_ends_chunk(&cursor)) {
            *vector++ = cursor.crc;
            bl_cursor_next_chunk(&cursor);
            bl_crash_point("payload.chunk_streamed");
        }
    }
    uint32_t blank = -gather.staged % BL_LINE_SIZE;
    memset(gather.stage + gather.staged, 0, blank);
    gather.staged += blank;
    bl_gather_flush(&gather);
    return 0;
}

/* All lines are dropped before the first is fetched: with a fence every few lines the hardware
 * would start its prefetching anew each time. */
int bl_scatter_read(const bl_memory *memory, uint64_t offset, const bl_fragment *fragments,
                    uint32_t count, uint64_t length, uint32_t chunk_size, const uint32_t *vector)
{
    if (!bl_transfer_valid(memory, offset, fragments, count, length))
        return -EINVAL;
    bl_cursor cursor = bl_cursor_make(fragments, length, vector ? chunk_size : 0);
    bl_refetch(memory, offset, length);
    while (cursor.left > 0) {
        bl_fragment run = bl_cursor_take(&cursor);
        void *target = (void *)run.address;
        if (cursor.chunk_size > 0)
            cursor.crc = bl_fetch_crc(memory, offset, target, run.size, cursor.crc);
        else
            bl_fetch(memory, offset, target, run.size);
        offset += run.size;
        if (bl_cursor_ends_chunk(&cursor)) {
            if (!bl_verify(memory, cursor.crc == *vector++))
                return -EBADMSG;
            bl_cursor_next_chunk(&cursor);
            bl_crash_point("payload.chunk_fetched");
        }
    }
    return 0;
}

/* The arguments of one transfer. */
typedef struct bl_transfer {
    const bl_memory *memory;
    uint64_t offset;
    const bl_fragment *fragments;
    uint64_t length;
    uint32_t count;
    uint32_t chunk_size;
    uint32_t *vector;           /* of a write */
    const uint32_t *expected;   /* of a read */
} bl_transfer;

static int bl_transfer_write_guarded(void *context)
{
    const bl_transfer *t = context;
    int status = bl_gather_write(t->memory, t->offset, t->fragments, t->count, t->length,
                                 t->chunk_size, t->vector);
    bl_fence_store(t->memory);
    return status;
}

int bl_transfer_write(const bl_pool *pool, uint64_t offset, const bl_fragment *fragments,
                      uint32_t count, uint64_t length, uint32_t chunk_size, uint32_t *vector)
{
    bl_transfer transfer = {&pool->memory, offset, fragments, length, count, chunk_size, vector,
                            NULL};
    return bl_guarded(&pool->memory, bl_transfer_write_guarded, &transfer);
}

static int bl_transfer_read_guarded(void *context)
{
    const bl_transfer *t = context;
    return bl_scatter_read(t->memory, t->offset, t->fragments, t->count, t->length, t->chunk_size,
                           t->expected);
}

int bl_transfer_read(const bl_pool *pool, uint64_t offset, const bl_fragment *fragments,
                     uint32_t count, uint64_t length, uint32_t chunk_size, const uint32_t *vector)
{
    bl_transfer transfer = {&pool->memory, offset, fragments, length, count, chunk_size, NULL,
                            vector};
    return bl_guarded(&pool->memory, bl_transfer_read_guarded, &transfer);
}

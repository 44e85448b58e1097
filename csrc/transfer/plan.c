/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Makes plans of whole blocks, and validates plans: pieces and chunks must lie in the pool, and
 * pieces in their chunks.
 */
#include "transfer/plan.h"

#include <errno.h>

#include "base/minmax.h"
#include "pool/pool.h"

/* Validate piece i, and its chunk if the piece is the first one. at is the end of the piece before
 * it, or UINT64_MAX. */
static int bl_plan_piece_valid(const bl_memory *memory, const bl_plan *plan, uint32_t i,
                               uint64_t at)
{
    const bl_piece *piece = &plan->pieces[i];
    uint32_t before = i > 0 ? plan->pieces[i - 1].chunk : plan->chunk_base - 1;
    if (piece->chunk - plan->chunk_base >= plan->chunk_count ||
        (piece->chunk != before && piece->chunk != before + 1))
        return 0;
    const bl_chunk *chunk = bl_plan_chunk(plan, piece);
    if (piece->chunk != before) {
        if (chunk->first - plan->piece_base != i || chunk->offset > memory->size ||
            chunk->length > memory->size - chunk->offset ||
            (chunk->offset % BL_LINE_SIZE > 0 && chunk->offset != at))
            return 0;
        at = chunk->offset;
    }
    if (piece->offset < chunk->offset || piece->offset > bl_chunk_end(chunk) ||
        piece->length > bl_chunk_end(chunk) - piece->offset)
        return 0;
    return plan->sparse || (piece->offset == at && (!bl_plan_ends_chunk(plan, i) ||
                                                    bl_piece_end(piece) == bl_chunk_end(chunk)));
}

int bl_plan_valid(const bl_memory *memory, const bl_plan *plan)
{
    for (uint32_t i = 0; i < plan->piece_count; i++)
        if (!bl_plan_piece_valid(memory, plan, i,
                                 i > 0 ? bl_piece_end(&plan->pieces[i - 1]) : UINT64_MAX))
            return 0;
    return plan->piece_count == 0
               ? plan->chunk_count == 0
               : plan->pieces[plan->piece_count - 1].chunk + 1 - plan->chunk_base ==
                     plan->chunk_count;
}

int bl_plan_within(const bl_plan *plan, uint64_t size)
{
    for (uint32_t i = 0; i < plan->piece_count; i++)
        if (plan->pieces[i].offset > size || plan->pieces[i].length > size - plan->pieces[i].offset)
            return 0;
    for (uint32_t i = 0; i < plan->chunk_count; i++)
        if (plan->chunks[i].offset > size || plan->chunks[i].length > size - plan->chunks[i].offset)
            return 0;
    return 1;
}

int bl_plan_check(const bl_pool *pool, const bl_plan *plan)
{
    return bl_plan_valid(&pool->memory, plan) ? 0 : -EINVAL;
}

void bl_plan_add(bl_plan *plan, bl_piece *pieces, bl_chunk *chunks, const bl_plan_source *source)
{
    const uint64_t *address = source->addresses, *size = source->sizes;
    uint64_t used = 0, at = source->offset, end = at + source->length, chunk_end = at;
    for (uint64_t run; at < end; at += run, used += run) {
        while (used == *size)
            address += source->stride, size += source->stride, used = 0;
        if (at == chunk_end) {
            chunk_end += bl_min(end - at, source->chunk_size ? source->chunk_size
                                                               : bl_stripe_rest(at));
            chunks[plan->chunk_count++] =
                (bl_chunk){at, (uint32_t)(chunk_end - at), plan->piece_count};
        }
        run = bl_min(bl_min(*size - used, bl_stripe_rest(at)), chunk_end - at);
        pieces[plan->piece_count++] =
            (bl_piece){*address + used, at, (uint32_t)run, plan->chunk_count - 1};
    }
}

uint64_t bl_plan_blocks(const uint64_t *addresses, const uint64_t *sizes, const uint64_t *offsets,
                        uint32_t block_count, uint32_t fragment_count, uint64_t chunk_size,
                        bl_piece *pieces, bl_chunk *chunks)
{
    bl_plan plan = {0};
    bl_plan_source source = {.sizes = sizes, .stride = 1, .chunk_size = chunk_size};
    for (uint32_t f = 0; f < fragment_count; f++)
        source.length += sizes[f];
    for (uint32_t b = 0; b < block_count; b++) {
        source.addresses = &addresses[(uint64_t)b * fragment_count];
        source.offset = offsets[b];
        bl_plan_add(&plan, pieces, chunks, &source);
    }
    return plan.piece_count;
}

/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Validates plans: pieces and chunks must lie in the pool, and pieces in their chunks.
 */
#include "transfer/plan.h"

#include <errno.h>

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

int bl_plan_check(const bl_pool *pool, const bl_plan *plan)
{
    return bl_plan_valid(&pool->memory, plan) ? 0 : -EINVAL;
}

/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Declares the making and the validation of plans (api/transfer.h).
 */
#ifndef BL_PLAN_H
#define BL_PLAN_H

#include "api/transfer.h"
#include "coherence/memory.h"

static inline const bl_chunk *bl_plan_chunk(const bl_plan *plan, const bl_piece *piece)
{
    return &plan->chunks[piece->chunk - plan->chunk_base];
}

static inline uint64_t bl_piece_end(const bl_piece *piece) { return piece->offset + piece->length; }

static inline uint64_t bl_chunk_end(const bl_chunk *chunk) { return chunk->offset + chunk->length; }

static inline int bl_plan_ends_chunk(const bl_plan *plan, uint32_t i)
{
    return i + 1 == plan->piece_count || plan->pieces[i + 1].chunk != plan->pieces[i].chunk;
}

/* A block of length bytes at an offset of the pool, and its fragments: stride words lie between
 * their addresses, and between their sizes. */
typedef struct bl_plan_source {
    uint64_t offset;
    uint64_t length;
    uint64_t chunk_size;        /* 0: a chunk is the part of the block in one stripe */
    const uint64_t *addresses;
    const uint64_t *sizes;
    uint32_t stride;
} bl_plan_source;

/* Append a block's pieces and chunks to a plan's arrays. It is cut at the ends of fragments, chunks
 * and stripes. */
void bl_plan_add(bl_plan *plan, bl_piece *pieces, bl_chunk *chunks, const bl_plan_source *source);

/* Returns 1 if a plan's pieces lie in the pool and in their chunks, and, in a dense plan, tile
 * these. */
int bl_plan_valid(const bl_memory *memory, const bl_plan *plan);

#endif

/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Makes plans of whole blocks and of rows, and validates plans: pieces and chunks must lie in the
 * pool, and pieces in their chunks.
 */
#include "transfer/plan.h"

#include <errno.h>
#include <stdlib.h>

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

/* A piece of a row, and the number of its chunk, counted over all blocks. */
typedef struct bl_cut {
    uint64_t chunk;
    bl_piece piece;
} bl_cut;

/* Cut off the part of a row that begins at this place of the payload. Returns its size. */
static uint64_t bl_row_part(const bl_row *row, uint64_t offset, uint64_t chunk_size, uint64_t at)
{
    uint64_t rest = bl_min(row->place + row->size - at, bl_stripe_rest(offset + at));
    return bl_min(rest, chunk_size - at % chunk_size);
}

uint64_t bl_plan_rows_count(const bl_row *rows, uint64_t row_count, const uint64_t *offsets,
                            uint64_t chunk_size)
{
    uint64_t count = 0;
    for (const bl_row *row = rows; row < rows + row_count; row++)
        for (uint64_t at = row->place; at < row->place + row->size; count++)
            at += bl_row_part(row, offsets[row->block], chunk_size, at);
    return count;
}

/* Rows overlap, so two cuts may have the same bytes of the pool. */
static int bl_cut_compare(const void *a, const void *b)
{
    const bl_cut *one = a, *two = b;
    if (one->chunk != two->chunk)
        return one->chunk < two->chunk ? -1 : 1;
    if (one->piece.offset != two->piece.offset)
        return one->piece.offset < two->piece.offset ? -1 : 1;
    return one->piece.address < two->piece.address ? -1 : one->piece.address > two->piece.address;
}

int64_t bl_plan_rows(const bl_row *rows, uint64_t row_count, const uint64_t *offsets,
                     uint64_t length, uint64_t chunk_size, const uint32_t *checksums,
                     bl_piece *pieces, bl_chunk *chunks, uint32_t *sums)
{
    uint64_t per_block = (length + chunk_size - 1) / chunk_size, count = 0;
    uint32_t chunk_count = 0;
    int sorted = 1;
    bl_cut *cuts = malloc((bl_plan_rows_count(rows, row_count, offsets, chunk_size) + 1) *
                          sizeof *cuts);
    if (cuts == NULL)
        return -ENOMEM;
    for (const bl_row *row = rows; row < rows + row_count; row++)
        for (uint64_t part, at = row->place; at < row->place + row->size; at += part) {
            uint64_t offset = offsets[row->block];
            part = bl_row_part(row, offset, chunk_size, at);
            cuts[count] = (bl_cut){row->block * per_block + at / chunk_size,
                                   {row->address + (at - row->place), offset + at, (uint32_t)part,
                                    0}};
            sorted &= count == 0 || bl_cut_compare(&cuts[count - 1], &cuts[count]) <= 0;
            count++;
        }
    if (!sorted)
        qsort(cuts, count, sizeof *cuts, bl_cut_compare);
    for (uint64_t i = 0; i < count; i++) {
        uint64_t chunk = cuts[i].chunk, start = chunk % per_block * chunk_size;
        if (i == 0 || chunk != cuts[i - 1].chunk) {
            if (checksums != NULL)
                sums[chunk_count] = checksums[chunk];
            chunks[chunk_count++] = (bl_chunk){offsets[chunk / per_block] + start,
                                               (uint32_t)bl_min(length - start, chunk_size),
                                               (uint32_t)i};
        }
        pieces[i] = cuts[i].piece;
        pieces[i].chunk = chunk_count - 1;
    }
    free(cuts);
    return chunk_count;
}

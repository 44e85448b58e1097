/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Cuts the chunks of sparse plans with checksums into runs.
 *
 * To compare a checksum, the whole chunk is read. The delivered bytes must be the summed bytes,
 * even if the pool's bytes change between two reads. So each byte is read once, with all its
 * targets, even where rows overlap.
 */
#include <errno.h>
#include <stdlib.h>

#include "api/transfer.h"
#include "format/interleave.h"
#include "transfer/plan.h"

/* Scratch memory for one chunk. */
typedef struct bl_run_scratch {
    uint64_t *edges;            /* where runs begin and end */
    bl_piece *rows;             /* in order of their offsets */
    uint32_t *active;           /* the rows that contain the present run */
} bl_run_scratch;

static int bl_run_add(bl_row_runs *runs, bl_piece piece, int64_t shared)
{
    if (runs->count == runs->room) {
        uint32_t room = runs->room ? 2 * runs->room : 256;
        bl_piece *pieces = realloc(runs->pieces, room * sizeof *pieces);
        if (pieces != NULL)
            runs->pieces = pieces;
        int64_t *more = realloc(runs->shared, room * sizeof *more);
        if (more != NULL)
            runs->shared = more;
        if (pieces == NULL || more == NULL)
            return -ENOMEM;
        runs->room = room;
    }
    runs->pieces[runs->count] = piece;
    runs->shared[runs->count++] = shared;
    return 0;
}

static int bl_edge_compare(const void *a, const void *b)
{
    uint64_t one = *(const uint64_t *)a, two = *(const uint64_t *)b;
    return one < two ? -1 : one > two;
}

static int bl_row_compare(const void *a, const void *b)
{
    return bl_edge_compare(&((const bl_piece *)a)->offset, &((const bl_piece *)b)->offset);
}

/* Sort the edges of a chunk and its rows. Returns the number of edges. */
static uint32_t bl_run_edges(const bl_chunk *chunk, bl_run_scratch *scratch, uint32_t row_count)
{
    uint32_t count = 0;
    for (uint64_t at = chunk->offset; at < bl_chunk_end(chunk); at += bl_stripe_rest(at))
        scratch->edges[count++] = at;
    scratch->edges[count++] = bl_chunk_end(chunk);
    for (uint32_t i = 0; i < row_count; i++) {
        scratch->edges[count++] = scratch->rows[i].offset;
        scratch->edges[count++] = bl_piece_end(&scratch->rows[i]);
    }
    qsort(scratch->edges, count, sizeof *scratch->edges, bl_edge_compare);
    qsort(scratch->rows, row_count, sizeof *scratch->rows, bl_row_compare);
    return count;
}

static int bl_run_chunk(bl_row_runs *runs, const bl_chunk *chunk, uint32_t number,
                        bl_run_scratch *scratch, uint32_t row_count)
{
    uint32_t edge_count = bl_run_edges(chunk, scratch, row_count), next = 0, active = 0;
    int status = 0;
    for (uint32_t e = 0; e + 1 < edge_count && status == 0; e++) {
        uint64_t start = scratch->edges[e], end = scratch->edges[e + 1];
        uint32_t kept = 0;
        if (start == end)
            continue;
        for (uint32_t i = 0; i < active; i++)
            if (bl_piece_end(&scratch->rows[scratch->active[i]]) > start)
                scratch->active[kept++] = scratch->active[i];
        for (; next < row_count && scratch->rows[next].offset == start; next++)
            scratch->active[kept++] = next;
        active = kept;
        bl_piece run = {0, start, (uint32_t)(end - start), number};
        if (active == 0)
            status = bl_run_add(runs, run, 0);
        for (uint32_t i = 0; i < active && status == 0; i++) {
            const bl_piece *row = &scratch->rows[scratch->active[i]];
            run.address = row->address + (start - row->offset);
            status = bl_run_add(runs, run, i == 0 ? (int64_t)active - 1 : -1);
        }
    }
    return status;
}

int bl_row_runs_make(const bl_plan *plan, bl_row_runs *runs)
{
    int status = 0;
    runs->count = 0;
    for (uint32_t c = 0, first = 0, end; c < plan->chunk_count && status == 0; c++, first = end) {
        const bl_chunk *chunk = &plan->chunks[c];
        end = first;
        while (end < plan->piece_count && plan->pieces[end].chunk - plan->chunk_base == c)
            end++;
        uint32_t rows = end - first;
        uint64_t edges = 2ull * rows + chunk->length / BL_STRIPE_SIZE + 3;
        bl_run_scratch scratch = {malloc(edges * sizeof *scratch.edges),
                                  malloc((rows + 1ull) * sizeof *scratch.rows),
                                  malloc((rows + 1ull) * sizeof *scratch.active)};
        status = -ENOMEM;
        if (scratch.edges != NULL && scratch.rows != NULL && scratch.active != NULL) {
            for (uint32_t i = 0; i < rows; i++)
                scratch.rows[i] = plan->pieces[first + i];
            status = bl_run_chunk(runs, chunk, plan->chunk_base + c, &scratch, rows);
        }
        free(scratch.edges);
        free(scratch.rows);
        free(scratch.active);
    }
    return status;
}

void bl_row_runs_free(bl_row_runs *runs)
{
    free(runs->pieces);
    free(runs->shared);
    *runs = (bl_row_runs){0};
}

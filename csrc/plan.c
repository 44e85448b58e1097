/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * The copy engine of the CPU: plans (api_transfer.h) executed by one thread or several. A plan is
 * parted where a line begins and, if it has checksums, a chunk; each part is one thread's.
 */
#include <errno.h>
#include <stdlib.h>

#include "crash_point.h"
#include "crew.h"
#include "guard.h"
#include "pool.h"
#include "transfer.h"

enum bl_plan_constant {
    BL_PARTS_PER_THREAD = 4,    /* so that a slow one is waited for a quarter of its time */
    BL_STEP_SIZE = 2 << 10,     /* read between two drops of the next window's lines */
    BL_HEAD_SIZE = 2 << 10,     /* of the next piece, asked for while this one is written */
    BL_PAST_SIZE = 256 << 10,   /* a dense plan that would take so much cache goes past it */
#ifdef BL_SIM
    BL_WINDOW_SIZE = 256        /* its blocks are small, and have several windows too */
#else
    BL_WINDOW_SIZE = 64 << 10
#endif
};

/* ---- Is it a plan? */

static const bl_chunk *bl_plan_chunk(const bl_plan *plan, const bl_piece *piece)
{
    return &plan->chunks[piece->chunk - plan->chunk_base];
}

static uint64_t bl_piece_end(const bl_piece *piece) { return piece->offset + piece->length; }

static uint64_t bl_chunk_end(const bl_chunk *chunk) { return chunk->offset + chunk->length; }

static int bl_plan_ends_chunk(const bl_plan *plan, uint32_t i)
{
    return i + 1 == plan->piece_count || plan->pieces[i + 1].chunk != plan->pieces[i].chunk;
}

/* Piece i, and if it is its chunk's first the chunk; at: where the piece before it ended. */
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
            (chunk->offset % BL_LINE_SIZE > 0 && (i == 0 || chunk->offset != at)))
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

/* ---- Pieces [first, end) of a plan, by this thread. */

/* A place in the bytes of a plan, ahead of where they are copied. */
typedef struct bl_ahead {
    const bl_plan *plan;
    uint32_t piece;
    uint32_t end;
    uint64_t used;              /* bytes of the piece that are behind */
} bl_ahead;

/* The next run of at most size bytes, in one piece: its length, 0 at the end. */
static uint64_t bl_ahead_take(bl_ahead *ahead, uint64_t size, bl_piece *run)
{
    if (ahead->piece == ahead->end)
        return 0;
    *run = ahead->plan->pieces[ahead->piece];
    run->address += ahead->used, run->offset += ahead->used;
    run->length = (uint32_t)bl_least(run->length - ahead->used, size);
    ahead->used += run->length;
    if (ahead->used == ahead->plan->pieces[ahead->piece].length)
        ahead->piece++, ahead->used = 0;
    return run->length;
}

/* One piece: as a whole, or in steps that are paid for. */
static int bl_piece_gather(bl_gather *gather, const bl_piece *piece, uint32_t *crc, bl_toll *toll)
{
    int status = 0;
    uint64_t most = toll == NULL ? piece->length : BL_TOLL_STEP;
    for (uint64_t done = 0, step; done < piece->length && status == 0; done += step) {
        step = bl_least(piece->length - done, most);
        status = bl_toll_pay(toll, piece->offset + done, step);
        if (status == 0)
            bl_gather_put(gather, (const uint8_t *)piece->address + done, step, crc);
    }
    return status;
}

static int bl_plan_gather(const bl_memory *memory, const bl_plan *plan, uint32_t first,
                          uint32_t end, bl_toll *toll)
{
    bl_gather gather;
    uint32_t crc = 0;
    int status = 0;
    uint64_t at = first < end ? plan->pieces[first].offset : 0;
    bl_gather_begin(&gather, memory, at);
    for (uint32_t i = first; i < end && status == 0; i++) {
        const bl_piece *piece = &plan->pieces[i];
        if (i + 1 < end) /* the hardware finds the rest, but not where the next one begins */
            bl_prefetch_source((const void *)piece[1].address,
                               bl_least(piece[1].length, BL_HEAD_SIZE));
        if (piece->offset != at) { /* another block's */
            bl_gather_end(&gather);
            bl_gather_begin(&gather, memory, piece->offset);
        }
        status = bl_piece_gather(&gather, piece, plan->checksums ? &crc : NULL, toll);
        at = bl_piece_end(piece);
        if (plan->checksums && bl_plan_ends_chunk(plan, i)) {
            plan->checksums[piece->chunk - plan->chunk_base] = crc;
            crc = 0;
            bl_crash_point("payload.chunk_streamed");
        }
    }
    bl_gather_end(&gather);
    return status;
}

/* Reading: the lines of the next window are dropped between the copies of this one's, so that the
 * memory always has both to do; and it takes a full fence to have lines dropped, so a window is not
 * small. */
typedef struct bl_scatter {
    const bl_memory *memory;
    const bl_plan *plan;
    uint8_t *scratch;           /* for a chunk of which some is wanted; or NULL */
    bl_toll *toll;
    enum bl_copy_how how;
    uint32_t crc;               /* of this chunk's bytes before */
    bl_ahead drop;              /* where the next window is not dropped yet */
} bl_scatter;

/* The end of the window of pieces that begins at first; between chunks, if they come whole. */
static uint32_t bl_window_end(const bl_scatter *scatter, uint32_t first, uint32_t end)
{
    const bl_plan *plan = scatter->plan;
    uint32_t i = first;
    for (uint64_t size = 0; i < end && size < BL_WINDOW_SIZE; i++)
        size += plan->pieces[i].length;
    while (scatter->scratch && i < end && !bl_plan_ends_chunk(plan, i - 1))
        i++;
    return i;
}

/* Drop size bytes more of the next window; where chunks come whole, one with its first piece. */
static void bl_window_drop(bl_scatter *scatter, uint64_t size)
{
    bl_piece run;
    while (size > 0 && bl_ahead_take(&scatter->drop, size, &run) > 0) {
        const bl_plan *plan = scatter->plan;
        const bl_chunk *chunk = bl_plan_chunk(plan, &run);
        size -= run.length;
        if (scatter->scratch == NULL)
            bl_invalidate(scatter->memory, run.offset, run.length);
        else if (run.offset == plan->pieces[chunk->first - plan->piece_base].offset)
            bl_invalidate(scatter->memory, chunk->offset, chunk->length);
    }
}

static int bl_chunk_differs(const bl_scatter *scatter, const bl_piece *piece, uint32_t crc)
{
    const bl_plan *plan = scatter->plan;
    return bl_verify(scatter->memory, crc == plan->checksums[piece->chunk - plan->chunk_base])
               ? 0
               : -EBADMSG;
}

/* A piece whose chunk comes whole: the chunk first, into the scratch. */
static int bl_piece_pick(bl_scatter *scatter, const bl_piece *piece, int begins_chunk)
{
    const bl_chunk *chunk = bl_plan_chunk(scatter->plan, piece);
    int status = 0;
    bl_window_drop(scatter, piece->length);
    if (begins_chunk)
        status = bl_toll_pay(scatter->toll, chunk->offset, chunk->length);
    if (begins_chunk && status == 0) {
        uint32_t crc = 0;
        bl_fetch_run(scatter->memory, chunk->offset, scatter->scratch, chunk->length, &crc,
                     BL_COPY_CACHED);
        status = bl_chunk_differs(scatter, piece, crc);
    }
    if (status == 0)
        memcpy((void *)piece->address, scatter->scratch + (piece->offset - chunk->offset),
               piece->length);
    return status;
}

static int bl_piece_fetch(bl_scatter *scatter, const bl_piece *piece, int ends_chunk)
{
    uint32_t *crc = scatter->plan->checksums ? &scatter->crc : NULL;
    for (uint64_t done = 0, step; done < piece->length; done += step) {
        step = bl_least(piece->length - done, BL_STEP_SIZE);
        int status = bl_toll_pay(scatter->toll, piece->offset + done, step);
        if (status < 0)
            return status;
        bl_window_drop(scatter, step);
        bl_fetch_run(scatter->memory, piece->offset + done, (uint8_t *)piece->address + done, step,
                     crc, scatter->how);
    }
    if (crc == NULL || !ends_chunk)
        return 0;
    bl_crash_point("payload.chunk_fetched");
    uint32_t whole = *crc;
    *crc = 0;
    return bl_chunk_differs(scatter, piece, whole);
}

static int bl_window_fetch(bl_scatter *scatter, uint32_t first, uint32_t end)
{
    const bl_plan *plan = scatter->plan;
    int status = 0;
    for (uint32_t i = first; i < end && status == 0; i++)
        if (scatter->scratch != NULL)
            status = bl_piece_pick(scatter, &plan->pieces[i],
                                   i == first || bl_plan_ends_chunk(plan, i - 1));
        else
            status = bl_piece_fetch(scatter, &plan->pieces[i], bl_plan_ends_chunk(plan, i));
    return status;
}

/* scatter: all but where. */
static int bl_plan_scatter(bl_scatter scatter, uint32_t first, uint32_t end)
{
    const bl_memory *memory = scatter.memory;
    const bl_plan *plan = scatter.plan;
    uint32_t next = bl_window_end(&scatter, first, end);
    int status = 0;
    scatter.drop = (bl_ahead){plan, first, next, 0};
    bl_fence_full(memory); /* no drop before the look that told the caller to read */
    bl_window_drop(&scatter, UINT64_MAX);
    while (first < end && status == 0) {
        uint32_t after = bl_window_end(&scatter, next, end);
        scatter.drop = (bl_ahead){plan, next, after, 0};
        bl_fence_full(memory); /* what was dropped is gone; the loads below go to memory */
        status = bl_window_fetch(&scatter, first, next);
        bl_window_drop(&scatter, UINT64_MAX);
        first = next, next = after;
    }
    if (scatter.how == BL_COPY_PAST)
        bl_copy_settle();
    return status;
}

/* ---- The whole plan, by several threads. */

static uint64_t bl_pieces_size(const bl_plan *plan, uint32_t first, uint32_t end)
{
    uint64_t size = 0;
    for (uint32_t i = first; i < end; i++)
        size += plan->pieces[i].length;
    return size;
}

typedef struct bl_plan_run {
    const bl_memory *memory;
    const bl_plan *plan;
    const uint32_t *firsts;     /* part k: pieces [firsts[k], firsts[k + 1]) */
    uint32_t scratch_size;      /* 0: none is needed */
    enum bl_copy_how how;
    uint32_t write;
    uint32_t part_count;
    bl_toll *toll;
} bl_plan_run;

typedef struct bl_plan_part {
    const bl_plan_run *run;
    uint8_t *scratch;
    bl_toll *toll;
    uint32_t first;
    uint32_t end;
} bl_plan_part;

static int bl_plan_part_guarded(void *context)
{
    const bl_plan_part *part = context;
    const bl_plan_run *run = part->run;
    if (run->write)
        return bl_plan_gather(run->memory, run->plan, part->first, part->end, part->toll);
    bl_scatter scatter = {.memory = run->memory, .plan = run->plan, .scratch = part->scratch,
                          .toll = part->toll, .how = run->how};
    return bl_plan_scatter(scatter, part->first, part->end);
}

static int bl_plan_part_do(const bl_plan_run *run, bl_toll *toll, uint32_t item)
{
    bl_plan_part part = {run, NULL, toll, run->firsts[item], run->firsts[item + 1]};
    if (run->scratch_size > 0 && (part.scratch = malloc(run->scratch_size)) == NULL)
        return -ENOMEM;
    int status = bl_guarded(run->memory, bl_plan_part_guarded, &part);
    free(part.scratch);
    return status;
}

/* Several threads have a toll each. */
static int bl_plan_do(void *context, uint32_t item)
{
    const bl_plan_run *run = context;
    if (run->toll == NULL || run->part_count == 1)
        return bl_plan_part_do(run, run->toll, item);
    bl_toll toll = bl_toll_part(run->toll, bl_pieces_size(run->plan, run->firsts[item],
                                                          run->firsts[item + 1]));
    int status = bl_plan_part_do(run, &toll, item);
    bl_toll_end(&toll);
    return status;
}

/* Where parts of about size bytes begin, and behind them where the plan ends: how many parts. */
static uint32_t bl_plan_cut(const bl_plan *plan, uint64_t size, uint32_t *firsts, uint32_t room)
{
    uint32_t count = 0;
    uint64_t done = 0;
    for (uint32_t i = 0; i < plan->piece_count; i++) {
        const bl_piece *piece = &plan->pieces[i];
        int may = i == 0 || (piece->offset % BL_LINE_SIZE == 0 &&
                             (plan->checksums == NULL || bl_plan_ends_chunk(plan, i - 1)));
        if (may && count < room && (i == 0 || done >= size)) {
            firsts[count++] = i;
            done = 0;
        }
        done += piece->length;
    }
    firsts[count] = plan->piece_count;
    return count;
}

int bl_plan_execute(const bl_memory *memory, const bl_plan *plan, uint32_t threads, int write,
                    bl_toll *toll)
{
    enum { ROOM = BL_PARTS_PER_THREAD * (BL_CREW_MAX + 1) };
    uint32_t firsts[ROOM + 1] = {0, plan->piece_count};
    if (!bl_plan_valid(memory, plan) || (write && plan->sparse))
        return -EINVAL;
    uint64_t size = bl_pieces_size(plan, 0, plan->piece_count);
    bl_plan_run run = {memory, plan, firsts, 0,
                       plan->sparse || size < BL_PAST_SIZE ? BL_COPY_CACHED : BL_COPY_PAST,
                       (uint32_t)write, 1, toll};
    for (uint32_t i = 0; plan->sparse && plan->checksums && i < plan->chunk_count; i++)
        if (plan->chunks[i].length > run.scratch_size)
            run.scratch_size = plan->chunks[i].length;
    if (threads <= 1 || size < 2 * BL_PART_SIZE_LEAST)
        return bl_plan_do(&run, 0);
    uint64_t share = size / threads / BL_PARTS_PER_THREAD;
    share = share < BL_PART_SIZE_LEAST ? BL_PART_SIZE_LEAST : share;
    run.part_count = bl_plan_cut(plan, share, firsts, ROOM);
    return bl_crew_run(threads, run.part_count, bl_plan_do, &run);
}

/* By a toll of its own. */
static int bl_plan_pass(const bl_pool *pool, const bl_plan *plan, uint32_t threads, int write,
                        bl_port *port, uint32_t transfer_class)
{
    if (port == NULL)
        return bl_plan_execute(&pool->memory, plan, threads, write, NULL);
    uint64_t size = bl_pieces_size(plan, 0, plan->piece_count);
    bl_toll toll = bl_toll_make(port, write, transfer_class, size, threads);
    int status = bl_plan_execute(&pool->memory, plan, threads, write, &toll);
    bl_toll_end(&toll);
    return status;
}

int bl_plan_write(const bl_pool *pool, const bl_plan *plan, uint32_t threads, bl_port *port,
                  uint32_t transfer_class)
{
    int status = bl_plan_pass(pool, plan, threads, 1, port, transfer_class);
    bl_fence_store(&pool->memory);
    return status;
}

int bl_plan_read(const bl_pool *pool, const bl_plan *plan, uint32_t threads, bl_port *port,
                 uint32_t transfer_class)
{
    return bl_plan_pass(pool, plan, threads, 0, port, transfer_class);
}
